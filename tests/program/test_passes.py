"""Each pass on its own: what it does to a graph, and that nobody can tell by the results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.fx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stowgrad as sg
from stowgrad import engine
from stowgrad.autograd import roots_of, targets_of
from stowgrad.context import backward_scope, below_overrides
from stowgrad.errors import SavedTensorChanged
from stowgrad.program import passes, steps
from stowgrad.program.capture import Captured, capture, compute, item
from stowgrad.program.effects import Effects, Kind, arrange, kind_of
from stowgrad.program.memory import peak_bytes
from stowgrad.program.program import Program
from stowgrad.saved import SavedTensor, compose, prefetch_of, saved_tensors_hooks

aten = torch.ops.aten
Pass = Callable[[Captured], None]


class Backward:
    """A backward that can be captured, and run by the engine or as a program, time and again."""

    def __init__(
        self, loss: Callable[[], Tensor | Sequence[Tensor]], inputs: Sequence[Tensor] | None = None
    ) -> None:
        with sg.record():
            outputs = loss()
            self.outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            grads = [
                torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape)
                for o in self.outputs
            ]
            self.roots = roots_of(self.outputs, grads)
            self.targets = None if inputs is None else targets_of(inputs, accumulate=False)

    def captured(self, **options: Any) -> Captured:
        with sg.record(), backward_scope(False), below_overrides():
            return capture(
                self.roots, inputs=self.targets, accumulate=self.targets is None, **options
            )

    def eager(self) -> list[Tensor | None]:
        with sg.record(), below_overrides():
            return list(
                engine.run(self.roots, True, False, self.targets, self.targets is None)
            )

    def run(self, captured: Captured) -> list[Tensor | None]:
        with sg.record(), below_overrides():
            program = Program(captured)
            inputs = program.match(self.roots, self.targets, True)
            assert type(inputs) is list, program.reason(inputs)  # type: ignore[arg-type]
            return list(program.run(inputs, self.roots, True, self.targets))


def same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    """Whether they agree to the last bit, NaNs included."""
    return len(a) == len(b) and all(
        (x is None and y is None)
        or (
            x is not None and y is not None and x.dtype is y.dtype
            and torch.equal(torch.nan_to_num(x, 7.5), torch.nan_to_num(y, 7.5))
            and x.stride() == y.stride()
        )
        for x, y in zip(a, b, strict=True)
    )  # fmt: skip


def targets(captured: Captured) -> list[Any]:
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]


def find(captured: Captured, target: Any) -> list[torch.fx.Node]:
    return [n for n in captured.graph.nodes if n.target is target]


def places(captured: Captured) -> dict[torch.fx.Node, int]:
    return {n: i for i, n in enumerate(captured.graph.nodes)}


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape).add_(0.5).requires_grad_()


@contextmanager
def copies(log: list[str] | None = None) -> Iterator[None]:
    """Within: saved tensors are kept as copies, out of PyTorch's sight."""

    def pack(tensor: Tensor) -> Any:
        return tensor.tolist(), tensor.dtype

    def unpack(packed: Any) -> Tensor:
        if log is not None:
            log.append("unpack")
        return torch.tensor(packed[0], dtype=packed[1])

    with saved_tensors_hooks(pack, unpack):
        yield


# -- nets


def chain(n: int = 6, size: int = 4) -> Backward:
    x = leaf(size)

    def loss() -> Tensor:
        y = x
        for _ in range(n):
            y = y * x
        return y.exp().sum()

    return Backward(loss, [x])


def mlp() -> Backward:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3), nn.Tanh())
    x = torch.randn(4, 5)
    return Backward(lambda: net(x).square().sum(), list(net.parameters()))


def attention() -> Backward:
    torch.manual_seed(0)
    x, w, o = torch.randn(2, 6, 8), leaf(8, 24), leaf(8, 8)

    def loss() -> Tensor:
        q, k, v = (x @ w).split(8, -1)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return ((weights @ v).transpose(1, 2).flatten(2) @ o).square().mean()

    return Backward(loss, [w, o])


