"""Capture: one backward written down as a torch.fx graph.

The graph of nodes is copied: each node gets a stand-in of the same rule, whose saved tensors and
sizes are fake. The engine runs the copy as it would run the original, under a mode that writes
every ATen op down. So the order of everything is the engine's own. A stand-in's saved tensor is
a placeholder and a `check`, `read` or `unpack` step at the place where its rule first reads it;
hooks, accumulation, and nodes that cannot be traced are steps that call the real thing when the
program runs. Nothing of the user's runs here.

Sizes are symbols: equal numbers share one until a second capture shows them apart (what is 0 or 1
stays so). Where a rule looks at a size, the symbolic shapes of PyTorch note a guard.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import _private, engine
from ..graph import AccumulateNode, Edge, Node, NodeHooks, locate, seam
from ..rules.table import VERSION_BITS, RuleNode
from ..saved import SavedTensor, hooks, prefetch_of
from . import learned, steps
from .shapes import SHAPES
from .storages import Storages, note

MOST_NODES = 20_000  # more are run node by node: the code for them would take longer to make

Size = Any  # an int, or the name of a symbol


class Uncapturable(Exception):
    """This backward cannot be a program; the message says why. It is run node by node."""


@dataclass(frozen=True)
class Look:
    """What a tensor looks like: its shape (numbers and symbols), dtype and device."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device | None = None


@dataclass
class Entry:
    """One saved entry of a node. `kind`: "raw" (a tensor as it is), "plain" (a SavedTensor without
    hooks), "packed" (one with), "traced" (one whose unpack hook is traced: `value` is the hook and
    the structure of what it takes, `parts` the tensors in that), "value" (anything else), "list"
    (several of these)."""

    kind: str
    name: str
    look: Look | None = None
    value: Any = None
    parts: list[Entry] = field(default_factory=list)
    edge: bool = False  # its shape and dtype are those of an edge of the node
    slot: tuple[int, ...] = ()  # where it is in the node's `saved`
    strides: Any = None  # makes a fake tensor that is laid out so; None: contiguous
    placeholder: torch.fx.Node | None = None
    prefetch: bool = False  # its hooks can start a fetch early


@dataclass
class Link:
    """An edge: output `index` of node number `target`, whose gradient has `look`."""

    target: int
    index: int
    look: Look


@dataclass
class Spec:
    """What a program expects of one node of the graph it runs."""

    index: int
    kind: str  # "rule", "leaf", "opaque"
    cls: type
    plan: Any
    outputs: int
    links: list[Link | None]
    where: str
    op: str  # for people
    name: str  # of the node
    entries: list[Entry] = field(default_factory=list)
    values: dict[str, Any] | None = None
    metas: list[Look | None] | None = None
    edge_counts: list[int] | None = None
    look: Look | None = None  # of a leaf
    hooks: tuple[Any, ...] = ()  # which kinds of hook it has
    seq: float = 0.0
    placeholder: torch.fx.Node | None = None  # where the program needs the node itself
    stolen: bool = False  # what it saved is taken from it when the program begins
    versions: torch.fx.Node | None = None


@dataclass
class Captured:
    """A backward as a graph, and what it holds for."""

    graph: torch.fx.Graph
    specs: list[Spec]
    roots: list[tuple[int, int, Look]]  # node, output, and the look of the gradient
    inputs: list[tuple[int, int] | None] | None  # None in it: one that nothing leads to
    symbols: dict[str, int]  # with the values they had
    guards: list[str]  # Python expressions over the symbols
    notes: list[str]  # why some nodes are opaque
    create_graph: bool
    accumulate: bool
    constants: dict[str, Tensor]
    stream: list[int]
    structure: list[Any]
    sizes: Sizes
    unlearned: list[tuple[type, str, Any, list[bool]]]
    storages: Storages  # which saved tensors share memory, as at capture


