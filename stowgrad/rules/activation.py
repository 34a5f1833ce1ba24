"""Activations, softmax and dropout.

What is saved: the output where its sign or value decides the slope (relu, sigmoid, tanh, softmax,
the in-place forms of elu and leaky_relu), the input elsewhere, a bool mask for dropout. Never the
output where PyTorch saves the input: code may go on to change that output in place.
Fused backward kernels serve first order; their own rows below are their derivatives.
"""

from __future__ import annotations

import math

import torch

from ..ops import SPECIAL
from .common import conj
from .table import vjp

aten = torch.ops.aten

# -- piecewise linear: the slope is constant on either side, so second derivatives are zero

vjp(aten.relu, "out", self=lambda g, s: aten.threshold_backward(g, s.out, 0))
vjp(aten.threshold, "self", self=lambda g, s: aten.threshold_backward(g, s.self, s.threshold))
vjp(aten.hardtanh, "self",
    self=lambda g, s: aten.hardtanh_backward(g, s.self, s.min_val, s.max_val))
vjp(aten.relu6, "self", self=lambda g, s: aten.hardtanh_backward(g, s.self, 0, 6))
vjp(aten.hardsigmoid, "self", self=lambda g, s: aten.hardsigmoid_backward(g, s.self))
vjp(aten.hardshrink, "self", self=lambda g, s: aten.hardshrink_backward(g, s.self, s.lambd))
vjp(aten.softshrink, "self", self=lambda g, s: aten.softshrink_backward(g, s.self, s.lambd))
vjp(aten.leaky_relu, "self",
    self=lambda g, s: aten.leaky_relu_backward(g, s.self, s.negative_slope, False))
vjp(aten.leaky_relu_.default, "out",
    self=lambda g, s: aten.leaky_relu_backward(g, s.out, s.negative_slope, True))

vjp(aten.threshold_backward, "self",
    grad_output=lambda g, s: aten.threshold_backward(g, s.self, s.threshold),
    self=lambda g, s: torch.zeros_like(g))
vjp(aten.hardtanh_backward, "self",
    grad_output=lambda g, s: aten.hardtanh_backward(g, s.self, s.min_val, s.max_val),
    self=lambda g, s: torch.zeros_like(g))
vjp(aten.hardsigmoid_backward, "self",
    grad_output=lambda g, s: aten.hardsigmoid_backward(g, s.self),
    self=lambda g, s: torch.zeros_like(g))
vjp(aten.hardshrink_backward, "self",
    grad_out=lambda g, s: aten.hardshrink_backward(g, s.self, s.lambd),
    self=lambda g, s: torch.zeros_like(g))
vjp(aten.softshrink_backward, "self",
    grad_output=lambda g, s: aten.softshrink_backward(g, s.self, s.lambd),
    self=lambda g, s: torch.zeros_like(g))
vjp(aten.leaky_relu_backward, "self",
    grad_output=lambda g, s: aten.leaky_relu_backward(
        g, s.self, s.negative_slope, s.self_is_result),
    self=lambda g, s: torch.zeros_like(g))


@vjp(aten._prelu_kernel, "self weight", wrt="self weight")
def prelu(g, s, needs):
    """x where x > 0, w x elsewhere."""
    return aten._prelu_kernel_backward(g, s.self, s.weight)


@vjp(aten._prelu_kernel_backward, "grad_output self weight", wrt="grad_output self weight")
def prelu_backward(g, s, needs):
    """The derivative of (g, x, w) -> (g where x > 0 else g w, 0 where x > 0 else g x)."""
    to_x, to_w = g
    positive = s.self > 0
    zero = torch.zeros_like(s.self)
    to_x = zero if to_x is None else to_x
    to_w = zero if to_w is None else to_w
    return (
        torch.where(positive, to_x, to_x * s.weight + to_w * s.self),
        torch.where(positive, zero, to_w * s.grad_output),
        torch.where(positive, zero, to_x * s.grad_output),
    )


