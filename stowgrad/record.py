"""The recorder: sees every op of a thread's forward pass and writes the graph.

`record()` leaves PyTorch's autograd key out of dispatch and puts a TorchDispatchMode on top of the
mode stack. Each op then arrives in `Recorder._dispatch` as an ATen overload with plain
tensors. With grad mode off, or with no tracked argument, the kernel runs and that is all. Else the
op's entry says how it is recorded: by its rule, by the ops it is composed of, or by the fallback.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _private
from .context import Before, call_recorded, this_thread
from .errors import NotDifferentiableError, describe
from .graph import Edge, Location, Node, _leaves, _outside, attach, seam
from .ops import SPECIAL, Entry, Kind, _entries, entry_of
from .rules.table import _FACTS, VERSION_BITS, Plan, Rule, RuleNode
from .saved import SavedTensor, changes, hooks, note_change, watchers
from .views import ErrorNode, check_inplace, gradient_edge, note_birth, rebase, renew

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
_PLAIN = Kind.PLAIN  # an enum member is slow to look up, and this is asked of every op
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
        entry = _entries.get(id(func))
        if entry is None:
            entry = entry_of(func)
        if entry.made_of_ops:
            _private.resolve_lazy_views()
        if entry.kind is not _PLAIN and _grad_enabled() and not _inference():
            if not kwargs:
                rule = entry.fast
                if rule is not None and not (entry.composite and _private.modes_beneath()):
                    return self._record_fast(entry, rule, args)
                kwargs = {}
            count = 0
            for a in (*args, *kwargs.values()) if kwargs else args:
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
                note_birth(out)
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
                    if edge is None:
                        ref = _leaves.get(id(a))
                        if ref is not None and (leaf := ref()) is not None and leaf.edge:
                            edge = leaf.edge()
                            if edge is not None and edge.shape != a.shape:
                                edge = None
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
                node.code, node.offset = code, frame.f_lasti
                break
            frame = frame.f_back  # type: ignore[assignment]
        if anomaly_enabled():
            note_traceback(node)

        saved: list[Any] = []
        if plan.fast_inputs:
            plain = not watchers and not hooks.pairs
            node.tick = changes.tick
            shift = 0
            for name, position, index in plan.fast_inputs:
                value = args[position] if position < given else None
                if isinstance(value, Tensor):
                    try:  # a SavedTensor once it is asked for
                        version = value._version if plain else -1
                    except RuntimeError:
                        version = -1  # an inference tensor, of which SavedTensor says what to do
                    if version > 0:
                        node.versions |= version << shift
                    elif version < 0:
                        edge = edges[index] if index >= 0 else None
                        value = SavedTensor(value, name, rule.name, node.where, None, edge)
                saved.append(value)
                shift += VERSION_BITS
        if plan.fast_values:
            node.values = _values(rule, plan, args, {})
        born = None
        if entry.touches_views:
            _include()
            try:
                out = entry.call(*args)
            finally:
                _exclude()
            if entry.composite and out is args[0]:
                return out  # nothing happened (x.contiguous())
            if out._is_view():
                born = out._version
        else:
            out = entry.call(*args)
        for name in plan.outputs:
            saved.append(SavedTensor(out, name, rule.name, node.where, 0))
        node.saved = saved
        dtype = out.dtype
        if dtype in _DIFFERENTIABLE:
            out._stowgrad = Edge(node, 0, out.shape, dtype, born)
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
            if this_thread.recorder is self:  # else see _private.Session
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


class record(ContextDecorator):
    """Within: PyTorch code runs unmodified, and stowgrad, not PyTorch, is its autograd.

    A context manager and a decorator; may be nested; acts on the current thread only; leaves
    everything as it was, also when the body raises. Tensors tracked inside can be used further in
    another `record()`; elsewhere PyTorch's `backward()` on them raises OutsideRecordError.

    >>> with sg.record():
    ...     loss = model(x).square().mean()
    ...     loss.backward()

    `backward`: a context that says how backwards run (`sg.compiled_backward()`), entered within.
    """

    def __init__(self, backward: AbstractContextManager[Any] | None = None) -> None:
        self._backward = backward

    def __enter__(self) -> record:
        from . import autocast, torch_api

        thread = this_thread
        if self._backward is not None:
            self._backward.__enter__()
        if thread.depth == 0:
            before = Before()
            autocast.enter()
            torch_api.bind()
            try:
                guard = _private.BelowAutograd()
                guard.__enter__()
                thread.guard = guard
                thread.recorder = _private.session.recording = Recorder()
                _exclude()
                thread.recorder.__enter__()
                seam.user = call_recorded
                _private.set_scripts_compile(False)
                thread.before = before
            except BaseException:
                torch_api.unbind()
                autocast.leave()
                if self._backward is not None:
                    self._backward.__exit__(None, None, None)
                raise
        thread.entered.append(thread.depth)
        thread.depth += 1
        return self

    def __exit__(self, *exc: Any) -> None:
        from . import autocast, torch_api

        thread = this_thread
        thread.depth = thread.entered.pop()
        if thread.depth == 0:
            recorder, guard, before = thread.recorder, thread.guard, thread.before
            thread.recorder = thread.guard = thread.before = None
            _private.session.recording = None
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
        if self._backward is not None:
            self._backward.__exit__(*exc)
