"""Custom functions: `torch.autograd.Function`, recorded as one node.

`apply(cls, args)` stands where PyTorch's C++ `Function.apply` stands: it makes the context, runs
the user's `forward` without grad mode, sorts the outputs (new tensors, views, inputs returned as
they are, inputs changed in place, outputs marked non-differentiable), gives each its producer, and
saves what was asked for through SavedTensor, so that hooks apply.

Node and context are two objects that share one `__dict__`. The node is the graph's: the engine
reads its slots. The context is the user's, who may set any attribute on it, also one named like a
slot of the node (`ctx.outputs = ...`). `y.grad_fn` is the node, and answers for both. The context
refers to its node weakly, so a graph is freed as soon as nobody holds it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_leaves

from . import _private, graph
from .errors import GradientError, GraphFreedError, InPlaceError, describe
from .graph import Edge, Node, attach, call_user
from .record import note_traceback, user_location
from .saved import SavedTensor
from .views import ErrorNode, check_inplace, gradient_edge, producer, rebase

_tracked = _private.native_requires_grad

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed): what {} saved is gone. Saved tensors are freed when you call "
    ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through "
    "the graph a second time or to access saved tensors after backward."
)


class Context:
    """`ctx`: the part of a custom function's context that PyTorch implements in C++.

    Mixed into `F._backward_cls`, so that what PyTorch implements in Python is there too. The
    class attributes shadow the C++ ones: their instances' values live in `__dict__`.
    """

    to_save: Any = None
    non_differentiable: Any = None
    dirty_tensors: Any = None
    saved_for_forward: Any = None
    needs_input_grad: tuple[bool, ...] = ()
    materialize_grads = True
    requires_grad = False
    _materialize_non_diff_grads = True
    _stowgrad_node: Any = None  # weak reference to the node; None before there is one
    _stowgrad_cleared = False

    def _node(self) -> FunctionNode:
        node = self._stowgrad_node() if self._stowgrad_node is not None else None
        if node is None:
            raise GraphFreedError(
                f"the graph of {type(self).__name__} is gone: nothing holds an output of it"
            )
        return node

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """What `save_for_backward` was given, unpacked and checked anew at each access."""
        if self._stowgrad_node is None:
            return ()
        once = getattr(self, "clear_saved_tensors_on_access", False) or getattr(
            getattr(self, "_forward_cls", None), "clear_saved_tensors_on_access", False
        )
        if once and self._stowgrad_cleared:
            raise RuntimeError(
                "saved_tensors can only be accessed once when clear_saved_tensors_on_access=True "
                "is set on the autograd.Function. Either access saved_tensors only once, or set "
                "clear_saved_tensors_on_access=False."
            )
        node = self._node()
        found = tuple(s if s is None else s.unpack(node) for s in node.entries())
        if once:
            self._stowgrad_cleared = True
            node.release()
        return found

    @property
    def saved_variables(self) -> tuple[Tensor | None, ...]:
        warnings.warn(
            "'saved_variables' is deprecated; use 'saved_tensors'", DeprecationWarning, stacklevel=2
        )
        return self.saved_tensors

    @property
    def _raw_saved_tensors(self) -> tuple[SavedTensor | None, ...]:
        return () if self._stowgrad_node is None else tuple(self._node().entries())

    def maybe_clear_saved_tensors(self) -> None:
        if getattr(self, "clear_saved_tensors_on_access", False):
            self._node().release()

    @property
    def next_functions(self) -> Any:
        return () if self._stowgrad_node is None else self._node().next_functions

    @property
    def metadata(self) -> dict[str, Any]:
        return {} if self._stowgrad_node is None else self._node().metadata

    def name(self) -> str:
        return type(self).__name__

    def _sequence_nr(self) -> int:
        return self._node()._sequence_nr()

    def register_hook(self, fn: Callable[..., Any]) -> Any:
        return self._node().register_hook(fn)

    def register_prehook(self, fn: Callable[..., Any]) -> Any:
        return self._node().register_prehook(fn)


class FunctionNode(Node, FunctionCtx):
    """The node of one application of a custom function; its derivative is the user's code."""

    __slots__ = ("__dict__", "ctx", "devices", "metas", "saved", "tensor_inputs")

    runs_without_gradient = True  # the user's backward runs also when every gradient is zero

    def __init__(self, ctx: Any, edges: Sequence[Edge | None], inputs: Sequence[Any]) -> None:
        super().__init__(edges)
        self.ctx = ctx
        self.tensor_inputs = [isinstance(x, Tensor) for x in inputs]
        self.devices = [x.device for x in inputs if isinstance(x, Tensor)]
        # of each output: shape, dtype, device, layout, and whether it is differentiable
        self.metas: list[Any] = []
        self.saved: list[SavedTensor | None] | None = None
        ctx._stowgrad_node = weakref.ref(self)
        self.__dict__ = ctx.__dict__

    def entries(self) -> list[SavedTensor | None]:
        if self.saved is None:
            raise GraphFreedError(_FREED.format(type(self.ctx)._forward_cls.__name__))
        return self.saved

    def __getattr__(self, name: str) -> Any:
        if name in FunctionNode.__slots__:
            raise AttributeError(name)
        return getattr(self.ctx, name)

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None = None
    ) -> Sequence[Tensor | None]:
        ctx = self.ctx
        given = [self._zeros(i) if g is None else g for i, g in enumerate(grads)]
        grads.clear()
        backward = ctx._get_user_fn()
        if getattr(ctx._forward_cls, "boxed_grads_call", False):
            result = call_user(backward, ctx, given)
        else:
            given.reverse()
            result = call_user(backward, ctx, *[given.pop() for _ in range(len(given))])
        if not isinstance(result, tuple):
            result = (result,)
        return self._check(result)

    def _zeros(self, index: int) -> Tensor | None:
        """What backward gets for an output to which no gradient came."""
        meta = self.metas[index]
        if meta is None or not self.ctx.materialize_grads:
            return None
        shape, dtype, device, layout, differentiable = meta
        if not differentiable and not self.ctx._materialize_non_diff_grads:
            return None
        return torch.zeros(shape, dtype=dtype, device=device, layout=layout)

    def _check(self, result: tuple[Any, ...]) -> list[Tensor | None]:
        """The gradients of the tensor inputs, out of what backward returned for all inputs."""
        expected = len(self.tensor_inputs)
        if len(result) > expected and all(g is None for g in result[expected:]):
            result = result[:expected]
        if len(result) != expected:
            raise GradientError(
                f"function {self.name()} returned an incorrect number of gradients (expected "
                f"{expected}, got {len(result)})"
            )
        gradients: list[Tensor | None] = []
        for position, (g, is_tensor) in enumerate(zip(result, self.tensor_inputs, strict=True)):
            if not is_tensor:
                if g is not None:
                    raise GradientError(
                        f"function {self.name()} returned a gradient different than None at "
                        f"position {position + 1}, but the corresponding forward input was not a "
                        "Variable"
                    )
                continue
            if g is not None and not isinstance(g, Tensor):
                raise GradientError(
                    f"function {self.name()}: expected Variable or None (got {type(g).__name__})"
                )
            index = len(gradients)
            if g is not None and self.edges[index] is not None:
                device = self.devices[index]
                if g.device != device and not (g.dim() == 0 and g.device.type == "cpu"):
                    raise GradientError(
                        f"Function {self.name()} returned an invalid gradient at index {index} - "
                        f"expected device {device} but got {g.device}"
                    )
            gradients.append(g)
        return gradients

    def release(self) -> None:
        if self.saved is not None:
            for entry in self.saved:
                if entry is not None:
                    entry.release()
            self.saved = None


