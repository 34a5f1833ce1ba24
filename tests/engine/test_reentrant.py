"""A backward within a hook or a backward, backward in several threads, and callbacks at its end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import backward_works, in_threads, leaves_nothing_behind, thread_state
from tests.parity import same

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float32, requires_grad=True)


@pytest.fixture(autouse=True)
def clean_thread() -> Iterator[None]:
    with leaves_nothing_behind():
        yield


# -- within a hook


def test_a_backward_of_another_graph_within_a_hook() -> None:
    def program() -> Any:
        log: list[Any] = []

        def hook(grad: Tensor) -> None:
            with torch.enable_grad():
                other = leaf(3, 3)
                (other * other).sum().backward()
            log.append(other.grad.tolist())

        x = leaf()
        y = x * x
        y.register_hook(hook)
        x.register_hook(lambda g: log.append("x"))
        y.sum().backward()
        return log, x.grad

    assert same(program)[0] == [[6.0, 6.0], "x"]


def test_a_backward_into_the_same_leaf_within_a_hook() -> None:
    def program() -> Any:
        x = leaf()
        y = x * x

        def hook(grad: Tensor) -> None:
            with torch.enable_grad():
                (x * 5).sum().backward()

        y.register_hook(hook)
        y.sum().backward()
        return x.grad

    assert same(program).tolist() == [7.0, 9.0]


def test_a_backward_through_the_same_graph_within_a_hook() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        y = x * x
        z = y.exp()

        y_sum = y.sum()
        z.register_hook(lambda g: log.append(torch.autograd.grad(y_sum, x, retain_graph=True)))
        z.sum().backward()
        return log, x.grad

    same(program)


def test_a_backward_within_a_hook_that_frees_the_outer_graph_is_an_error() -> None:
    def program() -> Any:
        x = leaf()
        y = x.exp()
        inner = y.sum()
        z = y * 2
        z.register_hook(lambda g: (inner.backward(), None)[1])
        with pytest.raises(RuntimeError, match="second time"):
            z.sum().backward()
        return x.grad

    same(program)


def test_hooks_within_hooks_sixty_deep() -> None:
    def program() -> Any:
        log: list[int] = []

        def down(n: int) -> None:
            with torch.enable_grad():
                x = leaf()
                y = x * 2
                if n:
                    y.register_hook(lambda g: down(n - 1))
                y.sum().backward()
            log.append(n)

        down(60)
        return log

    assert same(program) == list(range(61))


def test_grad_mode_of_the_outer_backward_is_restored() -> None:
    def program() -> Any:
        log: list[bool] = []

        def hook(grad: Tensor) -> None:
            log.append(torch.is_grad_enabled())
            with torch.enable_grad():
                (leaf() * 2).sum().backward(create_graph=not create_graph)
            log.append(torch.is_grad_enabled())

        for create_graph in (False, True):
            y = leaf() * 2
            y.register_hook(hook)
            torch.autograd.grad(y.sum(), y, create_graph=create_graph)
        return log

    assert same(program) == [False, False, True, True]


# -- within a backward


class Reentrant(torch.autograd.Function):
    """As checkpointing once did: runs a forward and a backward of its own in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (x * x).sum().backward()
        return x.grad * g


def test_a_backward_within_a_backward() -> None:
    def program() -> Any:
        x = leaf(1.1, 1.2)
        y = x
        for _ in range(4):
            y = Reentrant.apply(y)
        y.sum().backward()
        return x.grad

    same(program)


