"""S5: many threads at once, over shared parameters: right gradients or a clear error."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording, in_threads
from tests.spec.columns import columns, eager, program, raced_program

THREADS, ROUNDS = 8, 6


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def parameters() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def loss_of(params: list[Tensor], data: Tensor) -> Tensor:
    a, b, c = params
    hidden = (data @ a).sin() * (data @ b)
    return (hidden @ c.t()).square().sum() + a.exp().sum()


def inputs(n: int) -> list[Tensor]:
    return [torch.randn(5, 4, dtype=torch.float64) for _ in range(n)]


def expected(params: list[Tensor], batches: list[Tensor], times: int) -> list[Tensor]:
    """By PyTorch, in one thread."""
    loss = sum(loss_of(params, batch) for batch in batches) * times
    return list(torch.autograd.grad(loss, params))


@columns(eager, program)
def test_s05_threads_that_record_and_run_over_shared_parameters(run: Any) -> None:
    params, batches = parameters(), inputs(THREADS)
    want = expected(params, batches, ROUNDS)

    def work(data: Tensor) -> None:
        for _ in range(ROUNDS):  # each enters and leaves on its own time
            with sg.record():
                run(loss_of(params, data))

    in_threads([lambda d=d: work(d) for d in batches])
    assert_close([p.grad for p in params], want)


@columns(eager, program)
def test_s05_threads_with_hooks_of_their_own(run: Any) -> None:
    params, batches = parameters(), inputs(THREADS)
    want = expected(params, batches, ROUNDS)
    pairs = [Recording() for _ in batches]

    def work(data: Tensor, pair: Recording) -> None:
        for i in range(ROUNDS):
            with sg.record():
                if i % 2:
                    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
                        loss = loss_of(params, data)
                else:
                    loss = loss_of(params, data)
                run(loss)

    in_threads([lambda d=d, p=p: work(d, p) for d, p in zip(batches, pairs, strict=True)])
    assert_close([p.grad for p in params], want)
    assert len({p.counts for p in pairs}) == 1, "each thread packed what it saved, and no more"
    assert pairs[0].packs == pairs[0].unpacks > 0


@columns(eager, program)
def test_s05_one_graph_run_by_many_threads(run: Any) -> None:
    params, (data,) = parameters(), inputs(1)
    want = expected(params, [data], THREADS)
    with sg.record():
        loss = loss_of(params, data)

    def work() -> None:
        with sg.record():
            run(loss, retain_graph=True)

    in_threads([work] * THREADS)
    assert_close([p.grad for p in params], want)


@columns(eager, program)
def test_s05_one_hooked_graph_run_by_many_threads(run: Any) -> None:
    params, (data,), pair = parameters(), inputs(1), Recording()
    want = expected(params, [data], THREADS)
    with sg.record(), sg.saved_tensors_hooks(pair.pack, pair.unpack):
        loss = loss_of(params, data)

    def work() -> None:
        with sg.record():
            run(loss, retain_graph=True)

    in_threads([work] * THREADS)
    assert_close([p.grad for p in params], want)


@columns(eager, raced_program)
def test_s05_a_graph_that_another_thread_frees_gives_right_gradients_or_an_error(run: Any) -> None:
    """All start at once without retain_graph: whoever is late is told so; none adds a part."""
    for _ in range(10):
        x = torch.randn(4, dtype=torch.float64, requires_grad=True)
        with sg.record():
            loss = x.sin().sin().sin().sin().sum()
        want = torch.autograd.grad(x.sin().sin().sin().sin().sum(), x)[0]
        done: list[int] = []

        def work(loss: Tensor = loss, done: list[int] = done) -> None:
            with sg.record():
                try:
                    run(loss)
                except sg.GraphFreedError:
                    return
            done.append(1)

        in_threads([work] * 4)
        if done:
            assert_close(x.grad, want * len(done))
        else:
            assert x.grad is None


@columns(eager, raced_program)
def test_s05_hooks_that_change_while_other_threads_unpack(run: Any) -> None:
    """A thread puts hooks on saved tensors and takes them off again; those that run see a pair and
    what that pair packed, or the plain tensor, and never parts of two."""
    x = torch.randn(20, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor) -> tuple[Tensor, list[Any]]:
        nodes = []
        for _ in range(10):
            x = (x * 1.1).sin()
            nodes.append(x.grad_fn)
        return x.sum(), nodes

    want = torch.autograd.grad(forward(x)[0], x)[0]
    with sg.record():
        loss, nodes = forward(x)
        saved = [node._raw_saved_self for node in nodes]
    over = threading.Event()

    def meddle() -> None:
        for i in itertools.count():
            if over.is_set():
                return
            if i % 3:
                saved[i % 10].replace_hooks(lambda t, i=i: (i, t + i), lambda p: p[1] - p[0])
            else:
                saved[i * 7 % 10].remove_hooks()

    def work() -> None:
        for _ in range(10):
            with sg.record():
                run(loss, retain_graph=True)

    def workers() -> None:
        try:
            in_threads([work] * 3)
        finally:
            over.set()

    in_threads([meddle, workers])
    assert_close(x.grad, 30 * want)


@columns(eager, program)
def test_s05_double_backward_in_many_threads(run: Any) -> None:
    params, batches = parameters(), inputs(4)

    def penalty(data: Tensor, grad: Any) -> Tensor:
        grads = grad(loss_of(params, data), params, create_graph=True)
        return sum(g.square().sum() for g in grads)

    want = torch.autograd.grad(sum(penalty(d, torch.autograd.grad) for d in batches), params)

    def work(data: Tensor) -> None:
        with sg.record():
            run(penalty(data, torch.autograd.grad))

    in_threads([lambda d=d: work(d) for d in batches])
    assert_close([p.grad for p in params], list(want))


def test_s05_entering_and_leaving_while_another_thread_trains_without_us() -> None:
    """PyTorch's names are bound and unbound under the other thread's feet: it never notices."""
    params, batches = parameters(), inputs(2)
    want = expected(params, batches[:1], 40)

    def plain() -> None:
        for _ in range(40):
            loss = loss_of(params, batches[0])
            assert loss.grad_fn is not None
            assert not loss.is_leaf
            loss.backward()

    def entering() -> None:
        for _ in range(200):
            with sg.record():
                pass

    in_threads([plain, entering, entering])
    assert_close([p.grad for p in params], want)


FIRST_USE = """
import sys, threading
import torch
import stowgrad as sg

sys.setswitchinterval(1e-6)
start, wrong = threading.Barrier(8), []

def work():
    x = torch.ones(3, requires_grad=True)
    start.wait()
    with sg.record():
        y = x
        for op in (torch.sin, torch.exp, torch.tanh, torch.sigmoid, torch.square):
            y = op(y) * 1.5
            if y.grad_fn.next_functions[0][0].name().startswith("Fallback"):
                wrong.append(op)
        y.sum().backward()
    want = torch.ones(3, requires_grad=True)
    z = want
    for op in (torch.sin, torch.exp, torch.tanh, torch.sigmoid, torch.square):
        z = op(z) * 1.5
    (g,) = torch.autograd.grad(z.sum(), want)
    if not torch.allclose(g, x.grad):
        wrong.append("gradient")

threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print("wrong:", wrong)
"""


def test_s05_threads_that_are_the_first_to_record_in_a_process() -> None:
    """What is made on first use is made once, and whole."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(sg.__file__).parents[1])},
        check=False,
    )
    assert done.stdout.strip() == "wrong: []", done.stdout + done.stderr
