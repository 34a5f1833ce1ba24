"""S11: each hooked saved tensor is an input of the program, and a step that unpacks it late."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import stowgrad as sg
from stowgrad.program import steps
from tests.helpers import Recording

pytestmark = pytest.mark.usefixtures("recorded")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=torch.float64, requires_grad=True)


def inputs(program: sg.Program, kind: str) -> list[torch.fx.Node]:
    nodes = program.graph.nodes
    return [n for n in nodes if n.op == "placeholder" and n.meta["input"][0] == kind]


def unpacks(program: sg.Program) -> list[torch.fx.Node]:
    return [n for n in program.graph.nodes if n.target is steps.unpack]


def chain(x: Tensor, depth: int = 6) -> Tensor:
    for _ in range(depth):
        x = x.sin()
    return x.sum()


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    ).double()


def transformer() -> Callable[[], Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    data = torch.randn(2, 5, 8, dtype=torch.float64)
    return lambda: layer(data).square().mean()


def mlp() -> Callable[[], Tensor]:
    model, data = net(), torch.randn(3, 4, dtype=torch.float64)
    return lambda: model(data).square().mean()


each_model = pytest.mark.parametrize("make", [mlp, transformer])


# -- the graph


@each_model
def test_s11_each_hooked_tensor_is_an_input_and_an_unpack(make: Any) -> None:
    forward, pair = make(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = forward()
    program = sg.capture(loss)
    found = unpacks(program)
    assert len(found) == pair.packs
    assert [n.args[0] for n in found] == [
        n for n in (u.args[0] for u in found) if n in inputs(program, "saved")
    ]
    assert len({n.args[0] for n in found}) == len(found), "each of its own"
    assert not inputs(program, "raw")


@each_model
def test_s11_what_has_no_hooks_is_a_plain_input(make: Any) -> None:
    program = sg.capture(make()())
    assert not unpacks(program)
    assert inputs(program, "raw")


def test_s11_the_two_kinds_in_one_program() -> None:
    x, pair = leaf(), Recording()
    y = x.sin()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        z = y.exp()
    loss = (z * x).sum()
    program = sg.capture(loss)
    assert len(unpacks(program)) == 1
    assert len(inputs(program, "raw")) == 3  # the input of sin, both factors


def test_s11_hooks_on_one_tensor_count_as_well() -> None:
    x, pair = leaf(), Recording()
    y = x.sin()
    z = y.cos().sum()
    y.grad_fn._raw_saved_self.register_hooks(pair.pack, pair.unpack)
    program = sg.capture(z)
    assert len(unpacks(program)) == 1
    with sg.compiled_backward():
        z.backward()
    assert pair.counts == (1, 1)
    assert_close(x.grad, -x.detach().sin().sin() * x.detach().cos())


@each_model
@pytest.mark.parametrize("reorder", [False, True])
def test_s11_unpacks_stand_as_late_as_their_first_use_allows(make: Any, reorder: bool) -> None:
    """Between an unpack and its first use there are but other steps that unpack or read for the
    same use. (Reordered, the node may let go of what it saved first, to free it early.)"""
    forward, pair = make(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = forward()
    program = sg.capture(loss, reorder=reorder)
    order = list(program.graph.nodes)
    for n in unpacks(program):
        first = min(map(order.index, n.users))
        for between in order[order.index(n) + 1 : first]:
            if reorder:
                assert between.meta["spec"] is n.meta["spec"], (n, between)
            else:
                assert between.target in (steps.unpack, steps.check, steps.read), (n, between)


def test_s11_an_unpack_does_not_pass_user_code() -> None:
    """A hook that comes before it in the eager engine comes before it here."""

    def order() -> list[str]:
        x, log = leaf(), []

        def unpack(t: Tensor) -> Tensor:
            log.append("unpack")
            return t

        with sg.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
            y = x.sin()
            z = y.exp()
        z.register_hook(lambda g: log.append("z"))
        y.register_hook(lambda g: log.append("y"))
        y.grad_fn.register_prehook(lambda g: log.append("before sin"))
        x.register_hook(lambda g: log.append("x"))
        z.sum().backward()
        return log

    expected = order()
    assert expected == ["z", "unpack", "y", "before sin", "unpack", "x"]
    with sg.compiled_backward():
        assert order() == expected
        assert order() == expected


# -- running


class Log(TorchDispatchMode):
    """The ops that run, and what is noted between."""

    passive = True

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in ("cos", "mm", "mul"):
            self.events.append(name)
        return func(*args, **(kwargs or {}))


def test_s11_unpacks_and_ops_take_turns() -> None:
    x, log = leaf(), Log()

    def unpack(t: Tensor) -> Tensor:
        log.events.append("unpack")
        return t

    def step() -> list[str]:
        with sg.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
            loss = chain(x, 4)
        log.events.clear()
        with log:
            loss.backward()
        return list(log.events)

    with sg.compiled_backward():
        for _ in range(2):
            assert step() == ["unpack", "cos", "mul"] * 4


class OneByOne:
    """Hooks that know how many of the tensors they gave are alive, at most."""

    def __init__(self) -> None:
        self.alive: list[StorageWeakRef] = []
        self.most = 0
        self.unpacks = 0

    def pack(self, t: Tensor) -> Any:
        return t.detach().numpy().copy()

    def unpack(self, packed: Any) -> Tensor:
        self.unpacks += 1
        t = torch.from_numpy(packed.copy())
        self.alive = [s for s in self.alive if not s.expired()]
        self.alive.append(StorageWeakRef(t.untyped_storage()))
        self.most = max(self.most, len(self.alive))
        return t


def test_s11_each_value_is_dropped_after_its_last_use() -> None:
    x, pair = leaf(), OneByOne()
    with sg.compiled_backward():
        for _ in range(2):
            with sg.saved_tensors_hooks(pair.pack, pair.unpack):
                loss = chain(x)
            loss.backward()
            del loss
    assert pair.unpacks == 12
    assert pair.most == 1, "the one before is gone when the next one comes"


@each_model
def test_s11_no_more_are_alive_than_in_the_eager_engine(make: Any) -> None:
    forward = make()

    def most() -> int:
        pair = OneByOne()
        with sg.saved_tensors_hooks(pair.pack, pair.unpack):
            loss = forward()
        loss.backward()
        assert pair.unpacks > 5
        return pair.most

    eager = most()
    with sg.compiled_backward():
        for _ in range(2):
            assert most() <= eager


def test_s11_packed_values_are_dropped_one_by_one_too() -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    x, boxes, seen = leaf(), [], []

    def pack(t: Tensor) -> Box:
        box = Box(t.detach().clone())
        boxes.append(weakref.ref(box))
        return box

    def unpack(box: Box) -> Tensor:
        seen.append(sum(b() is not None for b in boxes))
        return box.tensor.clone()

    gc.disable()
    try:
        with sg.compiled_backward():
            for _ in range(2):
                boxes.clear()
                seen.clear()
                with sg.saved_tensors_hooks(pack, unpack):
                    loss = chain(x)
                loss.backward()
                assert seen == [6, 5, 4, 3, 2, 1]
                assert all(b() is None for b in boxes)
    finally:
        gc.enable()


def test_s11_plain_inputs_are_dropped_one_by_one_too() -> None:
    x, seen = leaf(), []
    with sg.compiled_backward():
        for _ in range(2):
            y, refs = x * 1, []
            for _ in range(6):
                refs.append(StorageWeakRef(y.untyped_storage()))
                y = y.sin()
                y.register_hook(
                    lambda g, refs=refs: seen.append(sum(not r.expired() for r in refs))
                )
            loss = y.sum()
            del y
            seen.clear()
            loss.backward()
            assert seen == [6, 5, 4, 3, 2, 1]


def test_s11_the_gradients_are_right_whatever_the_hooks() -> None:
    model = net()
    data = torch.randn(3, 4, dtype=torch.float64)
    model(data).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    disk, half = sg.ToDisk(smallest=1), (lambda t: t.numpy().copy(), torch.from_numpy)
    pairs = [
        (disk.pack, disk.unpack),
        (lambda t: half[0](t.detach()), half[1]),
        sg.compose(disk, (lambda t: (t, None), lambda p: p[0])),
    ]
    for pair in pairs:
        with sg.compiled_backward():
            for _ in range(2):
                model.zero_grad()
                with sg.saved_tensors_hooks(*pair):
                    loss = model(data).square().mean()
                loss.backward()
                for p, e in zip(model.parameters(), expected, strict=True):
                    assert_close(p.grad, e, rtol=0, atol=0)


def test_s11_a_checkpoint_stays_a_step_at_its_place() -> None:
    """It recomputes when the backward comes to it, and not before."""
    x, log = leaf(), []

    def block(name: str) -> Callable[[Tensor], Tensor]:
        def run(t: Tensor) -> Tensor:
            log.append(name)
            return t.sin().exp()

        return run

    def step() -> list[str]:
        a = checkpoint(block("first"), x, use_reentrant=False)
        b = checkpoint(block("second"), a, use_reentrant=False)
        a.register_hook(lambda g: log.append("between"))
        loss = b.sum()
        log.clear()
        loss.backward()
        return list(log)

    expected = step()
    assert expected == ["second", "between", "first"]
    with sg.compiled_backward():
        assert step() == expected
        assert step() == expected
