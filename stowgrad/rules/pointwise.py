"""Pointwise ops: one value in, one value out, broadcast where there are two."""

from __future__ import annotations

import torch

from .common import conj
from .table import vjp

aten = torch.ops.aten



vjp(aten.mul, "self other", self=lambda g, s: g * conj(s.other), other=lambda g, s: g * conj(s.self))
vjp(aten.sin, "self", self=lambda g, s: g * conj(s.self.cos()))
vjp(aten.exp, "out", self=lambda g, s: g * conj(s.out))
vjp(aten.sum, "self.shape", self=lambda g, s: g.expand(s.self_shape))
vjp(aten.select, "self.shape", self=lambda g, s: aten.select_backward(g, s.self_shape, s.dim, s.index))
