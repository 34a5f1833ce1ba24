"""Products with sparse matrices.

The gradient of a sparse matrix is needed at its own entries only: where PyTorch gives it there, so
do these rows (`sparse_mask`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _private
from .common import conj
from .matmul import times
from .table import vjp

aten = torch.ops.aten


def masked(x: Tensor, like: Tensor) -> Tensor:
    """The entries of `x` where the sparse COO or CSR matrix `like` has one."""
    return x.sparse_mask(like.coalesce() if like.layout is torch.sparse_coo else like)


# fmt: off
vjp(aten._sparse_addmm.default, "mat1 mat2",
    self=lambda g, s: times(g, s.beta),
    mat1=lambda g, s: masked(times(torch.mm(g, s.mat2.mH), s.alpha), s.mat1),
    mat2=lambda g, s: times(torch.mm(adjoint(s.mat1), g), s.alpha))
vjp(aten._sparse_sparse_matmul.default, "self other",
    self=lambda g, s: masked(product(g, adjoint(s.other)), s.self),
    other=lambda g, s: masked(product(adjoint(s.self), g), s.other))
vjp(aten.sparse_sampled_addmm.default, "self mat1 mat2",
    self=lambda g, s: times(g, s.beta),
    mat1=lambda g, s: times(torch.mm(sampled(g, s.self), s.mat2.mH), s.alpha),
    mat2=lambda g, s: times(torch.mm(s.mat1.mH, sampled(g, s.self)), s.alpha))
# fmt: on


def adjoint(x: Tensor) -> Tensor:
    return conj(x).transpose(-2, -1)


def product(a: Tensor, b: Tensor) -> Tensor:
    with _private.view_tracking_off():  # its kernel resizes what it takes for the bare result
        return aten._sparse_sparse_matmul(a, b)


def sampled(g: Tensor, like: Tensor) -> Tensor:
    """G at the entries of `like`, sparse also if it came dense."""
    return g.sparse_mask(like) if g.layout is torch.strided else g


@vjp(
    aten._sparse_mm_reduce_impl.default, saves="self other arg", outputs="out arg",
    differentiable="out", wrt="self other",
)  # fmt: skip
def sparse_mm_reduce(g: Tensor, s: Any, needs: list[bool]) -> list[Tensor | None]:
    """A sparse matrix times a dense one, with the sum replaced by a mean or an extremum."""
    return list(aten._sparse_mm_reduce_impl_backward(s.self, g, s.other, s.reduce, s.arg, needs))
