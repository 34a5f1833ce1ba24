"""Matrix factorisations: SVD, eigenvectors, QR, LU, Householder products.

Factors are determined up to a choice (the phase of a singular vector, the scale of an
eigenvector) that a loss must not depend on; where a complex one does, there is no gradient and an
error says so. Notation as in linalg.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _private
from ..errors import NotDifferentiableError
from .table import vjp

aten = torch.ops.aten


def check_phase(angles: Tensor, op: str, what: str) -> None:
    """Raise if a loss depends on the phases of complex vectors: `angles` are its derivatives
    with respect to them. Not checked where values are not at hand (vmap, tracing)."""
    if _private.functorch_active() or type(angles) is not Tensor:
        return
    if not bool((angles.detach().abs() <= 1e-2).all()):
        raise NotDifferentiableError(
            f"the loss depends on the phases of the {what} of {op}, which are arbitrary (each may "
            "be multiplied by exp(i phi)): its gradient is not defined. Use a loss that does not "
            "change with them, such as one of their absolute values or of V V^H."
        )


def skew(x: Tensor) -> Tensor:
    return x - x.mH


def gaps(x: Tensor) -> Tensor:
    """E[i, j] = x[j] - x[i], with ones on the diagonal."""
    one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return x.unsqueeze(-2) - x.unsqueeze(-1) + one


def hermitian_from_upper(x: Tensor) -> Tensor:
    """The Hermitian matrix with x's upper triangle and the real part of its diagonal."""
    up = x.triu(1)
    return up + up.mH + torch.diag_embed(x.diagonal(0, -2, -1).real)


# -- singular values and vectors


@vjp(aten._linalg_svd.default, saves="U S Vh", outputs="U S Vh", wrt="A")
def svd(g: Any, s: Any, needs: list[bool]) -> tuple[Tensor | None]:
    """d(A) of A = U S V^H.

    With P = skew(U^H dU), Q = skew(V^H dV) for the gradients dU, dV, and E[i, j] = s_j^2 - s_i^2:
    d(A) = U [(P S + S Q) / E + diag(dS)] V^H, and for a tall A what of dU S^-1 V^H leaves the
    span of U (for a wide one, likewise with V). Complex phases add diag(P / 2S).
    Sources: Townsend 2016, "Differentiating the singular value decomposition"; Wan & Zhang 2019
    (arXiv 1909.02659) for the complex case.
    """
    gu, gs, gvh = g
    if gu is None and gs is None and gvh is None:
        return (None,)
    u, sv, vh = s.U, s.S, s.Vh
    m, n, k = u.shape[-2], vh.shape[-1], sv.shape[-1]
    if u.shape[-1] != k or vh.shape[-2] != k:  # full matrices; the added vectors are arbitrary
        u, vh = u[..., :k], vh[..., :k, :]
        gu = None if gu is None else gu[..., :k]
        gvh = None if gvh is None else gvh[..., :k, :]
    if gu is None and gvh is None:
        return ((u * gs.unsqueeze(-2)) @ vh if m >= n else u @ (gs.unsqueeze(-1) * vh),)
    p = None if gu is None else skew(u.mH @ gu)
    q = None if gvh is None else skew(vh @ gvh.mH)
    row, column = sv.unsqueeze(-2), sv.unsqueeze(-1)
    if u.is_complex():
        both: Any = q if p is None else p if q is None else p + q
        check_phase(both.diagonal(0, -2, -1), "svd", "singular vectors")
    if p is None:
        core = column * q
    else:
        core = p * row if q is None else p * row + column * q
    core = core / gaps(sv * sv)
    if gs is not None:
        core = core + torch.diag_embed(gs)
    if u.is_complex() and p is not None and q is not None:
        core = core + torch.diag_embed(p.diagonal(0, -2, -1) / (2 * sv))
    if m > k and gu is not None:
        outside = gu / row
        return ((u @ core + outside - u @ (u.mH @ outside)) @ vh,)
    if n > k and gvh is not None:
        outside = gvh / column
        return (u @ (core @ vh + outside - (outside @ vh.mH) @ vh),)
    return (u @ (core @ vh) if m >= n else (u @ core) @ vh,)


