"""Ops without a rule: saved inputs, and a backward that re-runs the op under PyTorch's autograd.

The forward runs the kernel as ever and saves the op's tensor inputs (hooks apply to them). The
backward unpacks them, runs that one op again with PyTorch's autograd on, and asks it for the
gradient. With create_graph, the gradient itself is differentiable: it is a node of the same kind,
whose forward was PyTorch's backward. Costs one more run of the op, and the memory of its inputs.

`stowgrad ops` lists what falls back; `torch.autograd` decides what is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import _private
from ..errors import NotDifferentiableError, describe
from ..graph import Edge, Node, attach
from ..saved import SavedTensor

_differentiable_outputs: dict[Any, bool] = {}


class FallbackNode(Node):
    """Backward by re-running one op under PyTorch's autograd."""

    __slots__ = ("func", "metas", "op", "positions", "rng", "saved", "spec")

    def name(self) -> str:
        return f"Fallback[{self.op}]"

    def apply(self, grads: list[Tensor | None], needs: Sequence[bool] | None) -> Sequence[Tensor | None]:
        from ..errors import GraphFreedError

        if self.saved is None:
            raise GraphFreedError(
                "Trying to backward through the graph a second time (or directly access saved "
                f"tensors after they have already been freed): what {self.op} saved is gone. "
                "Specify retain_graph=True if you need to backward through the graph a second time."
            )
        create_graph = torch.is_grad_enabled()
        leaves = [
            s.unpack(self, create_graph) if isinstance(s, SavedTensor) else s for s in self.saved
        ]
        wanted = [p for i, p in enumerate(self.positions) if needs is None or needs[i]]
        present = [i for i, g in enumerate(grads) if g is not None]
        if not present or not wanted:
            return [None] * len(self.edges)
        outputs = [grads[i] for i in present]
        results = _vjp_node(self, leaves, wanted, present, outputs, create_graph)
        found = dict(zip(wanted, results, strict=True))
        return [found.get(p) for p in self.positions]

    def release(self) -> None:
        for s in self.saved or ():
            if isinstance(s, SavedTensor):
                s.release()
        self.saved = None


def _native_vjp(
    node: FallbackNode,
    leaves: list[Any],
    wanted: list[int],
    present: list[int],
    grads: list[Tensor],
    create_graph: bool = False,
) -> tuple[list[Any], Any]:
    """The gradients by PyTorch's own autograd; with create_graph, also its inputs and outputs."""
    with native_autograd(node.rng):
        fresh = [
            x.detach().requires_grad_(True)
            if isinstance(x, Tensor) and (i in wanted or (create_graph and _private.native_requires_grad(x)))
            else (x.detach() if isinstance(x, Tensor) else x)
            for i, x in enumerate(leaves)
        ]
        seeds = [g.detach().requires_grad_(create_graph) for g in grads]
        args, kwargs = tree_unflatten(fresh, node.spec)
        out = node.func(*args, **kwargs)
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        chosen = [outs[i] for i in present]
        usable = [k for k, o in enumerate(chosen) if o.requires_grad]
        if not usable:
            return [None] * len(wanted), (fresh, seeds)
        results = torch.autograd.grad(
            [chosen[k] for k in usable],
            [fresh[p] for p in wanted],
            [seeds[k] for k in usable],
            create_graph=create_graph,
            allow_unused=True,
        )
    return list(results), (fresh, seeds)


def _vjp_node(
    node: FallbackNode,
    leaves: list[Any],
    wanted: list[int],
    present: list[int],
    grads: list[Any],
    create_graph: bool,
) -> list[Any]:
    if not create_graph:
        return _native_vjp(node, leaves, wanted, present, grads)[0]
    from ..record import gradient_edge

    with torch.enable_grad():
        results, (fresh, seeds) = _native_vjp(node, leaves, wanted, present, grads, True)
    sources = [x for x in leaves if isinstance(x, Tensor) and _private.native_requires_grad(x)]
    natives = [f for x, f in zip(leaves, fresh, strict=True) if isinstance(x, Tensor) and _private.native_requires_grad(x)]
    for g, s in zip(grads, seeds, strict=True):
        if _private.native_requires_grad(g):
            sources.append(g)
            natives.append(s)
    second = NativeGraphNode([gradient_edge(x) for x in sources], len(results))
    second.op = node.op
    second.native_outputs = results
    second.native_inputs = natives
    out: list[Any] = []
    for i, r in enumerate(results):
        if r is None:
            out.append(None)
            continue
        plain = r.detach()
        if _private.native_grad_fn(r) is not None or _private.native_requires_grad(r):
            attach(plain, Edge(second, i, plain.shape, plain.dtype))
        out.append(plain)
    return out


