"""Code compiled with torch.compile runs inside record()."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stowgrad as sg


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_has_pytorchs_gradients(backend: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend=backend)
    with sg.record():
        compiled(x).square().sum().backward()
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted)