def _classes(cls: Any) -> tuple[Any, type[FunctionNode]]:
    """The classes of `ctx` and of the node for the Function `cls`, which carry its name.

    Made once, and kept on the class that PyTorch made for the same purpose.
    """
    backward_cls = cls._backward_cls
    found: tuple[Any, type[FunctionNode]] | None = vars(backward_cls).get("_stowgrad_classes")
    if found is None:
        name = backward_cls.__name__
        found = (
            type(name, (Context, backward_cls), {}),
            type(name, (FunctionNode,), {"__slots__": ()}),
        )
        backward_cls._stowgrad_classes = found
    return found


# How the function is applied into which PyTorch's AOTAutograd makes a compiled region; set by
# program/forward.py when it is there. NotImplemented: as any other.
apply_region: Callable[[Any, tuple[Any, ...]], Any] | None = None


def apply(cls: Any, *args: Any) -> Any:
    """Run the Function `cls` on `args` and record it, as PyTorch's `Function.apply` does.

    Raises what PyTorch raises, in its words, for an output or a mark that cannot be.
    """
    if apply_region is not None and "compiled_fw" in vars(cls):
        done = apply_region(cls, args)
        if done is not NotImplemented:
            return done
    tensors = [a for a in args if isinstance(a, Tensor)]
    needs = tuple([isinstance(a, Tensor) and _tracked(a) for a in args])
    recorded = any(needs) and _private.grad_enabled() and not _private.inference_enabled()
    context_class, node_class = _classes(cls)
    ctx = context_class()
    ctx.needs_input_grad = needs
    node: FunctionNode | None = None
    if recorded:
        edges = [gradient_edge(t) if _tracked(t) else None for t in tensors]
        node = node_class(ctx, edges, args)
        node.where = user_location()
        if torch.is_anomaly_enabled():
            note_traceback(node)
        ctx.requires_grad = True

    separate = cls.setup_context is not torch.autograd.Function.setup_context
    grad_mode = _private.grad_enabled()
    _private.set_grad_enabled(False)
    try:
        if separate:
            raw = cls.forward(*args)
            cls.setup_context(ctx, args, raw)
        else:
            raw = cls.forward(ctx, *args)
    finally:
        _private.set_grad_enabled(grad_mode)

    out: Any
    if node is not None and _is_plain(raw, ctx, tensors):
        node.metas.append((raw.shape, raw.dtype, raw.device, raw.layout, True))
        attach(raw, Edge(node, 0, raw.shape, raw.dtype))
        out = raw
    else:
        outputs = _wrap_outputs(ctx, node, tensors, raw, separate)
        out = outputs if isinstance(raw, tuple) else outputs[0]
    if node is not None:
        node.saved = [] if ctx.to_save is None else _save(node, cls.__name__, ctx.to_save)
    else:
        ctx.non_differentiable = None
    ctx.to_save = ctx.saved_for_forward = None
    return out


