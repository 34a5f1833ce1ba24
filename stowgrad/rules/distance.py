"""Distances between points: cdist and pdist.

Each p-norm kernel has a backward kernel, which serves first order. PyTorch stops there. When the
backward is itself recorded, the closed form below is used instead, so that second derivatives
exist for every p; it holds all differences at once, points x points x features. It is used for a
batch of gradients too: mapped by torch.vmap, cdist's kernel gives wrong ones (PyTorch 2.13).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _private
from .table import vjp

aten = torch.ops.aten


def closed_form_wanted() -> bool:
    return torch.is_grad_enabled() or _private.functorch_active()


def distance_slope(g: Tensor, difference: Tensor, distance: Tensor, p: float) -> Tensor:
    """The gradient of a difference d from G, that of |d|_p (without its last dim).

    Zero where the distance is: sign(d) |d|^(p-1) / |d|_p^(p-1), and for p = inf the sign of those
    components that attain the maximum.
    """
    g, distance = g.unsqueeze(-1), distance.unsqueeze(-1)
    if p == 0:
        return torch.zeros_like(difference)
    if p == 1:
        return g * difference.sign()
    if math.isinf(p):
        return g * difference.sign() * (difference.abs() == distance)
    nowhere = distance == 0
    safe = distance.masked_fill(nowhere, 1)
    if p == 2:
        return difference * (g / safe).masked_fill(nowhere, 0)
    size = difference.abs()
    if p < 2:  # an infinite slope (p < 1), or one of its derivative, where a component is zero
        nowhere = nowhere | (size == 0)
        size = size.masked_fill(size == 0, 1)
    slope = difference.sign() * (size / safe).pow(p - 1)
    return (g * slope).masked_fill(nowhere, 0)


@vjp(aten._cdist_forward.default, saves="x1 x2 out", wrt="x1 x2")
def cdist(g: Tensor, s: Any, needs: list[bool]) -> list[Tensor | None]:
    """out[i, j] = |x1[i] - x2[j]|_p."""
    if closed_form_wanted():
        difference = s.x1.unsqueeze(-2) - s.x2.unsqueeze(-3)
        slope = distance_slope(g, difference, s.out, s.p)
        return [slope.sum(-2), -slope.sum(-3)]
    g1 = g2 = None
    if needs[0]:
        g1 = aten._cdist_backward(g.contiguous(), s.x1, s.x2, s.p, s.out)
    if needs[1]:
        flipped = s.out.mT.contiguous()
        g2 = aten._cdist_backward(g.mT.contiguous(), s.x2, s.x1, s.p, flipped)
    return [g1, g2]


@vjp(aten._euclidean_dist.default, saves="x1 x2 out", wrt="x1 x2")
def euclidean_dist(g: Tensor, s: Any, needs: list[bool]) -> list[Tensor | None]:
    """cdist with p = 2, computed by a matrix product; so is its gradient."""
    ratio = (g / s.out).masked_fill(s.out == 0, 0)
    g1 = g2 = None
    if needs[0]:
        g1 = s.x1 * ratio.sum(-1, keepdim=True) - ratio @ s.x2
    if needs[1]:
        g2 = s.x2 * ratio.sum(-2).unsqueeze(-1) - ratio.mT @ s.x1
    return [g1, g2]


@vjp(aten._pdist_forward.default, saves="self out", wrt="self")
def pdist(g: Tensor, s: Any, needs: list[bool]) -> tuple[Tensor]:
    """The distances of all pairs i < j of rows, row by row."""
    x = s.self
    if not closed_form_wanted():
        return (aten._pdist_backward(g, x, s.p, s.out),)
    i, j = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    slope = distance_slope(g, x.index_select(0, i) - x.index_select(0, j), s.out, s.p)
    zero = torch.zeros_like(x)
    return (zero.index_add(0, i, slope).index_add(0, j, -slope),)
