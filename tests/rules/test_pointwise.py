"""Pointwise ops: kinks and ties, numbers for tensors, in-place forms, what is saved."""

from __future__ import annotations

import math

import pytest
import torch

import stowgrad as sg
from stowgrad.ops import Kind, entry_of
from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, matrix, saved_by

aten = torch.ops.aten

REAL = """
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min
    copysign cos cosh deg2rad div.floor_rounding div.no_rounding_mode div.trunc_rounding exp exp2
    expm1 fill float_power floor fmax fmin fmod frac frexp hypot ldexp lerp log log10 log1p log2
    logaddexp logaddexp2 logit masked_fill max.binary maximum min.binary minimum mul nan_to_num neg
    nextafter pow rad2deg reciprocal remainder round rsqrt rsub sgn sign sin sinc sinh sqrt square
    sub tan trunc where xlogy zero_
""".split()
COMPLEX = """
    abs acos acosh add addcdiv addcmul asin asinh atan atanh cos cosh div.no_rounding_mode exp exp2
    expm1 float_power ldexp lerp log log10 log1p log2 logaddexp masked_fill mul neg pow reciprocal
    rsqrt rsub sgn sin sinc sinh sqrt square sub tan where
""".split()


@pytest.mark.parametrize("name", REAL)
def test_the_database_by_our_rules(name):
    assert_by_rule(name, torch.float64, limit=2)


@pytest.mark.parametrize("name", COMPLEX)
def test_the_database_by_our_rules_in_complex(name):
    assert_by_rule(name, torch.complex128, limit=2)


# -- kinks, ties, and where a function ends

POINTS = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, math.inf, -math.inf, math.nan, 40.0], dtype=torch.float64
)


@pytest.mark.parametrize(
    "fn",
    [
        torch.abs, torch.sgn, torch.sign, torch.sqrt, torch.rsqrt, torch.log, torch.acos,
        torch.acosh, torch.atanh, torch.sinc, torch.nan_to_num, torch.reciprocal, torch.square,
        lambda x: x**0, lambda x: x**1, lambda x: x**2, lambda x: x**-1.5, lambda x: 0**x,
        lambda x: (-2.0) ** x, lambda x: x.clamp(0, 1), lambda x: x.clamp(1, 0),
        lambda x: x.clamp(min=1), lambda x: x.clamp_max(1),
        lambda x: torch.where(x > 0, x, 2.0), lambda x: torch.where(x > 0, 2.0, x),
    ],
)  # fmt: skip
def test_slopes_at_special_points(fn):
    for x in POINTS:  # one by one, for a NaN hides all else in the sum that `agree` differentiates
        agree(fn, x)



@pytest.mark.parametrize(
    "fn",
    [
        torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.atan2, torch.xlogy, torch.pow,
        torch.fmod, torch.remainder, torch.nextafter, torch.logaddexp, torch.div, torch.hypot,
    ],
)  # fmt: skip
def test_slopes_at_special_pairs(fn):
    def slopes():
        n = len(POINTS)
        a = POINTS.repeat_interleave(n).requires_grad_()
        b = POINTS.repeat(n).requires_grad_()
        return torch.autograd.grad(fn(a, b), (a, b), torch.arange(1.0, n * n + 1, dtype=a.dtype))

    expected = slopes()
    with sg.record():
        got = slopes()
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_clamp_by_tensors_whose_bounds_cross():
    """Where they cross the result is the upper bound, and the gradient goes there."""

    def slopes():
        x = torch.tensor([0.0, 1.0, 2.0, 1.0, 5.0], requires_grad=True)
        low = torch.tensor([1.0, 1.0, 3.0, 0.0, 1.0], requires_grad=True)
        high = torch.tensor([2.0, 1.0, 0.0, 2.0, 4.0], requires_grad=True)
        return torch.autograd.grad(x.clamp(low, high).sum(), (x, low, high))

    expected = slopes()
    with sg.record():
        got = slopes()
    assert [g.tolist() for g in got] == [g.tolist() for g in expected]


