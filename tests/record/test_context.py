"""`record()` itself: what it switches on, for whom, and that nothing of it stays."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import stowgrad as sg
from stowgrad import _private
from stowgrad.context import suspended
from tests.helpers import (
    backward_works,
    in_thread,
    in_threads,
    leaves_nothing_behind,
    live_tensors,
    names_bound,
    thread_state,
)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float32, requires_grad=True)


@pytest.fixture(autouse=True)
def clean_thread() -> Iterator[None]:
    with leaves_nothing_behind():
        yield


# -- a context and a decorator


def test_as_a_context() -> None:
    x = leaf()
    with sg.record():
        assert sg.recording()
        (x * x).sum().backward()
    assert not sg.recording()
    assert x.grad.tolist() == [2.0, 4.0]


def test_as_a_decorator() -> None:
    @sg.record()
    def step(x: Tensor, power: int = 2) -> bool:
        """Docs."""
        (x**power).sum().backward()
        return sg.recording()

    x = leaf()
    for _ in range(2):
        assert step(x, power=2)
        assert not sg.recording()
    assert x.grad.tolist() == [4.0, 8.0]
    assert step.__name__ == "step"
    assert step.__doc__ == "Docs."


def test_it_can_be_nested() -> None:
    x = leaf()
    with sg.record():
        outer = thread_state()
        with sg.record():
            y = x * x
            assert thread_state() == outer, "the inner one adds nothing"
        assert sg.recording()
        y.sum().backward()
    assert x.grad.tolist() == [2.0, 4.0]


def test_one_object_can_be_entered_again() -> None:
    context = sg.record()
    for _ in range(2):
        with context, context:
            assert sg.recording()
        assert not sg.recording()


def test_a_decorated_function_may_call_itself() -> None:
    @sg.record()
    def power(x: Tensor, n: int) -> Tensor:
        return x if n == 1 else power(x, n - 1) * x

    x = leaf()
    sg.backward(power(x, 5), torch.ones(2))
    assert x.grad.tolist() == [5.0, 80.0]


def test_a_graph_may_be_continued_in_another_block() -> None:
    x = leaf()
    with sg.record():
        y = x * 3
    with sg.record():
        (y * y).sum().backward()
    assert x.grad.tolist() == [18.0, 36.0]


def test_below_modes_of_the_users() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    x = leaf()
    with Counting() as outer, sg.record(), Counting() as inner:
        y = x * x
        y.sum().backward()
    assert x.grad.tolist() == [2.0, 4.0]
    assert inner.count >= 2
    assert outer.count >= 2


# -- nothing stays


@pytest.fixture
def before() -> tuple[Any, Any]:
    return thread_state(), names_bound()


def assert_restored(before: tuple[Any, Any]) -> None:
    assert thread_state() == before[0]
    changed = {k for k, v in names_bound().items() if before[1].get(k) != v}
    assert {f"{owner.__name__}.{name}" for owner, name in changed} == set()
    assert before[1].keys() == names_bound().keys()


def test_it_binds_names_while_it_lasts(before: Any) -> None:
    """So that the tests below would see a name that stayed."""
    with sg.record():
        changed = {k for k, v in names_bound().items() if before[1].get(k) != v}
        names = {name for _, name in changed}
        assert {"grad_fn", "is_leaf", "requires_grad", "register_hook"} <= names
        assert thread_state() != before[0]


def test_everything_is_restored_after_it(before: Any) -> None:
    with sg.record():
        (leaf() * 2).sum().backward()
    assert_restored(before)


def test_everything_is_restored_after_an_exception(before: Any) -> None:
    with pytest.raises(KeyError), sg.record(), sg.record():
        raise KeyError
    assert_restored(before)
    backward_works()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_everything_is_restored_after_an_interrupt(before: Any, error: type) -> None:
    with pytest.raises(error), sg.record():
        raise error
    assert_restored(before)


def test_everything_is_restored_after_an_error_in_an_op(before: Any) -> None:
    with pytest.raises(RuntimeError, match=r"size|shape|inconsistent"), sg.record():
        leaf() @ torch.ones(3)
    assert_restored(before)


def test_everything_is_restored_after_an_error_in_a_backward(before: Any) -> None:
    with pytest.raises(ZeroDivisionError), sg.record():
        y = leaf() * 2
        y.register_hook(lambda g: 1 / 0)
        y.sum().backward()
    assert_restored(before)


def test_everything_is_restored_after_an_error_in_a_decorated_function(before: Any) -> None:
    @sg.record()
    def step() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        step()
    assert_restored(before)


def test_everything_is_restored_after_many_threads(before: Any) -> None:
    def work() -> None:
        for _ in range(20):
            with sg.record():
                (leaf() * 2).sum().backward()

    in_threads([work] * 6)
    assert_restored(before)


def test_names_stay_while_another_thread_records(before: Any) -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with sg.record():
            entered.set()
            assert leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    with sg.record():
        pass
    x = leaf()
    y = x * x
    assert y.grad_fn.name() == "MulBackward0"
    assert not y.is_leaf
    y.sum().backward()  # PyTorch's
    assert x.grad.tolist() == [2.0, 4.0]
    leave.set()
    thread.join()
    assert_restored(before)


def test_user_hooks_and_modes_inside_do_not_leak(before: Any) -> None:
    with pytest.raises(KeyError), sg.record():
        sg.push_hooks(lambda t: t, lambda p: p)
        with torch.no_grad():
            try:
                raise KeyError
            finally:
                sg.pop_hooks()
    assert_restored(before)


# -- threads


def test_another_thread_uses_pytorchs_autograd_at_the_same_time() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    data = torch.randn(5, 3, dtype=torch.float64)
    net(data).square().sum().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()

    def ours() -> None:
        for _ in range(10):
            with sg.record():
                net(data).square().sum().backward()

    def theirs() -> None:
        for _ in range(10):
            loss = net(data).square().sum()
            assert _private.native_grad_fn(loss) is loss.grad_fn
            loss.backward()

    copies = [copy.deepcopy(net) for _ in range(2)]

    def theirs_apart() -> None:
        for _ in range(10):
            torch.autograd.grad(copies[0](data).square().sum(), list(copies[0].parameters()))

    in_threads([ours, theirs_apart, ours, theirs_apart])
    assert_close([p.grad for p in net.parameters()], [20 * w for w in want])
    assert [p.grad for p in copies[0].parameters()] == [None] * 4
    net.zero_grad()
    in_thread(theirs)
    assert_close([p.grad for p in net.parameters()], [10 * w for w in want])


def test_a_thread_started_inside_does_not_record() -> None:
    with sg.record():
        assert in_thread(sg.recording) is False
        assert in_thread(lambda: (leaf() * 2).grad_fn.name()) == "MulBackward0"
        assert in_thread(lambda: _private.native_grad_fn(leaf() * 2)) is not None


def test_a_graph_may_be_run_in_another_thread() -> None:
    x = leaf()
    with sg.record():
        loss = (x * x).sum()
    in_thread(lambda: sg.backward(loss))
    assert x.grad.tolist() == [2.0, 4.0]


# -- a tracked tensor outside


def tracked() -> tuple[Tensor, Tensor]:
    x = leaf()
    with sg.record():
        return x, x * 3


OUTSIDE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "backward from it": lambda x, y: y.backward(torch.ones(2)),
    "backward from what was computed from it": lambda x, y: (y * 2).sum().backward(),
    "torch.autograd.backward": lambda x, y: torch.autograd.backward([y], [torch.ones(2)]),
    "grad with respect to the leaf": lambda x, y: torch.autograd.grad(y.sum(), x),
    "grad with respect to it": lambda x, y: torch.autograd.grad(y.sum(), y),
    "mixed with what PyTorch tracks": lambda x, y: (y + x * 2).sum().backward(),
    "mixed with the leaf": lambda x, y: (y * x).sum().backward(),
    "a view made outside": lambda x, y: y.view(2, 1).sum().backward(),
    "an in-place op on a native tensor": lambda x, y: (x * 2).mul_(y).sum().backward(),
    "through a module": lambda x, y: nn.Linear(2, 1)(y).sum().backward(),
    "an in-place change": lambda x, y: y.add_(1),
    "a hook": lambda x, y: y.register_hook(lambda g: None),
    "a deep copy": lambda x, y: copy.deepcopy(y),
    "a custom function": lambda x, y: _Double.apply(y).sum().backward(),
}


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


@pytest.mark.parametrize("use", OUTSIDE.values(), ids=list(OUTSIDE))
@pytest.mark.parametrize("elsewhere", ["after", "another thread"])
def test_a_tracked_tensor_outside_fails_loudly(use: Any, elsewhere: str) -> None:
    x, y = tracked()
    with pytest.raises(RuntimeError):
        if elsewhere == "after":
            use(x, y)
        else:
            with sg.record():
                in_thread(lambda: use(x, y))
    assert x.grad is None
    with sg.record():  # and it works on where it is recorded
        (y * 2).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda t: t.view(2, 1),
    "select": lambda t: t[0],
    "slice": lambda t: t[:1],
    "expand": lambda t: t.expand(3, 2),
    "transpose": lambda t: t.view(1, 2).t(),
    "split": lambda t: t.split(1)[1],
    "a view of a view": lambda t: t.view(2, 1)[1],
    "in place through a view": lambda t: t.clone()[:1].mul_(2),
}


@pytest.mark.parametrize("of_leaf", [True, False])
@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_a_tracked_view_outside_fails_loudly(view: Any, of_leaf: bool) -> None:
    """PyTorch itself keeps track of views, whoever made them."""
    x = leaf()
    with sg.record():
        v = view(x if of_leaf else x * 3)
    with pytest.raises(sg.OutsideRecordError, match="stowgrad recorded"):
        v.sum().backward()
    with pytest.raises(sg.OutsideRecordError, match="stowgrad recorded"):
        v.backward(torch.ones_like(v))
    assert x.grad is None


def test_the_error_says_what_to_do() -> None:
    _, y = tracked()
    with pytest.raises(sg.OutsideRecordError, match=r"float32 \[2\].*record\(\).*sg\.backward"):
        y.backward(torch.ones(2))


def test_grad_past_a_tracked_tensor_outside_fails_loudly() -> None:
    x, y = tracked()
    with pytest.raises(sg.OutsideRecordError, match="go past"):
        torch.autograd.grad((y + x).sum(), x)


def test_a_tracked_tensor_outside_is_a_value_without_grad_mode() -> None:
    _, y = tracked()
    with torch.no_grad():
        assert (y + 1).tolist() == [4.0, 7.0]
    assert y.detach().tolist() == [3.0, 6.0]
    assert y.tolist() == [3.0, 6.0]
    assert y.requires_grad


def test_pickling_keeps_the_data_and_leaves_the_graph() -> None:
    x, y = tracked()
    for where in (sg.record(), torch.enable_grad()):
        with where:
            again = pickle.loads(pickle.dumps(y.detach()))
            assert again.tolist() == [3.0, 6.0]
    with sg.record():
        again = pickle.loads(pickle.dumps(y))
        assert again.tolist() == [3.0, 6.0]
        assert again.grad_fn is None
        y.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


# -- a tensor of PyTorch's graph inside


def pair() -> tuple[Tensor, Tensor]:
    x = leaf()
    return x, x * 3


INSIDE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an op": lambda x, p: p + 1,
    "an op with a leaf": lambda x, p: p * x,
    "a list of tensors": lambda x, p: torch.cat([x, p]),
    "a foreach op": lambda x, p: torch._foreach_mul([x, p], 2.0),
    "a view": lambda x, p: p.view(2, 1),
    "an item": lambda x, p: p[0],
    "a branch of where": lambda x, p: torch.where(x > 0, x, p),
    "an in-place op on it": lambda x, p: p.add_(1),
    "an in-place op with it": lambda x, p: (x * 2).add_(p),
    "an assigned slice": lambda x, p: (x * 2).__setitem__(slice(1), p[:1]),
    "backward": lambda x, p: p.backward(torch.ones(2)),
    "grad of it": lambda x, p: torch.autograd.grad(p, x, torch.ones(2)),
    "grad with respect to it": lambda x, p: torch.autograd.grad(x.sum(), p),
    "a custom function": lambda x, p: _Double.apply(p),
    "checkpointing": lambda x, p: torch.utils.checkpoint.checkpoint(
        torch.sin, p, use_reentrant=False
    ),
    "a gradient edge": lambda x, p: torch.autograd.graph.get_gradient_edge(p),
    "an output argument": lambda x, p: torch.add(torch.ones(2), 1, out=p),
    "a module": lambda x, p: nn.Linear(2, 1)(p),
}


@pytest.mark.parametrize("use", INSIDE.values(), ids=list(INSIDE))
def test_a_tensor_that_pytorch_tracks_inside_fails_loudly(use: Any) -> None:
    x, p = pair()
    with sg.record(), pytest.raises(RuntimeError):
        use(x, p)
    p.sum().backward()  # and PyTorch's graph is as it was
    assert x.grad.tolist() == [3.0, 3.0]


def test_that_error_says_what_to_do() -> None:
    _, p = pair()
    with (
        sg.record(),
        pytest.raises(sg.OutsideRecordError, match=r"MulBackward0.*inside record\(\).*detach"),
    ):
        p + 1


def test_a_tensor_that_pytorch_tracks_inside_is_a_value_without_grad_mode() -> None:
    _, p = pair()
    with sg.record():
        with torch.no_grad():
            assert (p + 1).tolist() == [4.0, 7.0]
        assert not p.detach().requires_grad
        assert (p > 3).tolist() == [False, True]
        assert p.tolist() == [3.0, 6.0]


def test_leaves_may_be_shared_by_both() -> None:
    x = leaf()
    (x * 2).sum().backward()
    with sg.record():
        (x * 3).sum().backward()
    (x * 5).sum().backward()
    assert x.grad.tolist() == [10.0, 10.0]


# -- no node of PyTorch's


def native_nodes_made(fn: Callable[[], Any]) -> int:
    """How many autograd nodes PyTorch makes in this thread while `fn` runs: it numbers them."""
    number = torch._C._autograd._get_sequence_nr
    before = number()
    fn()
    return number() - before


def test_the_count_of_native_nodes_counts() -> None:
    x = leaf()
    assert native_nodes_made(lambda: (x * 2).exp()) == 2
    assert in_thread(lambda: native_nodes_made(lambda: leaf() * 2)) == 1
    with sg.record(), suspended():
        assert native_nodes_made(lambda: x * 2) == 1


class Net(nn.Module):
    """A bit of everything that a training step meets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.conv = nn.Conv1d(8, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 10))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.rnn(hidden)[0]
        hidden = torch.utils.checkpoint.checkpoint(self.layer, hidden, use_reentrant=False)
        hidden = self.norm(self.conv(hidden.transpose(1, 2))).relu_()
        pooled = hidden.max(2).values
        pooled[:, 0] *= 2
        return self.head(pooled)


