"""Activations, softmax and dropout: special points, what is saved, random numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.parity import same

_OPS = [
    "celu", "elu", "gelu", "glu", "hardshrink", "hardswish", "hardtanh", "leaky_relu",
    "logsigmoid", "mish", "prelu", "relu", "relu6", "rrelu", "selu", "silu", "softmin", "softplus",
    "softshrink", "softsign", "tanhshrink", "threshold", "dropout", "dropout2d", "alpha_dropout",
    "feature_alpha_dropout.with_train",
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [f"nn.functional.{op}" for op in _OPS]
    + ["sigmoid", "tanh", "softmax", "log_softmax", "torch.ops.aten._safe_softmax.default"],
)
def test_the_database_by_our_rules(name):
    assert_by_rule(name, torch.float64)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "softmax.with_dtype"])
def test_the_database_by_our_rules_in_complex(name):
    assert_by_rule(name, torch.complex128)


def test_hardsigmoid_by_our_rule():
    """PyTorch has no second derivative to compare with; it is zero."""
    assert_by_rule("nn.functional.hardsigmoid", torch.float64, second=False)
    with sg.record():
        x = torch.tensor([-4.0, -3.0, 0.5, 3.0], requires_grad=True)
        (g,) = torch.autograd.grad(F.hardsigmoid(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
    assert_close(g.detach(), torch.tensor([0, 0, 1 / 6, 0]))
    assert h.eq(0).all()


_KINKS = [-6.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0, 6.0, float("inf"), float("nan")]


@pytest.mark.parametrize(
    "fn",
    [
        F.relu, F.relu6, F.hardtanh, F.hardsigmoid, F.hardswish, F.hardshrink, F.softshrink, F.elu,
        F.celu, F.selu, F.leaky_relu, lambda x: F.threshold(x, 0.5, 9.0),
        lambda x: F.prelu(x, torch.tensor([0.3])), lambda x: F.rrelu(x, training=True),
        lambda x: F.softplus(x, beta=2, threshold=2),
    ],
)  # fmt: skip
def test_slopes_at_kinks(fn):
    def slopes():
        torch.manual_seed(0)
        x = torch.tensor(_KINKS, requires_grad=True)
        return torch.autograd.grad(fn(x).sum(), x)

    expected = slopes()
    with sg.record():
        actual = slopes()
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "fn_",
    [
        torch.relu_, torch.sigmoid_, torch.tanh_, F.elu_, torch.celu_, torch.selu_, F.leaky_relu_,
        F.hardtanh_, torch.rrelu_, lambda x: F.silu(x, inplace=True),
        lambda x: F.mish(x, inplace=True), lambda x: F.hardswish(x, inplace=True),
        lambda x: F.threshold_(x, 0.1, 2.0), lambda x: F.dropout(x, 0.4, inplace=True),
        lambda x: F.alpha_dropout(x, 0.4, inplace=True),
        lambda x: F.rrelu(x, training=True, inplace=True),
    ],
)  # fmt: skip
def test_in_place_forms(fn_):
    def run():
        x = torch.linspace(-2, 2, 12).reshape(3, 4).requires_grad_()
        y, z = x * 1.5, x * 0.5
        fn_(y[1:])
        fn_(z)
        return y, z, torch.autograd.grad((y * z).sum(), x)

    same(run)


def test_in_place_on_a_view_differentiates_twice():
    """What sigmoid_ saves of its result is a part of the changed base."""

    def run():
        x = torch.arange(1.0, 7.0, dtype=torch.float64, requires_grad=True)
        y = x * 1
        first = y[:3]
        first.sigmoid_()
        loss = (first * first).sum() + y[1:].exp().sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return g, *torch.autograd.grad((g * g).sum(), x)

    expected = run()
    with sg.record():
        actual = run()
    for got, wanted in zip(actual, expected, strict=True):
        assert_close(got.detach(), wanted.detach())


def _saved(fn, *inputs):
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with sg.record(), sg.saved_tensors_hooks(pack, lambda t: t):
        out = fn(*inputs)
    return out, kept


@pytest.mark.parametrize(
    "fn", [torch.relu, torch.sigmoid, torch.tanh, lambda x: x.softmax(-1)]
)
def test_saves_its_output(fn):
    """The next op often saves that too; the input may go."""
    x = torch.randn(4, 5, requires_grad=True)
    out, kept = _saved(fn, x)
    assert [t.data_ptr() for t in kept] == [out.data_ptr()]


def test_the_output_may_be_changed_where_pytorch_lets_it():
    def run():
        x = torch.linspace(-8, 8, 9, requires_grad=True)
        outs = [F.relu6(x), F.relu6(x * 1, True), F.hardshrink(x), F.elu(x), F.leaky_relu(x)]
        for y in outs:
            y += 1
        return torch.autograd.grad([y.sum() for y in outs], x)

    same(run)


def test_dropout_saves_a_bool_mask():
    x = torch.randn(8, 9, requires_grad=True)
    out, kept = _saved(lambda x: F.dropout(x, 0.5), x)
    assert [(t.dtype, t.shape) for t in kept] == [(torch.bool, x.shape)]
    assert torch.equal(kept[0], out != 0)


def test_training_rrelu_saves_its_slopes_only():
    x = torch.randn(8, 9, requires_grad=True)
    _, kept = _saved(lambda x: F.rrelu(x, training=True), x)
    assert len(kept) == 1 and bool((kept[0][x > 0] == 1).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.1, 1 / 3, 0.5, 1.0])
def test_dropout_draws_what_pytorch_draws(p, dtype):
    """Same mask, same rounding, and the generator is left in the same state."""

    def run():
        x = torch.randn(7, 11, dtype=dtype).t().requires_grad_()
        y = F.dropout(x, p)
        z = F.dropout1d(y, 0.5)
        return y, z, torch.autograd.grad((z * z).sum(), x), torch.rand(3)

    same(run)


def test_dropout_without_effect_is_its_input():
    x = torch.randn(3, requires_grad=True)
    with sg.record():
        y = x * 2
        assert F.dropout(y, 0.5, False) is y
        assert F.dropout(y, 0.0) is y
        assert F.dropout(y[:0], 0.5).grad_fn.name() == "SliceBackward0"


def test_softmax_in_another_dtype_gives_a_gradient_of_the_inputs():
    def run():
        x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
        return torch.autograd.grad(F.softmax(x, -1, dtype=torch.float32)[:, 0].sum(), x)

    same(run)


def test_masked_rows_of_safe_softmax_are_blind():
    def run():
        scores = torch.full((2, 3), -torch.inf)
        scores[0, 1:] = 1.0
        scores.requires_grad_()
        p = torch.ops.aten._safe_softmax(scores, -1)
        return p, torch.autograd.grad((p * torch.arange(3)).sum(), scores)

    same(run)


def test_fused_dropout_rows():
    """`native_dropout`, which other devices use, and its backward."""

    def run():
        x = torch.randn(5, 6, requires_grad=True)
        y, mask = torch.native_dropout(x, 0.3, True)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y, mask, g, torch.autograd.grad(g.sum(), x)

    same(run)
