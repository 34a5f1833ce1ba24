"""Random programs over a few tensors, as Python source, run under either autograd and compared.

`draft(rng)` writes a program: leaves, then steps (ops, views, in-place changes, regions, hooks),
then what differentiates it. While it writes, it runs the program under PyTorch, so that it knows
the shapes and keeps values moderate. `run` executes a program and notes, for every variable, its
value, gradient, version and flags, and for every step what it raised; `difference` compares two
such runs. `reduced` drops steps as long as a program still fails. What a program may call that is
not PyTorch's is below, under "names that programs use".
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import stowgrad as sg
from stowgrad.errors import SavedTensorChanged

# -- names that programs use


def leaf(seed: int, shape: Sequence[int], grad: bool = False, layout: str = "plain") -> Tensor:
    """A tensor of its own memory; `layout` says how it lies there."""
    rng = torch.Generator().manual_seed(seed)
    if layout == "transposed" and len(shape) > 1:
        turned = [shape[1], shape[0], *shape[2:]]
        t = torch.randn(turned, generator=rng, dtype=torch.float64).transpose(0, 1)
    elif layout == "strided" and len(shape) > 0:
        long = [*shape[:-1], shape[-1] * 2]
        t = torch.randn(long, generator=rng, dtype=torch.float64)[..., ::2]
    else:
        t = torch.randn(shape, generator=rng, dtype=torch.float64)
    t = t.detach()
    if layout == "parameter":
        return torch.nn.Parameter(t, requires_grad=grad)
    return t.requires_grad_(grad)


def cot(t: Tensor) -> Tensor:
    """A cotangent for `t`: the same numbers whenever the shape is the same."""
    values = torch.linspace(0.5, 1.5, max(t.numel(), 1), dtype=torch.float64)[: t.numel()]
    return values.reshape(t.shape).to(t.dtype)


def total(*tensors: Tensor) -> Tensor:
    """A scalar that depends on every element of every tensor."""
    parts = [(torch.view_as_real(t) if t.is_complex() else t) for t in tensors]
    return sum((p * cot(p)).sum() for p in parts)  # type: ignore[return-value]


def hook(t: Tensor, fn: Callable[[Tensor], Any]) -> None:
    """`t.register_hook(fn)`, where PyTorch does not crash on it: a view of no producer, whose base
    has come to need gradients since."""
    if t.grad_fn is None and t._is_view():
        raise RuntimeError("a view without a producer")
    t.register_hook(fn)


class Box:
    """What a pack hook may return: an object that is no tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.inner = tensor


@contextlib.contextmanager
def packing(how: str) -> Iterator[None]:
    pack, unpack = {
        "identity": (lambda t: t, lambda p: p),
        "detach": (lambda t: t.detach(), lambda p: p),
        "clone": (lambda t: t.detach().clone(), lambda p: p.clone()),
        "box": (lambda t: Box(t.detach().clone()), lambda p: p.inner.clone()),
        "numpy": (lambda t: t.detach().resolve_conj().numpy().copy(), torch.from_numpy),
    }[how]
    with saved_tensors_hooks(pack, unpack):
        yield


class ScaleSaves(torch.autograd.Function):
    """x * y; saves both its inputs and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        out = x * y
        ctx.save_for_backward(x, y, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y, _ = ctx.saved_tensors
        return (g * y).sum_to_size(x.shape), (g * x).sum_to_size(y.shape)


class TanhOut(torch.autograd.Function):
    """tanh, by its output, in the setup_context style."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return g * (1 - out * out)


class DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class DoubleAndSine(torch.autograd.Function):
    """x in place doubled and handed back, with a second result that is new."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y = x.sin()
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.mul_(2), y

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 2 + h * x.cos()


class Transpose(torch.autograd.Function):
    """A view of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.transpose(0, -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.transpose(0, -1) * 1


class AsIs(torch.autograd.Function):
    """Returns its input itself; its gradient is tripled so that it shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.cos() - h * x.sin()


class OneIsConstant(torch.autograd.Function):
    """The second output has no gradient; missing gradients stay None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        y, z = x * 2, x.floor()
        ctx.mark_non_differentiable(z)
        return y, z, x * 3

    @staticmethod
    def backward(ctx: Any, g: Any, _: Any, h: Any) -> Any:
        if g is None:
            return None if h is None else h * 3
        return g * 2 if h is None else g * 2 + h * 3


# -- a program and its runs


@dataclass
class Program:
    """`steps`: each is a piece of source. `watch`: the flags of all variables are asked for after
    each step (which makes stale views work out their producer), rather than at the end only."""

    steps: list[str]
    watch: bool = False

    def source(self) -> str:
        return "\n".join(["torch.manual_seed(0)", *self.steps])


@dataclass
class Run:
    errors: list[Exception | None]
    facts: list[dict[str, Any]]  # after each step if watched; else after the last one
    memory: list[StorageWeakRef]  # of each variable


_CODE: dict[str, Any] = {}


def scope() -> dict[str, Any]:
    """The names a program starts with."""
    return {
        "torch": torch, "F": F, "checkpoint": checkpoint, "no_grad": torch.no_grad,
        "leaf": leaf, "hook": hook, "cot": cot, "total": total, "packing": packing, "seen": [],
        "grad": torch.autograd.grad, "backward": torch.autograd.backward,
        **{c.__name__: c for c in (
            ScaleSaves, TanhOut, DoubleInPlace, DoubleAndSine, Transpose, AsIs, TwoOutputs,
            OneIsConstant,
        )},
    }  # fmt: skip


def execute(step: str, env: dict[str, Any]) -> None:
    code = _CODE.get(step)
    if code is None:
        if len(_CODE) > 20_000:
            _CODE.clear()
        code = _CODE[step] = compile(step, "<program>", "exec")
    exec(code, env)


def run(program: Program) -> Run:
    """Execute the program under whichever autograd is in force. A step that raises is noted and
    the next one tried."""
    torch.manual_seed(0)
    env = scope()
    errors: list[Exception | None] = []
    facts: list[dict[str, Any]] = []
    births: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in program.steps:
            try:
                execute(step, env)
                errors.append(None)
            except Exception as error:
                errors.append(error.with_traceback(None))
            for name, value in _tensors(env).items():
                births.setdefault(name, value._version)
            if program.watch:
                facts.append(_facts(env, births, values=False))
        facts.append(_facts(env, births, values=True))
    memory = [StorageWeakRef(t.untyped_storage()) for t in _tensors(env).values()]
    env.clear()
    return Run(errors, facts, memory)


def _tensors(env: dict[str, Any]) -> dict[str, Tensor]:
    found = {n: v for n, v in env.items() if isinstance(v, Tensor) and n != "_"}
    for name, value in env.items():
        if isinstance(value, tuple):
            found |= {f"{name}[{i}]": v for i, v in enumerate(value) if isinstance(v, Tensor)}
    return found


def _facts(env: dict[str, Any], births: dict[str, int], values: bool) -> dict[str, Any]:
    facts = {n: _fact(t, births[n], values) for n, t in _tensors(env).items()}
    if values:
        for i, (label, value) in enumerate(env["seen"]):
            facts[f"seen[{i}]"] = {"label": label, "value": _value(value)}
    return facts


def _value(t: Tensor | None) -> Any:
    return None if t is None else t.detach().resolve_conj().clone()


def _fact(t: Tensor, born: int, values: bool) -> dict[str, Any]:
    """`born`: its version when it was new, which tells how an op is made rather than what it did
    (a kernel may fill in place what it returns)."""
    fact: dict[str, Any] = {"requires_grad": t.requires_grad, "version": t._version - born}
    for what in ("is_leaf", "grad_fn is None"):
        try:
            fact[what] = t.is_leaf if what == "is_leaf" else t.grad_fn is None
        except RuntimeError:
            fact[what] = "raises"
    if values:
        fact["value"] = _value(t)
        fact["stride"] = t.stride()
        fact["grad"] = _value(t.grad)
        if t.grad is not None:
            fact["grad requires_grad"] = t.grad.requires_grad
    return fact


# Where PyTorch raises and what we do is right: a saved tensor was detached in place; a product is
# a view there and none here; a view that is never read again lost its base; a node that
# saved nothing here (of a list, of a change through a view) runs twice.
_STRICTER = (
    "INTERNAL ASSERT", "detached in-place", "Can't detach views in-place",
    "another view of its base has been modified inplace", "graph a second time",
)  # fmt: skip


# Steps that may use nothing of a view that can no longer be used: casts and the like that return
# it as it is, arguments of a region. PyTorch does not look at it there; we do, and raise.
_UNUSED = re.compile(r"flatten|reshape|ravel|contiguous|double\(|type_as|to\(|checkpoint\(")


def difference(
    program: Program, expected: Run, got: Run, forgive: Callable[[Exception], bool]
) -> str:
    """What differs, as "kind: detail", or "". After an error of ours for which `forgive` is true
    the rest of the two runs is not compared."""
    for i, (e, g) in enumerate(zip(expected.errors, got.errors, strict=True)):
        if e is None and g is None:
            continue
        if g is not None and forgive(g):
            return ""
        step = program.steps[i]
        if e is None:
            stale = "another view of its base has been modified inplace" in str(g)
            if stale and _UNUSED.search(step):
                return ""
            return f"raises: step {i} raised {type(g).__name__}: {g}"
        if g is None:
            if any(gist in str(e) for gist in _STRICTER):
                return ""
            if "leaf Variable" in str(e) and not program.watch:
                return ""  # PyTorch has not noticed yet that a view's base has a producer now
            return f"succeeds: step {i} should raise {type(e).__name__}: {e}"
        if "backward(" in step or "grad(" in step:
            return ""  # a backward that failed has reached some leaves and not others
        if isinstance(e, RuntimeError) != isinstance(g, RuntimeError):
            return f"other error: step {i} raised {g!r} for {e!r}"
    for i, (e_facts, g_facts) in enumerate(zip(expected.facts, got.facts, strict=True)):
        if e_facts.keys() != g_facts.keys():
            names = sorted(e_facts.keys() ^ g_facts.keys())
            return f"names: after step {i} only one of the runs has {names}"
        for name, e_fact in e_facts.items():
            g_fact = g_facts[name]
            if not isinstance(e_fact, dict) or not isinstance(g_fact, dict):
                if e_fact != g_fact:
                    return f"{name}: {g_fact}, should be {e_fact}"
                continue
            for what, e in e_fact.items():
                g = g_fact.get(what)
                if what == "stride" and not name.startswith("v"):
                    continue
                if not _equal(e, g):
                    return f"{what}: after step {i}, {name}.{what} is {g}, should be {e}"
    return ""


def _equal(e: Any, g: Any) -> bool:
    if isinstance(e, Tensor) and isinstance(g, Tensor):
        if e.shape != g.shape or e.dtype != g.dtype:
            return False
        if e.numel() == 0:
            return True
        finite = e.abs()[e.isfinite()]
        scale = float(finite.max()) if finite.numel() else 0.0
        return torch.allclose(g, e, rtol=1e-6, atol=1e-9 * max(scale, 1.0), equal_nan=True)
    return bool(e == g) if not isinstance(e, Tensor) and not isinstance(g, Tensor) else False


def aliased_change(error: Exception) -> bool:
    """A hooked tensor that was changed in place is an error of ours, and none of PyTorch's."""
    return isinstance(error, SavedTensorChanged)


def never(error: Exception) -> bool:
    return False


def compare(program: Program) -> str:
    """What differs between the program under PyTorch and recorded, or ""."""
    # PyTorch does not check what a hook keeps an alias of, and may be wrong; with a copy it is not.
    copying = [re.sub("'(identity|detach)'", "'clone'", step) for step in program.steps]
    expected = run(Program(copying, program.watch))
    with sg.record():
        got = run(program)
    text = program.source()
    forgive = aliased_change if "packing(" in text or "checkpoint(" in text else never
    found = difference(program, expected, got, forgive)
    if found.startswith("succeeds") and "modified by an inplace operation" in found:
        # We may save less, or a copy. PyTorch gets by, too, if all that it saves is copied.
        with packing("clone"):
            expected = run(Program(copying, program.watch))
        found = difference(program, expected, got, forgive)
    return found


def compare_packed(program: Program, how: str, forgive: Callable[[Exception], bool]) -> str:
    """As `compare`, with all that is saved packed by the pair called `how` when recorded. PyTorch
    packs copies: what it saves is then right whatever happens to it."""
    with packing("clone"):
        expected = run(program)
    with sg.record(), packing(how):
        got = run(program)
    return difference(program, expected, got, forgive)


def reduced(program: Program, fails: Callable[[Program], str]) -> tuple[Program, str]:
    """A program with fewer steps that fails with the same kind of difference."""
    found = fails(program)
    kind = found.split(":")[0]
    steps = program.steps
    size = max(len(steps) // 2, 1)
    while True:
        at, shrunk = 0, False
        while at < len(steps):
            fewer = Program(steps[:at] + steps[at + size :], program.watch)
            now = fails(fewer)
            if now and now.split(":")[0] == kind:
                steps, found, shrunk = fewer.steps, now, True
            else:
                at += size
        if size == 1 and not shrunk:
            for at, step in enumerate(steps):
                for simpler in _simpler(step):
                    fewer = Program([*steps[:at], simpler, *steps[at + 1 :]], program.watch)
                    now = fails(fewer)
                    if now and now.split(":")[0] == kind:
                        steps, found, shrunk = fewer.steps, now, True
                        break
            if not shrunk:
                return Program(steps, program.watch), found
        size = max(size // 2, 1)


def _simpler(step: str) -> Iterator[str]:
    """The step with less around it or in it."""
    if step.startswith("with ") and ": " in step:
        yield step.split(": ", 1)[1]
    if step.startswith("def "):
        body = step.split("\n")
        yield from ("\n".join(body[:i] + body[i + 1 :]) for i in range(1, len(body) - 2))
    if "total(" in step or "cot(" in step:
        for name in sorted(set(re.findall(r"\bv\d+\b", step))):
            less = re.sub(rf"(, )?\bcot\({name}\)(?(1)|(, )?)", "", step)
            less = re.sub(rf"(, )?\b{name}\b(?(1)|(, )?)", "", less)
            if "total()" not in less and "([]" not in less:
                yield less


# -- writing a program


class Draft:
    """A program being written, and its variables as they are under PyTorch."""

    def __init__(self, rng: random.Random, given: dict[str, Tensor] | None = None) -> None:
        self.rng = rng
        self.given = given or {}
        self.env = self._start()
        self.names: list[str] = list(self.given)
        self.fixed: set[str] = set()  # not to be changed in place: their version tells nothing
        self.steps: list[str] = []
        self.count = 0

    def _start(self) -> dict[str, Any]:
        given = {n: t.detach().clone().requires_grad_() for n, t in self.given.items()}
        return {**scope(), **given}

    # what is there

    def t(self, name: str) -> Tensor:
        value: Tensor = self.env[name]
        return value

    def some(self, fits: Callable[[Tensor], bool] = lambda t: True) -> str:
        """The name of a variable that fits, preferably a recent one."""
        found = [n for n in self.names if fits(self.t(n))]
        if not found:
            raise Unfit
        if self.rng.random() < 0.4:
            found = found[-4:]
        return self.rng.choice(found)

    def real(self, dims: int = 0) -> str:
        return self.some(lambda t: not t.is_complex() and t.dim() >= dims)

    def full(self, dims: int = 1) -> str:
        """Real, with elements."""
        return self.some(lambda t: not t.is_complex() and t.dim() >= dims and t.numel() > 0)

    def into(self, shape: torch.Size) -> str:
        """A variable that broadcasts to `shape`."""
        return self.some(lambda t: not t.is_complex() and _broadcasts(t.shape, shape))

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def dim(self, name: str) -> int:
        return self.rng.randrange(self.t(name).dim())

    def index(self, size: int, count: int | None = None, repeats: bool = True) -> str:
        count = self.rng.randint(1, 3) if count is None else count
        if not repeats:
            return str(self.rng.sample(range(size), min(count, size)))
        return str([self.rng.randrange(size) for _ in range(count)])

    # adding to it

    def add(self, step: str) -> bool:
        """Run the step and keep it, unless it raises (mostly) or its values run away."""
        before = set(self.env)
        error: Exception | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                execute(step, self.env)
            except Exception as caught:
                error = caught
        if error is not None:
            kept = isinstance(error, RuntimeError) and self.rng.random() < 0.3
            if kept:
                self.steps.append(step)
            return kept
        self.steps.append(step)
        made = [n for n in self.env if n not in before and n.startswith("v")]
        with torch.no_grad():
            fine = all(_moderate(self.env[n]) for n in [*self.names, *made])
        if not fine:
            self.steps.pop()
            self._rerun()
            return False
        self.names += [n for n in made if isinstance(self.env[n], Tensor)]
        memory = {_memory(self.t(n)) for n in self.fixed if n in self.env}
        self.fixed |= {n for n in made if n in self.names and _memory(self.t(n)) in memory}
        return True

    def _rerun(self) -> None:
        self.env = self._start()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in self.steps:
                with contextlib.suppress(Exception):
                    execute(step, self.env)


class Unfit(Exception):
    """No variable fits this kind of step."""


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _is_leaf(t: Tensor) -> bool:
    try:
        return t.is_leaf
    except RuntimeError:  # a view whose producer cannot be worked out any more
        return False


def _sound(t: Tensor) -> bool:
    """Whether hooks and retain_grad() are safe: PyTorch crashes where a later output of a node
    retains its gradient and is then changed through a view."""
    try:
        return t.output_nr == 0 and (t.grad_fn is not None or not t._is_view())
    except RuntimeError:
        return False


def _moderate(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return True
    if value.numel() > 64 or value.dim() > 5:
        return False
    return value.numel() == 0 or bool((value.abs() < 1e3).all())


Kind = Callable[[Draft], str]

_UNARY = (
    "{a}.sin()", "{a}.tanh()", "{a}.sigmoid()", "({a} * 0.3).exp()", "{a}.abs()", "{a}.square()",
    "{a}.clamp(-0.5, 0.8)", "F.gelu({a})", "F.relu({a})", "F.leaky_relu({a}, 0.1)",
    "F.softplus({a})", "F.silu({a})", "-{a}", "({a}.abs() + 0.5).log()",
    "({a}.square() + 1).rsqrt()", "{a} ** 2", "{a} ** 3", "1.5 - {a}", "{a} / 2",
    "2 / ({a}.abs() + 1)",
    "{a}.sign()", "{a}.floor()", "{a}.clone()", "{a}.contiguous()", "{a}.to(torch.float64)",
    "{a}.float().double()", "{a}.erf()", "({a}.abs() + 0.1).sqrt()",
    "{a}.tril() if {a}.dim() > 1 else {a}.cos()",
    "F.elu({a})", "F.hardtanh({a})", "torch.where({a} > 0, {a}, 0.5)",
    "{a}.masked_fill({a} > 0.3, 0.2)",
    "F.dropout({a}, 0.4)", "F.dropout({a}, 0.3, training=False)", "{a}.nan_to_num()",
    "{a}.sinh().atan()",
    "{a} * torch.rand_like({a})", "{a}.atan()", "{a}.cosh().log()", "{a}.expm1().clamp(max=2)",
    "F.logsigmoid({a})", "F.softshrink({a})", "F.hardswish({a})", "F.mish({a})",
    "F.threshold({a}, 0.1, 0.2)",
    "{a}.double()", "{a}.type_as({a})", "{a}.positive()", "{a}.frac()", "{a}.remainder(1.5)",
    "torch.complex({a}, {a} * 2)", "{a}.new_ones({a}.shape) * {a}", "torch.zeros_like({a}) + {a}",
)  # fmt: skip
_BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 1)", "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})", "torch.where({a} > {b}, {a}, {b})", "torch.lerp({a}, {b}, 0.3)",
    "torch.addcmul({a}, {a}, {b}, value=0.5)", "torch.hypot({a}, {b} + 2)",
    "torch.atan2({a}, {b}.abs() + 1)", "({a}.abs() + 0.5) ** {b}.tanh()",
    "torch.add({a}, {b}, alpha=2)",
    "torch.addcdiv({a}, {b}, {a}.abs() + 1)", "torch.special.xlogy({a}, {b}.abs() + 1)",
    "F.mse_loss(*torch.broadcast_tensors({a}, {b}))", "ScaleSaves.apply({a}, {b})",
    "torch.where({b} > 0, {a}, {b})", "torch.lerp({a}, {b}, {b}.sigmoid())",
    "torch.logaddexp({a}, {b})",
    "F.smooth_l1_loss(*torch.broadcast_tensors({a}, {b}), reduction='none')",
    "torch.fmax({a}, {b})", "{a}.masked_fill({b} > 0, 0.25)", "torch.dist({a}, {b})",
)  # fmt: skip
_ALONG = (
    "{a}.sum({d})", "{a}.sum({d}, keepdim=True)", "{a}.mean({d})", "{a}.amax({d})",
    "{a}.max({d}).values",
    "{a}.min({d})[0]", "{a}.median({d})[0]", "{a}.sort({d})[0]",
    "{a}.sort({d}, descending=True).values",
    "{a}.topk(1, {d})[0]", "{a}.kthvalue(1, {d})[0]", "{a}.logsumexp({d})", "{a}.softmax({d})",
    "{a}.log_softmax({d})", "({a} + 3).norm(dim={d})", "{a}.var({d}, correction=0)",
    "({a}.var({d}, correction=0) + 0.5).sqrt()", "{a}.cumsum({d})", "{a}.cumprod({d})",
    "{a}.prod({d})",
    "{a}.flip({d})", "{a}.roll(1, {d})", "{a}.cummax({d})[0]", "{a}.logcumsumexp({d})",
    "{a}.argsort({d}).double()",
    "F.normalize({a} + 2, dim={d})", "{a}.diff(dim={d})", "{a}.repeat_interleave(2, {d})",
    "{a}.nansum({d})",
    "F.layer_norm({a}, {a}.shape[-1:])",
    "F.layer_norm({a}, {a}.shape[-1:], *[{a}.reshape(-1)[:{a}.shape[-1]]] * 2)",
    "F.glu(torch.cat([{a}, {a}], {d}), {d})",
    "{a}.std({d}, correction=0).square()",
    "torch.cat([{a}, {a} * 2], {d})", "torch.stack([{a}, {a}.sin()], {d})",
    "{a}.aminmax(dim={d})[0]",
    "{a}.argmax({d}).double() * {a}.sum({d})", "{a}.mode({d})[0]",
    "torch.std_mean({a}, {d}, correction=0)[1]",
    "F.rms_norm({a}, {a}.shape[-1:])", "{a}.renorm(2, {d}, 1.0)", "{a}.count_nonzero({d}).double()",
    "torch.gather({a}, {d}, torch.zeros_like({a}, dtype=torch.long))", "{a}.softmax({d}).log()",
    "{a}.quantile(0.4, {d})",
)  # fmt: skip
_ALL = (
    "{a}.sum()", "{a}.mean()", "{a}.max()", "{a}.min()", "{a}.prod()", "({a} + 2).norm()",
    "{a}.median()",
    "{a}.var(correction=0)", "{a}.logsumexp(0)", "{a}.amax()", "{a}.std(correction=0).square()",
    "{a}.flatten().dot({a}.flatten())",
)  # fmt: skip
_IN_PLACE = (
    "{a}.sin_()", "{a}.mul_(0.5)", "{a}.add_(1)", "{a}.tanh_()", "{a}.sigmoid_()", "{a}.zero_()",
    "{a}.fill_(0.5)",
    "{a}.clamp_(-0.5, 0.7)", "{a}.neg_()", "{a}.square_()", "{a}.abs_()",
    "{a}.masked_fill_({a} > 0, 0.1)",
    "F.relu_({a})", "{a}.div_(2)", "{a}.sub_({a}.detach() * 0.5)", "{a}.mul_(0.2).exp_()",
    "{a} *= 0.5", "{a}.add_({a})",
    "{a}.mul_({a})", "{a}.floor_()", "{a}.pow_(2)", "{a}.erf_()", "{a}.clamp_min_(0.1)",
    "F.leaky_relu_({a}, 0.1)",
    "{a}.uniform_()", "{a}.bernoulli_(0.5)", "F.elu_({a})", "F.dropout_({a}, 0.3)", "{a}.round_()",
    "{a}.detach_()", "{a}.requires_grad_()", "{a}.requires_grad_(False)",
    "F.threshold_({a}, 0.1, 0.3)",
    "F.silu({a}, inplace=True)", "F.hardtanh_({a})", "{a}.abs_().add_(1).log_()",
    "{a}.abs_().add_(0.5).sqrt_()",
    "{a}.abs_().add_(0.5).rsqrt_()", "{a}.abs_().add_(1).reciprocal_()",
    "{a}.masked_fill_({a}.detach() < 0, {a}.sum())",
    "torch._foreach_mul_([{a}], 0.5)", "DoubleInPlace.apply({a})", "{n} = DoubleInPlace.apply({a})",
    "{n}, {m} = DoubleAndSine.apply({a})", "{a}.lerp_({a}.detach() + 1, 0.3)",
    "{n} = {a}.mul_(0.7)",
    "torch.sin({a}, out={a})", "{a}.swapaxes_(0, -1)", "{a}.unsqueeze_(0)", "{a}.squeeze_()",
    "{a}.t_()", "{a}.transpose_(0, -1)", "{a}.renorm_(2, 0, 1.0)",
    "{a}.index_fill_(0, torch.tensor([0]), 0.4)",
    "{a}.cumsum_(0)", "{a}.tril_()", "{a}.diagonal().zero_()", "{a}.T.mul_(0.5)",
    "{a}[...].mul_(0.5)",
    "{a}.fill_diagonal_(0.3)", "{a}.view(-1).sin_()", "{a}.unbind(0)[0].mul_(2)",
    "{a}.nan_to_num_()",
)  # fmt: skip
_IN_PLACE_WITH = (
    "{a}.add_({b})", "{a}.sub_({b}, alpha=0.5)", "{a}.mul_({b})", "{a}.copy_({b})",
    "{a}.div_({b}.abs() + 1)",
    "{a}.addcmul_({b}, {b}, value=0.3)", "{a}.lerp_({b}.expand_as({a}), 0.4)", "{a}[...] = {b}",
    "{a} += {b}",
    "{a}.masked_fill_({b} > 0, 0.2)", "{a}[{a}.detach() > 0.2] = 0.4", "{a}.copy_({b}.detach())",
    "{a} *= {b}",
    "{a}.addcdiv_({b}, {b}.abs() + 1)", "{a}.hypot_({b} + 2)",
    "{a}.masked_scatter_({a} > 0, {b}.expand_as({a}).clone())",
    "torch._foreach_add_([{a}], [{b}.expand_as({a})])",
    "torch._foreach_addcmul_([{a}], [{b}.expand_as({a})], [{a} * 1], 0.5)",
    "{a}.lerp_({b}, {b}.sigmoid())",
    "{a}.atan2_({b}.abs() + 1)", "{a}.copysign_({b})",
)  # fmt: skip


