"""S4: hooks, the disabled state and the recorder belong to one thread; a new one starts clean."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording, in_thread, in_threads
from tests.spec.columns import columns, eager, program


@columns(eager, program)
def test_s04_a_new_thread_has_no_hooks(run: Any) -> None:
    pair = Recording()

    def other() -> Any:
        x = torch.ones(3, requires_grad=True)
        with sg.record():
            run((x * x).sum())
        return x.grad

    with sg.record(), sg.saved_tensors_hooks(pair.pack, pair.unpack):
        grad = in_thread(other)
    assert pair.counts == (0, 0)
    assert_close(grad, torch.full((3,), 2.0))


def test_s04_hooks_of_another_thread_are_not_seen_here() -> None:
    entered, leave = threading.Event(), threading.Event()
    pair = Recording()

    def other() -> None:
        with sg.saved_tensors_hooks(pair.pack, pair.unpack):
            entered.set()
            assert leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    x = torch.ones(3, requires_grad=True)
    with sg.record():
        (x * x).sum().backward()
    leave.set()
    thread.join()
    assert pair.counts == (0, 0)
    assert_close(x.grad, torch.full((3,), 2.0))


def test_s04_disabling_is_of_one_thread() -> None:
    pair = Recording()

    def other() -> None:
        x = torch.ones(3, requires_grad=True)
        with sg.record(), sg.saved_tensors_hooks(pair.pack, pair.unpack):
            x.exp()

    with sg.disable_saved_tensors_hooks("not here"):
        in_thread(other)
        with pytest.raises(sg.HooksDisabledError, match="not here"):
            sg.push_hooks(pair.pack, pair.unpack)
    assert pair.counts == (1, 0)


def test_s04_recording_is_of_one_thread() -> None:
    """PyTorch's autograd goes on in another thread, while this one records."""

    def other() -> Any:
        x = torch.ones(3, requires_grad=True)
        y = (x * x).sum()
        assert not sg.recording()
        assert type(y.grad_fn).__module__ != "stowgrad.rules.table"
        assert y.grad_fn.name() == "SumBackward0"  # type: ignore[union-attr]
        y.backward()
        return x.grad

    with sg.record():
        assert sg.recording()
        assert_close(in_thread(other), torch.full((3,), 2.0))


def test_s04_native_hooks_in_another_thread_stay_native() -> None:
    """PyTorch's context acts on PyTorch's graph where nothing records, and on ours where we do."""
    pair = Recording()

    def other() -> None:
        x = torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pair.pack, pair.unpack):
            (x * x).sum().backward()

    with sg.record():
        in_thread(other)
        assert pair.counts == (2, 2)
        assert sg.saved.hooks.pairs == []


@columns(eager, program)
def test_s04_each_thread_uses_its_own_pair(run: Any) -> None:
    pairs = [Recording() for _ in range(6)]
    together = threading.Barrier(len(pairs))

    def work(pair: Recording, uses: int) -> None:
        x = torch.ones(3, requires_grad=True)
        with sg.record(), sg.saved_tensors_hooks(pair.pack, pair.unpack):
            together.wait(10)  # all are inside at once
            y = x
            for _ in range(uses):
                y = y.exp()
            together.wait(10)
        with sg.record():
            run(y.sum())

    in_threads([lambda p=p, i=i: work(p, i) for i, p in enumerate(pairs)])
    assert [p.counts for p in pairs] == [(i, i) for i in range(len(pairs))]


@columns(eager, program)
def test_s04_a_backward_in_another_thread_unpacks_what_was_packed_here(run: Any) -> None:
    """The hooks of a saved tensor go with it."""
    pair, x = Recording(), torch.ones(3, requires_grad=True)
    with sg.record(), sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = (x * x).sum()

    def other() -> None:
        with sg.record():
            run(loss)

    in_thread(other)
    assert pair.counts == (2, 2)
    assert_close(x.grad, torch.full((3,), 2.0))


def test_s04_the_double_backward_of_another_thread_packs_with_its_own_hooks() -> None:
    """What a backward itself saves is packed by the hooks of the thread that runs it."""
    here, there, x = Recording(), Recording(), torch.ones(3, requires_grad=True)
    with sg.record(), sg.saved_tensors_hooks(here.pack, here.unpack):
        loss = x.exp().sum()

    def other() -> Any:
        with sg.record(), sg.saved_tensors_hooks(there.pack, there.unpack):
            return torch.autograd.grad(loss, x, create_graph=True)[0].detach()

    assert_close(in_thread(other), x.detach().exp())
    assert here.counts == (1, 1)
    assert there.packs > 0
