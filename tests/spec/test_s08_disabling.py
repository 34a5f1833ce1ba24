"""S8: `disable_saved_tensors_hooks(message)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stowgrad as sg
from tests.helpers import Recording, in_thread

pytestmark = pytest.mark.usefixtures("recorded")
BOTH = pytest.mark.parametrize(
    ("disable", "enter"),
    [
        (sg.disable_saved_tensors_hooks, sg.saved_tensors_hooks),
        (
            torch.autograd.graph.disable_saved_tensors_hooks,
            torch.autograd.graph.saved_tensors_hooks,
        ),
    ],
    ids=["sg", "torch"],
)


@BOTH
def test_s08_entering_while_disabled_raises_with_the_message(disable: Any, enter: Any) -> None:
    pair = Recording()
    with disable("no hooks in here"):
        with pytest.raises(sg.HooksDisabledError, match="no hooks in here"):
            with enter(pair.pack, pair.unpack):
                pass
    with enter(pair.pack, pair.unpack):
        torch.ones(3, requires_grad=True).exp()
    assert pair.packs == 1


def test_s08_without_a_message_there_is_one() -> None:
    with sg.disable_saved_tensors_hooks(), pytest.raises(sg.HooksDisabledError, match="disabled"):
        sg.push_hooks(lambda t: t, lambda p: p)


@BOTH
def test_s08_disabling_while_hooks_are_active_raises(disable: Any, enter: Any) -> None:
    x, pair = torch.ones(3, requires_grad=True), Recording()
    with enter(pair.pack, pair.unpack):
        with pytest.raises(sg.HooksDisabledError, match="while a pair is active"):
            with disable("message"):
                pass
        x.exp()
    assert pair.packs == 1, "the pair is still there"
    sg.push_hooks(pair.pack, pair.unpack)  # and nothing is disabled
    sg.pop_hooks()


@BOTH
def test_s08_nested_uses_restore_what_was_there(disable: Any, enter: Any) -> None:
    with disable("outer"):
        with disable("inner"), pytest.raises(sg.HooksDisabledError, match="inner"):
            enter(lambda t: t, lambda p: p).__enter__()
        with pytest.raises(sg.HooksDisabledError, match="outer"):
            enter(lambda t: t, lambda p: p).__enter__()
    with enter(lambda t: t, lambda p: p):
        pass


@BOTH
def test_s08_leaving_by_an_exception_enables_again(disable: Any, enter: Any) -> None:
    with pytest.raises(KeyError), disable("message"):
        raise KeyError
    with enter(lambda t: t, lambda p: p):
        pass


@BOTH
def test_s08_only_in_this_thread(disable: Any, enter: Any) -> None:
    def other() -> None:
        with sg.record(), enter(lambda t: t, lambda p: p):
            pass

    with disable("here"):
        in_thread(other)


def test_s08_what_is_saved_is_not_affected() -> None:
    """Hooks on one saved tensor are not default hooks."""
    x, pair = torch.ones(3, requires_grad=True), Recording()
    with sg.disable_saved_tensors_hooks("message"):
        y = x.exp()
        y.grad_fn._raw_saved_out.register_hooks(pair.pack, pair.unpack)
        y.sum().backward()
    assert pair.counts == (1, 1)


def test_s08_save_on_cpu_obeys() -> None:
    """A public context built on hooks."""
    with sg.disable_saved_tensors_hooks("not now"):
        with pytest.raises(sg.HooksDisabledError, match="not now"):
            with torch.autograd.graph.save_on_cpu():
                pass
