"""``python -m benchmarks.peers [NAME ...]``: makes the environments of peers, all or those named,
and says which are there and why others are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.peers.environments import Absent, python_of
from benchmarks.peers.table import ENVIRONMENTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes them; the exit code is 0 whichever are absent."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    names = parser.parse_args(arguments).names or list(ENVIRONMENTS)
    if unknown := set(names) - set(ENVIRONMENTS):
        parser.error(f"no such environment: {', '.join(unknown)}")
    for name in names:
        try:
            print(f"{name}: {python_of(name, print)}", flush=True)
        except Absent as error:
            print(f"{name}: absent, {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
