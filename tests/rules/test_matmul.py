"""Gradients of matrix products: every rank, memory order, what is saved, and how it is counted."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import stowgrad as sg
from stowgrad.context import current_recorder
from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, matrix, saved_by


def operand(x, shape):
    return x.flatten().repeat(6)[: torch.Size(shape).numel()].reshape(shape).sin()


SHAPES = [(4,), (4, 4), (3, 4, 4), (1, 4, 4), (2, 3, 4, 4), (2, 1, 4, 4), (1, 4), (4, 1, 4)]


@pytest.mark.parametrize(("left", "right"), list(itertools.product(SHAPES, SHAPES)))
def test_matmul_of_every_pair_of_ranks(left, right):
    try:
        torch.empty(left) @ torch.empty(right)
    except RuntimeError:
        pytest.skip("these do not multiply")
    agree(lambda x: operand(x, left) @ operand(x + 1, right), matrix(), order=2)


PRODUCTS = {
    "mm": lambda x: [torch.mm(x, x.t()), torch.mm(x.t(), x)],
    "mv, dot, vdot": lambda x: [torch.mv(x, x[0]), torch.dot(x[0], x[1]), torch.vdot(x[0], x[1])],
    "outer": lambda x: [torch.outer(x[0], x[1]), torch.ger(x[0], x[:, 1])],
    "addmm": lambda x: [torch.addmm(x[:, 0], x, x.t(), beta=2, alpha=3), x @ x.t() + x[0, 0]],
    "addmm of a row": lambda x: torch.addmm(x[:1, :4], x, x.t(), beta=0.5),
    "addmm in place": lambda x: (x[:, :4] * 2).addmm_(x, x.t(), alpha=0.5),
    "addmv": lambda x: [torch.addmv(x[:, 0], x, x[0], alpha=2), torch.addmv(x[0, 0], x, x[1])],
    "addr": lambda x: [torch.addr(x, x[:, 0], x[1], beta=2, alpha=3), torch.addr(x[0], x[0], x[1])],
    "baddbmm": lambda x: torch.baddbmm(x[:, 0], x[None].repeat(2, 1, 1), x.t().expand(2, 6, 4)),
    "addbmm": lambda x: torch.addbmm(x[:, :4], x.expand(3, 4, 6), x.t().expand(3, 6, 4), alpha=2),
    "linear": lambda x: [
        F.linear(x, x[:3], x[0, :3]), F.linear(x.reshape(2, 2, 6), x, x[:, 0]),
        F.linear(x[0], x, x[:, 0]), F.linear(x, x), F.linear(x, x[0]), F.linear(x[1], x[0]),
        F.linear(x, x, x[0, :1]),
    ],
    "bilinear": lambda x: F.bilinear(x[:, :3], x[:, 3:], operand(x, (5, 3, 3)), operand(x, (5,))),
    "einsum": lambda x: [
        torch.einsum("ij,kj,kl->il", x, x, x), torch.einsum("...i,...i->...", x, x + 1),
        torch.einsum("ii->i", x[:4, :4]), torch.einsum("ij,j->", x, x[0]),
    ],
    "tensordot, inner, kron": lambda x: [
        torch.tensordot(x, x, ([1], [1])), torch.inner(x, x[:2]), torch.kron(x[:2], x[:, :2]),
    ],
    "multi_dot, chain": lambda x: torch.linalg.multi_dot([x, x.mT, x, x[0]]),
    "conjugated": lambda x: [x.conj() @ x.mT, F.linear(x, x.conj()), x.mH @ x.resolve_conj()],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("case", PRODUCTS)
def test_first_and_second_derivatives_equal_pytorchs(case, dtype):
    if case == "bilinear" and dtype.is_complex:
        pytest.skip("the reference has no complex bilinear")
    agree(PRODUCTS[case], matrix(dtype=dtype), order=2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.linear(x.reshape(2, 2, 6), x, x[:, 0]),
        lambda x: x.reshape(2, 2, 6) @ operand(x, (3, 1, 6, 5)),
        lambda x: torch.addmm(x[:, 0], x, x.mT, alpha=2, beta=3),
        lambda x: torch.einsum("ij,kj,kl->il", x, x, x),
    ],
)
def test_a_batch_of_gradients(fn):
    batched(fn, matrix())


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: torch.mm(x, w),
        lambda x, w: x @ w,
        lambda x, w: x.expand(3, 4, 6) @ w,
        lambda x, w: torch.addmm(x[0, :1], x, w),
        lambda x, w: F.linear(x, w.t()),
    ],
)
def test_the_gradient_of_a_transposed_weight_lies_as_the_weight_does(fn):
    """W.t() is column-major; a row-major gradient of it would be a copy away from W's."""
    weight = torch.randn(5, 6).t()
    assert not weight.is_contiguous()
    with sg.record():
        weight.requires_grad_()
        out = fn(matrix().float(), weight)
        (g,) = torch.autograd.grad(out, weight, torch.randn_like(out))
    assert g.stride() == weight.stride()


