"""Hooks on tensors and nodes: the same calls with the same values in the same order as PyTorch's.

Each program returns a log of what its hooks saw; `same` runs it under both and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

import stowgrad as sg
from tests.parity import both_raise, same

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float32, requires_grad=True)


def show(grad: Any) -> Any:
    if isinstance(grad, (tuple, list)):
        return [show(g) for g in grad]
    return None if grad is None else grad.flatten().tolist()


def noting(log: list[Any], name: str) -> Callable[..., None]:
    """A hook that writes its name and what it got, and changes nothing."""

    def hook(*grads: Any) -> None:
        log.append((name, [show(g) for g in grads]))

    return hook


def test_every_kind_of_hook_in_one_backward() -> None:
    def program() -> Any:
        log: list[Any] = []
        x, w = leaf(), leaf(3, 4)
        x.register_hook(noting(log, "x"))
        x.register_post_accumulate_grad_hook(lambda t: log.append(("after x", show(t.grad))))
        y = x * w
        y.retain_grad()
        y.register_hook(noting(log, "y, first"))
        y.register_hook(noting(log, "y, second"))
        y.grad_fn.register_prehook(noting(log, "before the product"))
        y.grad_fn.register_hook(noting(log, "after the product"))
        z = y.exp()
        z.register_hook(noting(log, "z"))
        register_multi_grad_hook((x, y, w), noting(log, "all"))
        register_multi_grad_hook((x, y, w), noting(log, "any"), mode="any")
        w.register_hook(noting(log, "w"))
        z.sum().backward()
        return log, x.grad, y.grad, w.grad

    log = same(program)[0]
    assert [entry[0] for entry in log] == [
        "z", "y, first", "y, second", "any", "before the product", "after the product", "x",
        "after x", "all", "w",
    ]  # fmt: skip


def test_hooks_that_change_gradients() -> None:
    def program() -> Any:
        x = leaf()
        y = x * 3
        y.register_hook(lambda g: g * 2)
        y.register_hook(lambda g: g + 1)
        x.register_hook(lambda g: g * 10)
        y.grad_fn.register_prehook(lambda go: (go[0] * 2,))
        y.grad_fn.register_hook(lambda gi, go: tuple(None if g is None else g + 5 for g in gi))
        y.retain_grad()
        y.register_hook(lambda g: g + 100)
        (y * y).sum().backward()
        return x.grad, y.grad

    same(program)


def test_a_hook_that_changes_its_gradient_in_place() -> None:
    def program() -> Any:
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: (g.mul_(5), None)[1])
        (y * 1).sum().backward()
        return x.grad

    assert same(program).tolist() == [10.0, 10.0]


def test_a_node_hook_sees_gradients_like_the_nodes_inputs() -> None:
    """Summed over what was broadcast, and of the inputs' dtype."""

    def program() -> Any:
        log: list[Any] = []

        def hook(grad_inputs: Any, grad_outputs: Any) -> None:
            log.append([None if g is None else (list(g.shape), str(g.dtype)) for g in grad_inputs])

        row, number, wide = leaf(), torch.tensor(2.0, requires_grad=True), leaf().double()
        for y in (
            row.expand(3, 2),
            row + torch.ones(3, 1),
            row * number,
            torch.ones(3, 2) - number,
            row * wide.detach(),
            row.double(),
            torch.addmm(row, torch.ones(3, 4), torch.ones(4, 2)),
        ):
            y.grad_fn.register_hook(hook)
            y.sum().backward()
        return log

    assert same(program)[0] == [([2], "torch.float32")]


def test_the_order_of_branches() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        a, b = x * 2, x * 3
        c = a * b
        d = b * x
        e, f = c + d, a * 5
        for name, t in {"x": x, "a": a, "b": b, "c": c, "d": d, "e": e, "f": f}.items():
            t.register_hook(noting(log, name))
        (e + f).sum().backward()
        return log

    assert len(same(program)) == 7