def _is_plain(raw: Any, ctx: Any, inputs: list[Tensor]) -> bool:
    """Whether `forward` returned one new tensor and marked nothing: most functions do."""
    return (
        isinstance(raw, Tensor)
        and ctx.dirty_tensors is None
        and ctx.non_differentiable is None
        and not raw._is_view()
        and (raw.is_floating_point() or raw.is_complex())
        and not any(raw is t for t in inputs)
    )


def _save(node: FunctionNode, op: str, tensors: Any) -> list[SavedTensor | None]:
    saved: list[SavedTensor | None] = []
    for position, tensor in enumerate(tensors):
        if tensor is None:
            saved.append(None)
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"save_for_backward can only save variables, but argument {position} is of type "
                f"{type(tensor).__name__}"
            )
        edge = producer_or_leaf(tensor) if _tracked(tensor) else None
        output = None
        if edge is not None and edge.node is node:
            output, edge = edge.index, None
        name = f"saved_tensors[{position}]"
        saved.append(SavedTensor(tensor, name, op, node.where, output, edge))
    return saved


def producer_or_leaf(tensor: Tensor) -> Edge:
    """`gradient_edge`, except for a view in a state in which its producer cannot be worked out:
    it may be saved all the same, since only a second derivative would ask."""
    edge = graph.state(tensor)
    try:
        return gradient_edge(tensor)
    except InPlaceError:
        if edge is None:
            raise
        return edge


