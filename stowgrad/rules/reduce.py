"""Reductions: sums, means, extrema, variances, norms, products, and their cumulative forms.

`unreduce` puts the reduced dims of a gradient back as size 1, so that it broadcasts against the
input again. Ties of an extremum share its gradient equally.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .common import conj, reduced, reduced_size, unreduce
from .table import vjp

aten = torch.ops.aten

# -- sums and means

# op                        saves           gradient
vjp(aten.sum.default,       "self.shape",   self=lambda g, s: g.expand(s.self_shape))
vjp(aten.sum.dim_IntList,   "self.shape",
    self=lambda g, s: unreduce(g, s.self_shape, s.dim, s.keepdim).expand(s.self_shape))
vjp(aten.mean.default,      "self.shape",
    self=lambda g, s: (g / math.prod(s.self_shape)).expand(s.self_shape))
vjp(aten.mean.dim,          "self.shape",
    self=lambda g, s: (unreduce(g, s.self_shape, s.dim, s.keepdim)
                       / reduced_size(s.self_shape, s.dim)).expand(s.self_shape))
vjp(aten.nansum,            "self",
    self=lambda g, s: unreduce(g, s.self.shape, s.dim, s.keepdim) * ~s.self.isnan())
vjp(aten.trace,             "self.shape",
    self=lambda g, s: aten.diagonal_backward(
        g.expand(min(s.self_shape)), s.self_shape, 0, 0, 1))  # fmt: skip

# -- extrema over several dims (over one dim, with an index: sort.py)

for op in (aten.amax.default, aten.amin.default):
    vjp(op, "self out", self=lambda g, s: _share(g, s.self, s.out, s.dim, s.keepdim))
for op in (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default):
    vjp(op, "self out", self=lambda g, s: _share_among_equal(g, s.self, s.out))


@vjp(aten.aminmax, "self min max", wrt="self", outputs="min max")
def aminmax(g: Any, s: Any, needs: Any) -> Any:
    """The sum of what amin and amax give."""
    dim = [] if s.dim is None else [s.dim]
    parts = [
        _share(grad, s.self, out, dim, s.keepdim)
        for grad, out in zip(g, (s.min, s.max), strict=True)
        if grad is not None
    ]
    return sum(parts[1:], parts[0])


def _share(g: Tensor, x: Tensor, out: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """`g` at the elements that equal their result, in equal shares."""
    shape = x.shape
    equal = unreduce(out, shape, dim, keepdim) == x
    count = equal.sum(reduced(dim, len(shape)), keepdim=True) if shape else equal
    return unreduce(g, shape, dim, keepdim) / count * equal


def _share_among_equal(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """As `_share`, over all of `x`; a result that is nan shares among the nans."""
    equal = (x == out) | (x.isnan() & out.isnan())
    return torch.where(equal, g / equal.sum(), 0)


# -- variances and standard deviations

# op                        saves           gradient
vjp(aten.var.correction,    "self",
    self=lambda g, s: _var_backward(g, s.self, s.dim, s.correction, s.keepdim))
vjp(aten.std.correction,    "self out",
    self=lambda g, s: _var_backward(
        _std_backward(g, s.out), s.self, s.dim, s.correction, s.keepdim))  # fmt: skip


@vjp(aten.var_mean.correction, "self", wrt="self", outputs="var mean")
def var_mean(g: Any, s: Any, needs: Any) -> Any:
    return _moments_backward(g[0], g[1], s.self, s.dim, s.correction, s.keepdim)


@vjp(aten.std_mean.correction, "self std", wrt="self", outputs="std mean")
def std_mean(g: Any, s: Any, needs: Any) -> Any:
    to_var = None if g[0] is None else _std_backward(g[0], s.std)
    return _moments_backward(to_var, g[1], s.self, s.dim, s.correction, s.keepdim)


def _var_backward(g: Tensor, x: Tensor, dim: Any, correction: Any, keepdim: bool) -> Tensor:
    """2 (x - mean) / (n - correction). With no degree of freedom left, as the limit: infinite."""
    freedom = reduced_size(x.shape, dim) - (1 if correction is None else correction)
    if freedom <= 0 and len(reduced(dim, x.ndim)) == x.ndim:
        return g * torch.where(x == x.mean(), math.nan, math.inf)
    scale = 2 / freedom if freedom else math.inf
    centered = x - (x.mean(dim, keepdim=True) if dim else x.mean())
    return unreduce(g, x.shape, dim, keepdim) * scale * centered


def _std_backward(g: Tensor, std: Tensor) -> Tensor:
    """From the gradient of a standard deviation to that of the variance; zero where it is 0."""
    return (g / (std * 2)).masked_fill(std == 0, 0)


def _moments_backward(
    to_var: Any, to_mean: Any, x: Tensor, dim: Any, correction: Any, keepdim: bool
) -> Tensor | None:
    result: Tensor | None = None
    if to_var is not None:
        result = _var_backward(to_var, x, dim, correction, keepdim)
    if to_mean is not None:
        part = unreduce(to_mean, x.shape, dim, keepdim) / reduced_size(x.shape, dim)
        result = part.expand(x.shape) if result is None else result + part
    return result


# -- norms

vjp(aten.norm.Scalar, "self out", self=lambda g, s: _norm_backward(g, s.self, s.p, s.out))
vjp(aten.norm.ScalarOpt_dtype, "self out",
    self=lambda g, s: _norm_backward(g, s.self.to(g.dtype), s.p, s.out))
vjp(aten.norm.ScalarOpt_dim, "self out",
    self=lambda g, s: _norm_backward(g, s.self, s.p, s.out, s.dim, s.keepdim))
vjp(aten.norm.ScalarOpt_dim_dtype, "self out",
    self=lambda g, s: _norm_backward(g, s.self.to(g.dtype), s.p, s.out, s.dim, s.keepdim))
vjp(aten.linalg_vector_norm, "self out",
    self=lambda g, s: _norm_backward(g, s.self, s.ord, s.out, s.dim, s.keepdim))
vjp(aten.dist, "self other out",
    self=lambda g, s: _norm_backward(g, s.self - s.other, s.p, s.out),
    other=lambda g, s: _norm_backward(-g, s.self - s.other, s.p, s.out))  # fmt: skip


def _norm_backward(
    g: Tensor, x: Tensor, p: Any, norm: Tensor, dim: Any = None, keepdim: bool = False
) -> Tensor | None:
    """sgn(x) |x|^(p-1) norm^(1-p), zero where the norm is zero; None (all zero) for p = 0."""
    p = 2.0 if p is None else float(p)
    if p == 0:
        return None
    g, norm = unreduce(g, x.shape, dim, keepdim), unreduce(norm, x.shape, dim, keepdim)
    if p == 1:
        return x.sgn() * g
    if p == 2:
        if torch.is_grad_enabled():  # PyTorch's order, which gives nan where the norm is zero
            return g * (x / norm).masked_fill(norm == 0, 0)
        return x * (g / norm).masked_fill(norm == 0, 0)
    size = x.abs()
    if math.isinf(p):
        largest = (size == norm) | size.isnan()
        count = largest.sum(reduced(dim, x.ndim), keepdim=True) if x.ndim else largest
        return x.sgn() * (g / count * largest)
    if p < 1:
        return x.sgn() * size.pow(p - 1).masked_fill(x == 0, 0) * (g * norm.pow(1 - p))
    scale = (g / norm.pow(p - 1)).masked_fill(norm == 0, 0)
    if p < 2:
        return x.sgn() * size.pow(p - 1) * scale
    return x * size.pow(p - 2) * scale


@vjp(aten.renorm, "self", wrt="self")
def renorm(g: Tensor, s: Any, needs: Any) -> Tensor:
    """Slices with norm > maxnorm are scaled by maxnorm / (norm + 1e-7); the others stay."""
    x, limit = s.self, s.maxnorm
    dims = [d for d in range(x.ndim) if d != s.dim % x.ndim]
    norm = torch.linalg.vector_norm(x, s.p, dims, keepdim=True)
    inverse = (norm + 1e-7).reciprocal()
    along = (conj(x) * g).sum(dims, keepdim=True)
    along = along.real if along.is_complex() else along
    through_norm = _norm_backward(along, x, s.p, norm, dims, True)
    slope = g if through_norm is None else g - inverse * through_norm
    return torch.where(norm > limit, limit * inverse * slope, g)


vjp(aten.logsumexp, "self out",
    self=lambda g, s: unreduce(g, s.self.shape, s.dim, s.keepdim)
    * conj((s.self - unreduce(s.out, s.self.shape, s.dim, s.keepdim)).exp()))  # fmt: skip

# -- products

vjp(aten.prod.default,      "self out",
    self=lambda g, s: _prod_backward(g, s.self, s.out, None))
vjp(aten.prod.dim_int,      "self out",
    self=lambda g, s: _prod_backward(g, s.self, s.out, s.dim, s.keepdim))


def _prod_backward(
    g: Tensor, x: Tensor, out: Tensor, dim: int | None, keepdim: bool = False
) -> Tensor:
    """For each element the product of the others.

    To be differentiated again, that is the product of those before times that of those after.
    Else it is result / element: where one element alone is zero, it gets the product of the
    others, and they get zero; where more are zero, all get zero.
    """
    if not x.ndim:
        return g
    x = x.to(g.dtype)
    g = unreduce(g, x.shape, dim, keepdim)
    if torch.is_grad_enabled():
        flat = x.reshape(-1) if dim is None else x
        others = _exclusive_products(flat, dim or 0).reshape(x.shape)
        return g * conj(others)
    over: Any = {"dim": dim, "keepdim": True} if dim is not None else {}
    zero = x == 0
    rest = x.masked_fill(zero, 1)
    product = rest.prod(**over)
    zeros = zero.sum(**over)
    others = torch.where(zero, product * (zeros == 1), product * (zeros == 0) / rest)
    return g * conj(others)


def _exclusive_products(x: Tensor, dim: int) -> Tensor:
    """For each element the product of all others along `dim`."""
    size = x.shape[dim]
    one = torch.ones_like(x.narrow(dim, 0, min(size, 1)))
    before = torch.cat([one, x.narrow(dim, 0, max(size - 1, 0))], dim).cumprod(dim)
    after = torch.cat([one, x.flip(dim).narrow(dim, 0, max(size - 1, 0))], dim).cumprod(dim)
    return before * after.flip(dim)


# -- cumulative forms

vjp(aten.cumsum, self=lambda g, s: _from_the_end(g, s.dim))
for op in (aten.cummax.default, aten.cummin.default):
    vjp(op, "self.shape indices", outputs="values indices", differentiable="values",
        self=lambda g, s: g.new_zeros(s.self_shape).scatter_add(s.dim, s.indices, g))
vjp(aten.cumprod, "self out",
    self=lambda g, s: _cumprod_backward(g, s.self, s.out, s.dim))
vjp(aten.logcumsumexp, "self out",
    self=lambda g, s: _logcumsumexp_backward(g, s.self, s.out, s.dim))


def _from_the_end(x: Tensor, dim: int) -> Tensor:
    """The cumulative sum from the other end."""
    if x.ndim == 0 or x.shape[dim] <= 1:
        return x
    return x.flip(dim).cumsum(dim).flip(dim)


def _cumprod_backward(g: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """For x_i: the sum over j >= i of g_j times the product up to j without x_i.

    Before the first zero that is a sum of g_j out_j, divided by x_i; at the first zero, of g_j
    times the products with 1 in its place; after it, zero. To be differentiated again, without
    divisions: see `_scan_backward`.
    """
    if not x.ndim:
        return g
    x = x.to(g.dtype)
    if torch.is_grad_enabled():
        return _scan_backward(g, x, dim)
    zero = x == 0
    seen = zero.cumsum(dim)
    first = zero & (seen == 1)
    without = x.masked_fill(first, 1).cumprod(dim)
    before = _from_the_end(g * conj(out.to(g.dtype)), dim) / conj(x.masked_fill(zero, 1))
    at_first = _from_the_end((g * conj(without)).masked_fill(seen == 0, 0), dim)
    return torch.where(seen == 0, before, torch.where(first, at_first, 0))


def _scan_backward(g: Tensor, x: Tensor, dim: int) -> Tensor:
    """The gradient of a cumulative product computed by doubling, which only multiplies.

    Forward, step k: y[i] becomes y[i] y[i - 2^k] (Hillis and Steele 1986). n log n operations.
    """
    size = x.shape[dim]
    steps = []
    reach = 1
    while reach < size:
        steps.append((x, reach))
        kept, moved = x.narrow(dim, 0, reach), x.narrow(dim, 0, size - reach)
        x = torch.cat([kept, x.narrow(dim, reach, size - reach) * moved], dim)
        reach *= 2
    for y, reach in reversed(steps):
        rest = size - reach
        low, high = y.narrow(dim, 0, rest), y.narrow(dim, reach, rest)
        from_high = g.narrow(dim, reach, rest)
        own = torch.cat([g.narrow(dim, 0, reach), from_high * conj(low)], dim)
        none = torch.zeros_like(g.narrow(dim, 0, reach))
        g = own + torch.cat([from_high * conj(high), none], dim)
    return g


def _logcumsumexp_backward(g: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """The sum over j >= i of g_j exp(x_i - out_j), summed as logarithms, by the sign of g."""
    if not x.ndim:
        return g

    def part(log_g: Tensor) -> Tensor:
        return ((log_g - out).flip(dim).logcumsumexp(dim).flip(dim) + x).exp()

    if g.is_complex():
        return conj(part(conj(g).log()))
    size = g.abs().log()
    none = torch.finfo(g.dtype).min
    return part(torch.where(g > 0, size, none)) - part(torch.where(g < 0, size, none))
