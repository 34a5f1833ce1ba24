"""Programs, their cache, and what is said when something goes wrong."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import stowgrad as sg
from stowgrad import engine
from stowgrad.context import this_thread
from tests.helpers import Recording, backward_works, in_threads, leaves_nothing_behind

cache = sg.program_cache


@pytest.fixture(autouse=True)
def from_scratch() -> Iterator[None]:
    cache.clear()
    torch.manual_seed(0)
    with leaves_nothing_behind(), sg.record():
        yield
    cache.clear()


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=dtype, requires_grad=True)


def line() -> int:
    """The number of the caller's line."""
    return sys._getframe(1).f_lineno


class Ops(TorchDispatchMode):
    """Every op that runs."""

    passive = True

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append(func._schema.name)
        return func(*args, **(kwargs or {}))


# -- capture


def test_capture_runs_nothing_and_leaves_the_graph_as_it_is() -> None:
    x, log = leaf(), []
    y = x.exp()
    y.register_hook(lambda g: log.append("hook"))
    loss = (y * x).sin().sum()
    with Ops() as ops:
        program = sg.capture(loss)
    assert set(ops.log) <= {"aten::ones_like"}, "the gradient of the loss, and no more"
    assert log == [] and x.grad is None and program.runs == 0
    assert (cache.hits, cache.misses, len(cache)) == (0, 0, 0)
    loss.backward()
    d = x.detach()
    assert_close(x.grad, (d.exp() * d).cos() * (d.exp() * d + d.exp()))
    assert log == ["hook"]


def test_capture_of_inputs_and_of_given_gradients() -> None:
    x, w = leaf(), leaf()
    y = x.exp() * w
    program = sg.capture(y, torch.ones_like(y), inputs=[x, w])
    kinds = [n.meta["input"][0] for n in program.graph.nodes if n.op == "placeholder"]
    assert kinds.count("grad") == 1
    (output,) = [n for n in program.graph.nodes if n.op == "output"]
    assert len(output.args[0]) == 2
    assert not any("accumulate" in str(n.target) for n in program.graph.nodes)


def test_an_input_that_nothing_leads_to_has_no_gradient() -> None:
    x, z = leaf(), leaf()
    program = sg.capture(x.sin().sum(), inputs=[z, x])
    (output,) = [n for n in program.graph.nodes if n.op == "output"]
    assert output.args[0][0] is None and output.args[0][1] is not None


def test_capture_of_what_has_no_graph() -> None:
    with pytest.raises(RuntimeError, match=r"does not require grad"):
        sg.capture(torch.ones(()))
    x = leaf()
    loss = x.sin().sum()
    loss.backward()
    with pytest.raises(sg.Uncapturable, match="its graph was freed"):
        sg.capture(loss)


def test_capture_outside_record() -> None:
    x = leaf()
    loss = x.sin().sum()
    assert sg.capture(loss).runs == 0


def test_what_a_program_says_mentions_the_forward_lines() -> None:
    x, pair = leaf(), Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        y, first = x.sin(), line()
    z, second = (y * x).sum(), line()
    program = sg.capture(z)
    for text in (str(program), program.source):
        assert f"test_programs.py:{first}" in text
        assert f"test_programs.py:{second}" in text
    assert "packed by a hook, saved by aten.sin" in str(program)
    assert "unpack" in program.source
    assert f"test_programs.py:{second}" in repr(program)
    assert program.name.startswith("aten.sum")


def test_a_program_holds_no_tensors_of_its_step() -> None:
    x = leaf()
    with sg.compiled_backward():
        y = x.exp()
        z = y.sin()
        w = torch.randn(3, dtype=torch.float64)
        loss = (z * w).sum()
        refs = [weakref.ref(t.untyped_storage()) for t in (y, z, w, loss)]
        del y, z, w
        loss.backward()
        node = weakref.ref(loss.grad_fn)
        del loss
        gc.collect()
        assert [r() for r in refs] == [None] * 4
        assert node() is None
        assert len(cache) == 1
        leaves = weakref.ref(x)
        del x
        gc.collect()
        assert leaves() is None, "nor its leaves"