def _rrelu(self, noise, lower=1 / 8, upper=1 / 3, training=False, generator=None):
    """Training draws a slope for each negative element into `noise`, and 1 for the others: all
    that backward needs. Else the slope is fixed, and backward needs the signs."""
    out = aten.rrelu_with_noise(self, noise, lower, upper, training, generator)
    return out, {"slopes": noise if training else self > 0}


def _rrelu_backward(g, slopes, lower, upper):
    if slopes.dtype == torch.bool:
        return torch.where(slopes, g, g * ((lower + upper) / 2))
    return g * slopes


vjp(aten.rrelu_with_noise.default, "slopes", forward=_rrelu, constant="noise",
    self=lambda g, s: _rrelu_backward(g, s.slopes, s.lower, s.upper))
vjp(aten.rrelu_with_noise_functional, "self noise_out", outputs="out noise_out",
    differentiable="out", constant="noise",
    self=lambda g, s: _rrelu_backward(
        g, s.noise_out if s.training else s.self > 0, s.lower, s.upper))

# -- smooth: each backward kernel is g f'(x), its row gives f'(x) to g and g f''(x) to x

vjp(aten.sigmoid, "out", self=lambda g, s: aten.sigmoid_backward(g, s.out))
vjp(aten.tanh, "out", self=lambda g, s: aten.tanh_backward(g, s.out))
vjp(aten.gelu, "self",
    self=lambda g, s: aten.gelu_backward(g, s.self, approximate=s.approximate))
vjp(aten.silu, "self", self=lambda g, s: aten.silu_backward(g, s.self))
vjp(aten.mish, "self", self=lambda g, s: aten.mish_backward(g, s.self))
vjp(aten.softplus, "self",
    self=lambda g, s: aten.softplus_backward(g, s.self, s.beta, s.threshold))
vjp(aten.log_sigmoid, "self", self=lambda g, s: g * torch.sigmoid(-s.self))
vjp(aten.log_sigmoid_forward, "self", outputs="out buffer", differentiable="out",
    self=lambda g, s: g * torch.sigmoid(-s.self))
vjp(aten.hardswish, "self", self=lambda g, s: aten.hardswish_backward(g, s.self))
vjp(aten.glu, "self", self=lambda g, s: aten.glu_backward(g, s.self, s.dim))

# elu(x) = scale x for x > 0, scale alpha (exp(input_scale x) - 1) elsewhere
vjp(aten.elu, "self",
    self=lambda g, s: aten.elu_backward(g, s.alpha, s.scale, s.input_scale, False, s.self))
vjp(aten.elu_.default, "out",
    self=lambda g, s: aten.elu_backward(g, s.alpha, s.scale, s.input_scale, True, s.out))
vjp(aten.celu, "self",
    self=lambda g, s: aten.elu_backward(g, s.alpha, 1, 1 / s.alpha, False, s.self))
vjp(aten.celu_.default, "out",
    self=lambda g, s: aten.elu_backward(g, s.alpha, 1, 1 / s.alpha, True, s.out))
# Source of the two numbers: Klambauer et al. 2017 (arXiv 1706.02515), section 3.
_SELU = 1.6732632423543772, 1.0507009873554805
vjp(aten.selu, "self", self=lambda g, s: aten.elu_backward(g, *_SELU, 1, False, s.self))
vjp(aten.selu_.default, "out", self=lambda g, s: aten.elu_backward(g, *_SELU, 1, True, s.out))

vjp(aten.sigmoid_backward, "grad_output output",
    grad_output=lambda g, s: aten.sigmoid_backward(g, conj(s.output)),
    output=lambda g, s: conj(g) * s.grad_output * (1 - 2 * conj(s.output)))
vjp(aten.tanh_backward, "grad_output output",
    grad_output=lambda g, s: aten.tanh_backward(g, conj(s.output)),
    output=lambda g, s: conj(g) * s.grad_output * (-2 * conj(s.output)))
vjp(aten.gelu_backward, "grad_output self",
    grad_output=lambda g, s: aten.gelu_backward(g, s.self, approximate=s.approximate),
    self=lambda g, s: g * s.grad_output * gelu_second(s.self, s.approximate))
