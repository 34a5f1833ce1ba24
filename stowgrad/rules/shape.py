"""Views, and ops that move elements without changing them: cat, pad, repeat, flip, casts, copies.

Every gradient here is again such an op: what forward reads from place i, backward adds to place i.
Views share memory with their base; what an in-place change of one means for the others is the
recorder's business (record.py), not the rules'.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _private
from .common import filled, on
from .table import nondifferentiable, vjp

aten = torch.ops.aten


def view(op: Any, saves: str = "", **formulas: Any) -> None:
    """The rule of a view op, and of its twin that returns a copy (aten.permute_copy)."""
    vjp(op, saves, **formulas)
    twins = getattr(aten, op._schema.name.removeprefix("aten::") + "_copy", None)
    if twins is not None and op._overloadname in twins.overloads():
        vjp(getattr(twins, op._overloadname), saves, **formulas)


# -- the same elements in another shape

for op in (
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
    aten.reshape.default, aten._reshape_copy.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
):  # fmt: skip
    view(op, "self.shape", self=lambda g, s: g.reshape(s.self_shape))
for op in (aten.view_as.default, aten.reshape_as.default):
    vjp(op, "self.shape", constant="other", self=lambda g, s: g.reshape(s.self_shape))
view(aten.unsqueeze.default, self=lambda g, s: g.squeeze(s.dim))
nondifferentiable(aten.view.dtype, aten.view_copy.dtype)

# -- the same elements in another order

view(aten.t.default, self=lambda g, s: g.t())
view(aten.transpose.int, self=lambda g, s: g.transpose(s.dim0, s.dim1))
vjp(aten.transpose_.default, self=lambda g, s: g.transpose(s.dim0, s.dim1))
vjp(aten.swapaxes, self=lambda g, s: g.transpose(s.axis0, s.axis1))
vjp(aten.swapdims, self=lambda g, s: g.transpose(s.dim0, s.dim1))
vjp(aten.mT.default, self=lambda g, s: g.mT)
vjp(aten.numpy_T.default, self=lambda g, s: g.permute(tuple(range(g.ndim - 1, -1, -1))))
view(aten.permute.default, self=lambda g, s: g.permute(_inverse(s.dims)))
vjp(aten.movedim, self=lambda g, s: g.movedim(s.destination, s.source))
vjp(aten.moveaxis, self=lambda g, s: g.movedim(s.destination, s.source))
vjp(aten.flip, self=lambda g, s: g.flip(s.dims))
vjp(aten.rot90, self=lambda g, s: g.rot90(-s.k, s.dims))
vjp(aten.roll, self=lambda g, s: g.roll([-n for n in reversed(_ints(s.shifts))],
                                        list(reversed(_ints(s.dims)))))  # fmt: skip


def _ints(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _inverse(dims: Sequence[int]) -> list[int]:
    """The permutation that undoes `dims`."""
    inverse = [0] * len(dims)
    for position, dim in enumerate(dims):
        inverse[dim % len(dims)] = position
    return inverse


# -- a part of the elements; the others get a zero gradient

# op                       saves           gradient
view(aten.select.int,      "self.shape",   self=lambda g, s: aten.select_backward(
    g, s.self_shape, s.dim, s.index))
view(aten.slice.Tensor,    "self.shape",   self=lambda g, s: aten.slice_backward(
    g, s.self_shape, s.dim, s.start or 0, sys.maxsize if s.end is None else s.end, s.step))
view(aten.narrow.default,  "self.shape",   self=lambda g, s: aten.slice_backward(
    g, s.self_shape, s.dim, *_bounds(s.self_shape[s.dim], s.start, s.length), 1))
view(aten.diagonal.default, "self.shape",  self=lambda g, s: aten.diagonal_backward(
    g, s.self_shape, s.offset, s.dim1, s.dim2))
view(aten.unfold.default,  "self.shape",   self=lambda g, s: aten.unfold_backward(
    g, s.self_shape, s.dimension, s.size, s.step))
view(aten.as_strided.default, "self.shape self.stride self.storage_offset",
     self=lambda g, s: as_strided_backward(
         g, s.self_shape, s.self_stride, s.self_storage_offset, s.size, s.stride,
         s.storage_offset))  # fmt: skip
vjp(aten.tril, self=lambda g, s: g.tril(s.diagonal))
vjp(aten.triu, self=lambda g, s: g.triu(s.diagonal))

vjp(aten.select_backward, grad_output=lambda g, s: g.select(s.dim, s.index))
vjp(aten.slice_backward, grad_output=lambda g, s: aten.slice(g, s.dim, s.start, s.end, s.step))
vjp(aten.diagonal_backward, grad_output=lambda g, s: g.diagonal(s.offset, s.dim1, s.dim2))
vjp(aten.unfold_backward, grad_in=lambda g, s: g.unfold(s.dim, s.size, s.step))


def _bounds(size: int, start: int, length: int) -> tuple[int, int]:
    start = start + size if start < 0 else start
    return start, start + length


# -- several parts at once

for op in (
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default,
    aten.tensor_split.sections, aten.tensor_split.indices,
    aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default,
):  # fmt: skip
    view(op, self=lambda g, s: torch.cat(filled(g, s._node), s.dim))
view(aten.unbind.int, self=lambda g, s: torch.stack(filled(g, s._node), s.dim))

# -- elements used several times: their gradients add up (over broadcast dims the engine adds)

view(aten.expand.default, self=lambda g, s: g)
vjp(aten.expand_as, constant="other", self=lambda g, s: g)
vjp(aten.repeat, "self.shape", self=lambda g, s: _repeat_backward(g, s.self_shape, s.repeats))


def _repeat_backward(g: Tensor, shape: Sequence[int], repeats: Sequence[int]) -> Tensor:
    """Each repeated dim apart as [times, size], and the sum over the times."""
    if 0 in repeats:
        return g.new_zeros(shape)
    extra = len(repeats) - len(shape)
    apart = list(repeats[:extra])
    summed = list(range(extra))
    for times, size in zip(repeats[extra:], shape, strict=True):
        if times != 1:
            summed.append(len(apart))
            apart.append(times)
        apart.append(size)
    g = g.reshape(apart)
    return g.sum(summed) if summed else g


# -- elements put into a larger tensor


@vjp(aten.cat.default, "tensors.shape", wrt="tensors")
def cat(g: Tensor, s: Any, needs: Any) -> Any:
    """The part of `g` that came from each tensor. One of shape (0,) goes with any others."""
    shapes, dim = s.tensors_shape, s.dim
    parts = torch.split_with_sizes(g, [0 if n == (0,) else n[dim] for n in shapes], dim)
    return [[
        (g.new_zeros(n) if n == (0,) else part) if need else None
        for part, n, need in zip(parts, shapes, needs[0], strict=True)
    ]]  # fmt: skip


@vjp(aten.block_diag, "tensors.shape", wrt="tensors")
def block_diag(g: Tensor, s: Any, needs: Any) -> Any:
    """Each block of `g`; the next one begins where the rows and columns of the last end."""
    row = column = 0
    grads: list[Tensor | None] = []
    for shape, need in zip(s.tensors_shape, needs[0], strict=True):
        height, width = (1, 1, *shape)[-2:]
        block = g[row : row + height, column : column + width]
        grads.append(block.reshape(shape) if need else None)
        row, column = row + height, column + width
    return [grads]


vjp(aten.stack, tensors=lambda g, s: g.unbind(s.dim))
vjp(aten.diag_embed, self=lambda g, s: g.diagonal(s.offset, s.dim1, s.dim2))
vjp(aten.constant_pad_nd, self=lambda g, s: aten.constant_pad_nd(g, _opposite(s.pad)))


def _opposite(numbers: Sequence[int]) -> list[int]:
    return [-n for n in numbers]


# -- elements put over others: those get a zero gradient

# op                                saves        gradients
vjp(aten.select_scatter,            "src.shape",
    self=lambda g, s: torch.select_scatter(g, g.new_zeros(s.src_shape), s.dim, s.index),
    src=lambda g, s: g.select(s.dim, s.index))
vjp(aten.slice_scatter,             "src.shape",
    self=lambda g, s: torch.slice_scatter(
        g, g.new_zeros(s.src_shape), s.dim, s.start, s.end, s.step),
    src=lambda g, s: aten.slice(g, s.dim, s.start, s.end, s.step))
vjp(aten.diagonal_scatter,          "src.shape",
    self=lambda g, s: torch.diagonal_scatter(
        g, g.new_zeros(s.src_shape), s.offset, s.dim1, s.dim2),
    src=lambda g, s: g.diagonal(s.offset, s.dim1, s.dim2))
# of a contiguous `self`; PyTorch gives it the gradient of the overwritten elements, not the others'
vjp(aten.as_strided_scatter, "self.storage_offset",
    self=lambda g, s: _strided(
        g, s.size, s.stride, s.storage_offset, s.self_storage_offset, g.new_zeros(s.size)),
    src=lambda g, s: _strided(
        g, s.size, s.stride, s.storage_offset, s.self_storage_offset))  # fmt: skip


def _strided(
    g: Tensor, size: Any, stride: Any, offset: int | None, base: int, source: Tensor | None = None
) -> Tensor:
    """as_strided of a gradient of something that began at `base`, or `source` put there."""
    g = g.contiguous()
    place = int(g.storage_offset()) + (0 if offset is None else offset - base)
    if source is None:
        return g.as_strided(size, stride, place)
    return torch.as_strided_scatter(g, source, size, stride, place)


# -- the same elements in another place, dtype or layout (the engine casts a gradient back)

for op in (
    aten.alias.default, aten.clone.default, aten._lazy_clone.default, aten.contiguous.default,
    aten.lift.default, aten.lift_fresh.default, aten._pin_memory.default, aten._coalesce.default,
):  # fmt: skip
    view(op, self=lambda g, s: g)
for op in (
    aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other,
):  # fmt: skip
    vjp(op, "self.device", constant="other", self=lambda g, s: on(g, s.self_device))
for op in (
    aten._to_sparse.default, aten._to_sparse.sparse_dim, aten._to_sparse_csr.default,
    aten._to_sparse_csc.default, aten._to_sparse_bsr.default, aten._to_sparse_bsc.default,
):  # fmt: skip
    vjp(op, "self.layout", self=lambda g, s: _with_layout(g, s.self_layout))
vjp(aten.sparse_mask, "self.layout", constant="mask",
    self=lambda g, s: _with_layout(g, s.self_layout))
vjp(aten._to_dense, "self", self=lambda g, s: _to_dense_backward(g, s.self, s.masked_grad))


def _with_layout(g: Tensor, layout: torch.layout) -> Tensor:
    if g.layout == layout:
        return g
    return g.to_dense() if layout is torch.strided else g.to_sparse(layout=layout)


def _to_dense_backward(g: Tensor, x: Tensor, masked: bool | None) -> Tensor:
    """The gradient in the layout of `x`; if `masked` (the default), only where `x` has elements."""
    if x.layout is torch.strided:
        return g
    if x.layout is torch.sparse_coo:
        return g.to_sparse(x.sparse_dim()) if masked is False else g.sparse_mask(x.coalesce())
    block: torch.Size | None = None
    if x.layout in (torch.sparse_bsr, torch.sparse_bsc):
        batch = (x.crow_indices() if x.layout is torch.sparse_bsr else x.ccol_indices()).dim() - 1
        block = x.values().shape[batch + 1 : batch + 3]
    if masked is not False:
        g = g.sparse_mask(x.to_sparse(x.sparse_dim()))
    return g.to_sparse(layout=x.layout, blocksize=block)


# -- any elements of the memory (aten.as_strided)


def as_strided_backward(
    g: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    view_shape: Sequence[int],
    view_stride: Sequence[int],
    view_offset: int | None,
) -> Tensor:
    """The gradient of a tensor (of `shape`, `stride`, `offset`) read by as_strided.

    `g` adds up in a copy of the memory, place by place; from there it is read as the tensor was.
    A place that the tensor shows several times (an expanded one) gives each an equal share.
    """
    view_offset = offset if view_offset is None else view_offset
    if g.numel() == 0 or 0 in shape:
        return g.new_zeros(shape)
    first = min(offset, view_offset)
    if (
        offset == first
        and _contiguous(shape, stride)
        and view_offset + _extent(view_shape, view_stride) <= offset + math.prod(shape)
        and not _overlaps(view_shape, view_stride)
        and not _private.functorch_active()
    ):
        whole = g.new_zeros(shape)
        return torch.as_strided_scatter(whole, g, view_shape, view_stride, view_offset - offset)
    offset, view_offset = offset - first, view_offset - first
    extent = max(offset + _extent(shape, stride), view_offset + _extent(view_shape, view_stride))
    places = torch.arange(extent, device=g.device)
    read = places.as_strided(view_shape, view_stride, view_offset).reshape(-1)
    shown = places.as_strided(shape, stride, offset).reshape(-1)
    memory = g.new_zeros(extent).index_add(0, read, g.reshape(-1))
    if _overlaps(shape, stride):
        memory = memory / torch.bincount(shown, minlength=extent).clamp(min=1)
    return memory.index_select(0, shown).reshape(shape)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many places there are from the first element to the last."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def _contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for n, step in zip(reversed(shape), reversed(stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether some place may be shown twice (PyTorch's test: exact but for odd strides)."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False
