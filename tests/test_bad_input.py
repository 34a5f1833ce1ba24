"""Bad input: each gives a clear error and leaves nothing behind.

Behind: the hook stack, modes and names bound, the thread's state, what the failed graph held. And
a fresh backward works.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowgrad as sg
from stowgrad import context, engine
from tests.helpers import (
    backward_works,
    in_thread,
    in_threads,
    leaves_nothing_behind,
    opaque,
    thread_state,
)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float32, requires_grad=True)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    with leaves_nothing_behind():
        yield
        assert engine.current_task() is None
    backward_works()


class ToFiles:
    """A hook pair whose packed values own a file each; raises at a chosen call."""

    def __init__(self, folder: Path, fail: str = "", at: int = 1) -> None:
        self.folder, self.fail, self.at = folder, fail, at
        self.calls = {"pack": 0, "unpack": 0}

    def _count(self, what: str) -> None:
        self.calls[what] += 1
        if self.fail == what and self.calls[what] == self.at:
            raise OSError(f"no space left in {what}")

    def pack(self, tensor: Tensor) -> Any:
        self._count("pack")
        file = File(self.folder)
        torch.save(tensor, file.path)
        return file

    def unpack(self, packed: Any) -> Tensor:
        self._count("unpack")
        return torch.load(packed.path)

    @property
    def hooks(self) -> Any:
        return sg.saved_tensors_hooks(self.pack, self.unpack)

    @property
    def files(self) -> list[str]:
        if os.listdir(self.folder):
            gc.collect()  # tracebacks make circles
        return os.listdir(self.folder)


class File:
    def __init__(self, folder: Path) -> None:
        handle, self.path = tempfile.mkstemp(dir=folder)
        weakref.finalize(self, os.unlink, self.path)
        os.close(handle)


def model(x: Tensor) -> Tensor:
    return (x * x).exp().sin().sum()


# -- a hook that raises


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_pack_that_raises(at: int, tmp_path: Path) -> None:
    disk = ToFiles(tmp_path, "pack", at)
    with pytest.raises(OSError, match="no space left in pack") as error, sg.record(), disk.hooks:
        model(leaf())
    assert disk.calls["pack"] == at
    error.value.__traceback__ = None
    del error
    assert disk.files == []


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_unpack_that_raises(at: int, tmp_path: Path) -> None:
    disk = ToFiles(tmp_path, "unpack", at)
    x = leaf()

    def step() -> None:
        with sg.record():
            with disk.hooks:
                loss = model(x)
            loss.backward()

    with pytest.raises(OSError, match="no space left in unpack") as error:
        step()
    assert x.grad is None
    error.value.__traceback__ = None
    del error
    assert disk.files == []


def test_hooks_that_raise_in_a_thread(tmp_path: Path) -> None:
    """The other threads go on; only that one fails."""
    broken, fine = ToFiles(tmp_path, "unpack", 2), ToFiles(tmp_path)
    x = leaf()

    def step(disk: ToFiles) -> bool:
        with leaves_nothing_behind(), sg.record():
            with disk.hooks:
                loss = model(x)
            try:
                loss.backward()
            except OSError:
                return False
        return True

    # one after the other: the state that is compared includes what other threads bind
    assert in_thread(lambda: step(broken)) is False
    assert in_thread(lambda: step(fine)) is True
    assert fine.files == []
    assert x.grad is not None


def test_hooks_that_raise_in_many_threads_at_once(tmp_path: Path) -> None:
    x = leaf()

    def step(i: int) -> bool:
        disk = ToFiles(tmp_path, "unpack" if i % 2 else "", 1 + i // 2)
        with sg.record():
            with disk.hooks:
                loss = model(x)
            try:
                loss.backward()
            except OSError:
                return False
        return sg.saved.hooks.pairs == []

    assert in_threads([lambda i=i: step(i) for i in range(8)]) == [True, False] * 4
    gc.collect()
    assert os.listdir(tmp_path) == []
    y = leaf()
    with sg.record():
        model(y).backward()
    torch.testing.assert_close(x.grad, 4 * y.grad)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_tensor_hook_that_raises(register: str) -> None:
    x = leaf()
    getattr(x, register)(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError), sg.record():
        model(x).backward()


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_node_hook_that_raises(register: str) -> None:
    x = leaf()
    with pytest.raises(ZeroDivisionError), sg.record():
        y = x * x
        getattr(y.grad_fn, register)(lambda *grads: 1 / 0)
        y.sum().backward()
    assert x.grad is None


def test_a_custom_function_that_raises_in_forward_and_in_backward() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, early: bool) -> Tensor:
            if early:
                raise ValueError("in forward")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            raise ValueError("in backward")

    with pytest.raises(ValueError, match="in forward"), sg.record():
        Fails.apply(leaf(), True)
    with pytest.raises(ValueError, match="in backward"), sg.record():
        Fails.apply(leaf(), False).sum().backward()


def test_a_module_that_raises_in_forward(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("in a module")

    disk = ToFiles(tmp_path)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), Fails())
    with pytest.raises(ValueError, match="in a module") as error, sg.record(), disk.hooks:
        net(torch.ones(1, 2))
    error.value.__traceback__ = None
    del error
    assert disk.files == []


# -- a gradient that cannot be


def test_backward_from_a_non_scalar_without_a_gradient() -> None:
    x = leaf()
    with (
        sg.record(),
        pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"),
    ):
        (x * x).backward()
    assert x.grad is None


def test_backward_from_what_needs_no_gradient() -> None:
    with sg.record(), pytest.raises(sg.NotDifferentiableError, match="does not require grad"):
        torch.ones(2).sum().backward()


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (torch.ones(3), r"shape.*\[3\].*\[2\]"),
        (torch.ones(2, 1), r"shape.*\[2, 1\].*\[2\]"),
        (torch.ones(()), "shape"),
        (torch.ones(2, dtype=torch.complex64), "complex"),
        (torch.ones(2, device="meta"), r"float32 \[2\] on cpu\) is on meta"),
    ],
    ids=["shape", "more dimensions", "fewer dimensions", "dtype", "device"],
)
@pytest.mark.parametrize("at_leaf", [False, True])
def test_a_gradient_of_the_wrong_kind(gradient: Tensor, message: str, at_leaf: bool) -> None:
    x = leaf()
    with sg.record(), pytest.raises(RuntimeError, match=message):
        (x if at_leaf else x * x).backward(gradient)
    assert x.grad is None


def returning(gradient: Any) -> type[torch.autograd.Function]:
    class Returns(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return gradient

    return Returns


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (
            torch.ones(3),
            RuntimeError,
            r"invalid gradient at index 0 - got \[3\] but expected.*\[2\]",
        ),
        (torch.ones(2, device="meta"), RuntimeError, "expected device cpu but got meta"),
        ((torch.ones(2), torch.ones(2)), RuntimeError, "returned an incorrect number of gradients"),
        ("text", (TypeError, RuntimeError), "str"),
    ],
    ids=["shape", "device", "count", "type"],
)
@pytest.mark.parametrize("into_leaf", [False, True])
def test_a_custom_function_that_returns_the_wrong_kind(
    gradient: Any, error: Any, message: str, into_leaf: bool
) -> None:
    x = leaf()
    with sg.record():
        loss = returning(gradient).apply(x if into_leaf else x * 3).sum()
        with pytest.raises(error, match=message):
            loss.backward()
    assert x.grad is None


def test_inputs_that_are_no_tensors() -> None:
    with sg.record():
        loss = model(leaf())
        with pytest.raises((TypeError, RuntimeError, AttributeError)):
            torch.autograd.grad(loss, ["x"])  # type: ignore[list-item]


# -- twice, changed, without derivative


def test_backward_twice() -> None:
    x = leaf()
    with sg.record():
        loss = model(x)
        loss.backward()
        before = x.grad.clone()
        with pytest.raises(sg.GraphFreedError, match=r"a second time.*retain_graph=True"):
            loss.backward()
    assert torch.equal(x.grad, before)


def test_an_in_place_change_of_a_saved_tensor() -> None:
    x = leaf()
    with sg.record():
        y = x * 2
        loss = y.sin().sum()
        y.add_(1)
        with pytest.raises(sg.SavedTensorChanged, match=r"aten\.sin.*aten\.add_"):
            loss.backward()
    assert x.grad is None


def test_an_in_place_change_of_a_leaf() -> None:
    x = leaf()
    with sg.record():
        with pytest.raises(sg.InPlaceError, match="leaf"):
            x.add_(1)
        with pytest.raises(sg.InPlaceError, match="leaf"):
            x[0] = 3
        with pytest.raises(sg.InPlaceError, match="leaf"):
            x.view(2, 1).mul_(2)
    assert x.tolist() == [1.0, 2.0]


def test_an_output_argument_that_needs_gradients() -> None:
    with sg.record(), pytest.raises(sg.NotDifferentiableError, match=r"out=\.\.\. arguments"):
        torch.add(leaf(), 1, out=torch.empty(2))


@pytest.mark.filterwarnings("ignore:stowgrad_tests:UserWarning")
@pytest.mark.parametrize(
    ("op", "name"),
    [
        (opaque, "stowgrad_tests.opaque"),
        (lambda x: torch.igamma(x, torch.ones(2)), "igamma"),
        (lambda x: torch.special.zeta(x + 1, torch.ones(2)), "zeta"),
    ],
    ids=["of a third party", "igamma", "zeta"],
)
def test_an_op_without_a_derivative_raises_when_its_gradient_is_needed(op: Any, name: str) -> None:
    x = leaf()
    with sg.record():
        y = op(x * 1)  # the forward is fine
        assert y.requires_grad
        with pytest.raises(sg.NotDifferentiableError, match=name):
            y.sum().backward()
        assert x.grad is None
        with torch.no_grad():
            op(x)
        op(x.detach())
        (op(x).detach() + x).sum().backward()  # its gradient is not needed here
    assert x.grad.tolist() == [1.0, 1.0]


def test_an_op_with_a_derivative_for_another_argument_alone() -> None:
    """igamma has one for its second argument."""
    x, other = leaf(), leaf()
    with sg.record():
        y = torch.igamma(other, x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    want = torch.autograd.grad(torch.igamma(other.detach(), x).sum(), x)[0]
    torch.testing.assert_close(grad, want)


@pytest.mark.filterwarnings("ignore:stowgrad_tests:UserWarning")
def test_an_op_without_a_derivative_beside_one_that_has_one() -> None:
    x, w = leaf(), leaf(3.0, 4.0)
    with sg.record():
        loss = (opaque(x) + w * 2).sum()
        assert torch.autograd.grad(loss, w, retain_graph=True)[0].tolist() == [2.0, 2.0]
        with pytest.raises(sg.NotDifferentiableError, match="opaque"):
            loss.backward()


# -- Ctrl-C


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handling of Ctrl-C, whatever the test runner does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*args: Any) -> None:
    signal.raise_signal(signal.SIGINT)


PLACES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in a tensor hook": lambda x, y: y.register_hook(interrupt),
    "in a leaf's hook": lambda x, y: x.register_hook(interrupt),
    "before a node": lambda x, y: y.grad_fn.register_prehook(interrupt),
    "after a node": lambda x, y: y.grad_fn.register_hook(interrupt),
    "after accumulation": lambda x, y: x.register_post_accumulate_grad_hook(interrupt),
    "in a callback": lambda x, y: y.register_hook(
        lambda g: torch.autograd.Variable._execution_engine.queue_callback(interrupt)
    ),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_ctrl_c_in_a_backward(
    place: Any, create_graph: bool, interrupts: None, tmp_path: Path
) -> None:
    disk = ToFiles(tmp_path)
    x = leaf()

    def step() -> None:
        with sg.record(), disk.hooks:
            y = x * x
            place(x, y)
            y.exp().sin().sum().backward(create_graph=create_graph)

    with pytest.raises(KeyboardInterrupt) as error:
        step()
    error.value.__traceback__ = None
    del error
    x.grad = None  # with create_graph it holds the graph
    assert disk.files == []


def test_ctrl_c_in_an_unpack_hook(interrupts: None) -> None:
    x = leaf()
    with pytest.raises(KeyboardInterrupt), sg.record():
        with sg.saved_tensors_hooks(lambda t: t.clone(), lambda p: interrupt() or p):
            loss = model(x)
        loss.backward()
    assert x.grad is None


def test_ctrl_c_in_a_pack_hook(interrupts: None) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        sg.record(),
        sg.saved_tensors_hooks(lambda t: interrupt() or t.clone(), lambda p: p),
    ):
        model(leaf())


OURS = str(Path(sg.__file__).parent)


def struck_at(event: int, step: Callable[[], Any]) -> bool:
    """Run `step` and raise KeyboardInterrupt at the event-th line of stowgrad that it comes to, as
    Ctrl-C may; whether it got that far."""
    left = [event]

    def trace(frame: Any, what: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        caller = frame
        while caller is not None and caller.f_code is not struck_at.__code__:
            if caller.f_code.co_qualname in ("record.__enter__", "record.__exit__"):
                return None  # who strikes there has not begun, or is through
            caller = caller.f_back
        if what == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def training_step(x: Tensor, disk: ToFiles, create_graph: bool) -> None:
    with sg.record():
        with disk.hooks:
            y = (x * x).exp()
            y[:1].mul_(2)
            loss = torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=False).sum()
        y.register_hook(lambda g: g * 1)
        if create_graph:
            torch.autograd.grad(loss, x, create_graph=True)
        else:
            loss.backward()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified name")
@pytest.mark.parametrize("create_graph", [False, True])
def test_ctrl_c_at_any_line(create_graph: bool, tmp_path: Path) -> None:
    """Also where a scope is about to be entered or left, which no `finally` can guard."""
    x, disk = leaf(), ToFiles(tmp_path)
    training_step(x, disk, create_graph)
    event, struck = 1, 0
    while True:
        with leaves_nothing_behind():
            if not struck_at(event, lambda: training_step(x, disk, create_graph)):
                break
            assert engine.current_task() is None
        struck += 1
        event += 149
    assert struck > 10
    x.grad = None
    assert disk.files == []


def test_a_scope_that_was_never_left_changes_nothing_later() -> None:
    """Ctrl-C may strike as one is entered; the collector leaves it, at some time."""
    with sg.record():
        recorder = context.current_recorder()
        scopes: list[Any] = [
            context.backward_scope(False),
            recorder.on(),
            context.below_overrides(),
            context.suspended(),
            sg._private.view_tracking(),
            sg.saved_tensors_hooks(lambda t: t, lambda p: p),
        ]
        for scope in scopes:
            scope.__enter__()
        del scope
        sg.pop_hooks()
    before = thread_state()
    pair = (lambda t: t.clone()), (lambda p: p)
    with sg.saved_tensors_hooks(*pair):
        within = thread_state()
        while scopes:
            scopes.pop()
        gc.collect()
        assert thread_state() == within
    assert thread_state() == before
