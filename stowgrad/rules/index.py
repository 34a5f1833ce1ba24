"""Indexing, gather and scatter, masked selection.

Reading at an index scatters the gradient back, adding where an index comes up twice; writing at an
index reads it there. Where several writes meet, PyTorch's conventions hold: an overwriting write
gives every source the gradient of its place, ties of amin and amax share it equally.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .common import scaled
from .table import nondifferentiable, vjp

aten = torch.ops.aten

# -- x[i, j] and x[i, j] = y

# op                            saves                   gradients
vjp(aten.index.Tensor,          "self.shape indices",
    self=lambda g, s: aten.index_put(g.new_zeros(s.self_shape), s.indices, g, True))
vjp(aten._unsafe_index.Tensor,  "self.shape indices",
    self=lambda g, s: aten._unsafe_index_put(g.new_zeros(s.self_shape), s.indices, g, True))
vjp(aten._unsafe_masked_index,  "self.shape mask indices",
    self=lambda g, s: aten._unsafe_masked_index_put_accumulate(
        g.new_zeros(s.self_shape), s.mask, s.indices, g))
for op in (aten.index_put, aten._index_put_impl):
    vjp(op,                     "indices",
        self=lambda g, s: g if s.accumulate else aten.index_put(g, s.indices, g.new_zeros(())),
        values=lambda g, s: aten.index(g, s.indices))
vjp(aten._unsafe_index_put,     "indices",
    self=lambda g, s: g if s.accumulate else aten._unsafe_index_put(
        g, s.indices, g.new_zeros(())),
    values=lambda g, s: aten._unsafe_index(g, s.indices))
vjp(aten._unsafe_masked_index_put_accumulate, "mask indices",
    self=lambda g, s: g,
    values=lambda g, s: aten._unsafe_masked_index(g, s.mask, s.indices, 0))

# -- whole slices at an index along one dim

vjp(aten.index_select,          "self.shape index",
    self=lambda g, s: aten.index_select_backward(g, s.self_shape, s.dim, s.index))
vjp(aten.index_add,             "index source.shape",
    self=lambda g, s: g,
    source=lambda g, s: scaled(_read(g, s.dim, s.index, s.source_shape), s.alpha))
vjp(aten.index_copy,            "index source.shape",
    self=lambda g, s: g.index_fill(s.dim, s.index, 0),
    source=lambda g, s: _read(g, s.dim, s.index, s.source_shape))
vjp(aten.index_fill.int_Scalar, "index",
    self=lambda g, s: g.index_fill(s.dim, s.index, 0))
vjp(aten.index_fill.int_Tensor, "index",
    self=lambda g, s: g.index_fill(s.dim, s.index, 0),
    value=lambda g, s: _filled_sum(g, s.dim, s.index))


def _read(g: Tensor, dim: int, index: Tensor, shape: Sequence[int]) -> Tensor:
    """g[index] along `dim`, for a source of `shape` (which may be a single number)."""
    if not shape:
        return g.index_select(dim, index.reshape(-1)).reshape(shape)
    return g.index_select(dim, index)


def _filled_sum(g: Tensor, dim: int, index: Tensor) -> Tensor:
    """The sum of `g` over the slices at `index`, each of them once."""
    if not g.ndim:
        return g if index.numel() else torch.zeros_like(g)
    shape = [1] * g.ndim
    shape[dim] = g.shape[dim]
    hit = torch.zeros(shape[dim], dtype=torch.bool, device=g.device).index_fill(0, index, True)
    return torch.where(hit.reshape(shape), g, 0).sum()


# -- single elements at an index along one dim, or in the flattened tensor

vjp(aten.gather,                "self.shape index",
    self=lambda g, s: _gather_backward(g, s.self_shape, s.dim, s.index, s.sparse_grad))
vjp(aten.scatter.src,           "index",
    self=lambda g, s: g.scatter(s.dim, s.index, 0), src=lambda g, s: g.gather(s.dim, s.index))
vjp(aten.scatter.value,         "index",
    self=lambda g, s: g.scatter(s.dim, s.index, 0))
vjp(aten.scatter_add,           "index",
    self=lambda g, s: g,
    src=lambda g, s: g.gather(s.dim, s.index))
vjp(aten.take,                  "self.shape index",
    self=lambda g, s: _untake(g, s.self_shape, s.index))
vjp(aten.put,                   "index source.shape",
    self=lambda g, s: g if s.accumulate else g.put(s.index, g.new_zeros(s.source_shape)),
    source=lambda g, s: g.take(s.index).reshape(s.source_shape))


def _untake(g: Tensor, shape: Sequence[int], index: Tensor) -> Tensor:
    flat = g.new_zeros(math.prod(shape))
    return flat.index_put((index.reshape(-1),), g.reshape(-1), True).reshape(shape)


def _gather_backward(
    g: Tensor, shape: Sequence[int], dim: int, index: Tensor, sparse: bool
) -> Tensor:
    if sparse:
        return aten._gather_sparse_backward(g.new_zeros(()).expand(shape), dim, index, g)
    return g.new_zeros(shape).scatter_add(dim, index, g)


# -- elements under a mask (masked_fill is in pointwise.py)

vjp(aten.masked_select,         "self.shape mask",
    self=lambda g, s: _unselect(g, s.self_shape, s.mask))
vjp(aten.masked_scatter,        "mask source.shape",
    self=lambda g, s: g.masked_fill(s.mask, 0),
    source=lambda g, s: aten.masked_scatter_backward(g, s.mask, s.source_shape))
vjp(aten.masked_scatter_backward, "grad_output.shape mask",
    grad_output=lambda g, s: g.new_zeros(s.grad_output_shape).masked_scatter(s.mask, g))


def _unselect(g: Tensor, shape: Sequence[int], mask: Tensor) -> Tensor:
    """The selected elements back in their places, in the shape that self and mask broadcast to."""
    return g.new_zeros(torch.broadcast_shapes(shape, mask.shape)).masked_scatter(mask, g)


# -- reductions at an index


@vjp(aten.scatter_reduce.two, "self index src out", wrt="self src")
def scatter_reduce(g: Tensor, s: Any, needs: Any) -> Any:
    """self[index[i]] reduced with src[i]; `write` and `read` are the two directions of that."""
    dim, index = s.dim, s.index

    def write(into: Tensor, values: Tensor) -> Tensor:
        return into.scatter_add(dim, index, values)

    def read(x: Tensor) -> Tensor:
        return x.gather(dim, index)

    def again(x: Tensor, values: Tensor) -> Tensor:
        return x.scatter_reduce(dim, index, values, reduce=reduce, include_self=s.include_self)

    reduce = s.reduce
    if reduce == "sum":
        self, src = g, read(g)
    else:
        self, src = _reduce_backward(
            reduce, g, s.self, s.src, s.out, s.include_self, write, read, again
        )
    if not s.include_self:
        self = self.scatter(dim, index, 0)
    return self, src


@vjp(aten.index_reduce, "self index source out", wrt="self source")
def index_reduce(g: Tensor, s: Any, needs: Any) -> Any:
    """As scatter_reduce, with whole slices of `source` at each index."""
    dim, index = s.dim, s.index

    def write(into: Tensor, values: Tensor) -> Tensor:
        return into.index_add(dim, index, values)

    def read(x: Tensor) -> Tensor:
        return x.index_select(dim, index)

    def again(x: Tensor, values: Tensor) -> Tensor:
        return x.index_reduce(dim, index, values, s.reduce, include_self=s.include_self)

    self, source = _reduce_backward(
        s.reduce, g, s.self, s.source, s.out, s.include_self, write, read, again
    )
    if not s.include_self:
        self = self.index_fill(dim, index, 0)
    return self, source


def _reduce_backward(
    reduce: str, g: Tensor, x: Tensor, source: Tensor, out: Tensor, include: bool,
    write: Any, read: Any, again: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of `x` and of the `source` reduced into it.

    mean: each place's gradient over the number of its values. amin, amax: shared by the values
    that equal the result. prod: result / value; a value that is zero gets the product of the
    others, which is nonzero only if it is the only zero.
    """
    if reduce == "mean":
        ones = torch.ones_like(g)
        count = write(ones if include else torch.zeros_like(g), torch.ones_like(source))
        g = g / count.masked_fill(count == 0, 1)
        return g, read(g)
    if reduce in ("amin", "amax"):
        of_x = (x == out).to(g.dtype)
        of_source = (source == read(out)).to(g.dtype)
        g = g / write(of_x, of_source)
        return of_x * g, of_source * read(g)
    # prod
    others = x.masked_fill(x == 0, 1)
    to_x = g * again(others, source) / others
    zero = source == 0
    zeros = read(write(torch.zeros_like(x), zero.to(x.dtype)))
    alone = zero & (zeros == 1)
    without = again(x, source.masked_fill(alone, 1))
    to_source = torch.where(
        alone, read(g * without), read(g * out) / source.masked_fill(zero, 1)
    )
    return to_x, to_source


# -- reductions of segments

vjp(aten.segment_reduce, "data lengths offsets out", constant="lengths indices offsets",
    data=lambda g, s: aten._segment_reduce_backward(
        g.contiguous(), s.out, s.data, s.reduce, lengths=s.lengths, offsets=s.offsets, axis=s.axis,
        initial=s.initial))  # fmt: skip

nondifferentiable(aten.repeat_interleave.Tensor)
