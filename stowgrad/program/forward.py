"""A compiled forward: a region of the model as one node, with a forward and a backward graph.

`compile(fn)` lets PyTorch's front end (`torch._dynamo`) trace `fn` and guard what it traced;
AOTAutograd makes the joint graph of forward and backward out of that, and PyTorch's min-cut
partitioner decides what goes from one to the other. Both run as straight-line ATen code. Under
`record()` a call of the region is one CompiledNode. What it saves are SavedTensors like all others:

- each is saved (packed, where hooks apply) as soon as the forward graph has computed it, not when
  the region is over, so that a forward whose saved tensors leave memory never holds them all;
- each is unpacked by a step of the backward graph that stands before the first op that needs it,
  and dropped after the last one.

Mutated inputs and buffers, outputs that are views or inputs, sizes that change: AOTAutograd and
the guards see to all of them, around the node; what they do to tensors there is recorded as ever.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .. import _private, engine, function
from ..context import backward_scope, recording, suspended
from ..errors import GraphFreedError
from ..graph import Edge, Node, attach
from ..record import note_traceback, user_location
from ..saved import SavedTensor
from ..views import ErrorNode, gradient_edge

_tracked = _private.native_requires_grad

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed): what {} saved is gone. Saved tensors are freed when you call "
    ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through "
    "the graph a second time or to access saved tensors after backward."
)
_TWICE = (
    "the backward of {} is a compiled graph, which has no derivative of its own: a second "
    "derivative through sg.compile is not supported. Call the function without it there."
)


def compile(
    fn: Callable[..., Any] | None = None,
    *,
    backend: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Any:
    """`fn` (a function or a module), compiled: traced once, and one node of the graph a region.

    Use it as a function or as a decorator. Under `record()` a call makes one node for each region
    that PyTorch's front end can trace in one piece (the whole of `fn`, unless it has graph breaks;
    what stands between regions is recorded op by op). Outside `record()` it is `torch.compile`
    with a backend of ATen code, and PyTorch's autograd; its saved tensors are PyTorch's then.

    `dynamic`, `fullgraph`: as in `torch.compile`; by default a size that has changed once is a
    symbol from then on. `backend` is for ways to run the graphs other than as ATen ops, of which
    there is none yet: it must be None. (`sg.compiled_backward(backend=...)` compiles the backward,
    those of regions included.)

    A region that cannot be compiled is run op by op, with a warning that says why. Raises
    TypeError for what cannot be called, ValueError for a backend; a second derivative through a
    region raises RuntimeError. Gradients are those of the function without `compile`; so are
    random draws, each of which is made once, in forward.
    """
    if fn is None:
        return lambda f: compile(f, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    if not callable(fn):
        raise TypeError(f"sg.compile() takes a function or a module, not {type(fn).__name__}")
    if backend is not None:
        raise ValueError(
            f"sg.compile() runs a region as ATen ops; it has no backend {backend!r}. Compile the "
            "backward instead: sg.compiled_backward(backend=...)."
        )
    name = getattr(fn, "__name__", type(fn).__name__)
    return _private.compiler_front_end(
        fn,
        _Backend(name),
        dynamic=dynamic,
        fullgraph=fullgraph,
        step_aside=_Aside,
    )


class _Aside:
    """From here until `back()`: neither the recorder nor a mode that only looks is on, and
    PyTorch's autograd is; the front end traces only so."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        if recording():
            self._stack.enter_context(suspended())
        modes = _private.mode_stack()
        rest = [m for m in modes if not getattr(m, "passive", False)]
        if len(rest) < len(modes):
            _private.set_mode_stack(rest)
            self._stack.callback(_private.set_mode_stack, modes)

    def back(self) -> None:
        self._stack.close()


