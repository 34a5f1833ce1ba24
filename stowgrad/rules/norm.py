"""Normalisation: batch, layer, group, RMS and weight norm.

First derivatives come from the kernels. The kernels' own rules are one formula, `normalized`, for
all of them: they differ only in the dims they average over.

Batch, layer, group and RMS norm are composites taken whole. Of batch norm's statistics only
those are saved that its backward reads: the batch's in training, the running ones in evaluation;
and in evaluation with a frozen weight its input is not saved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .common import conj
from .table import vjp

aten = torch.ops.aten

# -- the second derivative of every norm


def statistics(x: Tensor, mean: Tensor, rstd: Tensor, dims: Any) -> tuple[Tensor, Tensor]:
    """`mean` and `rstd` of x, as functions of x if a further derivative may be asked for.

    epsilon is what is missing from the variance to explain rstd.
    """
    if not torch.is_grad_enabled():
        return mean, rstd
    x = x.to(rstd.dtype)
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square().mean(dims, keepdim=True)
    return mean, (var + (rstd.pow(-2) - var).detach()).rsqrt()


def normalized(
    cotangents: Any, grad: Tensor, x: Tensor, weight: Any, mean: Any, rstd: Tensor, dims: Any
) -> tuple[Any, Any, Any]:
    """The gradients of (grad, x, weight) from the cotangents (u, v, r) of a norm's backward.

    With z = (x - mean) rstd, h = grad weight, averages over `dims`, and the projection
    P(a) = a - <a> - z <a z>, that backward is

        x' = rstd P(h),   weight' = grad z,   bias' = grad     (the last two summed by the caller)

    P is its own adjoint; z depends on x by rstd P, and rstd by -rstd^2 z / count. So, writing
    t = rstd P(u):

        grad:   t weight + v z + r
        weight: t grad
        x:      -rstd^2 (z <u P(h)> + P(u <h z> + h <u z>)) + rstd P(v grad)

    Without `mean` (RMS norm) the same holds with P(a) = a - z <a z>. u, v and r may be None;
    v and r, like weight, must broadcast against x.
    """
    u, v, r = cotangents

    def average(a: Tensor) -> Tensor:
        return a.mean(dims, keepdim=True)

    z = x * rstd if mean is None else (x - mean) * rstd

    def project(a: Tensor) -> Tensor:
        a_z = average(a * z)
        return a - z * a_z if mean is None else a - average(a) - z * a_z

    d_grad = d_x = d_weight = None
    if u is not None:
        h = grad if weight is None else grad * weight
        t = rstd * project(u)
        d_grad = t if weight is None else t * weight
        d_weight = t * grad
        inner = project(u * average(h * z) + h * average(u * z))
        d_x = -rstd.square() * (z * average(u * project(h)) + inner)
    if v is not None:
        d_grad = v * z if d_grad is None else d_grad + v * z
        more = rstd * project(v * grad)
        d_x = more if d_x is None else d_x + more
    if r is not None:
        d_grad = r.expand(grad.shape) if d_grad is None else d_grad + r
    return d_grad, d_x, d_weight


# -- batch norm


def channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dims that a batch norm of x averages over, and the shape in which a vector of one value
    a channel broadcasts against x."""
    dims = [d for d in range(x.dim()) if d != 1]
    return dims, [-1 if d == 1 else 1 for d in range(x.dim())]


def batch_norm_forward(
    input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
):  # fmt: skip
    out, mean, rstd, reserve, kind = aten._batch_norm_impl_index(
        input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
    )
    scales_only = not training and not (weight is not None and weight.requires_grad)
    return out, {
        "x": None if scales_only else input,
        "mean": mean if training else running_mean,
        "rstd": rstd if training else running_var,
        "reserve": reserve if kind else None,  # what cudnn keeps
        "kind": kind,
    }


@vjp(aten.batch_norm, "weight:input x mean rstd reserve kind input.stride weight.shape bias.shape",
     forward=batch_norm_forward, wrt="input weight bias",
     constant="running_mean running_var")  # fmt: skip
