"""The graph of a forward pass: nodes, the edges between them, and the leaves.

A Node is one differentiable step. It holds an Edge for each input that may need a gradient; an
Edge says which output of which node that input was, and what its gradient must look like. A
tensor that needs gradients carries the Edge of its own producer as the attribute `_stowgrad`,
which lives as long as the tensor; a leaf has none, and its AccumulateNode is found by identity.

This module knows nothing of rules, modes, hooks on saved tensors, or how backward runs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import _private
from .errors import (
    GradientError,
    InPlaceError,
    NotDifferentiableError,
    OutsideRecordError,
    describe,
)

_T = TypeVar("_T")

next_sequence: Callable[[], int] = itertools.count().__next__

# One step of user code: the code object and the offset in it; resolved to file:line when shown.
Location = tuple[Any, int]


class Edge:
    """Output `index` of `node`, and the shape and dtype its gradient must have.

    `version` is None, or for a view the version at which this edge was right: an in-place change
    of any alias makes it stale, and the view's producer has to be worked out anew.
    """

    __slots__ = ("__weakref__", "dtype", "index", "node", "shape", "version")

    def __init__(
        self,
        node: Node,
        index: int,
        shape: torch.Size,
        dtype: torch.dtype,
        version: int | None = None,
    ) -> None:
        self.node = node
        self.index = index
        self.shape = shape
        self.dtype = dtype
        self.version = version

    def settled(self) -> Edge:
        """The same for a tensor that is no view, which no change elsewhere makes stale."""
        if self.version is None:
            return self
        return Edge(self.node, self.index, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"<output {self.index} of {self.node.name()}>"

    def __reduce__(self) -> Any:
        raise OutsideRecordError(
            f"a tensor tracked by stowgrad (output of {self.node.name()}) cannot be copied or "
            "pickled with its graph. Detach it first: tensor.detach()."
        )


class NodeHooks:
    """The hooks of one node, in the order in which they run: tensor, retain, pre, (node), post."""

    __slots__ = ("post", "pre", "retained", "tensor")

    def __init__(self) -> None:
        self.tensor: dict[int, OrderedDict[int, Callable[..., Any]]] = {}
        self.retained: dict[int, weakref.ref[Tensor]] = {}
        self.pre: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.post: OrderedDict[int, Callable[..., Any]] = OrderedDict()


class Node:
    """One differentiable step. Subclasses say in `apply` how gradients pass through it.

    Public to users as `tensor.grad_fn`, with the methods of `torch.autograd.graph.Node`.
    """

    __slots__ = (
        "__weakref__", "_metadata", "code", "edges", "hooks", "offset", "outputs", "seq", "within",
    )  # fmt: skip

    edges: Sequence[Edge | None]
    # Whether `apply` is called although no gradient arrived, rather than passing that on.
    runs_without_gradient = False
    within: Callable[[], Edge]  # set only where this node is a part of another

    def __init__(self, edges: Sequence[Edge | None], outputs: int = 1) -> None:
        self.edges = edges
        self.outputs = outputs
        self.seq: float = next_sequence()
        self.hooks: NodeHooks | None = None
        self.code: Any = None  # the line of user code it comes from; see `where`
        self.offset = 0
        self._metadata: dict[str, Any] | None = None

    @property
    def where(self) -> Location | None:
        """The step of user code that made it, if that was noted."""
        return None if self.code is None else (self.code, self.offset)

    @where.setter
    def where(self, where: Location | None) -> None:
        self.code, self.offset = (None, 0) if where is None else where

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None
    ) -> Sequence[Tensor | None]:
        """Gradients of the inputs (one for each edge), given those of the outputs.

        `grads` has one entry an output, None where it is zero; it may be emptied, so that a
        gradient lives no longer than it is used. `needs` says which edges want a gradient (None:
        every edge that is there); the others may be None.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Let go of everything saved for backward. Backward through the node is over."""

    def output_edge(self, index: int, like: Tensor) -> Edge:
        """The edge that output `index`, which looks like `like`, carries."""
        within = getattr(self, "within", None)
        return Edge(self, index, like.shape, like.dtype) if within is None else within()

    # -- torch.autograd.graph.Node's public face

    def name(self) -> str:
        return type(self).__name__

    @property
    def metadata(self) -> dict[str, Any]:
        if self._metadata is None:
            self._metadata = {}
        return self._metadata

    @property
    def next_functions(self) -> tuple[tuple[Node | None, int], ...]:
        return tuple((None, 0) if e is None else (e.node, e.index) for e in self.edges)

    def _sequence_nr(self) -> int:
        return int(min(self.seq, 2**63 - 1))

    @property
    def _input_metadata(self) -> Sequence[Any]:
        """What the gradient of each output looks like, for the outputs of which that is known."""
        known = _outputs.get(self, {})
        metas = getattr(self, "metas", None) or [None] * self.outputs
        return [
            known.get(i) if m is None else OutputFacts(*m[:3]) for i, m in enumerate(metas)
        ]

    def note_output(self, index: int, tensor: Tensor) -> None:
        """Remember what output `index` looks like: somebody took a handle on it (a public
        GradientEdge), and may come back without the tensor."""
        facts = OutputFacts(tensor.shape, tensor.dtype, tensor.device)
        _outputs.setdefault(self, {})[index] = facts

    def register_hook(self, fn: Callable[..., Any]) -> Any:
        """`fn(grad_inputs, grad_outputs)` runs after this node; it may return new grad_inputs."""
        return self._handle(self.ensure_hooks().post, fn)

    def register_prehook(self, fn: Callable[..., Any]) -> Any:
        """`fn(grad_outputs)` runs before this node; it may return new grad_outputs."""
        return self._handle(self.ensure_hooks().pre, fn)

    def ensure_hooks(self) -> NodeHooks:
        if self.hooks is None:
            self.hooks = NodeHooks()
        return self.hooks

    def register_tensor_hook(self, index: int, fn: Callable[..., Any]) -> Any:
        """`fn(grad)` runs on the gradient of output `index` before the node sees it."""
        return self._handle(self.ensure_hooks().tensor.setdefault(index, OrderedDict()), fn)

    def _handle(self, hooks: OrderedDict[int, Callable[..., Any]], fn: Callable[..., Any]) -> Any:
        from torch.utils.hooks import RemovableHandle

        handle = RemovableHandle(hooks)
        hooks[handle.id] = fn
        if seam.hooked is not None:
            seam.hooked.append(self)
        return handle

    def __repr__(self) -> str:
        return f"<{self.name()} at {hex(id(self))}>"


class OutputFacts(NamedTuple):
    """One output of a node, in the words of PyTorch's `_input_metadata`."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_nested_tensor: bool = False
    is_cpp_nested_tensor: bool = False


