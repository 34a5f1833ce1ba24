"""Special functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import NotDifferentiableError
from .table import nondifferentiable, vjp

aten = torch.ops.aten

# -- the error function and its kin

_SLOPE = 2 / math.sqrt(math.pi)  # erf'(x) = _SLOPE exp(-x^2)

vjp(aten.erf, "self", self=lambda g, s: g * ((-s.self * s.self).exp() * _SLOPE))
vjp(aten.erfc, "self", self=lambda g, s: g * ((-s.self * s.self).exp() * -_SLOPE))
vjp(aten.special_erfcx, "self out", self=lambda g, s: g * ((s.self + s.self) * s.out - _SLOPE))
vjp(aten.erfinv, "self",  # not its output: PyTorch lets that be changed in place
    self=lambda g, s: g * (s.self.erfinv().square().exp() / _SLOPE))
vjp(aten.special_ndtri, "out",
    self=lambda g, s: g * ((s.out * s.out * 0.5).exp() * math.sqrt(2 * math.pi)))
vjp(aten.special_log_ndtr, "self out",
    self=lambda g, s: g * ((s.self * s.self * -0.5 - s.out).exp() / math.sqrt(2 * math.pi)))

# -- the gamma function and its kin

vjp(aten.lgamma, "self", self=lambda g, s: g * s.self.digamma())
vjp(aten.digamma, "self", self=lambda g, s: g * torch.polygamma(1, s.self))
vjp(aten.polygamma, "self", self=lambda g, s: g * torch.polygamma(s.n + 1, s.self))
vjp(aten.polygamma_.default, "self", self=lambda g, s: g * torch.polygamma(s.n + 1, s.self))


def mvlgamma(g: Tensor, s: Any) -> Tensor:
    """The sum of digamma(x - i/2) for i below p: mvlgamma is that of lgamma, and a constant."""
    slope = s.self.digamma()
    for i in range(1, s.p):
        slope = slope + (s.self - i / 2).digamma()
    return g * slope


vjp(aten.mvlgamma, "self", self=mvlgamma)


def unknown(g: Tensor, s: Any) -> Tensor:
    """Raises only when the gradient is asked for: often that of the other argument is all."""
    raise NotDifferentiableError(
        "the derivatives of igamma and igammac (gammainc, gammaincc) with respect to the shape, "
        "and of zeta with respect to the exponent, are not implemented. Detach that argument."
    )


def gamma_density(shape: Tensor, x: Tensor) -> Tensor:
    return ((shape - 1) * x.log() - x - shape.lgamma()).exp()


vjp(aten.igamma, "self other", self=unknown,
    other=lambda g, s: g * gamma_density(s.self, s.other))
vjp(aten.igammac, "self other", self=unknown,
    other=lambda g, s: g * -gamma_density(s.self, s.other))
vjp(aten.special_zeta, "self other", self=unknown,
    other=lambda g, s: g * (torch.special.zeta(s.self + 1, s.other) * -s.self))


# -- modified Bessel functions

vjp(aten.i0, "self", self=lambda g, s: g * torch.special.i1(s.self))
vjp(aten.special_i0e, "self out",
    self=lambda g, s: g * (torch.special.i1e(s.self) - s.self.sign() * s.out))


def i1(g: Tensor, s: Any) -> Tensor:
    """i0(x) - i1(x)/x, which is 1/2 at 0."""
    x, tiny = _away_from_zero(s.self)
    return g * (x.i0() - s.out / x).masked_fill(tiny, 0.5)


def i1e(g: Tensor, s: Any) -> Tensor:
    """i0e(x) - i1e(x) (sign(x) + 1/x), which is 1/2 at 0."""
    x, tiny = _away_from_zero(s.self)
    return g * (torch.special.i0e(x) - s.out * (x.sign() + x.reciprocal())).masked_fill(tiny, 0.5)


def _away_from_zero(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with tiny values replaced, so that no NaN arises behind a mask; and the mask."""
    eps = torch.finfo(x.dtype).eps
    tiny = x.abs() <= eps
    return x.masked_fill(tiny, eps), tiny


vjp(aten.special_i1, "self out", self=i1)
vjp(aten.special_i1e, "self out", self=i1e)

# -- entropies

vjp(aten.special_entr, "self", self=lambda g, s: g * (-1 - s.self.log()))
vjp(aten.special_xlog1py, "self other",
    self=lambda g, s: torch.special.xlog1py(g, s.other).masked_fill(
        (s.self == 0) & (s.other <= -1), 0),
    other=lambda g, s: g * s.self / (s.other + 1))

# -- without derivatives, in PyTorch too

nondifferentiable(
    aten.special_airy_ai, aten.special_bessel_j0, aten.special_bessel_j1, aten.special_bessel_y0,
    aten.special_bessel_y1, aten.special_modified_bessel_i0, aten.special_modified_bessel_i1,
    aten.special_modified_bessel_k0, aten.special_modified_bessel_k1,
    aten.special_scaled_modified_bessel_k0, aten.special_scaled_modified_bessel_k1,
    aten.special_spherical_bessel_j0, aten.special_chebyshev_polynomial_t,
    aten.special_chebyshev_polynomial_u, aten.special_chebyshev_polynomial_v,
    aten.special_chebyshev_polynomial_w, aten.special_shifted_chebyshev_polynomial_t,
    aten.special_shifted_chebyshev_polynomial_u, aten.special_shifted_chebyshev_polynomial_v,
    aten.special_shifted_chebyshev_polynomial_w, aten.special_hermite_polynomial_h,
    aten.special_hermite_polynomial_he, aten.special_laguerre_polynomial_l,
    aten.special_legendre_polynomial_p,
)  # fmt: skip
