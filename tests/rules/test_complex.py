"""Complex numbers: parts, conjugates, polar form, and real arguments among complex ones."""

from __future__ import annotations

import pytest
import torch

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, matrix

REAL = ["complex", "polar", "view_as_complex", "angle", "resolve_neg", "real"]
COMPLEX = ["angle", "conj", "conj_physical", "imag", "real", "resolve_conj", "sgn", "view_as_real"]


@pytest.mark.parametrize("name", REAL)
def test_the_database_by_our_rules(name):
    assert_by_rule(name, torch.float64, limit=3)


@pytest.mark.parametrize("name", COMPLEX)
def test_the_database_by_our_rules_in_complex(name):
    assert_by_rule(name, torch.complex128, limit=3)


@pytest.mark.parametrize("fn", [torch.abs, torch.angle, torch.sgn, torch.square, torch.sinc])
def test_at_zero(fn):
    agree(fn, torch.tensor([0, 1j, -2, 1 + 1j], dtype=torch.complex128))


@pytest.mark.parametrize(
    "fn",
    [
        lambda z: z.conj() * z, lambda z: z.conj().clone(), lambda z: z.mH @ z,
        lambda z: z.conj_physical().exp(), lambda z: (z * 2).conj_physical_() + z,
        lambda z: z.real * z.imag, lambda z: torch.view_as_real(z).sin(),
        lambda z: torch.view_as_real(z.t().exp())[..., 0], lambda z: z.conj().imag * 3,
        lambda z: torch.view_as_complex(torch.view_as_real(z).flip(-1)),
        lambda z: torch.polar(z.abs(), z.angle()), lambda z: torch.complex(z.imag, z.real) * z,
    ],
)  # fmt: skip
def test_parts_and_conjugates(fn):
    agree(fn, matrix(3, 3, torch.complex128), order=2)


@pytest.mark.parametrize("n", [2, -1, 0.5, 1 + 2j, torch.tensor(2.0), torch.tensor(1j)])
def test_powers(n):
    agree(lambda z: z**n, matrix(3, 3, torch.complex128), order=2)
    agree(lambda x: (x + 3) ** n * (1 + 1j), matrix(3, 3))


def test_a_complex_bases_zeroth_power_is_flat_at_zero():
    agree(lambda n: torch.pow(torch.tensor([0j, 1 + 1j, 0]), n), torch.tensor([1.0, 2.0, 0.0]))
    agree(lambda n: torch.pow(0j, n), torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.div, torch.pow])
def test_the_gradient_of_a_real_argument_is_real(op):
    z = matrix(3, 3, torch.complex128)
    agree(lambda x: op(x + 3, z), matrix(3, 3), order=2)
    agree(lambda x: op(z, x + 3), matrix(3, 3), order=2)
    with sg.record():
        x = torch.ones(3, requires_grad=True)
        (op(x, 1 + 2j)).abs().sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("fn", [lambda x: torch.polar(x, x * 2).real, lambda x: (x * 1j).angle()])
def test_formulas_are_mapped_over_a_batch_of_gradients(fn):
    batched(lambda x: fn(x.abs() + 1), matrix(2, 3))