vjp(aten.silu_backward, "grad_output self",
    grad_output=lambda g, s: aten.silu_backward(g, s.self),
    self=lambda g, s: g * s.grad_output * silu_second(s.self))
vjp(aten.mish_backward, "grad_output self",
    grad_output=lambda g, s: aten.mish_backward(g, s.self),
    self=lambda g, s: g * s.grad_output * mish_second(s.self))
vjp(aten.softplus_backward, "grad_output self",
    grad_output=lambda g, s: aten.softplus_backward(g, s.self, s.beta, s.threshold),
    self=lambda g, s: g * s.grad_output * softplus_second(s.self, s.beta, s.threshold))
vjp(aten.log_sigmoid_backward, "grad_output self buffer", constant="buffer",
    grad_output=lambda g, s: aten.log_sigmoid_backward(g, s.self, s.buffer),
    self=lambda g, s: -g * s.grad_output * sigmoid_slope(s.self))
vjp(aten.hardswish_backward, "grad_output self",
    grad_output=lambda g, s: aten.hardswish_backward(g, s.self),
    self=lambda g, s: torch.where(s.self.abs() < 3, g * s.grad_output / 3, 0))


def sigmoid_slope(x):
    y = torch.sigmoid(x)
    return y * (1 - y)


def gelu_second(x, approximate):
    """f'' of f = x Phi(x), or of f = x (1 + tanh u) / 2 with u = k (x + c x^3).

    Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2.
    """
    if approximate == "none":
        return (2 - x * x) * torch.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)
    k, c = math.sqrt(2 / math.pi), 0.044715
    u1 = k * (1 + 3 * c * x * x)
    t = torch.tanh(k * (x + c * x * x * x))
    return (1 - t * t) * (u1 + x * (3 * k * c * x - t * u1 * u1))


def silu_second(x):
    """f'' of f = x sigmoid(x)."""
    y = torch.sigmoid(x)
    return y * (1 - y) * (2 + x * (1 - 2 * y))


def mish_second(x):
    """f'' of f = x t with t = tanh(softplus(x)); t' = (1 - t^2) sigmoid(x)."""
    y = torch.sigmoid(x)
    t = torch.tanh(torch.nn.functional.softplus(x))
    return (1 - t * t) * y * (2 + x * (1 - y - 2 * t * y))


def softplus_second(x, beta, threshold):
    """f'' of f = log(1 + exp(beta x)) / beta; zero where the kernel takes f = x."""
    return torch.where(x * beta > threshold, 0, beta * sigmoid_slope(x * beta))


@vjp(aten.elu_backward, "grad_output self_or_result", wrt="grad_output self_or_result")
def elu_backward(g, s, needs):
    """g f' is g scale for x > 0; elsewhere g alpha scale c exp(c x) of the input x, or
    g c (y + alpha scale) of the result y, with c = input_scale."""
    x, c, steep = s.self_or_result, s.input_scale, s.alpha * s.scale
    to_grad = to_x = None
    if needs[0]:
        to_grad = aten.elu_backward(g, s.alpha, s.scale, c, s.is_result, x)
    if needs[1]:
        slope = c if s.is_result else steep * c * c * torch.exp(c * x)
        to_x = torch.where(x > 0, 0, g * s.grad_output * slope)
    return to_grad, to_x


@vjp(aten.glu_backward, "grad_output self", wrt="grad_output self")
def glu_backward(g, s, needs):
    """glu is a y with y = sigmoid(b); its backward is h -> (h y, h a y'), y' = y (1 - y)."""
    h, dim = s.grad_output, s.dim
    a, b = s.self.chunk(2, dim)
    to_a, to_b = g.chunk(2, dim)
    y = torch.sigmoid(b)
    slope = y * (1 - y)
    to_h = to_a * y + to_b * a * slope
    if not needs[1]:
        return to_h, None
    bend = slope * (1 - 2 * y)
    return to_h, torch.cat([to_b * h * slope, to_a * h * slope + to_b * h * a * bend], dim)


