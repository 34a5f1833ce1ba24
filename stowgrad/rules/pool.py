"""Pooling and its inverse.

Average pools save nothing but shapes; max pools save only where each maximum was. The input, which
PyTorch saves as well, is needed by the kernels for its shape and memory format alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import nothing, stand_in
from .table import vjp

aten = torch.ops.aten


def pick(x: Tensor, indices: Tensor, dims: int) -> Tensor:
    """The elements of x that `indices` names, which counts within the last `dims` dims of x.

    The derivative of a max pool applied to a cotangent, and the reverse of max_unpool.
    """
    return x.flatten(-dims).gather(-1, indices.flatten(-dims)).view(indices.shape)


def max_pool2d_forward(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    out, indices = aten.max_pool2d_with_indices(
        self, kernel_size, stride, padding, dilation, ceil_mode
    )
    return out, {"indices": indices}


# fmt: off
# op                        saves           gradient of each tensor argument, given g
vjp(aten.avg_pool2d.default, "self.shape self.stride", self=lambda g, s: aten.avg_pool2d_backward(
    g, stand_in(g, s.self_shape, s.self_stride), s.kernel_size, s.stride, s.padding, s.ceil_mode,
    s.count_include_pad, s.divisor_override))
vjp(aten.avg_pool3d.default, "self.shape self.stride", self=lambda g, s: aten.avg_pool3d_backward(
    g, stand_in(g, s.self_shape, s.self_stride), s.kernel_size, s.stride, s.padding, s.ceil_mode,
    s.count_include_pad, s.divisor_override))
vjp(aten.avg_pool2d_backward.default, "self.shape", self=nothing,
    grad_output=lambda g, s: aten.avg_pool2d(
        g, s.kernel_size, s.stride, s.padding, s.ceil_mode, s.count_include_pad,
        s.divisor_override))
vjp(aten.avg_pool3d_backward.default, "self.shape", self=nothing,
    grad_output=lambda g, s: aten.avg_pool3d(
        g, s.kernel_size, s.stride, s.padding, s.ceil_mode, s.count_include_pad,
        s.divisor_override))

vjp(aten._adaptive_avg_pool2d.default, "self.shape self.stride",
    self=lambda g, s: aten._adaptive_avg_pool2d_backward(
        g, stand_in(g, s.self_shape, s.self_stride)))
vjp(aten._adaptive_avg_pool3d.default, "self.shape self.stride",
    self=lambda g, s: aten._adaptive_avg_pool3d_backward(
        g, stand_in(g, s.self_shape, s.self_stride)))
vjp(aten._adaptive_avg_pool2d_backward.default, "grad_output.shape self.shape", self=nothing,
    grad_output=lambda g, s: aten._adaptive_avg_pool2d(g, s.grad_output_shape[-2:]))
vjp(aten._adaptive_avg_pool3d_backward.default, "grad_output.shape self.shape", self=nothing,
    grad_output=lambda g, s: aten._adaptive_avg_pool3d(g, s.grad_output_shape[-3:]))

MAX: Any = {"outputs": "out indices", "differentiable": "out"}

vjp(aten.max_pool2d.default, "self.shape self.stride indices", forward=max_pool2d_forward,
    self=lambda g, s: aten.max_pool2d_with_indices_backward(
        g, stand_in(g, s.self_shape, s.self_stride), s.kernel_size, s.stride, s.padding,
        s.dilation, s.ceil_mode, s.indices))
vjp(aten.max_pool2d_with_indices.default, "self.shape self.stride indices", **MAX,
    self=lambda g, s: aten.max_pool2d_with_indices_backward(
        g, stand_in(g, s.self_shape, s.self_stride), s.kernel_size, s.stride, s.padding,
        s.dilation, s.ceil_mode, s.indices))
vjp(aten.max_pool3d_with_indices.default, "self.shape self.stride indices", **MAX,
    self=lambda g, s: aten.max_pool3d_with_indices_backward(
        g, stand_in(g, s.self_shape, s.self_stride), s.kernel_size, s.stride, s.padding,
        s.dilation, s.ceil_mode, s.indices))
vjp(aten.adaptive_max_pool2d.default, "self.shape self.stride indices", **MAX,
    self=lambda g, s: aten.adaptive_max_pool2d_backward(
        g, stand_in(g, s.self_shape, s.self_stride), s.indices))
vjp(aten.adaptive_max_pool3d.default, "self.shape self.stride indices", **MAX,
    self=lambda g, s: aten.adaptive_max_pool3d_backward(
        g, stand_in(g, s.self_shape, s.self_stride), s.indices))
vjp(aten.fractional_max_pool2d.default, "self.shape self.stride indices", **MAX,
    self=lambda g, s: aten.fractional_max_pool2d_backward(
        g, stand_in(g, s.self_shape, s.self_stride), s.kernel_size, s.output_size, s.indices))
vjp(aten.fractional_max_pool3d.default, "self.shape self.stride indices", **MAX,
    self=lambda g, s: aten.fractional_max_pool3d_backward(
        g, stand_in(g, s.self_shape, s.self_stride), s.kernel_size, s.output_size, s.indices))

for op in (
    aten.max_pool2d_with_indices_backward, aten.adaptive_max_pool2d_backward,
    aten.fractional_max_pool2d_backward,
):
    vjp(op.default, "indices self.shape", self=nothing,
        grad_output=lambda g, s: pick(g, s.indices, 2))
for op in (
    aten.max_pool3d_with_indices_backward, aten.adaptive_max_pool3d_backward,
    aten.fractional_max_pool3d_backward,
):
    vjp(op.default, "indices self.shape", self=nothing,
        grad_output=lambda g, s: pick(g, s.indices, 3))

vjp(aten.max_unpool2d.default, "indices", self=lambda g, s: pick(g, s.indices, 2))
vjp(aten.max_unpool3d.default, "indices", self=lambda g, s: pick(g, s.indices, 3))
# fmt: on
