"""Saved tensors: what autograd keeps between forward and backward, and the hooks on it.

A SavedTensor holds either a tensor or whatever a `pack` hook made of it, never both. Hooks come
from the thread's stack of default pairs (only the innermost applies) or are registered on one
saved tensor. Every access unpacks anew, and checks by version counter that nothing changed the
tensor in place meanwhile; a packed value that still shares the tensor's memory is checked too.

This module knows graph.py (whose output it was) and nothing of rules, modes, policies or
programs.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from . import _private
from .errors import GraphFreedError, HookError, HooksDisabledError, SavedTensorChanged, describe
from .graph import Edge, Location, Node, attach, call_user, locate, seam, state

# `pack(tensor)`; or, if the function has a true attribute `wants_info`, `pack(info, tensor)`.
Pack = Callable[..., Any]
Unpack = Callable[[Any], Tensor]

_DISABLED = (
    "saved-tensor hooks are disabled here. Leave the disable_saved_tensors_hooks() block, or do "
    "without hooks in it."
)


class HookPair(NamedTuple):
    pack: Pack
    unpack: Unpack


class HookStack(threading.local):
    """The default hooks of this thread: the innermost pair is the last. A new thread starts clean.

    `disabled`: the message with which entering hooks fails, or None. `ignored`: saving behaves as
    if the stack were empty, while push and pop go on as before (capture sets it). `floor`: how
    many of the pairs lie under the user's code (`stowgrad run` puts one there): they apply as any
    other does, but code may disable hooks and cannot pop them.
    """

    def __init__(self) -> None:
        self.pairs: list[HookPair] = []
        self.floor = 0
        self.disabled: str | None = None
        self.ignored = False


hooks = HookStack()


def push_hooks(pack: Pack, unpack: Unpack) -> None:
    """Make (pack, unpack) the pair that applies to what this thread saves from here on.

    Raises HooksDisabledError, with the message given there, where hooks are disabled; HookError
    for a pair that cannot be called.
    """
    hooks.pairs.append(_pair_of(pack, unpack))


def _pair_of(pack: Pack, unpack: Unpack) -> HookPair:
    if hooks.disabled is not None:
        raise HooksDisabledError(hooks.disabled)
    for role, fn in (("pack", pack), ("unpack", unpack)):
        if not callable(fn):
            raise HookError(f"the {role} hook is {type(fn).__name__}, which cannot be called")
    return HookPair(pack, unpack)


def pop_hooks() -> HookPair:
    """End the innermost pair and return it. Raises HookError where there is none."""
    if len(hooks.pairs) <= hooks.floor:
        raise HookError("no saved-tensor hooks to pop: push and pop do not match")
    return hooks.pairs.pop()


def disable_hooks(message: str | None) -> None:
    """Make entering hooks fail with `message` from here on. Raises where hooks are active."""
    if len(hooks.pairs) > hooks.floor:
        raise HooksDisabledError(
            "saved-tensor hooks cannot be disabled while a pair is active: leave the "
            "saved_tensors_hooks() block first."
        )
    hooks.disabled = _DISABLED if message is None else message


def enable_hooks() -> None:
    hooks.disabled = None


@contextmanager
def saved_tensors_hooks(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Within: `pack(tensor)` on every tensor saved for backward, `unpack(packed)` at each use.

    The stack is as before on leaving, also when the body raised. Semantics:
    torch.autograd.graph.saved_tensors_hooks.
    """
    depth = len(hooks.pairs)
    pair = _pair_of(pack, unpack)
    try:
        hooks.pairs.append(pair)
        yield
    finally:
        if len(hooks.pairs) > depth and hooks.pairs[depth] is pair:  # else see _private.Session
            del hooks.pairs[depth:]


@contextmanager
def disable_saved_tensors_hooks(message: str | None = None) -> Iterator[None]:
    """Within: entering saved-tensor hooks raises with `message`; nested uses restore."""
    before = hooks.disabled
    ours = _DISABLED if message is None else message
    try:
        disable_hooks(message)
        yield
    finally:
        if hooks.disabled is ours:
            hooks.disabled = before


