"""sg.compile: a region of the forward as one node, against PyTorch's autograd."""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowgrad as sg
from stowgrad.inspect import Meter
from stowgrad.program.forward import CompiledNode
from stowgrad.program.forward import compile as sg_compile

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import train_gpt

TIGHT = {"atol": 1e-9, "rtol": 1e-9}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def nodes(*tensors: Tensor) -> list[CompiledNode]:
    """The compiled regions in the graph of these."""
    seen: dict[Any, None] = {}
    todo = [t.grad_fn for t in tensors]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo += [n for n, _ in node.next_functions]
    return [n for n in seen if isinstance(n, CompiledNode)]


def flat(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor)]


def run(fn: Any, inputs: list[Tensor], params: list[Tensor], **kwargs: Any) -> Any:
    """Outputs and gradients of one call. Each float output takes part with a weight of its own."""
    leaves = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in inputs
    ]
    for p in params:
        p.grad = None
    torch.manual_seed(1)
    outs = flat(fn(*leaves, **kwargs))
    regions = nodes(*outs)
    total = sum(
        ((o * torch.linspace(1, 2, o.numel(), dtype=o.dtype).view(o.shape)).sum() * (i + 1))
        for i, o in enumerate(outs)
        if o.requires_grad
    )
    if isinstance(total, Tensor):
        total.backward()
    grads = [x.grad for x in leaves if isinstance(x, Tensor)] + [p.grad for p in params]
    marks = [o.requires_grad for o in outs]
    return [o.detach().clone() for o in outs], grads, marks, len(regions)


def check(
    fn: Any, *inputs: Any, module: nn.Module | None = None, regions: int | None = 1, times: int = 2,
    compiled: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    params = list(module.parameters()) if module is not None else []
    compiled = sg_compile(fn) if compiled is None else compiled
    for _ in range(times):
        before = [] if module is None else [b.clone() for b in module.buffers()]
        expected = run(fn, list(inputs), params, **kwargs)
        after = [] if module is None else [b.clone() for b in module.buffers()]
        if module is not None:
            for b, old in zip(module.buffers(), before, strict=True):
                b.copy_(old)
        with sg.record():
            actual = run(compiled, list(inputs), params, **kwargs)
        torch.testing.assert_close(actual[0], expected[0], **TIGHT)
        for a, e in zip(actual[1], expected[1], strict=True):
            assert (a is None) == (e is None)
            if a is not None:
                torch.testing.assert_close(a, e, **TIGHT)
        assert actual[2] == expected[2]
        if regions is not None:
            assert actual[3] == regions
        if module is not None:
            torch.testing.assert_close(list(module.buffers()), after, **TIGHT)
    return compiled


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# -- functions and modules


def test_a_function_of_several_inputs_and_outputs():
    def f(x, y, scale, *, shift=0.0):
        h = (x @ y).tanh() * scale + shift
        return h.sin(), h.sum(0), (h > 0), h.detach() * 2

    check(f, leaf(3, 4), leaf(4, 5), 1.5, shift=0.25)


def test_an_output_that_does_not_take_part():
    def f(x, y):
        return (x * y).exp(), (x - y).sin()

    x, y = leaf(4), leaf(4)
    (expected,) = torch.autograd.grad(f(x, y)[0].sum(), x)
    with sg.record():
        a, _ = sg_compile(f)(x, y)
        (actual,) = torch.autograd.grad(a.sum(), x)
    torch.testing.assert_close(actual, expected, **TIGHT)


def test_a_module():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    compiled = check(model, leaf(3, 4), module=model)
    assert compiled.state_dict().keys()


def test_as_a_decorator():
    @sg_compile
    def f(x):
        return x.exp() * x

    @sg_compile(dynamic=True)
    def g(x):
        return x.exp() * x

    for fn in (f, g):
        x = leaf(3)
        with sg.record():
            y = fn(x)
            assert isinstance(y.grad_fn, CompiledNode)
            y.sum().backward()
        torch.testing.assert_close(x.grad, x.detach().exp() * (x.detach() + 1), **TIGHT)


def test_convolutions_and_batch_norm_whose_statistics_move_once():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 3),
    ).double()  # fmt: skip
    check(model, leaf(2, 2, 8, 8), module=model, times=3)
    assert model[1].num_batches_tracked == 3


def test_dropout_draws_once_and_its_backward_has_the_same_mask():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).double()
    check(model, leaf(5, 6), module=model, times=3)


