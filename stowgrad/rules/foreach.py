"""Ops on lists of tensors (torch._foreach_*), recorded as loops of their single forms.

A list may mix tensors that need gradients with others, and tensors with their own kinds of trouble
(leaves, views); each single op deals with its own. Where nothing is tracked (an optimizer under
no_grad), the fused kernel runs as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..graph import Edge, attach
from ..ops import SPECIAL
from ..views import EndNode, check_inplace

aten = torch.ops.aten

_PLAIN = """
abs acos asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp expm1 floor frac lerp
lgamma log log10 log1p log2 max mm mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt
add sub tan tanh trunc
""".split()


def _with_value(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, a, b, value=1: op(x, a, b, value=value)


def _norm(x: Tensor, ord: Any = 2, dtype: Any = None) -> Tensor:
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


def _powsum(x: Tensor, ord: Any = 2, dtype: Any = None) -> Tensor:
    return x.abs().pow(ord).sum(dtype=dtype)


def _with_tensor(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """maximum and minimum take no number, and share a tie, which clamp does not."""

    def single(x: Tensor, other: Any) -> Tensor:
        if not isinstance(other, Tensor):
            other = torch.scalar_tensor(other, dtype=x.dtype, device=x.device)
        return op(x, other)

    return single


def _written(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In place, of the op on a copy, which it may save."""
    return lambda x, *args: x.copy_(op(x.clone(), *args))


_maximum, _minimum = _with_tensor(torch.maximum), _with_tensor(torch.minimum)

# name of the op on lists, without "_foreach_" -> the op on one tensor
SINGLE: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in _PLAIN},
    **{f"{name}_": getattr(Tensor, f"{name}_") for name in _PLAIN if hasattr(Tensor, f"{name}_")},
    "addcmul": _with_value(torch.addcmul),
    "addcmul_": _with_value(Tensor.addcmul_),
    "addcdiv": _with_value(torch.addcdiv),
    "addcdiv_": _with_value(Tensor.addcdiv_),
    "copy": aten.copy.default,
    "copy_": Tensor.copy_,
    "maximum": _maximum,
    "maximum_": _written(_maximum),
    "minimum": _minimum,
    "minimum_": _written(_minimum),
    "norm": _norm,
    "powsum": _powsum,
    "zero": aten.zero.default,
    "zero_": Tensor.zero_,
}


def record_each(
    single: Callable[..., Any], recorder: Any, entry: Any, func: Any, args: Any, kwargs: Any
) -> list[Any] | None:
    """Record `func` as `single` on the first tensor of each list, on the second, and so on."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    apart = {a.name for a in func._schema.arguments if str(a.type).startswith("List")}
    if isinstance(given.get("scalars"), Tensor):
        given["scalars"] = given["scalars"].tolist()
        apart.add("scalars")
    options = {a.name for a in func._schema.arguments if a.kwarg_only}
    count = max(len(given[name]) for name in apart)
    results = []
    rows = [{n: v[i] if n in apart else v for n, v in given.items()} for i in range(count)]
    if entry.inplace:  # all is checked before anything is changed
        for row in rows:
            if any(isinstance(v, Tensor) and v.requires_grad for v in row.values()):
                check_inplace(row["self"])
    with recorder.on():
        for each in rows:
            positional = [v for n, v in each.items() if n not in options]
            results.append(single(*positional, **{n: each[n] for n in options & each.keys()}))
    if entry.inplace:
        return None
    for r in results:  # as results of one op they need gradients all together, or none does
        if not r.requires_grad and (r.is_floating_point() or r.is_complex()):
            attach(r, Edge(EndNode(()), 0, r.shape, r.dtype))
    return results


for name, single in SINGLE.items():
    packet = getattr(aten, f"_foreach_{name}", None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        if "out" not in [a.name for a in op._schema.arguments]:
            SPECIAL[op] = partial(record_each, single)