def test_the_order_of_a_random_graph() -> None:
    """Thirty nodes that take two earlier ones each, over six leaves."""

    def program() -> Any:
        log: list[Any] = []
        order = torch.Generator().manual_seed(3)
        values = [leaf(float(i), 1.0) for i in range(6)]
        for i in range(30):
            a, b = torch.randint(len(values), (2,), generator=order).tolist()
            values.append((values[a] * values[b]).tanh() + values[(a + b) % len(values)])
            if i % 7 == 3:
                values[-1] = values[-1].detach().requires_grad_()
        for i, t in enumerate(values):
            t.register_hook(lambda g, i=i: log.append(i))
        values[-1].sum().backward()
        return log

    assert len(same(program)) > 10


def test_roots_that_are_leaves_or_lead_to_each_other() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        a = x * 2
        b, c = a * 3, x * 4
        for name, t in {"x": x, "a": a, "b": b, "c": c}.items():
            t.register_hook(noting(log, name))
        torch.autograd.backward([a, b, c, x], [torch.ones(2)] * 4)
        return log, x.grad

    same(program)


def test_one_function_registered_twice_runs_twice() -> None:
    def program() -> Any:
        log: list[Any] = []
        hook = noting(log, "hook")
        x = leaf()
        y = x * 2
        for t in (x, x, y, y):
            t.register_hook(hook)
        y.sum().backward()
        return log

    assert len(same(program)) == 4


def test_hooks_removed_by_their_handle() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        y = x * 2
        handles = [
            y.register_hook(noting(log, "y")),
            x.register_hook(noting(log, "x")),
            x.register_post_accumulate_grad_hook(lambda t: log.append("after x")),
            y.grad_fn.register_hook(noting(log, "node")),
            y.grad_fn.register_prehook(noting(log, "before node")),
            register_multi_grad_hook((x, y), noting(log, "all")),
            register_multi_grad_hook((x, y), noting(log, "any"), mode="any"),
        ]
        y.sum().backward(retain_graph=True)
        for handle in handles:
            handle.remove()
            log.append("-")
            y.sum().backward(retain_graph=True)
        return log

    assert same(program)[-1] == "-"


def test_a_hook_removed_while_others_run() -> None:
    def program() -> Any:
        log: list[Any] = []
        y = leaf() * 2
        y.register_hook(lambda g: (log.append("first"), later.remove())[0])
        later = y.register_hook(noting(log, "later"))
        for _ in range(2):
            y.sum().backward(retain_graph=True)
            log.append("-")
        return log

    same(program)


def test_a_hook_registered_while_backward_runs() -> None:
    def program() -> Any:
        log: list[Any] = []
        y = leaf() * 2
        z = y * 3
        z.register_hook(lambda g: (y.register_hook(noting(log, "late")), None)[1])
        z.sum().backward()
        return log

    assert len(same(program)) == 1


def test_hooks_registered_before_recording_began() -> None:
    log: list[Any] = []
    x = leaf()
    x.register_hook(lambda g: (log.append("x"), g * 2)[1])
    x.register_post_accumulate_grad_hook(lambda t: log.append("after x"))
    register_multi_grad_hook((x,), noting(log, "all"))
    with sg.record():
        (x * 3).sum().backward()
    assert log == ["x", ("all", [[[6.0, 6.0]]]), "after x"]
    assert x.grad.tolist() == [6.0, 6.0]


def test_hooks_registered_while_recording_act_outside_too() -> None:
    """They are the leaf's, whoever runs the backward."""
    log: list[Any] = []
    x = leaf()
    with sg.record():
        x.register_hook(noting(log, "x"))
        x.register_post_accumulate_grad_hook(lambda t: log.append("after x"))
    (x * 3).sum().backward()
    assert log == [("x", [[3.0, 3.0]]), "after x"]


