"""Gradients of matrix factorisations, by shape, by which factors are used, real and complex."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, gradients, matrix

L = torch.linalg


def square(x):
    return x[:3, :3]


def hermitian(x):
    return x[:4, :4] + x[:4, :4].mH


FACTORS = {
    "svd": lambda x: L.svd(x, full_matrices=False),
    "svd of a tall matrix": lambda x: L.svd(x.mT, full_matrices=False),
    "svd, left vectors": lambda x: L.svd(x.mT, full_matrices=False)[0],
    "svd, right vectors": lambda x: L.svd(x, full_matrices=False)[2],
    "svd, values and right vectors": lambda x: L.svd(x, full_matrices=False)[1:],
    "svd of full matrices": lambda x: L.svd(x)[:2],
    "svdvals": L.svdvals,
    "eigh": lambda x: L.eigh(hermitian(x)),
    "eigh, vectors": lambda x: L.eigh(hermitian(x), UPLO="U")[1],
    "eigvalsh": lambda x: L.eigvalsh(hermitian(x)),
    "eig": lambda x: L.eig(square(x)),
    "eig, vectors": lambda x: L.eig(square(x))[1],
    "eigvals": lambda x: L.eigvals(square(x)),
    "qr of a wide matrix": lambda x: L.qr(x),
    "qr of a wide matrix, Q": lambda x: L.qr(x)[0],
    "qr of a wide matrix, R": lambda x: L.qr(x)[1],
    "qr of a wide matrix, complete": lambda x: L.qr(x, mode="complete"),
    "qr of a tall matrix": lambda x: L.qr(x.mT),
    "qr of a tall matrix, Q": lambda x: L.qr(x.mT)[0],
    "qr of a tall matrix, R": lambda x: L.qr(x.mT)[1],
    "lu": lambda x: L.lu(square(x))[1:],
    "lu of a wide matrix": lambda x: L.lu(x)[1:],
    "lu of a wide matrix, L": lambda x: L.lu(x)[1],
    "lu of a wide matrix, U": lambda x: L.lu(x)[2],
    "lu of a tall matrix": lambda x: L.lu(x.mT)[1:],
    "lu of a tall matrix, L": lambda x: L.lu(x.mT)[1],
    "lu of a tall matrix, U": lambda x: L.lu(x.mT)[2],
    "lu_factor": lambda x: [L.lu_factor(x)[0], L.lu_factor(x.mT)[0]],
    "lu_unpack": lambda x: [*torch.lu_unpack(*L.lu_factor(x))[1:], *L.lu(x.mT)[1:]],
    "lu_solve": lambda x: [
        L.lu_solve(*L.lu_factor(square(x)), x[:3], adjoint=True),
        L.lu_solve(*L.lu_factor(square(x)), x[:3].mT, left=False),
        L.lu_solve(*L.lu_factor(square(x)), x[:3].mT, left=False, adjoint=True),
        L.lu_solve(*L.lu_factor(torch.stack([square(x), x[1:, :3]])), x[:3]),
    ],
    "householder_product": lambda x: L.householder_product(x.mT, x[:, 0] / 4),
    "householder_product of few": lambda x: L.householder_product(x.mT, x[:2, 0] / 4),
    "ormqr": lambda x: [
        torch.ormqr(x.mT, x[:, 0] / 4, x.mT),
        torch.ormqr(x.mT, x[:, 0] / 4, x.mT, transpose=True),
        torch.ormqr(x.mT, x[:, 0] / 4, x, left=False),
        torch.ormqr(x.mT, x[:, 0] / 4, x, left=False, transpose=True),
    ],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("case", FACTORS)
def test_first_and_second_derivatives_equal_pytorchs(case, dtype):
    agree(FACTORS[case], matrix(dtype=dtype), order=2)


@pytest.mark.parametrize(
    "case", ["svdvals", "eig, vectors", "qr of a wide matrix, R", "lu of a tall matrix, U"]
)
def test_a_batch_of_gradients(case):
    batched(lambda x: FACTORS[case](x).abs(), matrix())


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda x: (L.svd(square(x))[0] * L.svd(square(x))[0]).real, "svd"),
        (lambda x: L.eigh(hermitian(x))[1].imag, "eigh"),
        (lambda x: L.eig(square(x))[1].real, "eig"),
    ],
)
def test_a_loss_that_depends_on_a_phase_has_no_gradient(fn, op):
    x = matrix(dtype=torch.complex128)
    with sg.record(), pytest.raises(sg.NotDifferentiableError, match=f"phases.* of {op},"):
        gradients(fn, x)


@pytest.mark.parametrize("mode", ["r", "complete"])
def test_qr_without_a_gradient(mode):
    def r(x):
        return L.qr(x.mT, mode=mode)[1]

    with sg.record(), pytest.raises(sg.NotDifferentiableError, match="mode='reduced'"):
        gradients(r, matrix())


def test_reflectors_in_closed_form_equal_reflectors_one_by_one():
    """Any tau, zero among them; PyTorch steps through inverses of single reflectors."""
    x, tau = matrix(5, 4), torch.tensor([0.3, 0.0, 1.7, -0.4], dtype=torch.float64)

    def one_by_one(x, tau):
        q = torch.eye(5, dtype=x.dtype)
        for i in range(4):
            v = torch.cat([torch.zeros(i), torch.ones(1), x[i + 1 :, i]])
            q = q - (q @ v)[:, None] * tau[i] * v
        return q[:, :4]

    def both(fn):
        a, b = x.clone().requires_grad_(), tau.clone().requires_grad_()
        weights = torch.arange(20.0, dtype=torch.float64).reshape(5, 4)
        return torch.autograd.grad((fn(a, b) * weights).sum(), [a, b])

    expected = both(one_by_one)
    with sg.record():
        assert_close(both(L.householder_product), expected)


OPS = """linalg.eig linalg.eigh linalg.householder_product linalg.lu linalg.lu_solve linalg.qr
linalg.svd ormqr svd_lowrank""".split()


@pytest.mark.parametrize("name", OPS)
def test_op_database(name):
    assert_by_rule(name, torch.float64, limit=2)


@pytest.mark.parametrize("name", ["linalg.eig", "linalg.lu_factor", "linalg.qr", "linalg.svd"])
def test_op_database_complex(name):
    assert_by_rule(name, torch.complex128, limit=2)
