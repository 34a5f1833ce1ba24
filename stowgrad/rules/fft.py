"""Fourier transforms. All of torch.fft, stft and istft come down to three kernels.

A transform is linear, so its gradient is the adjoint transform, which is the inverse with the same
normalization. A real signal has a spectrum whose second half mirrors the first, and only the first
half is kept ("onesided"): its inner elements stand for two, which is where the weights come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .table import vjp

aten = torch.ops.aten


def multiplicity(g: Tensor, dim: int, half: int, full: int) -> Tensor:
    """How often each of the first `half` elements along `dim` occurs in a spectrum of `full`:
    once at zero and at an even signal's highest frequency, else twice."""
    at = torch.arange(half, device=g.device)
    count = torch.where((at > 0) & (at <= full - half), 2, 1).to(g.real.dtype)
    return count.view([-1] + [1] * (g.dim() - 1 - dim % g.dim()))


def real_to_complex(g: Tensor, shape: torch.Size, dim: list[int], norm: int, half: bool) -> Tensor:
    """The real part of the inverse transform of G, taken as zero where G is not kept."""
    if not half:
        return torch.real(aten._fft_c2c(g, dim, norm, False))
    last, full = dim[-1], shape[dim[-1]]
    return aten._fft_c2r(g / multiplicity(g, last, g.shape[last], full), dim, norm, full)


def complex_to_real(g: Tensor, dim: list[int], norm: int, full: int) -> Tensor:
    half = aten._fft_r2c(g, dim, norm, True)
    return half * multiplicity(half, dim[-1], half.shape[dim[-1]], full)


vjp(
    aten._fft_c2c.default,
    self=lambda g, s: aten._fft_c2c(g, s.dim, s.normalization, not s.forward),
)
vjp(
    aten._fft_r2c.default, "self.shape",
    self=lambda g, s: real_to_complex(g, s.self_shape, s.dim, s.normalization, s.onesided),
)  # fmt: skip
vjp(
    aten._fft_c2r.default,
    self=lambda g, s: complex_to_real(g, s.dim, s.normalization, s.last_dim_size),
)