def test_outputs_that_are_inputs_or_views():
    def f(x, y):
        h = x * 2
        return x, y.view(6), h.t(), h[0], h

    check(f, leaf(2, 3), leaf(3, 2), regions=None)


def test_what_is_tracked_before_and_after():
    inner = sg_compile(lambda x: x.sin() * x)

    def compiled(x):
        return inner(x * 3).exp()

    check(lambda x: ((x * 3).sin() * (x * 3)).exp(), leaf(4), compiled=compiled)


def test_a_view_of_a_tracked_tensor_as_input():
    inner = sg_compile(lambda x: x.sin() * x)
    check(
        lambda x: (x * 3)[1:].t().sin() * (x * 3)[1:].t(),
        leaf(4, 3),
        compiled=lambda x: inner((x * 3)[1:].t()),
    )


def test_an_input_changed_in_place():
    def f(x, y):
        h = x * 2
        g(h, y)
        return h * y

    def g(h, y):
        h.mul_(y)
        h.add_(1)
        return h.sin()

    compiled_g = sg_compile(g)

    def compiled(x, y):
        h = x * 2
        compiled_g(h, y)
        return h * y

    check(f, leaf(3), leaf(3), compiled=compiled, regions=None)


def test_a_buffer_changed_in_place():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x):
            self.seen += x.detach()
            return x * self.weight + self.seen

    model = Counter()
    check(model, leaf(3), module=model, times=3)


def test_a_graph_break_makes_two_regions():
    @torch._dynamo.disable
    def opaque(x):
        return x.sin() * 2  # recorded op by op

    def f(x):
        h = opaque(x.exp() * x)
        return h.cos() * x

    check(f, leaf(3), regions=2, times=3)


def test_control_flow_that_looks_at_data():
    def f(x):
        h = x.exp() * x
        if h.sum() > 0:
            return h.sin()
        return h.cos()

    compiled = sg_compile(f)
    check(f, torch.ones(3, dtype=torch.float64, requires_grad=True), compiled=compiled, regions=2)
    check(f, -torch.ones(3, dtype=torch.float64, requires_grad=True), compiled=compiled, regions=2)


def test_sizes_that_change_need_no_recompilation_after_the_second():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
    calls = []

    def f(x):
        return model(x).softmax(0).unflatten(1, (2, 2)) * x.shape[0]

    compiled = sg_compile(f)
    for n in (3, 5, 7, 11, 4):
        check(f, leaf(n, 4), module=model, compiled=compiled, times=1)
        calls.append(torch._dynamo.utils.counters["frames"]["total"])
    assert calls[1] == calls[-1]


def test_nested():
    inner = sg_compile(lambda x: x.sin() * x)
    check(lambda x: (x.sin() * x).exp(), leaf(3), compiled=sg_compile(lambda x: inner(x).exp()))


def test_without_grad():
    compiled = sg_compile(lambda x: x.exp() * x)
    x = leaf(3)
    with sg.record():
        with torch.no_grad():
            y = compiled(x)
        assert not y.requires_grad and y.grad_fn is None
        with torch.inference_mode():
            z = compiled(x)
        assert z.is_inference()
        w = compiled(x.detach())
        assert w.grad_fn is None
    torch.testing.assert_close(y, x.detach().exp() * x.detach(), **TIGHT)


def test_under_autocast():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    compiled = sg_compile(model)
    x = torch.randn(4, 8, requires_grad=True)

    def step(m):
        model.zero_grad()
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
            loss = y.float().square().sum()
        loss.backward()
        return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]

    expected = step(model)
    with sg.record():
        actual = step(compiled)
        again = step(compiled)
    assert actual[0].dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=2e-2)
    torch.testing.assert_close(again, actual)


def test_outside_record_pytorch_is_the_autograd():
    compiled = sg_compile(lambda x: x.exp() * x)
    x = leaf(3)
    with sg.record():
        compiled(x).sum().backward()
    expected, x.grad = x.grad, None
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, expected, **TIGHT)
    with sg.record():
        assert isinstance(compiled(x).grad_fn, CompiledNode)


def test_a_custom_function_inside():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * g

    check(lambda x: Cube.apply(x.sin()) * x, leaf(3), regions=None)


