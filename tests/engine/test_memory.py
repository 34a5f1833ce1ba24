"""How deep a graph may be, and how long backward keeps what it holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import LiveBytes, without_rule

DEEP = 100_000


def leaf(*shape: int) -> Tensor:
    return torch.rand(*(shape or (2,)), requires_grad=True)


# -- depth


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        assert ctx.saved_tensors
        return g


def through_parts(x: Tensor) -> Tensor:
    a, b = x.split(1)
    return torch.cat([b, a])


def in_place(x: Tensor) -> Tensor:
    x[:1].mul_(1)
    return x


def chain(step: Callable[[Tensor], Tensor], x: Tensor, length: int) -> Tensor:
    y = x * 1
    for _ in range(length):
        y = step(y)
    return y.sum()


CHAINS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "mul": (lambda x: x * 1, DEEP),
    "sin": (torch.sin, 30_000),
    "in place": (lambda x: x.mul_(1), 30_000),
    "in place through a view": (in_place, 3_000),
    "views": (lambda x: x.view(2), 30_000),
    "split and cat": (through_parts, 5_000),
    "custom functions": (Same.apply, 5_000),
}
each_chain = pytest.mark.parametrize("kind", list(CHAINS))


@each_chain
def test_a_long_chain_goes_backward(kind: str) -> None:
    step, length = CHAINS[kind]
    x = leaf()
    with sg.record():
        y = chain(step, x, length)
        y.backward()
        del y
    if kind == "sin":
        assert 0 < x.grad.abs().max() < 1
    else:
        assert x.grad.tolist() == [1.0, 1.0]


@each_chain
def test_a_long_chain_is_freed_without_a_backward(kind: str) -> None:
    step, length = CHAINS[kind]
    x = leaf()
    with sg.record():
        y = chain(step, x, 20_000 if kind == "mul" else length)
        gone = weakref.ref(y.grad_fn)
        del y
    assert gone() is None


def test_a_long_chain_of_sines_is_freed_without_a_backward() -> None:
    with sg.record():
        y = chain(torch.sin, leaf(), DEEP)
        gone = weakref.ref(y.grad_fn)
        del y
    assert gone() is None


def test_a_wide_graph_goes_backward() -> None:
    """One leaf in a hundred thousand places, gathered by a list."""
    x = leaf()
    with sg.record():
        parts = [x * 2 for _ in range(DEEP)]
        y = torch.cat(parts).sum()
        del parts
        y.backward()
        del y
    assert x.grad.tolist() == [2.0 * DEEP] * 2


def test_the_graph_of_a_long_backward_is_freed() -> None:
    x = leaf()
    with sg.record():
        (g,) = torch.autograd.grad(chain(torch.sin, x, 5_000), x, create_graph=True)
        gone = weakref.ref(g.grad_fn)
        del g
    gc.collect()
    assert gone() is None


# -- what was saved


def test_what_a_node_saved_is_gone_once_it_has_run() -> None:
    x = leaf()
    alive: list[list[bool]] = []
    with sg.record():
        values = [x * 1]
        for _ in range(4):
            values.append(values[-1].sin())
        storages = [StorageWeakRef(v.untyped_storage()) for v in values[:-1]]
        for v in reversed(values):
            v.register_hook(lambda g: alive.append([not s.expired() for s in storages]))
        loss = values[-1].sum()
        del values, v
        loss.backward()
    assert alive == [[i < 4 - n for i in range(4)] for n in range(5)]


def test_with_retain_graph_it_is_not() -> None:
    x = leaf()
    with sg.record():
        y = x * 1
        storage = StorageWeakRef(y.untyped_storage())
        loss = y.sin().sum()
        del y
        loss.backward(retain_graph=True)
        assert not storage.expired()
        del loss
    assert storage.expired()


def test_a_graph_is_freed_by_counting_references_alone() -> None:
    gc.disable()
    try:
        net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
        with sg.record():
            out = net(torch.randn(5, 3))
            loss = nn.functional.cross_entropy(out, torch.zeros(5, dtype=torch.long))
            gone = [weakref.ref(out.grad_fn), weakref.ref(loss.grad_fn), weakref.ref(out)]
            loss.backward()
            del out, loss
        assert [g() for g in gone] == [None] * 3
    finally:
        gc.enable()


def test_a_leaf_is_freed_with_its_node() -> None:
    gc.disable()
    try:
        x = leaf()
        with sg.record():
            y = x * 2
        gone = weakref.ref(x)
        del x
        assert gone() is not None, "the graph holds it"
        del y
        assert gone() is None
    finally:
        gc.enable()


# -- gradients on their way


def residual(x: Tensor) -> Tensor:
    for _ in range(8):
        x = x + x.sin() * 0.5
    return x


def views(x: Tensor) -> Tensor:
    for _ in range(6):
        x = x.view(100, 10).t().sin().reshape(1000)
    return x


def many_users(x: Tensor) -> Tensor:
    y = x.sin()
    return sum((y * float(i) for i in range(1, 9)), torch.zeros(()))


def stacked(x: Tensor) -> Tensor:
    return torch.stack([x.sin() for _ in range(6)]).exp().sum(0)


GRAPHS = {
    "a chain": lambda x: x.sin().sin().sin().sin().sin(),
    "residual": residual,
    "views": views,
    "one value with many users": many_users,
    "stacked": stacked,
    "softmax": lambda x: x.view(10, 100).softmax(1).log_softmax(1),
    "matrix products": lambda x: x.view(25, 40) @ x.view(40, 25) @ x[:625].view(25, 25).tanh(),
}


def peak(fn: Callable[[Tensor], Tensor], record: Any, forward_too: bool) -> tuple[int, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1000, requires_grad=True)
    with LiveBytes() as live, record:
        loss = fn(x).sum()
        if not forward_too:
            live.peak = live.now()
        loss.backward()
    return live.peak, x.grad


@pytest.mark.parametrize("forward_too", [True, False])
@pytest.mark.parametrize("fn", GRAPHS.values(), ids=list(GRAPHS))
def test_peak_live_bytes_are_at_most_pytorchs(fn: Any, forward_too: bool) -> None:
    theirs, want = peak(fn, nullcontext(), forward_too)
    ours, found = peak(fn, sg.record(), forward_too)
    assert_close(found, want)
    assert 0 < ours <= theirs


def test_gradients_on_their_way_are_few() -> None:
    """In a chain: the one that arrives at a node, and the one that leaves it."""
    size = 1000
    x = torch.randn(size, requires_grad=True)
    with LiveBytes() as live, sg.record():
        y = x
        for _ in range(20):
            y = y * 2.0  # saves nothing
        live.peak = 0
        y.backward(torch.ones(size))
    assert live.peak <= 4 * size * 4  # with the one given and y itself


def test_gradients_of_one_value_are_summed_in_place() -> None:
    size = 1000
    x = torch.randn(size, requires_grad=True)
    with LiveBytes() as live, sg.record():
        y = x * 2.0
        loss = sum(((y * float(i)).sum() for i in range(8)), torch.zeros(()))
        live.peak = 0
        loss.backward()
    assert live.peak <= 3 * size * 4 + 64  # y, the sum, and what is added to it


def test_the_fallback_keeps_nothing() -> None:
    x = torch.randn(1000, requires_grad=True)
    with LiveBytes() as live, sg.record():
        with without_rule(torch.ops.aten.atan.default):
            loss = x.atan().sum()
        loss.backward()
        del loss
        x.grad = None
        assert live.now() == 0
