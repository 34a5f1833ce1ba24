"""What derivative rules do when they are captured: at other sizes, on fake tensors, as one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stowgrad as sg

Function = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def _no_programs_before() -> Iterator[None]:
    sg.program_cache.clear()
    yield
    sg.program_cache.clear()


def gradient(fn: Function, x: Tensor) -> Tensor:
    leaf = torch.ones((), dtype=x.dtype, requires_grad=True)  # the sizes of leaves stay numbers
    torch.manual_seed(1)
    with sg.record():
        x = x * leaf
        out = fn(x)
        (found,) = torch.autograd.grad(out, x, torch.randn(out.shape, dtype=out.dtype))
    return found


def both(fn: Function, x: Tensor) -> None:
    """The gradient from a program is that of the engine, to the bit."""
    expected = gradient(fn, x)
    with sg.compiled_backward():
        got = gradient(fn, x)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert torch.equal(got, expected)


def randn(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


def weight(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


# Each at (rows, columns), in sequence: equal ones and ones that differ, swapped, and 1s.
PLANES = [(4, 6), (5, 7), (6, 6), (9, 4), (1, 6)]

MATRICES: dict[str, Function] = {
    "narrow": lambda x: x.narrow(0, 0, x.shape[0] - 1).narrow(1, x.shape[1] // 2, 1),
    "slice": lambda x: x[x.shape[0] // 2 :, ::2],
    "slice_to_fixed": lambda x: x[:2, -1:],
    "select": lambda x: x[x.shape[0] - 1],
    "split": lambda x: x.split(max(1, x.shape[0] // 2))[0],
    "split_fixed": lambda x: x.split(2, 1)[-1],
    "chunk": lambda x: x.chunk(3, 1)[0],
    "unbind": lambda x: x.unbind(0)[0] * x.unbind(0)[-1],
    "pad": lambda x: F.pad(x, (1, 2, 0, 3)),
    "pad_by_size": lambda x: F.pad(x, (x.shape[1], 0)),
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "expand_by_size": lambda x: x.unsqueeze(0).expand(x.shape[1], -1, -1),
    "repeat": lambda x: x.repeat(2, 3),
    "repeat_by_size": lambda x: x.repeat(x.shape[0], 1),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "tile": lambda x: x.tile(2, 2, 2),
    "roll": lambda x: x.roll(x.shape[0] // 2, 0),
    "flip": lambda x: x.flip(0, 1),
    "diagonal": lambda x: x.diagonal(),
    "diag_embed": lambda x: x.diag_embed(1),
    "triu": lambda x: x.triu(1),
    "reshape": lambda x: x.reshape(-1) * weight(x.numel()),
    "unfold": lambda x: F.pad(x, (3, 0)).unfold(1, 3, 2),
    "as_strided": lambda x: x.as_strided((x.shape[0],), (x.shape[1],)),
    "cat": lambda x: torch.cat([x, x * 2, x[:1]]),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "gather": lambda x: x.gather(1, torch.arange(x.shape[0])[:, None] % x.shape[1]),
    "index": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)],
    "index_select": lambda x: x.index_select(1, torch.tensor([0, x.shape[1] - 1])),
    "mask": lambda x: x[x > 0],
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0),
    "index_put": lambda x: (x * 0).index_put((torch.tensor([0, 0]),), x[:1] * x[0], True),
    "index_add": lambda x: x.index_add(0, torch.zeros(x.shape[0], dtype=torch.long), x * 3),
    "scatter": lambda x: x.scatter(1, torch.zeros_like(x, dtype=torch.long)[:, :1], x[:, :1] * 2),
    "embedding": lambda x: F.embedding(torch.tensor([0, x.shape[0] - 1, 0]), x),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(1, 0)[0],
    "max": lambda x: x.max(1)[0] + x.amax(1),
    "mean": lambda x: x.mean(0),
    "var": lambda x: F.pad(x, (0, 1)).var(1),
    "std_of_all": lambda x: F.pad(x, (0, 1)).std(),
    "norm": lambda x: x.norm(dim=1),
    "prod": lambda x: x.prod(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0) * x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1]),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, weight(*x.shape)),
    "matmul": lambda x: x @ x.mT @ x,
    "linear": lambda x: F.linear(x, weight(3, x.shape[1])),
    "bmm": lambda x: x[None].expand(2, -1, -1) @ weight(2, x.shape[1], 3),
    "outer": lambda x: torch.outer(x[0], x[:, 0]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "kron": lambda x: torch.kron(x, x[:1]),
    "broadcast": lambda x: x * x[:1] + x[:, :1],
    "where": lambda x: torch.where(x > 0, x, x[:1]),
    "solve": lambda x: torch.linalg.solve(x @ x.mT + 3 * torch.eye(x.shape[0]).to(x), x),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=x.shape[1]),
    "cdist": lambda x: torch.cdist(x, x * 2 + 1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None] * 2, x[None]),
}

# Each at (batch, channels, height, width).
PICTURES = [(2, 3, 8, 8), (3, 3, 8, 10), (4, 5, 9, 7), (5, 6, 11, 12)]

IMAGES: dict[str, Function] = {
    "conv": lambda x: F.conv2d(x, weight(4, x.shape[1], 3, 3), stride=2, padding=1),
    "conv_transpose": lambda x: F.conv_transpose2d(x, weight(x.shape[1], 2, 3, 3), stride=2),
    "depthwise": lambda x: F.conv2d(x, weight(x.shape[1], 1, 2, 2), groups=x.shape[1]),
    "conv1d": lambda x: F.conv1d(x.flatten(2), weight(2, x.shape[1], 3)),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "max_pool_whole": lambda x: F.max_pool2d(x, x.shape[2:]),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "global_pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 1, weight(x.shape[1])),
    "instance_norm": lambda x: F.instance_norm(x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "upsample_nearest": lambda x: F.interpolate(x, scale_factor=2),
    "upsample_bilinear": lambda x: F.interpolate(x, size=(5, 6), mode="bilinear"),
    "upsample_by_size": lambda x: F.interpolate(x, size=x.shape[3], mode="bicubic"),
    "reflect": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "circular": lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"),
    "unfold": lambda x: F.unfold(x, 3, stride=2),
    "fold": lambda x: F.fold(F.unfold(x, 3), x.shape[2:], 3),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x[:, :1].expand(-1, 4, -1, -1), 2),
    "grid_sample": lambda x: F.grid_sample(x, weight(x.shape[0], 3, 4, 2), align_corners=False),
    "flatten": lambda x: x.flatten(1) * 2,
    "permute": lambda x: x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).cumsum(0),
    "channels_last": lambda x: F.conv2d(
        x.contiguous(memory_format=torch.channels_last), weight(2, x.shape[1], 3, 3)
    ),
    "mean": lambda x: x.mean((2, 3)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_program_is_right_at_other_sizes(name: str) -> None:
    for rows, columns in PLANES:
        both(MATRICES[name], randn(rows, columns))
    assert not sg.program_cache.fallbacks


@pytest.mark.parametrize("name", IMAGES)
def test_a_program_is_right_for_images_of_other_sizes(name: str) -> None:
    for shape in PICTURES:
        both(IMAGES[name], randn(*shape))
    assert not sg.program_cache.fallbacks


def test_most_programs_hold_for_other_sizes() -> None:
    """One for two sizes that differ, or the test above says nothing of hits."""
    for fn in MATRICES.values():
        both(fn, randn(5, 7))
        both(fn, randn(6, 9))
    assert sg.program_cache.hits > 0.6 * len(MATRICES), sg.program_cache.report()


def test_shapes_of_another_rank_are_another_program() -> None:
    def add(a: Tensor, b: Tensor) -> Tensor:
        with sg.record():
            (found,) = torch.autograd.grad(a + b, b, torch.ones_like(a + b.detach()))
        return found

    with sg.compiled_backward():
        for shapes in [((5, 7), ()), ((), (5, 7)), ((5, 10, 5), (10, 5)), ((7,), (3, 5, 7))]:
            a, b = (randn(*s).requires_grad_() for s in shapes)
            assert torch.equal(add(a, b), torch.ones_like(a + b).sum_to_size(b.shape))


def test_a_gradient_whose_shape_only_the_data_tell() -> None:
    mask = torch.tensor([True, False, True, True])
    both(lambda x: torch.zeros_like(x[0]).index_put((mask,), x[0, :3] * 2) * 3, randn(2, 4))
    (program,) = sg.program_cache.programs
    assert any("depends on data" in note for note in program.notes)


def test_an_infinite_order_after_a_finite_one() -> None:
    for order in (3.0, 1 / 3, torch.inf, -torch.inf, 2.5):
        both(lambda x, order=order: x.norm(order) * 2, randn(4, 6))  # type: ignore[misc]
    assert not sg.program_cache.fallbacks


def test_what_fails_on_fake_tensors_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    both(lambda x: F.bilinear(x, x + 1, weight(2, x.shape[1], x.shape[1])), randn(4, 6))
    assert not [r for r in caplog.records if r.name == "torch._subclasses.fake_tensor"]
