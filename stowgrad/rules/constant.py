"""Ops whose results have no gradient: factories, comparisons, indices, counts, tests."""

from __future__ import annotations

import torch

from .common import zero
from .table import nondifferentiable, vjp

aten = torch.ops.aten

nondifferentiable(
    aten.detach, aten.lift_fresh, aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like,
    aten.rand_like, aten.randn_like, aten.randint_like, aten.new_empty, aten.new_zeros,
    aten.new_ones, aten.new_full, aten.new_empty_strided,
    aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.isfinite,
    aten.isposinf, aten.isneginf, aten.isreal, aten.signbit, aten.logical_and, aten.logical_or,
    aten.logical_not, aten.logical_xor, aten.isclose, aten.allclose, aten.equal, aten.is_nonzero,
    aten.argmax, aten.argmin, aten.argsort, aten.nonzero, aten.count_nonzero, aten.searchsorted,
    aten.bucketize, aten.histc, aten.any, aten.all, aten.multinomial,
    aten._local_scalar_dense, aten.item, aten.isin, aten._is_all_true, aten._is_any_true,
    aten.hash_tensor, aten.nonzero_static, aten.indices, aten._indices, aten._values,
    aten.crow_indices, aten.col_indices, aten.ccol_indices, aten.row_indices,
    aten.logical_and_, aten.logical_or_, aten.logical_not_, aten.logical_xor_,
    aten.record_stream, aten._coalesced_,
)  # fmt: skip

# compared in place, the answer written over a tensor that may need gradients: 0 or 1, so no slope
for _op in (aten.eq_, aten.ne_, aten.lt_, aten.le_, aten.gt_, aten.ge_):
    vjp(_op.Scalar, self=zero)
    vjp(_op.Tensor, self=zero, other=zero)
