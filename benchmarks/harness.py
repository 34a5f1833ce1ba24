"""How things are compared: PyTorch and stowgrad in one process, in turn, by the median.

A benchmark is a function that makes two measurements of the same work, `once(record)`, and a bar
for their ratio. Samples are taken in turn, so that whatever else the machine does strikes both.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import stowgrad as sg
from stowgrad.inspect import Meter

Work = Callable[[], Any]


@dataclass(frozen=True)
class Options:
    """How much to measure. `samples`: of each of the two; None: as the benchmark likes."""

    samples: int | None = None
    quick: bool = False


@dataclass
class Result:
    """Medians of both, in `unit`, and whether their ratio is at or under the bar."""

    name: str
    unit: str
    bar: float
    pytorch: float = 0.0
    stowgrad: float = 0.0
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.stowgrad / self.pytorch

    @property
    def passed(self) -> bool:
        return round(self.ratio, 3) <= self.bar

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "passed": self.passed}


@dataclass(frozen=True)
class Bench:
    name: str
    unit: str  # "s" or "B"
    bar: float
    measure: Callable[[Options], Iterator[tuple[float, float]]]

    def run(self, options: Options) -> Iterator[Result]:
        """The result after each pair of samples; the last one counts."""
        result = Result(self.name, self.unit, self.bar)
        taken: dict[str, list[float]] = {"pytorch": [], "stowgrad": []}
        for pair in self.measure(options):
            for who, value in zip(taken, pair, strict=True):
                taken[who].append(value)
                setattr(result, who, statistics.median(taken[who]))
            result.samples = taken
            yield result


BENCHES: list[Bench] = []


def bench(name: str, *, unit: str, bar: float) -> Callable[[Any], Any]:
    """Register a benchmark: a generator of pairs (PyTorch's measurement, stowgrad's)."""

    def register(measure: Callable[[Options], Iterator[tuple[float, float]]]) -> Any:
        BENCHES.append(Bench(name, unit, bar, measure))
        return measure

    return register


def autograd(record: bool) -> AbstractContextManager[Any]:
    return sg.record() if record else nullcontext()


def times(work: Work, samples: int, repeat: int = 1) -> Iterator[tuple[float, float]]:
    """Seconds that `work()` takes (the mean of `repeat` in a row), under both, in turn.

    Entering `record()` is not part of it. One round goes before, unmeasured.
    """

    def seconds(record: bool) -> float:
        with autograd(record):
            start = time.perf_counter()
            for _ in range(repeat):
                work()
            return (time.perf_counter() - start) / repeat

    def pair() -> tuple[float, float]:
        return seconds(False), seconds(True)

    pair()
    gc.collect()
    for _ in range(samples):
        yield pair()


def peaks(work: Work, held: Callable[[], Any], samples: int) -> Iterator[tuple[float, float]]:
    """Most bytes that tensors hold at once during `work()`, under both, in turn.

    `held()`: the tensors that are there before it and stay (parameters and the like).
    """

    def peak(record: bool) -> int:
        gc.collect()
        with Meter() as meter:
            meter.count(held())
            with autograd(record):
                work()
            return meter.peak

    work()  # makes what stays: gradients and the optimizer's state
    for _ in range(samples):
        yield peak(False), peak(True)
