"""Random ops: what is drawn has no gradient, or a pathwise one."""

from __future__ import annotations

import torch

from .common import zero
from .table import vjp

aten = torch.ops.aten

# -- drawn anew: nothing of the old value is left

for _op in (
    aten.normal_, aten.uniform_, aten.exponential_, aten.cauchy_, aten.log_normal_,
    aten.geometric_, aten.random_, aten.bernoulli_,
):  # fmt: skip
    for _name in _op.overloads():
        vjp(getattr(_op, _name), self=zero, p=zero)
for _op in (
    aten.normal_functional, aten.uniform, aten.exponential, aten.cauchy, aten.log_normal,
    aten.geometric, aten.random,
):  # fmt: skip
    vjp(_op, self=zero)

# -- drawn with a parameter, through which no gradient flows

vjp(aten.bernoulli, self=zero)
vjp(aten.poisson, self=zero)
vjp(aten.normal, "mean.shape std.shape",
    mean=lambda g, s: g.new_zeros(s.mean_shape), std=lambda g, s: g.new_zeros(s.std_shape))

# -- a pathwise gradient

vjp(aten._standard_gamma, "self out",
    self=lambda g, s: g * aten._standard_gamma_grad(s.self, s.out))
