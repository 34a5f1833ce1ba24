"""Live tensor bytes and time in backward, measured alike under PyTorch and under stowgrad.

`Meter` looks at every op's arguments and results. A storage it has not met adds its bytes, once,
however many tensors live in it; a weak reference to the storage object (which lives as long as the
memory does, whatever Python objects come and go) takes them off again. So the count is of memory
that tensors hold, in forward and in backward, not of tensors. It costs some microseconds an op.

Not counted: what a kernel uses for itself and frees before it returns, memory that no op of this
thread has met, and tensors without a storage of their own (sparse ones).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _private, saved
from ..graph import state


class _Storage(weakref.ref[Any]):
    """A weak reference to a storage, with what was counted for it."""

    __slots__ = ("device", "key", "nbytes")

    key: int
    nbytes: int
    device: str


class Meter(TorchDispatchMode):
    """Within: `live` bytes that tensors hold, their `peak`, and how much of it was saved tensors.

    Enter it outside `record()`. All figures are in bytes. `live` and `peak` add up all kinds of
    device; `peaks` has one entry a kind, such as "cpu" and "cuda". `saved_at_peak`: what
    stowgrad's saved tensors held when `peak` was reached, each storage once, parameters not
    counted; 0 under PyTorch's own autograd, which cannot be asked.
    """

    passive = True  # the recorder hands composite ops on whole; see _dispatch

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}
        self._dead: deque[_Storage] = deque()  # by finalizers, which may run at any moment
        self._lock = threading.RLock()
        self._live: dict[str, int] = {}
        self._saved = _SavedBytes()
        self._total = 0
        self.peak = 0
        self.peaks: dict[str, int] = {}
        self.saved_at_peak = 0

    @property
    def live(self) -> int:
        """Bytes held by tensors right now."""
        with self._lock:
            self._bury()
            return self._total

    @property
    def saved(self) -> int:
        """Bytes held by saved tensors right now, parameters not counted."""
        return self._saved.total()

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        with self._lock:
            self._bury()
            self.peak, self.peaks = self._total, dict(self._live)
            self.saved_at_peak = self.saved

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count these too (a model's parameters, say), although no op has met them yet."""
        for tensor in tensors:
            self._meet(tensor)

    def __enter__(self) -> Meter:
        super().__enter__()
        saved.watchers.append(self._saved)
        return self

    def __exit__(self, *exc: Any) -> None:
        saved.watchers.remove(self._saved)
        super().__exit__(*exc)

    def _dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        parts = _composite.get(func)
        if parts is None:
            parts = _composite[func] = _takes_apart(func)
        if parts:  # below autograd these arrive whole, and allocate inside
            _private.push_mode(self)
            try:
                return _private.run_parts(func, args, kwargs or {})
            finally:
                _private.pop_mode()
        out = func(*args, **kwargs) if kwargs else func(*args)
        for value in args:
            if isinstance(value, Tensor):
                self._meet(value)
            elif type(value) is list or type(value) is tuple:
                for item in value:
                    if isinstance(item, Tensor):
                        self._meet(item)
        if isinstance(out, Tensor):
            self._meet(out)
        elif type(out) is list or type(out) is tuple:
            for item in out:
                if isinstance(item, Tensor):
                    self._meet(item)
                elif type(item) is list or type(item) is tuple:
                    for inner in item:
                        if isinstance(inner, Tensor):
                            self._meet(inner)
        return out

    def _meet(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # no storage of its own
            return
        key = storage._cdata
        known = self._storages.get(key)
        nbytes = storage.nbytes()
        if known is not None and known.nbytes == nbytes and known() is storage:
            return
        with self._lock:
            self._bury()
            known = self._storages.get(key)
            if known is not None and known() is storage:  # resized
                self._add(known.device, nbytes - known.nbytes)
                known.nbytes = nbytes
                return
            if not _has_memory(storage):
                return
            ref = _Storage(storage, self._dead.append)
            ref.key, ref.nbytes, ref.device = key, nbytes, storage.device.type
            self._storages[key] = ref
            self._add(ref.device, nbytes)

    def _add(self, device: str, nbytes: int) -> None:
        live = self._live[device] = self._live.get(device, 0) + nbytes
        self._total += nbytes
        if live > self.peaks.get(device, 0):
            self.peaks[device] = live
        if self._total > self.peak:
            self.peak = self._total
            self.saved_at_peak = self._saved.total()

    def _bury(self) -> None:
        """Take off what has died since. Finalizers only leave a note: they may run in the middle
        of anything, in any thread."""
        dead = self._dead
        while dead:
            ref = dead.popleft()
            if self._storages.get(ref.key) is ref:
                del self._storages[ref.key]
            self._add(ref.device, -ref.nbytes)


# As in record.py: a method defined in the class body would be wrapped in two more frames.
Meter.__torch_dispatch__ = Meter._dispatch  # type: ignore[method-assign,assignment]

_composite: dict[Any, bool] = {}


def _takes_apart(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and _private.is_composite(func)


def _has_memory(storage: Any) -> bool:
    """Whether bytes stand behind a storage: not those of meta and fake tensors and wrappers."""
    try:
        return storage.nbytes() > 0 and storage.data_ptr() != 0
    except RuntimeError:
        return False


class _Held:
    """What one SavedTensor holds: a storage, and a weak reference that says when it is gone."""

    __slots__ = ("holder", "key", "nbytes", "ref")

    ref: weakref.ref[saved.SavedTensor]

    def __init__(self, holder: int, key: int, nbytes: int) -> None:
        self.holder = holder  # its id
        self.key = key
        self.nbytes = nbytes


class _SavedBytes:
    """Watches SavedTensors: the distinct storages they hold, parameters' left out."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}  # id of the SavedTensor -> what it holds
        self._counts: dict[int, int] = {}  # storage -> SavedTensors that hold it
        self._gone: deque[_Held] = deque()
        self._lock = threading.RLock()
        self._bytes = 0

    def total(self) -> int:
        with self._lock:
            self._drop_gone()
            return self._bytes

    def kept(self, holder: saved.SavedTensor, tensor: Tensor) -> None:
        if _of_a_parameter(tensor):
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        held = _Held(id(holder), storage._cdata, storage.nbytes())
        gone = self._gone
        held.ref = weakref.ref(holder, lambda _: gone.append(held))
        with self._lock:
            self._drop_gone()
            self._held[held.holder] = held
            count = self._counts[held.key] = self._counts.get(held.key, 0) + 1
            if count == 1:
                self._bytes += held.nbytes

    def dropped(self, holder: saved.SavedTensor) -> None:
        with self._lock:
            held = self._held.get(id(holder))
            if held is not None and held.ref() is holder:
                del self._held[held.holder]
                self._uncount(held)

    def _drop_gone(self) -> None:
        while self._gone:
            held = self._gone.popleft()
            if self._held.get(held.holder) is held:
                del self._held[held.holder]
                self._uncount(held)

    def _uncount(self, held: _Held) -> None:
        left = self._counts[held.key] - 1
        if left:
            self._counts[held.key] = left
        else:
            del self._counts[held.key]
            self._bytes -= held.nbytes


def _of_a_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is, or is a view of, a leaf that needs gradients or a module's parameter."""
    for t in (tensor, tensor._base if tensor._is_view() else None):
        if t is not None and (
            isinstance(t, torch.nn.Parameter)
            or (_private.native_requires_grad(t) and state(t) is None)
        ):
            return True
    return False


class BackwardClock:
    """Within: counts the calls of backward in this process and the seconds spent in them.

    Stands where PyTorch's engine object stands, so it times its engine and ours in the same way.
    A backward inside a backward is part of the outer one. Enter it inside `record()`, if at all.
    `intervals`: seconds from the start of each call to that of the next, the last 10,000 of them.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.intervals: deque[float] = deque(maxlen=10_000)
        self._started: float | None = None
        self._depth = threading.local()

    def __enter__(self) -> BackwardClock:
        self._engine = torch.autograd.Variable._execution_engine
        torch.autograd.Variable._execution_engine = self  # type: ignore[assignment]
        return self

    def __exit__(self, *exc: Any) -> None:
        torch.autograd.Variable._execution_engine = self._engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._depth, "inside", False):
            return self._engine.run_backward(*args, **kwargs)
        self._depth.inside = True
        self.calls += 1
        start = time.perf_counter()
        if self._started is not None:
            self.intervals.append(start - self._started)
        self._started = start
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start
            self._depth.inside = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
