"""The table of derivative rules: how a row is written, stored, and turned into a node.

A row says, for one ATen op, what to save and how to turn the gradient of its output into the
gradient of each argument:

    vjp(aten.mm, "self mat2", self=lambda g, s: g @ s.mat2.mH, mat2=lambda g, s: s.self.mH @ g)

`g` is the gradient of the output; `s` gives what was saved and every non-tensor argument by name.
A formula uses ops that have rules themselves, so it can be differentiated again.

What the machinery does, so that no row has to:
- only the formulas of arguments that need a gradient run, and only what those formulas read
  (found from their code) is saved;
- gradients are summed over broadcast dims, cast to the argument's dtype, and made real for a real
  argument (engine.fit);
- a formula may return None for "zero"; a zero gradient never reaches a single-output row;
- the in-place form of an op uses the row of its plain form.

Words in `saves`: the name of a tensor argument (tensor lists too) or of an output keeps that
tensor; `x.shape` keeps only that fact, read as `s.x_shape` (or any other in `_FACTS`: dtype,
device, layout, stride, storage_offset, is_contiguous, requires_grad, order); `x:a,b` keeps `x`
only if the gradient of `a` or `b` is needed.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _private
from ..errors import GraphFreedError
from ..graph import Edge, Node, next_sequence
from ..saved import SavedTensor

Formula = Callable[..., Any]
VERSION_BITS = 32
_VERSION = (1 << VERSION_BITS) - 1
grad_enabled = _private.grad_enabled

RULES: dict[Any, Rule] = {}  # OpOverload -> Rule
NONDIFFERENTIABLE: set[Any] = set()  # overloads whose results never need gradients

_FACTS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: t.shape,
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "layout": lambda t: t.layout,
    "stride": lambda t: t.stride() if t.layout is torch.strided else None,
    "storage_offset": lambda t: t.storage_offset(),
    "is_contiguous": lambda t: t.is_contiguous(),
    "order": lambda t: -2 if _column_major(t) else t.dim(),  # the number of dims, mostly
    "requires_grad": _private.native_requires_grad,
}


def _column_major(t: Tensor) -> bool:
    """Whether `t` is a matrix whose columns lie one after the other, as in a transpose."""
    if t.dim() != 2 or t.layout is not torch.strided:
        return False
    row, column = t.stride()
    return row == 1 and column == t.shape[0]


class Rule:
    """How to differentiate one overload. Built by `vjp`; its tables are filled on first use."""

    def __init__(
        self,
        op: Any,
        saves: str,
        formulas: dict[str, Formula],
        function: Formula | None,
        outputs: str | None,
        wrt: str | None,
        differentiable: str | None,
        forward: Formula | None,
        constant: str,
    ) -> None:
        self.op = op
        self.name: str = op._schema.name.replace("::", ".")
        packet = op._schema.name.split("::")[1].lstrip("_")
        words = packet.split("_")
        self.node_name = "".join(w[:1].upper() + w[1:] for w in words) + "Backward0"
        self.formulas = formulas
        self.function = function
        self.forward = forward
        self.arguments: list[str] = [a.name for a in op._schema.arguments]
        self.position = {name: i for i, name in enumerate(self.arguments)}
        self.defaults = {
            a.name: a.default_value for a in op._schema.arguments if a.has_default_value()
        }
        self._saves_text = saves
        self._outputs_text = outputs
        self._wrt_text = wrt
        self._differentiable_text = differentiable
        self.constant = frozenset(constant.split())
        self._ready = False
        self._plans: dict[int, Plan] = {}
        # A class of its own, so that `type(t.grad_fn).__name__` and repr(t) say which op it was.
        self.node_class: type[RuleNode] = type(self.node_name, (RuleNode,), {"__slots__": ()})

    # -- filled on first use: reading formulas' code takes a while, and most ops are never used

    def prepare(self) -> None:
        if self._ready:
            return
        returns = self.op._schema.returns
        count = len(returns)
        text = self._outputs_text
        self.outputs: list[str] = (
            text.split() if text else (["out"] if count == 1 else [f"out{i}" for i in range(count)])
        )
        self.output_position = {name: i for i, name in enumerate(self.outputs)}
        self.list_output = count == 1 and str(returns[0].type).startswith("List")
        chosen = self._differentiable_text
        self.differentiable: frozenset[str] = frozenset(chosen.split() if chosen else self.outputs)
        self.single = len(self.differentiable) == 1 and not self.list_output
        self.grad_index = (
            self.output_position[next(iter(self.differentiable))] if self.single else -1
        )
        tensor_args = {
            a.name: ("list" if "List" in str(a.type) else "one")
            for a in self.op._schema.arguments
            if "Tensor" in str(a.type)
        }
        if self._wrt_text is not None:
            names = [n for n in self._wrt_text.split() if n in self.position]
        elif self.function is not None:
            names = [n for n in tensor_args if n not in self.constant]
        else:
            names = [n for n in self.arguments if n in self.formulas and n in tensor_args]
        self.wrt: list[str] = names
        self.wrt_positions: list[int] = [self.position[n] for n in names]
        self.wrt_kinds: list[str] = [tensor_args[n] for n in names]
        self.has_lists = "list" in self.wrt_kinds
        self.tensor_args = tensor_args

        self._saves: list[tuple[str, str | None, frozenset[str]]] = []
        for word in self._saves_text.split():
            what, _, users = word.partition(":")
            name, _, fact = what.partition(".")
            if name in self.position and name not in tensor_args:
                continue  # a number in this overload, a tensor in another
            self._saves.append((name, fact or None, frozenset(users.split(",") if users else ())))
        if self.function is not None:
            used = _names_read(self.function)
            self._uses = {n: used for n in names}
        else:
            self._uses = {n: _names_read(self.formulas[n]) for n in names}
        saved_names = {n for n, fact, _ in self._saves if fact is None}
        self.scalar_names = {
            n for n in self.arguments if n not in tensor_args and n not in saved_names
        }
        # positions of the tensor arguments that have no formula
        self.others = [self.position[n] for n in tensor_args if n not in names]
        lists = "list" in tensor_args.values()
        self.simple = not lists and self.forward is None and not self.list_output
        self._ready = True

    def plan(self, mask: int) -> Plan:
        """What to save when the arguments in `mask` (a bit for each of `wrt`) need gradients."""
        plan = self._plans.get(mask)
        if plan is None:
            plan = self._plans[mask] = Plan(self, mask)
        return plan

    def argument(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        position = self.position.get(name)
        if position is not None and position < len(args):
            return args[position]
        if name in kwargs:
            return kwargs[name]
        return self.defaults.get(name)


class Plan:
    """What one rule saves for one set of needed arguments."""

    __slots__ = (
        "facts", "fast_inputs", "fast_values", "formulas", "grad_index", "index", "inputs", "kept",
        "outputs", "rule", "run", "scalars",
    )  # fmt: skip

    def __init__(self, rule: Rule, mask: int) -> None:
        self.rule = rule
        needed = [n for bit, n in enumerate(rule.wrt) if mask >> bit & 1]
        read: set[str] | None = set()
        for name in needed:
            used = rule._uses[name]
            if used is None:
                read = None  # cannot tell what the formula reads: keep everything
                break
            assert read is not None
            read |= used
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.kept: list[str] = []  # computed by the rule's own forward
        self.facts: list[tuple[str, str, str]] = []
        for name, fact, users in rule._saves:
            if users and not users & set(needed):
                continue
            if fact is not None:
                key = f"{name}_{fact}"
                if read is None or key in read:
                    self.facts.append((key, name, fact))
            elif read is None or name in read or users:
                if name in rule.position:
                    self.inputs.append(name)
                elif name in rule.output_position:
                    self.outputs.append(name)
                else:
                    self.kept.append(name)
        self.scalars = [
            n for n in rule.arguments if n in rule.scalar_names and (read is None or n in read)
        ]
        names = self.inputs + self.kept + self.outputs  # the order in which they are saved
        self.index = {name: i for i, name in enumerate(names)}
        # for each saved argument: its name, its position, and which edge it has (-1: none)
        self.fast_inputs = [
            (n, rule.position[n], rule.wrt.index(n) if n in rule.wrt else -1) for n in self.inputs
        ]
        # whether a call without keywords has anything but defaults to note (alpha is a keyword)
        keywords = {a.name for a in rule.op._schema.arguments if a.kwarg_only}
        self.fast_values = bool(self.facts) or not keywords.issuperset(self.scalars)
        # which output's gradient a formula gets; None: those of all
        self.grad_index = rule.grad_index if rule.single else None
        self.run: Callable[[Any, Any, Any], list[Tensor | None]] | None = None  # see _straight
        # the formula of each argument that needs a gradient, None for the others
        self.formulas: tuple[Formula | None, ...] | None = None
        if rule.function is None and not rule.has_lists:
            self.formulas = tuple(
                rule.formulas[n] if mask >> bit & 1 else None for bit, n in enumerate(rule.wrt)
            )


def _names_read(function: Formula) -> set[str] | None:
    """The attributes that `function` reads from its second parameter `s`; None if it does more
    with it than read attributes (hands it on, or closes over it)."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount < 2:
        return None
    name = code.co_varnames[1]
    if name in code.co_cellvars:
        return None
    read: set[str] = set()
    waiting = False
    for step in dis.get_instructions(code):
        if step.opname in ("CACHE", "RESUME", "EXTENDED_ARG", "COPY_FREE_VARS", "NOP"):
            continue
        if waiting:
            if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            read.add(str(step.argval))
            waiting = False
        elif step.opname.startswith("LOAD_FAST"):
            value = step.argval
            if value == name:
                waiting = True
            elif isinstance(value, tuple) and name in value:
                if value[0] == name:
                    return None
                waiting = True
    return None if waiting else read


