"""`tfkv eval`: caches side by side on one text, as JSON and as a page with a picture.

The picture is quality against bytes a token: a cache above and to the right of another one
is the worse of the two in both.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jinja2
import numpy as np

from tfkv.errors import ConfigError
from tfkv.evaluation import Comparison, perplexity

#: Called with stage, steps done and steps in all.
Progress = Callable[[str, int, int], None]

_RESAMPLES = 1000
_FILE, _PAGE = "eval.json", "eval.html"


@dataclasses.dataclass(frozen=True)
class CacheScore:
    """How far one cache is from the full one, on one text.

    Intervals are of 95 %, from bootstrap samples of whole stretches of text: neighbouring
    tokens are not independent.

    Attributes:
        cache: Policy and codec.
        bytes_per_token: Of a session of a passage's length, over the tokens that it read, with
            what the codec keeps exactly; a window stores fewer tokens than it reads.
        tokens: Tokens compared.
        kl: Mean KL divergence of the next token's distribution, nats.
        kl_interval: Of it.
        kl_median: Median over tokens.
        kl_p99: 99th percentile over tokens.
        top1_percent: Tokens after which both caches find the same one most likely.
        top1_interval: Of it.
        perplexity: Of the text, read through the cache.
        full_perplexity: Likewise, through the full one.
    """

    cache: str
    bytes_per_token: float
    tokens: int
    kl: float
    kl_interval: tuple[float, float]
    kl_median: float
    kl_p99: float
    top1_percent: float
    top1_interval: tuple[float, float]
    perplexity: float
    full_perplexity: float

    @classmethod
    def of(cls, cache: str, bytes_per_token: float, found: Comparison, block: int) -> Self:
        """Summarises a comparison.

        Args:
            cache: Policy and codec.
            bytes_per_token: See `CacheScore`.
            found: Token by token.
            block: Neighbouring tokens that are resampled together.
        """
        return cls(
            cache=cache,
            bytes_per_token=bytes_per_token,
            tokens=found.tokens,
            kl=found.mean_kl,
            kl_interval=interval(found.kl, block),
            kl_median=float(np.median(found.kl)),
            kl_p99=float(np.percentile(found.kl, 99)),
            top1_percent=found.top1_percent,
            top1_interval=interval(100.0 * found.same_top, block),
            perplexity=perplexity(found.candidate_nll),
            full_perplexity=perplexity(found.reference_nll),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads what ``dataclasses.asdict`` gave and JSON kept."""
        pairs = {name: tuple(data[name]) for name in ("kl_interval", "top1_interval")}
        return cls(**{**data, **pairs})


def interval(values: np.ndarray, block: int, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of ``values [M]``, resampled in blocks."""
    whole = values[: len(values) // block * block].reshape(-1, block).mean(axis=1)
    chosen = np.random.default_rng(seed).integers(0, len(whole), (_RESAMPLES, len(whole)))
    low, high = np.percentile(whole[chosen].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


class Report:
    """Scores by cache, kept in a directory: a second run goes on where the first one stopped.

    Args:
        directory: Where ``eval.json`` and ``eval.html`` are.
        setting: What the scores depend on besides the cache: model, text, lengths. Scores of
            another setting are not mixed with these.

    Raises:
        ConfigError: The directory holds scores of another setting, or no readable ones.
    """

    def __init__(self, directory: str | pathlib.Path, setting: Mapping[str, Any]) -> None:
        importlib.import_module("matplotlib")  # missing, it is missed before hours of measuring
        self.directory = pathlib.Path(directory)
        self.setting = dict(setting)
        self.scores: dict[str, CacheScore] = {}
        path = self.directory / _FILE
        if not path.exists():
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            kept, scores = data["setting"], [CacheScore.from_dict(s) for s in data["scores"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a report of `tfkv eval`: {error}.") from error
        if kept != self.setting:
            differs = sorted(k for k in {*kept, *self.setting} if kept.get(k) != setting.get(k))
            raise ConfigError(
                f"{path} holds scores of another {', '.join(differs)}. "
                "Choose another `--out`, or remove it."
            )
        self.scores = {score.cache: score for score in scores}

    def add(self, score: CacheScore) -> None:
        """Takes a score in, and writes both files anew."""
        self.scores[score.cache] = score
        self.directory.mkdir(parents=True, exist_ok=True)
        scores = [dataclasses.asdict(score) for score in self.scores.values()]
        text = json.dumps({"setting": self.setting, "scores": scores}, indent=1)
        (self.directory / _FILE).write_text(text + "\n", encoding="utf-8")
        (self.directory / _PAGE).write_text(self.html(), encoding="utf-8")

    def html(self) -> str:
        """The page: setting, picture and table, in one file."""
        scores = sorted(self.scores.values(), key=lambda score: -score.bytes_per_token)
        page = jinja2.Environment(autoescape=True).from_string(_TEMPLATE)
        return page.render(setting=self.setting, scores=scores, picture=_picture(scores))


def evaluate(
    caches: Sequence[str],
    report: Report,
    measure: Callable[[str], tuple[Comparison, float]],
    block: int,
    progress: Progress,
) -> list[CacheScore]:
    """Scores every cache that the report does not have yet.

    Args:
        caches: Policies and codecs, in their canonical form.
        report: Where scores are kept.
        measure: Reads the text through a cache and through the full one, and says the
            cache's bytes a token.
        block: Neighbouring tokens that are resampled together.
        progress: Called after each.

    Returns:
        Their scores, in the order asked for.
    """
    for index, cache in enumerate(caches):
        progress("caches", index, len(caches))
        if cache not in report.scores:
            found, bytes_per_token = measure(cache)
            report.add(CacheScore.of(cache, bytes_per_token, found, block))
    progress("caches", len(caches), len(caches))
    return [report.scores[cache] for cache in caches]


def _picture(scores: Sequence[CacheScore]) -> str:
    """KL against bytes a token as SVG; empty where no cache is lossy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lossy = [score for score in scores if score.kl > 0]
    if not lossy:
        return ""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    best = float("inf")
    for score in sorted(lossy, key=lambda score: (score.bytes_per_token, score.kl)):
        front, best = score.kl < best, min(best, score.kl)
        low, high = score.kl_interval
        bars = [[max(score.kl - low, 0.0)], [max(high - score.kl, 0.0)]]
        point = (score.bytes_per_token, score.kl)
        axes.errorbar(*point, yerr=bars, fmt="o" if front else "x", color="C0" if front else "C7")
        label = score.cache.removeprefix("dense+").removesuffix("+float32")
        axes.annotate(label, point, xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.margins(x=0.3)  # room for the labels
    axes.set(
        xlabel="bytes a token",
        ylabel="KL from the full cache (nats)",
        xscale="log",
        yscale="log",
        title="Filled: no cache of as few bytes is nearer",
    )
    out = io.StringIO()
    figure.savefig(out, format="svg")
    pyplot.close(figure)
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
</html>
"""