def test_a_captured_program_holds_no_graph() -> None:
    x = leaf()
    y = x.exp()
    loss = y.sum()
    program = sg.capture(loss)
    storage, node = weakref.ref(y.untyped_storage()), weakref.ref(loss.grad_fn)
    del x, y, loss
    gc.collect()
    assert storage() is None and node() is None
    assert "aten.exp" in str(program)


# -- the cache


def step(x: Tensor) -> None:
    (x.sin() * 2).exp().sum().backward()


def test_the_second_step_is_a_hit() -> None:
    x = leaf()
    with sg.compiled_backward():
        for n in range(3):
            step(x)
            assert (cache.hits, cache.misses) == (n, 1)
    assert cache.programs[0].runs == 3
    assert cache.reasons == {"the first backward of its kind": 1}
    assert not cache.fallbacks


def test_another_batch_or_length_is_a_hit() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    sizes = [(7, 5), (2, 5), (3, 7), (4, 9), (9, 4), (6, 11)]
    data = [torch.randn(b, n, 8) for b, n in sizes]
    expected = []
    for x in data:
        layer.zero_grad()
        layer(x).square().mean().backward()
        expected.append([p.grad for p in layer.parameters()])
    with sg.compiled_backward():
        for x, want in zip(data, expected, strict=True):
            layer.zero_grad()
            layer(x).square().mean().backward()
            for p, w in zip(layer.parameters(), want, strict=True):
                assert torch.equal(p.grad, w)
    assert (cache.hits, cache.misses) == (len(sizes) - 1, 1), cache.report()
    assert not cache.fallbacks


def test_sizes_that_were_equal_by_chance() -> None:
    """Are told apart by the second program at the latest, and there is no third."""
    w = leaf(2, 2)
    with sg.compiled_backward():
        for batch, length in ((5, 5), (5, 6), (7, 7), (8, 3)):
            (torch.ones(batch, length, 2, dtype=torch.float64) @ w).exp().sum().backward()
    assert (cache.hits, cache.misses) == (2, 2), cache.report()


def changed_step(what: str) -> Callable[[int], None]:
    """A step whose second time differs from its first in one way."""
    x, w, pair = leaf(4), leaf(4), Recording()

    def run(i: int) -> None:
        leaf_ = x.detach().to(torch.float32) if what == "dtype" and i else x.detach()
        a = leaf_.requires_grad_()
        if what == "shape" and i:
            a = x.detach().repeat(2, 1).requires_grad_()
        y = a.sin()
        if what == "hook" and i:
            y.register_hook(lambda g: None)
        if what == "saved hooks" and i:
            with sg.saved_tensors_hooks(pair.pack, pair.unpack):
                z = y.exp()
        else:
            z = y.exp()
        if what == "graph" and i:
            z = z.cos()
        if what == "argument":
            z = z.clamp(min=-i)
        if what == "leaf hook" and i:
            a.register_hook(lambda g: None)
        total = z.sum()
        if what == "create_graph" and i:
            grad(total, a, create_graph=True)
        elif what == "inputs" and i:
            total.backward(inputs=[w, a][1:])
        else:
            total.backward()

    return run


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("shape", r"aten\.\w+ .*test_programs\.py:\d+: .*(shape|dims)"),
        ("dtype", r"(the outputs|aten\.\w+ .*test_programs\.py:\d+): the dtype"),
        ("hook", r"aten\.sin .*test_programs\.py:\d+: a hook that was not there before"),
        ("leaf hook", r": a hook that was not there before"),
        ("saved hooks", r"aten\.exp .*test_programs\.py:\d+: "),
        ("graph", r"aten\.exp .*test_programs\.py:\d+: another op"),
        ("argument", r"aten\.clamp .*test_programs\.py:\d+: (other arguments|the argument 'min')"),
    ],
)
def test_a_miss_says_why(what: str, reason: str) -> None:
    run = changed_step(what)
    with sg.compiled_backward():
        run(0)
        run(1)
        assert cache.misses == 2, cache.report()
        (why,) = set(cache.reasons) - {"the first backward of its kind"}
        assert re.search(reason, why), why
        assert why in cache.report()
        run(0)
        run(1)
    assert (cache.hits, cache.misses) == (2, 2), "both are kept"


