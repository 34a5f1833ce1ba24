"""How many bytes a program holds at each step, told from metadata alone.

What is counted is what `stowgrad.inspect.Meter` counts: storages, each once, however many tensors
live in them. A storage is there from the step that makes it (or from the start) until the last use
of the last value in it, or until the node that saved it lets go of it, whichever is later.

Not known, and not counted: what user code inside an unpack, a hook or a custom function allocates
for itself, and what the caller of backward holds (other than leaves). Of a checkpointed region, the
tensors that it recomputes are counted from the first of its unpacks on, each until its own unpack
is used up; what its second run makes and does not save is not. With `create_graph`, what the
program's own graph would save is not counted. A compiled stretch is taken to need what its ops need
one by one, as while a dispatch mode looks on; compiled, it may need less or more.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _private
from . import steps
from .capture import Captured, Entry, Look, Spec, item

# What a storage is there for.
LEAVES = "leaves"
ACCUMULATED = "accumulated .grad"
SAVED = "saved"
UNPACKED = "unpacked"
GRADIENTS = "gradients and temporaries"
KINDS = (LEAVES, ACCUMULATED, SAVED, UNPACKED, GRADIENTS)


@dataclass
class Timeline:
    """The steps of a program with the bytes that are alive during each, in all and by kind."""

    steps: list[torch.fx.Node]
    live: list[int]
    kinds: dict[str, list[int]]

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(self.live, default=0)

    @property
    def peak_step(self) -> int:
        """The first step during which so many are alive."""
        return self.live.index(self.peak) if self.live else 0


def live_bytes(
    captured: Captured,
    sizes: dict[str, int] | None = None,
    *,
    grads_exist: bool | None = None,
    keep_graph: bool = False,
) -> list[int]:
    """The bytes alive during each step (each `call_function` node of the graph, in order).

    `sizes`: values for some of `captured.symbols` (default: those at capture). `grads_exist`:
    whether each leaf has a `.grad` that is added to (default: as it was at capture). `keep_graph`:
    as `retain_graph=True`, nothing saved is let go of. Raises ValueError for sizes that the program
    is not for.
    """
    return timeline(captured, sizes, grads_exist=grads_exist, keep_graph=keep_graph).live


def peak_bytes(
    captured: Captured,
    sizes: dict[str, int] | None = None,
    *,
    grads_exist: bool | None = None,
    keep_graph: bool = False,
) -> int:
    """The most bytes alive at once. Arguments as for `live_bytes`."""
    return timeline(captured, sizes, grads_exist=grads_exist, keep_graph=keep_graph).peak


def timeline(
    captured: Captured,
    sizes: dict[str, int] | None = None,
    *,
    grads_exist: bool | None = None,
    keep_graph: bool = False,
) -> Timeline:
    """As `live_bytes`, with the steps and the kinds."""
    return _Model(captured, Numbers(captured, sizes), grads_exist, keep_graph).timeline()


# -- sizes


class Numbers:
    """The value of each size under an assignment of the symbols."""

    def __init__(self, captured: Captured, sizes: dict[str, int] | None) -> None:
        self._symbols = captured.sizes.symbols
        self._values = {**captured.symbols, **(sizes or {})}
        self._code: dict[Any, int] = {}
        if not sizes:
            return
        unknown = sizes.keys() - captured.symbols.keys()
        if unknown:
            raise ValueError(
                f"no such size: {', '.join(sorted(unknown))}. The sizes of this program are "
                f"{', '.join(captured.symbols) or 'all fixed'}."
            )
        for name, value in sizes.items():
            if value < 2:
                raise ValueError(f"{name} = {value}: sizes of 0 and 1 are programs of their own")
        for guard in captured.guards:
            if not eval(guard, {"math": math}, self._values):
                raise ValueError(
                    f"the program is not for these sizes: {guard} does not hold for "
                    + ", ".join(f"{k}={v}" for k, v in self._values.items())
                )

    def __call__(self, size: Any) -> int:
        """`size`: an int, the name of a symbol, or a SymInt."""
        if isinstance(size, str):
            return self._values[size]
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        found = self._code.get(expression)
        if found is None:
            try:
                code, _ = _private.size_code(size, self._symbols)
                found = int(eval(code, {"math": math}, self._values))
            except KeyError:  # depends on the numbers in a tensor, which nobody knows
                found = 0
            self._code[expression] = found
        return found

    def shape(self, sizes: Iterable[Any]) -> list[int]:
        return [self(n) for n in sizes]

    def bytes_of(self, look: Look) -> int:
        return math.prod(self.shape(look.shape)) * look.dtype.itemsize


# -- values


def variable(node: torch.fx.Node) -> torch.fx.Node:
    """What the generated code calls the value of `node`: a `check` gives its argument itself."""
    while node.target is steps.check and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def last_uses(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """The last step that uses each variable (the step that makes it, if none does)."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        last[variable(node)] = node
        for used in node.all_input_nodes:
            last[variable(used)] = node
    return last


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value of a step, without those that have no storage of their own."""
    if isinstance(value, Tensor):
        if _private.has_plain_storage(value):
            yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors(v)


@dataclass(eq=False)
class _Storage:
    nbytes: int
    kind: str
    birth: int  # a step
    death: int = -1  # the last step during which it is alive
    # those that took it over: it is of another kind from a step on
    later: tuple[int, str] | None = None

    def until(self, step: int) -> None:
        self.death = max(self.death, step)


@dataclass
class _Model:
    """One pass over the steps finds the storages and how long each is alive."""

    captured: Captured
    numbers: Numbers
    grads_exist: bool | None
    keep_graph: bool
    inside: dict[int, int] = field(default_factory=dict)  # bytes that an op needs while it runs

    def timeline(self) -> Timeline:
        graph = self.captured.graph
        self.steps = [n for n in graph.nodes if n.op == "call_function"]
        self.end = len(self.steps)
        at = {node: i for i, node in enumerate(self.steps)}
        # a value lives from its step until the last use of its variable
        self.dies = {v: at.get(n, self.end) for v, n in last_uses(graph).items()}
        self.at = at
        self.all: list[_Storage] = []
        self.by_fake: dict[int, _Storage] = {}
        self.fetched: dict[Any, _Storage] = {}
        self.regions: dict[int, dict[Any, _Storage]] = {}
        self._inputs()
        for i, node in enumerate(self.steps):
            self._step(i, node)
        self._accumulate()
        return self._add_up()

    def _new(self, nbytes: int, kind: str, birth: int, death: int = -1) -> _Storage:
        made = _Storage(nbytes, kind, birth, max(birth, death))
        self.all.append(made)
        return made

    # -- what is there at the start

    def _inputs(self) -> None:
        captured, notes = self.captured, self.captured.storages
        self.by_number: dict[int, _Storage] = {}
        self.entries: dict[Any, tuple[Spec, Entry]] = {
            (spec.index, entry.slot): (spec, entry)
            for spec in captured.specs
            for entry in _flat(spec.entries)
        }
        self.number_bytes = self._bytes_by_number()
        releases = {
            node.meta["spec"].index: i
            for i, node in enumerate(self.steps)
            if node.target is steps.release
        }
        read = {
            node.meta["input"][1]
            for node in captured.graph.nodes
            if node.op == "placeholder" and node.meta["input"][0] in ("raw", "saved")
        }

        def held(index: int) -> int:
            """The last step at which node `index` of the graph holds what it saved."""
            if self.keep_graph:
                return self.end
            if index in releases:
                return releases[index]
            spec = captured.specs[index]
            return -1 if spec.stolen or index in read else self.end

        for number in {*notes.variables.values(), *notes.leaves}:
            self._numbered(number).until(self.end)
        for place, number in notes.saved.items():
            self._numbered(number).until(held(place[0]))
        for place, found in notes.held.items():
            for number in found:
                self._numbered(number).until(held(place[0]))
        for index, found in notes.opaque.items():
            for number in found:
                self._numbered(number).until(held(index))

        for node in captured.graph.nodes:
            if node.op != "placeholder":
                continue
            what = node.meta["input"]
            if what[0] in ("raw", "saved"):
                if what[1:] not in notes.saved:
                    continue
                storage = self._numbered(notes.saved[what[1:]])
                storage.until(self.dies.get(node, -1))
                for t in tensors(node.meta["val"]):
                    self.by_fake[_private.storage_key(t)] = storage
            elif what[0] in ("grad", "constant"):  # the caller, and the program, hold them
                kind = GRADIENTS if what[0] == "grad" else SAVED
                for t in tensors(node.meta["val"]):
                    nbytes = self._nbytes(t)
                    self.by_fake[_private.storage_key(t)] = self._new(nbytes, kind, 0, self.end)

    def _bytes_by_number(self) -> dict[int, int]:
        """The bytes of each storage that is there at the start, under the sizes asked for.

        Known is what a storage had at capture, and how each saved tensor in it depends on the
        sizes. A storage is taken to grow as the largest tensor in it does.
        """
        captured, notes = self.captured, self.captured.storages
        before = Numbers(captured, None)
        largest: dict[int, tuple[int, Look]] = {}

        def consider(number: int, look: Look | None) -> None:
            if look is not None:
                nbytes = before.bytes_of(look)
                if nbytes > largest.get(number, (0, look))[0]:
                    largest[number] = nbytes, look

        for index, number in notes.variables.items():
            consider(number, captured.specs[index].look)
        for places in (notes.saved, notes.origins):
            for place, number in places.items():
                if place in self.entries:
                    consider(number, self.entries[place][1].look)
        found = dict(enumerate(notes.nbytes))
        for number, (nbytes, look) in largest.items():
            found[number] = found[number] * self.numbers.bytes_of(look) // nbytes
        return found

    def _numbered(self, number: int) -> _Storage:
        found = self.by_number.get(number)
        if found is None:
            kind = LEAVES if number in self.captured.storages.leaves else SAVED
            found = self.by_number[number] = self._new(self.number_bytes[number], kind, 0)
            found.death = -1  # until somebody holds it
        return found

    def _nbytes(self, tensor: Tensor) -> int:
        return self.numbers(tensor.untyped_storage().nbytes())

    # -- steps

    def _step(self, i: int, node: torch.fx.Node) -> None:
        target: Any = node.target
        value = node.meta.get("val")
        if value is None:  # what it gives is known by what is taken from it
            value = [u.meta.get("val") for u in node.users if u.target is item]
        fakes = list(tensors(value))
        if target in (steps.check, steps.read, steps.packed, steps.unpack):
            self._same(fakes, self._saved(i, node))
        elif target is getattr(steps, "fetch", None):
            self._fetch(i, node)
        elif target in (steps.tensor_hooks, steps.leaf_hooks):
            self._same(fakes, self._of(node.args[-1]))  # taken to hand on what it gets
        elif target in (steps.pre_hooks, steps.post_hooks):
            given = node.args[1:] if target is steps.pre_hooks else node.args[1]
            for user in node.users:
                if user.target is item:
                    passed = self._of(given[user.args[1]])  # type: ignore[index]
                    self._same(list(tensors(user.meta.get("val"))), passed)
        elif target is steps.retain_grad:
            for t in tensors([a.meta.get("val") for a in _nodes(node.args)]):
                self._new(self._nbytes(t), ACCUMULATED, i, self.end)
        elif isinstance(target, torch._ops.OpOverload) and _private.is_composite(target):
            self.inside[i] = self._inside(node)
        elif isinstance(module := getattr(target, "source", None), torch.fx.GraphModule):
            self.inside[i] = self._inside_stretch(module.graph)
        dies = self.dies.get(variable(node), i)
        for fake in fakes:
            key = _private.storage_key(fake)
            found = self.by_fake.get(key)
            if found is None:
                found = self.by_fake[key] = self._new(self._nbytes(fake), GRADIENTS, i)
            found.until(dies)

    def _same(self, fakes: list[Tensor], storage: _Storage | None) -> None:
        if storage is not None:
            for fake in fakes:
                self.by_fake[_private.storage_key(fake)] = storage

    def _of(self, value: Any) -> _Storage | None:
        """The storage of what is given to a step."""
        for node in _nodes(value):
            for t in tensors(node.meta.get("val")):
                return self.by_fake.get(_private.storage_key(t))
        return None

    def _saved(self, i: int, node: torch.fx.Node) -> _Storage | None:
        """The storage in which a saved tensor is when it is read at step `i`."""
        notes = self.captured.storages
        place = _place(node)
        if place in notes.saved:
            return self._numbered(notes.saved[place])
        if place not in self.entries:
            return None
        if place in self.fetched:
            return self.fetched.pop(place)
        origin = notes.origins.get(place)
        if origin is not None and origin in notes.held.get(place, ()):
            return self._numbered(origin)  # the hook kept the tensor itself
        region = notes.region.get(place)
        if region is not None:
            if region not in self.regions:
                self.regions[region] = self._recompute(i, region)
            found = self.regions[region].get(origin)
            if found is not None:
                return found
        return self._new(self._unpacked_bytes(place), UNPACKED, i)

    def _unpacked_bytes(self, place: Any) -> int:
        notes = self.captured.storages
        if place in notes.whole:
            return self.number_bytes[notes.origins[place]]
        look = self.entries[place][1].look
        assert look is not None
        return self.numbers.bytes_of(look)

    def _recompute(self, i: int, region: int) -> dict[Any, _Storage]:
        """All that a checkpointed region saved is there again from its first unpack on; each waits
        for its own."""
        notes = self.captured.storages
        made: dict[Any, _Storage] = {}
        for node in self.steps[i:]:
            place = _place(node) if node.target is steps.unpack else None
            if place is None or notes.region.get(place) != region:
                continue
            origin = notes.origins.get(place)
            if origin is None:
                continue
            if origin not in made:
                if origin in self.by_number and self.by_number[origin].death >= i:
                    made[origin] = self.by_number[origin]  # a leaf, or what the region began from
                else:
                    made[origin] = self._new(self.number_bytes[origin], UNPACKED, i)
            made[origin].until(self.at[node])
        return made

    def _fetch(self, i: int, node: torch.fx.Node) -> None:
        place = _place(node)
        if place in self.entries and place not in self.captured.storages.region:
            storage = self._new(self._unpacked_bytes(place), UNPACKED, i)
            self.fetched[place] = storage
            for later in self.steps[i + 1 :]:
                if later.target is steps.unpack and _place(later) == place:
                    storage.until(self.at[later])
                    break

    # -- gradients of leaves

    def _accumulate(self) -> None:
        notes = self.captured.storages
        outputs = self.captured.create_graph
        for i, node in enumerate(self.steps):
            if node.target is not steps.accumulate:
                continue
            spec: Spec = node.meta["spec"]
            assert spec.look is not None
            nbytes = self.numbers.bytes_of(spec.look)
            exists = self.grads_exist
            if exists is None:
                exists = spec.index in notes.with_grad
            if exists:
                self._new(nbytes, ACCUMULATED, 0, self.end)
                if outputs:  # the sum is a new tensor
                    self._new(nbytes, ACCUMULATED, i, i)
                continue
            grad = _nodes(node.args[1])
            storage = self._of(grad)
            fakes = [t for g in grad for t in tensors(g.meta.get("val"))]
            alone = storage is not None and storage.death == i and storage.later is None
            if alone and not outputs and fakes and self._laid_out(spec, fakes[0]):
                assert storage is not None
                storage.later = i + 1, ACCUMULATED
                storage.until(self.end)
            else:
                self._new(nbytes, ACCUMULATED, i, self.end)

    def _laid_out(self, spec: Spec, grad: Tensor) -> bool:
        """Whether a gradient's elements lie as those of the leaf do, so that it is taken over."""
        if spec.index not in self.captured.storages.in_order:
            return True
        expected = 1
        strides = self.numbers.shape(grad.stride())
        shape = self.numbers.shape(grad.shape)
        for n, stride in zip(reversed(shape), reversed(strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True

    # -- inside an op

    def _inside(self, node: torch.fx.Node) -> int:
        """The bytes that a composite op needs beside its arguments and results, while it runs."""
        mode = _private.new_fake_mode(None)
        with mode:
            args = torch.fx.map_arg(node.args, self._concrete)
            kwargs = torch.fx.map_arg(node.kwargs, self._concrete)
            with _Watch() as watch:
                try:
                    out = _private.run_parts(node.target, args, kwargs)
                except Exception:  # it takes sizes that only the whole op knows how to make
                    return 0
        results = {_private.storage_key(t) for t in tensors(out)}
        return max(0, watch.peak - sum(watch.seen.get(key, 0) for key in results))

    def _inside_stretch(self, graph: torch.fx.Graph) -> int:
        """As `_inside`, of a compiled stretch: what its ops need when they run one by one."""
        nodes = list(graph.nodes)
        at = {node: i for i, node in enumerate(nodes)}
        given: set[int] = set()
        births: dict[int, tuple[int, int]] = {}  # storage -> its first step, its bytes
        deaths: dict[int, int] = {}
        for i, node in enumerate(nodes):
            last = max((at[u] for u in node.users), default=i)
            for t in tensors(node.meta.get("val")):
                key = _private.storage_key(t)
                if node.op == "placeholder":
                    given.add(key)
                elif key not in given:
                    births.setdefault(key, (i, self._nbytes(t)))
                    deaths[key] = max(deaths.get(key, 0), last)
        changes = [0] * (len(nodes) + 1)
        for key, (birth, nbytes) in births.items():
            changes[birth] += nbytes
            changes[deaths[key] + 1] -= nbytes
        end = len(nodes) - 1
        results = sum(n for key, (_, n) in births.items() if deaths[key] == end)
        return max(itertools.accumulate(changes)) - results

    def _concrete(self, node: torch.fx.Node) -> Any:
        """The value of `node` as a fake tensor of fixed sizes."""

        def of(value: Any) -> Any:
            if isinstance(value, Tensor):
                shape, strides = self.numbers.shape(value.shape), self.numbers.shape(value.stride())
                return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
            if isinstance(value, (list, tuple)):
                return type(value)([of(v) for v in value])
            return self.numbers(value) if isinstance(value, torch.SymInt) else value

        return of(node.meta.get("val"))

    # -- the sum

    def _add_up(self) -> Timeline:
        changes = {kind: [0] * (self.end + 1) for kind in KINDS}

        def add(nbytes: int, kind: str, first: int, last: int) -> None:
            if first <= last:
                changes[kind][first] += nbytes
                changes[kind][min(last + 1, self.end)] -= nbytes

        for s in self.all:
            if s.later is None:
                add(s.nbytes, s.kind, s.birth, s.death)
            else:
                at, kind = s.later
                add(s.nbytes, s.kind, s.birth, min(at - 1, s.death))
                if at < self.end:
                    add(s.nbytes, kind, at, s.death)
        for i, nbytes in self.inside.items():
            add(nbytes, GRADIENTS, i, i)
        kinds: dict[str, list[int]] = {}
        for kind, steps_of in changes.items():
            total, kinds[kind] = 0, []
            for change in steps_of[: self.end]:
                total += change
                kinds[kind].append(total)
        live = [sum(at) for at in zip(*kinds.values(), strict=True)]
        return Timeline(self.steps, live, kinds)


def _flat(entries: Iterable[Entry]) -> Iterator[Entry]:
    for entry in entries:
        if entry.kind == "list":
            yield from _flat(entry.parts)
        elif entry.kind != "value":
            yield entry


def _nodes(value: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(value, found.append)
    return found


def _place(node: torch.fx.Node) -> Any:
    """Which saved entry a check, read, unpack or fetch is of: the number of its node, its slot."""
    source = node.args[0]
    if isinstance(source, torch.fx.Node) and source.op == "placeholder":
        what = source.meta["input"]
        if what[0] in ("raw", "saved"):
            return what[1:]
    entry, spec = node.meta.get("entry"), node.meta.get("spec")
    return None if entry is None or spec is None else (spec.index, entry.slot)


class _Watch(TorchDispatchMode):
    """Within: `peak`, the most bytes that tensors made here hold at once. `seen`: by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self.seen: dict[int, int] = {}
        self._refs: list[Any] = []
        self._given: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in tensors(list(args)):
            key = _private.storage_key(t)
            if key not in self.seen:
                self._given.add(key)
        out = func(*args, **(kwargs or {}))
        for t in tensors(out):
            key = _private.storage_key(t)
            if key not in self.seen and key not in self._given:
                self._meet(t.untyped_storage(), key)
        return out

    def _meet(self, storage: Any, key: int) -> None:
        nbytes = self.seen[key] = storage.nbytes()
        self._refs.append(weakref.ref(storage, lambda _: self._gone(nbytes)))
        self._live += nbytes
        self.peak = max(self.peak, self._live)

    def _gone(self, nbytes: int) -> None:
        self._live -= nbytes
