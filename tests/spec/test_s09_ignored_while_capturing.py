"""S9: while a program is captured there are no default hooks; they fire when it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from stowgrad import saved
from tests.helpers import Recording, in_thread

pytestmark = pytest.mark.usefixtures("recorded")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=torch.float64, requires_grad=True)


def captured_through(during: Callable[[], Any]) -> Any:
    """Capture a backward with an unpack hook that is traced, and calls `during()` meanwhile."""
    found: list[Any] = []

    @sg.traceable
    def unpack(t: Tensor) -> Tensor:
        found.append(during())
        return t * 1

    with sg.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
        y = leaf().sin().sum()
    sg.capture(y)
    assert len(found) == 1, "it is traced through once"
    return found[0]


def test_s09_capture_calls_no_hook() -> None:
    x, pair = leaf(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = (x.sin() * x).sum()
        packs = pair.packs
        program = sg.capture(loss)
        assert pair.counts == (packs, 0)
    loss.backward()
    assert pair.counts == (packs, packs)
    assert_close(x.grad, x.detach().cos() * x.detach() + x.detach().sin())
    assert program.runs == 0


def test_s09_hooks_fire_when_the_program_runs() -> None:
    x, pair = leaf(), Recording()
    for times in (1, 2, 3):
        with sg.saved_tensors_hooks(pair.pack, pair.unpack):
            loss = x.sin().sum()
        with sg.compiled_backward():
            loss.backward()
        assert pair.counts == (times, times)
    assert sg.program_cache.hits == 2


def test_s09_what_a_captured_backward_saves_is_packed_when_it_runs() -> None:
    """With create_graph the backward saves tensors of its own, in which the hooks have a part."""
    x = leaf()

    def counts() -> tuple[int, int]:
        pair = Recording()
        with sg.saved_tensors_hooks(pair.pack, pair.unpack):
            (g,) = torch.autograd.grad(x.exp().sin().sum(), x, create_graph=True)
        g.sum().backward()
        return pair.counts

    expected = counts()
    assert expected[0] > 2
    assert x.grad is not None
    grad, x.grad = x.grad, None
    with sg.compiled_backward():
        assert counts() == expected
        assert_close(x.grad, grad)
        assert counts() == expected, "and the second time, from the cache"


def test_s09_capture_with_create_graph_calls_no_hook() -> None:
    x, pair = leaf(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = x.exp().sin().sum()
        before = pair.counts
        sg.capture(loss, inputs=x, create_graph=True)
    assert pair.counts == before


def test_s09_meanwhile_push_and_pop_work_as_ever() -> None:
    pair = Recording()

    def during() -> list[Any]:
        depth = len(saved.hooks.pairs)
        sg.push_hooks(pair.pack, pair.unpack)
        deeper = len(saved.hooks.pairs) - depth
        assert sg.pop_hooks() == (pair.pack, pair.unpack)
        with sg.saved_tensors_hooks(pair.pack, pair.unpack):
            with torch.autograd.graph.saved_tensors_hooks(pair.pack, pair.unpack):
                deepest = len(saved.hooks.pairs) - depth
        with pytest.raises(sg.HookError, match="no saved-tensor hooks to pop"):
            while True:
                sg.pop_hooks()
        return [deeper, deepest, len(saved.hooks.pairs)]

    assert captured_through(during) == [1, 2, 0]
    assert pair.counts == (0, 0)


def test_s09_meanwhile_disabling_works_as_ever() -> None:
    def during() -> None:
        with sg.disable_saved_tensors_hooks("not in here"):
            with pytest.raises(sg.HooksDisabledError, match="not in here"):
                sg.push_hooks(lambda t: t, lambda p: p)
            with pytest.raises(sg.HooksDisabledError, match="not in here"):
                with torch.autograd.graph.save_on_cpu():
                    pass
        with sg.saved_tensors_hooks(lambda t: t, lambda p: p):
            with pytest.raises(sg.HooksDisabledError, match="while a pair is active"):
                with sg.disable_saved_tensors_hooks("either"):
                    pass

    captured_through(during)


def test_s09_meanwhile_no_pack_fires() -> None:
    """Whatever is computed there, and though a pair is pushed there."""
    pair = Recording()

    def during() -> None:
        with sg.saved_tensors_hooks(pair.pack, pair.unpack), torch.enable_grad():
            t = torch.ones(3, requires_grad=True)
            (t.exp() * t).sum()

    captured_through(during)
    assert pair.counts == (0, 0)


def test_s09_hooks_around_the_capture_are_there_again_after_it() -> None:
    pair, x = Recording(), leaf()
    loss = x.sin().sum()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        sg.capture(loss)
        x.exp()
        assert pair.packs == 1
        assert not saved.hooks.ignored


def test_s09_an_unpack_that_raises_while_traced_leaves_no_trace() -> None:
    x, pair = leaf(), Recording()

    @sg.traceable
    def unpack(t: Tensor) -> Tensor:
        raise KeyError("nothing there")

    with sg.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
        loss = x.sin().sum()
    try:
        sg.capture(loss)
    except KeyError:
        pass
    assert not saved.hooks.ignored
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        x.exp()
    assert pair.packs == 1
    with sg.compiled_backward(), pytest.raises(KeyError, match="nothing there"):
        loss.backward()
    assert not saved.hooks.ignored


def test_s09_only_in_this_thread() -> None:
    """Another thread's hooks fire while this one captures."""

    def other() -> tuple[int, int]:
        pair, x = Recording(), leaf()
        with sg.record():
            assert not saved.hooks.ignored
            with sg.saved_tensors_hooks(pair.pack, pair.unpack):
                loss = x.exp().sum()
            loss.backward()
        return pair.counts

    assert captured_through(lambda: in_thread(other)) == (1, 1)


def test_s09_threads_capture_at_once() -> None:
    failed: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            x, pair = leaf(), Recording()
            with sg.record():
                barrier.wait()
                for n in range(1, 6):
                    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
                        loss = x.sin().sum()
                        sg.capture(loss)
                        assert pair.counts == (n, n - 1)
                    loss.backward()
                    assert pair.counts == (n, n)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed[0]