class Sizes:
    """The symbols of one capture: one for each number that is a size, since many are the slower.

    `features`: the sizes of leaves, which stay. Such a number stays a number where it is the last
    size of a shape, or the channels of images: the width of a net, and not a batch of as many.
    `streams`: the numbers that were named, in turn, when other graphs of the same structure were
    captured. What has differed in any of them is two symbols, though it may be equal now.
    """

    def __init__(self, streams: Sequence[list[int]], features: frozenset[int]) -> None:
        self.env = _private.new_shape_env()
        self._features = features
        self.values: dict[str, Any] = {}
        self.symbols: dict[str, Any] = {}  # their SymInts
        self.stream: list[int] = []
        self._streams = streams
        self._names: dict[tuple[int, ...], str] = {}

    def name(self, value: int, feature: bool = False) -> Size:
        """The name of a size. What is 0 or 1 stays a number; so may what `feature` says is one."""
        at = len(self.stream)
        self.stream.append(value)
        if value < 2 or value > 2**31:
            return int(value)
        key = (value, *[s[at] for s in self._streams if at < len(s)])
        if feature and value in self._features and all(v == value for v in key):
            return int(value)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"s{len(self._names)}"
            self.values[name] = value
            self.symbols[name] = _private.new_size(self.env, name, value)
        return name

    def number(self, value: float) -> Size:
        """The name of a number that need be no size, and was another one before."""
        if type(value) is int:
            return self.name(value)
        name = f"f{len(self.values)}"
        self.values[name] = value
        self.symbols[name] = _private.new_number(self.env, name, value)
        return name

    def names(self, shape: Sequence[int], features: bool = True) -> tuple[Size, ...]:
        """The names of the sizes of a shape. `features`: it may have them, as indices have not."""
        last = len(shape) - 1
        return tuple([
            self.name(n, features and (i == last or (i == 1 and last > 2)))
            for i, n in enumerate(shape)
        ])  # fmt: skip

    def symbolic(self, size: Size) -> Any:
        return self.symbols[size] if isinstance(size, str) else size

    def shape(self, names: Sequence[Size]) -> torch.Size:
        return torch.Size([self.symbolic(n) for n in names])

    def guards(self) -> list[str]:
        """What the symbols must satisfy, as Python expressions over their names."""
        return _private.guards_of(self.env, self.symbols)


