"""Every use of PyTorch's private API, so that a new release is mended in this one file.

Each name says why no public way serves. Nothing else in the package touches `torch._C` or an
underscore name of PyTorch's, except `torch_api.py`, whose whole purpose is to rebind them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._functorch.pyfunctorch as pyfunctorch
import torch._prims_common as _prims_common
import torch.utils._python_dispatch as _python_dispatch
from torch import Tensor
from torch._functorch.vmap import vmap_increment_nesting
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import NotDifferentiableError

TORCH_DIR = os.path.dirname(torch.__file__)

# The native getters and setters, taken before anything can rebind the public names. They read the
# C++ flag; the public properties are ours while recording.
_native: Any = vars(torch._C.TensorBase)
native_requires_grad: Callable[[Tensor], bool] = _native["requires_grad"].__get__
set_native_requires_grad: Callable[[Tensor, bool], None] = _native["requires_grad"].__set__
native_grad_fn: Callable[[Tensor], Any] = _native["grad_fn"].__get__
native_is_leaf: Callable[[Tensor], bool] = _native["is_leaf"].__get__
set_native_hooks: Callable[[Tensor, Any], None] = _native["_backward_hooks"].__set__
native_hooks: Callable[[Tensor], Any] = _native["_backward_hooks"].__get__
# The view of a tensor, made anew on another base; the public ways to make views need the ops.
replay_view: Callable[[Tensor, Tensor], Tensor] = _native["_view_func"]
_use_count: Callable[[Tensor], int] = _native["_use_count"]

# Why: called on a tensor of a subclass, or in a function mode, the above and every op go to a
# `__torch_function__` first. Within this guard none does; the public one leaves the modes on.
overridden: Callable[[Any], bool] = torch._C._has_torch_function_unary
NoFunctionOverrides = torch._C.DisableTorchFunction
function_overrides: Callable[[], Any] = vars(torch._C)["_get_torch_function_state"]
set_function_overrides: Callable[[Any], None] = vars(torch._C)["_set_torch_function_state"]

# Why: once TorchScript has compiled a function, its gradient is PyTorch's own, in one piece. Till
# then it runs op by op. The public switch is a context manager only.
scripts_compile: Callable[[], bool] = torch._C._get_graph_executor_optimize
set_scripts_compile: Callable[[bool], None] = torch._C._set_graph_executor_optimize

grad_enabled = torch.is_grad_enabled
inference_enabled = torch.is_inference_mode_enabled  # with it, grad mode may be on and counts not
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled  # the public one is a class

# Why: PyTorch's autograd is a dispatch key, and no public switch leaves it out while grad mode
# stays what the user set.
BelowAutograd = torch._C._AutoDispatchBelowAutograd

_VIEW_KEY = torch._C.DispatchKey.ADInplaceOrView
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


def exclude_view_tracking() -> None:
    """Leave out the key that marks views and counts versions, until `include_view_tracking`.

    The recorder keeps it out above itself and puts it back around the kernel, so that what the
    kernel returns is already the finished view (PyTorch wraps it after the mode otherwise).
    """
    _set_excluded(_VIEW_KEY, True)


def include_view_tracking() -> None:
    _set_excluded(_VIEW_KEY, False)


def view_tracking_excluded() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_VIEW_KEY)


class Session(threading.local):
    """The recording that this thread is in: an object that no other has, or None.

    A scope that Ctrl-C struck as it was entered is left when the collector comes by, perhaps after
    recording is over and everything is back in place, perhaps in another thread. So a scope that
    changes the thread's state sees by this whether it is still its turn to change it back.
    """

    recording: object = None


session = Session()


@contextmanager
def view_tracking() -> Iterator[None]:
    """Within: views are marked as such, wherever this is called."""
    here = session.recording
    excluded = view_tracking_excluded()
    _set_excluded(_VIEW_KEY, False)
    try:
        yield
    finally:
        if session.recording is here:
            _set_excluded(_VIEW_KEY, excluded)


@contextmanager
def view_tracking_off() -> Iterator[None]:
    here = session.recording
    excluded = view_tracking_excluded()
    exclude_view_tracking()
    try:
        yield
    finally:
        if not excluded and session.recording is here:
            include_view_tracking()


# Why: a mode that must be taken off the stack and put back in the middle (around rules that need
# no recording) has no public form; `with mode:` only nests.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack


def pop_mode() -> Any:
    return torch._C._pop_torch_dispatch_stack(None)


def mode_stack() -> list[Any]:
    return _python_dispatch._get_current_dispatch_mode_stack()


def set_mode_stack(wanted: list[Any]) -> None:
    """Make `wanted` the stack of modes, by as few steps as it takes."""
    now = mode_stack()
    common = 0
    while common < min(len(now), len(wanted)) and now[common] is wanted[common]:
        common += 1
    for _ in now[common:]:
        pop_mode()
    for mode in wanted[common:]:
        push_mode(mode)


def modes_beneath() -> bool:
    """Whether modes lie under the one that is running and want to see the parts of composite ops.

    A mode with a true attribute `passive` only looks, and takes composite ops apart by itself.
    """
    return mode_count() > 0 and not all(getattr(m, "passive", False) for m in mode_stack())


# Why: to leave the recorder out around one call; taking it off the stack and back costs more.
NoDispatchModes = torch._C._DisableTorchDispatch

# How a view came to be; decides which in-place changes PyTorch allows on it.
creation_meta: Callable[[Tensor], Any] = torch._C._autograd._get_creation_meta
set_creation_meta: Callable[[Tensor, Any], None] = torch._C._autograd._set_creation_meta
CreationMeta = torch._C._autograd.CreationMeta


def storage_key(tensor: Tensor) -> int:
    """The identity of a live tensor's storage (its C++ object, not its address in memory)."""
    return tensor.untyped_storage()._cdata


