"""Binds PyTorch's public autograd names to ours while recording. The only module that patches.

Names are bound as low as they can be: `backward` and `grad` at the engine they call,
`saved_tensors_hooks` and everything built on it (offloading, checkpointing) at the functions that
push and pop, custom functions at the class beneath `Function`. So a name that a script imported
before recording began works too, and PyTorch's own checks and messages stay in force.

A binding is global, since Python attributes are; each replacement asks whether this thread is
recording and otherwise does what it replaced. They go when the last recording thread leaves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._python_dispatch as _python_dispatch
import torch.utils.checkpoint as checkpoint
from torch import Tensor

from . import _private, autocast, engine, function, graph, saved
from .autograd import run_backward
from .context import current_recorder, recording
from .errors import NotDifferentiableError, OutsideRecordError, describe
from .graph import AccumulateNode, Edge, Node, attach
from .record import user_location
from .views import gradient_edge, producer

_lock = threading.Lock()
_users = 0
_ever_bound = False
_originals: list[tuple[Any, str, Any]] = []
_MISSING = object()

torch.autograd.graph.Node.register(Node)  # isinstance(t.grad_fn, torch.autograd.graph.Node)


def bind() -> None:
    """Put our names in place; counted, so that the last `unbind` takes them away."""
    global _users, _ever_bound
    with _lock:
        _ever_bound = True
        _users += 1
        if _users > 1:
            return
        for owner, name, make in _bindings():
            original = vars(owner).get(name, _MISSING)
            _originals.append((owner, name, original))
            setattr(owner, name, make(getattr(owner, name, None)))


def unbind() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users > 0:
            return
        while _originals:
            owner, name, original = _originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


Make = Callable[[Any], Any]


def _bindings() -> list[tuple[Any, str, Make]]:
    C = torch._C
    bindings: list[tuple[Any, str, Make]] = [
        (Tensor, "grad_fn", lambda native: property(_grad_fn)),
        (Tensor, "is_leaf", lambda native: property(_is_leaf)),
        (Tensor, "requires_grad", lambda native: property(_get_requires_grad, _set_requires_grad)),
        (Tensor, "requires_grad_", lambda native: _requires_grad_),
        (Tensor, "output_nr", lambda native: property(_output_nr)),
        (Tensor, "retains_grad", lambda native: property(_retains_grad)),
        (Tensor, "retain_grad", _method(_retain_grad)),
        (Tensor, "register_hook", _method(_register_hook)),
        (Tensor, "detach_", _here(_detach_)),
        (torch, "detach_", _here(_detach_)),
        (Tensor, "as_subclass", _make_as_subclass),
        (Tensor, "__reduce_ex__", _make_reduce),
        (torch.autograd.graph, "_get_grad_fn_or_grad_acc", _here(_node_of)),
        (torch.autograd, "_make_grads", _make_make_grads),
        (torch.autograd.function._SingleLevelFunction, "apply", _make_apply),
        (C._functions, "DelayedError", _here(function.DelayedError)),
        (C._functions, "UndefinedGrad", _here(function.UndefinedGrad)),
        (torch.autograd.forward_ad, "make_dual", _here(_no_forward_mode)),
        (torch._vmap_internals, "_vmap", _here(_vmap)),
        (torch.autograd.functional, "_vmap", _here(_vmap)),
        (torch, "set_autocast_enabled", _also(autocast.set_enabled)),
        (torch, "clear_autocast_cache", _also(autocast.clear_cache)),
        (torch, "set_autocast_cache_enabled", _here(autocast.set_cache_enabled)),
        (torch, "is_autocast_cache_enabled", _here(autocast.is_cache_enabled)),
        (C, "_InferenceMode", _make_inference_mode),
        (_python_dispatch, "_push_mode", _make_push),
        (_python_dispatch, "_pop_mode", _make_pop),
        (C, "_current_graph_task_id", _here(_graph_task_id)),
        (C, "_current_autograd_node", _here(_current_node)),
        (C, "_will_engine_execute_node", _here(_will_execute)),
        (C._autograd, "_push_saved_tensors_default_hooks", _here(saved.push_hooks)),
        (C._autograd, "_pop_saved_tensors_default_hooks", _here(saved.pop_hooks)),
        (C._autograd, "_saved_tensors_hooks_disable", _here(_disable)),
        (C._autograd, "_saved_tensors_hooks_enable", _here(saved.enable_hooks)),
        (C._autograd, "_saved_tensors_hooks_is_enabled", _here(_enabled)),
        (
            C._autograd,
            "_saved_tensors_hooks_get_disabled_error_message",
            _here(lambda: saved.hooks.disabled),
        ),
    ]
    bindings += [(torch, name, _make_sparse_factory) for name in _SPARSE_FACTORIES]
    if hasattr(checkpoint, "_make_saved_tensor"):  # older releases use a Function for it
        bindings += [
            (checkpoint, "_make_saved_tensor", _here(_make_saved_tensor)),
            (checkpoint, "SavedTensor", lambda native: (native, saved.SavedTensor)),
        ]
    selective = getattr(checkpoint, "_CachedTorchDispatchMode", None)
    if selective is not None:
        bindings += [
            (selective, "__enter__", _make_selective_enter),
            (selective, "__exit__", _make_selective_exit),
        ]
    return bindings


def _here(ours: Callable[..., Any]) -> Make:
    """Ours in a thread that records; the original in every other."""

    def make(original: Any) -> Any:
        def bound(*args: Any, **kwargs: Any) -> Any:
            if recording():
                return ours(*args, **kwargs)
            return original(*args, **kwargs)

        return bound

    return make


def _also(ours: Callable[..., Any]) -> Make:
    """The original, and then ours in a thread that records."""

    def make(original: Any) -> Any:
        def bound(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if recording():
                ours(*args, **kwargs)
            return result

        return bound

    return make


def _method(ours: Callable[..., Any]) -> Make:
    """`ours(original, tensor, ...)` for tensors that we track; the original for all others."""

    def make(original: Any) -> Any:
        def bound(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if recording() and _private.native_requires_grad(self) and not _is_leaf(self):
                return ours(self, *args, **kwargs)
            return original(self, *args, **kwargs)

        bound.__name__ = getattr(original, "__name__", "bound")
        bound.__doc__ = original.__doc__
        return bound

    return make


# -- what a tensor says of itself


def _grad_fn(self: Tensor) -> Any:
    if not recording():
        return _private.native_grad_fn(self)
    if not _private.native_requires_grad(self):
        return None
    edge = producer(self)
    if edge is None or isinstance(edge.node, AccumulateNode):
        return None
    return edge.node


def _is_leaf(self: Tensor) -> bool:
    if not recording():
        # PyTorch's compiler, which traces with recording off, must know too that ours is none
        return _private.native_is_leaf(self) and graph.state(self) is None
    return _grad_fn(self) is None


def _get_requires_grad(self: Tensor) -> bool:
    return _private.native_requires_grad(self)


def _set_requires_grad(self: Tensor, value: bool) -> None:
    if recording() and graph.state(self) is not None:
        raise RuntimeError(
            "you can only change requires_grad flags of leaf variables. If you want to use a "
            "computed variable in a subgraph that doesn't require differentiation use "
            "var_no_grad = var.detach()."
        )
    _private.set_native_requires_grad(self, value)


def _requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
    """See torch.Tensor.requires_grad_."""
    if not (requires_grad and recording() and graph.state(self) is not None):  # else it does
        _set_requires_grad(self, requires_grad)
    return self


def _output_nr(self: Tensor) -> int:
    edge = producer(self) if recording() else None
    if edge is None:
        return 0
    edge.node.note_output(edge.index, self)  # whoever asks is about to make a GradientEdge
    return edge.index


def _node_of(self: Any) -> Node:
    """The node that a tensor's gradient passes through; a leaf's accumulate node."""
    if not isinstance(self, Tensor):
        return self.node
    return gradient_edge(self).node


def _retains_grad(self: Tensor) -> bool:
    edge = producer(self) if recording() else None
    if edge is None or edge.node.hooks is None:
        return False
    ref = edge.node.hooks.retained.get(edge.index)
    return ref is not None and ref() is self


def _retain_grad(self: Tensor) -> None:
    edge = gradient_edge(self)
    edge.node.ensure_hooks().retained[edge.index] = weakref.ref(self)


def _register_hook(self: Tensor, hook: Callable[..., Any]) -> Any:
    edge = gradient_edge(self)
    return edge.node.register_tensor_hook(edge.index, hook)


def _detach_(self: Tensor) -> Tensor:
    """See torch.Tensor.detach_."""
    if self._is_view():
        raise RuntimeError(
            "Can't detach views in-place. Use detach() instead. (Gradients that are views of a "
            "bucket, as DistributedDataParallel's can be, are cleared by Optimizer.zero_grad().)"
        )
    graph.detach_(self)
    return self


def _make_as_subclass(original: Any) -> Any:
    def as_subclass(self: Tensor, cls: Any) -> Tensor:
        """See torch.Tensor.as_subclass. It makes a view by an op that it shows to no mode."""
        if not recording():
            return original(self, cls)
        with _private.view_tracking(), _private.NoFunctionOverrides():
            out: Tensor = original(self, cls)
        seen = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if seen and _private.native_requires_grad(self):
            edge = gradient_edge(torch.ops.aten.alias(self))
            version = out._version if out._is_view() else None
            attach(out, Edge(edge.node, edge.index, out.shape, out.dtype, version))
        return out

    return as_subclass


# Their bindings set `requires_grad` once the op has run and been recorded.
_SPARSE_FACTORIES = (
    "sparse_coo_tensor", "sparse_compressed_tensor", "sparse_csr_tensor", "sparse_csc_tensor",
    "sparse_bsr_tensor", "sparse_bsc_tensor",
)  # fmt: skip


def _make_sparse_factory(original: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if recording() and graph.state(made) is not None:
            _private.set_native_requires_grad(made, True)
        return made

    return make


def _make_reduce(original: Any) -> Any:
    def reduce(self: Tensor, protocol: Any) -> Any:
        """Pickle the data of a tracked tensor; its place in the graph stays behind."""
        edge = graph.state(self)
        if edge is None:
            return original(self, protocol)
        del self._stowgrad  # type: ignore[attr-defined]
        try:
            return original(self, protocol)
        finally:
            self._stowgrad = edge  # type: ignore[attr-defined]

    return reduce


# -- modes


def _make_inference_mode(original: Any) -> Any:
    class InferenceMode:
        """As PyTorch's; `inference_mode(False)` puts its autograd keys back into dispatch, which
        while recording stay out."""

        def __init__(self, mode: bool) -> None:
            self._native = original(mode)
            self._guard = _private.BelowAutograd() if recording() and not mode else None

        def __enter__(self) -> None:
            self._native.__enter__()
            if self._guard is not None:
                self._guard.__enter__()

        def __exit__(self, *exc: Any) -> None:
            if self._guard is not None:
                self._guard.__exit__(*exc)
            self._native.__exit__(*exc)

    return InferenceMode


def _recorder_on_top() -> Any:
    """The recorder of this thread, if it would see the next op; else None."""
    if not recording() or not _private.mode_count():
        return None
    top = _private.mode_stack()[-1]
    return top if top is current_recorder() else None


def _make_push(original: Any) -> Any:
    """PyTorch's autograd sits above all modes, so the recorder does: a mode that is entered while
    recording goes under it, and sees the ops that the recorder runs."""

    def push(mode: Any) -> None:
        recorder = _recorder_on_top()
        if recorder is None or recorder is mode:
            return original(mode)
        _private.pop_mode()
        try:
            original(mode)
        finally:
            _private.push_mode(recorder)

    return push


def _make_pop(original: Any) -> Any:
    def pop(key: Any = None) -> Any:
        recorder = _recorder_on_top() if key is None else None
        if recorder is None or _private.mode_count() == 1:
            return original(key)
        _private.pop_mode()
        try:
            return original(key)
        finally:
            _private.push_mode(recorder)

    return pop


# -- custom functions


def _make_apply(original: Any) -> Any:
    native = torch._C._FunctionBase.__dict__["apply"]

    def apply(cls: Any, *args: Any) -> Any:
        if recording():
            return function.apply(cls, *args)
        return native.__get__(None, cls)(*args)

    return classmethod(apply)


# -- the engine


def _refuse_tracked(outputs: Any) -> None:
    """Raise if PyTorch's graph of `outputs` holds a tensor that stowgrad tracks.

    A backward that reaches such a tensor fails by its hook; one that is limited to some inputs may
    go past it, and would give a gradient that lacks what flows through it.
    """
    todo: list[Any] = [o.grad_fn if isinstance(o, Tensor) else o.node for o in outputs]
    seen: set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and graph.state(leaf) is not None:
            raise OutsideRecordError(
                f"PyTorch's own backward would go past a tensor ({describe(leaf)}) whose graph "
                "stowgrad recorded, and leave out the gradient that flows through it. Run this "
                "code inside record()."
            )
        todo.extend(fn for fn, _ in node.next_functions)


def _make_make_grads(native: Any) -> Any:
    def make_grads(outputs: Any, grads: Any, is_grads_batched: bool) -> Any:
        """The commonest of all, a scalar's 1, without a turn through the recorder."""
        if len(outputs) == 1 and grads[0] is None and recording() and _private.mode_count() == 1:
            out = outputs[0]
            if type(out) is Tensor and out.dim() == 0 and out.is_floating_point():
                if out.layout is torch.strided and not _private.functorch_active():
                    with _private.NoDispatchModes():
                        return (torch.ones_like(out) if out.requires_grad else None,)
        return native(outputs, grads, is_grads_batched=is_grads_batched)

    return make_grads


