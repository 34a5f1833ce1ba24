"""Recompute the repeated blocks of a model in backward, with no edit of the model.

While recording, a call of a block becomes a call of `checkpoint`. The blocks are found when a
module is first called from outside every other: the elements of its outermost `nn.ModuleList`s
and `nn.Sequential`s, as far as two or more are of one class, have parameters, and have submodules
of their own (one layer alone saves little more than its input). They are recomputed in training
with grad mode on.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..record import recording
from .checkpoint import checkpoint

_PLAIN = (Tensor, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class Recompute:
    """Within: blocks of models are recomputed in backward instead of kept; see the module.

    Acts on this thread. `blocks`: how many were found; `calls`: how often one was called under
    `checkpoint`; `skipped`: how often one was not, since it was given something that a second run
    might change (a cache of keys and values, say).
    """

    place = "recompute"

    def __init__(self) -> None:
        self.calls = 0
        self.skipped = 0
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._blocks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inside = 0  # modules being called, one inside the other

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def __enter__(self) -> Recompute:
        if _active.now is not None:
            raise RuntimeError("blocks are being recomputed already in this thread")
        _bind()
        _active.now = self
        return self

    def __exit__(self, *exc: Any) -> None:
        _active.now = None
        _unbind()

    def _call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._inside == 0 and module not in self._roots:
            self._find_blocks(module)
        self._inside += 1
        try:
            wanted = module.training and torch.is_grad_enabled() and recording()
            if not wanted or module not in self._blocks:
                return original(module, *args, **kwargs)
            if not (_is_plain(args) and _is_plain(tuple(kwargs.values()))):
                self.skipped += 1
                return original(module, *args, **kwargs)
            self.calls += 1
            return self._checkpointed(original, module, args, kwargs)
        finally:
            self._inside -= 1

    def _find_blocks(self, root: nn.Module) -> None:
        self._roots.add(root)
        self._blocks.update(find_blocks(root))

    def _checkpointed(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        def run(args: Any, kwargs: Any) -> Any:
            self._inside += 1  # in backward too: what the block calls is not called from outside
            try:
                return original(module, *args, **kwargs)
            finally:
                self._inside -= 1

        run.__qualname__ = type(module).__qualname__
        return checkpoint(run, args, kwargs)  # as two, so that no name meets one of checkpoint's


def find_blocks(root: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: see the module's docstring.

    Of the elements of a container that are containers themselves (a stage of blocks), the blocks
    inside are taken, if there are any.
    """
    found: list[nn.Module] = []
    if not isinstance(root, (nn.ModuleList, nn.Sequential)):
        for child in root.children():
            found += find_blocks(child)
        return found
    kinds = Counter(type(child) for child in root.children() if _has_parameters(child))
    for child in root.children():
        inner = find_blocks(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        repeated = kinds[type(child)] >= 2 and _has_parameters(child)
        if not inner and repeated and next(child.children(), None) is not None:
            found.append(child)
        else:
            found += inner or find_blocks(child)
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_plain(value: Any) -> bool:
    """Whether a second run is given the same as the first, whatever the first did to it."""
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


# -- the binding


class _Active(threading.local):
    now: Recompute | None = None


_active = _Active()
_lock = threading.Lock()
_users = 0
_original: Any = None


def _bind() -> None:
    """Stand where `nn.Module.__call__` stands; counted, as in torch_api.py."""
    global _users, _original
    with _lock:
        _users += 1
        if _users > 1:
            return
        original = _original = nn.Module.__call__

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            active = _active.now
            if active is None:
                return original(self, *args, **kwargs)
            return active._call(original, self, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]


def _unbind() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            nn.Module.__call__ = _original  # type: ignore[method-assign]