def hooked() -> Backward:
    """Unpack hooks, hooks on tensors, a custom function."""
    torch.manual_seed(0)
    a, b = leaf(3, 3), leaf(3, 3)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    def loss() -> Tensor:
        with copies():
            y = (a @ b).tanh() * a
        y.register_hook(lambda g: g * 3)
        z = Double.apply(b) * y + b
        z.register_hook(lambda g: None)
        return (z * z).sum()

    return Backward(loss, [a, b])


NETS = [chain, mlp, attention, hooked]
ALL: list[Pass] = [
    passes.latest_unpack,
    passes.remove_dead,
    passes.common_subexpressions,
    lambda c: passes.common_subexpressions(c, far=True),
    passes.reorder,
    passes.reuse,
    lambda c: passes.fetch_ahead(c, 2),
    passes.schedule,
    lambda c: passes.schedule(c, window=2, reorder=True),
    lambda c: passes.schedule(c, reorder=True, direct=False),
]
NAMES = [
    "latest", "dead", "common", "common far", "reorder", "reuse", "fetch", "schedule", "all",
    "indirect",
]  # fmt: skip


@pytest.mark.parametrize("change", ALL, ids=NAMES)
@pytest.mark.parametrize("net", [chain, mlp, hooked])
def test_same_results(net: Callable[[], Backward], change: Pass) -> None:
    backward = net()
    expected = backward.eager()
    captured = backward.captured()
    change(captured)
    captured.graph.lint()
    assert same(backward.run(captured), expected)
    again = backward.captured()  # nothing that was saved has been written to
    assert same(backward.run(again), expected)


def test_same_results_of_a_larger_net() -> None:
    backward = attention()
    expected = backward.eager()
    captured = backward.captured()
    passes.schedule(captured, window=2, reorder=True)
    captured.graph.lint()
    assert same(backward.run(captured), expected)


@pytest.mark.parametrize("change", ALL, ids=NAMES)
def test_leaves_accumulate_the_same(change: Pass) -> None:
    w, b = leaf(4, 4), leaf(4)
    backward = Backward(lambda: ((w @ w + b).tanh() * b).sum())
    for _ in range(2):  # the second time there is something to add to
        found = []
        for program in (False, True):
            before = None if w.grad is None else (w.grad.clone(), b.grad.clone())
            captured = backward.captured()
            change(captured)
            if program:
                backward.run(captured)
            else:
                backward.eager()
            found.append((w.grad.clone(), b.grad.clone()))
            w.grad, b.grad = before if before is not None else (None, None)
        assert same(*found)
        w.grad, b.grad = (t.clone() for t in found[0])


# -- latest_unpack


class TestLatestUnpack:
    def test_moves_each_to_its_first_use(self) -> None:
        backward = chain()
        captured = backward.captured()
        firsts = [*find(captured, steps.check), *find(captured, steps.read)]
        rest = [n for n in captured.graph.nodes if n.op == "call_function" and n not in firsts]
        arrange(captured.graph, [*firsts, *rest])
        passes.latest_unpack(captured)
        at = places(captured)
        for node in firsts:
            between = list(captured.graph.nodes)[at[node] + 1 : min(at[u] for u in node.users)]
            assert all(n.target in (steps.check, steps.read) for n in between)
        assert same(backward.run(captured), backward.eager())

    def test_unpacks_keep_their_order_among_user_code(self) -> None:
        backward = hooked()
        captured = backward.captured()
        before = [n for n in captured.graph.nodes if n.op == "call_function"]
        user = [n for n in before if kind_of(n.target) in (Kind.USER, Kind.VISIBLE)]
        unpacks = find(captured, steps.unpack)
        assert len(unpacks) > 2
        passes.latest_unpack(captured)
        after = [n for n in captured.graph.nodes if n.op == "call_function"]
        assert [n for n in after if n in user] == user

    def test_unpack_moves_down_to_its_use(self) -> None:
        a = leaf(3)
        with copies():
            backward = Backward(lambda: a.sin().exp().sum(), [a])
        captured = backward.captured()
        first, second = find(captured, steps.unpack)
        earliest = next(n for n in captured.graph.nodes if n.op == "call_function")
        earliest.prepend(first)
        passes.latest_unpack(captured)
        at = places(captured)
        assert at[first] == min(at[u] for u in first.users) - 1
        assert at[first] < at[second]

    def test_a_check_stays_above_what_changes_the_tensor(self) -> None:
        backward = chain(2)
        captured = backward.captured()
        check = find(captured, steps.check)[0]
        (use,) = check.users
        with captured.graph.inserting_before(use):
            change = captured.graph.call_function(aten.mul_.Tensor, (check.args[0], 2.0))
        change.meta.update(val=check.args[0].meta["val"], spec=None)
        passes.latest_unpack(captured)
        at = places(captured)
        assert at[check] < at[change] < at[use]

    def test_a_read_stays_above_its_release(self) -> None:
        backward = chain(2)
        captured = backward.captured()
        (read,) = find(captured, steps.read)
        release = next(
            n for n in find(captured, steps.release) if n.meta["spec"] is read.meta["spec"]
        )
        read.append(release)
        passes.latest_unpack(captured)
        at = places(captured)
        assert at[read] < at[release]


