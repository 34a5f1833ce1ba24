"""Run the same code under PyTorch's autograd and under stowgrad's, and compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing import assert_close

import stowgrad as sg


def same(fn: Callable[[], Any]) -> Any:
    """Check that `fn()` gives the same under PyTorch and recorded; returns what it gives.

    Compares nests of tensors and plain values, without tolerance. `fn` makes its own tensors; the
    random state is the same both times.
    """
    torch.manual_seed(0)
    expected = fn()
    torch.manual_seed(0)
    with sg.record():
        actual = fn()
    assert_close(plain(actual), plain(expected), rtol=0, atol=0, equal_nan=True)
    return actual


def both_raise(fn: Callable[[], Any], gist: str, error: type[Exception] = RuntimeError) -> None:
    """Check that `fn()` raises under PyTorch and recorded, with `gist` in both messages."""
    for context in (torch.enable_grad(), sg.record()):
        with context:
            try:
                fn()
            except error as caught:
                assert gist in str(caught), f"{context}: {caught}"
            else:
                raise AssertionError(f"nothing raised under {context}")


def plain(value: Any) -> Any:
    """`value` with tensors detached, and what cannot be compared as numbers made so."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, bool):
        return int(value)
    if value is None or isinstance(value, (str, torch.dtype, torch.device)):
        return [ord(c) for c in str(value)]
    return value