def test_training_steps_are_pytorchs():
    def train(wrap, scope):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        model = model.double()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, y = torch.randn(8, 4).double(), torch.randn(8, 1).double()
        step = wrap(lambda: F.mse_loss(model(x), y))
        losses = []
        with scope():
            for _ in range(5):
                loss = step()
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.detach())
        return losses

    from contextlib import nullcontext

    expected = train(lambda f: f, nullcontext)
    torch.testing.assert_close(train(sg_compile, sg.record), expected, **TIGHT)


def test_one_tensor_given_twice_and_one_region_called_twice():
    f = sg_compile(lambda x, y: (x @ y).sin())
    check(
        lambda x: ((x @ x).sin() @ (x @ x).sin()).sin() * x,
        leaf(3, 3),
        compiled=lambda x: f(f(x, x), f(x, x)) * x,
        regions=3,
    )


def test_views_of_one_base_one_of_them_changed_in_place():
    def g(a, b):
        a.mul_(2)
        return (a * b).sin()

    compiled_g = sg_compile(g)

    def f(g):
        def run(x):
            h = x * 1.5
            return g(h[:3], h[1:]) + h.sum()

        return run

    check(f(g), leaf(5).detach()[:4].requires_grad_(), compiled=f(compiled_g), regions=None)


def test_a_dict_as_result_and_none():
    def f(x):
        return {"a": x.sin(), "b": None, "c": [x.cos(), 3]}

    def values(fn):
        return lambda x: (lambda d: (d["a"], d["c"][0]))(fn(x))

    check(values(f), leaf(3), compiled=values(sg_compile(f)))


def test_training_and_evaluation_are_two_regions():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    compiled = sg_compile(model)
    check(model, leaf(6, 4), module=model, compiled=compiled)
    model.eval()
    check(model, leaf(6, 4), module=model, compiled=compiled)
    model.train()
    check(model, leaf(6, 4), module=model, compiled=compiled)


def test_complex_numbers():
    def f(x, y):
        return ((x * y.conj()).exp() @ y).abs().square()

    x = torch.randn(3, 3, dtype=torch.complex128, requires_grad=True)
    y = torch.randn(3, 3, dtype=torch.complex128, requires_grad=True)
    check(f, x, y, regions=None)


def test_the_example_gpt_has_pytorchs_gradients():
    model, tokens, targets = gpt(layers=2)
    model.double()
    check(model.loss, tokens, targets, module=model, times=2)


# -- what is saved


def test_saved_tensors_can_be_asked():
    with sg.record():
        y = sg_compile(lambda x, w: (x @ w).exp())(leaf(2, 3), leaf(3, 3))
        node = y.grad_fn
        infos = [s.info() for s in node._raw_saved_tensors]
        assert all(
            i.op.startswith("Compiled[") and "test_compiled_forward" in i.where for i in infos
        )
        assert {i.state for i in infos} == {"live"}
        assert any(i.is_output for i in infos) and any(i.is_leaf for i in infos)
        y.sum().backward()
        with pytest.raises(sg.GraphFreedError, match="second time"):
            node._raw_saved_tensors  # noqa: B018


def test_hooks_see_each_once_and_nothing_is_held():
    packed: list[Any] = []
    unpacked: list[int] = []
    alive: list[weakref.ref[Tensor]] = []

    def pack(t):
        packed.append(t.detach().clone())
        alive.append(weakref.ref(t))
        return len(packed) - 1

    def unpack(i):
        unpacked.append(i)
        return packed[i].clone()

    f = sg_compile(lambda x, w: ((x * 2) @ w).tanh().exp().sin())
    g = lambda x, w: ((x * 2) @ w).tanh().exp().sin()
    x, w = leaf(4, 3), leaf(3, 3)
    expected = torch.autograd.grad(g(x, w).sum(), [x, w])
    with sg.record():
        with sg.saved_tensors_hooks(pack, unpack):
            y = f(x, w)
        node = y.grad_fn
        count = len(node._raw_saved_tensors)
        assert len(packed) == count and not unpacked
        held = [r() for r in alive if r() is not None]
        assert all(t is x or t is w or t.data_ptr() == y.data_ptr() for t in held)
        first = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
        assert sorted(unpacked) == list(range(count))
        second = torch.autograd.grad(y.sum(), [x, w])
        assert sorted(unpacked) == sorted(2 * list(range(count)))
        assert len(packed) == count
        with pytest.raises(sg.GraphFreedError):
            torch.autograd.grad(y.sum(), [x, w])
    torch.testing.assert_close(first, expected, **TIGHT)
    torch.testing.assert_close(second, expected, **TIGHT)


