"""`sg.compiled_backward()`: within it, each backward runs as a program; and `sg.capture()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor

from .. import _private, engine
from ..autograd import roots_of, targets_of
from ..context import below_overrides, this_thread
from ..engine import Grads
from ..graph import Edge
from ..record import record
from .cache import describe_root, program_cache
from .capture import Uncapturable
from .program import Program, Roots, make

Backend = str | Callable[..., Any] | None


class compiled_backward(ContextDecorator):
    """Within, in the current thread: each backward is captured once as a program (see `Program`)
    and run from it after that. A context manager and a decorator; may be given to `record`.

    `backend`: None runs the program's ATen ops one by one as straight-line code. "inductor", any
    other name that torch.compile knows, or a callable `backend(gm, example_inputs)` compiles the
    stretches between the steps that are not tensor code (unpack hooks, hooks, custom functions).
    `window`: how many unpacks ahead hook pairs with a `prefetch(packed)` are told to begin.
    `reorder`: change the order of steps where that lowers the predicted peak of live bytes.

    A backward that cannot be a program (anomaly detection is on, a tensor subclass) runs node by
    node; `sg.program_cache.report()` says how many and why. A program found again costs about a
    microsecond a node to recognise; sizes may differ.
    """

    def __init__(self, backend: Backend = None, *, window: int = 0, reorder: bool = False) -> None:
        if window < 0:
            raise ValueError(f"window must be 0 or more unpacks ahead, not {window}")
        self.backend, self.window, self.reorder = backend, window, reorder
        self._options = (backend, window, reorder)
        self._outer: list[Any] = []

    def __enter__(self) -> compiled_backward:
        self._outer.append(this_thread.backward)
        this_thread.backward = self.run
        return self

    def __exit__(self, *exc: Any) -> None:
        this_thread.backward = self._outer.pop()

    def run(
        self,
        roots: Roots,
        keep_graph: bool,
        create_graph: bool,
        targets: Sequence[Edge] | None,
        accumulate: bool,
    ) -> Grads:
        """As engine.run, from a program."""
        first = roots[0][0].node
        batched = _private.functorch_active()
        key = (
            getattr(first, "plan", None) or type(first), id(first.code), first.offset, len(roots),
            -1 if targets is None else len(targets), create_graph, accumulate, batched,
            self._options,
        )  # fmt: skip
        if torch.is_anomaly_enabled():
            program_cache.fall_back("anomaly detection is on")
            return engine.run(roots, keep_graph, create_graph, targets, accumulate)
        program, found, reason = self._find(key, roots, targets, keep_graph)
        if program is not None:
            program_cache.hit(key, program)
            return program.run(found, roots, keep_graph, targets)
        with program_cache.lock:
            # another thread may have captured one like it meanwhile
            program, found, reason = self._find(key, roots, targets, keep_graph, replace=True)
            if program is not None:
                program_cache.hit(key, program)
            else:
                program = self._make(key, roots, create_graph, targets, accumulate, batched)
                if program is not None:
                    found = program.match(roots, targets, keep_graph)
                    if isinstance(found, list):
                        program_cache.add(key, program, reason)
                    else:
                        why = program.reason(found)
                        program_cache.fall_back(f"its program does not fit it: {why}")
                        program = None
        if program is not None:
            return program.run(found, roots, keep_graph, targets)
        return engine.run(roots, keep_graph, create_graph, targets, accumulate)

    def _find(
        self,
        key: Any,
        roots: Roots,
        targets: Sequence[Edge] | None,
        keep_graph: bool,
        replace: bool = False,
    ) -> tuple[Program | None, Any, str]:
        """The program of this backward, and its inputs; or why there is none. `replace`: drop one
        for which there is a better one."""
        reason = "the first backward of its kind"
        for program in program_cache.get(key):
            found = program.match(roots, targets, keep_graph)
            if isinstance(found, list):
                if not program.stale:
                    return program, found, reason
                if replace:
                    program_cache.remove(key, program)
                return None, None, "what its opaque nodes give is known now"
            reason = program.reason(found)
        return None, None, reason

    def _make(
        self,
        key: Any,
        roots: Roots,
        create_graph: bool,
        targets: Sequence[Edge] | None,
        accumulate: bool,
        batched: bool,
    ) -> Program | None:
        why, times = program_cache.refused.get(key, ("", 0))
        if times >= 8:
            program_cache.fall_back(why)
            return None
        programs = program_cache.get(key)
        if len(programs) >= program_cache.variants:
            first = describe_root(roots[0][0].node)
            program_cache.fall_back(f"more than {program_cache.variants} programs for {first}")
            return None
        try:
            return make(
                roots, create_graph, targets, accumulate, self.backend,
                [p.captured for p in programs], self.window, self.reorder, batched,
            )  # fmt: skip
        except Uncapturable as error:
            program_cache.refuse(key, str(error))
            program_cache.fall_back(str(error))
            return None


def capture(
    outputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    inputs: Tensor | Sequence[Tensor] | None = None,
    *,
    create_graph: bool = False,
    backend: Backend = None,
    window: int = 0,
    reorder: bool = False,
) -> Program:
    """The backward of `outputs` as a program, without running anything; the graph stays as it is.

    `grad_outputs`: as in `backward`; only what they look like counts. `inputs`: the gradients with
    respect to these, as `grad` gives them (default: those of the leaves, accumulated). The rest as
    in `compiled_backward`. Raises Uncapturable where the backward cannot be a program,
    NotDifferentiableError where `outputs` need no gradient.
    """
    with record():
        outs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        given = (grad_outputs,) if isinstance(grad_outputs, Tensor) else grad_outputs
        given = (None,) * len(outs) if given is None else tuple(given)
        grads = [torch.ones_like(o) if g is None else g for o, g in zip(outs, given, strict=True)]
        roots = roots_of(outs, grads)
        targets = None
        if inputs is not None:
            chosen = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
            targets = targets_of(chosen, accumulate=False)
        with below_overrides(), program_cache.lock:
            return make(roots, create_graph, targets, inputs is None, backend, (), window, reorder)
