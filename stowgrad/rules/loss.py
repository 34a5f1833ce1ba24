"""Losses. The gradient of a loss is a kernel, or a line; a kernel's own rule is a line.

cross_entropy_loss, nll_loss, kl_div, l1_loss, ctc_loss and the margin losses made of other ops
are recorded as their parts. Cross entropy keeps what log_softmax keeps, its output, and the target.

Reductions, as ATen numbers them: 0 none, 1 mean, 2 sum. A derivative of the whole loss with
respect to one element carries 1 / n for a mean: `scaled`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import nothing, stand_in
from .table import vjp

aten = torch.ops.aten

MEAN = 1


def scaled(x: Tensor, reduction: int) -> Tensor:
    """x, a value for each element of the loss, as that of their mean, sum, or each."""
    return x / x.numel() if reduction == MEAN and x.numel() else x


# fmt: off
# op                        saves                       gradient of each tensor argument, given g
vjp(aten.mse_loss.default, "self target",
    self=lambda g, s: aten.mse_loss_backward(g, s.self, s.target, s.reduction),
    target=lambda g, s: aten.mse_loss_backward(g, s.target, s.self, s.reduction))
vjp(aten.mse_loss_backward.default, "grad_output self target",
    grad_output=lambda g, s: aten.mse_loss_backward(g, s.self, s.target, s.reduction),
    self=lambda g, s: scaled(g * s.grad_output * 2, s.reduction),
    target=lambda g, s: scaled(g * s.grad_output * -2, s.reduction))

vjp(aten.smooth_l1_loss.default, "self target",
    self=lambda g, s: aten.smooth_l1_loss_backward(g, s.self, s.target, s.reduction, s.beta),
    target=lambda g, s: aten.smooth_l1_loss_backward(g, s.target, s.self, s.reduction, s.beta))
vjp(aten.smooth_l1_loss_backward.default, "grad_output self target",
    grad_output=lambda g, s: aten.smooth_l1_loss_backward(g, s.self, s.target, s.reduction, s.beta),
    self=lambda g, s: within(g * s.grad_output, s.self, s.target, s.beta, s.beta, s.reduction),
    target=lambda g, s: -within(g * s.grad_output, s.self, s.target, s.beta, s.beta, s.reduction))

vjp(aten.huber_loss.default, "self target",
    self=lambda g, s: aten.huber_loss_backward(g, s.self, s.target, s.reduction, s.delta),
    target=lambda g, s: aten.huber_loss_backward(g, s.target, s.self, s.reduction, s.delta))
vjp(aten.huber_loss_backward.default, "grad_output self target",
    grad_output=lambda g, s: aten.huber_loss_backward(g, s.self, s.target, s.reduction, s.delta),
    self=lambda g, s: within(g * s.grad_output, s.self, s.target, s.delta, 1, s.reduction),
    target=lambda g, s: -within(g * s.grad_output, s.self, s.target, s.delta, 1, s.reduction))

vjp(aten.soft_margin_loss.default, "self target",
    self=lambda g, s: aten.soft_margin_loss_backward(g, s.self, s.target, s.reduction))
vjp(aten.soft_margin_loss_backward.default, "grad_output self target",
    grad_output=lambda g, s: aten.soft_margin_loss_backward(g, s.self, s.target, s.reduction),
    self=lambda g, s: soft_margin_second(g * s.grad_output, s.self, s.target, s.reduction))

vjp(aten.binary_cross_entropy.default, "self target weight",
    self=lambda g, s: aten.binary_cross_entropy_backward(
        g, s.self, s.target, s.weight, s.reduction),
    target=lambda g, s: bce_scale(g * -torch.logit(s.self), s.weight, s.reduction))
vjp(aten.binary_cross_entropy_backward.default, "grad_output self target weight",
    grad_output=lambda g, s: aten.binary_cross_entropy_backward(
        g, s.self, s.target, s.weight, s.reduction),
    self=lambda g, s: bce_scale(
        g * s.grad_output * bce_curvature(s.self, s.target), s.weight, s.reduction),
    target=lambda g, s: bce_scale(
        -g * s.grad_output / bce_variance(s.self), s.weight, s.reduction))
vjp(aten.binary_cross_entropy_with_logits.default, "self target weight pos_weight",
    self=lambda g, s: bce_scale(
        g * logits_slope(s.self, s.target, s.pos_weight), s.weight, s.reduction),
    target=lambda g, s: bce_scale(
        g * logits_target_slope(s.self, s.pos_weight), s.weight, s.reduction))

vjp(aten.multi_margin_loss.default, "self target weight",
    self=lambda g, s: aten.multi_margin_loss_backward(
        g, s.self, s.target, s.p, s.margin, s.weight, s.reduction))
vjp(aten.multilabel_margin_loss_forward.default, "self target is_target",
    outputs="out is_target", differentiable="out",
    self=lambda g, s: aten.multilabel_margin_loss_backward(
        g, s.self, s.target, s.reduction, s.is_target))

NLL: Any = {"outputs": "out total_weight", "differentiable": "out"}

vjp(aten.nll_loss_forward.default, "self.shape self.stride target weight total_weight", **NLL,
    self=lambda g, s: aten.nll_loss_backward(
        g, stand_in(g, s.self_shape, s.self_stride), s.target, s.weight, s.reduction,
        s.ignore_index, s.total_weight))
vjp(aten.nll_loss2d_forward.default, "self.shape self.stride target weight total_weight", **NLL,
    self=lambda g, s: aten.nll_loss2d_backward(
        g, stand_in(g, s.self_shape, s.self_stride), s.target, s.weight, s.reduction,
        s.ignore_index, s.total_weight))
vjp(aten.nll_loss_backward.default, "target weight self.shape",
    constant="total_weight", self=nothing,
    grad_output=lambda g, s: aten.nll_loss(g, s.target, s.weight, s.reduction, s.ignore_index))
vjp(aten.nll_loss2d_backward.default, "target weight self.shape",
    constant="total_weight", self=nothing,
    grad_output=lambda g, s: aten.nll_loss2d(g, s.target, s.weight, s.reduction, s.ignore_index))

CTC: Any = {"outputs": "loss alpha", "differentiable": "loss"}

vjp(aten._ctc_loss.default, "log_probs targets loss alpha", **CTC,
    log_probs=lambda g, s: aten._ctc_loss_backward(
        g, s.log_probs, s.targets, s.input_lengths, s.target_lengths, s.loss, s.alpha, s.blank,
        s.zero_infinity))
vjp(aten._ctc_loss.Tensor, "log_probs targets input_lengths target_lengths loss alpha", **CTC,
    log_probs=lambda g, s: aten._ctc_loss_backward(
        g, s.log_probs, s.targets, s.input_lengths, s.target_lengths, s.loss, s.alpha, s.blank,
        s.zero_infinity))
# fmt: on


def within(x: Tensor, a: Tensor, b: Tensor, bound: float, scale: float, reduction: int) -> Tensor:
    """x / scale where a and b are nearer than `bound`, where the loss is quadratic; else zero."""
    return scaled(torch.where((a - b).abs() < bound, x / (scale or 1), 0), reduction)


def soft_margin_second(x: Tensor, a: Tensor, y: Tensor, reduction: int) -> Tensor:
    """x d^2/da^2 log(1 + exp(-y a)) = x y^2 p (1 - p), with p = sigmoid(y a)."""
    p = torch.sigmoid(y * a)
    return scaled(x * y * y * p * (1 - p), reduction)


# -- binary cross entropy: -(y log p + (1 - y) log(1 - p))


def bce_scale(x: Tensor, weight: Any, reduction: int) -> Tensor:
    return scaled(x if weight is None else x * weight, reduction)


def bce_variance(p: Tensor) -> Tensor:
    """p (1 - p), kept off zero as the kernel keeps it."""
    return (p * (1 - p)).clamp(min=1e-12)


def bce_curvature(p: Tensor, y: Tensor) -> Tensor:
    """d/dp of (p - y) / (p (1 - p)), which is y / p^2 + (1 - y) / (1 - p)^2."""
    return (p * p - 2 * p * y + y) / bce_variance(p).square()


def logits_slope(x: Tensor, y: Tensor, pos_weight: Any) -> Tensor:
    """d/dx of -(w y log p + (1 - y) log(1 - p)), p = sigmoid(x), w = pos_weight."""
    if pos_weight is None:
        return torch.sigmoid(x) - y
    positive = pos_weight * y
    return (positive + 1 - y) * torch.sigmoid(x) - positive


def logits_target_slope(x: Tensor, pos_weight: Any) -> Tensor:
    """d/dy of the same."""
    log_sigmoid = torch.nn.functional.logsigmoid
    return -x if pos_weight is None else log_sigmoid(-x) - pos_weight * log_sigmoid(x)
