"""Ops without a rule: saved inputs, and a backward that re-runs the op under PyTorch's autograd.

The forward runs the kernel as ever and saves the op's tensor inputs (hooks apply to them). The
backward unpacks them, runs that one op again with PyTorch's autograd on, and asks it for the
gradient. With create_graph the gradient is the output of a node of ours that keeps PyTorch's graph
of that one op and differentiates it again, to any order. Costs two more runs of the op (one, in
the forward, to learn which results have a gradient) and the memory of its inputs.

`stowgrad ops` lists what falls back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import _private
from ..errors import GraphFreedError, NotDifferentiableError
from ..graph import Edge, Node, attach, locate
from ..saved import SavedTensor

_tracked = _private.native_requires_grad


class FallbackNode(Node):
    """Backward by re-running one op under PyTorch's autograd."""

    __slots__ = ("func", "op", "positions", "rng", "saved", "spec")

    saved: list[Any] | None

    def __init__(
        self,
        op: str,
        func: Any,
        edges: Sequence[Edge],
        positions: list[int],
        spec: Any,
        rng: Tensor | None,
    ) -> None:
        super().__init__(edges)
        self.op = op
        self.func = func
        self.positions = positions  # of the tracked tensors among the flattened arguments
        self.spec = spec
        self.rng = rng
        self.saved = None

    def name(self) -> str:
        return f"Fallback[{self.op}]"

    def _at(self) -> str:
        where = locate(self.where)
        return f" (at {where})" if where else ""

    def run_native(self, leaves: list[Any]) -> tuple[list[Any], list[Tensor]]:
        """The op under PyTorch's autograd: its results, and the leaves that have gradients."""
        tracked = set(self.positions)
        fresh = [
            x.detach().requires_grad_(i in tracked) if isinstance(x, Tensor) else x
            for i, x in enumerate(leaves)
        ]
        args, kwargs = tree_unflatten(fresh, self.spec)
        out = self.func(*args, **kwargs)
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        return outs, [fresh[i] for i in self.positions]

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None
    ) -> Sequence[Tensor | None]:
        if self.saved is None:
            raise GraphFreedError(
                "Trying to backward through the graph a second time (or directly access saved "
                f"tensors after they have already been freed): what {self.op} saved is gone. "
                "Specify retain_graph=True if you need to backward through the graph a second time."
            )
        leaves = [
            s.unpack(self, graph=False) if isinstance(s, SavedTensor) else s for s in self.saved
        ]
        with native_autograd(self.rng):
            outs, inputs = self.run_native(leaves)
        return _native_gradients(self.op, self._at(), outs, inputs, self.edges, grads)

    def release(self) -> None:
        for s in self.saved or ():
            if isinstance(s, SavedTensor):
                s.release()
        self.saved = None


class NativeGraphNode(Node):
    """A piece of graph that PyTorch's autograd holds: the gradient of an op that falls back."""

    __slots__ = ("native_inputs", "native_outputs", "op")

    def __init__(
        self, op: str, edges: Sequence[Edge | None], outputs: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        super().__init__(edges, len(outputs))
        self.op = op
        self.native_outputs: Sequence[Any] | None = outputs
        self.native_inputs: Sequence[Any] = inputs

    def name(self) -> str:
        return f"FallbackBackward[{self.op}]"

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None
    ) -> Sequence[Tensor | None]:
        if self.native_outputs is None:
            raise GraphFreedError(
                f"Trying to backward a second time through the gradient of {self.op}, which is "
                "freed. Specify retain_graph=True the first time."
            )
        return _native_gradients(
            self.op, "", self.native_outputs, self.native_inputs, self.edges, grads
        )

    def release(self) -> None:
        self.native_outputs = None
        self.native_inputs = ()


