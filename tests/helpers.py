"""What several test files share: hook pairs that count, bytes that are alive, clean threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

import stowgrad as sg
from stowgrad import ops, saved
from stowgrad.rules.table import RULES


class Recording:
    """A hook pair that counts its calls. What it keeps is a copy, in a box of its own."""

    def __init__(self) -> None:
        self.packs = 0
        self.unpacks = 0

    def pack(self, tensor: Tensor) -> Any:
        self.packs += 1
        return ("box", tensor.detach().clone())

    def unpack(self, packed: Any) -> Tensor:
        self.unpacks += 1
        assert packed[0] == "box"
        return packed[1].clone()

    @property
    def counts(self) -> tuple[int, int]:
        return self.packs, self.unpacks


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that ops made within and that are still alive, each counted once.

    Entered outside `record()`, so that it sees the kernels, whoever calls them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in strided_tensors((args, kwargs))}
        for t in strided_tensors(out):
            storage = t.untyped_storage()
            if storage._cdata not in given:
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        return sum(size for _, size in self.storages.values())


def strided_tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.layout is torch.strided]


@contextmanager
def without_rule(op: Any) -> Iterator[None]:
    """Within: the overload `op` has no rule of ours, so that it goes through the fallback."""
    entry = ops.entry_of(op)
    rule = RULES.pop(op)
    del ops._entries[id(op)]
    try:
        yield
    finally:
        RULES[op] = rule
        ops._entries[id(op)] = entry


# An op of a third party that has no derivative anywhere.
_library = torch.library.Library("stowgrad_tests", "FRAGMENT")
_library.define("opaque(Tensor x) -> Tensor")
_library.impl("opaque", lambda x: torch.from_numpy(x.detach().numpy() + 1), "CPU")


def opaque(x: Tensor) -> Tensor:
    return torch.ops.stowgrad_tests.opaque(x)


# What record() may not leave changed behind it.
_OWNERS: list[Any] = [
    torch.Tensor,
    torch._C,
    torch._C.TensorBase,
    torch._C._autograd,
    torch.autograd,
    torch.autograd.graph,
    torch.autograd.function,
    torch.autograd.Function,
    torch.autograd.Variable,
    torch.utils.checkpoint,
    torch.nn.Module,
]


def thread_state() -> dict[str, Any]:
    """What this thread has switched on: modes, hooks, grad mode, dispatch keys."""
    return {
        "modes": [id(m) for m in _get_current_dispatch_mode_stack()],
        "hooks": list(saved.hooks.pairs),
        "disabled": saved.hooks.disabled,
        "ignored": saved.hooks.ignored,
        "recording": sg.recording(),
        "native hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "native disabled": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly": torch.is_anomaly_enabled(),
        "keys": str(torch._C._dispatch_tls_local_exclude_set())
        + str(torch._C._dispatch_tls_local_include_set()),
    }


def names_bound() -> dict[tuple[Any, str], int]:
    """Every name of PyTorch's that recording may bind, and the identity of what it stands for."""
    return {
        (owner, name): id(value)
        for owner in _OWNERS
        for name, value in vars(owner).items()
        if name not in ("__slotnames__", "__warningregistry__")  # caches that others leave
    }


@contextmanager
def leaves_nothing_behind() -> Iterator[None]:
    """Fail if what happens within leaves this thread, or PyTorch's names, other than before."""
    before, bound = thread_state(), names_bound()
    yield
    now, now_bound = thread_state(), names_bound()
    names = [k for k in now_bound.keys() | bound.keys() if now_bound.get(k) != bound.get(k)]
    left = [f"{owner.__name__}.{name}" for owner, name in names]
    left += [
        f"{what}: {now[what]}, was {before[what]}" for what in now if now[what] != before[what]
    ]
    assert not left, left


def backward_works() -> None:
    """A fresh recording and backward give the right gradient."""
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    with sg.record():
        (x * x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4.0, 6.0]


def in_thread(fn: Callable[[], Any]) -> Any:
    """What `fn()` returns in a thread of its own; what it raises is raised here."""
    return in_threads([fn])[0]


def in_threads(fns: list[Callable[[], Any]]) -> list[Any]:
    """As `in_thread`, for several at once, which start together."""
    results: list[Any] = [None] * len(fns)
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(fns))

    def work(i: int) -> None:
        try:
            barrier.wait()
            results[i] = fns[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(fns))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


def live_tensors() -> list[Tensor]:
    """Every tensor that Python knows of."""
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
