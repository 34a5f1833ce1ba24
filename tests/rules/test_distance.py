"""Gradients of cdist and pdist: each norm, where points coincide, and beyond the first order."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, gradients, matrix

NORMS = [0.0, 0.7, 1.0, 1.5, 2.0, 3.0, float("inf")]


def pairs(x, y, p):
    """Distances in plain ops, for the orders that PyTorch's kernels lack."""
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


@pytest.mark.parametrize("p", NORMS)
def test_cdist_where_some_points_coincide(p):
    agree(lambda x: torch.cdist(x, x[:2], p), matrix())
    agree(lambda x: torch.cdist(x.expand(3, 4, 6), torch.stack([x, x + 1, -x]), p), matrix())
    agree(lambda x: torch.cdist(x.round(), x[1:].round() + 1, p), matrix())


@pytest.mark.parametrize("p", NORMS)
def test_pdist(p):
    agree(lambda x: F.pdist(torch.cat([x, x[:1]]), p), matrix())


@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"])
def test_euclidean_cdist_both_ways(mode):
    agree(lambda x: torch.cdist(x, x[1:] * 2, compute_mode=mode), matrix())


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, float("inf")])
def test_second_derivatives(p):
    """PyTorch has none for these; plain ops under PyTorch's autograd are the reference."""
    i, j = torch.triu_indices(4, 4, 1)
    crossed = gradients(lambda x: pairs(x, x[:2] + 1, p), matrix(), 2)
    own = gradients(lambda x: torch.linalg.vector_norm(x[i] - x[j], p, -1), matrix(), 2)
    with sg.record():
        assert_close(gradients(lambda x: torch.cdist(x, x[:2] + 1, p), matrix(), 2), crossed)
        assert_close(gradients(lambda x: F.pdist(x, p), matrix(), 2), own)


def test_euclidean_second_derivatives():
    agree(
        lambda x: torch.cdist(x, x[1:] * 2 + 1, compute_mode="use_mm_for_euclid_dist"),
        matrix(), order=2,
    )  # fmt: skip


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_a_batch_of_gradients(p):
    """vmap of cdist's own backward kernel mixes up its rows."""
    batched(lambda x: torch.cdist(x, x[:2] + 1, p), matrix())
    batched(lambda x: F.pdist(x, p), matrix())


@pytest.mark.parametrize("name", ["cdist", "nn.functional.pdist"])
def test_op_database(name):
    assert_by_rule(name, torch.float64, limit=8, second=False)