_outputs: weakref.WeakKeyDictionary[Node, dict[int, OutputFacts]] = weakref.WeakKeyDictionary()


class AccumulateNode(Node):
    """The end of the graph at a leaf: adds what arrives to `variable.grad`.

    Its hooks are the leaf's own (`Tensor.register_hook`, `register_post_accumulate_grad_hook`),
    kept where PyTorch keeps them, so that those registered before recording count too. The node
    holds the leaf; the leaf is found from its node by identity, in `_leaves`.
    """

    __slots__ = ("_lock", "edge", "variable")

    runs_without_gradient = True  # its hooks run, as PyTorch's do

    def __init__(self, variable: Tensor) -> None:
        super().__init__(())
        self.seq = float("inf")
        self.variable = variable
        self.edge: weakref.ref[Edge] | None = None  # the edge into it that is in use, if any is
        self._lock = threading.Lock()

    def name(self) -> str:
        return "torch::autograd::AccumulateGrad"

    def leaf_hooks(self) -> Sequence[Callable[..., Any]]:
        """The leaf's own tensor hooks. Raises InPlaceError if it is a leaf no more."""
        if state(self.variable) is not None:
            raise InPlaceError(
                f"leaf variable ({describe(self.variable)}) has been moved into the graph interior:"
                " it was used, and then changed in place by an op that needs gradients. Change a "
                "copy of it."
            )
        hooks = _private.native_hooks(self.variable)
        return tuple(hooks.values()) if hooks else ()

    @property
    def _input_metadata(self) -> Sequence[Any]:
        leaf = self.variable
        return [OutputFacts(leaf.shape, leaf.dtype, leaf.device)]

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None
    ) -> Sequence[Tensor | None]:
        self.add(grads)
        self.call_post_hooks()
        return ()

    def add(self, box: list[Tensor | None]) -> None:
        """Take the gradient out of `box`, so that nobody else holds it, and add it to `.grad`."""
        grad = box.pop()
        if grad is not None and _private.native_requires_grad(self.variable):
            with self._lock:  # several threads may reach one leaf at once
                accumulate(self.variable, grad)

    def call_post_hooks(self) -> None:
        """The leaf's post-accumulate-grad hooks."""
        hooks = self.variable._post_accumulate_grad_hooks
        if hooks:
            for hook in tuple(hooks.values()):
                call_user(hook, self.variable)