@pytest.mark.parametrize("what", ["create_graph", "inputs"])
def test_another_flag_is_another_program(what: str) -> None:
    run = changed_step(what)
    with sg.compiled_backward():
        for i in (0, 1, 0, 1):
            run(i)
    assert (cache.hits, cache.misses) == (2, 2)
    assert cache.reasons == {"the first backward of its kind": 2}


def test_other_options_are_other_programs() -> None:
    x = leaf()
    for options in ({}, {"reorder": True}, {"window": 1}):
        for _ in range(2):
            with sg.compiled_backward(**options):
                step(x)
    assert (cache.hits, cache.misses, len(cache)) == (3, 3, 3)


def on_its_own_line(n: int) -> Callable[[Tensor], Tensor]:
    """A function whose line is the n-th: programs go by the line of their root."""
    scope: dict[str, Any] = {}
    exec(compile("\n" * n + "def f(x): return (x * x).sum()", f"<made {n}>", "exec"), scope)
    return scope["f"]


def test_the_cache_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(cache, "size", 3)
    x = leaf()
    fns = [on_its_own_line(n) for n in range(6)]
    with sg.compiled_backward():
        for fn in fns:
            fn(x).backward()
            assert len(cache) <= 3
        assert cache.misses == 6
        fns[5](x).backward()
        assert cache.hits == 1, "the last one is there"
        fns[0](x).backward()
        assert cache.misses == 7, "the first one is gone"
        fns[5](x).backward()
        assert cache.hits == 2, "what is used stays"


def test_too_many_variants_of_one_backward_run_node_by_node(monkeypatch: Any) -> None:
    monkeypatch.setattr(cache, "variants", 3)
    x = leaf()

    def deep(n: int) -> Tensor:
        y = x
        for _ in range(n):
            y = y.sin()
        return y.sum()

    with sg.compiled_backward():
        for n in range(1, 7):
            x.grad = None
            deep(n).backward()
            found = x.grad
            assert_close(found, engine_grad(lambda n=n: deep(n), x), rtol=0, atol=0)
    (reason,) = cache.fallbacks
    assert reason.startswith("more than 3 programs for ") and "test_programs.py" in reason
    assert cache.fallbacks[reason] == 3
    assert len(cache) == 3
    assert reason in cache.report()


def engine_grad(make: Callable[[], Tensor], x: Tensor) -> Tensor:
    """The gradient by the eager engine."""
    run, this_thread.backward = this_thread.backward, None
    try:
        return grad(make(), x)[0]
    finally:
        this_thread.backward = run


def test_clear_and_report() -> None:
    x = leaf()
    with sg.compiled_backward():
        step(x)
        step(x)
        with torch.autograd.set_detect_anomaly(True):
            step(x)
    text = cache.report()
    assert text == repr(cache)
    first = text.splitlines()[0]
    assert first == ("backward programs: 1 kept, 1 hits, 1 misses, 1 backwards run node by node")
    assert "missed 1 x: the first backward of its kind" in text
    assert "node by node 1 x: anomaly detection is on" in text
    assert "aten.sum" in text and "test_programs.py" in text and "2 runs" in text
    cache.clear()
    assert len(cache) == 0 and cache.programs == []
    assert cache.report().startswith("backward programs: 0 kept, 0 hits, 0 misses, 0 backwards")
    with sg.compiled_backward():
        step(x)
    assert (cache.hits, cache.misses) == (0, 1)


def test_threads_over_shared_parameters() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    data = [torch.randn(2 + i % 3, 4, dtype=torch.float64) for i in range(8)]
    for x in data:
        for _ in range(6):
            net(x).square().sum().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()

    def work(x: Tensor) -> Callable[[], None]:
        def run() -> None:
            with sg.record(), sg.compiled_backward():
                for _ in range(6):
                    net(x).square().sum().backward()

        return run

    in_threads([work(x) for x in data])
    for p, e in zip(net.parameters(), expected, strict=True):
        assert_close(p.grad, e)
    assert not cache.fallbacks
    assert cache.hits + cache.misses == 48