class Frame:
    """`s` in a rule: what was saved and the op's other arguments, by name, for one run.

    A saved tensor is unpacked when it is first read, and only then; the value lives as long as
    the frame, which ends with the rule.
    """

    def __init__(self, node: RuleNode) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        value = self._node.read(name)
        self.__dict__[name] = value
        return value


def _straight(plan: Plan) -> Callable[[RuleNode, Any, Any], list[Tensor | None]]:
    """The formulas of `plan` as straight-line code: `run(node, saved, g)`, all that are needed.

    Most of the time of a small op is spent between its kernels, in loops over one or two things.
    """
    lines = ["def run(node, saved, g):", " s = new(Frame)", " s._node = node"]
    if plan.fast_inputs:
        lines.append(" versions = node.versions")
    for i, (name, _, _) in enumerate(plan.fast_inputs):
        # what is simply there is read at once; the frame unpacks the rest when it is read
        version = f"versions >> {i * VERSION_BITS} & {_VERSION}" if i else f"versions & {_VERSION}"
        lines.append(f" t = saved[{i}]")
        lines.append(f" if isinstance(t, Tensor) and t._version == {version}: s.{name} = t")
    assert plan.formulas is not None
    calls = ["None" if f is None else f"f{i}(g, s)" for i, f in enumerate(plan.formulas)]
    lines.append(f" return [{', '.join(calls)}]")
    names: dict[str, Any] = {f"f{i}": f for i, f in enumerate(plan.formulas)}
    names.update(Frame=Frame, Tensor=Tensor, new=object.__new__)
    exec("\n".join(lines), names)  # the names in it are those of the op's schema
    run: Callable[[RuleNode, Any, Any], list[Tensor | None]] = names["run"]
    return run