def batch_norm(g: Tensor, s: Any, needs: list[bool]) -> Any:
    """By whichever kernel the forward chose; in evaluation, `mean` and `rstd` (there: the
    variance) are the running ones, constants, and x' = g weight rstd."""
    if g.numel() == 0:  # of any shape; the kernels crash
        d_weight = g.new_zeros(s.weight_shape) if needs[1] else None
        return g, d_weight, g.new_zeros(s.bias_shape) if needs[2] else None
    x = s.x
    weight = s.weight if needs[0] else None
    if x is None:
        dims, shape = channels(g)
        scale = (s.rstd + s.eps).rsqrt()
        scale = (scale if weight is None else scale * weight).to(g.dtype).view(shape)
        if g.dim() in (4, 5) and s.input_stride[1] == 1:  # the format that the kernel would give
            g = g.contiguous(
                memory_format=torch.channels_last if g.dim() == 4 else torch.channels_last_3d
            )
        return g * scale if needs[0] else None, None, g.sum(dims) if needs[2] else None
    batch = s.mean, s.rstd  # in evaluation nothing reads these, but vmap wants them to be there
    running = (None, None) if s.training else batch
    if s.kind == 0:
        return aten.native_batch_norm_backward(
            g, x, weight, *running, *batch, s.training, s.eps, needs
        )
    return aten._batch_norm_impl_index_backward(
        s.kind, x, g, weight, *running, *batch, s.training, s.eps, needs, s.reserve
    )


def _keeping(op: Any, training: bool | None) -> Any:
    """A forward for the kernel `op` that keeps the statistics its backward reads."""
    names = [a.name for a in op._schema.arguments]

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        results = op(*args, **kwargs)
        by_batch = given["training"] if training is None else training
        return results, {
            "by_batch": by_batch,
            "mean": results[1] if by_batch else given["running_mean"],
            "rstd": results[2] if by_batch else given["running_var"],
            "reserve": results[3] if len(results) > 3 else None,
        }

    return forward


for op, training in (
    (aten.native_batch_norm.default, None),
    (aten._native_batch_norm_legit.default, None),
    (aten._native_batch_norm_legit.no_stats, None),
    (aten._native_batch_norm_legit_no_training.default, False),
    (aten._batch_norm_with_update.default, True),
    (aten._batch_norm_no_update.default, False),
):

    @vjp(op, "input weight:input by_batch mean rstd reserve", wrt="input weight bias",
         forward=_keeping(op, training), differentiable="out0",
         constant="running_mean running_var")  # fmt: skip
    def native_batch_norm(g: Tensor, s: Any, needs: list[bool]) -> Any:
        by_batch, batch = s.by_batch, (s.mean, s.rstd)
        running = (None, None) if by_batch else batch
        weight = s.weight if needs[0] else None
        if s.reserve is not None and not g.is_cpu:
            return aten.batch_norm_backward(
                g, s.input, weight, *running, *batch, by_batch, s.eps, needs, s.reserve
            )
        return aten.native_batch_norm_backward(
            g, s.input, weight, *running, *batch, by_batch, s.eps, needs
        )


def _batch_norm_second(
    g: Any, grad: Tensor, x: Tensor, weight: Any, mean: Any, rstd: Any, by_batch: bool
) -> Any:
    dims, shape = channels(x)
    u, v, r = (g[0], *(None if a is None else a.view(shape) for a in g[1:]))
    w = None if weight is None else weight.view(shape)
    mean, rstd = mean.view(shape), rstd.view(shape)
    if by_batch:
        mean, rstd = statistics(x, mean, rstd, dims)
        d_grad, d_x, d_weight = normalized((u, v, r), grad, x, w, mean, rstd, dims)
    else:
        terms = []
        d_x = d_weight = None
        if u is not None:
            terms.append(u * rstd if w is None else u * (rstd * w))
            d_weight = u * grad * rstd
        if v is not None:
            terms.append(v * (x - mean) * rstd)
            d_x = v * grad * rstd
        if r is not None:
            terms.append(r.expand(grad.shape))
        d_grad = sum(terms[1:], terms[0]) if terms else None
    return d_grad, d_x, None if d_weight is None or weight is None else d_weight.sum(dims)