def training_step(net: Net, optimizer: Any) -> None:
    tokens = torch.arange(12).view(2, 6) % 10
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(tokens)
    loss = nn.functional.cross_entropy(logits.float(), torch.tensor([1, 2]))
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_no_native_node_is_made_in_a_training_step(optimizer: str) -> None:
    net = Net()
    step = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1)
    with sg.record():
        made = native_nodes_made(lambda: [training_step(net, step) for _ in range(2)])
    assert made == 0
    assert native_nodes_made(lambda: training_step(net, step)) > 50, "without recording"


def test_no_native_node_is_made_by_a_double_backward() -> None:
    x = leaf()

    def program() -> None:
        (g,) = torch.autograd.grad((x.exp() * x.sin()).sum(), x, create_graph=True)
        g.square().sum().backward()

    with sg.record():
        assert native_nodes_made(program) == 0
    assert x.grad is not None


def test_a_custom_functions_output_has_no_native_node() -> None:
    """Its `ctx` is an object of PyTorch's class, which has a number; it is in no graph."""
    with sg.record():
        y = _Double.apply(leaf())
        assert _private.native_grad_fn(y) is None
        y = _Double.apply(y * 2)
        assert _private.native_grad_fn(y) is None
        assert y.grad_fn is not None


def leads_to_native_node(tensor: Tensor) -> bool:
    """Asking a view whose base was changed makes a node on the spot; that one does not count."""
    made = torch._C._autograd._get_sequence_nr()
    node = _private.native_grad_fn(tensor)
    return node is not None and made == torch._C._autograd._get_sequence_nr()


def test_no_live_tensor_leads_to_a_native_node() -> None:
    """Seen from the tensors: whatever an op gave, and whatever anyone kept of it."""
    net = nn.Sequential(Net())
    net.register_forward_hook(lambda m, a, out: _Double.apply(out))
    step = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[Tensor] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            seen.extend(t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))
            return out

    before = {id(t) for t in live_tensors()}
    with sg.record(), Watch():
        training_step(net, step)
    assert len(seen) > 100
    made = [t for t in live_tensors() if id(t) not in before]
    assert len(made) > 100
    once = {id(t): t for t in (*seen, *made)}
    assert [t.shape for t in once.values() if leads_to_native_node(t)] == []
    canary = leaf() * 2
    assert any(t is canary and leads_to_native_node(t) for t in live_tensors())
    seen.clear()
