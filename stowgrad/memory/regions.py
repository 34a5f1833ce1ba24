"""Which bytes of which storage are packed, and where: one storage is packed once.

A tensor goes as the bytes it lives in. The first saved tensor of a storage puts a Region (a range
of the storage's bytes, at one version) in its new place; the others, whatever views they are and
whichever policy they meet, refer to it by a Packed of their own, with dtype, shape, strides and
offset. Which range: the whole storage, if the tensor spans more than half of it; else the tensor's
span; or, if its elements are spread thin over their span, the elements alone.

A storage is known by its live object and never by its address, which the next tensor may have. A
region lives as long as something packed refers to it. Loaded bytes are shared too, while they are
alive and unchanged, so aliases come back as aliases.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _private

if TYPE_CHECKING:
    from .place import Place

_THIN = 8  # elements spread over more than this many times their bytes are gathered
_ALIGNMENT = 16  # bytes; the size of the largest dtype


class Geometry(NamedTuple):
    """Where the elements of a tensor lie in its storage. `offset` and `stride` in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(
            tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()),
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip

    def span(self) -> tuple[int, int]:
        """The first byte, and the one after the last."""
        item = self.dtype.itemsize
        if 0 in self.shape:
            return self.offset * item, self.offset * item
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset * item, (self.offset + last + 1) * item


class Region:
    """Bytes `start` to `start + nbytes` of one storage, as they were at one version."""

    __slots__ = (
        "__weakref__", "_loaded", "_loaded_probe", "device", "handle", "known", "label", "nbytes",
        "owner", "packs", "probe", "site", "start", "thin", "version",
    )  # fmt: skip

    def __init__(
        self, owner: Place, known: Storage, tensor: Tensor, start: int, nbytes: int, label: str
    ) -> None:
        self.owner = owner
        self.known = known
        self.start = start
        self.nbytes = nbytes
        self.label = label
        self.site: Any = None
        self.device = tensor.device
        self.version = tensor._version
        self.probe = _private.version_probe(tensor)
        self.thin: Geometry | None = None  # of gathered elements
        self.handle: Any = None
        self.packs = 0  # how many Packed refer to it
        self._loaded: weakref.ref[Any] | None = None
        self._loaded_probe: Tensor | None = None

    def holds(self, geometry: Geometry, version: int) -> bool:
        """Whether this has what a tensor of that storage has, which is at `version` now."""
        if not version == self.version == self.probe._version:
            return False
        if self.thin is not None:
            return self.thin == geometry
        start, end = geometry.span()
        return self.start <= start and end <= self.start + self.nbytes

    def unchanged(self) -> bool:
        """Whether nothing has changed the tensor that was packed since then."""
        return self.version == self.probe._version

    def load(self) -> Tensor:
        """The bytes as a tensor of uint8 on their device; shared while an earlier one lives."""
        storage = self._loaded() if self._loaded is not None else None
        probe = self._loaded_probe
        if storage is not None and probe is not None and probe._version == 0:
            flat = _private.alias(probe)
            flat.data = bytes_of(storage, 0, storage.nbytes())
            return flat
        flat = self.owner.load(self)
        self._loaded = weakref.ref(flat.untyped_storage())
        self._loaded_probe = _private.version_probe(flat)
        return flat

    def prefetch(self) -> None:
        if self._loaded is None or self._loaded() is None:
            self.owner._prefetch(self.handle)

    def __del__(self) -> None:
        if self.handle is not None:
            self.owner.drop(self.handle)


class Packed:
    """One saved tensor in its new place."""

    __slots__ = ("__weakref__", "geometry", "region")

    holds_no_alias = True

    def __init__(self, region: Region, geometry: Geometry) -> None:
        self.region = region
        self.geometry = geometry
        region.packs += 1

    def __del__(self) -> None:
        self.region.packs -= 1

    def tensor(self) -> Tensor:
        """The tensor, with the dtype, device, shape and strides it had.

        Raises StowError if its bytes cannot be brought back as they were.
        """
        region, g = self.region, self.geometry
        flat = region.load()
        if region.thin is not None:
            # The gaps between gathered elements hold nothing.
            result = torch.empty_strided(g.shape, g.stride, dtype=g.dtype, device=flat.device)
            return _lazily(g, result.copy_(flat.view(g.dtype).view(g.shape)))
        # Under the loaded bytes' own version counter, so that a change made through one alias is
        # noticed by the next unpack; and not a view, so that no base comes along.
        result = _private.alias(flat)
        offset = g.offset - region.start // g.dtype.itemsize
        result.data = raw_view(flat.untyped_storage(), g.dtype, offset, g.shape, g.stride)
        return _lazily(g, result)

    def __repr__(self) -> str:
        g = self.geometry
        return f"<{g.dtype} {list(g.shape)} in {self.region.handle}>"