def test_threads_that_start_at_once_make_one_program() -> None:
    def run() -> None:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with sg.record(), sg.compiled_backward():
            step(x)

    in_threads([run] * 8)
    assert (cache.hits, cache.misses, len(cache)) == (7, 1, 1)


# -- errors


def clean(loss: Tensor | None = None) -> None:
    """The thread is as it was, and a fresh backward works; the graph of `loss` is gone."""
    assert engine.current_task() is None
    assert torch.is_grad_enabled()
    with sg.compiled_backward():
        backward_works()
        if loss is not None:
            with pytest.raises(sg.GraphFreedError, match="a second time"):
                loss.backward()


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


pointed = pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")


@pointed
def test_an_unpack_hook_that_raises_points_at_the_forward_line() -> None:
    def unpack(t: Tensor) -> Tensor:
        raise OSError("gone")

    for _ in range(2):
        x = leaf()
        with sg.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
            y, where = x.sin(), line()
        loss = y.exp().sum()
        with sg.compiled_backward(), pytest.raises(OSError, match="gone") as error:
            loss.backward()
        assert f"in the backward of aten.sin, recorded at {__file__}:{where}" in notes(error.value)
        assert x.grad is None
        clean(loss)
    assert cache.misses >= 1


@pointed
@pytest.mark.parametrize("kind", ["tensor", "pre", "post", "leaf", "post accumulate"])
def test_a_hook_that_raises_points_at_the_forward_line(kind: str) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("in the hook")

    x = leaf()
    y, where = x.sin(), line()
    if kind == "tensor":
        y.register_hook(fail)
    elif kind == "pre":
        y.grad_fn.register_prehook(fail)
    elif kind == "post":
        y.grad_fn.register_hook(fail)
    elif kind == "leaf":
        x.register_hook(fail)
    else:
        x.register_post_accumulate_grad_hook(fail)
    with sg.compiled_backward(), pytest.raises(KeyError, match="in the hook") as error:
        y.exp().sum().backward()
    if kind in ("tensor", "pre", "post"):
        assert f":{where}" in notes(error.value)
    clean()


@pointed
def test_a_custom_function_that_raises_points_at_the_forward_line() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise ZeroDivisionError("bad")

    x = leaf()
    y, where = Bad.apply(x.sin()), line()
    with sg.compiled_backward(), pytest.raises(ZeroDivisionError, match="bad") as error:
        y.sum().backward()
    assert f":{where}" in notes(error.value)
    clean()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_tensor_changed_in_place_is_the_eager_error(hooked: bool) -> None:
    def changed(backward: Callable[[Tensor], None]) -> str:
        x = leaf()
        y = x * 2
        if hooked:
            with sg.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
                z = y.sin()
        else:
            z = y.sin()
        y.add_(1)
        with pytest.raises(sg.SavedTensorChanged) as error:
            backward(z.sum())
        assert x.grad is None
        clean()
        return str(error.value)

    def captured(loss: Tensor) -> None:
        with sg.compiled_backward():
            loss.backward()

    expected = changed(lambda loss: loss.backward())
    assert "saved by aten.sin" in expected and "aten.add_" in expected
    assert changed(captured) == expected
    assert changed(captured) == expected, "and from the cache"
    assert not set(cache.fallbacks) - {"its graph was freed"}


def test_a_second_backward_is_the_references_error() -> None:
    x = leaf()
    for _ in range(2):
        loss = x.sin().sum()
        with sg.compiled_backward():
            loss.backward()
        clean(loss)


def test_an_error_in_the_capture_is_a_fall_back(monkeypatch: Any) -> None:
    """Whatever it is: the eager engine can do it, or says what is wrong."""
    from stowgrad.program import program

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("out of luck")

    monkeypatch.setattr(program, "capture", broken)
    x = leaf()
    with sg.compiled_backward():
        step(x)
    assert x.grad is not None
    (reason,) = cache.fallbacks
    assert "out of luck" in reason
    with pytest.raises(sg.Uncapturable, match="out of luck"):
        sg.capture(x.sin().sum())


