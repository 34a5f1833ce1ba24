"""Producers of tensors, and what in-place changes do to them.

Views and in-place ops follow PyTorch's scheme. The native view bookkeeping (`_base`, version
counters, creation meta) stays switched on around kernels. An in-place op on a tensor that is no
view gives the tensor a new producer. On a view it gives the base a new producer (CopySlices, which
lets the gradient of the changed part through the op and the rest past it), and every view of that
base, being at an older version now, works out its producer anew when it is next used: the view is
replayed on the base.

This module knows the graph and PyTorch's views; of recording only how to switch it on and off.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _private, graph
from .context import suspended
from .errors import InPlaceError, describe
from .graph import AccumulateNode, Edge, Node, attach, call_user, leaf_edge

_tracked = _private.native_requires_grad

def gradient_edge(tensor: Tensor) -> Edge:
    """The edge of the producer of `tensor`, which needs gradients."""
    edge: Edge | None = getattr(tensor, "_stowgrad", None)
    if edge is not None:
        if edge.version is None or edge.version == tensor._version:
            return edge
        return _replay_view(tensor)
    if tensor._is_view():
        base = tensor._base
        if base is not None and _tracked(base):
            born = getattr(tensor, "_stowgrad_born", None)
            if graph.state(base) is not None and born != tensor._version:
                return _replay_view(tensor)
            if not _has_own_flag(tensor):
                return Edge(EndNode(()), 0, tensor.shape, tensor.dtype)
    return leaf_edge(tensor)


class EndNode(Node):
    """Where gradients go that belong to nothing."""

    __slots__ = ()

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None
    ) -> Sequence[Tensor | None]:
        return ()


def _has_own_flag(view: Tensor) -> bool:
    """Whether a view that reads as tracked is so by itself, rather than as a view of a base that
    is: one made without grad, or before the base was tracked, is a constant. PyTorch's autograd
    tells by the edge it would record."""
    with suspended(), torch.enable_grad():
        node = _private.native_grad_fn(view.view_as(view))
    return node.next_functions[0][0] is not None


def note_birth(out: Any) -> None:
    """A view of a tracked tensor, made without grad, counts as a constant while its base stays as
    it is now; afterwards it may not be used with grad (PyTorch's rule)."""
    for view in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(view, Tensor) and _tracked(view) and graph.state(view) is None:
            base = view._base
            if base is not None and graph.state(base) is not None:
                view._stowgrad_born = view._version  # type: ignore[attr-defined]


def producer(tensor: Tensor) -> Edge | None:
    """As `gradient_edge`, but None for a leaf or a tensor that needs no gradient."""
    if not _tracked(tensor):
        return None
    edge = graph.state(tensor)
    if edge is not None and (edge.version is None or edge.version == tensor._version):
        return edge
    base = tensor._base  # None for what is no view, and for a lazy module's parameter
    if base is None or (edge is None and not _tracked(base)):
        return None
    found = gradient_edge(tensor)
    if edge is None and isinstance(found.node, (AccumulateNode, EndNode)):
        return None
    return found


def _replay_view(view: Tensor) -> Edge:
    """The producer of a view whose base was changed in place since: the same view of the base."""
    meta = _private.creation_meta(view)
    base = view._base
    assert base is not None
    if meta != _private.CreationMeta.DEFAULT:
        raise InPlaceError(_message(meta, view, _BASE_CHANGED))
    with torch.enable_grad():
        fresh = call_user(_private.replay_view, view, base)
    found = gradient_edge(fresh)
    edge = Edge(found.node, found.index, found.shape, found.dtype, view._version)
    _move_retained(graph.state(view), edge.node, view, edge.index)
    attach(view, edge)
    return edge


_NO_GRAD_ADVICE = (
    "Given that this use case is ambiguous and error-prone, it is forbidden. You can clarify your "
    "code by moving both the view and the inplace either both inside the no_grad block (if you "
    "don't want the inplace to be tracked) or both outside (if you want the inplace to be tracked)."
)


_BASE_CHANGED = "its base or another view of its base has been modified inplace"
_CHANGING = "is being modified inplace"


def _message(meta: Any, view: Tensor, what: str) -> str:
    """Why `what` (one of the two above) may not happen to a view of this kind."""
    kinds = _private.CreationMeta
    if meta == kinds.NO_GRAD_MODE:
        return (
            f"A view ({describe(view)}) was created in no_grad mode and {what} with grad mode "
            f"enabled. {_NO_GRAD_ADVICE}"
        )
    if meta == kinds.INFERENCE_MODE:
        mode = "with grad mode enabled " if what == _BASE_CHANGED else ""
        return (
            f"A view ({describe(view)}) was created in inference mode and {what} {mode}in "
            "normal mode. Create the view outside inference_mode()."
        )
    edge = graph.state(view)
    source = f"Output {edge.index} of {edge.node.name()}" if edge is not None else "A tensor"
    if meta == kinds.IN_CUSTOM_FUNCTION:
        return (
            f"{source} ({describe(view)}) is a view created inside a custom Function (or because "
            f"an input was returned as-is) and {what}. Clone the output of the custom Function."
        )
    return (
        f"{source} ({describe(view)}) is a view and {what}. This view is the output of a function "
        "that returns multiple views. Such functions do not allow the output views to be modified "
        "inplace. You should replace the inplace operation by an out-of-place one."
    )


def check_inplace(target: Tensor) -> None:
    """Raise, as PyTorch does, where an in-place change of `target` has no sound gradient."""
    if target._is_view():
        meta = _private.creation_meta(target)
        if meta != _private.CreationMeta.DEFAULT:
            raise InPlaceError(_message(meta, target, _CHANGING))
        base = target._base
        if base is not None and _tracked(base) and graph.state(base) is None:
            raise InPlaceError(
                f"a view of a leaf Variable that requires grad is being used in an in-place "
                f"operation (the leaf is {describe(base)}). Change it under no_grad(), or a copy "
                "of it."
            )
    elif _tracked(target) and graph.state(target) is None:
        raise InPlaceError(
            "a leaf Variable that requires grad is being used in an in-place operation "
            f"({describe(target)}). Change it under no_grad(), or a copy of it."
        )


class ErrorNode(Node):
    """A node through which no gradient may pass."""

    __slots__ = ("message",)

    def __init__(self, message: str, edges: Sequence[Edge | None], outputs: int) -> None:
        super().__init__(edges, outputs)
        self.message = message

    def name(self) -> str:
        return "torch::autograd::Error"

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None = None
    ) -> Sequence[Tensor | None]:
        raise RuntimeError(self.message)