def compose(*pairs: Any) -> HookPair:
    """One pair out of several: the first packs the tensor, each next one every tensor in that.

    A pair is anything with `pack` and `unpack`, or a tuple of the two. Unpacking goes the other
    way round. The packed value may be any nest of tuples, lists and dicts with tensors in it. What
    the last pair packed can be fetched ahead if that pair has a `prefetch` (see `prefetch_of`).
    """
    from torch.utils._pytree import tree_flatten, tree_unflatten

    stages = [p if hasattr(p, "pack") else HookPair(*p) for p in pairs]
    if not stages:
        raise HookError("compose() needs at least one pair")

    def pack(info: SavedInfo, tensor: Tensor) -> Any:
        packed = tell(stages[0].pack, info, tensor)
        for stage in stages[1:]:
            leaves, spec = tree_flatten(packed)
            marks = [isinstance(leaf, Tensor) for leaf in leaves]
            done = [
                tell(stage.pack, info, x) if m else x for x, m in zip(leaves, marks, strict=True)
            ]
            packed = (done, marks, spec)
        return packed

    pack.wants_info = True  # type: ignore[attr-defined]

    def unpack(packed: Any) -> Tensor:
        for stage in reversed(stages[1:]):
            done, marks, spec = packed
            leaves = [stage.unpack(x) if m else x for x, m in zip(done, marks, strict=True)]
            packed = tree_unflatten(leaves, spec)
        result: Tensor = stages[0].unpack(packed)
        return result

    ahead = prefetch_of(stages[-1].unpack)  # whose packed values the nest is made of
    if ahead is not None:

        def prefetch(packed: Any) -> None:
            todo = [packed] if len(stages) == 1 else itertools.compress(packed[0], packed[1])
            for part in todo:
                ahead(part)

        unpack.prefetch = prefetch  # type: ignore[attr-defined]
    return HookPair(pack, unpack)


def prefetch_of(unpack: Unpack) -> Callable[[Any], object] | None:
    """The `prefetch(packed)` of a pair, with which a packed value can be fetched ahead of its use.

    It is an attribute of the unpack function or, of a bound method, of the object: a policy with
    the methods `pack`, `unpack` and `prefetch`. It starts the fetch and returns at once; `unpack`
    of the same packed value comes later, and waits for what is not there yet. It is called in
    programs only (`compiled_backward(window=...)`), at most once before an unpack. None where a
    pair has none.
    """
    found = getattr(unpack, "prefetch", None)
    if found is None:
        found = getattr(getattr(unpack, "__self__", None), "prefetch", None)
    return found if callable(found) else None


_F = TypeVar("_F", bound=Callable[..., Any])


def traceable(unpack: _F) -> _F:
    """Decorator: `unpack` is plain tensor code, which a captured backward may take apart.

    In a program (`compiled_backward`), its ops stand in place of a call: they are scheduled and
    compiled with the rest. It is run on fake tensors, once, so it may depend on nothing but the
    packed value (a tensor, or a nest of containers with tensors and plain values), have no side
    effect, and must be the same function object each time; a method of a policy will do.
    """
    unpack.traceable = True  # type: ignore[attr-defined]
    return unpack


def tell(pack: Pack, info: SavedInfo, tensor: Tensor) -> Any:
    """`pack(tensor)`, or `pack(info, tensor)` for one that wants to know what it packs."""
    return pack(info, tensor) if getattr(pack, "wants_info", False) else pack(tensor)


@dataclass(frozen=True)
class SavedInfo:
    """What one can ask a saved tensor about itself."""

    op: str  # the op whose backward will read it, e.g. "aten.mm"
    name: str  # the argument or result of that op, e.g. "mat2"
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    state: str  # "live", "packed" or "released"
    is_output: bool
    is_leaf: bool
    view_of: torch.Size | None  # the shape of the base it is a view of
    storage: int | None  # identity of its storage while it is live
    where: str  # file:line of the user's code that saved it
    is_parameter: bool = False  # see `is_parameter`
    module: str = ""  # the path of the module that was running, where somebody watches modules
    alias_of: str = ""  # whose memory it lives in that is packed already, said to policies


