"""`backward` and `grad` with every argument, as PyTorch has them and as `sg.*`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from tests.parity import both_raise, same


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float32, requires_grad=True)


# -- backward


def test_grad_tensors_one_for_each_root() -> None:
    def program() -> Any:
        x = leaf()
        torch.autograd.backward([x * x, x.sum()], [torch.tensor([1.0, 2.0]), None])
        return x.grad

    assert same(program).tolist() == [3.0, 9.0]


def test_one_root_several_times() -> None:
    def program() -> Any:
        x = leaf()
        y = x * x
        torch.autograd.backward([y, y * 3, y], [torch.ones(2)] * 3)
        return x.grad

    same(program)


@pytest.mark.parametrize(
    ("call", "gist"),
    [
        (lambda y: torch.autograd.backward([y]), "scalar outputs"),
        (lambda y: y.backward(), "scalar outputs"),
        (lambda y: y.backward(torch.ones(3)), "Mismatch in shape"),
        (lambda y: y.sum().backward(torch.ones(1)), "Mismatch in shape"),
        (lambda y: y.backward(torch.ones(2, dtype=torch.complex64)), "complex"),
        (lambda y: y.sum().backward(inputs=[]), "cannot be empty"),
        (lambda y: y.detach().sum().backward(), "does not require grad"),
        (lambda y: torch.autograd.grad(y, [leaf()]), "scalar outputs"),
        (lambda y: torch.autograd.grad(y.sum(), [leaf()]), "not have been used"),
        (lambda y: torch.autograd.grad(y.sum(), [torch.ones(2)]), "does not require grad"),
        (lambda y: torch.autograd.grad(y.sum(), []), "cannot be empty"),
        (
            lambda y: torch.autograd.grad(y, leaf(), torch.ones(3, 3), is_grads_batched=True),
            "is_grads_batched",
        ),
    ],
)
def test_bad_arguments_are_pytorchs_errors(call: Callable[[Tensor], Any], gist: str) -> None:
    both_raise(lambda: call(leaf() * 2), gist)


def test_a_grad_that_is_no_tensor_is_a_type_error() -> None:
    both_raise(lambda: (leaf() * 2).backward("text"), "str", TypeError)  # type: ignore[arg-type]


def test_retain_graph() -> None:
    def program() -> Any:
        x = leaf()
        y = (x * x).sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
        return x.grad

    assert same(program).tolist() == [4.0, 8.0]


def test_create_graph_implies_retain_graph() -> None:
    def program() -> Any:
        x = leaf()
        y = (x * x).sum()
        y.backward(create_graph=True)
        y.backward()
        return x.grad

    same(program)


def test_create_graph_without_retain_graph_frees() -> None:
    def program() -> Any:
        x = leaf()
        y = (x * x).sum()
        y.backward(create_graph=True, retain_graph=False)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
        return x.grad

    same(program)


def test_inputs_limit_the_leaves() -> None:
    def program() -> Any:
        x, w = leaf(), leaf(3, 4)
        (x * w).sum().backward(inputs=[w])
        return x.grad, w.grad

    assert same(program)[0] is None


def test_inputs_may_be_one_tensor() -> None:
    def program() -> Any:
        x, w = leaf(), leaf(3, 4)
        (x * w).sum().backward(inputs=w)
        return x.grad, w.grad

    same(program)


def test_inputs_may_be_no_leaves() -> None:
    def program() -> Any:
        x = leaf()
        y = x * 2
        z = y * y
        z.sum().backward(inputs=[y], retain_graph=True)
        first = y.grad.clone(), x.grad
        z.sum().backward(inputs=[z, y, x])
        return first, y.grad, z.grad, x.grad

    assert same(program)[0][1] is None


def test_inputs_that_are_no_leaves_keep_accumulating() -> None:
    def program() -> Any:
        x = leaf()
        y = x * 2
        (y * 3).sum().backward(inputs=[y], retain_graph=True)
        (y * 5).sum().backward(inputs=[y], retain_graph=True)
        (y * 7).sum().backward()
        return y.grad, x.grad

    assert same(program)[0].tolist() == [15.0, 15.0]


@pytest.mark.parametrize("tensor", [lambda: torch.ones(2), lambda: (leaf() * 2).detach()])
def test_inputs_without_gradient_are_an_error(tensor: Callable[[], Tensor]) -> None:
    both_raise(lambda: (leaf() * 2).sum().backward(inputs=[tensor()]), "require")


def test_inputs_that_were_not_used_get_nothing() -> None:
    def program() -> Any:
        unused = leaf()
        (leaf() * 2).sum().backward(inputs=[unused])
        return unused.grad

    assert same(program) is None


# -- grad


def test_grad_leaves_grad_alone() -> None:
    def program() -> Any:
        x = leaf()
        grads = torch.autograd.grad((x * x).sum(), x)
        return grads, x.grad

    assert same(program)[1] is None


def test_grad_of_leaves_intermediates_and_outputs_at_once() -> None:
    def program() -> Any:
        x = leaf()
        h = x * 2
        a, b = h * 3, h * 4
        out = a * b
        return torch.autograd.grad(out.sum(), [x, h, a, b, out, x])

    same(program)


def test_grad_of_a_tensor_with_respect_to_itself() -> None:
    def program() -> Any:
        x = leaf()
        return torch.autograd.grad(x, x, torch.tensor([5.0, 6.0]))

    assert same(program)[0].tolist() == [5.0, 6.0]


def test_grad_of_several_outputs() -> None:
    def program() -> Any:
        x = leaf()
        y = x * x
        return torch.autograd.grad([y, y.exp()], x, [torch.ones(2), torch.full((2,), 2.0)])

    same(program)


def test_allow_unused() -> None:
    def program() -> Any:
        x, unused = leaf(), leaf()
        return torch.autograd.grad((x * x).sum(), [unused, x], allow_unused=True)

    assert same(program)[0] is None


def test_materialize_grads() -> None:
    def program() -> Any:
        x, unused = leaf(), leaf(1, 2, 3)
        return torch.autograd.grad((x * x).sum(), [unused, x], materialize_grads=True)

    assert same(program)[0].tolist() == [0.0, 0.0, 0.0]


def test_materialize_grads_contradicts_allow_unused_false() -> None:
    def program() -> Any:
        x = leaf()
        torch.autograd.grad((x * x).sum(), [x, leaf()], materialize_grads=True, allow_unused=False)

    both_raise(program, "allow_unused", ValueError)


def test_an_input_on_a_path_without_gradient_counts_as_unused() -> None:
    """One of two results of one node is used; the other's producers get nothing."""

    def program() -> Any:
        x, w = leaf(), leaf()

        class Two(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
                return a * 2, b * 3

            @staticmethod
            def backward(ctx: Any, ga: Any, gb: Any) -> Any:
                return ga * 2, None

        a, _ = Two.apply(x, w * 1)
        return torch.autograd.grad(a.sum(), [x, w], allow_unused=True)

    assert same(program)[1] is None


def test_create_graph_to_the_third_order() -> None:
    def program() -> Any:
        x = leaf()
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        (k,) = torch.autograd.grad(h.sum(), x)
        return g, h, k, g.requires_grad, h.requires_grad, k.requires_grad

    assert same(program)[2].tolist() == [6.0, 6.0]


def test_create_graph_leads_to_the_given_gradients_too() -> None:
    def program() -> Any:
        x, v = leaf(), leaf(5, 6)
        (g,) = torch.autograd.grad(x * x, x, v, create_graph=True)
        return torch.autograd.grad(g.sum(), [x, v])

    same(program)


def test_without_create_graph_results_have_no_graph() -> None:
    def program() -> Any:
        x = leaf()
        (g,) = torch.autograd.grad((x * x).sum(), x)
        return g.requires_grad, g.grad_fn

    assert same(program) == (False, None)


@pytest.mark.parametrize("create_graph", [True, False])
def test_grad_mode_around_it_does_not_matter(create_graph: bool) -> None:
    def program() -> Any:
        x = leaf()
        y = (x * x).sum()
        with torch.no_grad():
            (g,) = torch.autograd.grad(y, x, create_graph=create_graph)
            mode = torch.is_grad_enabled()
        return g, g.requires_grad, mode

    assert same(program)[1:] == (create_graph, False)


# -- batched gradients


def test_is_grads_batched() -> None:
    def program() -> Any:
        x, w = leaf(), leaf(3, 4)
        z = (x * w).sin()
        eye = torch.eye(2)
        return torch.autograd.grad([z, x * x], [x, w], [eye, 2 * eye], is_grads_batched=True)

    same(program)


def test_is_grads_batched_through_a_network() -> None:
    def program() -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        x = torch.randn(5, 3, requires_grad=True)
        out = net(x)
        v = torch.randn(7, 5, 2)
        return torch.autograd.grad(out, [x, *net.parameters()], v, is_grads_batched=True)

    torch.manual_seed(0)
    with sg.record():
        found = program()
    torch.manual_seed(0)
    assert_close(found, program())


def test_is_grads_batched_with_create_graph() -> None:
    def program() -> Any:
        x = leaf()
        (jacobian,) = torch.autograd.grad(
            x**3, x, torch.eye(2), is_grads_batched=True, create_graph=True
        )
        return torch.autograd.grad(jacobian.sum(), x)

    assert same(program)[0].tolist() == [6.0, 12.0]


def test_functional_derivatives() -> None:
    def program() -> Any:
        x = torch.tensor([1.0, 2.0])
        v = torch.tensor([3.0, 4.0])

        def f(x: Tensor) -> Tensor:
            return x * x.sum()

        def g(x: Tensor) -> Tensor:
            return (x**3).sum()

        api = torch.autograd.functional
        return (
            api.jacobian(f, x), api.jacobian(f, x, vectorize=True), api.hessian(g, x),
            api.vjp(f, x, v), api.vhp(g, x, v), api.hvp(g, x, v),
        )  # fmt: skip

    same(program)


# -- gradient edges


def test_gradient_edges_as_outputs_and_inputs() -> None:
    def program() -> Any:
        x = leaf()
        y = x * x
        root = torch.autograd.graph.get_gradient_edge(y)
        end = torch.autograd.graph.get_gradient_edge(x)
        return torch.autograd.grad(root, [end], torch.ones(2))

    same(program)


# -- dtypes of gradients that are given


@pytest.mark.parametrize("at_leaf", [True, False])
def test_a_given_gradient_is_cast_to_the_outputs_dtype(at_leaf: bool) -> None:
    def program() -> Any:
        seen = []
        x = leaf()
        y = x if at_leaf else x * 1
        y.register_hook(lambda g: seen.append(str(g.dtype)))
        y.backward(torch.ones(2, dtype=torch.float64))
        return seen, x.grad, x.grad.dtype

    assert same(program)[0] == ["torch.float32"]


def test_complex_outputs() -> None:
    def program() -> Any:
        x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
        (x * x.conj()).sum().backward(torch.tensor(1 + 0j))
        return torch.view_as_real(x.grad)

    same(program)
    both_raise(lambda: leaf().to(torch.complex64).sum().backward(), "real scalar")


# -- sg.backward and sg.grad


def test_sg_backward_inside_and_outside() -> None:
    for inside in (True, False):
        x, w = leaf(), leaf(3, 4)
        with sg.record():
            y = x * w
            if inside:
                sg.backward(y, torch.ones(2), inputs=[x])
        if not inside:
            sg.backward(y, torch.ones(2), inputs=[x])
        assert x.grad.tolist() == [3.0, 4.0]
        assert w.grad is None


def test_sg_backward_takes_every_argument() -> None:
    x = leaf()
    with sg.record():
        y = x * x
    sg.backward([y], [torch.ones(2)], retain_graph=True)
    sg.backward(y, torch.ones(2), create_graph=True)
    assert x.grad.requires_grad
    sg.backward(y, torch.ones(2))
    with pytest.raises(sg.GraphFreedError):
        sg.backward(y, torch.ones(2))


def test_sg_grad_takes_every_argument() -> None:
    x, unused = leaf(), leaf()
    with sg.record():
        y = x * x
    (g,) = sg.grad(y, x, torch.ones(2), retain_graph=True)
    assert g.tolist() == [2.0, 4.0]
    g, none = sg.grad(y, [x, unused], torch.ones(2), retain_graph=True, allow_unused=True)
    assert none is None
    _, zeros = sg.grad(y, [x, unused], torch.ones(2), retain_graph=True, materialize_grads=True)
    assert zeros.tolist() == [0.0, 0.0]
    (jacobian,) = sg.grad(y, x, torch.eye(2), retain_graph=True, is_grads_batched=True)
    assert jacobian.tolist() == [[2.0, 0.0], [0.0, 4.0]]
    (g,) = sg.grad(y, x, torch.ones(2), create_graph=True)
    (second,) = sg.grad(g, x, torch.ones(2))
    assert second.tolist() == [2.0, 2.0]
    assert x.grad is None
    assert not sg.recording()


def test_sg_grad_names_what_is_wrong() -> None:
    x = leaf()
    with sg.record():
        y = (x * x).sum()
    with pytest.raises(sg.NotDifferentiableError, match="not have been used in the graph"):
        sg.grad(y, leaf())
    with pytest.raises(sg.NotDifferentiableError, match=r"float32 \[2\]"):
        sg.grad(y, torch.ones(2))
