"""Checkpointing: PyTorch's, run as it is on our engine, and stowgrad's own."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import stowgrad as sg
from tests.helpers import LiveBytes
from tests.parity import both_raise, same


def leaf(*shape):
    return torch.randn(*shape or (3,), dtype=torch.float64, requires_grad=True)


def mlp():
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(4, 2)).double()


def gradients(model, *more):
    return [p.grad for p in model.parameters()], [t.grad for t in more]


# -- PyTorch's own, on our engine


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_pytorchs_checkpoint(reentrant, early_stop):
    def run():
        model, x = mlp(), leaf(3, 4)
        with set_checkpoint_early_stop(early_stop):
            y = checkpoint(model, x, use_reentrant=reentrant)
        (y**2).sum().backward()
        return y, *gradients(model, x)

    same(run)


def test_pytorchs_checkpoint_keeps_only_the_inputs():
    def run():
        packed = []
        model, x = mlp(), leaf(3, 4)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (packed.append(tuple(t.shape)), t.detach())[1], lambda t: t
        ):
            y = checkpoint(model, x, use_reentrant=False)
        y.sum().backward()
        return packed, x.grad

    same(run)


def test_pytorchs_nested_checkpoints():
    def run():
        calls = []

        def inner(x):
            calls.append("inner")
            return x.sin().exp()

        def outer(x):
            calls.append("outer")
            return checkpoint(inner, checkpoint(inner, x, use_reentrant=False), use_reentrant=False)

        x = leaf()
        checkpoint(outer, x, use_reentrant=False).sum().backward()
        return calls, x.grad

    same(run)


def test_pytorchs_checkpoint_runs_backward_again_with_retain_graph():
    def run():
        calls = []
        x = leaf()
        y = checkpoint(lambda x: (calls.append(1), x.sin().exp().cos())[1], x, use_reentrant=False)
        y.sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=True)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g**2).sum(), x)
        return len(calls), x.grad, g, h

    same(run)


def test_pytorchs_checkpoint_sequential():
    def run():
        model, x = mlp(), leaf(3, 4)
        checkpoint_sequential(model, 3, x, use_reentrant=False).sum().backward()
        return gradients(model, x)

    same(run)


def test_pytorchs_checkpoint_sees_a_mismatch():
    def run(change):
        count = []

        def fn(x):
            count.append(1)
            return change(x, len(count))

        x = leaf(4)
        checkpoint(fn, x, use_reentrant=False).sum().backward()

    def fewer(x, n):
        return x.sin() * x if n == 1 else x.sin()

    def other_shape(x, n):
        return (x * x).exp() if n == 1 else (x[:2] * x[:2]).exp()

    both_raise(lambda: run(fewer), "A different number of tensors was saved")
    both_raise(lambda: run(other_shape), "have different metadata")


@pytest.mark.parametrize("preserve", [True, False])
def test_pytorchs_checkpoint_and_random_state(preserve):
    def run():
        x = torch.ones(100, dtype=torch.float64, requires_grad=True)
        drop = nn.Dropout(0.5)
        y = checkpoint(
            lambda x: (drop(x.sin() * 2)).exp(), x, use_reentrant=False, preserve_rng_state=preserve
        )
        y.sum().backward()
        after = torch.rand(3)
        return y, x.grad, after

    same(run)


def test_pytorchs_checkpoint_with_keywords_and_other_arguments():
    def run():
        def fn(x, k, *, w, flag=False):
            return {"out": (x * k * w).sin() if flag else x}, "text"

        x, w = leaf(), leaf()
        out, text = checkpoint(fn, x, 2, w=w, flag=True, use_reentrant=False)
        out["out"].sum().backward()
        return x.grad, w.grad, text

    same(run)


OPS = [torch.ops.aten.sin.default, torch.ops.aten.mm.default]


def prefers_sin(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in OPS else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [prefers_sin, OPS], ids=["function", "list"])
def test_selective_checkpointing(policy):
    def run():
        ran = []

        class Count(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func in OPS or func is torch.ops.aten.exp.default:
                    ran.append(str(func))
                return func(*args, **(kwargs or {}))

        x, w = leaf(3, 3), leaf(3, 3)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        with Count():
            y = checkpoint(
                lambda x, w: (x.sin().mm(w)).exp().mm(w.cos()), x, w,
                use_reentrant=False, context_fn=contexts,
            )  # fmt: skip
        forward = len(ran)
        with Count():
            y.sum().backward()
        recomputed = [n for n in ran[forward:] if "exp" in n]
        return y, x.grad, w.grad, ran[:forward], recomputed

    same(run)


def test_context_fn_is_entered_both_times():
    def run():
        seen = []

        @contextlib.contextmanager
        def note(name):
            seen.append(name)
            yield
            seen.append(f"{name} ends")

        x = leaf()
        y = checkpoint(
            lambda x: x.sin().exp(), x, use_reentrant=False,
            context_fn=lambda: (note("first"), note("again")),
        )  # fmt: skip
        y.sum().backward()
        return seen, x.grad

    same(run)


def test_pytorchs_checkpoint_under_autocast():
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        x = torch.randn(3, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model[2](checkpoint(lambda x: model(model(x)), x, use_reentrant=False))
        y.float().sum().backward()
        return y.dtype, gradients(model, x)

    same(run)


def test_pytorchs_debug_mode_lists_the_ops():
    def run():
        count = []

        def fn(x):
            count.append(1)
            return x.sin() * x if len(count) == 1 else x.sin().exp().cos() * x

        checkpoint(fn, leaf(), use_reentrant=False, debug=True, early_stop=False).sum().backward()

    both_raise(run, "Operations executed during the original forward")


def test_reentrant_checkpoint_refuses_partial_backward():
    def run():
        x = leaf()
        torch.autograd.grad(checkpoint(torch.sin, x, use_reentrant=True).sum(), x)

    both_raise(run, "incompatible")
