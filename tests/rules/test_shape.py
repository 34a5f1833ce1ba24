"""Views, in-place changes through them, and ops that move elements, as PyTorch has them."""

from __future__ import annotations

import pytest
import torch

import stowgrad as sg
from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, gradients, matrix, saved_by

# -- changes in place, seen through views


def view_of_a_changed_base(x):
    y = x * 2
    row = y[1]
    y.mul_(y.detach() + 1)
    return row


def base_of_a_changed_view(x):
    y = x * 2
    y[1].mul_(3)
    return y


def view_changed_through_another_view(x):
    y = x * 2
    first, second = y[:3], y[1:]
    first.exp_()
    return second, y, first


def chain_of_views(x):
    y = x * 2
    part = y.t()[1:4].transpose(0, 1).unsqueeze(0).squeeze().reshape(-1, 3)
    part.sin_()
    return y, part


def many_changes_through_many_views(x):
    y = x.clone()
    a, b, c = y[0], y[:, 1], y.diagonal()
    for step in range(3):
        a.mul_(2 + step)
        b.add_(a[1])
        c.sin_()
        y.mul_(1.5)
    return a, b, c, y


def slice_assignment(x):
    y = torch.zeros(4, 6, dtype=x.dtype)
    y[1:3, ::2] = x[:2, :3]
    y[:, 0] = x[:, 5] * 2
    y[3] = 7
    return y


def slice_assignment_over_what_was_there(x):
    y = x * 2
    y[1:3] = x[0]  # broadcast
    y[0, 0] = 0
    y[y < 0] = 0
    return y


def index_assignment(x):
    y = x * 1
    y[torch.tensor([0, 2, 0])] = x[torch.tensor([1, 3, 1])] * 3
    y[x > 0.5] = x[x > 0.5] * 5
    y[:, torch.tensor([1, 2])] += x[:, :2]
    return y


def untracked_base_takes_tracked_values(x):
    base = torch.ones(4, 6, dtype=x.dtype)
    before = base[0]
    base[:2].mul_(x[:2])
    return base, before, base[1]


def transposed_in_place(x):
    y = x * 2
    y.t_().mul_(2)
    z = x * 3
    z.transpose_(0, 1).unsqueeze_(0).squeeze_()
    return y, z


def view_transposed_in_place(x):
    y = x * 2
    v = y[1:3]
    v.t_()
    v.mul_(torch.arange(12.0, dtype=x.dtype).reshape(6, 2))
    return y, v


def expanded_and_reduced(x):
    y = x[:, :1].expand(4, 6) * x
    y[:, 1:].mul_(x[:, :1])
    return y


def as_strided_view(x):
    y = x * 2
    v = y.as_strided((3, 2), (5, 3), 1)
    v.mul_(3)
    return y, y.as_strided((4,), (6,)), v


def overlapping_windows(x):
    return x.unfold(1, 3, 2) * 2, x.reshape(-1).as_strided((5, 4), (3, 1), 2)


def conjugated_view(x):
    z = torch.complex(x[:2], x[2:])
    z.conj()[0].mul_(2j)
    z.imag.mul_(3)
    torch.view_as_real(z)[..., 0].sin_()
    return z


def view_of_a_stale_conjugate(x):
    z = torch.complex(x[:2], x[2:])
    row = z.select(0, 1)
    part = row.conj().squeeze()
    row.unsqueeze_(0)
    return part


def change_after_use(x):
    y = x * 1
    a = y[0] + 1  # keeps nothing of y
    y[0].zero_()
    return a, y


def copies_do_not_see_changes(x):
    y = x * 2
    copy = y[1].clone()
    y[1].mul_(5)
    return copy, y


VIEWS = [
    view_of_a_changed_base, base_of_a_changed_view, view_changed_through_another_view,
    chain_of_views, many_changes_through_many_views, slice_assignment,
    slice_assignment_over_what_was_there, index_assignment, untracked_base_takes_tracked_values,
    transposed_in_place, view_transposed_in_place, expanded_and_reduced, as_strided_view,
    overlapping_windows, conjugated_view, view_of_a_stale_conjugate, change_after_use,
    copies_do_not_see_changes,
]  # fmt: skip


