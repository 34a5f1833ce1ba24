"""Scaled dot-product attention: PyTorch's choice of kernel, its values bit by bit, and twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import stowgrad as sg
from stowgrad.context import current_recorder
from tests.opinfo_cases import assert_by_rule
from tests.parity import same

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).double()},
    "bool mask": {"attn_mask": torch.arange(60).reshape(2, 1, 5, 6) % 7 > 0},
    "masked row": {"attn_mask": torch.arange(5).reshape(5, 1).expand(5, 6) > 0},
    "dropout": {"dropout_p": 0.3},
}


def inputs(key_heads=4, dtype=torch.float64):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 5, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, key_heads, 6, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize(
    "name",
    ["nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"],
)
def test_the_database_by_our_rules(name):
    assert_by_rule(name, torch.float64, limit=8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", _KINDS)
def test_values_and_gradients_are_pytorchs_bit_by_bit(kind, key_heads, dtype):
    options = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in _KINDS[kind].items()
    }

    def run():
        q, k, v = inputs(key_heads, dtype)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=key_heads < 4, **options)
        return out, torch.autograd.grad(out.sum(), (q, k, v))

    same(run)


def test_the_kernel_is_the_one_that_pytorch_chooses():
    q, k, v = inputs()
    mask = torch.zeros(5, 6, dtype=torch.float64, requires_grad=True)
    with sg.record():
        ops = current_recorder().ops = {}
        F.scaled_dot_product_attention(q, k, v)
        assert ops == {_flash: 1}
        ops.clear()
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # a mask to train: the math path
        assert _flash not in ops and torch.ops.aten._safe_softmax.default in ops


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("kind", [k for k in _KINDS if k != "dropout"])
def test_flash_attention_differentiates_twice(kind, key_heads):
    """PyTorch's own does not; the reference is its math path."""

    def run():
        q, k, v = inputs(key_heads)
        options = {"enable_gqa": key_heads < 4, **_KINDS[kind]}
        out = F.scaled_dot_product_attention(q, k, v, **options)
        cotangent = torch.randn(out.shape, dtype=out.dtype, requires_grad=True)
        first = torch.autograd.grad(out, (q, k, v), cotangent, create_graph=True)
        again = [torch.randn(g.shape, dtype=g.dtype) for g in first]
        second = torch.autograd.grad(first, (q, k, v, cotangent), again)
        return [g.detach() for g in (out, *first, *second)]

    with sdpa_kernel(SDPBackend.MATH):
        expected = run()
    with sg.record():
        actual = run()
    assert_close(actual, expected)


def test_flash_attention_saves_no_matrix_of_scores():
    kept = []
    q, k, v = (torch.randn(1, 2, 256, 8, requires_grad=True) for _ in range(3))
    with sg.record(), sg.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert sum(t.numel() for t in kept) == 4 * q.numel() + q.numel() // 8  # q, k, v, out, logsumexp


@pytest.mark.parametrize(
    "op",
    [
        lambda q, k, v, a: a._scaled_dot_product_flash_attention(q, k, v, 0.0, True),
        lambda q, k, v, a: a._scaled_dot_product_efficient_attention(q, k, v, None, True),
        lambda q, k, v, a: a._scaled_dot_product_cudnn_attention(q, k, v, None, True),
    ],
)
def test_kernels_of_other_devices_get_the_right_arguments(op):
    """Shapes alone, on the meta device; once and twice."""
    make = lambda: torch.randn(
        2, 4, 8, 16, device="meta", dtype=torch.bfloat16, requires_grad=True
    )
    leaves = [make(), make(), make()]
    with sg.record():
        out = op(*leaves, torch.ops.aten)[0]
        first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    assert [g.shape for g in (*first, *second)] == [leaf.shape for leaf in leaves * 2]