def _unary(p: Draft) -> str:
    return f"{p.new()} = " + p.rng.choice(_UNARY).format(a=p.real())


def _binary(p: Draft) -> str:
    a = p.real()
    shape = p.t(a).shape

    def fits(t: Tensor) -> bool:
        try:
            return not t.is_complex() and math.prod(torch.broadcast_shapes(t.shape, shape)) <= 48
        except RuntimeError:
            return False

    return f"{p.new()} = " + p.rng.choice(_BINARY).format(a=a, b=p.some(fits))


def _along(p: Draft) -> str:
    a = p.full()
    return f"{p.new()} = " + p.rng.choice(_ALONG).format(a=a, d=p.dim(a))


def _over_all(p: Draft) -> str:
    return f"{p.new()} = " + p.rng.choice(_ALL).format(a=p.full(0))


def _product(p: Draft) -> str:
    a = p.real(1)
    ta, n = p.t(a), p.new()
    wide = [m for m in p.names if not p.t(m).is_complex() and p.t(m).dim() >= 1]
    fits = [m for m in wide if p.t(m).shape[max(-2, -p.t(m).dim())] == ta.shape[-1]]
    same = [m for m in wide if p.t(m).shape[-1] == ta.shape[-1]]
    ways = [
        f"{n} = {a} @ {a}.mT if {a}.dim() > 1 else {a} @ {a}",
        f"{n} = torch.outer({a}.flatten()[:4], {a}.flatten()[:3])",
    ]  # fmt: skip
    if fits:
        ways += [f"{n} = {a} @ {p.rng.choice(fits)}"] * 3
    if same:
        b = p.rng.choice(same)
        ways += [f"{n} = F.linear({a}, {b})", f"{n} = torch.tensordot({a}, {b}, ([-1], [-1]))"]
        ways += [f"{n} = torch.einsum('...i,...i->...', {a}, {b})", f"{n} = torch.inner({a}, {b})"]
        ways += [f"{n} = F.cosine_similarity({a} + 2, {b} - 2, dim=-1)"]
    if ta.dim() == 2:
        ways += [
            f"{n} = torch.addmm({a} @ {a}.t(), {a}, {a}.t(), beta=0.5)",
            f"{n} = torch.mv({a}, {a}[0])",
        ]  # fmt: skip
        ways += [f"{n} = {a}.t().mm({a})", f"{n} = torch.addmv({a}[:, 0], {a}, {a}[0])"]
        ways += [f"{n} = F.scaled_dot_product_attention({a}[None], {a}[None], {a}[None])[0]"]
    if ta.dim() == 3:
        ways += [f"{n} = torch.bmm({a}, {a}.mT)", f"{n} = torch.baddbmm({a}, {a} @ {a}.mT, {a})"]
        ways += [f"{n} = F.group_norm({a}, 1)"]
    return p.rng.choice(ways)


