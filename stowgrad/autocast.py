"""Autocast's cache of weights, while recording.

Within an autocast region PyTorch casts each weight once: it keeps the copy of every leaf until the
region ends. What it takes for a leaf is a tensor to which no graph of its own leads, and that is
every tensor that we track: it would keep a copy of each activation too, and add up in low
precision the gradients of all that uses one. So its cache is off while recording, and this one
stands in, which keeps leaves. An explicit cast of a leaf to autocast's dtype, in such a region,
looks the same and gives the same copy; that is fine unless it is then changed in place, which the
version tells.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from . import graph
from .ops import SPECIAL

_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "maia", "privateuseone")


class _Casts(threading.local):
    """This thread's cache. `on`: the device types for which user code has autocast on, since
    within an op that autocast casts it reads as off; `wanted`: whether weights are to be kept."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[weakref.ref[Tensor], Tensor, int]] = {}
        self.on: set[str] = set()
        self.wanted = True


_casts = _Casts()


def enter() -> None:
    """Recording begins in this thread."""
    _casts.on = {
        k for k in _KINDS if torch.amp.is_autocast_available(k) and torch.is_autocast_enabled(k)
    }
    _casts.wanted = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)


def leave() -> None:
    """Recording ends, and the names are PyTorch's again."""
    torch.set_autocast_cache_enabled(_casts.wanted)
    _casts.kept.clear()


# -- what stands for, or goes with, PyTorch's functions of these names


def set_cache_enabled(enabled: bool) -> None:
    _casts.wanted = enabled


def is_cache_enabled() -> bool:
    return _casts.wanted


def clear_cache() -> None:
    _casts.kept.clear()


def set_enabled(kind: str | bool, enabled: bool | None = None) -> None:
    if not isinstance(kind, str):  # the older form, which is for CUDA
        kind = "cuda"
    (_casts.on.add if torch.is_autocast_enabled(kind) else _casts.on.discard)(kind)


# -- the cast itself


def cast(recorder: Any, entry: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record `x.to(dtype)`; of a weight that autocast casts, at most once in a region."""
    x = args[0]
    kind = x.device.type
    if not (
        kind in _casts.on
        and _casts.wanted
        and x.dtype == torch.float32
        and args[1] == torch.get_autocast_dtype(kind)
        and graph.state(x) is None
        and not x._is_view()
    ):
        return recorder._record_rule(entry, func, args, kwargs, 1)
    found = _casts.kept.get(id(x))
    if found is not None and found[0]() is x and found[1].dtype == args[1]:
        if found[1]._version == found[2]:
            return found[1]
    copy = recorder._record_rule(entry, func, args, kwargs, 1)
    _casts.kept[id(x)] = (weakref.ref(x), copy, copy._version)
    return copy


SPECIAL[torch.ops.aten.to.dtype] = cast
