"""What `stowgrad run` reports: figures of one run, as a table for people and as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Report:
    """Figures of one run. Bytes are bytes, times are seconds.

    `step_seconds`: median time from the start of one backward to that of the next.
    `peak_bytes`: most that tensors held at once, whatever the device; `peak_bytes_by_device`: the
    same for each kind of device; `saved_bytes`: what saved tensors held of `peak_bytes`,
    parameters not counted; `stowed_bytes`: most that was at once in the place of `stow`. None:
    not measured.
    """

    script: str
    autograd: str  # "stowgrad" or "pytorch"
    stow: str | None
    exit_code: int = 0
    backward_calls: int = 0
    backward_seconds: float = 0.0
    step_seconds: float | None = None
    wall_seconds: float = 0.0
    peak_bytes: int | None = None
    peak_bytes_by_device: dict[str, int] = field(default_factory=dict)
    saved_bytes: int | None = None
    stowed_bytes: int = 0
    stowed_tensors: int = 0
    stayed: dict[str, int] = field(default_factory=dict)  # saved tensors left alone, by reason
    blocks: int = 0  # of the model, recomputed
    block_calls: int = 0
    block_calls_skipped: int = 0
    ops_by_rule: dict[str, int] = field(default_factory=dict)
    ops_by_fallback: dict[str, int] = field(default_factory=dict)

    def count_ops(self, ops: dict[Any, int]) -> None:
        """Sort what the recorder counted (overload -> times) by how it was recorded."""
        from ..ops import Kind, entry_of

        for func, count in ops.items():
            kind = entry_of(func).kind
            if kind is Kind.FALLBACK:
                self.ops_by_fallback[str(func)] = count
            elif kind is not Kind.OUT:
                self.ops_by_rule[str(func)] = count

    def write(self, path: Path) -> None:
        """Write the figures as one JSON object. Raises OSError."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def print(self) -> None:
        """Print the table to standard error."""
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        table.add_column()
        for name, text in self._rows():
            table.add_row(name, text)
        console = Console(file=sys.stderr, highlight=False)
        console.rule("stowgrad" if self.autograd == "stowgrad" else "PyTorch's own autograd")
        console.print(table)

    def _rows(self) -> list[tuple[str, str]]:
        wall, backward = _seconds(self.wall_seconds), _seconds(self.backward_seconds)
        steps = f"{self.backward_calls} calls of backward"
        if self.step_seconds is not None:
            steps += f", {1e3 * self.step_seconds:.1f} ms from one to the next"
        rows = [
            ("steps seen", steps),
            ("time", f"{wall}, of it {backward} in backward"),
        ]
        if self.peak_bytes is not None:
            rows.append(("peak live tensors", self._peak()))
        if self.autograd != "stowgrad":
            return rows
        rows.append(("stowed", self._stowed()))
        rows.append(("ops", self._ops()))
        return rows

    def _peak(self) -> str:
        assert self.peak_bytes is not None
        text = _bytes(self.peak_bytes)
        if len(self.peak_bytes_by_device) > 1:
            parts = (f"{k} {_bytes(n)}" for k, n in sorted(self.peak_bytes_by_device.items()))
            text += f" ({', '.join(parts)})"
        if self.saved_bytes is not None:
            text += f", of it {_bytes(self.saved_bytes)} saved for backward"
        return text

    def _stowed(self) -> str:
        if self.stow is None:
            return "nothing"
        if self.stow == "recompute":
            if not self.blocks:
                return "nothing: no repeated blocks (ModuleList, Sequential) found in the model"
            text = f"{self.blocks} blocks of the model recomputed, in {self.block_calls} calls"
            if self.block_calls_skipped:
                text += (
                    f"; {self.block_calls_skipped} calls kept, being given an object that cannot "
                    "be copied for a second run"
                )
            return text
        here = self.stayed.get("in host memory already", 0)
        if here and not self.stowed_tensors:
            return f"nothing: all {here} saved tensors were in host memory already"
        stayed = ", ".join(f"{n} {why}" for why, n in sorted(self.stayed.items()))
        text = f"{self.stowed_tensors} saved tensors to {self.stow}, "
        text += f"at most {_bytes(self.stowed_bytes)} at once"
        return f"{text}; left alone: {stayed}" if stayed else text

    def _ops(self) -> str:
        rule, fallback = sum(self.ops_by_rule.values()), sum(self.ops_by_fallback.values())
        text = f"{rule} recorded by rule, {fallback} by fallback"
        if fallback:
            most = Counter(self.ops_by_fallback).most_common(5)
            text += " (" + ", ".join(f"{name} {n}" for name, n in most)
            text += ", ...)" if len(self.ops_by_fallback) > len(most) else ")"
        return text


def _bytes(n: int) -> str:
    """`12.3 MiB`."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{n} B" if unit == "B" else f"{value:.1f} {unit}"


def _seconds(t: float) -> str:
    return f"{t:.2f} s" if t < 60 else f"{int(t // 60)} min {t % 60:.0f} s"