@pytest.mark.parametrize("fn", VIEWS, ids=lambda f: f.__name__)
def test_views_and_changes_in_place_give_pytorchs_gradients(fn):
    agree(fn, matrix(), order=2)


# -- changes in place that have no sound gradient: PyTorch's error


def change_a_piece(make):
    def fn(x):
        y = x * 2
        make(y)[0].mul_(2)
        return y

    return fn


def change_a_base_of_pieces(x):
    y = x * 2
    piece = y.unbind()[0]
    y.mul_(2)
    return piece * 2


def change_a_view_of_a_leaf(x):
    x[0].mul_(2)
    return x


def change_a_leaf(x):
    return x.mul_(2)


def change_a_view_made_without_grad(x):
    y = x * 2
    with torch.no_grad():
        v = y[0]
    v.mul_(2)
    return y


def change_the_base_of_a_view_made_without_grad(x):
    y = x * 2
    with torch.no_grad():
        v = y[0]
    y.mul_(2)
    return v * 1


def transpose_a_leaf_in_place(x):
    return x.t_()


ERRORS = {
    "split": change_a_piece(lambda y: y.split(2)),
    "split_with_sizes": change_a_piece(lambda y: y.split([1, 3])),
    "chunk": change_a_piece(lambda y: y.chunk(2)),
    "unbind": change_a_piece(lambda y: y.unbind(1)),
    "tensor_split": change_a_piece(lambda y: y.tensor_split(3)),
    "hsplit": change_a_piece(lambda y: y.hsplit(2)),
    "base of pieces": change_a_base_of_pieces,
    "view of a leaf": change_a_view_of_a_leaf,
    "leaf": change_a_leaf,
    "view without grad": change_a_view_made_without_grad,
    "base of a view without grad": change_the_base_of_a_view_made_without_grad,
    "leaf transposed": transpose_a_leaf_in_place,
}


def error_of(fn) -> str | None:
    try:
        gradients(fn, matrix())
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", ERRORS)
def test_unsound_changes_in_place_raise_as_in_pytorch(case):
    expected = error_of(ERRORS[case])
    with sg.record():
        got = error_of(ERRORS[case])
    if expected is None:
        assert got is None
    else:
        assert got is not None
        assert isinstance(got, str)
        phrases = [
            "This view is the output of a function that returns multiple views",
            "a view of a leaf Variable that requires grad is being used in an in-place operation",
            "a leaf Variable that requires grad is being used in an in-place operation",
            "was created in no_grad mode and is being modified inplace",
            "was created in no_grad mode and its base or another view of its base has been",
        ]
        same = [p for p in phrases if p in expected]
        assert same and all(p in got for p in same), (expected, got)


@pytest.mark.parametrize(
    "make",
    [lambda y: torch.unsafe_split(y, 2), lambda y: torch.unsafe_chunk(y, 2), lambda y: (y[:2],)],
)
def test_pieces_that_are_no_views_may_change(make):
    agree(lambda x: make(x * 2)[0].mul_(3), matrix(), order=2)


# -- single ops where PyTorch's database has no sample