class _Backend:
    """What the front end calls with each region that it has traced."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        plan = CompiledPlan(self._name)
        try:
            compiled = _private.compile_joint(
                module,
                inputs,
                forward=plan.compile_forward,
                backward=plan.compile_backward,
                inference=plan.compile_inference,
                partition=plan.partition,
                decompositions=None,
            )

            def call(*args: Any) -> Any:
                outer, _running.plan = _running.plan, plan
                try:
                    return compiled(*args)
                finally:
                    _running.plan = outer

            return call
        except Exception as error:
            if _private.traces_again(error):
                raise
            if not self._warned:
                self._warned = True
                reason = str(error).strip().split("\n", 1)[0]
                warnings.warn(
                    f"a region of {self._name} cannot be compiled and runs op by op "
                    f"({type(error).__name__}: {reason})",
                    stacklevel=2,
                )
            plain: Callable[..., Any] = module.forward
            return plain


class CompiledPlan:
    """The two graphs of one compiled region. Its identity stands for them.

    `forward`, `backward`: torch.fx GraphModules (None until there are any; a region that never
    needs a gradient has no backward). `saved`: the names that the saved tensors have in them.
    """

    def __init__(self, name: str) -> None:
        self.name = f"Compiled[{name}]"
        self.forward: Any = None
        self.backward: Any = None
        self.saved: list[str] = []
        self._outputs = 0

    def __repr__(self) -> str:
        return f"<{self.name}, {len(self.saved)} saved tensors>"

    def partition(self, joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        """Cut the joint graph in two (PyTorch's min-cut partitioner)."""
        self._outputs = num_fwd_outputs
        forward, backward = _private.min_cut_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        _save_bases(forward.graph, backward.graph, num_fwd_outputs)
        forward.recompile()
        backward.recompile()
        return forward, backward

    def compile_inference(self, module: Any, inputs: Any) -> Callable[[list[Any]], Any]:
        self.forward = module
        return _boxed(module)

    def compile_forward(self, module: Any, inputs: Any) -> Callable[[list[Any]], Any]:
        """The forward graph, with a step after each value that is saved which saves it."""
        self.forward = module
        graph = module.graph
        output = graph.output_node()
        values = list(output.args[0])
        returned = set(values[: self._outputs])
        for index, value in enumerate(values[self._outputs :], self._outputs):
            if not _is_tensor(value):
                continue
            self.saved.append(value.name)
            # an output or an input is held by others anyway, and is saved with its producer
            if value.op != "placeholder" and value not in returned:
                with graph.inserting_after(value):
                    values[index] = graph.call_function(keep, (value, value.name))
        output.args = (tuple(values),)
        return _boxed(module)

    def compile_backward(self, module: Any, inputs: Any) -> Callable[[list[Any]], Any]:
        """The backward graph, with a step before the first use of each input that gets it."""
        self.backward = module
        graph = module.graph
        order = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if node.op != "placeholder" or not _is_tensor(node) or not node.users:
                continue
            first = min(node.users, key=order.__getitem__)
            with graph.inserting_before(first):
                value = graph.call_function(fetch, (node,))
            value.meta.update(node.meta)
            node.replace_all_uses_with(value, delete_user_cb=lambda user, v=value: user is not v)
        return _boxed(module)


_VIEWS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "view", "_unsafe_view", "permute", "transpose", "t", "select", "unsqueeze", "squeeze",
        "expand", "slice", "alias", "detach", "unbind", "split", "split_with_sizes",
    )
)  # fmt: skip


def _base(node: Any) -> Any:
    """What `node` is a view of, by ops and numbers alone; itself where it is none."""
    while node.op == "call_function" and node.all_input_nodes == [node.args[0]]:
        step = node.args[0] if node.target is operator.getitem else node  # an item of several views
        if getattr(step.target, "overloadpacket", None) not in _VIEWS:
            break
        node = node.args[0]
    return node


