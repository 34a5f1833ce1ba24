"""A program: one backward, captured, with the code that finds it again and that which runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _private, engine
from ..context import backward_scope
from ..engine import Grads, Task
from ..errors import GradientError
from ..graph import Edge, Node, locate, seam
from ..saved import SavedTensor
from . import steps
from .capture import Captured, Spec, Uncapturable, brief, capture, hook_kinds
from .emit import Changed, Emitter
from .learned import gives
from .match import Matcher
from .passes import schedule

Roots = Sequence[tuple[Edge, Tensor]]


class Program:
    """A backward as straight-line code. `sg.capture(loss)` makes one; `print` shows it.

    `graph`: the torch.fx graph. `symbols`: the sizes it takes as numbers, by name, with the values
    they had when it was captured. `notes`: why some nodes are run as they are. `source`: the code.
    """

    def __init__(self, captured: Captured, backend: Any = None) -> None:
        self.captured = captured
        self.backend = backend
        self._finish()
        self._matcher = Matcher(captured)
        self._emitter = Emitter(captured)
        self.match = self._matcher.match
        self._run = self._emitter.run
        self.runs = 0
        self.stale = False  # a better one can be captured now

    def _finish(self) -> None:
        """What can be said only of the whole: which nodes give up what they saved at once."""
        graph = self.captured.graph
        opaque = any(n.target in USER_STEPS for n in graph.nodes if n.op == "call_function")
        self._user_steps = opaque
        for node in list(graph.nodes):
            if node.target is not steps.release:
                continue
            spec: Spec = node.meta["spec"]
            if not opaque and spec.kind == "rule" and _all_raw(spec.entries):
                spec.stolen = True
                graph.erase_node(node)
        for node in reversed(list(graph.nodes)):
            if node.op == "placeholder" and not node.users:
                graph.erase_node(node)

    @property
    def graph(self) -> torch.fx.Graph:
        return self.captured.graph

    @property
    def symbols(self) -> dict[str, int]:
        return self.captured.symbols

    @property
    def notes(self) -> list[str]:
        return self.captured.notes

    @property
    def source(self) -> str:
        return self._emitter.source

    @property
    def name(self) -> str:
        """The op that the backward starts from, and its line."""
        spec = self.captured.specs[self.captured.roots[0][0]]
        return f"{spec.op} {spec.where}".rstrip()

    def reason(self, number: int) -> str:
        """What check `number` of the match asked for."""
        return self._matcher.reasons[number]

    def run(
        self,
        inputs: list[Any],
        roots: Roots,
        keep_graph: bool,
        targets: Sequence[Edge] | None = None,
    ) -> Grads:
        """Run on `inputs`, which `match` gathered; the gradients at the captured inputs."""
        self.runs += 1
        task = Task(self.captured.create_graph, keep_graph, [edge.node for edge, _ in roots])
        if targets is not None:
            task.limit(targets, self.captured.accumulate)
        outer, seam.hooked = seam.hooked, [] if self._user_steps else None
        with task:
            try:
                found = self._run(inputs, keep_graph)
                if seam.hooked:
                    self._check_hooked(seam.hooked, roots)
            except Changed as changed:
                raise self._changed(changed, roots) from None
            except Exception as error:
                self._point_at_line(error, roots)
                raise
            finally:
                seam.hooked = outer
            task.run_callbacks()
        self.stale |= task.surprised
        if self.captured.unlearned:
            self._see_what_is_known()
        return list(found)

    def _see_what_is_known(self) -> None:
        """Whether what nodes gave that could not be traced makes more of the program traceable."""
        for cls, name, needs, needed in self.captured.unlearned:
            sure = gives(cls, name, needs)
            if sure is not None and any(a and b for a, b in zip(sure, needed, strict=True)):
                self.stale = True
        self.captured.unlearned = []

    def _check_hooked(self, hooked: list[Node], roots: Roots) -> None:
        """A hook that is registered in the midst of a program, on what is still to run, is missed:
        never without a word."""
        specs = dict(zip(self._nodes(roots), self.captured.specs, strict=True))
        for node in hooked:
            spec = specs.get(node)
            if spec is not None and spec.kind != "leaf" and hook_kinds(node) != spec.hooks:
                raise GradientError(
                    f"a hook was registered on {node.name()} (recorded at {locate(node.where)}) "
                    "while its backward ran as a program, which knows only the hooks that were "
                    "there when it began. Register it before backward, or run this backward "
                    "outside compiled_backward()."
                )

    def _changed(self, changed: Changed, roots: Roots) -> Exception:
        """The error that the eager engine would give for a tensor that was changed in place."""
        node: Any = self._nodes(roots)[changed.spec]
        name = self.captured.specs[changed.spec].entries[changed.slot].name
        saved = SavedTensor.of(
            changed.tensor, changed.version, node.tick, name, node.rule.name, node.where, None
        )
        return saved.changed(changed.tensor._version, changed.tensor)

    def _point_at_line(self, error: Exception, roots: Roots) -> None:
        """Say which line of the forward pass made the node in which `error` happened."""
        if not hasattr(error, "add_note"):  # Python 3.10
            return
        trace = error.__traceback__
        spec = None
        while trace is not None:
            if trace.tb_frame.f_code is self._run.__code__:
                spec = self._emitter.specs[trace.tb_lineno]
            trace = trace.tb_next
        if spec is not None:
            where = locate(self._nodes(roots)[spec.index].where) or spec.where
            error.add_note(f"in the backward of {spec.op}, recorded at {where}")

    def _nodes(self, roots: Roots) -> list[Node]:
        return list(engine.count_edges(edge.node for edge, _ in roots))

    def __str__(self) -> str:
        from .show import text

        return text(self.captured)

    def __repr__(self) -> str:
        return f"<backward program of {self.name}>"

    def plot(self, path: Any, sizes: dict[str, int] | None = None) -> None:
        """Draw the live bytes over the steps into `path` (.svg, .png). Needs matplotlib."""
        from .show import plot

        plot(self.captured, path, sizes)

    def peak_bytes(self, sizes: dict[str, int] | None = None) -> int:
        """The most bytes that tensors hold at once while it runs, from metadata alone.

        `sizes`: values of `symbols` (default: those at capture). What user code inside an unpack
        or a hook allocates is not known.
        """
        from .memory import peak_bytes

        return peak_bytes(self.captured, sizes)


def _all_raw(entries: Any) -> bool:
    return all(e.kind in ("raw", "value") for e in entries)


USER_STEPS = frozenset([
    steps.unpack, steps.tensor_hooks, steps.leaf_hooks, steps.pre_hooks, steps.post_hooks,
    steps.call_node, steps.post_accumulate_hooks,
])  # fmt: skip


def make(
    roots: Roots,
    create_graph: bool,
    targets: Sequence[Edge] | None,
    accumulate: bool,
    backend: Any = None,
    before: Sequence[Captured] = (),
    window: int = 0,
    reorder: bool = False,
    batched: bool = False,
) -> Program:
    """Capture a backward, schedule it and make its code. Raises Uncapturable."""
    # what watches the user's ops has no business here
    with backward_scope(False), _private.no_modes():
        try:
            captured = capture(roots, create_graph, targets, accumulate, before)
        except Uncapturable:
            raise
        except Exception as error:
            # The eager engine will do it, or say what is wrong.
            raise Uncapturable(f"its capture failed: {brief(error)}") from error
        direct = not create_graph and not batched
        if backend is not None and direct:
            from .lower import lower

            lower(captured, backend)
        schedule(captured, window=window, reorder=reorder, direct=direct)
        return Program(captured, backend)
