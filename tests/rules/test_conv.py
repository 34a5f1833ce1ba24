"""Convolutions, fold and unfold: frozen weights, memory format, second derivatives, old kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.parity import same

aten = torch.ops.aten


@pytest.mark.parametrize(
    "op", ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "unfold"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_database_by_our_rules(op, dtype):
    assert_by_rule(f"nn.functional.{op}", dtype)


def _saved(fn):
    kept = []
    with sg.record(), sg.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = fn()
    return out, [t.data_ptr() for t in kept]


@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_saves_only_what_the_wanted_gradient_needs(frozen):
    x = torch.randn(2, 4, 8, 8, requires_grad=frozen == "weight")
    w = torch.randn(6, 4, 3, 3, requires_grad=frozen == "input")
    b = torch.randn(6, requires_grad=True)
    _, kept = _saved(lambda: F.conv2d(x, w, b, padding=1))
    assert kept == {"weight": [w.data_ptr()], "input": [x.data_ptr()], "both": []}[frozen]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("x_last", [False, True])
@pytest.mark.parametrize("w_last", [False, True])
@pytest.mark.parametrize("frozen", ["weight", "input", "nothing"])
def test_values_and_strides_are_pytorchs(transposed, x_last, w_last, frozen):
    formats = torch.contiguous_format, torch.channels_last

    def run():
        x = torch.randn(2, 4, 9, 8).to(memory_format=formats[x_last])
        w = torch.randn(4, 2, 3, 3).to(memory_format=formats[w_last])
        x.requires_grad_(frozen != "input")
        w.requires_grad_(frozen != "weight")
        conv = F.conv_transpose2d if transposed else F.conv2d
        y = conv(x, w, stride=2, padding=1, groups=2)
        wanted = [t for t in (x, w) if t.requires_grad]
        grads = torch.autograd.grad(y, wanted, torch.randn(y.shape))
        return grads, [g.stride() for g in grads]

    same(run)


@pytest.mark.parametrize("transposed", [False, True])
def test_third_derivatives(transposed):
    """Every derivative of a convolution is made of convolutions."""

    def run():
        x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
        w = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
        b = torch.randn(4, dtype=torch.float64, requires_grad=True)
        conv = F.conv_transpose2d if transposed else F.conv2d
        y = conv(x, w, b, dilation=2, groups=2, padding=2)
        parts = (y * y * y).sum()
        for _ in range(2):
            grads = torch.autograd.grad(parts, [x, w, b], create_graph=True)
            parts = sum((g * g).sum() for g in grads)
        return torch.autograd.grad(parts, [x, w, b])

    assert_close(_recorded(run), _native(run))


def _native(run):
    torch.manual_seed(0)
    return run()


def _recorded(run):
    with sg.record():
        return _native(run)


def test_a_bias_alone_has_a_second_derivative():
    def run():
        x = torch.randn(2, 3, 5, requires_grad=True)
        b = torch.randn(4, requires_grad=True)
        y = F.conv1d(x, torch.ones(4, 3, 2), b)
        seed = torch.randn_like(y).requires_grad_()
        (db,) = torch.autograd.grad(y, b, seed, create_graph=True)
        return torch.autograd.grad((db * torch.arange(4.0)).sum(), seed)

    same(run)


ONE, TWO = (1,) * 3, (2,) * 3  # cut to the kernel's rank
OLD = {
    "_slow_conv2d_forward": ((1, 4, 6, 6), (5, 4, 3, 3), {"stride": ONE, "padding": ONE}),
    "slow_conv3d_forward": ((1, 2, 4, 5, 4), (3, 2, 2, 2, 2), {"stride": ONE, "padding": ONE}),
    "slow_conv_dilated2d": ((1, 2, 7, 7), (3, 2, 3, 3), {"dilation": TWO}),
    "slow_conv_dilated3d": ((1, 2, 5, 5, 5), (3, 2, 2, 2, 2), {"dilation": TWO}),
    "slow_conv_transpose2d": ((1, 2, 4, 4), (2, 3, 3, 3), {"stride": TWO, "output_padding": ONE}),
    "slow_conv_transpose3d": ((1, 2, 3, 3, 3), (2, 3, 2, 2, 2), {"stride": TWO}),
    "mkldnn_convolution": (
        (1, 4, 6, 6), (6, 2, 3, 3), {"padding": ONE, "stride": TWO, "dilation": ONE, "groups": 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_kernels_called_directly(name):
    x_shape, w_shape, options = OLD[name]
    rank = len(x_shape) - 2
    options = {k: v if k == "groups" else v[:rank] for k, v in options.items()}
    if name != "mkldnn_convolution":
        options["kernel_size"] = w_shape[2:]
    channels = w_shape[1] if "transpose" in name else w_shape[0]

    def run():
        x, w = torch.randn(x_shape, requires_grad=True), torch.randn(w_shape, requires_grad=True)
        b = torch.randn(channels, requires_grad=True)
        y = getattr(aten, name)(x, w, bias=b, **options)
        first = torch.autograd.grad((y * y).sum(), [x, w, b], create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in first), [x, w, b])

    assert_close(_recorded(run), _native(run), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frozen", ["", "x", "w", "b"])
def test_conv_tbc(frozen):
    def run():
        x = torch.randn(7, 2, 3, dtype=torch.float64).requires_grad_(frozen != "x")
        w = torch.randn(3, 3, 4, dtype=torch.float64).requires_grad_(frozen != "w")
        b = torch.randn(4, dtype=torch.float64).requires_grad_(frozen != "b")
        wanted = [t for t in (x, w, b) if t.requires_grad]
        y = torch.conv_tbc(x, w, b, pad=1)
        first = torch.autograd.grad((y * y).sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), wanted)
        return [g.detach() for g in (*first, *second)]

    assert_close(_recorded(run), _native(run))


def test_fold_second_derivative():
    def run():
        x = torch.randn(2, 12, 12, requires_grad=True)
        y = F.fold(x, (4, 5), (2, 2))
        (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), x)

    same(run)


def test_batched_gradients():
    def run():
        x, w = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(6, 4, 3, 3)
        y = F.conv2d(x, w)
        return torch.autograd.grad(y, x, torch.randn(5, *y.shape), is_grads_batched=True)

    assert_close(_recorded(run), _native(run))
