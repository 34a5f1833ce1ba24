"""Compare stowgrad with PyTorch's own autograd, side by side, against the bars we set ourselves.

    python benchmarks/run.py                  # everything, a few minutes
    python benchmarks/run.py --only peak      # those whose name has a word in it
    python benchmarks/run.py --quick          # small models: whether it works, not how fast

Prints a table and writes build/bench.json. A ratio is the median of what a row names over that of
what it is compared with; lower is better, 1.00 is the same, and the bar is the most we accept.
Rows without a bar are there to be seen.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import (
    BENCHES,
    UNCOMPILED,
    WAYS,
    Options,
    Ratio,
    Result,
    Sample,
    backwards,
    bench,
    in_turn,
    peaks,
    times,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch._dynamo.utils import counters
from workloads import chain, chain_loss, convnet, gpt, with_files

import stowgrad as sg
from stowgrad.autograd import roots_of

Samples = Iterator[Sample]


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@bench("chain of 50 small multiplications, time", unit="s", bar=2.5)
def chain_time(options: Options) -> Samples:
    with one_thread():
        yield from times(chain(), options.samples or 301, repeat=4)


@bench("GPT step, time", unit="s", bar=1.10)
def gpt_time(options: Options) -> Samples:
    return times(gpt(options), options.samples or 9)


@bench("ResNet step, time", unit="s", bar=1.10)
def convnet_time(options: Options) -> Samples:
    return times(convnet(options), options.samples or 15)


@bench("GPT step, peak live bytes", unit="B", bar=1.00)
def gpt_peak(options: Options) -> Samples:
    training = gpt(options)
    return peaks(training, training.held, options.samples or 3)


@bench("ResNet step, peak live bytes", unit="B", bar=1.00)
def convnet_peak(options: Options) -> Samples:
    training = convnet(options)
    return peaks(training, training.held, options.samples or 3)


@bench("GPT step, each block checkpointed, peak live bytes", unit="B", bar=1.00)
def gpt_checkpoint_peak(options: Options) -> Samples:
    training = gpt(options, checkpoint=True)
    return peaks(training, training.held, options.samples or 3)


@bench("GPT step, each block checkpointed, time", unit="s", bar=1.10)
def gpt_checkpoint_time(options: Options) -> Samples:
    return times(gpt(options, checkpoint=True), options.samples or 9)


@bench("GPT step, all saved tensors in files, peak live bytes", unit="B", bar=1.00)
def gpt_files_peak(options: Options) -> Samples:
    training = gpt(options)
    return peaks(with_files(training), training.held, options.samples or 3)


@bench("ResNet step, all saved tensors in files, peak live bytes", unit="B", bar=1.00)
def convnet_files_peak(options: Options) -> Samples:
    training = convnet(options)
    return peaks(with_files(training), training.held, options.samples or 3)


# -- backward as a program


def beside(direct: float, inductor: float | None = None) -> list[Ratio]:
    """All ways over PyTorch's eager backward; bars for a program, direct and compiled."""
    bars = {"stowgrad program": direct, "stowgrad program, Inductor": inductor}
    return [Ratio(way, "PyTorch", bars.get(way)) for way in WAYS if way != "PyTorch"]


@bench("chain of 50 small multiplications, backward only", *beside(0.60), unit="s")
def chain_backward(options: Options) -> Samples:
    with one_thread():
        yield from backwards(chain_loss(), options.samples or 301, repeat=4)


@bench("chain of 50 multiplications by a constant, backward only", *beside(0.60), unit="s")
def constant_chain_backward(options: Options) -> Samples:
    with one_thread():
        yield from backwards(chain_loss(constant=True), options.samples or 301, repeat=4)


@bench(
    "look-up of a program, for each node",
    Ratio("chain", "a microsecond", 1.5),
    Ratio("GPT", "a microsecond", 1.5),
    unit="s",
)
def look_up(options: Options) -> Samples:
    losses = {"chain": chain_loss(), "GPT": gpt(options).fresh_loss}
    with sg.record():
        found = {}
        for name, loss in losses.items():
            out = loss()
            roots = roots_of([out], [torch.ones_like(out)])
            found[name] = roots, sg.capture(out)
        for _ in range(options.samples or 101):
            sample = {"a microsecond": 1e-6}
            for name, (roots, program) in found.items():
                start = time.perf_counter()
                inputs = program.match(roots, None, True)
                taken = time.perf_counter() - start
                assert isinstance(inputs, list)
                sample[name] = taken / len(program.captured.specs)
            yield sample


@bench("GPT, backward only", *beside(1.00, 0.95), unit="s")
def gpt_backward(options: Options) -> Samples:
    return backwards(gpt(options).fresh_loss, options.samples or 9)


# What capturing costs in memory, of either.
CAPTURED = (
    Ratio("stowgrad program", "stowgrad", 1.00),
    Ratio("PyTorch captured", "PyTorch"),
)


