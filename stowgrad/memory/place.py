"""The base of pairs that put saved tensors somewhere else: what goes, what stays, what is shared.

A tensor goes as the bytes it lives in. Its storage is packed once, whatever views of it and nodes
save it: the first one to come puts a Region (a range of the storage's bytes, at one version) in
its new place, the others refer to it, each with its own dtype, shape, strides and offset. Which
range: the whole storage, if the tensor spans more than half of it; else the tensor's span; or, if
its elements are spread thin over their span, the elements alone. A storage is known by its live
object and never by its address, which the next tensor may have.

A region lives as long as something packed refers to it. Loaded bytes are shared too, while they
are alive and unchanged, so aliases come back as aliases.

What stays where it is: parameters, other leaves that need gradients and everything in their
storage; modules and tensors given as `leave`; tensors of fewer than `smallest` bytes; subclasses
of Tensor, tensors of a functional transform, and layouts other than strided.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import _private
from ..graph import state
from ..saved import SavedInfo

SMALLEST = 4096  # bytes; below it, bookkeeping costs more than the memory is worth
_THIN = 8  # elements spread over more than this many times their bytes are gathered
_ALIGNMENT = 16  # bytes; the size of the largest dtype


class NoRoom(Exception):
    """The new place takes no more for now: the tensor stays where it is."""


class Region:
    """Bytes `start` to `start + nbytes` of one storage, as they were at one version."""

    __slots__ = (
        "__weakref__", "_loaded", "_loaded_probe", "device", "handle", "label", "nbytes", "owner",
        "probe", "start", "thin", "version",
    )  # fmt: skip

    def __init__(self, owner: Place, tensor: Tensor, start: int, nbytes: int, label: str) -> None:
        self.owner = owner
        self.start = start
        self.nbytes = nbytes
        self.label = label
        self.device = tensor.device
        self.version = tensor._version
        self.probe = _version_probe(tensor)
        self.thin: Any = None  # for gathered elements: their dtype and geometry
        self.handle: Any = None
        self._loaded: weakref.ref[Any] | None = None
        self._loaded_probe: Tensor | None = None

    def still_holds(self, version: int) -> bool:
        """Whether a tensor that is at `version` now has the bytes that were packed."""
        return version == self.version == self.probe._version

    def load(self) -> Tensor:
        """The bytes as a tensor of uint8 on their device; shared while an earlier one lives."""
        storage = self._loaded() if self._loaded is not None else None
        probe = self._loaded_probe
        if storage is not None and probe is not None and probe._version == 0:
            flat = _private.alias(probe)
            flat.data = _bytes_of(storage, 0, storage.nbytes())
            return flat
        flat = self.owner._load(self.handle, self.nbytes, self.device, self.label)
        self._loaded = weakref.ref(flat.untyped_storage())
        self._loaded_probe = _version_probe(flat)
        return flat

    def prefetch(self) -> None:
        if self._loaded is None or self._loaded() is None:
            self.owner._prefetch(self.handle)

    def __del__(self) -> None:
        if self.handle is not None:
            self.owner._release(self.handle)


class Packed:
    """One saved tensor in its new place."""

    __slots__ = ("__weakref__", "conj", "dtype", "neg", "offset", "region", "shape", "stride")

    holds_no_alias = True

    def __init__(self, region: Region, tensor: Tensor, offset: int) -> None:
        self.region = region
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = offset  # in elements, from the region's start
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()

    def __repr__(self) -> str:
        return f"<{self.dtype} {list(self.shape)} in {self.region.handle}>"


class _Known:
    """A live storage, and the regions of it that are packed."""

    __slots__ = ("ref", "regions")

    def __init__(self, ref: weakref.ref[Any]) -> None:
        self.ref = ref
        self.regions: list[weakref.ref[Region]] = []


class Place:
    """A pair (pack, unpack) that keeps saved tensors elsewhere; see the module's docstring.

    Subclasses say how bytes get there and back: `_store`, `_load`, `_free`. `smallest`: tensors
    of fewer bytes stay where they are. `leave`: modules, whose parameters and buffers stay, and
    tensors, whose storages stay. Safe to use from many threads.

    `packs`: tensors packed; `stayed`: how many stayed, by reason; `bytes_now`, `bytes_peak` and
    `bytes_total`: bytes that are, at most were at once, and ever were in the new place.
    """

    place = "elsewhere"

    def __init__(
        self, *, smallest: int = SMALLEST, leave: Iterable[nn.Module | Tensor] = ()
    ) -> None:
        self.smallest = smallest
        self.packs = 0
        self.stayed: Counter[str] = Counter()
        self._now = 0
        self.bytes_peak = 0
        self.bytes_total = 0
        self._known: dict[int, _Known] = {}  # storages something of which is packed
        self._left: dict[int, weakref.ref[Any]] = {}  # storages that stay
        self._lock = threading.Lock()
        self._gone: deque[Any] = deque()  # handles whose region has died
        for item in leave:
            self.leave(item)

    @property
    def bytes_now(self) -> int:
        """Bytes in the new place right now."""
        self._drain()
        return self._now

    def leave(self, item: nn.Module | Tensor) -> None:
        """From here on, keep a tensor's storage, or a module's parameters and buffers, in place."""
        if isinstance(item, Tensor):
            self._leave_storage(item)
            return
        for tensor in (*item.parameters(), *item.buffers()):
            self._leave_storage(tensor)

    # -- the pair

    def pack(self, info: SavedInfo, tensor: Tensor) -> Any:
        """Put `tensor` away and return what brings it back; or `tensor` itself, if it stays."""
        reason = self._stays(tensor)
        if reason is None:
            try:
                packed = self._put(info, tensor)
            except NoRoom:
                reason = "no room"
            else:
                self.packs += 1
                return packed
        self.stayed[reason] += 1
        return tensor

    pack.wants_info = True  # type: ignore[attr-defined]

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, with the dtype, device, shape and strides it had.

        Raises StowError if its bytes cannot be brought back as they were.
        """
        if not isinstance(packed, Packed):
            result: Tensor = packed
            return result
        region = packed.region
        flat = region.load()
        if region.thin is not None:
            return _lazily(packed, _spread(packed, flat))
        # Under the loaded bytes' own version counter, so that a change made through one alias is
        # noticed by the next unpack; and not a view, so that no base comes along.
        result = _private.alias(flat)
        result.data = _raw_view(
            flat.untyped_storage(), packed.dtype, packed.offset, packed.shape, packed.stride
        )
        return _lazily(packed, result)

    def prefetch(self, packed: Any) -> None:
        """Start to fetch what `unpack` will be asked for soon, where that helps."""
        if isinstance(packed, Packed):
            packed.region.prefetch()

    # -- what subclasses say

    def _store(self, flat: Tensor, dtype: torch.dtype, label: str) -> Any:
        """Put the bytes of `flat` (uint8, one dimension) away; return a handle. May raise NoRoom.

        They are elements of `dtype`, beginning with a whole one. One call at a time. `flat` lives
        in the saved tensor's memory, which is freed, or changed in place, as soon as this returns:
        what still needs it then keeps a copy.
        """
        raise NotImplementedError

    def _load(self, handle: Any, nbytes: int, device: torch.device, label: str) -> Tensor:
        """The bytes again, in a new tensor of uint8 on `device`. Any number of calls at a time."""
        raise NotImplementedError

    def _free(self, handle: Any) -> int:
        """Nobody needs these bytes any more; return how many they were.

        One call at a time, and not during a `_store`.
        """
        raise NotImplementedError

    def _prefetch(self, handle: Any) -> None:
        """Start to fetch these bytes, for a `_load` that comes soon. Returns at once."""

    # -- what stays

    def _stays(self, tensor: Tensor) -> str | None:
        """Why `tensor` stays where it is; None if it goes."""
        if type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
            return "subclass"
        if tensor.layout is not torch.strided or _private.is_wrapped(tensor):
            return "layout"
        if tensor.device.type == "meta":
            return "no data"
        if self._is_left(tensor):
            return "in use"
        for t in (tensor, tensor._base if tensor._is_view() else None):
            if t is not None and _is_leaf_with_grad(t):
                self._leave_storage(tensor)
                return "in use"
        if tensor.numel() * tensor.element_size() < max(self.smallest, 1):
            return "small"
        return None

    def _leave_storage(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        self._left[storage._cdata] = weakref.ref(storage)

    def _is_left(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        ref = self._left.get(storage._cdata)
        if ref is None:
            return False
        if ref() is storage:
            return True
        del self._left[storage._cdata]  # that storage is gone; this one came to its address
        return False

    # -- what goes

    def _put(self, info: SavedInfo, tensor: Tensor) -> Packed:
        storage = tensor.untyped_storage()
        item = tensor.element_size()
        start = int(tensor.storage_offset()) * item
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        span = (1 + last) * item
        try:
            with self._lock:
                known = self._known_storage(storage)
                found = self._find(known, tensor, start, start + span)
                if found is None:
                    found = self._put_new(known, storage, info, tensor, start, span)
        finally:
            self._drain()
        if found.thin is not None:
            return Packed(found, tensor, 0)
        return Packed(found, tensor, (start - found.start) // item)

    def _known_storage(self, storage: Any) -> _Known:
        key = storage._cdata
        known = self._known.get(key)
        if known is None or known.ref() is not storage:
            # The callback may come late, when the address has a new storage: it looks first.
            table = self._known
            known = _Known(weakref.ref(storage, lambda ref: _forget(table, key, ref)))
            table[key] = known
        return known

    def _find(self, known: _Known, tensor: Tensor, start: int, end: int) -> Region | None:
        version = tensor._version
        for ref in known.regions:
            region = ref()
            if region is None or not region.still_holds(version):
                continue
            if region.thin is not None:
                if region.thin == _geometry(tensor):
                    return region
            elif region.start <= start and end <= region.start + region.nbytes:
                return region
        return None

    def _put_new(
        self, known: _Known, storage: Any, info: SavedInfo, tensor: Tensor, start: int, span: int
    ) -> Region:
        where = f" at {info.where}" if info.where else ""
        label = f"'{info.name}' of {info.op}{where}"
        if span >= _THIN * tensor.numel() * tensor.element_size() and 0 not in tensor.stride():
            elements = _raw_view(
                storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
            )
            flat = elements.contiguous().view(-1).view(torch.uint8)
            region = Region(self, tensor, start, flat.numel(), label)
            region.thin = _geometry(tensor)
        else:
            if 2 * span > storage.nbytes():
                start, end = 0, storage.nbytes()
            else:
                start, end = start - start % _ALIGNMENT, start + span
            flat = _bytes_of(storage, start, end - start)
            region = Region(self, tensor, start, end - start, label)
        region.handle = self._store(flat, tensor.dtype, label)
        self._now += region.nbytes
        self.bytes_total += region.nbytes
        self.bytes_peak = max(self.bytes_peak, self._now)
        known.regions = [r for r in known.regions if r() is not None]
        known.regions.append(weakref.ref(region))
        return region

    # -- letting go

    def _release(self, handle: Any) -> None:
        """A region has died: in any thread, at any moment, perhaps inside a pack of this pair."""
        self._gone.append(handle)
        self._drain()

    def _drain(self) -> None:
        # Whoever holds the lock drains after letting go of it, so nothing is left behind.
        while self._gone and self._lock.acquire(blocking=False):
            try:
                while self._gone:
                    handle = self._gone.popleft()
                    self._now -= self._free(handle)
            finally:
                self._lock.release()


@contextmanager
def leaving_modules(pair: Place) -> Iterator[None]:
    """Within: `pair` leaves alone the parameters and buffers of every module that is called, and
    what a model is given as input that needs no gradient (the batch, which its owner holds on to).
    """
    known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those called from outside

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module not in known:
            pair.leave(module)
            for inner in module.modules():
                known.add(inner)
                roots.discard(inner)
            roots.add(module)
        if module in roots:
            for arg in args:
                if isinstance(arg, Tensor) and not _private.native_requires_grad(arg):
                    pair.leave(arg)

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _forget(table: dict[int, _Known], key: int, ref: weakref.ref[Any]) -> None:
    known = table.get(key)
    if known is not None and known.ref is ref:
        del table[key]


def _is_leaf_with_grad(tensor: Tensor) -> bool:
    """A parameter (frozen ones too), or another leaf that needs gradients."""
    return isinstance(tensor, nn.Parameter) or (
        _private.native_requires_grad(tensor) and state(tensor) is None and not tensor._is_view()
    )


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _version_probe(tensor: Tensor) -> Tensor:
    """An empty tensor that shares `tensor`'s version counter and none of its memory."""
    probe = _private.alias(tensor)
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def _bytes_of(storage: Any, start: int, nbytes: int) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (nbytes,), (1,))


def _raw_view(
    storage: Any, dtype: torch.dtype, offset: int, shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """A tensor in `storage`, whatever conjugation or sign another one there goes by."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, shape, stride)


def _spread(packed: Packed, flat: Tensor) -> Tensor:
    """Gathered elements back in their strides. The gaps hold nothing."""
    result = torch.empty_strided(
        packed.shape, packed.stride, dtype=packed.dtype, device=flat.device
    )
    return result.copy_(flat.view(packed.dtype).view(packed.shape))


def _lazily(packed: Packed, tensor: Tensor) -> Tensor:
    """`tensor` conjugated and negated, in name only, as what was packed was."""
    if packed.conj:
        tensor = _private.alias(tensor.conj())
    if packed.neg:
        tensor = _private.alias(_private.neg_view(tensor))
    return tensor
