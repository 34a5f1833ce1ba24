"""Which saved tensors share memory, noted at capture.

The steps of a program say what shares memory with what among the values that the program makes.
They cannot say it of its inputs: one tensor may be saved by several nodes, as itself or as views,
and may be a parameter. So that is written down while the graph is there to be looked at. Only
numbers are kept, so nothing is held alive. It is a note for predictions: no program is refused
because another graph shares its memory in another way.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _private
from ..graph import AccumulateNode, Node
from ..saved import SavedTensor

if TYPE_CHECKING:
    from .capture import Spec

Slot = tuple[int, ...]  # where a saved entry is in the node's `saved`
Place = tuple[int, Slot]  # the index of a node's spec, and a slot

_MOST = 300  # objects of a packed value that are looked at
_RECOMPUTING = ("stowgrad.memory.checkpoint", "torch.utils.checkpoint")


@dataclass
class Storages:
    """The storages that a graph holds, as numbers in the order in which they were met."""

    nbytes: list[int] = field(default_factory=list)
    leaves: set[int] = field(default_factory=set)  # storages of leaves: they outlive the backward
    variables: dict[int, int] = field(default_factory=dict)  # spec of a leaf -> its storage
    # specs of the leaves whose `.grad` was there, and of those whose elements lie in order
    with_grad: set[int] = field(default_factory=set)
    in_order: set[int] = field(default_factory=set)
    saved: dict[Place, int] = field(default_factory=dict)  # raw and plain entries
    # Packed entries: what the packed value holds in memory, the storage that the tensor had when it
    # was packed, its bytes (a guess where it was a view), and the checkpointed region it is from.
    held: dict[Place, tuple[int, ...]] = field(default_factory=dict)
    origins: dict[Place, int] = field(default_factory=dict)
    region: dict[Place, int] = field(default_factory=dict)
    whole: set[Place] = field(default_factory=set)  # views packed with all of their storage
    opaque: dict[int, tuple[int, ...]] = field(default_factory=dict)  # what such a node holds
    _numbers: dict[int, int] = field(default_factory=dict)

    def number(self, tensor: Tensor) -> int:
        return self._number(_private.storage_key(tensor), tensor.untyped_storage().nbytes())

    def _number(self, key: int, nbytes: int) -> int:
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.nbytes)
            self.nbytes.append(nbytes)
        return found


def note(order: Sequence[Node], specs: Sequence[Spec]) -> Storages:
    """The storages of the graph whose nodes are `order`."""
    made = Storages()
    regions: dict[int, tuple[int, ...]] = {}  # a pair of hooks -> what its region holds
    for node, spec in zip(order, specs, strict=True):
        if type(node) is AccumulateNode:
            variable = node.variable
            if _private.has_plain_storage(variable):
                made.variables[spec.index] = number = made.number(variable)
                made.leaves.add(number)
                if variable.is_contiguous():
                    made.in_order.add(spec.index)
            if variable.grad is not None:
                made.with_grad.add(spec.index)
        elif spec.kind == "rule":
            for slot, saved in _flat(getattr(node, "saved", None) or ()):
                _note(made, (spec.index, slot), saved, regions)
        else:
            held = made.opaque[spec.index] = _numbers(made, [getattr(node, "saved", None)])
            if not held:
                del made.opaque[spec.index]
    made._numbers.clear()  # identities mean nothing once the graph is gone
    return made


def _flat(saved: Iterable[Any], before: Slot = ()) -> Iterator[tuple[Slot, Any]]:
    for i, entry in enumerate(saved):
        if isinstance(entry, list):
            yield from _flat(entry, (*before, i))
        else:
            yield (*before, i), entry


def _note(made: Storages, place: Place, saved: Any, regions: dict[int, tuple[int, ...]]) -> None:
    packed = None
    if isinstance(saved, SavedTensor):
        packed, saved = saved._packed, saved._data
    if isinstance(saved, Tensor):
        if _private.has_plain_storage(saved):
            made.saved[place] = number = made.number(saved)
            if isinstance(saved, torch.nn.Parameter):
                made.leaves.add(number)
        return
    if packed is None:
        return
    info = packed.info
    if packed.storage is not None:
        shape = max(info.shape, info.view_of or (), key=math.prod)
        nbytes = math.prod(shape) * info.dtype.itemsize
        made.origins[place] = made._number(packed.storage.key, nbytes)
        if info.view_of is not None and _file_bytes(packed.value) >= nbytes:
            made.whole.add(place)  # so torch.save does, and so torch.load gives it back
    unpack = packed.pair.unpack
    if getattr(unpack, "__module__", "") in _RECOMPUTING:
        key = id(packed.pair)
        if key not in regions:
            regions[key] = _numbers(made, [unpack])
        made.region[place] = key
        made.held[place] = regions[key]
    elif not getattr(type(packed.value), "holds_no_alias", False):
        made.held[place] = _numbers(made, [packed.value])


def _file_bytes(packed: Any) -> int:
    """How long the file is that a packed value names; -1 if it names none."""
    if not isinstance(packed, (str, PurePath)):
        return -1
    try:
        return os.stat(packed).st_size
    except (OSError, ValueError):
        return -1


def _numbers(made: Storages, todo: list[Any]) -> tuple[int, ...]:
    """The storages of the tensors that some objects hold, as far as that can be seen."""
    found: dict[int, None] = {}
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        item = todo.pop()
        if isinstance(item, _SIMPLE) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if _private.has_plain_storage(item):
                found[made.number(item)] = None
        elif isinstance(item, SavedTensor):
            todo += [item._data, item._packed and item._packed.value]
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, MethodType):
            todo.append(item.__self__)
        elif isinstance(item, FunctionType):
            todo.extend(item.__closure__ or ())
        elif isinstance(item, CellType):
            try:
                todo.append(item.cell_contents)
            except ValueError:  # empty
                continue
        elif isinstance(item, functools.partial):
            todo += [item.func, item.args, item.keywords]
        elif not isinstance(item, torch.nn.Module):  # what a module holds stays anyway
            todo.extend(getattr(item, "__dict__", {}).values())
            slots = [getattr(c, "__slots__", ()) for c in type(item).__mro__]
            names = [n for s in slots for n in ((s,) if isinstance(s, str) else s)]
            todo.extend(getattr(item, n, None) for n in names if not n.startswith("__"))
    return tuple(found)


_SIMPLE = (type(None), bool, int, float, str, bytes, PurePath, torch.dtype, torch.device, type)