def _view(p: Draft) -> str:
    a = p.some()
    t, n, rng = p.t(a), p.new(), p.rng
    if rng.random() < 0.05:
        p.fixed.add(n)
        return f"{n} = {a}.data"
    ways = [
        f"{n} = {a}.detach()", f"{n} = {a}.view({a}.shape)",
        f"{n} = {a}.unsqueeze({rng.randint(0, t.dim())})",
    ]  # fmt: skip
    ways += [
        f"{n} = {a}.reshape(-1)", f"{n} = {a}.view(-1)", f"{n} = {a}.squeeze()",
        f"{n} = {a}.flatten()",
    ]  # fmt: skip
    ways += [
        f"{n} = {a}[...]", f"{n} = {a}.view_as({a})", f"{n} = {a}.expand_as({a})",
        f"{n} = {a}[None]", f"{n} = {a}.alias() if False else {a}.ravel()",
    ]  # fmt: skip
    ways += [
        f"{n} = {a}.expand(2, *{a}.shape)",
        f"{n} = {a}.as_strided({a}.shape, {a}.stride(), {a}.storage_offset())",
    ]  # fmt: skip
    if t.is_complex():
        parts = ["torch.view_as_real({a})", "{a}.conj()", "{a}.real", "{a}.imag"]
        ways += [f"{n} = {part.format(a=a)}" for part in parts] * 3
        ways += [
            f"{n} = torch.view_as_real({a}.resolve_conj())", f"{n} = {a} * {a}.conj()",
            f"{n} = {a}.abs()",
        ]  # fmt: skip
    elif t.dim() and t.shape[-1] == 2:
        ways += [f"{n} = torch.view_as_complex({a})"] * 4
    if t.dim():
        d = rng.randrange(t.dim())
        e = rng.randrange(t.dim())
        size = t.shape[d]
        ways += [
            f"{n} = {a}.transpose({d}, {e})", f"{n} = {a}.movedim({d}, {e})",
            f"{n} = {a}.squeeze({d})",
            f"{n} = {a}.permute({rng.sample(range(t.dim()), t.dim())})", f"{n} = {a}.mT",
            f"{n} = {a}.T",
            f"{n} = {a}.narrow({d}, 0, {max(size - 1, 0)})",
            f"{n} = {a}[{'1:' if size > 1 else ':'}]",
            f"{n} = {a}.unfold({d}, {min(2, size)}, 1)", f"{n} = {a}[..., ::2]",
            f"{n} = {a}.view(torch.int64).view(torch.float64)",
            f"{n} = {a}.reshape({list(t.shape[::-1])})",
            f"{n} = {a}.flatten({min(d, e)}, {max(d, e)})",
        ]  # fmt: skip
        if size:
            i = rng.randrange(size)
            ways += [
                f"{n} = {a}.select({d}, {i})", f"{n} = {a}.select({d}, {i})",
                f"{n} = {a}[{'..., ' if rng.random() < 0.5 else ''}0]",
            ]  # fmt: skip
            ways += [
                f"{n}, *_ = {a}.split({max(size - 1, 1)}, {d})", f"{n}, *_ = {a}.chunk(2, {d})",
                f"{n}, *_ = {a}.unbind({d})",
            ]  # fmt: skip
            ways += [
                f"{n} = {a}.unflatten({d}, (1, {size}))", f"{n} = {a}.tensor_split(2, {d})[0]",
                f"{n} = {a}.swapdims(0, {d})",
            ]  # fmt: skip
            ways += [f"{n}, {p.new()} = ({a}.split({max(size - 1, 1)}, {d}) * 2)[:2]"]
            ways += [f"{n} = {a}.as_strided(({size},), ({t.stride(d)},), {a}.storage_offset())"]
    if t.dim() > 1:
        ways += [
            f"{n} = {a}.diagonal()", f"{n} = {a}.diagonal(1)", f"{n} = {a}.t()",
            f"{n} = {a}.adjoint()",
        ]  # fmt: skip
        ways += [f"{n} = Transpose.apply({a})"]
    return rng.choice(ways)


