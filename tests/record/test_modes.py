"""Grad mode, inference mode and `requires_grad` while recording, as PyTorch has them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import stowgrad as sg
from tests.parity import both_raise, same


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float32, requires_grad=True)


def facts(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.requires_grad, tensor.is_leaf, tensor.grad_fn is None


@torch.no_grad()
def decorated_off(x: Tensor) -> Tensor:
    return x * 2


@torch.enable_grad()
def decorated_on(x: Tensor) -> Tensor:
    return x * 2


@torch.inference_mode()
def decorated_inference(x: Tensor) -> Tensor:
    return x * 2


@torch.no_grad()
def generator_off(x: Tensor) -> Any:
    yield facts(x * 2)
    yield torch.is_grad_enabled()


def no_grad(x: Tensor) -> Any:
    with torch.no_grad():
        return facts(x * 2)


def enable_within_no_grad(x: Tensor) -> Any:
    with torch.no_grad():
        with torch.enable_grad():
            inner = facts(x * 2)
        return inner, facts(x * 2)


def set_as_context(x: Tensor) -> Any:
    with torch.set_grad_enabled(False):
        off = facts(x * 2)
    return off, facts(x * 2)


def set_as_function(x: Tensor) -> Any:
    torch.set_grad_enabled(False)
    try:
        off = facts(x * 2)
    finally:
        torch.set_grad_enabled(True)
    return off, facts(x * 2)


def decorators(x: Tensor) -> Any:
    with torch.no_grad():
        on = facts(decorated_on(x))
    return facts(decorated_off(x)), on, facts(x * 2)


def generators(x: Tensor) -> Any:
    return list(generator_off(x)), facts(x * 2)


def restored_after_an_exception(x: Tensor) -> Any:
    try:
        with torch.no_grad():
            raise KeyError
    except KeyError:
        return torch.is_grad_enabled(), facts(x * 2)


def inference(x: Tensor) -> Any:
    with torch.inference_mode():
        y = x * 2
    return facts(y), y.is_inference(), decorated_inference(x).is_inference(), facts(y.clone())


def inference_switched_off_within(x: Tensor) -> Any:
    with torch.inference_mode(), torch.inference_mode(False):
        y = x * 2
    return facts(y), y.is_inference()


def grad_mode_within_inference(x: Tensor) -> Any:
    """Inference mode wins."""
    with torch.inference_mode(), torch.enable_grad():
        y = x * 2
        return facts(y), y.is_inference(), torch.is_grad_enabled()


def in_place_within_inference(x: Tensor) -> Any:
    with torch.inference_mode():
        y = torch.zeros(2)
        y.add_(1)
        y[0] = 5
        y[1:].mul_(3)
        torch.add(y, 1, out=y)
        return y.clone()


def a_leaf_made_within_inference(x: Tensor) -> Any:
    with torch.inference_mode():
        y = torch.ones(2, requires_grad=True)
    return y.requires_grad, y.is_inference(), (y * 1).requires_grad


def an_inference_tensor_that_is_not_saved(x: Tensor) -> Any:
    with torch.inference_mode():
        c = torch.tensor([3.0, 4.0])
    (x + c).sum().backward()
    return x.grad


def mixed_in_one_graph(x: Tensor) -> Any:
    y = x * 2
    with torch.no_grad():
        z = y * 3
    (y * z).sum().backward()
    return x.grad


def views_made_without_grad_mode(x: Tensor) -> Any:
    y = x * 3
    with torch.no_grad():
        v = y.view(2, 1)
    (v.view(2) * x).sum().backward()
    return facts(v), x.grad


MODES = [
    no_grad, enable_within_no_grad, set_as_context, set_as_function, decorators, generators,
    restored_after_an_exception, inference, inference_switched_off_within,
    grad_mode_within_inference, in_place_within_inference, a_leaf_made_within_inference,
    an_inference_tensor_that_is_not_saved, mixed_in_one_graph, views_made_without_grad_mode,
]  # fmt: skip


@pytest.mark.parametrize("program", MODES)
def test_modes(program: Callable[[Tensor], Any]) -> None:
    same(lambda: program(leaf()))


def test_grad_mode_is_of_the_thread() -> None:
    def program() -> Any:
        log: list[bool] = []

        def work() -> None:
            log.append(torch.is_grad_enabled())
            with torch.no_grad():
                log.append((leaf() * 2).requires_grad)

        with torch.no_grad():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            log.append(torch.is_grad_enabled())
        return log

    assert same(program) == [True, False, False]


def test_a_thread_that_records_has_its_own_grad_mode() -> None:
    x = leaf()
    inside, go = threading.Event(), threading.Event()

    def work() -> None:
        with sg.record(), torch.no_grad():
            inside.set()
            assert go.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    with sg.record():
        (x * x).sum().backward()
    go.set()
    thread.join()
    assert x.grad.tolist() == [2.0, 4.0]


def test_an_inference_tensor_cannot_be_saved() -> None:
    def program() -> None:
        with torch.inference_mode():
            c = torch.ones(2)
        leaf() * c

    both_raise(program, "saved for backward")
    with sg.record(), pytest.raises(sg.HookError, match=r"aten\.mul \(as 'other'\).*[Cc]lone"):
        program()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t[0].fill_(2),
        lambda t: t.copy_(leaf()),
        lambda t: t.__setitem__(0, 1.0),
    ],
)
def test_an_inference_tensor_cannot_be_changed_outside(change: Any) -> None:
    def program() -> None:
        with torch.inference_mode():
            t = torch.ones(2)
        change(t)

    both_raise(program, "Inplace update to inference tensor outside InferenceMode")


# -- requires_grad


def test_requires_grad_of_results() -> None:
    def program() -> Any:
        x = leaf()
        return [
            t.requires_grad
            for t in (
                x > 0, x.argmax(), x.long(), x.bool(), x.round(), x.sign(), x.detach(), x.data,
                torch.zeros_like(x), x.new_ones(2), x.clone(), x + 1, x.sort()[0], x.sort()[1],
                x.max(), torch.as_tensor(x), x.isnan(), x.view(1, 2), x.floor(),
            )
        ]  # fmt: skip

    same(program)


@pytest.mark.parametrize(
    ("call", "gist"),
    [
        (lambda: (leaf() * 2).requires_grad_(False), "leaf variables"),
        (lambda: setattr(leaf() * 2, "requires_grad", False), "leaf variables"),
        (lambda: setattr(leaf() * 2, "requires_grad", True), "leaf variables"),
        (lambda: torch.ones(2, dtype=torch.long).requires_grad_(), "floating point"),
        (lambda: torch.ones(2, dtype=torch.long, requires_grad=True), "floating point"),
        (lambda: leaf().numpy(), "requires grad"),
        (lambda: (leaf() * 2).numpy(), "requires grad"),
        (lambda: (leaf() * 2).__array__(), "requires grad"),
    ],
)
def test_what_cannot_be_set_or_read(call: Any, gist: str) -> None:
    both_raise(call, gist)


def test_requires_grad_true_of_a_computed_tensor_is_no_change() -> None:
    def program() -> Any:
        x = leaf()
        y = x * 2
        y.requires_grad_().requires_grad_(True)
        y.sum().backward()
        return facts(y), x.grad

    same(program)


def test_freezing_a_leaf() -> None:
    def program() -> Any:
        x = leaf()
        before = x * 3
        x.requires_grad = False
        after = x * 3
        facts_after = facts(after)
        (before + after).sum().backward()
        x.requires_grad_()
        (x * 5).sum().backward()
        return facts_after, x.grad

    assert same(program)[1].tolist() == [5.0, 5.0]


def test_a_detached_tensor_may_become_a_leaf() -> None:
    def program() -> Any:
        y = leaf() * 2
        d = y.detach()
        before = facts(d)
        d.requires_grad_()
        (d * 3).sum().backward()
        return before, facts(d), d.grad

    same(program)


def test_detach_in_place() -> None:
    def program() -> Any:
        x = leaf()
        y = x * 3
        z = y * 1
        y.detach_()
        z.sum().backward()
        return facts(y), x.grad

    same(program)
    both_raise(lambda: (leaf() * 2).view(2).detach_(), "view")


def test_a_leaf_that_becomes_part_of_a_graph() -> None:
    def program() -> None:
        x, w = leaf(), leaf()
        y = x * 2
        x.requires_grad_(False)
        x.mul_(w)
        y.sum().backward()

    both_raise(program, "leaf variable")
    with sg.record(), pytest.raises(sg.InPlaceError, match="moved into the graph interior"):
        program()


def test_parameters_made_of_tracked_tensors() -> None:
    def program() -> Any:
        x = leaf()
        p = torch.nn.Parameter(x * 2)
        (p * 3).sum().backward()
        return facts(p), p.grad, x.grad, type(p * 1) is Tensor

    same(program)


def test_reading_values() -> None:
    def program() -> Any:
        y = leaf() * 2
        return (
            y.tolist(),
            float(y.sum().detach()),
            y.sum().item(),
            bool(y.sum() > 0),
            str(y.detach()),
            len(y),
        )

    same(program)


def test_how_a_tracked_tensor_prints() -> None:
    def program() -> Any:
        x = leaf()
        return str(x), str(x * 2), repr((x * 2).sum()), str(x.view(2, 1)), str(x.split(1)[0])

    same(program)
