"""How each op is recorded: by its rule, by its parts, by the fallback, or not at all.

`entry_of(overload)` answers from a table that fills as ops are met. The order of preference: the
formula that Python code registered for it (torch.library.register_autograd); the op's own rule;
for an in-place op the rule of its plain form; "its results have no gradient"; the composite's
parts; the fallback.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Any

import torch

from . import _private
from .rules.common import linear
from .rules.table import NONDIFFERENTIABLE, RULES, Rule


class Kind(enum.Enum):
    PLAIN = "no gradient"
    RULE = "rule"
    COMPOSITE = "parts"
    SPECIAL = "special"
    FALLBACK = "fallback"
    OUT = "out="


def _unset(*args: Any) -> Any:
    raise AssertionError("an entry without a kernel")


class Entry:
    """How one overload is recorded.

    `touches_views`: its kernel makes views or changes tensors in place, so the native bookkeeping
    of both must be on around it. `composite`: the op can be taken apart into others. `reshapes`: it
    changes its argument in place, but only its sizes and strides (aten.transpose_). `written`: the
    position and name of each argument it changes in place.
    `fast`: its rule, if `Recorder._record_fast` can record it. `call`: what runs the kernel.
    `made_of_ops`: its kernel calls other ops, and may hand them lazily conjugated tensors.
    """

    __slots__ = (
        "call", "composite", "fast", "handler", "inplace", "kind", "made_of_ops", "name", "op",
        "reshapes", "rule", "touches_views", "written",
    )  # fmt: skip

    op: Any

    def __init__(self, name: str, kind: Kind) -> None:
        self.name = name
        self.kind = kind
        self.rule: Rule | None = None
        self.inplace = False
        self.reshapes = False
        self.touches_views = False
        self.written: list[tuple[int, str]] = []
        self.composite = False
        self.made_of_ops = False
        self.handler: Callable[..., Any] | None = None
        self.fast: Rule | None = None
        self.call: Callable[..., Any] = _unset


# Python's own bindings of these cost a third less to call than the overload, with the same result.
_aten = torch.ops.aten
_quick_calls: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.neg.default: torch.neg,
    _aten.exp.default: torch.exp,
    _aten.sqrt.default: torch.sqrt,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.square.default: torch.square,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.rsub.Scalar: torch.rsub,
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.permute.default: torch.permute,
    _aten.view.default: torch.Tensor.view,
    _aten.reshape.default: torch.reshape,
    _aten.expand.default: torch.Tensor.expand,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.select.int: torch.select,
    _aten.sum.default: torch.sum,
    _aten.clone.default: torch.clone,
    _aten.where.self: torch.where,
    _aten.where.ScalarOther: torch.where,
    _aten.where.ScalarSelf: torch.where,
    _aten.masked_fill.Scalar: torch.masked_fill,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.relu.default: torch.relu,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.matmul.default: torch.matmul,
    _aten.linear.default: linear,
    _aten.softmax.int: torch.softmax,
    _aten.log_softmax.int: torch.log_softmax,
    _aten.gelu.default: torch.nn.functional.gelu,
}
# Composites whose result is always a new tensor, made without lazy views.
_fresh = {
    _aten.matmul.default, _aten.linear.default, _aten.square.default, _aten.where.ScalarOther,
    _aten.where.ScalarSelf, _aten._sparse_mm.default, _aten._sparse_mm.reduce,
    _aten.softmax.int, _aten.log_softmax.int, _aten.relu6.default, _aten.selu.default,
    _aten.log_sigmoid.default,
}  # fmt: skip

# By identity, which an entry keeps valid: the hash of an overload is a Python function.
_entries: dict[int, Entry] = {}
_resolving = threading.RLock()
# overload -> handler(recorder, entry, func, args, kwargs)
SPECIAL: dict[Any, Callable[..., Any]] = {}


def entry_of(func: Any) -> Entry:
    entry = _entries.get(id(func))
    if entry is None:
        with _resolving:  # a rule that is used for the first time makes its tables then
            entry = _entries.get(id(func))
            if entry is None:
                entry = _resolve(func)
                entry.op = func
                _entries[id(func)] = entry
    return entry


def _resolve(func: Any) -> Entry:
    from . import rules  # fills the table on first use

    rules.load()
    if not hasattr(func, "_schema") or not isinstance(func, torch._ops.OpOverload):
        return _higher_order(func)
    schema = func._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    entry = Entry(schema.name.replace("::", "."), Kind.PLAIN)
    entry.composite = _private.is_composite(func)
    views = any(r.alias_info is not None for r in schema.returns)
    entry.touches_views = bool(written) or views or (entry.composite and func not in _fresh)
    entry.made_of_ops = func not in _fresh and _private.made_of_ops(func)
    entry.written = [(i, a.name) for i, a in enumerate(schema.arguments) if a in written]
    entry.inplace = bool(written) and written[0] is schema.arguments[0]
    entry.reshapes = entry.inplace and torch.Tag.inplace_view in func.tags

    if func in SPECIAL:
        entry.kind, entry.handler = Kind.SPECIAL, SPECIAL[func]
        entry.rule = RULES.get(func) or (_plain_rule(func) if entry.inplace else None)
        if entry.rule is not None:
            entry.rule.prepare()
        return entry
    if _private.registered_autograd(func) is not None:
        entry.kind, entry.handler = Kind.SPECIAL, _registered
        return entry
    rule = RULES.get(func)
    if rule is None and entry.inplace:
        rule = _plain_rule(func)
    if rule is not None:
        rule.prepare()
        entry.kind, entry.rule = Kind.RULE, rule
        if rule.simple and len(schema.returns) == 1 and not written and (
            views or not entry.touches_views
        ):
            entry.fast = rule
            entry.call = _quick_calls.get(func, func)
    elif any(a.kwarg_only for a in written):
        entry.kind = Kind.OUT
    elif func in NONDIFFERENTIABLE or not any("Tensor" in str(r.type) for r in schema.returns):
        entry.kind = Kind.PLAIN
        if entry.inplace and func not in NONDIFFERENTIABLE:
            entry.kind, entry.handler = Kind.FALLBACK, _fallback
    elif entry.composite:
        entry.kind = Kind.COMPOSITE
    else:
        entry.kind, entry.handler = Kind.FALLBACK, _fallback
    return entry


def _plain_rule(func: Any) -> Rule | None:
    """The rule of an in-place op's plain form: aten.add_.Tensor -> aten.add.Tensor."""
    packet = func._schema.name.split("::")
    plain = packet[1].removesuffix("_")
    if plain == packet[1]:
        return None
    space = getattr(torch.ops, packet[0])
    if not hasattr(space, plain):
        return None
    rule = RULES.get(getattr(getattr(space, plain), func._overloadname, None))
    kinds = [str(a.type) for a in func._schema.arguments]
    if rule is not None and kinds != [str(a.type) for a in rule.op._schema.arguments]:
        return None  # pow_.Scalar has a number for exponent, pow.Scalar one for self
    return rule


def _fallback(recorder: Any, entry: Entry, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    from .rules.fallback import record_fallback

    return record_fallback(recorder, entry, func, args, kwargs)


def _registered(recorder: Any, entry: Entry, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    from .function import record_registered

    return record_registered(recorder, entry, func, args, kwargs)


def _higher_order(func: Any) -> Entry:
    entry = Entry(str(func), Kind.SPECIAL)
    entry.handler = lambda recorder, entry, func, args, kwargs: func(*args, **kwargs)
    return entry
