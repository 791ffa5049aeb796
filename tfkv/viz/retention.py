"""Pictures of what a cache keeps: which tokens, in which layers and heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jinja2
import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tfkv.errors import ConfigError
from tfkv.viz.html import Html
from tfkv.viz.style import (
    COLOUR_MAP,
    as_array,
    check_tokens,
    label_tokens,
    layer_ticks,
    new_figure,
    shown,
)

#: Characters of a line of text in a figure, points of one that fills its place, and inches
#: between lines.
_LINE, _SIZE, _LINE_HEIGHT = 120, 8.7, 0.24


def kept_tokens(positions: Iterable[Any], tokens: int, row: int = 0) -> np.ndarray:
    """Which tokens each layer and KV head still holds.

    Args:
        positions: For each layer, positions of the entries of a cache, int ``[B, K, S]``, −1 =
            empty; as of `tfkv.causal_lm.CausalLM.kept_positions`.
        tokens: How many tokens were read.
        row: Session of the batch.

    Returns:
        bool ``[L, K, tokens]``.

    Raises:
        ConfigError: A position is beyond the tokens.
    """
    kept = []
    for layer in positions:
        held = np.asarray(layer)[row]
        if held.max(initial=-1) >= tokens:
            raise ConfigError(
                f"`tokens` must be more than every position. Received: tokens={tokens} and "
                f"position {held.max()}."
            )
        kept.append([np.isin(np.arange(tokens), head) for head in held])
    return np.array(kept)


def retention_map(
    kept: Any, tokens: Sequence[str] | None = None, title: str = "What each layer keeps"
) -> Figure:
    """Tokens across, layers down: in how many of a layer's KV heads a token is kept.

    Args:
        kept: bool ``[L, K, S]``, as of `kept_tokens`.
        tokens: Texts of the S tokens, written along the axis where there is room.
        title: What is shown.

    Raises:
        ConfigError: Shapes do not fit.
    """
    shares = 100.0 * as_array("kept", kept, "LKS").mean(axis=1)
    layers, count = shares.shape
    check_tokens(tokens, count)
    figure, axes = new_figure(height=3.8)
    image = axes.imshow(
        shares, cmap=COLOUR_MAP, vmin=0, vmax=100, aspect="auto", interpolation="nearest"
    )
    axes.set(xlabel="position of the token", ylabel="layer", title=title)
    layer_ticks(axes.yaxis, layers)
    if tokens is not None:
        label_tokens(axes.xaxis, tokens, rotation=90)
    figure.colorbar(image, ax=axes, label="KV heads that keep it (%)")
    return figure


def coloured_text(tokens: Sequence[str], shares: Any, title: str = "") -> Html:
    """The text, each token in the colour of how much of it is kept: dark = gone.

    Args:
        tokens: Texts of the S tokens.
        shares: ``[S]``, from 0 to 1: of all layers and heads, those that keep the token;
            ``kept_tokens(...).mean(axis=(0, 1))``.
        title: What is shown.

    Raises:
        ConfigError: Shapes do not fit, or a share is out of range.
    """
    values = _shares(tokens, shares)
    rows = [
        (token, *_colours(value), f"token {at}: kept by {100 * value:.0f} % of layers and heads")
        for at, (token, value) in enumerate(zip(tokens, values, strict=True))
    ]
    scale = [(f"{100 * value:.0f} %", *_colours(value)) for value in (0, 0.25, 0.5, 0.75, 1)]
    page = jinja2.Environment(autoescape=True).from_string(_TEXT)
    return Html(page.render(rows=rows, scale=scale, title=title))


def coloured_text_figure(tokens: Sequence[str], shares: Any, title: str = "") -> Figure:
    """As `coloured_text`, drawn: for pages that cannot show HTML.

    Args:
        tokens: Texts of the S tokens.
        shares: As of `coloured_text`.
        title: What is shown.

    Raises:
        ConfigError: As of `coloured_text`.
    """
    values = _shares(tokens, shares)
    places = list(_places(tokens))
    lines = 1 + max(line for _, line, _ in places)
    figure, axes = new_figure(height=1.1 + _LINE_HEIGHT * lines)
    for (text, line, column), value in zip(places, values, strict=True):
        back, front = _colours(value)
        axes.add_patch(Rectangle((column, line), len(text), 0.9, facecolor=back, linewidth=0))
        axes.text(
            column, line + 0.5, text, color=front, family="monospace", fontsize=_SIZE, va="center",
            parse_math=False,
        )  # fmt: skip
    axes.set(xlim=(0, _LINE), ylim=(lines, -0.1), title=title)
    axes.set_axis_off()
    scale = matplotlib.cm.ScalarMappable(cmap=COLOUR_MAP)
    scale.set_clim(0, 100)
    label = "layers and heads that keep the token (%)"
    figure.colorbar(scale, ax=axes, label=label, orientation="horizontal", aspect=60, pad=0.02)
    return figure


def _shares(tokens: Sequence[str], shares: Any) -> np.ndarray:
    values = as_array("shares", shares, "S")
    check_tokens(tokens, len(values))
    if values.min() < 0 or values.max() > 1:
        raise ConfigError(
            f"`shares` must be from 0 to 1. Received: {values.min()} to {values.max()}."
        )
    return values


def _colours(share: float) -> tuple[str, str]:
    """Background and letters."""
    # Of a whole number it would take the colour of that number.
    red, green, blue, _ = matplotlib.colormaps[COLOUR_MAP](float(share))
    bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.45
    return to_hex((red, green, blue)), "#000000" if bright else "#ffffff"


def _places(tokens: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Each token with the line and the column it stands at."""
    line = column = 0
    for token in tokens:
        text = shown(token)[:_LINE]
        if column + len(text) > _LINE:
            line, column = line + 1, 0
        yield text, line, column
        column += len(text)
        if "\n" in token:
            line, column = line + 1, 0


_TEXT = """<div style="font: 15px/1.9 system-ui, sans-serif; max-width: 60rem">
{% if title %}<p style="margin: .3rem 0"><b>{{ title }}</b></p>
{% endif %}<div style="white-space: pre-wrap">{% for text, back, front, said in rows -%}
<span style="background: {{ back }}; color: {{ front }}" title="{{ said }}">{{ text }}</span>
{%- endfor %}</div>
<p style="font-size: 12px; margin: .3rem 0">Kept by so many layers and heads:
{% for text, back, front in scale %}<b style="background: {{ back }}; color: {{ front }};
padding: 1px 8px; font-weight: normal">{{ text }}</b>{% endfor %}</p></div>
"""
