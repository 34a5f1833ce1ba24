"""Small helpers that several families of rules share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _private


def conj(x: Any) -> Any:
    """The conjugate of a tensor or number; of a real one, itself."""
    if isinstance(x, torch.Tensor):
        return x.conj() if x.is_complex() else x
    return x.conjugate() if isinstance(x, complex) else x


def scaled(x: Any, factor: Any) -> Any:
    """`x * factor`, and x itself for the usual factor 1."""
    return x if factor == 1 else x * factor


def zero(g: Any, s: Any) -> Any:
    """The formula of an argument whose gradient is zero wherever the result is differentiable."""
    return torch.zeros_like(g)


def reduced(dim: Any, ndim: int) -> list[int]:
    """The dims that a reduction over `dim` (one, several, or None or [] for all) takes away."""
    if isinstance(dim, int):
        return [dim % ndim] if ndim else []
    if not dim:
        return list(range(ndim))
    return [d % ndim for d in dim] if ndim else []


def unreduce(g: Tensor, shape: Sequence[int], dim: Any = None, keepdim: bool = False) -> Tensor:
    """A result of a reduction of something of `shape`, with the reduced dims back as size 1."""
    ndim = len(shape)
    if keepdim or not ndim or g.ndim == ndim:
        return g
    if isinstance(dim, int):
        return g.unsqueeze(dim)
    gone = reduced(dim, ndim)
    if len(gone) == 1:
        return g.unsqueeze(gone[0])
    return g.reshape([1 if i in gone else n for i, n in enumerate(shape)])


def reduced_size(shape: Sequence[int], dim: Any = None) -> int:
    """How many elements go into each result of a reduction over `dim`."""
    return math.prod(shape[d] for d in reduced(dim, len(shape)))


def filled(grads: Sequence[Tensor | None], node: Any) -> list[Tensor]:
    """The gradients of all outputs of `node`, zeros where none arrived."""
    return [node.zeros(i) if g is None else g for i, g in enumerate(grads)]


def on(g: Tensor, device: torch.device) -> Tensor:
    """`g` on `device`: the gradient of something that was copied from there."""
    return g if g.device == device else g.to(device)


def stand_in(like: torch.Tensor, shape: Any, stride: Any) -> torch.Tensor:
    """A tensor without content of this geometry, of `like`'s dtype and device.

    For a kernel that takes an argument only to learn its shape and memory format, so that the
    argument itself need not be saved. On a CPU it occupies one element, unless it is channels last.
    """
    if like.device.type != "cpu" or (len(shape) > 3 and stride[1] == 1):
        return like.new_empty_strided(shape, stride)
    return like.new_empty(()).expand(shape)


def nothing(g: torch.Tensor, s: Any) -> torch.Tensor:
    """The gradient of the `self` that a backward kernel takes for its geometry: zero."""
    return g.new_zeros(s.self_shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, rounded as under PyTorch's autograd, where its kernel does not see that.

    For an `x` that is not contiguous, `linear` is `matmul(x, weight.t())`, which is one product
    rather than one for each of the batch only if the transposed weight says that it requires grad.
    """
    if x.dim() < 3 or x.is_contiguous():
        return torch.nn.functional.linear(x, weight, bias)
    turned = weight.t()
    _private.set_native_requires_grad(turned, _private.native_requires_grad(weight))
    out = torch.matmul(x, turned)
    return out if bias is None else out.add_(bias)
