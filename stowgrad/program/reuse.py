"""Elementwise ops write their result into an argument that dies with them.

That saves an allocation an op, and the memory of one value. It needs an argument whose memory is
nobody else's, and that has room for just the result.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from .. import _private
from .capture import Captured, item
from .effects import Effects, FxNode, Kind

aten = torch.ops.aten

# Op -> its in-place form, which runs the same kernel on the same numbers.
_IN_PLACE: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.add.Scalar: aten.add_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.sub.Scalar: aten.sub_.Scalar,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.neg.default: aten.neg_.default,
    aten.exp.default: aten.exp_.default,
    aten.log.default: aten.log_.default,
    aten.sqrt.default: aten.sqrt_.default,
    aten.rsqrt.default: aten.rsqrt_.default,
    aten.reciprocal.default: aten.reciprocal_.default,
    aten.sin.default: aten.sin_.default,
    aten.cos.default: aten.cos_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
}
# a + b is b + a to the last bit, where alpha is 1
_COMMUTATIVE = frozenset([aten.add.Tensor, aten.mul.Tensor])
# Ops that are not elementwise and whose results are always in new memory.
_MAKERS = frozenset([
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default,
    aten.matmul.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.cat.default,
    aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default,
    aten.convolution_backward.default, aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default, aten.embedding_dense_backward.default,
    aten.index_select.default, aten.gather.default, aten.full.default, aten.zeros.default,
    aten.ones.default, aten.zeros_like.default, aten.ones_like.default,
])  # fmt: skip


def reuse(captured: Captured) -> None:
    """Ops become their in-place forms where an argument is dead after them.

    The argument was made in new memory by an op of this program, nothing else that is still used
    is in that memory, and no step that is not an ATen op was ever given it, which might have kept
    it. It has the dtype, the shape (without a new guard) and the layout of the result. The layout
    may be another when the program runs, if what was saved is laid out in another way; that does no
    harm: whatever the strides, the elements of a new result lie in places of their own, and an
    elementwise op finds them by index. (What was expanded is a view, and so never a candidate.)
    For programs that are not recorded themselves, outside vmap; no pass may come after it that
    changes the order of ops.
    """
    effects = Effects(captured)
    last: dict[Any, int] = {}  # memory -> its last use
    members: Counter[Any] = Counter()  # storage of fake tensors -> the steps whose values are in it
    for i, node in enumerate(effects.nodes):
        for root in effects.touched(node):
            last[root] = i
        members.update(effects.keys[node])
    fresh: set[FxNode] = set()
    # Of a value in reused memory, all those that were there: they are one tensor. What came before
    # it is dead, so its own uses say all that is to be known of that memory.
    same: dict[FxNode, list[FxNode]] = {}
    for i, node in enumerate(effects.nodes):
        if node.op != "call_function" or not _is_fresh(effects, node):
            continue
        fresh.add(node)
        in_place = _IN_PLACE.get(node.target)
        if in_place is None:
            continue
        value = node.meta["val"]
        places = (0, 1) if node.target in _COMMUTATIVE and not value.dtype.is_complex else (0,)
        for place in places[: 1 if node.kwargs else 2]:
            target = node.args[place]
            if not isinstance(target, FxNode) or target not in fresh:
                continue
            (root,) = effects.groups(target)
            if last[root] != i or root in effects.outside or not _alike(target, node):
                continue
            if any(n is not target and root in effects.groups(n) for n in node.all_input_nodes):
                continue  # a view of it: elements would be read that have been written already
            if not _share(target, node, same.setdefault(target, [target]), members):
                continue
            same[node] = same[target]
            others = (*node.args[:place], *node.args[place + 1 :])
            node.target = in_place
            node.args = (target, *others)
            break


def _share(target: FxNode, node: FxNode, chain: list[FxNode], members: Counter[Any]) -> bool:
    """Let the fake tensors of both say that they share memory. False where they cannot: both have
    views, whose fake tensors say that they share it with one of the two."""
    key = _private.storage_key(target.meta["val"])
    new = _private.storage_key(node.meta["val"])
    if members[new] == 1:
        node.meta["val"] = target.meta["val"]
        members[key] += 1
    elif members[key] == len(chain):
        for n in chain:
            n.meta["val"] = node.meta["val"]
        members[new] += len(chain)
    else:
        return False
    chain.append(node)
    return True


def _is_fresh(effects: Effects, node: FxNode) -> bool:
    """Whether the step gives one tensor in memory that nothing else was in before."""
    if not isinstance(node.meta.get("val"), Tensor):
        return False
    maker = node
    if node.target is item:
        given = node.args[0]
        if not isinstance(given, FxNode) or given.target not in _MAKERS:
            return False
        if sum(u.args[1] == node.args[1] for u in given.users) > 1:
            return False
        maker = given
    elif effects.kinds[node] is not Kind.PURE:
        return False
    target = maker.target
    if target not in _MAKERS:
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
            return False
    groups = effects.groups(node)
    return len(groups) == 1 and all(
        groups.isdisjoint(effects.groups(n)) for n in maker.all_input_nodes
    )


def _alike(a: FxNode, b: FxNode) -> bool:
    """Whether two values have the same dtype, shape and strides, which may add no guard."""
    x, y = a.meta["val"], b.meta["val"]
    if x.dtype is not y.dtype or x.device != y.device or x.dim() != y.dim():
        return False
    return all(map(_same_size, (*x.shape, *x.stride()), (*y.shape, *y.stride())))


def _same_size(a: Any, b: Any) -> bool:
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return type(a) is type(b) and bool(a.node.expr == b.node.expr)
    return bool(a == b)
