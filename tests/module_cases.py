"""Compare gradients with PyTorch's on samples of its own database of modules (ModuleInfo).

One check runs one module on one input under PyTorch's autograd and under `record()`, with the same
random state, and compares results, buffers, and the gradients of inputs and parameters.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

import stowgrad as sg
from stowgrad.context import current_recorder
from stowgrad.ops import Kind, entry_of
from tests.opinfo_cases import Outcome

TOLERANCE = 1e-9  # of the largest element of what is compared


def name(info: Any) -> str:
    return str(info.name)


def modes(info: Any) -> tuple[bool, ...]:
    """Train, and eval where that differs."""
    return (True, False) if info.train_and_eval_differ else (True,)


def _run(info: Any, sample: Any, training: bool) -> tuple[dict[str, Any], int]:
    """Everything to compare, by name, by whichever autograd is in force; how many gradients."""
    torch.manual_seed(5)
    made = sample.constructor_input
    module = info.module_cls(*made.args, **made.kwargs).to(torch.float64).train(training)
    given = sample.forward_input
    fresh: dict[int, Tensor] = {}

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in fresh:
            fresh[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return fresh[id(x)]

    args, kwargs = tree_map(leaf, (tuple(given.args), dict(given.kwargs)))
    out = module(*args, **kwargs)
    found: dict[str, Any] = {}
    for i, t in enumerate(t for t in tree_leaves(out) if isinstance(t, Tensor)):
        found[f"result {i}"] = t
    outs = [t for t in found.values() if t.requires_grad]
    leaves = {f"input {i}": t for i, t in enumerate(fresh.values()) if t.requires_grad}
    leaves.update((n, p) for n, p in module.named_parameters() if p.requires_grad)
    found.update(module.named_buffers())
    if not outs:
        return found, 0
    torch.manual_seed(6)
    seeds = [torch.randn(o.shape, dtype=o.dtype) for o in outs]
    grads = torch.autograd.grad(outs, list(leaves.values()), seeds, allow_unused=True)
    found.update((f"gradient of {n}", g) for n, g in zip(leaves, grads, strict=True))
    return found, len(leaves)


def check(info: Any, sample: Any, training: bool) -> Outcome:
    """How stowgrad differentiates this module on this input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, gradients = _run(info, sample, training)
        except Exception as error:  # the reference cannot do it either
            return Outcome("skip", f"reference: {type(error).__name__}: {error}"[:200])
        fallbacks: set[str] = set()
        try:
            with sg.record():
                ops = current_recorder().ops = {}
                actual, _ = _run(info, sample, training)
                fallbacks = {str(f) for f in ops if entry_of(f).kind is Kind.FALLBACK}
        except Exception as error:
            return Outcome("error", f"{type(error).__name__}: {error}"[:300], fallbacks)
    if expected.keys() != actual.keys():
        return Outcome("wrong", f"{sorted(actual)} for {sorted(expected)}", fallbacks)
    for key, value in expected.items():
        got = actual[key]
        if value is None or got is None:
            if value is not got:
                return Outcome("wrong", f"{key}: {value is None=} {got is None=}", fallbacks)
            continue
        size = value.detach().abs().nan_to_num(0, 0).max().item() if value.numel() else 0.0
        try:
            assert_close(
                got.detach(), value.detach(), rtol=0, atol=TOLERANCE * size, equal_nan=True
            )
        except AssertionError as error:
            return Outcome("wrong", f"{key}: {error}"[:300], fallbacks)
    if not gradients:
        return Outcome("skip", "no gradient", fallbacks)
    return Outcome("fallback" if fallbacks else "rule", "", fallbacks)


_RANK = {"skip": 0, "rule": 1, "fallback": 2, "wrong": 3, "error": 4}


def check_module(info: Any, training: bool) -> Outcome:
    """The worst outcome over all inputs that the database has for `info`."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
        )
    worst = Outcome("skip", "no inputs")
    for sample in samples:
        outcome = check(info, sample, training)
        outcome.fallbacks |= worst.fallbacks
        if _RANK[outcome.verdict] >= _RANK[worst.verdict]:
            worst = outcome
        worst.fallbacks |= outcome.fallbacks
    return worst


__all__ = ["Outcome", "check", "check_module", "modes", "module_db", "name"]
