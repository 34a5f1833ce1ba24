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


def gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))


def gelu_gradients(fn) -> list[torch.Tensor]:
    found = []
    for _ in range(4):  # TorchScript compiles what it has seen a few times
        x, bias = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        fn(x, bias).sum().backward()
        found += [x.grad, bias.grad]
    return found


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_code_has_pytorchs_gradients():
    torch.manual_seed(0)
    expected = gelu_gradients(gelu)
    torch.manual_seed(0)
    with sg.record():
        actual = gelu_gradients(torch.jit.script(gelu))
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
        for _ in range(4):
            model(torch.randn(2, 4)).sum().backward()
    torch.testing.assert_close(actual, expected)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_code_that_torchscript_compiled_before_says_so():
    scripted = torch.jit.script(gelu)
    gelu_gradients(scripted)
    advice = r"TorchScript compiled it.*Call it inside first"
    with sg.record(), pytest.raises(sg.OutsideRecordError, match=advice):
        gelu_gradients(scripted)
    gelu_gradients(scripted)