class _LeafRef(weakref.ref[AccumulateNode]):
    """A weak reference to the node of a leaf, which it knows by its identity."""

    __slots__ = ("key",)

    key: int


_leaves: dict[int, _LeafRef] = {}
_leaves_lock = threading.Lock()


def _forget(ref: _LeafRef) -> None:
    if _leaves.get(ref.key) is ref:
        _leaves.pop(ref.key, None)


def leaf_edge(variable: Tensor) -> Edge:
    """The edge into `variable`'s accumulate node, made on first use.

    Raises OutsideRecordError if PyTorch's own autograd holds a graph for it: the gradient would
    silently stop here.
    """
    ref = _leaves.get(id(variable))
    node = None if ref is None else ref()
    if node is None:
        node = _new_leaf(variable)
    edge = None if node.edge is None else node.edge()
    shape = variable.shape
    if edge is None or edge.shape != shape:
        dtype = getattr(variable, "grad_dtype", None) or variable.dtype
        edge = Edge(node, 0, shape, dtype)
        if not variable._is_view():  # else whether it is a leaf has to be asked anew
            node.edge = weakref.ref(edge)
    return edge


def _new_leaf(variable: Tensor) -> AccumulateNode:
    native = _private.native_grad_fn(variable)
    if native is not None:
        if _private.functorch_active():
            raise NotDifferentiableError(
                "torch.func.grad, vjp and jacrev are not recorded: call them outside record(), "
                "or use torch.autograd.grad inside it"
            )
        if native.name().startswith("torch::jit"):
            raise OutsideRecordError(
                f"a scripted function returned a tensor ({describe(variable)}) whose gradient is "
                "PyTorch's own: TorchScript compiled it so when it was called outside record(). "
                "Call it inside first, or use the function that was scripted."
            )
        raise OutsideRecordError(
            f"a tensor ({describe(variable)}) that PyTorch's autograd tracks "
            f"({native.name()}) is used while stowgrad records: its "
            "gradient would stop here. Compute it inside record() too, or detach() it."
        )
    key = id(variable)
    with _leaves_lock:
        ref = _leaves.get(key)
        node = None if ref is None else ref()
        if node is None:
            node = AccumulateNode(variable)
            ref = _LeafRef(node, _forget)
            ref.key = key
            _leaves[key] = ref
    return node


def accumulate(variable: Tensor, grad: Tensor) -> None:
    """Add `grad` to `variable.grad`, as PyTorch's AccumulateGrad does.

    Without create_graph: the first gradient is taken over as it is when nobody else holds it and
    its strides are the leaf's, and copied otherwise; later ones are added in place. With
    create_graph every sum is a new tensor, so that it can be differentiated.
    """
    if grad.device != variable.device:
        if grad.dim():
            raise GradientError(
                f"a gradient on {grad.device} has reached a leaf ({describe(variable)}) on "
                f"{variable.device}"
            )
        grad = grad.to(variable.device)  # a number that was used with tensors of another device
    if variable.layout is torch.sparse_coo and grad.layout is torch.strided:
        grad = grad.to_sparse()  # the same numbers, in the one layout that its .grad may have
    old = variable.grad
    if old is None:
        if torch.is_grad_enabled():
            variable.grad = clone_like(grad, variable)
        elif grad.layout is not torch.strided:
            variable.grad = grad.detach() if _private.unshared(grad, 2) else grad.clone()
        elif (
            _private.unshared(grad, 2)
            and same_layout(grad, variable)
            and _private.unshared_storage(grad)
        ):
            variable.grad = grad.detach()
        else:
            variable.grad = clone_like(grad, variable)
    elif old.layout is not torch.strided and grad.layout is torch.strided:
        variable.grad = grad + old
    elif torch.is_grad_enabled():
        variable.grad = old + grad
    else:
        old.add_(grad)


