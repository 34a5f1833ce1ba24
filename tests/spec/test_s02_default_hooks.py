"""S2: `saved_tensors_hooks(pack, unpack)` applies to everything saved inside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording, without_rule
from tests.spec.columns import columns, eager, program

pytestmark = pytest.mark.usefixtures("recorded")

# Ours, PyTorch's, and the functional pair under each.
CONTEXTS = [sg.saved_tensors_hooks, torch.autograd.graph.saved_tensors_hooks]
STACKS = [
    (sg.push_hooks, sg.pop_hooks),
    (
        lambda *pair: torch._C._autograd._push_saved_tensors_default_hooks(*pair),
        lambda: torch._C._autograd._pop_saved_tensors_default_hooks(),
    ),
]


def leaf() -> Tensor:
    return torch.randn(3, dtype=torch.float64, requires_grad=True)


@columns(eager, program)
@pytest.mark.parametrize("hooks", CONTEXTS)
def test_s02_apply_to_saved_inputs(run: Any, hooks: Any) -> None:
    x, pair = leaf(), Recording()
    with hooks(pair.pack, pair.unpack):
        loss = (x * x).sum()
    run(loss)
    assert pair.counts == (2, 2)
    assert_close(x.grad, 2 * x.detach())


@columns(eager, program)
@pytest.mark.parametrize("hooks", CONTEXTS)
def test_s02_apply_to_saved_outputs(run: Any, hooks: Any) -> None:
    x, pair = leaf(), Recording()
    with hooks(pair.pack, pair.unpack):
        loss = x.exp().sum()
    run(loss)
    assert pair.counts == (1, 1)
    assert_close(x.grad, x.detach().exp())


@columns(eager, program)
@pytest.mark.parametrize("hooks", CONTEXTS)
def test_s02_apply_to_what_a_custom_function_saves(run: Any, hooks: Any) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x**3
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            x, y = ctx.saved_tensors
            assert y.shape == x.shape
            return g * 3 * x**2

    x, pair = leaf(), Recording()
    with hooks(pair.pack, pair.unpack):
        loss = Cube.apply(x).sum()
    run(loss)
    assert pair.counts == (2, 2)
    assert_close(x.grad, 3 * x.detach() ** 2)


@columns(eager, program)
def test_s02_apply_to_what_an_in_place_op_saves(run: Any) -> None:
    x, pair = leaf(), Recording()
    y = x * 2
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        y.mul_(x)
    run(y.sum())
    assert pair.counts == (2, 2)
    assert_close(x.grad, 4 * x.detach())


@columns(eager, program)
def test_s02_apply_to_an_op_without_a_rule(run: Any) -> None:
    x, pair = leaf(), Recording()
    with without_rule(torch.ops.aten.atan2.default), sg.saved_tensors_hooks(pair.pack, pair.unpack):
        y = torch.atan2(x, torch.full_like(x, 2.0))
    assert y.grad_fn.name().startswith("Fallback")
    run(y.sum())
    assert pair.counts == (2, 2)
    assert_close(x.grad, 2 / (x.detach() ** 2 + 4))


@columns(eager, program)
@pytest.mark.parametrize(("push", "pop"), STACKS)
def test_s02_functional_push_and_pop(run: Any, push: Any, pop: Any) -> None:
    x, pair = leaf(), Recording()
    push(pair.pack, pair.unpack)
    inside = x.exp()
    pop()
    outside = x.exp()
    run((inside + outside).sum())
    assert pair.counts == (1, 1)
    assert_close(x.grad, 2 * x.detach().exp())


@pytest.mark.parametrize(("push", "pop"), STACKS)
def test_s02_popping_more_than_was_pushed_is_an_error(push: Any, pop: Any) -> None:
    push(lambda t: t, lambda t: t)
    pop()
    with pytest.raises(sg.HookError, match="no saved-tensor hooks to pop"):
        pop()


@pytest.mark.parametrize("hooks", CONTEXTS)
@pytest.mark.parametrize("pair", [(None, lambda p: p), (lambda t: t, "unpack")])
def test_s02_hooks_that_cannot_be_called_are_an_error(hooks: Any, pair: Any) -> None:
    with pytest.raises((sg.HookError, TypeError), match="call"):
        with hooks(*pair):
            leaf().exp()
    assert sg.saved.hooks.pairs == []


@columns(eager, program)
@pytest.mark.parametrize("hooks", CONTEXTS)
def test_s02_what_was_saved_outside_is_not_touched(run: Any, hooks: Any) -> None:
    x, pair = leaf(), Recording()
    before = x.exp()
    with hooks(pair.pack, pair.unpack):
        pass
    after = x.exp()
    with hooks(pair.pack, pair.unpack):
        run((before + after).sum())  # the backward is inside, its tensors are not
    assert pair.counts == (0, 0)
    assert_close(x.grad, 2 * x.detach().exp())


@columns(eager, program)
def test_s02_hooks_outlive_their_context(run: Any) -> None:
    x, calls = leaf(), []
    with sg.saved_tensors_hooks(lambda t: t.detach().clone(), lambda p: (calls.append(1), p)[1]):
        loss = x.exp().sum()
    assert calls == []
    run(loss)
    assert calls == [1]


@pytest.mark.parametrize("hooks", CONTEXTS)
def test_s02_nothing_is_packed_where_nothing_is_saved(hooks: Any) -> None:
    x, pair = leaf(), Recording()
    with hooks(pair.pack, pair.unpack):
        with torch.no_grad():
            x.exp()
        x.detach().exp()
        x + x
    assert pair.counts == (0, 0)


@columns(eager, program)
@pytest.mark.parametrize("hooks", CONTEXTS)
def test_s02_a_default_hook_that_changes_its_input_is_an_error(run: Any, hooks: Any) -> None:
    x = leaf()
    with (
        hooks(lambda t: t.mul_(2), lambda p: p),
        pytest.raises(sg.HookError, match=r"'self' of aten\.mul at .*changed its input in place"),
    ):
        (x * 2) * x


@columns(eager, program)
def test_s02_a_default_unpack_that_returns_something_else_is_an_error(run: Any) -> None:
    x = leaf()
    with sg.saved_tensors_hooks(lambda t: None, lambda p: torch.zeros(7)):
        loss = x.sin().sum()
    with pytest.raises(
        sg.HookError, match=r"'self' of aten\.sin at .*float32 \[7\].*float64 \[3\]"
    ):
        run(loss)


@columns(eager, program)
def test_s02_what_a_hook_computes_is_not_saved(run: Any) -> None:
    """A pack that computes does not call itself."""
    x, pair = leaf(), Recording()
    weight = leaf()

    def pack(t: Tensor) -> Any:
        (t * weight).exp()
        return pair.pack(t)

    def unpack(packed: Any) -> Tensor:
        weight.exp()
        return pair.unpack(packed)

    with sg.saved_tensors_hooks(pack, unpack):
        loss = x.exp().sum()
        run(loss)
    assert pair.counts == (1, 1)
    assert_close(x.grad, x.detach().exp())


@columns(eager, program)
def test_s02_a_whole_model(run: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2)
    ).double()
    data, pair = torch.randn(5, 4, dtype=torch.float64), Recording()
    run(model(data).square().sum())
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = model(data).square().sum()
    run(loss)
    assert pair.packs >= 4
    assert pair.packs == pair.unpacks
    assert_close([p.grad for p in model.parameters()], plain)
