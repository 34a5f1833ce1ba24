"""A function of one leaf under PyTorch's autograd and under ours: do the gradients agree?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg


def matrix(rows: int = 4, columns: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns, dtype=dtype)


def gradients(fn: Callable[[Tensor], Any], x: Tensor, order: int = 1) -> list[Tensor | None]:
    """The gradients, up to `order`, of a random combination of what `fn(x)` returns."""
    leaf = x.detach().clone().requires_grad_()
    out = fn(leaf)
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    torch.manual_seed(3)
    found: list[Tensor | None] = []
    for _ in range(order):
        parts = [(o * torch.randn(o.shape, dtype=o.dtype)).abs().pow(2).sum() for o in outs]
        outs = torch.autograd.grad(sum(parts), [leaf], create_graph=True)
        found += [g.detach() for g in outs]
    return found


def agree(fn: Callable[[Tensor], Any], x: Tensor, order: int = 1) -> None:
    """Fail unless `fn` has the same gradients at `x` in PyTorch and while recording."""
    expected = gradients(fn, x, order)
    with sg.record():
        got = gradients(fn, x, order)
    assert_close(got, expected, equal_nan=True)


def saved_by(fn: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """The tensors that a recorded `fn(x)` saves for backward."""
    found: list[Tensor] = []
    with sg.record(), sg.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        fn(x.detach().clone().requires_grad_())
    return found


def batched(fn: Callable[[Tensor], Any], x: Tensor) -> None:
    """Fail unless a batch of output gradients, mapped by vmap, gives PyTorch's Jacobian."""

    def jacobian() -> Tensor:
        leaf = x.detach().clone().requires_grad_()
        y = fn(leaf)
        seeds = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
        return torch.autograd.grad(y, leaf, seeds, is_grads_batched=True)[0]

    expected = jacobian()
    with sg.record():
        got = jacobian()
    assert_close(got, expected)
