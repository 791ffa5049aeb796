"""The page of `tfkv eval`: pictures and tables of scores, in one HTML file.

The picture of a text is quality against bytes a token: a cache above and to the right of
another one is the worse of the two in both. The picture of a task has a panel for each cache:
how many questions it answers, by depth and length.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from tfkv.cache_scores import ContinuationScore, Score, TaskScore, TextScore


def render(setting: Mapping[str, Any], scores: Sequence[Score]) -> str:
    """The page as text."""
    texts = [score for score in scores if isinstance(score, TextScore)]
    continuations = [score for score in scores if isinstance(score, ContinuationScore)]
    tasks = [score for score in scores if isinstance(score, TaskScore)]
    by_length = {n: [s for s in texts if s.length == n] for n in sorted({s.length for s in texts})}
    by_task = {n: [s for s in tasks if s.task == n] for n in sorted({s.task for s in tasks})}
    for rows in by_length.values():
        rows.sort(key=lambda score: -score.bytes_per_token)
    for asked in by_task.values():
        asked.sort(key=lambda score: score.length)
    environment = jinja2.Environment(autoescape=True)
    environment.filters["percent"] = percent
    return environment.from_string(_TEMPLATE).render(
        setting=setting,
        texts=[(length, _quality(rows), rows) for length, rows in by_length.items()],
        continuations=sorted(continuations, key=lambda score: score.length),
        tasks=[(name, _grids(asked), asked) for name, asked in by_task.items()],
    )


def short(cache: str) -> str:
    """A cache's name without what goes without saying."""
    return cache.removeprefix("dense+").removesuffix("+float32")


def percent(value: float) -> str:
    """A share, or that there is none."""
    return "–" if math.isnan(value) else f"{value:.0f} %"


def _quality(scores: Sequence[TextScore]) -> str:
    """KL against bytes a token as SVG; empty where no cache is lossy."""
    lossy = [score for score in scores if score.kl > 0]
    if not lossy:
        return ""
    from tfkv.viz import QualityPoint, quality_curve

    points = [
        QualityPoint(short(score.cache), score.bytes_per_token, score.kl, score.kl_interval)
        for score in lossy
    ]
    return _svg(quality_curve(points))


def _grids(scores: Sequence[TaskScore]) -> str:
    """Questions answered by depth and length, a panel for each cache, as SVG; two where it makes
    a difference whether the question was known. Empty where answers have no depth."""
    panels: dict[str, list[tuple[int, dict[float, float]]]] = {}
    for score in scores:
        sides = [("", False)]
        if score.aware != score.agnostic:
            sides = [(", question unknown", False), (", question known", True)]
        for words, aware in sides:
            if cells := score.by_depth(aware):
                panels.setdefault(short(score.cache) + words, []).append((score.length, cells))
    if not panels:
        return ""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    for place, (name, by_length) in zip(axes.flat, panels.items(), strict=False):
        _heat(place, name, by_length)
    return _svg(figure)


def _heat(axes: Any, name: str, cells: Sequence[tuple[int, dict[float, float]]]) -> None:
    """One panel: depth down, length across, percent in each cell."""
    depths = sorted({depth for _, shares in cells for depth in shares})
    grid = np.array([[shares.get(depth, math.nan) for _, shares in cells] for depth in depths])
    axes.imshow(grid, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        said = "–" if math.isnan(value) else f"{value:.0f}"
        colour = "white" if value < 50 else "black"
        axes.text(column, row, said, ha="center", va="center", color=colour)
    axes.set_xticks(range(len(cells)), [f"{length:,}" for length, _ in cells])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    axes.set_title("\n".join(name[at : at + 40] for at in range(0, len(name), 40)), fontsize=8)
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("depth", fontsize=8)


def _svg(figure: Any) -> str:
    """A figure as SVG text."""
    out = io.StringIO()
    figure.savefig(out, format="svg")
    return out.getvalue()[out.getvalue().index("<svg") :]


_TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Caches side by side</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
 table { border-collapse: collapse } th, td { padding: .2rem .7rem; text-align: right }
 th:first-child, td:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
 small { color: #666 } svg { max-width: 100%; height: auto }
</style>
<h1>Caches side by side</h1>
<p>{% for name, value in setting.items() %}{{ name }}: {{ value }}{{ ", " if not loop.last }}
{% endfor %}</p>
{% for length, picture, scores in texts %}
<h2>Text of {{ "{:,}".format(length) }} tokens</h2>
{{ picture | safe }}
<table>
<tr><th>cache<th>bytes a token<th>KL, nats<th>median<th>p99<th>same top token<th>perplexity</tr>
{% for s in scores %}
<tr><td><code>{{ s.cache }}</code><td>{{ "{:,.0f}".format(s.bytes_per_token) }}
<td>{{ "%.2e" | format(s.kl) }}
<small>{{ "%.1e" | format(s.kl_interval[0]) }} to {{ "%.1e" | format(s.kl_interval[1]) }}</small>
<td>{{ "%.1e" | format(s.kl_median) }}<td>{{ "%.1e" | format(s.kl_p99) }}
<td>{{ "%.2f" | format(s.top1_percent) }} %
<td>{{ "%.3f" | format(s.perplexity) }} <small>full {{ "%.3f" | format(s.full_perplexity) }}</small>
</tr>
{% endfor %}
</table>
<p><small>Teacher-forced; all but the newest piece of the text is read back from the cache.
Intervals: 95 %, bootstrap of stretches of text.</small></p>
{% endfor %}
{% if continuations %}
<h2>What follows, greedily</h2>
<table>
<tr><th>cache<th>passage<th>tokens before the first that differs<th>same tokens</tr>
{% for s in continuations %}
<tr><td><code>{{ s.cache }}</code><td>{{ "{:,}".format(s.length) }}
<td>{{ s.first_divergence | join(", ") }} <small>of {{ s.expected[0] | length }}</small>
<td>{{ "%.1f" | format(s.agreement_percent) }} %
</tr>
{% endfor %}
</table>
{% endif %}
{% for name, picture, scores in tasks %}
<h2>Task: {{ name }}</h2>
{{ picture | safe }}
<table>
<tr><th>cache<th>tokens<th>asked<th>full cache answers<th>of these, question unknown<th>question
known</tr>
{% for s in scores %}
<tr><td><code>{{ s.cache }}</code><td>{{ "{:,}".format(s.length) }}<td>{{ s.solved | length }}
<td>{{ s.scored }}<td>{{ s.agnostic | sum }} <small>{{ s.percent() | percent }}</small>
<td>{{ s.aware | sum }} <small>{{ s.percent(true) | percent }}</small>
</tr>
{% endfor %}
</table>
<p><small>Only what the full float32 cache answers counts. Unknown: the context was read, and
compressed by policies that evict, before anything was asked. Known: the question was read with
it.</small></p>
{% endfor %}
</html>
"""
