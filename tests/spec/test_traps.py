"""The list of traps of the table of behaviours, as far as saving and backward themselves reach.

Those that concern moving tensors to a host or a disk (4 to 11) have their tests with the policies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording
from tests.spec.columns import columns, eager, program

pytestmark = pytest.mark.usefixtures("recorded")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=torch.float64, requires_grad=True)


@columns(eager, program)
def test_trap_01_memory_that_is_used_again_is_no_alias(run: Any) -> None:
    """Each sine's input is packed to numbers and freed; the next may lie at the same address.

    Every one of them is changed right after it was packed: a check that took one tensor for
    another would find a change where there was none.
    """
    x = leaf(1000)
    addresses: list[int] = []

    def pack(t: Tensor) -> Any:
        addresses.append(t.data_ptr())
        return t.tolist()

    total = torch.zeros((), dtype=torch.float64)
    for _ in range(30):
        y = x * 2
        with sg.saved_tensors_hooks(pack, lambda p: torch.tensor(p, dtype=torch.float64)):
            total = total + y.sin().sum()
        with torch.no_grad():
            y.add_(1)
        del y
    assert len(set(addresses)) < len(addresses), "some address came again"
    run(total)
    assert_close(x.grad, 30 * 2 * (2 * x.detach()).cos())


@columns(eager, program)
def test_trap_01_a_storages_identity_is_not_given_twice_while_it_is_saved(run: Any) -> None:
    keys = []
    nodes = []
    for _ in range(20):
        y = leaf().sin()
        nodes.append(y)
        keys.append(y.grad_fn._raw_saved_self.info().storage)
    assert len(set(keys)) == len(keys)


@columns(eager, program)
def test_trap_02_a_square_matrix_and_its_transpose_are_two_saved_tensors(run: Any) -> None:
    """One storage, one dtype, one shape; each comes back as it was."""
    w = leaf(4, 4)
    a, b = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    seen: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Any:
        seen.append(t.stride())
        return t.detach().clone(memory_format=torch.contiguous_format), t.stride()

    with sg.saved_tensors_hooks(pack, lambda p: p[0]):
        loss = ((w.t().sin() * a) + (w.sin() * b)).sum()
    run(loss)
    assert (1, 4) in seen and (4, 1) in seen
    assert_close(w.grad, w.detach().cos() * (a.t() + b))


@columns(eager, program)
def test_trap_03_a_result_that_is_a_view_of_an_unpacked_tensor_lives_on(run: Any) -> None:
    """The gradient a node returns may lie in the memory of what it unpacked."""

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
            ctx.save_for_backward(table)
            return (x * table[1]).sum()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return ctx.saved_tensors[0][1], None  # a view of what was unpacked

    table = torch.randn(2, 3, dtype=torch.float64)
    x, later = leaf(), leaf()
    freed = []

    class Box:
        def __init__(self, t: Tensor) -> None:
            self.content = t.clone()

    def unpack(box: Box) -> Tensor:
        freed.append(box)
        return box.content

    with sg.saved_tensors_hooks(Box, unpack):
        y = x * 1
        z = Lookup.apply(y, table)
        loss = z + (later.exp() * later.sin()).sum()
    y.register_hook(lambda g: [b.__dict__.clear() for b in freed[-1:]] and None)
    run(loss)
    torch.zeros(50, 3, dtype=torch.float64)
    assert_close(x.grad, table[1])


_kept: dict[int, Tensor] = {}


def keep(t: Tensor) -> int:
    _kept[len(_kept)] = t.detach().clone()
    return len(_kept) - 1


@columns(eager, program)
@pytest.mark.parametrize(
    ("pair", "fresh"),
    [
        ((lambda t: t.clone(), lambda p: p), False),
        ((lambda t: t.clone(), lambda p: p.view(3)), False),
        ((keep, lambda i: _kept[i]), False),
        ((lambda t: t.numpy().copy(), torch.from_numpy), False),
        ((lambda t: t.clone(), lambda p: p.clone()), True),
        ((lambda t: t.numpy().copy(), torch.tensor), True),
        ((lambda t: t.tolist(), lambda p: torch.tensor(p, dtype=torch.float64)), True),
    ],
    ids=["kept", "a view", "elsewhere", "numpy", "copied", "numpy copied", "numbers"],
)
def test_trap_12_an_unpacked_value_written_to_by_its_consumer(
    run: Any, pair: Any, fresh: bool
) -> None:
    """With retain_graph the next unpack must not see what the first consumer wrote."""

    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return x.mul_(2).mul_(g)  # in place, into what was unpacked

    x = leaf()
    with sg.saved_tensors_hooks(*pair):
        loss = Overwrites.apply(x * 1).sum()
    run(loss, retain_graph=True)
    first = x.grad.clone()
    assert_close(first, 2 * x.detach())
    if fresh:
        run(loss)
        assert_close(x.grad, 2 * first)
    else:
        with pytest.raises(sg.SavedTensorChanged, match=r"changed in place.*same memory again"):
            run(loss)
        assert_close(x.grad, first)


@columns(eager, program)
def test_trap_12_without_hooks_it_is_an_error_too(run: Any) -> None:
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                return x.mul_(2).mul_(g)

    x = leaf()
    loss = Overwrites.apply(x * 1).sum()
    run(loss, retain_graph=True)
    with pytest.raises(sg.SavedTensorChanged):
        run(loss)


@columns(eager, program)
def test_trap_12_a_gradient_is_never_taken_over_from_what_a_hook_keeps(run: Any) -> None:
    """The unpacked value becomes the gradient; neither `.grad` nor a later sum may write to it."""

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
            ctx.save_for_backward(t)
            return (x * t).sum()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return ctx.saved_tensors[0], None

    x, kept = leaf(), {}
    table = torch.randn(3, dtype=torch.float64)

    def pack(t: Tensor) -> str:
        kept.setdefault("t", t.detach().clone())
        return "t"

    with sg.saved_tensors_hooks(pack, lambda key: kept[key]):
        loss = Constant.apply(x, table) + Constant.apply(x, table)
    run(loss, retain_graph=True)
    x.grad.add_(100)
    run(loss)
    assert_close(kept["t"], table)
    assert_close(x.grad, 4 * table + 100)


@columns(eager, program)
@pytest.mark.parametrize("autocast", [True, False])
def test_trap_13_a_checkpointed_region_is_the_same_the_second_time(
    run: Any, autocast: bool
) -> None:
    """The random state of dropout, autocast with its cache of cast weights, batch statistics."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    data = torch.randn(6, 4)

    def step(checkpointed: bool) -> Any:
        torch.manual_seed(3)
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            hidden = net[0](data)  # fills the cache of cast weights
            if checkpointed:
                out = torch.utils.checkpoint.checkpoint(net, hidden.float(), use_reentrant=False)
            else:
                out = net(hidden.float())
        run(out.float().square().sum())
        return [p.grad for p in net.parameters()], torch.rand(3)

    plain, checkpointed = step(False), step(True)
    assert_close(checkpointed, plain)


@columns(eager, program)
def test_trap_13_hooks_around_a_checkpointed_region_see_its_inputs_once(run: Any) -> None:
    pair, x = Recording(), leaf()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        y = torch.utils.checkpoint.checkpoint(lambda t: t.sin().exp(), x * 1, use_reentrant=False)
    run(y.sum())
    assert pair.packs == pair.unpacks
    assert_close(x.grad, x.detach().cos() * x.detach().sin().exp())
