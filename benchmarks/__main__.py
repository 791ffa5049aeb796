"""``python -m benchmarks``: decode and prefill rates beside those of peers, on one machine.

Prepares the peers, then runs one system at a time, each in a process of its own, in rounds, so
that noise falls on all of them. Writes ``speed.json``, ``speed.md`` and plots to
``benchmarks/results/`` and prints the tables.
"""

from __future__ import annotations

import argparse
import pathlib
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks import report, speed
from benchmarks.peers.environments import probe
from benchmarks.peers.run import cores
from benchmarks.peers.table import SYSTEMS

RESULTS = pathlib.Path(__file__).with_name("results")
#: Context and rows of each case.
SHAPES = ((100, 1), (1000, 1), (4000, 1), (512, 1), (512, 2), (512, 4), (512, 8))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True, markup=False, highlight=False)
    threads = cores(options.threads)
    # Whoever ends this process ends what it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found = speed.compare(
        options.systems,
        options.shapes,
        options.rounds,
        threads,
        console.print,
        lambda so_far: report.write(so_far.to_dict(), options.out),
    )
    if options.systems == list(SYSTEMS):
        found.absent |= probe(console.print)
    print(report.write(found.to_dict(), options.out))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        default=list(SHAPES),
        metavar="CONTEXTxROWS",
        help="tokens of a prompt, and rows of a batch or sessions of a server",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    return parser


def _shape(text: str) -> tuple[int, int]:
    context, _, rows = text.partition("x")
    return int(context), int(rows or 1)


if __name__ == "__main__":
    sys.exit(main())