# -- eigenvalues and eigenvectors


@vjp(
    aten._linalg_eigh.default, saves="eigenvalues eigenvectors",
    outputs="eigenvalues eigenvectors", wrt="A",
)  # fmt: skip
def eigh(g: Any, s: Any, needs: list[bool]) -> tuple[Tensor | None]:
    """A = V L V^H: d(A) = V [skew(V^H dV) / 2E + diag(dL)] V^H, with E[i, j] = l_j - l_i."""
    gl, gv = g
    values, v = s.eigenvalues, s.eigenvectors
    if gv is None:
        return (None if gl is None else (v * gl.unsqueeze(-2)) @ v.mH,)
    core = v.mH @ gv
    if v.is_complex():
        check_phase(core.diagonal(0, -2, -1).imag, "eigh", "eigenvectors")
    core = with_diagonal(0.5 * skew(core) / gaps(values), gl)
    return (v @ (core @ v.mH),)


@vjp(
    aten.linalg_eig.default, saves="eigenvalues eigenvectors",
    outputs="eigenvalues eigenvectors", wrt="self",
)  # fmt: skip
def eig(g: Any, s: Any, needs: list[bool]) -> tuple[Tensor | None]:
    """A V = V L with columns of norm one: d(A) = V^-H [K / conj(E) + diag(dL)] V^H, where
    K = V^H dV - V^H V diag(Re(V^H dV)) takes out the change of norm.

    Source: Boeddeker et al. 2017 (arXiv 1701.00392), equation 4.77.
    """
    gl, gv = g
    values, v = s.eigenvalues, s.eigenvectors
    if gv is None:
        return (None if gl is None else torch.linalg.solve(v.mH, gl.unsqueeze(-1) * v.mH),)
    core = v.mH @ gv
    diagonal = core.diagonal(0, -2, -1)
    check_phase(diagonal.imag, "eig", "eigenvectors")
    core = core - v.mH @ (v * diagonal.real.unsqueeze(-2))
    core = with_diagonal(core / gaps(values).conj(), gl)
    return (torch.linalg.solve(v.mH, core @ v.mH),)


def with_diagonal(x: Tensor, diagonal: Tensor | None) -> Tensor:
    """x with that diagonal instead of its own, or with its own."""
    if diagonal is None:
        return x
    on = torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    return torch.where(on, diagonal.unsqueeze(-1), x)


# -- QR


@vjp(aten.linalg_qr.default, saves="Q R A.shape", outputs="Q R", wrt="A")
def qr(g: Any, s: Any, needs: list[bool]) -> tuple[Tensor | None]:
    """A = Q R, tall or square: d(A) = (dQ + Q N) R^-H, N Hermitian with the upper triangle of
    dR R^H - Q^H dQ.

    A wide A = [X Y] is a square X = Q U, and Y = Q W, which adds Y dW^H to dQ and gives
    d(Y) = Q dW. Source: Roberts & Roberts 2020 (arXiv 2009.10071).
    """
    gq, gr = g
    if gq is None and gr is None:
        return (None,)
    m, n = s.A_shape[-2:]
    if s.mode == "r":
        raise NotDifferentiableError(
            "qr with mode='r' does not compute Q, which its gradient needs: use mode='reduced'"
        )
    if s.mode == "complete" and m > n:
        raise NotDifferentiableError(
            "qr with mode='complete' is not differentiable for more rows than columns, as the "
            "added columns of Q are arbitrary: use mode='reduced'"
        )
    q, r = s.Q, s.R
    gy = None
    if m < n:
        if gr is not None:
            gw = gr[..., m:]
            turn = (q @ r[..., m:]) @ gw.mH
            gq = turn if gq is None else gq + turn
            gy = q @ gw
            gr = gr[..., :m]
        r = r[..., :m]
    n_mat: Any = -(q.mH @ gq) if gq is not None else None
    if gr is not None:
        n_mat = gr @ r.mH if n_mat is None else n_mat + gr @ r.mH
    gx = q @ hermitian_from_upper(n_mat)
    if gq is not None:
        gx = gx + gq
    gx = torch.linalg.solve_triangular(r.mH, gx, upper=False, left=False)
    if m >= n:
        return (gx,)
    if gy is None:
        gy = torch.zeros_like(s.R[..., m:])
    return (torch.cat([gx, gy], -1),)


