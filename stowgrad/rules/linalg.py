"""Linear algebra: inverses, solves, determinants, Cholesky, the matrix exponential.

Factorisations whose factors are the result (SVD, eigenvectors, QR, LU) are in factor.py. The
formulas are those of Giles 2008 ("An extended collection of matrix derivative results"), of
Golub & Pereyra 1973 for the pseudoinverse, in complex form: G is the gradient of a result, ^H
the conjugate transpose, and <G, dX> = Re tr(G^H dX).

Solves and determinants keep the LU factors that their forward made. The factors have no gradient,
so a backward that is itself recorded works from the matrix instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import conj
from .table import vjp

aten = torch.ops.aten
Pair = list[Tensor | None]


# -- inverses

vjp(
    aten.linalg_inv_ex.default, "inverse", outputs="inverse info", differentiable="inverse",
    A=lambda g, s: -(s.inverse.mH @ g @ s.inverse.mH),
)  # fmt: skip
vjp(
    aten.linalg_pinv.atol_rtol_tensor, "self out", constant="atol rtol",
    self=lambda g, s: pinv_vjp(g, s.self, s.out),
)  # fmt: skip


def pinv_vjp(g: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """d(A) given G = d(X), where X is the pseudoinverse of A and A keeps its rank.

    dX = -X dA X + X X^H dA^H (I - A X) + (I - X A) dA^H X^H X, hence
    d(A) = -X^H G X^H + (I - A X) G^H X X^H + X^H X G^H (I - X A),
    multiplied in the order that keeps the products small.
    """
    xh, gh = x.mH, g.mH
    if a.shape[-2] <= a.shape[-1]:
        k = gh @ x
        left = (k - a @ (x @ k)) @ xh
        k = (xh @ x) @ gh
        right = k - (k @ x) @ a
        return left + right - (xh @ g) @ xh
    k = gh @ (x @ xh)
    left = k - a @ (x @ k)
    k = x @ gh
    right = xh @ (k - (k @ x) @ a)
    return left + right - xh @ (g @ xh)


# -- solves


def is_vector(shape: torch.Size, matrix: torch.Size) -> bool:
    """Whether a right-hand side of this shape is a vector (for each matrix), not a matrix."""
    return len(shape) == 1 or (len(shape) == len(matrix) - 1 and shape == matrix[:-1])


@vjp(
    aten._linalg_solve_ex.default,
    saves="A B.shape result:A LU pivots",
    outputs="result LU pivots info", differentiable="result", wrt="A B",
)  # fmt: skip
def solve(g: Tensor, s: Any, needs: list[bool]) -> Pair:
    """A X = B (or X A = B): d(B) solves A^H d(B) = G, and d(A) = -d(B) X^H."""
    a, left, vector = s.A, s.left, is_vector(s.B_shape, s.A.shape)
    if vector:
        g = g.unsqueeze(-1)
    if torch.is_grad_enabled():
        gb = torch.linalg.solve(a.mH, g, left=left)
    else:
        gb = torch.linalg.lu_solve(s.LU, s.pivots, g, left=left, adjoint=True)
    ga = None
    if needs[0]:
        xh = (s.result.unsqueeze(-1) if vector else s.result).mH
        ga = -(gb @ xh) if left else -(xh @ gb)
    return [ga, gb.squeeze(-1) if vector else gb]


@vjp(aten.linalg_solve_triangular.default, saves="self out:self", wrt="self B")
def solve_triangular(g: Tensor, s: Any, needs: list[bool]) -> Pair:
    """As `solve`, and d(A) only where A is read."""
    gb = torch.linalg.solve_triangular(
        s.self.mH, g, upper=not s.upper, left=s.left, unitriangular=s.unitriangular
    )
    if not needs[0]:
        return [None, gb]
    ga = -(gb @ s.out.mH) if s.left else -(s.out.mH @ gb)
    return [triangle(ga, s.upper, s.unitriangular), gb]


def triangle(x: Tensor, upper: bool, without_diagonal: bool) -> Tensor:
    """The part of `x` that a triangular op reads."""
    return x.triu(int(without_diagonal)) if upper else x.tril(-int(without_diagonal))


@vjp(
    aten.triangular_solve.default,
    saves="A solution:A", outputs="solution cloned_coefficient", wrt="self A",
)  # fmt: skip
def triangular_solve(g: Any, s: Any, needs: list[bool]) -> Pair:
    """A X = B, or A^T X = B with `transpose`; the second result is a copy of A."""
    gx, copy = g
    if gx is None:
        return [None, copy]
    gb = aten.triangular_solve(gx, conj(s.A), s.upper, not s.transpose, s.unitriangular)[0]
    if not needs[1]:
        return [gb, None]
    ga = -(conj(s.solution) @ gb.mT) if s.transpose else -(gb @ s.solution.mH)
    ga = triangle(ga, s.upper, s.unitriangular)
    return [gb, ga if copy is None else ga + copy]


@vjp(
    aten.linalg_lstsq.default,
    saves="self b solution",
    outputs="solution residuals rank singular_values", differentiable="solution residuals",
    wrt="self b",
)  # fmt: skip
def lstsq(g: Any, s: Any, needs: list[bool]) -> Pair:
    """X = A^+ B, and residuals: the squared norms of the columns of R = A X - B.

    R is orthogonal to the columns of A, so X's own change does not move the residuals:
    d(A) = 2 R diag(g) X^H and d(B) = -2 R diag(g) from those.
    """
    gx, gr = g[:2]
    a, b, x = s.self, s.b, s.solution
    vector = is_vector(b.shape, a.shape)
    if vector:
        b, x = b.unsqueeze(-1), x.unsqueeze(-1)
        gx = None if gx is None else gx.unsqueeze(-1)
    ga = gb = None
    if gx is not None:
        inverse = torch.linalg.pinv(a)
        gb = inverse.mH @ gx
        ga = pinv_vjp(gx @ b.mH, a, inverse) if needs[0] else None
    if gr is not None and gr.numel():
        r = 2 * (a @ x - b) * gr.unsqueeze(-2)
        gb = -r if gb is None else gb - r
        ga = r @ x.mH if ga is None else ga + r @ x.mH
    return [ga, gb.squeeze(-1) if vector and gb is not None else gb]


# -- Cholesky


@vjp(aten.linalg_cholesky_ex.default, saves="L", outputs="L info", differentiable="L", wrt="self")
def cholesky_ex(g: Tensor, s: Any, needs: list[bool]) -> tuple[Tensor]:
    return (cholesky_vjp(g, s.L, s.upper),)


vjp(aten.cholesky.default, "out", self=lambda g, s: cholesky_vjp(g, s.out, s.upper))


def cholesky_vjp(g: Tensor, factor: Tensor, upper: bool) -> Tensor:
    """d(A) of A = L L^H: L^-H phi(L^H G) L^-1, where phi mirrors the lower triangle and halves.

    Source: Murray 2016 (arXiv 1602.07527), equation 10, made Hermitian.
    """
    low, g = (factor.mH, g.mH) if upper else (factor, g)
    phi = low.mH @ g
    phi = 0.5 * (phi.tril() + phi.tril(-1).mH)
    phi = torch.linalg.solve_triangular(low.mH, phi, upper=True)
    return torch.linalg.solve_triangular(low, phi, upper=False, left=False)


@vjp(aten.cholesky_inverse.default, saves="self out", wrt="self")
def cholesky_inverse(g: Tensor, s: Any, needs: list[bool]) -> tuple[Tensor]:
    """X = (L L^H)^-1, so d(L) = -X (G + G^H) X L."""
    k = s.out @ (g + g.mH) @ s.out
    return (-(s.self @ k) if s.upper else -(k @ s.self),)


@vjp(aten.cholesky_solve.default, saves="input2 out:input2", wrt="self input2")
def cholesky_solve(g: Tensor, s: Any, needs: list[bool]) -> Pair:
    """L L^H X = B: a solve, whose matrix has d(L L^H) = -d(B) X^H."""
    gb = torch.cholesky_solve(g, s.input2, upper=s.upper)
    if not needs[1]:
        return [gb, None]
    k = gb @ s.out.mH
    k = -(k + k.mH)
    return [gb, s.input2 @ k if s.upper else k @ s.input2]


# -- determinants


@vjp(
    aten._linalg_det.default, saves="A A.is_contiguous result LU pivots",
    outputs="result LU pivots", differentiable="result", wrt="A",
)  # fmt: skip
def det(g: Tensor, s: Any, needs: list[bool]) -> tuple[Tensor]:
    """d(det A) = det(A) tr(A^-1 dA), so d(A) is the conjugate of det(A), times A^-H.

    A singular matrix has a gradient too, from its adjugate (PyTorch gives zero for it). A zero
    pivot is nudged in A and in det(A) alike, which cancels; when recorded, an SVD serves.
    The kernel factors the transpose of a real contiguous matrix, which saves it a copy.
    """
    a = s.A
    if not a.numel():
        return (torch.zeros_like(a),)
    if a.shape[-1] == 1:
        return (_matrix(g).expand(a.shape),)
    tiny = torch.finfo(a.dtype).eps
    if not torch.is_grad_enabled():
        pivot = s.LU.diagonal(0, -2, -1)
        nudge = torch.where(pivot == 0, tiny, 0.0).to(a.dtype)
        factors = s.LU + torch.diag_embed(nudge)
        place = torch.arange(1, a.shape[-1] + 1, device=a.device)
        swaps = (s.pivots != place).sum(-1)
        nudged = (pivot + nudge).prod(-1) * (1 - 2 * (swaps % 2))
        c = g * conj(torch.where(s.result == 0, nudged, s.result))
        transposed = s.A_is_contiguous and not a.is_complex()
        return (scaled_inverse(c, factors, s.pivots, transposed),)
    singular = s.result.abs() < 100 * tiny
    if not bool(singular.any()):
        return (torch.linalg.inv(a).mH * _matrix(g * conj(s.result)),)
    singular = _matrix(singular)
    regular = torch.where(singular, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device), a)
    spread = torch.arange(1, a.shape[-1] + 1, device=a.device).to(a.dtype).diag()
    return (
        torch.where(
            singular,
            adjugate(torch.where(singular, a, spread)) * _matrix(g),
            torch.linalg.inv(regular).mH * _matrix(g * conj(s.result)),
        ),
    )


@vjp(
    aten._linalg_slogdet.default, saves="A A.is_contiguous sign LU pivots",
    outputs="sign logabsdet LU pivots", differentiable="sign logabsdet", wrt="A",
)  # fmt: skip
def slogdet(g: Any, s: Any, needs: list[bool]) -> tuple[Tensor | None]:
    """d(log det A) = tr(A^-1 dA), whose real part moves logabsdet and whose imaginary part is
    the angle of sign."""
    g_sign, c = g[:2]
    a = s.A
    if a.is_complex() and g_sign is not None:
        turn = torch.complex(torch.zeros_like(s.sign.real), (g_sign * conj(s.sign)).imag)
        c = turn if c is None else c + turn
    if c is None:
        return (None,)
    if torch.is_grad_enabled():
        return (torch.linalg.inv(a).mH * _matrix(c),)
    transposed = s.A_is_contiguous and not a.is_complex()
    return (scaled_inverse(c.to(a.dtype), s.LU, s.pivots, transposed),)


def _matrix(c: Tensor) -> Tensor:
    """A number for each matrix of a batch, ready to be multiplied with them."""
    return c.unsqueeze(-1).unsqueeze(-1)


def scaled_inverse(c: Tensor, factors: Tensor, pivots: Tensor, transposed: bool) -> Tensor:
    """c A^-H from the LU factors of A, or of its transpose."""
    diagonal = torch.diag_embed(c.unsqueeze(-1).expand(pivots.shape))
    return torch.linalg.lu_solve(factors, pivots, diagonal, adjoint=not transposed)


def adjugate(a: Tensor) -> Tensor:
    """The conjugate transposed adjugate of A: the gradient of det, also where A is singular.

    With A = U S V^H it is conj(det U det V^H) U diag(products of all other singular values) V^H.
    Source: Stewart 1998, "On the adjugate matrix".
    """
    u, sv, vh = torch.linalg.svd(a)
    others = sv.unsqueeze(-2).expand(a.shape).masked_fill(
        torch.eye(a.shape[-1], dtype=torch.bool, device=a.device), 1
    )  # fmt: skip
    turn = conj(torch.linalg.det(u) * torch.linalg.det(vh))
    return (u * others.prod(-1).unsqueeze(-2)) @ vh * _matrix(turn)


# -- the rest


@vjp(aten.linalg_matrix_exp.default, saves="self", wrt="self")
def matrix_exp(g: Tensor, s: Any, needs: list[bool]) -> tuple[Tensor]:
    """The upper right block of exp([[A^H, G], [0, A^H]]): the exponential's Fréchet derivative.

    Source: Higham 2008, "Functions of Matrices", equation 3.16.
    """
    ah = s.self.mH
    n = ah.shape[-1]
    top = torch.cat([ah, g], -1)
    bottom = torch.cat([torch.zeros_like(ah), ah], -1)
    return (torch.linalg.matrix_exp(torch.cat([top, bottom], -2))[..., :n, n:],)


vjp(
    aten.linalg_cross.default, "self other",
    self=lambda g, s: torch.linalg.cross(conj(s.other), g, dim=s.dim),
    other=lambda g, s: torch.linalg.cross(g, conj(s.self), dim=s.dim),
)  # fmt: skip
