"""What all pictures share: figures, colours that everyone can tell apart, labels of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure

from tfkv.errors import ConfigError

#: Of lines and points: Okabe and Ito, https://jfly.uni-koeln.de/color/.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Of numbers: dark to bright, in colour and in grey alike.
COLOUR_MAP = "cividis"
#: Inches across a notebook's page.
WIDTH = 9.0

#: Most tokens that are written along an axis.
_MOST_LABELS = 64


def new_figure(
    height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """A figure as wide as a page, and its axes.

    It belongs to nobody else: what pyplot keeps would be shown twice, and never be freed.
    """
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=rows == columns == 1)


def attention_norm() -> Normalize:
    """Colours of weights from 0 to 1, with more of them for small ones: most are."""
    return PowerNorm(0.5, vmin=0.0, vmax=1.0)


def label_tokens(axis: Any, tokens: Sequence[str], rotation: float = 0.0) -> None:
    """Writes tokens along an axis where there is room for all of them."""
    if len(tokens) <= _MOST_LABELS:
        size = 8 if len(tokens) <= _MOST_LABELS // 2 else 7 if len(tokens) <= 48 else 6
        # A dollar sign is a token, not mathematics.
        axis.set_ticks(range(len(tokens)), [shown(token) for token in tokens], parse_math=False)
        axis.set_tick_params(labelsize=size, labelrotation=rotation)


def shown(token: str) -> str:
    """A token in one line, with its blanks to be seen."""
    return token.replace("\n", "↵").replace("\t", "→").replace(" ", "·")


def layer_ticks(axis: Any, layers: int) -> None:
    """Numbers of layers, as many as there is room for."""
    step = max(1, -(-layers // 10))
    axis.set_ticks(range(0, layers, step))


def as_array(name: str, value: Any, axes: str) -> np.ndarray:
    """A float array with the axes that are asked for.

    Args:
        name: Of the argument, for the error.
        value: What was given.
        axes: Letters of its axes, such as ``"LNTS"``.

    Raises:
        ConfigError: It has other axes, an empty one, or numbers that are none.
    """
    array = np.asarray(value, np.float64)
    if array.ndim != len(axes) or not array.size:
        raise ConfigError(
            f"`{name}` must have axes [{', '.join(axes)}], none of them empty. Received: "
            f"shape={array.shape}."
        )
    if not np.isfinite(array).all():
        raise ConfigError(f"`{name}` must be finite. Received: NaN or infinity among its numbers.")
    return array


def check_tokens(tokens: Sequence[str] | None, count: int) -> None:
    """Refuses texts of tokens that are not as many as there are."""
    if tokens is not None and len(tokens) != count:
        raise ConfigError(
            f"`tokens` must hold a text for each of {count} tokens. Received: {len(tokens)}."
        )
