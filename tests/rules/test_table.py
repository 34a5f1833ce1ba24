"""The rule machinery: what is saved, for whom, and what a row cannot get wrong silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stowgrad as sg
from stowgrad.rules.table import RULES, Rule, _names_read, vjp

aten = torch.ops.aten


def saved_names(tensor: torch.Tensor) -> list[str]:
    return list(tensor.grad_fn.plan.index)


def helper(s: Any) -> Any:
    return s.x


@pytest.mark.parametrize(
    ("formula", "names"),
    [
        (lambda g, s: g * s.other, {"other"}),
        (lambda g, s: (g @ s.mat2.mH) if s.flag else g, {"mat2", "flag"}),
        (lambda g, s: s.x.sum(s.dim, keepdim=s.keepdim), {"x", "dim", "keepdim"}),
        (lambda g, s: g, set()),
        (lambda g, s: helper(s), None),  # hands `s` on: everything has to be kept
        (lambda g, s: (lambda: s.x)(), None),  # closes over it
    ],
)
def test_what_a_formula_reads_is_found_from_its_code(formula: Any, names: Any) -> None:
    assert _names_read(formula) == names


def test_only_what_a_needed_gradient_reads_is_saved() -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3)
    with sg.record():
        assert saved_names(a * b) == ["other"]
        assert saved_names(b * a) == ["self"]
        assert saved_names(a * a.clone()) == ["self", "other"]
        assert saved_names(a + b) == []


def test_an_argument_without_a_formula_is_an_error_not_a_zero() -> None:
    lib = torch.library.Library("stowgrad_test_table", "DEF")
    lib.define("scale(Tensor x, Tensor by) -> Tensor")
    lib.impl("scale", lambda x, by: x * by, "CPU")
    op = torch.ops.stowgrad_test_table.scale.default
    vjp(op, "by", x=lambda g, s: g * s.by)
    x, by = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with sg.record():
        op(x, by.detach()).sum().backward()
        torch.testing.assert_close(x.grad, by.detach())
        with pytest.raises(sg.NotDifferentiableError, match="'by' is not implemented"):
            op(x, by)
    del RULES[op]


def test_a_row_for_arguments_that_no_overload_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no overload"):
        vjp(aten.sin, x=lambda g, s: g)


def test_a_formula_that_reads_what_is_not_saved_says_so() -> None:
    rule = Rule(aten.sin.default, "", {"self": lambda g, s: g * s.self}, *[None] * 5, "")
    rule.prepare()
    node = rule.node_class(rule.plan(1), [None])
    with pytest.raises(AttributeError, match=r"reads 'self', which it does not save"):
        node.read("self")


def test_gradients_are_summed_over_broadcast_dims_and_cast() -> None:
    a = torch.randn(3, 1, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    (a * b).sum().backward()
    expected = a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    with sg.record():
        (a * b).sum().backward()
    for got, wanted in zip((a.grad, b.grad), expected, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)


def test_a_real_argument_of_a_complex_op_gets_a_real_gradient() -> None:
    a = torch.randn(3, requires_grad=True)
    with sg.record():
        (a * (1 + 2j)).abs().sum().backward()
    assert a.grad.dtype == torch.float32
    torch.testing.assert_close(a.grad, a.detach().sgn() * 5**0.5)


def test_nodes_are_called_after_their_op() -> None:
    a = torch.randn(3, requires_grad=True)
    with sg.record():
        y = a * 2
        assert y.grad_fn.name() == type(y.grad_fn).__name__ == "MulBackward0"
        assert "MulBackward0" in repr(y)
