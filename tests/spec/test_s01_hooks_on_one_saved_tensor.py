"""S1: `saved.register_hooks(pack, unpack)` on one saved tensor."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording
from tests.spec.columns import columns, eager, program

pytestmark = pytest.mark.usefixtures("recorded")
NAMES_IT = r"'self' of aten\.mul at .*test_s01_\w+\.py:\d+"  # the saved tensor, the op, the line


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=torch.float64, requires_grad=True)


def saved_self(y: Tensor) -> sg.SavedTensor:
    return y.grad_fn._raw_saved_self  # type: ignore[union-attr]


def square(x: Tensor) -> tuple[Tensor, sg.SavedTensor]:
    y = x * x
    return y, saved_self(y)


@columns(eager, program)
def test_s01_pack_is_called_at_once_and_unpack_at_each_use(run: Any) -> None:
    x, pair = leaf(), Recording()
    y, saved = square(x)
    saved.register_hooks(pair.pack, pair.unpack)
    assert pair.counts == (1, 0)
    run(y.sum())
    assert pair.counts == (1, 1)
    assert_close(x.grad, 2 * x.detach())


@columns(eager, program)
def test_s01_the_hooks_values_are_the_ones_used(run: Any) -> None:
    x = leaf()
    y, saved = square(x)
    saved.register_hooks(lambda t: t.detach().clone(), lambda t: t * 100)
    run(y.sum())
    assert_close(x.grad, 101 * x.detach())


def test_s01_every_access_unpacks_anew() -> None:
    x, pair = leaf(), Recording()
    y, saved = square(x)
    saved.register_hooks(pair.pack, pair.unpack)
    for n in (1, 2, 3):
        assert_close(y.grad_fn._saved_self, x)
        assert pair.counts == (1, n)


def test_s01_an_access_leads_back_to_the_leaf_through_its_hooks() -> None:
    x = leaf()
    y, saved = square(x)
    saved.register_hooks(lambda t: t.detach().clone(), lambda t: t.clone())
    again = y.grad_fn._saved_self
    assert again.requires_grad
    (again * 3).sum().backward()
    assert_close(x.grad, torch.full_like(x, 3))


@columns(eager, program)
@pytest.mark.parametrize("wrap", [str, lambda key: None, lambda key: object(), lambda key: [key]])
def test_s01_packed_may_be_any_object(run: Any, wrap: Any) -> None:
    store, seen = {}, []

    def pack(t: Tensor) -> Any:
        store[0] = t.detach().clone()
        seen.append(wrap(0))
        return seen[0]

    def unpack(packed: Any) -> Tensor:
        assert packed is seen[0]
        return store[0]

    x = leaf()
    y, saved = square(x)
    saved.register_hooks(pack, unpack)
    assert saved.packed is seen[0]
    run(y.sum())
    assert_close(x.grad, 2 * x.detach())


def test_s01_only_what_pack_returned_is_kept() -> None:
    x = leaf()
    mid = x * 2
    y = mid * leaf()
    gone = weakref.ref(mid)
    del mid
    assert gone() is not None, "saved by mul"
    saved_self(y).register_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy)
    assert gone() is None


@columns(eager, program)
def test_s01_hooks_on_a_saved_output(run: Any) -> None:
    x, pair = leaf(), Recording()
    y = x.exp()
    y.grad_fn._raw_saved_result.register_hooks(pair.pack, pair.unpack)  # PyTorch's word for it
    run(y.sum())
    assert pair.counts == (1, 1)
    assert_close(x.grad, x.detach().exp())


def test_s01_hooks_are_called_without_grad_mode() -> None:
    modes: list[bool] = []
    x = leaf()
    y, saved = square(x)
    saved.register_hooks(
        lambda t: (modes.append(torch.is_grad_enabled()), t.detach().clone())[1],
        lambda p: (modes.append(torch.is_grad_enabled()), p)[1],
    )
    y.sum().backward(create_graph=True)
    assert modes == [False, False]


def test_s01_registering_twice_is_an_error() -> None:
    x = leaf()
    y, saved = square(x)
    saved.register_hooks(lambda t: t.detach().clone(), lambda p: p)
    with pytest.raises(sg.HookError, match=NAMES_IT + ".*only one pair"):
        saved.register_hooks(lambda t: None, lambda p: p)
    y.sum().backward()  # the first pair is still in place
    assert_close(x.grad, 2 * x.detach())


def test_s01_registering_after_release_is_an_error() -> None:
    y, saved = square(leaf())
    y.sum().backward()
    with pytest.raises(sg.GraphFreedError, match=NAMES_IT):
        saved.register_hooks(lambda t: t, lambda p: p)


def test_s01_accessing_after_release_is_an_error() -> None:
    y, saved = square(leaf())
    saved.register_hooks(lambda t: t.detach().clone(), lambda p: p)
    y.sum().backward()
    with pytest.raises(sg.GraphFreedError, match=NAMES_IT):
        saved.unpack()
    with pytest.raises(sg.GraphFreedError, match=r"aten\.mul"):
        _ = y.grad_fn._saved_self


def test_s01_a_pack_that_changes_its_input_is_an_error() -> None:
    x = leaf()
    y, saved = square(x)
    with pytest.raises(sg.HookError, match=NAMES_IT + ".*changed its input in place"):
        saved.register_hooks(lambda t: t.add_(1), lambda p: p)
    with pytest.raises(sg.SavedTensorChanged, match=r"saved by aten\.mul"):
        y.sum().backward()  # what was saved is not what it was


def test_s01_a_pack_that_raises_leaves_the_tensor_as_it_was() -> None:
    def pack(t: Tensor) -> Any:
        raise OSError("no space left")

    x = leaf()
    y, saved = square(x)
    with pytest.raises(OSError, match="no space left"):
        saved.register_hooks(pack, lambda p: p)
    assert saved.state == "live"
    y.sum().backward()
    assert_close(x.grad, 2 * x.detach())


@columns(eager, program)
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "NoneType, not a tensor"),
        ("text", "str, not a tensor"),
        (torch.zeros(4, dtype=torch.float64), r"float64 \[4\].*float64 \[3\]"),
        (torch.zeros(3, 1, dtype=torch.float64), r"float64 \[3, 1\]"),
        (torch.zeros(3), r"float32 \[3\].*float64 \[3\]"),
        (torch.zeros(3, dtype=torch.float64, device="meta"), "meta.*cpu"),
    ],
)
def test_s01_an_unpack_that_returns_something_else_is_an_error(
    run: Any, returned: Any, message: str
) -> None:
    y, saved = square(leaf())
    saved.register_hooks(lambda t: None, lambda p: returned)
    with pytest.raises(sg.HookError, match=NAMES_IT + ".*" + message):
        run(y.sum())


@pytest.mark.parametrize("pair", [(None, lambda p: p), (lambda t: t, 3)])
def test_s01_hooks_that_cannot_be_called_are_an_error(pair: Any) -> None:
    _y, saved = square(leaf())
    with pytest.raises(sg.HookError, match="cannot be called"):
        saved.register_hooks(*pair)
    assert saved.state == "live"


@columns(eager, program)
def test_s01_identity_hooks_change_nothing(run: Any) -> None:
    x = leaf()
    y, saved = square(x)
    saved.register_hooks(lambda t: t, lambda p: p)
    run(y.sum())
    assert_close(x.grad, 2 * x.detach())


def test_s01_a_pack_hook_gets_a_tensor_without_graph() -> None:
    x, got = leaf(), []
    _y, saved = square(x * 2)
    saved.register_hooks(
        lambda t: (got.append(t.requires_grad), t.detach().clone())[1], lambda p: p
    )
    assert got == [False]
