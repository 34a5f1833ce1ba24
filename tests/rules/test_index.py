"""Indexing, gather, scatter, masks, sorting: repeated and negative indices, ties, zero sizes."""

from __future__ import annotations

import pytest
import torch

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, matrix, saved_by

ROWS = torch.tensor([2, 0, 2, -1])
PICK = torch.tensor([1, 1, -2, 0])
COLUMNS = torch.tensor([5, 0, 0])
MASK = torch.tensor([[1, 0, 0, 1, 0, 1], [0] * 6, [1] * 6, [0, 1, 0, 0, 0, 0]], dtype=torch.bool)
PLACES = torch.tensor([[0, 3, 3], [1, 1, 1]])
LINEAR = torch.tensor([[0, 23, 5], [5, -1, 5]])
FIRST = torch.tensor([True, False, True, False])

READS = {
    "x[i, j]": lambda x: x[ROWS, PICK],
    "x[:, j]": lambda x: x[:, PICK] * 2,
    "x[i][..., None, j]": lambda x: x[ROWS][..., None, PICK],
    "x[i, mask]": lambda x: x[torch.tensor([[0], [2]]), torch.tensor([3, 1])],
    "x[mask]": lambda x: x[MASK] * 2,
    "x[rows]": lambda x: x[FIRST],
    "x[none]": lambda x: x[torch.zeros(0, dtype=torch.long)],
    "a number": lambda x: x[0, 0][None][torch.tensor([0, 0])],
    "index_select": lambda x: x.index_select(1, COLUMNS),
    "index_select of a number": lambda x: x[1, 1].index_select(0, torch.tensor([0])),
    "gather": lambda x: x.gather(0, PLACES),
    "gather of a part": lambda x: x.gather(-1, PLACES[:, :0]),
    "take": lambda x: x.take(LINEAR),
    "take_along_dim": lambda x: x.take_along_dim(x.detach().argsort(1), 1),
    "masked_select, broadcast": lambda x: x.masked_select(FIRST[:, None]),
    "masked_select of a row": lambda x: x[0].masked_select(MASK),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([2, 0, 1, 1]), 0),
    "unsafe_index": lambda x: torch.ops.aten._unsafe_index(x, [ROWS, PICK]),
    "sort": lambda x: x.sort(0, descending=True).values,
    "topk": lambda x: x.topk(3, 1, largest=False).values,
    "msort": torch.msort,
}


@pytest.mark.parametrize("case", READS)
def test_reading_at_an_index(case):
    agree(READS[case], matrix(), order=2)


def write(how):
    """`how(target, source)` on a changed copy of x, with values from x."""
    return lambda x: how(x * 2, x * 3)


WRITES = {
    "x[i, j] = y": lambda t, v: t.index_put((ROWS, PICK), v[0, :4]),
    "x[i, j] += y, repeated": lambda t, v: t.index_put((ROWS, PICK), v[0, :4], accumulate=True),
    "x[i] = row": lambda t, v: t.index_put((ROWS[:2],), v[0]),
    "x[mask] = number": lambda t, v: t.index_put((MASK,), v[0, 0]),
    "x[mask] = values": lambda t, v: t.index_put_((MASK,), v.reshape(-1)[:10]),
    "index_add": lambda t, v: t.index_add(1, COLUMNS, v[:, :3], alpha=-2),
    "index_add_": lambda t, v: t.index_add_(0, ROWS[:2], v[:2]),
    "index_add of numbers": lambda t, v: t[0, 0].index_add(0, torch.tensor([0]), v[0, 0]),
    "index_copy of a number": lambda t, v: t[0, 0].index_copy(0, torch.tensor([0]), v[0, 0]),
    "index_copy": lambda t, v: t.index_copy(0, ROWS[:2], v[2:]),
    "index_fill": lambda t, v: t.index_fill(1, COLUMNS, 7.0),
    "index_fill with a tensor": lambda t, v: t.index_fill(1, COLUMNS, v[0, 0]),
    "index_fill of a number": lambda t, v: t[0, 0].index_fill(0, torch.tensor([0]), v[0, 0]),
    "scatter": lambda t, v: t.scatter(0, torch.tensor([[0, 3, 2], [1, 1, 1]]), v[:2, :3]),
    "scatter of a number": lambda t, v: t.scatter(1, PLACES, 2.5),
    "scatter_add": lambda t, v: t.scatter_add(0, PLACES, v[1:3, :3]),
    "scatter_": lambda t, v: t.scatter_(1, PLACES[1:, :1], v[:1, :1]),
    "put": lambda t, v: t.put(torch.tensor([3, -1]), v[0, :2]),
    "put, accumulate": lambda t, v: t.put(LINEAR, v[:2, :3], accumulate=True),
    "masked_scatter": lambda t, v: t.masked_scatter(MASK, v),
    "masked_scatter, broadcast": lambda t, v: t.masked_scatter(MASK[0], v),
}


