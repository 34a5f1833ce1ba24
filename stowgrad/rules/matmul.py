"""Matrix products of every rank.

`linear` and `matmul` are composites, taken whole: PyTorch's parts for them make views, and copies
of broadcast operands, which would be recorded and saved; whole, only the operands are. A gradient
comes out in the memory order of what it is a gradient of (`x @ w.t()` gives `w` a contiguous one).

einsum, tensordot, inner, kron, multi_dot and bilinear stay composites: their parts are rules here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import conj
from .table import vjp

aten = torch.ops.aten


# -- one formula for each operand of a product, whatever the ranks. `order` is the number of dims of
# -- the operand whose gradient it is, or -2 if that is a column-major matrix


def times(x: Tensor, factor: Any) -> Tensor:
    """x times the conjugate of a Python number, which is mostly 1."""
    return x if factor == 1 else x * conj(factor)


def left(g: Tensor, other: Tensor, order: int = 2) -> Tensor:
    """G B^H: the gradient of A in A @ B, two-dimensional."""
    return torch.mm(conj(other), g.t()).t() if order == -2 else torch.mm(g, other.mH)


def right(g: Tensor, other: Tensor, order: int = 2) -> Tensor:
    """A^H G: the gradient of B in A @ B, two-dimensional."""
    return torch.mm(g.t(), conj(other)).t() if order == -2 else torch.mm(other.mH, g)


def rows(x: Tensor) -> Tensor:
    """x as a matrix: all dims but the last made one."""
    return x if x.dim() == 2 else x.flatten(0, -2)


def matmul_self(g: Tensor, other: Tensor, order: int) -> Tensor:
    """d(self) of self @ other, by rank. Broadcast batch dims are left for the machinery to sum.

    A matrix against a batch is one product over all of the batch, not a product each and a sum.
    """
    if abs(order) == 2:
        if other.dim() == 2:
            return left(g, other, order)
        if other.dim() > 2:
            return torch.mm(rows(g.mT).t(), conj(rows(other.mT)))
    if other.dim() == 1:
        return g * conj(other) if order == 1 else g.unsqueeze(-1) * conj(other)
    if order == 1:
        return torch.matmul(conj(other), g.unsqueeze(-1)).squeeze(-1)
    return torch.matmul(g, other.mH)


def matmul_other(g: Tensor, self: Tensor, order: int) -> Tensor:
    """d(other) of self @ other; see `matmul_self`."""
    if self.dim() == 1:
        return g * conj(self) if order == 1 else conj(self).unsqueeze(-1) * g.unsqueeze(-2)
    if abs(order) == 2:
        return right(rows(g), rows(self), order)
    if order == 1:
        return torch.mv(rows(self).mH, g.reshape(-1))
    return torch.matmul(self.mH, g)


def linear_input(g: Tensor, weight: Tensor) -> Tensor:
    """G W: d(input) of input @ weight.T; a weight may be one row."""
    return torch.matmul(g, weight) if weight.dim() == 2 else g.unsqueeze(-1) * weight


def linear_weight(g: Tensor, x: Tensor, order: int) -> Tensor:
    """G^T X over all rows: d(weight) of x @ weight.T."""
    if order == 1:
        return matmul_other(g, x, order)
    if x.dim() == 1:
        return g.unsqueeze(-1) * conj(x)
    g, x = rows(g), rows(x)
    return torch.mm(x.mH, g).t() if order == -2 else torch.mm(g.t(), conj(x))


# op                    saves                           gradient of each tensor argument, given g
# fmt: off
vjp(aten.linear.default, "input weight weight.order bias.order",
    input=lambda g, s: linear_input(g, conj(s.weight)),
    weight=lambda g, s: linear_weight(g, s.input, s.weight_order),
    bias=lambda g, s: row_sum(g) if s.bias_order == 1 else g)
vjp(aten.matmul.default, "self other self.order other.order",
    self=lambda g, s: matmul_self(g, s.other, s.self_order),
    other=lambda g, s: matmul_other(g, s.self, s.other_order))

vjp(aten.mm.default, "self mat2 self.order mat2.order",
    self=lambda g, s: left(g, s.mat2, s.self_order),
    mat2=lambda g, s: right(g, s.self, s.mat2_order))
vjp(aten.bmm.default, "self mat2",
    self=lambda g, s: torch.bmm(g, s.mat2.mH),
    mat2=lambda g, s: torch.bmm(s.self.mH, g))
vjp(aten.mv, "self vec",
    self=lambda g, s: g.unsqueeze(1) * conj(s.vec),
    vec=lambda g, s: torch.mv(s.self.mH, g))
vjp(aten.dot, "self tensor",
    self=lambda g, s: g * conj(s.tensor),
    tensor=lambda g, s: g * conj(s.self))
vjp(aten.vdot, "self other",  # conjugates self, so its gradient is conjugated twice over
    self=lambda g, s: conj(g) * s.other,
    other=lambda g, s: g * s.self)

vjp(aten.addmm.default, "mat1 mat2 mat1.order mat2.order self.order",
    self=lambda g, s: times(row_sum(g) if s.self_order == 1 else g, s.beta),
    mat1=lambda g, s: times(left(g, s.mat2, s.mat1_order), s.alpha),
    mat2=lambda g, s: times(right(g, s.mat1, s.mat2_order), s.alpha))
vjp(aten.addmv, "mat vec",
    self=lambda g, s: times(g, s.beta),
    mat=lambda g, s: times(g.unsqueeze(1) * conj(s.vec), s.alpha),
    vec=lambda g, s: times(torch.mv(s.mat.mH, g), s.alpha))
vjp(aten.addr, "vec1 vec2",
    self=lambda g, s: times(g, s.beta),
    vec1=lambda g, s: times(torch.mv(g, conj(s.vec2)), s.alpha),
    vec2=lambda g, s: times(torch.mv(g.t(), conj(s.vec1)), s.alpha))
vjp(aten.baddbmm.default, "batch1 batch2",
    self=lambda g, s: times(g, s.beta),
    batch1=lambda g, s: times(torch.bmm(g, s.batch2.mH), s.alpha),
    batch2=lambda g, s: times(torch.bmm(s.batch1.mH, g), s.alpha))
vjp(aten.addbmm, "batch1 batch2",
    self=lambda g, s: times(g, s.beta),
    batch1=lambda g, s: times(torch.matmul(g, s.batch2.mH), s.alpha),
    batch2=lambda g, s: times(torch.matmul(s.batch1.mH, g), s.alpha))
vjp(aten._grouped_mm.default, "self mat2 offs", constant="offs",  # products of groups of rows
    self=lambda g, s: aten._grouped_mm(g, s.mat2.mT, s.offs),
    mat2=lambda g, s: aten._grouped_mm(s.self.mT, g, s.offs))
# fmt: on


def row_sum(g: Tensor) -> Tensor:
    """G summed over all dims but the last: the machinery's own sum takes thrice as long to call."""
    return g.sum(0) if g.dim() == 2 else g if g.dim() == 1 else g.sum(list(range(g.dim() - 1)))


