"""Reductions: ties, zeros, nan, empty tensors, and what they save."""

from __future__ import annotations

import math

import pytest
import torch

from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, matrix, saved_by

INF, NAN = math.inf, math.nan


def tied() -> torch.Tensor:
    return torch.tensor([[1.0, 3, 3, 0], [3, 2, 0, 3], [-1, -1, -1, -1]], dtype=torch.float64)


TIES = {
    "amax": lambda x: x.amax(1),
    "amin over all dims": lambda x: x.amin((0, 1), keepdim=True),
    "aminmax": lambda x: torch.aminmax(x, dim=0),
    "aminmax of all": lambda x: torch.aminmax(x)[1],
    "max": torch.max,
    "min": torch.min,
    "median": torch.median,
    "nanmedian": torch.nanmedian,
    "max along a dim": lambda x: x.max(1).values,
    "median along a dim": lambda x: x.median(0, keepdim=True).values,
    "mode": lambda x: x.mode(1).values,
    "kthvalue": lambda x: x.kthvalue(2, -1).values,
    "cummax": lambda x: x.cummax(1).values,
    "cummin": lambda x: x.cummin(0).values,
    "norm of order inf": lambda x: torch.linalg.vector_norm(x, INF, dim=1),
    "norm of order -inf": lambda x: torch.linalg.vector_norm(x, -INF, dim=(0, 1)),
}


@pytest.mark.parametrize("case", TIES)
def test_ties_share_as_in_pytorch(case):
    agree(TIES[case], tied())


@pytest.mark.parametrize("case", ["amax", "max", "median", "nanmedian", "aminmax", "cummax"])
def test_nan_as_in_pytorch(case):
    x = tied()
    x[0, 1] = x[1, 1] = NAN
    agree(TIES[case], x)


ZEROS = {"none": [], "one": [(0, 1)], "one a row": [(0, 1), (1, 3), (2, 0), (3, 2)],
         "many": [(0, 1), (0, 3), (1, 0), (2, 2), (2, 3), (2, 5)]}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize(
    "fn",
    [torch.prod, lambda x: x.prod(1), lambda x: x.prod(0, keepdim=True), lambda x: x.cumprod(1)],
    ids=["prod", "prod along 1", "prod along 0", "cumprod"],
)
def test_products_with_zeros(fn, zeros, dtype):
    x = matrix(dtype=dtype)
    for at in ZEROS[zeros]:
        x[at] = 0
    agree(fn, x)
    agree(fn, x, order=2)


def test_a_long_cumulative_product():
    """Lengths about the powers of two, where the doubling scan has its edges."""
    for n in (1, 2, 3, 4, 5, 16, 17):
        x = matrix(2, n)
        x[0, n // 2] = 0
        agree(lambda x: x.cumprod(1), x, order=2)


EDGES = {
    "variance with no freedom left": (lambda x: x.var(1), (3, 1)),
    "variance of all with no freedom left": (lambda x: x.var(correction=6), (2, 3)),
    "variance, correction beyond": (lambda x: x.var(1, correction=4), (2, 3)),
    "deviation of equals": (lambda x: (x * 0).std(1), (2, 3)),
    "deviation and mean": (lambda x: torch.std_mean(x, 1, keepdim=True), (2, 3)),
    "the mean alone of var_mean": (lambda x: torch.var_mean(x, 0)[1], (2, 3)),
    "sum of nothing": (lambda x: x.sum(1), (2, 0)),
    "mean of nothing": (lambda x: x.mean(0), (0, 2)),
    "product of nothing": (lambda x: x.prod(1), (2, 0)),
    "norm of nothing": (lambda x: torch.linalg.vector_norm(x, dim=1), (2, 0)),
    "a single number": (lambda x: [x.sum(0), x.mean(-1), x.prod(), x.cumsum(0), x.amax(),
                                   x.var(correction=0), x.norm(), x.logsumexp(0)], ()),
    "another dtype": (lambda x: [x.sum(dtype=torch.float32), x.mean(0, dtype=torch.float32),
                                 x.cumsum(1, dtype=torch.float32), x.prod(dtype=torch.float32),
                                 x.float().norm(dtype=torch.float64)], (2, 3)),
    "nansum": (lambda x: (x / x.relu()).nansum((0, 1)), (2, 3)),
    "trace of a wide matrix": (torch.trace, (2, 5)),
    "logcumsumexp": (lambda x: (x * 30).logcumsumexp(1), (2, 5)),
    "renorm": (lambda x: x.renorm(3, 0, 1.0), (4, 3)),
    "distance": (lambda x: [torch.dist(x[0], x[1], p) for p in (1, 1.5, 2, 3, INF)], (2, 4)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("case", EDGES)
def test_edges(case):
    fn, shape = EDGES[case]
    torch.manual_seed(1)
    agree(fn, torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 2, 3, -1, INF, -INF])
def test_norms_with_zeros(p):
    x = matrix()
    x[1] = 0
    x[2, :3] = 0
    agree(lambda x: [torch.linalg.vector_norm(x, p, dim=1), x * 1], x)
    agree(lambda x: [x.norm(p, (0, 1)), x * 1], x)


def test_logsumexp_at_infinity():
    agree(lambda x: x.logsumexp(1), torch.tensor([[-INF, 1.0], [-INF, -INF], [INF, 1.0]]))


def test_sums_save_nothing_and_extrema_along_a_dim_only_their_index():
    assert saved_by(lambda x: x.sum(1).mean().cumsum(0), matrix()) == []
    (index,) = saved_by(lambda x: x.max(1).values, matrix())
    assert index.dtype == torch.int64 and index.shape == (4,)


BATCHED = [
    lambda x: x.sum((0, 1), keepdim=True) + x.mean(1),
    lambda x: x.amax(1) + x.max(1).values + x.max(),
    lambda x: x.prod(1) + x.cumprod(1)[:, 2],
    lambda x: x.var(1) + x.std(1) + x.norm(dim=1) + torch.linalg.vector_norm(x, 3, 1),
    lambda x: x.cumsum(1) + x.cummax(1).values + x.logcumsumexp(1),
    lambda x: x.logsumexp(1) + x.median(1).values + x.trace(),
]


@pytest.mark.parametrize("fn", BATCHED)
def test_a_batch_of_gradients_passes_through(fn):
    batched(fn, matrix())


REAL = """sum mean nansum prod amax amin aminmax max.reduction_with_dim max.reduction_no_dim median
nanmedian mode kthvalue var std var_mean std_mean norm linalg.vector_norm logsumexp cumsum cumprod
cummax cummin logcumsumexp dist trace renorm quantile masked.sum masked.prod masked.amax masked.mean
masked.norm masked.var masked.std masked.cumprod""".split()


@pytest.mark.parametrize("name", REAL)
def test_op_database(name):
    assert_by_rule(name, torch.float64)


@pytest.mark.parametrize("name", "sum mean prod var norm cumprod logcumsumexp renorm".split())
def test_op_database_complex(name):
    assert_by_rule(name, torch.complex128)