@bench("GPT step, each block checkpointed, program, peak live bytes", *CAPTURED, unit="B")
def gpt_checkpoint_program_peak(options: Options) -> Samples:
    training = gpt(options, checkpoint=True)
    return peaks(training, training.held, options.samples or 3, UNCOMPILED)


@bench("GPT step, all saved tensors in files, program, peak live bytes", *CAPTURED, unit="B")
def gpt_files_program_peak(options: Options) -> Samples:
    training = gpt(options)
    return peaks(with_files(training), training.held, options.samples or 3, UNCOMPILED)


@bench(
    "GPT, capture",
    Ratio("stowgrad program", "stowgrad", 5.0),
    Ratio("PyTorch captured", "PyTorch"),
    unit="s",
)
def gpt_capture(options: Options) -> Samples:
    """Capturing over one eager backward. PyTorch's can only be had with a first run."""
    loss = gpt(options).fresh_loss

    def seconds(way: str) -> float:
        torch._C._dynamo.compiled_autograd.clear_cache()
        with sg.record() if way.startswith("stowgrad") else WAYS[way]():
            out = loss()
            start = time.perf_counter()
            if way == "stowgrad program":
                sg.capture(out)
            else:
                out.backward()
            return time.perf_counter() - start

    for way in UNCOMPILED:
        seconds(way)
    yield from in_turn(seconds, UNCOMPILED, options.samples or 5)


@bench(
    "GPT, ten sequence lengths, captures after the second",
    Ratio("stowgrad program", "steps", 0.0),
    Ratio("PyTorch captured", "steps"),
    unit="",
)
def gpt_lengths(options: Options) -> Samples:
    training = gpt(options)
    longest = training.batch[0].shape[1]
    lengths = [longest - 3 * i for i in range(10)]
    cache = sg.program_cache
    sg.program_cache.clear()
    torch._C._dynamo.compiled_autograd.clear_cache()
    missed = {"steps": 8.0, "stowgrad program": 0.0, "PyTorch captured": 0.0}
    for number, length in enumerate(lengths):
        hits, captures = cache.hits, counters["compiled_autograd"]["captures"]
        for way in ("stowgrad program", "PyTorch captured"):
            with WAYS[way]():
                training.loss_of_first(length).backward()
        if number >= 2:
            missed["stowgrad program"] += cache.hits == hits  # a fallback is no hit either
            missed["PyTorch captured"] += counters["compiled_autograd"]["captures"] - captures
    yield missed


def in_unit(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 2**20:.2f} MiB"
    if not unit:
        return f"{value:.0f}"
    if value < 1e-4:
        return f"{value * 1e6:.2f} us"
    return f"{value * 1e3:.2f} ms" if value < 10 else f"{value:.1f} s"


def table_of(results: list[Result]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "base", "measured", "ratio", "bar", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for r in results:
        if len(r.ratios) > 1:  # then each has a row of its own, which says what it compares
            table.add_row(r.name)
        for ratio in r.ratios:
            name = f"    {ratio.of} / {ratio.to}" if len(r.ratios) > 1 else r.name
            verdict = "[green]pass[/]" if r.meets(ratio) else "[red]fail[/]"
            table.add_row(
                name, in_unit(r.medians[ratio.to], r.unit), in_unit(r.medians[ratio.of], r.unit),
                f"{r.value(ratio):.3f}", *("", "") if ratio.bar is None else
                (f"{ratio.bar:.2f}", verdict),
            )  # fmt: skip
    return table


def measure(names: list[str], options: Options) -> list[Result]:
    """Run the benchmarks with these names, and show how far they are."""
    results = []
    with Progress(console=Console(stderr=True)) as progress:
        whole = progress.add_task("benchmarks", total=len(names))
        for b in BENCHES:
            if b.name not in names:
                continue
            progress.update(whole, description=b.name)
            result = None
            for result in b.run(options):
                progress.update(
                    whole, description=f"{b.name}: {result.value(result.ratios[0]):.3f}"
                )
            assert result is not None
            results.append(result)
            progress.advance(whole)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="*", default=[], metavar="WORD", help="those with one of these in the name")
    add("--list", action="store_true", help="list the benchmarks and stop")
    add("--samples", type=int, help="of each, instead of the benchmark's own choice")
    add("--quick", action="store_true", help="small models and few samples")
    add("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's own choice")
    add("--json", type=Path, default=Path("build/bench.json"), metavar="FILE")
    add("--check", action="store_true", help="exit with 1 if a bar is missed")
    args = parser.parse_args()
    words = [word.lower() for word in args.only]
    names = [b.name for b in BENCHES if not words or any(w in b.name.lower() for w in words)]
    if args.list or not names:
        print("\n".join(names) or f"no benchmark has {' or '.join(args.only)} in its name")
        return 0 if names else 2
    if args.threads:
        torch.set_num_threads(args.threads)
    samples = args.samples or (3 if args.quick else None)
    results = measure(names, Options(samples, args.quick))
    # Names are long, and a table that is wrapped cannot be read: into a file, as wide as it is.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    console.print(table_of(results))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "quick": args.quick,
        "results": [r.as_json() for r in results],
    }
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if args.check and not all(r.passed for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