# -- LU


@vjp(aten.linalg_lu.default, saves="P L U", outputs="P L U", differentiable="L U", wrt="A")
def lu(g: Any, s: Any, needs: list[bool]) -> tuple[Tensor | None]:
    return (lu_vjp(g[1], g[2], s.P if s.pivot else None, s.L, s.U),)


@vjp(
    aten.linalg_lu_factor_ex.default, saves="LU pivots",
    outputs="LU pivots info", differentiable="LU", wrt="A",
)  # fmt: skip
def lu_factor_ex(g: Tensor, s: Any, needs: list[bool]) -> tuple[Tensor | None]:
    """As `lu`, with both factors in one matrix."""
    p, low, up = torch.lu_unpack(s.LU, s.pivots, unpack_pivots=s.pivot)
    k = min(g.shape[-2:])
    return (lu_vjp(g[..., :k].tril(-1), g[..., :k, :].triu(), p if s.pivot else None, low, up),)


def lu_vjp(
    gl: Tensor | None, gu: Tensor | None, p: Tensor | None, low: Tensor, up: Tensor
) -> Tensor | None:
    """d(A) of A = P L U from the gradients of L and U.

    Square: P L^-H [strictly lower part of L^H dL + upper part of dU U^H] U^-H. A wide A = P [X Y]
    has Y = L W: d(Y) = P L^-H dW, and dL loses (L^-H dW) W^H. A tall A has rows M U below:
    d of those is dM U^-H, and dU loses M^H (dM U^-H).
    """
    if gl is None and gu is None:
        return None
    m, n = low.shape[-2], up.shape[-1]
    k = min(m, n)
    beside = below = None
    top, first = low[..., :k, :], up[..., :k]
    if m < n and gu is not None:
        beside = torch.linalg.solve_triangular(top.mH, gu[..., k:], upper=True, unitriangular=True)
        less = beside @ up[..., k:].mH
        gl = -less if gl is None else gl - less
    if m > n and gl is not None:
        below = torch.linalg.solve_triangular(first.mH, gl[..., k:, :], upper=False, left=False)
        less = low[..., k:, :].mH @ below
        gu = -less if gu is None else gu - less
    core = None
    if gl is not None:
        core = (top.mH @ gl[..., :k, :]).tril(-1)
    if gu is not None:
        part = (gu[..., :k] @ first.mH).triu()
        core = part if core is None else core + part
    core = torch.linalg.solve_triangular(top.mH, core, upper=True, unitriangular=True)
    core = torch.linalg.solve_triangular(first.mH, core, upper=False, left=False)
    if m < n:
        rest = torch.zeros_like(up[..., k:]) if beside is None else beside
        core = torch.cat([core, rest], -1)
    elif m > n:
        rest = torch.zeros_like(low[..., k:, :]) if below is None else below
        core = torch.cat([core, rest], -2)
    return core if p is None else p @ core


@vjp(
    aten.lu_unpack.default, saves="LU_data.shape", outputs="P L U",
    differentiable="L U", wrt="LU_data", constant="LU_pivots",
)  # fmt: skip
def lu_unpack(g: Any, s: Any, needs: list[bool]) -> tuple[Tensor | None]:
    """L is the strictly lower triangle, U the upper one; a gradient of either is padded back."""
    m, n = s.LU_data_shape[-2:]
    _, gl, gu = g
    if gl is not None:
        gl = gl.tril(-1)
        gl = gl if m >= n else torch.nn.functional.pad(gl, (0, n - m))
    if gu is not None:
        gu = gu.triu()
        gu = gu if n >= m else torch.nn.functional.pad(gu, (0, 0, 0, m - n))
    return (gu if gl is None else gl if gu is None else gl + gu,)


