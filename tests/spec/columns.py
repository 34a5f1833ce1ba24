"""The columns of the table of behaviours: the ways in which a backward runs.

A test that holds in several takes `run` from `columns(...)` and calls it in place of
`loss.backward()`.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor


def eager(loss: Tensor, **options: Any) -> None:
    """Backward node by node, as recorded."""
    loss.backward(**options)


def columns(*runs: Any) -> Any:
    return pytest.mark.parametrize("run", runs, ids=lambda run: run.__name__)