@vjp(aten.native_batch_norm_backward,
     "grad_out input weight running_mean running_var save_mean save_invstd",
     wrt="grad_out input weight",
     constant="running_mean running_var save_mean save_invstd")  # fmt: skip
def native_batch_norm_backward(g: Any, s: Any, needs: list[bool]) -> Any:
    mean, rstd = s.save_mean, s.save_invstd
    if not s.train:
        mean, rstd = s.running_mean, (s.running_var + s.eps).rsqrt()
    return _batch_norm_second(g, s.grad_out, s.input, s.weight, mean, rstd, s.train)


@vjp(aten.batch_norm_backward,
     "grad_out input weight running_mean running_var save_mean save_var",
     wrt="grad_out input weight",
     constant="running_mean running_var save_mean save_var reserve")  # fmt: skip
def batch_norm_backward(g: Any, s: Any, needs: list[bool]) -> Any:
    mean, rstd = s.save_mean, s.save_var  # which holds the inverse deviation
    if not s.update:
        mean, rstd = s.running_mean, (s.running_var + s.eps).rsqrt()
    return _batch_norm_second(g, s.grad_out, s.input, s.weight, mean, rstd, s.update)


@vjp(aten.cudnn_batch_norm_backward, "grad_output input weight save_mean save_var",
     wrt="input grad_output weight",
     constant="running_mean running_var save_mean save_var reserveSpace")  # fmt: skip
def cudnn_batch_norm_backward(g: Any, s: Any, needs: list[bool]) -> Any:
    d_grad, d_x, d_weight = _batch_norm_second(
        g, s.grad_output, s.input, s.weight, s.save_mean, s.save_var, True
    )
    return d_x, d_grad, d_weight


# -- layer norm


def layer_norm_forward(
    input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True
):
    out, mean, rstd = aten.native_layer_norm(input, normalized_shape, weight, bias, eps)
    return out, {"mean": mean, "rstd": rstd}


@vjp(aten.layer_norm, "input weight bias mean rstd", forward=layer_norm_forward,
     wrt="input weight bias")  # fmt: skip
@vjp(aten.native_layer_norm, "input weight bias mean rstd", outputs="out mean rstd",
     differentiable="out", wrt="input weight bias")  # fmt: skip
def layer_norm(g: Tensor, s: Any, needs: list[bool]) -> Any:
    """Source: Ba, Kiros, Hinton 2016 (arXiv 1607.06450), equations 3 and 4."""
    return aten.native_layer_norm_backward(
        g, s.input, s.normalized_shape, s.mean, s.rstd, s.weight, s.bias, needs
    )


@vjp(aten.native_layer_norm_backward, "grad_out input weight mean rstd",
     wrt="grad_out input weight", constant="mean rstd bias")  # fmt: skip
def native_layer_norm_backward(g: Any, s: Any, needs: list[bool]) -> Any:
    dims = list(range(-len(s.normalized_shape), 0))
    x = s.input
    mean, rstd = statistics(x, s.mean, s.rstd, dims)
    return normalized(g, s.grad_out, x, s.weight, mean, rstd, dims)


# -- group norm


def in_format(x: Tensor, like: Tensor) -> Tensor:
    """x as the group norm kernels want it: channels last where `like` is (on a CPU only)."""
    if like.is_cpu and like.is_contiguous(memory_format=torch.channels_last) and like.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous()


def _whole(parameter: Tensor | None) -> Tensor | None:
    """The kernels of group norm read `parameter` as if its elements lay one after the other."""
    return None if parameter is None else parameter.contiguous()


