"""Which module of a model is running, and what is held by the model and by the training loop.

While something intercepts, `nn.Module.__call__` is bound to a function that keeps the stack of the
modules of this thread. PyTorch's global module hooks would do as well, but send every call of every
module the slow way round. Paths are those of `named_modules()`, from the module that was called
from outside all others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from .. import _private
from ..graph import seam


class Interceptor(Protocol):
    """Stands around the calls of modules in one thread."""

    def call(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any: ...


class Holds(Protocol):
    """Is told what is held by somebody anyway."""

    def add(self, item: nn.Module | Tensor) -> None: ...


class _Here(threading.local):
    """`around`: what stands around a call, the innermost first. `running`: the modules that are
    being called, each by the next before."""

    def __init__(self) -> None:
        self.around: list[Interceptor] = []
        self.running: list[nn.Module] = []


_here = _Here()
_Names = weakref.WeakKeyDictionary[nn.Module, str]
_names: weakref.WeakKeyDictionary[nn.Module, _Names] = weakref.WeakKeyDictionary()


def module_path() -> str:
    """The path of the module that is running, from its root: "blocks.3.mlp"; "" for none."""
    running = _here.running
    if not running:
        return ""
    root, module = running[0], running[-1]
    names = _names.get(root)
    if names is None or module not in names:  # never asked, or made since
        names = _names[root] = weakref.WeakKeyDictionary()
        for name, inner in root.named_modules():
            names[inner] = name
        names.setdefault(module, type(module).__name__)
    return names[module]


@contextmanager
def intercepting(interceptor: Interceptor) -> Iterator[None]:
    """Within, in this thread: calls of modules go through `interceptor`, and paths are known."""
    _bind()
    _here.around.insert(0, interceptor)
    outer, seam.module_path = seam.module_path, module_path
    try:
        yield
    finally:
        seam.module_path = outer
        _here.around.remove(interceptor)
        _unbind()


def is_around(interceptor: Interceptor) -> bool:
    """Whether calls in this thread go through it."""
    return interceptor in _here.around


class Moment:
    """Which modules are running and what stands around calls, now in this thread."""

    def __init__(self) -> None:
        self.running = list(_here.running)
        self._around = list(_here.around)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, in this thread: as it was then (a part of a model runs again)."""
        here = _here
        outer = here.running, here.around, seam.module_path
        _bind()
        here.running, here.around = list(self.running), list(self._around)
        seam.module_path = module_path
        try:
            yield
        finally:
            here.running, here.around, seam.module_path = outer
            _unbind()


class Watching:
    """Tells `holds` of the modules that are called, and of what a model is given that needs no
    gradient: the batch, which the training loop holds on to."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # called from outside

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module not in self._known:
            self._holds.add(module)
            for inner in module.modules():
                self._known.add(inner)
                self._roots.discard(inner)
            self._roots.add(module)
        if module in self._roots:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and not _private.native_requires_grad(value):
                    self._holds.add(value)
        return original(module, *args, **kwargs)


# -- the binding

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
            around = _here.around
            if not around:
                return original(self, *args, **kwargs)
            running = _here.running
            running.append(self)
            try:
                return _through(tuple(around), original, self, args, kwargs)
            finally:
                running.pop()

        nn.Module.__call__ = call  # type: ignore[method-assign]


def _through(
    around: tuple[Interceptor, ...], original: Any, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    if not around:
        return original(module, *args, **kwargs)

    def inner(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _through(around[1:], original, module, args, kwargs)

    return around[0].call(inner, module, args, kwargs)


def _unbind() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            nn.Module.__call__ = _original  # type: ignore[method-assign]