def test_a_handle_from_recording_removes_outside() -> None:
    log: list[Any] = []
    x = leaf()
    with sg.record():
        handle = x.register_hook(noting(log, "x"))
        y = x * 2
        inner = y.register_hook(noting(log, "y"))
    handle.remove()
    inner.remove()
    sg.backward(y, torch.ones(2))
    assert log == []


# -- gradients that are not there


def test_tensor_hooks_of_a_root_run_though_no_input_is_behind_it() -> None:
    def step() -> Any:
        calls: list[str] = []
        x = torch.ones(2, requires_grad=True)
        a, b = x * 2, x.detach().requires_grad_() * 3
        b.register_hook(lambda g: calls.append("root"))
        b.grad_fn.register_prehook(lambda gs: calls.append("node"))
        torch.autograd.grad([b], [a], [x.detach()], allow_unused=True, retain_graph=True)
        torch.autograd.grad([b * 2], [a], [x.detach()], allow_unused=True, retain_graph=True)
        torch.autograd.grad([b, a * 2], [a], [x.detach()] * 2, allow_unused=True)
        return calls

    same(step)


def test_hooks_see_that_no_gradient_arrived() -> None:
    def program() -> Any:
        log: list[Any] = []

        class Two(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
                return a * 1, b * 1

            @staticmethod
            def backward(ctx: Any, ga: Tensor, gb: Tensor) -> Any:
                log.append(("function", show(ga), show(gb)))
                return ga, None

        a, b = leaf(), leaf(3, 4)
        b1 = b * 2
        p, q = Two.apply(a * 2, b1)
        b1.register_hook(noting(log, "b1"))
        b1.grad_fn.register_prehook(noting(log, "before b1"))
        b1.grad_fn.register_hook(noting(log, "after b1"))
        b.register_hook(noting(log, "b"))
        b.register_post_accumulate_grad_hook(lambda t: log.append("after b"))
        q.register_hook(noting(log, "q"))
        p.sum().backward()
        return log, a.grad, b.grad

    log = same(program)[0]
    assert ("b", [None]) in log
    assert "after b" in log


def test_hooks_of_an_output_that_is_not_used() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = torch.arange(6.0, requires_grad=True)
        a, b, c = x.split(2)
        for name, t in {"a": a, "b": b, "c": c, "x": x}.items():
            t.register_hook(noting(log, name))
        b.retain_grad()
        c.retain_grad()
        (a * 1 + b * 2).sum().backward()
        return log, x.grad, b.grad, c.grad

    assert ("c", [None]) in same(program)[0]


def test_hooks_of_what_the_root_does_not_depend_on_do_not_run() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        y, z = x * 2, x * 3
        z.register_hook(noting(log, "z"))
        y.sum().backward()
        return log

    assert same(program) == []


def test_a_multi_grad_hook_with_tensors_that_get_nothing() -> None:
    def program() -> Any:
        log: list[Any] = []
        a, b, c = leaf(), leaf(3, 4), leaf(5, 6)
        register_multi_grad_hook((a, b, c), noting(log, "all"))
        (a * b).sum().backward()
        (c * b).sum().backward()
        return log

    assert len(same(program)) == 2


def test_what_a_node_without_a_gradient_saved_is_released() -> None:
    class OnlyFirst(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a + b

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g, None

    with sg.record():
        dead = leaf().sin()
        saved = dead.grad_fn._raw_saved_self
        OnlyFirst.apply(leaf(), dead).sum().backward()
    assert saved.state == "released"


# -- with `inputs`


def test_only_what_leads_to_the_inputs_runs() -> None:
    def program() -> Any:
        log: list[Any] = []
        x, w = leaf(), leaf(5, 6)
        y = x * 2
        z = y * w
        y.register_hook(noting(log, "y"))
        y.grad_fn.register_prehook(noting(log, "before y"))
        x.register_hook(noting(log, "x"))
        w.register_hook(noting(log, "w"))
        z.sum().backward(inputs=[y])
        return log, y.grad, x.grad, w.grad

    assert [entry[0] for entry in same(program)[0]] == ["y", "before y"]


def test_grad_runs_tensor_hooks_at_its_inputs_and_no_node_hooks() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: g * 10)
        y.grad_fn.register_prehook(noting(log, "node"))
        x.register_hook(noting(log, "x"))
        return torch.autograd.grad((y * y).sum(), [y]), log

    assert same(program)[1] == []


def test_grad_at_a_tensor_on_the_way_to_another_is_that_before_its_hooks() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: g * 10)
        y.grad_fn.register_prehook(noting(log, "node"))
        x.register_hook(lambda g: g * 7)
        return torch.autograd.grad((y * y).sum(), [x, y]), log

    same(program)


