"""Compare stowgrad with PyTorch's own autograd, side by side, against the bars we set ourselves.

    python benchmarks/run.py                  # everything, a few minutes
    python benchmarks/run.py --only peak      # those whose name has a word in it
    python benchmarks/run.py --quick          # small models: whether it works, not how fast

Prints a table and writes build/bench.json. A ratio is stowgrad's median over PyTorch's; lower is
better, 1.00 is the same, and the bar is the most we accept.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import BENCHES, Options, Result, bench, peaks, times
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from workloads import chain, convnet, gpt, with_files

Pairs = Iterator[tuple[float, float]]


@bench("chain of 50 small multiplications, time", unit="s", bar=2.5)
def chain_time(options: Options) -> Pairs:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from times(chain(), options.samples or 301, repeat=4)
    finally:
        torch.set_num_threads(threads)


@bench("GPT step, time", unit="s", bar=1.10)
def gpt_time(options: Options) -> Pairs:
    return times(gpt(options), options.samples or 9)


@bench("ResNet step, time", unit="s", bar=1.10)
def convnet_time(options: Options) -> Pairs:
    return times(convnet(options), options.samples or 15)


@bench("GPT step, peak live bytes", unit="B", bar=1.00)
def gpt_peak(options: Options) -> Pairs:
    training = gpt(options)
    return peaks(training, training.held, options.samples or 3)


@bench("ResNet step, peak live bytes", unit="B", bar=1.00)
def convnet_peak(options: Options) -> Pairs:
    training = convnet(options)
    return peaks(training, training.held, options.samples or 3)


@bench("GPT step, each block checkpointed, peak live bytes", unit="B", bar=1.00)
def gpt_checkpoint_peak(options: Options) -> Pairs:
    training = gpt(options, checkpoint=True)
    return peaks(training, training.held, options.samples or 3)


@bench("GPT step, each block checkpointed, time", unit="s", bar=1.10)
def gpt_checkpoint_time(options: Options) -> Pairs:
    return times(gpt(options, checkpoint=True), options.samples or 9)


@bench("GPT step, all saved tensors in files, peak live bytes", unit="B", bar=1.00)
def gpt_files_peak(options: Options) -> Pairs:
    training = gpt(options)
    return peaks(with_files(training), training.held, options.samples or 3)


@bench("ResNet step, all saved tensors in files, peak live bytes", unit="B", bar=1.00)
def convnet_files_peak(options: Options) -> Pairs:
    training = convnet(options)
    return peaks(with_files(training), training.held, options.samples or 3)


def in_unit(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 2**20:.2f} MiB"
    return f"{value * 1e3:.2f} ms" if value < 10 else f"{value:.1f} s"


def table_of(results: list[Result]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "PyTorch", "stowgrad", "ratio", "bar", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for r in results:
        verdict = "[green]pass[/]" if r.passed else "[red]fail[/]"
        table.add_row(
            r.name, in_unit(r.pytorch, r.unit), in_unit(r.stowgrad, r.unit), f"{r.ratio:.3f}",
            f"{r.bar:.2f}", verdict,
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
                progress.update(whole, description=f"{b.name}: {result.ratio:.3f}")
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
