"""Checkpointing: run a region of the forward pass again in backward rather than keep what it saved.

In the first run a pair of hooks turns everything the region saves into a Slot, which knows only
its number. When backward unpacks the first Slot, the region runs again from its inputs, under the
random state, the autocast state and the module buffers with which the first run began, and its
hooks hand out the tensors by number: each to the backward that runs then, and only once. The run
ends as soon as the last Slot that anything still refers to is there (early stop).

Regions nest. The inputs of an inner one are saved by the outer one like any tensor; a Slot of the
inner one makes the outer one run, which gives the inputs, and then the inner one. Backward inside
a region, several backwards with `retain_graph`, and higher derivatives work: every backward runs
the region anew, and nothing of it outlives that backward. A region inside `torch.vmap` is mapped
the second time too.

Costs one more forward of the region at most for each backward; memory between forward and
backward is that of the inputs. Source: Chen et al. 2016 (arXiv 1604.06174); semantics of
torch.utils.checkpoint, non-reentrant.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import _private, engine
from ..context import recording
from ..errors import CheckpointMismatch, SavedTensorChanged
from ..graph import Location, locate
from ..record import user_location
from ..saved import SavedInfo, SavedTensor, saved_tensors_hooks
from ..views import gradient_edge
from .buffers import Buffers

_R = TypeVar("_R")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint(
    fn: Callable[..., _R],
    *args: Any,
    early_stop: bool = True,
    preserve_rng: bool = True,
    check: bool = True,
    context_fn: Contexts | None = None,
    **kwargs: Any,
) -> _R:
    """Run `fn(*args, **kwargs)` keeping only its inputs; recompute the rest in backward.

    Returns what `fn` returns. Costs one more forward of `fn` at most for each backward; memory
    between forward and backward is that of the tensors in `args` and `kwargs`, to which the
    saved-tensor hooks around the call apply. What `fn` refers to otherwise must not change until
    backward; the buffers of modules that `fn` is, holds or is given may.

    `early_stop`: end the recomputation once the last needed tensor is there.
    `preserve_rng`: give the second run the random state of the first, on the CPU and on the
    devices of the arguments.
    `check`: compare what the two runs save.
    `context_fn`: returns two contexts, one around each run (torch.utils.checkpoint's
    `create_selective_checkpoint_contexts`, for one). The second one is entered once a backward.

    Backward raises CheckpointMismatch if the second run saves other shapes, dtypes or devices, or
    another op's tensors; SavedTensorChanged if an input was changed in place meanwhile. Outside
    `record()` this is torch.utils.checkpoint.checkpoint.
    """
    if not recording():
        options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        result: _R = torch.utils.checkpoint.checkpoint(
            fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng,
            determinism_check="default" if check else "none", early_stop=early_stop,
            **options, **kwargs,
        )  # fmt: skip
        return result
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    first, second = context_fn() if context_fn is not None else (nullcontext(), nullcontext())
    region = Region(fn, args, kwargs, second, early_stop, preserve_rng, check)
    with saved_tensors_hooks(region.pack, region.unpack), first:
        out = fn(*args, **kwargs)
    region.first_run_is_over()
    return out


# The second run, in backward, is not compiled; so the first may not be either, where a part of `fn`
# would be one node.
_private.skip_compiler(checkpoint)


class Slot:
    """Stands for the tensor that a region saved as number `index`."""

    __slots__ = ("__weakref__", "index", "region")

    holds_no_alias = True

    def __init__(self, region: Region, index: int) -> None:
        self.region = region
        self.index = index

    def __repr__(self) -> str:
        return f"<number {self.index} of {self.region}>"


class _Input(NamedTuple):
    """A tensor argument: what is under the `torch.vmap`s around the region, and what they batch."""

    saved: SavedTensor
    dims: list[int | None]


class _Enough(BaseException):
    """The recomputation has got everything. No Exception, lest the user's code catch it."""


