"""What backward does to `.grad`: taken over, copied, or added in place, and in which layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

import stowgrad as sg
from stowgrad import engine
from tests.parity import same

# PyTorch's advice against backward(create_graph=True), which is just what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


@pytest.fixture(autouse=True)
def every_sum_may_be_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of few elements are not even considered, for speed; the tensors here are small."""
    monkeypatch.setattr(engine, "_SMALL", 0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), requires_grad=True)


def watch(x: Tensor) -> list[int]:
    """The memory of each gradient on its way into the leaf `x`."""
    seen: list[int] = []
    x.register_hook(lambda g: seen.append(g.data_ptr()))
    return seen


# -- identity


def test_the_first_gradient_is_taken_over() -> None:
    def program() -> Any:
        x = leaf()
        seen = watch(x)
        (x * 2).sum().backward()
        return x.grad.data_ptr() == seen[0], x.grad.requires_grad, x.grad.grad_fn

    assert same(program)[0]


def test_a_gradient_that_someone_holds_is_copied() -> None:
    def program() -> Any:
        x, held = leaf(), []
        x.register_hook(lambda g: held.append(g))
        (x * 2).sum().backward()
        x.grad.zero_()
        return x.grad.data_ptr() == held[0].data_ptr(), held[0]

    assert not same(program)[0]


def test_later_gradients_are_added_in_place() -> None:
    def program() -> Any:
        x = leaf()
        (x * 2).sum().backward()
        grad, pointer, version = x.grad, x.grad.data_ptr(), x.grad._version
        (x * 3).sum().backward()
        return x.grad is grad, x.grad.data_ptr() == pointer, x.grad._version - version, x.grad

    assert same(program)[:3] == (True, True, 1)


def test_with_create_graph_the_first_gradient_is_a_copy() -> None:
    def program() -> Any:
        x = leaf()
        seen = watch(x)
        (x * x).sum().backward(create_graph=True)
        copied = x.grad.data_ptr() != seen[0]
        second = torch.autograd.grad(x.grad.sum(), x)
        return copied, x.grad.requires_grad, second

    assert same(program)[:2] == (True, True)


def test_with_create_graph_later_gradients_make_a_new_tensor() -> None:
    def program() -> Any:
        x = leaf()
        (x * 2).sum().backward()
        first = x.grad
        before = first.clone()
        (x * x).sum().backward(create_graph=True)
        return x.grad is first, torch.equal(first, before), x.grad.requires_grad, x.grad

    assert same(program)[:3] == (False, True, True)


def test_without_create_graph_a_grad_with_a_graph_is_added_to_in_place() -> None:
    def program() -> Any:
        x = leaf()
        (x * x).sum().backward(create_graph=True)
        first = x.grad
        (x * x).sum().backward()
        return x.grad is first, x.grad

    assert same(program)[0]


def test_a_grad_that_was_set_before_is_added_to() -> None:
    def program() -> Any:
        x = leaf(2)
        x.grad = given = torch.ones(2)
        (x * 2).sum().backward()
        return x.grad is given, given

    assert same(program)[0]


def test_several_paths_are_summed_before_they_reach_the_leaf() -> None:
    def program() -> Any:
        x, seen = leaf(2), []
        x.register_hook(lambda g: seen.append(g.tolist()))
        (x * 2 + x * 3 + x * 5).sum().backward()
        return seen, x.grad

    assert same(program)[0] == [[10.0, 10.0]]


# -- layout


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 3).t(),
    "permuted": lambda: torch.randn(4, 3, 2).permute(1, 2, 0),
    "every second": lambda: torch.randn(4, 6)[:, ::2],
    "a part of each row": lambda: torch.randn(4, 6)[:, :3],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "one element": lambda: torch.randn(1, 1),
    "empty": lambda: torch.randn(0, 3),
    "zero-dimensional": lambda: torch.randn(()),
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded gradient": lambda x: x.sum(),
    "gradient like the input": lambda x: (x * x).sum(),
    "contiguous gradient": lambda x: (x * torch.ones(x.shape)).sum(),
    "transposed gradient": lambda x: (x.mT * torch.ones(x.mT.shape)).sum(),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_strides_of_the_gradient(layout: Any, loss: Any, create_graph: bool) -> None:
    def program() -> Any:
        x = layout().detach().requires_grad_()
        if loss is LOSSES["transposed gradient"] and x.dim() < 2:
            return None
        loss(x).backward(create_graph=create_graph)
        first = x.grad.stride()
        loss(x).backward(create_graph=create_graph)
        return first, x.grad.stride(), x.grad

    same(program)


def test_strides_of_a_convolutions_weight_in_channels_last() -> None:
    def program() -> Any:
        net = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        net(torch.randn(2, 3, 5, 5)).sum().backward()
        return net.weight.grad.stride(), net.bias.grad.stride()

    same(program)


# -- no aliasing


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: a + b,
        lambda a, b: a.view(6) + b.view(6),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.stack([a, b]).unbind(0)[1] + a,
        lambda a, b: a.t() + b.t(),
        lambda a, b: a.expand(2, 2, 3) + b,
    ],
)
def test_two_leaves_never_share_a_gradient(fn: Any) -> None:
    a, b = leaf(2, 3), leaf(2, 3)
    with sg.record():
        fn(a, b).sum().backward()
    want = b.grad.clone()
    a.grad.add_(1000)
    assert torch.equal(b.grad, want)


def test_a_gradient_that_was_given_is_not_taken_over() -> None:
    """PyTorch takes it over through a view, and a later backward adds to it."""
    x, given = leaf(2), torch.ones(2)
    with sg.record():
        x.view_as(x).backward(given)
        x.view_as(x).backward(given)
    assert given.tolist() == [1.0, 1.0]
    assert x.grad.tolist() == [2.0, 2.0]


