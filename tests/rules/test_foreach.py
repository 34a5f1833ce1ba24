"""Ops on lists of tensors: gradients as of the single ops, in lists that mix all kinds."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
)
from torch.utils._pytree import tree_leaves

import stowgrad as sg
from stowgrad.ops import Kind, entry_of
from tests.opinfo_cases import check
from tests.parity import same
from tests.rules.agree import agree, gradients, matrix

OPS = [
    op
    for op in itertools.chain(
        foreach_unary_op_db, foreach_binary_op_db, foreach_pointwise_op_db, foreach_reduce_op_db,
        foreach_other_op_db,
    )
    if op.supports_autograd
]  # fmt: skip


def in_place(op):
    def fn(tensors, *args, **kwargs):
        copies = [t.clone() for t in tensors]
        op.inplace_variant(copies, *args, **kwargs)
        return copies

    return fn


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_op_database(op):
    """All overloads, some samples of each kind, both forms; by rule wherever PyTorch has a word."""
    found = op.sample_inputs("cpu", torch.float64, requires_grad=True)
    seen = set()
    for sample in found:
        kind = (tuple(type(a).__name__ for a in sample.args), tuple(sample.kwargs))
        if kind in seen or len(sample.input) < 2:
            continue
        seen.add(kind)
        forms = [op.method_variant, in_place(op) if op.inplace_variant is not None else None]
        for fn in filter(None, forms):
            for second in (False, True):
                outcome = check(op, sample, torch.float64, second=second, fn=fn)
                bools = second and kind[0] == ("bool",)  # PyTorch cuts the graph of x ** True
                assert outcome.verdict in ("rule", "skip") or bools, (kind, second, outcome)
    assert seen


def mixed(fn):
    """`fn` of a list with a tracked tensor, an untracked one, a view and a leaf."""

    def call(x):
        y = x * 2
        return fn([x[0] * 1, torch.ones(6, dtype=x.dtype), y[1], x[2:, :3].reshape(-1)]), y

    return lambda x: tree_leaves(call(x))


def changed(name, *args):
    def fn(tensors):
        getattr(torch, name)(tensors, *args)
        return tensors

    return fn


SCALARS = [1.0, -2.0, 0.5, 3.0]
MIXED = {
    "add of a number": lambda ts: torch._foreach_add(ts, 2.0),
    "sub, alpha": lambda ts: torch._foreach_sub(ts, ts[::-1], alpha=3),
    "pow of a number": lambda ts: torch._foreach_pow(2.0, ts),
    "norm": lambda ts: torch._foreach_norm(ts, 3),
    "maximum with ties": lambda ts: torch._foreach_maximum(ts, [1.0, 1.0, ts[2][0].item(), 0.0]),
    "lerp": lambda ts: torch._foreach_lerp(ts, ts[::-1], 0.3),
    "mul_": changed("_foreach_mul_", SCALARS),
    "sin_": changed("_foreach_sin_"),
    "exp_": changed("_foreach_exp_"),
    "zero_": changed("_foreach_zero_"),
    "clamp_max_": changed("_foreach_clamp_max_", 0.3),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_lists_that_mix_tracked_untracked_and_views(case):
    agree(mixed(MIXED[case]), matrix(), order=2)


# where PyTorch has no derivative, it is that of the loop: name -> op on the list, on one tensor
LOOPS = {
    "mul by a tensor": (
        lambda ts: torch._foreach_mul(ts, ts[0][0]),
        lambda ts: [t * ts[0][0] for t in ts],
    ),
    "addcmul, numbers in a tensor": (
        lambda ts: torch._foreach_addcmul(ts, ts[::-1], ts, torch.tensor(SCALARS)),
        lambda ts: [torch.addcmul(t, u, t, value=v)
                    for t, u, v in zip(ts, ts[::-1], SCALARS, strict=True)],
    ),
    "minimum_": (
        changed("_foreach_minimum_", 0.3),
        lambda ts: [t.copy_(torch.minimum(t.clone(), torch.tensor(0.3))) for t in ts],
    ),
    "copy_": (
        lambda ts: changed("_foreach_copy_", ts)([torch.zeros_like(t) for t in ts]),
        lambda ts: [torch.zeros_like(t).copy_(t) for t in ts],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOOPS)
def test_where_pytorch_has_no_derivative_it_is_that_of_the_loop(case):
    lists, loop = LOOPS[case]
    expected = gradients(mixed(loop), matrix())
    with sg.record():
        got = gradients(mixed(lists), matrix())
    assert_close(got, expected)


def test_a_leaf_in_the_list_cannot_be_changed():
    with sg.record():
        x = matrix().requires_grad_()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            torch._foreach_add_([torch.ones(2), x], 1.0)


def test_nothing_is_changed_if_one_of_the_list_cannot_be():
    with sg.record():
        first, x = torch.ones(2), matrix().requires_grad_()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            torch._foreach_mul_([first, x], [x[0, 0], x])
    assert first._version == 0


def test_all_results_need_gradients_if_one_does():
    def step():
        x, w = matrix(), matrix().requires_grad_()
        a, b = torch._foreach_sin([x, w])
        (c,) = torch._foreach_sin([x])
        found = torch.autograd.grad([a, b], [w], [x, x])
        return [t.requires_grad for t in (a, b, c)] + [a.grad_fn is None, *found]

    same(step)


def test_what_saves_nothing_can_run_backward_twice():
    def step():
        x = matrix().requires_grad_()
        (y,) = torch._foreach_lerp([x], [x], 0.3)
        y.sum().backward()
        y.sum().backward()
        return x.grad

    same(step)


def test_without_grad_the_fused_kernel_runs():
    with sg.record():
        x = matrix().requires_grad_()
        with torch.no_grad():
            torch._foreach_mul_([x], 2.0)
    assert_close(x.detach(), matrix() * 2)
    assert x.grad_fn is None


def test_no_op_on_lists_falls_back():
    aten = torch.ops.aten
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    for name in sorted(n for n in names if n.startswith("_foreach_") and hasattr(aten, n)):
        packet = getattr(aten, name)
        for overload in packet.overloads():
            if "out" not in overload:
                assert entry_of(getattr(packet, overload)).kind is Kind.SPECIAL, (name, overload)
