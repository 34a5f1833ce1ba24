"""Module buffers that a call changes, so that a second run can begin where the first one did.

Batch norm moves its running statistics, spectral norm its vectors. Version counters do not tell:
batch norm's kernel writes past them. So the first call of a module compares all its buffers with
copies of them; later ones copy only those that changed then. Cost: that comparison, and a copy of
the changing buffers for each run that may be repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_known: weakref.WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = weakref.WeakKeyDictionary()


class Buffers:
    """The buffers of one module as they were before a call."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        changing = _known.get(module, {}).get(module.training)
        self._first = changing is None
        with torch.no_grad():
            self.before: dict[str, Tensor] = {
                name: buffer.clone()
                for name, buffer in (module.named_buffers() if changing != set() else ())
                if changing is None or name in changing
            }

    def learn(self) -> None:
        """After the call: keep only what it changed, and remember that for the next one."""
        if not self._first:
            return
        now = dict(self.module.named_buffers())
        for name in list(self.before):
            if name in now and torch.equal(self.before[name], now[name]):
                del self.before[name]
        _known.setdefault(self.module, {})[self.module.training] = set(self.before)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within: the module has copies of its buffers as they were, in place of its own."""
        kept: list[tuple[nn.Module, str, Tensor | None]] = []
        for path, value in self.before.items():
            owner, _, name = path.rpartition(".")
            holder = self.module.get_submodule(owner)
            kept.append((holder, name, holder._buffers[name]))
            with torch.no_grad():
                holder._buffers[name] = value.clone()
        try:
            yield
        finally:
            for holder, name, mine in kept:
                holder._buffers[name] = mine
