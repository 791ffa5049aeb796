from __future__ import annotations

import json

import numpy as np
import pytest

from tfkv.cache_report import CacheScore, Report, evaluate, interval
from tfkv.errors import ConfigError
from tfkv.evaluation import Comparison

SETTING = {"model": "tiny <model>", "tokens": 64}


def comparison(kl: float, seed: int = 0) -> Comparison:
    random = np.random.default_rng(seed)
    spread = random.exponential(kl, 256) if kl else np.zeros(256)
    nll = random.exponential(2.0, 256)
    nll[-1] = np.nan
    return Comparison(spread, random.random(256) < 0.9, spread, nll, nll + kl)


def score(cache: str, kl: float, size: float = 100.0) -> CacheScore:
    return CacheScore.of(cache, size, comparison(kl), block=16)


def test_a_score_is_the_summary_of_its_tokens():
    found = comparison(0.01)
    summary = CacheScore.of("dense+int8", 40.0, found, block=16)
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
    measured = []

    def measure(cache):
        measured.append(cache)
        return comparison(0.01), 50.0

    steps = []
    for caches in (["a", "b"], ["b", "c"]):
        report = Report(tmp_path, SETTING)
        scores = evaluate(caches, report, measure, 16, lambda *step: steps.append(step))
        assert [found.cache for found in scores] == caches
    assert measured == ["a", "b", "c"]
    assert steps[-1] == ("caches", 2, 2)
    data = json.loads((tmp_path / "eval.json").read_text())
    assert data["setting"] == SETTING
    assert [found["cache"] for found in data["scores"]] == ["a", "b", "c"]


def test_scores_of_another_setting_are_not_mixed(tmp_path):
    Report(tmp_path, SETTING).add(score("a", 0.1))
    with pytest.raises(ConfigError, match=r"another tokens.*another `--out`"):
        Report(tmp_path, {**SETTING, "tokens": 65})


def test_another_file_is_not_taken_for_a_report(tmp_path):
    (tmp_path / "eval.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a report"):
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
