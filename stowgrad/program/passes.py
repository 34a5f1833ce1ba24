"""Schedules: passes over a captured graph, each of which changes it in place.

What all of them keep: the results, bit for bit; every step that runs user code, as often as before
and in the same order (unpack hooks, hooks, custom functions), and what that code can see when it
runs; the check of every saved tensor that the eager engine would check.

`schedule` applies those that are worth it by default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from . import steps
from .capture import Captured, Entry, item
from .effects import Effects, FxNode, Kind, arrange, kind_of
from .reorder import reorder
from .reuse import reuse

__all__ = [
    "common_subexpressions", "fetch_ahead", "latest_unpack", "remove_dead", "reorder", "reuse",
    "schedule",
]  # fmt: skip


def schedule(
    captured: Captured, *, window: int = 0, reorder: bool = False, direct: bool = True
) -> None:
    """Apply the passes that a program gets before its code is made.

    `window`: as in `fetch_ahead`; 0 for none. `reorder`: change the order of steps where that
    lowers the predicted peak. `direct`: the program is run as it is, outside vmap and not recorded
    itself, so that nobody sees which values it has in between.
    """
    remove_dead(captured)
    if direct:
        common_subexpressions(captured)
        if reorder:
            _reorder(captured)
    latest_unpack(captured)
    if direct:
        reuse(captured)
    if window:
        fetch_ahead(captured, window)


_reorder = reorder


def latest_unpack(captured: Captured) -> None:
    """Each unpack, read and check stands as late as its first use allows.

    An unpack runs user code and stays between its neighbours of that kind. A check or a read may
    move down past user code (it then also sees what that changed), but not past an op that changes
    the tensor, nor may a read come after the node has let go of it.
    """
    effects = Effects(captured)
    end = len(effects.nodes)
    keys: dict[FxNode, tuple[float, int]] = {}
    visible: tuple[float, int] = (end, 0)  # the next step that user code runs in or sees
    writes: dict[Any, float] = {}  # memory -> the next op that changes it
    released: dict[int, float] = {}  # spec -> where it lets go
    for i in range(end - 1, -1, -1):
        node = effects.nodes[i]
        keys[node] = (i, 0)
        if node.op != "call_function":
            continue
        kind = effects.kinds[node]
        for root in effects.written(node):
            writes[root] = i
        if node.target is steps.release:
            released[node.meta["spec"].index] = i
        if node.target is steps.unpack and node.users:
            first = min(keys[u] for u in node.users)
            keys[node] = _before(min(first, visible), i)
        elif kind is Kind.SAVED and node.users:
            limit = min(keys[u] for u in node.users)
            for root in effects.groups(node):
                limit = min(limit, (writes.get(root, end), 0))
            spec = node.meta.get("spec")
            if node.target in (steps.read, steps.packed) and spec is not None:
                limit = min(limit, (released.get(spec.index, end), 0))
            keys[node] = _before(limit, i)
        if kind is Kind.USER or kind is Kind.VISIBLE:
            visible = keys[node]
    order = sorted((n for n in effects.nodes if n.op == "call_function"), key=keys.__getitem__)
    arrange(captured.graph, order)


def _before(limit: tuple[float, int], i: int) -> tuple[float, int]:
    """The place just before `limit`, which may be such a place itself."""
    at = limit[0]
    return (at - 0.5 if at == int(at) else at), i


def fetch_ahead(captured: Captured, window: int) -> None:
    """Tell hook pairs that can start a fetch early to do so, `window` unpacks ahead.

    Such a pair has a `prefetch(packed)`; see `saved.prefetch_of`. The fetch of the unpack that
    comes `window` after another one stands right behind that one, the first `window` fetches at
    the start. So never more than `window` tensors are fetched and not yet used: fetching further
    ahead would raise the peak that the hooks are there to lower.
    """
    if window < 1:
        return
    graph = captured.graph
    unpacks = [
        node
        for node in graph.nodes
        if node.target is steps.unpack and _fetches(node.meta.get("entry"))
    ]
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for i, node in enumerate(unpacks):
        if i < window:
            assert first is not None
            place = graph.inserting_before(first)
        else:
            place = graph.inserting_after(unpacks[i - window])
        with place:
            made = graph.call_function(steps.fetch, (node.args[0],))
        made.meta.update(spec=node.meta.get("spec"), entry=node.meta.get("entry"))


def _fetches(entry: Entry | None) -> bool:
    return entry is not None and entry.prefetch


def remove_dead(captured: Captured) -> None:
    """Take out what nobody uses: tensor code whose results are dead, sizes, inputs.

    Steps that the eager engine would have run for more than their value stay: unpack hooks fire as
    often as ever, a saved tensor that was changed is an error though its value is not used, and a
    random op draws its numbers.
    """
    graph = captured.graph
    gone = set()
    for node in reversed(list(graph.nodes)):
        if node.users:
            continue
        if node.op == "placeholder" and node.meta["input"][0] != "grad":
            gone.add(node)
            graph.erase_node(node)
        elif node.op == "call_function" and kind_of(node.target) is Kind.PURE:
            graph.erase_node(node)
    if gone:
        for spec in captured.specs:
            if spec.placeholder in gone:
                spec.placeholder = None
            if spec.versions in gone:
                spec.versions = None
            _forget(spec.entries, gone)


def _forget(entries: Iterable[Entry], gone: set[FxNode]) -> None:
    for entry in entries:
        if entry.placeholder in gone:
            entry.placeholder = None
        if entry.parts:
            _forget(entry.parts, gone)


def common_subexpressions(captured: Captured, far: bool = False) -> None:
    """Equal ops on equal arguments run once; so do equal checks and reads.

    Not merged are results that are changed in place or that leave the program (two gradients that
    the user gets are two tensors), and ops between which their arguments may have changed. Unless
    `far`, neither are those that would keep memory alive longer than before: an op runs again if
    its first result is used up by then, so the peak does not rise.
    """
    effects = Effects(captured)
    graph = captured.graph
    written = {root for n in effects.nodes for root in effects.written(n)}
    last: dict[Any, int] = {}  # storage -> its last use
    sharers: Counter[Any] = Counter()  # storage -> the steps whose value is in it
    for i, node in enumerate(effects.nodes):
        for n in (node, *node.all_input_nodes):
            for key in effects.keys[n]:
                last[key] = i
        if node.target is not item:
            sharers.update(effects.keys[node])
    changes: Counter[Any] = Counter()  # memory -> how often it was changed so far
    epoch = 0  # how often memory outside may have been changed
    seen: dict[Any, FxNode] = {}
    for i, node in enumerate(effects.nodes):
        if node.op != "call_function":
            continue
        kind = effects.kinds[node]
        if kind is Kind.USER or (kind is Kind.VISIBLE and node.target is not steps.release):
            epoch += 1
        for root in effects.written(node):
            changes[root] += 1
            epoch += root in effects.outside
        roots = effects.groups(node)
        if kind not in (Kind.PURE, Kind.SAVED) or not roots.isdisjoint(written):
            continue
        given = {key for n in node.all_input_nodes for key in effects.keys[n]}
        inputs = {root for n in node.all_input_nodes for root in effects.groups(n)}
        allocates = kind is Kind.PURE and node.target is not item and not given.issuperset(
            effects.keys[node]
        )  # fmt: skip
        if _seen_outside(node) or (allocates and not roots.isdisjoint(effects.outside)):
            continue
        state = sum(changes[root] for root in inputs)
        then = epoch if roots and not inputs.isdisjoint(effects.outside) else -1
        try:
            call = (
                node.target, _frozen(node.args), _frozen(sorted(node.kwargs.items())), state, then
            )  # fmt: skip
            before = seen.get(call)
        except TypeError:  # an argument that has no hash
            continue
        if before is None:
            seen[call] = node
            continue
        if allocates and not far and any(last[key] < i for key in effects.keys[before]):
            seen[call] = node
            continue
        if effects.keys[node] != effects.keys[before] and node.target is not item:
            # Fake tensors of views would say that they are of another storage than they are.
            if any(sharers[key] > 1 for key in effects.keys[node]):
                continue
        latest = max((last[key] for key in effects.keys[node]), default=i)
        for key in effects.keys[before]:
            last[key] = max(last[key], latest)
        node.replace_all_uses_with(before)
        graph.erase_node(node)
    remove_dead(captured)


def _seen_outside(node: FxNode) -> bool:
    """Whether the very tensor that the step gives goes to user code or to the caller: another view
    of the same memory is another tensor, with attributes of its own."""
    return any(
        u.op == "output" or kind_of(u.target) in (Kind.USER, Kind.VISIBLE) for u in node.users
    )


def _frozen(value: Any) -> Any:
    """A nest of arguments as something that compares by type too: 1, 1.0 and True are three."""
    if isinstance(value, (list, tuple)):
        return type(value), *[_frozen(v) for v in value]
    if isinstance(value, FxNode):
        return value
    if isinstance(value, float):
        return float, value.hex()  # 0.0 and -0.0 are two
    return type(value), value
