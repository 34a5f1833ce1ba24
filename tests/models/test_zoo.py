"""The zoo itself, under PyTorch's own autograd: tests that use it rely on these properties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models import zoo


def gradients(model: torch.nn.Module, loss: zoo.Loss, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_gradients_depend_on_the_seed_and_nothing_else(name, attention):
    torch.manual_seed(123)
    first = gradients(*zoo.MODELS[name](attention), seed=1)
    again = gradients(*zoo.MODELS[name](attention), seed=1)
    other = gradients(*zoo.MODELS[name](attention), seed=2)

    assert first.keys() == again.keys()
    assert all(grad.dtype == torch.float64 and grad.isfinite().all() for grad in first.values())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first), "no dropout"


@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_parameter_takes_part(name):
    model, loss = zoo.MODELS[name]()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained - gradients(model, loss, seed=1).keys() == set()