def group_norm_forward(input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    if input.dim() < 2:
        return aten.group_norm(input, num_groups, weight, bias, eps)  # which raises
    batch, channels = input.shape[:2]
    out, mean, rstd = aten.native_group_norm(
        in_format(input, input), _whole(weight), _whole(bias), batch, channels,
        math.prod(input.shape[2:]), num_groups, eps,
    )  # fmt: skip
    return out, {"mean": mean, "rstd": rstd}


@vjp(aten.group_norm, "input weight mean rstd", forward=group_norm_forward,
     wrt="input weight bias")  # fmt: skip
def group_norm(g: Tensor, s: Any, needs: list[bool]) -> Any:
    x = s.input
    batch, channels = x.shape[:2]
    return aten.native_group_norm_backward(
        in_format(g, x), in_format(x, x), s.mean, s.rstd, _whole(s.weight), batch, channels,
        math.prod(x.shape[2:]), s.num_groups, needs,
    )  # fmt: skip


@vjp(aten.native_group_norm, "input weight mean rstd", outputs="out mean rstd",
     wrt="input weight bias")  # fmt: skip
def native_group_norm(g: Any, s: Any, needs: list[bool]) -> Any:
    """The mean and rstd that it returns have gradients too; the kernel knows only that of out."""
    grad, d_mean, d_rstd = g
    x = s.input
    d_x = d_weight = d_bias = None
    if grad is not None:
        d_x, d_weight, d_bias = aten.native_group_norm_backward(
            in_format(grad, x), in_format(x, x), s.mean, s.rstd, _whole(s.weight), s.N, s.C,
            s.HxW, s.group, needs,
        )  # fmt: skip
    if needs[0] and (d_mean is not None or d_rstd is not None):
        shape = (s.N, s.group, 1)
        count = max(s.C // s.group * s.HxW, 1)
        x = x.reshape(s.N, s.group, s.C // s.group * s.HxW)
        mean, rstd = statistics(x, s.mean.view(shape), s.rstd.view(shape), 2)
        more: Any = 0 if d_mean is None else d_mean.view(shape) / count
        if d_rstd is not None:
            more = more - d_rstd.view(shape) * rstd.pow(3) * (x - mean) / count
        more = more.expand(x.shape).reshape(s.input.shape)
        d_x = more if d_x is None else d_x + more
    return d_x, d_weight, d_bias


@vjp(aten.native_group_norm_backward, "grad_out input mean rstd weight",
     wrt="grad_out input weight", constant="mean rstd")  # fmt: skip
def native_group_norm_backward(g: Any, s: Any, needs: list[bool]) -> Any:
    shape = (s.N, s.group, s.C // s.group, s.HxW)

    def per_channel(a: Any) -> Any:
        return None if a is None else a.view(1, s.group, -1, 1)

    x, dims = s.input.reshape(shape), [2, 3]
    stats = (s.N, s.group, 1, 1)
    mean, rstd = statistics(x, s.mean.view(stats), s.rstd.view(stats), dims)
    u = None if g[0] is None else g[0].reshape(shape)
    d_grad, d_x, d_weight = normalized(
        (u, per_channel(g[1]), per_channel(g[2])), s.grad_out.reshape(shape), x,
        per_channel(s.weight), mean, rstd, dims,
    )  # fmt: skip
    whole = s.input.shape
    return (
        None if d_grad is None else d_grad.reshape(whole),
        None if d_x is None else d_x.reshape(whole),
        None if d_weight is None else d_weight.sum((0, 3)).view(-1),
    )


# -- RMS norm


def rms_norm_forward(input, normalized_shape, weight=None, eps=None):
    """PyTorch's fused kernel where it has one, and its parts elsewhere; both give rstd."""
    shape = tuple(normalized_shape)
    if input.shape[-len(shape) :] != shape or (weight is not None and weight.shape != shape):
        return aten.rms_norm(input, normalized_shape, weight, eps)  # which raises
    fused = not input.is_complex() and (weight is None or weight.dtype == input.dtype)
    if fused or input.is_cpu:
        out, rstd = aten._fused_rms_norm(input, normalized_shape, weight, eps)
    else:
        out = aten.rms_norm(input, normalized_shape, weight, eps)
        wide = input if input.is_complex() else input.float()
        dims = list(range(-len(normalized_shape), 0))
        eps = torch.finfo(wide.dtype).eps if eps is None else eps
        rstd = (wide.square().mean(dims, keepdim=True) + eps).rsqrt()
    return out, {"rstd": rstd}


def root_mean_square(x: Tensor, rstd: Tensor, dims: Any) -> Tensor:
    """`rstd` = (<x^2> + epsilon)^-1/2, as a function of x if a derivative may be asked for."""
    if not torch.is_grad_enabled():
        return rstd
    square = x.to(rstd.dtype).square().mean(dims, keepdim=True)
    return (square + (rstd.pow(-2) - square).detach()).rsqrt()


def rms_norm_backward(
    g: Tensor, x: Tensor, weight: Any, rstd: Tensor, shape: Any, needs: Any
) -> Any:
    """With z = x rstd and h = g weight: x' = rstd (h - z <h z>), weight' = g z; holomorphic in x.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """
    if g.is_cuda and not x.is_complex() and (weight is None or weight.dtype == x.dtype):
        return aten._fused_rms_norm_backward(g, x, shape, rstd, weight, needs)
    dims = list(range(-len(shape), 0))
    rstd = conj(root_mean_square(x, rstd, dims))
    z = conj(x) * rstd
    g = g.to(z.dtype)  # as `z`, in the precision that `rstd` was computed in
    d_x = None
    if needs[0]:
        h = g if weight is None else g * conj(weight)
        d_x = rstd * (h - z * (h * z).mean(dims, keepdim=True))
    return d_x, g * z if needs[1] else None


@vjp(aten.rms_norm, "input weight:input rstd", forward=rms_norm_forward, wrt="input weight")
def rms_norm(g: Tensor, s: Any, needs: list[bool]) -> Any:
    weight = s.weight if needs[0] else None
    return rms_norm_backward(g, s.input, weight, s.rstd, s.normalized_shape, needs)


@vjp(aten._fused_rms_norm, "input weight rstd", outputs="out rstd", wrt="input weight")
def fused_rms_norm(g: Any, s: Any, needs: list[bool]) -> Any:
    grad, d_rstd = g
    x, shape = s.input, s.normalized_shape
    d_x = d_weight = None
    if grad is not None:
        d_x, d_weight = rms_norm_backward(grad, x, s.weight, s.rstd, shape, needs)
    if needs[0] and d_rstd is not None:
        dims = list(range(-len(shape), 0))
        rstd = root_mean_square(x, s.rstd, dims)
        more = -d_rstd * conj(rstd.pow(3) * x) / math.prod(shape)
        d_x = more if d_x is None else d_x + more
    return d_x, d_weight


@vjp(aten._fused_rms_norm_backward, "grad_out input rstd weight",
     wrt="grad_out input weight", constant="rstd")  # fmt: skip
def fused_rms_norm_backward(g: Any, s: Any, needs: list[bool]) -> Any:
    dims = list(range(-len(s.normalized_shape), 0))
    x = s.input
    rstd = root_mean_square(x, s.rstd, dims)
    return normalized((*g, None), s.grad_out, x, s.weight, None, rstd, dims)


# -- weight norm


@vjp(aten._weight_norm_interface, "v g norms", outputs="out norms", differentiable="out", wrt="v g")
def weight_norm(grad: Tensor, s: Any, needs: list[bool]) -> Any:
    """w = v g / |v|, norms over all dims but one: with t = <grad, v> / |v|^2,
    v' = g / |v| (grad - t v), g' = t |v|."""
    if not torch.is_grad_enabled():
        return aten._weight_norm_interface_backward(grad.contiguous(), s.v, s.g, s.norms, s.dim)
    v = s.v
    dims = [d for d in range(v.dim()) if d != s.dim % v.dim()]
    square = v.square().sum(dims, keepdim=True)
    norm = square.sqrt()
    t = (grad * v).sum(dims, keepdim=True) / square
    return s.g / norm * (grad - t * v), t * norm
