"""The columns of the table of behaviours: the ways in which a backward runs.

A test that holds in several takes `run` from `columns(...)` and calls it in place of
`loss.backward()`.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import stowgrad as sg


def eager(loss: Tensor, **options: Any) -> None:
    """Backward node by node, as recorded."""
    loss.backward(**options)


def program(loss: Tensor, **options: Any) -> None:
    """Backward captured as a program, which then runs. It may not fall back in silence."""
    with sg.compiled_backward():
        try:
            loss.backward(**options)
        finally:
            no_fallback()


def no_fallback() -> None:
    """Fail if a backward ran node by node, but for one whose graph was freed: that is an error."""
    reasons = sg.program_cache.fallbacks.keys() - {"its graph was freed"}
    assert not reasons, sg.program_cache.report()


def raced_program(loss: Tensor, **options: Any) -> None:
    """The same where other threads change the graph meanwhile: a program may no longer fit."""
    with sg.compiled_backward():
        loss.backward(**options)


def columns(*runs: Any) -> Any:
    return pytest.mark.parametrize("run", runs, ids=lambda run: run.__name__)