class Watcher(Protocol):
    """Is told of every tensor that a SavedTensor holds; see `watchers`."""

    def kept(self, saved: SavedTensor, tensor: Tensor) -> None:
        """`saved` holds `tensor` (its storage, if a pack hook kept an alias) from here on, until
        `dropped`, or until `saved` itself goes away."""

    def dropped(self, saved: SavedTensor) -> None: ...


watchers: list[Watcher] = []  # of all threads; empty unless something is being measured


class _Packed:
    """What stands for a saved tensor that a hook packed. Made whole and put in place in one step,
    so that a thread that unpacks never sees parts of two.

    `probe` and `storage`: the tensor's version counter and its storage, both without its memory;
    `aliased`: whether `value`, which `pack` returned, still lives in that memory. `handed`: what
    `unpack` returned last, if that outlives its use.
    """

    __slots__ = (
        "aliased", "explicit", "handed", "info", "pair", "probe", "storage", "value", "version",
    )  # fmt: skip

    def __init__(
        self, tensor: Tensor, value: Any, pair: HookPair, info: SavedInfo, explicit: bool
    ) -> None:
        self.value = value
        self.pair = pair
        self.info = info
        self.explicit = explicit
        self.version: int = tensor._version
        self.aliased = _keeps_alias(value, tensor)
        self.handed: _Handed | None = None
        self.storage: _private.StorageRef | None = None
        self.probe: Tensor | None = None
        if _private.has_plain_storage(tensor):
            self.storage = _private.StorageRef(tensor)
            self.probe = _private.version_probe(tensor)
        elif self.aliased:
            self.probe = _private.alias(tensor)


