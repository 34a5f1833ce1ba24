"""Code compiled with torch.compile runs inside record(), and the compiler leaves us alone."""

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


def test_the_compiler_traces_none_of_our_code() -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.extend(n.stack_trace or "" for n in graph.graph.nodes)
        return graph.forward

    w = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda x: (x * w).sin().exp(), backend=backend)
    with sg.record():
        compiled(torch.randn(3)).sum().backward()
    assert not any("stowgrad/" in trace.replace("tests/", "") for trace in seen)
    assert not torch._dynamo.utils.counters["unimplemented"]
