"""Finding the program of a backward: a function that tries whether a graph is the one expected.

It is generated for each program: straight-line code that walks the graph from its roots, compares
what the program depends on (rules, edges, shapes, dtypes, kinds of saved entries and hooks,
order), binds the sizes, and gathers the inputs on its way. That costs less than a hash of the same
facts would. It answers with the list of inputs, or the number of the check that failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from .. import _private
from ..saved import SavedTensor
from .capture import Captured, Entry, Look, Spec, has_sizes, hook_kinds, packed_leaves


class Matcher:
    """`match(roots, targets, keep)` gives the inputs of the program, or the number of a reason."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.reasons: list[str] = ["a node of another kind, or more or fewer of something"]
        self._lines: list[str] = []
        self._names: dict[str, Any] = {
            "SavedTensor": SavedTensor,
            "hook_kinds": hook_kinds,
            "native_hooks": _private.native_hooks,
            "flat": _flat,
            "packed_leaves": packed_leaves,
        }
        self._bound: set[str] = set()  # sizes that have their value
        self._shapes: dict[tuple[Any, ...], str] = {}
        self._where = ""
        self._generate()
        self.source = "\n".join(self._lines) + "\n"
        exec(compile(self.source, "<match>", "exec"), self._names)
        self.match: Callable[[Any, Any, bool], list[Any] | int] = self._names["match"]

    # -- writing

    def _line(self, text: str, depth: int = 2) -> None:
        self._lines.append("    " * depth + text)

    def _fail(self, condition: str, reason: str) -> None:
        """Unless `condition` is false, the program is not the one; `reason` says why."""
        self._line(f"if {condition}: return {len(self.reasons)}")
        self.reasons.append(f"{self._where}: {reason}")

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        name = f"K{len(self._names)}"
        self._names[name] = value
        return name

    def _look(self, text: str, look: Look, what: str) -> None:
        self._shape(f"{text}.shape", look.shape, f"the shape of {what}")
        self._fail(f"{text}.dtype is not {self._constant(look.dtype)}", f"the dtype of {what}")
        if look.device is not None:
            self._fail(f"{text}.device != {self._constant(look.device)}", f"the device of {what}")

    def _shape(self, text: str, shape: tuple[Any, ...], what: str) -> None:
        """Compare a shape, and take from it the sizes that are not known yet."""
        unknown = {s for s in shape if isinstance(s, str)} - self._bound
        new = len(unknown)
        if unknown:
            self._line(f"z = {text}")
            self._fail(f"len(z) != {len(shape)}", f"{what} has another number of dims")
            for i, size in enumerate(shape):
                if size in unknown:
                    unknown.discard(size)
                    self._bind(size, f"z[{i}]", what)
            text = "z"
            if new == len(shape):
                return  # each of them is one that was just taken
        self._fail(f"{text} != {self._tuple(shape)}", what)

    def _bind(self, size: str, text: str, what: str) -> None:
        self._line(f"{size} = {text}")
        self._bound.add(size)
        self._fail(f"{size} < 2", f"a size of {what} is 0 or 1, which are programs of their own")

    def _tuple(self, shape: tuple[Any, ...]) -> str:
        name = self._shapes.get(shape)
        if name is None:
            if not any(isinstance(s, str) for s in shape):
                return self._constant(tuple(shape))
            name = self._shapes[shape] = f"S{len(self._shapes)}"
            self._line(f"{name} = ({', '.join(map(str, shape))},)")
        return name

    # -- the walk

    def _generate(self) -> None:
        captured = self.captured
        self._line("def match(roots, targets, keep):", 0)
        self._line("try:", 1)
        self._where = "the outputs"
        self._line("".join(f"(r{i}, g{i}), " for i in range(len(captured.roots))) + "= roots")
        bound: set[int] = set()
        todo: list[int] = []
        for i, (number, index, look) in enumerate(captured.roots):
            self._follow(f"r{i}", number, index, bound, todo)
            self._look(f"g{i}", look, "the gradient of an output")
            odd = f"r{i}.shape != g{i}.shape or r{i}.dtype is not g{i}.dtype"
            self._fail(odd, "the gradient of an output has another shape or dtype than it")
        position = 0
        while position < len(todo):
            self._node(captured.specs[todo[position]], bound, todo)
            position += 1
        self._where = "the inputs of the backward"
        chosen = captured.inputs or []
        if None in chosen:
            self._line(f"reached = ({', '.join(f'n{number}' for number in todo)},)")
        for i, target in enumerate(chosen):
            self._line(f"t = targets[{i}]")
            if target is None:
                self._fail("t.node in reached", "one that nothing led to before")
            else:
                number, index = target
                self._fail(f"t.node is not n{number} or t.index != {index}", "another one")
        self._order(todo)
        self._where = "the sizes"
        for guard in captured.guards:
            self._fail(f"not ({guard})", f"{guard} no longer holds")
        inputs = [
            self._input(node.meta["input"]) for node in captured.graph.nodes
            if node.op == "placeholder"
        ]  # fmt: skip
        stolen = [f"n{s.index}.saved" for s in captured.specs if s.stolen]
        if stolen:
            self._line("if not keep:")
            for start in range(0, len(stolen), 20):
                self._line(" = ".join(stolen[start : start + 20]) + " = None", 3)
        self._line(f"return [{', '.join(inputs)}]")
        self._line("except (AttributeError, IndexError, KeyError, TypeError, ValueError):", 1)
        self._line("return 0")

    def _follow(self, edge: str, number: int, index: int, bound: set[int], todo: list[int]) -> None:
        """`edge` must lead to output `index` of node `number`."""
        if number in bound:
            self._fail(f"{edge}.node is not n{number}", "an input that came from elsewhere")
        else:
            self._line(f"n{number} = {edge}.node")
            bound.add(number)
            todo.append(number)
        spec = self.captured.specs[number]
        if spec.outputs > 1 or spec.kind == "opaque":
            self._fail(f"{edge}.index != {index}", "another output of the node before")

    def _node(self, spec: Spec, bound: set[int], todo: list[int]) -> None:
        n = f"n{spec.index}"
        self._where = f"{spec.op} {spec.where}".rstrip()
        if spec.kind == "rule":
            self._fail(f"{n}.plan is not {self._constant(spec.plan)}", "another op, or other needs")
        else:
            self._fail(f"type({n}) is not {self._constant(spec.cls)}", "another op")
        self._hooks(spec, n)
        if spec.kind == "leaf":
            self._line(f"v = {n}.variable")
            assert spec.look is not None
            self._fail(f"v.device != {self._constant(spec.look.device)}", "the device of a leaf")
            self._fail("getattr(v, '_stowgrad', None) is not None", "a leaf that is one no more")
            return
        if spec.outputs > 1 or spec.kind == "opaque":
            self._fail(f"{n}.outputs != {spec.outputs}", "another number of outputs")
        self._edges(spec, n, bound, todo)
        if spec.kind == "rule":
            if spec.entries:
                self._saved(spec.entries, f"{n}.saved", n)
            if spec.values:
                self._values(spec.values, n)
            else:  # None, or empty: an argument that is given is another program
                self._fail(f"{n}.values", "other arguments")
            if spec.edge_counts is not None:
                counts = self._constant(spec.edge_counts)
                self._fail(f"{n}.edge_counts != {counts}", "other numbers of tensors in a list")
            for i, meta in enumerate(spec.metas or ()):
                if meta is not None:
                    self._shape(f"{n}.metas[{i}][0]", meta.shape, f"the shape of output {i}")
                    kind = f"({self._constant(meta.dtype)}, {self._constant(meta.device)})"
                    self._fail(f"{n}.metas[{i}][1:] != {kind}", f"the dtype of output {i}")

    def _hooks(self, spec: Spec, n: str) -> None:
        if spec.hooks:
            self._fail(f"hook_kinds({n}) != {self._constant(spec.hooks)}", "other hooks")
            return
        some = f"{n}.hooks is not None"
        if spec.kind == "leaf":
            some += f" or native_hooks({n}.variable) or {n}.variable._post_accumulate_grad_hooks"
            some = f"({some})"
        self._fail(f"{some} and hook_kinds({n})", "a hook that was not there before")

    def _edges(self, spec: Spec, n: str, bound: set[int], todo: list[int]) -> None:
        if not spec.links:
            return
        names = [f"e{i}" for i in range(len(spec.links))]
        self._line(f"{', '.join(names)}, = {n}.edges")
        for name, link in zip(names, spec.links, strict=True):
            if link is None:
                if spec.kind != "rule" or spec.edge_counts is not None:
                    self._fail(f"{name} is not None", "an input that needed no gradient before")
                continue
            self._follow(name, link.target, link.index, bound, todo)
            self._look(name, link.look, "an input")

    def _saved(self, entries: list[Entry], text: str, n: str) -> None:
        names = [f"{n}_{'_'.join(map(str, e.slot))}" for e in entries]
        self._line(f"{', '.join(names)}, = {text}")
        for name, entry in zip(names, entries, strict=True):
            what = f"the saved '{entry.name}'"
            if entry.kind == "list":
                self._fail(f"type({name}) is not list", what)
                self._saved(entry.parts, name, n)
            elif entry.kind == "value" and has_sizes(entry.value):
                self._number(entry.value, name, what)
            elif entry.kind == "value":
                value = self._constant(entry.value)
                self._fail(f"type({name}) is not type({value}) or {name} != {value}", what)
            elif entry.kind == "raw":
                self._fail(f"type({name}) is SavedTensor", f"{what}, which somebody asked for")
                if not entry.edge:
                    assert entry.look is not None
                    self._look(name, entry.look, what)
                self._strides(name, entry, what)
            else:
                assert entry.look is not None
                packed = entry.kind != "plain"
                self._fail(f"type({name}) is not SavedTensor", what)
                self._line(f"d = {name}._packed")
                if packed:
                    self._fail("d is None", f"{what} has no hooks now")
                    self._line("d = d.info")
                else:
                    self._fail("d is not None", f"{what} has hooks now")
                    self._line(f"d = {name}._data")
                self._look("d", entry.look, what)
                if entry.kind == "traced":
                    self._traced(name, entry, what)
                else:
                    self._strides("d", entry, what)

    def _traced(self, name: str, entry: Entry, what: str) -> None:
        """What was packed must be as it was, and be unpacked by the same function."""
        unpack, structure = entry.value
        self._line(f"d = {name}._packed")
        self._fail(f"d.pair.unpack != {self._constant(unpack)}", f"{what} has other hooks")
        self._line("q, *z = packed_leaves(d.value)")
        self._fail(f"z != {self._constant(structure)}", f"{what} was packed differently")
        for i, part in enumerate(entry.parts):
            assert part.look is not None
            self._look(f"q[{i}]", part.look, f"{what} as it was packed")

    def _strides(self, text: str, entry: Entry, what: str) -> None:
        """Where a tensor has gaps or overlaps, ops may have looked at its strides."""
        names = getattr(entry.strides, "names", None)
        if names is not None:
            self._shape(f"{text}.stride()", names, f"the strides of {what}")

    def _values(self, values: dict[str, Any], n: str) -> None:
        sized = {k: v for k, v in values.items() if has_sizes(v)}
        if not sized and all(v == v for v in values.values()):
            self._fail(f"{n}.values != {self._constant(values)}", "other arguments")
            return
        self._line(f"v = {n}.values")
        self._fail(f"len(v) != {len(values)}", "other arguments")
        for key, value in values.items():
            what = f"the argument '{key}'"
            if key not in sized:
                if value == value:
                    self._fail(f"v[{key!r}] != {self._constant(value)}", what)
                else:
                    self._fail(f"v[{key!r}] == v[{key!r}]", what)
            elif isinstance(value, str):
                self._number(value, f"v[{key!r}]", what)
            else:
                self._shape(f"flat(v[{key!r}])", _flat(value), what)

    def _number(self, name: str, text: str, what: str) -> None:
        """An argument that the program takes as it comes: a size, or any number."""
        if name[0] == "s":
            self._fail(f"type({text}) is not int", what)
            self._shape(f"({text},)", (name,), what)
            return
        self._line(f"{name} = {text}")
        self._fail(f"type({name}) is not float", what)

    def _order(self, reached: list[int]) -> None:
        """Nodes run in the order in which they were recorded, the last first."""
        self._where = "the order of the ops"
        specs = [s for s in map(self.captured.specs.__getitem__, reached) if s.kind != "leaf"]
        specs.sort(key=lambda s: -s.seq)
        for a, b in itertools.pairwise(specs):
            if not any(k is not None and k.target == b.index for k in a.links):
                self._fail(f"n{a.index}.seq < n{b.index}.seq", f"{b.op} came after {a.op}")

    def _input(self, kind: tuple[Any, ...]) -> str:
        match kind:
            case ("grad", i):
                return f"g{i}"
            case ("raw" | "saved", number, slot):
                return f"n{number}_{'_'.join(map(str, slot))}"
            case ("versions", number):
                return f"n{number}.versions"
            case ("node", number):
                return f"n{number}"
            case ("size", name):
                return str(name)
            case ("constant", name):
                return self._constant(self.captured.constants[name])
        raise AssertionError(kind)


def _flat(value: Any) -> tuple[Any, ...]:
    """The numbers of a nest of sequences, in order."""
    if not isinstance(value, (list, tuple)):
        return (value,)
    found: list[Any] = []
    for v in value:
        found += _flat(v) if isinstance(v, (list, tuple)) else [v]
    return tuple(found)