def _save_bases(forward: Any, backward: Any, outputs: int) -> None:
    """Where several saved tensors are views of one, save that one, and view it in backward.

    Hooks pack one tensor then rather than several, some of which would drag the whole along. So
    too where one is a view of an input or an output of the region, which is there anyway.
    """
    output = forward.output_node()
    values = list(output.args[0])
    kept = values[outputs:]
    groups: dict[Any, list[Any]] = {}
    for value in kept:
        if _is_tensor(value) and (base := _base(value)) is not value and _is_tensor(base):
            groups.setdefault(base, []).append(value)
    inputs = {node.name: node for node in backward.nodes if node.op == "placeholder"}
    for base, views in groups.items():
        if any(v.name not in inputs for v in views):
            continue
        if base not in kept:
            free = base.op == "placeholder" or base in values[:outputs]
            if not free and (len(views) < 2 or sum(map(_nbytes, views)) < _nbytes(base)):
                continue
            with backward.inserting_before(inputs[views[0].name]):
                source = backward.placeholder(base.name)
            source.meta.update(base.meta)
            kept[kept.index(views[0])] = base
        elif base.name in inputs:
            source = inputs[base.name]
            kept.remove(views[0])
        else:
            continue
        kept = [v for v in kept if v not in views]
        for view in views:
            old = inputs[view.name]
            if old.users:
                old.replace_all_uses_with(_replayed(backward, view, base, source, old))
            backward.erase_node(old)
    output.args = ((*values[:outputs], *kept),)
    for node in reversed(forward.nodes):  # views that nobody needs there any more
        if not node.users and getattr(node.target, "overloadpacket", None) in _VIEWS:
            forward.erase_node(node)
    backward.lint()


def _replayed(graph: Any, view: Any, base: Any, source: Any, old: Any) -> Any:
    """The ops from `base` to `view`, in the backward graph, before the first use of `old`."""
    chain = []
    while view is not base:
        chain.append(view)
        view = view.args[0]
    order = {node: i for i, node in enumerate(graph.nodes)}
    made = source
    with graph.inserting_before(min(old.users, key=order.__getitem__)):
        for step in reversed(chain):
            made = graph.call_function(step.target, (made, *step.args[1:]), dict(step.kwargs))
            made.meta.update(step.meta)
    return made


def _nbytes(node: Any) -> int:
    """The size of a traced tensor; where it is symbolic, with the values it was traced with."""
    value = node.meta["val"]
    count = value.numel()
    return (count if isinstance(count, int) else _private.size_hint(count)) * value.itemsize


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), Tensor)


def _boxed(module: Any) -> Callable[[list[Any]], Any]:
    """`module` as straight-line code that takes its inputs in a list, which it empties, so that
    each value goes after its last use."""
    graph = module.graph
    graph.set_codegen(_private.boxed_codegen())
    graph.lint()
    module.recompile()
    return _unrecorded(module.forward)


