from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from tfkv import terminal
from tfkv.cache_report import Measuring, Report, evaluate
from tfkv.cache_scores import ContinuationScore, TaskScore, TextScore, interval
from tfkv.errors import ConfigError
from tfkv.evaluation import Comparison

SETTING = {"model": "tiny <model>", "tokens": 64}


def comparison(kl: float, seed: int = 0) -> Comparison:
    random = np.random.default_rng(seed)
    spread = random.exponential(kl, 256) if kl else np.zeros(256)
    nll = random.exponential(2.0, 256)
    nll[-1] = np.nan
    return Comparison(spread, random.random(256) < 0.9, spread, nll, nll + kl)


def score(cache: str, kl: float, size: float = 100.0, length: int = 64) -> TextScore:
    return TextScore.of(cache, length, size, comparison(kl), block=16)


def asked(cache: str, length: int, aware: tuple[bool, ...] = (True, False, False)) -> TaskScore:
    """The full cache answers three of four; the cache one of these, where it stands at 0.25."""
    return TaskScore(
        cache,
        "needle",
        length,
        depths=(0.25, 0.25, 0.75, 0.75),
        solved=(True, True, True, False),
        agnostic=(True, False, False, False),
        aware=(*aware, False),
    )


def continued(cache: str) -> ContinuationScore:
    return ContinuationScore(cache, 64, ((1, 2, 3, 4), (5, 6, 7, 8)), ((1, 2, 9, 4), (5, 6, 7, 8)))


def test_a_score_is_the_summary_of_its_tokens():
    found = comparison(0.01)
    summary = TextScore.of("dense+int8", 64, 40.0, found, block=16)
    assert summary.kl == pytest.approx(found.kl.mean())
    assert summary.kl_p99 == pytest.approx(np.percentile(found.kl, 99))
    assert summary.kl_interval[0] < summary.kl < summary.kl_interval[1]
    assert summary.full_perplexity == pytest.approx(np.exp(found.reference_nll[:-1].mean()))
    assert summary.perplexity == pytest.approx(summary.full_perplexity * np.exp(0.01))


def test_the_interval_covers_the_mean_as_often_as_it_says():
    random = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        # Blocks of 8 equal numbers: single tokens would give an interval √8 too narrow.
        low, high = interval(np.repeat(random.normal(size=60), 8), block=8)
        held += low <= 0 <= high
    assert 0.88 <= held / 200 <= 0.99


def test_a_second_run_measures_only_what_is_missing(tmp_path):
    taken = []

    def measuring(stage, caches, make):
        def take(cache):
            taken.append((cache, make(cache).measure))
            return make(cache)

        return Measuring(stage, make("any").measure, caches, take)

    def texts(caches, length=64):
        return measuring("caches", caches, lambda cache: score(cache, 0.01, length=length))

    def tasks(caches):
        return measuring("tasks", caches, lambda cache: asked(cache, 32))

    steps = []
    first = evaluate([texts("ab"), tasks("a")], Report(tmp_path, SETTING), lambda *s: None)
    assert [(s.cache, s.measure) for s in first] == [
        *[("a", "text of 64"), ("b", "text of 64"), ("a", "needle in 32")],
    ]
    assert taken == [("a", "text of 64"), ("a", "needle in 32"), ("b", "text of 64")], "by cache"
    taken.clear()
    second = evaluate(
        [texts("bc"), texts("c", 128), tasks("ac")],
        Report(tmp_path, SETTING),
        lambda *step: steps.append(step),
    )
    assert len(second) == 5
    assert taken == [("c", "text of 64"), ("c", "text of 128"), ("c", "needle in 32")]
    assert steps[:2] == [("caches", 0, 3), ("tasks", 0, 2)]
    assert {("caches", 3, 3), ("tasks", 2, 2)} <= set(steps)
    again = Report(tmp_path, SETTING).scores
    assert len(again) == 6
    assert all(again[s.cache, s.measure] == s for s in first + second), "what was written is read"


