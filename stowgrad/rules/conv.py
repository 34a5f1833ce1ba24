"""Convolutions, fold and unfold.

Every kind of convolution is one call of `aten.convolution_backward`, whose own rule is the formula
below; so all of them can be differentiated any number of times. The gradient of the input needs
only the weight and that of the weight only the input: with frozen weights no input is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import stand_in
from .table import vjp

aten = torch.ops.aten


@vjp(
    aten.convolution.default,
    "input:weight weight:input input.shape input.stride weight.shape weight.stride bias.shape",
    wrt="input weight bias",
)
@vjp(
    aten._convolution.default,
    "input:weight weight:input input.shape input.stride weight.shape weight.stride bias.shape",
    wrt="input weight bias",
)
def convolution(g: Tensor, s: Any, needs: list[bool]) -> Any:
    """Of y = x * w + b, for given y': x' and w' by the kernel, b' = the sum of y' per channel."""
    x = s.input if needs[1] else stand_in(g, s.input_shape, s.input_stride)
    w = s.weight if needs[0] else stand_in(g, s.weight_shape, s.weight_stride)
    return aten.convolution_backward(
        g, x, w, s.bias_shape, s.stride, s.padding, s.dilation, s.transposed, s.output_padding,
        s.groups, needs,
    )  # fmt: skip


@vjp(
    aten.convolution_backward.default,
    "grad_output:input,weight input:grad_output weight:grad_output "
    "grad_output.shape input.shape input.stride weight.shape weight.stride",
    wrt="grad_output input weight",
)
def convolution_backward(g: Any, s: Any, needs: list[bool]) -> Any:
    """The kernel gives x' = C(y', w), w' = D(y', x), b' = sum y', all bilinear in their arguments.

    By adjointness, for cotangents (u, v, r) of (x', w', b'):
    y'' = u * w + x * v + r,  x'' = C(y', v),  w'' = D(y', u).
    """
    u, v, r = g

    def convolve(a: Tensor, b: Tensor, bias: Any) -> Tensor:
        return torch.convolution(
            a, b, bias, s.stride, s.padding, s.dilation, s.transposed, s.output_padding, s.groups
        )

    def backward(a: Tensor, b: Tensor, mask: list[bool]) -> Any:
        return aten.convolution_backward(
            s.grad_output, a, b, None, s.stride, s.padding, s.dilation, s.transposed,
            s.output_padding, s.groups, mask,
        )  # fmt: skip

    d_grad = d_input = d_weight = None
    if needs[0]:
        if u is not None:
            d_grad = convolve(u, s.weight, r)
        if v is not None:
            more = convolve(s.input, v, r if u is None else None)
            d_grad = more if d_grad is None else d_grad + more
        if d_grad is None and r is not None:
            shape = s.grad_output_shape
            d_grad = r.view(-1, *[1] * (len(shape) - 2)).expand(shape)
    if needs[1] and v is not None:
        x = stand_in(v, s.input_shape, s.input_stride)
        d_input = backward(x, v, [True, False, False])[0]
    if needs[2] and u is not None:
        w = stand_in(u, s.weight_shape, s.weight_stride)
        d_weight = backward(u, w, [False, True, False])[1]
    return d_grad, d_input, d_weight


# -- kernels below the ones above, which are called directly only by old code

_SAVES = "self:weight weight:self self.shape self.stride weight.shape weight.stride bias.shape"


def _direct(
    g: Tensor, s: Any, needs: list[bool], dilation: Any, transposed: bool, groups: int
) -> Any:
    """As `convolution`, for an op that calls its input `self`."""
    x = s.self if needs[1] else stand_in(g, s.self_shape, s.self_stride)
    w = s.weight if needs[0] else stand_in(g, s.weight_shape, s.weight_stride)
    output_padding = s.output_padding if transposed else [0] * len(s.padding)
    return aten.convolution_backward(
        g, x, w, s.bias_shape, s.stride, s.padding, dilation, transposed, output_padding, groups,
        needs,
    )  # fmt: skip


for op in (aten._slow_conv2d_forward.default, aten.slow_conv3d_forward.default):

    @vjp(op, _SAVES, wrt="self weight bias")
    def _plain(g: Tensor, s: Any, needs: list[bool]) -> Any:
        return _direct(g, s, needs, [1] * len(s.padding), False, 1)


for op in (aten.slow_conv_dilated2d.default, aten.slow_conv_dilated3d.default):

    @vjp(op, _SAVES, wrt="self weight bias")
    def _dilated(g: Tensor, s: Any, needs: list[bool]) -> Any:
        return _direct(g, s, needs, s.dilation, False, 1)


for op in (aten.slow_conv_transpose2d.default, aten.slow_conv_transpose3d.default):

    @vjp(op, _SAVES, wrt="self weight bias")
    def _transposed(g: Tensor, s: Any, needs: list[bool]) -> Any:
        return _direct(g, s, needs, s.dilation, True, 1)


for op in (aten._conv_depthwise2d.default, aten.conv_depthwise3d.default):

    @vjp(op, _SAVES, wrt="self weight bias")
    def _depthwise(g: Tensor, s: Any, needs: list[bool]) -> Any:
        return _direct(g, s, needs, s.dilation, False, s.self_shape[1])


@vjp(aten.mkldnn_convolution.default, _SAVES, wrt="self weight bias")
def _mkldnn(g: Tensor, s: Any, needs: list[bool]) -> Any:
    return _direct(g, s, needs, s.dilation, False, s.groups)


@vjp(aten.conv_tbc.default, "self:weight weight:self self.shape weight.shape bias.shape",
     wrt="self weight bias")  # fmt: skip
def conv_tbc(g: Tensor, s: Any, needs: list[bool]) -> Any:
    """A conv1d whose input is (time, batch, channel) and weight (width, in, out)."""
    shape, weight_shape = s.self_shape, s.weight_shape
    x = s.self if needs[1] else stand_in(g, shape, (0, 0, 0))
    w = s.weight if needs[0] else stand_in(g, weight_shape, (0, 0, 0))
    dx, dw, db = aten.convolution_backward(
        g.permute(1, 2, 0), x.permute(1, 2, 0), w.permute(2, 1, 0), s.bias_shape, [1], [s.pad], [1],
        False, [0], 1, needs,
    )  # fmt: skip
    return (
        dx.permute(2, 0, 1) if needs[0] else None,
        dw.permute(2, 1, 0) if needs[1] else None,
        db if needs[2] else None,
    )


# op                        saves           gradient of each tensor argument, given g
# fmt: off
vjp(aten.im2col.default,    "self.shape",   self=lambda g, s: aten.col2im(
    g, s.self_shape[-2:], s.kernel_size, s.dilation, s.padding, s.stride))
vjp(aten.col2im.default,                    self=lambda g, s: aten.im2col(
    g, s.kernel_size, s.dilation, s.padding, s.stride))
# fmt: on
