"""The command `stowgrad`: run a script under the recorder, and list what has a rule.

    stowgrad run --stow disk train.py --steps 100
    stowgrad ops softmax

The script runs outside the command-line parser, so that its exceptions, exit codes and Ctrl-C act
as they do under `python`. Whatever happens to it, hooks, files and bindings are gone when it ends.
"""

from __future__ import annotations

import enum
import fnmatch
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import stowgrad

if TYPE_CHECKING:
    from .inspect.report import Report

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(
        f"the stowgrad command needs rich and typer ({error}). Install them with: "
        "pip install 'stowgrad[cli]'"
    ) from None

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train with stowgrad instead of PyTorch's autograd.",
)


class Place(str, enum.Enum):
    """Where saved tensors go."""

    host = "host"
    disk = "disk"
    recompute = "recompute"


def _version(value: bool) -> None:
    if value:
        print(f"stowgrad {stowgrad.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# -- stowgrad run


@app.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
    }
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script, and its own arguments after it.")],
    stow: Annotated[
        Place | None,
        typer.Option(
            help="Put saved tensors in host memory or on disk, or recompute the model's blocks."
        ),
    ] = None,
    stow_dir: Annotated[
        Path | None,
        typer.Option(help="Where --stow disk writes. Default: the temporary directory."),
    ] = None,
    record_only: Annotated[
        bool, typer.Option("--record-only", help="Record and stow nothing (the default).")
    ] = False,
    native: Annotated[
        bool, typer.Option("--native", help="Measure PyTorch's own autograd, for comparison.")
    ] = False,
    meter: Annotated[
        bool,
        typer.Option(help="Measure live bytes, for some microseconds an op."),
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report here too.")
    ] = None,
    full_traceback: Annotated[
        bool, typer.Option("--full-traceback", help="Show stowgrad's own frames in tracebacks.")
    ] = False,
) -> None:
    """Run SCRIPT as `python SCRIPT` would, with recording on from its first line.

    A report follows on standard error.
    """
    if stow is not None and (record_only or native):
        given = "--record-only" if record_only else "--native"
        raise typer.BadParameter(f"cannot be combined with {given}", param_hint="--stow")
    if stow_dir is not None and stow is not Place.disk:
        raise typer.BadParameter("needs --stow disk", param_hint="--stow-dir")
    if stow_dir is not None and not stow_dir.is_dir():
        raise typer.BadParameter(f"{stow_dir} is not a directory", param_hint="--stow-dir")
    jobs: list[Callable[[], None]] = context.obj
    arguments = list(context.args)
    jobs.append(
        lambda: _run(script, arguments, stow, stow_dir, native, meter, json_file, full_traceback)
    )


def _run(
    script: str,
    arguments: list[str],
    stow: Place | None,
    stow_dir: Path | None,
    native: bool,
    metered: bool,
    json_file: Path | None,
    full_traceback: bool,
) -> None:
    from . import runner
    from .context import current_recorder
    from .inspect import BackwardClock, Meter
    from .inspect.report import Report
    from .record import record

    problem = runner.unreadable(script)
    if problem is not None:
        print(f"stowgrad: {problem}", file=sys.stderr)
        raise SystemExit(2)
    report = Report(script, "pytorch" if native else "stowgrad", stow.value if stow else None)
    failure: BaseException | None = None
    ops: dict[Any, int] = {}
    clock = BackwardClock()
    meter = Meter() if metered else None
    finish: Callable[[Report], None] = lambda report: None
    start = time.perf_counter()
    try:
        with ExitStack() as stack:
            if meter is not None:
                stack.enter_context(meter)
            if not native:
                stack.enter_context(record())
                current_recorder().ops = ops
            stack.enter_context(clock)
            if stow is not None:
                finish = _stowing(stack, stow, stow_dir)
            runner.execute(script, arguments)
    except BaseException as error:
        failure = error
    report.wall_seconds = time.perf_counter() - start
    report.exit_code = runner.exit_code(failure)
    report.backward_calls, report.backward_seconds = clock.calls, clock.seconds
    if clock.intervals:
        report.step_seconds = statistics.median(clock.intervals)
    if meter is not None:
        report.peak_bytes, report.peak_bytes_by_device = meter.peak, meter.peaks
        report.saved_bytes = None if native else meter.saved_at_peak
    report.count_ops(ops)
    finish(report)
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads it any more: the interpreter will say so itself
        pass
    report.print()
    if json_file is not None:
        try:
            report.write(json_file)
        except OSError as error:
            print(f"stowgrad: the report could not be written: {error}", file=sys.stderr)
            if failure is None:
                failure = SystemExit(1)
    runner.end(failure, full_traceback)