# -- softmax: y, with backward g -> y (g - sum(g y))

vjp(aten._softmax, "out",
    self=lambda g, s: aten._softmax_backward_data(g, s.out, s.dim, s.out.dtype))
vjp(aten.softmax.int, "out",
    self=lambda g, s: aten._softmax_backward_data(g, s.out, s.dim, s.out.dtype))
vjp(aten._safe_softmax, "out",
    self=lambda g, s: aten._softmax_backward_data(g, s.out, s.dim, s.out.dtype))
vjp(aten._log_softmax, "out",
    self=lambda g, s: aten._log_softmax_backward_data(g, s.out, s.dim, s.out.dtype))
vjp(aten.log_softmax.int, "out",
    self=lambda g, s: aten._log_softmax_backward_data(g, s.out, s.dim, s.out.dtype))
vjp(aten._masked_softmax, "out mask", constant="mask",
    self=lambda g, s: aten._masked_softmax_backward(g, s.out, s.mask, s.dim))


@vjp(aten._softmax_backward_data, "grad_output output", wrt="grad_output output")
def softmax_backward(g, s, needs):
    """The derivative of (h, y) -> y (h - sum(h y)), which is symmetric in h."""
    y, h, dim = s.output, s.grad_output, s.dim
    g = g.to(y.dtype)
    to_h = aten._softmax_backward_data(g, y, dim, s.input_dtype) if needs[0] else None
    if not needs[1]:
        return to_h, None
    return to_h, g * (h - (h * y).sum(dim, True)) - h * (g * y).sum(dim, True)


@vjp(aten._log_softmax_backward_data, "grad_output output", wrt="grad_output output")
def log_softmax_backward(g, s, needs):
    """The derivative of (h, y) -> h - exp(y) sum(h)."""
    g = g.to(s.output.dtype)
    part = g * torch.exp(s.output)
    to_h = g - part.sum(s.dim, True)
    return to_h, -part * s.grad_output.sum(s.dim, True) if needs[1] else None


# -- dropout


def _dropout(input, p, train):
    """PyTorch's own steps, so that the draws are its own; kept is only which elements live."""
    if not 0 < p < 1:
        return aten.dropout(input, p, train), {"mask": None}
    if input.device.type != "cpu":
        out, mask = aten.native_dropout(input, p, train)
        return out, {"mask": mask}
    noise = torch.empty_like(input).bernoulli_(1 - p)
    mask = noise.bool()
    return input * noise.div_(1 - p), {"mask": mask}


def _dropout_backward(g, mask, p):
    return g * 0 if mask is None else g * mask * _scale(p, g.dtype)


def _scale(p, dtype):
    """1 / (1 - p), rounded as the forward's noise is: in float32 for the dtypes below it."""
    if dtype == torch.float64:
        return 1 / (1 - p)
    return _round(_round(1 / _round(1 - p, 24), 24), _DIGITS[dtype])


def _round(x, digits):
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, digits)), exponent - digits)


_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # binary ones

vjp(aten.dropout, "mask", forward=_dropout,
    input=lambda g, s: _dropout_backward(g, s.mask, s.p))
vjp(aten.native_dropout, "mask", outputs="out mask", differentiable="out",
    input=lambda g, s: aten.native_dropout_backward(
        g, s.mask, 1 if s.train is False else 0 if s.p == 1 else 1 / (1 - s.p)))
vjp(aten.native_dropout_backward, "mask",
    grad_output=lambda g, s: aten.native_dropout_backward(g, s.mask, s.scale))


def _record_dropout(recorder, entry, func, args, kwargs):
    """Where nothing is dropped, the result is the input itself and there is nothing to record."""
    x, p, train = args
    if p == 0 or not train or x.numel() == 0:
        return x
    return recorder._record_rule(entry, func, args, kwargs, 1)


SPECIAL[aten.dropout.default] = SPECIAL[aten.dropout_.default] = _record_dropout
