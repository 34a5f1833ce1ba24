"""Recompute: repeated blocks of an unedited model run under checkpointing, and nothing changes."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import stowgrad as sg
from stowgrad.inspect import Meter
from stowgrad.memory import Recompute
from stowgrad.memory.recompute import find_blocks


class Block(nn.Module):
    def __init__(self, width=32, drop=0.2, norm=True):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.seen = 0

    def forward(self, x, scale=1.0, **options):
        self.seen += 1
        return self.norm(x + scale * self.drop(self.body(x)))


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(4))
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def train(model, steps=3):
    """Losses of a few steps, and everything the model holds after them."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(64, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.state_dict().values())


def same(a, b):
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_training_is_the_same_to_the_bit_and_blocks_run_twice():
    torch.manual_seed(0)
    model = Model()
    other = copy.deepcopy(model)
    expected = train(model)
    with sg.record(), Recompute() as recompute:
        found = train(other)
    assert same(found, expected)  # batch norm's statistics and dropout's masks included
    assert (recompute.blocks, recompute.calls, recompute.skipped) == (4, 12, 0)
    assert [block.seen for block in model.blocks] == [3] * 4
    assert [block.seen for block in other.blocks] == [6] * 4


def test_a_block_whose_buffers_decide_what_it_computes():
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(norm=False) for _ in range(2)])
    for block in model:
        nn.utils.parametrizations.spectral_norm(block.body[0])
    other = copy.deepcopy(model)
    expected = train(model)
    with sg.record(), Recompute() as recompute:
        found = train(other)
    assert same(found, expected) and recompute.calls == 6


def test_what_is_saved_between_forward_and_backward():
    model, x = Model(drop=0.0), torch.randn(64, 32)

    def saved():
        with Meter() as meter, sg.record():
            loss = model(x).square().mean()
            held = meter.saved
            loss.backward()
        return held

    whole = saved()
    with Recompute():
        part = saved()
    inputs = 4 * x.nbytes
    assert inputs <= part < whole - 4 * 2 * 4 * x.nbytes  # two hidden layers a block are gone


def test_only_in_training_with_gradients():
    model, x = Model(), torch.randn(64, 32)
    with Recompute() as recompute:
        with sg.record():
            with torch.no_grad():
                model(x)
            model.eval()
            model(x).sum().backward()
            assert recompute.calls == 0
            model.train()
            model(x).sum().backward()
            assert recompute.calls == 4


def test_leaving_puts_modules_back_as_they_were():
    call = nn.Module.__call__
    model, x = Model(), torch.randn(64, 32)
    with pytest.raises(ZeroDivisionError), Recompute():
        assert nn.Module.__call__ is not call
        1 / 0  # noqa: B018
    assert nn.Module.__call__ is call
    with sg.record(), Recompute() as recompute:
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match="already"), recompute:
            pass
    loss_of_a_block_left_behind = loss
    sg.backward(loss_of_a_block_left_behind)  # what was recorded within runs after it, too
    assert model.blocks[0].body[0].weight.grad is not None
    assert recompute.calls == 4
    with sg.record():
        model(x)
    assert recompute.calls == 4


def test_it_acts_on_its_thread_only():
    model, x = Model(), torch.randn(64, 32)
    calls = []

    def work():
        with sg.record():
            model(x).sum().backward()
        calls.append(recompute.calls)

    with Recompute() as recompute:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert calls == [0]


class Cache:
    """Grows by what each block puts in."""

    def __init__(self):
        self.keys = []
        self.taken = 0


class Cached(Block):
    def forward(self, x, cache=None, more=()):
        if cache is not None:
            cache.keys.append(x * 2)
            cache.taken += 1
            x = x + sum(cache.keys) + cache.taken
        more.append(x) if isinstance(more, list) else None
        return super().forward(x) + sum(more)


class WithCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(3))

    def forward(self, x, cache, more=()):
        for block in self.blocks:
            x = block(x, cache=cache, more=more)
        return x


def test_a_block_that_changes_an_object_it_is_given():
    torch.manual_seed(0)
    model, x = WithCache(), torch.randn(8, 32)

    def gradients(*arguments):
        torch.manual_seed(1)
        model.zero_grad()
        out = model(x, *arguments)
        out.square().sum().backward(retain_graph=True)
        out.square().sum().backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(Cache(), [torch.ones(())])
    cache, more = Cache(), [torch.ones(())]
    with sg.record(), Recompute() as recompute:
        found = gradients(cache, more)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (recompute.calls, recompute.skipped) == (3, 0)
    assert (len(cache.keys), cache.taken, len(more)) == (3, 3, 4)


def test_a_block_given_what_cannot_be_copied_is_left_alone():
    model, x = WithCache(), torch.randn(8, 32)
    cache = Cache()
    cache.lock = threading.Lock()
    with sg.record(), Recompute() as recompute:
        model(x, cache).sum().backward()
    assert (recompute.calls, recompute.skipped) == (0, 3)
    assert len(cache.keys) == 3


def test_arguments_named_as_those_of_checkpoint():
    class Odd(Block):
        def forward(self, x, early_stop, preserve_rng=None, fn=0):
            return super().forward(x, early_stop)

    a, b, x = Odd(), Odd(), torch.randn(8, 32)
    blocks = nn.Sequential(nn.Identity(), nn.ModuleList([a, b]))

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            return b(a(x, 2.0, fn=1), early_stop=x, preserve_rng=3)

    with sg.record(), Recompute() as recompute:
        Whole()(x).sum().backward()
    assert recompute.calls == 2


def test_which_modules_are_blocks():
    block, linear = Block, lambda: nn.Linear(8, 8)
    stage = lambda: nn.Sequential(linear(), nn.ReLU())

    def count(*modules):
        return len(find_blocks(nn.Sequential(*modules)))

    assert count(block(), block(), block()) == 3
    assert count(linear(), nn.ReLU(), linear(), nn.ReLU()) == 0  # single layers
    assert count(block(), linear()) == 0  # nothing is repeated
    assert count(stage(), stage()) == 2
    stages = [nn.Sequential(block(), block()), nn.Sequential(block(), block(), block())]
    assert count(*stages) == 5  # the blocks, not the stages
    assert count(linear(), nn.ModuleList([block(), block()]), linear()) == 2
    nested = Model()
    nested.blocks[0].body = nn.Sequential(block(), block())
    assert find_blocks(nested) == list(nested.blocks)  # the outermost
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    transformer = nn.TransformerEncoder(layer, 3)
    assert find_blocks(transformer) == list(transformer.layers)
