"""Recompute the repeated blocks of a model in backward, with no edit of the model.

While recording, a call of a block becomes a call of `checkpoint`. The blocks are found when a
module is first called from outside every other: the elements of its outermost `nn.ModuleList`s
and `nn.Sequential`s, as far as two or more are of one class, have parameters, and have submodules
of their own (one layer alone saves little more than its input). They are recomputed in training
with grad mode on.

A block may change what it is given: append its keys and values to a cache, say. Objects other
than tensors and constants are therefore copied before the first run, and the second run gets the
copy, which shares the tensors. It keeps those alive until then: a Hugging Face model saves more
with `use_cache=False`.
"""

from __future__ import annotations

import io
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..context import recording
from .checkpoint import checkpoint

_PLAIN = (Tensor, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class Recompute:
    """Within: blocks of models are recomputed in backward instead of kept; see the module.

    Acts on this thread. `blocks`: how many were found; `calls`: how often one was called under
    `checkpoint`; `skipped`: how often one was not, since it was given an object that cannot be
    copied.
    """

    place = "recompute"

    def __init__(self) -> None:
        self.blocks = 0
        self.calls = 0
        self.skipped = 0
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._blocks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inside = 0  # modules being called, one inside the other

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
            try:
                objects = _Objects(args, kwargs)
            except Exception:  # whatever an object's own code raises when it is copied
                self.skipped += 1
                return original(module, *args, **kwargs)
            self.calls += 1
            return self._checkpointed(original, module, objects)
        finally:
            self._inside -= 1

    def _find_blocks(self, root: nn.Module) -> None:
        self._roots.add(root)
        for block in find_blocks(root):
            if block not in self._blocks:
                self._blocks.add(block)
                self.blocks += 1

    def _checkpointed(
        self, original: Callable[..., Any], module: nn.Module, objects: _Objects
    ) -> Any:
        def run(args: Any, kwargs: Any) -> Any:
            self._inside += 1  # in backward too: what the block calls is not called from outside
            try:
                args, kwargs = objects.put_back(args, kwargs)
                return original(module, *args, **kwargs)
            finally:
                self._inside -= 1

        run.__qualname__ = type(module).__qualname__
        # As two arguments, so that no name meets one of checkpoint's.
        return checkpoint(run, objects.args, objects.kwargs)


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


class _Objects:
    """A block's arguments, with what it might change taken out for checkpoint to hold no more.

    `put_back` gives the objects themselves the first time, and a copy of what they were before
    each time after. Raises what copying raises.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._first: list[Any] = []
        self.args = tuple(self._take_out(value) for value in args)
        self.kwargs = {name: self._take_out(value) for name, value in kwargs.items()}
        self._tensors: list[Any] = []
        self._copy = b""
        if self._first:
            file = io.BytesIO()
            _Pickler(file, self._tensors).dump(self._first)
            self._copy = file.getvalue()

    def _take_out(self, value: Any) -> Any:
        if _is_plain(value):
            return value
        self._first.append(value)
        return _Place(len(self._first) - 1)

    def put_back(self, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        if not self._copy:
            return args, kwargs
        objects, self._first = self._first, []
        if not objects:
            objects = _Unpickler(io.BytesIO(self._copy), self._tensors).load()
        return (
            [objects[a.index] if isinstance(a, _Place) else a for a in args],
            {k: objects[a.index] if isinstance(a, _Place) else a for k, a in kwargs.items()},
        )


@dataclass(frozen=True)
class _Place:
    """Where one of the objects was."""

    index: int


class _Pickler(pickle.Pickler):
    """Copies an object's structure; tensors and modules in it are shared."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, (Tensor, nn.Module)):
            return None
        self._shared.append(obj)
        return len(self._shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]


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
