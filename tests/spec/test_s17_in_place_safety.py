"""S17: a saved tensor that was changed in place is found out, hooked or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording, in_thread
from tests.spec.columns import columns, eager, program

pytestmark = pytest.mark.usefixtures("recorded")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=torch.float64, requires_grad=True)


def line() -> int:
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


# -- without hooks


@columns(eager, program)
def test_s17_the_error_names_the_saver_the_changer_and_both_versions(run: Any) -> None:
    x = leaf()
    y = x * 2
    z, saved_at = y.sin(), line()
    y.add_(1)
    y.mul_(3)
    first = line() - 2
    with pytest.raises(sg.SavedTensorChanged) as error:
        run(z.sum())
    message = str(error.value)
    assert "modified by an inplace operation" in message, "PyTorch's words, for those who match it"
    assert f"'self' (float64 [3]), saved by aten.sin at {__file__}:{saved_at}" in message
    assert f"by aten.add_ at {__file__}:{first}" in message
    assert "(version 2, saved at 0)" in message


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "a slice": lambda t: t[1:].zero_(),
    "an item": lambda t: t.__setitem__(0, 3.0),
    "a mask": lambda t: t.masked_fill_(t > 0, 0.0),
    "copy_": lambda t: t.copy_(torch.ones(3)),
    "through a view": lambda t: t.view(3, 1).add_(1),
    "through detach": lambda t: t.detach().add_(1),
    "by foreach": lambda t: torch._foreach_add_([t], 1.0),
    "by a random op": lambda t: t.normal_(),
    "an out= argument": lambda t: torch.add(torch.ones(3), 1, out=t),
    "set_": lambda t: t.set_(torch.ones(3, dtype=torch.float64)),
}


@columns(eager, program)
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("tracked", [True, False])
def test_s17_every_way_to_change_a_saved_tensor(run: Any, change: Any, tracked: bool) -> None:
    x = leaf()
    y = x.detach() * 2 if not tracked else x * 2
    loss = (y * x).sum()
    with torch.no_grad():
        change(y)
    with pytest.raises(sg.SavedTensorChanged, match=r"'self' .*saved by aten\.mul at"):
        run(loss)


@columns(eager, program)
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_s17_the_error_knows_who_changed_it(run: Any, change: Any) -> None:
    x, y = leaf(), torch.randn(3, dtype=torch.float64)
    loss = (y * x).sum()
    change(y)
    with pytest.raises(sg.SavedTensorChanged, match=r"changed in place by aten\.\w+ at .*test_s17"):
        run(loss)


@columns(eager, program)
def test_s17_a_saved_output_that_was_changed(run: Any) -> None:
    x = leaf()
    y = x.exp()
    y.add_(1)
    with pytest.raises(sg.SavedTensorChanged, match=r"'out' .*saved by aten\.exp.*aten\.add_ at"):
        run(y.sum())


@columns(eager, program)
def test_s17_a_parameter_that_an_optimizer_changed(run: Any) -> None:
    """The classic: two losses of one network, with a step between their backwards."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
    first, second = net(torch.ones(1, 3)).sum(), net(torch.zeros(1, 3)).sum()
    run(first)
    optimizer.step()
    with pytest.raises(sg.SavedTensorChanged, match=r"changed in place by aten\._foreach_add_ at"):
        run(second)


@columns(eager, program)
def test_s17_a_change_before_the_save_is_fine(run: Any) -> None:
    x = leaf()
    y = x * 2
    y.add_(1)
    loss = y.sin().sum()
    run(loss)
    assert_close(x.grad, 2 * (2 * x.detach() + 1).cos())


@columns(eager, program)
def test_s17_a_change_of_what_was_not_saved_is_fine(run: Any) -> None:
    x = leaf()
    y = x.exp() + 1  # the sum saves nothing
    y.mul_(2)
    run(y.sum())
    assert_close(x.grad, 2 * x.detach().exp())


@columns(eager, program)
def test_s17_a_change_that_another_thread_made(run: Any) -> None:
    x = leaf()
    y = x * 2
    loss = y.sin().sum()

    def other() -> None:
        with torch.no_grad():
            y.add_(1)

    in_thread(other)
    with pytest.raises(sg.SavedTensorChanged, match="version 1, saved at 0"):
        run(loss)


@columns(eager, program)
def test_s17_a_changed_tensor_is_found_at_each_access(run: Any) -> None:
    x = leaf()
    y = x * 2
    z = y.sin()
    y.add_(1)
    with pytest.raises(sg.SavedTensorChanged):
        _ = z.grad_fn._saved_self
    with pytest.raises(sg.SavedTensorChanged):
        z.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda p: p)


@columns(eager, program)
def test_s17_nothing_is_accumulated_by_a_backward_that_fails_so(run: Any) -> None:
    x = leaf()
    y = x * 2
    loss = y.sin().sum()
    y.add_(1)
    with pytest.raises(sg.SavedTensorChanged):
        run(loss)
    assert x.grad is None


# -- with hooks: an alias that was changed is an error


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


class Slotted:
    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


_hidden: dict[int, Tensor] = {}


def hide(t: Tensor) -> int:
    _hidden[len(_hidden)] = t.detach()
    return len(_hidden) - 1


