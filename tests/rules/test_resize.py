"""Resampling, padding, shuffles and grid sampling."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.parity import plain

RESIZE = [
    *(f"nn.functional.interpolate.{mode}"
      for mode in ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear",
                   "area")),
    "_upsample_bilinear2d_aa", "nn.functional.upsample_nearest",
    *(f"nn.functional.pad.{mode}"
      for mode in ("reflect", "replicate", "replicate_negative", "circular")),
    "nn.functional.pixel_shuffle", "nn.functional.pixel_unshuffle", "nn.functional.channel_shuffle",
]  # fmt: skip


@pytest.mark.parametrize("name", RESIZE)
def test_the_database_by_our_rules(name):
    assert_by_rule(name, torch.float64)


def test_grid_samples_of_the_database():
    assert_by_rule("grid_sampler_2d", torch.float64)
    assert_by_rule("grid_sampler_3d", torch.float64, limit=2)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_in_complex(mode):
    assert_by_rule(f"nn.functional.pad.{mode}", torch.complex128)


OPS = {
    "nearest": lambda x: F.interpolate(x, scale_factor=1.7),
    "bilinear": lambda x: F.interpolate(x, (7, 3), mode="bilinear", align_corners=True),
    "smooth bilinear": lambda x: F.interpolate(x, (3, 3), mode="bilinear", antialias=True),
    "smooth bicubic": lambda x: F.interpolate(x, (3, 9), mode="bicubic", antialias=True),
    "reflect": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 2, -1, 4), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 2, 3, -1), mode="circular"),
    "pixels": lambda x: F.pixel_shuffle(x, 2),
    "channels": lambda x: F.channel_shuffle(x, 2),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_values_and_strides_are_pytorchs(name, format):
    def run():
        x = torch.randn(2, 4, 6, 6, dtype=torch.float64).to(memory_format=format).requires_grad_()
        y = OPS[name](x)
        (g,) = torch.autograd.grad(y, x, torch.randn(y.shape, dtype=y.dtype))
        return y, g, y.stride(), g.stride()

    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with sg.record():
        actual = run()
    assert_close(plain(actual), plain(expected))
    assert actual[2:] == expected[2:]


@pytest.mark.parametrize("name", OPS)
def test_nothing_is_saved(name):
    with sg.record(), sg.saved_tensors_hooks(lambda t: pytest.fail("saved"), lambda t: t):
        OPS[name](torch.randn(2, 4, 6, 6, requires_grad=True))


@pytest.mark.parametrize("name", OPS)
def test_batched_gradients(name):
    def run():
        x = torch.randn(2, 4, 6, 6, dtype=torch.float64, requires_grad=True)
        y = OPS[name](x)
        seeds = torch.randn(3, *y.shape, dtype=y.dtype)
        return torch.autograd.grad(y, x, seeds, is_grads_batched=True)

    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with sg.record():
        actual = run()
    assert_close(plain(actual), plain(expected))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 3, 4, 5)])
@pytest.mark.parametrize("align", [False, True])
def test_affine_grid(shape, align):
    def run():
        theta = torch.randn(2, len(shape) - 2, len(shape) - 1, requires_grad=True)
        grid = F.affine_grid(theta, shape, align_corners=align)
        (g,) = torch.autograd.grad(grid.pow(3).sum(), theta, create_graph=True)
        return g, torch.autograd.grad(g.square().sum(), theta)

    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with sg.record():
        actual = run()
    assert_close(plain(actual), plain(expected), rtol=1e-4, atol=1e-4)


MODES = [
    (rank, mode, padding, align)
    for rank, mode, padding, align in itertools.product(
        (2, 3), ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (True, False)
    )
    if (rank, mode) != (3, "bicubic")
]


def _sample(rank, mode, padding, align):
    x = torch.randn(2, 3, *(5, 4, 3)[:rank], dtype=torch.float64, requires_grad=True)
    grid = torch.rand(2, *(3, 4, 2)[:rank], rank, dtype=torch.float64) * 5 - 2.5
    grid.requires_grad_()
    y = F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=align)
    return x, grid, y


@pytest.mark.parametrize("how", MODES)
def test_grid_samples_far_outside(how):
    """Second derivatives too; coordinates that reflect several times."""

    def run():
        x, grid, y = _sample(*how)
        seed = torch.randn_like(y).requires_grad_()
        first = torch.autograd.grad(y, [x, grid], seed, create_graph=True)
        second = torch.autograd.grad(
            first, [seed, x, grid], [torch.randn_like(g) for g in first], allow_unused=True
        )
        return first, [torch.zeros(()) if g is None or not g.any() else g for g in second]

    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with sg.record():
        actual = run()
    assert_close(plain(actual), plain(expected))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_third_derivative_of_a_grid_sample(mode):
    """PyTorch has none; against finite differences of the second."""
    torch.manual_seed(0)
    with sg.record():
        x, grid, _ = _sample(2, mode, "zeros", True)
        direction = torch.randn_like(grid)

        def second(grid):
            y = F.grid_sample(x, grid, mode=mode, align_corners=True)
            (g,) = torch.autograd.grad(y.square().sum(), grid, create_graph=True)
            return torch.autograd.grad(g.square().sum(), grid, create_graph=True)[0].sum()

        (third,) = torch.autograd.grad(second(grid), grid)
        ends = [
            second((grid + step * direction).detach().requires_grad_()).item()
            for step in (1e-6, -1e-6)
        ]
    slope = (ends[0] - ends[1]) / 2e-6
    assert (third * direction).sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_a_grid_alone_is_saved_when_it_is_fixed():
    """The gradient of the input needs where was sampled, not what."""
    kept = []
    x, grid = torch.randn(1, 2, 4, 4, requires_grad=True), torch.rand(1, 3, 3, 2)
    with sg.record(), sg.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = F.grid_sample(x, grid, align_corners=False)
        y.sum().backward()
    assert [t.data_ptr() for t in kept] == [grid.data_ptr()]
    ours, x.grad = x.grad, None
    F.grid_sample(x, grid, align_corners=False).sum().backward()
    assert_close(ours, x.grad)


def test_a_padded_input_may_change():
    """PyTorch keeps it for its shape, and would refuse."""
    with sg.record():
        x = torch.ones(1, 2, 4, 4, requires_grad=True)
        y = x * 2
        z = F.pad(y, (1, 1, 1, 1), mode="reflect")
        y.zero_()
        z.sum().backward()
    assert x.grad.sum() == 2 * z.numel()
