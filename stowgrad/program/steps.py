"""The steps of a program that are no ATen ops: those that reach outside its own values.

Each function here is the target of `call_function` nodes. None is pure, so their order is kept by
every pass. `box` is a list of one gradient, emptied by the step, so that the program holds it no
longer than the step does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import _private, engine
from ..errors import GradientError
from ..graph import AccumulateNode, Node
from ..saved import SavedTensor
from . import learned

Grads = list[Tensor | None]


def check(tensor: Tensor, versions: int, shift: int) -> Tensor:
    """A tensor that was saved as it is, and not changed in place since. Written out in the
    generated code; see `emit`."""
    raise AssertionError("never called")


def read(saved: SavedTensor, node: Node | None) -> Tensor:
    """A saved tensor without hooks. `node`: given where it shall come attached to its graph."""
    return saved.unpack(node, node is not None)


def unpack(saved: SavedTensor, node: Node | None) -> Tensor:
    """A saved tensor through its unpack hook."""
    return saved.unpack(node, node is not None)


def fetch(saved: SavedTensor) -> None:
    """Start to fetch what the unpack hook will be asked for soon; see `saved.prefetch_of`."""
    saved.prefetch()


def packed(saved: SavedTensor, index: int) -> Tensor:
    """Tensor `index` in what a pack hook returned, whose unpack hook is part of the program."""
    return [t for t in tree_leaves(saved.packed_value()) if isinstance(t, Tensor)][index]


def release(node: Node) -> None:
    """Backward through `node` is over: let go of what it saved. Not where the graph is kept."""
    node.release()


def tensor_hooks(node: Node, index: int, box: Grads) -> Tensor | None:
    """The hooks on output `index` of `node`, in order of registration."""
    _at(node)
    hooks = node.hooks
    fns = hooks.tensor.get(index) if hooks is not None else None
    return engine.call_tensor_hooks((fns or {}).values(), box.pop(), node)


def leaf_hooks(leaf: AccumulateNode, box: Grads) -> Tensor | None:
    """The hooks on a leaf itself."""
    _at(leaf)
    return engine.call_tensor_hooks(leaf.leaf_hooks(), box.pop(), leaf)


def retain_grad(node: Node, index: int, grad: Tensor | None) -> None:
    """`retain_grad()` on output `index` of `node`."""
    ref = node.hooks.retained.get(index) if node.hooks is not None else None
    tensor = ref() if ref is not None else None
    if tensor is not None and grad is not None:
        engine.retain(tensor, grad)


def pre_hooks(node: Node, *grads: Tensor | None) -> Grads:
    """The hooks that run before `node`."""
    _at(node)
    assert node.hooks is not None
    return engine.pre_hooks(node, node.hooks, list(grads))


def post_hooks(node: Node, results: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> Any:
    """The hooks that run after `node`; they see its gradients as its inputs will get them."""
    _at(node)
    assert node.hooks is not None
    return engine.after(node, node.hooks, results, list(grads))


def call_node(
    node: Node, box: Grads, needs: Sequence[bool] | None, assumed: Sequence[bool] | None
) -> Sequence[Tensor | None]:
    """A node that cannot be traced (a custom Function, an op that falls back), run as it is. Its
    gradients come in the shape and dtype that its inputs have. `assumed`: for which of them the
    program takes it for granted that they are there, and dense; see learned.py."""
    like = next((g for g in box if g is not None), None) if assumed is not None else None
    whole = all(g is not None for g in box)
    _at(node)
    results = node.apply(box, needs)
    if len(results) != len(node.edges):
        raise GradientError(
            f"{node.name()} returned {len(results)} gradients for its {len(node.edges)} inputs"
        )
    fitted = [
        g if g is None or e is None else engine.fit(g, e, node, i)
        for i, (g, e) in enumerate(zip(results, node.edges, strict=True))
    ]
    if whole:
        learned.note(node, needs, fitted)
    if assumed is not None and learned.filled(node, fitted, assumed, like):
        task = engine.current_task()
        if task is not None:
            task.surprised = True
    return fitted


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, of which nothing is known before they are there."""
    if a is None or b is None:
        return b if a is None else a
    return a + b if a.layout is torch.strided else b + a


def accumulate(leaf: AccumulateNode, box: Grads, hooked: bool) -> None:
    """Add a gradient to the leaf's `.grad`. `hooked`: its hooks are steps of the program; else they
    were registered since it began."""
    if not hooked and _private.native_hooks(leaf.variable):
        box = [leaf_hooks(leaf, box)]
    leaf.add(box)
    if not hooked and leaf.variable._post_accumulate_grad_hooks:
        post_accumulate_hooks(leaf)


def post_accumulate_hooks(leaf: AccumulateNode) -> None:
    """The leaf's post-accumulate-grad hooks."""
    _at(leaf)
    leaf.call_post_hooks()


def _at(node: Node) -> None:
    """User code that asks which node runs hears of `node`."""
    task = engine.current_task()
    if task is not None:
        task.node = node