# -- numbers where tensors are meant, zero sizes, mixed dtypes


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + 2, lambda x: 2 + x, lambda x: torch.add(2, x, alpha=3), lambda x: x - 2.5,
        lambda x: 1 - x, lambda x: torch.rsub(x, 2, alpha=3), lambda x: torch.sub(3, x, alpha=2),
        lambda x: x * 2, lambda x: True * x, lambda x: x / 3, lambda x: 3 / x,
        lambda x: torch.div(3, x), lambda x: x % 2, lambda x: x.fmod(2),
        lambda x: 2**x, lambda x: torch.xlogy(x.abs(), 2), lambda x: torch.xlogy(2, x.abs()),
        lambda x: x.lerp(x * 2, 0.3), lambda x: torch.addcmul(x, x, x.sin(), value=2),
        lambda x: torch.addcdiv(x, x.sin(), x, value=2), lambda x: x * (1 + 2j), lambda x: x - 2j,
        lambda x: torch.add(x, x, alpha=2), lambda x: torch.copysign(x, -1.0),
    ],
)  # fmt: skip
def test_numbers_among_the_arguments(fn):
    agree(lambda x: fn(x).abs(), matrix())


def test_a_remainder_of_a_number_by_a_tensor():
    """PyTorch has no derivative for it: 7 % x = 7 - x floor(7 / x)."""
    with sg.record():
        x = torch.tensor([2.0, 3.0, -4.0], requires_grad=True)
        (g,) = torch.autograd.grad(torch.remainder(7, x).sum(), x)
    assert g.tolist() == [-3.0, -2.0, 2.0]


def test_floor_division_is_flat():
    with sg.record():
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        (g,) = torch.autograd.grad((x // 2).sum(), x)
    assert g.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_no_elements_and_no_dims(shape):
    def fn(x):
        y = x * x + x / (x + 3) - x.clamp(0, 1) + torch.maximum(x, x * 2) + torch.where(x > 0, x, 0)
        return y**2

    agree(fn, torch.ones(shape, dtype=torch.float64), order=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_each_gradient_has_the_dtype_and_shape_of_its_argument(dtype):
    def slopes():
        x = torch.linspace(1, 2, 6).reshape(3, 2).requires_grad_()
        y = torch.tensor(0.5, dtype=dtype, requires_grad=True)
        z = torch.tensor([[2.0], [1.0], [3.0]], dtype=dtype, requires_grad=True)
        out = (x * y + z / x - y * z).abs().sum()
        return torch.autograd.grad(out, (x, y, z))

    expected = slopes()
    with sg.record():
        got = slopes()
    torch.testing.assert_close(got, expected)


def test_fake_quantisation_passes_the_gradient_where_nothing_is_cut_off():
    scale, point = torch.tensor(0.1), torch.tensor(0, dtype=torch.int32)

    def fn(x):
        per_channel = torch.full((6,), 0.1), torch.zeros(6, dtype=torch.int32)
        return (
            torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -5, 5)
            + torch.fake_quantize_per_tensor_affine(x, scale, point, -5, 5) * 2
            + torch.fake_quantize_per_channel_affine(x, *per_channel, 1, -5, 5) * 3
        )

    agree(fn, matrix(dtype=torch.float32))
    assert {t.dtype for t in saved_by(fn, matrix(dtype=torch.float32))} == {torch.bool}


# -- in place


@pytest.mark.parametrize(
    "change",
    [
        lambda y, x: y.add_(x, alpha=2), lambda y, x: y.mul_(x), lambda y, x: y.div_(x),
        lambda y, x: y.pow_(3), lambda y, x: y.pow_(x), lambda y, x: y.__ipow__(2),
        lambda y, x: y.ldexp_(torch.tensor(3)), lambda y, x: y.clamp_(0, 1),
        lambda y, x: y.clamp_min_(x), lambda y, x: y.masked_fill_(x > 0, 2), lambda y, x: y.exp_(),
        lambda y, x: y.lerp_(x, 0.3), lambda y, x: y.addcmul_(x, x), lambda y, x: y.atan2_(x),
        lambda y, x: y.zero_(), lambda y, x: y.fill_(x[0, 0]), lambda y, x: y.copy_(x[0]),
        lambda y, x: y.eq_(x), lambda y, x: y.copysign_(x), lambda y, x: y.remainder_(x),
        lambda y, x: y.xlogy_(x.abs()), lambda y, x: y.float_power_(2), lambda y, x: y.square_(),
        lambda y, x: y.hypot_(x), lambda y, x: y.nextafter_(x), lambda y, x: y.sub_(2).rsqrt_(),
    ],
)  # fmt: skip
def test_in_place_forms(change):
    def fn(x):
        y = x * 2 + 5
        change(y[1:], x[1:])
        return y * x

    agree(fn, matrix(), order=2)


def test_an_in_place_form_does_not_borrow_the_rule_of_another_op():
    """pow_.Scalar is x^n; the overload pow.Scalar is n^x."""
    with sg.record():
        x = torch.tensor([3.0], requires_grad=True)
        (x * 1).pow_(2).backward()
    assert x.grad.item() == 6


@pytest.mark.parametrize("write", [lambda t, x: t.copy_(x), lambda t, x: t.fill_(x[0])])
def test_floats_written_to_integers_leave_the_graph(write):
    with sg.record():
        x = torch.ones(3, requires_grad=True)
        t = write(torch.zeros(3, dtype=torch.long), x)
    assert not t.requires_grad


def test_copy_gives_the_source_its_own_dtype_back_and_the_old_value_zero():
    with sg.record():
        x = torch.ones(3, requires_grad=True)
        y = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        z = y * 2
        z.copy_(x)
        z.sum().backward()
    assert x.grad.tolist() == [2, 2, 2] and x.grad.dtype == torch.float32
    assert y.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


# -- what is saved, and what backward costs


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + x, lambda x: x - x.detach(), lambda x: -x, lambda x: x * 2, lambda x: 1 - x,
        lambda x: x / 3, lambda x: x.floor(), lambda x: x.frac(), lambda x: x % 2,
        lambda x: torch.add(x, x, alpha=2), lambda x: x.lerp(x, 0.5), lambda x: x.deg2rad(),
        lambda x: x.copy_(x.detach()) if not x.is_leaf else x.clone().copy_(x),
    ],
)  # fmt: skip
def test_linear_ops_save_nothing(fn):
    assert saved_by(fn, matrix()) == []


