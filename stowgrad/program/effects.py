"""What each step of a program touches: memory, and what code of the user can see. For the passes.

Two values are in one *group* if they may share memory: views, what `check` and `read` give of an
input, and what a step that is not a plain op hands on of what it was given. User code may read and
change what it was given, what it gave and what was there before the program: that memory is
`outside`. Steps that touch it stay on their side of every step that runs user code; what happens
to other memory is nobody's business, and only the values must be right.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.fx

from .. import _private
from ..ops import _fresh
from . import steps
from .capture import Captured, compute, item
from .memory import tensors

FxNode = torch.fx.Node
aten = torch.ops.aten


class Kind(enum.Enum):
    """What kind of step it is, by what may be done with it."""

    PURE = "pure"  # gives a value, and that is all
    WRITE = "write"  # changes a value of the program in place
    SAVED = "saved"  # reads a saved tensor without user code, or says that it was changed
    VISIBLE = "visible"  # user code that runs later sees what it did
    USER = "user"  # runs user code, or may


_KINDS: dict[Any, Kind] = {
    compute: Kind.PURE,
    item: Kind.PURE,
    steps.add: Kind.PURE,
    steps.check: Kind.SAVED,
    steps.read: Kind.SAVED,
    steps.packed: Kind.SAVED,
    steps.release: Kind.VISIBLE,
    steps.accumulate: Kind.VISIBLE,
    steps.retain_grad: Kind.VISIBLE,
}
_LIBRARIES = frozenset(["aten", "prims", "stowgrad"])  # ops of others are user code


def kind_of(target: Any) -> Kind:
    """The kind of the steps that call `target`."""
    found = _KINDS.get(target)
    if found is not None:
        return found
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.USER
    if target.namespace not in _LIBRARIES or torch.Tag.nondeterministic_seeded in target.tags:
        kind = Kind.USER  # random numbers come in an order, and hooks may draw some too
    elif target._schema.is_mutable:
        kind = Kind.WRITE
    else:
        kind = Kind.PURE
    _KINDS[target] = kind
    return kind


def _hands_on(target: Any) -> bool:
    """Whether a result of `target` may be, or share memory with, what it was given, though the
    fake tensors need not say so: that may depend on how things are laid out."""
    found = _HANDS_ON.get(target)
    if found is None:
        if isinstance(target, torch._ops.OpOverload):
            views = any(r.alias_info is not None for r in target._schema.returns)
            composite = _private.is_composite(target) and target not in _fresh
            found = views or composite or target.namespace not in _LIBRARIES
        else:
            found = target is not compute and target is not item
        _HANDS_ON[target] = found
    return found


_HANDS_ON: dict[Any, bool] = {aten._unsafe_view.default: True}


class Effects:
    """The steps of a graph, their kinds, and the groups of memory they touch."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.nodes: list[FxNode] = []
        self.at: dict[FxNode, int] = {}
        self.kinds: dict[FxNode, Kind] = {}
        self._parents: dict[Any, Any] = {}
        # the storages of the fake tensors; a node itself, where nothing is known
        self.keys: dict[FxNode, tuple[Any, ...]] = {}
        outside: list[FxNode] = []
        for i, node in enumerate(captured.graph.nodes):
            self.nodes.append(node)
            self.at[node] = i
            keys = self.keys[node] = self._keys_of(node)
            if node.op != "call_function":
                outside += (node, *node.all_input_nodes)
                continue
            target = node.target
            kind = self.kinds[node] = kind_of(target)
            given = node.all_input_nodes
            source = given[0] if target is item and given else None
            hands_on = kind is not Kind.VISIBLE and _hands_on(target)
            if hands_on or (source is not None and not self._plain(source)):
                for n in given:
                    self._join(keys, self.keys[n])
            if kind is Kind.USER or kind is Kind.VISIBLE:
                outside.append(node)
                outside += given
        roots = {node: frozenset(map(self._root, keys)) for node, keys in self.keys.items()}
        self._groups = roots
        self._touched: dict[FxNode, frozenset[Any]] = {}
        # What leaves the program, or came into it, or was in the hands of user code.
        self.outside: set[Any] = {root for n in outside for root in roots[n]}

    def _keys_of(self, node: FxNode) -> tuple[Any, ...]:
        value = node.meta.get("val")
        keys = tuple([_private.storage_key(t) for t in tensors(value)])
        if keys or isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return keys
        return (node,)  # something, of which nothing is known

    def _plain(self, node: FxNode) -> bool:
        """Whether the fake tensors of `node` tell where each of its results lives."""
        return isinstance(node.target, torch._ops.OpOverload) and "val" in node.meta

    def _join(self, a: Iterable[Any], b: Iterable[Any]) -> None:
        roots = [self._root(k) for k in (*a, *b)]
        for root in roots[1:]:
            if root != roots[0]:
                self._parents[self._root(root)] = self._root(roots[0])

    def _root(self, key: Any) -> Any:
        parents = self._parents
        top = key
        while (above := parents.get(top)) is not None:
            top = above
        while key != top:
            parents[key], key = top, parents[key]
        return top

    def groups(self, node: FxNode) -> frozenset[Any]:
        """The memory in which the value of `node` may lie."""
        return self._groups[node]

    def touched(self, node: FxNode) -> frozenset[Any]:
        """The memory that the step reads, changes or makes."""
        found = self._touched.get(node)
        if found is None:
            groups = self._groups
            found = groups[node].union(*[groups[n] for n in node.all_input_nodes])
            self._touched[node] = found
        return found

    def written(self, node: FxNode) -> frozenset[Any]:
        """The memory that the step changes in place."""
        if self.kinds.get(node) is not Kind.WRITE:
            return _NOTHING
        return _NOTHING.union(*[self.groups(n) for n in _written(node)])

    def crosses_user_code(self, node: FxNode) -> bool:
        """Whether the step may go to the other side of user code without anyone knowing."""
        if self.kinds[node] not in (Kind.PURE, Kind.WRITE):
            return False
        return self.outside.isdisjoint(self.touched(node))


_NOTHING: frozenset[Any] = frozenset()


def _written(node: FxNode) -> Iterator[FxNode]:
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for n in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(n, FxNode):
                    yield n


def arrange(graph: torch.fx.Graph, order: Iterable[FxNode]) -> None:
    """Put the steps of `graph` in this order; what is not named stays before them."""
    order = list(order)
    if order == [n for n in graph.nodes if n.op == "call_function"]:
        return
    at = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)
    for node in order:
        if at is None:
            first = next(iter(graph.nodes))
            if first is not node:
                first.prepend(node)
        else:
            at.append(node)
        at = node
