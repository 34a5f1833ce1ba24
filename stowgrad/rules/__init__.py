"""Derivative rules, a module per family of ops. `load()` fills the table."""

from __future__ import annotations

import importlib

FAMILIES = (
    "constant",
    "pointwise",
    "reduce",
    "shape",
    "index",
    "sort",
    "foreach",
    "matmul",
    "sparse",
    "distance",
    "linalg",
    "factor",
    "fft",
    "conv",
    "pool",
    "norm",
    "resize",
    "grid",
    "activation",
    "loss",
    "attention",
    "rnn",
    "embedding",
    "random",
    "complex",
    "special",
)

_loaded = False


def load() -> None:
    """Import every family once. Kept out of `import stowgrad`, which stays quick."""
    global _loaded
    if not _loaded:
        _loaded = True
        for family in FAMILIES:
            importlib.import_module(f"{__name__}.{family}")
