"""Embeddings and bags: padding, frequencies, sparse gradients, renormalisation in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.parity import same

_INDICES = torch.tensor([[1, 2, 1, 0], [4, 1, 0, 3]])


def weight():
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double().requires_grad_()


def test_the_database_by_our_rules():
    assert_by_rule("nn.functional.embedding", torch.float64, limit=8)
    assert_by_rule("nn.functional.embedding_bag", torch.float64, limit=40, second=False)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 1, -1])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_gradients_of_embedding(padding_idx, by_frequency, sparse):
    def run():
        w = weight()
        out = F.embedding(
            _INDICES, w, padding_idx, scale_grad_by_freq=by_frequency and not sparse, sparse=sparse
        )
        (out * out.detach()).sum().backward()
        grad = w.grad
        assert grad is not None and grad.is_sparse == sparse
        return out, grad.to_dense()

    same(run)


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_second_derivatives_of_embedding(padding_idx):
    def run():
        w = weight()
        out = F.embedding(_INDICES, w, padding_idx)
        (g,) = torch.autograd.grad((out**3).sum(), w, create_graph=True)
        return g, torch.autograd.grad((g * g).sum(), w)

    same(run)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradients_of_bags(mode, padding_idx, last, sparse):
    if mode == "max" and sparse:
        pytest.skip("PyTorch has no sparse gradient of maxima")

    def run():
        w = weight()
        offsets = torch.tensor([0, 3, 3, 8] if last else [0, 3, 3])  # the second bag is empty
        out = F.embedding_bag(
            _INDICES.flatten(), w, offsets, mode=mode, padding_idx=padding_idx, sparse=sparse,
            include_last_offset=last,
        )  # fmt: skip
        (out * out.detach()).sum().backward()
        assert w.grad is not None
        return out, w.grad.to_dense()

    same(run)


def plain_bags(w, samples, mode, padding_idx):
    """The same in plain indexing, which PyTorch differentiates as often as one likes."""
    bags = []
    for i, row in enumerate(_INDICES):
        keep = [j for j, index in enumerate(row.tolist()) if index != padding_idx]
        rows = w[row[keep]]
        if samples is not None:
            rows = rows * samples[i, keep].unsqueeze(1)
        bags.append({"sum": rows.sum(0), "mean": rows.mean(0)}.get(mode, rows.amax(0)))
    return torch.stack(bags)


@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("mode", ["weighted sum", "sum", "mean", "max"])
def test_second_derivatives_of_bags(mode, padding_idx):
    """PyTorch has none."""
    weighted, mode = mode.startswith("weighted"), mode.removeprefix("weighted ")

    def run(bags):
        w = weight()
        samples = (_INDICES * 0.25 + 0.5).double().requires_grad_() if weighted else None
        leaves = [w] if samples is None else [w, samples]
        loss = (bags(w, samples) ** 3).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), leaves)
        return [g.detach() for g in (*first, *second)]

    expected = run(lambda w, samples: plain_bags(w, samples, mode, padding_idx))
    with sg.record():
        actual = run(
            lambda w, samples: F.embedding_bag(
                _INDICES, w, mode=mode, padding_idx=padding_idx, per_sample_weights=samples
            )
        )
    assert_close(actual, expected)


def test_renormalising_in_place_changes_the_leaf_and_not_the_graph():
    def run():
        w = weight()
        out = F.embedding(_INDICES, w, max_norm=0.5)
        out.sum().backward()
        return w, w.grad

    same(run)


def test_one_hot_needs_no_gradient():
    with sg.record():
        assert not F.one_hot(_INDICES, 5).requires_grad