ALIASES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda t: t, lambda p: p),
    "detach": (lambda t: t.detach(), lambda p: p),
    "data": (lambda t: t.data, lambda p: p),
    "a view": (lambda t: t.view(3, 1), lambda p: p.view(3)),
    "numpy": (lambda t: t.detach().numpy(), torch.from_numpy),
    "a tuple": (lambda t: (1, t), lambda p: p[1]),
    "a dict": (lambda t: {"t": t}, lambda p: p["t"]),
    "a nest": (lambda t: [{"t": ((t,),)}], lambda p: p[0]["t"][0][0]),
    "an object": (Box, lambda p: p.content),
    "an object with slots": (Slotted, lambda p: p.content),
    "an object that is unpacked to a copy": (Box, lambda p: p.content.clone()),
    "numpy in an object": (lambda t: Box(t.detach().numpy()), lambda p: torch.tensor(p.content)),
    "a closure": (lambda t: lambda: t, lambda p: p()),
    "a global": (hide, lambda p: _hidden[p]),
}
each_alias = pytest.mark.parametrize("pair", ALIASES.values(), ids=list(ALIASES))


@columns(eager, program)
@each_alias
@pytest.mark.parametrize("explicit", [True, False])
def test_s17_a_packed_alias_that_was_changed_is_an_error(
    run: Any, pair: Any, explicit: bool
) -> None:
    x = leaf()
    y = x * 2
    if explicit:
        z = y.sin()
        z.grad_fn._raw_saved_self.register_hooks(*pair)
    else:
        with sg.saved_tensors_hooks(*pair):
            z = y.sin()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(sg.SavedTensorChanged) as error:
        run(z.sum())
    assert "'self' (float64 [3]), saved by aten.sin at" in str(error.value)
    assert "changed in place by aten.add_ at" in str(error.value)
    assert "(version 1, saved at 0)" in str(error.value)
    assert x.grad is None


@columns(eager, program)
@each_alias
def test_s17_a_packed_alias_of_an_output_that_was_changed_is_an_error(run: Any, pair: Any) -> None:
    x = leaf()
    with sg.saved_tensors_hooks(*pair):
        y = x.exp()
    y.add_(1)
    with pytest.raises(sg.SavedTensorChanged, match=r"'out' .*saved by aten\.exp"):
        run(y.sum())


@columns(eager, program)
@each_alias
def test_s17_a_packed_alias_that_was_not_changed_is_right(run: Any, pair: Any) -> None:
    x = leaf()
    with sg.saved_tensors_hooks(*pair):
        z = (x * 2).sin()
    run(z.sum())
    assert_close(x.grad, 2 * (2 * x.detach()).cos())


def from_list(packed: list[float]) -> Tensor:
    return torch.tensor(packed, dtype=torch.float64)


COPIES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a clone": (lambda t: t.detach().clone(), lambda p: p),
    "another dtype": (lambda t: t.detach().to(torch.complex128), lambda p: p.real),
    "numpy": (lambda t: t.detach().numpy().copy(), torch.from_numpy),
    "a list": (lambda t: t.tolist(), from_list),
    "bytes": (
        lambda t: t.numpy().tobytes(),
        lambda p: torch.frombuffer(bytearray(p), dtype=torch.float64),
    ),
    "a closure": (lambda t: (lambda c: lambda: c)(t.clone()), lambda p: p()),
}


@columns(eager, program)
@pytest.mark.parametrize("pair", COPIES.values(), ids=list(COPIES))
def test_s17_a_packed_copy_is_simply_right(run: Any, pair: Any) -> None:
    x = leaf()
    y = x * 2
    with sg.saved_tensors_hooks(*pair):
        z = y.sin()
    with torch.no_grad():
        y.add_(1)
    run(z.sum())
    assert_close(x.grad, 2 * (2 * x.detach()).cos())


@columns(eager, program)
def test_s17_a_change_between_two_passes_is_found(run: Any) -> None:
    x = leaf()
    y = x * 2
    with sg.saved_tensors_hooks(lambda t: t.detach(), lambda p: p):
        z = y.sin()
    run(z.sum(), retain_graph=True)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(sg.SavedTensorChanged):
        run(z.sum())


@columns(eager, program)
def test_s17_unpacking_to_the_same_memory_each_time_is_fine(run: Any) -> None:
    """A hook may unpack into a buffer of its own, over and over."""
    buffer = torch.zeros(3, dtype=torch.float64)
    x = leaf()
    with sg.saved_tensors_hooks(lambda t: t.clone(), lambda p: buffer.copy_(p)):
        z = (x * 2).sin()
    run(z.sum(), retain_graph=True)
    run(z.sum())
    assert_close(x.grad, 4 * (2 * x.detach()).cos())


@columns(eager, program)
def test_s17_freed_memory_that_is_used_again_is_not_taken_for_an_alias(run: Any) -> None:
    """The tensor was changed and then freed; what is unpacked may well lie where it was."""
    for _ in range(50):
        x = leaf()
        y = x * 2
        with sg.saved_tensors_hooks(lambda t: t.tolist(), from_list):
            z = y.sin()
        with torch.no_grad():
            y.add_(1)
        del y
        run(z.sum())
        assert_close(x.grad, 2 * (2 * x.detach()).cos())


@columns(eager, program)
def test_s17_checking_holds_no_memory(run: Any) -> None:
    """A pack that moves the tensor away later, from where it kept it at first."""
    boxes: list[Box] = []

    def pack(t: Tensor) -> Box:
        boxes.append(Box(t))
        return boxes[-1]

    x = leaf(100)
    with sg.saved_tensors_hooks(pack, lambda p: from_list(p.content)):
        z = (x * 2).sin()
    storage = torch.multiprocessing.reductions.StorageWeakRef(boxes[0].content.untyped_storage())
    boxes[0].content = boxes[0].content.tolist()
    assert storage.expired()
    run(z.sum())
    assert_close(x.grad, 2 * (2 * x.detach()).cos())


def test_s17_without_changes_hooks_see_each_use() -> None:
    x, pair = leaf(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        z = x.sin()
    z.sum().backward(retain_graph=True)
    with torch.no_grad():
        x.add_(1)  # the copy in the box is right all the same
    z.sum().backward()
    assert pair.counts == (1, 2)