def _native_gradients(
    op: str,
    where: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    edges: Sequence[Edge | None],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of `inputs` through the graph that PyTorch holds between them and `outputs`.

    `edges` are the places of `inputs` in our graph. With grad mode on (create_graph) what is
    returned is differentiable with respect to them and to `grads`.
    """
    from ..views import gradient_edge

    create_graph = torch.is_grad_enabled()
    pairs = [
        (o, g)
        for o, g in zip(outputs, grads, strict=True)
        if g is not None and isinstance(o, Tensor) and _tracked(o)
    ]
    if not pairs:
        return [None] * len(inputs)
    for o, _ in pairs:
        fn = _private.native_grad_fn(o)
        if fn is not None and fn.name().endswith("WarnNotImplemented"):  # PyTorch goes on without
            raise NotDifferentiableError(
                f"{op}{where} has no derivative: nothing is registered for it with PyTorch's "
                "autograd. Register one (torch.library.register_autograd), or detach() what goes "
                "into it."
            )
    given = [g for _, g in pairs]
    with native_autograd(None):
        seeds = [g.detach().requires_grad_(create_graph and _tracked(g)) for g in given]
        try:
            found: Sequence[Tensor | None] = torch.autograd.grad(
                [o for o, _ in pairs],
                list(inputs),
                seeds,
                create_graph=create_graph,
                retain_graph=True,
                allow_unused=True,
            )
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            raise NotDifferentiableError(
                f"{op}{where} has no derivative, here or in PyTorch ({error}). Keep it out of the "
                "path of a gradient: detach() what goes into it, or use another op."
            ) from error
        if not create_graph:
            return list(found)
        plain = [None if g is None else g.detach() for g in found]
    sources = [(s, gradient_edge(g)) for s, g in zip(seeds, given, strict=True) if _tracked(g)]
    node = NativeGraphNode(
        op,
        [*edges, *(e for _, e in sources)],
        found,
        [*inputs, *(s for s, _ in sources)],
    )
    for i, (g, p) in enumerate(zip(found, plain, strict=True)):
        if g is not None and p is not None and _tracked(g):
            attach(p, Edge(node, i, p.shape, p.dtype))
    return plain


@contextmanager
def native_autograd(rng: Tensor | None) -> Iterator[None]:
    """Within: PyTorch's own autograd, with the random state `rng` (None: as it is)."""
    from ..context import suspended

    with suspended(), torch.enable_grad():
        if rng is None:
            yield
        else:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(rng)
                yield


def record_fallback(
    recorder: Any, entry: Any, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Record one op that has no rule."""
    from ..record import user_location
    from ..views import gradient_edge

    if func._schema.is_mutable:
        return _record_inplace(recorder, entry, func, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    random = torch.Tag.nondeterministic_seeded in func.tags
    positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and _tracked(x)]
    edges = [gradient_edge(leaves[p]) for p in positions]
    rng = torch.get_rng_state() if random else None
    node = FallbackNode(entry.name, func, edges, positions, spec, rng)
    node.where = user_location()
    differentiable = _probe(node, leaves)
    place = {p: e for p, e in zip(positions, edges, strict=True)}
    node.saved = [
        SavedTensor(x, f"input {i}", entry.name, node.where, None, place.get(i))
        if isinstance(x, Tensor)
        else x
        for i, x in enumerate(leaves)
    ]
    out = recorder.run(entry, func, args, kwargs)
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    node.outputs = len(outs)
    for i, o in enumerate(outs):
        if isinstance(o, Tensor) and i in differentiable:
            version = o._version if o._is_view() else None
            attach(o, Edge(node, i, o.shape, o.dtype, version))
    return out


def _probe(node: FallbackNode, leaves: list[Any]) -> set[int]:
    """Which results have a gradient, by PyTorch's word: a trial run whose graph is dropped."""
    with native_autograd(node.rng):
        outs, _ = node.run_native(leaves)
    return {i for i, o in enumerate(outs) if isinstance(o, Tensor) and _tracked(o)}


def _record_inplace(
    recorder: Any, entry: Any, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """An in-place op without a rule: its plain form is recorded, and the result copied over."""
    namespace, name = func._schema.name.split("::")
    plain = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    plain = getattr(plain, func._overloadname, None) if plain is not None else None
    if plain is None or name == name.removesuffix("_"):
        raise NotDifferentiableError(
            f"{entry.name} changes its input in place and has no rule and no plain form; compute "
            "it out of place, or under no_grad()"
        )
    with recorder.on():
        result = plain(*args, **kwargs)
        target = args[0]
        if isinstance(target, Tensor):
            return target.copy_(result)
        for t, r in zip(target, result, strict=True):
            t.copy_(r)
        return target
