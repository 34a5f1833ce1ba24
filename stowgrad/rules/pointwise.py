"""Pointwise ops: one value in, one value out, broadcast where there are two.

Arithmetic first, since most of a program is that: add, sub, neg cost no more than a call in
backward. Then powers, exponentials, trigonometry; rounding and signs; choices between values.
At kinks the subgradients are PyTorch's: a clamp passes its bounds, a tie of maximum is shared.
"""

from __future__ import annotations

import cmath
import math
from typing import Any

import torch
from torch import Tensor

from .common import conj, on, scaled, zero
from .table import vjp

aten = torch.ops.aten

# -- arithmetic

vjp(aten.add, self=lambda g, s: g, other=lambda g, s: scaled(g, conj(s.alpha)))
vjp(aten.sub, self=lambda g, s: g,
    other=lambda g, s: -g if s.alpha == 1 else g * -conj(s.alpha))
vjp(aten.rsub, other=lambda g, s: g,
    self=lambda g, s: -g if s.alpha == 1 else g * -conj(s.alpha))
vjp(aten.mul, "self other",
    # a factor of a real product is real: the commonest of all rules asks no more than it must
    self=lambda g, s: g * (conj(s.other) if g.is_complex() else s.other),
    other=lambda g, s: g * (conj(s.self) if g.is_complex() else s.self))
vjp(aten.div.Tensor, "self other",
    self=lambda g, s: g / conj(s.other),
    other=lambda g, s: g * conj(s.self / s.other / -s.other))
vjp(aten.div.Scalar, self=lambda g, s: g / conj(s.other))
vjp(aten.neg, self=lambda g, s: -g)
vjp(aten.reciprocal, "out", self=lambda g, s: g * conj(-s.out * s.out))
vjp(aten.addcmul, "tensor1 tensor2",
    self=lambda g, s: g,
    tensor1=lambda g, s: g * conj(scaled(s.tensor2, s.value)),
    tensor2=lambda g, s: g * conj(scaled(s.tensor1, s.value)))
vjp(aten.addcdiv, "tensor1 tensor2",
    self=lambda g, s: g,
    tensor1=lambda g, s: scaled(g / conj(s.tensor2), conj(s.value)),
    tensor2=lambda g, s: scaled(g * conj(s.tensor1 / s.tensor2 / -s.tensor2), conj(s.value)))
vjp(aten.lerp, "self end weight",
    self=lambda g, s: g * (1 - conj(s.weight)),
    end=lambda g, s: g * conj(s.weight),
    weight=lambda g, s: g * conj(s.end - s.self))
vjp(aten.deg2rad, self=lambda g, s: g.deg2rad())
vjp(aten.rad2deg, self=lambda g, s: g.rad2deg())

# with a rounding mode a quotient is constant between its steps


@vjp(aten.div.Tensor_mode, "self other", wrt="self other")
def div_mode(g: Tensor, s: Any, needs: Any) -> Any:
    if s.rounding_mode is not None:
        return [torch.zeros_like(g) if need else None for need in needs]
    return (
        g / conj(s.other) if needs[0] else None,
        g * conj(s.self / s.other / -s.other) if needs[1] else None,
    )


vjp(aten.div.Scalar_mode,
    self=lambda g, s: g / conj(s.other) if s.rounding_mode is None else torch.zeros_like(g))
vjp(aten.floor_divide, self=zero, other=zero)
vjp(aten.floor_divide_.Tensor, self=zero, other=zero)
vjp(aten.fmod, "self other",
    self=lambda g, s: g,
    other=lambda g, s: g * -torch.div(s.self, s.other, rounding_mode="trunc"))
vjp(aten.remainder, "self other",
    self=lambda g, s: g,
    other=lambda g, s: g * -torch.div(s.self, s.other, rounding_mode="floor"))

# -- powers and roots


def pow_self(g: Tensor, s: Any) -> Tensor:
    """n x^(n-1), for a number n; zero for n = 0, also at x = 0."""
    x, n = s.self, s.exponent
    if n == 2:
        return g * conj(x + x)
    if n == 1:
        return g
    if n == 0:
        return torch.zeros_like(g)
    return g * conj(x.pow(n - 1) * n)


def pow_self_tensor(g: Tensor, s: Any) -> Tensor:
    x, n = s.self, s.exponent
    return (g * conj(x.pow(n - 1) * n)).masked_fill(n == 0, 0)


def pow_exponent(g: Tensor, s: Any) -> Tensor:
    """x^n log(x); zero where x = 0 and n is real and not negative, for there 0^n stays 0."""
    x, n, out = s.self, s.exponent, s.out
    inside = (n.imag == 0) & (n.real >= 0) if n.is_complex() else n >= 0
    if not isinstance(x, Tensor):
        slope = conj(out * _log(x))
        return g * (slope.masked_fill(inside, 0) if x == 0 else slope)
    return g * conj(out * x.to(out.dtype).log()).masked_fill((x == 0) & inside, 0)


def _log(x: Any) -> Any:
    if isinstance(x, complex):
        return cmath.log(x) if x != 0 else -math.inf
    return math.log(x) if x > 0 else (-math.inf if x == 0 else math.nan)


