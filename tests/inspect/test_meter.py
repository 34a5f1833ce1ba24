"""The meter of live bytes and the backward clock, under PyTorch's autograd and stowgrad's."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import stowgrad as sg
from stowgrad.inspect import BackwardClock, Meter
from stowgrad.saved import watchers

KIB = 256  # elements of float32


def test_storages_are_counted_once_however_many_tensors_live_in_them():
    with Meter() as meter:
        x = torch.zeros(4, KIB)
        assert meter.live == 4096
        views = [x.t(), x[0], x.view(-1), x.detach(), x.chunk(2)]
        x.add_(1)
        assert meter.live == meter.peak == 4096
        del x
        assert meter.live == 4096  # the views hold it
        del views
        assert (meter.live, meter.peak) == (0, 4096)


def test_the_peak_is_of_what_is_alive_at_once():
    with Meter() as meter:
        for _ in range(5):
            x = torch.zeros(KIB)
            del x
        assert meter.peak == 1024
        a, b = torch.zeros(KIB), torch.zeros(2 * KIB)
        assert meter.peak == 3072
        del a, b
        assert meter.live == 0
        meter.reset_peak()
        assert meter.peak == 0
        c = torch.zeros(KIB)
        assert meter.peak == 1024
        del c


def test_tensors_from_before_count_when_an_op_meets_them():
    before, given = torch.zeros(KIB), torch.zeros(KIB)
    with Meter() as meter:
        assert meter.live == 0
        torch.stack([before, before])
        assert meter.live == 1024
        meter.count([given, given.t()])
        assert meter.live == 2048


def test_resized_storages_and_lists_of_results():
    with Meter() as meter:
        x = torch.zeros(KIB)
        x.resize_(3 * KIB)
        assert meter.live == 3072
        parts = torch.randn(4, KIB).unbind()
        assert meter.live == 3072 + 4096
        q = torch.linalg.qr(torch.eye(16))
        assert meter.live >= 3072 + 4096 + 2048
        del parts, q


def test_no_bytes_for_tensors_without_memory():
    with Meter() as meter:
        held = [torch.zeros(KIB, device="meta"), torch.zeros(0), torch.zeros(0, 5).t()]
        assert meter.live == 0
        del held


def step(model, x):
    model.zero_grad()
    model(x).square().mean().backward()


def test_a_step_takes_the_same_under_both_autograds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    x = torch.randn(128, 64)
    figures = []
    for record in (False, True):
        model.zero_grad()
        with Meter() as meter:
            if record:
                with sg.record():
                    step(model, x)
            else:
                step(model, x)
            figures.append((meter.peak, meter.live))
    grads = sum(p.grad.nbytes for p in model.parameters())
    parameters = sum(p.nbytes for p in model.parameters())
    for _, live in figures:
        assert live == parameters + grads + x.nbytes
    native, ours = figures[0][0], figures[1][0]
    hidden = 128 * 256 * 4
    assert native > figures[0][1] + hidden  # forward and backward were seen, not only what is left
    assert abs(ours - native) <= hidden // 4


@pytest.mark.parametrize("record", [False, True])
def test_what_a_composite_op_allocates_inside_is_seen(record):
    # On CPU einsum is composite: the copies it makes of its permuted arguments are freed inside.
    a, b = torch.randn(8, 64, 32), torch.randn(8, 32, 64)

    def peak():
        with Meter() as meter, torch.inference_mode():
            if record:
                with sg.record():
                    torch.einsum("bij,bjk->kib", a, b).contiguous()
            else:
                torch.einsum("bij,bjk->kib", a, b).contiguous()
        return meter.peak

    assert peak() >= a.nbytes + b.nbytes + 2 * 8 * 64 * 64 * 4


def test_what_is_recorded_does_not_depend_on_the_meter():
    weight, x = torch.randn(32, 32, requires_grad=True), torch.randn(8, 32)
    names = []
    for metered in (False, True):
        meter = Meter()
        if metered:
            meter.__enter__()
        try:
            with sg.record():
                y = nn.functional.linear(x, weight)
                names.append(type(y.grad_fn).__name__ + y.grad_fn.name())
                y.sum().backward()
        finally:
            if metered:
                meter.__exit__(None, None, None)
    assert names[0] == names[1]


def test_saved_bytes_are_distinct_storages_without_parameters():
    weight = nn.Parameter(torch.randn(KIB, KIB))
    x = torch.randn(4, KIB)
    with Meter() as meter, sg.record():
        h = torch.tanh(x @ weight)  # saves x and its own result
        assert meter.saved == x.nbytes + h.nbytes
        y = h * h.view(4, KIB)  # saves h twice more
        assert meter.saved == x.nbytes + h.nbytes
        z = h @ weight.t()  # saves the parameter, as a view
        assert meter.saved == x.nbytes + h.nbytes
        loss = y.sum() + z.sum()
        loss.backward(retain_graph=True)
        assert meter.saved == x.nbytes + h.nbytes
        loss.backward()
        assert meter.saved == 0
        meter.reset_peak()
        k = torch.tanh(h.detach() @ weight)
        rest = [torch.zeros(100 * KIB) for _ in range(3)]
        assert meter.saved_at_peak == h.nbytes + k.nbytes
        del rest
    assert not watchers


def test_saved_bytes_go_with_a_graph_that_is_dropped_and_with_hooks():
    x = torch.randn(KIB, requires_grad=True)
    with Meter() as meter, sg.record():
        y = x.exp()
        assert meter.saved == y.nbytes
        del y
        assert meter.saved == 0
        with sg.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = x.exp()
        assert meter.saved == 0
        with sg.saved_tensors_hooks(lambda t: t, lambda t: t):
            z = x.exp()
        assert meter.saved == z.nbytes  # the hook kept the tensor itself
        y.grad_fn._raw_saved_out.remove_hooks()
        assert meter.saved == 2 * z.nbytes
        del y, z


def test_other_threads_do_not_count():
    with Meter() as meter:
        kept = []
        thread = threading.Thread(target=lambda: kept.append(torch.zeros(KIB)))
        thread.start()
        thread.join()
        assert meter.live == 0


def test_an_error_leaves_no_meter_behind():
    with pytest.raises(ZeroDivisionError), Meter() as meter:
        torch.zeros(KIB)
        1 / 0  # noqa: B018
    torch.zeros(KIB)
    assert meter.peak == 1024 and not watchers


@pytest.mark.parametrize("record", [False, True])
def test_the_clock_counts_backward_calls(record):
    x = torch.randn(100, requires_grad=True)

    def work():
        x.exp().sum().backward()
        torch.autograd.grad(x.exp().sum(), x)

        def inner(grad):
            with torch.enable_grad():
                torch.autograd.grad(x.exp().sum(), x)

        y = x.exp()
        y.register_hook(inner)  # a backward inside a backward
        y.sum().backward()

    engine = torch.autograd.Variable._execution_engine
    if record:
        with sg.record(), BackwardClock() as clock:
            work()
    else:
        with BackwardClock() as clock:
            work()
    assert clock.calls == 3
    assert len(clock.intervals) == 2 and 0 < sum(clock.intervals) < 60
    assert 0 < clock.seconds < 60
    assert torch.autograd.Variable._execution_engine is engine