def test_retained_gradients_are_copies() -> None:
    def program() -> Any:
        x = leaf(2)
        y = x * 1
        y.retain_grad()
        z = y + 0
        z.retain_grad()
        z.sum().backward()
        z.grad.add_(5)
        y.grad.mul_(3)
        return x.grad, y.grad, z.grad

    assert same(program)[0].tolist() == [1.0, 1.0]


def test_a_gradient_a_hook_kept_is_not_added_to() -> None:
    """Sums on the way are made in place only where nobody can see it."""

    def program() -> Any:
        x, kept = leaf(2), []
        y = x * 1
        a, b, c = y * 2, y * 3, y * 4
        for t in (a, b, c):
            t.grad_fn.register_hook(lambda gi, go: kept.extend(g for g in gi if g is not None))
        (a + b + c).sum().backward()
        return kept, x.grad

    kept, grad = same(program)
    assert [k.tolist() for k in kept] == [[4.0, 4.0], [3.0, 3.0], [2.0, 2.0]]
    assert grad.tolist() == [9.0, 9.0]


def test_views_a_hook_kept_are_not_added_to() -> None:
    x, kept = leaf(2, 2), []
    with sg.record():
        y = x * 1
        a, b, c = y * 2, y * 3, y * 4
        for t in (a, b, c):
            t.grad_fn.register_hook(lambda gi, go: kept.append(gi[0].view(-1)))
        (a + b + c).sum().backward()
    assert sorted(k[0].item() for k in kept) == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("viewed_first", [True, False])
def test_a_sum_is_not_made_in_memory_that_another_gradient_lies_in(viewed_first: bool) -> None:
    """Two values get one gradient, one of them as a view of it; the one that was made last gets
    another gradient before the other has used its own."""

    def program() -> Any:
        x, w = leaf(4), leaf(4)
        first = x * 1
        last = w * 1
        t = last.sin()
        a, b = (first, last) if viewed_first else (last, first)
        s = a.view(2, 2).view(4) + b
        (s * 1 + t).sum().backward()
        return x.grad, w.grad

    assert same(program)[0].tolist() == [1.0] * 4


def test_a_saved_tensor_that_is_returned_as_gradient_is_not_changed() -> None:
    """With retain_graph it is still needed; it must be neither taken over nor added to."""
    table = torch.randn(2)

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
            ctx.save_for_backward(t)
            return (x * t).sum()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return ctx.saved_tensors[0], None

    before = table.clone()
    x = leaf(2)
    with sg.record():
        loss = Constant.apply(x, table) + Constant.apply(x, table) + x.sum()
        loss.backward(retain_graph=True)
        loss.backward()
    x.grad.add_(7)
    assert torch.equal(table, before)


# -- sparse


def lookup(w: Tensor) -> Tensor:
    return embedding(torch.tensor([1, 3, 1]), w, sparse=True).sum()


def dense(w: Tensor) -> Tensor:
    return (w * 2).sum()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "losses",
    [
        [lookup], [lookup, lookup], [lookup, dense], [dense, lookup], [lookup, dense, lookup],
        [lambda w: lookup(w) + lookup(w)], [lambda w: lookup(w) + dense(w)],
    ],
)  # fmt: skip
def test_sparse_gradients(losses: list[Callable[[Tensor], Tensor]], create_graph: bool) -> None:
    def program() -> Any:
        w = leaf(5, 3)
        for loss in losses:
            loss(w).backward(create_graph=create_graph)
        return w.grad.is_sparse, w.grad.to_dense()

    same(program)


def test_a_dense_gradient_meets_a_sparse_one_on_the_way() -> None:
    def program() -> Any:
        w = leaf(5, 3)
        (dense(w) + lookup(w)).backward()
        return w.grad.is_sparse, w.grad.to_dense()

    assert not same(program)[0]


def test_a_sparse_gradient_is_added_to_in_place() -> None:
    def program() -> Any:
        w = leaf(5, 3)
        lookup(w).backward()
        first = w.grad
        lookup(w).backward()
        return w.grad is first

    assert same(program)


# -- dtype, views, complex


def test_the_gradient_has_the_leafs_dtype() -> None:
    def program() -> Any:
        low = torch.randn(3, dtype=torch.bfloat16, requires_grad=True)
        (low * torch.ones(3)).sum().backward()
        high = torch.randn(3, dtype=torch.float64, requires_grad=True)
        high.float().sum().backward()
        return low.grad.dtype, high.grad.dtype

    assert same(program) == (torch.bfloat16, torch.float64)


def test_the_gradient_of_a_real_leaf_is_real() -> None:
    def program() -> Any:
        x = leaf(3)
        (x * torch.randn(3, dtype=torch.complex64)).abs().sum().backward()
        z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
        z.conj().sum().abs().backward()
        return x.grad, torch.view_as_real(z.grad.resolve_conj()), z.grad.is_conj()

    same(program)


def test_the_gradient_has_the_leafs_shape() -> None:
    def program() -> Any:
        scalar, row = torch.tensor(2.0, requires_grad=True), leaf(1, 3)
        (scalar * torch.ones(3)).sum().backward()
        (row * torch.ones(2, 3)).sum().backward()
        return scalar.grad, row.grad

    same(program)


def test_the_gradient_is_no_view() -> None:
    def program() -> Any:
        x = leaf(4)
        x.view(2, 2).t().reshape(4).sum().backward()
        return x.grad._is_view(), x.grad.is_leaf

    assert same(program) == (False, True)


def test_a_training_loop_accumulates_the_same() -> None:
    def program() -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(6):
            net(torch.ones(2, 3)).square().sum().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step == 3)
        return [p.detach() for p in net.parameters()]

    same(program)
