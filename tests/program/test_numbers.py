"""Numbers in a step that change from one to the next, and are no sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import stowgrad as sg

STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "divided": lambda y, n: y.sum() / n,
    "scaled before": lambda y, n: (y * n).square().sum(),
    "a power": lambda y, n: y.exp().pow(n).sum(),
    "clamped": lambda y, n: y.clamp(max=n / 20).sum(),
    "added": lambda y, n: torch.add(y.sin(), y, alpha=n).sum(),
    "leaky": lambda y, n: nn.functional.leaky_relu(y, n / 20).square().sum(),
}


@pytest.mark.parametrize("kind", [float, int])
@pytest.mark.parametrize("fn", STEPS.values(), ids=STEPS)
def test_one_program_serves_all_values(fn: Any, kind: type) -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    sg.program_cache.clear()

    def step(n: Any, how: Any) -> Tensor:
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        with sg.record(how):
            (g,) = torch.autograd.grad(fn(x @ w, n), w)
        return g

    def check(n: int) -> None:
        got, want = step(kind(n), sg.compiled_backward()), step(kind(n), None)
        assert_close(got, want, rtol=0, atol=0, equal_nan=True)

    for n in (7, 11, 5, 13, 2, 17):
        check(n)
    assert sg.program_cache.misses <= 3, sg.program_cache.report()
    for n in (1, 0, -1, 3):  # where rules make exceptions
        check(n)


def test_numbers_in_a_compiled_program_that_change() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    sg.program_cache.clear()
    for n in (2.5, 3.5, 4.5, 5.5):
        found = []
        for how in (None, sg.compiled_backward(backend="aot_eager")):
            net.zero_grad()
            with sg.record(how):
                (net(x).tanh().square().sum() / n).backward()
            found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        assert_close(*found)
