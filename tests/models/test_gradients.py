"""Whole models: loss and every parameter's gradient equal PyTorch's, dropout included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import stowgrad as sg
from tests.models import zoo

TOLERANCE = 1e-9  # of the largest element of the reference
# The gradient of a key's bias is zero but for rounding, for softmax does not see it.
SMALLEST = 1e-10


def loss_and_gradients(model: torch.nn.Module, loss: zoo.Loss) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    value = loss(model)
    value.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), **found}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_gradients_of_models_are_pytorchs(name, attention):
    model, loss = zoo.MODELS[name](attention)
    expected = loss_and_gradients(model, loss)
    with sg.record():
        actual = loss_and_gradients(model, loss)

    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        error = (actual[key] - value).abs().max() / value.abs().max().clamp(min=SMALLEST)
        assert error <= TOLERANCE, f"{key}: {error:.1e}"