def has_plain_storage(tensor: Tensor) -> bool:
    """Whether the elements lie in a storage of the tensor's own (not so for sparse layouts, nor
    for tensors that are a wrapper around others)."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def share_storage(a: Tensor, b: Tensor) -> bool:
    try:
        return storage_key(a) == storage_key(b)
    except (RuntimeError, NotImplementedError):  # sparse and other storage-less layouts
        return a is b


def has_kernel(func: Any, key: str) -> bool:
    """Whether the dispatcher has a kernel of its own for `func` under `key`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def all_aten_ops() -> list[Any]:
    """Every overload in `torch.ops.aten`, by name. Why: the namespace lists only those in use."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            try:
                found.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
            except (AttributeError, RuntimeError):  # not callable from Python
                continue
    return found


def is_composite(func: Any) -> bool:
    """Whether `func` is made only of other ops (CompositeImplicitAutograd)."""
    return has_kernel(func, "CompositeImplicitAutograd")


def run_parts(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the composite `func` as the ops it is made of.

    Why: `func.decompose()` prefers decompositions in Python where there are some (`lstm`, `matmul`,
    `upsample_*`, ...), whose numbers and random draws are not those of the kernel that people run.
    """
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def registered_autograd(func: Any) -> Any:
    """The kernel that Python code registered for `func` under an autograd key, or None.

    Why: `torch.library.register_autograd` keeps its formula in such a kernel and nowhere else.
    """
    space, _, name = func.name().partition("::")
    for key in ("Autograd", "AutogradCPU", "AutogradCUDA"):
        if f"{space}/{name}/{key}" in torch.library._impls:
            return torch.library.get_kernel(func, "AutogradCPU" if key == "Autograd" else key)
    return None


def dispatch_keys(tensors: Iterable[Tensor]) -> Any:
    """The keys that dispatch would see for these arguments in this thread."""
    keys = torch._C._dispatch_tls_local_include_set()
    for tensor in tensors:
        keys = keys | torch._C._dispatch_keys(tensor)
    return keys - torch._C._dispatch_tls_local_exclude_set()


# A tensor that is another one's negative in name only; `Tensor.imag` of a conjugate makes one.
neg_view: Callable[[Tensor], Tensor] = torch._neg_view


def is_wrapped(tensor: Tensor) -> bool:
    """Whether `tensor` is the wrapper that a functional transform (vmap, grad, jvp) works with."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


# Why: while a mode's handler runs, PyTorch leaves out every dispatch key above the mode's. Ops that
# run in there would get no autocast, and take a lazily conjugated or negated tensor as it lies.
_LAZY_KEYS = [torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative]
_AUTOCAST_KEYS = [
    key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")
]
_autocast_by_itself: dict[Any, list[Any]] = {}


_restored_keys: Any = vars(torch._C)["_RestorePythonTLSSnapshot"]


def resolve_lazy_views() -> None:
    """In a mode's handler: from here on, lazy conjugates and negatives are seen to as ever."""
    for key in _LAZY_KEYS:
        _set_excluded(key, False)