ONES = torch.ones(2, 6, dtype=torch.float64)
CASES = {
    "cat with a tensor of shape (0,)": lambda x: torch.cat([x, x.new_ones(0), x[:1]], 0),
    "cat of the leaf with itself": lambda x: torch.cat([x, x, ONES], -2),
    "stack of tracked and untracked": lambda x: torch.stack([x[:2], ONES, x[2:]], 1),
    "block_diag of 0, 1 and 2 dims": lambda x: torch.block_diag(x[0, 0], x[1], x[:, :2], ONES),
    "one piece of a split": lambda x: x.split(3, 1)[1],
    "the last of unbind": lambda x: x.unbind(1)[-1] * 2,
    "pieces in another order": lambda x: x.tensor_split([1, 3], 1)[::-1],
    "narrow from the end": lambda x: x.narrow(1, -3, 2),
    "repeat zero times": lambda x: [x.repeat(0, 1), x * 1],
    "repeat with new dims": lambda x: x.repeat(2, 1, 3, 2),
    "roll of the flattened": lambda x: x.roll(5),
    "roll twice along a dim": lambda x: x.roll((1, 2), (0, 0)),
    "permute by negative dims": lambda x: x.reshape(2, 2, 6).permute(-1, 0, -2),
    "T of three dims": lambda x: x.reshape(2, 2, 6).permute(2, 1, 0).mT.movedim((0, 1), (2, 0)),
    "expand over new dims": lambda x: x[:, None].expand(3, -1, 2, -1),
    "as_strided over itself": lambda x: x.as_strided((5, 5), (2, 1), 3),
    "as_strided of a transpose": lambda x: x.t().as_strided((3, 3), (7, 1), 1),
    "as_strided of an expanded": lambda x: x[:1].expand(4, 6).as_strided((3, 2), (1, 2)),
    "as_strided of a slice": lambda x: x[1:, 2:].as_strided((2, 2), (6, 1)),
    "unfold with gaps and overlaps": lambda x: [x.unfold(1, 2, 3), x.unfold(1, 3, 1)],
    "pad and crop": lambda x: torch.nn.functional.pad(x, (-1, 2, 1, -2), value=3.0),
    "casts": lambda x: [x.to(torch.float32).double(), x.to(torch.complex128), x.to(x), x.cdouble()],
    "cast of a complex to its real part": lambda x: (x * (1 + 2j)).to(torch.float64),
    "contiguous, or already so": lambda x: [x.t().contiguous(), x.contiguous()],
    "flatten a part": lambda x: x.reshape(2, 2, 2, 3).flatten(1, 2).unflatten(1, (4, 1)),
    "view as another": lambda x: [x.view_as(x.reshape(3, 8)), x[:1].expand_as(x)],
    "squeeze several": lambda x: x[None, :, None].squeeze((0, 2)).squeeze(0).unsqueeze(-1),
    "to sparse and back": lambda x: (x * 2).to_sparse().to_dense(),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_pytorchs(case):
    agree(CASES[case], matrix(), order=2)


def test_as_strided_scatter_gives_self_the_gradient_of_what_is_left_of_it():
    """PyTorch gives it that of the overwritten elements."""
    with sg.record():
        whole = torch.zeros(9, dtype=torch.float64)
        x = whole[3:].requires_grad_()  # an offset of its own
        y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        out = torch.as_strided_scatter(x, y, (2,), (2,), 4)
        w = torch.arange(1.0, 7, dtype=torch.float64)
        to_x, to_y = torch.autograd.grad(out, [x, y], w)
    assert to_x.tolist() == [1, 0, 3, 0, 5, 6] and to_y.tolist() == [2, 4]


def test_views_and_moves_save_no_tensor():
    def moves(x):
        y = torch.cat([x[1:, ::2], x.t().reshape(4, 6)[1:, :2]], 1).unfold(1, 2, 1)
        y = torch.stack(y.expand(2, *y.shape).unbind(1)).repeat(1, 2, 1, 1).flip(0).roll(1, 0)
        y = torch.nn.functional.pad(y.float().permute(3, 2, 1, 0), (1, 1)).tril()
        return y.as_strided((2,), (1,)).sum()

    assert saved_by(moves, matrix()) == []


BATCHED = [
    lambda x: torch.cat([x[1:, ::2], x.t().reshape(4, 6)[1:, :2]], 1).unfold(1, 2, 1),
    lambda x: torch.stack(x.split(3, 1)[::-1]).repeat(2, 1, 1).diagonal(0, 1, 2),
    lambda x: x.reshape(-1).as_strided((3, 2), (2, 1), 1),
    lambda x: torch.block_diag(x, x[0]).tril()[1:].squeeze().permute(1, 0),
]


@pytest.mark.parametrize("fn", BATCHED)
def test_a_batch_of_gradients_passes_through(fn):
    batched(fn, matrix())


OPS = """as_strided cat constant_pad_nd diag_embed diagonal diagonal_scatter expand flip permute
repeat reshape roll rot90 select select_scatter slice slice_scatter split_with_sizes squeeze stack
tensor_split tile to tril unbind unfold unsqueeze view_copy block_diag __getitem__""".split()


@pytest.mark.parametrize("name", OPS)
def test_op_database(name):
    assert_by_rule(name, torch.float64, limit=3)


@pytest.mark.parametrize("name", ["__getitem__", "cat", "repeat", "select", "to", "unfold"])
def test_op_database_complex(name):
    assert_by_rule(name, torch.complex128, limit=3)
