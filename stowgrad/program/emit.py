"""A captured graph as straight-line Python.

`run(inputs, keep)` empties the list of inputs, executes one line a step, and lets go of each value
after its last use. A step that takes a gradient over gets it in a list of its own, and nothing
else holds it. Plain ops call PyTorch's Python bindings, which cost less than the overloads.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from ..ops import _quick_calls
from ..rules.table import VERSION_BITS
from . import steps
from .capture import Captured, Spec, compute, item

_MASK = (1 << VERSION_BITS) - 1
_BOXED = frozenset([
    steps.tensor_hooks, steps.leaf_hooks, steps.accumulate, steps.call_node,
])  # fmt: skip
_NO_VALUE = frozenset([
    steps.fetch, steps.release, steps.accumulate, steps.post_accumulate_hooks, steps.retain_grad,
])  # fmt: skip
_numbers = itertools.count()


class Changed(Exception):
    """A saved tensor was changed in place: entry `slot` of node `spec`."""

    def __init__(self, spec: int, slot: int, tensor: torch.Tensor, versions: int) -> None:
        super().__init__(spec, slot)
        self.spec, self.slot, self.tensor = spec, slot, tensor
        self.version = versions >> slot * VERSION_BITS & _MASK


class Emitter:
    """The code of one program."""

    def __init__(self, captured: Captured) -> None:
        self.graph = captured.graph
        self.specs: list[Spec | None] = [None, None, None]  # of each line; lines count from 1
        self._lines = ["def run(inputs, keep):"]
        self._globals: dict[str, Any] = {"Changed": Changed}
        self._constants: dict[int, str] = {}
        self._names: dict[torch.fx.Node, str] = {}
        self._generate()
        self.source = "\n".join(self._lines) + "\n"
        self.filename = f"<backward program {next(_numbers)}>"
        exec(compile(self.source, self.filename, "exec"), self._globals)
        self.run: Callable[[list[Any], bool], tuple[Any, ...]] = self._globals["run"]
        lines = self.source.splitlines(keepends=True)
        linecache.cache[self.filename] = (len(self.source), None, lines, self.filename)
        weakref.finalize(self, linecache.cache.pop, self.filename, None)

    def _line(self, text: str, spec: Spec | None) -> None:
        if spec is not None and (not self.specs or self.specs[-1] is not spec):
            text += f"  # {spec.op} {spec.where}".rstrip()
        self._lines.append("    " + text)
        self.specs.append(spec)

    def _constant(self, value: Any) -> str:
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"K{len(self._constants)}"
            self._globals[name] = value
        return name

    def _call(self, function: Any) -> str:
        name = getattr(function, "__name__", "").replace(".", "_")
        if not name.isidentifier() or self._globals.setdefault(name, function) is not function:
            return self._constant(function)
        return name

    def _argument(self, value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return self._names[value]
        if isinstance(value, (list, tuple)):
            inside = ", ".join(self._argument(v) for v in value)
            if isinstance(value, list):
                return f"[{inside}]"
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float and value - value == 0:
            return repr(value)
        return self._constant(value)

    def _generate(self) -> None:
        last: dict[str, torch.fx.Node] = {}  # where each local is used last
        nodes = list(self.graph.nodes)
        for node in nodes:
            aliased = node.args[0] if node.target is steps.check else None
            if isinstance(aliased, torch.fx.Node):
                self._names[node] = self._names[aliased]
            else:
                made = node.op == "call_function"
                self._names[node] = f"v{len(self._names)}" if made else node.name
            if node.target not in _NO_VALUE:
                last[self._names[node]] = node
            for used in node.all_input_nodes:
                last[self._names[used]] = node
        dying: dict[torch.fx.Node, list[str]] = {}
        for name, node in last.items():
            dying.setdefault(node, []).append(name)

        inputs = [n.name for n in nodes if n.op == "placeholder"]
        if inputs:
            self._lines.append(f"    {', '.join(inputs)}, = inputs")
        else:
            self._lines.append("    pass")
        self._line("del inputs[:]", None)
        for node in nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self._line(f"return {self._argument(tuple(node.args[0]))}", None)
                continue
            gone = dying.get(node, [])
            spec = node.meta.get("spec")
            self._line(self._step(node, gone, spec), spec)
            if gone:
                self._line(f"del {', '.join(gone)}", spec)

    def _step(self, node: torch.fx.Node, gone: list[str], spec: Spec | None) -> str:
        target, name = node.target, self._names[node]
        args = node.args
        if target is steps.check:
            value, versions, shift = args
            version = f"{self._argument(versions)}{f' >> {shift}' if shift else ''} & {_MASK}"
            assert spec is not None and isinstance(shift, int)
            changed = f"Changed({spec.index}, {shift // VERSION_BITS}, {self._argument(value)}, "
            return (
                f"if {self._argument(value)}._version != {version}: "
                f"raise {changed}{self._argument(versions)})"
            )
        if target is item:
            return f"{name} = {self._argument(args[0])}[{args[1]}]"
        if target is compute:
            # the names in the code are those of the sizes
            names = [self._argument(a) for a in args[1:]]
            assert names == list(node.meta["names"])
            return f"{name} = {args[0]}"
        if target is steps.release:
            return f"if not keep: {self._call(target)}({self._argument(args[0])})"
        if target in _BOXED or getattr(target, "_boxed_call", False):
            return self._boxed(node, gone)
        assert callable(target)
        parts = [self._argument(a) for a in args]
        if target in _NO_VALUE:
            return f"{self._call(target)}({', '.join(parts)})"
        if isinstance(target, torch._ops.OpOverload):
            quick = self._quick(target, parts, node)
            if quick is not None:
                return f"{name} = {quick}"
        parts += [f"{k}={self._argument(v)}" for k, v in node.kwargs.items()]
        return f"{name} = {self._call(target)}({', '.join(parts)})"

    def _quick(self, target: Any, parts: list[str], node: torch.fx.Node) -> str | None:
        if node.kwargs:
            return None
        found = _quick_calls.get(target)
        if found is not None:
            return f"{self._call(found)}({', '.join(parts)})"
        method = target._schema.name.removeprefix("aten::")
        if method in _IN_PLACE and len(parts) > 0:
            return f"{parts[0]}.{method}({', '.join(parts[1:])})"
        return None

    def _boxed(self, node: torch.fx.Node, gone: list[str]) -> str:
        """A step that takes gradients over: `box = [g]; del g; x = step(..., box)`."""
        before = []
        parts = []
        for value in node.args:
            text = self._argument(value)
            if isinstance(value, list):
                inside = {self._names[v] for v in value if isinstance(v, torch.fx.Node)}
                freed = [n for n in gone if n in inside]
                if freed:
                    before = [f"box = {text}", f"del {', '.join(freed)}"]
                    for n in freed:
                        gone.remove(n)
                    text = "box"
            parts.append(text)
        call = f"{self._call(node.target)}({', '.join(parts)})"
        if node.target not in _NO_VALUE:
            call = f"{self._names[node]} = {call}"
        return "; ".join([*before, call, *(["del box"] if before else [])])


_IN_PLACE = frozenset([
    "add_", "sub_", "mul_", "div_", "neg_", "exp_", "sqrt_", "rsqrt_", "tanh_", "sigmoid_",
    "reciprocal_", "masked_fill_", "zero_", "copy_",
])  # fmt: skip