@contextmanager
def as_called(func: Any) -> Iterator[None]:
    """In a mode's handler for the composite `func`; within: the dispatch keys as they are for the
    parts of `func` where no mode is on. That is as where it was called, except that autocast does
    not cast the parts of an op that it casts by itself.
    """
    own = _autocast_by_itself.get(func)
    if own is None:
        own = [key for key in _AUTOCAST_KEYS if has_kernel(func, key.name)]
        _autocast_by_itself[func] = own
    with _restored_keys():
        for key in own:
            _set_excluded(key, True)
        yield


def made_of_ops(func: Any) -> bool:
    """Whether the kernel of `func` itself calls ops through the dispatcher."""
    return func.namespace not in ("aten", "prims") or not (
        has_kernel(func, "CPU") or has_kernel(func, "CUDA")
    )


def is_initialized(device_type: str) -> bool:
    """Whether this process has used the accelerator. Asking it anything else would begin to."""
    return bool(getattr(torch.get_device_module(device_type), "_initialized", True))


def functorch_active() -> bool:
    return torch._C._are_functorch_transforms_active()


class VmapLevels:
    """The `torch.vmap`s around a call, so that the call can be made again when they are over.

    Why: a batched tensor means nothing outside its vmap, and there is no public way to take one
    apart, nor to enter a vmap except by giving it a function.
    """

    def __init__(self) -> None:
        self.levels: list[tuple[int, int, str]] = []  # outermost first: level, size, randomness
        if functorch_active():
            for layer in pyfunctorch.retrieve_all_functorch_interpreters():
                if not isinstance(layer, pyfunctorch.VmapInterpreter):
                    raise NotDifferentiableError(
                        "torch.func's grad, vjp and jvp are not recorded: call them outside "
                        "record(), or use torch.autograd.grad inside it"
                    )
                self.levels.append((layer.level(), layer.batch_size(), layer.randomness()))

    def take_apart(self, tensor: Tensor) -> tuple[Tensor, list[int | None]]:
        """The plain tensor under `tensor`, and the dimension that each level has batched."""
        functorch = torch._C._functorch
        dims: list[int | None] = []
        for level, _, _ in reversed(self.levels):
            if functorch.is_batchedtensor(tensor) and functorch.maybe_get_level(tensor) == level:
                dims.append(functorch.maybe_get_bdim(tensor))
                tensor = functorch.get_unwrapped(tensor)
            else:
                dims.append(None)
        return tensor, dims[::-1]

    @contextmanager
    def again(self) -> Iterator[Callable[[Tensor, list[int | None]], Tensor]]:
        """Within: these vmaps and no other transform. Gives what puts a tensor together again."""
        with ExitStack() as stack:
            if functorch_active():
                stack.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())
            now = [
                stack.enter_context(vmap_increment_nesting(size, randomness))
                for _, size, randomness in self.levels
            ]

            def put_together(tensor: Tensor, dims: list[int | None]) -> Tensor:
                for level, dim in zip(now, dims, strict=True):
                    if dim is not None:
                        tensor = torch._C._functorch._add_batch_dim(tensor, dim, level)
                return tensor

            yield put_together


