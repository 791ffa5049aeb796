"""What pages cost: ``python -m benchmarks.pages``, the table behind decisions 0003 and 0012.

A step of SmolLM2 on pages of several sizes: alone, in a batch of unlike lengths, and in a
batch whose sessions share their prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from benchmarks import texts
from benchmarks.artifacts import prepare
from benchmarks.engine import Artifact
from benchmarks.report import table

_CHUNK = 16
_ROWS = 8
_OWN = 20


def main() -> None:
    """Measures each page size and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-sizes", default="16,32,64,128", help="comma-separated")
    parser.add_argument("--shared", type=int, default=1024, help="tokens of the shared prompt")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.page_sizes.split(",")]
    found = [_measure(size, arguments.shared) for size in sizes]
    print(table(list(found[0]), [list(row.values()) for row in found]))


def _measure(page_size: int, shared: int) -> dict[str, str]:
    text = texts.real_text().tolist()
    found = {"page size": str(page_size)}
    lengths = range(100, 4001, 3900 // (_ROWS - 1))
    # No text begins as another unless it is meant to.
    mixed = [text[97 * row : 97 * row + length] for row, length in enumerate(lengths)]
    tails = [text[30_000 + 97 * row :][:_OWN] for row in range(_ROWS)]
    batches = {
        "100 alone": [text[20_000:20_100]],
        "4000 alone": [text[21_000:25_000]],
        "8 of 100-4000": mixed,
        f"8 of {shared}, shared": [[*text[40_000 : 40_000 + shared], *tail] for tail in tails],
        f"8 of {shared}, apart": [
            text[50_000 + 97 * row :][: shared + _OWN] for row in range(_ROWS)
        ],
    }
    with Artifact(prepare(f"pages-{page_size}")) as artifact:
        for label, batch in batches.items():
            found[label] = f"{1e3 * _step_seconds(artifact, label, batch):.1f}"
    return found


def _step_seconds(artifact: Artifact, label: str, batch: Sequence[Sequence[int]]) -> float:
    """Median seconds of a decode step of sessions with these texts."""
    names = [f"{label} {row}" for row in range(len(batch))]
    reached = [artifact.prefill(name, given) for name, given in zip(names, batch, strict=True)]
    seconds = []
    for turn in range(9):
        rows = [
            {"session_id": name, "position": at, "max_new_tokens": _CHUNK}
            for name, at in zip(names, reached, strict=True)
        ]
        start = time.perf_counter()
        reached = [int(answer["position"]) for answer in artifact.rows(rows)]
        if turn:
            seconds.append((time.perf_counter() - start) / _CHUNK)
    artifact.close(names)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