# -- fetch_ahead


class Remote:
    """A policy that fetches from far away: each fetch takes a while, several go on at once."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.log: list[tuple[str, int]] = []
        self.arrived: dict[int, threading.Event] = {}
        self.count = 0
        self.waiting = 0
        self.most_waiting = 0

    def pack(self, tensor: Tensor) -> tuple[int, Any]:
        self.count += 1
        return self.count, tensor.numpy().copy()

    def prefetch(self, packed: tuple[int, Any]) -> None:
        number, _ = packed
        self.log.append(("fetch", number))
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        event = self.arrived[number] = threading.Event()
        threading.Timer(self.seconds, event.set).start()

    def unpack(self, packed: tuple[int, Any]) -> Tensor:
        number, array = packed
        self.log.append(("unpack", number))
        event = self.arrived.pop(number, None)
        if event is None:
            time.sleep(self.seconds)
        else:
            event.wait()
            self.waiting -= 1
        return torch.tensor(array)


class TestFetchAhead:
    def deep(self, remote: Any, n: int = 8) -> Backward:
        x = leaf(4)

        def loss() -> Tensor:
            y = x
            with saved_tensors_hooks(remote.pack, remote.unpack):
                for _ in range(n):
                    y = y.sin()
            return y.sum()

        return Backward(loss, [x])

    @pytest.mark.parametrize("window", [1, 3, 8, 20])
    def test_order_and_window(self, window: int) -> None:
        remote = Remote()
        backward = self.deep(remote)
        captured = backward.captured()
        passes.fetch_ahead(captured, window)
        assert same(backward.run(captured), backward.eager())
        log = remote.log[:16]
        unpacked = [n for what, n in log if what == "unpack"]
        assert unpacked == [8, 7, 6, 5, 4, 3, 2, 1]
        assert [n for what, n in log if what == "fetch"] == unpacked
        for i, n in enumerate(unpacked):  # `window` unpacks ahead, or at the start
            ahead = log[: log.index(("fetch", n))]
            assert sum(what == "unpack" for what, _ in ahead) == max(0, i + 1 - window)

    @pytest.mark.parametrize("window", [1, 3, 20])
    def test_never_more_in_flight_than_the_window(self, window: int) -> None:
        remote = Remote()
        backward = self.deep(remote)
        captured = backward.captured()
        passes.schedule(captured, window=window)
        backward.run(captured)
        assert remote.most_waiting == min(window, 8)
        assert remote.waiting == 0

    def test_fetches_overlap(self) -> None:
        remote = Remote(seconds=0.04)
        backward = self.deep(remote)
        took = {}
        for window in (0, 4):
            captured = backward.captured()
            passes.schedule(captured, window=window)
            began = time.perf_counter()
            backward.run(captured)
            took[window] = time.perf_counter() - began
        assert took[0] > 8 * 0.04
        assert took[4] < 0.7 * took[0]

    def test_pairs_that_cannot(self) -> None:
        a = leaf(3)
        with copies():
            backward = Backward(lambda: a.sin().exp().sum(), [a])
        captured = backward.captured()
        passes.fetch_ahead(captured, 2)
        assert not find(captured, steps.fetch)

    def test_where_prefetch_is_looked_for(self) -> None:
        remote = Remote()
        assert prefetch_of(remote.unpack) == remote.prefetch

        def unpack(packed: Any) -> Tensor:
            return packed

        assert prefetch_of(unpack) is None
        unpack.prefetch = remote.prefetch  # type: ignore[attr-defined]
        assert prefetch_of(unpack) == remote.prefetch

    def test_composed(self) -> None:
        remote = Remote()
        pair = compose((lambda t: (t.clone(), "other"), lambda packed: packed[0]), remote)
        backward = self.deep(pair, 3)
        captured = backward.captured()
        passes.schedule(captured, window=1)
        assert same(backward.run(captured), backward.eager())
        assert remote.log[:6] == [
            ("fetch", 3), ("unpack", 3), ("fetch", 2), ("unpack", 2), ("fetch", 1), ("unpack", 1),
        ]  # fmt: skip

    def test_through_the_public_name(self) -> None:
        remote = Remote()
        x = leaf(4)
        with sg.record(), sg.compiled_backward(window=2):
            with sg.saved_tensors_hooks(remote.pack, remote.unpack):
                loss = x.sin().sin().sin().sum()
            loss.backward()
        assert [what for what, _ in remote.log] == [
            "fetch", "fetch", "unpack", "fetch", "unpack", "unpack",
        ]  # fmt: skip

    def test_nothing_to_fetch_any_more(self) -> None:
        saved = SavedTensor(torch.ones(2), "x", "op")
        steps.fetch(saved)
        saved.release()
        steps.fetch(saved)


# -- reorder


class TestReorder:
    def branches(self, pack: Any = None) -> Backward:
        """Forward goes over all branches twice, so backward has the big gradients of all at once,
        unless it finishes one after the other."""
        small = [leaf(64) for _ in range(6)]
        big = torch.rand(64, 64)

        def loss() -> Tensor:
            wide = [(s * 2) * big for s in small]
            return torch.stack([w.neg().sum() for w in wide]).sum()

        return Backward(loss, small)

    def test_lowers_the_peak(self) -> None:
        backward = self.branches()
        captured = backward.captured()
        before = peak_bytes(captured)
        passes.reorder(captured)
        assert peak_bytes(captured) < 0.6 * before
        assert same(backward.run(captured), backward.eager())

    @pytest.mark.parametrize("net", NETS)
    def test_never_raises_it(self, net: Callable[[], Backward]) -> None:
        captured = net().captured()
        order = list(captured.graph.nodes)
        before = peak_bytes(captured)
        passes.reorder(captured)
        after = peak_bytes(captured)
        assert after < before or order == list(captured.graph.nodes)

    def test_user_code_keeps_its_order_and_its_surroundings(self) -> None:
        seen: list[Any] = []
        a, b = leaf(32, 32), leaf(32)

        def optimizer(p: Tensor) -> None:  # changes what is saved, once it is not needed any more
            seen.append((p is a, p.grad.clone()))
            with torch.no_grad():
                p -= p.grad

        a.register_post_accumulate_grad_hook(optimizer)
        b.register_post_accumulate_grad_hook(optimizer)
        results = []
        start = a.detach().clone(), b.detach().clone()
        for change in (None, passes.reorder, lambda c: passes.schedule(c, reorder=True)):
            with torch.no_grad():
                a.copy_(start[0])
                b.copy_(start[1])
            a.grad = b.grad = None
            seen.clear()
            log: list[str] = []
            with copies(log):
                backward = Backward(lambda: ((a @ a) * b).sin().sum())
            if change is None:
                backward.eager()
            else:
                captured = backward.captured()
                change(captured)
                backward.run(captured)
            results.append(([s for s, _ in seen], [g for _, g in seen], a.detach().clone(), log))
        for order, grads, value, log in results[1:]:
            assert order == results[0][0]
            assert same(grads, results[0][1])
            assert same([value], [results[0][2]])
            assert log == results[0][3]

    @pytest.mark.parametrize("late", [False, True])
    def test_a_grad_that_was_saved(self, late: bool) -> None:
        """Accumulating changes a saved tensor: after its use, or before it, which is an error."""
        found = []
        for change in (None, passes.reorder):
            p, q = (torch.full((8,), v, requires_grad=True) for v in (0.5, 0.8))
            p.grad = torch.ones(8)

            def loss(p: Tensor = p, q: Tensor = q) -> Tensor:
                assert p.grad is not None
                if late:
                    return ((q * p.grad).sin() * p).sum()
                return (p.sin() * q * p.grad).sum()

            backward = Backward(loss)
            captured = backward.captured()
            if change is not None:
                change(captured)
            run = backward.eager if change is None else lambda: backward.run(captured)  # noqa: B023
            if late:
                with pytest.raises(SavedTensorChanged):
                    run()
            else:
                run()
                found.append([p.grad, q.grad])
        assert late or same(*found)

    def test_ops_in_place_and_their_readers(self) -> None:
        backward = chain(2)
        captured = backward.captured()
        passes.reuse(captured)
        before = backward.run(backward.captured())
        effects = Effects(captured)
        assert any(effects.written(n) for n in captured.graph.nodes)
        passes.reorder(captured)
        assert same(backward.run(captured), before)


# -- common_subexpressions


class TestCommonSubexpressions:
    def doubled(self, backward: Backward, target: Any) -> tuple[Captured, torch.fx.Node]:
        """A capture in which the first call of `target` with users is there once more at once, for
        its last user."""
        captured = backward.captured()
        node = next(n for n in find(captured, target) if n.users)
        with captured.graph.inserting_after(node):
            twin = captured.graph.node_copy(node)
        with sg.record(), backward_scope(False), below_overrides():
            twin.meta["val"] = node.meta["val"].clone()
        user = list(node.users)[-1]
        user.replace_input_with(node, twin)
        return captured, twin

    @pytest.mark.parametrize("target", [aten.mul.Tensor, steps.check])
    def test_merges(self, target: Any) -> None:
        backward = chain()
        plain = targets(backward.captured())
        captured, _ = self.doubled(backward, target)
        passes.common_subexpressions(captured)
        assert len(targets(captured)) <= len(plain)
        assert same(backward.run(captured), backward.eager())

    def test_not_across_a_change(self) -> None:
        backward = chain()
        captured, twin = self.doubled(backward, aten.mul.Tensor)
        argument = twin.args[0]
        with captured.graph.inserting_before(twin):
            change = captured.graph.call_function(aten.neg_.default, (argument,))
        change.meta.update(val=argument.meta["val"], spec=None)
        passes.common_subexpressions(captured)
        assert twin in list(captured.graph.nodes)

    def test_not_what_is_changed(self) -> None:
        backward = chain()
        captured, twin = self.doubled(backward, aten.mul.Tensor)
        with captured.graph.inserting_after(twin):
            change = captured.graph.call_function(aten.neg_.default, (twin,))
        change.meta.update(val=twin.meta["val"], spec=None)
        passes.common_subexpressions(captured)
        assert twin in list(captured.graph.nodes)

    def test_checks_not_across_user_code(self) -> None:
        a = leaf(3)
        log: list[Any] = []

        def loss() -> Tensor:
            y = a.sin()  # saves a
            y.register_hook(log.append)
            return (y * a).sum()  # saves a

        backward = Backward(loss, [a])
        captured = backward.captured()
        before = targets(captured).count(steps.check) + targets(captured).count(steps.read)
        passes.common_subexpressions(captured)
        assert targets(captured).count(steps.check) + targets(captured).count(steps.read) == before

    def test_not_gradients_that_leave(self) -> None:
        a, b = leaf(3), leaf(3)
        c = torch.rand(3)
        backward = Backward(lambda: (a * c).sum() + (b * c).sum(), [a, b])
        captured = backward.captured()
        passes.common_subexpressions(captured, far=True)
        one, other = backward.run(captured)
        assert one is not None and other is not None
        assert one.data_ptr() != other.data_ptr()

    def test_random_numbers_are_drawn_each_time(self) -> None:
        assert kind_of(aten.rand.default) is Kind.USER
        assert kind_of(aten.native_dropout.default) is Kind.USER

    @pytest.mark.parametrize("net", NETS)
    def test_never_raises_the_peak(self, net: Callable[[], Backward]) -> None:
        captured = net().captured()
        before = peak_bytes(captured)
        passes.common_subexpressions(captured)
        assert peak_bytes(captured) <= before

    def test_numbers_of_other_types_are_others(self) -> None:
        frozen = passes._frozen
        assert len({frozen(v) for v in (1, 1.0, True, 0.0, -0.0)}) == 5


# -- remove_dead


class TestRemoveDead:
    def test_dead_code_and_inputs_go(self) -> None:
        backward = chain(3)
        captured = backward.captured()
        wanted = targets(captured)
        used = next(n for n in find(captured, aten.mul.Tensor))
        with captured.graph.inserting_after(used):
            dead = captured.graph.call_function(aten.exp.default, (used,))
            dead.meta.update(val=used.meta["val"], spec=None)
            with captured.graph.inserting_after(dead):
                deader = captured.graph.call_function(item, ([dead], 0))
                deader.meta.update(val=used.meta["val"], spec=None)
        passes.remove_dead(captured)
        assert targets(captured) == wanted
        assert same(backward.run(captured), backward.eager())

    def test_inputs_are_forgotten_where_they_were_noted(self) -> None:
        backward = chain(3)
        captured = backward.captured()
        check = find(captured, steps.check)[0]
        spec, entry = check.meta["spec"], check.meta["entry"]
        for other in find(captured, steps.check):  # as if nobody needed its value
            if other.meta["spec"] is spec:
                other.replace_all_uses_with(find(captured, steps.read)[0])
                captured.graph.erase_node(other)
        passes.remove_dead(captured)
        assert entry.placeholder is None
        assert spec.versions is None
        assert not any(n.op == "placeholder" and not n.users for n in captured.graph.nodes)

    @pytest.mark.parametrize("target", [steps.check, steps.read, steps.unpack])
    def test_what_eager_would_run_stays(self, target: Any) -> None:
        a = leaf(3)
        with copies():
            packed = Backward(lambda: a.sin().sum(), [a])
        backward = packed if target is steps.unpack else chain(2)
        captured = backward.captured()
        node = find(captured, target)[0]
        (user,) = node.users
        user.replace_input_with(node, user.args[0])  # of the gradient alone
        count = targets(captured).count(target)
        passes.remove_dead(captured)
        assert targets(captured).count(target) == count

    def test_unpack_hooks_fire_as_often(self) -> None:
        counts = []
        for change in (None, *ALL):
            log: list[str] = []
            a, b = leaf(3, 3), leaf(3, 3)
            with copies(log):
                backward = Backward(lambda a=a, b=b: ((a @ b).sin() * a).sum())
            if change is None:
                backward.eager()
            else:
                captured = backward.captured()
                change(captured)
                backward.run(captured)
            counts.append(len(log))
        assert len(set(counts)) == 1

    @pytest.mark.parametrize("change", ALL, ids=NAMES)
    def test_a_changed_tensor_is_still_an_error(self, change: Pass) -> None:
        a = leaf(4)
        middle: list[Tensor] = []

        def loss() -> Tensor:
            middle.append(a * 2)
            return middle[-1].exp().sin().sum()

        backward = Backward(loss, [a])
        captured = backward.captured()
        change(captured)
        y = Backward(lambda: (a * a).sin().sum(), [a])  # saves the leaf itself
        other = y.captured()
        change(other)
        with torch.no_grad():
            a.add_(1)
        backward.run(captured)  # of the leaf it needs nothing
        with pytest.raises(SavedTensorChanged):
            y.run(other)


# -- reuse


class TestReuse:
    def test_a_chain(self) -> None:
        backward = chain(6)
        captured = backward.captured()
        passes.reuse(captured)
        found = targets(captured)
        # per op of the chain: one product anew, one in the gradient, one sum in the sum so far
        assert found.count(aten.mul_.Tensor) == 6
        assert found.count(aten.add_.Tensor) == 6
        assert found.count(aten.add.Tensor) == 0
        assert found.count(aten.mul.Tensor) == 7
        assert same(backward.run(captured), backward.eager())

    def test_the_memory_model_knows(self) -> None:
        captured = chain(6, 1000).captured()
        before = peak_bytes(captured)
        passes.reuse(captured)
        assert peak_bytes(captured) <= before - 2000

    def forms(self, loss: Callable[..., Tensor], *leaves: Tensor) -> list[Any]:
        backward = Backward(lambda: loss(*leaves), leaves)
        expected = backward.eager()
        captured = backward.captured()
        passes.reuse(captured)
        assert same(backward.run(captured), expected)
        assert same(backward.run(captured), expected)
        return targets(captured)

    def test_not_an_input_nor_a_saved_tensor(self) -> None:
        found = self.forms(lambda a: a.exp(), leaf(3))  # grad * out
        assert aten.mul.Tensor in found and aten.mul_.Tensor not in found

    def test_not_what_was_expanded(self) -> None:
        found = self.forms(lambda a: (a.sum(0) * 1.5).sum(), leaf(3, 4))
        assert not any("_." in str(t) for t in found if isinstance(t, torch._ops.OpOverload))

    def test_not_what_is_used_again(self) -> None:
        backward = chain(3)
        captured = backward.captured()
        passes.reuse(captured)
        at = places(captured)
        for node in captured.graph.nodes:
            if node.target in (aten.mul_.Tensor, aten.add_.Tensor):
                assert max(at[u] for u in node.args[0].users) == at[node]

    def test_not_a_view_nor_what_has_one_alive(self) -> None:
        w = torch.rand(3, 3)
        self.forms(lambda a, b: ((a.t() * w).t() * b.exp().t() * w).sum(), leaf(3, 3), leaf(3, 3))
        self.forms(lambda a: (a.exp() @ a.exp().t() + a.exp().t()).sum(), leaf(3, 3))

    def test_an_op_on_a_value_and_its_own_view(self) -> None:
        backward = chain(1)
        captured = backward.captured()
        value = next(n for n in find(captured, aten.mul.Tensor))
        with sg.record(), backward_scope(False), below_overrides():
            flipped = value.meta["val"].t()  # the same memory
        users = list(value.users)
        with captured.graph.inserting_after(value):
            view = captured.graph.call_function(aten.t.default, (value,))
            view.meta.update(val=flipped, spec=None)
        with captured.graph.inserting_after(view):
            product = captured.graph.call_function(aten.mul.Tensor, (value, view))
            product.meta.update(val=value.meta["val"], spec=None)
        for user in users:
            user.replace_input_with(value, product)
        passes.reuse(captured)
        assert product.target is aten.mul.Tensor

    def test_not_what_a_hook_saw(self) -> None:
        kept: list[Tensor] = []
        a = leaf(4)

        def loss() -> Tensor:
            y = a.exp()
            y.register_hook(kept.append)
            return (y.sin() * 2).sum()

        backward = Backward(loss, [a])
        captured = backward.captured()
        passes.reuse(captured)
        backward.run(captured)
        before = kept[0].clone()
        backward.eager()
        assert torch.equal(before, kept[1])
        assert torch.equal(kept[0], kept[1])

    def test_not_what_a_leaf_took(self) -> None:
        a, b = leaf(4), leaf(4)
        backward = Backward(lambda: (a.exp() + 2 * b.sin()).sum())
        backward.eager()
        expected = [a.grad, b.grad]
        a.grad = b.grad = None
        captured = backward.captured()
        passes.reuse(captured)
        backward.run(captured)
        assert same([a.grad, b.grad], expected)

    def test_not_into_another_shape_or_dtype(self) -> None:
        a, b = leaf(4, 1), leaf(1, 5).double().detach().requires_grad_()
        self.forms(lambda a, b: (a.exp() * b.exp()).sin().sum(), a, b)

    def test_results_that_have_views(self) -> None:
        found = self.forms(
            lambda a: (a.exp().sin().view(6, 2).cos() @ torch.ones(2, 2)).sum(), leaf(3, 4)
        )
        assert any(t in found for t in (aten.mul_.Tensor,))

    def test_other_layouts_than_at_capture(self) -> None:
        """A program serves tensors that are laid out in another way."""
        results = []
        for program in (False, True):
            torch.manual_seed(0)
            with sg.record(), (sg.compiled_backward() if program else below_overrides()):
                for turned in (False, True):
                    a = torch.rand(4, 4)
                    a = (a.t() if turned else a).requires_grad_()
                    ((a * a) * a.sin() * a).exp().sum().backward()
                    results.append(a.grad)
        assert same(results[:2], results[2:])


# -- fast


@pytest.mark.parametrize("size", [250])
def test_time(size: int) -> None:
    backward = chain(size)
    captured = backward.captured()
    began = time.process_time()
    passes.schedule(captured, window=2)
    took = time.process_time() - began
    assert took / (len(targets(captured)) / 500) < 0.3  # about 0.05 when nothing else runs


# -- random programs


@st.composite
def nets(draw: Any) -> tuple[list[tuple[Any, ...]], int]:
    count = draw(st.integers(3, 14))
    lines = []
    for i in range(count):
        op = draw(st.sampled_from(list(OPS)))
        lines.append((op, draw(st.integers(0, i + 1)), draw(st.integers(0, i + 1))))
    return lines, draw(st.integers(0, 7))


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b * 0.5,
    "mul": lambda a, b: a * b * 0.7,
    "matmul": lambda a, b: (a @ b) * 0.3,
    "div": lambda a, b: a / (b * b + 1),
    "tanh": lambda a, b: a.tanh(),
    "sin": lambda a, b: a.sin(),
    "exp": lambda a, b: (a * 0.3).clamp(-2, 2).exp(),
    "t": lambda a, b: a.t(),
    "rows": lambda a, b: a.sum(0, keepdim=True).expand(3, 3),
    "split": lambda a, b: torch.cat([a[:1], b[1:]]),
    "view": lambda a, b: a.reshape(9).flip(0).view(3, 3),
    "where": lambda a, b: torch.where(a > b, a, b),
    "norm": lambda a, b: torch.nn.functional.layer_norm(a, (3,)),
    "softmax": lambda a, b: a.softmax(-1) + b,
    "copied": lambda a, b: a.clone().mul_(b),
}


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(nets(), st.sampled_from(["plain", "packed", "hooks"]))
def test_random_nets(net: tuple[list[tuple[Any, ...]], int], how: str) -> None:
    lines, seed = net
    torch.manual_seed(seed)
    leaves = [leaf(3, 3), leaf(3, 3)]
    log: list[Any] = []

    def loss() -> Tensor:
        values = list(leaves)
        for i, (op, a, b) in enumerate(lines):
            if how == "packed" and i % 3 == 0:
                with copies(log):
                    value = OPS[op](values[a], values[b])
            else:
                value = OPS[op](values[a], values[b])
            if how == "hooks" and i % 3 == 0:
                value.register_hook(lambda g, i=i: log.append((i, g)))
            values.append(value)
        return (values[-1] + values[-2] * values[-1]).sum() + sum(v.sum() for v in leaves)

    backward = Backward(loss, leaves)
    expected = backward.eager()
    logged = [*log]
    for name, change in zip(NAMES, ALL, strict=True):
        log.clear()
        captured = backward.captured()
        peak = peak_bytes(captured)
        change(captured)
        captured.graph.lint()
        found = backward.run(captured)
        assert all(
            torch.equal(torch.nan_to_num(x, 7.5), torch.nan_to_num(y, 7.5))
            for x, y in zip(found, expected, strict=True) if x is not None and y is not None
        ), (name, captured.graph)  # fmt: skip
        assert len(log) == len(logged)
        for one, other in zip(log, logged, strict=True):
            if isinstance(one, tuple):
                assert one[0] == other[0]
                assert torch.equal(torch.nan_to_num(one[1]), torch.nan_to_num(other[1]))
        if name in ("common", "reorder", "reuse", "dead", "schedule", "all"):
            assert peak_bytes(captured) <= peak, name


def test_compute_is_pure() -> None:
    assert kind_of(compute) is Kind.PURE
    assert kind_of(print) is Kind.USER
