"""A comparison of speeds as JSON, as a Markdown table and as a picture."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = ("system", "context", "batch", "decode tokens/s", "prefill tokens/s")


def write(result: Mapping[str, Any], directory: pathlib.Path) -> str:
    """Writes all three; returns the Markdown.

    Args:
        result: ``machine``, name to number, and ``runs``, see `benchmarks.speed.Run`.
        directory: Where to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = markdown(result)
    (directory / "speed.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (directory / "speed.md").write_text(text + "\n", encoding="utf-8")
    _plot(result["runs"], directory / "speed.png")
    return text


def markdown(result: Mapping[str, Any]) -> str:
    """The table: medians, with the least and the most in brackets."""
    rows = []
    for run in result["runs"]:
        rates = (
            _rate(run["decode"], run["decode_median"]),
            _rate(run["prefill"], run["prefill_median"]),
        )
        rows.append((run["system"], str(run["context"]), str(run["rows"]), *rates))
    machine = ", ".join(f"{name} {value:.1f}" for name, value in result["machine"].items())
    return f"Machine: {machine}.\n\n{table(_HEAD, rows)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rate(values: Sequence[float], median: float | None) -> str:
    if median is None:
        return "not run"
    return f"{median:.1f} ({min(values):.1f}-{max(values):.1f})"


def _plot(runs: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Decode rate over context, one panel a batch size, one line a system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted({run["rows"] for run in runs})
    figure, panels = pyplot.subplots(
        1, len(batches), figsize=(5 * len(batches), 4), squeeze=False, layout="constrained"
    )
    for panel, rows in zip(panels[0], batches, strict=True):
        for system in dict.fromkeys(run["system"] for run in runs):
            mine = [r for r in runs if (r["system"], r["rows"]) == (system, rows) and r["decode"]]
            contexts, medians = ([run[key] for run in mine] for key in ("context", "decode_median"))
            low = [run["decode_median"] - min(run["decode"]) for run in mine]
            high = [max(run["decode"]) - run["decode_median"] for run in mine]
            panel.errorbar(contexts, medians, [low, high], marker="o", capsize=3, label=system)
        panel.set(
            title=f"batch {rows}",
            xlabel="context (tokens)",
            ylabel="decode (tokens/s, all rows)",
            xscale="log",
            yscale="log",
        )
        panel.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
