"""What Inductor's code for the CPU does slower than ATen, and is told to do otherwise.

Its sums over the leading dims go down one column after the other, through memory that lies far
apart; ATen's kernel goes along the rows. And the derivative of GELU needs erf(x/√2) and exp(-x²/2):
the polynomial that both ATen and Inductor use for erf in float32 has that very exponential in it,
which here is computed once. A few gradients of views (those of q, k and v, say) are joined in the
loop that uses the result, not copied into one tensor before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor

from .. import _private

aten = torch.ops.aten

# ATen's kernel makes all three gradients in two sweeps.
WHOLE = frozenset([aten.native_layer_norm_backward.default])


@functools.cache
def _always() -> dict[str, Any]:
    _private.leave_to_aten(WHOLE)
    _private.define_op("column_sum", "(Tensor x, int[] dim, bool keepdim) -> Tensor", _column_sum)
    return {
        "post_grad_custom_pre_pass": _private.inductor_pass(_sums_to_aten, "stowgrad column sums 1")
    }


def options(graph: torch.fx.Graph) -> dict[str, Any]:
    """Options of `torch._inductor.config` for a stretch."""
    found = dict(_always())
    joined = [n for n in graph.nodes if n.target in (aten.cat.default, aten.stack.default)]
    if joined and all(map(_joins_few_blocks, joined)):
        found["force_pointwise_cat"] = True
    return found


def _joins_few_blocks(node: torch.fx.Node) -> bool:
    tensors: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dims = node.meta["val"].dim()
    return len(tensors) <= 4 and dim % dims != dims - 1


def _column_sum(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return aten.sum.dim_IntList(x, dim, keepdim)


def _sums_to_aten(graph: torch.fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        x, dims, *rest = node.args
        value, result = x.meta["val"], node.meta["val"]
        plain = value.dtype is result.dtype and value.dtype.is_floating_point
        if not plain or value.device.type != "cpu" or not isinstance(dims, (list, tuple)):
            continue
        leading = {d % value.dim() for d in dims if value.dim()}
        if not leading or leading != set(range(len(leading))) or len(leading) == value.dim():
            continue
        keep = bool(rest[0]) if rest else bool(node.kwargs.get("keepdim", False))
        with graph.inserting_before(node):
            made = graph.call_function(
                torch.ops.stowgrad.column_sum.default, (x, sorted(leading), keep)
            )
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def rewrite(graph: torch.fx.Graph, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """Other ops for `node`, added to `graph` with `args` in place of its own; None: as it is."""
    value = node.meta["val"]
    if node.target is aten.gelu_backward.default and kwargs.get("approximate", "none") == "none":
        if value.dtype is torch.float32 and value.device.type == "cpu" and len(args) == 2:
            return _gelu_backward(functools.partial(_op, graph), *args)
    return None


def _op(graph: torch.fx.Graph, target: Callable[..., Any], *args: Any) -> torch.fx.Node:
    return graph.call_function(target, args)


def _gelu_backward(op: Callable[..., torch.fx.Node], grad: Any, x: Any) -> torch.fx.Node:
    # erfc(z) = t * (p1 + t * (p2 + ...)) * exp(-z²), z >= 0, as in ATen's Vectorized<float>::erf
    mul, add = aten.mul.Tensor, aten.add.Tensor
    z = op(mul, op(aten.abs.default, x), 0.3275911 / math.sqrt(2.0))
    t = op(aten.reciprocal.default, op(add, z, 1.0))
    e = op(aten.exp.default, op(mul, op(mul, x, x), -0.5))
    p = op(add, op(mul, t, 0.5 * 1.061405429), 0.5 * -1.453152027)
    for c in (1.421413741, -0.284496736, 0.254829592):
        p = op(add, op(mul, p, t), 0.5 * c)
    below = op(mul, op(mul, p, t), e)  # the normal distribution at -|x|
    above = op(add, op(aten.neg.default, below), 1.0)
    cdf = op(aten.where.self, op(aten.ge.Scalar, x, 0.0), above, below)
    density = op(mul, e, 1.0 / math.sqrt(2.0 * math.pi))
    return op(mul, grad, op(add, cdf, op(mul, x, density)))