def rebase(target: Tensor, node: Node, self_index: int, output: int = 0) -> None:
    """After an in-place op: `node` is the producer of what `target` holds now.

    `self_index`: which of the node's edges led to the old value of `target`. `output`: which of
    its outputs the new value is (for a view: the only one).
    """
    base = target._base if target._is_view() else None
    if base is None:
        _move_retained(graph.state(target), node, target, output)
        attach(target, Edge(node, output, target.shape, target.dtype))
        return
    old = gradient_edge(base) if _tracked(base) else None
    copy = CopySlices(old, base, target, node, self_index)
    copy.where = node.where
    _move_retained(graph.state(base), copy, base)
    attach(base, Edge(copy, 0, base.shape, base.dtype))
    edge = graph.state(target)
    if edge is not None:
        edge.version = -1  # stale: worked out anew from the base when next used


def renew(target: Tensor, node: Node) -> None:
    """After an op that changed only the sizes and strides of `target`: the memory is as before,
    so that of a view the base and the other views are too."""
    _move_retained(graph.state(target), node, target)
    version = target._version if target._is_view() else None
    attach(target, Edge(node, 0, target.shape, target.dtype, version))


def _move_retained(old: Edge | None, node: Node, tensor: Tensor, output: int = 0) -> None:
    """retain_grad() follows the tensor to its new producer; tensor hooks stay with the old."""
    if old is None or old.node.hooks is None:
        return
    ref = old.node.hooks.retained.get(old.index)
    if ref is not None and ref() is tensor:
        del old.node.hooks.retained[old.index]
        node.ensure_hooks().retained[output] = ref


