"""How things are compared: PyTorch and stowgrad in one process, in turn, by the median.

A benchmark measures the same work in several ways (PyTorch, stowgrad, a captured backward of
either), and has bars for the ratios of some to others. Samples are taken in turn, so that whatever
else the machine does strikes all alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import stowgrad as sg
from stowgrad.inspect import Meter

Work = Callable[[], Any]
Sample = dict[str, float]  # what was measured, by the way in which it was


@dataclass(frozen=True)
class Options:
    """How much to measure. `samples`: of each way; None: as the benchmark likes."""

    samples: int | None = None
    quick: bool = False


@dataclass(frozen=True)
class Ratio:
    """One way over another, and the most we accept; None: only to be seen."""

    of: str
    to: str
    bar: float | None = None


@dataclass
class Result:
    """Medians of all ways, in `unit`, and whether the ratios are at or under their bars."""

    name: str
    unit: str
    ratios: Sequence[Ratio]
    medians: Sample = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def value(self, ratio: Ratio) -> float:
        return self.medians[ratio.of] / self.medians[ratio.to]

    def meets(self, ratio: Ratio) -> bool:
        return ratio.bar is None or round(self.value(ratio), 3) <= ratio.bar

    @property
    def passed(self) -> bool:
        return all(self.meets(r) for r in self.ratios)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "passed": self.passed,
            "ratios": [
                {"of": r.of, "to": r.to, "ratio": self.value(r), "bar": r.bar} for r in self.ratios
            ],
            "medians": self.medians,
            "samples": self.samples,
        }


@dataclass(frozen=True)
class Bench:
    name: str
    unit: str  # "s", "B", or "" for a count
    ratios: Sequence[Ratio]
    measure: Callable[[Options], Iterator[Sample]]

    def run(self, options: Options) -> Iterator[Result]:
        """The result after each round of samples; the last one counts."""
        result = Result(self.name, self.unit, self.ratios)
        for sample in self.measure(options):
            for way, value in sample.items():
                taken = result.samples.setdefault(way, [])
                taken.append(value)
                result.medians[way] = statistics.median(taken)
            yield result


BENCHES: list[Bench] = []


def bench(name: str, *ratios: Ratio, unit: str, bar: float | None = None) -> Callable[[Any], Any]:
    """Register a benchmark: a generator of samples. `bar`: for stowgrad over PyTorch."""
    compared = ratios or (Ratio("stowgrad", "PyTorch", bar),)

    def register(measure: Callable[[Options], Iterator[Sample]]) -> Any:
        BENCHES.append(Bench(name, unit, compared, measure))
        return measure

    return register


def autograd(record: bool) -> AbstractContextManager[Any]:
    return sg.record() if record else nullcontext()


# PyTorch's cache of captured backwards does not ask which compiler a graph was for: one entry
# serves both ways, and this says which.
_with_inductor = False


def _compiler(graph: Any) -> Callable[..., Any]:
    compiled = torch.compile(graph, backend="inductor")
    return lambda *args: (compiled if _with_inductor else graph)(*args)


@contextmanager
def _pytorch_captured(inductor: bool = False) -> Iterator[None]:
    global _with_inductor
    with compiled_autograd._enable(_compiler):
        _with_inductor = inductor
        try:
            yield
        finally:
            _with_inductor = False


@contextmanager
def _program(backend: Any = None) -> Iterator[None]:
    with sg.record(), sg.compiled_backward(backend=backend):
        yield


# The ways in which a backward can run. "Captured": torch._dynamo.compiled_autograd, its graph run
# as it is, unless Inductor compiled it.
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "PyTorch": nullcontext,
    "PyTorch captured": _pytorch_captured,
    "PyTorch captured, Inductor": lambda: _pytorch_captured(inductor=True),
    "stowgrad": sg.record,
    "stowgrad program": _program,
    "stowgrad program, Inductor": lambda: _program("inductor"),
}
BOTH = ("PyTorch", "stowgrad")
UNCOMPILED = ("PyTorch", "PyTorch captured", "stowgrad", "stowgrad program")


def in_turn(once: Callable[[str], float], ways: Sequence[str], samples: int) -> Iterator[Sample]:
    gc.collect()
    for _ in range(samples):
        yield {way: once(way) for way in ways}


def times(work: Work, samples: int, repeat: int = 1) -> Iterator[Sample]:
    """Seconds that `work()` takes (the mean of `repeat` in a row), under both, in turn.

    Entering `record()` is not part of it. One round goes before, unmeasured.
    """

    def seconds(way: str) -> float:
        with WAYS[way]():
            start = time.perf_counter()
            for _ in range(repeat):
                work()
            return (time.perf_counter() - start) / repeat

    for way in BOTH:
        seconds(way)
    yield from in_turn(seconds, BOTH, samples)


def backwards(forward: Callable[[], Tensor], samples: int, repeat: int = 1) -> Iterator[Sample]:
    """Seconds that the backward of `forward()` takes, all ways, in turn; the forward is not timed.

    Two rounds go before, unmeasured: one that captures, and one that makes up for what it guessed.
    """

    def seconds(way: str) -> float:
        total = 0.0
        with WAYS[way]():
            for _ in range(repeat):
                loss = forward()
                start = time.perf_counter()
                loss.backward()
                total += time.perf_counter() - start
        return total / repeat

    for way in [*WAYS, *WAYS]:
        seconds(way)
    yield from in_turn(seconds, tuple(WAYS), samples)


def peaks(
    work: Work, held: Callable[[], Any], samples: int, ways: Sequence[str] = BOTH
) -> Iterator[Sample]:
    """Most bytes that tensors hold at once during `work()`, in turn.

    `held()`: the tensors that are there before it and stay (parameters and the like).
    """

    def peak(way: str) -> int:
        gc.collect()
        with Meter() as meter:
            meter.count(held())
            with WAYS[way]():
                work()
            return meter.peak

    for way in ways:  # makes what stays: gradients, the optimizer's state and the programs
        with WAYS[way]():
            work()
    yield from in_turn(peak, ways, samples)
