"""Views and in-place changes: which tensor is a leaf, a constant, or the output of what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import same


def leaf() -> Tensor:
    return torch.arange(6.0, dtype=torch.float64).reshape(2, 3).sin().requires_grad_()


def test_a_base_with_gaps_between_its_elements() -> None:
    """A base need not be dense: a detached slice is one. The gradient of its rest is laid out as
    it is, gaps and all."""

    def step() -> Any:
        w = torch.tensor(0.7, requires_grad=True)
        base = torch.arange(18.0).reshape(3, 6).sin()[..., ::2].detach()
        view = base[:2]
        view[:1] += w
        ((view + 3).square() * torch.tensor([0.5, 1.0, 1.5])).sum().backward()
        return w.grad

    same(step)


def unwatched_view() -> tuple[Tensor, Tensor]:
    x = leaf()
    with torch.no_grad():
        return x, x[:1]


def view_of_what_is_tracked_later() -> tuple[Tensor, Tensor]:
    x = leaf().detach()
    view = x[:1]
    return x.requires_grad_(), view


def unwatched_view_of_a_result() -> tuple[Tensor, Tensor]:
    x = leaf() * 2
    x.retain_grad()
    with torch.no_grad():
        return x, x[:1]


def unwatched_view_made_a_leaf() -> tuple[Tensor, Tensor]:
    x, view = unwatched_view()
    return x, view.requires_grad_()


KINDS = [
    unwatched_view, view_of_what_is_tracked_later, unwatched_view_of_a_result,
    unwatched_view_made_a_leaf,
]  # fmt: skip


@pytest.mark.parametrize("make", KINDS)
def test_a_view_that_is_tracked_only_through_its_base_is_a_constant(
    make: Callable[[], tuple[Tensor, Tensor]],
) -> None:
    def step() -> Any:
        x, view = make()
        flags = [view.requires_grad, view.is_leaf, view.grad_fn is None]
        y = view * 3
        found = torch.autograd.grad(y.sum(), [view, x], allow_unused=True)
        (view * x).sum().backward()
        return [*flags, y.requires_grad, y.grad_fn is None, *found, view.grad, x.grad]

    same(step)


@pytest.mark.parametrize("view", [lambda x: x.expand(2, 2, 3), lambda x: x[0], lambda x: x.mT])
def test_a_view_of_a_leaf_that_was_changed_without_grad_is_no_leaf(
    view: Callable[[Tensor], Tensor],
) -> None:
    def step() -> Any:
        x = leaf()
        v = view(x)
        with torch.no_grad():
            x.mul_(2)
        flags = [v.is_leaf, v.grad_fn is None]
        (v * v).sum().backward()
        return [*flags, x.grad]

    same(step)


def test_a_retained_gradient_follows_a_view_whose_base_changes() -> None:
    def step() -> Any:
        x = leaf() * 2
        view = x[0]
        view.retain_grad()
        x.mul_(3)
        (view * view).sum().backward()
        return [view.retains_grad, view.grad]

    same(step)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def test_a_custom_function_changes_a_view_of_another_dtype() -> None:
    def step() -> Any:
        w = torch.ones(3, 2, requires_grad=True)
        x = w * torch.arange(6.0).reshape(3, 2)
        y = Twice.apply(torch.view_as_complex(x))
        (torch.view_as_real(y) * x).sum().backward()
        return [y.is_leaf, x, w.grad]

    same(step)


def test_the_flag_of_an_unwatched_view_may_be_set_after_its_base_changed() -> None:
    def step() -> Any:
        x = leaf() * 2
        with torch.no_grad():
            view = x[0]
        x.mul_(2)
        return [view.requires_grad_(False).requires_grad, view.requires_grad_().requires_grad]

    same(step)