def test_linear_is_one_op_that_saves_its_input_and_weight():
    x, w, b = matrix(), torch.randn(3, 6).double(), torch.randn(3).double()
    for z in (x, x.reshape(2, 2, 6)):
        with sg.record():
            current_recorder().ops = {}
            F.linear(z.clone().requires_grad_(), w.requires_grad_(), b.requires_grad_()).sum()
            assert torch.ops.aten.linear.default in current_recorder().ops
            assert not any("addmm" in str(op) for op in current_recorder().ops)
        assert len(saved_by(lambda x: F.linear(x, w, b), z)) == 2  # input and weight
        w.requires_grad_(False)
        assert [t.shape for t in saved_by(lambda x: F.linear(x, w, b), z)] == [w.shape]


def test_a_broadcast_matmul_saves_no_copy():
    """PyTorch's parts save the operands expanded to the batch and copied."""
    x, w = torch.randn(8, 1, 4, 6), torch.randn(5, 6, 3, requires_grad=True)
    saved = saved_by(lambda x: x @ w, x)
    assert sorted(t.numel() for t in saved) == sorted([x.numel(), w.numel()])


def test_a_frozen_weight_saves_no_input():
    w = torch.randn(6, 3).double()
    assert len(saved_by(lambda x: x @ w, matrix())) == 1
    assert len(saved_by(lambda x: torch.mm(x, w), matrix())) == 1


def test_empty_operands():
    agree(lambda x: [x[:0] @ x.t(), x[:, :0] @ x.t()[:0], torch.mv(x[:0], x[0])], matrix(), 2)


def test_grouped_products():
    ends = torch.tensor([8, 24, 32], dtype=torch.int32)
    for left, right in [((32, 16), (3, 16, 24)), ((3, 16, 16), (16, 32)), ((16, 32), (32, 16))]:

        def both(left=left, right=right):
            torch.manual_seed(0)
            a = torch.randn(left, dtype=torch.bfloat16, requires_grad=True)
            b = torch.randn(right, dtype=torch.bfloat16, requires_grad=True)
            out = torch._grouped_mm(a, b, ends)
            return torch.autograd.grad(out, [a, b], torch.randn_like(out))

        expected = both()
        with sg.record():
            assert_close(both(), expected)


@pytest.mark.parametrize("gelu", [False, True])
def test_addmm_with_activation(gelu):
    """Beyond PyTorch, which has no derivative of the fused kernel."""

    def parts(x):
        y = torch.addmm(x[0, :4], x, x.t(), beta=0.5)
        return F.gelu(y) if gelu else F.relu(y)

    def fused(x):
        return torch._addmm_activation(x[0, :4], x, x.t(), beta=0.5, use_gelu=gelu)

    with sg.record():
        x = matrix().requires_grad_()
        seed = torch.randn(4, 4).double()
        assert_close(*(torch.autograd.grad(f(x), x, seed) for f in (fused, parts)))


OPS = """addbmm addmm addmv addr baddbmm bmm dot einsum inner kron linalg.multi_dot linalg.vecdot
matmul mm mv nn.functional.bilinear nn.functional.linear outer tensordot vdot""".split()


@pytest.mark.parametrize("name", OPS)
def test_op_database(name):
    assert_by_rule(name, torch.float64, limit=3)


@pytest.mark.parametrize("name", ["addmm", "addr", "baddbmm", "einsum", "matmul", "vdot"])
def test_op_database_complex(name):
    assert_by_rule(name, torch.complex128, limit=3)
