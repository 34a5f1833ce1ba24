"""The programs of past backwards, found again by what they depend on; hits, misses, reasons."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Any

from ..graph import locate
from .program import Program

Key = tuple[Any, ...]


class ProgramCache:
    """Programs by the op they start from and the kind of backward; thread safe.

    `hits`, `misses`: backwards that found their program, and those for which one was captured.
    `fallbacks`: backwards run node by node, with the reasons. At most `size` programs are kept (the
    least recently used go), and `variants` of one backward.
    """

    def __init__(self, size: int = 256, variants: int = 16) -> None:
        self.size = size
        self.variants = variants
        self.lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Forget every program and every count."""
        with self.lock:
            self._programs: OrderedDict[Key, tuple[Program, ...]] = OrderedDict()
            self.hits = 0
            self.misses = 0
            self.reasons: Counter[str] = Counter()
            self.fallbacks: Counter[str] = Counter()
            self.refused: dict[Key, tuple[str, int]] = {}

    def __len__(self) -> int:
        return sum(len(p) for p in self._programs.values())

    @property
    def programs(self) -> list[Program]:
        return [p for found in tuple(self._programs.values()) for p in found]

    def get(self, key: Key) -> tuple[Program, ...]:
        return self._programs.get(key, ())

    def hit(self, key: Key, program: Program) -> None:
        with self.lock:
            self.hits += 1
            found = self._programs.get(key, ())
            if found and found[0] is not program and program in found:
                # the next backward of this kind is likely the same
                self._programs[key] = (program, *(p for p in found if p is not program))
            if key in self._programs:
                self._programs.move_to_end(key)

    def add(self, key: Key, program: Program, reason: str) -> None:
        with self.lock:
            self.misses += 1
            self.reasons[reason] += 1
            self._programs[key] = (program, *self._programs.get(key, ()))
            self._programs.move_to_end(key)
            while len(self) > self.size and len(self._programs) > 1:
                self._programs.popitem(last=False)

    def remove(self, key: Key, program: Program) -> None:
        """Drop a program."""
        with self.lock:
            self._programs[key] = tuple(p for p in self.get(key) if p is not program)

    def fall_back(self, reason: str) -> None:
        with self.lock:
            self.fallbacks[reason] += 1

    def refuse(self, key: Key, reason: str) -> None:
        """A backward of this kind could not be captured."""
        with self.lock:
            _, count = self.refused.get(key, ("", 0))
            self.refused[key] = reason, count + 1
            if len(self.refused) > 4 * self.size:
                self.refused.pop(next(iter(self.refused)))

    def report(self) -> str:
        """Hits, misses and fallbacks with their reasons, and the programs there are, as text."""
        with self.lock:
            lines = [
                f"backward programs: {len(self)} kept, {self.hits} hits, {self.misses} misses, "
                f"{sum(self.fallbacks.values())} backwards run node by node"
            ]
            for title, counts in (("missed", self.reasons), ("node by node", self.fallbacks)):
                for reason, count in counts.most_common():
                    lines.append(f"  {title} {count} x: {reason}")
            for program in self.programs:
                steps = sum(n.op == "call_function" for n in program.graph.nodes)
                sizes = ", ".join(f"{k}={v}" for k, v in program.symbols.items())
                lines.append(f"  {program.name}: {steps} steps, {program.runs} runs ({sizes})")
                lines += [f"    not traced: {note}" for note in program.notes]
            return "\n".join(lines)

    __repr__ = report


program_cache = ProgramCache()


def describe_root(node: Any) -> str:
    return f"{node.name()} {locate(node.where)}".rstrip()