# -- outputs


def _wrap_outputs(
    ctx: Any, node: FunctionNode | None, inputs: list[Tensor], raw: Any, separate: bool
) -> tuple[Any, ...]:
    """Give every output of `forward` its producer. Returns what the user gets."""
    raws = raw if isinstance(raw, tuple) else (raw,)
    dirty = _dirty(ctx)
    input_ids = {id(t) for t in inputs}
    saved_ids = {id(t) for t in ctx.to_save or ()} if separate else set()
    plain_ids = {id(t) for t in ctx.non_differentiable or ()}
    outputs: list[Any] = []
    differentiable_outputs = 0
    if node is not None:
        node.outputs = len(raws)
    for index, out in enumerate(raws):
        if not isinstance(out, Tensor):
            outputs.append(out)
            if node is not None:
                node.metas.append(None)
            continue
        is_input = id(out) in input_ids
        is_dirty = id(out) in dirty
        differentiable = (
            node is not None
            and id(out) not in plain_ids
            and (out.is_floating_point() or out.is_complex())
        )
        if node is not None:
            node.metas.append((out.shape, out.dtype, out.device, out.layout, differentiable))
        if not differentiable:
            out = _without_graph(out, is_input, is_dirty, id(out) in saved_ids)
        else:
            assert node is not None
            differentiable_outputs += 1
            if is_dirty:
                _attach_dirty(node, index, out, inputs, len(raws))
            else:
                if is_input:
                    out = _same_again(out, id(out) in saved_ids)
                version = out._version if out._is_view() else None
                attach(out, Edge(node, index, out.shape, out.dtype, version))
        if out._is_view() and not (is_input and is_dirty):
            _private.set_creation_meta(out, _private.CreationMeta.IN_CUSTOM_FUNCTION)
        outputs.append(out)
    if differentiable_outputs > 1:
        for out in outputs:
            if isinstance(out, Tensor) and out._is_view():
                _private.set_creation_meta(out, _private.CreationMeta.MULTI_OUTPUT_NODE)
    if not dirty <= {id(out) for out in raws}:
        raise InPlaceError(
            "Some elements marked as dirty during the forward method were not returned as output. "
            "The inputs that are modified inplace must all be outputs of the Function."
        )
    return tuple(outputs)


def _dirty(ctx: Any) -> set[int]:
    """The identities of what was marked dirty; their version counters move on."""
    marked, ctx.dirty_tensors = ctx.dirty_tensors, None
    if not marked:
        return set()
    for position, tensor in enumerate(marked):
        if not isinstance(tensor, Tensor):
            raise InPlaceError(
                f"mark_dirty can only accept variables, but argument {position} is of type "
                f"{type(tensor).__name__}"
            )
    torch.autograd.graph.increment_version([t for t in marked if not t.is_inference()])
    return {id(t) for t in marked}


def _without_graph(out: Tensor, is_input: bool, is_dirty: bool, saved: bool) -> Tensor:
    """An output that has no gradient: no graph, and never the input object itself."""
    if not _tracked(out):
        return _same_again(out, saved) if is_input and not is_dirty else out
    if is_input:
        with torch.no_grad():
            return out.detach()
    if graph.state(out) is not None:
        graph.detach_(out)
    return out


def _same_again(tensor: Tensor, saved: bool) -> Tensor:
    """An input that is returned as it is: a view of it, which can have a producer of its own."""
    if saved:
        raise RuntimeError(
            "An input that has been returned as-is as output is being saved for backward. This is "
            "not supported if you override setup_context. You should return and save a view of the "
            "input instead, e.g. with x.view_as(x) or setup ctx inside the forward function itself."
        )
    with torch.no_grad():
        return tensor.view_as(tensor)


