"""Programs whose tensor code a backend of torch.compile compiled, in stretches."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stowgrad as sg
from stowgrad.errors import CompileError
from stowgrad.program import capture, compiled_backward, program_cache, steps
from stowgrad.program.lower import Stretch


@pytest.fixture(autouse=True)
def _forget() -> Any:
    program_cache.clear()
    yield
    program_cache.clear()


class Counting:
    """A backend that runs the ops as they are, and counts what it was asked to compile."""

    def __init__(self) -> None:
        self.modules: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        self.modules.append(gm)
        return gm.forward


def stretches(program: Any) -> list[Stretch]:
    return [n.target for n in program.graph.nodes if isinstance(n.target, Stretch)]


class Attending(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2, vocabulary: int = 11) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        q, k, v = (
            self.qkv(self.norm(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.mlp(x))


def mlp(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).to(dtype)

    def loss(n: int) -> Tensor:
        x = torch.randn(n, 6, dtype=dtype, generator=torch.Generator().manual_seed(n))
        return net(x).square().mean()

    return net, loss


def convnet(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3, bias=False), nn.Flatten(), nn.Linear(4 * 9, 5),
    ).to(dtype)  # fmt: skip

    def loss(n: int) -> Tensor:
        x = torch.randn(n, 3, 10, 10, dtype=dtype, generator=torch.Generator().manual_seed(n))
        return F.cross_entropy(net(x), torch.arange(n) % 5)

    return net, loss


def transformer(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    net = Attending().to(dtype)

    def loss(n: int) -> Tensor:
        tokens = torch.arange(3 * n).view(3, n) ** 2 % 11
        return F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten().flip(0))

    return net, loss


def gradients(net: nn.Module, loss: Any, size: int, backend: Any = "eager") -> list[Tensor]:
    net.zero_grad()
    with sg.record(compiled_backward(backend)):
        loss(size).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def expected(net: nn.Module, loss: Any, size: int) -> list[Tensor]:
    net.zero_grad()
    loss(size).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        tolerance = 1e-9 if b.dtype is torch.float64 else 2e-5
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("make", [mlp, convnet, transformer])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_the_same_and_sizes_share_the_code(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, loss = make(dtype)
    backend = Counting()
    for size in (5, 7, 12):
        assert_close(gradients(net, loss, size, backend), expected(net, loss, size))
        if size == 7:
            compiled = len(backend.modules)
    assert len(backend.modules) == compiled
    program = program_cache.programs[0]
    assert len(stretches(program)) == 1
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert not any(isinstance(t, torch._ops.OpOverload) for t in targets)


@pytest.mark.parametrize(
    "make, dtype",
    [
        (mlp, torch.float32),
        pytest.param(mlp, torch.float64, marks=pytest.mark.slow),
        pytest.param(convnet, torch.float32, marks=pytest.mark.slow),
        pytest.param(convnet, torch.float64, marks=pytest.mark.slow),
        pytest.param(transformer, torch.float32, marks=pytest.mark.slow),
        pytest.param(transformer, torch.float64, marks=pytest.mark.slow),
    ],
)
def test_inductor_gives_the_same_gradients_for_all_sizes(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, loss = make(dtype)
    for size in (5, 7, 12, 15):  # at 16, Inductor makes other code for a convolution, and guards
        assert_close(gradients(net, loss, size, "inductor"), expected(net, loss, size))
        if size == 7:
            made = len(program_cache)
    assert len(program_cache) == made
    assert stretches(program_cache.programs[0])
    found: list[list[Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(gradients(net, loss, 9, "inductor")))
    thread.start()
    thread.join()
    assert_close(found[0], expected(net, loss, 9))


def test_unpack_hooks_stay_between_the_stretches() -> None:
    seen: list[str] = []
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    backend = Counting()

    def net() -> Tensor:
        y = (x.sin() * x.cos()).exp()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = y.tanh()
        return (y.sin() * 3).square().sum()

    def unpack(t: Tensor) -> Tensor:
        seen.append("unpack")
        return t

    with sg.record():
        program = capture(net(), backend=backend)
    order = [
        n.target.__name__ for n in program.graph.nodes
        if isinstance(n.target, Stretch) or n.target is steps.unpack
    ]  # fmt: skip
    assert order == ["stretch_0", "unpack", "stretch_1"]
    assert not seen

    def run(backend: Any) -> Tensor:
        x.grad = None
        with sg.record(*([compiled_backward(backend)] if backend else [])):
            net().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(run(backend), run(None), rtol=1e-9, atol=1e-9)
    assert seen == ["unpack", "unpack"]


def test_hooks_see_what_they_would_see() -> None:
    def run(context: Any) -> tuple[list[Any], Tensor]:
        seen: list[Any] = []
        x = torch.linspace(1, 2, 6, dtype=torch.float64).requires_grad_()
        x.register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.grad.clone())))
        with sg.record(*context):
            y = x.exp().sin()
            y.register_hook(lambda g: (seen.append(("hook", g.clone())), g * 2)[1])
            (y.cos() * y).sum().backward()
        assert x.grad is not None
        return seen, x.grad

    (a, found), (b, wanted) = run([compiled_backward(Counting())]), run([])
    torch.testing.assert_close(found, wanted)
    assert [k for k, _ in a] == [k for k, _ in b]
    for (_, left), (_, right) in zip(a, b, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", lambda gm, examples: gm])
def test_any_backend_will_do(backend: Any) -> None:
    net, loss = mlp(torch.float64)
    assert_close(gradients(net, loss, 5, backend), expected(net, loss, 5))


def test_what_does_not_compile_stays_as_it_is() -> None:
    def broken(gm: Any, examples: Any) -> Any:
        raise ValueError("no idea how")

    net, loss = mlp(torch.float64)
    with pytest.warns(
        UserWarning, match=r"broken could not compile stretch_0 \(.*test_lower.py:\d+"
    ):
        found = gradients(net, loss, 5, broken)
    assert_close(found, expected(net, loss, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(net, loss, 5, broken)


def test_without_a_compiler_the_error_says_what_to_do() -> None:
    import torch._inductor.config as config

    net, loss = mlp(torch.float64)
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(CompileError, match=r"Install g\+\+ or clang.*backend=None"):
            gradients(net, loss, 5, "inductor")


def test_an_output_never_lies_in_the_memory_of_an_input() -> None:
    def careless(gm: Any, examples: list[Any]) -> Any:
        """Hands out its last input in place of each output, which has the same numbers here."""
        return lambda *inputs: tuple(inputs[-1] for _ in gm(*inputs))

    w = torch.full((3, 3), 2.0)
    x = torch.ones(3, 3, requires_grad=True)
    for _ in range(3):
        x.grad = None
        with sg.record(compiled_backward(careless)):
            ((x * w) * 1.0).sum().backward()
        assert x.grad is not None
        x.grad.zero_()
        assert (w == 2).all()


def test_layouts_other_than_those_that_were_compiled_for() -> None:
    def run(x: Tensor, w: Tensor, backend: Any) -> Tensor:
        x = x.detach().requires_grad_()
        with sg.record(*([compiled_backward(backend)] if backend else [])):
            ((x * w).sin() * w).sum().backward()
        assert x.grad is not None
        return x.grad

    def strict(gm: Any, examples: list[Any]) -> Any:
        """As compiled code would: addresses by the strides of its examples."""

        def call(*inputs: Any) -> Any:
            for a, e in zip(inputs, examples, strict=True):
                if isinstance(a, Tensor):
                    assert a.is_contiguous() == e.is_contiguous()
            return gm(*inputs)

        return call

    a, b = torch.randn(4, 6), torch.randn(6, 4)
    for x, w in ((a, a * 2), (b.t(), a), (a, b.t()), (b.t(), b.t() + 1)):
        torch.testing.assert_close(run(x, w, strict), run(x, w, None))


def test_inputs_are_let_go_of_early() -> None:
    """Inductor's code frees an input after its last use; nothing above may hold it."""
    alive: list[Any] = []
    box = [torch.ones(3), torch.ones(3)]
    alive = [weakref.ref(t) for t in box]
    seen: list[bool] = []

    def boxed(inputs: list[Any]) -> Any:
        a, b = inputs
        inputs.clear()
        del b
        seen.append(alive[1]() is None)
        return (a + 1,)

    from stowgrad.program.lower import _Code

    code: Any = _Code(torch.fx.GraphModule({}, torch.fx.Graph()), 2, [0], lambda box: True, boxed)
    stretch = Stretch("stretch_0", code)
    stretch([torch.ones(1), torch.ones(1)])  # the first run keeps them, to compare
    seen.clear()
    stretch(box)
    assert seen == [True]


def test_a_dispatch_mode_sees_every_op() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    names: list[str] = []

    def backend(gm: Any, examples: Any) -> Any:
        return lambda *inputs: pytest.fail("compiled code ran below a mode")

    x = torch.ones(3, requires_grad=True)
    with sg.record(compiled_backward(backend)):
        loss = x.exp().sin().sum()
        with Names():
            loss.backward()
    assert "aten::cos" in names
    torch.testing.assert_close(x.grad, torch.ones(3).exp().cos() * torch.ones(3).exp())


def test_blocks_that_repeat_are_compiled_once() -> None:
    backend = Counting()
    x = torch.randn(4, 4, requires_grad=True)
    with sg.record():
        y = x
        for _ in range(5):
            y.register_hook(lambda g: g)
            y = (y.sin() * 2).cos()
        program = capture(y.sum(), backend=backend)
    assert len(stretches(program)) > len(backend.modules)
