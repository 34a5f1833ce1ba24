"""Pooling: what is saved, ties, memory format, second derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.parity import same


@pytest.mark.parametrize(
    "name",
    [f"nn.functional.{kind}_pool{d}d" for kind in ("avg", "max", "adaptive_avg", "adaptive_max")
     for d in (1, 2, 3)]
    + [f"nn.functional.fractional_max_pool{d}d" for d in (2, 3)]
    + [f"nn.functional.max_unpool{d}d" for d in (1, 2, 3)]
    + ["nn.functional.max_unpool2d.grad", "max_pool2d_with_indices_backward"],
)  # fmt: skip
def test_the_database_by_our_rules(name):
    assert_by_rule(name, torch.float64)


POOLS = [
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.max_pool2d(x, 3, 2, 1, dilation=1, ceil_mode=True),
    lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    lambda x: F.adaptive_max_pool2d(x, 3),
    lambda x: F.adaptive_avg_pool2d(x, 3),
    lambda x: F.lp_pool2d(x, 3.0, 2),
]


@pytest.mark.parametrize("fn", POOLS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("batch", [2, 0, None])
def test_values_and_strides_are_pytorchs(fn, channels_last, batch):
    if channels_last and batch is None:
        pytest.skip("three dims have no such format")

    def run():
        x = torch.rand(*([] if batch is None else [batch]), 4, 9, 8)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        y = fn(x)
        (g,) = torch.autograd.grad(y, x, torch.randn(y.shape))
        return y, g, g.stride()

    same(run)


def _saved(fn):
    kept = []
    with sg.record(), sg.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fn()
    return [(t.dtype, tuple(t.shape)) for t in kept]


def test_what_is_saved():
    """Max pools save where the maxima were, average pools nothing; PyTorch saves the input too."""
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    assert _saved(lambda: F.max_pool2d(x, 2)) == [(torch.int64, (2, 3, 4, 4))]
    assert _saved(lambda: F.adaptive_max_pool2d(x, 2)) == [(torch.int64, (2, 3, 2, 2))]
    assert _saved(lambda: F.avg_pool2d(x, 2)) == []
    assert _saved(lambda: F.adaptive_avg_pool2d(x, 3)) == []


def test_input_may_change_after_pooling():
    """The gradient does not depend on the values that were pooled."""
    with sg.record():
        x = torch.arange(16.0).view(1, 1, 4, 4).requires_grad_()
        y = x * 1
        z = F.max_pool2d(y, 2) + F.avg_pool2d(y, 2)
        y.zero_()
        z.sum().backward()
    assert x.grad.sum() == 8 and x.grad[0, 0, 1, 1] == 1.25


@pytest.mark.parametrize("fn", [F.max_pool2d, F.adaptive_max_pool2d])
def test_ties_go_where_pytorch_sends_them(fn):
    def run():
        x = torch.zeros(1, 2, 4, 4)
        x[0, 1] = float("nan")
        x.requires_grad_()
        fn(x, 2).sum().backward()
        return x.grad

    same(run)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_global_average(format):
    """PyTorch takes a mean, and marks its result as channels last if the input was."""

    def run():
        x = torch.rand(2, 4, 9, 8).to(memory_format=format).requires_grad_()
        y = F.adaptive_avg_pool2d(x, 1)
        y.pow(2).sum().backward()
        return y, y.stride(), x.grad, x.grad.stride()

    same(run)


@pytest.mark.parametrize("fn", POOLS)
def test_second_derivatives(fn):
    def run():
        x = torch.rand(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(fn(x).pow(3).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.pow(2).sum(), x)
        return g, h

    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with sg.record():
        actual = run()
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach())


def test_returned_indices_have_no_gradient():
    with sg.record():
        x = torch.randn(1, 1, 4, 4, requires_grad=True)
        y, indices = F.max_pool2d(x, 2, return_indices=True)
        assert y.requires_grad and not indices.requires_grad
        back = F.max_unpool2d(y, indices, 2)
        back.sum().backward()
    assert x.grad.sum() == 4


def test_batched_gradients():
    def run():
        x = torch.randn(2, 4, 6, 6, requires_grad=True)
        y = F.max_pool2d(x, 2) + F.avg_pool2d(x, 2)
        return torch.autograd.grad(y, x, torch.randn(5, *y.shape), is_grads_batched=True)

    same(run)
