"""Special functions: the operator database, the points where a formula has 0/0, refusals."""

from __future__ import annotations

import math

import pytest
import torch

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, matrix

OPS = """
    digamma erf erfc erfinv i0 lgamma mvlgamma.mvlgamma_p_1 mvlgamma.mvlgamma_p_5
    polygamma.polygamma_n_0 polygamma.polygamma_n_1 polygamma.polygamma_n_4 special.entr
    special.erfcx special.i0e special.i1 special.i1e special.log_ndtr special.ndtr special.ndtri
    special.polygamma.special_polygamma_n_0 special.xlog1py
""".split()


@pytest.mark.parametrize("name", OPS)
def test_the_database_by_our_rules(name):
    assert_by_rule(name, torch.float64, limit=3)


@pytest.mark.parametrize("fn", [torch.i0, torch.special.i0e, torch.special.i1, torch.special.i1e])
def test_bessel_functions_at_and_near_zero(fn):
    """The formulas of i1 and i1e divide by x; at 0 the slope is 1/2, and its own slope finite."""
    x = torch.tensor([0.0, -0.0, 1e-300, -1e-20, 1e-3, -2.0], dtype=torch.float64)
    agree(fn, x, order=2)


@pytest.mark.parametrize(
    "fn", [torch.special.xlog1py, lambda x, y: torch.special.entr(x) * y], ids=["xlog1py", "entr"]
)
def test_logarithms_at_zero(fn):
    y = torch.tensor([-1.0, -1.0, 0.0, 2.0, -1.5], dtype=torch.float64)
    agree(lambda x: fn(x, y), torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64))


def test_numbers_among_the_arguments():
    agree(lambda x: torch.special.xlog1py(2, x.abs()), matrix(), order=2)
    agree(lambda x: torch.special.xlog1py(x, 2), matrix(), order=2)
    agree(lambda x: torch.special.zeta(3.0, x.abs() + 1), matrix(), order=2)


def test_the_order_of_polygamma_comes_first_and_in_place_second():
    agree(lambda x: (x.abs() + 1).polygamma_(2), matrix(), order=2)
    agree(lambda x: torch.polygamma(2, x.abs() + 1), matrix(), order=2)


@pytest.mark.parametrize("fn", [torch.special.gammainc, torch.special.gammaincc])
def test_incomplete_gamma_in_its_second_argument(fn):
    shape = torch.rand(4, 6, dtype=torch.float64) + 0.5
    agree(lambda x: fn(shape, x.abs()), matrix(), order=2)


@pytest.mark.parametrize("fn", [torch.special.gammainc, torch.special.zeta])
def test_an_unknown_derivative_raises_only_when_it_is_asked_for(fn):
    with sg.record():
        a = torch.tensor([2.0], requires_grad=True)
        x = torch.tensor([1.5], requires_grad=True)
        out = fn(a, x)
        torch.autograd.grad(out, x, retain_graph=True)
        with pytest.raises(sg.NotDifferentiableError, match="not implemented"):
            torch.autograd.grad(out, a)


def test_functions_without_derivative_give_constants():
    with sg.record():
        x = torch.tensor([1.0], requires_grad=True)
        assert not torch.special.bessel_j0(x).requires_grad
        assert not torch.special.hermite_polynomial_h(x, 2).requires_grad


def test_the_slope_of_erf_is_the_normal_density():
    with sg.record():
        x = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(torch.erf(x).sum(), x)
    assert g.tolist() == pytest.approx([2 / math.sqrt(math.pi), 2 / math.sqrt(math.pi) / math.e])


@pytest.mark.parametrize("fn", [torch.special.i1, torch.lgamma, lambda x: torch.mvlgamma(x, 2)])
def test_formulas_are_mapped_over_a_batch_of_gradients(fn):
    batched(lambda x: fn(x.abs() + 1), matrix(2, 3))


def test_the_result_of_erfinv_may_be_changed_in_place() -> None:
    x = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    x.erfinv().mul_(2).sum().backward()
    expected, x.grad = x.grad, None
    with sg.record():
        x.erfinv().mul_(2).sum().backward()
    torch.testing.assert_close(x.grad, expected)
