"""Sorting, top-k, order statistics: values picked out along one dim.

What was picked from index i gives its gradient back to index i.
"""

from __future__ import annotations

import torch

from .table import vjp

aten = torch.ops.aten

for op in (aten.sort.default, aten.sort.stable, aten.topk.default):
    vjp(op, "self.shape indices", outputs="values indices", differentiable="values",
        self=lambda g, s: g.new_zeros(s.self_shape).scatter(s.dim, s.indices, g))
for op in (
    aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default,
    aten.kthvalue.default,
):  # fmt: skip
    vjp(op, "self.shape indices", outputs="values indices", differentiable="values",
        self=lambda g, s: aten.value_selecting_reduction_backward(
            g, s.dim, s.indices, s.self_shape, s.keepdim))