def test_grad_runs_no_post_accumulate_hooks() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        x.register_post_accumulate_grad_hook(lambda t: log.append("after x"))
        x.register_hook(lambda g: g * 7)
        return torch.autograd.grad((x * x).sum(), [x]), log, x.grad

    assert same(program)[1] == []


# -- retain_grad


def test_retain_grad_of_a_leaf_does_nothing() -> None:
    def program() -> Any:
        x = leaf()
        x.retain_grad()
        x.sum().backward()
        return x.retains_grad, x.grad

    assert not same(program)[0]


def test_retain_grad_twice_retains_once() -> None:
    def program() -> Any:
        x = leaf()
        y = x * 2
        before = y.retains_grad
        y.retain_grad()
        y.retain_grad()
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return before, y.retains_grad, y.grad, x.grad

    assert same(program)[2].tolist() == [2.0, 2.0]


def test_retain_grad_follows_an_in_place_change_and_hooks_do_not() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        y = x * 2
        y.retain_grad()
        y.register_hook(noting(log, "old"))
        y.mul_(3)
        y.register_hook(noting(log, "new"))
        y.sum().backward()
        return log, y.grad, x.grad

    same(program)


def test_retain_grad_with_create_graph_can_be_differentiated() -> None:
    def program() -> Any:
        x = leaf()
        y = x * x
        y.retain_grad()
        (y * y).sum().backward(create_graph=True)
        return y.grad, torch.autograd.grad(y.grad.sum(), x)

    same(program)


def test_a_retained_tensor_that_is_gone_is_no_trouble() -> None:
    x = leaf()
    with sg.record():
        y = x * 2
        y.retain_grad()
        z = (y + 1).sum()
        del y
        z.backward()
    assert x.grad.tolist() == [2.0, 2.0]


# -- the node of a leaf


def test_hooks_on_a_leafs_node() -> None:
    def program() -> Any:
        log: list[Any] = []
        x = leaf()
        y = x.view_as(x)
        node = y.grad_fn.next_functions[0][0]
        node.register_prehook(lambda go: (log.append(("before", show(go))), (go[0] * 2,))[1])
        node.register_hook(lambda gi, go: log.append(("after", show(gi), show(go), show(x.grad))))
        x.register_hook(noting(log, "x"))
        x.register_post_accumulate_grad_hook(lambda t: log.append("after x"))
        y.sum().backward()
        return log, node.name(), node.variable is x, x.grad

    same(program)


def test_the_node_of_a_leaf_is_one_while_someone_holds_it() -> None:
    def program() -> Any:
        x = leaf()
        a, b = x * 2, x * 3
        one, other = (t.grad_fn.next_functions[0][0] for t in (a, b))
        return one is other

    assert same(program)


# -- grad mode, and derivatives of hooks


def test_grad_mode_in_hooks() -> None:
    def program() -> Any:
        log: list[bool] = []

        def note(*args: Any) -> None:
            log.append(torch.is_grad_enabled())

        x = leaf()
        y = x * 2
        y.register_hook(note)
        x.register_post_accumulate_grad_hook(note)
        y.grad_fn.register_hook(note)
        y.grad_fn.register_prehook(note)
        y.sum().backward(retain_graph=True)
        y.sum().backward(create_graph=True)
        return log

    assert same(program) == [False] * 4 + [True] * 4


