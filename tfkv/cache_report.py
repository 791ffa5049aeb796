"""`tfkv eval`: scores of caches side by side, kept as JSON and as a page."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfkv.cache_page import render
from tfkv.cache_scores import ContinuationScore, Score, TaskScore, TextScore
from tfkv.errors import ConfigError

#: Called with stage, steps done and steps in all.
Progress = Callable[[str, int, int], None]

_FILE, _PAGE = "eval.json", "eval.html"
#: Of the file; those of form 1 had one length of text and no tasks.
_FORM = 2
_KINDS: dict[str, type[Score]] = {
    "texts": TextScore,
    "continuations": ContinuationScore,
    "tasks": TaskScore,
}


class Report:
    """Scores by cache and measure, kept in a directory: a second run goes on where the first one
    stopped.

    Args:
        directory: Where ``eval.json`` and ``eval.html`` are.
        setting: What the scores depend on besides cache and measure: model, text, how many.
            Scores of another setting are not mixed with these.

    Raises:
        ConfigError: The directory holds scores of another setting, or no readable ones.
    """

    def __init__(self, directory: str | pathlib.Path, setting: Mapping[str, Any]) -> None:
        importlib.import_module("matplotlib")  # missing, it is missed before hours of measuring
        self.directory = pathlib.Path(directory)
        self.setting = dict(setting)
        self.scores: dict[tuple[str, str], Score] = {}
        path = self.directory / _FILE
        if not path.exists():
            return
        kept, scores = _read(path)
        if kept != self.setting:
            differs = sorted(k for k in {*kept, *self.setting} if kept.get(k) != setting.get(k))
            raise ConfigError(
                f"{path} holds scores of another {', '.join(differs)}. "
                "Choose another `--out`, or remove it."
            )
        self.scores = {(score.cache, score.measure): score for score in scores}

    def add(self, score: Score) -> None:
        """Takes a score in, and writes both files anew."""
        self.scores[score.cache, score.measure] = score
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / _FILE).write_text(self._json(), encoding="utf-8")
        (self.directory / _PAGE).write_text(self.html(), encoding="utf-8")

    def of_measure(self, measure: str) -> Score | None:
        """Any cache's score of a measure: what the full cache does is in each."""
        return next((score for (_, of), score in self.scores.items() if of == measure), None)

    def html(self) -> str:
        """The page: setting, pictures and tables, in one file."""
        return render(self.setting, list(self.scores.values()))

    def _json(self) -> str:
        """A score a line: lists of hundreds of tokens are for no reader."""
        fields = [f'"form": {_FORM}', f'"setting": {json.dumps(self.setting)}']
        for name, kind in _KINDS.items():
            lines = [
                json.dumps(dataclasses.asdict(score))
                for score in self.scores.values()
                if isinstance(score, kind)
            ]
            fields.append(f'"{name}": [' + ",".join(f"\n  {line}" for line in lines) + "]")
        return "{" + ",\n ".join(fields) + "}\n"


def _read(path: pathlib.Path) -> tuple[dict[str, Any], list[Score]]:
    """Setting and scores of a file.

    Raises:
        ConfigError: It is none of `Report`, or of an earlier form.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        form = data.get("form", 1) if "setting" in data else None
        if form in (None, _FORM):
            scores = [
                kind(**{field: _frozen(value) for field, value in score.items()})
                for name, kind in _KINDS.items()
                for score in data[name]
            ]
            return data["setting"], scores
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a report of `tfkv eval`: {error!r}.") from error
    raise ConfigError(
        f"{path} is a report of form {form}, and this version of tfkv reads form {_FORM}. Choose "
        "another `--out`, or remove it."
    )


def _frozen(value: Any) -> Any:
    """A value as a score has it: JSON makes lists of tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True)
class Measuring:
    """One measure to take of some caches.

    Attributes:
        stage: What progress calls it.
        measure: Key of its scores.
        caches: Policies and codecs, in their canonical form.
        take: Makes the score of a cache.
    """

    stage: str
    measure: str
    caches: Sequence[str]
    take: Callable[[str], Score]


def evaluate(measurings: Sequence[Measuring], report: Report, progress: Progress) -> list[Score]:
    """Takes what the report does not have yet, cache by cache.

    Args:
        measurings: What to measure.
        report: Where scores are kept.
        progress: Called with stage, caches done in it and caches in all, after each.

    Returns:
        All scores asked for, measure by measure.
    """
    totals: dict[str, int] = {}
    for one in measurings:
        totals[one.stage] = totals.get(one.stage, 0) + len(one.caches)
    done = dict.fromkeys(totals, 0)
    for stage, total in totals.items():
        progress(stage, 0, total)
    for cache in dict.fromkeys(cache for one in measurings for cache in one.caches):
        for one in measurings:
            if cache not in one.caches:
                continue
            if (cache, one.measure) not in report.scores:
                report.add(one.take(cache))
            done[one.stage] += 1
            progress(one.stage, done[one.stage], totals[one.stage])
    return [report.scores[cache, one.measure] for one in measurings for cache in one.caches]