class Tracer(TorchDispatchMode):
    """Writes down every op that runs on fake tensors below it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.graph = torch.fx.Graph()
        self.fake = _private.new_fake_mode(sizes.env)
        self.spec: Spec | None = None  # the node whose derivative runs
        self.size_nodes: dict[Any, torch.fx.Node] = {}
        self.constants: dict[str, Tensor] = {}
        self.keep: list[Any] = []  # fake tensors, by whose identity values are found
        self.unknown: set[int] = set()  # fakes of gradients that may be None, or not strided
        self._values: dict[int, torch.fx.Node] = {}
        self._last: torch.fx.Node | None = None  # the last placeholder
        self.made: list[torch.fx.Node] = []  # the steps
        self.notes: list[str] = []
        self.create_graph = False
        # opaque nodes of which it is not known what they give: class, name, needs, and needed edges
        self.unlearned: list[tuple[type, str, Any, list[bool]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.spec is None and func is _ADD and (dense := _dense_of(args)) is not None:
            out = torch.empty_like(dense)
            self.record(steps.add, args, {}, out)
            return out
        out = SHAPES.get(func, func)(*args, **kwargs)
        if not isinstance(out, (Tensor, list, tuple)):
            return out
        if func in _LIFTS:  # a constant
            return out
        if self.spec is None and func is _ADD and any(id(a) in self.unknown for a in args):
            self.record(steps.add, args, {}, out)  # the engine adds gradients up
            self.unknown.add(id(out))
        else:
            self.record(func, args, kwargs, out)
        return out

    def record(self, target: Any, args: Any, kwargs: Any, out: Any) -> torch.fx.Node:
        node = self.call(target, self.arg(tuple(args)), self.arg(kwargs))
        self.bind(node, out)
        return node

    def call(self, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta["spec"] = self.spec
        self.made.append(node)
        return node

    def undo(self, mark: int) -> None:
        """Take back every step from number `mark` on."""
        gone = set(self.made[mark:])
        self.size_nodes = {k: n for k, n in self.size_nodes.items() if n not in gone}
        while len(self.made) > mark:
            self.graph.erase_node(self.made.pop())

    def bind(self, node: torch.fx.Node, out: Any) -> None:
        """`out` is what `node` gives."""
        node.meta["val"] = out
        if isinstance(out, Tensor):
            self._values[id(out)] = node
            self.keep.append(out)
        elif isinstance(out, (list, tuple)):
            for i, o in enumerate(out):
                if isinstance(o, Tensor):
                    self.bind(self.call(item, (node, i)), o)

    def value(self, tensor: Tensor) -> torch.fx.Node:
        node = self._values.get(id(tensor))
        if node is None:
            if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
                raise Uncapturable(f"a tensor of unknown origin in {self._where()}")
            name = f"constant_{len(self.constants)}"
            self.constants[name] = tensor
            node = self.placeholder(name, ("constant", name), tensor)
        return node

    def _where(self) -> str:
        return "the roots" if self.spec is None else f"{self.spec.op} {self.spec.where}"

    def arg(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.value(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.size(value)
        if isinstance(value, (list, tuple)):
            items = [self.arg(v) for v in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {k: self.arg(v) for k, v in value.items()}
        return value

    def size(self, value: Any) -> Any:
        """A symbolic number as a node (or a plain number, where it turned out to be one)."""
        code, names = _private.size_code(value, self.sizes.symbols)
        if not names:
            return eval(code)  # a number
        node = self.size_nodes.get(code)
        if node is None:
            if code in self.sizes.symbols:
                node = self.placeholder(code, ("size", code), value)
            else:
                symbols = [self.size(self.sizes.symbols[name]) for name in names]
                node = self.call(compute, (code, *symbols))
                node.meta.update(val=value, names=names)
            self.size_nodes[code] = node
        return node

    # -- inputs

    def node(self, spec: Spec) -> torch.fx.Node:
        """The placeholder of a node itself."""
        if spec.placeholder is None:
            spec.placeholder = self.placeholder(f"n{spec.index}", ("node", spec.index), None)
        return spec.placeholder

    def placeholder(self, name: str, kind: tuple[Any, ...], val: Any) -> torch.fx.Node:
        with self.graph.inserting_after(self._last):  # None: at the beginning
            node = self._last = self.graph.placeholder(name)
        node.meta.update(val=val, input=kind, spec=None)
        if isinstance(val, Tensor):
            self._values[id(val)] = node
            self.keep.append(val)
        return node

    def like(self, look: Look, strides: Callable[[list[Any]], Tensor] | None = None) -> Tensor:
        """A fake tensor that looks so."""
        shape = [self.sizes.symbolic(n) for n in look.shape]
        with _private.mode_off(self), self.fake:
            if strides is not None:
                return strides(shape)
            return torch.empty(shape, dtype=look.dtype, device=look.device)


_ADD = torch.ops.aten.add.Tensor
_LIFTS = frozenset([torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default])


def _dense_of(args: Sequence[Any]) -> Tensor | None:
    """The dense one of two gradients, where the other is sparse: fake tensors cannot add these."""
    dense = [a for a in args if a.layout is torch.strided]
    return dense[0] if len(dense) == 1 else None


def item(values: Any, index: int) -> Any:
    """The target of steps that take one of several results."""
    return values[index]


def compute(code: str, *symbols: int) -> Any:
    """The target of steps that compute a size from others; written out in the generated code."""
    raise AssertionError("never called")


# -- stand-ins for nodes


_classes: dict[type, type] = {}


def _traced_class(cls: type) -> type:
    """A subclass of `cls`, a node with saved entries, that is traced."""
    found = _classes.get(cls)
    if found is None:
        base: Any = cls

        def _unpack(self: Any, entry: Any) -> Any:
            if type(entry) is Entry:
                return _read(self.tracer, self.spec, entry)
            return [self._unpack(e) for e in entry] if isinstance(entry, list) else entry

        def apply(self: Any, grads: list[Any], needs: Any) -> Any:
            tracer = self.tracer
            if any(id(g) in tracer.unknown for g in grads):
                return _call_node(tracer, self.spec, grads, needs)
            mark, notes = len(tracer.made), len(tracer.notes)
            tracer.spec = self.spec
            try:
                results = base.apply(self, list(grads), needs)
                for g in results:
                    if g is not None:
                        tracer.value(g)
                        if _private.of_unknown_size(g):
                            raise Uncapturable("the shape of a gradient depends on data")
            except Exception as error:
                tracer.undo(mark)
                del tracer.notes[notes:]
                tracer.notes.append(f"{self.spec.op} {self.spec.where}: {brief(error)}")
                return _call_node(tracer, self.spec, grads, needs)
            finally:
                tracer.spec = None
            grads.clear()
            return results

        names: dict[str, Any] = {"_unpack": _unpack, "apply": apply, "release": _release}
        names["__slots__"] = ("spec", "tracer")
        found = _classes[cls] = type(cls.__name__, (cls,), names)
    return found


def brief(error: Exception) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text[:120]}"


class _Opaque(Node):
    """The stand-in of a node that cannot be traced."""

    __slots__ = ("runs_without_gradient", "spec", "tracer")

    spec: Spec
    tracer: Tracer

    def apply(self, grads: list[Any], needs: Any) -> Any:
        return _call_node(self.tracer, self.spec, grads, needs)

    def release(self) -> None:
        _release(self)


class _Leaf(Node):
    __slots__ = ("spec", "tracer")

    spec: Spec
    tracer: Tracer
    runs_without_gradient = True

    def apply(self, grads: list[Any], needs: Any) -> Any:
        tracer, spec = self.tracer, self.spec
        grad = grads[0]
        grads.clear()
        tracer.spec = spec
        if grad is not None:
            tracer.call(
                steps.accumulate, (tracer.node(spec), [tracer.arg(grad)], bool(spec.hooks))
            )
        if "post_accumulate" in spec.hooks:
            tracer.call(steps.post_accumulate_hooks, (tracer.node(spec),))
        tracer.spec = None
        return ()


def _release(self: Any) -> None:
    if self.spec.kind == "opaque" or self.spec.entries:
        self.tracer.spec = self.spec
        self.tracer.call(steps.release, (self.tracer.node(self.spec),))
        self.tracer.spec = None


def _read(tracer: Tracer, spec: Spec, entry: Entry) -> Tensor:
    """Where a rule reads a saved tensor: the placeholder of it, and the step that reads it."""
    assert entry.look is not None
    if entry.kind == "raw":
        if entry.placeholder is None:
            name = f"n{spec.index}_{entry.name}"
            fake = tracer.like(entry.look, entry.strides)
            entry.placeholder = tracer.placeholder(name, ("raw", spec.index, entry.slot), fake)
        if spec.versions is None:
            name = f"n{spec.index}_versions"
            spec.versions = tracer.placeholder(name, ("versions", spec.index), 0)
        shift = entry.slot[0] * VERSION_BITS
        step = tracer.call(steps.check, (entry.placeholder, spec.versions, shift))
    else:
        if entry.placeholder is None:
            name = f"n{spec.index}_{entry.name}"
            kind = ("saved", spec.index, entry.slot)
            entry.placeholder = tracer.placeholder(name, kind, None)
        owner = tracer.node(spec) if tracer.create_graph else None
        if entry.kind == "traced" and owner is None:
            return _traced_unpack(tracer, entry)
        target = steps.read if entry.kind == "plain" else steps.unpack
        step = tracer.call(target, (entry.placeholder, owner))
    value = tracer.like(entry.look, entry.strides)
    tracer.bind(step, value)
    step.meta["entry"] = entry
    return value


def _traced_unpack(tracer: Tracer, entry: Entry) -> Tensor:
    """The ops of an unpack hook that is plain tensor code."""
    unpack, (others, structure) = entry.value
    fakes = []
    for i, part in enumerate(entry.parts):
        assert part.look is not None
        fakes.append(tracer.like(part.look, part.strides))
        step = tracer.call(steps.packed, (entry.placeholder, i))
        tracer.bind(step, fakes[-1])
        step.meta["entry"] = entry
    left = iter(fakes)
    leaves = [next(left) if x is None else x[0] for x in others]
    value = unpack(tree_unflatten(leaves, structure))
    look = entry.look
    assert look is not None
    if not isinstance(value, Tensor) or value.dtype != look.dtype:
        raise Uncapturable("its unpack hook returned something else than was packed")
    if value.shape != tracer.sizes.shape(look.shape):
        raise Uncapturable("its unpack hook returned another shape than was packed")
    return value


def _call_node(tracer: Tracer, spec: Spec, grads: list[Any], needs: Any) -> list[Any]:
    tracer.spec = spec
    given = [tracer.arg(g) for g in grads]
    device = next((g.device for g in grads if g is not None), None)
    certain = not any(id(g) in tracer.unknown for g in grads)
    grads.clear()
    wanted = None if needs is None else list(needs)
    sure = learned.gives(spec.cls, spec.name, wanted) if certain else None
    needed = [k is not None and (wanted is None or wanted[i]) for i, k in enumerate(spec.links)]
    if sure is None or len(sure) != len(needed):
        if certain:
            tracer.unlearned.append((spec.cls, spec.name, wanted, needed))
        sure = [False] * len(needed)
    sure = [a and b for a, b in zip(sure, needed, strict=True)]
    assumed = sure if any(sure) else None
    step = tracer.call(steps.call_node, (tracer.node(spec), given, wanted, assumed))
    results: list[Any] = []
    for i, link in enumerate(spec.links):
        if link is None or not needed[i]:
            results.append(None)
            continue
        look = link.look if device is None else replace(link.look, device=device)
        value = tracer.like(look)
        tracer.bind(tracer.call(item, (step, i)), value)
        if not sure[i]:
            tracer.unknown.add(id(value))
        results.append(value)
    tracer.spec = None
    return results


def _stand_in_hooks(tracer: Tracer, spec: Spec, node: Node) -> NodeHooks | None:
    """Hooks that write down that the real ones are called there."""
    if not spec.hooks:
        return None
    made = NodeHooks()

    def step(target: Any, *args: Any) -> Any:
        before, tracer.spec = tracer.spec, spec
        try:
            return tracer.call(target, (tracer.node(spec), *args))
        finally:
            tracer.spec = before

    def fresh(grad: Any, made_by: Any, unknown: bool = False) -> Any:
        """What a hook gives for `grad`: something that looks the same."""
        with _private.mode_off(tracer), tracer.fake:
            value = torch.empty_like(grad)
        tracer.bind(made_by, value)
        if unknown or id(grad) in tracer.unknown:
            tracer.unknown.add(id(value))
        return value

    def on_tensor(target: Any, *index: int) -> Callable[[Any], Any]:
        def hook(grad: Any) -> Any:
            called = step(target, *index, [tracer.arg(grad)])
            return None if grad is None else fresh(grad, called)

        return hook

    def retaining(index: int) -> Callable[[Any], Any]:
        def hook(grad: Any) -> None:
            step(steps.retain_grad, index, tracer.arg(grad))

        return hook

    def before(grads: Any) -> Any:
        called = step(steps.pre_hooks, *[tracer.arg(g) for g in grads])
        return items(called, grads)

    def afterwards(results: Any, grads: Any) -> Any:
        given = [[tracer.arg(g) for g in gs] for gs in (results, grads)]
        return items(step(steps.post_hooks, *given), results)

    def items(called: torch.fx.Node, grads: Any) -> list[Any]:
        """The results of a hook that gives several, some of which may be None then."""
        before, tracer.spec = tracer.spec, spec
        found = [
            None if g is None else fresh(g, tracer.call(item, (called, i)), unknown=True)
            for i, g in enumerate(grads)
        ]
        tracer.spec = before
        return found

    for kind in spec.hooks:
        if kind == "leaf":
            made.tensor.setdefault(0, OrderedDict())[-1] = on_tensor(steps.leaf_hooks)
        elif kind == "pre":
            made.pre[0] = before
        elif kind == "post":
            made.post[0] = afterwards
        elif isinstance(kind, tuple) and kind[0] == "tensor":
            hook = on_tensor(steps.tensor_hooks, kind[1])
            made.tensor.setdefault(kind[1], OrderedDict())[0] = hook
        elif isinstance(kind, tuple) and kind[0] == "retain":
            made.tensor.setdefault(kind[1], OrderedDict())[1] = retaining(kind[1])
    return made


def hook_kinds(node: Node) -> tuple[Any, ...]:
    """Which kinds of hook a node has, in the order in which they run."""
    kinds: list[Any] = []
    if type(node) is AccumulateNode:
        if _private.native_hooks(node.variable):
            kinds.append("leaf")
        if node.variable._post_accumulate_grad_hooks:
            kinds.append("post_accumulate")
    hooked = node.hooks
    if hooked is not None:
        kinds += [("tensor", i) for i, fns in hooked.tensor.items() if fns]
        kinds += [("retain", i) for i, ref in hooked.retained.items() if ref() is not None]
        if hooked.pre:
            kinds.append("pre")
        if hooked.post:
            kinds.append("post")
    return tuple(kinds)


# -- reading a graph


_SIZE_FACTS = frozenset(["shape", "stride", "storage_offset"])
_SIZE_ARGUMENTS = frozenset([
    "size", "shape", "sizes", "split_size", "split_sizes", "start", "end", "length", "output_size",
    "repeats", "normalized_shape", "stride_size", "sizes_or_sections",
])  # fmt: skip
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout,
          torch.memory_format)  # fmt: skip


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return isinstance(value, _PLAIN)


def _named(sizes: Sizes, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        if all(type(v) is int for v in value):
            return sizes.names(value)
        return tuple([_named(sizes, v) for v in value])
    return sizes.name(value) if type(value) is int else value


def has_sizes(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(has_sizes(v) for v in value)
    return isinstance(value, str) and value[:1] in "sf" and value[1:].isdigit()


def _symbolic(sizes: Sizes, value: Any, like: Any) -> Any:
    if isinstance(value, tuple):
        items = [_symbolic(sizes, v, x) for v, x in zip(value, like, strict=True)]
        if isinstance(like, list):
            return items
        return torch.Size(items) if isinstance(like, torch.Size) else tuple(items)
    return sizes.symbolic(value) if type(like) in (int, float) else value


def _look(sizes: Sizes, tensor: Any, with_device: bool = True) -> Look:
    """`tensor`: a Tensor, an Edge or a SavedInfo."""
    dtype = tensor.dtype
    shape = sizes.names(tensor.shape, dtype.is_floating_point or dtype.is_complex)
    return Look(shape, dtype, tensor.device if with_device else None)


def _look_of_leaf(like: Any, device: torch.device | None) -> Look:
    """What a leaf, or a gradient of it, looks like: in numbers, since parameters keep theirs."""
    return Look(tuple(like.shape), like.dtype, device)


def _edge_look(sizes: Sizes, edge: Edge) -> Look:
    if type(edge.node) is AccumulateNode:
        return _look_of_leaf(edge, None)
    return _look(sizes, edge, False)


def _strides(sizes: Sizes, tensor: Tensor) -> Any:
    """A function that makes a fake tensor laid out as `tensor` is; None if it is contiguous."""
    if tensor.is_contiguous():
        return None
    dtype, device = tensor.dtype, tensor.device
    stride = tensor.stride()
    if _private.dense(tensor):
        dims = range(tensor.dim())
        order = sorted(dims, key=lambda d: (stride[d], tensor.shape[d] != 1), reverse=True)
        back = [order.index(d) for d in dims]
        return lambda shape: torch.empty(
            [shape[d] for d in order], dtype=dtype, device=device
        ).permute(back)
    return _Strided(sizes, tensor)


class _Strided:
    """Makes fake tensors with strides like those of `tensor`, which has gaps or overlaps."""

    def __init__(self, sizes: Sizes, tensor: Tensor) -> None:
        self.names = sizes.names(tensor.stride())
        self._sizes, self._dtype, self._device = sizes, tensor.dtype, tensor.device

    def __call__(self, shape: Any) -> Tensor:
        strides = [self._sizes.symbolic(n) for n in self.names]
        return torch.empty_strided(shape, strides, dtype=self._dtype, device=self._device)


def _check_tensor(tensor: Tensor) -> None:
    if not _private.has_plain_storage(tensor):
        raise Uncapturable(f"a tensor of class {type(tensor).__name__} or layout {tensor.layout}")


def packed_leaves(value: Any) -> tuple[list[Tensor], list[Any], Any]:
    """The tensors in a packed value; the other leaves, None where a tensor is; the structure."""
    leaves, spec = tree_flatten(value)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return tensors, [None if isinstance(x, Tensor) else (x,) for x in leaves], spec


def _entry(
    sizes: Sizes, saved: Any, name: str, slot: tuple[int, ...], link: Link | None = None
) -> Entry:
    if isinstance(saved, Tensor):
        _check_tensor(saved)
        look = _look(sizes, saved) if link is None else Look(link.look.shape, saved.dtype, None)
        if look.device is None:
            look = Look(look.shape, look.dtype, saved.device)
        strides = _strides(sizes, saved)
        return Entry("raw", name, look, edge=link is not None, slot=slot, strides=strides)
    if isinstance(saved, SavedTensor):
        data, packed = saved._data, saved._packed
        if data is not None:
            _check_tensor(data)
            look = _look(sizes, data)
            return Entry("plain", name, look, slot=slot, strides=_strides(sizes, data))
        if packed is None:
            raise Uncapturable("its graph was freed")
        if getattr(packed.pair.unpack, "traceable", False):
            leaves, *structure = packed_leaves(packed.value)
            if all(_private.has_plain_storage(t) for t in leaves):
                parts = [
                    Entry("raw", name, _look(sizes, t), strides=_strides(sizes, t)) for t in leaves
                ]
                value = (packed.pair.unpack, structure)
                return Entry("traced", name, _look(sizes, packed.info), value, parts, slot=slot)
        ahead = prefetch_of(packed.pair.unpack) is not None
        return Entry("packed", name, _look(sizes, packed.info), slot=slot, prefetch=ahead)
    if isinstance(saved, list):
        parts = [_entry(sizes, e, f"{name}_{i}", (*slot, i)) for i, e in enumerate(saved)]
        return Entry("list", name, parts=parts, slot=slot)
    if not _is_plain(saved):
        raise Uncapturable(f"a saved value of class {type(saved).__name__}")
    return Entry("value", name, value=saved, slot=slot)


def _spec(
    sizes: Sizes, index: int, node: Any, numbers: dict[Node, int], earlier: list[Spec]
) -> Spec:
    """What a program depends on of `node`. `earlier`: the same in graphs of that structure."""
    links = [
        None if e is None else Link(numbers[e.node], e.index, _edge_look(sizes, e))
        for e in node.edges
    ]
    spec = Spec(
        index, "opaque", type(node), None, node.outputs, links, locate(node.where), node.name(),
        node.name(),
        hooks=hook_kinds(node), seq=node.seq,
    )  # fmt: skip
    if type(node) is AccumulateNode:
        spec.kind, spec.look = "leaf", _look_of_leaf(node.variable, node.variable.device)
        return spec
    if not getattr(node, "traceable", False):
        return spec
    if node.saved is None:
        raise Uncapturable("its graph was freed")
    values, facts = node.values, {}
    if isinstance(node, RuleNode):
        spec.op = node.rule.name
        facts = {key: fact for key, _, fact in node.plan.facts}
        names = list(node.plan.index)
        linked = [links[i] if i >= 0 else None for _, _, i in node.plan.fast_inputs]
    else:
        names, linked = [f"saved_{i}" for i in range(len(node.saved))], []
    if values is not None and not _is_plain(list(values.values())):
        return spec  # a generator, say: it runs as it is
    spec.kind, spec.plan = "rule", node.plan
    for i, saved in enumerate(node.saved):
        link = linked[i] if i < len(linked) else None
        entry = _entry(sizes, saved, names[i], (i,), link)
        if any(_differs(s.entries[i].value, saved) for s in earlier if i < len(s.entries)):
            entry.value = sizes.number(saved)
        spec.entries.append(entry)
    if values is not None:
        spec.values = {}
        for key, value in values.items():
            sized = (
                facts.get(key) in _SIZE_FACTS
                or key in _SIZE_ARGUMENTS
                or not isinstance(node, RuleNode)
            )
            named = _named(sizes, value) if sized else value
            if not sized and any(_differs((s.values or {}).get(key), value) for s in earlier):
                named = sizes.number(value)
            spec.values[key] = named if has_sizes(named) else value
    metas = getattr(node, "metas", None)
    if metas is not None:
        spec.metas = [None if m is None else Look(sizes.names(m[0]), m[1], m[2]) for m in metas]
    spec.edge_counts = getattr(node, "edge_counts", None)
    return spec


def _differs(before: Any, value: Any) -> bool:
    """Whether an argument that is a number was another one in an earlier graph, or no fixed one."""
    if type(value) not in (int, float) or not math.isfinite(value):
        return False  # that an infinite one is a guard could not say
    return has_sizes(before) or (type(before) is type(value) and before != value)


def _copy(tracer: Tracer, spec: Spec, node: Any) -> Node:
    """The stand-in of `node`; its edges are set later."""
    made: Any
    if spec.kind == "leaf":
        made = _Leaf((), 1)
    elif spec.kind == "opaque":
        made = _Opaque((), node.outputs)
        made.runs_without_gradient = node.runs_without_gradient
    else:
        cls = _traced_class(type(node))
        made = object.__new__(cls)
        for base in type(node).__mro__:
            for slot in getattr(base, "__slots__", ()):
                if slot not in ("__weakref__", "__dict__") and hasattr(node, slot):
                    setattr(made, slot, getattr(node, slot))
        made.saved = [_handed(e, tracer.sizes) for e in spec.entries]
        if spec.values is not None:
            made.values = {
                k: _symbolic(tracer.sizes, v, node.values[k]) if v is not node.values[k] else v
                for k, v in spec.values.items()
            }
        if spec.metas is not None:
            made.metas = [
                None if m is None else (tracer.sizes.shape(m.shape), m.dtype, m.device)
                for m in spec.metas
            ]
    made.seq, made.code, made.offset = node.seq, node.code, node.offset
    made.spec, made.tracer = spec, tracer
    made.hooks = _stand_in_hooks(tracer, spec, node)
    return made


def _handed(entry: Entry, sizes: Sizes) -> Any:
    if entry.kind == "value":
        return sizes.symbolic(entry.value) if has_sizes(entry.value) else entry.value
    return [_handed(e, sizes) for e in entry.parts] if entry.kind == "list" else entry


def capture(
    roots: Sequence[tuple[Edge, Tensor]],
    create_graph: bool = False,
    inputs: Sequence[Edge] | None = None,
    accumulate: bool = True,
    before: Sequence[Captured] = (),
) -> Captured:
    """The backward from `roots` as a graph. The recorder must be off, the graph is left alone.

    `before`: captures of other graphs that began from the same op; those of the same structure tell
    which sizes are equal by chance. Raises Uncapturable where it cannot be one.
    """
    order = list(engine.count_edges(edge.node for edge, _ in roots))
    if len(order) > MOST_NODES:
        raise Uncapturable(f"it has {len(order)} nodes, and a program at most {MOST_NODES}")
    numbers = {node: i for i, node in enumerate(order)}
    structure = [
        (
            getattr(n, "plan", type(n)),
            [e and (numbers[e.node], e.index, len(e.shape)) for e in n.edges],
        )
        for n in order
    ]
    leaves = [n.variable.shape for n in order if type(n) is AccumulateNode]
    alike = [b for b in before if b.structure == structure]
    sizes = Sizes(
        [b.stream for b in alike],
        frozenset(size for shape in leaves for size in shape),
    )
    tracer = Tracer(sizes)
    tracer.create_graph = create_graph
    specs = [
        _spec(sizes, i, node, numbers, [b.specs[i] for b in alike]) for i, node in enumerate(order)
    ]
    made = [_copy(tracer, spec, node) for spec, node in zip(specs, order, strict=True)]
    for spec, node in zip(specs, made, strict=True):
        node.edges = [
            None if k is None else Edge(
                made[k.target], k.index, sizes.shape(k.look.shape), k.look.dtype
            )
            for k in spec.links
        ]  # fmt: skip
    starts = []
    looks = []
    for i, (edge, grad) in enumerate(roots):
        _check_tensor(grad)
        if grad.shape != edge.shape or grad.dtype != edge.dtype:
            raise Uncapturable("a gradient of another shape or dtype than its output")
        look = _look(sizes, grad)
        fake = tracer.like(look)
        tracer.placeholder(f"grad_{i}", ("grad", i), fake)
        # the matcher sees to it that an output has the shape and dtype of its gradient
        shape = sizes.shape(look.shape)
        starts.append((Edge(made[numbers[edge.node]], edge.index, shape, edge.dtype), fake))
        looks.append((numbers[edge.node], edge.index, look))
    targets = chosen = None
    if inputs is not None:
        chosen = [(numbers[e.node], e.index) if e.node in numbers else None for e in inputs]
        targets = [
            Edge(made[k[0]], k[1], e.shape, e.dtype)
            for k, e in zip(chosen, inputs, strict=True)
            if k is not None
        ]
    user, seam.user = seam.user, None
    ignored, hooks.ignored = hooks.ignored, True
    try:
        with _private.no_transforms(), _private.quiet_fakes(), tracer.fake, tracer:
            found = engine.run(starts, False, create_graph, targets, accumulate, in_place=False)
    finally:
        seam.user = user
        hooks.ignored = ignored
    arrived = iter(found)
    found = [next(arrived) if k is not None else None for k in chosen or ()]
    outputs = tuple([None if g is None else tracer.value(g) for g in found])
    tracer.graph.output(outputs)
    return Captured(
        tracer.graph, specs, looks, chosen,
        sizes.values, sizes.guards(), tracer.notes, create_graph, accumulate,
        tracer.constants, sizes.stream, structure, sizes, tracer.unlearned, note(order, specs),
    )  # fmt: skip
