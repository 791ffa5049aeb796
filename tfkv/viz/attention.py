"""Pictures of attention weights: one head, all heads, sinks, entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tfkv.errors import ConfigError
from tfkv.viz.style import (
    COLOUR_MAP,
    COLOURS,
    as_array,
    attention_norm,
    check_tokens,
    label_tokens,
    layer_ticks,
    new_figure,
)


def attention_map(
    weights: Any, tokens: Sequence[str] | None = None, title: str = "Who attends to whom"
) -> Figure:
    """One head: tokens that attend go down, tokens that are attended to go across.

    Args:
        weights: ``[T, S]``; row t sums to 1 over what it sees. T may be less than S: then the
            rows are the last T tokens.
        tokens: Texts of the S tokens, written along the axes where there is room.
        title: What is shown.

    Raises:
        ConfigError: Shapes do not fit.
    """
    array = as_array("weights", weights, "TS")
    asking, seen = array.shape
    check_tokens(tokens, seen)
    if asking > seen:
        raise ConfigError(
            f"`weights` must have at least as many columns as rows. Received: shape={array.shape}."
        )
    figure, axes = new_figure(height=2.2 + 6.0 * asking / seen)
    image = axes.imshow(array, cmap=COLOUR_MAP, norm=attention_norm(), interpolation="nearest")
    axes.set(xlabel="token attended to", ylabel="token that attends", title=title)
    if tokens is not None:
        label_tokens(axes.xaxis, tokens, rotation=90)
        label_tokens(axes.yaxis, tokens[seen - asking :])
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    return figure


def attention_grid(
    weights: Any,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    title: str = "A layer a row, a head a column",
) -> Figure:
    """Many heads side by side, each as in `attention_map`, in one scale of colours.

    Args:
        weights: ``[L, N, T, S]``.
        layers: Layers to show, some six spread evenly where left out.
        heads: Query heads to show, all of them where left out.
        title: What is shown.

    Raises:
        ConfigError: Shapes do not fit, or there is no such layer or head.
    """
    array = as_array("weights", weights, "LNTS")
    count = array.shape[0]
    spread = sorted({round(float(at)) for at in np.linspace(0, count - 1, min(6, count))})
    rows = _chosen("layers", layers, count, spread)
    columns = _chosen("heads", heads, array.shape[1], range(array.shape[1]))
    height = 0.8 + 8.4 * len(rows) / max(len(columns), 4)
    figure, grid = new_figure(height, len(rows), len(columns))
    grid = np.reshape(grid, (len(rows), len(columns)))
    for (row, column), axes in np.ndenumerate(grid):
        layer, head = rows[row], columns[column]
        image = axes.imshow(array[layer, head], cmap=COLOUR_MAP, norm=attention_norm())
        axes.set(xticks=[], yticks=[])
        if row == 0:
            axes.set_title(f"head {head}", fontsize=9)
        if column == 0:
            axes.set_ylabel(f"layer {layer}", fontsize=9)
    figure.colorbar(image, ax=grid, label="weight", shrink=0.6, aspect=30)
    figure.suptitle(title)
    return figure


def sink_share(weights: Any, sinks: int = 1) -> np.ndarray:
    """How much of its attention each head pays to the first tokens, mean over queries.

    Queries that see nothing else are left out: they have no choice.

    Args:
        weights: ``[L, N, T, S]`` of the last T of S tokens.
        sinks: How many first tokens.

    Returns:
        float ``[L, N]``, from 0 to 1.

    Raises:
        ConfigError: Shapes do not fit, or no query sees more than the sinks.
    """
    array = as_array("weights", weights, "LNTS")
    first = array.shape[3] - array.shape[2]
    asking = array[:, :, max(sinks - first, 0) :]
    if sinks < 1 or not asking.shape[2]:
        raise ConfigError(
            f"`sinks` must be from 1 to {array.shape[3] - 1}, fewer than there are tokens. "
            f"Received: sinks={sinks}."
        )
    return asking[..., :sinks].sum(axis=-1).mean(axis=-1)


def sinks_by_layer(weights: Any, sinks: int = 1) -> Figure:
    """`sink_share` of every head, and the mean of each layer.

    Args:
        weights: ``[L, N, T, S]``.
        sinks: How many first tokens.

    Raises:
        ConfigError: As of `sink_share`.
    """
    shares = 100.0 * sink_share(weights, sinks)
    what = "the first token" if sinks == 1 else f"the first {sinks} tokens"
    figure, axes = _by_layer(shares, f"attention paid to {what} (%)")
    axes.set(ylim=(-3, 103), title=f"Share of attention that heads pay to {what}")
    return figure


def attention_entropy(weights: Any) -> np.ndarray:
    """How widely each head spreads its attention, mean over queries.

    Args:
        weights: ``[L, N, T, S]``.

    Returns:
        float ``[L, N]``, bits: 0 = one token, 3 = as if eight tokens got the same.

    Raises:
        ConfigError: Shapes do not fit.
    """
    array = as_array("weights", weights, "LNTS")
    logs = np.log2(array, where=array > 0, out=np.zeros_like(array))
    return -(array * logs).sum(axis=-1).mean(axis=-1)


def entropy_by_layer(weights: Any) -> Figure:
    """`attention_entropy` of every head, and the mean of each layer, below what a head that
    spreads its attention evenly would have.

    Args:
        weights: ``[L, N, T, S]`` of the last T of S tokens.

    Raises:
        ConfigError: Shapes do not fit.
    """
    entropy = attention_entropy(weights)
    asking, seen = np.shape(weights)[2:]
    even = np.log2(np.arange(seen - asking, seen) + 1.0).mean()
    figure, axes = _by_layer(entropy, "entropy of attention (bits)")
    axes.axhline(even, color=COLOURS[6], linestyle=":", label="attends to all alike")
    axes.set(ylim=(0, None), title="How widely heads spread their attention")
    _legend(axes)
    return figure


def _by_layer(values: np.ndarray, label: str) -> tuple[Figure, Any]:
    """Points of heads and a line of means for ``values [L, N]``."""
    layers, heads = values.shape
    figure, axes = new_figure(height=3.6)
    places = np.repeat(np.arange(layers), heads)
    axes.scatter(places, values.ravel(), s=14, color=COLOURS[5], label="a head")
    axes.plot(values.mean(axis=1), color=COLOURS[0], linewidth=2, label="mean of the layer")
    axes.set(xlabel="layer", ylabel=label)
    layer_ticks(axes.xaxis, layers)
    axes.grid(alpha=0.3)
    _legend(axes)
    return figure, axes


def _legend(axes: Any) -> None:
    # Beside the points, of which there may be some anywhere.
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _chosen(name: str, asked: Sequence[int] | None, count: int, usual: Sequence[int]) -> list[int]:
    chosen = list(usual if asked is None else asked)
    if not chosen or any(not 0 <= one < count for one in chosen):
        raise ConfigError(f"`{name}` must be from 0 to {count - 1}. Received: {name}={asked!r}.")
    return chosen
