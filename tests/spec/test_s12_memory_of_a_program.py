"""S12: a program that is run directly holds no more bytes at once than the eager engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stowgrad as sg
from tests.helpers import LiveBytes

Forward = Callable[[], Tensor]
Run = Callable[[nn.Module, Tensor], Tensor]  # how a block is run


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def mlp(run: Run) -> tuple[nn.Module, Forward]:
    width = 64
    blocks = nn.ModuleList([
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(3)
    ])  # fmt: skip
    head = nn.Linear(width, 10)
    data, target = torch.randn(128, width), torch.randint(0, 10, (128,))

    def forward() -> Tensor:
        x = data
        for block in blocks:
            x = x + run(block, x)
        return nn.functional.cross_entropy(head(x), target)

    return nn.ModuleList([blocks, head]), forward


def transformer(run: Run) -> tuple[nn.Module, Forward]:
    width, words = 32, 50
    table, head = nn.Embedding(words, width), nn.Linear(width, words)
    blocks = nn.ModuleList([Block(width, 4) for _ in range(2)])
    tokens = torch.randint(0, words, (4, 48))

    def forward() -> Tensor:
        x = table(tokens)
        for block in blocks:
            x = run(block, x)
        return nn.functional.cross_entropy(head(x).flatten(0, 1), tokens.flatten())

    return nn.ModuleList([table, head, blocks]), forward


class Hooks:
    """How the saved tensors are kept, and how a block runs."""

    def __init__(self, name: str, pair: Callable[[nn.Module], Any], run: Run | None = None) -> None:
        self.name, self.pair = name, pair
        self.run: Run = run or (lambda block, x: block(x))


def kept_by(policy: Any) -> Any:
    return sg.saved_tensors_hooks(policy.pack, policy.unpack)


def to_numpy(t: Tensor) -> Any:
    """Bytes that no meter of tensors sees, as on a disk."""
    return t.detach().numpy().copy()


def from_numpy(packed: Any) -> Tensor:
    return torch.from_numpy(packed).clone()


def on_disk(model: nn.Module) -> Any:
    return kept_by(sg.ToDisk(smallest=1, leave=[model]))


pytorchs: Run = lambda block, x: checkpoint(block, x, use_reentrant=False)
ours: Run = sg.checkpoint
nested: Run = lambda block, x: sg.checkpoint(lambda x: sg.checkpoint(block, x) * 1, x)

WAYS = [
    Hooks("as it is", lambda model: nullcontext()),
    Hooks("checkpoints of PyTorch's", lambda model: nullcontext(), pytorchs),
    Hooks("checkpoints", lambda model: nullcontext(), ours),
    Hooks("nested checkpoints", lambda model: nullcontext(), nested),
    Hooks("save_on_cpu", lambda model: torch.autograd.graph.save_on_cpu()),
    Hooks("numpy", lambda model: sg.saved_tensors_hooks(to_numpy, from_numpy)),
    Hooks("disk", on_disk),
    Hooks("disk and checkpoints", on_disk, ours),
]


def peaks(make: Any, way: Hooks, steps: int) -> tuple[list[int], list[Tensor | None]]:
    """The peak live bytes of each of some steps, forward and backward, and the last gradients."""
    torch.manual_seed(0)
    model, forward = make(way.run)
    found = []
    for _ in range(steps):
        model.zero_grad()
        with LiveBytes() as live, sg.record():
            with way.pair(model):
                loss = forward()
            live.peak = live.now()
            loss.backward()
            del loss
        found.append(live.peak)
    return found, [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("way", "reorder"),
    [(way, False) for way in WAYS] + [(way, True) for way in WAYS[::3]],
    ids=lambda value: getattr(value, "name", "reordered" if value else ""),
)
@pytest.mark.parametrize("make", [mlp, transformer])
def test_s12_the_peak_is_at_most_the_eager_engines(make: Any, way: Hooks, reorder: bool) -> None:
    (eager,), expected = peaks(make, way, 1)
    with sg.compiled_backward(reorder=reorder):
        programs, actual = peaks(make, way, 2)
    assert (sg.program_cache.misses, sg.program_cache.hits) == (1, 1), sg.program_cache.report()
    assert not sg.program_cache.fallbacks
    for a, e in zip(actual, expected, strict=True):
        assert a is not None and e is not None and torch.equal(a, e)
    assert max(programs) <= eager, f"{max(programs) / eager:.3f} of the eager engine's peak"


def test_s12_checkpoints_and_hooks_lower_it_at_all() -> None:
    """So that the test above compares what it says."""
    with sg.compiled_backward():
        plain, _ = peaks(mlp, WAYS[0], 1)
        for way in WAYS[1:]:
            if way.name != "save_on_cpu":  # a copy on the same CPU
                lower, _ = peaks(mlp, way, 1)
                assert lower[0] < plain[0], way.name


@pytest.mark.parametrize("make", [mlp, transformer])
def test_s12_with_retain_graph_too(make: Any) -> None:
    def peak() -> int:
        torch.manual_seed(0)
        _, forward = make(ours)
        with LiveBytes() as live, sg.record():
            loss = forward()
            live.peak = live.now()
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
        return live.peak

    eager = peak()
    with sg.compiled_backward():
        assert peak() <= eager
        assert peak() <= eager


@pytest.mark.parametrize("make", [mlp, transformer])
def test_s12_with_an_optimizer_in_the_backward_too(make: Any) -> None:
    """Gradients that are used and freed as they come."""

    def peak() -> int:
        torch.manual_seed(0)
        model, forward = make(ours)

        def update(p: Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        with LiveBytes() as live, sg.record():
            loss = forward()
            live.peak = live.now()
            loss.backward()
            del loss
        return live.peak

    eager = peak()
    with sg.compiled_backward():
        assert peak() <= eager
        assert peak() <= eager
