"""Another order of the steps, with a lower predicted peak."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from typing import Any

from . import steps
from .capture import Captured
from .effects import Effects, FxNode, Kind, arrange
from .memory import Numbers, peak_bytes, tensors


def reorder(captured: Captured) -> None:
    """Put the steps into an order that needs less memory: what frees first, what allocates last.

    Each time, of the steps that may come next, that one comes which adds least to the live bytes.
    That is a guess at the best order; where the predicted peak does not get lower by it, all stays
    as it was. Kept are: what depends on what, ops in place and the readers of what they change, the
    order of all that runs user code, and on which side of it all other steps are that it may see.
    Sums of gradients stay the sums they are.
    """
    before = [n for n in captured.graph.nodes if n.op == "call_function"]
    peak = peak_bytes(captured)
    order = _Scheduler(captured).run()
    arrange(captured.graph, order)
    if peak_bytes(captured) >= peak:
        arrange(captured.graph, before)


class _Scheduler:
    """Numbers are places in the order that there was."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.effects = effects = Effects(captured)
        self.steps = [n for n in effects.nodes if n.op == "call_function"]
        self.number = {n: i for i, n in enumerate(self.steps)}
        count = len(self.steps)
        self.after: list[list[int]] = [[] for _ in range(count)]
        self.waits = [0] * count  # for how many others
        self.glued: dict[int, int] = {}  # checks and reads that come with their first use
        self.spans: dict[int, list[Any]] = defaultdict(list)  # step -> what it reads undisturbed
        self.span_left: Counter[Any] = Counter()
        self._constraints()
        self._memory()

    # -- what must come before what

    def _edge(self, first: int, then: int) -> None:
        if first != then:
            self.after[first].append(then)
            self.waits[then] += 1

    def _constraints(self) -> None:
        effects = self.effects
        written = {root for n in self.steps for root in effects.written(n)}
        saved = {
            root
            for n in effects.nodes
            if n.op == "placeholder" and n.meta["input"][0] in ("raw", "saved", "constant")
            for root in effects.groups(n)
        }
        user = -1  # the last step that ran user code
        since: list[int] = []  # steps that must stay between it and the next one
        reads: dict[int, list[int]] = defaultdict(list)  # spec -> steps before its release
        targets: dict[FxNode, int] = {}  # node of the graph -> the last step with an effect on it
        readers: dict[Any, list[int]] = defaultdict(list)
        writer: dict[Any, int] = {}
        checks: list[int] = []  # since the last accumulation, and that
        segment = interval = 0
        segments: dict[int, int] = {}
        for i, node in enumerate(self.steps):
            kind = effects.kinds[node]
            for n in node.all_input_nodes:
                if n in self.number:
                    self._edge(self.number[n], i)
            writes = effects.written(node)
            touched = effects.touched(node)
            if not writes.isdisjoint(effects.outside):
                kind = Kind.USER  # whoever holds that memory sees it
            for root in touched & written:
                if root in writer:
                    self._edge(writer[root], i)
                if root in writes:
                    for j in readers.pop(root, ()):
                        self._edge(j, i)
                    writer[root] = i
                else:
                    readers[root].append(i)
            spec = node.meta.get("spec")
            if spec is not None and node.target is steps.release:
                for j in reads.pop(spec.index, ()):
                    self._edge(j, i)
            elif spec is not None and kind is not Kind.PURE:
                reads[spec.index].append(i)
            if node.target is steps.accumulate:  # may change a `.grad` that was saved
                for j in checks:
                    self._edge(j, i)
                checks = [i]
            if kind is Kind.SAVED:
                checks.append(i)
            if kind is Kind.VISIBLE:
                for n in node.all_input_nodes:
                    if n.op == "placeholder":
                        if n in targets:
                            self._edge(targets[n], i)
                        targets[n] = i
            segments[i] = segment
            if kind is Kind.USER:
                for j in (*since, user):
                    if j >= 0:
                        self._edge(j, i)
                user, since = i, []
                segment += 1
            elif kind is Kind.VISIBLE or not effects.crosses_user_code(node):
                if user >= 0:
                    self._edge(user, i)
                since.append(i)
            if kind is Kind.USER or node.target is steps.accumulate:
                interval += 1
            elif kind is not Kind.VISIBLE:
                for root in touched & saved:
                    self.spans[i].append((root, interval))
                    self.span_left[root, interval] += 1
        for i, node in enumerate(self.steps):
            if effects.kinds[node] is Kind.SAVED and node.users:
                uses = [self.number.get(u, -1) for u in node.users]
                together = all(segments.get(u) == segments[i] for u in uses)
                pure = all(effects.kinds.get(u) is Kind.PURE for u in node.users)
                if together and pure and effects.groups(node).isdisjoint(written):
                    self.glued[i] = min(uses)
                    for u in uses:  # the first of them brings it along
                        self.after[i].remove(u)
                        self.waits[u] -= 1

    # -- what each step frees and allocates

    def _memory(self) -> None:
        effects, numbers = self.effects, Numbers(self.captured, None)
        self.bytes: dict[Any, int] = defaultdict(int)
        made: dict[Any, int] = {}
        kept = {root for n in effects.nodes if n.op == "output" for root in effects.touched(n)}
        for node in effects.nodes:
            if node.op == "placeholder" and node.meta["input"][0] in ("grad", "constant"):
                kept |= effects.groups(node)
            for t in tensors(node.meta.get("val")):
                nbytes = numbers(t.untyped_storage().nbytes())
                for root in effects.groups(node):
                    self.bytes[root] = max(self.bytes[root], nbytes)
        self.left: Counter[Any] = Counter()  # memory -> the steps that still use it, and their sum
        self.sums: Counter[Any] = Counter()
        self.uses: list[list[Any]] = []
        self.delta = [0] * len(self.steps)
        has_grad = self.captured.storages.with_grad
        for i, node in enumerate(self.steps):
            touched = effects.touched(node)
            self.uses.append([] if i in self.glued else [r for r in touched if self.bytes.get(r)])
            for root in self.uses[-1]:
                self.left[root] += 1
                self.sums[root] += i
                given = any(root in effects.groups(n) for n in node.all_input_nodes)
                if root not in made and not given:
                    self.delta[i] += self.bytes[root]
                made[root] = i
            spec = node.meta.get("spec")
            if node.target is steps.accumulate and spec is not None and spec.index not in has_grad:
                kept |= touched  # the gradient becomes the `.grad`
            if node.target is steps.release:
                self.delta[i] = -(1 << 62)
        for root in kept:
            self.bytes[root] = 0
        for root, left in self.left.items():
            if left == 1:
                self.delta[self.sums[root]] -= self.bytes[root]

    # -- the order

    def run(self) -> list[FxNode]:
        self.heap: list[tuple[int, int]] = []
        self.order: list[FxNode] = []
        self.done = [False] * len(self.steps)
        self.open: set[Any] = set()
        held: list[int] = []  # accumulations that wait until nothing is open
        for i, waits in enumerate(self.waits):
            if not waits and i not in self.glued:
                self._push(i)
        brings: dict[int, list[int]] = defaultdict(list)
        for i in self.glued:
            for u in self.steps[i].users:
                brings[self.number[u]].append(i)
        while self.heap or held:
            if held and not (self.open and self.heap):
                self.open.clear()
                for i in held:
                    self._push(i)
                held = []
            delta, i = heapq.heappop(self.heap)
            if self.done[i] or delta != self.delta[i]:
                continue  # it has been pushed again since
            if self.open and self.steps[i].target is steps.accumulate:
                held.append(i)
                continue
            for j in brings.get(i, ()):
                if not self.done[j]:
                    self._emit(j)
            self._emit(i)
        return self.order

    def _push(self, i: int) -> None:
        heapq.heappush(self.heap, (self.delta[i], i))

    def _emit(self, i: int) -> None:
        self.done[i] = True
        self.order.append(self.steps[i])
        for span in self.spans.get(i, ()):
            # A `.grad` may have been saved: between its check and its use nothing is added to it
            # that was not added there before.
            self.span_left[span] -= 1
            if self.span_left[span]:
                self.open.add(span)
            else:
                self.open.discard(span)
        for j in self.after[i]:
            self.waits[j] -= 1
            if not self.waits[j] and j not in self.glued:
                self._push(j)
        for root in self.uses[i]:
            self.left[root] -= 1
            self.sums[root] -= i
            if self.left[root] == 1:
                last = self.sums[root]
                self.delta[last] -= self.bytes[root]
                if not self.waits[last] and not self.done[last] and last not in self.glued:
                    self._push(last)
