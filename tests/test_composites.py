"""What ops that are made of other ops see of the dispatcher, inside the recorder's handler."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import stowgrad as sg


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: torch.einsum("ij,jk->ik", x, w),
        lambda x, w: torch.tensordot(x, w, 1),
        lambda x, w: torch.inner(x, w.t()),
        lambda x, w: x @ w,
        lambda x, w: torch.cosine_embedding_loss(x, x, torch.ones(3)),
        lambda x, w: torch.kron(x, w),
    ],
)
def test_parts_are_autocast_as_without_the_recorder(fn):
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = fn(x, w)
    with sg.record(), torch.autocast("cpu", dtype=torch.bfloat16):
        got = fn(x, w)
    assert got.dtype == expected.dtype
    assert_close(got, expected)


def test_an_op_autocast_as_a_whole_has_its_parts_left_alone():
    """cdist is cast to float32 at the top; a matrix product inside it must not be cast down."""
    x = torch.randn(30, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.cdist(x, x.detach() + 1)
        with sg.record():
            got = torch.cdist(x, x.detach() + 1)
    assert got.dtype == expected.dtype
    assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("fn", [torch.linalg.pinv, lambda x: torch.linalg.vecdot(x, x + 1)])
def test_lazy_conjugates_inside_an_op_are_resolved(fn, tracked):
    """A dispatch mode's handler leaves the key out that does it: values were silently wrong."""
    torch.manual_seed(0)
    x = torch.randn(3, 3, dtype=torch.complex128)
    expected = fn(x)
    with sg.record():
        assert_close(fn(x.clone().requires_grad_(tracked)), expected)
