"""Which thread records, and how recording is switched off and on again within it.

A thread that records has its recorder (a dispatch mode) on the mode stack and PyTorch's autograd
key out of dispatch. A backward takes the recorder off, unless it is itself recorded; hooks and
custom functions run with it on again; the fallback runs PyTorch as it is without us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from . import _private, engine
from .graph import seam
from .saved import hooks

if TYPE_CHECKING:
    from .record import Recorder

_include = _private.include_view_tracking
_exclude = _private.exclude_view_tracking

class Before:
    """What a thread had on when it began to record, to be put back whatever happened since.

    Every scope here cleans up after itself; but Ctrl-C strikes anywhere, in the midst of that too.
    """

    def __init__(self) -> None:
        self.modes = _private.mode_stack()
        self.view_tracking_excluded = _private.view_tracking_excluded()
        self.overrides = _private.function_overrides()
        self.scripts_compile = _private.scripts_compile()
        self.backwards = engine.running()
        self.pairs = list(hooks.pairs)

    def restore(self, raised: bool) -> None:
        engine.abandon(self.backwards)
        _private.set_mode_stack(self.modes)
        if not self.view_tracking_excluded:
            _include()
        _private.set_function_overrides(self.overrides)
        this_thread.overrides = None
        _private.set_scripts_compile(self.scripts_compile)
        if raised:
            hooks.pairs[:] = self.pairs


class _Thread(threading.local):
    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.depth = 0
        self.entered: list[int] = []  # the depth around each record() that is entered
        self.before: Before | None = None
        self.guard: Any = None
        self.backward: Callable[..., Any] | None = None  # runs a backward; None: engine.run
        self.overrides: Any = None  # in a backward: the state of __torch_function__ around it


this_thread = _Thread()


def recording() -> bool:
    """Whether this thread is inside `record()`."""
    return this_thread.depth > 0


def current_recorder() -> Recorder:
    recorder = this_thread.recorder
    if recorder is None:
        raise RuntimeError("not inside record()")
    return recorder


def call_recorded(fn: Callable[..., Any], *args: Any) -> Any:
    """Call user code from inside an op or a backward, with recording on as around it."""
    # All in one frame: backward within hooks within backward may go deep.
    thread = this_thread
    recorder, overrides = thread.recorder, thread.overrides
    on = recorder is None or (_private.mode_count() and recorder in _private.mode_stack())
    if on and overrides is None:
        return fn(*args)
    if overrides is not None:
        inner = _private.function_overrides()
        thread.overrides = None
        _private.set_function_overrides(overrides)
    excluded = _private.view_tracking_excluded()
    if not on:  # `recorder.on()`, written out: hooks come through here one by one
        _private.push_mode(recorder)
        _exclude()
    try:
        return fn(*args)
    finally:
        if not on:
            _private.pop_mode()
            if not excluded:
                _include()
        if overrides is not None:
            _private.set_function_overrides(inner)
            thread.overrides = overrides


class backward_scope:
    """Around a backward: without create_graph its ops need no recording, so the mode comes off."""

    __slots__ = ("_above", "_recorder")

    def __init__(self, create_graph: bool) -> None:
        self._recorder = current_recorder()
        self._above: list[Any] | None = None if create_graph or not _private.mode_count() else []

    def __enter__(self) -> None:
        above, recorder = self._above, self._recorder
        if above is None:
            return
        mode = _private.pop_mode()
        if mode is not recorder:
            _private.push_mode(mode)
            if recorder not in _private.mode_stack():
                self._above = None
                return
            while (mode := _private.pop_mode()) is not recorder:
                above.append(mode)
            for mode in reversed(above):
                _private.push_mode(mode)
        _include()

    def __exit__(self, *exc: Any) -> None:
        above = self._above
        if above is not None and this_thread.recorder is self._recorder:  # else _private.Session
            _exclude()
            kept = [_private.pop_mode() for _ in above]
            _private.push_mode(self._recorder)
            for mode in reversed(kept):
                _private.push_mode(mode)


class below_overrides:
    """Within: ops go past `__torch_function__`, as those of PyTorch's own backward do; user code
    that is called in there (`call_recorded`) has it as it was."""

    __slots__ = ("_guard", "_here", "_outer")

    def __enter__(self) -> None:
        thread = this_thread
        self._here = thread.recorder
        self._outer = thread.overrides
        thread.overrides = _private.function_overrides()
        self._guard = _private.NoFunctionOverrides()
        self._guard.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._guard.__exit__(*exc)
        if this_thread.recorder is self._here:
            this_thread.overrides = self._outer


@contextmanager
def suspended() -> Iterator[None]:
    """Within: PyTorch as it is without us, its own autograd included. For the fallback."""
    recorder = current_recorder()
    on_stack = bool(_private.mode_count()) and recorder in _private.mode_stack()
    if on_stack:
        scope: Any = backward_scope(False)
    else:
        scope = nullcontext()
    with scope, _private.autograd_included():
        excluded = _private.view_tracking_excluded()
        _include()
        user, seam.user = seam.user, None
        depth, this_thread.depth = this_thread.depth, 0
        try:
            yield
        finally:
            if this_thread.recorder is recorder:
                this_thread.depth = depth
                seam.user = user
                if excluded:
                    _exclude()
