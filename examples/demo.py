"""Train two models under PyTorch and under stowgrad, with each way of stowing what is saved.

    python examples/demo.py            # two to four minutes on two CPU cores

Runs the training scripts beside this file, unmodified, by `stowgrad run`. Checks that every run
learns the same, prints a table of loss, memory and time, and draws a picture of all three.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-4  # relative; on a CPU the runs differ by nothing at all

# How a script is run: the options of `stowgrad run`, and what the picture calls it.
WAYS = {
    "PyTorch": ["--native"],
    "keep": ["--record-only"],
    "host": ["--stow", "host"],
    "disk": ["--stow", "disk"],
    "recompute": ["--stow", "recompute"],
}
MODELS = {
    "GPT": (
        "train_gpt.py",
        "--layers 4 --width 128 --heads 4 --context 128 --batch 8 --megabytes 0.5 --sample 0",
    ),
    "ResNet": ("train_convnet.py", "--batch 64 --size 16 --test 0"),
}


@dataclass
class Run:
    """One script, run in one way: the loss of each step and the report of `stowgrad run`."""

    model: str
    way: str
    losses: list[float]
    report: dict[str, Any]

    @property
    def peak(self) -> float:
        """Most that tensors held at once, in MiB."""
        return self.report["peak_bytes"] / 2**20

    @property
    def saved(self) -> float:
        """What of it was saved for backward, in MiB; 0 where PyTorch cannot tell."""
        return (self.report["saved_bytes"] or 0) / 2**20

    @property
    def step(self) -> float:
        """Milliseconds from the start of one backward to that of the next: the median."""
        return 1e3 * self.report["step_seconds"]


def run(model: str, way: str, steps: int, threads: int, folder: Path) -> Run:
    """Run one script in a process of its own. Raises SystemExit with what it said if it fails."""
    script, options = MODELS[model]
    losses, report = folder / "losses.json", folder / "report.json"
    command = [
        sys.executable, "-m", "stowgrad", "run", *WAYS[way], "--json", str(report),
        str(HERE / script), *options.split(), "--steps", str(steps), "--losses", str(losses),
        "--threads", str(threads),
    ]  # fmt: skip
    # Threads that wait in place slow each other down out of proportion on a busy machine.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stderr}")
    return Run(model, way, json.loads(losses.read_text()), json.loads(report.read_text()))


def largest_difference(runs: list[Run]) -> float:
    """Of any loss from that of the first run at the same step, relative to it."""
    first = runs[0].losses
    return max(
        abs(a - b) / abs(b) for r in runs for a, b in zip(r.losses, first, strict=True)
    )


def table(runs: list[Run]) -> Any:
    from rich.table import Table

    result = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "", "loss", "peak MiB", "saved MiB", "ms/step", "stowed"):
        result.add_column(name, justify="right" if name else "left", no_wrap=True)
    for r in runs:
        native = r.way == "PyTorch"
        stowed = r.report["stowed_bytes"] / 2**20
        blocks = r.report["blocks"]
        result.add_row(
            r.model if native else "",
            r.way if native else f"stowgrad, {r.way}",
            f"{r.losses[-1]:.6f}",
            f"{r.peak:.1f}",
            "" if native else f"{r.saved:.1f}",
            f"{r.step:.0f}",
            f"{stowed:.1f} MiB" if stowed else f"{blocks} blocks" if blocks else "",
            end_section=r.way == list(WAYS)[-1],
        )
    return result


def draw(runs: list[Run], path: Path) -> None:
    """Loss, memory and time of every run: a row for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = dict(zip(WAYS, ("#8a8a8a", "#1f4e79", "#3a86b7", "#d9822b", "#3f8f5b"), strict=True))
    plt.rcParams.update({
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold",
        "axes.edgecolor": "#888888", "xtick.color": "#444444", "ytick.color": "#444444",
    })  # fmt: skip
    figure, grid = plt.subplots(
        len(MODELS), 3, figsize=(11, 2.9 * len(MODELS)), squeeze=False, layout="constrained",
        width_ratios=(1.25, 1, 1),
    )  # fmt: skip
    for row, model in zip(grid, MODELS, strict=True):
        chosen = [r for r in runs if r.model == model]
        curves, memory, time = row
        widest = 2 * len(chosen)
        for i, r in enumerate(chosen):  # one on top of the other: wide ones below
            curves.plot(
                range(1, len(r.losses) + 1), r.losses, color=colors[r.way], label=r.way,
                lw=widest - 2 * i, solid_capstyle="round",
            )  # fmt: skip
        curves.set_title(f"{model}: the loss is the same")
        curves.set_xlabel("step")
        curves.legend(frameon=False, fontsize=8)

        names = [r.way for r in chosen]
        shades = [colors[name] for name in names]
        bars = memory.barh(names, [r.peak for r in chosen], color=shades, height=0.7)
        memory.barh(
            names, [r.saved for r in chosen], left=[r.peak - r.saved for r in chosen],
            color="none", edgecolor="white", hatch="////", lw=0, height=0.7,
        )  # fmt: skip
        memory.bar_label(bars, [f"{r.peak:.0f}" for r in chosen], padding=4, fontsize=8)
        memory.set_title("peak live tensors, MiB")
        memory.set_xlabel("hatched: saved for backward (PyTorch does not tell)", fontsize=8)

        bars = time.barh(names, [r.step for r in chosen], color=shades, height=0.7)
        time.bar_label(bars, [f"{r.step:.0f}" for r in chosen], padding=4, fontsize=8)
        time.set_title("time a step, ms")
        time.set_xlabel("median", fontsize=8)
        for axes in (memory, time):
            axes.invert_yaxis()
            axes.margins(x=0.12)
            axes.tick_params(left=False)
            axes.spines.left.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's choice")
    parser.add_argument("--out", type=Path, default=Path("build/demo.png"), metavar="FILE")
    args = parser.parse_args()
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        raise SystemExit(
            "the demo needs rich and matplotlib: pip install 'stowgrad[cli,plot]'"
        ) from None

    console = Console(highlight=False)
    runs: list[Run] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        task = progress.add_task("", total=len(MODELS) * len(WAYS))
        for model in MODELS:
            for way in WAYS:
                progress.update(task, description=f"{model}, {way}")
                runs.append(run(model, way, args.steps, args.threads, Path(folder)))
                progress.advance(task)
        progress.update(task, description="done")
    console.print()
    console.print(table(runs))
    console.print()
    for model in MODELS:
        worst = largest_difference([r for r in runs if r.model == model])
        failed |= not worst <= TOLERANCE
        console.print(
            f"{model}: no loss differs from PyTorch's by more than {worst:.1e} of it"
            f" ({'allowed' if worst <= TOLERANCE else 'TOO MUCH: allowed'} {TOLERANCE:.0e})"
        )
    draw(runs, args.out)
    console.print(f"picture: {args.out}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
