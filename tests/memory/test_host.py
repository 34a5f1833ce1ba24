"""ToHost: nothing to do for tensors in host memory; a copy there and back for all others."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import stowgrad as sg
from stowgrad.errors import SavedTensorChanged
from stowgrad.inspect import Meter
from stowgrad.memory import ToHost


class ToOtherHostMemory(ToHost):
    """As on a machine whose tensors are elsewhere: every tensor is copied."""

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return False


def stowed(pair):
    return sg.saved_tensors_hooks(pair.pack, pair.unpack)


def gradient(x, fn, pair=None):
    x = x.clone().requires_grad_()
    if pair is None:
        fn(x).sum().backward()
    else:
        with sg.record(), stowed(pair):
            fn(x).sum().backward()
    return x.grad


def fn(x):
    h = (x @ x.t()).tanh()
    q, k = h.chunk(2)
    return (h @ h.t()).exp() + (q * k).sin().sum()


@pytest.mark.parametrize("pair", [ToHost(), ToOtherHostMemory()], ids=["here", "elsewhere"])
def test_gradients_are_pytorchs_to_the_bit(pair):
    x = torch.randn(48, 48)
    assert torch.equal(gradient(x, fn, pair), gradient(x, fn))
    assert pair.bytes_now == 0


def test_a_tensor_that_is_here_stays_as_it_is():
    pair = ToHost()
    with Meter() as meter, sg.record(), stowed(pair):
        x = torch.randn(64, 64, requires_grad=True)
        y = x.exp()
        assert meter.live == 2 * x.nbytes  # no copy was made
        assert y.grad_fn._raw_saved_out.packed.data_ptr() == y.data_ptr()
        assert (pair.packs, pair.stayed) == (0, {"in host memory already": 1})
        y.mul_(2)
        with pytest.raises(SavedTensorChanged):
            y.sum().backward()


def test_copies_share_storages_and_go_with_the_graph():
    pair = ToOtherHostMemory()
    x = torch.randn(64, 64, requires_grad=True)
    with sg.record(), stowed(pair):
        h = x.exp()
        kept = [h.sin(), h.t().cos(), h @ h.t()]
        assert pair.bytes_now == pair.bytes_total == h.nbytes
        h.mul_(2)  # a copy does not mind
        kept[0].sum().backward(retain_graph=True)
        assert torch.equal(x.grad, h.detach().div(2).cos() * h.detach().div(2))
        del kept, h
        gc.collect()
        assert pair.bytes_now == 0


def test_the_original_is_not_kept():
    pair = ToOtherHostMemory()
    with Meter() as meter, sg.record(), stowed(pair):
        x = torch.randn(64, 64, requires_grad=True)
        y = (x * 2).exp().mul(3)
        assert meter.saved == 0
        assert pair.bytes_now == x.nbytes
        assert meter.live == 3 * x.nbytes  # x, its host copy of exp's result, and y
        y.sum().backward()


def test_parameters_and_small_tensors_stay():
    pair = ToOtherHostMemory()
    model = nn.Linear(64, 64)
    with sg.record(), stowed(pair):
        loss = model(torch.randn(2, 64, requires_grad=True) * 2).sum()
    assert pair.bytes_now == 0 and pair.stayed["in use"] == 1
    del loss


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_from_a_gpu_and_back(pin_memory):
    pair = ToHost(pin_memory=pin_memory)
    x = torch.randn(512, 512, device="cuda")
    cpu = torch.randn(512, 512)

    def mixed(x):
        return fn(x) + (cpu * x.cpu()).exp().cuda()

    assert torch.equal(gradient(x, mixed, pair), gradient(x, mixed))
    assert pair.packs > 3 and pair.stayed["in host memory already"] > 0
