"""A comparison of speeds as JSON, as Markdown tables and as plots."""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_RATES = (
    *("system", "context", "rows", "decode tokens/s", "of the limit"),
    *("prefill tokens/s", "of the limit", "same tokens"),
)
_PROCESSES = ("system", "load s", "warm-up s", "peak MB", "versions and settings")
#: The context at which rows are varied; a plot over context is of one row.
_BATCH_CONTEXT = 512

Run = Mapping[str, Any]


def write(result: Mapping[str, Any], directory: pathlib.Path) -> str:
    """Writes all three; returns the Markdown.

    Args:
        result: Of `benchmarks.speed.Comparison.to_dict`.
        directory: Where to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = markdown(result)
    (directory / "speed.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (directory / "speed.md").write_text(text + "\n", encoding="utf-8")
    _plots(result["runs"], directory)
    return text


def markdown(result: Mapping[str, Any]) -> str:
    """The tables: medians, with the least and the most in brackets."""
    machine = ", ".join(f"{name} {spread(values)}" for name, values in result["machine"].items())
    load = ", ".join(f"{value:.1f}" for value in result["load_before_rounds"])
    parts = [
        f"{result['threads']} threads. Measured limits: {machine}. Load before the rounds: {load}.",
        table(_RATES, [_rates(run) for run in result["runs"]]),
        table(_PROCESSES, [_process(name, result) for name in result["processes"]]),
    ]
    if result["absent"]:
        reasons = [(name, reason.replace("|", "/")) for name, reason in result["absent"].items()]
        parts.append(table(("absent", "why"), reasons))
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    if not values:
        return "not run"
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def _rates(run: Run) -> tuple[str, ...]:
    where = (run["system"], str(run["context"]), str(run["rows"]))
    if run["reason"]:
        return *where, f"not run: {run['reason']}", *[""] * 4
    same = f"{run['agreed']} of {run['compared']}" if run["compared"] else ""
    return (
        *where,
        *(spread(run["decode"]), _percent(run["decode_share"])),
        *(spread(run["prefill"]), _percent(run["prefill_share"])),
        same,
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _process(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    process = result["processes"][name]
    runs = [run["warm_up_seconds"] for run in result["runs"] if run["system"] == name]
    # Each round warms up anew: all of its cases together.
    rounds = [sum(values) for values in zip(*[r for r in runs if r], strict=False)]
    about = ", ".join(f"{key} {value}" for key, value in process["about"].items())
    return (
        name,
        spread(process["load_seconds"]),
        spread(rounds),
        f"{max(process['peak_mb']):.0f}",
        about.replace("|", "/")[:160],
    )


def _plots(runs: Sequence[Run], directory: pathlib.Path) -> None:
    """Rates over context, over batch and over sessions, and shares of the limits."""
    alone = [run for run in runs if run["rows"] == 1]
    wide = [run for run in runs if run["context"] == _BATCH_CONTEXT]
    batches = [run for run in wide if not run["server"]]
    sessions = [run for run in wide if run["server"]]
    for phase in ("decode", "prefill"):
        rate, share = f"{phase}_median", f"{phase}_share"
        tokens = f"{phase} (tokens/s, all rows)"
        _lines(alone, "context", rate, tokens, directory / f"{phase}-context.png")
        _lines(batches, "rows", rate, tokens, directory / f"{phase}-batch.png")
        _lines(sessions, "rows", rate, tokens, directory / f"{phase}-sessions.png")
        limit = f"{phase}, share of the machine's limit"
        _lines(alone, "context", share, limit, directory / f"{phase}-share.png")


def _lines(runs: Sequence[Run], axis: str, value: str, label: str, path: pathlib.Path) -> None:
    """One line a system; bars from the least to the most where the value is a rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
    by_system: dict[str, list[Run]] = {}
    for run in runs:
        if run[value] is not None:
            by_system.setdefault(run["system"], []).append(run)
    for number, (system, mine) in enumerate(by_system.items()):
        mine = sorted(mine, key=_key(axis))
        places, heights = ([run[key] for run in mine] for key in (axis, value))
        bars = None
        if value.endswith("_median"):
            rates = [run[value.removesuffix("_median")] for run in mine]
            bars = [
                [height - min(rate) for height, rate in zip(heights, rates, strict=True)],
                [max(rate) - height for height, rate in zip(heights, rates, strict=True)],
            ]
        style = ("-", "--", ":", "-.")[number // 10 % 4]
        panel.errorbar(places, heights, bars, marker="o", capsize=3, label=system, linestyle=style)
    names = {"context": "context (tokens)", "rows": f"rows of {_BATCH_CONTEXT} tokens"}
    scale = "log" if value.endswith("_median") else "linear"
    panel.set(xlabel=names[axis], ylabel=label, xscale="log", yscale=scale)
    if by_system:
        panel.legend(fontsize="small", bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _key(axis: str) -> Callable[[Run], Any]:
    return lambda run: run[axis]
