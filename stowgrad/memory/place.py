"""The base of policies that put saved tensors somewhere else: what goes, and what stays.

What stays where it is: parameters, other leaves that need gradients and everything in their
storage; modules and tensors given as `leave`; tensors of fewer than `smallest` bytes; subclasses
of Tensor, tensors of a functional transform, and layouts other than strided; and what was seen to
be kept alive by somebody else anyway (see `Place`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _private
from ..saved import SavedInfo, is_parameter
from .policy import Choice, Policy
from .regions import Geometry, Packed, Region, range_of, storages

SMALLEST = 4096  # bytes; below it, bookkeeping costs more than the memory is worth
_SEEN_ALIVE = 3  # times that a site's memory was not freed by packing, before it is left alone


class NoRoom(Exception):
    """The new place does not take this tensor: it stays where it is. The argument says why."""


class Place(Policy):
    """A policy that keeps saved tensors elsewhere, as bytes; see the module's docstring.

    Subclasses say how bytes get there and back: `_store`, `_load`, `_free`. `smallest`: tensors
    of fewer bytes stay where they are. `leave`: modules, whose parameters and buffers stay, and
    tensors, whose storages stay. Safe to use from many threads.

    Packing frees nothing where somebody else keeps the memory alive. That cannot be known when a
    tensor is packed; it is known when it comes back, since the original is still there then. An
    op's argument on a line of code of a module, of which that was so `_SEEN_ALIVE` times and never
    otherwise, stays from then on. `bytes_in_vain` counts what was packed for nothing.

    `packs`: tensors packed; `stayed`: how many stayed, by reason; `bytes_now`, `bytes_peak` and
    `bytes_total`: bytes that are, at most were at once, and ever were in the new place.
    """

    place = "elsewhere"
    lossless = True  # what comes back is what went, to the bit

    def __init__(
        self, *, smallest: int = SMALLEST, leave: Iterable[nn.Module | Tensor] = ()
    ) -> None:
        self.smallest = smallest
        self.packs = 0
        self.stayed: Counter[str] = Counter()
        self.bytes_peak = 0
        self.bytes_total = 0
        self.bytes_in_vain = 0
        self.left = Left(leave)
        self._now = 0
        self._lock = threading.Lock()
        self._gone: deque[Any] = deque()  # handles whose region has died
        self._sites: dict[Any, int] = {}  # how often packing freed nothing; -1: it once did

    @property
    def bytes_now(self) -> int:
        """Bytes in the new place right now."""
        self._drain()
        return self._now

    def leave(self, item: nn.Module | Tensor) -> None:
        """From here on, keep a tensor's storage, or a module's parameters and buffers, in place."""
        self.left.add(item)

    # -- as a policy, and as a pair

    def choose(self, info: SavedInfo, tensor: Tensor) -> Choice | None:
        reason = self._stays(tensor) or self._seen_alive(info)
        if reason is None:
            return self
        self.stayed[reason] += 1
        return None

    def pack(self, info: SavedInfo, tensor: Tensor) -> Any:
        """Put `tensor` away and return what brings it back; or `tensor` itself, if it stays."""
        if self.choose(info, tensor) is None:
            return tensor
        try:
            return self.take(info, tensor)
        except NoRoom:
            return tensor

    pack.wants_info = True  # type: ignore[attr-defined]

    def take(self, info: SavedInfo, tensor: Tensor) -> Packed:
        """Put away a tensor for which this was the choice. Raises NoRoom."""
        known = storages.of(tensor)
        geometry = Geometry.of(tensor)
        with known.lock:
            region = known.find(geometry, tensor._version, self)
            if region is None:
                try:
                    region = self._new_region(known, info, tensor, geometry)
                except NoRoom as reason:
                    self.stayed[str(reason) or "no room"] += 1
                    raise
                known.add(region)
            self.packs += 1
            return self._packed(region, geometry)

    def _packed(self, region: Region, geometry: Geometry) -> Packed:
        return Packed(region, geometry)

    def _new_region(
        self, known: Any, info: SavedInfo, tensor: Tensor, geometry: Geometry
    ) -> Region:
        where = f" at {info.where}" if info.where else ""
        label = f"'{info.name}' of {info.op}{where}"
        start, flat, thin = range_of(tensor, geometry)
        region = Region(self, known, tensor, start, flat.numel(), label)
        region.thin = thin
        region.site = _site(info)
        region.handle = self.put(flat, tensor.dtype, label)
        return region

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, with the dtype, device, shape and strides it had.

        Raises StowError if its bytes cannot be brought back as they were.
        """
        result: Tensor = packed.tensor() if isinstance(packed, Packed) else packed
        return result

    def prefetch(self, packed: Any) -> None:
        """Start to fetch what `unpack` will be asked for soon, where that helps."""
        if isinstance(packed, Packed):
            packed.region.prefetch()

    # -- bytes, for a region or for another place

    def put(self, flat: Tensor, dtype: torch.dtype, label: str) -> Any:
        """Put bytes away; the arguments and what is raised are `_store`'s. Returns a handle, whose
        `nbytes` says how many bytes are in the place now."""
        try:
            with self._lock:
                handle = self._store(flat, dtype, label)
                self._now += handle.nbytes
                self.bytes_total += handle.nbytes
                self.bytes_peak = max(self.bytes_peak, self._now)
        finally:
            self._drain()
        return handle

    def get(self, handle: Any, nbytes: int, device: torch.device, label: str) -> Tensor:
        """The bytes of a handle again, in a tensor of uint8 on `device`."""
        return self._load(handle, nbytes, device, label)

    def drop(self, handle: Any) -> None:
        """Nobody needs these bytes any more. From any thread, at any moment, perhaps inside a
        `_store` of this very place."""
        self._gone.append(handle)
        self._drain()

    def load(self, region: Region) -> Tensor:
        """The bytes of a region again."""
        self._learn(region)
        return self.get(region.handle, region.nbytes, region.device, region.label)

    def _drain(self) -> None:
        # Whoever holds the lock drains after letting go of it, so nothing is left behind.
        while self._gone and self._lock.acquire(blocking=False):
            try:
                while self._gone:
                    self._now -= self._free(self._gone.popleft())
            finally:
                self._lock.release()

    # -- what subclasses say

    def _store(self, flat: Tensor, dtype: torch.dtype, label: str) -> Any:
        """Put the bytes of `flat` (uint8, one dimension) away; return a handle, with its `nbytes`.

        They are elements of `dtype`, beginning with a whole one. One call at a time. `flat` lives
        in the saved tensor's memory, which is freed, or changed in place, as soon as this returns:
        what still needs it then keeps a copy. Raises NoRoom(reason) for what it does not take.
        """
        raise NotImplementedError

    def _load(self, handle: Any, nbytes: int, device: torch.device, label: str) -> Tensor:
        """The bytes again, in a new tensor of uint8 on `device`. Any number of calls at a time."""
        raise NotImplementedError

    def _free(self, handle: Any) -> int:
        """Nobody needs these bytes any more; return the handle's `nbytes`.

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
        if tensor in self.left or is_parameter(tensor):
            self.left.add(tensor)
            return "in use"
        if tensor.numel() * tensor.element_size() < max(self.smallest, 1):
            return "small"
        return None

    def _seen_alive(self, info: SavedInfo) -> str | None:
        return "alive anyway" if self._sites.get(_site(info), 0) >= _SEEN_ALIVE else None

    def _learn(self, region: Region) -> None:
        """A region comes back: was its memory freed meanwhile?"""
        if region.known.alive():
            self.bytes_in_vain += region.nbytes
            count = self._sites.get(region.site, 0)
            if count >= 0:
                self._sites[region.site] = count + 1
        elif self._sites.get(region.site) != -1:
            self._sites[region.site] = -1


def _site(info: SavedInfo) -> Any:
    return info.op, info.name, info.where, info.module


class Left:
    """Storages that stay where they are."""

    def __init__(self, items: Iterable[nn.Module | Tensor] = ()) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}
        for item in items:
            self.add(item)

    def add(self, item: nn.Module | Tensor) -> None:
        """A tensor's storage, or those of a module's parameters and buffers."""
        tensors = (
            [item] if isinstance(item, Tensor) else [*item.parameters(), *item.buffers()]
        )
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            self._refs[storage._cdata] = weakref.ref(storage)

    def __contains__(self, tensor: Tensor) -> bool:
        if not self._refs:
            return False
        storage = tensor.untyped_storage()
        ref = self._refs.get(storage._cdata)
        if ref is None:
            return False
        if ref() is storage:
            return True
        self._refs.pop(storage._cdata, None)  # it is gone; this one came to its address
        return False
