"""Norms: running statistics, what is saved, memory format, second and third derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.parity import both_raise, plain, same


@pytest.mark.parametrize(
    "name",
    [f"nn.functional.{n}_norm"
     for n in ("batch", "layer", "group", "instance", "rms", "local_response")]
    + ["native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
       "native_group_norm", "native_layer_norm"],
)  # fmt: skip
def test_the_database_by_our_rules(name):
    assert_by_rule(name, torch.float64)


def test_rms_norm_in_complex():
    assert_by_rule("nn.functional.rms_norm", torch.complex128)


def _saved(fn):
    kept = []
    with sg.record(), sg.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fn()
    return [t.data_ptr() for t in kept], sum(t.nbytes for t in kept)


def _batch_norm_inputs(affine=True, frozen=False):
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    w, b = (torch.randn(3).requires_grad_(not frozen) if affine else None for _ in range(2))
    return x, w, b, torch.randn(3), torch.rand(3) + 0.5


def test_batch_norm_saves_the_statistics_it_reads():
    x, w, b, mean, var = _batch_norm_inputs()
    kept, size = _saved(lambda: F.batch_norm(x, mean, var, w, b, training=True))
    assert {x.data_ptr(), w.data_ptr()} < set(kept) and mean.data_ptr() not in kept
    assert size == x.nbytes + 3 * w.nbytes
    kept, size = _saved(lambda: F.batch_norm(x, mean, var, w, b, training=False))
    assert set(kept) >= {t.data_ptr() for t in (x, w, mean, var)}
    assert size == x.nbytes + 3 * w.nbytes


def test_frozen_batch_norm_does_not_save_its_input():
    x, w, b, mean, var = _batch_norm_inputs(frozen=True)
    kept, _ = _saved(lambda: F.batch_norm(x, mean, var, w, b, training=False))
    assert set(kept) == {t.data_ptr() for t in (w, mean, var)}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("weight", ["learnt", "frozen", "none"])
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_values_strides_and_running_statistics_are_pytorchs(norm, weight, training, channels_last):
    def run():
        x, w, b, mean, var = _batch_norm_inputs(weight != "none", weight == "frozen")
        x = x.detach()
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        options = {"training" if norm is F.batch_norm else "use_input_stats": training}
        y = norm(x, mean, var, w, b, **options)
        wanted = [t for t in (x, w, b) if t is not None and t.requires_grad]
        grads = torch.autograd.grad(y, wanted, torch.randn(y.shape))
        return y, grads, mean, var, mean._version, [g.stride() for g in grads]

    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with sg.record():
        actual = run()
    assert_close(plain(actual), plain(expected))


def test_running_statistics_may_change_before_backward():
    """In training the backward does not read them, so a second forward or a reset is no error."""
    with sg.record():
        bn = torch.nn.BatchNorm2d(3)
        x = torch.randn(4, 3, 5, 5, requires_grad=True)
        loss = bn(x).pow(3).sum() + bn(x).pow(3).sum()
        bn.reset_running_stats()
        loss.backward()
    assert x.grad is not None


@pytest.mark.parametrize("shape", [(0,), (0, 3), (0, 3, 4)])
def test_an_empty_batch(shape):
    def run():
        x = torch.zeros(shape, requires_grad=True)
        w = torch.ones(shape[1:2] or 1, requires_grad=True) if len(shape) > 1 else None
        y = torch.batch_norm(x, w, w, None, None, True, 0.1, 1e-5, False)
        return torch.autograd.grad(y.sum(), [x] if w is None else [x, w])

    same(run)


NORMS = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "frozen": lambda x, w, b: F.batch_norm(x, torch.ones(4), torch.ones(4) * 2, w, b),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "layer": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "rms": lambda x, w, b: F.rms_norm(x, (4,), w) + b,
}


@pytest.mark.parametrize("name", NORMS)
def test_derivatives_up_to_the_third(name):
    """Against finite differences: PyTorch's own third derivatives take the statistics as given."""

    def norm(x, w, b):
        return NORMS[name](x, w, b)

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        x, w, b = torch.randn(3, 4, 4), torch.randn(4), torch.randn(4)
        directions = [[torch.randn_like(t) for t in (x, w, b)] for _ in range(3)]
        seed = torch.randn(3, 4, 4)

        def derivative(order, *at):
            """The mixed derivative of <seed, norm> along the first `order` directions."""
            with sg.record():
                at = [t.clone().requires_grad_() for t in at]
                value = (norm(*at) * seed).sum()
                for direction in directions[:order]:
                    if not value.requires_grad:
                        return torch.zeros(())
                    grads = torch.autograd.grad(value, at, create_graph=True, allow_unused=True)
                    pairs = zip(grads, direction, strict=True)
                    value = sum((g * d).sum() for g, d in pairs if g is not None)
                return value.detach()

        def moved(step, direction):
            return [t + step * d for t, d in zip((x, w, b), direction, strict=True)]

        h = 1e-5
        for order in (1, 2, 3):
            ends = [derivative(order - 1, *moved(s, directions[order - 1])) for s in (h, -h)]
            slope = (ends[0] - ends[1]) / (2 * h)
            assert_close(derivative(order, x, w, b), slope, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["batch", "group", "instance", "layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_strides(name, dtype):
    def run():
        x = torch.randn(3, 4, 5, 4).to(dtype).to(memory_format=torch.channels_last)
        x.requires_grad_()
        w, b = (torch.randn(4).to(dtype).requires_grad_() for _ in range(2))
        y = NORMS[name](x, w, b)
        grads = torch.autograd.grad(y, [x, w, b], torch.randn(y.shape).to(dtype))
        return grads, [(g.stride(), g.dtype) for g in grads]

    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with sg.record():
        actual = run()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    assert_close(actual[0], expected[0], **tolerance)
    assert actual[1] == expected[1]


def test_rms_norm_saves_its_input_and_one_number_a_row():
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    _, size = _saved(lambda: F.rms_norm(x, (8,), w))
    assert size == x.nbytes + w.nbytes + 6 * 4


def _assert_second_derivative(first_of, *inputs):
    """That of the sum of squared first gradients, against finite differences: PyTorch's is wrong
    in these cases. `first_of(*inputs)` gives the gradients, with a graph."""
    at = [t.clone().requires_grad_() for t in inputs]
    directions = [torch.randn_like(t) for t in inputs]

    def value(*at):
        return sum(g.square().sum() for g in first_of(*at))

    with sg.record():
        grads = torch.autograd.grad(value(*at), at)
        ends = [
            value(*[(t + step * d).detach().requires_grad_()
                    for t, d in zip(at, directions, strict=True)]).item()
            for step in (1e-5, -1e-5)
        ]  # fmt: skip
    along = sum((g * d).sum() for g, d in zip(grads, directions, strict=True)).item()
    assert along == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)


def test_statistics_of_a_group_norm_have_gradients():
    def first(x):
        _, mean, rstd = torch.native_group_norm(x, None, None, 2, 4, 3, 2, 1e-5)
        value = (mean * 2 + rstd.square()).sum()
        return torch.autograd.grad(value, [x], create_graph=True)

    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    with sg.record():
        ours = first(x.clone().requires_grad_())
    assert_close(plain(ours), plain(first(x.clone().requires_grad_())))
    _assert_second_derivative(first, x)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_weight_norm(dim):
    def first(v, g):
        w = torch._weight_norm(v, g, dim)
        return torch.autograd.grad(w.pow(3).sum(), [v, g], create_graph=True)

    torch.manual_seed(0)
    v = torch.randn(4, 5, 3, dtype=torch.float64)
    g = torch.randn([n if d == dim else 1 for d, n in enumerate(v.shape)], dtype=v.dtype)
    with sg.record():
        ours = first(v.requires_grad_(), g.requires_grad_())
    assert_close(plain(ours), plain(first(v, g)))
    _assert_second_derivative(first, v.detach(), g.detach())


@pytest.mark.parametrize("name", ["batch", "frozen", "group", "layer", "rms"])
def test_batched_gradients(name):
    def run():
        x = torch.randn(3, 4, 4, requires_grad=True)
        w, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        y = NORMS[name](x, w, b)
        return torch.autograd.grad(y, [x, w], torch.randn(5, *y.shape), is_grads_batched=True)

    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with sg.record():
        actual = run()
    assert_close(plain(actual), plain(expected), rtol=1e-4, atol=1e-4)


def test_wrong_shapes_raise_as_pytorchs_do():
    x = torch.randn(2, 5, requires_grad=True)
    both_raise(lambda: F.rms_norm(x, (3,)), "normalized_shape")
    both_raise(lambda: F.rms_norm(x, (5,), torch.ones(3)), "weight")
    both_raise(lambda: F.layer_norm(x, (3,)), "normalized_shape")
    both_raise(lambda: F.group_norm(x, 2), "divisible")
    both_raise(lambda: F.group_norm(x, 5, torch.ones(3)), "weight")


def test_rms_norm_in_low_precision_rounds_as_pytorch_does():
    def run():
        x = torch.randn(6, 16, dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(16, dtype=torch.bfloat16, requires_grad=True)
        F.rms_norm(x, (16,), w).backward(torch.randn(6, 16, dtype=torch.bfloat16))
        return x.grad, w.grad

    same(run)


def test_group_norm_with_parameters_that_have_gaps_between_their_elements():
    def step():
        x = torch.arange(48.0, dtype=torch.float64).reshape(2, 4, 6).sin().requires_grad_()
        pairs = torch.linspace(1, 2, 8, dtype=torch.float64).reshape(4, 2).requires_grad_()
        y = F.group_norm(x, 2, pairs[:, 0], pairs[:, 1])
        (first,) = torch.autograd.grad(y.sin().sum(), [x], create_graph=True)
        return [y, first, *torch.autograd.grad(first.square().sum(), [x, pairs])]

    expected = step()
    with sg.record():
        assert_close(plain(step()), plain(expected))