class AliasPacked(Packed):
    """One whose region is the tensor's own memory: it stays where it is."""

    __slots__ = ()

    holds_no_alias = False
    holds_alias = True  # see saved._keeps_alias


class Storage:
    """A storage that is or was, and the regions of it that are packed."""

    __slots__ = ("lock", "notes", "ref", "regions")

    def __init__(self, ref: weakref.ref[Any]) -> None:
        self.ref = ref
        self.regions: list[weakref.ref[Region]] = []
        self.notes: dict[int, Any] = {}  # by version: how its contents were computed
        # Reentrant, since the garbage collector may run anything anywhere.
        self.lock = threading.RLock()

    def alive(self) -> bool:
        return self.ref() is not None

    def find(self, geometry: Geometry, version: int, place: Place | None = None) -> Region | None:
        """The region that holds such a tensor; of the lossless ones, or of `place`'s."""
        for ref in tuple(self.regions):
            region = ref()
            if region is None or not region.holds(geometry, version):
                continue
            if region.owner.lossless or region.owner is place:
                return region
        return None

    def add(self, region: Region) -> None:
        self.regions = [r for r in self.regions if r() is not None]
        self.regions.append(weakref.ref(region))


class _Table:
    """The storages something is known of."""

    def __init__(self) -> None:
        self._known: dict[int, Storage] = {}
        self._lock = threading.RLock()

    def of(self, tensor: Tensor) -> Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None or known.ref() is not storage:
            with self._lock:
                known = self._known.get(key)
                if known is None or known.ref() is not storage:
                    # The callback may come late, when the address has a new storage: it looks.
                    known = Storage(weakref.ref(storage, lambda ref: self._forget(key, ref)))
                    self._known[key] = known
        return known

    def get(self, tensor: Tensor) -> Storage | None:
        """As `of`, if anything is known of it."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        return known if known is not None and known.ref() is storage else None

    def _forget(self, key: int, ref: weakref.ref[Any]) -> None:
        known = self._known.get(key)
        if known is not None and known.ref is ref:
            self._known.pop(key, None)


storages = _Table()


def range_of(tensor: Tensor, geometry: Geometry) -> tuple[int, Tensor, Geometry | None]:
    """What of its storage goes when `tensor` does: the first byte, the bytes as a tensor of uint8,
    and the geometry if they are gathered elements rather than a range."""
    storage = tensor.untyped_storage()
    start, end = geometry.span()
    span = end - start
    spread = span >= _THIN * tensor.numel() * tensor.element_size()
    if spread and 0 not in geometry.stride:
        elements = raw_view(
            storage, geometry.dtype, geometry.offset, geometry.shape, geometry.stride
        )
        return start, elements.contiguous().view(-1).view(torch.uint8), geometry
    if 2 * span > storage.nbytes():
        return 0, bytes_of(storage, 0, storage.nbytes()), None
    start -= start % _ALIGNMENT
    return start, bytes_of(storage, start, end - start), None


def bytes_of(storage: Any, start: int, nbytes: int) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (nbytes,), (1,))


def raw_view(
    storage: Any, dtype: torch.dtype, offset: int, shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """A tensor in `storage`, whatever conjugation or sign another one there goes by."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, shape, stride)


def _lazily(geometry: Geometry, tensor: Tensor) -> Tensor:
    """`tensor` conjugated and negated, in name only, as what was packed was."""
    if geometry.conj:
        tensor = _private.alias(tensor.conj())
    if geometry.neg:
        tensor = _private.alias(_private.neg_view(tensor))
    return tensor
