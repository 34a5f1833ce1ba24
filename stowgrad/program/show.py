"""A program for people: as text, one line a step, and as a picture of its live bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor

from .. import _private
from ..errors import StowgradError
from . import steps
from .capture import Captured, Entry, Spec, compute, item
from .memory import (
    ACCUMULATED,
    GRADIENTS,
    LEAVES,
    SAVED,
    UNPACKED,
    Timeline,
    last_uses,
    timeline,
    variable,
)

_WIDTH = 76  # columns of a step's code before its result is shown beside it


def text(captured: Captured) -> str:
    """The inputs, the steps and what each frees, as lines of text.

    A step reads `%7 = aten.mul(%3, n5.self)`, then what it gives (dtype and shape), then the op of
    the forward it belongs to with its line. `n5.self` is what node n5 of the graph saved as its
    argument `self`; `free` names the values that are gone after the step.
    """
    return _Text(captured).text()


class _Text:
    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.graph = captured.graph
        self.names: dict[torch.fx.Node, str] = {}
        self.steps: list[torch.fx.Node] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.names[node] = self._input_name(node.meta["input"])
            elif node.op == "call_function":
                self._name_step(node)

    def text(self) -> str:
        return "\n".join([*self._head(), "", *self._inputs(), "", *self._steps()]) + "\n"

    def _input_name(self, what: tuple[Any, ...]) -> str:
        match what:
            case ("grad", i):
                return "grad" if len(self.captured.roots) == 1 else f"grad_{i}"
            case ("raw" | "saved", number, slot):
                spec = self.captured.specs[number]
                return f"n{number}.{_entry(spec, slot).name}"
            case ("versions", number):
                return f"n{number}.versions"
            case ("node", number):
                return f"n{number}"
            case _:
                return str(what[1])

    def _name_step(self, node: torch.fx.Node) -> None:
        target, args = node.target, node.args
        if target is steps.check:
            self.names[node] = self.names[variable(node)]
        elif target is item and isinstance(args[0], torch.fx.Node):
            self.names[node] = f"{self.names[args[0]]}.{args[1]}"
            return  # no line of its own
        elif target is compute:
            code = str(args[0])
            self.names[node] = code if code.isidentifier() or code[:1] == "(" else f"({code})"
            return
        elif target not in _NO_VALUE:
            self.names[node] = f"%{len(self.steps)}"
        self.steps.append(node)

    # -- the head

    def _head(self) -> list[str]:
        captured = self.captured
        first = captured.specs[captured.roots[0][0]]
        plural = "" if len(self.steps) == 1 else "s"
        lines = [f"backward of {_origin(first)}: {len(self.steps)} step{plural}"]
        if captured.create_graph:
            lines.append("its own run is recorded (create_graph)")
        if captured.symbols:
            sizes = ", ".join(f"{k} = {v}" for k, v in captured.symbols.items())
            lines += _wrap("sizes:  ", sizes)
        for i, guard in enumerate(captured.guards):
            lines.append(("where:  " if i == 0 else "        ") + guard)
        for note in captured.notes:
            lines.append(f"not traced: {_short(note)}")
        return lines

    def _inputs(self) -> list[str]:
        captured = self.captured
        rows: list[tuple[str, str, str]] = []
        places: dict[int, str] = {}  # storage -> the input met first that lies there
        for number in captured.storages.variables.items():
            places.setdefault(number[1], f"leaf n{number[0]}")
        for node in self.graph.nodes:
            if node.op != "placeholder":
                continue
            what, name = node.meta["input"], self.names[node]
            match what:
                case ("grad", i):
                    number, output, _ = captured.roots[i]
                    of = f"output {output} of " if captured.specs[number].outputs > 1 else ""
                    rows.append(
                        (
                            name,
                            self._looks(node.meta["val"]),
                            f"gradient of {of}{_origin(captured.specs[number])}",
                        )
                    )
                case ("raw" | "saved", number, slot):
                    spec = captured.specs[number]
                    entry = _entry(spec, slot)
                    how = "packed by a hook," if entry.kind == "packed" else ""
                    note = " ".join(filter(None, [how, f"saved by {_origin(spec)}"]))
                    storage = captured.storages.saved.get((number, slot))
                    if storage is not None:
                        same = places.setdefault(storage, name)
                        if same != name:
                            note += f"  = memory of {same}"
                    rows.append((name, _look(entry), note))
                case ("constant", _):
                    rows.append((name, self._looks(node.meta["val"]), "a constant"))
                case ("node", number) if captured.specs[number].kind == "leaf":
                    spec = captured.specs[number]
                    assert spec.look is not None
                    hooks = f", hooks: {_hooks(spec)}" if spec.hooks else ""
                    rows.append((name, _shape(spec.look), f"leaf{hooks}"))
                case ("node", number) if captured.specs[number].hooks:
                    spec = captured.specs[number]
                    rows.append((name, "", f"{_origin(spec)}, hooks: {_hooks(spec)}"))
                case ("node", number) if captured.specs[number].kind == "opaque":
                    spec = captured.specs[number]
                    rows.append((name, "", f"{_origin(spec)}, run as it is"))
        if not rows:
            return ["inputs: none"]
        widths = [max(len(r[i]) for r in rows) for i in (0, 1)]
        lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        return ["inputs:", *lines]

    # -- the steps

    def _steps(self) -> list[str]:
        frees: dict[torch.fx.Node, list[str]] = {}
        lines_of = set(self.steps)
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        shown: dict[torch.fx.Node, torch.fx.Node] = {}  # a step -> the line that it is in
        line: torch.fx.Node | None = None
        for node in self.graph.nodes:
            if node in lines_of:
                line = node
            if line is not None:
                shown[node] = line
        ends: dict[str, torch.fx.Node] = {}
        for node, last in last_uses(self.graph).items():
            if last.op == "output" or last not in shown or node.meta.get("val") is None:
                continue
            if node.op == "placeholder" and node.meta["input"][0] not in ("raw", "grad"):
                continue
            if node.target is compute or node.target in _NO_VALUE:
                continue
            name = self.names[node]
            if name not in ends or order[ends[name]] < order[last]:
                ends[name] = last
        made = {self.names[n]: n for n in self.steps if n in self.names}
        for name, last in ends.items():
            at = shown[last]
            if made.get(name) is at and not name.startswith("n"):  # nobody takes it
                if last is at:
                    continue
                if any(o.startswith(f"{name}.") for o in ends):
                    continue  # its parts are named one by one
            frees.setdefault(at, []).append(name)

        rows = []
        for node in self.steps:
            code, looks = self._step(node)
            rows.append((node, code, looks, sorted(frees.get(node, []), key=_natural)))
        width = _column(_WIDTH, (code for _, code, _, _ in rows))
        beside = _column(30, (looks for _, _, looks, _ in rows))
        gone = _column(24, (_free(freed) for *_, freed in rows))
        found = ["steps:"]
        before: Any = None
        for node, code, looks, freed in rows:
            free = _free(freed)
            row = f"  {code:<{width}}  {looks:<{beside}}  {free:<{gone}}"
            spec: Spec | None = node.meta.get("spec")
            origin = _by_no_node(node) if spec is None else _origin(spec)
            if (spec, origin) != before and (spec is None or spec.kind != "leaf"):
                row += f"  # {origin}"
            before = spec, origin
            found.append(row.rstrip())
        output = next(n for n in self.graph.nodes if n.op == "output")
        values = output.args[0]
        if values:
            names = [self._arg(v) for v in values]
            found.append(f"  return {', '.join(names)}")
        return found

    def _step(self, node: torch.fx.Node) -> tuple[str, str]:
        """The code of a step, and what it gives."""
        target: Any = node.target
        args, name = node.args, self.names.get(node, "")
        looks = self._looks(node.meta.get("val"))
        if target is steps.check:
            return f"check that {name} was not changed", looks
        if target in (steps.read, steps.packed, steps.unpack):
            return f"{name} = {target.__name__} {self._arg(args[0])}", looks
        if target is _FETCH:
            return f"start to fetch {self._arg(args[0])}", ""
        if target is steps.release:
            return f"release {self._arg(args[0])}", ""
        if target is steps.accumulate:
            return f"accumulate {self._box(args[1])} into {self._arg(args[0])}.grad", ""
        if target is steps.retain_grad:
            where = f"output {args[1]} of {self._arg(args[0])}"
            return f"retain {self._arg(args[2])} as the .grad of {where}", ""
        if target is steps.post_accumulate_hooks:
            return f"call the post-accumulate hooks of {self._arg(args[0])}", ""
        if target is steps.leaf_hooks:
            return f"{name} = call the hooks of {self._arg(args[0])} on {self._box(args[1])}", looks
        if target is steps.tensor_hooks:
            hooks = f"the hooks of output {args[1]} of {self._arg(args[0])}"
            return f"{name} = call {hooks} on {self._box(args[2])}", looks
        if target is steps.pre_hooks:
            given = ", ".join(self._arg(a) for a in args[1:])
            return f"{name} = call the pre-hooks of {self._arg(args[0])} on ({given})", looks
        if target is steps.post_hooks:
            given = ", ".join(f"({self._box(a)})" for a in args[1:])
            return f"{name} = call the hooks after {self._arg(args[0])} on {given}", looks
        if target is steps.call_node:
            looks = self._looks([u.meta.get("val") for u in node.users if u.target is item])
            return f"{name} = call {self._arg(args[0])} on ({self._box(args[1])})", looks
        given = ", ".join(
            [self._arg(a) for a in args] + [f"{k}={self._arg(v)}" for k, v in node.kwargs.items()]
        )
        prefix = f"{name} = " if name else ""
        return f"{prefix}{_target(target)}({given})", looks

    def _box(self, values: Any) -> str:
        return ", ".join(self._arg(v) for v in values)

    def _arg(self, value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return self.names.get(value, value.name)
        if isinstance(value, (list, tuple)):
            inside = ", ".join(self._arg(v) for v in value)
            if isinstance(value, list):
                return f"[{inside}]"
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if isinstance(value, float):
            return f"{value:.6g}"
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return str(value).removeprefix("torch.")
        return repr(value)

    def _looks(self, value: Any) -> str:
        if isinstance(value, Tensor):
            sizes = ", ".join(self._size(n) for n in value.shape)
            return f"{str(value.dtype).removeprefix('torch.')} [{sizes}]"
        if isinstance(value, (list, tuple)):
            found = [self._looks(v) for v in value]
            return "; ".join(f or "None" for f in found) if any(found) else ""
        return ""

    def _size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt):
            return str(size)
        try:
            return _private.size_code(size, self.captured.sizes.symbols)[0]
        except KeyError:
            return "?"


_FETCH = getattr(steps, "fetch", None)
_NO_VALUE = frozenset([
    steps.release, steps.accumulate, steps.post_accumulate_hooks, steps.retain_grad, _FETCH,
])  # fmt: skip


def _column(most: int, cells: Iterable[str]) -> int:
    """How wide a column is. Cells that are wider stand out of it."""
    return max((n for n in map(len, cells) if n <= most), default=0)


def _free(names: list[str]) -> str:
    if not names:
        return ""
    more = [f"and {len(names) - 8} more"] if len(names) > 9 else []
    return "free " + ", ".join((names[:8] if more else names) + more)


def _by_no_node(node: torch.fx.Node) -> str:
    if node.target in (steps.add, torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
        return "sum of gradients"
    return "several ops" if not isinstance(node.target, torch._ops.OpOverload) else "the engine"


def _entry(spec: Spec, slot: tuple[int, ...]) -> Entry:
    entry = spec.entries[slot[0]]
    for i in slot[1:]:
        entry = entry.parts[i]
    return entry


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name.removesuffix(".default")
    return str(getattr(target, "__name__", None) or type(target).__name__)


def _short(where: str) -> str:
    """Paths in `where` without their directories."""
    return " ".join(
        os.path.basename(w) if os.sep in w and ":" in w else w for w in where.split(" ")
    )


def _origin(spec: Spec) -> str:
    return f"{spec.op} at {_short(spec.where)}" if spec.where else spec.op


def _hooks(spec: Spec) -> str:
    names = [k if isinstance(k, str) else k[0] for k in spec.hooks]
    return ", ".join(n.replace("_", "-") for n in names)


def _look(entry: Entry) -> str:
    assert entry.look is not None
    return _shape(entry.look)


def _shape(look: Any) -> str:
    sizes = ", ".join(map(str, look.shape))
    return f"{str(look.dtype).removeprefix('torch.')} [{sizes}]"


def _wrap(label: str, words: str) -> list[str]:
    import textwrap

    found = textwrap.wrap(words, 100 - len(label)) or [""]
    return [label + found[0], *[" " * len(label) + line for line in found[1:]]]


def _natural(name: str) -> tuple[str, list[int]]:
    """Orders %9 before %10."""
    parts = "".join(c if c.isdigit() else " " for c in name).split()
    return name[:1], [int(p) for p in parts]


# -- the picture

# Colour-blind safe, dark enough for text of their own beside them.
_COLOURS = {
    LEAVES: "#c9ced6",
    ACCUMULATED: "#8a94a6",
    SAVED: "#4c78a8",
    UNPACKED: "#f2a541",
    GRADIENTS: "#d1605e",
}


def plot(
    captured: Captured,
    path: str | os.PathLike[str],
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> None:
    """Draw the bytes that are alive over the steps into `path`, by kind, with the peak named.

    The suffix says what is written: .svg, .png, .pdf. `sizes` and `options`: as for `live_bytes`.
    Needs matplotlib (`pip install stowgrad[plot]`). Raises StowgradError where it is missing.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StowgradError(
            "plot() needs matplotlib, which is not installed: pip install 'stowgrad[plot]'"
        ) from error
    times = timeline(captured, sizes, **options)
    style: Any = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure.add_subplot(), captured, times)
        figure.savefig(Path(path), dpi=150)