def _unrecorded(forward: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        if not recording():
            return forward(args)
        with backward_scope(False):
            return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


# -- the steps that save and get a tensor


class _Frame:
    """One call of a region under `record()`, while its forward runs."""

    __slots__ = ("markers", "plan", "saved", "where")

    def __init__(self, plan: CompiledPlan, where: Any) -> None:
        self.plan = plan
        self.saved: dict[int, SavedTensor] = {}  # by the identity of its marker
        self.markers: list[Tensor] = []
        self.where = where


class _Running(threading.local):
    plan: CompiledPlan | None = None  # of the region that is being called
    frame: _Frame | None = None  # if it is being recorded


_running = _Running()


def keep(value: Tensor, name: str) -> Tensor:
    """In a forward graph: save `value` now. Gives what stands for it among the outputs, where
    PyTorch wants a tensor: an empty one."""
    frame = _running.frame
    if frame is None:
        return value
    saved = SavedTensor(value, name, frame.plan.name, frame.where)
    marker = torch.empty(0)
    frame.markers.append(marker)
    frame.saved[id(marker)] = saved
    return marker


class _Handle:
    """A saved tensor of a node on its way into the backward graph."""

    __slots__ = ("entry", "last", "node")

    def __init__(self, node: CompiledNode, entry: Any, last: bool) -> None:
        self.node = node
        self.entry = entry
        self.last = last  # whether this is its last use


def fetch(value: Any) -> Any:
    """In a backward graph: the saved tensor behind a handle, unpacked now; and let go of, where
    this is the last backward through it."""
    if type(value) is not _Handle:
        return value
    tensor = value.node._unpack(value.entry)
    if value.last and isinstance(value.entry, SavedTensor):
        value.entry.release()
    return tensor


# -- the node


class CompiledNode(Node):
    """One call of a compiled region.

    `saved`: a SavedTensor for each tensor that the backward graph takes. `values`: the sizes it
    takes. `plan`: the graphs. `metas`: shape, dtype and device of each output that has a gradient,
    None for the others.
    """

    __slots__ = ("extra", "function", "metas", "plan", "saved", "tensor_inputs", "unchecked",
                 "values")  # fmt: skip

    traceable = True  # `apply` can run on fake tensors; it unpacks through `_unpack` alone
    runs_without_gradient = True  # as PyTorch's: the gradients that are missing are zeros

    def __init__(
        self, plan: CompiledPlan, cls: Any, edges: Sequence[Edge | None], inputs: Sequence[Any]
    ) -> None:
        super().__init__(edges)
        self.function = cls  # AOTAutograd's Function, which sorts gradients in and out
        self.tensor_inputs = [isinstance(x, Tensor) for x in inputs]
        self.plan = plan
        self.saved: list[SavedTensor] | None = None
        self.values: dict[str, Any] | None = None
        self.metas: list[Any] = []
        self.unchecked = 0  # how many of the last ones PyTorch hands on by another way
        self.extra: dict[str, Any] = {}

    def name(self) -> str:
        return self.plan.name

    @property
    def _raw_saved_tensors(self) -> tuple[SavedTensor, ...]:
        return tuple(self._entries())

    def _entries(self) -> list[SavedTensor]:
        if self.saved is None:
            raise GraphFreedError(_FREED.format(self.name()))
        return self.saved

    def _unpack(self, entry: Any) -> Any:
        return entry.unpack(self, False) if isinstance(entry, SavedTensor) else entry

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None = None
    ) -> Sequence[Tensor | None]:
        """Run the backward graph. With grad mode on, what it returns raises NotDifferentiableError
        where a second derivative is taken."""
        entries = self._entries()
        create_graph = _private.grad_enabled()
        if create_graph and type(self)._unpack is not CompiledNode._unpack:
            raise NotImplementedError(_TWICE.format(self.name()))  # a capture: it calls us instead
        arrived = [g for g in grads if g is not None and _tracked(g)] if create_graph else ()
        given = [self._zeros(i) if g is None else g for i, g in enumerate(grads)]
        grads.clear()
        task = engine.current_task()
        last = task is not None and not task.keep_graph
        context = _BackwardContext(self, [_Handle(self, e, last) for e in entries])
        del entries
        _private.set_grad_enabled(False)
        try:
            if getattr(self.function, "boxed_grads_call", False):
                result = self.function.backward(context, given)
            else:
                given.reverse()
                result = self.function.backward(context, *[given.pop() for _ in range(len(given))])
        finally:
            _private.set_grad_enabled(create_graph)
        pairs = zip(result, self.tensor_inputs, strict=True)
        results: list[Tensor | None] = [g for g, is_tensor in pairs if is_tensor]
        if create_graph:
            self._forbid_derivative(results, arrived)
        return results

    def _zeros(self, index: int) -> Tensor | None:
        meta = self.metas[index]
        if meta is None:
            return None
        shape, dtype, device = meta
        return torch.zeros(shape, dtype=dtype, device=device)

    def _forbid_derivative(self, results: list[Tensor | None], arrived: Sequence[Tensor]) -> None:
        """Give the gradients a producer that raises: the values in the graphs are not recorded, so
        nothing else could be right."""
        edges = [*self.edges, *[gradient_edge(g) for g in arrived]]
        node = ErrorNode(_TWICE.format(self.name()), edges, len(results))
        for i, g in enumerate(results):
            if g is not None and self.edges[i] is not None:
                g = results[i] = _private.alias(g)  # it may be one that arrived
                attach(g, Edge(node, i, g.shape, g.dtype))

    def release(self) -> None:
        for entry in self.saved or ():
            entry.release()
        self.saved = None


