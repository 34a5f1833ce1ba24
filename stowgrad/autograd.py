"""`sg.backward` and `sg.grad`: PyTorch's functions of the same names, on graphs recorded here."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import engine, graph
from .context import backward_scope, below_overrides, this_thread
from .errors import GradientError, NotDifferentiableError, describe
from .graph import AccumulateNode, Edge, Node
from .record import record
from .views import EndNode, gradient_edge


def backward(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:
    """Add the gradients of `tensors` to the `.grad` of the leaves they were computed from.

    Works inside `record()` and outside it, in any thread. `grad_tensors`: the gradient of each
    tensor, of its shape and dtype; may be left out for scalars. `retain_graph` keeps what was
    saved for another backward (default: `create_graph`); `create_graph` records the backward
    itself; `inputs` limits the leaves.

    Raises GraphFreedError on a second backward without `retain_graph`, SavedTensorChanged if a
    saved tensor was changed in place, RuntimeError for a bad `grad_tensors`.
    Semantics: torch.autograd.backward.
    """
    with record():
        torch.autograd.backward(tensors, grad_tensors, retain_graph, create_graph, inputs=inputs)


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """The gradients of `outputs` with respect to `inputs`, one for each, in their shapes.

    Nothing is added to any `.grad`. `allow_unused`: None for an input that `outputs` do not
    depend on, rather than an error; `materialize_grads`: zeros instead of None;
    `is_grads_batched`: the first dimension of `grad_outputs` is a batch, mapped by vmap. The rest
    as in `backward`. Semantics: torch.autograd.grad.
    """
    with record():
        run: Any = torch.autograd.grad  # its annotations are narrower than what it takes
        return run(
            outputs,
            inputs,
            grad_outputs,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused,
            is_grads_batched=is_grads_batched,
            materialize_grads=materialize_grads,
        )


def run_backward(
    outputs: Sequence[Any],
    grads: Sequence[Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unreachable: bool,
    accumulate: bool,
) -> tuple[Tensor | None, ...]:
    """What PyTorch's engine entry does, on our graph. `outputs` and `inputs` are tensors or
    gradient edges (node, output_nr)."""
    roots = roots_of(outputs, grads)
    targets = targets_of(inputs, accumulate) if inputs else None
    run = this_thread.backward or engine.run
    with backward_scope(create_graph), below_overrides():
        captured = run(roots, keep_graph, create_graph, targets, accumulate)
    if accumulate:
        return ()
    if not allow_unreachable and any(g is None for g in captured):
        missing = next(i for i, g in enumerate(captured) if g is None)
        raise NotDifferentiableError(
            f"The differentiated Tensor at index {missing} appears to not have been used in the "
            "graph. Set allow_unused=True if this is the desired behavior."
        )
    return tuple(captured)


def roots_of(outputs: Sequence[Any], grads: Sequence[Tensor | None]) -> list[tuple[Edge, Tensor]]:
    """Where a backward begins: the edge of each output, with its gradient."""
    roots = []
    for output, grad in zip(outputs, grads, strict=True):
        if isinstance(output, Tensor):
            edge = gradient_edge(output) if output.requires_grad else None
            if edge is not None and isinstance(edge.node, EndNode) and graph.state(output) is None:
                edge = None
            if grad is None and edge is not None:
                raise GradientError("a root without a gradient")
            engine.check_root(edge, grad, output)  # type: ignore[arg-type]
        else:
            edge = edge_of_public(output)
        assert edge is not None
        if grad is None:
            grad = torch.ones(edge.shape, dtype=edge.dtype)
        roots.append((edge, grad))
    return roots


def targets_of(inputs: Sequence[Any], accumulate: bool) -> list[Edge]:
    """The edges of the inputs that a backward is limited to."""
    targets: list[Edge] = []
    for tensor in inputs:
        if not isinstance(tensor, Tensor):
            targets.append(edge_of_public(tensor))
            continue
        if not tensor.requires_grad:
            raise NotDifferentiableError(
                f"One of the differentiated Tensors does not require grad ({describe(tensor)})"
            )
        edge = gradient_edge(tensor)
        if accumulate and not isinstance(edge.node, AccumulateNode):
            edge.node.ensure_hooks().retained[edge.index] = weakref.ref(tensor)
        targets.append(edge)
    return targets


def edge_of_public(gradient_edge: Any) -> Edge:
    """Our Edge for a public `GradientEdge(node, output_nr)`."""
    if not isinstance(gradient_edge, tuple) or not isinstance(gradient_edge[0], Node):
        kind = type(gradient_edge).__name__
        raise TypeError(f"all inputs have to be Tensors or GradientEdges, but got {kind}")
    node, index = gradient_edge[0], gradient_edge[1]
    facts = node._input_metadata[index]
    return Edge(node, index, facts.shape, facts.dtype)