# -- anomaly detection


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_anomaly_detection_falls_back_and_names_the_line() -> None:
    x = torch.zeros(3, requires_grad=True)
    with sg.compiled_backward(), torch.autograd.set_detect_anomaly(True):
        y, where = x.sqrt() * 0, line()
        with pytest.raises(RuntimeError, match="nan values") as error:
            y.sum().backward()
    assert f"test_programs.py:{where}" in str(error.value) + notes(error.value)
    assert cache.fallbacks == {"anomaly detection is on": 1}
    assert "node by node 1 x: anomaly detection is on" in cache.report()
    clean()


# -- hooks that come late


def test_a_hook_registered_during_backward_on_a_later_node_is_an_error() -> None:
    for _ in range(2):
        x = leaf()
        y, where = x.sin(), line()
        z = y.exp()
        z.register_hook(lambda g, y=y: y.register_hook(lambda g: None) and None)
        with sg.compiled_backward(), pytest.raises(sg.GradientError, match="a hook was reg") as e:
            z.sum().backward()
        assert f":{where}" in str(e.value) and "Register it before backward" in str(e.value)
        clean()


def test_a_hook_registered_during_backward_on_a_leaf_runs() -> None:
    log: list[str] = []
    for n in (1, 2):
        x = leaf()
        y = x.sin()

        def hook(g: Tensor, x: Tensor = x) -> None:
            x.register_hook(lambda g: log.append("x"))
            x.register_post_accumulate_grad_hook(lambda t: log.append("after x"))

        y.register_hook(hook)
        with sg.compiled_backward():
            y.sum().backward()
        assert log == ["x", "after x"] * n


# -- the context


def test_as_an_argument_of_record() -> None:
    def work() -> None:
        x = leaf()
        with sg.record(sg.compiled_backward()):
            step(x)
            step(x)
        assert this_thread.backward is None

    in_threads([work])
    assert (cache.hits, cache.misses) == (1, 1)


def test_as_a_decorator() -> None:
    @sg.compiled_backward()
    def train(x: Tensor, again: bool = True) -> str:
        step(x)
        if again:
            train(x, False)
        step(x)
        return "done"

    assert train(leaf()) == "done"
    assert (cache.hits, cache.misses) == (3, 1)
    assert this_thread.backward is None


def test_nested_the_innermost_applies() -> None:
    x = leaf()
    with sg.compiled_backward() as outer:
        step(x)
        with sg.compiled_backward(reorder=True) as inner:
            assert this_thread.backward == inner.run
            step(x)
        assert this_thread.backward == outer.run
        step(x)
        with outer:
            step(x)
        assert this_thread.backward == outer.run
    assert this_thread.backward is None
    assert (cache.hits, cache.misses) == (2, 2)


def test_an_exception_in_the_body_restores_what_was_there() -> None:
    with sg.compiled_backward() as outer:
        with pytest.raises(KeyError):
            with sg.compiled_backward(window=1):
                raise KeyError
        assert this_thread.backward == outer.run
    with pytest.raises(KeyError), sg.compiled_backward():
        raise KeyError
    assert this_thread.backward is None


def test_other_threads_are_not_affected() -> None:
    inside, done = threading.Event(), threading.Event()

    def captures() -> None:
        with sg.record(), sg.compiled_backward():
            inside.set()
            done.wait(30)
            step(leaf())

    def plain() -> None:
        inside.wait(30)
        assert this_thread.backward is None
        with sg.record():
            step(leaf())
        assert cache.misses == 0
        done.set()

    in_threads([captures, plain])
    assert cache.misses == 1


def test_sg_backward_and_sg_grad_and_outside_record() -> None:
    x = leaf()
    loss, other = x.sin().sum(), x.sin().sum()
    with sg.compiled_backward():
        sg.backward(loss)
        (g,) = sg.grad(other, x)
    assert_close(x.grad, g)
    assert cache.misses == 2


def test_a_bad_window() -> None:
    with pytest.raises(ValueError, match="window must be 0 or more"):
        sg.compiled_backward(window=-1)