def same_layout(grad: Tensor, variable: Tensor) -> bool:
    """Whether `grad` has the memory layout a leaf's gradient should have (PyTorch's contract)."""
    if _private.dense(variable):
        return all(
            size == 1 or a == b
            for size, a, b in zip(grad.shape, grad.stride(), variable.stride(), strict=True)
        )
    return grad.is_contiguous()


def clone_like(grad: Tensor, variable: Tensor) -> Tensor:
    if grad.layout is not torch.strided or variable.layout is not torch.strided:
        return grad.clone()
    if _private.dense(variable) and not same_layout(grad.contiguous(), variable):
        fresh = grad.new_empty_strided(variable.shape, variable.stride())
        return fresh.copy_(grad)
    return grad.clone(memory_format=torch.contiguous_format)


def attach(tensor: Tensor, edge: Edge) -> None:
    """Make `tensor` a tracked one: `edge` is its producer.

    The native flag is set as well, so that everything that asks `requires_grad` (in C++ too)
    hears the truth; and a native hook that raises, so that PyTorch's own backward, should it ever
    reach this tensor, fails loudly instead of stopping here. (A view says that it needs gradients
    as soon as its base does, but without the flag of its own no backward reaches it.)
    """
    tensor._stowgrad = edge  # type: ignore[attr-defined]
    if _private.overridden(tensor):
        with _private.NoFunctionOverrides():
            _private.set_native_requires_grad(tensor, True)
            _private.set_native_hooks(tensor, _outside)
    else:
        _private.set_native_requires_grad(tensor, True)
        _private.set_native_hooks(tensor, _outside)


def detach_(tensor: Tensor) -> None:
    """The reverse of `attach`: an untracked tensor that needs no gradient."""
    with _private.NoFunctionOverrides():
        if hasattr(tensor, "_stowgrad"):
            del tensor._stowgrad
            _private.set_native_hooks(tensor, None)
        _private.set_native_requires_grad(tensor, False)


def state(tensor: Tensor) -> Edge | None:
    """The edge a tracked tensor carries; None for leaves and tensors without gradients.

    It may be stale for a view (see Edge.version); the recorder's `gradient_edge` is not.
    """
    return getattr(tensor, "_stowgrad", None)


class _Outside:
    """The native hook on every tracked tensor: PyTorch's backward has reached it."""

    __torch_unserializable__ = True  # pickling a tensor's data need not warn about this hook

    def __call__(self, grad: Tensor) -> None:
        raise OutsideRecordError(
            f"PyTorch's own backward reached a tensor ({describe(grad)}) whose graph stowgrad "
            "recorded, so its gradient would stop here. Run this code inside record(), or call "
            "sg.backward(loss) on a loss computed there."
        )


class _OutsideHooks(OrderedDict[int, Any]):
    """The native hooks of every tracked tensor, one object for all: nothing may be added to it."""

    def __init__(self) -> None:
        super().__init__()
        super().__setitem__(0, _Outside())

    def __setitem__(self, key: int, hook: Any) -> None:
        raise OutsideRecordError(
            "a hook on a tensor whose graph stowgrad recorded can be registered only where it "
            "records: call register_hook() inside record()."
        )


_outside = _OutsideHooks()


class Seam(threading.local):
    """What a recorder wants done in its own thread, for the layers that know of no recorder.

    `user`: how to call code of the user's from inside forward or backward (recording goes on in
    it). None: call it directly. `hooked`: where not None, nodes on which a hook is registered.
    `module_path`: tells which module of the user's model is running.
    """

    user: Callable[..., Any] | None = None
    hooked: list[Node] | None = None
    module_path: Callable[[], str] | None = None


seam = Seam()


def call_user(fn: Callable[..., _T], *args: Any) -> _T:
    """Call user code (a hook, a custom function) as if from user code."""
    wrap = seam.user
    return fn(*args) if wrap is None else wrap(fn, *args)


def locate(where: Location | None) -> str:
    """`file.py:41`, or '' where the location was not taken."""
    if where is None:
        return ""
    code, offset = where
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            line = number
            break
    return f"{code.co_filename}:{line}"
