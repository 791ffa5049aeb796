"""``python -m benchmarks``: decode and prefill rates beside those of peers, on one machine.

Writes ``speed.json``, ``speed.md`` and ``speed.png`` to ``benchmarks/results/`` and prints the
table. Runs of all systems take turns, so that noise falls on all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from tfkv import terminal

RESULTS = pathlib.Path(__file__).with_name("results")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    console = Console(stderr=True, markup=False, highlight=False)
    terminal.load_tensorflow()
    from benchmarks import report, speed

    cases = [(context, rows) for context in options.contexts for rows in options.batches]
    with contextlib.ExitStack() as stack:
        systems = speed.systems(stack, options.systems, console.print)
        runs = speed.compare(systems, cases, options.repeats, console.print)
    result = {"machine": speed.machine(), "runs": [run.to_dict() for run in runs]}
    print(report.write(result, options.out))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = ("grpc", "in-process", "keras-nlp", "no-cache")
    parser.add_argument("--systems", nargs="+", choices=known, default=list(known))
    parser.add_argument("--contexts", nargs="+", type=int, default=[100, 1000, 4000])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
