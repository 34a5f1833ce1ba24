"""Runs a script as `python SCRIPT ARGS` would, inside whatever contexts it is given.

The script is `__main__`, sees its own `sys.argv` and `sys.path[0]`, and ends the process as it
would without us: with its own exit code, with its own traceback (our frames left out), or, on
Ctrl-C, by the signal.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import types
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

from . import _private

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DISPATCH = tuple(
    os.path.join(_private.TORCH_DIR, *parts)
    for parts in (("_ops.py",), ("utils", "_python_dispatch.py"))
)


def execute(script: str, args: Iterable[str]) -> None:
    """Run `script` as the main program. Raises whatever it raises, SystemExit too.

    `sys.argv`, `sys.path[0]` and `sys.modules["__main__"]` stay the script's afterwards: what it
    leaves behind (threads, exit handlers) may use them.
    """
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    path = os.path.abspath(script)
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    vars(main)["__builtins__"] = builtins
    vars(main)["__cached__"] = None
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def unreadable(script: str) -> str | None:
    """Why `script` cannot be run, in Python's words; None if it can be opened."""
    if os.path.isdir(script):
        return f"can't find '__main__' module in {script!r}"
    try:
        with open(script, "rb"):
            return None
    except OSError as error:
        path = os.path.abspath(script)
        return f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"


def exit_code(error: BaseException | None) -> int:
    """The code with which Python ends after `error` (-2 for Ctrl-C: ended by SIGINT)."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code if isinstance(error.code, int) else 1
    return -2 if isinstance(error, KeyboardInterrupt) else 1


def end(error: BaseException | None, full_traceback: bool = False) -> NoReturn:
    """End the process as Python does after `error`, the last frame of ours being left out."""
    if error is None or isinstance(error, SystemExit):
        raise error or SystemExit(0)
    if not full_traceback:
        leave_out_our_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        # The interpreter runs the exit handlers, then ends itself by the signal.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt from None
    raise SystemExit(1)


def leave_out_our_frames(error: BaseException) -> None:
    """Take our frames, and PyTorch's between them and a kernel, out of the traceback of `error`,
    of its causes, and of the exceptions in a group."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        item.__traceback__ = _users_frames(item.__traceback__)
        todo += [item.__cause__, item.__context__, *getattr(item, "exceptions", ())]


def _users_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    kept: list[types.TracebackType] = []
    ours = False
    while traceback is not None:
        name: Any = traceback.tb_frame.f_code.co_filename
        ours = name.startswith(_OURS) or (ours and name.startswith(_DISPATCH))
        if not ours:
            kept.append(traceback)
        traceback = traceback.tb_next
    result: types.TracebackType | None = None
    for step in reversed(kept):
        result = types.TracebackType(result, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return result