class CopySlices(Node):
    """The producer of a base one of whose views was changed in place by `inner`.

    The gradient of the changed part goes through `inner`; what `inner` gives for its own old
    value takes that part's place in the gradient of the old base. Edges: the old base, then
    `inner`'s without the one of its target.
    """

    __slots__ = (
        "_base_geometry", "_dtypes", "_self_index", "_view_geometry", "_view_meta", "inner",
    )  # fmt: skip

    def __init__(
        self, old: Edge | None, base: Tensor, view: Tensor, inner: Node, self_index: int
    ) -> None:
        others = [e for i, e in enumerate(inner.edges) if i != self_index]
        super().__init__([old, *others])
        self.inner = inner
        self._self_index = self_index
        self._base_geometry = (base.shape, base.stride())
        offset = view.storage_offset() - base.storage_offset()
        self._view_geometry = (view.shape, view.stride(), offset)
        self._view_meta: Tensor | None = None
        plain = view.dtype == base.dtype and not (
            view.is_conj() or view.is_neg() or base.is_conj() or base.is_neg()
        )
        if not plain:  # replay the view rather than describe it by strides
            like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
            with torch.no_grad():
                self._view_meta = call_user(_private.replay_view, view, like)
        self._dtypes = (base.dtype, view.dtype)
        me = weakref.ref(self)  # not a circle; `inner` lives no longer than this does
        inner.within = lambda: me().changed_part()  # type: ignore[union-attr]

    def name(self) -> str:
        return "torch::autograd::CopySlices"

    def _view(self, base: Tensor) -> Tensor:
        if self._view_meta is not None:
            return _private.replay_view(self._view_meta, base)
        shape, stride, offset = self._view_geometry
        return base.as_strided(shape, stride, base.storage_offset() + offset)

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None
    ) -> Sequence[Tensor | None]:
        if needs is None:
            needs = [e is not None for e in self.edges]
        g = grads[0]
        if g is None:
            return [None] * len(self.edges)
        grads.clear()
        shape, stride = self._base_geometry
        if g.stride() != stride or g._is_view():
            g = g.new_empty_strided(shape, stride).copy_(g)
        index = self._self_index
        inner_needs = [*needs[1 : index + 1], needs[0], *needs[index + 1 :]]
        results = list(self.inner.apply([self._view(g)], inner_needs))
        part = results.pop(index)
        whole: Tensor | None = None
        if needs[0]:
            whole = g.new_empty_strided(shape, stride).copy_(g)  # a clone would close gaps
            if part is None:
                self._view(whole).zero_()
            else:
                self._view(whole).copy_(part)
        return [whole, *results]

    def release(self) -> None:
        self.inner.release()

    def changed_part(self) -> Edge:
        """What `inner` made, as a part of the new base: what `inner` saved of its own result."""
        base_dtype, dtype = self._dtypes
        node = ChangedPart([Edge(self, 0, self._base_geometry[0], base_dtype)])
        return Edge(node, 0, self._view_geometry[0], dtype)

    def spread(self, grad: Tensor) -> Tensor:
        """A gradient of the changed part as one of the whole base."""
        shape, stride = self._base_geometry
        whole = torch.empty_strided(shape, stride, dtype=self._dtypes[0], device=grad.device)
        whole.zero_()
        self._view(whole).copy_(grad)
        return whole


class ChangedPart(Node):
    """A view of the base that a CopySlices made."""

    __slots__ = ()

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None
    ) -> Sequence[Tensor | None]:
        source = self.edges[0]
        assert source is not None and isinstance(source.node, CopySlices)
        return [None if grads[0] is None else source.node.spread(grads[0])]
