"""Gradients of inverses, solves, determinants, Cholesky and matrix functions."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, gradients, matrix, saved_by

L = torch.linalg


def square(x):
    return x[:3, :3]


def stacked(x):
    return torch.stack([x[:3, :3], x[1:, 2:5]])


def positive(x):
    return x @ x.mH + torch.eye(x.shape[0])


SOLVES = {
    "inv": lambda x: [L.inv(square(x)), L.inv_ex(stacked(x))[0], torch.inverse(square(x).mT)],
    "pinv of a wide matrix": L.pinv,
    "pinv of a tall matrix": lambda x: L.pinv(x.mT),
    "pinv of a matrix that lacks rank": lambda x: L.pinv(x[:, :2] @ x[:2], atol=1e-8),
    "pinv, hermitian": lambda x: L.pinv(positive(x), hermitian=True),
    "solve": lambda x: [L.solve(square(x), x[:3]), L.solve(square(x).mT, x[:3])],
    "solve, a vector": lambda x: [L.solve(square(x), x[:3, 3]), L.solve(stacked(x), x[:2, 3:])],
    "solve, broadcast": lambda x: [L.solve(stacked(x), x[:3]), L.solve(square(x), stacked(x))],
    "solve, from the right": lambda x: L.solve(square(x), x[:, :3], left=False),
    "solve_triangular": lambda x: [
        L.solve_triangular(square(x), x[:3], upper=upper, unitriangular=unit)
        for upper in (True, False) for unit in (True, False)
    ],
    "solve_triangular, from the right": lambda x: [
        L.solve_triangular(square(x), x[:, :3], upper=upper, left=False) for upper in (True, False)
    ],
    "triangular_solve": lambda x: [
        torch.triangular_solve(x[:3], square(x), upper, transpose, unit)[0]
        for upper in (True, False) for transpose in (True, False) for unit in (True, False)
    ],
    "triangular_solve, its copy too": lambda x: torch.triangular_solve(x[:3], square(x)),
    "lstsq": lambda x: L.lstsq(x.mT, x.mT[:, :2]).solution,
    "lstsq, residuals": lambda x: L.lstsq(x.mT[:, :2], x.mT[:, 2:])[:2],
    "lstsq, a wide matrix": lambda x: L.lstsq(x, x[:, :1]).solution,
    "cholesky": lambda x: [L.cholesky(positive(x)), torch.linalg.cholesky(positive(x), upper=True)],
    "cholesky_inverse": lambda x: [
        torch.cholesky_inverse(L.cholesky(positive(x))),
        torch.cholesky_inverse(L.cholesky(positive(x), upper=True), upper=True),
    ],
    "cholesky_solve": lambda x: [
        torch.cholesky_solve(x, L.cholesky(positive(x))),
        torch.cholesky_solve(x, L.cholesky(positive(x), upper=True), upper=True),
    ],
    "det": lambda x: [L.det(square(x)), L.det(stacked(x)), L.det(x[:1, :1]), L.det(x[:2, :2].mT)],
    "slogdet": lambda x: [*L.slogdet(square(x)), *L.slogdet(stacked(x).mT)],
    "logdet": lambda x: torch.logdet(positive(x).real),
    "matrix_exp": lambda x: [L.matrix_exp(square(x)), L.matrix_exp(stacked(x))],
    "matrix_power": lambda x: [L.matrix_power(square(x), n) for n in (-2, 0, 1, 5)],
    "cross": lambda x: [L.cross(x[:, :3], x[:, 3:]), L.cross(x[:3], x[:3, :1], dim=0)],
    "norms": lambda x: [L.matrix_norm(x, o) for o in ("fro", "nuc", 2, -2, 1)],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.triangular_solve")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("case", SOLVES)
def test_first_and_second_derivatives_equal_pytorchs(case, dtype):
    agree(SOLVES[case], matrix(dtype=dtype), order=2)


@pytest.mark.parametrize(
    "case", ["lstsq", "matrix_exp", "solve, from the right", "pinv of a wide matrix", "inv"]
)
def test_a_batch_of_gradients(case):
    def first(x):
        out = SOLVES[case](x)
        return out[0] if isinstance(out, list) else out

    batched(first, matrix())


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    ("entries", "adjugate"),
    [
        ([[1, 2], [2, 4]], [[4, -2], [-2, 1]]),
        ([[0, 0, 1], [1, 0, 3], [2, 0, 5]], [[0, 1, 0], [0, -2, 0], [0, 1, 0]]),
        ([[0, 0, 0], [0, 0, 3], [2, 4, 5]], [[-12, 6, 0], [0, 0, 0], [0, 0, 0]]),
        ([[0, 0, 0], [0, 0, 0], [2, 4, 5]], [[0, 0, 0]] * 3),
    ],
)
def test_a_singular_determinant_has_its_adjugate_as_gradient(entries, adjugate, create_graph):
    """Exactly singular: PyTorch gives zero here unless create_graph is on."""
    with sg.record():
        x = torch.tensor([entries], dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(L.det(x), x, torch.ones(1).double(), create_graph=create_graph)
    assert_close(g, torch.tensor([adjugate], dtype=torch.float64), atol=1e-12, rtol=1e-12)


def test_second_derivative_of_a_determinant_where_only_some_of_a_batch_are_singular():
    """det is a polynomial: of [[a, b], [c, d]] the Hessian is the same everywhere."""
    x = torch.tensor([[[1.0, 2], [2, 4]], [[3, 1], [0, 2]]], dtype=torch.float64)
    with sg.record():
        x.requires_grad_()
        (g,) = torch.autograd.grad(L.det(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g[:, 0, 0].sum(), x)
    expected = torch.tensor([[0.0, 0], [0, 1]], dtype=torch.float64).expand(2, 2, 2)
    assert_close(h, expected)


def test_a_first_backward_solves_with_the_factors_of_the_forward():
    """No second factorisation, unless the backward is recorded."""

    def factorisations(create_graph):
        with sg.record():
            x = (matrix()[:3, :3] + 3 * torch.eye(3)).requires_grad_()
            y = L.solve(x, x) + L.slogdet(x)[1] + L.det(x)
            with torch.profiler.profile() as profile:
                torch.autograd.grad(y.sum(), x, create_graph=create_graph)
        return sum("lu_factor" in e.name for e in profile.events())

    assert factorisations(False) == 0
    assert factorisations(True) > 0


def test_what_is_saved():
    def shapes(fn):
        return [tuple(t.shape) for t in saved_by(fn, matrix(4, 4))]

    assert shapes(L.inv) == [(4, 4)]  # the inverse
    assert shapes(lambda x: L.cholesky_ex(x @ x.mT + torch.eye(4))[0])[-1] == (4, 4)
    assert len(shapes(lambda x: L.solve_triangular(x.detach(), x, upper=True))) == 1
    assert len(shapes(lambda x: L.cross(x[:, :3], x[:, 1:].detach()))) == 1


def test_empty_matrices():
    x = torch.zeros(2, 0, 0, dtype=torch.float64)
    for fn in (L.inv, L.det, L.slogdet, L.matrix_exp, L.pinv, L.cholesky):
        out = gradients(lambda x, fn=fn: fn(x), x)
        with sg.record():
            assert_close(gradients(lambda x, fn=fn: fn(x), x), out)


OPS = """cholesky cholesky_solve linalg.cond linalg.cross linalg.det linalg.inv linalg.lstsq
linalg.multi_dot linalg.pinv linalg.slogdet linalg.solve linalg.solve_triangular
linalg.tensorsolve logdet matrix_exp triangular_solve""".split()


@pytest.mark.parametrize("name", OPS)
def test_op_database(name):
    assert_by_rule(name, torch.float64, limit=3)


@pytest.mark.parametrize("name", ["cholesky_inverse", "linalg.det", "linalg.lstsq", "pinverse"])
def test_op_database_complex(name):
    assert_by_rule(name, torch.complex128, limit=3)


@pytest.mark.parametrize(
    "fn", [lambda x: L.ldl_factor(x)[0], lambda x: torch.geqrf(x)[0]], ids=["ldl", "geqrf"]
)
def test_a_factorisation_without_a_derivative_says_so(fn):
    """An error, as in PyTorch, rather than a gradient that leaves this path out."""
    with sg.record(), pytest.raises(sg.NotDifferentiableError, match="no derivative"):
        gradients(lambda x: fn(x @ x.mT) + x.sum(), matrix())