class Region:
    """One call of `checkpoint`: its inputs, and what its first run saved."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: AbstractContextManager[Any],
        early_stop: bool,
        preserve_rng: bool,
        check: bool,
    ) -> None:
        self.fn = fn
        self.where: Location | None = user_location()
        self._context = context
        self._early_stop = early_stop
        self._check = check
        self._complete = False
        leaves, self._spec = tree_flatten((args, kwargs))
        self._vmaps = _private.VmapLevels()
        self._inputs = [
            self._save(x, i) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)
        ]
        self._state = _State([x for x in leaves if isinstance(x, Tensor)], preserve_rng)
        self._buffers = [Buffers(module) for module in _modules_in((fn, *leaves))]
        self._slots: list[weakref.ref[Slot]] = []
        self._saved: list[SavedInfo] = []

    def _save(self, tensor: Tensor, position: int) -> _Input:
        tensor, dims = self._vmaps.take_apart(tensor)
        edge = gradient_edge(tensor) if _private.native_requires_grad(tensor) else None
        name = f"input {position}"
        return _Input(SavedTensor(tensor, name, "checkpoint", self.where, None, edge), dims)

    def first_run_is_over(self) -> None:
        self._complete = True
        for buffers in self._buffers:
            buffers.learn()
        self._buffers = [b for b in self._buffers if b.before]
        self._state.first_run_is_over()

    def pack(self, info: SavedInfo, tensor: Tensor) -> Slot:
        slot = Slot(self, len(self._slots))
        self._slots.append(weakref.ref(slot))
        self._saved.append(info)
        return slot

    pack.wants_info = True  # type: ignore[attr-defined]

    def unpack(self, slot: Slot) -> Tensor:
        index = slot.index
        task = engine.current_task()
        kept: dict[int, tuple[Tensor, int]] | None = None
        if task is not None:
            kept = task.notes.get(self)
        if kept is None or index not in kept:
            needed = {index}
            if kept is None and task is not None:
                needed = {i for i, ref in enumerate(self._slots) if ref() is not None}
            found = self._run_again(needed)
            if index not in found:
                raise CheckpointMismatch(self._fewer(len(found)))
            if kept is None:
                kept = found
                if task is not None:
                    task.notes[self] = kept
            else:  # asked for a second time in one backward
                kept[index] = found[index]
        tensor, version = kept.pop(index)
        if tensor._version != version:
            info = self._saved[index]
            raise SavedTensorChanged(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: '{info.name}' ({_describe(info)}), saved by {info.op}"
                f"{_at(info.where)} inside {self}, was changed in place after it was recomputed "
                f"(version {tensor._version}, saved at {version}). Change a copy instead "
                "(`x = x + d` for `x += d`)."
            )
        return tensor

    def _run_again(self, needed: set[int]) -> dict[int, tuple[Tensor, int]]:
        """Run the region from its inputs; what it saves as one of the numbers in `needed`."""
        found: dict[int, tuple[Tensor, int]] = {}
        last = max(needed) if self._early_stop else -1
        count = 0

        def pack(info: SavedInfo, tensor: Tensor) -> Tensor:
            # What is returned serves a backward inside the region.
            nonlocal count
            index = count
            count += 1
            if self._check and (index < len(self._saved) or self._complete):
                self._compare(index, info)
            if _private.native_requires_grad(tensor):
                tensor = _private.alias(tensor)
            if index in needed:
                found[index] = tensor, tensor._version
            if index == last:
                raise _Enough
            return tensor

        pack.wants_info = True  # type: ignore[attr-defined]
        leaves = [x.saved.unpack() if isinstance(x, _Input) else x for x in self._inputs]
        with ExitStack() as stack:
            put_together = stack.enter_context(self._vmaps.again())
            for i, x in enumerate(self._inputs):
                if isinstance(x, _Input):
                    leaves[i] = put_together(leaves[i], x.dims)
            args, kwargs = tree_unflatten(leaves, self._spec)
            del leaves
            stack.enter_context(self._state.restored())
            for buffers in self._buffers:
                stack.enter_context(buffers.as_before())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
            stack.enter_context(self._context)
            try:
                self.fn(*args, **kwargs)
            except _Enough:
                return found
        if self._check and self._complete and count < len(self._saved):
            raise CheckpointMismatch(self._fewer(count))
        return found

    def _compare(self, index: int, info: SavedInfo) -> None:
        """Raise unless the second run saves as number `index` what the first one did."""
        if index >= len(self._saved):
            raise CheckpointMismatch(
                f"the second run of {self} saved more tensors than the {len(self._saved)} of its "
                f"first: {_quote(info)}. {_ADVICE}"
            )
        first = self._saved[index]
        for fact in ("shape", "dtype", "device", "op", "name"):
            if getattr(first, fact) != getattr(info, fact):
                raise CheckpointMismatch(
                    f"the second run of {self} saved another tensor than its first as number "
                    f"{index + 1}: {_quote(info)}. It was {_quote(first)}. {_ADVICE}"
                )

    def _fewer(self, count: int) -> str:
        missing = self._saved[min(count, len(self._saved) - 1)]
        return (
            f"the second run of {self} saved {count} tensors and its first {len(self._saved)}: "
            f"missing is {_quote(missing)}. {_ADVICE}"
        )

    def __repr__(self) -> str:
        fn = getattr(self.fn, "__qualname__", None) or type(self.fn).__name__
        return f"the checkpointed region {fn}{_at(locate(self.where))}"


_ADVICE = (
    "A region must do the same both times: what it reads (globals, arguments, Python's or NumPy's "
    "random numbers) may not change in between."
)


def _describe(info: SavedInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"


def _quote(info: SavedInfo) -> str:
    return f"'{info.name}' of {info.op}, {_describe(info)} on {info.device}{_at(info.where)}"


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _modules_in(values: tuple[Any, ...]) -> Iterator[nn.Module]:
    """The modules among `values`, or that a function or a method among them refers to."""
    seen: set[int] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif hasattr(value, "__self__"):
            todo += [value.__self__, getattr(value, "__func__", None)]
        elif getattr(value, "__closure__", None):
            todo += [cell.cell_contents for cell in value.__closure__ if _filled(cell)]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False


class _State:
    """What else decides what a region computes: random generators, autocast, default device."""

    def __init__(self, tensors: list[Tensor], preserve_rng: bool) -> None:
        devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
        accelerator = torch.accelerator.current_accelerator()
        kinds = {"cpu", *(d.type for d in devices)}
        self._asleep: str | None = None  # an accelerator that nothing has used yet
        if accelerator is not None:
            kinds.add(accelerator.type)
            module = torch.get_device_module(accelerator.type)
            if not _private.is_initialized(accelerator.type):
                self._asleep = accelerator.type
            elif hasattr(module, "current_device"):
                devices.add(torch.device(accelerator.type, module.current_device()))
        self._preserve_rng = preserve_rng
        self._generators = _random_states(devices) if preserve_rng else []
        self._autocast = {k: _autocast(k) for k in kinds if torch.amp.is_autocast_available(k)}
        self._device = torch.get_default_device()

    def first_run_is_over(self) -> None:
        if self._asleep is not None and self._preserve_rng:
            if _private.is_initialized(self._asleep):
                raise RuntimeError(
                    f"{self._asleep} was first used inside a checkpointed region, so the state of "
                    "its random generator before it is not known. Use the device once before, or "
                    "pass preserve_rng=False."
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within: all of it as it was when the region first ran."""
        with ExitStack() as stack:
            for kind, (enabled, dtype, cache) in self._autocast.items():
                if _autocast(kind) != (enabled, dtype, cache):
                    stack.enter_context(
                        torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache)
                    )
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            if not self._generators:
                yield
                return
            now = _random_states({device for device, _ in self._generators if device is not None})
            try:
                _set_random_states(self._generators)
                yield
            finally:
                _set_random_states(now)


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def _random_states(devices: set[torch.device]) -> list[tuple[torch.device | None, Tensor]]:
    """The states of the generators of the CPU (as None) and of `devices`."""
    states: list[tuple[torch.device | None, Tensor]] = [(None, torch.get_rng_state())]
    for device in devices:
        states.append((device, torch.get_device_module(device.type).get_rng_state(device)))
    return states


def _set_random_states(states: list[tuple[torch.device | None, Tensor]]) -> None:
    for device, state in states:
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device.type).set_rng_state(state, device)
