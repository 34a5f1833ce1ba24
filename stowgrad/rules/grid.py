"""Grid sampling, and the second derivative of it.

A sample is a sum over taps (two a dim when linear, four when cubic) of the input there times a
weight, which is a product of one factor for each dim. The factors are polynomials of the position
within a cell, so all derivatives come from the factors w and their w', w''. The kernels serve the
forward and first derivatives; what is written out here is the rule of the backward kernels.
It costs a gather and a scatter for each tap.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .common import stand_in
from .table import vjp

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2


class Tap(NamedTuple):
    """One neighbour, along one dim, of each sampled position."""

    at: Tensor  # its index, clipped to the input
    inside: Tensor  # whether it is one
    weight: Tensor
    slope: Tensor  # dw / d position
    curve: Tensor  # its second derivative


def source(grid: Tensor, size: int, padding: int, align: bool) -> tuple[Tensor, Tensor]:
    """The position in an input of `size` that a grid coordinate in [-1, 1] names, and its
    derivative with respect to the coordinate."""
    scale = (size - 1) / 2 if align else size / 2
    position = (grid + 1) * scale - (0 if align else 0.5)
    slope = torch.full_like(grid, scale)
    if padding == REFLECTION:
        position, slope = _reflect(position, slope, size, align)
    if padding in (BORDER, REFLECTION):
        outside = (position <= 0) | (position >= size - 1)
        position, slope = position.clamp(0, size - 1), slope.masked_fill(outside, 0)
    return position, slope


def _reflect(x: Tensor, slope: Tensor, size: int, align: bool) -> tuple[Tensor, Tensor]:
    """x mirrored at both ends of the input: at its outer samples, or half a sample beyond."""
    low, span = (0.0, size - 1) if align else (-0.5, size)
    if span == 0:
        return torch.zeros_like(x), torch.zeros_like(slope)
    x = x - low
    sign = torch.where(x < 0, -1.0, 1.0).to(x.dtype)
    x = x * sign
    turns = (x / span).floor()
    rest = x - turns * span
    odd = turns.remainder(2) != 0
    return torch.where(odd, span - rest, rest) + low, slope * torch.where(odd, -sign, sign)


def linear_taps(grid: Tensor, size: int, padding: int, align: bool) -> tuple[list[Tap], Tensor]:
    position, slope = source(grid, size, padding, align)
    cell = position.floor().detach()
    t = position - cell
    one, zero = torch.ones_like(t), torch.zeros_like(t)
    taps = []
    for shift, weight, sign in ((0, 1 - t, -one), (1, t, one)):
        at = cell + shift
        taps.append(Tap(*_lookup(at, size), weight, sign, zero))
    return taps, slope


def cubic_taps(grid: Tensor, size: int, padding: int, align: bool) -> tuple[list[Tap], Tensor]:
    """Keys 1981, with a = -3/4. Each tap is clipped or reflected on its own, the position not."""
    a = -0.75
    position, slope = source(grid, size, ZEROS, align)
    cell = position.floor().detach()
    t = position - cell

    def near(x: Tensor) -> Any:  # within one sample
        return (
            ((a + 2) * x - (a + 3)) * x * x + 1,
            (3 * (a + 2) * x - 2 * (a + 3)) * x,
            6 * (a + 2) * x - 2 * (a + 3),
        )

    def far(x: Tensor) -> Any:  # one to two samples away
        return (
            ((a * x - 5 * a) * x + 8 * a) * x - 4 * a,
            (3 * a * x - 10 * a) * x + 8 * a,
            6 * a * x - 10 * a,
        )

    factors = ((-1, far(t + 1), 1), (0, near(t), 1), (1, near(1 - t), -1), (2, far(2 - t), -1))
    taps = []
    for shift, (weight, first, second), sign in factors:
        at = cell + shift
        if padding == REFLECTION:
            at = _reflect(at, at, size, align)[0]
        if padding != ZEROS:
            at = at.clamp(0, size - 1)
        taps.append(Tap(*_lookup(at, size), weight, first * sign, second))
    return taps, slope


def _lookup(at: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`at` as an index, and whether it is one."""
    inside = (at >= 0) & (at <= size - 1)
    return at.clamp(0, size - 1).nan_to_num(0).long(), inside