def test_a_saved_input_changed_in_place_is_found_out():
    with sg.record():
        h = leaf(3) * 2
        y = sg_compile(lambda x: x.sin() * x)(h)
        h.add_(1)
        with pytest.raises(sg.SavedTensorChanged, match="changed in place"):
            y.sum().backward()


def test_everything_is_freed_with_the_graph():
    with sg.record():
        h = leaf(3) * 2
        y = sg_compile(lambda x: (x.sin() * x).exp())(h)
        node = weakref.ref(y.grad_fn)
        gc.disable()
        try:
            del h, y
            assert node() is None
        finally:
            gc.enable()


def test_a_hook_that_raises_leaves_no_trace():
    def unpack(_):
        raise ValueError("gone")

    f = sg_compile(lambda x: x.sin() * x)
    x = leaf(3)
    with sg.record():
        with sg.saved_tensors_hooks(lambda t: None, unpack):
            y = f(x)
        with pytest.raises(ValueError, match="gone"):
            y.sum().backward()
        f(x).sum().backward()
    torch.testing.assert_close(x.grad, (x.sin() + x * x.cos()).detach(), **TIGHT)


# -- second derivatives, and what cannot be compiled


def test_a_second_derivative_is_refused():
    f = sg_compile(lambda x: x.sin() * x)
    x = leaf(3)
    with sg.record():
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        torch.testing.assert_close(g, (x.sin() + x * x.cos()).detach(), **TIGHT)
        with pytest.raises(RuntimeError, match="second derivative through"):
            g.sum().backward()
        (g,) = torch.autograd.grad(f(x * 1.0).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative through"):
            torch.autograd.grad(g.sum(), x)


def test_a_region_that_cannot_be_compiled_runs_op_by_op(monkeypatch):
    from stowgrad import _private

    def fail(*args, **kwargs):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(_private, "compile_joint", fail)
    with pytest.warns(UserWarning, match="runs op by op.*no such thing"):
        check(lambda x: x.sin() * x, leaf(3), regions=0)


def test_regions_that_torch_compiled_are_recorded_as_functions():
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.compilers import nop

    f = aot_function(lambda x: x.sin() * x, nop)
    x = leaf(3)
    f(x)  # compiles it
    with sg.record():
        f(x).sum().backward()
    torch.testing.assert_close(x.grad, (x.sin() + x * x.cos()).detach(), **TIGHT)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_captured_backward_inlines_the_backward_graph(hooked: bool):
    from stowgrad.program import capture

    unpacked: list[int] = []

    def unpack(t):
        unpacked.append(1)
        return t.clone()

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).double()
    x = leaf(3, 4)
    expected = torch.autograd.grad(model(x).square().sum(), x)
    with sg.record():
        if hooked:
            with sg.saved_tensors_hooks(lambda t: t.clone(), unpack):
                y = sg_compile(model)(x)
        else:
            y = sg_compile(model)(x)
        text = str(capture(y.square().sum()))
        assert not unpacked
        y.square().sum().backward()
    assert "aten.gelu_backward" in text and "call" not in text.split("steps:")[1].split("(")[0]
    assert ("unpack" in text) == hooked
    torch.testing.assert_close(x.grad, expected[0], **TIGHT)


def test_hooks_on_an_output_and_on_the_node():
    seen: list[str] = []
    f = sg_compile(lambda x: x.sin() * x)
    x = leaf(3)
    with sg.record():
        y = f(x * 1.0)
        y.retain_grad()
        y.register_hook(lambda g: seen.append("tensor") or g * 2)
        y.grad_fn.register_hook(lambda gi, go: seen.append("node"))
        y.sum().backward()
    assert seen == ["tensor", "node"]
    torch.testing.assert_close(y.grad, torch.full_like(y, 2).detach(), **TIGHT)
    torch.testing.assert_close(x.grad, 2 * (x.sin() + x * x.cos()).detach(), **TIGHT)


def test_inside_a_checkpoint():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    inner = sg_compile(model)
    check(
        model, leaf(3, 4), module=model, regions=None,
        compiled=lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False),
    )  # fmt: skip


def test_a_checkpoint_inside():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def f(x):
        return torch.utils.checkpoint.checkpoint(model, x.sin(), use_reentrant=False) * x.sum()

    check(f, leaf(3, 4), module=model, regions=None)


