"""Policies: who decides, for each saved tensor, what stays in memory between forward and backward.

A policy is told about a tensor that is being saved (SavedInfo: op and argument, shape, dtype and
bytes; whether it is a parameter, a view, an alias of something packed; the line of code, the
module), and answers with a choice or with None, which leaves it to the next. A choice is a pair
(pack, unpack).

    sg.stow(Rematerialise(), Compress(), ToDisk("/scratch").where(min_bytes=1 << 20))

asks the three in this order for every tensor saved inside, and keeps what none of them takes.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    ContextDecorator,
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import _private
from ..errors import StowgradError
from ..graph import locate
from ..record import user_location
from ..saved import HookPair, SavedInfo, hooks, is_parameter, prefetch_of, push_hooks, tell
from .modules import Watching, intercepting, module_path
from .regions import Geometry, Packed, storages


class Choice(Protocol):
    """What a policy answers: a pair. `pack` is called with the tensor, or, if it has a true
    attribute `wants_info`, with the SavedInfo and the tensor."""

    @property
    def pack(self) -> Callable[..., Any]: ...

    @property
    def unpack(self) -> Callable[[Any], Tensor]: ...


class Policy:
    """Decides for saved tensors. Subclasses say how, in `choose`."""

    needs_engine = False  # cannot answer without what only stowgrad's recorder knows

    def choose(self, info: SavedInfo, tensor: Tensor) -> Choice | None:
        """Who packs `tensor`; None: not this policy. It may look at the tensor and not keep it."""
        raise NotImplementedError

    def entered(self) -> AbstractContextManager[Any]:
        """A context for the length of `stow(...)` with this policy in it."""
        return nullcontext()

    def where(
        self,
        condition: Callable[[SavedInfo], bool] | None = None,
        *,
        op: str | Iterable[str] | None = None,
        name: str | Iterable[str] | None = None,
        module: str | Iterable[str] | None = None,
        dtype: torch.dtype | Iterable[torch.dtype] | None = None,
        min_bytes: int = 0,
        max_bytes: int | None = None,
    ) -> Policy:
        """This policy for some saved tensors only: those for which everything given holds.

        `op`, `name`, `module`: glob patterns for the op ("aten.gelu", "*norm*"), for its argument
        or result ("self", "mask"), and for the path of the module that was running
        ("blocks.*.mlp"). `dtype`: one or several. `min_bytes`, `max_bytes`: of the tensor,
        inclusive. `condition`: a function of its SavedInfo.
        """
        tests: list[Callable[[SavedInfo], bool]] = []
        for key, patterns in (("op", op), ("name", name), ("module", module)):
            if patterns is not None:
                tests.append(_matcher(key, patterns))
        if dtype is not None:
            dtypes = {dtype} if isinstance(dtype, torch.dtype) else set(dtype)
            tests.append(lambda info: info.dtype in dtypes)
        if min_bytes or max_bytes is not None:
            most = float("inf") if max_bytes is None else max_bytes
            tests.append(lambda info: min_bytes <= info.nbytes <= most)
        if condition is not None:
            tests.append(condition)
        return _Where(self, tests, needs_engine=op is not None or name is not None)

    def __or__(self, other: Any) -> Policy:
        """This policy and, where it has no answer, the other."""
        return FirstOf(self, other)

    def torch_hooks(self) -> AbstractContextManager[Any]:
        """This policy as saved-tensor hooks of PyTorch's own autograd, without `record()`.

        PyTorch does not say which op saves a tensor: a policy that needs to know raises
        StowgradError.
        """
        return _torch_hooks(self)


def as_policy(value: Any) -> Policy:
    """A policy; a function of SavedInfo that answers with one, or with None; or a pair."""
    if isinstance(value, Policy):
        return value
    if hasattr(value, "pack") and hasattr(value, "unpack"):
        return Pair(value.pack, value.unpack)
    if isinstance(value, tuple) and len(value) == 2:
        return Pair(*value)
    if callable(value):
        return _ByFunction(value)
    raise StowgradError(
        f"{value!r} is no policy: give a Policy, a pair (pack, unpack), or a function that is told "
        "a SavedInfo and returns one of them or None"
    )


class FirstOf(Policy):
    """Asks policies in order; the first that answers decides."""

    def __init__(self, *policies: Any) -> None:
        self.policies = [as_policy(p) for p in policies]
        self.needs_engine = any(p.needs_engine for p in self.policies)

    def choose(self, info: SavedInfo, tensor: Tensor) -> Choice | None:
        for policy in self.policies:
            choice = policy.choose(info, tensor)
            if choice is not None:
                return choice
        return None

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for policy in self.policies:
                stack.enter_context(policy.entered())
            yield


class _Where(Policy):
    def __init__(
        self, inner: Policy, tests: list[Callable[[SavedInfo], bool]], needs_engine: bool
    ) -> None:
        self.inner = inner
        self.tests = tests
        self.needs_engine = needs_engine or inner.needs_engine

    def choose(self, info: SavedInfo, tensor: Tensor) -> Choice | None:
        if all(test(info) for test in self.tests):
            return self.inner.choose(info, tensor)
        return None

    def entered(self) -> AbstractContextManager[Any]:
        return self.inner.entered()


class _ByFunction(Policy):
    def __init__(self, function: Callable[[SavedInfo], Any]) -> None:
        self.function = function

    def choose(self, info: SavedInfo, tensor: Tensor) -> Choice | None:
        answer = self.function(info)
        return None if answer is None else as_policy(answer).choose(info, tensor)


class Pair(Policy):
    """A pair of hooks as a policy: it takes everything it is asked about, tensor by tensor."""

    def __init__(self, pack: Callable[..., Any], unpack: Callable[[Any], Tensor]) -> None:
        self.pack = pack
        self.unpack = unpack

    def choose(self, info: SavedInfo, tensor: Tensor) -> Choice | None:
        return self


class Keep(Policy):
    """Everything stays where it is: for what no later policy shall take."""

    def choose(self, info: SavedInfo, tensor: Tensor) -> Choice | None:
        return _KEEP


_KEEP = HookPair(lambda tensor: tensor, lambda tensor: tensor)


class _ByPair:
    """What a pair's `pack` returned, where several pairs are mixed."""

    __slots__ = ("pair", "value")

    def __init__(self, pair: Choice, value: Any) -> None:
        self.pair = pair
        self.value = value