def test_with_create_graph_what_a_hook_computes_is_differentiated() -> None:
    def program() -> Any:
        x = leaf()
        y = x * x
        y.register_hook(lambda g: g * x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return g, torch.autograd.grad(g.sum(), x)

    assert same(program)[1][0].tolist() == [4.0, 8.0]


def test_a_hook_that_leaves_grad_mode_changed_changes_nothing_else() -> None:
    def program() -> Any:
        x = leaf()
        y = x * x
        y.register_hook(lambda g: (torch.set_grad_enabled(True), None)[1])
        y.sum().backward()
        return torch.is_grad_enabled(), x.grad

    same(program)


# -- hooks that break the rules


@pytest.mark.parametrize("on_leaf", [True, False])
@pytest.mark.parametrize(
    ("returned", "error", "gist"),
    [
        ("text", TypeError, "str"),
        (torch.ones(3), RuntimeError, "has changed the"),
        (torch.ones(2, 1), RuntimeError, "has changed the"),
        (torch.ones(2, dtype=torch.float64), RuntimeError, "has changed the dtype"),
        (torch.ones(2, device="meta"), RuntimeError, "has changed the"),
    ],
)
def test_a_tensor_hook_that_returns_something_else(
    on_leaf: bool, returned: Any, error: type[Exception], gist: str
) -> None:
    x = leaf()
    with sg.record():
        y = x * 2
        (x if on_leaf else y).register_hook(lambda g: returned)
        with pytest.raises(error, match=gist):
            y.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("returned", [(), (torch.ones(2),) * 4, "text", (torch.ones(7), None)])
@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_node_hook_that_returns_something_else(register: str, returned: Any) -> None:
    def program() -> None:
        y = leaf() * 2
        getattr(y.grad_fn, register)(lambda *grads: returned)
        y.sum().backward()

    for context in (torch.enable_grad(), sg.record()):
        with context, pytest.raises((RuntimeError, TypeError)):
            program()


def test_a_hook_cannot_put_a_gradient_where_there_is_none() -> None:
    def program() -> None:
        x = torch.arange(4.0, requires_grad=True)
        a, b = x.split(2)
        b.register_hook(lambda g: torch.ones(2))
        a.sum().backward()

    both_raise(program, "can't replace a None gradient")


@pytest.mark.parametrize(
    ("call", "gist"),
    [
        (lambda: torch.ones(2).register_hook(lambda g: None), "doesn't require gradient"),
        (
            lambda: torch.ones(2).register_post_accumulate_grad_hook(lambda g: None),
            "doesn't require gradient",
        ),
        (
            lambda: (leaf() * 2).register_post_accumulate_grad_hook(lambda g: None),
            "non-leaf",
        ),
        (lambda: torch.ones(2).retain_grad(), "requires_grad=False"),
        (lambda: leaf().detach().retain_grad(), "requires_grad=False"),
    ],
)
def test_hooks_where_there_is_no_gradient(call: Callable[[], Any], gist: str) -> None:
    both_raise(call, gist)


# -- what a hook may ask


def test_what_a_hook_may_ask_the_engine() -> None:
    def program() -> Any:
        log: list[Any] = []
        x, w = leaf(), leaf()
        y = x * 2
        z = y * w

        def hook(grad: Tensor) -> None:
            node = torch._C._current_autograd_node()
            log.append((node is y.grad_fn, torch._C._current_graph_task_id() >= 0))
            log.append(torch._C._will_engine_execute_node(y.grad_fn))

        y.grad_fn.register_prehook(lambda go: hook(go[0]))
        z.sum().backward()
        return log, torch._C._current_graph_task_id()

    same(program)