@pytest.mark.parametrize("fn", [torch.exp, torch.sqrt, torch.rsqrt, torch.tan, torch.reciprocal])
def test_the_output_is_saved_where_it_is_enough(fn):
    results = []
    x = matrix().abs()
    saved = saved_by(lambda leaf: results.append(fn(leaf)), x)
    assert [t.data_ptr() for t in saved] == [results[0].data_ptr()]


def test_a_product_saves_only_what_the_needed_gradient_reads():
    other = torch.ones(6, dtype=torch.float64)
    for fn in (lambda x: x * other, lambda x: x / other, lambda x: other.addcmul(x, other)):
        saved = saved_by(fn, matrix())
        assert [t.data_ptr() for t in saved] == [other.data_ptr()]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, m: torch.where(m, x, x * 2), lambda x, m: torch.where(m, x, 0.0),
        lambda x, m: x.masked_fill(m, 0.0), lambda x, m: torch.where(m, 1, x),
    ],
)  # fmt: skip
def test_choices_save_their_mask(fn):
    mask = matrix() > 0
    saved = [t for t in saved_by(lambda x: fn(x, mask), matrix()) if t.dtype != torch.float64]
    assert [t.dtype for t in saved] == [torch.bool]
    agree(lambda x: fn(x, mask), matrix())


def test_a_sum_hands_the_gradient_on_as_it_is():
    with sg.record():
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        g = torch.ones(3)
        grads = torch.autograd.grad(x + y, (x, y), g)
    assert [t.data_ptr() for t in grads] == [g.data_ptr()] * 2


@pytest.mark.parametrize(
    "op",
    [
        aten.add.Tensor, aten.mul.Tensor, aten.where.self, aten.where.ScalarOther, aten.div.Tensor,
        aten.masked_fill.Scalar, aten.square.default, aten.pow.Tensor_Scalar, aten.clamp.default,
    ],
)  # fmt: skip
def test_common_ops_take_the_fast_path(op):
    assert entry_of(op).kind is Kind.RULE and entry_of(op).fast is not None


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * x / (x + 3) - x.sin(), lambda x: x.abs() ** 1.5, lambda x: x.clamp(-0.5, 0.5),
        lambda x: torch.where(x > 0, x * 2, x), lambda x: torch.maximum(x, x.flip(0)),
        lambda x: x.masked_fill(x > 0, 1.0), lambda x: torch.atan2(x, x.flip(0)),
        lambda x: torch.copysign(x, x.flip(0)), lambda x: x.sinc(), lambda x: x.sigmoid().logit(),
        lambda x: x.fmax(x.flip(0)), lambda x: torch.xlogy(x, x.abs()), lambda x: x.abs() ** x,
    ],
)  # fmt: skip
def test_formulas_are_mapped_over_a_batch_of_gradients(fn):
    batched(fn, matrix(2, 3))
