"""Gradients of Fourier transforms: even and odd lengths, each normalization, real and complex."""

from __future__ import annotations

import pytest
import torch

from tests.opinfo_cases import assert_by_rule
from tests.rules.agree import agree, batched, matrix, saved_by

REAL = ["rfft", "irfft", "hfft", "ihfft", "fft", "ifft"]


@pytest.mark.parametrize("norm", ["forward", "backward", "ortho"])
@pytest.mark.parametrize("name", REAL)
def test_lengths_and_norms(name, norm):
    """One element, two, odd and even; cropped and padded. Inner frequencies count twice."""
    fn = getattr(torch.fft, name)
    agree(lambda x: [fn(x, n=n, norm=norm) for n in (1, 2, 5, 6, 9)], matrix(), order=2)


CASES = {
    "several dims": lambda x: [torch.fft.fftn(x), torch.fft.ifft2(x, dim=(1, 0))],
    "several dims, real": lambda x: [
        torch.fft.rfft2(x), torch.fft.rfftn(x.reshape(2, 2, 6), dim=(2, 0, 1)),
        torch.fft.rfft(x, dim=0), torch.fft.ihfft2(x),
    ],
    "several dims, to real": lambda x: [
        torch.fft.irfft2(x), torch.fft.irfft2(x, s=(3, 7)), torch.fft.hfft2(x),
        torch.fft.irfft(x, dim=0), torch.fft.hfftn(x, s=(5, 5)),
    ],
    "there and back": lambda x: [
        torch.fft.irfft(torch.fft.rfft(x), n=6), torch.fft.ifft(torch.fft.fft(x, dim=0), dim=0),
    ],
    "shifts": lambda x: [torch.fft.fftshift(x), torch.fft.ifftshift(x, dim=1)],
    "stft": lambda x: torch.stft(
        x.flatten(), 8, hop_length=3, window=x.flatten()[:8], return_complex=True
    ),
    "istft": lambda x: torch.istft(
        torch.complex(x[:, :5].t(), x[:, 1:].t()).contiguous(), 8, hop_length=2, center=True,
        window=torch.ones(8, dtype=x.dtype),
    ),
    "two-sided spectrum of a real signal": lambda x: torch.ops.aten._fft_r2c(x, [1], 0, False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_first_and_second_derivatives_equal_pytorchs(case):
    agree(CASES[case], matrix(), order=2)


def test_complex_signals():
    z = matrix(dtype=torch.complex128)
    agree(lambda z: [torch.fft.fft(z), torch.fft.ifftn(z), torch.fft.irfft(z, n=9)], z, order=2)


def test_transforms_save_nothing():
    assert saved_by(lambda x: torch.fft.irfft(torch.fft.fft(torch.fft.ifft(x))), matrix()) == []


@pytest.mark.parametrize(
    "fn", [lambda x: torch.fft.rfft2(x).imag, torch.fft.irfft, lambda x: torch.fft.ihfft(x).real]
)
def test_a_batch_of_gradients(fn):
    batched(fn, matrix())


OPS = "fft.fft2 fft.hfft2 fft.ihfftn fft.irfftn fft.rfftn fft.fftshift stft istft".split()


@pytest.mark.parametrize("name", OPS)
def test_op_database(name):
    dtype = torch.complex128 if name == "istft" else torch.float64
    assert_by_rule(name, dtype, limit=3)


@pytest.mark.parametrize("name", ["fft.fft", "fft.irfft2", "fft.hfft"])
def test_op_database_complex(name):
    assert_by_rule(name, torch.complex128, limit=3)
