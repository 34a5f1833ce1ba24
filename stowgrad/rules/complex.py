"""Complex numbers: parts, conjugates, views as real."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .table import vjp

aten = torch.ops.aten

vjp(aten.view_as_real, self=lambda g, s: torch.view_as_complex(g.contiguous()))
vjp(aten.view_as_complex, self=lambda g, s: torch.view_as_real(g.contiguous().resolve_conj()))
vjp(aten._conj, self=lambda g, s: g.conj())
vjp(aten._neg_view, self=lambda g, s: -g)
vjp(aten._conj_physical, self=lambda g, s: g.conj_physical())
vjp(aten.conj_physical_.default, self=lambda g, s: g.conj_physical())
vjp(aten.complex, real=lambda g, s: g.real, imag=lambda g, s: g.imag)


def angle(g: Tensor, s: Any) -> Tensor:
    """i z / |z|^2; zero at 0, and for real numbers."""
    z = s.self
    if not z.is_complex():
        return torch.zeros_like(g)
    size = z.abs()
    return (g * z / (size * size) * 1j).masked_fill(size == 0, 0)


@vjp(aten.polar, "out", wrt="abs angle")
def polar(g: Tensor, s: Any, needs: Any) -> Any:
    """Along the ray and across it: Re(conj(g) z/|z|) and Re(conj(g) i z)."""
    z, back = s.out, g.conj()
    return (
        (back * z.sgn()).real if needs[0] else None,
        (back * (z * 1j)).real if needs[1] else None,
    )


vjp(aten.angle, "self", self=angle)
