"""How many modules of PyTorch's own database get the reference's gradients here.

    python tools/modules.py [--modules nn.LSTM,nn.Linear] [-v]

Float64, train and eval mode; gradients of inputs and parameters, results and buffers. A module is
right if all its inputs in the database are.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tests.module_cases import check_module, modes, module_db, name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--modules", help="comma-separated names; default all")
    parser.add_argument("-v", "--verbose", action="store_true", help="list every module")
    args = parser.parse_args()
    wanted = args.modules.split(",") if args.modules else None
    torch.set_num_threads(1)
    count: Counter[str] = Counter()
    for info in module_db:
        if wanted and name(info) not in wanted:
            continue
        for training in modes(info):
            try:
                outcome = check_module(info, training)
                verdict, detail, through = outcome.verdict, outcome.detail, outcome.fallbacks
            except Exception as error:
                verdict, detail, through = "error", f"{type(error).__name__}: {error}", set()
            word = {"rule": "right", "fallback": "right"}.get(verdict, verdict)
            count[word] += 1
            count["fallback"] += verdict == "fallback"
            if args.verbose or verdict in ("wrong", "error"):
                mode = "train" if training else "eval"
                print(f"{word:6} {name(info):34} {mode:5}", *sorted(through), *detail.split())
    total = count["right"] + count["wrong"] + count["error"]
    share = count["right"] / max(total, 1)
    print(
        f"{total} modules and modes: right {count['right']} ({share:.1%}), "
        f"{count['fallback']} of them with an op that falls back; wrong {count['wrong']}, "
        f"error {count['error']}; no gradient in the reference {count['skip']}"
    )
    return 1 if count["wrong"] or count["error"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
