"""Resampling, padding by reflection or repetition, pixel and channel shuffles, affine grids.

All of these are linear, so nothing but shapes is saved, and the rule of each backward kernel is
the forward op. Padding with a constant is in shape.py, grid sampling in grid.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import nothing, stand_in
from .table import vjp

aten = torch.ops.aten

# -- interpolation: by the kernel of the same name with `_backward`

for name in ("upsample_nearest1d", "_upsample_nearest_exact1d"):
    forward, backward = getattr(aten, name).default, getattr(aten, name + "_backward").default
    vjp(forward, "self.shape", self=lambda g, s, backward=backward: backward(
        g, s.output_size, s.self_shape, s.scales))  # fmt: skip
    vjp(backward, grad_output=lambda g, s, forward=forward: forward(g, s.output_size, s.scales))

for name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
    forward, backward = getattr(aten, name).default, getattr(aten, name + "_backward").default
    vjp(forward, "self.shape", self=lambda g, s, backward=backward: backward(
        g, s.output_size, s.self_shape, s.scales_h, s.scales_w))  # fmt: skip
    vjp(backward, grad_output=lambda g, s, forward=forward: forward(
        g, s.output_size, s.scales_h, s.scales_w))  # fmt: skip

for name in ("upsample_nearest3d", "_upsample_nearest_exact3d"):
    forward, backward = getattr(aten, name).default, getattr(aten, name + "_backward").default
    vjp(forward, "self.shape", self=lambda g, s, backward=backward: backward(
        g, s.output_size, s.self_shape, s.scales_d, s.scales_h, s.scales_w))  # fmt: skip
    vjp(backward, grad_output=lambda g, s, forward=forward: forward(
        g, s.output_size, s.scales_d, s.scales_h, s.scales_w))  # fmt: skip

vjp(aten.upsample_linear1d.default, "self.shape", self=lambda g, s: aten.upsample_linear1d_backward(
    g, s.output_size, s.self_shape, s.align_corners, s.scales))  # fmt: skip
vjp(aten.upsample_linear1d_backward.default, grad_output=lambda g, s: aten.upsample_linear1d(
    g, s.output_size, s.align_corners, s.scales))  # fmt: skip

for name in (
    "upsample_bilinear2d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
):  # fmt: skip
    forward, backward = getattr(aten, name).default, getattr(aten, name + "_backward").default
    vjp(forward, "self.shape", self=lambda g, s, backward=backward: backward(
        g, s.output_size, s.self_shape, s.align_corners, s.scales_h, s.scales_w))  # fmt: skip
    vjp(backward, grad_output=lambda g, s, forward=forward: forward(
        g, s.output_size, s.align_corners, s.scales_h, s.scales_w))  # fmt: skip

vjp(aten.upsample_trilinear3d.default, "self.shape",
    self=lambda g, s: aten.upsample_trilinear3d_backward(
        g, s.output_size, s.self_shape, s.align_corners, s.scales_d, s.scales_h, s.scales_w)
)  # fmt: skip
vjp(aten.upsample_trilinear3d_backward.default, grad_output=lambda g, s: aten.upsample_trilinear3d(
    g, s.output_size, s.align_corners, s.scales_d, s.scales_h, s.scales_w))  # fmt: skip

# -- padding

for kind in ("reflection", "replication"):
    for rank in (1, 2, 3):
        forward = getattr(aten, f"{kind}_pad{rank}d").default
        backward = getattr(aten, f"{kind}_pad{rank}d_backward").default
        vjp(forward, "self.shape self.stride", self=lambda g, s, backward=backward: backward(
            g, stand_in(g, s.self_shape, s.self_stride), s.padding))  # fmt: skip
        vjp(backward, "self.shape", self=nothing,
            grad_output=lambda g, s, forward=forward: forward(g, s.padding))  # fmt: skip


def pad_circular_backward(g: Tensor, pad: list[int]) -> Tensor:
    """Fold what was repeated beyond each end back on the other end; dim by dim, last first.

    A negative pad has cut that much off before anything was repeated.
    """
    for i in range(0, len(pad), 2):
        dim = g.dim() - 1 - i // 2
        before, after = max(pad[i], 0), max(pad[i + 1], 0)
        size = g.shape[dim] - before - after
        core = g.narrow(dim, before, size)
        if before:
            core = core + aten.constant_pad_nd(g.narrow(dim, 0, before), _at(i, size - before, 0))
        if after:
            tail = g.narrow(dim, before + size, after)
            core = core + aten.constant_pad_nd(tail, _at(i, 0, size - after))
        cut = max(-pad[i], 0), max(-pad[i + 1], 0)
        g = aten.constant_pad_nd(core, _at(i, *cut)) if any(cut) else core
    return g


def _at(i: int, before: int, after: int) -> list[int]:
    return [0] * i + [before, after]


vjp(aten._pad_circular.default, self=lambda g, s: pad_circular_backward(g, s.pad))

# -- shuffles and grids

vjp(aten.pixel_shuffle, self=lambda g, s: torch.pixel_unshuffle(g, s.upscale_factor))
vjp(aten.pixel_unshuffle, self=lambda g, s: torch.pixel_shuffle(g, s.downscale_factor))
vjp(aten.channel_shuffle, self=lambda g, s: torch.channel_shuffle(g, g.shape[1] // s.groups))
vjp(aten.native_channel_shuffle, self=lambda g, s: torch.channel_shuffle(g, g.shape[1] // s.groups))


def affine_grid(g: Tensor, s: Any) -> Tensor:
    """grid = base theta^T per sample, where `base` is the grid of theta = identity and ones.

    The base is had from the op itself, applied to the identity.
    """
    rank = len(s.size) - 2
    identity = torch.eye(rank, rank + 1, dtype=g.dtype, device=g.device).unsqueeze(0)
    base = aten.affine_grid_generator(identity, [1, *s.size[1:]], s.align_corners)
    base = torch.cat([base, torch.ones_like(base[..., :1])], -1).flatten(0, -2)
    return torch.matmul(g.flatten(1, -2).mT, base)


vjp(aten.affine_grid_generator, theta=affine_grid)