class _BackwardContext:
    """`ctx` in the backward of AOTAutograd's Function: hands on what was saved, still packed."""

    def __init__(self, node: CompiledNode, handles: list[_Handle]) -> None:
        checked = len(handles) - node.unchecked
        self.saved_tensors = tuple(handles[:checked])
        self._tensors_no_vc_check = handles[checked:]
        self.symints = list((node.values or {}).values())
        self.__dict__.update(node.extra)

    def maybe_clear_saved_tensors(self) -> None:
        pass


def apply_region(cls: Any, args: tuple[Any, ...]) -> Any:
    """Run AOTAutograd's Function `cls` on `args` and record it as one node. NotImplemented if it is
    not a region of ours: code of torch.compile's is recorded as any Function is."""
    plan = _running.plan
    if plan is None:
        return NotImplemented
    tensors = [a for a in args if isinstance(a, Tensor)]
    needs = tuple([isinstance(a, Tensor) and _tracked(a) for a in args])
    grad_mode = _private.grad_enabled()
    recorded = any(needs) and grad_mode and not _private.inference_enabled()
    context_class, _ = function._classes(cls)
    ctx = context_class()
    ctx.needs_input_grad = needs
    where = user_location()
    node: CompiledNode | None = None
    frame: _Frame | None = None
    if recorded:
        edges = [gradient_edge(t) if _tracked(t) else None for t in tensors]
        node = CompiledNode(plan, cls, edges, args)
        node.where = where
        if torch.is_anomaly_enabled():
            note_traceback(node)
        ctx.requires_grad = True
        frame = _Frame(plan, where)
    outer, _running.frame = _running.frame, frame
    _private.set_grad_enabled(False)
    try:
        raw = cls.forward(ctx, *args)
    finally:
        _private.set_grad_enabled(grad_mode)
        _running.frame = outer
    of_function: Any = node  # it has what of a FunctionNode is asked for
    outputs = function._wrap_outputs(ctx, of_function, tensors, raw, False)
    if node is not None:
        assert frame is not None
        node.metas = [None if m is None or not m[4] else m[:3] for m in node.metas]
        _save(node, ctx, frame, _changed_afterwards(cls, args))
    return outputs if isinstance(raw, tuple) else outputs[0]


def _changed_afterwards(cls: Any, args: tuple[Any, ...]) -> set[int]:
    """The storages of the inputs that `fn` changes in place. The graphs know nothing of that: the
    region returns the new values, and they are copied over the old when its node is there."""
    metadata = cls.metadata
    return {
        _private.storage_key(args[i])
        for i in metadata.mutated_inp_runtime_indices
        if metadata.input_info[i].mutates_data and isinstance(args[i], Tensor)
    }


def _save(node: CompiledNode, ctx: Any, frame: _Frame, changed: set[int]) -> None:
    """Give the node what its backward takes: the tensors that were saved on the way, and those
    that are inputs or outputs of the region."""
    plan = node.plan
    checked = ctx.to_save or ()
    unchecked = getattr(ctx, "_tensors_no_vc_check", None) or ()
    names = plan.saved
    if len(names) != len(checked) + len(unchecked):
        names = [f"saved_tensors[{i}]" for i in range(len(checked) + len(unchecked))]
    saved = []
    for i, tensor in enumerate((*checked, *unchecked)):
        done = frame.saved.get(id(tensor))
        if done is not None:
            saved.append(done)
            continue
        if changed and _private.storage_key(tensor) in changed:
            with torch.no_grad():
                tensor = tensor.clone()
        edge = function.producer_or_leaf(tensor) if _tracked(tensor) else None
        output = None
        if edge is not None and edge.node is node:
            output, edge = edge.index, None
        if i >= len(checked):
            tensor, edge, output = tensor.data, None, None  # it has been changed, as it should be
        saved.append(SavedTensor(tensor, names[i], plan.name, node.where, output, edge))
    node.saved = saved
    node.unchecked = len(unchecked)
    node.values = {f"size_{i}": v for i, v in enumerate(getattr(ctx, "symints", ()))}
    for key in ("opaque_objects", "_curr_iter"):
        if key in ctx.__dict__:
            node.extra[key] = ctx.__dict__[key]


function.apply_region = apply_region
