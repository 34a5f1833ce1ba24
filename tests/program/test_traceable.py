"""Unpack hooks that are plain tensor code are taken apart in a program."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import stowgrad as sg
from stowgrad.program import steps

SCALE = 2.0


def halved(tensor: Tensor) -> Any:
    return {"half": tensor.to(torch.bfloat16), "what": (tensor.dtype, SCALE)}


@sg.traceable
def whole(packed: Any) -> Tensor:
    dtype, scale = packed["what"]
    return packed["half"].to(dtype) * scale / 2


def step(net: nn.Module, x: Tensor, how: Any, pair: Any = (halved, whole)) -> list[Tensor]:
    net.zero_grad()
    with sg.record():
        with sg.saved_tensors_hooks(*pair):
            loss = net(x).square().sum()
        with how:
            loss.backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.fixture
def net() -> nn.Module:
    sg.program_cache.clear()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def test_its_ops_stand_in_the_program(net: nn.Module) -> None:
    for size in (5, 7, 5):
        x = torch.randn(size, 6)
        got = step(net, x, sg.compiled_backward())
        assert_close(got, step(net, x, nullcontext()), rtol=0, atol=0)
    (program,) = sg.program_cache.programs
    targets = {n.target for n in program.graph.nodes}
    assert steps.unpack not in targets and steps.packed in targets
    assert sg.program_cache.hits == 2


def test_another_hook_or_another_constant_is_another_program(net: nn.Module) -> None:
    global SCALE
    x = torch.randn(5, 6)
    step(net, x, sg.compiled_backward())
    try:
        SCALE = 4.0
        want = step(net, x, nullcontext())
        assert_close(step(net, x, sg.compiled_backward()), want, rtol=0, atol=0)
    finally:
        SCALE = 2.0

    @sg.traceable
    def tripled(packed: Any) -> Tensor:
        return packed["half"].to(packed["what"][0]) * 3

    want = step(net, x, nullcontext(), (halved, tripled))
    assert_close(step(net, x, sg.compiled_backward(), (halved, tripled)), want, rtol=0, atol=0)
    assert sg.program_cache.misses == 3


def test_a_packed_alias_that_was_changed_is_found(net: nn.Module) -> None:
    @sg.traceable
    def as_it_is(packed: Tensor) -> Tensor:
        return packed * 1

    for _ in range(2):
        with sg.record(sg.compiled_backward()):
            x = torch.randn(3, requires_grad=True)
            y = x * 2
            with sg.saved_tensors_hooks(lambda t: t.detach(), as_it_is):
                loss = y.sin().sum()
            with torch.no_grad():
                y.add_(1)
            with pytest.raises(sg.SavedTensorChanged, match=r"aten\.sin"):
                loss.backward()


def test_what_cannot_be_traced_is_called(net: nn.Module) -> None:
    calls = []

    @sg.traceable
    def through_numpy(packed: Any) -> Tensor:
        calls.append(1)
        return torch.from_numpy(packed["half"].float().numpy().copy())

    x = torch.randn(5, 6)
    want = step(net, x, nullcontext(), (halved, through_numpy))
    assert_close(step(net, x, sg.compiled_backward(), (halved, through_numpy)), want)
    assert sg.program_cache.programs[0].notes


def test_second_derivatives() -> None:
    def program(how: Any) -> Tensor:
        torch.manual_seed(1)
        x = torch.randn(4, dtype=torch.float64, requires_grad=True)
        with sg.record(), how, sg.saved_tensors_hooks(lambda t: (t * 2,), unpack):
            (g,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
            (gg,) = torch.autograd.grad(g.square().sum(), x)
        return gg

    @sg.traceable
    def unpack(packed: Any) -> Tensor:
        return packed[0] / 2

    assert_close(program(sg.compiled_backward()), program(nullcontext()))
