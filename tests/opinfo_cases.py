"""Compare gradients with PyTorch's on samples of its own operator database (OpInfo).

One `check` runs one sample under PyTorch's autograd and under `record()`, in the same process with
the same random state, and says how stowgrad got its gradient: by its own rules, by the fallback,
or not at all. Used by tools/opinfo.py (the whole database) and by the tests of the rule families.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import stowgrad as sg
from stowgrad.context import current_recorder
from stowgrad.ops import Kind, entry_of

TOLERANCE = {
    torch.float64: (1e-7, 1e-8),
    torch.complex128: (1e-7, 1e-8),
    torch.float32: (2e-4, 1e-4),
    torch.bfloat16: (2e-2, 2e-2),
}


@dataclass
class Outcome:
    """`verdict`: "rule", "fallback", "wrong", "error", or "skip" (the reference has none)."""

    verdict: str
    detail: str = ""
    fallbacks: set[str] = field(default_factory=set)


def full_name(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def differentiable_ops(dtype: torch.dtype) -> list[Any]:
    return [op for op in op_db if op.supports_autograd and dtype in op.supported_dtypes("cpu")]


def samples(op: Any, dtype: torch.dtype, limit: int) -> Iterator[Any]:
    """Up to `limit` samples that need a gradient somewhere, spread over those there are."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [
            s
            for s in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=True), 200)
            if any(t.requires_grad for t in _tensors((s.input, s.args, s.kwargs)))
        ]
    step = max(1, len(found) // limit)
    yield from found[::step][:limit]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _fresh(sample: Any) -> tuple[Any, list[Tensor]]:
    """A copy of the sample's inputs with leaves of its own, and those that need gradients."""
    made: dict[int, Tensor] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return made[id(x)]

    tree = tree_map(copy, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    return tree, [t for t in made.values() if t.requires_grad]


def gradients(
    fn: Callable[..., Any], sample: Any, second: bool, seed: int
) -> tuple[list[Any], list[Any]]:
    """Results and gradients of `fn` on `sample`, by whichever autograd is in force.

    The loss pairs every differentiable result with a random cotangent. With `second`, the first
    gradients are paired with random cotangents again and differentiated once more, with respect
    to the inputs and the first cotangents.
    """
    (x, args, kwargs), leaves = _fresh(sample)
    torch.manual_seed(seed)
    out = fn(x, *args, **kwargs)
    if sample.output_process_fn_grad is not None:
        out = sample.output_process_fn_grad(out)
    outs = [o for o in _tensors(out) if o.requires_grad]
    if not outs:
        return [o.detach() for o in _tensors(out)], []
    torch.manual_seed(seed + 1)
    seeds = [torch.randn_like(o.detach()).requires_grad_(second) for o in outs]
    first = torch.autograd.grad(outs, leaves, seeds, create_graph=second, allow_unused=True)
    values = [o.detach() for o in _tensors(out)]
    if not second:
        return values, [_plain(g) for g in first]
    some = [g for g in first if g is not None and g.requires_grad]
    if not some:
        return values, [_plain(g) for g in first]
    # not randn_like, which fills in the order of g's strides, and these may differ
    again = [torch.randn(g.shape, dtype=g.dtype, device=g.device) for g in some]
    last = torch.autograd.grad(some, [*leaves, *seeds], again, allow_unused=True)
    return values, [_plain(g) for g in [*first, *last]]


def _plain(g: Any) -> Any:
    return None if g is None else g.detach()


def check(
    op: Any, sample: Any, dtype: torch.dtype, *, second: bool = False, fn: Any = None
) -> Outcome:
    """How stowgrad differentiates `op` (or `fn`, a variant of it) on this sample."""
    fn = fn or op.op
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            values, expected = gradients(fn, sample, second, 7)
        except Exception as error:  # the reference has no derivative here
            return Outcome("skip", f"reference: {type(error).__name__}: {error}"[:200])
        if not expected or (second and all(g is None for g in expected)):
            return Outcome("skip", "reference: no gradient")
        fallbacks: set[str] = set()
        try:
            with sg.record():
                recorder = current_recorder()
                recorder.ops = {}
                got_values, got = gradients(fn, sample, second, 7)
                fallbacks = {
                    str(f) for f in recorder.ops if entry_of(f).kind is Kind.FALLBACK
                }
        except Exception as error:
            return Outcome("error", f"{type(error).__name__}: {error}"[:300], fallbacks)
    rtol, atol = TOLERANCE[dtype]
    try:
        for a, b in zip(got_values, values, strict=True):
            assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
    except (AssertionError, ValueError) as error:
        return Outcome("wrong", f"value: {error}"[:300], fallbacks)
    if len(got) != len(expected):
        return Outcome("wrong", f"{len(got)} gradients for {len(expected)}", fallbacks)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a is None and b is None:
            continue
        if a is None or b is None:
            other = b if a is None else a
            if not bool((other == 0).all()):  # None and zero mean the same
                return Outcome("wrong", f"gradient {i}: {a is None=} {b is None=}", fallbacks)
            continue
        try:  # an input may be less precise than the sample's dtype
            rtol, atol = max(TOLERANCE[dtype], TOLERANCE.get(b.dtype, (0.0, 0.0)))
            assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return Outcome("wrong", f"gradient {i}: {error}"[:300], fallbacks)
    return Outcome("fallback" if fallbacks else "rule", "", fallbacks)


_RANK = {"skip": 0, "rule": 1, "fallback": 2, "wrong": 3, "error": 4}


def check_op(op: Any, dtype: torch.dtype, *, limit: int = 10, second: bool = False) -> Outcome:
    """The worst outcome over up to `limit` samples of `op`."""
    worst = Outcome("skip", "no sample needs a gradient")
    for sample in samples(op, dtype, limit):
        outcome = check(op, sample, dtype, second=second)
        outcome.fallbacks |= worst.fallbacks
        if _RANK[outcome.verdict] > _RANK[worst.verdict] or worst.verdict == "skip":
            worst = outcome
        else:
            worst.fallbacks |= outcome.fallbacks
    return worst


def find(name: str) -> Any:
    """The OpInfo with this full name, e.g. "linalg.svd" or "nn.functional.pad.reflect"."""
    for op in op_db:
        if full_name(op) == name:
            return op
    raise KeyError(name)


def assert_by_rule(name: str, dtype: torch.dtype, *, limit: int = 4, second: bool = True) -> None:
    """Fail unless our own rules give the reference's gradients for the op called `name`."""
    for order in (False, True) if second else (False,):
        outcome = check_op(find(name), dtype, limit=limit, second=order)
        assert outcome.verdict in ("rule", "skip"), (
            f"{name} ({'second' if order else 'first'} order, {dtype}): {outcome.verdict} "
            f"{outcome.detail} {sorted(outcome.fallbacks)}"
        )
        if not order:
            assert outcome.verdict == "rule", f"{name}: the reference gave nothing to compare"


__all__ = [
    "Outcome", "assert_by_rule", "check", "check_op", "differentiable_ops", "find", "full_name",
    "samples", "tree_flatten", "tree_unflatten",
]  # fmt: skip
