"""Pictures of sessions: what happened when, and what each call had to compute."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tfkv.errors import ConfigError
from tfkv.viz.style import COLOURS, new_figure

_HATCHES = ("", "//", "..", "xx", "--", "\\\\", "++")


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        row: Whose line it is drawn on: a session, or a server.
        kind: What it was; spans of a kind have a colour.
        start: When it began, seconds.
        end: When it ended.
    """

    row: str
    kind: str
    start: float
    end: float


class Timeline:
    """Notes when things begin and end.

    Example:
        >>> timeline = Timeline()
        >>> with timeline.span("session A", "prompt"):
        ...     pass
        >>> [span.kind for span in timeline.spans]
        ['prompt']
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._begin = time.perf_counter()

    @contextlib.contextmanager
    def span(self, row: str, kind: str) -> Iterator[None]:
        """Notes how long the block takes; what raises is noted too."""
        start = time.perf_counter() - self._begin
        try:
            yield
        finally:
            self.spans.append(Span(row, kind, start, time.perf_counter() - self._begin))


def session_timeline(spans: Sequence[Span], title: str = "Who waited for what") -> Figure:
    """Spans as bars, a line for each row, seconds across.

    Args:
        spans: As of `Timeline.spans`.
        title: What is shown.

    Raises:
        ConfigError: There is no span, or one ends before it begins.
    """
    if not spans or any(span.end < span.start for span in spans):
        raise ConfigError(
            "`spans` must hold spans, none of which ends before it begins. Received: "
            f"{list(spans)!r}."
        )
    rows = list(dict.fromkeys(span.row for span in spans))
    kinds = list(dict.fromkeys(span.kind for span in spans))
    figure, axes = new_figure(height=1.4 + 0.5 * len(rows))
    longest = max(span.end for span in spans)
    for span in spans:
        # What is too short to be seen is drawn as a line.
        length = max(span.end - span.start, longest / 400)
        axes.barh(
            rows.index(span.row), length, left=span.start, height=0.6, edgecolor="white",
            linewidth=0.5, **_look(kinds.index(span.kind)),
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(xlabel="seconds", title=title, xlim=(0, longest * 1.02))
    axes.grid(axis="x", alpha=0.3)
    _legend(axes, kinds)
    return figure


class CallTokens(NamedTuple):
    """Tokens that one call was about.

    Attributes:
        call: What it is called.
        reused: Tokens whose keys and values were found.
        computed: Tokens whose keys and values were computed.
        sampled: Tokens that it sampled.
    """

    call: str
    reused: int
    computed: int
    sampled: int


def tokens_by_call(
    calls: Sequence[CallTokens], title: str = "What each call found, and what it computed"
) -> Figure:
    """Each call as a bar of its tokens: those found in the cache, computed, and sampled.

    Args:
        calls: In their order.
        title: What is shown.

    Raises:
        ConfigError: There is no call, or a number is negative.
    """
    if not calls or any(min(call[1:]) < 0 for call in calls):
        raise ConfigError(
            f"`calls` must hold calls, and no negative number. Received: {list(calls)!r}."
        )
    figure, axes = new_figure(height=1.5 + 0.42 * len(calls))
    kinds = ("found in the cache", "computed", "sampled")
    for line, call in enumerate(calls):
        left = 0
        for kind, count in enumerate(call[1:]):
            if count:
                axes.barh(line, count, left=left, height=0.6, edgecolor="white", **_look(kind))
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.9}
                axes.text(
                    left + count / 2, line, f"{count}", ha="center", va="center", fontsize=8,
                    bbox=box,
                )  # fmt: skip
            left += count
    axes.set_yticks(range(len(calls)), [call.call for call in calls], parse_math=False)
    axes.invert_yaxis()
    axes.set(xlabel="tokens", title=title)
    axes.margins(x=0.02)
    _legend(axes, kinds)
    return figure


def _look(index: int) -> dict[str, Any]:
    """Colour and pattern: kinds are told apart in grey, too."""
    return {
        "facecolor": COLOURS[index % len(COLOURS)],
        # Another pattern each time that the colours begin anew.
        "hatch": _HATCHES[(index + index // len(COLOURS)) % len(_HATCHES)],
    }


def _legend(axes: Any, kinds: Sequence[str]) -> None:
    patches = [Patch(label=kind, edgecolor="white", **_look(at)) for at, kind in enumerate(kinds)]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
