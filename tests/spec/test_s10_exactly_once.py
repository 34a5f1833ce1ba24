"""S10: one pack for each save, one unpack for each use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording, without_rule
from tests.spec.columns import columns, eager, program

pytestmark = pytest.mark.usefixtures("recorded")


class Counting:
    """Counts the uses of each packed tensor apart; those without elements do not count."""

    def __init__(self) -> None:
        self.uses: Counter[int] = Counter()
        self.packs = 0

    def pack(self, tensor: Tensor) -> Any:
        if not tensor.numel():
            return 0, tensor
        self.packs += 1
        return self.packs, tensor.detach().clone()

    def unpack(self, packed: Any) -> Tensor:
        if packed[0]:
            self.uses[packed[0]] += 1
        return packed[1]

    def assert_each_used(self, times: int) -> None:
        assert self.packs > 0
        assert self.uses == {n: times for n in range(1, self.packs + 1)}


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=torch.float64, requires_grad=True)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.square()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return 2 * x * g


def convnet() -> Callable[[], Tensor]:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(4 * 3 * 3, 5),
    ).double()  # fmt: skip
    data, target = torch.randn(3, 2, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2])
    return lambda: nn.functional.cross_entropy(net(data), target)


def transformer() -> Callable[[], Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    data = torch.randn(2, 5, 8, dtype=torch.float64)
    return lambda: layer(data).square().mean()


def in_place() -> Callable[[], Tensor]:
    x = leaf(4)

    def forward() -> Tensor:
        y = x * 2
        y[1:].mul_(x[1:])
        return y.exp_().sum()

    return forward


def fallback() -> Callable[[], Tensor]:
    x = leaf(4)

    def forward() -> Tensor:
        with without_rule(torch.ops.aten.atan2.default):
            return torch.atan2(x, x.detach() + 9).sum()

    return forward


def simple(fn: Callable[[Tensor], Tensor]) -> Callable[[], Callable[[], Tensor]]:
    def make() -> Callable[[], Tensor]:
        x = leaf(4)
        return lambda: fn(x).sum()

    return make


MODELS: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "one input twice": simple(lambda x: x * x),
    "an output": simple(torch.exp),
    "a chain": simple(lambda x: x.sin().exp().cos()),
    "one tensor by several ops": simple(lambda x: x.sin() + x.cos() + x.exp()),
    "a custom function": simple(Twice.apply),
    "in place": in_place,
    "the fallback": fallback,
    "a convolution net": convnet,
    "a transformer layer": transformer,
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))


@columns(eager, program)
@each_model
def test_s10_one_pack_a_save_and_one_unpack_a_use(
    run: Any, make: Callable[[], Callable[[], Tensor]]
) -> None:
    forward, pair = make(), Counting()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = forward()
    assert not pair.uses
    run(loss)
    pair.assert_each_used(1)


@columns(eager, program)
@each_model
def test_s10_with_retain_graph_one_unpack_a_pass(
    run: Any, make: Callable[[], Callable[[], Tensor]]
) -> None:
    forward, pair = make(), Counting()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = forward()
    packs = pair.packs
    for times in (1, 2, 3):
        run(loss, retain_graph=times < 3)
        pair.assert_each_used(times)
        assert pair.packs == packs, "a backward packs nothing of the forward's again"


@columns(eager, program)
def test_s10_what_no_gradient_needs_is_not_unpacked(run: Any) -> None:
    a, b, pair = leaf(), leaf(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = (a * b).sum()
    assert pair.packs == 2
    run(loss, inputs=[a])
    assert pair.unpacks == 1
    assert_close(a.grad, b.detach())
    assert b.grad is None


@columns(eager, program)
def test_s10_what_no_gradient_needs_is_not_packed(run: Any) -> None:
    a, b, pair = leaf(), leaf().detach(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = (a * b).sum()  # only b is needed, for a's gradient
    run(loss)
    assert pair.counts == (1, 1)


def test_s10_double_backward_unpacks_once_more_for_its_own_use() -> None:
    x, pair = leaf(), Counting()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        y = x.sin().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    assert pair.uses == {1: 1}
    (gg,) = torch.autograd.grad(g.sum(), x)
    assert pair.uses == {1: 1}, "the second backward uses what the first one saved"
    assert_close(gg, -x.detach().sin())
