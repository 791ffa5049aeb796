"""Pictures of what caches cost and what they lose, and of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from tfkv.errors import ConfigError
from tfkv.viz.style import COLOURS, as_array, new_figure

#: Bytes as people write them.
_PLAIN = StrMethodFormatter("{x:,.0f}")
#: Points from one name to the next.
_NAME_HEIGHT = 12.0
_STYLES = ("-", "--", "-.", ":")


class QualityPoint(NamedTuple):
    """What one cache costs, and how far it is from the full one.

    Attributes:
        cache: What it is called.
        bytes_per_token: Of a session, over the tokens that it read.
        kl: KL divergence of the next token's distribution from the full cache's, nats.
        interval: Of the KL.
    """

    cache: str
    bytes_per_token: float
    kl: float
    interval: tuple[float, float] | None = None


def quality_curve(
    points: Sequence[QualityPoint], title: str = "Filled: no cache of as few bytes is nearer"
) -> Figure:
    """Distance from the full cache against bytes a token, both on logarithmic axes.

    A cache above and to the right of another one is the worse of the two in both.

    Args:
        points: Caches; those that lose nothing have no place on a logarithmic axis, and are
            named below it.
        title: What is shown.

    Raises:
        ConfigError: No cache loses anything.
    """
    lossy = [point for point in points if point.kl > 0]
    if not lossy:
        raise ConfigError("`points` must hold a cache that loses something. Received: none.")
    figure, axes = new_figure(height=4.8)
    sizes, best = [point.bytes_per_token for point in lossy], float("inf")
    for point in sorted(lossy, key=lambda point: (point.bytes_per_token, point.kl)):
        front, best = point.kl < best, min(best, point.kl)
        low, high = point.interval or (point.kl, point.kl)
        bars = [[max(point.kl - low, 0.0)], [max(high - point.kl, 0.0)]]
        place = (point.bytes_per_token, point.kl)
        style = {"fmt": "o", "color": COLOURS[0]} if front else {"fmt": "x", "color": COLOURS[1]}
        axes.errorbar(*place, yerr=bars, **style)
    axes.margins(0.1)
    exact = [point for point in points if point.kl <= 0]
    label = "bytes a token"
    if exact:
        names = ", ".join(f"{point.cache} at {point.bytes_per_token:,.0f}" for point in exact)
        label = f"{label}; losing nothing: {names}"
    axes.set(
        xlabel=label, ylabel="KL from the full cache (nats)", xscale="log", yscale="log",
        title=title,
    )  # fmt: skip
    axes.xaxis.set_major_formatter(_PLAIN)
    if max(sizes) < 10 * min(sizes):
        axes.xaxis.set_minor_formatter(_PLAIN)
    axes.grid(alpha=0.3)
    _name(axes, lossy)
    return figure


def _name(axes: Any, points: Sequence[QualityPoint]) -> None:
    """Writes names beside points, towards the middle, and none over another one."""
    sizes = [point.bytes_per_token for point in points]
    middle = (min(sizes) * max(sizes)) ** 0.5
    taken: list[tuple[bool, float]] = []
    for point in sorted(points, key=lambda point: point.kl):
        place = (point.bytes_per_token, point.kl)
        right = point.bytes_per_token > middle
        height = axes.transData.transform(place)[1] * 72 / axes.figure.dpi
        up = 4.0
        while any(side == right and abs(height + up - at) < _NAME_HEIGHT for side, at in taken):
            up += 1.0
        taken.append((right, height + up))
        axes.annotate(
            point.cache,
            place,
            xytext=(-8 if right else 8, up),
            textcoords="offset points",
            fontsize=8,
            ha="right" if right else "left",
        )


def memory_curve(
    tokens: Sequence[int],
    sizes: Mapping[str, Sequence[float]],
    title: str = "What a session takes as it grows",
) -> Figure:
    """Bytes of a session against the tokens that it has read, a line for each cache.

    Args:
        tokens: Lengths, ascending.
        sizes: For each cache its bytes at these lengths; as of `tfkv.cache_bytes.session_bytes`.
        title: What is shown.

    Raises:
        ConfigError: A cache has no size for each length.
    """
    if not sizes or not len(tokens):
        raise ConfigError("`sizes` must hold a cache, and `tokens` a length. Received: none.")
    figure, axes = new_figure(height=4.4)
    for index, (cache, values) in enumerate(sizes.items()):
        megabytes = as_array(f"sizes[{cache!r}]", values, "S") / 1e6
        if len(megabytes) != len(tokens):
            raise ConfigError(
                f"`sizes[{cache!r}]` must hold a size for each of {len(tokens)} lengths. "
                f"Received: {len(megabytes)}."
            )
        colour = COLOURS[index % len(COLOURS)]
        style = _STYLES[index // len(COLOURS) % len(_STYLES)]
        axes.plot(tokens, megabytes, color=colour, linestyle=style, linewidth=2, label=cache)
    axes.set(xlabel="tokens read", ylabel="cache of a session (MB)", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=2, frameon=False, fontsize=9)
    return figure


def learning_curve(
    losses: Sequence[float],
    held_out: tuple[float, float] | None = None,
    title: str = "Loss while training",
) -> Figure:
    """The loss of each step, smoothed as well, and what held-out text loses before and after.

    Args:
        losses: Of each step, nats a token.
        held_out: Before the first step and after the last one.
        title: What is shown.

    Raises:
        ConfigError: There is no loss.
    """
    values = as_array("losses", losses, "S")
    steps = np.arange(1, len(values) + 1)
    width = max(1, len(values) // 20)
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    figure, axes = new_figure(height=3.8)
    axes.plot(steps, values, color=COLOURS[5], linewidth=1, label="a step")
    axes.plot(steps[width - 1 :], smooth, color=COLOURS[0], linewidth=2, label=f"mean of {width}")
    if held_out is not None:
        places = (0, len(values))
        axes.plot(places, held_out, "D", color=COLOURS[1], label="held out, before and after")
        for place, value in zip(places, held_out, strict=True):
            axes.annotate(
                f"{value:.2f}", (place, value), xytext=(0, 7), textcoords="offset points",
                ha="center",
            )  # fmt: skip
    axes.margins(x=0.04, y=0.15)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