def _target(p: Draft) -> str:
    found = [n for n in p.names if n not in p.fixed]
    views = [n for n in found if p.t(n)._is_view()]
    inner = [n for n in found if not p.t(n).requires_grad or not _is_leaf(p.t(n))]
    for group, chance in ((views, 0.5), (inner, 0.9)):
        if group and p.rng.random() < chance:
            return p.rng.choice(group)
    if not found:
        raise Unfit
    return p.rng.choice(found)


def _in_place(p: Draft) -> str:
    step, a = p.rng.choice(_IN_PLACE), _target(p)
    if ("detach_" in step or "requires_grad_" in step) and any(
        p.t(n)._base is p.t(a) for n in p.names
    ):
        raise Unfit  # what becomes of its views depends on which have been used, and how
    n = p.new() if "{n}" in step else ""
    m = p.new() if "{m}" in step else ""
    return step.format(a=a, n=n, m=m)


def _in_place_with(p: Draft) -> str:
    a = _target(p)
    return p.rng.choice(_IN_PLACE_WITH).format(a=a, b=p.into(p.t(a).shape))


def _in_place_indexed(p: Draft) -> str:
    a = _target(p)
    t = p.t(a)
    if not t.dim() or not t.numel() or t.is_complex():
        raise Unfit
    rng = p.rng
    d, size = p.dim(a), t.shape[0]
    one = p.index(size)
    count = one.count(",") + 1
    rows = p.into(torch.Size([count, *t.shape[1:]]))
    value = rng.choice([rows, rows, f"{rows}.detach()", "0.3"])
    step = max(size - 1, 1)
    part = p.into(torch.Size([step, *t.shape[1:]]))
    full = p.into(t.shape)
    zeros = f"torch.zeros_like({a}, dtype=torch.long)"
    spread = f"{rows}.expand({count}, *{a}.shape[1:])"
    apart = f"torch.tensor({p.index(size, count, False)})"
    ways = [
        f"{a}[{one}] = {value}", f"{a}[:{step}] = {part}",
        f"{a}[0] = {rng.choice(['1.5', part + '.sum()'])}",
        f"{a}[:{step}] += {part}", f"{a}[..., :1] *= 0.5",
        f"{a}[{a}.detach() > 0] = {full}.sum() * 0.1",
        f"{a}.index_put_((torch.tensor({one}),), {rows}, accumulate={rng.random() < 0.5})",
        f"{a}.index_add_(0, torch.tensor({one}), {spread}, alpha=0.5)",
        f"{a}.index_copy_(0, {apart}, {a}.detach()[:{min(count, size)}] * 0.5)",
        f"{a}.scatter_({d}, torch.zeros_like({a}, dtype=torch.long)[..., :1], 0.7)",
        f"{a}.scatter_({d}, torch.zeros_like({a}, dtype=torch.long)[:1], {full}.expand_as({a}))",
        f"{a}.scatter_add_({d}, {zeros}, {full}.expand_as({a}) * 0.2)",
        f"{a}.index_fill_({d}, torch.tensor([0]), {full}.sum() * 0.1)",
        f"{a}.masked_scatter_({a} > 0, {full}.expand_as({a}) * 1)",
        f"{a}[{a} > 0.5] *= 0.5", f"{a}[..., 0] = {a}[..., -1]", f"{a}[{one}] *= 2",
        f"{a}.put_(torch.tensor([0, 0]), torch.tensor([0.1, 0.2], dtype=torch.float64), True)",
        f"{a}.scatter_reduce_({d}, {zeros}, {full}.expand_as({a}) * 0.5, 'sum')",
        f"{a}[:, None] = 0.5", f"{a}[-1].copy_({a}[0])",
        f"{a}.select({d}, 0).add_({a}.select({d}, -1))",
    ]  # fmt: skip
    return rng.choice(ways)