class _Engine:
    """Stands where PyTorch's engine object stands, from the import of stowgrad on: outside
    record() it passes everything on, once it has seen that no tracked tensor is involved."""

    def __init__(self, native: Any) -> None:
        self._native = native

    @_private.skip_compiler
    def run_backward(
        self,
        tensors: Any,
        grad_tensors: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Any = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        if recording():
            return run_backward(
                tensors, grad_tensors, keep_graph, create_graph, inputs or (),
                allow_unreachable, accumulate_grad,
            )  # fmt: skip
        for tensor in tensors:
            if isinstance(tensor, Tensor) and graph.state(tensor) is not None:
                raise OutsideRecordError(
                    f"backward() in a thread that does not record, from a tensor "
                    f"({describe(tensor)}) whose graph stowgrad recorded. Call it inside record(), "
                    "or use sg.backward()."
                )
        if inputs and _ever_bound:
            _refuse_tracked(tensors)
        return self._native.run_backward(
            tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable,
            accumulate_grad,
        )  # fmt: skip

    def is_checkpoint_valid(self) -> bool:
        """Whether every backward that runs in this thread is a whole one, without `inputs`."""
        if recording():
            return engine.whole()
        return bool(self._native.is_checkpoint_valid())

    def queue_callback(self, callback: Callable[[], Any]) -> None:
        task = engine.current_task()
        if task is None:
            self._native.queue_callback(callback)
        else:
            task.callbacks.append(callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def _vmap(
    func: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    allow_none_pass_through: bool = False,
) -> Callable[..., Any]:
    """What `is_grads_batched` maps the backward with: torch.vmap, which has a batching rule for
    nearly every op, in the place of PyTorch's older one, which has few."""

    def mapped(*args: Any) -> Any:
        none: list[bool] = []
        single: list[bool] = []

        def present(*inner: Any) -> Any:
            out = func(*inner)
            outs = out if isinstance(out, (tuple, list)) else (out,)
            single[:] = [not isinstance(out, (tuple, list))]
            none[:] = [o is None for o in outs]
            return tuple(o for o in outs if o is not None)

        found = iter(torch.vmap(present, in_dims, out_dims)(*args))
        result = tuple(None if absent else next(found) for absent in none)
        return result[0] if single[0] else result

    return mapped


def _no_forward_mode(*args: Any, **kwargs: Any) -> Any:
    raise NotDifferentiableError(
        "forward-mode derivatives are not recorded: leave record() for torch.autograd.forward_ad, "
        "or use reverse mode"
    )


def _make_saved_tensor(tensor: Tensor, is_output: bool) -> saved.SavedTensor:
    """How checkpointing saves the inputs of a region: as if an op had saved them."""
    edge = gradient_edge(tensor) if _private.native_requires_grad(tensor) else None
    return saved.SavedTensor(tensor, "input", "checkpoint", user_location(), None, edge)


def _make_selective_enter(original: Any) -> Any:
    """Selective checkpointing uses up what its first run kept. Where another backward may come,
    it is put back afterwards, so that (beyond PyTorch) the region can run again."""

    def enter(self: Any) -> Any:
        if recording():
            task = engine.current_task()
            if task is None or task.keep_graph:
                self._stowgrad_kept = {op: dict(values) for op, values in self.storage.items()}
        return original(self)

    return enter


def _make_selective_exit(original: Any) -> Any:
    def leave(self: Any, *exc: Any) -> Any:
        self.storage.update(vars(self).pop("_stowgrad_kept", {}))
        return original(self, *exc)

    return leave


def _graph_task_id() -> int:
    task = engine.current_task()
    return -1 if task is None else task.id


def _current_node() -> Any:
    task = engine.current_task()
    return None if task is None else task.node


def _will_execute(node: Any) -> bool:
    task = engine.current_task()
    if task is None:
        raise RuntimeError("_will_engine_execute_node can only be called inside a backward")
    leaf = getattr(node, "variable", None)
    if leaf is not None:  # perhaps PyTorch's node of it: a hook registered before recording began
        node = graph.leaf_edge(leaf).node
    if node not in task.reachable:
        return False
    return task.needed is None or node in task.needed or node in task.captured


def _enabled() -> bool:
    return saved.hooks.disabled is None


def _disable(message: str, fail_if_non_empty: bool = True) -> None:
    saved.disable_hooks(message)


torch.autograd.Variable._execution_engine = _Engine(  # type: ignore[assignment]
    torch.autograd.Variable._execution_engine
)
