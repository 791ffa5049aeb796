"""``python -m benchmarks.figures [ISSUE]``: measures figures and holds them against their bars.

One line a figure: name, value, unit, bar, ``holds`` or ``FALLS SHORT``. A figure that nobody
measured, or whose measurement failed, falls short. The exit code is 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from benchmarks.bars import SHORT, Bar, Measurement, as_json, read_bars
from benchmarks.registry import MODULES, Measure, Say, measures_of
from tfkv import terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurements; returns the exit code."""
    options = _parser().parse_args(arguments)
    everything = [bar for bar in read_bars() if options.issue in (None, bar.issue)]
    bars = [bar for bar in everything if not options.only or _asked(bar.name, options.only)]
    if not bars:
        print("No such figures; see benchmarks/figures.tsv.", file=sys.stderr)
        return 2
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    console = Console(stderr=True, markup=False, highlight=False)
    wanted = {bar.name for bar in bars}
    issues = dict.fromkeys(bar.issue for bar in bars)
    terminal.load_tensorflow()
    measures = [measure for issue in issues for measure in measures_of(issue)]
    found = run_measures([m for m in measures if wanted & set(m.names)], console)
    # What was measured along with it is shown as well.
    bars = [bar for bar in everything if bar.name in wanted | set(found)]
    for line in table(bars, found):
        print(line)
    if options.json:
        write_json(options.json, bars, found)
    return int(any(bar.verdict(found.get(bar.name)) == SHORT for bar in bars))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("issue", nargs="?", help="issue whose figures are measured; all by default")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this figure; again")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write them here")
    parser.epilog = f"Issues with measurements: {', '.join(MODULES)}."
    return parser


def _asked(name: str, only: Sequence[str]) -> bool:
    return any(name == asked or name.partition(".")[2] == asked for asked in only)


def run_measures(measures: Iterable[Measure], console: Console) -> dict[str, Measurement]:
    """Name to measurement of everything that could be measured."""
    found: dict[str, Measurement] = {}
    for measure in measures:
        start = time.perf_counter()
        title = ", ".join(measure.names)
        with console.status(title) as status:
            try:
                found |= _run(measure, _teller(console, status.update, title))
            except Exception:
                console.print(f"{title} could not be measured:")
                console.print(traceback.format_exc())
        console.print(f"{title}: {time.perf_counter() - start:.0f} s", style="dim")
    return found


def _teller(console: Console, update: Say, title: str) -> Say:
    """Says what is being done: on a terminal in the status line, elsewhere as a line."""
    if console.is_terminal:
        return lambda text: update(f"{title}: {text}")
    return lambda text: console.print(f"  {text}")


def _run(measure: Measure, say: Say) -> dict[str, Measurement]:
    values = measure.run(say)
    return {
        name: value if isinstance(value, Measurement) else Measurement(float(value))
        for name, value in values.items()
    }


def table(bars: Sequence[Bar], found: Mapping[str, Measurement]) -> list[str]:
    """One line a figure, in columns."""
    rows = [_row(bar, found.get(bar.name)) for bar in bars]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return lines


def _row(bar: Bar, measurement: Measurement | None) -> tuple[str, str, str, str, str, str]:
    value, limit, note = "missing", bar.text, ""
    if measurement is not None:
        value, note = f"{measurement.value:.4g}", measurement.note
        if float(measurement.value).is_integer() and abs(measurement.value) < 1e9:
            value = str(int(measurement.value))
        reached = bar.limit(measurement.names)
        if measurement.names and reached is not None:
            limit = f"{bar.text} = {reached:.4g}"
    return bar.name, value, bar.unit, limit, bar.verdict(measurement), note and f"({note})"


def write_json(path: pathlib.Path, bars: Sequence[Bar], found: Mapping[str, Measurement]) -> None:
    """Writes the figures as data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [as_json(bar, found.get(bar.name)) for bar in bars]
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
