"""Autocast while recording: weights are cast once in a region, activations are not kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import stowgrad as sg
from tests.models import zoo
from tests.parity import same


def weights():
    torch.manual_seed(0)
    return [torch.randn(8, 8, requires_grad=True) for _ in range(3)]


def autocast(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "unet"])
def test_a_model_in_bfloat16_has_pytorchs_gradients_bit_by_bit(name, attention):
    """With activations cast once for all that uses them, gradients differ by percents."""
    model, loss = zoo.MODELS[name](attention)
    model.float()

    def as_float32(module, args, kwargs):
        convert = lambda x: x.float() if torch.is_tensor(x) and x.is_floating_point() else x
        return tuple(map(convert, args)), {k: convert(v) for k, v in kwargs.items()}

    model.register_forward_pre_hook(as_float32, with_kwargs=True)

    def run():
        model.zero_grad()
        with autocast():
            value = loss(model)
        value.backward()
        return value, [p.grad.clone() for p in model.parameters()]

    same(run)


def test_a_weight_used_twice_is_cast_once():
    """As in PyTorch; so its gradient is a sum in bfloat16."""

    def run():
        x, w, v = weights()
        with autocast():
            y = F.linear(F.linear(x, w), w) @ v
        return torch.autograd.grad(y.float().square().sum(), (x, w, v))

    same(run)
    x, w, _ = weights()
    with sg.record(), autocast():
        first, second = (F.linear(x, w).grad_fn.next_functions for _ in range(2))
        assert first[1][0] is second[1][0]
        assert first[0][0] is second[0][0]  # x is a leaf too


def test_an_activation_used_twice_is_cast_twice():
    x, w, v = weights()
    with sg.record(), autocast():
        y = x * 2
        first, second = (F.linear(y, m).grad_fn.next_functions for m in (w, v))
        assert first[0][0] is not second[0][0]


def test_the_copy_of_an_activation_dies_with_its_last_use():
    x, w, v = weights()
    copies = []

    def alive():
        gc.collect()
        found = [copy() for copy in copies]
        return sum(t is not None and t.dtype == torch.bfloat16 for t in found)

    with sg.record(), autocast():
        with sg.saved_tensors_hooks(lambda t: copies.append(weakref.ref(t)) or t, lambda t: t):
            y = F.linear(x * 2, w)
            z = F.linear(y.float() * 2, v)
        assert alive() == 4
        del y, z
        assert alive() == 2  # the weights' copies, until the region ends
    assert alive() == 0


def test_weights_are_cast_anew_in_each_region():
    def run():
        x, w, _ = weights()
        values = []
        for _ in range(2):
            with autocast():
                values.append(F.linear(x, w))
            with torch.no_grad():
                w.mul_(2)
        return values

    same(run)


def test_a_copy_changed_in_place_is_not_taken_again():
    def run():
        x, w, _ = weights()
        with autocast():
            copy = w.to(torch.bfloat16)
            copy[0] = 0
            y = F.linear(x, w)
        return copy, y, torch.autograd.grad(y.float().sum() + copy.float().sum(), (x, w))

    same(run)


@pytest.mark.parametrize("cache", [True, False])
def test_the_cache_can_be_turned_off_as_ever(cache):
    def run():
        x, w, v = weights()
        with autocast(cache_enabled=cache):
            assert torch.is_autocast_cache_enabled() is cache
            y = F.linear(F.linear(x, w), w) @ v
        return torch.autograd.grad(y.float().square().sum(), (x, w, v))

    same(run)


def test_settings_are_as_before_afterwards():
    for outer in (True, False):
        with autocast(cache_enabled=outer):
            with sg.record():
                assert torch.is_autocast_cache_enabled() is outer
                x, w, _ = weights()
                F.linear(x, w).sum().backward()
            assert torch.is_autocast_cache_enabled() is outer
            assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