vjp(aten.pow.Tensor_Scalar, "self", self=pow_self)
vjp(aten.pow_.Scalar, "self", self=pow_self)
vjp(aten.pow.Tensor_Tensor, "self exponent out", self=pow_self_tensor, exponent=pow_exponent)
vjp(aten.pow_.Tensor, "self exponent out", self=pow_self_tensor, exponent=pow_exponent)
vjp(aten.pow.Scalar, "exponent out", exponent=pow_exponent)
vjp(aten.square, "self", self=lambda g, s: g * conj(s.self + s.self))
vjp(aten.sqrt, "out", self=lambda g, s: g / conj(s.out + s.out))
vjp(aten.rsqrt, "out", self=lambda g, s: g * conj(s.out.pow(3) * -0.5))
vjp(aten.hypot, "self other out",
    self=lambda g, s: g * (s.self / s.out), other=lambda g, s: g * (s.other / s.out))

# -- exponentials and logarithms

vjp(aten.exp, "out", self=lambda g, s: g * conj(s.out))
vjp(aten.exp2, "out", self=lambda g, s: g * conj(s.out * math.log(2)))
vjp(aten.expm1, "out", self=lambda g, s: g * conj(s.out + 1))
vjp(aten.log, "self", self=lambda g, s: g / conj(s.self))
vjp(aten.log2, "self", self=lambda g, s: g / conj(s.self * math.log(2)))
vjp(aten.log10, "self", self=lambda g, s: g / conj(s.self * math.log(10)))
vjp(aten.log1p, "self", self=lambda g, s: g / conj(s.self + 1))
vjp(aten.logaddexp, "self other",
    self=lambda g, s: g / conj((s.other - s.self).exp() + 1),
    other=lambda g, s: g / conj((s.self - s.other).exp() + 1))
vjp(aten.logaddexp2, "self other",
    self=lambda g, s: g / ((s.other - s.self).exp2() + 1),
    other=lambda g, s: g / ((s.self - s.other).exp2() + 1))
vjp(aten.logit, "self", self=lambda g, s: aten.logit_backward(g, s.self, s.eps))
vjp(aten.logit_backward, "grad_output self",
    grad_output=lambda g, s: aten.logit_backward(g, s.self, s.eps),
    # the slope is h = 1 / (x - x^2), and h' = (2x - 1) h^2
    self=lambda g, s: (s.self * 2 - 1) * aten.logit_backward(
        aten.logit_backward(g * s.grad_output, s.self, s.eps), s.self, s.eps))
for _op in (aten.ldexp.Tensor, aten.ldexp_.default):
    vjp(_op, "other out",
        self=lambda g, s: torch.ldexp(g, conj(s.other)),
        other=lambda g, s: g * conj(s.out * math.log(2)))
vjp(aten.frexp, "exponent", outputs="mantissa exponent", differentiable="mantissa",
    self=lambda g, s: torch.ldexp(g, -s.exponent.to(g.dtype)))
vjp(aten.xlogy, "self other",
    # masked where the value is constantly 0 in `other`, and its log is none
    self=lambda g, s: torch.xlogy(g, s.other).masked_fill((s.self == 0) & (s.other <= 0), 0),
    other=lambda g, s: g * s.self / s.other)

# -- trigonometric and hyperbolic

vjp(aten.sin, "self", self=lambda g, s: g * conj(s.self.cos()))
vjp(aten.cos, "self", self=lambda g, s: g * conj(-s.self.sin()))
vjp(aten.tan, "out", self=lambda g, s: g * conj(s.out * s.out + 1))
vjp(aten.sinh, "self", self=lambda g, s: g * conj(s.self.cosh()))
vjp(aten.cosh, "self", self=lambda g, s: g * conj(s.self.sinh()))
vjp(aten.asin, "self", self=lambda g, s: g * conj((1 - s.self * s.self).rsqrt()))
vjp(aten.acos, "self", self=lambda g, s: g * conj(-(1 - s.self * s.self).rsqrt()))
vjp(aten.atan, "self", self=lambda g, s: g / conj(s.self * s.self + 1))
vjp(aten.asinh, "self", self=lambda g, s: g * conj((s.self * s.self + 1).rsqrt()))
# two roots, since sqrt(x^2 - 1) takes the wrong branch in half of the complex plane
vjp(aten.acosh, "self", self=lambda g, s: g * conj((s.self + 1).rsqrt() * (s.self - 1).rsqrt())
    if s.self.is_complex() else g * (s.self * s.self - 1).rsqrt())
vjp(aten.atanh, "self", self=lambda g, s: g / conj(1 - s.self * s.self))


@vjp(aten.atan2, "self other", wrt="self other")
def atan2(g: Tensor, s: Any, needs: Any) -> Any:
    """other / r^2 and -self / r^2, with r^2 = self^2 + other^2; zero at the origin."""
    y, x = s.self, s.other
    square = y * y + x * x
    slope = g * square.reciprocal().masked_fill(square == 0, 0)
    return slope * x if needs[0] else None, slope * -y if needs[1] else None