def _indexed(p: Draft) -> str:
    a = p.full()
    t, n, rng = p.t(a), p.new(), p.rng
    d, size = p.dim(a), p.t(a).shape[0]
    one, along = p.index(size), p.index(t.shape[d])
    count = one.count(",") + 1
    ways = [
        f"{n} = {a}[{one}]", f"{n} = {a}[{a}.detach() > 0]",
        f"{n} = {a}.index_select({d}, torch.tensor({along}))",
        f"{n} = {a}.gather({d}, torch.zeros_like({a}, dtype=torch.long)[..., :1])",
        f"{n} = {a}.take(torch.tensor([0, 0, -1]))",
        f"{n} = {a}.masked_select({a} > 0)", f"{n} = {a}[torch.tensor({one})[:, None]]",
        f"{n} = {a}[..., {p.index(t.shape[-1])}]",
        f"{n} = torch.take_along_dim({a}, {a}.argsort({d}), {d})",
        f"{n} = {a}.index_add({d}, torch.tensor([0]), {a}.narrow({d}, 0, 1))",
        f"{n} = {a}.scatter({d}, torch.zeros_like({a}, dtype=torch.long)[..., :1], 0.5)",
        f"{n} = {a}.index_fill({d}, torch.tensor([0]), 0.5)",
        f"{n} = {a}.scatter_add({d}, torch.zeros_like({a}, dtype=torch.long), {a})",
        f"{n} = {a}.select_scatter({a}.select({d}, 0) * 2, {d}, 0)",
        f"{n} = {a}.slice_scatter({a}[:1] * 2, 0, 0, 1)",
        f"{n} = {a}.masked_scatter({a} > 0, {a} * 2)",
        f"{n} = {a}[({a}.detach() > -9).nonzero(as_tuple=True)]",
        f"{n} = F.embedding(torch.tensor({one}), {a}.reshape({size}, -1))",
        f"{n} = {a}.index_put((torch.tensor({one}),), {a}[:1].expand({count}, *{a}.shape[1:]))",
        f"{n} = {a}.scatter_reduce({d}, torch.zeros_like({a}, dtype=torch.long), {a} * 2, 'amax')",
        f"{n} = {a}.msort()", f"{n} = F.pad({a}, (1, 0))",
        f"{n} = {a}.scatter_reduce({d}, torch.zeros_like({a}, dtype=torch.long), {a} * 2, 'mean')",
        f"{n} = {a}.cov() if {a}.dim() == 2 else {a} * 2",
    ]  # fmt: skip
    return rng.choice(ways)