@vjp(aten.linalg_lu_solve.default, saves="LU pivots out:LU", wrt="LU B")
def lu_solve(g: Tensor, s: Any, needs: list[bool]) -> list[Tensor | None]:
    """A solve with A = P L U: d(L U) = P^T d(A), split between the factors as in `lu_vjp`."""
    gb = torch.linalg.lu_solve(s.LU, s.pivots, g, left=s.left, adjoint=not s.adjoint)
    if not needs[0]:
        return [None, gb]
    if s.left:
        ga = -(s.out @ gb.mH) if s.adjoint else -(gb @ s.out.mH)
    else:
        ga = -(gb.mH @ s.out) if s.adjoint else -(s.out.mH @ gb)
    p, low, up = torch.lu_unpack(s.LU, s.pivots)
    ga = p.mT @ ga
    return [(ga @ up.mH).tril(-1) + (low.mH @ ga).triu(), gb]


# -- products of Householder reflectors


@vjp(aten.linalg_householder_product.default, saves="input tau", wrt="input tau")
def householder_product(g: Tensor, s: Any, needs: list[bool]) -> list[Tensor | None]:
    """The first columns of Q = H_1 ... H_k."""
    columns = torch.eye(*s.input.shape[-2:], dtype=g.dtype, device=g.device)
    return list(reflectors_vjp(s.input, s.tau, g, columns))


@vjp(aten.ormqr.default, saves="self input2 input3:self,input2", wrt="self input2 input3")
def ormqr(g: Tensor, s: Any, needs: list[bool]) -> list[Tensor | None]:
    """Q C, Q^H C, C Q or C Q^H, with Q = H_1 ... H_k in full."""
    left, transpose = s.left, s.transpose
    gc = torch.ormqr(s.self, s.input2, g, left, not transpose) if needs[2] else None
    if not (needs[0] or needs[1]):
        return [None, None, gc]
    c = s.input3
    if left:
        x, y = (c, g) if transpose else (g, c)
    else:
        x, y = (g.mH, c.mH) if transpose else (c.mH, g.mH)
    return [*reflectors_vjp(s.self, s.input2, x, y), gc]


def reflectors_vjp(a: Tensor, tau: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """d(a) and d(tau) of Q = H_1 ... H_k, whose gradient is X Y^H.

    H_i = I - tau_i v_i v_i^H, and the columns v_i are those of `a` below the diagonal, with one
    on it. In closed form Q = I - V T V^H with T = (I + D S)^-1 D, D = diag(tau), S the strictly
    upper part of V^H V (Puglisi 1992), so that no step is one reflector at a time.
    """
    m, k = a.shape[-2], tau.shape[-1]
    one = torch.eye(m, k, dtype=a.dtype, device=a.device)
    v = a[..., :k].tril(-1) + one
    gram = (v.mH @ v).triu(1)
    d = tau.unsqueeze(-1)
    unit = d * gram + one[:k]
    t = torch.linalg.solve_triangular(unit, torch.diag_embed(tau), upper=True, unitriangular=True)
    xv, yv = x.mH @ v, y.mH @ v
    gt = -(xv.mH @ yv)
    g_unit = torch.linalg.solve_triangular(unit.mH, gt, upper=False, unitriangular=True)
    g_gram_scaled = -(g_unit @ t.mH)
    g_tau = g_unit.diagonal(0, -2, -1) + (g_gram_scaled * gram.conj()).sum(-1)
    g_gram = (d.conj() * g_gram_scaled).triu(1)
    gv = -(x @ (yv @ t.mH)) - y @ (xv @ t) + v @ (g_gram + g_gram.mH)
    gv = gv.tril(-1)
    if k < a.shape[-1]:
        gv = torch.nn.functional.pad(gv, (0, a.shape[-1] - k))
    return gv, g_tau
