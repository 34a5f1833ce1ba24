"""Code compiled with torch.compile runs inside record(), and the compiler leaves us alone."""

from __future__ import annotations

import subprocess
import sys

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


FIRST_OP_IN_COMPILED_CODE = """
import torch, stowgrad as sg
model = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU()), backend="eager")
with sg.record():
    model(torch.randn(3, 4)).sum().backward()
"""


def test_the_compiler_traces_none_of_our_code() -> None:
    # In a fresh process the table of rules is filled by the first op, here under the compiler,
    # which used to compile the functions that fill it until it hit its limit of recompilations.
    done = subprocess.run(
        [sys.executable, "-c", FIRST_OP_IN_COMPILED_CODE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "stowgrad" not in done.stderr
