"""Random programs of views, in-place changes and plain ops: everything as PyTorch has it.

Each program works on a growing list of tensors: leaves, untracked tensors, views of views, detached
ones, views made without grad. Where PyTorch finishes, so must we, with the same result; where it
refuses (a piece of a split changed in place, say), we must refuse too.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import stowgrad as sg

Maker = Callable[[random.Random, Tensor, Tensor], Tensor]


def a_dim(r: random.Random, t: Tensor) -> int:
    return r.randrange(t.ndim)


def without_grad(make: Callable[[Tensor], Tensor]) -> Maker:
    def maker(r, a, b):
        with torch.no_grad():
            return make(a)

    return maker


VIEWS: list[Maker] = [
    lambda r, a, b: a.select(d := a_dim(r, a), r.randrange(a.shape[d])),
    lambda r, a, b: a.narrow(d := a_dim(r, a), 0, max(1, a.shape[d] - 1)),
    lambda r, a, b: a.transpose(0, a.ndim - 1),
    lambda r, a, b: a[..., ::2],
    lambda r, a, b: a.unsqueeze(a_dim(r, a)),
    lambda r, a, b: a.squeeze(),
    lambda r, a, b: a.reshape(-1, 1),
    lambda r, a, b: a.diagonal() if a.ndim > 1 else a.view_as(a),
    lambda r, a, b: r.choice(a.split(1, a_dim(r, a))),
    lambda r, a, b: r.choice(a.unbind(a_dim(r, a))),
    lambda r, a, b: a.expand(2, *a.shape) if a.numel() < 30 else a.view_as(a),
    lambda r, a, b: a.conj() if a.is_complex() else a.view_as(a),
    without_grad(lambda a: a.view_as(a)),
]
PLAIN: list[Maker] = [
    lambda r, a, b: a * 2,
    lambda r, a, b: a.sin(),
    lambda r, a, b: a * b.sum(),
    lambda r, a, b: a.detach(),
    lambda r, a, b: a.clone(),
    lambda r, a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
]
CHANGES: list[Maker] = [
    lambda r, a, b: a.mul_(1.5),
    lambda r, a, b: a.sin_(),
    lambda r, a, b: a.mul_(b.sum()),
    lambda r, a, b: a.add_(a),
    lambda r, a, b: a.zero_(),
    lambda r, a, b: a.copy_(b.sum()),
    lambda r, a, b: a.__setitem__(0, b.sum()),
    lambda r, a, b: a.__setitem__(a.real > 0.3, 0.5),
    lambda r, a, b: a.index_put_((torch.tensor([0, a.shape[0] - 1]),), b.sum()),
    lambda r, a, b: a.masked_fill_(a.real > 0.5, 0.1),
    lambda r, a, b: a.transpose_(0, a.ndim - 1),
    lambda r, a, b: a.unsqueeze_(0),
    without_grad(lambda a: a.mul_(0.9)),
]


class Program:
    """What a random program did: its tensors, where it failed, the gradients of its leaves."""

    def __init__(self, seed: int, dtype: torch.dtype, steps: int = 14) -> None:
        r = random.Random(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.leaves = [self.values(3, 4).requires_grad_(), self.values(4).requires_grad_()]
        x, w = self.leaves
        self.tensors = [x * 1, torch.zeros(3, 4, dtype=dtype), x * w, self.values(4, 3)]
        self.error: RuntimeError | None = None
        self.gradients: list[Tensor | None] = []
        try:
            for _ in range(steps):
                self.step(r)
            self.flags = [(t.requires_grad, t.is_leaf, t._version) for t in self.tensors]
            self.differentiate()
        except RuntimeError as error:
            self.error = error

    def values(self, *shape: int) -> Tensor:
        return torch.randn(tuple(shape), dtype=self.dtype, generator=self.random)

    def step(self, r: random.Random) -> None:
        a, b = (r.choice([t for t in self.tensors if t.numel()]) for _ in range(2))
        kind = r.choice([VIEWS, VIEWS, PLAIN, CHANGES, CHANGES] if a.ndim else [PLAIN])
        made = r.choice(kind)(r, a, b)
        if kind is not CHANGES:
            self.tensors.append(made)

    def differentiate(self) -> None:
        tracked = [t for t in self.tensors if t.requires_grad]
        weights = [self.values(*t.shape).abs() for t in tracked]
        loss = sum((t.abs().pow(2) * w).sum() for t, w in zip(tracked, weights, strict=True))
        for _ in range(2):
            grads = torch.autograd.grad(loss, self.leaves, create_graph=True, allow_unused=True)
            self.gradients += [None if g is None else g.detach() for g in grads]
            some = [g for g in grads if g is not None and g.requires_grad]
            if not some:
                break
            loss = sum(g.abs().pow(2).sum() for g in some)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return not any(t is not None and bool(t.any()) for t in (a, b))
    return torch.allclose(a, b, rtol=1e-7, atol=1e-9, equal_nan=True)


# PyTorch says this also of a view that has become tracked through its base, unless someone has
# asked for its grad_fn before; and of values that an op saved without need, that they changed.
STRICTER = ("a leaf Variable that requires grad", "modified by an inplace operation: [torch.")


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("block", range(2))
def test_random_programs(block, dtype):
    finished = 0
    for seed in range(80 * block, 80 * (block + 1)):
        theirs = Program(seed, dtype)
        with sg.record():
            ours = Program(seed, dtype)
        if theirs.error is not None:
            strict = any(s in str(theirs.error) for s in STRICTER)
            assert strict or ours.error is not None, (seed, theirs.error)
            continue
        assert ours.error is None, (seed, ours.error)
        assert ours.flags == theirs.flags, seed
        assert all(map(same, ours.tensors, theirs.tensors)), seed
        assert all(map(same, ours.gradients, theirs.gradients)), seed
        finished += 1
    assert finished > 20
