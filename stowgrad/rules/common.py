"""Small helpers that several families of rules share."""

from __future__ import annotations

from typing import Any

import torch


def conj(x: Any) -> Any:
    """The conjugate of a tensor or number; of a real one, itself."""
    if isinstance(x, torch.Tensor):
        return x.conj() if x.is_complex() else x
    return x.conjugate() if isinstance(x, complex) else x
