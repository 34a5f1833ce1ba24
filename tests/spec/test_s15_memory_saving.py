"""S15: checkpointing, host memory and disk, alone, in each other, and with hooks of the user's."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import stowgrad as sg
from stowgrad.memory import ToDisk, ToHost
from tests.helpers import LiveBytes, Recording
from tests.spec.columns import columns, eager, program

pytestmark = pytest.mark.usefixtures("recorded")

Call = Callable[..., Any]


class ToOtherHostMemory(ToHost):
    """`ToHost` as on a machine whose tensors are elsewhere."""

    def _is_here(self, tensor: Tensor) -> bool:
        return False


def plain(fn: Call, *args: Any) -> Any:
    return fn(*args)


def theirs(fn: Call, *args: Any) -> Any:
    return torch_checkpoint(fn, *args, use_reentrant=False)


class Hooked:
    """A way to run a region: under a pair of hooks."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self, fn: Call, *args: Any) -> Any:
        pair = self.make()
        with sg.saved_tensors_hooks(pair.pack, pair.unpack):
            return fn(*args)


def on_cpu(fn: Call, *args: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return fn(*args)


@pytest.fixture
def ways(tmp_path: Path) -> dict[str, Call]:
    """The ways to save memory in a region of the forward."""
    disk, host = ToDisk(tmp_path, smallest=1), ToOtherHostMemory(smallest=1)
    return {
        "checkpoint": sg.checkpoint,
        "torch's checkpoint": theirs,
        "disk": Hooked(lambda: disk),
        "host": Hooked(lambda: host),
        "save_on_cpu": on_cpu,
        "the user's hooks": Hooked(Recording),
    }


NAMES = ["checkpoint", "torch's checkpoint", "disk", "host", "save_on_cpu", "the user's hooks"]


def network(outer: Call, inner: Call) -> Callable[[], tuple[Tensor, list[Tensor]]]:
    """A network with dropout and a norm; the first way around the second, and beside it."""
    torch.manual_seed(1)
    lin = [nn.Linear(6, 6) for _ in range(4)]
    norm, drop = nn.LayerNorm(6), nn.Dropout(0.3)
    for module in (*lin, norm):
        module.double()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def small(y: Tensor) -> Tensor:
        return drop(lin[1](norm(y)).tanh()) * y

    def large(y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = inner(small, lin[0](y).relu() * scale)
        return inner(small, y).exp(), y.t()

    def forward() -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(2)
        a, b = outer(large, x, x.detach().sin())
        c = inner(small, lin[2](a) + b.t())
        leaves = [x, *(p for m in (*lin[:3], norm) for p in m.parameters())]
        return (c * a).sum(), leaves

    return forward


def gradients(forward: Callable[[], tuple[Tensor, list[Tensor]]], run: Any) -> list[Tensor]:
    loss, leaves = forward()
    run(loss)
    found = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    assert len(found) == len(leaves)
    return found


@columns(eager, program)
@pytest.mark.parametrize("outer, inner", list(itertools.product(NAMES, NAMES)))
def test_s15_ways_mix_and_nest(outer: str, inner: str, ways: dict[str, Call], run: Any) -> None:
    expected = gradients(network(plain, plain), run)
    forward = network(ways[outer], ways[inner])
    assert_close(gradients(forward, run), expected, rtol=0, atol=0)
    assert_close(gradients(forward, run), expected, rtol=0, atol=0)


@columns(eager, program)
@pytest.mark.parametrize("name", NAMES)
def test_s15_several_backwards_and_second_derivatives(
    name: str, ways: dict[str, Call], run: Any
) -> None:
    def results(way: Call) -> list[Tensor]:
        loss, leaves = network(way, way)()
        run(loss, retain_graph=True)
        run(loss, retain_graph=True)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), leaves, allow_unused=True)
        found = [leaf.grad for leaf in leaves]
        return [t for t in (*found, *first, *second) if t is not None]

    assert_close(results(ways[name]), results(plain), rtol=1e-12, atol=1e-12)


@columns(eager, program)
@pytest.mark.parametrize("early_stop", [True, False])
def test_s15_a_region_runs_again_as_it_first_ran(early_stop: bool, run: Any) -> None:
    """Its random numbers, its autocast state and its buffers are those of the first run."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(6, 8, requires_grad=True)

    def step(way: Call) -> list[Tensor]:
        torch.manual_seed(0)
        model[1].reset_running_stats()
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = way(lambda x: model(model(x)), x)
        run(y.float().sum())
        grads = [p.grad.clone() for p in model.parameters()]
        return [y, *grads, torch.rand(2), *(b.clone() for b in model.buffers())]

    ours = functools.partial(sg.checkpoint, early_stop=early_stop)
    assert_close(step(ours), step(plain), rtol=0, atol=0)


@columns(eager, program)
def test_s15_a_second_run_that_differs_is_an_error(run: Any) -> None:
    sizes = iter([3, 2])

    def region(x: Tensor) -> Tensor:
        part = x[: next(sizes)]
        return (part * part).exp()

    x = torch.randn(4, requires_grad=True)
    loss = sg.checkpoint(region, x).sum()
    with pytest.raises(sg.CheckpointMismatch, match=r"float32 \[2\].*It was 'self' of aten.mul"):
        run(loss)


@columns(eager, program)
@pytest.mark.parametrize("first", ["checkpoint", "disk"])
def test_s15_disk_and_checkpoint_share_a_step(first: str, tmp_path: Path, run: Any) -> None:
    """The regions' inputs go to disk, or what an offloaded stretch has between regions does."""
    disk = ToDisk(tmp_path, smallest=1)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    x = torch.randn(64, 32)

    def forward(way: Call, hooks: AbstractContextManager[Any]) -> Tensor:
        y = x
        with hooks:
            for block in blocks:
                y = way(block, y)
        return y.square().mean()

    def measure(way: Call, hooks: AbstractContextManager[Any]) -> tuple[int, list[Any]]:
        for block in blocks:
            block.zero_grad()
        with LiveBytes() as live:
            loss = forward(way, hooks)
            kept = live.now()
            run(loss)
        return kept, [p.grad for b in blocks for p in b.parameters()]

    to_disk = sg.saved_tensors_hooks(disk.pack, disk.unpack)
    everything, expected = measure(plain, nullcontext())
    way = sg.checkpoint if first == "checkpoint" else plain
    kept, found = measure(way, to_disk)
    assert_close(found, expected, rtol=0, atol=0)
    assert disk.packs >= 3
    assert kept < everything / 4
    assert disk.bytes_now == 0


@columns(eager, program)
def test_s15_hooks_see_a_regions_inputs_and_nothing_of_its_inside(run: Any) -> None:
    outside, inside = Recording(), Recording()

    def region(x: Tensor) -> Tensor:
        y = x.sin().exp()
        with sg.saved_tensors_hooks(inside.pack, inside.unpack):
            return y.cos() * x

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with sg.saved_tensors_hooks(outside.pack, outside.unpack):
        loss = sg.checkpoint(region, x).sum()
    assert outside.counts == (1, 0)
    assert inside.counts == (3, 0)
    run(loss)
    assert outside.counts == (1, 1)
    assert_close(x.grad, torch.autograd.grad((x.sin().exp().cos() * x).sum(), x)[0])