def along(
    v: Tensor, grad: Tensor, x: Tensor, grid: Tensor, how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of L = <grad, D>, where D is the derivative of the sample of x at `grid` in
    the direction v: with respect to grad (which is D), x and grid.

    With factors w_d, chain-rule slopes s_d, and taps k:
    D = sum_k x_k sum_d v_d s_d w_d' prod_(e != d) w_e.
    """
    mode, padding, align = how
    sizes = x.shape[2:]
    rank = len(sizes)
    batch, width = x.shape[:2]
    find = cubic_taps if mode == BICUBIC else linear_taps
    axes = [find(grid[..., rank - 1 - d], sizes[d], padding, align) for d in range(rank)]
    slopes = [slope for _, slope in axes]
    step = [v[..., rank - 1 - d] * slopes[d] for d in range(rank)]
    values, grads = x.flatten(2), grad.flatten(2)
    d_grad, d_x = torch.zeros_like(grads), torch.zeros_like(values)
    d_position = [torch.zeros_like(s) for s in slopes]
    for taps in itertools.product(*(taps for taps, _ in axes)):
        index, inside = taps[0].at, taps[0].inside
        for size, tap in zip(sizes[1:], taps[1:], strict=True):
            index, inside = index * size + tap.at, inside & tap.inside

        def product(*slopes: int, taps: Any = taps) -> Any:
            """The weight of the taps, differentiated once along each of the dims `slopes`."""
            orders = [slopes.count(d) for d in range(rank)]
            pairs = zip(taps, orders, strict=True)
            return math.prod((t.weight, t.slope, t.curve)[order] for t, order in pairs)

        weight = sum(step[d] * product(d) for d in range(rank)) * inside
        where = index.flatten(1).unsqueeze(1).expand(batch, width, -1)
        weight = weight.flatten(1).unsqueeze(1)
        found = values.gather(2, where)
        d_grad = d_grad + found * weight
        d_x = d_x.scatter_add(2, where, grads * weight)
        pull = (grads * found).sum(1).view(inside.shape) * inside
        for e in range(rank):
            change = sum(step[d] * product(d, e) for d in range(rank))
            d_position[e] = d_position[e] + pull * change
    d_grid = [d_position[e] * slopes[e] for e in reversed(range(rank))]
    return d_grad.view(grad.shape), d_x.view(x.shape), torch.stack(d_grid, -1)


for rank in (2, 3):
    sampler = getattr(aten, f"grid_sampler_{rank}d").default
    kernel = getattr(aten, f"grid_sampler_{rank}d_backward").default

    @vjp(sampler, "input:grid grid input.shape input.stride", wrt="input grid")
    def grid_sampler(g: Tensor, s: Any, needs: list[bool], kernel: Any = kernel) -> Any:
        x = s.input if needs[1] else stand_in(g, s.input_shape, s.input_stride)
        return kernel(g, x, s.grid, s.interpolation_mode, s.padding_mode, s.align_corners, needs)

    @vjp(kernel, "grad_output input grid", wrt="grad_output input grid")
    def grid_sampler_backward(
        g: Any, s: Any, needs: list[bool], kernel: Any = kernel, sampler: Any = sampler
    ) -> Any:
        """For cotangents (u, v) of (input', grid'): u is sampled as the input was, and v asks
        for the derivative of a sample in its direction."""
        u, v = g
        grid, how = s.grid, (s.interpolation_mode, s.padding_mode, s.align_corners)
        d_grad = d_input = d_grid = None
        if u is not None:
            d_grad = sampler(u, grid, *how) if needs[0] else None
            d_grid = kernel(s.grad_output, u, grid, *how, [False, True])[1] if needs[2] else None
        if v is not None and s.interpolation_mode != NEAREST:
            more_grad, d_input, more_grid = along(v, s.grad_output, s.input, grid, how)
            d_grad = more_grad if d_grad is None else d_grad + more_grad
            d_grid = more_grid if d_grid is None else d_grid + more_grid
        return d_grad, d_input, d_grid