def test_a_task_counts_what_the_full_cache_answers():
    found = asked("a", 32, aware=(True, True, False))
    assert found.scored == 3
    assert found.percent() == pytest.approx(100 / 3)
    assert found.percent(aware=True) == pytest.approx(200 / 3)
    assert found.by_depth() == {0.25: 50.0, 0.75: 0.0}
    none = TaskScore("a", "needle", 32, (None,), (False,), (False,), (False,))
    assert np.isnan(none.percent()) and none.by_depth() == {}


def test_a_continuation_says_where_it_leaves_the_full_cache():
    assert continued("a").first_divergence == [2, 4]
    assert continued("a").agreement_percent == pytest.approx(100 * 7 / 8)


def test_scores_of_another_setting_are_not_mixed(tmp_path):
    Report(tmp_path, SETTING).add(score("a", 0.1))
    with pytest.raises(ConfigError, match=r"another tokens.*another `--out`"):
        Report(tmp_path, {**SETTING, "tokens": 65})


def test_another_file_is_not_taken_for_a_report(tmp_path):
    (tmp_path / "eval.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a report"):
        Report(tmp_path, SETTING)


def test_a_report_of_an_earlier_version_is_named_as_one(tmp_path):
    (tmp_path / "eval.json").write_text(json.dumps({"setting": SETTING, "scores": []}))
    with pytest.raises(ConfigError, match=r"of form 1.*reads form 2.*another `--out`"):
        Report(tmp_path, SETTING)


def test_the_page_shows_every_cache_and_a_picture(tmp_path):
    report = Report(tmp_path, SETTING)
    for name, kl, size in (("good", 0.01, 90.0), ("worse", 0.02, 95.0), ("full", 0.0, 100.0)):
        report.add(score(name, kl, size))
    page = (tmp_path / "eval.html").read_text()
    assert page.count("<tr>") == 4
    assert "tiny &lt;model&gt;" in page
    assert page.index(">full<") < page.index(">worse<") < page.index(">good<"), "most bytes first"
    assert page.count("<svg") == 1
    assert "<svg" not in Report(tmp_path / "none", SETTING).html()


def test_the_page_has_a_section_for_each_measure(tmp_path):
    report = Report(tmp_path, SETTING)
    report.add(score("a", 0.01))
    report.add(score("a", 0.02, length=128))
    report.add(continued("a"))
    report.add(asked("a", 512))
    report.add(asked("a", 1024, aware=(True, True, True)))
    page = report.html()
    for title in ("Text of 64 tokens", "Text of 128 tokens", "greedily", "Task: needle"):
        assert page.count(title) == 1
    assert page.count("<svg") == 3, "two texts and a grid"
    assert "<td>2, 4 <small>of 4</small>" in page
    assert "<td>1 <small>33 %</small>" in page and "<td>3 <small>100 %</small>" in page


def test_answers_that_are_everywhere_have_no_grid(tmp_path):
    report = Report(tmp_path, SETTING)
    report.add(TaskScore("a", "common_word", 32, (None,), (False,), (False,), (False,)))
    assert "<svg" not in report.html()
    assert "<small>–</small>" in report.html(), "nothing counts"


def test_the_terminal_shows_a_table_a_length_and_one_of_the_rest():
    console = Console(width=160, record=True, file=io.StringIO())
    rows = [score("a", 0.01), score("b", 0.01), score("a", 0.02, length=1280)]
    tables = terminal.scores_tables([*rows, continued("a"), asked("a", 512), asked("b", 512)])
    for table in tables:
        console.print(table)
    shown = console.export_text()
    assert [table.row_count for table in tables] == [2, 1, 2]
    assert shown.count("1,280 tokens, against") == 1
    assert "3 of 4" in shown and shown.count("1 / 1") == 2
    assert shown.count("2, 4; 88 %") == 1
    assert len(terminal.scores_tables(rows)) == 2
