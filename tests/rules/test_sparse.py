"""Products with sparse matrices: values, and gradients where PyTorch has them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.parity import same

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def dense(*shape):
    return lambda dtype: torch.randn(*shape, dtype=dtype, requires_grad=True)


def sparse(*shape, to="to_sparse"):
    def make(dtype):
        x = torch.randn(*shape, dtype=dtype)
        x[torch.rand(shape) > 0.6] = 0
        return getattr(x, to)().requires_grad_()

    return make


def csr(*shape):
    return sparse(*shape, to="to_sparse_csr")


def plain(x):
    return x if x.layout is torch.strided else x.to_dense()


PRODUCTS = {
    "sparse.mm": (torch.sparse.mm, [sparse(3, 4), dense(4, 5)]),
    "sparse.mm of two sparse": (torch.sparse.mm, [sparse(3, 4), sparse(4, 5)]),
    "mm": (torch.mm, [sparse(3, 4), dense(4, 5)]),
    "matmul": (torch.matmul, [csr(3, 4), dense(4, 5)]),
    "mv": (torch.mv, [csr(3, 4), dense(4)]),
    "dense by sparse": (torch.matmul, [dense(2, 3), sparse(3, 4)]),
    "linear": (F.linear, [dense(2, 4), csr(3, 4)]),
    "sparse.addmm": (
        lambda a, b, c: torch.sparse.addmm(a, b, c, beta=3.0, alpha=2.0),
        [dense(3, 5), sparse(3, 4), dense(4, 5)],
    ),
    "sampled_addmm": (
        lambda a, b, c: torch.sparse.sampled_addmm(a, b, c, beta=3.0, alpha=2.0),
        [csr(3, 4), dense(3, 5), dense(5, 4)],
    ),
}


def gradients(fn, makers, dtype):
    torch.manual_seed(0)
    leaves = [make(dtype) for make in makers]
    out = plain(fn(*leaves))
    return torch.autograd.grad(out, leaves, torch.randn(out.shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("case", PRODUCTS)
def test_gradients_equal_pytorchs_in_value_and_layout(case, dtype):
    expected = gradients(*PRODUCTS[case], dtype)
    with sg.record():
        got = gradients(*PRODUCTS[case], dtype)
    assert [g.layout for g in got] == [g.layout for g in expected]
    assert_close([plain(g) for g in got], [plain(g) for g in expected])


MADE = {
    "coo": lambda v: torch.sparse_coo_tensor([[0, 1, 2], [2, 0, 1]], v, (3, 3)),
    "coo of inferred size": lambda v: torch.sparse_coo_tensor([[0, 1, 2], [2, 0, 1]], v),
    "csr": lambda v: torch.sparse_csr_tensor([0, 1, 2, 3], [2, 0, 1], v, (3, 3)),
    "csc": lambda v: torch.sparse_csc_tensor([0, 1, 2, 3], [2, 0, 1], v, (3, 3)),
    "bsr": lambda v: torch.sparse_bsr_tensor([0, 1], [0], v[None, :, None], (3, 1)),
    "bsc": lambda v: torch.sparse_bsc_tensor([0, 1], [0], v[None, :, None], (3, 1)),
    "compressed": lambda v: torch.sparse_compressed_tensor(
        [0, 1, 2, 3], [2, 0, 1], v, (3, 3), layout=torch.sparse_csr
    ),
}


@pytest.mark.parametrize("case", MADE)
def test_the_values_of_a_sparse_tensor_get_their_gradient(case):
    def run():
        x = torch.randn(3, dtype=torch.float64, requires_grad=True)
        made, of_leaf = MADE[case](x * 2), MADE[case](x)
        (made.to_dense() * of_leaf.to_dense()).sum().backward()
        return x.grad, made.requires_grad, of_leaf.is_leaf

    same(run)


def test_a_sparse_product_that_needs_no_gradient_is_whole_too():
    """With PyTorch's view bookkeeping on, the kernel resizes an alias of its result, and it is
    left empty."""
    a, b = torch.eye(3).to_sparse(), torch.ones(3, 4).to_sparse()
    with sg.record():
        assert_close(torch.sparse.mm(a, b).to_dense(), torch.ones(3, 4))


@pytest.mark.parametrize("name", ["sparse.sampled_addmm", "sparse.mm.reduce"])
def test_op_database(name):
    assert_by_rule(name, torch.float64, limit=8, second=False)


def test_a_sparse_leaf_gets_the_dense_gradient_of_a_product_in_its_own_layout() -> None:
    entries = torch.tensor([[0, 1], [1, 0]]), torch.ones(2)

    def gradient() -> torch.Tensor:
        a = torch.sparse_coo_tensor(*entries, (2, 2), requires_grad=True)
        (a @ torch.ones(2, 3)).sum().backward()
        return a.grad

    expected = gradient()
    with sg.record():
        got = gradient()
    torch.testing.assert_close(got.to_dense(), expected)