class RuleNode(Node):
    """A node whose derivative is a row of the table."""

    __slots__ = ("edge_counts", "metas", "plan", "rule", "saved", "tick", "values", "versions")

    traceable = True  # `apply` does nothing but run ops on tensors (program/capture.py)

    def __init__(self, plan: Plan, edges: Sequence[Edge | None]) -> None:
        # Node.__init__, written out: one of these is made for every op of a forward pass
        self.edges = edges
        self.outputs = 1
        self.seq = next_sequence()
        self.hooks = None
        self.code = None
        self._metadata = None
        self.rule = plan.rule
        self.plan = plan
        # In the order of plan.index: a SavedTensor; or, for an input that no hook has touched, the
        # tensor, of which a SavedTensor is made when somebody asks for it; a list of SavedTensors;
        # or a plain value. None once released.
        self.saved: Any = ()
        # The versions that those tensors had, VERSION_BITS each, in one number; and the tick of
        # changes then. (One tuple a tensor would be a thing more for the garbage collector.)
        self.versions = 0
        self.tick = 0
        self.values: dict[str, Any] | None = None
        self.edge_counts: list[int] | None = None  # how many edges each list argument has
        self.metas: list[tuple[torch.Size, torch.dtype, torch.device]] | None = None

    def read(self, name: str) -> Any:
        """The value of `name` for a formula: a saved tensor, a fact, or a plain argument."""
        if name in self.plan.index:
            return self._unpack(self._entry(name))
        values = self.values
        if values is not None and name in values:
            return values[name]
        if name in self.rule.scalar_names:
            return self.rule.defaults.get(name)
        raise AttributeError(
            f"the rule of {self.rule.name} reads '{name}', which it does not save "
            f"(saves: {self.rule._saves_text!r})"
        )

    def _unpack(self, entry: Any) -> Any:
        if isinstance(entry, SavedTensor):
            return entry.unpack(self, grad_enabled())
        if isinstance(entry, list):
            return [self._unpack(e) for e in entry]
        return entry

    def apply(
        self, grads: list[Tensor | None], needs: Sequence[bool] | None
    ) -> Sequence[Tensor | None]:
        plan = self.plan
        saved = self.saved
        if saved is None:
            raise GraphFreedError(_FREED.format(plan.rule.name))
        g: Any
        if plan.grad_index is not None:
            g = grads[plan.grad_index]
            if g is None:
                return [None] * len(self.edges)
        else:
            g = tuple(grads)
        del grads[:]
        if needs is None and plan.run is not None:
            return plan.run(self, saved, g)
        frame = Frame(self)
        formulas = plan.formulas
        if formulas is not None:
            if needs is None:
                needs = [True] * len(formulas)
                plan.run = _straight(plan)
            return [
                f(g, frame) if f is not None and need else None
                for f, need in zip(formulas, needs, strict=True)
            ]
        if needs is None:
            needs = [e is not None for e in self.edges]
        return self._apply_general(plan.rule, g, frame, needs)

    def _apply_general(
        self, rule: Rule, g: Any, frame: Frame, needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Rules that are one function, or that have lists of tensors among their arguments."""
        wanted: list[Any] = []
        at = 0
        counts = self.edge_counts or [1] * len(rule.wrt)
        for kind, count in zip(rule.wrt_kinds, counts, strict=True):
            wanted.append(list(needs[at : at + count]) if kind == "list" else needs[at])
            at += count
        if rule.function is not None:
            results = rule.function(g, frame, wanted)
            if not isinstance(results, (tuple, list)):
                results = (results,)
        else:
            results = [
                rule.formulas[name](g, frame) if (any(w) if isinstance(w, list) else w) else None
                for name, w in zip(rule.wrt, wanted, strict=True)
            ]
        flat: list[Tensor | None] = []
        for kind, count, result in zip(rule.wrt_kinds, counts, results, strict=True):
            if kind != "list":
                flat.append(result)
            elif result is None:
                flat.extend([None] * count)
            else:
                flat.extend(result)
        return flat

    def release(self) -> None:
        saved = self.saved
        if not saved:
            return  # nothing was saved, so nothing is gone: the node can run again
        for entry in saved:
            kind = type(entry)
            if kind is SavedTensor:
                entry.release()
            elif kind is list:
                for e in entry:
                    if type(e) is SavedTensor:
                        e.release()
        self.saved = None

    def zeros(self, index: int) -> Tensor:
        """A zero gradient of output `index`."""
        assert self.metas is not None
        shape, dtype, device = self.metas[index]
        return torch.zeros(shape, dtype=dtype, device=device)

    def __getattr__(self, name: str) -> Any:
        """`_saved_x` gives x through its hooks; `_raw_saved_x` the SavedTensor itself."""
        if name.startswith("_raw_saved_"):
            return self._entry(name.removeprefix("_raw_saved_"))
        if name.startswith("_saved_"):
            key = name.removeprefix("_saved_")
            if key in self.plan.index:
                return self._unpack(self._entry(key))
            if self.values is not None and key in self.values:
                return self.values[key]
        raise AttributeError(f"{self.name()} has no attribute '{name}'")

    def _entry(self, key: str) -> Any:
        plan = self.plan
        if key == "result" and key not in plan.index:
            key = "out"  # PyTorch's word for it
        index = plan.index.get(key)
        if index is None:
            raise AttributeError(f"{self.name()} saves no '{key}' (saves: {list(plan.index)})")
        if self.saved is None:
            raise GraphFreedError(_FREED.format(self.rule.name))
        entry = self.saved[index]
        if isinstance(entry, Tensor):
            position = plan.fast_inputs[index][2]
            edge = self.edges[position] if position >= 0 else None
            version = self.versions >> index * VERSION_BITS & _VERSION
            entry = SavedTensor.of(
                entry, version, self.tick, key, self.rule.name, self.where, edge
            )
            self.saved[index] = entry
        return entry

    def __dir__(self) -> list[str]:
        extra = [f"_{raw}saved_{k}" for k in self.plan.index for raw in ("", "raw_")]
        return [*super().__dir__(), *extra]


_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed): what {} saved is gone. Saved tensors are freed when you call "
    ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through "
    "the graph a second time or to access saved tensors after backward."
)


def vjp(
    op: Any,
    saves: str = "",
    *,
    outputs: str | None = None,
    wrt: str | None = None,
    differentiable: str | None = None,
    forward: Formula | None = None,
    constant: str = "",
    **formulas: Formula,
) -> Any:
    """Register the rule of `op` (an overload, or a packet: all its overloads that fit).

    As a row: one formula `(g, s) -> gradient` for each tensor argument, by name. For an argument
    that is a list of tensors the formula returns a list.

    As a decorator (no formulas): the function `(g, s, needs)` returns one gradient for each name
    in `wrt` (default: every tensor argument), in that order; `needs` says which are wanted (a list
    of bools for a tensor list).

    `outputs`: names of the results, where there are several (default out0, out1, ...).
    `differentiable`: those of them that have gradients. With one, `g` is its gradient; with
    several (or a list of tensors as result), `g` is a tuple of all outputs' gradients, None where
    zero; then `s._node.zeros(i)` makes a zero gradient.
    `forward(*args, **kwargs) -> (result, {name: value})`: computes the op itself, and values to be
    saved under those names; for ops that are better taken in another way than their kernel's.
    `constant`: tensor arguments through which, by definition, no gradient flows (running
    statistics). A tracked tensor in any other argument without formula is an error, not a zero.
    """

    def register(function: Formula | None) -> Any:
        overloads = (
            [getattr(op, n) for n in op.overloads()] if hasattr(op, "overloads") else [op]
        )
        registered = False
        for overload in overloads:
            schema = overload._schema
            if hasattr(op, "overloads") and any(
                a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
            ):
                continue
            if overload in RULES and hasattr(op, "overloads"):
                continue  # an overload's own row comes before its packet's
            names = {a.name for a in schema.arguments}
            wanted = set(wrt.split()) if wrt else set(formulas)
            if wanted and not wanted & names and len(overloads) > 1:
                continue
            RULES[overload] = Rule(
                overload, saves, formulas, function, outputs, wrt, differentiable, forward, constant
            )
            registered = True
        if not registered:
            raise ValueError(f"no overload of {op} has the arguments {wrt or list(formulas)}")
        return function

    if formulas:
        return register(None)
    return register


def nondifferentiable(*ops: Any) -> None:
    """Declare that the results of `ops` never need gradients (comparisons, indices, ...)."""
    for op in ops:
        if hasattr(op, "overloads"):
            NONDIFFERENTIABLE.update(getattr(op, n) for n in op.overloads())
        else:
            NONDIFFERENTIABLE.add(op)