class SavedTensor:
    """One tensor kept for one node's backward.

    `name` is the argument or result of `op` that it was. `output`: which output of the saving
    node it is, or None for an input; an output is kept as an alias without graph, since the
    output itself would keep its own node alive in a circle.
    """

    __slots__ = (
        "__weakref__", "_data", "_edge", "_output", "_packed", "_tick", "_version", "name", "op",
        "where",
    )  # fmt: skip

    _data: Tensor | None

    def __init__(
        self,
        tensor: Tensor,
        name: str,
        op: str,
        where: Location | None = None,
        output: int | None = None,
        edge: Edge | None = None,
    ) -> None:
        self.name = name
        self.op = op
        self.where = where
        self._output = output
        self._edge = edge
        self._packed: _Packed | None = None
        self._tick = changes.tick
        try:
            self._version: int = tensor._version
        except RuntimeError as error:  # an inference tensor has no version counter
            raise HookError(
                f"an inference tensor ({describe(tensor)}) cannot be saved for backward by {op} "
                f"(as '{name}'): it has no version counter. Clone it outside inference_mode()."
            ) from error
        if output is not None:
            tensor = _private.alias(tensor)
        if hooks.pairs and not hooks.ignored:
            self._data = None
            self._pack(tensor, hooks.pairs[-1], explicit=False)
        else:
            self._data = tensor
            if watchers:
                _tell(self, tensor)

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        version: int,
        tick: int,
        name: str,
        op: str,
        where: Location | None,
        edge: Edge | None,
    ) -> SavedTensor:
        """The object for an input that was saved, without hooks, when its version was `version` and
        the log of in-place changes was at `tick`."""
        self = cls.__new__(cls)
        self.name, self.op, self.where = name, op, where
        self._output, self._edge, self._packed = None, edge, None
        self._data, self._version, self._tick = tensor, version, tick
        return self

    # -- reading

    def unpack(self, node: Node | None = None, graph: bool = True) -> Tensor:
        """The tensor, through the unpack hook if there is one.

        `graph`: return it attached to the graph as it was when saved, so that what is computed
        from it can be differentiated again. `node` is the node that saved it; an output needs it.

        Raises GraphFreedError after release, SavedTensorChanged if the tensor was changed in
        place since, HookError if `unpack` did not return such a tensor.
        """
        edge = self._edge  # first of all: another thread may release it all at any moment
        packed, data = self._packed, self._data
        if packed is None and data is None:
            packed = self._packed  # or may have packed it just now
            if packed is None:
                raise self._released()
        if packed is None:
            assert data is not None
            if data._version != self._version:
                raise self.changed(data._version, data)
            if self._output is None or not graph:
                return data
            plain = _private.alias(data)
        else:
            plain = self._call_unpack(packed)
            if not graph:
                return plain
            if not _private.native_requires_grad(plain):
                if edge is None and self._output is None:
                    return plain
            plain = _private.alias(plain)
        if self._output is not None:
            if node is None:
                return plain
            edge = node.output_edge(self._output, plain)
        if edge is not None:
            attach(plain, edge.settled())
        return plain

    def packed_value(self) -> Any:
        """What the pack hook returned. Raises as `unpack` does, which would be called with it."""
        packed = self._packed
        if packed is None:
            raise self._released()
        self._check_packed(packed)
        return packed.value

    def _check_packed(self, packed: _Packed) -> tuple[int, bool]:
        """The version that the packed tensor has now, and whether it is another one. Raises
        SavedTensorChanged if so and the packed value lives in its memory."""
        version = packed.probe._version if packed.probe is not None else packed.version
        changed = version != packed.version
        if changed and packed.aliased:
            raise self.changed(version, packed)
        return version, changed

    def _call_unpack(self, packed: _Packed) -> Tensor:
        version, changed = self._check_packed(packed)
        handed = packed.handed
        written = handed.probe._version if handed is not None else 0
        with torch.no_grad():
            result = call_user(packed.pair.unpack, packed.value)
        info = packed.info
        if not isinstance(result, Tensor):
            raise HookError(
                f"the unpack hook of {self} returned {type(result).__name__}, not a tensor"
            )
        if result.shape != info.shape or result.dtype != info.dtype or result.device != info.device:
            raise HookError(
                f"the unpack hook of {self} returned {describe(result)} on {result.device}; what "
                f"was packed is {_brief(info)} on {info.device}"
            )
        if changed and packed.storage is not None and packed.storage.holds(result):
            # an alias that the search after `pack` did not find
            raise self.changed(version, packed)
        if handed is not None and handed.version != written == handed.probe._version:
            if handed.holds(result):
                raise SavedTensorChanged(
                    f"what the unpack hook of {self} returned was changed in place by whoever used "
                    "it, and the hook has returned the same memory again. Return a copy from it, "
                    "or change a copy in the backward that uses it."
                )
        packed.handed = None if packed.aliased or _private.fresh(result, 1) else _Handed(result)
        return result

    def prefetch(self) -> None:
        """Start to fetch what `unpack` will be asked for soon, where the hook pair can do that."""
        packed = self._packed
        ahead = None if packed is None else prefetch_of(packed.pair.unpack)
        if packed is not None and ahead is not None:
            with torch.no_grad():
                call_user(ahead, packed.value)

    # -- hooks on this one tensor

    def register_hooks(self, pack: Pack, unpack: Unpack) -> None:
        """Call `pack(tensor)` now, keep only what it returns, and `unpack` that at every use.

        On a tensor that default hooks packed, it is unpacked and packed again. Raises HookError
        if it has a registered pair already (see `replace_hooks`), GraphFreedError after release.
        """
        packed = self._packed
        if packed is not None and packed.explicit:
            raise HookError(
                f"{self} has hooks already, and only one pair is allowed at a time. Use "
                "replace_hooks() to put another in its place."
            )
        self.replace_hooks(pack, unpack)

    def replace_hooks(self, pack: Pack, unpack: Unpack) -> None:
        """As `register_hooks`, whether or not a pair is there already."""
        for role, fn in (("pack", pack), ("unpack", unpack)):
            if not callable(fn):
                raise HookError(f"the {role} hook is {type(fn).__name__}, which cannot be called")
        tensor = self.unpack(graph=False)
        self._pack(_private.alias(tensor), HookPair(pack, unpack), explicit=True)
        self._data = None

    def remove_hooks(self) -> None:
        """Unpack and keep the plain tensor from here on."""
        packed = self._packed
        if packed is not None:
            data = _private.alias(self._call_unpack(packed))
            if self._edge is not None:  # an output gets its edge when it is unpacked
                attach(data, self._edge.settled())
            self._version, self._tick = data._version, changes.tick
            self._data = data
            self._packed = None
            if watchers:
                _tell(self, data)

    def _pack(self, tensor: Tensor, pair: HookPair, explicit: bool) -> None:
        # Metadata first: once `pack` has returned, nothing here refers to the tensor.
        info = self._describe(tensor, "packed")
        version = tensor._version
        with torch.no_grad():
            value = call_user(tell, pair.pack, info, tensor)
        if tensor._version != version:
            raise HookError(
                f"the pack hook of {self} changed its input in place ({describe(tensor)}): work "
                "on a clone of it."
            )
        self._tick = changes.tick
        self._packed = _Packed(tensor, value, pair, info, explicit)
        if watchers:
            _tell(self, tensor if self._packed.aliased else None)

    # -- asking

    def info(self) -> SavedInfo:
        """Who saved this tensor, what it is, and what state it is in. Runs no hook."""
        packed, data = self._packed, self._data
        if packed is not None:
            return packed.info
        if data is None:
            raise self._released()
        return self._describe(data, "live")

    @property
    def state(self) -> str:
        """ "live", "packed" or "released"."""
        if self._packed is not None:
            return "packed"
        return "released" if self._data is None else "live"

    @property
    def packed(self) -> Any:
        """What the pack hook returned; None where no hook applies."""
        packed = self._packed
        return None if packed is None else packed.value

    def _describe(self, tensor: Tensor, state: str) -> SavedInfo:
        base = tensor._base
        strided = tensor.layout is torch.strided
        return SavedInfo(
            op=self.op,
            name=self.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            device=tensor.device,
            nbytes=tensor.numel() * tensor.element_size(),
            state=state,
            is_output=self._output is not None,
            is_leaf=self._output is None and (self._edge is None or not self._edge.node.edges),
            view_of=base.shape if base is not None else None,
            storage=_private.storage_key(tensor) if strided and state == "live" else None,
            where=locate(self.where),
            is_parameter=is_parameter(tensor),
            module=seam.module_path() if seam.module_path is not None else "",
        )

    # -- the end

    def release(self) -> None:
        """Let go of the tensor or of what `pack` made of it. Further use raises."""
        self._data = self._packed = self._edge = None
        if watchers:
            _tell(self, None)

    def _released(self) -> GraphFreedError:
        return GraphFreedError(
            "Trying to backward through the graph a second time (or directly access saved tensors "
            f"after they have already been freed): {self} is gone. Saved tensors are freed when "
            "you call .backward() or autograd.grad(). Specify retain_graph=True if you need to "
            "backward through the graph a second time or to access saved tensors after backward."
        )

    def changed(self, version: int, kept: Tensor | _Packed) -> SavedTensorChanged:
        """The error for a tensor that was changed in place since, to `version`."""
        key: int | None = None
        if isinstance(kept, _Packed):
            what, saved_at = _brief(kept.info), kept.version
            if kept.storage is not None:
                key = kept.storage.key
        else:
            what, saved_at = describe(kept), self._version
            if _private.has_plain_storage(kept):
                key = _private.storage_key(kept)
        where = locate(self.where)
        return SavedTensorChanged(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: '{self.name}' ({what}), saved by {self.op}"
            f"{' at ' + where if where else ''} for its backward, was changed in place"
            f"{_changed_by(key, self._tick, saved_at)} (version {version}, saved at {saved_at}). "
            "Change a copy instead (`x = x + d` for `x += d`), or run backward "
            "first."
        )

    def __repr__(self) -> str:
        where = locate(self.where)
        return f"<saved '{self.name}' of {self.op}{' at ' + where if where else ''}, {self.state}>"


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is a leaf that needs gradients, a parameter (a frozen one too), or a view of one:
    whoever owns it keeps it, whatever autograd does."""
    base = tensor._base
    return _is_parameter(tensor) or (base is not None and _is_parameter(base))


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or (
        _private.native_requires_grad(tensor)
        and state(tensor) is None
        and not tensor._is_view()
        and _private.native_grad_fn(tensor) is None
    )


class _Changes:
    """The last in-place changes that recorders saw, so that an error can name the culprit.

    A storage is named by its identity, which a later one may have once it is freed. Those of a
    saved tensor cannot be freed, so what is newer than the save and of its storage is of it.
    """

    def __init__(self) -> None:
        self.tick = 0  # how many there were
        # tick, the storages with their new versions, op, where
        self.last: deque[tuple[int, list[tuple[int, int]], str, Location | None]]
        self.last = deque(maxlen=256)


changes = _Changes()


def note_change(tensors: Iterable[Tensor], op: str, where: Location | None) -> None:
    """`op` at `where` has just changed `tensors` in place."""
    marks = [
        (_private.storage_key(t), t._version)
        for t in tensors
        if _private.has_plain_storage(t) and not t.is_inference()
    ]
    changes.last.append((changes.tick, marks, op, where))
    changes.tick += 1


def _changed_by(key: int | None, tick: int, saved_at: int) -> str:
    """` by aten.add_ at train.py:88`: the first change since `tick`, if known."""
    for then, marks, op, place in tuple(changes.last):
        if then >= tick and any(k == key and version > saved_at for k, version in marks):
            where = locate(place)
            return f" by {op}{' at ' + where if where else ''}"
    return ""


class _Handed:
    """A value that an unpack hook returned and still holds, and its version then.

    Keeps nothing of it alive. Where the memory is not PyTorch's (a NumPy array's), it is known by
    its address: an array that was freed may be taken for its successor.
    """

    __slots__ = ("addresses", "probe", "storage", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.probe = _private.version_probe(tensor)
        self.version = self.probe._version
        self.storage = _private.StorageRef(tensor)
        self.addresses = _private.foreign_addresses(tensor)

    def holds(self, tensor: Tensor) -> bool:
        start, end = self.addresses
        return self.storage.holds(tensor) or (end > 0 and start <= tensor.data_ptr() < end)


def _brief(info: SavedInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"


def _tell(saved: SavedTensor, holds: Tensor | None) -> None:
    """Tell the watchers what `saved` holds from here on."""
    for watcher in tuple(watchers):
        watcher.dropped(saved)
        if holds is not None:
            watcher.kept(saved, holds)


def _keeps_alias(packed: Any, tensor: Tensor) -> bool:
    """Whether what a pack hook returned still lives in `tensor`'s memory.

    Looked for in tensors and NumPy arrays, in nests of containers, and in the attributes of
    objects. An alias that a hook hides elsewhere (in a closure, say) is not found. A class whose
    objects never, or always, hold one says so by `holds_no_alias` or `holds_alias`,
    and saves itself the search.
    """
    if packed is None or isinstance(packed, (str, bytes, int, float)):
        return False
    if getattr(type(packed), "holds_no_alias", False):
        return False
    if getattr(type(packed), "holds_alias", False):
        return True
    if tensor.layout is not torch.strided:
        return packed is tensor
    seen: set[int] = set()
    todo = [packed]
    while todo and len(seen) < 1000:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if _private.share_storage(item, tensor):
                return True
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif hasattr(item, "__array_interface__"):
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if start <= item.__array_interface__["data"][0] < start + max(storage.nbytes(), 1):
                return True
        elif hasattr(item, "__dict__"):
            todo.extend(vars(item).values())
        elif hasattr(item, "__slots__"):
            todo.extend(getattr(item, slot, None) for slot in item.__slots__)
    return False