def _stowing(
    stack: ExitStack, place: Place, directory: Path | None
) -> Callable[[Report], None]:
    """Enter what `--stow` asks for; return what adds its figures to the report."""
    from .memory import Place as Stowed
    from .memory import Recompute, ToDisk, ToHost, stow
    from .saved import hooks

    if place is Place.recompute:
        recompute = stack.enter_context(Recompute())

        def add_blocks(report: Report) -> None:
            report.blocks = recompute.blocks
            report.block_calls = recompute.calls
            report.block_calls_skipped = recompute.skipped

        return add_blocks

    policy: Stowed
    if place is Place.disk:
        disk = policy = ToDisk(directory)
        stack.callback(disk.close)
    else:
        policy = ToHost()
    stack.enter_context(stow(policy))
    hooks.floor += 1  # it lies under the script, which cannot pop it

    def lower() -> None:
        hooks.floor -= 1

    stack.callback(lower)

    def add_bytes(report: Report) -> None:
        report.stowed_bytes = policy.bytes_peak
        report.stowed_tensors = policy.packs
        report.stayed = dict(policy.stayed)

    return add_bytes


# -- stowgrad ops

_HOW = {
    "RULE": "rule",
    "SPECIAL": "special",
    "FALLBACK": "fallback",
    "COMPOSITE": "composite",
    "PLAIN": "constant",
    "OUT": "out",
}
_MEANING = {
    "rule": "has a derivative rule of its own",
    "special": "is recorded by code of its own",
    "fallback": "is run again under PyTorch's autograd in backward",
    "composite": "is made of other ops, which are recorded",
    "constant": "has results that never need gradients",
    "out": "writes to out=..., and is refused when a gradient is needed",
}


@app.command()
def ops(
    pattern: Annotated[
        str | None, typer.Argument(metavar="FILTER", help="A part of a name, or a glob pattern.")
    ] = None,
    how: Annotated[str | None, typer.Option(help=f"Only these: {', '.join(_MEANING)}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List how each ATen op is recorded."""
    if how is not None and how not in _MEANING:
        raise typer.BadParameter(f"one of {', '.join(_MEANING)}", param_hint="--how")
    found = {
        name: kind
        for name, kind in how_recorded().items()
        if (how is None or kind == how) and (pattern is None or _matches(name, pattern))
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console(highlight=False)
    table = Table("op", "how", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, kind in found.items():
        table.add_row(name, kind)
    if found:
        console.print(table)
        console.print()
    counts = Counter(found.values())
    for kind, meaning in _MEANING.items():
        if counts[kind]:
            console.print(f"{counts[kind]:5}  {kind:10} {meaning}")
    if not found:
        print(f"no op matches {pattern!r}", file=sys.stderr)
        raise typer.Exit(1)


def how_recorded() -> dict[str, str]:
    """For every overload in `torch.ops.aten`, by name: a key of `_MEANING`."""
    from . import _private
    from .ops import entry_of

    return {str(op): _HOW[entry_of(op).kind.name] for op in _private.all_aten_ops()}


def _matches(name: str, pattern: str) -> bool:
    short = name.removeprefix("aten.")
    if any(c in pattern for c in "*?["):
        return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(short, pattern)
    return pattern in name


def main() -> None:
    """The entry point of the command `stowgrad`."""
    jobs: list[Callable[[], None]] = []
    try:
        app(obj=jobs, prog_name="stowgrad")
    except SystemExit as error:
        if error.code or not jobs:
            raise
    for job in jobs:
        job()


if __name__ == "__main__":
    main()
