"""S6: hooks nest, only the innermost pair applies; `compose` stacks pairs explicitly."""

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


def leaf() -> Tensor:
    return torch.randn(3, dtype=torch.float64, requires_grad=True)


@columns(eager, program)
def test_s06_only_the_innermost_pair_applies(run: Any) -> None:
    x, outer, inner = leaf(), Recording(), Recording()
    with sg.saved_tensors_hooks(outer.pack, outer.unpack):
        with sg.saved_tensors_hooks(inner.pack, inner.unpack):
            loss = (x * x).sum()
    run(loss)
    assert outer.counts == (0, 0)
    assert inner.counts == (2, 2)
    assert_close(x.grad, 2 * x.detach())


@columns(eager, program)
def test_s06_leaving_restores_the_outer_pair(run: Any) -> None:
    x, outer, inner = leaf(), Recording(), Recording()
    with sg.saved_tensors_hooks(outer.pack, outer.unpack):
        a = x.exp()
        with sg.saved_tensors_hooks(inner.pack, inner.unpack):
            b = x.exp()
        c = x.exp()
    run((a + b + c).sum())
    assert outer.counts == (2, 2)
    assert inner.counts == (1, 1)


@columns(eager, program)
def test_s06_leaving_by_an_exception_restores_the_outer_pair(run: Any) -> None:
    x, outer, inner = leaf(), Recording(), Recording()
    with sg.saved_tensors_hooks(outer.pack, outer.unpack):
        with pytest.raises(KeyError), sg.saved_tensors_hooks(inner.pack, inner.unpack):
            raise KeyError
        loss = x.exp().sum()
    run(loss)
    assert (outer.counts, inner.counts) == ((1, 1), (0, 0))


def test_s06_leaving_by_an_exception_drops_pairs_that_were_pushed_within() -> None:
    outer, inner = Recording(), Recording()
    with sg.saved_tensors_hooks(outer.pack, outer.unpack):
        with pytest.raises(KeyError), sg.saved_tensors_hooks(inner.pack, inner.unpack):
            sg.push_hooks(inner.pack, inner.unpack)
            raise KeyError
        assert [p.pack for p in sg.saved.hooks.pairs] == [outer.pack]
    assert sg.saved.hooks.pairs == []


@columns(eager, program)
def test_s06_one_pair_in_two_places(run: Any) -> None:
    x, pair = leaf(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        with sg.saved_tensors_hooks(pair.pack, pair.unpack):
            loss = x.exp().sum()
    run(loss)
    assert pair.counts == (1, 1)


class Stage:
    """Multiplies on packing and divides on unpacking; notes the order of calls."""

    def __init__(self, name: str, factor: float, log: list[str]) -> None:
        self.name, self.factor, self.log = name, factor, log

    def pack(self, tensor: Tensor) -> Tensor:
        self.log.append(f"pack {self.name}")
        return tensor.detach() * self.factor

    def unpack(self, packed: Tensor) -> Tensor:
        self.log.append(f"unpack {self.name}")
        return packed / self.factor


@columns(eager, program)
def test_s06_compose_packs_in_order_and_unpacks_in_reverse(run: Any) -> None:
    x, log = leaf(), []
    pair = sg.compose(Stage("a", 2.0, log), Stage("b", 4.0, log), Stage("c", 8.0, log))
    with sg.saved_tensors_hooks(*pair):
        loss = x.exp().sum()
    assert log == ["pack a", "pack b", "pack c"]
    run(loss)
    assert log[3:] == ["unpack c", "unpack b", "unpack a"]
    assert_close(x.grad, x.detach().exp())


@columns(eager, program)
def test_s06_compose_packs_every_tensor_in_what_the_one_before_returned(run: Any) -> None:
    """As a quantizer does: it returns values and a scale, and the next pair moves both."""

    def quantize(t: Tensor) -> Any:
        scale = t.abs().max()
        return {"values": [(t / scale * 1000).round().short()], "scale": scale, "note": "q"}

    def restore(packed: Any) -> Tensor:
        assert packed["note"] == "q"
        return packed["values"][0].double() / 1000 * packed["scale"]

    x, mover = leaf(), Recording()
    with sg.saved_tensors_hooks(*sg.compose((quantize, restore), mover)):
        loss = x.exp().sum()
    run(loss)
    assert mover.counts == (2, 2)
    assert_close(x.grad, x.detach().exp(), rtol=1e-2, atol=1e-2)


@columns(eager, program)
def test_s06_compose_of_one_pair_is_that_pair(run: Any) -> None:
    x, pair = leaf(), Recording()
    with sg.saved_tensors_hooks(*sg.compose(pair)):
        loss = x.exp().sum()
    run(loss)
    assert pair.counts == (1, 1)


@columns(eager, program)
def test_s06_composed_pairs_can_be_composed_again(run: Any) -> None:
    x, log = leaf(), []
    inner = sg.compose(Stage("b", 2.0, log), Stage("c", 4.0, log))
    with sg.saved_tensors_hooks(*sg.compose(Stage("a", 8.0, log), inner)):
        loss = x.exp().sum()
    run(loss)
    assert log == ["pack a", "pack b", "pack c", "unpack c", "unpack b", "unpack a"]
    assert_close(x.grad, x.detach().exp())


@columns(eager, program)
def test_s06_composed_pairs_work_on_one_saved_tensor(run: Any) -> None:
    x, log = leaf(), []
    y = x.exp()
    y.grad_fn._raw_saved_out.register_hooks(*sg.compose(Stage("a", 2.0, log), Stage("b", 4.0, log)))
    run(y.sum())
    assert log == ["pack a", "pack b", "unpack b", "unpack a"]
    assert_close(x.grad, x.detach().exp())


def test_s06_compose_of_nothing_is_an_error() -> None:
    with pytest.raises(sg.HookError, match="at least one pair"):
        sg.compose()