# What `unshared` sees for a tensor that one local variable alone holds; found once, since it
# depends on the versions of Python and PyTorch.
def _storage_count(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ALONE_STORAGE = _storage_count(torch.empty(1))
_ALONE_TENSOR = _use_count(torch.empty(1))


def unshared(tensor: Tensor, names: int) -> bool:
    """Whether only `names` Python references (and this call's own) hold `tensor`.

    Why: taking over a gradient, or adding to it in place, is safe only when nobody else can see
    it, and reference counts are the only ones who know.
    """
    return sys.getrefcount(tensor) <= names + 2 and _use_count(tensor) <= _ALONE_TENSOR


def unshared_storage(tensor: Tensor) -> bool:
    """Whether no other tensor lives in `tensor`'s storage."""
    return tensor.layout is torch.strided and _storage_count(tensor) <= _ALONE_STORAGE


def fresh(tensor: Tensor, names: int) -> bool:
    """Whether `tensor` is new: nobody but `names` Python references can see it or its memory."""
    if not has_plain_storage(tensor):
        return True
    return (
        sys.getrefcount(tensor) <= names + 2
        and _use_count(tensor) <= _ALONE_TENSOR
        and _storage_count(tensor) <= _ALONE_STORAGE
        and tensor.untyped_storage().resizable()
    )


def foreign_addresses(tensor: Tensor) -> tuple[int, int]:
    """Where the memory of `tensor`'s storage lies if it is not PyTorch's own; else (0, 0)."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        return 0, 0
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


# Renamed between releases.
_gapless: Callable[[Tensor], Any] = next(
    fn
    for name, fn in vars(_prims_common).items()
    if name in ("is_non_overlapping_and_dense_or_false", "is_non_overlapping_and_dense")
)


def dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlap, in any order."""
    return tensor.is_contiguous() or bool(_gapless(tensor))


@contextmanager
def autograd_included() -> Iterator[None]:
    """Within: PyTorch's autograd keys take part in dispatch again (the fallback needs them)."""
    here = session.recording
    keys = [k for k in _AUTOGRAD_KEYS if torch._C._dispatch_tls_is_dispatch_key_excluded(k)]
    for key in keys:
        _set_excluded(key, False)
    try:
        yield
    finally:
        for key in keys if session.recording is here else ():
            _set_excluded(key, True)


_AUTOGRAD_KEYS = [
    torch._C.DispatchKey.__members__[name]
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
    if name in torch._C.DispatchKey.__members__
]


def alias(tensor: Tensor) -> Tensor:
    """`tensor.detach()`: the same storage and version counter, without a graph.

    The counter is shared only while the native view bookkeeping is on, which the recorder keeps
    out above itself.
    """
    if not view_tracking_excluded():
        return tensor.detach()
    _set_excluded(_VIEW_KEY, False)
    try:
        return tensor.detach()
    finally:
        _set_excluded(_VIEW_KEY, True)


def version_probe(tensor: Tensor) -> Tensor:
    """An empty tensor that shares `tensor`'s version counter and none of its memory.

    Why: to learn later that a tensor was changed in place, without keeping it alive. `set_()` on
    an alias moves it to another storage; with version tracking out it is not itself a change.
    """
    probe = alias(tensor)
    excluded = view_tracking_excluded()
    with NoDispatchModes():
        _set_excluded(_VIEW_KEY, True)
        try:
            return probe.set_()  # type: ignore[call-overload]
        finally:
            if not excluded:
                _set_excluded(_VIEW_KEY, False)


class StorageRef:
    """A weak reference to a tensor's storage. While one is there, its identity is not reused."""

    __slots__ = ("_ref", "key")

    def __init__(self, tensor: Tensor) -> None:
        self._ref = StorageWeakRef(tensor.untyped_storage())
        self.key: int = self._ref.cdata  # as `storage_key`

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lives in this storage, found by its memory where it has another handle
        on it (a tensor made from a NumPy array that was made from a tensor)."""
        if tensor.layout is not torch.strided or self._ref.expired():
            return False
        storage = tensor.untyped_storage()
        if storage._cdata == self.key:
            return True
        whole = torch.UntypedStorage._new_with_weak_ptr(self.key)
        if whole is None or whole.device != storage.device or not whole.nbytes():
            return False
        start = whole.data_ptr()
        return start <= storage.data_ptr() < start + whole.nbytes()


def skip_compiler(function: Any) -> Any:
    """Decorator: torch.compile neither traces this function nor anything called from it.

    Why: compiled code calls into the recorder, and the compiler would try to compile the recorder
    too. The public `torch.compiler.disable` adds two Python frames to each call; a mark on the
    code object adds none.
    """
    eval_frame = torch._C._dynamo.eval_frame
    action, strategy = eval_frame._FrameAction, eval_frame._FrameExecStrategy
    eval_frame.set_code_exec_strategy(function.__code__, strategy(action.SKIP, action.SKIP))
    return function


# -- capture. Why: symbolic sizes and fake tensors are what torch.export and torch.compile are made
# of; there is no public name for either.


def new_shape_env() -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(specialize_zero_one=True)


def new_fake_mode(shape_env: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)


class _Quiet(logging.Filter):
    """PyTorch logs an error for an op that fails on fake tensors; a capture has a way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()  # those that capture

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() not in self.threads


_quiet = _Quiet()


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Within: no log of the failures of fake tensors in this thread."""
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_quiet)  # again is no matter
    thread = threading.get_ident()
    outer = thread in _quiet.threads
    _quiet.threads.add(thread)
    try:
        yield
    finally:
        if not outer:
            _quiet.threads.discard(thread)


def new_size(shape_env: Any, name: str, value: int) -> Any:
    """A new symbolic size that has `value` for now."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shape_env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=value, source=source)


def new_number(shape_env: Any, name: str, value: float) -> Any:
    """A new symbolic number that is no size."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shape_env.create_unspecified_symbol(
        value, source=source, dynamic_dim=DimDynamic.DYNAMIC
    )
    return shape_env.create_symfloatnode(symbol, hint=value, source=source)


def _python_code(expr: Any, symbols: dict[str, Any]) -> tuple[str, list[str]]:
    """`expr` as Python code over the names of `symbols`, and which of them are in it."""
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.printers import PythonPrinter

    named = {symint.node._expr: name for name, symint in symbols.items()}
    found = sorted({named[s] for s in expr.free_symbols})
    words = {s: sympy.Symbol(n) for s, n in named.items()}
    # the printer would keep 15 digits of a float
    words |= {f: sympy.Symbol(f"({float(f)!r})") for f in expr.atoms(sympy.Float)}
    code = PythonPrinter().doprint(expr.xreplace(words))
    return code, found


def size_code(value: Any, symbols: dict[str, Any]) -> tuple[str, list[str]]:
    return _python_code(value.node.expr, symbols)


def of_unknown_size(tensor: Tensor) -> bool:
    """Whether a fake tensor has a size that only the data tell."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(type(n) is torch.SymInt and free_unbacked_symbols(n) for n in tensor.shape)


def guards_of(shape_env: Any, symbols: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(_python_code(g.expr, symbols)[0] for g in shape_env.guards))


@contextmanager
def mode_off(mode: Any) -> Iterator[None]:
    """Within: `mode`, if it is the innermost, does not see the ops."""
    if not mode_count() or mode_stack()[-1] is not mode:
        yield
        return
    pop_mode()
    try:
        yield
    finally:
        push_mode(mode)


@contextmanager
def no_transforms() -> Iterator[None]:
    """Within: outside every functional transform (vmap)."""
    if not functorch_active():
        yield
        return
    with pyfunctorch.temporarily_clear_interpreter_stack():
        yield


# -- lowering. Why: the backends of torch.compile take a graph and fake inputs. torch.compile itself
# is the only public way to them, and it takes Python functions.


def compiler_backend(name: str) -> Callable[..., Any]:
    """The backend that torch.compile knows by this name; raises its error where there is none."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


@contextmanager
def compiling(examples: list[Any]) -> Iterator[None]:
    """Within: a thread as a compiler expects it, whatever the caller had on; one at a time."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as stack:
        stack.enter_context(compile_lock)
        stack.enter_context(_disable_current_modes())
        stack.enter_context(no_transforms())
        stack.enter_context(torch.no_grad())
        stack.enter_context(autograd_included())
        stack.enter_context(view_tracking())
        stack.enter_context(torch._C._DisableAutocast())  # the casts are in the graph
        stack.enter_context(tracing(TracingContext(detect_fake_mode(examples))))
        yield


def inductor(
    module: torch.fx.GraphModule,
    examples: list[Any],
    options: dict[str, Any],
    whole: frozenset[Any],
) -> Callable[[list[Any]], Any]:
    """Compile with Inductor to a function of one list of inputs, which it empties.

    Why: so inputs are freed after their last use. What the registered backend gives takes them one
    by one, and holds them to the end. `options`: of `torch._inductor.config`; `whole`: ops that it
    shall call as they are. Takes `module` over.
    """
    from torch._dynamo.utils import GmWrapper
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    table = {op: fn for op, fn in select_decomp_table().items() if op not in whole}
    compiled: Any = compile_fx(
        GmWrapper(module, lambda flat: flat),  # type: ignore[arg-type]
        examples, config_patches=options, decompositions=table,
    )  # fmt: skip
    return compiled


def leave_to_aten(ops: Iterable[Any]) -> None:
    """Make Inductor call these kernels where the ops come to it whole. Why: it does so by itself,
    except that where the environment says CI it takes that for an oversight of its developers."""
    from torch._inductor.lowering import lowerings, make_fallback

    for op in ops:
        if op not in lowerings:
            make_fallback(op, warn=False, override_decomp=True)


def inductor_pass(change: Callable[[torch.fx.Graph], None], key: str) -> Any:
    """A pass over the graph that Inductor makes code for. Why: its passes are known to its cache of
    compiled code by a key, which only a class of its own can give."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> Any:
            return key

    return Pass()


_library: list[Any] = []  # an op lasts as long as the library object that defined it


def define_op(name: str, schema: str, function: Callable[..., Any]) -> None:
    """Define the op stowgrad::`name`, which compilers do not look into. Why: the public
    `torch.library.custom_op` wraps an op in checks that cost more than a small op itself."""
    library = torch.library.Library("stowgrad", "FRAGMENT")
    library.define(name + schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stowgrad::{name}", function, lib=library)
    _library.append(library)


def has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def no_cpp_compiler(error: BaseException | None) -> bool:
    """Whether `error` comes from the lack of a C++ compiler."""
    from torch._inductor.exc import InvalidCxxCompiler

    while error is not None:
        if isinstance(error, InvalidCxxCompiler) or "InvalidCxxCompiler" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


# -- torch.compile's front end and AOTAutograd. Why: `torch.compile` is the public way to both, and
# refuses to trace while a dispatch mode is on (ours is, when a region is met for the first time).


def compiler_front_end(
    fn: Any,
    backend: Callable[..., Any],
    *,
    dynamic: bool | None,
    fullgraph: bool,
    step_aside: Callable[[], Any],
) -> Any:
    """`fn` as torch.compile would make it with this `backend`.

    `step_aside()` is called when a frame is about to be traced. It takes off what the tracer may
    not see, and gives an object whose `back()` puts that on again: first of all for the making of
    the guards, which note the thread's dispatch state, and are later asked with everything on.
    """
    import torch._dynamo
    from torch._dynamo import trace_rules

    global _frames_skipped
    if not _frames_skipped:  # what we do between two regions is not the user's code
        _frames_skipped = True
        trace_rules.add(__name__.partition(".")[0])
    local = threading.local()

    def guards_are_made(guards: Any) -> list[bool]:
        if getattr(local, "aside", None):
            local.aside[-1].back()
        return [True] * len(guards)

    made: Any = torch._dynamo.optimize(
        backend, nopython=fullgraph, dynamic=dynamic, guard_filter_fn=guards_are_made
    )
    inner = getattr(made, "callback", None)
    if inner is None:  # the compiler is switched off by the environment
        return made(fn)

    def callback(*frame: Any) -> Any:
        aside = step_aside()
        if not hasattr(local, "aside"):
            local.aside = []
        local.aside.append(aside)
        try:
            return inner(*frame)
        finally:
            local.aside.pop()
            aside.back()

    callback._torchdynamo_orig_backend = inner  # type: ignore[attr-defined]
    made.callback = callback
    return made(fn)


_frames_skipped = False


def compile_joint(
    module: Any,
    inputs: Any,
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition: Callable[..., Any],
    decompositions: dict[Any, Any] | None,
) -> Callable[..., Any]:
    """AOTAutograd: the joint graph of `module`, cut by `partition` and compiled by the others."""
    import torch._functorch.config
    from torch._functorch.aot_autograd import aot_module_simplified

    def compile_forward(gm: Any, example_inputs: Any) -> Any:
        metadata: Any = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
        if getattr(metadata, "bw_donated_idxs", ()) is None:
            metadata.bw_donated_idxs = []  # else a backward with retain_graph is refused
        return forward(gm, example_inputs)

    # A donated buffer is one that the backward may overwrite; ours may be needed again. And the
    # backward graph is made at once, not when it is first run.
    config = torch._functorch.config
    wanted = {"donated_buffer": False, "force_non_lazy_backward_lowering": True}
    with config.patch({k: v for k, v in wanted.items() if hasattr(config, k)}):
        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=compile_forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=decompositions,
        )


def traces_again(error: Exception) -> bool:
    """Whether `error` is torch._dynamo's own word to trace a frame once more, in another way."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def min_cut_partition(*args: Any, **kwargs: Any) -> Any:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(*args, **kwargs)


def boxed_codegen() -> Any:
    """Code for an fx graph that takes its inputs in one list, which it empties."""
    from torch.fx.graph import _BoxedCodeGen

    return _BoxedCodeGen()


def size_hint(size: Any) -> int:
    """The value that a symbolic size had when it was traced. (`int(size)` would fix it to that.)"""
    hint = size.node.hint
    return 0 if hint is None else int(hint)


@contextmanager
def no_modes() -> Iterator[None]:
    """Within: no dispatch mode is on."""
    modes = mode_stack()
    set_mode_stack([])
    try:
        yield
    finally:
        set_mode_stack(modes)
