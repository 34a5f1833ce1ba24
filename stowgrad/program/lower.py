"""Lowering: the ATen steps of a captured backward, compiled in stretches.

`lower(captured, backend)` replaces each longest run of plain tensor code by one step that calls
what a backend of torch.compile made of it. User code (unpack hooks, hooks, custom functions) ends a
stretch, and nothing is moved across it. Between two such steps, saved tensors are read and let go
of first, then the tensor code runs, then leaves accumulate; so a backward without hooks is one
stretch.

Sizes are symbols in the compiled code as in the program: one compilation serves them all, and what
the backend wants to know of them becomes a guard of the program.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor

from .. import _private
from ..errors import CompileError
from . import inductor, steps
from .capture import Captured, compute, item

Backend = str | Callable[..., Any]

MIN_OPS = 2  # fewer are not worth a call into compiled code

_FIRST = frozenset([steps.check, steps.read, steps.packed, steps.release])
_LAST = frozenset([steps.accumulate, steps.retain_grad])
_PLAIN = frozenset([Tensor, torch.nn.Parameter])
# Random draws of compiled code are others than ATen's; the rest has no shape before it has run.
_UNFIT_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)


def lower(captured: Captured, backend: Backend) -> None:
    """Compile the stretches of `captured.graph`, in place, with `backend`.

    `backend`: a name that torch.compile knows, or `backend(gm, example_inputs) -> callable`. What
    it cannot compile stays as it is, with a warning. A program that is recorded itself
    (create_graph) is left alone: compiled code has no graph. Raises CompileError where Inductor has
    no C++ compiler.
    """
    if captured.create_graph:
        captured.notes.append("not compiled: with create_graph its ops are recorded one by one")
        return
    Lowering(captured, backend).run()


# -- what runs


class Stretch:
    """A compiled stretch: called with one list of sizes and tensors, which it empties; a tuple.

    Compiled code reads memory without asking, so the inputs are brought into the layout that it was
    compiled for. Where it cannot stand in for its ops (a tensor subclass came out of a hook, a
    dispatch mode wants to see the ops, inside vmap), they run one by one.
    """

    _boxed_call = True

    def __init__(self, name: str, code: _Code) -> None:
        self.__name__ = self.__qualname__ = name
        self._code = code

    def __repr__(self) -> str:
        return f"<compiled {self.__name__}: {self._code.ops} ops>"

    @property
    def source(self) -> torch.fx.GraphModule:
        """The ops, as the backend was given them."""
        return self._code.module

    def __call__(self, box: list[Any]) -> Sequence[Tensor]:
        code = self._code
        if _private.mode_count() or _private.functorch_active() or not code.fit(box):
            return code.plain(box)
        if code.copied is None:
            return code.first(box)
        outputs = code.run(box)
        if code.copied:
            return [o.clone() if i in code.copied else o for i, o in enumerate(outputs)]
        return outputs


@dataclass
class _Code:
    """What stretches of the same ops share."""

    module: torch.fx.GraphModule
    ops: int
    aliases: list[int]  # of each output: the first output that shares its memory
    fit: Callable[[list[Any]], bool]
    run: Callable[[list[Any]], Sequence[Tensor]]
    copied: frozenset[int] | None = None  # outputs that must be copied; None: not yet known
    lock: threading.Lock = field(default_factory=threading.Lock)

    def plain(self, box: list[Any]) -> Sequence[Tensor]:
        inputs = tuple(box)
        box.clear()
        return self.module.forward(*inputs)

    def first(self, box: list[Any]) -> Sequence[Tensor]:
        """The first run. A backend may hand out an input's memory as an output (of `x * 1`, say),
        or the same memory twice, where the ops do not: those outputs are copied from here on."""
        # Kept to the end of this call, so that no output can come to lie where an input lay.
        inputs = [t for t in box if isinstance(t, Tensor)]
        outputs = self.run(box)
        given = {_private.storage_key(t) for t in inputs}
        seen: dict[int, int] = {}
        copied = set()
        for i, o in enumerate(outputs):
            key = _private.storage_key(o)
            if key in given or seen.setdefault(key, self.aliases[i]) != self.aliases[i]:
                copied.add(i)
        self.copied = frozenset(copied)
        return [o.clone() if i in copied else o for i, o in enumerate(outputs)]


def _evaluate(code: str, names: tuple[str, ...], *values: int) -> Any:
    """A size from others, within a stretch."""
    return eval(code, dict(zip(names, values, strict=True)))


def _unboxed(compiled: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    def run(box: list[Any]) -> Any:
        inputs = tuple(box)
        box.clear()
        return compiled(*inputs)

    return run


def _fitting(inputs: Sequence[Any], sizes: Any) -> Callable[[list[Any]], bool]:
    """Code that brings a list of inputs into the layouts that `inputs`, fake ones, have. It answers
    False where one of them is no plain tensor."""
    names: dict[str, Any] = {"PLAIN": _PLAIN, "laid_out": _laid_out}
    head, checks = [], []
    for i, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            if isinstance(value, torch.SymInt):
                code, _ = _private.size_code(value, sizes.symbols)
                if code.isidentifier():
                    head.append(f"    {code} = box[{i}]")
            continue
        checks += [f"    t = box[{i}]", "    if type(t) not in PLAIN: return False"]
        if value.dtype.is_complex:
            checks.append(f"    if t.is_conj(): t = box[{i}] = t.resolve_conj()")
        if value.dtype.is_complex or value.dtype.is_floating_point:
            checks.append(f"    if t.is_neg(): t = box[{i}] = t.resolve_neg()")
        if _is_contiguous(value, sizes):
            checks.append(f"    if not t.is_contiguous(): box[{i}] = t.contiguous()")
        else:
            strides = "".join(f"{_code_of(s, sizes)}, " for s in value.stride())
            checks.append(f"    s = ({strides})")
            checks.append(f"    if t.stride() != s: box[{i}] = laid_out(t, s)")
    exec("\n".join(["def fit(box):", *head, *checks, "    return True"]), names)
    found: Callable[[list[Any]], bool] = names["fit"]
    return found


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(size == 1 or a == b for size, a, b in pairs):
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _code_of(size: Any, sizes: Any) -> str:
    if isinstance(size, torch.SymInt):
        return _private.size_code(size, sizes.symbols)[0]
    return repr(size)


def _is_contiguous(fake: Tensor, sizes: Any) -> bool:
    """Asked of the expressions: the fake tensor itself might add a guard to answer."""
    expected: Any = 1
    for size, stride in zip(reversed(fake.shape), reversed(fake.stride()), strict=True):
        if _code_of(expected, sizes) != _code_of(stride, sizes):
            return False
        expected = expected * size
    return True


# -- what is compiled


class Lowering:
    """One run of `lower`."""

    def __init__(self, captured: Captured, backend: Backend) -> None:
        self.captured = captured
        self.graph = captured.graph
        self.sizes = captured.sizes
        self.name = backend if isinstance(backend, str) else _name_of(backend)
        self.inductor = backend == "inductor"
        self.backend = _private.compiler_backend(backend) if isinstance(backend, str) else backend
        self.size_inputs: dict[str, torch.fx.Node] = {}
        self.last_input: torch.fx.Node | None = None
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.last_input = node
                if node.meta["input"][0] == "size":
                    self.size_inputs[node.meta["input"][1]] = node
        self.made: dict[Any, _Code] = {}  # a net repeats its blocks
        self.count = 0
        self.failed: list[str] = []

    def run(self) -> None:
        for segment in _segments(self.graph):
            ops = sum(_computes(node) for node in segment.middle)
            if ops >= MIN_OPS:
                self._stretch(segment, ops)
        # Whatever is not pure has no users or is kept; what the stretches took over is gone.
        for node in reversed(list(self.graph.nodes)):
            if node.target in (compute, item) and not node.users:
                self.graph.erase_node(node)
        self.captured.guards[:] = self.sizes.guards()
        if self.failed:
            more = f" (and {len(self.failed) - 1} more)" if len(self.failed) > 1 else ""
            warnings.warn(
                f"the backend {self.name} could not compile {self.failed[0]}{more}; its ops run "
                "one by one",
                stacklevel=2,
            )

    def _stretch(self, segment: _Segment, ops: int) -> None:
        segment.arrange()
        inside = dict.fromkeys(segment.middle)
        self._views_of_inputs_out(inside)
        builder = _Builder(self, inside)
        name = f"stretch_{self.count}"
        key = builder.key()
        code = self.made.get(key)
        if code is None:
            try:
                code = self._compile(builder, ops)
            except CompileError:
                raise
            except Exception as error:
                if self.inductor and _private.no_cpp_compiler(error):
                    raise _no_compiler() from error
                text = (str(error).strip() or repr(error)).splitlines()[0]
                self.failed.append(f"{name} ({_lines_of(inside)}): {type(error).__name__}: {text}")
                return
            self.made[key] = code
        self.count += 1
        graph = self.graph
        with graph.inserting_before(next(iter(inside))):
            call = graph.call_function(Stretch(name, code), (builder.inputs,))
            call.name = graph._graph_namespace.create_name(name, None)
            call.meta.update(spec=None, val=tuple(o.meta["val"] for o in builder.outputs))
            for i, output in enumerate(builder.outputs):
                taken = graph.call_function(item, (call, i))
                taken.meta.update(val=output.meta["val"], spec=output.meta.get("spec"))
                output.replace_all_uses_with(taken, lambda user: user not in inside)
        for node in reversed(inside):
            graph.erase_node(node)

    def _views_of_inputs_out(self, inside: dict[torch.fx.Node, None]) -> None:
        """Views of what comes in that are used outside are made outside, as views."""
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        first = next(iter(inside))
        given = _storages(n for node in inside for n in node.all_input_nodes if n not in inside)

        def movable(node: torch.fx.Node) -> bool:
            if node not in inside:
                return True
            return _storages([node]) <= given and all(map(movable, node.all_input_nodes))

        def outside(node: torch.fx.Node) -> torch.fx.Node:
            if node not in inside:
                return node
            found = copies.get(node)
            if found is None:
                with self.graph.inserting_before(first):
                    found = self.graph.node_copy(node, outside)
                copies[node] = found
            return found

        for node in list(inside):
            away = [u for u in node.users if u not in inside]
            value = node.meta["val"]
            if away and isinstance(value, Tensor) and _private.storage_key(value) in given:
                if movable(node) and not any(_writes(n) for n in inside):
                    copy = outside(node)
                    node.replace_all_uses_with(copy, lambda user: user not in inside)
        for node in reversed(list(inside)):
            if not node.users and len(inside) > 1 and node in copies:
                del inside[node]
                self.graph.erase_node(node)

    def size_input(self, name: str) -> torch.fx.Node:
        """The placeholder of a size, made where no step needed it so far."""
        node = self.size_inputs.get(name)
        if node is None:
            with self.graph.inserting_after(self.last_input):
                node = self.last_input = self.graph.placeholder(name)
            node.meta.update(val=self.sizes.symbols[name], input=("size", name), spec=None)
            self.size_inputs[name] = node
        return node

    def _compile(self, builder: _Builder, ops: int) -> _Code:
        devices = [v.device.type for v in builder.fakes if isinstance(v, Tensor)]
        device = next((d for d in devices if d != "cpu"), "cpu")
        if self.inductor and device == "cpu" and not _private.has_cpp_compiler():
            raise _no_compiler()
        examples = builder.examples()
        rewrite = inductor.rewrite if self.inductor else None
        module = builder.module(rewrite)  # the backend may change it
        with _private.compiling(examples):
            if self.inductor:
                whole = inductor.WHOLE if device == "cpu" else frozenset()
                run = _private.inductor(module, examples, inductor.options(module.graph), whole)
            else:
                run = _unboxed(self.backend(module, examples))
        fit = _fitting(builder.fakes, self.sizes)
        return _Code(builder.module(), ops, builder.aliases(), fit, run)


class _Builder:
    """The ops of a stretch as a graph module of their own."""

    def __init__(self, lowering: Lowering, inside: dict[torch.fx.Node, None]) -> None:
        self.inside = inside
        self.sizes = lowering.sizes
        tensors: dict[torch.fx.Node, None] = {}
        names: dict[str, None] = {}  # the sizes that are needed
        for node in inside:
            for n in node.all_input_nodes:
                if n in inside:
                    continue
                if n.target is compute:
                    names.update(dict.fromkeys(n.meta["names"]))
                elif n.op == "placeholder" and n.meta["input"][0] == "size":
                    names[n.meta["input"][1]] = None
                else:
                    tensors[n] = None
        for n in tensors:
            value = n.meta["val"]
            for size in (*value.shape, *value.stride(), value.storage_offset()):
                if isinstance(size, torch.SymInt):
                    names.update(dict.fromkeys(_private.size_code(size, self.sizes.symbols)[1]))
        # A size that a guard has made a number, or another size, is no symbol of its own any more.
        self.names: list[str] = []
        self.numbers: dict[str, Any] = {}
        for name in sorted(names):
            code, found = _private.size_code(self.sizes.symbols[name], self.sizes.symbols)
            if found:
                self.names.append(name)
            else:
                self.numbers[name] = eval(code)
        self.tensors = list(tensors)
        self.inputs: list[Any] = [lowering.size_input(n) for n in self.names] + self.tensors
        self.fakes: list[Any] = [self.sizes.symbols[n] for n in self.names]
        self.fakes += [n.meta["val"] for n in self.tensors]
        self.outputs = [n for n in inside if any(u not in inside for u in n.users)]
        self._given = {_private.storage_key(n.meta["val"]) for n in self.tensors}

    def aliases(self) -> list[int]:
        first: dict[int, int] = {}
        return [
            i if key in self._given else first.setdefault(key, i)
            for i, key in enumerate(_private.storage_key(o.meta["val"]) for o in self.outputs)
        ]

    def examples(self) -> list[Any]:
        modes = [getattr(v, "fake_mode", None) for v in self.fakes]
        mode = next((m for m in modes if m is not None), None)
        if mode is None:
            mode = _private.new_fake_mode(self.sizes.env)
        return [
            mode.from_tensor(v, static_shapes=True)
            if isinstance(v, Tensor) and getattr(v, "fake_mode", None) is None
            else v
            for v in self.fakes
        ]

    def module(self, rewrite: Callable[..., Any] | None = None) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        made: dict[torch.fx.Node, Any] = {}
        names: dict[str, Any] = dict(self.numbers)
        for node, fake in zip(self.inputs, self.fakes, strict=True):
            made[node] = graph.placeholder(node.name)
            made[node].meta.update(val=fake, example_value=fake)
            if node.op == "placeholder" and node.meta["input"][0] == "size":
                names[node.meta["input"][1]] = made[node]

        def value(node: torch.fx.Node) -> Any:
            found = made.get(node)
            if found is None and node.target is compute:
                code, *_ = node.args
                used = tuple(node.meta["names"])
                values = [names[n] for n in used]
                found = made[node] = graph.call_function(_evaluate, (code, used, *values))
                found.meta["val"] = node.meta["val"]
            elif found is None:  # a size that has become a number
                found = names[node.meta["input"][1]]
            return found

        for node in self.inside:
            args = torch.fx.node.map_arg(node.args, value)
            kwargs = torch.fx.node.map_arg(node.kwargs, value)
            copy = rewrite(graph, node, args, kwargs) if rewrite is not None else None
            if copy is None:
                copy = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            copy.meta["val"] = node.meta["val"]
            made[node] = copy
        results = []
        for node in self.outputs:
            result = made[node]
            if _private.storage_key(node.meta["val"]) in self._given:
                # No output shall live in an input's memory: what backends do then differs.
                result = graph.call_function(torch.ops.aten.clone.default, (result,))
                result.meta["val"] = node.meta["val"]
            results.append(result)
        graph.output(tuple(results))
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    def key(self) -> Any:
        """Equal for stretches that one compiled code serves."""
        number = {node: i for i, node in enumerate((*self.inputs, *self.inside))}

        def look(value: Any) -> Any:
            if isinstance(value, Tensor):
                sizes = [_code_of(s, self.sizes) for s in (*value.shape, *value.stride())]
                offset = _code_of(value.storage_offset(), self.sizes)
                return value.dtype, value.device, offset, *sizes
            return str(value)

        def written(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                if value in number:
                    return "value", number[value]
                if value.target is compute:
                    return "size", value.args[0], tuple(value.meta["names"])
                return "number", value.meta["input"][1]
            if isinstance(value, (list, tuple)):
                return type(value), *[written(v) for v in value]
            return type(value), str(value)

        return (
            tuple(look(v) for v in self.fakes),
            tuple(
                (node.target, written(node.args), written(sorted(node.kwargs.items())))
                for node in self.inside
            ),
            tuple(number[o] for o in self.outputs),
        )


@dataclass
class _Segment:
    """The steps between two that call user code: what goes first, tensor code, what goes last."""

    first: list[torch.fx.Node] = field(default_factory=list)
    middle: list[torch.fx.Node] = field(default_factory=list)
    last: list[torch.fx.Node] = field(default_factory=list)

    def arrange(self) -> None:
        """Put the steps in that order in the graph.

        Saved tensors are let go of before the stretch: it frees its inputs itself, each after its
        last use.
        """
        anchor = min((*self.first, *self.middle, *self.last))
        at = anchor.prev
        for node in (*self.first, *self.middle, *self.last):
            at.append(node)
            at = node


def _segments(graph: torch.fx.Graph) -> list[_Segment]:
    found = []
    segment = _Segment()
    owned: set[int] = set()  # storages that steps of the segment made
    shown: set[int] = set()  # storages that `last` steps of it were given
    opaque: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        target = node.target
        before = _storages(node.all_input_nodes)
        if target in _FIRST or target is compute:
            segment.first.append(node)
        elif target is item and node.args[0] in opaque:
            segment.first.append(node)
        elif target in _LAST:
            segment.last.append(node)
            shown |= before
        elif _is_tensor_code(node) and all(
            key in owned and key not in shown for key in _written(node)
        ):
            segment.middle.append(node)
            owned |= _storages([node]) - before
        else:
            found.append(segment)
            segment, owned, shown = _Segment(), set(), set()
            opaque.add(node)
    found.append(segment)
    return found


def _is_tensor_code(node: torch.fx.Node) -> bool:
    if node.target is item:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if any(tag in node.target.tags for tag in _UNFIT_TAGS):
        return False
    values = _tensors(node.meta.get("val"))
    given = [v for n in node.all_input_nodes for v in _tensors(n.meta.get("val"))]
    # What `item` takes of it is a step of its own; anything else than tensors has no value here.
    return bool(values) and all(_private.has_plain_storage(v) for v in (*values, *given))


def _written(node: torch.fx.Node) -> Iterable[int]:
    """The storages that a step changes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    schema = node.target._schema
    if not schema.is_mutable:
        return
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for n in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(n, torch.fx.Node):
                    for v in _tensors(n.meta.get("val")):
                        yield _private.storage_key(v)


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _computes(node: torch.fx.Node) -> bool:
    """Whether a step does more than look at its inputs in another way."""
    if node.target is item:
        return False
    before = _storages(node.all_input_nodes)
    return bool(_storages([node]) - before)


def _storages(nodes: Iterable[torch.fx.Node]) -> set[int]:
    """Where the values of these steps lie. Fake tensors share memory as the real ones do."""
    return {_private.storage_key(v) for n in nodes for v in _tensors(n.meta.get("val"))}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, Tensor)]
    return []


def _lines_of(nodes: Iterable[torch.fx.Node]) -> str:
    """The lines of the forward whose backward this is."""
    specs = [s for s in (n.meta.get("spec") for n in nodes) if s is not None]
    found = list(dict.fromkeys(f"{s.op} {s.where}".rstrip() for s in specs))
    text = ", ".join(found[:3])
    return f"{text}, ... {found[-1]}" if len(found) > 3 else text


def _name_of(backend: Any) -> str:
    return getattr(backend, "__name__", None) or type(backend).__name__


def _no_compiler() -> CompileError:
    return CompileError(
        "backend='inductor' compiles C++ for the CPU and has found no compiler. Install g++ or "
        "clang (Debian: apt install g++; conda: conda install gxx), or name one in the environment "
        "variable CXX. Without a compiler, backend=None runs the same program, op by op."
    )
