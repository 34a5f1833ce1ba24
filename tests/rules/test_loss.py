"""Losses: kinks, edges of probability, broadcasting, reductions, what is saved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.parity import both_raise, plain

LOSSES = [
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "nll_loss", "cross_entropy", "kl_div", "soft_margin_loss",
    "margin_ranking_loss", "multilabel_soft_margin_loss", "cosine_embedding_loss",
    "triplet_margin_loss", "triplet_margin_with_distance_loss", "hinge_embedding_loss",
    "poisson_nll_loss", "gaussian_nll_loss", "ctc_loss", "linear_cross_entropy",
]  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_database_by_our_rules(name):
    assert_by_rule(f"nn.functional.{name}", torch.float64)


@pytest.mark.parametrize("name", ["multi_margin_loss", "multilabel_margin_loss"])
def test_the_database_by_our_rules_once(name):
    assert_by_rule(f"nn.functional.{name}", torch.float64, second=False)


def _twice(fn, *inputs):
    """First and second derivatives, with respect to all inputs that have them."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = fn(*leaves)
    torch.manual_seed(1)
    seed = torch.randn_like(out).requires_grad_()
    first = torch.autograd.grad(out, leaves, seed, create_graph=True, allow_unused=True)
    some = [g for g in first if g is not None and g.requires_grad]
    again = [torch.randn_like(g) for g in some]
    second = torch.autograd.grad(some, [*leaves, seed], again, allow_unused=True)
    return [torch.zeros(()) if g is None or not (g != 0).any() else g for g in (*first, *second)]


def _agree(fn, *inputs):
    expected = _twice(fn, *inputs)
    with sg.record():
        actual = _twice(fn, *inputs)
    assert_close(plain(actual), plain(expected), equal_nan=True)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss,
        lambda *a, **k: F.smooth_l1_loss(*a, beta=0.5, **k),
        lambda *a, **k: F.smooth_l1_loss(*a, beta=0.0, **k),
        lambda *a, **k: F.huber_loss(*a, delta=2.0, **k),
        lambda x, y, **k: F.soft_margin_loss(x, y.detach(), **k),
        F.kl_div,
    ],
)  # fmt: skip
def test_slopes_at_kinks(loss, reduction):
    x = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 40.0], dtype=torch.float64)
    _agree(lambda a, b: loss(a, b, reduction=reduction), x, torch.zeros_like(x))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_probabilities_of_zero_and_one(reduction):
    p = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.3, 1e-8], dtype=torch.float64)
    y = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.9, 0.5], dtype=torch.float64)
    weight = torch.tensor(3.0, dtype=torch.float64)

    def loss(p):
        return F.binary_cross_entropy(p, y, weight, reduction=reduction)

    expected, actual = [], []
    for context, into in ((torch.enable_grad(), expected), (sg.record(), actual)):
        with context:
            leaf = p.clone().requires_grad_()
            into.extend(torch.autograd.grad(loss(leaf).sum(), leaf))
    assert_close(actual, expected)


def test_logits_with_positive_weights():
    x, y, w, p = (torch.rand(4, 3, dtype=torch.float64) for _ in range(4))
    for reduction in ("none", "mean", "sum"):
        _agree(
            lambda x, y, r=reduction: F.binary_cross_entropy_with_logits(
                x, y, w[:1], reduction=r, pos_weight=p[0]
            ),
            x * 60 - 30, y,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss"])
@pytest.mark.parametrize("reduction", [0, 2])
def test_the_op_itself_broadcasts(name, reduction):
    """Not for a mean: PyTorch divides by the size of the smaller one then."""
    op = getattr(torch.ops.aten, name)
    a, b = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    _agree(lambda a: op(a, b, reduction), a)
    _agree(lambda b: op(a, b, reduction), b)


def test_an_empty_mean():
    _agree(F.mse_loss, torch.zeros(0, 3), torch.zeros(0, 3))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (4,)])
def test_nll_with_weights_and_ignored(shape, reduction):
    torch.manual_seed(0)
    target = torch.randint(4, [n for i, n in enumerate(shape) if i != (len(shape) > 1)])
    if target.dim():
        target.view(-1)[0] = -100
    weight = torch.rand(4, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    for loss in (F.nll_loss, F.cross_entropy):
        _agree(lambda x, f=loss: f(x, target, weight, reduction=reduction), x)


def _saved(fn):
    kept = []
    with sg.record(), sg.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fn()
    return kept


def test_cross_entropy_saves_log_softmax_once():
    x, y = torch.randn(8, 100, requires_grad=True), torch.randint(100, (8,))
    kept = _saved(lambda: F.cross_entropy(x, y))
    assert sum(t.nbytes for t in kept) == x.nbytes + y.nbytes + 4  # and the count of the mean


def test_a_fixed_target_is_saved_and_not_differentiated():
    x = torch.randn(6, requires_grad=True)
    target = torch.randn(6)
    assert {t.data_ptr() for t in _saved(lambda: F.mse_loss(x, target))} == {
        x.data_ptr(), target.data_ptr()
    }  # fmt: skip


def test_a_weight_has_no_gradient_and_says_so():
    both_raise(
        lambda: F.binary_cross_entropy(
            torch.rand(3, requires_grad=True), torch.rand(3), torch.rand(3, requires_grad=True)
        ),
        "'weight'",
    )


@pytest.mark.parametrize("as_tensors", [False, True])
def test_ctc(as_tensors):
    def loss(logits):
        lengths = [6, 4], [3, 2]
        if as_tensors:
            lengths = tuple(torch.tensor(n) for n in lengths)
        return F.ctc_loss(logits.log_softmax(-1), targets, *lengths, zero_infinity=True)

    torch.manual_seed(0)
    targets = torch.randint(1, 5, (2, 3))
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    grads = []
    for context in (torch.enable_grad(), sg.record()):
        with context:
            leaf = x.clone().requires_grad_()
            grads.extend(torch.autograd.grad(loss(leaf), leaf))
    assert_close(grads[1], grads[0])