def test_a_backward_within_a_backward_into_shared_parameters() -> None:
    def program() -> Any:
        weight = leaf(2, 3)

        class Uses(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return (x * weight).detach()

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                with torch.enable_grad():
                    x = ctx.saved_tensors[0].detach().requires_grad_()
                    (x * weight).backward(g)
                return x.grad

        x = leaf()
        (Uses.apply(Uses.apply(x)) * weight).sum().backward()
        return x.grad, weight.grad

    same(program)


# -- threads


def test_threads_over_shared_leaves() -> None:
    x = leaf()

    def work(n: int) -> None:
        with sg.record():
            for _ in range(20):
                loss = (x * float(n)).sum()
                loss.backward()

    in_threads([lambda n=n: work(n) for n in range(8)])
    assert x.grad.tolist() == [20.0 * 28] * 2


def test_threads_over_one_graph_with_retain_graph() -> None:
    x = leaf()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with sg.record():
            y = x
            for _ in range(20):
                y = (y * 1.0 + y * 0.5) / 1.5
            loss = y.sum()

        def work() -> None:
            with sg.record():
                for _ in range(5):
                    loss.backward(retain_graph=True)

        in_threads([work] * 6)
    finally:
        sys.setswitchinterval(before)
    assert_close(x.grad, torch.full((2,), 30.0))


def test_a_leafs_hooks_run_in_the_thread_of_their_backward() -> None:
    x, seen = leaf(), []
    x.register_hook(lambda g: seen.append(threading.get_ident()))

    def work() -> int:
        with sg.record():
            (x * 2).sum().backward()
        return threading.get_ident()

    assert sorted(in_threads([work] * 4)) == sorted(seen)


def test_a_backward_within_a_hook_in_many_threads() -> None:
    x = leaf()

    def work() -> None:
        with sg.record():
            y = x * 2

            def hook(grad: Tensor) -> None:
                with torch.enable_grad():
                    (x * 3).sum().backward()

            y.register_hook(hook)
            y.sum().backward()

    in_threads([work] * 8)
    assert x.grad.tolist() == [40.0, 40.0]


def test_a_thread_within_a_hook() -> None:
    """A hook that waits for another thread's backward into the same leaf: no deadlock."""
    x = leaf()

    def other() -> None:
        with sg.record():
            (x * 5).sum().backward()

    with sg.record():
        y = x * 2
        y.register_hook(lambda g: in_threads([other]) and None)
        y.sum().backward()
    assert x.grad.tolist() == [7.0, 7.0]


def test_a_thread_within_a_post_accumulate_hook() -> None:
    x = leaf()

    def other() -> None:
        with sg.record():
            torch.autograd.grad((x * 5).sum(), x)
            (x * 5).sum().backward(inputs=[x])

    once = [True]

    def hook(t: Tensor) -> None:
        if once and once.pop():
            in_threads([other])

    x.register_post_accumulate_grad_hook(hook)
    with sg.record():
        (x * 2).sum().backward()
    assert x.grad.tolist() == [7.0, 7.0]


# -- callbacks


def queue(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def test_a_callback_runs_once_at_the_end() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: queue(lambda: log.append(("end", x.grad.tolist()))))
        x.register_hook(lambda g: log.append("x"))
        y.sum().backward(retain_graph=True)
        log.append("returned")
        return log

    assert same(program) == ["x", ("end", [2.0, 2.0]), "returned"]


def test_a_callback_may_queue_another() -> None:
    def program() -> Any:
        log: list[str] = []
        y = leaf() * 2
        y.register_hook(
            lambda g: queue(lambda: (log.append("one"), queue(lambda: log.append("two")))[0])
        )
        y.sum().backward()
        return log

    assert same(program) == ["one", "two"]


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("around", [True, False])
def test_a_callback_runs_under_the_callers_grad_mode(create_graph: bool, around: bool) -> None:
    def program() -> Any:
        log: list[bool] = []
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: queue(lambda: log.append(torch.is_grad_enabled())))
        loss = y.sum()
        with torch.set_grad_enabled(around):
            torch.autograd.grad(loss, x, create_graph=create_graph)
        return log

    assert len(same(program)) == 1


def test_a_callback_belongs_to_the_innermost_backward() -> None:
    def program() -> Any:
        log: list[str] = []

        def hook(grad: Tensor) -> None:
            queue(lambda: log.append("outer"))
            with torch.enable_grad():
                inner = leaf() * 2
            inner.register_hook(lambda g: queue(lambda: log.append("inner")))
            inner.backward(torch.ones(2))
            log.append("nested is over")

        x = leaf()
        y = x * 2
        y.register_hook(hook)
        x.register_hook(lambda g: log.append("x"))
        y.sum().backward()
        return log

    assert same(program) == ["inner", "nested is over", "x", "outer"]


def test_a_callback_that_raises() -> None:
    def program() -> Any:
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: queue(lambda: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        return x.grad

    assert same(program).tolist() == [2.0, 2.0]


def test_the_callbacks_of_a_backward_that_raises_are_dropped() -> None:
    def program() -> Any:
        log: list[str] = []
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: queue(lambda: log.append("never")))
        handle = x.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        handle.remove()
        (x * 2).sum().backward()
        return log

    assert same(program) == []


def test_a_callback_outside_a_backward_is_an_error() -> None:
    def program() -> Any:
        with pytest.raises(RuntimeError, match="during backward"):
            queue(lambda: None)

    same(program)


# -- a backward that raises


def test_after_a_nested_backward_that_raises_the_outer_one_goes_on() -> None:
    def program() -> Any:
        x = leaf()
        y = x * 2

        def hook(grad: Tensor) -> None:
            with torch.enable_grad():
                inner = leaf() * 2
            inner.register_hook(lambda g: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                inner.backward(torch.ones(2))

        y.register_hook(hook)
        y.sum().backward()
        return x.grad, torch._C._current_graph_task_id()

    assert same(program)[1] == -1


def test_a_nested_backward_that_raises_ends_both() -> None:
    with sg.record():
        before = thread_state()
        x = leaf()
        y = x * 2

        def hook(grad: Tensor) -> None:
            with torch.enable_grad():
                inner = leaf() * 2
            inner.register_hook(lambda g: 1 / 0)
            inner.backward(torch.ones(2))

        y.register_hook(hook)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        assert x.grad is None
        assert thread_state() == before
        assert torch._C._current_graph_task_id() == -1
    backward_works()