def sinc(g: Tensor, s: Any) -> Tensor:
    """(x cos(x) - sin(x)) / (x^2 / pi) at pi x; zero at 0."""
    x = s.self * math.pi
    square = s.self * x
    return (g * conj((x * x.cos() - x.sin()) / square)).masked_fill(square == 0, 0)


vjp(aten.sinc, "self", self=sinc)


# -- signs and rounding

vjp(aten.abs, "self",
    self=lambda g, s: g * (s.self.sgn() if s.self.is_complex() else s.self.sign()))
vjp(aten.sign, self=zero)
vjp(aten.floor, self=zero)
vjp(aten.ceil, self=zero)
vjp(aten.trunc, self=zero)
vjp(aten.round, self=zero)
vjp(aten.frac, self=lambda g, s: g)
vjp(aten.copysign, "self out",
    self=lambda g, s: g * (s.self.sgn() * s.out.sgn()), other=zero)
vjp(aten.nextafter, "self other",
    self=lambda g, s: g.masked_fill(s.self == s.other, 0), other=zero)
vjp(aten.nan_to_num, "self", self=lambda g, s: g * s.self.isfinite())

# rounding for training with quantised values passes the gradient where nothing was cut off
for _op in (
    aten.fake_quantize_per_tensor_affine_cachemask.default,
    aten.fake_quantize_per_channel_affine_cachemask.default,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
):
    vjp(_op, "mask", outputs="out mask", differentiable="out",
        self=lambda g, s: g * s.mask)



@vjp(aten.sgn, "self out", wrt="self")
def sgn(g: Tensor, s: Any, needs: Any) -> Tensor:
    """z/|z| turns with z but does not grow: (g - Re(g conj(u)) u) / |z| with u = z/|z|; 0 at 0.
    Zero for real numbers."""
    u = s.out
    if not u.is_complex():
        return torch.zeros_like(g)
    size = s.self.abs()
    return ((g - (g * u.conj()).real * u) / size).masked_fill(size == 0, 0)


# -- choices


def clamp_self(g: Tensor, s: Any) -> Tensor:
    x, low, high = s.self, s.min, s.max
    if high is None:
        inside = x >= low
    elif low is None:
        inside = x <= high
    else:
        inside = (x >= low) & (x <= high)
    return torch.where(inside, g, 0)


def clamp_min(g: Tensor, s: Any) -> Tensor:
    x, low, high = s.self, s.min, s.max
    return torch.where(x < low if high is None else (x < low) & (low < high), g, 0)


def clamp_max(g: Tensor, s: Any) -> Tensor:
    """Also where the bounds cross: there the result is `max`."""
    x, low, high = s.self, s.min, s.max
    return torch.where(x > high if low is None else (x > high) | (high < low), g, 0)


vjp(aten.clamp, "self min max", self=clamp_self, min=clamp_min, max=clamp_max)
vjp(aten.clamp_min, "self min",
    self=lambda g, s: torch.where(s.self >= s.min, g, 0),
    min=lambda g, s: torch.where(s.self < s.min, g, 0))
vjp(aten.clamp_max, "self max",
    self=lambda g, s: torch.where(s.self <= s.max, g, 0),
    max=lambda g, s: torch.where(s.self > s.max, g, 0))
vjp(aten.maximum, "self other",
    self=lambda g, s: _share(g, s.self, s.other).masked_fill(s.self < s.other, 0),
    other=lambda g, s: _share(g, s.self, s.other).masked_fill(s.self > s.other, 0))
vjp(aten.minimum, "self other",
    self=lambda g, s: _share(g, s.self, s.other).masked_fill(s.self > s.other, 0),
    other=lambda g, s: _share(g, s.self, s.other).masked_fill(s.self < s.other, 0))
# a NaN loses: the whole gradient goes to the other
vjp(aten.fmax, "self other",
    self=lambda g, s: torch.where((s.self >= s.other) | s.other.isnan(), g, 0),
    other=lambda g, s: torch.where((s.self >= s.other) | s.other.isnan(), 0, g))
vjp(aten.fmin, "self other",
    self=lambda g, s: torch.where((s.self <= s.other) | s.other.isnan(), g, 0),
    other=lambda g, s: torch.where((s.self <= s.other) | s.other.isnan(), 0, g))


def _share(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Half the gradient where `a` and `b` tie."""
    return torch.where(a == b, g / 2, g)


for _op in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
    vjp(_op, "condition",
        self=lambda g, s: torch.where(s.condition, g, 0),
        other=lambda g, s: torch.where(s.condition, 0, g))
vjp(aten.masked_fill, "mask",
    self=lambda g, s: g.masked_fill(s.mask, 0),
    value=lambda g, s: torch.where(s.mask, g, 0))

# -- filling and copying: what is overwritten has no gradient

vjp(aten.zero.default, self=zero)
vjp(aten.fill, "value.device",
    self=zero, value=lambda g, s: on(g.sum(), s.value_device))
vjp(aten.copy.default, "src.device", self=zero, src=lambda g, s: on(g, s.src_device))
