"""What some ops give on fake tensors, where PyTorch's own way does not take symbolic sizes.

Without these, a derivative that uses such an op would run as it is, outside the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Shape = Callable[..., Tensor]


def _empty(shape: Sequence[Any], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(list(shape), dtype=dtype or like.dtype, device=like.device)


def _as_argument(position: int) -> Shape:
    """The result looks like an argument."""
    return lambda *args, **kwargs: _empty(args[position].shape, args[position])


def _resized(g: Tensor, output_size: Any, input_size: Any, *rest: Any) -> Tensor:
    return _empty(input_size, g)


def _padded(self: Tensor, pad: Any, value: Any = 0) -> Tensor:
    shape = list(self.shape)
    for i in range(len(pad) // 2):
        shape[-1 - i] = shape[-1 - i] + pad[2 * i] + pad[2 * i + 1]
    return _empty(shape, self)


def _pad(self: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    return _padded(self, pad) if mode == "constant" else aten.pad.default(self, pad, mode, value)


def _scattered(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return _empty(torch.broadcast_shapes(self.shape, mask.shape), self)


def _solved(a: Tensor, b: Tensor) -> Tensor:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return _empty([*batch, *b.shape[-2:]], b)


def _to_real(self: Tensor, dim: Any, normalization: int, last_dim_size: Any) -> Tensor:
    shape = list(self.shape)
    shape[dim[-1]] = last_dim_size
    return _empty(shape, self, self.dtype.to_real())


def _to_complex(self: Tensor, dim: Any, normalization: int, onesided: bool) -> Tensor:
    shape = list(self.shape)
    if onesided:
        shape[dim[-1]] = shape[dim[-1]] // 2 + 1
    return _empty(shape, self, self.dtype.to_complex())


def _from_columns(self: Tensor, output_size: Any, kernel_size: Any, *rest: Any) -> Tensor:
    *batch, columns, _ = self.shape
    return _empty([*batch, columns // (kernel_size[0] * kernel_size[1]), *output_size], self)


SHAPES: dict[Any, Shape] = {
    aten.hardshrink_backward.default: _as_argument(0),
    aten.softshrink_backward.default: _as_argument(0),
    aten.multi_margin_loss_backward.default: _as_argument(1),
    aten.multilabel_margin_loss_backward.default: _as_argument(1),
    aten.fractional_max_pool3d_backward.default: _as_argument(1),
    aten._ctc_loss_backward.default: _as_argument(1),
    aten._ctc_loss_backward.Tensor: _as_argument(1),
    aten.constant_pad_nd.default: _padded,
    aten.pad.default: _pad,
    aten.masked_scatter.default: _scattered,
    aten.linalg_solve_triangular.default: lambda a, b, **kwargs: _solved(a, b),
    aten.cholesky_solve.default: lambda b, a, upper=False: _solved(a, b),
    aten.col2im.default: _from_columns,
    aten._fft_c2c.default: _as_argument(0),
    aten._fft_c2r.default: _to_real,
    aten._fft_r2c.default: _to_complex,
}
for _name in (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
):  # fmt: skip
    SHAPES[getattr(aten, _name + "_backward").default] = _resized
