"""The recorder: sees every op of a thread's forward pass and writes the graph.

`record()` leaves PyTorch's autograd key out of dispatch and puts a TorchDispatchMode on top of the
mode stack. Each op then arrives in `Recorder._dispatch` as an ATen overload with plain
tensors. With grad mode off, or with no tracked argument, the kernel runs and that is all. Else the
op's entry says how it is recorded: by its rule, by the ops it is composed of, or by the fallback.

Views and in-place ops follow PyTorch's scheme. The native view bookkeeping (`_base`, version
counters, creation meta) stays switched on around kernels. An in-place op on a tensor that is no
view gives the tensor a new producer. On a view it gives the base a new producer (CopySlices, which
lets the gradient of the changed part through the op and the rest past it), and every view of that
base, being at an older version now, works out its producer anew when it is next used: the view is
replayed on the base.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _private, engine, graph
from .errors import GradientError, InPlaceError, NotDifferentiableError, describe
from .graph import AccumulateNode, Edge, Location, Node, _outside, attach, leaf_edge, seam
from .ops import SPECIAL, Entry, Kind, _entries, entry_of
from .rules.table import _FACTS, Plan, Rule, RuleNode
from .saved import SavedTensor, changes, hooks, note_change, watchers

_tracked = _private.native_requires_grad
_set_tracked = _private.set_native_requires_grad
_set_hooks = _private.set_native_hooks
_grad_enabled = _private.grad_enabled
_inference = _private.inference_enabled
_DIFFERENTIABLE = frozenset(
    d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and (d.is_floating_point or d.is_complex)
)
anomaly_enabled = torch.is_anomaly_enabled
_include = _private.include_view_tracking
_exclude = _private.exclude_view_tracking

_PACKAGE_DIR = __file__.rpartition("/")[0] + "/"
_internal_files: dict[str, bool] = {}


def _is_internal(name: str) -> bool:
    found = name.startswith((_private.TORCH_DIR, _PACKAGE_DIR, "<frozen"))
    _internal_files[name] = found
    return found


def user_location() -> Location | None:
    """The innermost frame that is neither PyTorch's nor ours: the line of user code."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        internal = _internal_files.get(name)
        if internal is None:
            internal = _is_internal(name)
        if not internal:
            return code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Recorder(TorchDispatchMode):
    """The dispatch mode of one thread's `record()`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[Any, int] | None = None  # overload -> times recorded, when asked for

    # -- the hot path: every op of the thread comes through here

    @_private.skip_compiler
    def _dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        entry = _entries.get(func)
        if entry is None:
            entry = entry_of(func)
        if entry.made_of_ops:
            _private.resolve_lazy_views()
        if entry.kind is not Kind.PLAIN and _grad_enabled() and not _inference():
            if not kwargs:
                rule = entry.fast
                if rule is not None and not (entry.composite and _private.modes_beneath()):
                    return self._record_fast(entry, rule, args)
                kwargs = {}
            count = 0
            for a in args:
                if isinstance(a, Tensor):
                    if _tracked(a):
                        count += 1
                elif type(a) is list or type(a) is tuple:
                    for b in a:
                        if isinstance(b, Tensor) and _tracked(b):
                            count += 1
            for a in kwargs.values():
                if isinstance(a, Tensor):
                    if _tracked(a):
                        count += 1
                elif type(a) is list or type(a) is tuple:
                    for b in a:
                        if isinstance(b, Tensor) and _tracked(b):
                            count += 1
            if count:
                return self._record(entry, func, args, kwargs, count)
        elif kwargs is None:
            kwargs = {}
        if entry.touches_views:
            if entry.composite and _private.modes_beneath():
                return self.decompose(func, args, kwargs)
            out = self.run(entry, func, args, kwargs)
            if not entry.written:
                _note_birth(out)
            return out
        return func(*args, **kwargs)

    def _record_fast(self, entry: Entry, rule: Rule, args: Any) -> Any:
        """As `_record_rule`, for the plainest case: no lists, nothing changed in place, one tensor
        as result, no keyword. Most ops of a model; no step here is spare."""
        edges: list[Edge | None] = []
        mask = 0
        bit = 1
        given = len(args)
        for position in rule.wrt_positions:
            if position < given:
                a = args[position]
                if isinstance(a, Tensor) and _tracked(a):
                    edge = getattr(a, "_stowgrad", None)
                    if edge is None or edge.version is not None:
                        edge = gradient_edge(a)
                    edges.append(edge)
                    mask |= bit
                else:
                    edges.append(None)
            else:
                edges.append(None)
            bit <<= 1
        for position in rule.others:
            if position < given and isinstance(args[position], Tensor) and _tracked(args[position]):
                count = sum(isinstance(a, Tensor) and _tracked(a) for a in args)
                return self._record(entry, rule.op, args, {}, count)
        if not mask:
            return self.run(entry, entry.call, args, {})
        if self.ops is not None:
            self.ops[rule.op] = self.ops.get(rule.op, 0) + 1
        plan = rule._plans.get(mask)
        if plan is None:
            plan = rule.plan(mask)
        node = rule.node_class(plan, edges)

        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            internal = _internal_files.get(code.co_filename)
            if internal is None:
                internal = _is_internal(code.co_filename)
            if not internal:
                node.where = code, frame.f_lasti
                break
            frame = frame.f_back  # type: ignore[assignment]
        if anomaly_enabled():
            note_traceback(node)

        saved: list[Any] = []
        if plan.fast_inputs:
            plain = not watchers and not hooks.pairs
            for name, position, index in plan.fast_inputs:
                value = args[position] if position < given else None
                if not isinstance(value, Tensor):
                    saved.append(value)
                elif plain and not value.is_inference():
                    # a SavedTensor once it is asked for
                    saved.append((value, value._version, changes.tick))
                else:
                    edge = edges[index] if index >= 0 else None
                    saved.append(SavedTensor(value, name, rule.name, node.where, None, edge))
        if plan.fast_values:
            node.values = _values(rule, plan, args, {})
        version = None
        if entry.touches_views:
            _include()
            try:
                out = entry.call(*args)
            finally:
                _exclude()
            if entry.composite and out is args[0]:
                return out  # nothing happened (x.contiguous())
            if out._is_view():
                version = out._version
        else:
            out = entry.call(*args)
        for name in plan.outputs:
            saved.append(SavedTensor(out, name, rule.name, node.where, 0))
        node.saved = saved
        dtype = out.dtype
        if dtype in _DIFFERENTIABLE:
            out._stowgrad = Edge(node, 0, out.shape, dtype, version)
            _set_tracked(out, True)
            _set_hooks(out, _outside)
        return out

    def _record(
        self, entry: Entry, func: Any, args: Any, kwargs: dict[str, Any], count: int
    ) -> Any:
        kind = entry.kind
        if entry.composite and (kind is Kind.COMPOSITE or _private.modes_beneath()):
            return self.decompose(func, args, kwargs)
        if self.ops is not None:
            self.ops[func] = self.ops.get(func, 0) + 1
        if kind is Kind.RULE:
            return self._record_rule(entry, func, args, kwargs, count)
        if kind is Kind.OUT:
            raise NotDifferentiableError(
                f"{entry.name}(): functions with out=... arguments don't support automatic "
                "differentiation, but one of the arguments requires grad. Assign the result "
                "instead, or compute it under no_grad()."
            )
        assert entry.handler is not None
        return entry.handler(self, entry, func, args, kwargs)

    def decompose(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a composite op as its parts, each of which is recorded on its own."""
        with _private.as_called(func), self.on():
            return _private.run_parts(func, args, kwargs)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within: this recorder is on the stack, as for user code."""
        if _private.mode_count() and self in _private.mode_stack():
            yield  # once is enough: twice would record every op twice
            return
        excluded = _private.view_tracking_excluded()
        _private.push_mode(self)
        _exclude()
        try:
            yield
        finally:
            _private.pop_mode()
            if not excluded:
                _include()

    def run(self, entry: Entry, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The kernel itself, unrecorded; what it returns is a finished view where it is one."""
        if not entry.touches_views:
            return func(*args, **kwargs)
        _include()
        try:
            out = func(*args, **kwargs)
        finally:
            _exclude()
        if entry.written:
            _note_change(entry, args, kwargs)
        return out

    # -- an op that has a rule

    def _record_rule(
        self, entry: Entry, func: Any, args: Any, kwargs: dict[str, Any], count: int
    ) -> Any:
        rule = entry.rule
        assert rule is not None
        given = len(args)
        target: Tensor | None = None
        if entry.inplace:
            target = args[0] if given else kwargs[rule.arguments[0]]
            assert target is not None
            if target.dtype not in _DIFFERENTIABLE:
                return self.run(entry, func, args, kwargs)  # floats written to integers end here
            check_inplace(target)
        edges: list[Edge | None] = []
        mask = 0
        bit = 1
        counts: list[int] | None = None if not rule.has_lists else []
        for position, name in zip(rule.wrt_positions, rule.wrt, strict=True):
            a = args[position] if position < given else kwargs.get(name)
            if isinstance(a, Tensor):
                if _tracked(a):
                    edges.append(gradient_edge(a))
                    mask |= bit
                    count -= 1
                else:
                    edges.append(None)
                if counts is not None:
                    counts.append(1)
            elif isinstance(a, (list, tuple)) and counts is not None:
                for b in a:
                    if isinstance(b, Tensor) and _tracked(b):
                        edges.append(gradient_edge(b))
                        mask |= bit
                        count -= 1
                    else:
                        edges.append(None)
                counts.append(len(a))
            else:
                edges.append(None)
                if counts is not None:
                    counts.append(1)
            bit <<= 1
        if count:
            self._check_constants(entry, args, kwargs)
        if not mask:
            return self.run(entry, func, args, kwargs)

        plan = rule.plan(mask)
        node = rule.node_class(plan, edges)
        node.edge_counts = counts
        node.where = where = user_location()
        if anomaly_enabled():
            note_traceback(node)
        saved: list[Any] = []
        for name in plan.inputs:
            value = rule.argument(name, args, kwargs)
            if isinstance(value, Tensor):
                edge = None
                if _tracked(value):
                    edge = _edge_among(rule, edges, name, value)
                if value is target:
                    value = _before_change(value, edge)
                saved.append(SavedTensor(value, name, rule.name, where, None, edge))
            elif isinstance(value, (list, tuple)):
                saved.append([
                    SavedTensor(
                        b, f"{name}[{i}]", rule.name, where, None,
                        gradient_edge(b) if _tracked(b) else None,
                    ) if isinstance(b, Tensor) else b
                    for i, b in enumerate(value)
                ])  # fmt: skip
            else:
                saved.append(value)
        if plan.facts or plan.scalars:
            node.values = _values(rule, plan, args, kwargs)

        if rule.forward is None:
            out = self.run(entry, func, args, kwargs)
        else:
            out = self._run_forward(rule, plan, node, saved, args, kwargs)

        if target is not None:
            if rule.forward is not None and out is not target:
                _include()
                try:
                    target.copy_(out)
                finally:
                    _exclude()
            for name in plan.outputs:
                saved.append(SavedTensor(target, name, rule.name, where, 0))
            node.saved = saved
            if entry.reshapes:
                renew(target, node)
            else:
                rebase(target, node, rule.wrt.index(rule.arguments[0]))
            return target
        if isinstance(out, Tensor):
            for name in plan.outputs:
                saved.append(SavedTensor(out, name, rule.name, where, 0))
            node.saved = saved
            if entry.composite and any(out is a for a in args):
                return out  # nothing happened (x.contiguous(), x.to(x.dtype))
            dtype = out.dtype
            if dtype.is_floating_point or dtype.is_complex:
                version = out._version if entry.touches_views and out._is_view() else None
                attach(out, Edge(node, 0, out.shape, dtype, version))
            return out
        return self._finish_many(entry, node, plan, saved, out)

    def _run_forward(
        self, rule: Any, plan: Any, node: RuleNode, saved: list[Any], args: Any, kwargs: Any
    ) -> Any:
        """The rule's own way to compute the op, and the values it wants saved."""
        _include()
        try:
            out, kept = rule.forward(*args, **kwargs)
        finally:
            _exclude()
        for name in plan.kept:
            value = kept[name]
            if isinstance(value, Tensor):  # computed here, or an argument handed through
                edge = gradient_edge(value) if _tracked(value) else None
                value = SavedTensor(value, name, rule.name, node.where, None, edge)
            saved.append(value)
        return out

    def _finish_many(
        self, entry: Entry, node: RuleNode, plan: Any, saved: list[Any], out: Any
    ) -> Any:
        """Attach several results, or a list of them, to their node."""
        rule = node.rule
        outs = list(out)
        node.outputs = len(outs)
        for name in plan.outputs:
            if rule.list_output:
                saved.append([
                    SavedTensor(o, f"{name}[{i}]", rule.name, node.where, i)
                    for i, o in enumerate(outs)
                ])  # fmt: skip
                continue
            index = rule.output_position[name]
            value = outs[index]
            if isinstance(value, Tensor):
                tracked = name in rule.differentiable
                value = SavedTensor(value, name, rule.name, node.where, index if tracked else None)
            saved.append(value)
        node.saved = saved
        node.metas = [(o.shape, o.dtype, o.device) if isinstance(o, Tensor) else None for o in outs]  # type: ignore[misc]
        for index, o in enumerate(outs):
            if not isinstance(o, Tensor) or not (o.is_floating_point() or o.is_complex()):
                continue
            if rule.list_output or rule.outputs[index] in rule.differentiable:
                version = o._version if o._is_view() else None
                attach(o, Edge(node, index, o.shape, o.dtype, version))
        return out

    def _check_constants(self, entry: Entry, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise if an argument needs a gradient that its rule knows nothing of."""
        rule = entry.rule
        assert rule is not None
        for name in rule.tensor_args:
            if name in rule.wrt or name in rule.constant:
                continue
            value = rule.argument(name, args, kwargs)
            for a in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(a, Tensor) and _tracked(a):
                    raise NotDifferentiableError(
                        f"the derivative of {rule.name} with respect to '{name}' is not "
                        f"implemented ({describe(a)}). Detach it if no gradient should flow there."
                    )


# Assigned rather than defined in the class body: TorchDispatchMode wraps a method defined there in
# two more frames that keep torch.compile out, at a sixth of the recorder's whole cost.
Recorder.__torch_dispatch__ = Recorder._dispatch  # type: ignore[method-assign]


def _values(rule: Rule, plan: Plan, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The plain arguments and the facts of tensors that a rule's formulas read."""
    given = len(args)
    values = {}
    for name in plan.scalars:
        position = rule.position[name]
        if position < given:
            values[name] = args[position]
        elif name in kwargs:
            values[name] = kwargs[name]
    for key, name, fact in plan.facts:
        value = rule.argument(name, args, kwargs)
        if isinstance(value, Tensor):
            values[key] = _FACTS[fact](value)
        elif isinstance(value, (list, tuple)):
            values[key] = [_FACTS[fact](b) if isinstance(b, Tensor) else None for b in value]
        else:
            values[key] = None
    return values


def _note_change(entry: Entry, args: Any, kwargs: dict[str, Any]) -> None:
    """An op has changed tensors in place: remember which, for the error that may come of it."""
    changed: list[Tensor] = []
    for position, name in entry.written:
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            changed.append(value)
        elif isinstance(value, (list, tuple)):
            changed.extend(value)
    note_change(changed, entry.name, user_location())


def note_traceback(node: Node) -> None:
    """Anomaly mode: keep the stack of the forward call, for the error message."""
    node.metadata["traceback_"] = traceback.format_stack(sys._getframe(2))


def _edge_among(rule: Any, edges: Sequence[Edge | None], name: str, value: Tensor) -> Edge | None:
    if not rule.has_lists and name in rule.wrt:
        return edges[rule.wrt.index(name)]
    return gradient_edge(value)


def _before_change(value: Tensor, edge: Edge | None) -> Tensor:
    """A copy of an in-place op's target, which the op is about to change."""
    with torch.no_grad():
        copy = value.clone()
    if edge is not None:
        attach(copy, edge.settled())
    return copy


# -- producers


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


def _note_birth(out: Any) -> None:
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
        raise InPlaceError(_replay_message(meta, view))
    recorder = current_recorder()
    with torch.enable_grad(), recorder.on():
        fresh = _private.replay_view(view, base)
    found = gradient_edge(fresh)
    edge = Edge(found.node, found.index, found.shape, found.dtype, view._version)
    attach(view, edge)
    return edge


_NO_GRAD_ADVICE = (
    "Given that this use case is ambiguous and error-prone, it is forbidden. You can clarify your "
    "code by moving both the view and the inplace either both inside the no_grad block (if you "
    "don't want the inplace to be tracked) or both outside (if you want the inplace to be tracked)."
)


def _replay_message(meta: Any, view: Tensor) -> str:
    kinds = _private.CreationMeta
    if meta == kinds.NO_GRAD_MODE:
        return (
            f"A view ({describe(view)}) was created in no_grad mode and its base or another view "
            f"of its base has been modified inplace with grad mode enabled. {_NO_GRAD_ADVICE}"
        )
    if meta == kinds.INFERENCE_MODE:
        return (
            f"A view ({describe(view)}) was created in inference mode and its base or another "
            "view of its base has been modified inplace with grad mode enabled in normal mode. "
            "Create the view outside inference_mode()."
        )
    edge = graph.state(view)
    source = f"Output {edge.index} of {edge.node.name()}" if edge is not None else "A tensor"
    if meta == kinds.IN_CUSTOM_FUNCTION:
        return (
            f"{source} ({describe(view)}) is a view created inside a custom Function (or because "
            "an input was returned as-is) and its base or another view of its base has been "
            "modified inplace. Clone the output of the custom Function."
        )
    return (
        f"{source} ({describe(view)}) is a view and its base or another view of its base has been "
        "modified inplace. This view is the output of a function that returns multiple views. Such "
        "functions do not allow the output views to be modified inplace. You should replace the "
        "inplace operation by an out-of-place one."
    )


def _inplace_message(meta: Any, view: Tensor) -> str:
    kinds = _private.CreationMeta
    if meta == kinds.NO_GRAD_MODE:
        return (
            f"A view ({describe(view)}) was created in no_grad mode and is being modified inplace "
            f"with grad mode enabled. {_NO_GRAD_ADVICE}"
        )
    if meta == kinds.INFERENCE_MODE:
        return (
            f"A view ({describe(view)}) was created in inference mode and is being modified "
            "inplace in normal mode. Create the view outside inference_mode()."
        )
    return _replay_message(meta, view).replace(
        "and its base or another view of its base has been modified inplace", "and is being "
        "modified inplace"
    )


def check_inplace(target: Tensor) -> None:
    """Raise, as PyTorch does, where an in-place change of `target` has no sound gradient."""
    if target._is_view():
        meta = _private.creation_meta(target)
        if meta != _private.CreationMeta.DEFAULT:
            raise InPlaceError(_inplace_message(meta, target))
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


def _change_of_memory(
    recorder: Recorder, entry: Entry, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """set_() and resize_(), which give a tensor other memory: they have no derivative. What needs
    a gradient cannot be resized; after set_() its backward fails."""
    target = args[0]
    if "resize" in entry.name:
        if _tracked(target):
            raise NotDifferentiableError(
                f"cannot resize variables that require grad ({describe(target)})"
            )
        return recorder.run(entry, func, args, kwargs)
    check_inplace(target)
    out = recorder.run(entry, func, args, kwargs)
    node = ErrorNode("derivative for set_ is not implemented", [], 1)
    attach(target, Edge(node, 0, target.shape, target.dtype))
    return out


for _packet in (torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_):
    SPECIAL.update({getattr(_packet, name): _change_of_memory for name in _packet.overloads()})


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
            with torch.no_grad(), _private.view_tracking():
                self._view_meta = _private.replay_view(view, like)
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


# -- the context


class _Before:
    """What a thread had on when it began to record, to be put back whatever happened since.

    Every scope here cleans up after itself; but Ctrl-C strikes anywhere, in the midst of that too.
    """

    def __init__(self) -> None:
        self.modes = _private.mode_stack()
        self.view_tracking_excluded = _private.view_tracking_excluded()
        self.overrides = _private.function_overrides()
        self.backwards = engine.running()
        self.pairs = list(hooks.pairs)

    def restore(self, raised: bool) -> None:
        engine.abandon(self.backwards)
        _private.set_mode_stack(self.modes)
        if not self.view_tracking_excluded:
            _include()
        _private.set_function_overrides(self.overrides)
        _thread.overrides = None
        if raised:
            hooks.pairs[:] = self.pairs


class _Thread(threading.local):
    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.depth = 0
        self.entered: list[int] = []  # the depth around each record() that is entered
        self.before: _Before | None = None
        self.guard: Any = None
        self.overrides: Any = None  # in a backward: the state of __torch_function__ around it


_thread = _Thread()


def recording() -> bool:
    """Whether this thread is inside `record()`."""
    return _thread.depth > 0


def current_recorder() -> Recorder:
    recorder = _thread.recorder
    if recorder is None:
        raise RuntimeError("not inside record()")
    return recorder


def _call_user(fn: Callable[..., Any], *args: Any) -> Any:
    """Call user code from inside an op or a backward, with recording on as around it."""
    overrides = _thread.overrides
    if overrides is not None:
        inner = _private.function_overrides()
        _thread.overrides = None
        _private.set_function_overrides(overrides)
        try:
            return _call_user(fn, *args)
        finally:
            _private.set_function_overrides(inner)
            _thread.overrides = overrides
    recorder = _thread.recorder
    if recorder is None or (_private.mode_count() and recorder in _private.mode_stack()):
        return fn(*args)
    # `recorder.on()`, written out: hooks and custom functions come through here one by one
    excluded = _private.view_tracking_excluded()
    _private.push_mode(recorder)
    _exclude()
    try:
        return fn(*args)
    finally:
        _private.pop_mode()
        if not excluded:
            _include()


@contextmanager
def backward_scope(create_graph: bool) -> Iterator[None]:
    """Around a backward: without create_graph its ops need no recording, so the mode comes off."""
    recorder = current_recorder()
    if create_graph or not _private.mode_count():
        yield
        return
    modes = _private.mode_stack()
    if recorder not in modes:
        yield
        return
    above = []
    while True:
        mode = _private.pop_mode()
        if mode is recorder:
            break
        above.append(mode)
    for mode in reversed(above):
        _private.push_mode(mode)
    _include()
    try:
        yield
    finally:
        _exclude()
        kept = [_private.pop_mode() for _ in above]
        _private.push_mode(recorder)
        for mode in reversed(kept):
            _private.push_mode(mode)


class record(ContextDecorator):
    """Within: PyTorch code runs unmodified, and stowgrad, not PyTorch, is its autograd.

    A context manager and a decorator; may be nested; acts on the current thread only; leaves
    everything as it was, also when the body raises. Tensors tracked inside can be used further in
    another `record()`; elsewhere PyTorch's `backward()` on them raises OutsideRecordError.

    >>> with sg.record():
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    """

    def __enter__(self) -> record:
        from . import autocast, torch_api

        thread = _thread
        if thread.depth == 0:
            before = _Before()
            autocast.enter()
            torch_api.bind()
            try:
                guard = _private.BelowAutograd()
                guard.__enter__()
                thread.guard = guard
                thread.recorder = Recorder()
                _exclude()
                thread.recorder.__enter__()
                seam.user = _call_user
                thread.before = before
            except BaseException:
                torch_api.unbind()
                autocast.leave()
                raise
        thread.entered.append(thread.depth)
        thread.depth += 1
        return self

    def __exit__(self, *exc: Any) -> None:
        from . import autocast, torch_api

        thread = _thread
        thread.depth = thread.entered.pop()
        if thread.depth == 0:
            recorder, guard, before = thread.recorder, thread.guard, thread.before
            thread.recorder = thread.guard = thread.before = None
            seam.user = None
            assert recorder is not None and before is not None
            try:
                _private.set_mode_stack([*before.modes, recorder])
                recorder.__exit__(*exc)
            finally:
                before.restore(raised=exc[0] is not None)
                guard.__exit__(None, None, None)
                torch_api.unbind()
                autocast.leave()


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
    targets: list[Edge] | None = None
    if inputs:
        targets = []
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
    del output, grad
    with backward_scope(create_graph), below_overrides():
        captured = engine.run(
            roots,
            keep_graph=keep_graph,
            create_graph=create_graph,
            inputs=targets,
            accumulate=accumulate,
        )
    if accumulate:
        return ()
    if not allow_unreachable and any(g is None for g in captured):
        missing = next(i for i, g in enumerate(captured) if g is None)
        raise NotDifferentiableError(
            f"The differentiated Tensor at index {missing} appears to not have been used in the "
            "graph. Set allow_unused=True if this is the desired behavior."
        )
    return tuple(captured)


def edge_of_public(gradient_edge: Any) -> Edge:
    """Our Edge for a public `GradientEdge(node, output_nr)`."""
    if not isinstance(gradient_edge, tuple) or not isinstance(gradient_edge[0], Node):
        kind = type(gradient_edge).__name__
        raise TypeError(f"all inputs have to be Tensors or GradientEdges, but got {kind}")
    node, index = gradient_edge[0], gradient_edge[1]
    facts = node._input_metadata[index]
    return Edge(node, index, facts.shape, facts.dtype)


@contextmanager
def below_overrides() -> Iterator[None]:
    """Within: ops go past `__torch_function__`, as those of PyTorch's own backward do; user code
    that is called in there (`_call_user`) has it as it was."""
    outer = _thread.overrides
    _thread.overrides = _private.function_overrides()
    try:
        with _private.NoFunctionOverrides():
            yield
    finally:
        _thread.overrides = outer


@contextmanager
def suspended() -> Iterator[None]:
    """Within: PyTorch as it is without us, its own autograd included. For the fallback."""
    recorder = current_recorder()
    on_stack = bool(_private.mode_count()) and recorder in _private.mode_stack()
    if on_stack:
        scope: Any = backward_scope(False)
    else:
        scope = nullcontext()
    with scope, _private.autograd_included():
        excluded = _private.view_tracking_excluded()
        _include()
        user, seam.user = seam.user, None
        depth, _thread.depth = _thread.depth, 0
        try:
            yield
        finally:
            _thread.depth = depth
            seam.user = user
            if excluded:
                _exclude()
