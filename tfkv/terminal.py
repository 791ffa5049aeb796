"""What the command line and the demo show on a terminal, or in a log where there is none."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tfkv.manifest import Manifest

if TYPE_CHECKING:
    from tfkv.agreement import Agreement, PromptAgreement
    from tfkv.cache_scores import Score, TextScore
    from tfkv.presets import Preset

_STAGES = {
    "load": "Loading",
    "import": "Reading the model",
    "warmup": "Warming up",
    "export": "Exporting",
    "verify": "Verifying",
    "caches": "Reading the text",
    "continuations": "Continuing it",
    "tasks": "Asking",
    "answers": "Answering",
    "sessions": "Sessions",
}

#: Characters of a prompt in a table, which fits a terminal of 80 then.
_PROMPT_WIDTH = 20


def output() -> Console:
    """Standard output, for results. Text is printed as it is: brackets are not markup."""
    return Console(markup=False, highlight=False)


def notes() -> Console:
    """Standard error, for progress and remarks."""
    return Console(stderr=True, markup=False, highlight=False)


def load_tensorflow(keras: bool = True) -> None:
    """Imports TensorFlow without the messages of its C++ start, unless they are asked for.

    It writes them to standard error before it reads ``TF_CPP_MIN_LOG_LEVEL``. The variable's
    value 0 keeps them, and so does an import that fails. Where there is no GPU, the search
    for one is muted too.

    Args:
        keras: Whether Keras may come along, as it does by itself: 50 MB and half a second
            that a server has no use for.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    if not keras and "keras" not in sys.modules:
        # TensorFlow takes an import that fails for a missing package.
        sys.modules["keras"] = None  # type: ignore[assignment]
        try:
            load_tensorflow()
        finally:
            del sys.modules["keras"]
        return
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0":
        importlib.import_module("tensorflow")
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        try:
            tensorflow = importlib.import_module("tensorflow")
            # In a notebook it would report each step of a save, too.
            tensorflow.get_logger().setLevel("WARNING")
            if not any(pathlib.Path("/dev").glob("nvidia*")):
                tensorflow.config.list_physical_devices("GPU")
        except BaseException:
            messages.seek(0)
            os.write(kept, messages.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


class Steps:
    """Progress bars, one a stage, as a context manager and a callback.

    On a terminal the bars move; elsewhere each stage is one line, printed when it is done.

    Args:
        console: Where to draw; `notes` by default.

    Call arguments:
        stage: Name of the stage; a known one is shown in words.
        done: Steps done.
        total: Steps in all.

    Example:
        >>> with Steps() as steps:
        ...     steps("warmup", 3, 12)
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or notes()
        self._tasks: dict[str, Any] = {}
        self._progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the bars as they are; later stages, of a running server, are not shown."""
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        words = _STAGES.get(stage, stage)
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(words, total=total or None)
        self._progress.update(self._tasks[stage], completed=done, total=total or None)
        if done >= total > 0 and not self.console.is_terminal:
            self.console.print(f"{words}: {done}/{total}")


def stream(pieces: Iterable[Any]) -> None:
    """Prints pieces as they arrive, then a line end; token ids with spaces between them."""
    try:
        for piece in pieces:
            sys.stdout.write(piece if isinstance(piece, str) else f"{piece} ")
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def speed(result: Any) -> str:
    """One line about a `tfkv.serving.Result`: tokens, time to first token, rate."""
    parts = [
        f"{result.prompt_tokens} prompt + {len(result.tokens)} new tokens",
        f"first token after {result.time_to_first_token * 1000:.0f} ms",
    ]
    if result.tokens_per_second:
        parts.append(f"{result.tokens_per_second:.1f} tokens/s")
    parts.append(f"finish: {result.finish.name.lower()}")
    return ", ".join(parts)


def load_table(report: Any) -> Table:
    """What `tfkv bench` shows of a `tfkv.serving.LoadReport`: latencies, rates above them."""
    title = (
        f"{len(report.turns)} turns in {report.seconds:.1f} s: "
        f"{report.tokens_per_second:.1f} tokens/s, "
        f"{len(report.turns) / report.seconds:.2f} turns/s"
    )
    latencies = report.latencies()
    table = Table("ms", title=title, title_justify="left", title_style="", box=None)
    for name in next(iter(latencies.values()), {}):
        table.add_column(name, justify="right")
    for name, values in latencies.items():
        table.add_row(name, *(f"{value:.1f}" for value in values.values()))
    return table


def cache_bytes(manifest: Manifest, position: int) -> tuple[int, int]:
    """Bytes of cache that a session uses at a position, and the most that it can take."""
    most = manifest.bytes_per_session
    return min(position * manifest.bytes_per_token, most), most


def held(manifest: Manifest, position: int) -> str:
    """One line about the cache of a session at a position."""
    used, reserved = cache_bytes(manifest, position)
    return (
        f"cache: {position} tokens hold {human_bytes(used)} ({manifest.bytes_per_token:,} bytes a "
        f"token); a session can take {human_bytes(reserved)}"
    )


def human_bytes(count: float) -> str:
    """A number of bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def presets_table(presets: Iterable[Preset]) -> Table:
    """What `tfkv presets` shows."""
    table = Table("name", box=None, padding=(0, 2, 1, 0))
    table.add_column("cache, and what for", overflow="fold")
    for name in ("capacity", "slots"):
        table.add_column(name, justify="right", no_wrap=True)
    for preset in presets:
        what = f"{preset.cache}\n{preset.use}"
        table.add_row(preset.name, what, f"{preset.capacity:,}", str(preset.slots))
    return table


def plan_table(plan: Mapping[str, Any]) -> Table:
    """What `tfkv plan` shows; keys as of `tfkv.export.MemoryPlan.to_dict`."""
    table = Table(
        title=f"{plan['cache']}, sessions of {plan['context']:,} tokens", title_style="bold"
    )
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("")
    rows = {
        "a token: keys": plan["key_bytes"],
        "a token: values": plan["value_bytes"],
        "a session: kept beside its pages": plan["beside_bytes"],
        f"a session: {plan['session_pages']} pages, history, exact tokens": plan["session_bytes"],
        "weights": plan["weight_bytes"],
        "budget": plan["memory"],
        f"{plan['sessions']:,} sessions: --pool": plan["pool_bytes"],
        "  resident": plan["peak_bytes"],
        f"{plan['sessions_with_swap']:,} sessions and a version swap: --pool": (
            plan["pool_bytes_with_swap"]
        ),
        "  resident while two versions are loaded": plan["swap_peak_bytes"],
    }
    for name, count in rows.items():
        table.add_row(name, f"{count:,}", human_bytes(count))
    return table


def scores_tables(scores: Sequence[Score]) -> list[Table]:
    """What `tfkv eval` shows: a table of text for each length, and one of the rest."""
    from tfkv.cache_scores import TextScore

    texts = [score for score in scores if isinstance(score, TextScore)]
    by_length = {score.length: [s for s in texts if s.length == score.length] for score in texts}
    tables = [_text_table(length, rows) for length, rows in by_length.items()]
    rest = _rest_table([score for score in scores if not isinstance(score, TextScore)])
    return tables + [rest] if rest.columns else tables


def _text_table(length: int, scores: Sequence[TextScore]) -> Table:
    full = f"{scores[0].full_perplexity:.3f}"
    title = f"{length:,} tokens, against the full float32 cache, whose perplexity is {full}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("cache", overflow="fold")
    for name in ("bytes a token", "KL, nats", "p99", "same top", "perplexity"):
        table.add_column(name, justify="right", no_wrap=True)
    for score in scores:
        table.add_row(
            score.cache.removeprefix("dense+"),
            f"{score.bytes_per_token:,.0f}",
            f"{score.kl:.2e}",
            f"{score.kl_p99:.1e}",
            f"{score.top1_percent:.2f} %",
            f"{score.perplexity:.3f}",
        )
    return table


def _rest_table(scores: Sequence[Score]) -> Table:
    """A row a cache, a column a measure; no columns where there is nothing."""
    from tfkv.cache_scores import ContinuationScore, TaskScore

    cells: dict[str, dict[str, str]] = {}
    heads: dict[str, str] = {}
    for score in scores:
        row = cells.setdefault(score.cache, {})
        if isinstance(score, TaskScore):
            heads[score.measure] = f"{score.measure}\n{score.scored} of {len(score.solved)}"
            row[score.measure] = f"{sum(score.agnostic)} / {sum(score.aware)}"
        elif isinstance(score, ContinuationScore):
            count = len(score.expected[0])
            heads[score.measure] = f"{score.measure}\nsame before one of {count} differs; in all"
            first = ", ".join(map(str, score.first_divergence))
            row[score.measure] = f"{first}; {score.agreement_percent:.0f} %"
    title = (
        "What follows; and tasks: answered of those that the full cache answers, the question "
        "unknown / known while the context was compressed"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    if not heads:
        return table
    table.add_column("cache", overflow="fold")
    for head in heads.values():
        table.add_column(head, justify="right")
    for cache, row in cells.items():
        table.add_row(cache.removeprefix("dense+"), *(row.get(measure, "") for measure in heads))
    return table


def agreement_table(found: Agreement) -> Table:
    """What `tfkv verify` shows: a row for each prompt, and one over all."""
    title = f"{found.candidate} against {found.reference}"
    table = Table(title=title, title_justify="left", title_style="bold", show_footer=True)
    overall = _agreement_row(found, found.same_top_percent)
    table.add_column("prompt", footer="all")
    names = ("equal", "differs at", "KL, nats", "same top", "cosine")
    for name, footer in zip(names, overall, strict=True):
        table.add_column(name, footer=footer, justify="right", no_wrap=True)
    for one in found.prompts:
        shown = " ".join(one.prompt.split())
        shown = shown if len(shown) <= _PROMPT_WIDTH else f"{shown[: _PROMPT_WIDTH - 1]}…"
        table.add_row(shown, *_agreement_row(one, 100.0 * one.same_top / one.places))
    return table


def _agreement_row(found: Agreement | PromptAgreement, same_top: float) -> tuple[str, ...]:
    place, similarity = found.first_divergence, found.similarity
    return (
        f"{found.agreement_percent:.1f} %",
        "nowhere" if place is None else f"{place}",
        f"{found.kl:.2e}",
        f"{same_top:.1f} %",
        "" if similarity is None else f"{similarity:.3f}",
    )


def stats_table(stats: Mapping[str, int], meanings: Mapping[str, str]) -> Table:
    """Counters of an artifact, one a row, with what each counts."""
    table = Table(title="Statistics", title_justify="left", title_style="bold", box=None)
    table.add_column("counter")
    table.add_column("value", justify="right")
    table.add_column("meaning", overflow="fold")
    for name, value in stats.items():
        table.add_row(name, f"{value:,}" if name != "epoch" else str(value), meanings.get(name, ""))
    return table
