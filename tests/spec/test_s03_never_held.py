"""S3: under default hooks the engine holds what `pack` returned and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import LiveBytes, without_rule
from tests.spec.columns import columns, eager, program


def to_numpy(tensor: Tensor) -> Any:
    return tensor.detach().numpy().copy()


class Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x


def fallen_back(t: Tensor) -> Tensor:
    with without_rule(torch.ops.aten.atan.default):
        y = t.atan()
    assert y.grad_fn is not None and y.grad_fn.name().startswith("Fallback")
    return y


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda t: t.sin(),
    "both inputs": lambda t: t * t,
    "a view": lambda t: t.view(-1).sin(),
    "an op without a rule": lambda t: fallen_back(t),
    "a custom function": Save.apply,
    "a matrix product": lambda t: t.view(1, -1) @ t.view(-1, 1),
}


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_s03_a_packed_input_is_free_at_once(op: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(6, requires_grad=True)
    mid = x * 3.0
    gone = weakref.ref(mid)
    storage = torch.multiprocessing.reductions.StorageWeakRef(mid.untyped_storage())
    with sg.saved_tensors_hooks(to_numpy, torch.from_numpy):
        y = op(mid)
    del mid
    assert gone() is None
    assert storage.expired(), "no alias of it is alive either"
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.usefixtures("recorded")
def test_s03_a_packed_output_is_free_at_once() -> None:
    x = torch.randn(6, requires_grad=True)
    with sg.saved_tensors_hooks(to_numpy, torch.from_numpy):
        mid = x.exp()
    y = mid.sum()
    gone = weakref.ref(mid)
    storage = torch.multiprocessing.reductions.StorageWeakRef(mid.untyped_storage())
    del mid
    assert gone() is None
    assert storage.expired()
    y.backward()
    assert_close(x.grad, x.detach().exp())


@pytest.mark.usefixtures("recorded")
def test_s03_the_old_value_of_an_in_place_target_is_free_at_once() -> None:
    packed: list[Any] = []
    alive: list[Any] = []

    def pack(t: Tensor) -> Any:
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()))
        packed.append(to_numpy(t))
        return packed[-1]

    x = torch.randn(6, requires_grad=True)
    y = x * 2.0
    with sg.saved_tensors_hooks(pack, torch.from_numpy):
        y.mul_(x)
    assert len(packed) == 2
    assert alive[0].expired(), "the copy of y's old value"
    y.sum().backward()
    assert_close(x.grad, 4 * x.detach())


@pytest.mark.usefixtures("recorded")
def test_s03_nothing_is_held_while_pack_runs() -> None:
    """`pack` itself may free the memory: nobody but its caller refers to the tensor."""
    x = torch.randn(6, requires_grad=True)
    holders: list[int] = []

    def pack(t: Tensor) -> Any:
        holders.append(torch._C._storage_Use_Count(t.untyped_storage()._cdata))
        return to_numpy(t)

    with sg.saved_tensors_hooks(pack, torch.from_numpy):
        (x * 2.0).sin()
    alone = torch.empty(1)
    assert holders == [torch._C._storage_Use_Count(alone.untyped_storage()._cdata)]


@columns(eager, program)
def test_s03_live_bytes_do_not_grow_with_depth(run: Any) -> None:
    size, depth = 1000, 20

    def forward(x: Tensor) -> Tensor:
        for _ in range(depth):
            x = x.sin()
        return x

    x = torch.randn(size, requires_grad=True)
    with LiveBytes() as live, sg.record():
        y = forward(x)
        assert live.now() >= depth * size * 4 - size * 4, "without hooks, each sine's input"
        del y
        assert live.now() == 0
        with sg.saved_tensors_hooks(to_numpy, torch.from_numpy):
            y = forward(x)
        assert live.now() == size * 4, "with hooks, y alone"
        live.peak = 0
        run(y.sum())
        assert live.peak <= 6 * size * 4
    packed, x.grad = x.grad, None
    forward(x).sum().backward()
    assert_close(packed, x.grad)


@columns(eager, program)
def test_s03_live_bytes_with_a_lossy_pack(run: Any) -> None:
    """Half the bits, half the bytes."""
    x = torch.randn(1000, requires_grad=True)
    with LiveBytes() as live, sg.record():
        with sg.saved_tensors_hooks(lambda t: t.detach().bfloat16(), lambda p: p.float()):
            y = x.sin().sin()
        del live.storages[y.untyped_storage()._cdata]
        assert live.now() == 2 * 1000 * 2
        run(y.sum())
    want = x.detach().cos() * x.detach().sin().cos()
    assert_close(x.grad, want, rtol=0.02, atol=0.02)
