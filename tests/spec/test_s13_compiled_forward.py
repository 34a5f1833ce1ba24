"""S13: what a compiled region of the forward saved is unpacked one by one inside its backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

import stowgrad as sg
from stowgrad.program import steps
from stowgrad.program.forward import CompiledNode
from tests.helpers import LiveBytes
from tests.spec.columns import columns, eager, program


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    """What the front end binds for good when it is first used is bound before any test."""
    torch._dynamo.reset()
    sg.compile(nn.Linear(1, 1))(torch.ones(1, 1))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class OneByOne:
    """Hooks that count what they gave and how much of it is alive."""

    def __init__(self) -> None:
        self.packs = self.unpacks = self.most = 0
        self.alive: list[StorageWeakRef] = []

    def pack(self, t: Tensor) -> Any:
        self.packs += 1
        return t.detach().numpy().copy()

    def unpack(self, packed: Any) -> Tensor:
        self.unpacks += 1
        t = torch.from_numpy(packed.copy())
        self.alive = [s for s in self.alive if not s.expired()]
        self.alive.append(StorageWeakRef(t.untyped_storage()))
        self.most = max(self.most, len(self.alive))
        return t

    def hooks(self) -> Any:
        return sg.saved_tensors_hooks(self.pack, self.unpack)


DEPTH, WIDTH = 6, 32


def net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers).double()


def data() -> Tensor:
    return torch.randn(64, WIDTH, dtype=torch.float64)


def regions(loss: Tensor) -> list[Any]:
    seen: dict[Any, None] = {}
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo += [n for n, _ in node.next_functions]
    return [n for n in seen if isinstance(n, CompiledNode)]


@columns(eager, program)
@pytest.mark.usefixtures("recorded")
def test_s13_one_by_one(run: Any) -> None:
    model, x = net(), data()
    forward, pair = sg.compile(model), OneByOne()
    for times in (1, 2, 3):
        with pair.hooks():
            loss = forward(x).square().mean()
        assert len(regions(loss)) == 1
        run(loss)
        assert pair.packs == pair.unpacks
        assert pair.packs >= times * DEPTH
        assert pair.most <= 3, "what a step needs, and no more"
    model.zero_grad()
    expected = net()
    expected.load_state_dict(model.state_dict())
    expected(x).square().mean().backward()
    run(forward(x).square().mean())
    for p, e in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(p.grad, e.grad)


@pytest.mark.usefixtures("recorded")
def test_s13_a_captured_backward_inlines_it() -> None:
    model, x, pair = net(), data(), OneByOne()
    forward = sg.compile(model)
    with pair.hooks():
        loss = forward(x).square().mean()
    captured = sg.capture(loss)
    assert not captured.notes
    targets = [n.target for n in captured.graph.nodes if n.op == "call_function"]
    assert targets.count(steps.unpack) == pair.packs
    assert steps.call_node not in targets
    first = targets.index(steps.unpack)
    last = len(targets) - 1 - targets[::-1].index(steps.unpack)
    between = [t for t in targets[first:last] if t is torch.ops.aten.mm.default]
    assert len(between) >= DEPTH, "products stand between the first unpack and the last"


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("parts", [1, 2])
def test_s13_several_regions_and_what_is_between(parts: int) -> None:
    model, x = net(), data()
    blocks = [sg.compile(model[i : i + 4]) for i in range(0, 2 * DEPTH, 4)]

    def step() -> tuple[OneByOne, list[Tensor | None]]:
        model.zero_grad()
        pair, y = OneByOne(), x
        with pair.hooks():
            for block in blocks:
                y = block(y).sin() * parts
            loss = y.square().mean()
        assert len(regions(loss)) == 3
        loss.backward()
        return pair, [p.grad for p in model.parameters()]

    first, expected = step()
    with sg.compiled_backward():
        for _ in range(2):
            pair, actual = step()
            assert (pair.packs, pair.unpacks) == (first.packs, first.unpacks)
            assert pair.most <= first.most
            for a, e in zip(actual, expected, strict=True):
                assert_close(a, e)
    assert not sg.program_cache.fallbacks


def peak(compiled: bool, captured: bool) -> tuple[int, list[Tensor | None]]:
    torch.manual_seed(0)
    model, x = net(), data()
    forward = sg.compile(model) if compiled else model
    for _ in range(3):  # the first one compiles, the second one is in the cache
        model.zero_grad()
        pair = OneByOne()
        with LiveBytes() as live, sg.record():
            with pair.hooks():
                loss = forward(x).square().mean()
            live.peak = live.now()
            if captured:
                with sg.compiled_backward():
                    loss.backward()
            else:
                loss.backward()
            del loss
    return live.peak, [p.grad for p in model.parameters()]


def test_s13_the_peak_is_lower_than_that_of_unpacking_all_at_once() -> None:
    """That is PyTorch's, eager and captured: everything that the region saved, at the same time."""
    saved = 64 * WIDTH * 8
    plain, expected = peak(compiled=False, captured=False)
    compiled, actual = peak(compiled=True, captured=True)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)
    assert compiled <= plain
    parameters = sum(p.numel() * 8 for p in net().parameters())
    assert compiled < parameters + 6 * saved < parameters + 2 * DEPTH * saved


def test_s13_captured_or_not_the_peak_is_the_same_at_most() -> None:
    node_by_node, _ = peak(compiled=True, captured=False)
    as_program, _ = peak(compiled=True, captured=True)
    assert as_program <= node_by_node
