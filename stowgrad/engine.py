"""Runs a graph backward.

`run` is the whole of it: count how many edges lead into each reachable node; start with the
roots; take the ready node that was recorded last, give it the sum of what arrived for each of its
outputs, pass what it returns along its edges, and let go of what it saved. A node is ready when
every edge into it has delivered. Accumulating into a leaf comes before everything else, so that a
gradient is handed over as soon as it is whole. Cost: one visit a node and an edge; memory: the
gradients on their way. This is the order of PyTorch's engine (one worker), so hooks fire in it too.

With `inputs`, only nodes on a path to one of them run, and the gradients that arrive there are
captured rather than (or as well as) accumulated.

This module knows nodes and edges; nothing of modes, rules or policies.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from . import _private
from .errors import GradientError, NotDifferentiableError, describe
from .graph import AccumulateNode, Edge, Node, NodeHooks, call_user, locate

Grads = list[Tensor | None]


class Task:
    """One backward, and what code running inside it may ask about. Within it, it is the current."""

    captured: Collection[Node] = ()  # gradients are captured there
    needed: set[Node] | None = None  # None: all nodes
    node: Node | None = None
    surprised = False  # a step of a program found something else than it was made for
    root: Node | None = None  # where it starts, if that is one place

    def __init__(self, create_graph: bool, keep_graph: bool, roots: list[Node]) -> None:
        self.id = next(_task_ids)
        self.create_graph = create_graph
        self.keep_graph = keep_graph
        self.roots = roots
        self.callbacks: list[Callable[[], Any]] = []

    def __enter__(self) -> Task:
        self.grad_mode = torch.is_grad_enabled()  # around it
        self._depth = len(_tasks.stack)
        _tasks.stack.append(self)
        _private.set_grad_enabled(self.create_graph)
        return self

    def __exit__(self, *exc: Any) -> None:
        _private.set_grad_enabled(self.grad_mode)
        del _tasks.stack[self._depth :]

    def limit(self, inputs: Sequence[Edge], accumulate: bool) -> None:
        """Only what leads to `inputs` runs, and gradients are captured there (or accumulated)."""
        self.root = self.roots[0] if len(self.roots) == 1 else None
        targets = {edge.node for edge in inputs}
        if not accumulate:
            self.captured = targets
        self.needed = _leading_to(targets, self.roots, accumulate)

    def run_callbacks(self) -> None:
        while self.callbacks:
            callbacks, self.callbacks = self.callbacks, []
            for callback in callbacks:
                call_user(callback)

    @functools.cached_property
    def reachable(self) -> dict[Node, int]:
        """Every node that leads into it, with the number of its edges in."""
        return count_edges(self.roots)

    @functools.cached_property
    def notes(self) -> weakref.WeakKeyDictionary[Any, Any]:
        """What hooks keep until it is over, or until the key is gone."""
        return weakref.WeakKeyDictionary()


class _Tasks(threading.local):
    def __init__(self) -> None:
        self.stack: list[Task] = []


_tasks = _Tasks()
_task_ids = itertools.count()


def current_task() -> Task | None:
    """The innermost backward that is running in this thread."""
    return _tasks.stack[-1] if _tasks.stack else None


def whole() -> bool:
    """Whether no backward that runs in this thread is limited to some inputs."""
    return all(task.needed is None for task in _tasks.stack)


def running() -> int:
    """How many backwards are running in this thread, one within the other."""
    return len(_tasks.stack)


def abandon(keep: int) -> None:
    """Forget all but the `keep` outermost backwards: an interrupt struck while they cleaned up."""
    if len(_tasks.stack) > keep:
        _private.set_grad_enabled(_tasks.stack[keep].grad_mode)
        del _tasks.stack[keep:]


def run(
    roots: Sequence[tuple[Edge, Tensor]],
    keep_graph: bool = False,
    create_graph: bool = False,
    inputs: Sequence[Edge] | None = None,
    accumulate: bool = True,
    in_place: bool = True,
) -> Grads:
    """Run backward from `roots` (an output's edge and its gradient, each) and return the
    gradients captured at `inputs` (None where none arrived).

    `in_place`: gradients may be added up in place, where nobody can see it.
    `accumulate`: leaves among `inputs` (or all leaves, without `inputs`) add to their `.grad`.
    Raises what a hook or a rule raises; callbacks and state are cleaned up in every case.
    """
    task = Task(create_graph, keep_graph, [edge.node for edge, _ in roots])
    dependencies = task.reachable
    captures: dict[Node, list[tuple[int, int]]] | None = None
    if inputs is not None:
        captures = {}
        if not accumulate:
            for position, edge in enumerate(inputs):
                captures.setdefault(edge.node, []).append((edge.index, position))
        task.limit(inputs, accumulate)
    captured: Grads = [None] * (len(inputs) if inputs is not None else 0)

    with task:
        _loop(task, roots, dependencies, captures, captured, in_place and not create_graph)
        task.run_callbacks()
    return captured


def _loop(
    task: Task,
    roots: Sequence[tuple[Edge, Tensor]],
    dependencies: dict[Node, int],
    captures: dict[Node, list[tuple[int, int]]] | None,
    captured: Grads,
    in_place: bool,
) -> None:
    needed = task.needed
    arrived: dict[Node, Grads] = {}
    ready: list[tuple[float, int, Node]] = []
    tie = itertools.count()
    keep_graph = task.keep_graph

    for edge, grad in roots:
        if grad.shape != edge.shape or grad.dtype != edge.dtype:
            grad = fit(grad, edge, edge.node, edge.index)
        _deliver(arrived, edge, grad, in_place=False)
    for node in list(arrived):
        if dependencies.get(node, 0) == 0:
            ready.append((-node.seq, next(tie), node))
    heapq.heapify(ready)
    del roots

    plain = needed is None and not torch.is_anomaly_enabled()
    following: Node | None = None  # ready, and alone so: it need not go through the heap
    while ready or following is not None:
        if following is not None:
            node, following = following, None
        else:
            node = heapq.heappop(ready)[2]
        task.node = node
        edges = node.edges
        grads = arrived.pop(node, None)
        needs: Sequence[bool] | None = None
        if plain and grads is not None and node.hooks is None and edges:
            results = node.apply(grads, None)
        else:
            visited = _visit(task, node, grads, captures, captured)
            if visited is None:
                continue
            results, needs = visited
            del visited
        del grads
        if not keep_graph:
            node.release()

        if len(results) != len(edges):
            raise GradientError(
                f"{node.name()} returned {len(results)} gradients for its {len(edges)} inputs"
            )
        delivered = results if type(results) is list else list(results)
        del results
        for position, next_edge in enumerate(edges):
            if next_edge is None:
                continue
            grad_in = delivered[position]
            delivered[position] = None
            target = next_edge.node
            if grad_in is not None and (needs is None or needs[position]):
                if grad_in.shape != next_edge.shape or grad_in.dtype is not next_edge.dtype:
                    grad_in = fit(grad_in, next_edge, node, position)
                # the common cases, of _deliver too, written out
                slots = arrived.get(target)
                if slots is None and target.outputs == 1:
                    arrived[target] = [grad_in]
                elif (
                    slots is not None
                    and target.outputs == 1
                    and (old := slots[0]) is not None
                    and (not in_place or old.numel() < _SMALL)
                    and old.layout is _STRIDED
                ):
                    slots[0] = old + grad_in
                else:
                    holder = [grad_in]
                    grad_in = old = None  # held by nobody else: it may be added to in place
                    _deliver(arrived, next_edge, holder, in_place)
            grad_in = None
            left = dependencies[target] - 1
            dependencies[target] = left
            if left == 0:
                if not ready and following is None:
                    following = target
                    continue
                if following is not None:
                    heapq.heappush(ready, (-following.seq, next(tie), following))
                    following = None
                heapq.heappush(ready, (-target.seq, next(tie), target))


def _visit(
    task: Task,
    node: Node,
    grads: Grads | None,
    captures: dict[Node, list[tuple[int, int]]] | None,
    captured: Grads,
) -> tuple[Sequence[Tensor | None], Sequence[bool] | None] | None:
    """A node that is a leaf, or has hooks, or gets no gradient, or stands in a backward that is
    limited to some inputs or looks for anomalies: its results, and which of them are needed. None
    if it does not run.
    """
    runs = grads is not None or node.runs_without_gradient
    arrived: Grads = [None] * node.outputs
    if grads is not None:
        arrived = list(grads)
        grads.clear()  # so that a leaf may find that it alone holds its gradient
    hooks = node.hooks
    hooked = hooks is not None or type(node) is AccumulateNode
    needs: Sequence[bool] | None = None
    needed = task.needed
    if needed is not None:
        caught = captures is not None and node in captures
        if hooked and node not in needed and (caught or node is task.root):
            arrived = _tensor_hooks(node, hooks, arrived)  # of all that PyTorch's would reach
        if captures is not None and caught:
            for index, position in captures[node]:
                captured[position] = arrived[index]
        if node not in needed:
            return None
        needs = [
            e is not None and (e.node in needed or (captures is not None and e.node in captures))
            for e in node.edges
        ]
    if hooked:
        arrived = _tensor_hooks(node, hooks, arrived)
        if hooks is not None:
            arrived = pre_hooks(node, hooks, arrived)
        runs = runs or any(g is not None for g in arrived)
    kept = list(arrived) if hooks is not None and hooks.post else None
    if not runs:  # no gradient arrived at it; it passes that on, and its hooks see it
        results: Sequence[Tensor | None] = [None] * len(node.edges)
    elif torch.is_anomaly_enabled():
        results = _apply_with_anomaly_detection(node, arrived, needs)
    else:
        results = node.apply(arrived, needs)
    if kept is not None:
        assert hooks is not None
        results = after(node, hooks, results, kept)
    return results, needs


def _deliver(arrived: dict[Node, Grads], edge: Edge, grad: Any, in_place: bool) -> None:
    """Add a gradient to what has arrived for its output. `grad` may come in a list of one, which
    is emptied, so that nobody else holds it and it can be added to in place."""
    slots = arrived.get(edge.node)
    if slots is None:
        slots = arrived[edge.node] = [None] * edge.node.outputs
    new: Tensor = grad.pop() if type(grad) is list else grad
    old = slots[edge.index]
    if old is None:
        slots[edge.index] = new
        return
    slots[edge.index] = None
    if old.layout is not torch.strided:
        slots[edge.index] = new + old
    elif not in_place or old.numel() < _SMALL:
        slots[edge.index] = old + new
    elif _addable(old, new):
        slots[edge.index] = old.add_(new)
    elif _addable(new, old):
        slots[edge.index] = new.add_(old)
    else:
        slots[edge.index] = old + new


_STRIDED = torch.strided
_SMALL = 512  # elements; to ask whether a sum may be made in place costs more than to make it anew


def _addable(target: Tensor, other: Tensor) -> bool:
    """Whether adding into `target` is safe: nobody else can see it or its storage."""
    return (
        target.layout is torch.strided
        and _private.unshared(target, 2)
        and not _private.functorch_active()
        and _private.unshared_storage(target)
        and target.dtype == other.dtype
        and _private.dense(target)
    )


def fit(grad: Tensor, edge: Edge, node: Node, position: int) -> Tensor:
    """`grad` as a gradient of what `edge` is: summed over broadcast dims, real where that is real,
    of its dtype. Raises GradientError where no such reading exists (PyTorch's validate_outputs).
    """
    if grad.shape != edge.shape:
        if not _expandable(edge.shape, grad.shape):
            raise GradientError(
                f"Function {node.name()}{_at(node)} returned an invalid gradient at index "
                f"{position} - got {list(grad.shape)} but expected shape compatible with "
                f"{list(edge.shape)}"
            )
        grad = grad.sum_to_size(edge.shape)
    if grad.dtype != edge.dtype:
        if grad.is_complex() and not edge.dtype.is_complex:
            grad = torch.real(grad)
        if grad.dtype != edge.dtype:
            grad = grad.to(edge.dtype)
    return grad


def _expandable(shape: torch.Size, target: torch.Size) -> bool:
    if len(shape) > len(target):
        return False
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return all(size == 1 or size == wanted for size, wanted in pairs)


# -- hooks around a node


def pre_hooks(node: Node, hooks: NodeHooks, grads: Grads) -> Grads:
    """The node's own hooks that run before it; those of its outputs come first."""
    for hook in tuple(hooks.pre.values()):
        result = call_user(hook, tuple(grads))
        if result is not None:
            grads = _checked(result, len(grads), "pre-hook", node)
    return grads


def _checked(result: Any, count: int, kind: str, node: Node) -> Grads:
    """What a node's hook returned, as `count` gradients."""
    grads = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(grads) != count:
        raise GradientError(
            f"a {kind} on {node.name()}{_at(node)} returned {len(grads)} gradients, not "
            f"{count}"
        )
    for grad in grads:
        if grad is not None and not isinstance(grad, Tensor):
            raise TypeError(
                f"a {kind} on {node.name()}{_at(node)} must return None or tensors, not "
                f"{type(grad).__name__}"
            )
    return grads


def _tensor_hooks(node: Node, hooks: NodeHooks | None, grads: Grads) -> Grads:
    """The hooks of each output, in order of registration, then retain_grad()."""
    grads = list(grads)
    if type(node) is AccumulateNode:
        leaf_hooks = node.leaf_hooks()
        if leaf_hooks:
            grads[0] = call_tensor_hooks(leaf_hooks, grads[0], node)
    if hooks is None:
        return grads
    for index, fns in hooks.tensor.items():
        if fns:
            grads[index] = call_tensor_hooks(fns.values(), grads[index], node)
    for index, ref in hooks.retained.items():
        tensor, grad = ref(), grads[index]
        if tensor is not None and grad is not None:
            retain(tensor, grad)
    return grads


def call_tensor_hooks(
    fns: Iterable[Callable[..., Any]], grad: Tensor | None, node: Node
) -> Tensor | None:
    for hook in tuple(fns):
        result = call_user(hook, grad)
        if result is None:
            continue
        if not isinstance(result, Tensor):
            raise TypeError(
                f"a tensor hook on an output of {node.name()} must return None or a tensor, not "
                f"{type(result).__name__}"
            )
        if grad is None:
            raise GradientError(
                f"hook {getattr(hook, '__name__', hook)!r} can't replace a None gradient with a "
                f"non-None value: no gradient arrived at an output of {node.name()}{_at(node)}"
            )
        for what in ("shape", "dtype", "device"):
            was, now = getattr(grad, what), getattr(result, what)
            if was != now:
                raise GradientError(
                    f"hook {getattr(hook, '__name__', hook)!r} has changed the {what} of the "
                    f"gradient of an output of {node.name()}{_at(node)} from {was} to {now}"
                )
        grad = result
    return grad


def retain(tensor: Tensor, grad: Tensor) -> None:
    old = tensor.grad
    if old is not None:
        tensor.grad = old + grad
    elif grad.layout is torch.strided:
        tensor.grad = grad.clone(memory_format=torch.contiguous_format)
    else:
        tensor.grad = grad.clone()


def after(
    node: Node, hooks: NodeHooks, results: Sequence[Tensor | None], grads: Grads
) -> Sequence[Tensor | None]:
    """The hooks that run after a node; they see its gradients as its inputs will get them."""
    results = [
        grad if grad is None or edge is None else fit(grad, edge, node, position)
        for position, (grad, edge) in enumerate(zip(results, node.edges, strict=True))
    ]
    for hook in tuple(hooks.post.values()):
        new = call_user(hook, tuple(results), tuple(grads))
        if new is not None:
            results = _checked(new, len(results), "hook", node)
    return results


# -- which nodes there are, and which are needed


def count_edges(roots: Iterable[Node]) -> dict[Node, int]:
    """For every node reachable from `roots`: how many edges lead into it."""
    counts: dict[Node, int] = {}
    todo: list[Node] = []
    for node in roots:
        if node not in counts:
            counts[node] = 0
            todo.append(node)
    while todo:
        for edge in todo.pop().edges:
            if edge is not None:
                node = edge.node
                if node in counts:
                    counts[node] += 1
                else:
                    counts[node] = 1
                    todo.append(node)
    return counts


def _leading_to(targets: set[Node], roots: Iterable[Node], accumulate: bool) -> set[Node]:
    """The nodes that must run so that gradients reach `targets`: those with a path to one.

    A target itself runs if gradients accumulate at the targets, else only to pass on to another.
    """
    needed: set[Node] = set(targets) if accumulate else set()
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if done:
            for edge in node.edges:
                if edge is not None and (edge.node in needed or edge.node in targets):
                    needed.add(node)
                    break
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        stack.extend((e.node, False) for e in node.edges if e is not None and e.node not in seen)
    return needed


# -- anomaly detection (torch.autograd.detect_anomaly)


def _at(node: Node) -> str:
    where = locate(node.where)
    return f" (recorded at {where})" if where else ""


def _has_nan(grad: Tensor) -> bool:
    if grad.layout is torch.sparse_coo:
        grad = grad._values()
    elif grad.layout is not torch.strided:
        grad = grad.values()
    return bool(grad.isnan().any())


def _apply_with_anomaly_detection(
    node: Node, grads: Grads, needs: Sequence[bool] | None
) -> Sequence[Tensor | None]:
    """As `node.apply`, but an error or a NaN names the line of forward code it comes from."""
    try:
        results = node.apply(grads, needs)
        if torch.is_anomaly_check_nan_enabled():
            for index, grad in enumerate(results):
                if grad is not None and _has_nan(grad):
                    raise GradientError(
                        f"Function '{node.name()}' returned nan values in its {index}th output"
                        f"{_at(node)}."
                    )
        return results
    except Exception:
        trace = node.metadata.get("traceback_")
        detail = "".join(cast("list[str]", trace)) if trace else " (no forward trace)"
        warnings.warn(
            f"Error detected in {node.name()}{_at(node)}. Traceback of forward call that caused "
            f"the error:\n{detail}",
            stacklevel=2,
        )
        raise


# -- what is checked before a backward starts


def check_root(edge: Edge | None, grad: Tensor, output: Tensor) -> None:
    """Raise unless `grad` can be a gradient of `output`, and `output` has one at all."""
    if edge is None:
        raise NotDifferentiableError(
            "element 0 of tensors does not require grad and does not have a grad_fn "
            f"({describe(output)}). Was it computed under no_grad(), detached, or from tensors "
            "that need no gradient?"
        )
    if grad.device != output.device:
        raise GradientError(
            f"the gradient given for an output ({describe(output)} on {output.device}) is on "
            f"{grad.device}: move it there first"
        )