class NativeGraphNode(Node):
    """A piece of graph that PyTorch's autograd holds: the second and higher derivatives of an op
    that falls back."""

    __slots__ = ("native_inputs", "native_outputs", "op")

    def name(self) -> str:
        return f"FallbackBackward[{self.op}]"

    def apply(self, grads: list[Tensor | None], needs: Sequence[bool] | None) -> Sequence[Tensor | None]:
        pairs = [
            (o, g) for o, g in zip(self.native_outputs, grads, strict=True)
            if g is not None and o is not None and _private.native_requires_grad(o)
        ]  # fmt: skip
        if not pairs:
            return [None] * len(self.edges)
        create_graph = torch.is_grad_enabled()
        if create_graph:
            raise NotDifferentiableError(
                f"{self.op} has no rule; its fallback gives first and second derivatives, and a "
                "third is asked for"
            )
        with native_autograd(None):
            return list(
                torch.autograd.grad(
                    [o for o, _ in pairs], self.native_inputs, [g for _, g in pairs],
                    retain_graph=True, allow_unused=True,
                )
            )  # fmt: skip

    def release(self) -> None:
        self.native_outputs = [None] * self.outputs
        self.native_inputs = []


@contextmanager
def native_autograd(rng: Any) -> Any:
    """Within: PyTorch's own autograd, with the random state `rng` (None: as it is)."""
    from ..record import suspended

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
    """Record one op that has no rule. Raises NotDifferentiableError if it has no derivative."""
    from ..record import gradient_edge, user_location

    if entry.inplace or entry.touches_views and func._schema.is_mutable:
        return _record_inplace(recorder, entry, func, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    random = torch.Tag.nondeterministic_seeded in func.tags
    rng = torch.get_rng_state() if random else None
    positions = [
        i for i, x in enumerate(leaves)
        if isinstance(x, Tensor) and _private.native_requires_grad(x)
    ]  # fmt: skip
    node = FallbackNode([gradient_edge(leaves[p]) for p in positions])
    node.func, node.op, node.positions, node.spec, node.rng = (
        func, entry.name, positions, spec, rng,
    )  # fmt: skip
    node.where = user_location()
    differentiable = _probe(node, leaves, entry, func)
    node.saved = [
        SavedTensor(
            x, f"input {i}", entry.name, node.where, None,
            gradient_edge(x) if i in positions else None,
        ) if isinstance(x, Tensor) else x
        for i, x in enumerate(leaves)
    ]  # fmt: skip
    out = recorder.run(entry, func, args, kwargs)
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    node.outputs = len(outs)
    for i, o in enumerate(outs):
        if isinstance(o, Tensor) and i in differentiable:
            version = o._version if o._is_view() else None
            attach(o, Edge(node, i, o.shape, o.dtype, version))
    return out


def _probe(node: FallbackNode, leaves: list[Any], entry: Any, func: Any) -> set[int]:
    """Which outputs have a gradient, by PyTorch's word: a trial run whose graph is dropped.

    It costs the op a second time; only ops without a rule pay it.
    """
    with native_autograd(node.rng):
        fresh = [
            x.detach().requires_grad_(i in node.positions) if isinstance(x, Tensor) else x
            for i, x in enumerate(leaves)
        ]
        args, kwargs = tree_unflatten(fresh, node.spec)
        out = func(*args, **kwargs)
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    found = {i for i, o in enumerate(outs) if isinstance(o, Tensor) and o.requires_grad}
    for o in outs:
        fn = _private.native_grad_fn(o) if isinstance(o, Tensor) and o.requires_grad else None
        if fn is not None and fn.name() == "NotImplemented":
            raise NotDifferentiableError(
                f"{entry.name} has no derivative, here or in PyTorch ({describe(o)})"
            )
    return found


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