def test_a_checkpoint_of_ours_inside():
    def f(x):
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).cos()

    def g(x):
        return sg.checkpoint(inner, x).cos()

    inner = lambda t: t.sin() * t
    check(f, leaf(3), compiled=sg_compile(g), regions=None)


def test_a_whole_step_with_its_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    x = torch.randn(3, 4, dtype=torch.float64)

    def step():
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return [loss.detach(), *[p.grad.clone() for p in model.parameters()]]

    expected = step()
    with sg.record(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs op by op")
        compiled = sg_compile(step)
        for _ in range(3):
            torch.testing.assert_close(compiled(), expected, **TIGHT)


def test_from_two_threads():
    import threading

    f = sg_compile(lambda x: (x.sin() * x).exp())
    failed: list[BaseException] = []

    def work():
        try:
            x = torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True)
            (expected,) = torch.autograd.grad((x.sin() * x).exp().sum(), x)
            for _ in range(5):
                with sg.record():
                    (actual,) = torch.autograd.grad(f(x).sum(), x)
                torch.testing.assert_close(actual, expected, **TIGHT)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed[0]


def test_bad_arguments():
    with pytest.raises(ValueError, match="backend"):
        sg_compile(lambda x: x, backend="inductor")
    with pytest.raises(TypeError, match="function or a module"):
        sg_compile(3)


# -- memory


class Files:
    """Hooks that keep every saved tensor in a file."""

    def __init__(self, folder: str) -> None:
        self.folder, self.count, self.log = Path(folder), 0, []

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        torch.save(tensor, self.folder / str(self.count))
        self.log.append(("pack", self.count))
        return self.count

    def unpack(self, number: int) -> Tensor:
        self.log.append(("unpack", number))
        return torch.load(self.folder / str(number))


def gpt(layers: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    config = train_gpt.GPTConfig(vocabulary=31, layers=layers, width=64, heads=4, context=64)
    model = train_gpt.GPT(config)
    tokens = torch.randint(0, 31, (4, 64))
    return model, tokens, tokens.roll(-1, 1)


def peak_of_a_step(compiled: bool) -> tuple[int, list[Tensor], Files]:
    model, tokens, targets = gpt()
    loss = sg_compile(model.loss) if compiled else model.loss
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # the first one compiles
            model.zero_grad()
            gc.collect()
            torch.manual_seed(1)
            files = Files(folder)
            with Meter() as meter:
                meter.count([*model.parameters(), tokens, targets])
                with sg.record():
                    with sg.saved_tensors_hooks(files.pack, files.unpack):
                        value = loss(tokens, targets)
                    value.backward()
                    del value
    return meter.peak, [p.grad for p in model.parameters()], files


def test_s13_the_peak_with_everything_on_disk_is_below_the_eager_engines():
    eager, expected, _ = peak_of_a_step(False)
    compiled, actual, files = peak_of_a_step(True)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert compiled < eager
    packs = [n for kind, n in files.log if kind == "pack"]
    unpacks = [n for kind, n in files.log if kind == "unpack"]
    assert len(set(packs)) == len(packs) and sorted(unpacks) == sorted(packs)


def test_s13_each_is_unpacked_when_the_backward_graph_needs_it():
    events: list[Any] = []
    alive: list[Any] = []

    def pack(t):
        return t.detach().clone()

    def unpack(t):
        value = t.clone()
        gc.collect()
        events.append(sum(r() is not None for r in alive))
        alive.append(weakref.ref(value.untyped_storage()))
        return value

    def f(x):
        for _ in range(12):
            x = F.gelu(x) @ w
        return x

    w, x = leaf(4, 4), leaf(4, 4)
    with sg.record():
        with sg.saved_tensors_hooks(pack, unpack):
            y = sg_compile(f)(x)
        y.sum().backward()
    assert len(events) > 12
    assert max(events) <= 4, "saved tensors are unpacked long before they are used, or kept after"


def test_s13_the_first_backward_op_runs_before_the_last_unpack():
    model, tokens, targets = gpt(layers=2)
    order: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        passive = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                order.append("op")
            return func(*args, **(kwargs or {}))

    def unpack(t):
        order.append("unpack")
        return t

    loss = sg_compile(model.loss)
    with Watch(), sg.record():
        with sg.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
            value = loss(tokens, targets)
        order.clear()
        value.backward()
    runs = sum(a != b for a, b in itertools.pairwise(order))
    assert order.count("unpack") == len(order) - order.count("op") and runs > 10
