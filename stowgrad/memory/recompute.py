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

import fnmatch
import functools
import inspect
import io
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StowgradError
from ..saved import SavedInfo
from .checkpoint import checkpoint
from .modules import Moment, intercepting, is_around, module_path
from .policy import Policy

_PLAIN = (Tensor, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


Modules = str | type[nn.Module] | nn.Module | Callable[..., Any]


class Recompute(Policy):
    """Within: parts of models are recomputed in backward instead of kept; see the module.

    `Recompute()` takes the repeated blocks of a model. `Recompute(*which)` takes what is named: by
    a glob pattern of the paths of modules ("blocks.*", "encoder.layers.*.mlp"), by a class of
    modules, a module itself, or a function, which is found where it was defined (as the attribute
    of a module or a class; a name that `from ... import` bound elsewhere before is not). A policy
    for `stow(...)`, or a context of its own. Acts on the thread that entered it.

    `blocks`: how many modules were taken; `calls`: how often one, or a function, was called under
    `checkpoint`; `skipped`: how often one was not, since it was given an object that cannot be
    copied.
    """

    place = "recompute"

    def __init__(self, *which: Modules) -> None:
        self.blocks = 0
        self.calls = 0
        self.skipped = 0
        self._patterns = [w for w in which if isinstance(w, str)]
        self._classes = tuple(w for w in which if isinstance(w, type))
        self._automatic = not which
        self._functions: list[tuple[Any, str, Callable[..., Any]]] = []
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._blocks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stack: list[ExitStack] = []
        for w in which:
            if isinstance(w, nn.Module):
                self._blocks.add(w)
            elif not isinstance(w, (str, type)):
                self._functions.append((*_owner_of(w), self._instead_of(w)))

    def __enter__(self) -> Recompute:
        if self._stack:
            raise RuntimeError("this Recompute has been entered already")
        self._stack.append(ExitStack())
        self._stack[-1].enter_context(self.entered())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.pop().close()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with intercepting(self), self._functions_caught():
            yield

    @contextmanager
    def _functions_caught(self) -> Iterator[None]:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self._functions]
        for owner, name, instead in self._functions:
            setattr(owner, name, instead)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    def choose(self, info: SavedInfo, tensor: Tensor) -> None:
        """None: what a recomputed part saves never comes to a policy."""

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        now = Moment()
        if self._automatic and len(now.running) == 1 and module not in self._roots:
            self._roots.add(module)
            self._blocks.update(find_blocks(module))
        if not (module.training and torch.is_grad_enabled() and self._is_wanted(module)):
            return original(module, *args, **kwargs)
        if module not in self._seen:
            self._seen.add(module)
            self.blocks += 1

        def run(*args: Any, **kwargs: Any) -> Any:
            with now.again(), self._functions_caught():  # in backward too
                return original(module, *args, **kwargs)

        run.__qualname__ = type(module).__qualname__
        return self._checkpointed(run, args, kwargs)

    def _is_wanted(self, module: nn.Module) -> bool:
        if module in self._blocks or isinstance(module, self._classes):
            return True
        if not self._patterns:
            return False
        path = module_path()
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self._patterns)

    def _instead_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._functions_caught():
                return function(*args, **kwargs)

        run.__qualname__ = function.__qualname__

        @functools.wraps(function)
        def instead(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or not is_around(self):
                return function(*args, **kwargs)
            return self._checkpointed(run, args, kwargs)

        return instead

    def _checkpointed(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            objects = _Objects(args, kwargs)
        except Exception:  # whatever an object's own code raises when it is copied
            self.skipped += 1
            return run(*args, **kwargs)
        self.calls += 1

        def again(args: Any, kwargs: Any) -> Any:
            args, kwargs = objects.put_back(args, kwargs)
            return run(*args, **kwargs)

        again.__qualname__ = getattr(run, "__qualname__", type(run).__name__)
        # As two arguments, so that no name meets one of checkpoint's.
        return checkpoint(again, objects.args, objects.kwargs)


def _owner_of(function: Callable[..., Any]) -> tuple[Any, str]:
    """The module or class whose attribute a function is, and its name there."""
    owner: Any = sys.modules.get(getattr(function, "__module__", ""))
    *path, name = getattr(function, "__qualname__", "?").split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if owner is None or inspect.getattr_static(owner, name, None) is not function:
        raise StowgradError(
            f"Recompute({function!r}): it is not found under its own name, "
            f"{'.'.join([*path, name])} of {getattr(function, '__module__', None)}, so its calls "
            "cannot be caught there. Give a function of a module or a method of a class, or call "
            "sg.checkpoint(function, ...)."
        )
    return owner, name


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