# -- contractions of three tensors (bilinear)

vjp(
    aten._trilinear,
    "i1 i2 i3",
    i1=lambda g, s: aten._trilinear(
        g, conj(s.i2), conj(s.i3), s.sumdim, s.expand2, s.expand3, s.expand1
    ),
    i2=lambda g, s: aten._trilinear(
        conj(s.i1), g, conj(s.i3), s.expand1, s.sumdim, s.expand3, s.expand2
    ),
    i3=lambda g, s: aten._trilinear(
        conj(s.i1), conj(s.i2), g, s.expand1, s.expand2, s.sumdim, s.expand3
    ),
)


@vjp(aten._addmm_activation, saves="self mat1 mat2 out self.device", wrt="self mat1 mat2")
def addmm_activation(g: Tensor, s: Any, needs: list[bool]) -> list[Tensor | None]:
    """relu(beta self + alpha mat1 @ mat2), or gelu of it (the tanh form on CUDA).

    The fused kernel keeps no value from before its gelu, which is computed again.
    """
    if s.use_gelu:
        inner = torch.addmm(s.self, s.mat1, s.mat2, beta=s.beta, alpha=s.alpha)
        form = "tanh" if s.self_device.type == "cuda" else "none"
        g = aten.gelu_backward(g, inner, approximate=form)
    else:
        g = aten.threshold_backward(g, s.out, 0)
    return [
        times(g, s.beta) if needs[0] else None,
        times(left(g, s.mat2), s.alpha) if needs[1] else None,
        times(right(g, s.mat1), s.alpha) if needs[2] else None,
    ]
