"""How many ops of PyTorch's operator database get the reference's gradient here.

    python tools/opinfo.py [--ops mul,linalg.svd] [--dtype float64] [--second] [--samples 10] [-v]

Without --dtype and --second it runs all four tables (float64 and complex128, first and second
derivatives) and prints a line each: by our own rules, by the fallback, not at all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import torch
from opinfo_cases import Outcome, check_op, differentiable_ops, full_name

# Where ours differs from the reference for a reason that is not ours. Tests pin the right values.
STATED = {
    "as_strided_scatter": "PyTorch gives `self` the gradient of the elements that were overwritten",
    "cov": "a gradient that is zero, in float32 noise on both sides (float32 weights)",
    "pca_lowrank": "the reference moves by as much when its input moves by one rounding",
}


def one(job: tuple[str, str, bool, int]) -> tuple[str, Outcome]:
    name, dtype_name, second, limit = job
    torch.set_num_threads(1)
    dtype = getattr(torch, dtype_name)
    op = next(o for o in differentiable_ops(dtype) if full_name(o) == name)
    try:
        return name, check_op(op, dtype, limit=limit, second=second)
    except Exception as error:  # the samples themselves could not be made
        return name, Outcome("skip", f"samples: {type(error).__name__}: {error}"[:200])


def table(
    dtype_name: str, second: bool, wanted: list[str] | None, limit: int, jobs: int, verbose: bool
) -> dict[str, object]:
    dtype = getattr(torch, dtype_name)
    names = [full_name(o) for o in differentiable_ops(dtype)]
    if wanted:
        names = [n for n in names if any(n == w or n.startswith(w + ".") for w in wanted)]
    if second:
        able = {full_name(o) for o in differentiable_ops(dtype) if o.supports_gradgrad}
        names = [n for n in names if n in able]
    work = [(n, dtype_name, second, limit) for n in names]
    results: dict[str, Outcome] = {}
    start = time.time()
    if jobs > 1 and len(work) > 8:
        with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=100) as pool:
            for i, (name, outcome) in enumerate(pool.imap_unordered(one, work, chunksize=4)):
                results[name] = outcome
                _progress(i + 1, len(work), name)
    else:
        for i, job in enumerate(work):
            name, outcome = one(job)
            results[name] = outcome
            _progress(i + 1, len(work), name)
    print(file=sys.stderr)
    count = {v: sum(o.verdict == v for o in results.values()) for v in
             ("rule", "fallback", "wrong", "error", "skip")}  # fmt: skip
    total = len(results) - count["skip"]
    title = f"{dtype_name}, {'second' if second else 'first'} derivatives"
    right = count["rule"] + count["fallback"]
    print(
        f"{title}: {total} ops; right {right} ({right / max(total, 1):.1%}): by our rules "
        f"{count['rule']} ({count['rule'] / max(total, 1):.1%}), by the fallback "
        f"{count['fallback']}; wrong {count['wrong']}, errors {count['error']}; "
        f"no reference {count['skip']}  [{time.time() - start:.0f} s]"
    )
    for name, outcome in sorted(results.items()):
        if outcome.verdict == "wrong" and name in STATED:
            outcome.detail = f"({STATED[name]}) {outcome.detail}"
        if outcome.verdict in ("wrong", "error") or verbose:
            print(f"  {outcome.verdict:8} {name:45} {' '.join(sorted(outcome.fallbacks))} "
                  f"{' '.join(outcome.detail.split())}")  # fmt: skip
    faults = [
        n for n, o in results.items() if o.verdict in ("wrong", "error") and n not in STATED
    ]
    return {"title": title, "total": total, **count, "faults": faults}


def _progress(done: int, total: int, name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{total} {name:60}", end="", file=sys.stderr)
    elif done % 50 == 0:
        print(f"{done}/{total}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", help="comma-separated op names; default all")
    parser.add_argument("--dtype", choices=["float64", "complex128", "float32", "bfloat16"])
    parser.add_argument("--second", action="store_true", help="second derivatives")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("-v", "--verbose", action="store_true", help="list every op")
    parser.add_argument("--json", help="write the counts to this file")
    args = parser.parse_args()
    wanted = args.ops.split(",") if args.ops else None
    if args.dtype or args.second or wanted:
        runs = [(args.dtype or "float64", args.second)]
    else:
        runs = [(d, s) for d in ("float64", "complex128") for s in (False, True)]
    tables = [table(d, s, wanted, args.samples, args.jobs, args.verbose) for d, s in runs]
    if args.json:
        Path(args.json).write_text(json.dumps(tables, indent=1))
    return 1 if any(t["faults"] for t in tables) else 0


if __name__ == "__main__":
    raise SystemExit(main())