def _attach_dirty(
    node: FunctionNode, index: int, out: Tensor, inputs: list[Tensor], count: int
) -> None:
    """An input that `forward` changed in place: the node becomes its producer."""
    if not any(out is x for x in inputs):
        warnings.warn(
            "ctx.mark_dirty() received a tensor that was not an input. Only input Tensors that "
            "have been mutated should be passed to ctx.mark_dirty().",
            stacklevel=4,
        )
        attach(out, Edge(node, index, out.shape, out.dtype))
        return
    if _tracked(out) and producer(out) is None:
        raise InPlaceError(
            "a leaf Variable that requires grad has been used in an in-place operation "
            f"({describe(out)})."
        )
    if out._is_view() and count > 1:
        raise InPlaceError(
            "If your Function modifies inplace an input that is a view of another Tensor, your "
            "Function cannot return more than one Tensor. This is not supported by the current "
            "autograd engine. You should either make sure the input is not a view (using .clone() "
            "for example) or make your Function only return one Tensor (potentially splitting it "
            "into two Functions: one doing the inplace that returns a single Tensor and a second "
            "one that does the other operations)."
        )
    check_inplace(out)
    position = next(i for i, x in enumerate(inputs) if x is out)
    rebase(out, node, position, index)


# -- ops with a formula of their own (torch.library.register_autograd)


class _Inside(threading.local):
    def __init__(self) -> None:
        self.ops: list[Any] = []


_inside = _Inside()


def record_registered(
    recorder: Any, entry: Any, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Record an op through the autograd kernel that Python code registered for it.

    The kernel applies a Function (ours, while recording) whose forward calls the op once more,
    below autograd; that inner call is the plain kernel.
    """
    if func in _inside.ops:
        return recorder.run(entry, func, args, kwargs)
    kernel = _private.registered_autograd(func)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    _inside.ops.append(func)
    try:
        with recorder.on():
            return kernel.call_boxed(_private.dispatch_keys(tensors), *args, **kwargs)
    finally:
        _inside.ops.pop()


# -- two functions that PyTorch implements in C++, and uses from Python


def _passed_through(tensors: Sequence[Any], make: Callable[[list[Edge | None]], Node]) -> Any:
    """Aliases of `tensors` whose producer is the node that `make` makes from their edges."""
    tracked = [isinstance(t, Tensor) and _tracked(t) for t in tensors]
    outputs = [t.detach() if isinstance(t, Tensor) else t for t in tensors]
    if any(tracked) and _private.grad_enabled() and not _private.inference_enabled():
        node = make(
            [gradient_edge(t) if n else None for t, n in zip(tensors, tracked, strict=True)]
        )
        for index, out in enumerate(outputs):
            if isinstance(out, Tensor):
                attach(out, Edge(node, index, out.shape, out.dtype))
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


class DelayedError:
    """`torch._C._functions.DelayedError`: raises `message` when a gradient comes back (a second
    backward through a once_differentiable function)."""

    def __init__(self, message: bytes | str, count: int) -> None:
        self.message = message.decode() if isinstance(message, bytes) else message

    def __call__(self, *tensors: Any) -> Any:
        return _passed_through(tensors, lambda edges: ErrorNode(self.message, edges, len(edges)))


class UndefinedGrad:
    """`torch._C._functions.UndefinedGrad`: stops the gradient on its way back, as gradcheck does
    to see whether backward copes with a missing one."""

    def __call__(self, *tensors: Any) -> Any:
        return _passed_through(tensors, lambda edges: UndefinedGradBackward(edges, len(edges)))


class UndefinedGradBackward(Node):
    """A node through which every gradient becomes a missing one."""

    __slots__ = ()

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None = None
    ) -> Sequence[Tensor | None]:
        return [None] * len(self.edges)
