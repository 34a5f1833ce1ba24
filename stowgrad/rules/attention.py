"""Scaled dot-product attention.

`aten.scaled_dot_product_attention` is taken apart: PyTorch chooses the kernel, here as without us,
and each fused kernel has a row below; the math path is matmul, softmax and dropout, with rows of
their own. A fused kernel's backward is differentiated once more by the formula of the math path.
"""

from __future__ import annotations

import math

import torch

from ..errors import NotDifferentiableError
from .table import vjp

aten = torch.ops.aten


@vjp(aten._scaled_dot_product_flash_attention_for_cpu,
     "query key value attn_mask output logsumexp", wrt="query key value",
     outputs="output logsumexp", differentiable="output")
def flash_attention_for_cpu(g, s, needs):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, s.query, s.key, s.value, s.output, s.logsumexp, s.dropout_p, s.is_causal,
        attn_mask=s.attn_mask, scale=s.scale)


@vjp(aten._scaled_dot_product_flash_attention_for_cpu_backward,
     "grad_out query key value attn_mask", wrt="grad_out query key value",
     constant="out logsumexp")
def flash_attention_for_cpu_backward(g, s, needs):
    return second_derivative(
        g, s.grad_out, s.query, s.key, s.value, s.attn_mask, s.dropout_p, s.is_causal, s.scale)


_FLASH_RESULTS = (
    "output logsumexp cum_seq_q cum_seq_k max_q max_k rng_state unused debug_attn_mask"
)


@vjp(aten._scaled_dot_product_flash_attention,
     "query key value output logsumexp cum_seq_q cum_seq_k max_q max_k rng_state unused",
     wrt="query key value", outputs=_FLASH_RESULTS, differentiable="output")
def flash_attention(g, s, needs):
    return aten._scaled_dot_product_flash_attention_backward(
        g, s.query, s.key, s.value, s.output, s.logsumexp, s.cum_seq_q, s.cum_seq_k, s.max_q,
        s.max_k, s.dropout_p, s.is_causal, s.rng_state, s.unused, scale=s.scale)


@vjp(aten._scaled_dot_product_flash_attention_backward, "grad_out query key value",
     wrt="grad_out query key value", constant="out logsumexp")
def flash_attention_backward(g, s, needs):
    return second_derivative(
        g, s.grad_out, s.query, s.key, s.value, None, s.dropout_p, s.is_causal, s.scale)


@vjp(aten._scaled_dot_product_efficient_attention,
     "query key value attn_bias output log_sumexp philox_seed philox_offset",
     wrt="query key value attn_bias", outputs="output log_sumexp philox_seed philox_offset",
     differentiable="output")
def efficient_attention(g, s, needs):
    return aten._scaled_dot_product_efficient_attention_backward(
        g, s.query, s.key, s.value, s.attn_bias, s.output, s.log_sumexp, s.philox_seed,
        s.philox_offset, s.dropout_p, list(needs), s.is_causal, scale=s.scale)


@vjp(aten._scaled_dot_product_efficient_attention_backward, "grad_out_ query key value attn_bias",
     wrt="grad_out_ query key value attn_bias", constant="out logsumexp")
def efficient_attention_backward(g, s, needs):
    if needs[4]:
        raise NotDifferentiableError(
            "second derivatives of efficient attention with respect to its bias are not "
            "implemented. Use sdpa_kernel(SDPBackend.MATH) for it.")
    return *second_derivative(
        g[:3], s.grad_out_, s.query, s.key, s.value, s.attn_bias, s.dropout_p, s.is_causal,
        s.scale), None


_CUDNN_RESULTS = (
    "output logsumexp cum_seq_q cum_seq_k max_q max_k philox_seed philox_offset debug_attn_mask"
)


@vjp(aten._scaled_dot_product_cudnn_attention,
     "query key value attn_bias output logsumexp cum_seq_q cum_seq_k max_q max_k philox_seed "
     "philox_offset", wrt="query key value", outputs=_CUDNN_RESULTS, differentiable="output")
def cudnn_attention(g, s, needs):
    return aten._scaled_dot_product_cudnn_attention_backward(
        g, s.query, s.key, s.value, s.output, s.logsumexp, s.philox_seed, s.philox_offset,
        s.attn_bias, s.cum_seq_q, s.cum_seq_k, s.max_q, s.max_k, s.dropout_p, s.is_causal,
        scale=s.scale)


@vjp(aten._scaled_dot_product_cudnn_attention_backward, "grad_out query key value attn_bias",
     wrt="grad_out query key value", constant="out logsumexp")
def cudnn_attention_backward(g, s, needs):
    return second_derivative(
        g, s.grad_out, s.query, s.key, s.value, s.attn_bias, s.dropout_p, s.is_causal, s.scale)


def second_derivative(cotangents, grad, q, k, v, mask, dropout, causal, scale):
    """The derivative of attention's backward, with respect to (grad, q, k, v).

    With A = c q k' + mask, P = softmax(A) and h = grad, that backward is
        dP = h v',  dS = P (dP - sum(P dP)),  (c dS k, c dS' q, P' h),
    products of matrices but P (...) and sums over rows. `cotangents` (x, y, z), one for each of
    its results, go back through it from the end: W = c (x k' + q y') is the cotangent of dS, T of
    dP, and R of A. Memory: a few matrices of the size of P, which flash attention never makes.
    """
    if dropout > 0:
        raise NotDifferentiableError(
            "second derivatives of fused attention with dropout are not implemented. Use "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for it.")
    x, y, z = (torch.zeros_like(t) if c is None else c
               for c, t in zip(cotangents, (q, k, v), strict=True))  # fmt: skip
    groups = q.size(-3) // k.size(-3)  # grouped-query attention: query heads for each key head
    if groups > 1:
        k, v, y, z = (t.repeat_interleave(groups, -3) for t in (k, v, y, z))
    c = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    scores = c * (q @ k.mT)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -math.inf)
    elif mask is not None:
        scores = scores + mask
    p = torch._safe_softmax(scores, -1)

    dp = grad @ v.mT
    slack = dp - (p * dp).sum(-1, True)
    ds = c * p * slack
    w = c * (x @ k.mT + q @ y.mT)
    pw = (p * w).sum(-1, True)
    t = p * (w - pw)
    to_p = grad @ z.mT + w * slack - dp * pw
    r = c * p * (to_p - (p * to_p).sum(-1, True))

    to_k = ds.mT @ x + r.mT @ q
    to_v = t.mT @ grad
    if groups > 1:
        to_k, to_v = (t.unflatten(-3, (-1, groups)).sum(-3) for t in (to_k, to_v))
    return t @ v + p @ z, ds @ y + r @ k, to_k, to_v