def _several(p: Draft) -> str:
    a = p.full()
    n, m, rng = p.new(), p.new(), p.rng
    b = p.some(lambda t: t.shape == p.t(a).shape and not t.is_complex())
    d = p.dim(a)
    ways = [
        f"{n}, {m} = TwoOutputs.apply({a})", f"{n}, {m}, _ = OneIsConstant.apply({a})",
        f"{n}, _, {m} = OneIsConstant.apply({a})",
        f"{n}, {m} = torch._foreach_mul([{a}, {b}], [{b}, {a}])",
        f"{n}, {m} = torch._foreach_add([{a}, {b}], 2)",
        f"{n}, {m} = torch._foreach_sin([{a}, {b}])", f"{n}, {m} = {a}.sort({d})[0], {b}",
        f"{n}, {m} = torch.var_mean({a}, {d}, correction=0)",
f"{n} = torch.cat([{a}, {b}], {d})",
        f"{n} = torch.stack([{a}, {b}, {a}], {d})", f"{n} = TanhOut.apply({a})",
        f"{n} = AsIs.apply({a})", f"{n} = Transpose.apply({a})",
        f"{n}, {m} = torch.aminmax({a}, dim={d})", f"{n}, {m} = torch.broadcast_tensors({a}, {b})",
        f"{n}, {m} = torch.meshgrid({a}.flatten()[:2], {b}.flatten()[:2], indexing='ij')",
        f"{n} = torch.block_diag({a}.reshape(-1)[:2], {b}.reshape(-1)[:2])",
        f"{n}, {m} = {a}.unbind({d})[0], {a}.unbind({d})[-1]", f"{n} = torch.hstack([{a}, {b}])",
        f"{n}, {m} = torch._foreach_lerp([{a}, {b}], [{b}, {a}], 0.3)",
        f"{n} = torch.vstack([{a}, {b}])",
    ]  # fmt: skip
    if any("hook(" in step for step in p.steps):
        ways = [way for way in ways if "= torch._foreach" not in way]
    return rng.choice(ways)


def _hooked(p: Draft) -> str:
    if any("= torch._foreach" in step for step in p.steps):
        raise Unfit  # PyTorch has one node for all results, and so reaches more of the graph
    a = p.some(lambda t: t.requires_grad and _sound(t))
    label = p.new()
    double = "lambda gs: tuple(g if g is None else g * 2 for g in gs)"
    return p.rng.choice(
        [
            f"hook({a}, lambda g: seen.append(('{label}', g.detach().clone())))",
            f"hook({a}, lambda g: g * 2)",
            f"{a}.retain_grad()",
            f"{a}.retain_grad()",
            f"{a}.register_post_accumulate_grad_hook(lambda t: seen.append(('x', t.grad * 1)))",
            f"{a}.grad_fn.register_prehook({double})",
            f"{a}.grad_fn.register_hook(lambda i, o: seen.append(('{label}', o[0].clone())))",
        ]
    )


