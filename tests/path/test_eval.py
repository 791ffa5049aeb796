"""`tfkv eval` on the real model."""

from __future__ import annotations

import pathlib

import pytest

from tfkv.errors import ConfigError
from tfkv.export import EvalPlan, evaluate_caches
from tfkv.export.importers import ModelSource


def test_a_codec_beats_windows_of_its_bytes(source: ModelSource, tmp_path: pathlib.Path):
    steps = []
    plan = EvalPlan(tokens=(640,), passages=1, continuations=0, tasks=("none",))
    scores = evaluate_caches(
        source, ["int8"], tmp_path, plan=plan, progress=lambda *s: steps.append(s)
    )
    int8, window, sinks = scores
    assert int8.cache == "dense+int8"
    assert int8.bytes_per_token == 12_240
    assert int8.kl < 1e-3, "path.int8_kl"
    assert int8.perplexity == pytest.approx(int8.full_perplexity, rel=0.01)
    for baseline in (window, sinks):
        assert baseline.bytes_per_token <= 13_824, "a page more than int8 takes of 640 tokens"
        assert baseline.kl > 20 * int8.kl
    assert sinks.kl < window.kl, "StreamingLLM: a few sinks carry the window"
    assert steps[-1] == ("caches", 3, 3)
    assert (tmp_path / "eval.html").stat().st_size > 10_000


def test_a_text_that_is_too_short_is_refused(source: ModelSource, tmp_path: pathlib.Path):
    with pytest.raises(ConfigError, match="must hold 4 passages of 2048 tokens"):
        evaluate_caches(source, ["int8"], tmp_path, text="Too short.")
    with pytest.raises(ConfigError, match="Did you mean 'int8'"):
        evaluate_caches(source, ["int7"], tmp_path)
