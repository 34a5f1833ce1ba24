"""The list "measured on the reference" of the table of behaviours: to match, or to beat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording, in_thread

pytestmark = pytest.mark.usefixtures("recorded")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=torch.float64, requires_grad=True)


class Boxes(Recording):
    """What it packs is no tensor."""

    def pack(self, tensor: Tensor) -> Any:
        self.packs += 1
        return {"numbers": tensor.tolist(), "shape": tensor.shape}

    def unpack(self, packed: Any) -> Tensor:
        self.unpacks += 1
        return torch.tensor(packed["numbers"], dtype=torch.float64).reshape(packed["shape"])


# -- right there, and the least we may do


@pytest.mark.parametrize("inside", [True, False])
def test_double_backward_inside_and_outside_the_hook_context(inside: bool) -> None:
    x, pair = leaf(), Boxes()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = (x.sin() * x.exp()).sum()
        packs = pair.packs
        if inside:
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
    if not inside:
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
    assert (pair.packs > packs) == inside, "the backward's own saves are packed, where it runs"
    (second,) = torch.autograd.grad(g.sum(), x)
    value = x.detach()
    assert_close(second, 2 * value.cos() * value.exp())


def test_batched_gradients_through_hooks_that_pack_no_tensor() -> None:
    x, w, pair = leaf(), leaf(), Boxes()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        y = (x * w).sin()
    v = torch.eye(3, dtype=torch.float64)
    grads = torch.autograd.grad(y, (x, w), v, is_grads_batched=True)
    cos = (x.detach() * w.detach()).cos()
    assert_close(grads[0], torch.diag(cos * w.detach()))
    assert_close(grads[1], torch.diag(cos * x.detach()))
    assert pair.packs == pair.unpacks, "once for the whole batch"


def test_vmap_around_hooks() -> None:
    """The hooks see the whole batch, unwrapped."""
    shapes: list[torch.Size] = []
    kinds: list[bool] = []
    x = leaf()

    def pack(t: Tensor) -> Any:
        shapes.append(t.shape)
        kinds.append(torch._C._functorch.is_batchedtensor(t))
        return t.detach().clone()

    with sg.saved_tensors_hooks(pack, lambda p: p):
        out = torch.vmap(lambda row: (row * x).sin())(torch.ones(5, 3, dtype=torch.float64))
    out.sum().backward()
    assert_close(x.grad, 5 * x.detach().cos())
    assert torch.Size([5, 3]) in shapes
    assert not any(kinds)


def test_hooks_within_vmap() -> None:
    shapes: list[torch.Size] = []
    x = leaf()

    def pack(t: Tensor) -> Any:
        shapes.append(t.shape)
        return t.detach().clone()

    def one(row: Tensor) -> Tensor:
        with sg.saved_tensors_hooks(pack, lambda p: p):
            return (row * x).sin()

    torch.vmap(one)(torch.ones(5, 3, dtype=torch.float64)).sum().backward()
    assert_close(x.grad, 5 * x.detach().cos())
    assert torch.Size([5, 3]) in shapes


def test_a_second_backward_with_retain_graph() -> None:
    x, pair = leaf(), Boxes()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = (x * x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert pair.counts == (2, 4)
    assert_close(x.grad, 4 * x.detach())


# -- wrong there, right here


def saved_by(root: Any) -> list[sg.SavedTensor]:
    """Every saved tensor of the graph that `root` is the result of."""
    found: list[sg.SavedTensor] = []
    seen, todo = set(), [root.grad_fn]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_") and name != "_raw_saved_tensors":
                entry = getattr(node, name)
                found += [entry] if isinstance(entry, sg.SavedTensor) else []
        todo += [n for n, _ in node.next_functions if n is not None]
    return found


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: nn.functional.linear(x, w),
        lambda x, w: x @ w.t(),
        lambda x, w: torch.mm(x, w.t()),
        lambda x, w: torch.einsum("ij,kj->ik", x, w),
        lambda x, w: torch.addmm(torch.zeros(4, dtype=torch.float64), x, w.t()),
    ],
)
def test_a_saved_weight_is_known_by_its_storage(product: Any) -> None:
    """What is saved may be a view of the parameter, which a test by isinstance misses."""
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    out = product(leaf(2, 3), weight)
    key = sg._private.storage_key(weight)
    assert [s.info().storage == key for s in saved_by(out)].count(True) == 1


def test_a_hook_that_cannot_be_traced_is_simply_called() -> None:
    """Arbitrary Python, with side effects, input and output, in the middle of a graph."""
    x, log = leaf(), []

    def pack(t: Tensor) -> Any:
        log.append(f"{t.sum().item():.3f}")
        return t.numpy().tobytes()

    def unpack(packed: bytes) -> Tensor:
        log.append(str(len(packed)))
        return torch.frombuffer(bytearray(packed), dtype=torch.float64)

    with sg.saved_tensors_hooks(pack, unpack):
        loss = x.sin().sin().sum()
    loss.backward()
    assert len(log) == 4
    assert_close(x.grad, x.detach().cos() * x.detach().sin().cos())


def test_create_graph_with_hooks_gives_a_gradient_with_a_graph() -> None:
    x, pair = leaf(), Boxes()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = (x**3).sum()
        loss.backward(create_graph=True)
    assert x.grad is not None and x.grad.requires_grad
    (second,) = torch.autograd.grad(x.grad.sum(), x)
    x.grad = None
    assert_close(second, 6 * x.detach())


def test_selective_checkpointing_allows_more_than_one_backward() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if op is torch.ops.aten.mm.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def f(x: Tensor) -> Tensor:
        return torch.mm(x, x).sin().exp()

    x = leaf(3, 3)
    out = torch.utils.checkpoint.checkpoint(
        f, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    want = in_thread(lambda: torch.autograd.grad(f(x).sum(), x)[0])
    for keep in (True, True, False):
        (found,) = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=keep)
        assert_close(found, want)