@pytest.mark.parametrize("case", WRITES)
def test_writing_at_an_index(case):
    agree(write(WRITES[case]), matrix(), order=2)


def small() -> torch.Tensor:
    """Values with ties and zeros."""
    return torch.tensor([[1.0, 0, 2, 2, -1, 0], [2, 0, 2, 1, -1, 3]], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_reducing_at_an_index_with_ties_and_zeros(reduce, include_self):
    index = torch.tensor([[0, 1, 1, 0, 2, 1], [3, 3, 3, 0, 2, 2]])

    def scatter(x):
        return x.flip(0).scatter_reduce(1, index, x, reduce, include_self=include_self)

    agree(scatter, small())
    if reduce == "sum":
        return
    columns = torch.tensor([0, 2, 2, 0])

    def slices(x):
        return (x * 1).index_reduce(1, columns, x[:, 1:5], reduce, include_self=include_self)

    agree(slices, small())


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_reducing_segments(reduce):
    lengths = torch.tensor([1, 3, 0, 2])
    agree(lambda x: torch.segment_reduce(x[0], reduce, lengths=lengths, initial=1.0), matrix())


def test_what_has_no_derivative_says_so_in_backward():
    with sg.record():
        x = matrix().requires_grad_()
        for y in (x.unique_consecutive(), x.unique(dim=0), x.unique()):
            with pytest.raises(sg.NotDifferentiableError, match="has no derivative"):
                y.sum().backward()


def test_what_is_saved_is_the_index():
    (index,) = saved_by(lambda x: x[ROWS], matrix())
    assert index is ROWS
    (mask,) = saved_by(lambda x: x.masked_select(MASK), matrix())
    assert mask is MASK
    assert saved_by(lambda x: x.scatter_add(0, PLACES, torch.ones(2, 3).double()), matrix()) == []


BATCHED = [
    lambda x: x[ROWS, PICK] + x[:, 2],
    lambda x: x.index_select(1, COLUMNS).gather(0, PLACES),
    lambda x: (x * 1).index_put((ROWS[:2],), x[2:]).take(LINEAR),
    lambda x: x.index_add(1, COLUMNS, x[:, :3]).index_copy(0, ROWS[:2], x[:2]),
    lambda x: x.scatter_add(0, PLACES, x[:2, :3]).scatter(1, PLACES, 1.0),
    lambda x: x.sort(1).values[:, 0] + x.topk(2, 1).values[:, 1],
    lambda x: x.scatter_reduce(0, PLACES, x[:2, :3], "amax"),
]


@pytest.mark.parametrize("fn", BATCHED)
def test_a_batch_of_gradients_passes_through(fn):
    batched(fn, matrix())


REAL = """__getitem__ index_put gather scatter scatter_add scatter_reduce.sum scatter_reduce.prod
scatter_reduce.mean scatter_reduce.amax index_fill index_copy index_select index_add
index_reduce.prod index_reduce.mean index_reduce.amin _unsafe_masked_index put take take_along_dim
_unsafe_masked_index_put_accumulate masked_select masked_scatter repeat_interleave sort topk
msort""".split()


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", REAL)
def test_op_database(name):
    assert_by_rule(name, torch.float64)


@pytest.mark.parametrize("name", "gather index_put scatter put masked_scatter index_add".split())
def test_op_database_complex(name):
    assert_by_rule(name, torch.complex128)
