"""What nodes that cannot be traced give: a custom function may return None, or a sparse gradient.

Nothing is known of that before it has run once, so a first program runs everything below such a
node as it is, too. What it gave then is noted here; the program is captured again, and this time
takes for granted that a dense gradient comes where one has come each time. Should none come after
all, zeros stand in for it (the same gradient, though a leaf's `.grad` may be zeros in place of
None), with a warning, and it is not relied on again.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Node, locate

Needs = tuple[bool, ...] | None
_given: weakref.WeakKeyDictionary[type, dict[tuple[str, Needs], list[bool]]]
_given = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def gives(cls: type, name: str, needs: Sequence[bool] | None) -> list[bool] | None:
    """For each input of such a node whether a dense gradient for it has come each time; None where
    none has run."""
    key = (name, None if needs is None else tuple(needs))
    return _given.get(cls, {}).get(key)


def note(node: Node, needs: Sequence[bool] | None, results: Sequence[Tensor | None]) -> None:
    """`node` has given `results`."""
    key = (node.name(), None if needs is None else tuple(needs))
    found = [g is not None and g.layout is torch.strided for g in results]
    known = _given.get(type(node), {}).get(key)
    if known == found:
        return
    with _lock:
        if known is not None and len(known) == len(found):
            found = [a and b for a, b in zip(known, found, strict=True)]
        _given.setdefault(type(node), {})[key] = found


def filled(node: Node, results: list[Any], assumed: Sequence[bool], like: Tensor | None) -> bool:
    """Put zeros where a gradient was taken for granted and none has come; whether that was so."""
    surprised = False
    for i, sure in enumerate(assumed):
        edge = node.edges[i]
        if not sure or edge is None:
            continue
        if results[i] is None:
            surprised = True
            device = None if like is None else like.device
            results[i] = torch.zeros(edge.shape, dtype=edge.dtype, device=device)
            warnings.warn(
                f"{node.name()} (recorded at {locate(node.where)}) gave no gradient for input {i}, "
                "as it did before: its backward program went on with zeros",
                stacklevel=2,
            )
        elif results[i].layout is not torch.strided:
            surprised = True
            results[i] = results[i].to_dense()
    return surprised