def _draw(axes: Any, captured: Captured, times: Timeline) -> None:
    import numpy as np

    unit, name = _unit(times.peak)
    count = len(times.steps)
    edges = np.arange(count + 1)
    bottom = np.zeros(count + 1)
    for kind, values in times.kinds.items():
        if not any(values):
            continue
        top = bottom + np.array([*values, values[-1]]) / unit
        axes.fill_between(
            edges, bottom, top, step="post", color=_COLOURS[kind], linewidth=0, label=kind
        )
        bottom = top
    live = np.array([*times.live, times.live[-1]] if count else [0]) / unit
    axes.step(edges, live, where="post", color="#30343b", linewidth=0.8)
    peak, highest = times.peak_step, times.peak / unit
    axes.set_xlim(0, max(count, 1))
    axes.set_ylim(0, highest * 1.32 or 1)

    unpacks = [i + 0.5 for i, n in enumerate(times.steps) if n.target is steps.unpack]
    if unpacks:
        axes.plot(
            unpacks, [0.012] * len(unpacks), linestyle="none", marker="^", markersize=4,
            color="#7a4a00", transform=axes.get_xaxis_transform(), clip_on=False,
            label=f"unpack ({len(unpacks)})", zorder=5,
        )  # fmt: skip
    if count:
        left = peak < count / 2
        note = axes.annotate(
            f"peak {_bytes(times.peak)}\n{_describe(times.steps, peak)}",
            xy=(peak + 0.5, highest),
            xytext=(14 if left else -14, 10),
            textcoords="offset points",
            ha="left" if left else "right",
            va="bottom",
            arrowprops={
                "arrowstyle": "-", "color": "#30343b", "linewidth": 0.8, "shrinkA": 2,
                "relpos": (0 if left else 1, 0),
            },
            annotation_clip=False,
        )  # fmt: skip
        note.set_in_layout(False)  # else a long one would squeeze the axes
        axes.plot([peak + 0.5], [highest], marker="o", markersize=4, color="#30343b", zorder=6)
    first = captured.specs[captured.roots[0][0]]
    axes.set_title(f"Live bytes in the backward of {_origin(first)}", loc="left", fontsize=11)
    axes.set_xlabel(f"step (of {count})")
    axes.set_ylabel(f"alive, {name}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#ffffff", alpha=0.35, linewidth=0.7)
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels) or 1, frameon=False,
        handlelength=1.2, columnspacing=1.6,
    )  # fmt: skip


def _describe(all_steps: list[torch.fx.Node], number: int) -> str:
    """A step, and the line of the forward that it belongs to or comes after."""
    node = all_steps[number]
    lines = [f"step {number}: {_target(node.target)}"]
    specs = [n.meta.get("spec") for n in all_steps[: number + 1]]
    spec: Spec | None = next((s for s in reversed(specs) if s is not None and s.where), None)
    if spec is not None:
        belongs = node.meta.get("spec") is spec
        lines.append(f"{'in' if belongs else 'after'} the backward of {spec.op}")
        lines.append(_short(spec.where))
    return "\n".join(line if len(line) <= 64 else line[:63] + "…" for line in lines)


def _unit(most: int) -> tuple[int, str]:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most >= 1024**power:
            return 1024**power, name
    return 1, "bytes"


def _bytes(count: int) -> str:
    unit, name = _unit(count)
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} {name}"
