"""Custom Functions run as they are within a program; what lies below them is traced once it is
known what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from stowgrad.program import steps


def make(gives: Any) -> Any:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2 + y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            assert ctx.saved_tensors
            return g * 2, gives(g)

    return Twice


def step(function: Any, backward: Any) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(0)
    w, u = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    with sg.record(backward):
        a = (torch.ones(3, 4) @ w).sin()
        function.apply(a.exp(), u.cos()).square().sum().backward()
    return w.grad, u.grad


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    sg.program_cache.clear()


def test_the_second_program_traces_what_lies_below() -> None:
    function = make(lambda g: g)
    want = step(function, None)
    for _ in range(4):
        assert_close(step(function, sg.compiled_backward()), want, rtol=0, atol=0)
    assert (sg.program_cache.misses, sg.program_cache.hits) == (2, 2), sg.program_cache.report()
    (program,) = sg.program_cache.programs
    assert sum(n.target is steps.call_node for n in program.graph.nodes) == 1


def test_a_gradient_that_is_always_missing_stays_missing() -> None:
    function = make(lambda g: None)
    for _ in range(3):
        w, u = step(function, sg.compiled_backward())
        assert u is None
        assert_close(w, step(function, None)[0], rtol=0, atol=0)


def test_one_that_is_missing_for_once_is_zeros_with_a_warning_and_then_nothing() -> None:
    there = [True]
    function = make(lambda g: g if there else None)
    for _ in range(3):
        step(function, sg.compiled_backward())
    there.clear()
    with pytest.warns(UserWarning, match=r"gave no gradient for input 1"):
        w, u = step(function, sg.compiled_backward())
    assert_close(w, step(function, None)[0], rtol=0, atol=0)
    assert u is not None and not u.any()
    for _ in range(2):
        assert step(function, sg.compiled_backward())[1] is None
    there.append(True)
    assert_close(step(function, sg.compiled_backward()), step(function, None), rtol=0, atol=0)


def test_a_sparse_one_stays_sparse() -> None:
    function = make(lambda g: g.sum(0).to_sparse())

    def one(backward: Any) -> Tensor | None:
        u = torch.randn(4, requires_grad=True)
        with sg.record(backward):
            function.apply(torch.ones(3, 4, requires_grad=True), u).sum().backward()
        return u.grad

    for _ in range(3):
        got = one(sg.compiled_backward())
        assert got is not None and got.is_sparse == one(None).is_sparse