class stow(ContextDecorator):
    """Within: `policies` decide, in their order, what happens to each tensor saved for backward.

    A context manager and a decorator, around forward (or the whole step) inside `record()`. What no
    policy takes goes to the `stow` or the hooks around this one, if any, and else stays in memory.
    Parameters and buffers of the modules that are called, and a model's inputs that need no
    gradient, stay where they are: packing them frees nothing. `leave`: other modules and tensors
    to leave. May be entered again, nested, and used in several threads at once.

    `chosen`: how many tensors went to what (by class name), and how many bytes they have.
    """

    def __init__(self, *policies: Any, leave: Iterable[nn.Module | Tensor] = ()) -> None:
        from .place import Left

        self.policy = FirstOf(*policies)
        self.left = Left(leave)
        self.chosen: Counter[str] = Counter()
        self.chosen_bytes: Counter[str] = Counter()
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> stow:
        with ExitStack() as stack:
            stack.enter_context(self._policies_entered())
            outer = hooks.pairs[-1] if hooks.pairs else None
            mix = _Mix(self, outer)
            push_hooks(mix.pack, mix.unpack)
            stack.callback(_pop, mix)
            self._stacks.append(stack.pop_all())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stacks.pop().close()

    @contextmanager
    def _policies_entered(self) -> Iterator[None]:
        with intercepting(Watching(self.left)), self.policy.entered():
            yield


def _pop(mix: _Mix) -> None:
    """End the pair, and what was pushed inside and not popped since something raised there."""
    for depth, pair in enumerate(hooks.pairs):
        if getattr(pair.pack, "__self__", None) is mix:
            del hooks.pairs[depth:]
            return


class _Mix:
    """The pair that `stow` puts in force."""

    def __init__(self, session: stow, outer: HookPair | None) -> None:
        self.session = session
        self.outer = outer

    def pack(self, info: SavedInfo, tensor: Tensor) -> Any:
        session = self.session
        plain = tensor.layout is torch.strided and not _private.is_wrapped(tensor)
        if (plain and type(tensor) is Tensor) or isinstance(tensor, nn.Parameter):
            if info.is_parameter or tensor in session.left:
                return tensor
            known = storages.get(tensor)
            if known is not None:
                there = known.find(Geometry.of(tensor), tensor._version)
                if there is not None:
                    info = replace(info, alias_of=there.label)
        for policy in session.policy.policies:
            choice = policy.choose(info, tensor)
            if choice is None:
                continue
            if choice is _KEEP:
                return tensor
            packed = self._pack_by(choice, info, tensor)
            if packed is not None:
                name = type(choice).__name__
                session.chosen[name] += 1
                session.chosen_bytes[name] += info.nbytes
                return packed
        if self.outer is not None:
            return _ByPair(self.outer, tell(self.outer.pack, info, tensor))
        return tensor

    pack.wants_info = True  # type: ignore[attr-defined]

    def _pack_by(self, choice: Choice, info: SavedInfo, tensor: Tensor) -> Any:
        from .place import NoRoom, Place

        if isinstance(choice, Place):
            try:
                return choice.take(info, tensor)
            except NoRoom:
                return None
        return _ByPair(choice, tell(choice.pack, info, tensor))

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Packed):
            return packed.tensor()
        if isinstance(packed, _ByPair):
            return packed.pair.unpack(packed.value)
        result: Tensor = packed
        return result

    def prefetch(self, packed: Any) -> None:
        if isinstance(packed, Packed):
            packed.region.prefetch()
        elif isinstance(packed, _ByPair):
            ahead = prefetch_of(packed.pair.unpack)
            if ahead is not None:
                ahead(packed.value)


@contextmanager
def _torch_hooks(policy: Policy) -> Iterator[None]:
    if policy.needs_engine:
        raise StowgradError(
            "this policy asks which op saved a tensor, or runs ops again, and PyTorch's hooks do "
            "not say: use it as sg.stow(policy) inside sg.record()"
        )
    session = stow(policy)
    mix = _Mix(session, None)

    def pack(tensor: Tensor) -> Any:
        base = tensor._base
        info = SavedInfo(
            op="", name="", shape=tensor.shape, dtype=tensor.dtype, device=tensor.device,
            nbytes=tensor.numel() * tensor.element_size(), state="packed",
            is_output=False, is_leaf=tensor.is_leaf,
            view_of=base.shape if base is not None else None, storage=None,
            where=locate(user_location()), is_parameter=is_parameter(tensor), module=module_path(),
        )  # fmt: skip
        with torch.no_grad():
            return mix.pack(info, tensor)

    def unpack(packed: Any) -> Tensor:
        with torch.no_grad():
            return mix.unpack(packed)

    with session._policies_entered(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _matcher(key: str, patterns: str | Iterable[str]) -> Callable[[SavedInfo], bool]:
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)

    def matches(info: SavedInfo) -> bool:
        value = getattr(info, key)
        return any(fnmatch.fnmatchcase(value, p) for p in wanted)

    return matches
