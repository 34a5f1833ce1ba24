"""Derivative rules, a module per family of ops. `load()` fills the table."""

from __future__ import annotations

import importlib
import threading

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
_loading = threading.RLock()


def load() -> None:
    """Import every family once. Kept out of `import stowgrad`, which stays quick.

    A thread that comes while another loads waits for it: what it finds is remembered, and half a
    table would send ops through the fallback for good.
    """
    global _loaded
    if _loaded:
        return
    with _loading:
        if not _loaded:
            for family in FAMILIES:
                importlib.import_module(f"{__name__}.{family}")
            _loaded = True
