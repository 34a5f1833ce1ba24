"""`sg.backward` and `sg.grad`: PyTorch's functions of the same names, on graphs recorded here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .record import record


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