def _midway(p: Draft) -> str:
    a = p.some(lambda t: t.requires_grad)
    n = p.new()
    return p.rng.choice(
        [
            f"backward(total({a}), retain_graph=True)",
            f"backward(total({a}))",
            f"({n},) = grad(total({a}), [{a}], retain_graph=True)",
            f"with no_grad(): {a} -= 0.1 * ({a}.grad if {a}.grad is not None else 1)",
            f"{a}.grad = None",
            f"{a}.grad.zero_()",
            f"{n} = {a}.grad",
        ]
    )


_IN_REGIONS: list[Kind] = [
    _unary, _binary, _view, _along, _product, _in_place, _indexed, _several,
]  # fmt: skip


def _checkpointed(p: Draft) -> str:
    """A region with steps of its own over copies of its arguments, or over the arguments."""
    a, b = p.real(), p.real()
    body = Draft(p.rng, {"vx": p.t(a), "vy": p.t(b)})
    body.count = 100 + 10 * p.count
    for _ in range(p.rng.randint(1, 4)):
        kind = p.rng.choice(_IN_REGIONS)
        with contextlib.suppress(Unfit):
            body.add(kind(body))
    results = [n for n in body.names if n not in ("vx", "vy")] or ["vx * vy.sum()"]
    region, n = f"region{p.count}", p.new()
    lines = [f"def {region}(vx, vy):", *(f"    {s}" for s in body.steps)]
    lines.append(f"    return {results[-1]}")
    options = p.rng.choice(["", "", ", preserve_rng_state=False", ", early_stop=False"])
    lines.append(f"{n} = checkpoint({region}, {a}, {b}, use_reentrant=False{options})")
    return "\n".join(lines)


KINDS: list[tuple[Kind, int]] = [
    (_unary, 10), (_binary, 10), (_along, 6), (_over_all, 2), (_product, 5), (_view, 14),
    (_in_place, 10),
    (_in_place_with, 8), (_in_place_indexed, 7), (_indexed, 5), (_several, 6), (_hooked, 4),
    (_midway, 2), (_checkpointed, 3),
]  # fmt: skip
_WRAPPED = [f"packing({how!r})" for how in ("identity", "clone", "box", "numpy", "detach")]
_SHAPES = [
    (), (1,), (3,), (2, 3), (3, 3), (3, 2), (1, 3), (2, 3, 2), (3, 1), (0,), (2, 0), (4,), (2, 2),
]  # fmt: skip


def draft(rng: random.Random, least: int = 3, most: int = 30, hooks: bool = True) -> Program:
    """A random program. `hooks`: with regions in which saved tensors are packed."""
    p = Draft(rng)
    for i in range(rng.randint(2, 4)):
        shape = rng.choice(_SHAPES)
        options = ", grad=True" if i == 0 or rng.random() < 0.6 else ""
        layout = rng.choice(["plain", "plain", "plain", "transposed", "strided", "parameter"])
        options += f", layout={layout!r}" if layout != "plain" else ""
        p.add(f"{p.new()} = leaf({i}, {list(shape)}{options})")
    kinds, weights = zip(*KINDS, strict=True)
    for _ in range(rng.randint(least, most)):
        kind = rng.choices(kinds, weights)[0]
        try:
            step = kind(p)
        except Unfit:
            continue
        if kind is not _checkpointed and not step.startswith("with ") and kind is not _hooked:
            draw = rng.random()
            if draw < 0.06 and not re.search(r"squeeze_|\bt_|transpose_|swapaxes_", step):
                step = f"with no_grad(): {step}"
            elif draw < 0.16 and hooks:
                around = rng.sample(_WRAPPED, rng.choice([1, 1, 2]))
                step = f"with {', '.join(around)}: {step}"
            elif draw < 0.18:
                step = f"with no_grad(), torch.enable_grad(): {step}"
        p.add(step)
    _differentiate(p)
    return Program(p.steps, watch=rng.random() < 0.3)


def _differentiate(p: Draft) -> None:
    """Append what differentiates the program."""
    rng = p.rng
    roots = [n for n in p.names if p.t(n).requires_grad and not _is_leaf(p.t(n))]
    if not roots:
        return
    chosen = rng.sample(roots, min(len(roots), rng.choice([1, 2, 3, len(roots)])))
    if roots[-1] not in chosen:
        chosen.append(roots[-1])
    loss = f"total({', '.join(chosen)})"
    tracked = [n for n in p.names if p.t(n).requires_grad]
    leaves = [n for n in tracked if _is_leaf(p.t(n))]
    some = rng.sample(tracked, min(len(tracked), rng.randint(1, 3)))
    if rng.random() < 0.5 and leaves:
        some = leaves
    inputs = ", ".join(some)
    roots_text = ", ".join(chosen)
    cots = ", ".join(f"cot({n})" for n in chosen)
    # A hook that changes a gradient makes it depend on which of several equal formulas was used.
    meddled = any(word in step for step in p.steps for word in ("g * ", "seen", "AsIs", "retain"))
    way = rng.randrange(7 if meddled else 9)
    if way == 0:
        tail = [f"backward({loss})"]
    elif way == 1:
        tail = [f"backward([{roots_text}], [{cots}])", f"backward([{roots_text}], [{cots}])"]
    elif way == 2:
        tail = [f"loss = {loss}", "loss.backward(retain_graph=True)", "loss.backward()"]
    elif way == 3:
        tail = [f"backward({loss}, inputs=[{inputs}])"]
    elif way == 4:
        tail = [f"g = grad({loss}, [{inputs}], allow_unused=True)"]
    elif way == 5:
        options = "allow_unused=True, retain_graph=True"
        tail = [f"g = grad([{roots_text}], [{inputs}], [{cots}], {options})",
                f"backward({loss})"]  # fmt: skip
    elif way == 6:
        tail = [f"g = grad({loss}, [{inputs}])"]
    elif way == 7:
        tail = [f"g = grad({loss}, [{inputs}], create_graph=True, allow_unused=True)",
                "h = total(*[x.sin() for x in g if x is not None and x.requires_grad])",
                f"gg = grad(h, [{', '.join(leaves or some)}], allow_unused=True)"]  # fmt: skip
    else:
        tail = [f"backward({loss}, create_graph=True)",
                f"h = total(*[t.grad for t in [{', '.join(leaves)}] if t.grad is not None])",
                "backward(h)"]  # fmt: skip
    p.steps += tail
