"""Random ops: the same draws as PyTorch's, and zero gradients (not missing ones) through them."""

from __future__ import annotations

import pytest
import torch

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.parity import same


@pytest.mark.parametrize("name", ["bernoulli", "normal", "normal.number_mean"])
def test_the_database_by_our_rules(name):
    assert_by_rule(name, torch.float64, second=False)


@pytest.mark.parametrize(
    "draw",
    [
        lambda y, x: y.normal_(), lambda y, x: y.uniform_(-1, 2), lambda y, x: y.exponential_(2),
        lambda y, x: y.cauchy_(), lambda y, x: y.log_normal_(), lambda y, x: y.geometric_(0.4),
        lambda y, x: y.random_(), lambda y, x: y.random_(7), lambda y, x: y.random_(2, 7),
        lambda y, x: y.bernoulli_(), lambda y, x: y.bernoulli_(0.2),
        lambda y, x: y.bernoulli_(x.sigmoid()), lambda y, x: torch.poisson(y.abs()),
        lambda y, x: torch.normal(y, x.abs()), lambda y, x: torch.normal(1.0, y.abs()),
        lambda y, x: torch.normal(y, 2.0), lambda y, x: torch.bernoulli(y.sigmoid()),
    ],
)  # fmt: skip
def test_draws_and_their_gradients(draw):
    def run():
        x = torch.randn(5, requires_grad=True)
        y = x * 2
        drawn = draw(y, x)
        return drawn, torch.autograd.grad((drawn * x).sum(), x)

    same(run)


def test_a_part_drawn_anew_gets_no_gradient():
    def run():
        x = torch.ones(4, requires_grad=True)
        y = x * 3
        y[1:3].normal_()
        return torch.autograd.grad(y.sum(), x)

    assert same(run)[0].tolist() == [3, 0, 0, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda a: torch.distributions.Gamma(a, a), lambda a: torch.distributions.Beta(a, a + 1),
        lambda a: torch.distributions.Dirichlet(a), lambda a: torch.distributions.StudentT(a + 2),
    ],
)  # fmt: skip
def test_reparametrised_samples(make):
    def run():
        a = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64, requires_grad=True)
        sample = make(a).rsample((2,))
        return sample, torch.autograd.grad(sample.sin().sum(), a)

    same(run)


def test_the_gradient_of_a_gamma_sample_has_none_itself():
    with sg.record():
        a = torch.tensor([0.5, 1.0], requires_grad=True)
        (g,) = torch.autograd.grad(torch._standard_gamma(a).sum(), a, create_graph=True)
        with pytest.raises(RuntimeError, match="not implemented"):
            torch.autograd.grad(g.sum(), a)
