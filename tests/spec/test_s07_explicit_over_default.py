"""S7: a pair registered on one saved tensor takes the place of the default one; asking it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording
from tests.spec.columns import columns, eager, program

pytestmark = pytest.mark.usefixtures("recorded")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=torch.float64, requires_grad=True)


def second_derivative(y: Tensor, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return second


def saved_by_sin(x: Tensor) -> tuple[Tensor, sg.SavedTensor]:
    y = x.sin()
    return y, y.grad_fn._raw_saved_self  # type: ignore[union-attr]


@columns(eager, program)
def test_s07_registering_over_default_hooks_repacks(run: Any) -> None:
    x, default, mine = leaf(), Recording(), Recording()
    with sg.saved_tensors_hooks(default.pack, default.unpack):
        y, saved = saved_by_sin(x)
    saved.register_hooks(mine.pack, mine.unpack)
    assert default.counts == (1, 1), "unpacked once, to be packed again"
    assert mine.counts == (1, 0)
    run(y.sum())
    assert default.counts == (1, 1)
    assert mine.counts == (1, 1)
    assert_close(x.grad, x.detach().cos())


def test_s07_registering_twice_over_default_hooks_is_an_error() -> None:
    default = Recording()
    with sg.saved_tensors_hooks(default.pack, default.unpack):
        _, saved = saved_by_sin(leaf())
    saved.register_hooks(lambda t: t.clone(), lambda p: p)
    with pytest.raises(sg.HookError, match=r"'self' of aten\.sin at .*replace_hooks"):
        saved.register_hooks(lambda t: t.clone(), lambda p: p)


@columns(eager, program)
def test_s07_a_pair_can_be_replaced(run: Any) -> None:
    x, first, second = leaf(), Recording(), Recording()
    y, saved = saved_by_sin(x)
    saved.register_hooks(first.pack, first.unpack)
    saved.replace_hooks(second.pack, second.unpack)
    run(y.sum())
    assert (first.counts, second.counts) == ((1, 1), (1, 1))
    assert_close(x.grad, x.detach().cos())


@columns(eager, program)
def test_s07_replacing_where_there_are_no_hooks_registers(run: Any) -> None:
    x, pair = leaf(), Recording()
    y, saved = saved_by_sin(x)
    saved.replace_hooks(pair.pack, pair.unpack)
    run(y.sum())
    assert pair.counts == (1, 1)
    assert_close(x.grad, x.detach().cos())


def test_s07_a_replacement_that_raises_leaves_the_first_pair() -> None:
    x, first = leaf(), Recording()
    y, saved = saved_by_sin(x)
    saved.register_hooks(first.pack, first.unpack)
    with pytest.raises(ZeroDivisionError):
        saved.replace_hooks(lambda t: 1 / 0, lambda p: p)
    y.sum().backward()
    assert first.counts == (1, 2)
    assert_close(x.grad, x.detach().cos())


@columns(eager, program)
def test_s07_hooks_can_be_removed(run: Any) -> None:
    x, pair = leaf(), Recording()
    y, saved = saved_by_sin(x)
    saved.register_hooks(pair.pack, pair.unpack)
    saved.remove_hooks()
    assert saved.state == "live"
    assert pair.counts == (1, 1)
    run(y.sum())
    assert pair.counts == (1, 1)
    assert_close(x.grad, x.detach().cos())


@columns(eager, program)
def test_s07_default_hooks_can_be_removed_from_one_tensor(run: Any) -> None:
    x, pair = leaf(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        y, saved = saved_by_sin(x)
    saved.remove_hooks()
    saved.register_hooks(pair.pack, pair.unpack)  # there is room for an explicit pair again
    run(y.sum())
    assert pair.counts == (2, 2)
    assert_close(x.grad, x.detach().cos())


def test_s07_removing_where_there_are_no_hooks_does_nothing() -> None:
    x = leaf()
    y, saved = saved_by_sin(x)
    saved.remove_hooks()
    y.sum().backward()
    assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("of_leaf", [True, False])
@pytest.mark.parametrize("op", ["sin", "exp"])  # one saves its input, the other its output
def test_s07_a_tensor_whose_hooks_were_removed_still_leads_into_the_graph(
    op: str, of_leaf: bool
) -> None:
    x = leaf()
    x1 = x if of_leaf else x * 1
    y = getattr(x1, op)()
    saved = y.grad_fn._raw_saved_self if op == "sin" else y.grad_fn._raw_saved_out
    saved.register_hooks(lambda t: t.clone(), lambda p: p)
    saved.remove_hooks()
    want = -x.detach().sin() if op == "sin" else x.detach().exp()
    assert_close(second_derivative(y, x), want)


@pytest.mark.parametrize("of_leaf", [True, False])
@pytest.mark.parametrize("op", ["sin", "exp"])
def test_s07_a_tensor_whose_hooks_were_replaced_still_leads_into_the_graph(
    op: str, of_leaf: bool
) -> None:
    x = leaf()
    x1 = x if of_leaf else x * 1
    y = getattr(x1, op)()
    saved = y.grad_fn._raw_saved_self if op == "sin" else y.grad_fn._raw_saved_out
    saved.register_hooks(lambda t: t.clone(), lambda p: p)
    saved.replace_hooks(lambda t: t.numpy().copy(), torch.from_numpy)
    want = -x.detach().sin() if op == "sin" else x.detach().exp()
    assert_close(second_derivative(y, x), want)


def test_s07_an_unpacked_value_with_a_graph_of_its_own_adds_nothing() -> None:
    """What `unpack` computes from other tracked tensors is a value, not a piece of graph."""
    x, other = leaf(), leaf()

    def unpack(packed: Tensor) -> Tensor:
        with torch.enable_grad():
            return packed + other * 0

    constant = torch.randn(3, dtype=torch.float64)
    y = x * constant
    y.grad_fn._raw_saved_other.register_hooks(lambda t: t.clone(), unpack)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert not grad.requires_grad


# -- asking


def test_s07_who_saved_it_and_what_it_is() -> None:
    a, b = leaf(2, 3), leaf(3, 4)
    y = torch.mm(a, b)
    info = y.grad_fn._raw_saved_mat2.info()
    assert (info.op, info.name) == ("aten.mm", "mat2")
    assert (info.shape, info.dtype, info.device) == (b.shape, b.dtype, b.device)
    assert info.nbytes == 3 * 4 * 8
    assert info.is_leaf
    assert not info.is_output
    assert info.view_of is None
    assert "test_s07" in info.where


def test_s07_the_line_is_the_users() -> None:
    import inspect

    x = leaf()
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    y = torch.nn.functional.gelu(x)
    where = y.grad_fn._raw_saved_self.info().where
    assert where == f"{__file__}:{line}"


def test_s07_an_output_says_so() -> None:
    info = leaf().exp().grad_fn._raw_saved_out.info()
    assert (info.op, info.name, info.is_output) == ("aten.exp", "out", True)


def test_s07_an_intermediate_is_no_leaf() -> None:
    info = (leaf() * 2).sin().grad_fn._raw_saved_self.info()
    assert not info.is_leaf


def test_s07_a_view_says_of_what() -> None:
    base = leaf(4, 6)
    info = base.t().sin().grad_fn._raw_saved_self.info()
    assert info.view_of == base.shape
    assert info.storage == sg._private.storage_key(base)


def test_s07_storage_tells_aliases() -> None:
    x = leaf(4, 4)
    one, other = x.sin(), x.t().sin()
    apart = leaf(4, 4).sin()
    keys = [t.grad_fn._raw_saved_self.info().storage for t in (one, other, apart)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("by_default", [True, False])
def test_s07_states(by_default: bool) -> None:
    pair = Recording()
    if by_default:
        with sg.saved_tensors_hooks(pair.pack, pair.unpack):
            y, saved = saved_by_sin(leaf())
    else:
        y, saved = saved_by_sin(leaf())
        assert (saved.state, saved.info().state, saved.packed) == ("live", "live", None)
        saved.register_hooks(pair.pack, pair.unpack)
    assert (saved.state, saved.info().state) == ("packed", "packed")
    assert saved.packed[0] == "box"
    counts = pair.counts
    y.sum().backward()
    assert saved.state == "released"
    assert pair.counts == (counts[0], counts[1] + 1), "asking ran no hook"
    with pytest.raises(sg.GraphFreedError, match=r"'self' of aten\.sin"):
        saved.info()


def test_s07_a_packed_tensor_says_what_it_was() -> None:
    x = leaf(2, 3)
    with sg.saved_tensors_hooks(lambda t: "gone", lambda p: None):
        _, saved = saved_by_sin(x.t())
    info = saved.info()
    assert (info.shape, info.dtype, info.nbytes) == (torch.Size([3, 2]), torch.float64, 48)
    assert info.view_of == (2, 3)
    assert info.storage is None, "it holds none"
    assert "packed" in repr(saved) and "aten.sin" in repr(saved)
