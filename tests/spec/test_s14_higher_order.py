"""S14: second derivatives through hooked saved tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording, in_thread

pytestmark = pytest.mark.usefixtures("recorded")


def identity(tmp_path: Path) -> tuple[Any, Any]:
    return (lambda t: t), (lambda p: p)


def to_disk(tmp_path: Path) -> tuple[Any, Any]:
    names = itertools.count()

    def pack(t: Tensor) -> Path:
        path = tmp_path / str(next(names))
        torch.save(t, path)
        return path

    return pack, torch.load


def to_numpy(tmp_path: Path) -> tuple[Any, Any]:
    return (lambda t: t.detach().cpu().numpy().copy()), torch.from_numpy


PAIRS = pytest.mark.parametrize("make_pair", [identity, to_disk, to_numpy])
WHERE = pytest.mark.parametrize("where", ["forward", "backward", "both"])


def pointwise(x: Tensor, w: Tensor) -> Tensor:
    return ((x * w).sin() * x.exp()).sum()


def matrices(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() @ w.t()).square().sum()


def normed(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.gelu(nn.functional.layer_norm(x @ w, (4,))).sum()


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.conv1d(x.view(1, 1, 16), w.view(4, 1, 4)).sigmoid().sum()


def changed_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    y[1:].mul_(x[1:])
    return y.exp_().sum()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g * ctx.saved_tensors[0] ** 2


def custom(x: Tensor, w: Tensor) -> Tensor:
    return (Cube.apply(x * w) * w).sum()


def fallen_back(x: Tensor, w: Tensor) -> Tensor:
    return (torch.special.i1e(x * w) * w).sum()


FUNCTIONS = pytest.mark.parametrize(
    "fn", [pointwise, matrices, normed, convolved, changed_in_place, custom, fallen_back]
)


def leaves() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return tuple(torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))  # type: ignore[return-value]


def gradients(
    fn: Callable[[Tensor, Tensor], Tensor], pair: tuple[Any, Any] | None = None, where: str = ""
) -> list[Tensor]:
    """Derivatives: of `fn`, of the square of its gradient, and of the sum of those."""

    def hooked(part: str) -> Any:
        return sg.saved_tensors_hooks(*pair) if pair and where in (part, "both") else nullcontext()

    x, w = leaves()
    with hooked("forward"):
        loss = fn(x, w)
    with hooked("backward"):
        first = torch.autograd.grad(loss, (x, w), create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(penalty, (x, w), create_graph=True)
    third = torch.autograd.grad(second[0].sum() + second[1].sum(), (x, w))
    return [t.detach() for t in (*first, *second, *third)]


@FUNCTIONS
def test_s14_without_hooks(fn: Any) -> None:
    want = in_thread(lambda: gradients(fn))  # another thread does not record: that is PyTorch's
    found = gradients(fn)
    if fn is normed:  # finite differences say that PyTorch's third derivative is wrong
        want, found = want[:4], found[:4]
    assert_close(found, want)


@FUNCTIONS
@PAIRS
@WHERE
def test_s14_through_hooks(fn: Any, make_pair: Any, where: str, tmp_path: Path) -> None:
    calls = Recording()
    pack, unpack = make_pair(tmp_path)

    def counted(t: Tensor) -> Any:
        calls.packs += 1
        return pack(t)

    assert_close(gradients(fn, (counted, unpack), where), gradients(fn))
    assert calls.packs > 0


def test_s14_the_backwards_own_saves_are_packed() -> None:
    x, pair = leaves()[0], Recording()
    loss = x.sin().sum()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
    assert pair.packs >= 1
    assert pair.unpacks == 0
    (gg,) = torch.autograd.grad(g.sum(), x)
    assert pair.unpacks == pair.packs
    assert_close(gg, -x.detach().sin())


def test_s14_an_unpacked_output_leads_into_the_graph() -> None:
    """exp saves its output: its second derivative goes through the node that saved it."""
    x, pair = leaves()[0], Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        y = x.exp()
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum(), x)
    assert_close(gg, x.detach().exp())


def test_s14_gradient_penalty_of_a_model_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1)).double()
    data = torch.randn(3, 4, dtype=torch.float64)

    def step() -> list[Tensor]:
        x = data.clone().requires_grad_()
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        penalty = (g.norm(2, dim=1) - 1).square().mean()
        return [t.detach() for t in torch.autograd.grad(penalty, list(net.parameters())[:3])]

    with sg.saved_tensors_hooks(*to_disk(tmp_path)):
        found = step()
    assert_close(found, step())
