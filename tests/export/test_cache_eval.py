"""`evaluate_caches` on the tiny model, whose own words are the answers to a task of the test."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import string

import numpy as np
import pytest
import tiny_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tfkv.cache_scores import ContinuationScore, TaskScore, TextScore
from tfkv.errors import ConfigError
from tfkv.export import EvalPlan, cache_eval, evaluate_caches
from tfkv.export.engine_reader import EngineReader
from tfkv.layers.per_layer import normal_form
from tfkv.tasks import TASKS, Context, Question, Task
from tfkv.tasks.task import evenly

INT8 = "dense+int8"
FULL, WINDOW = "dense+float32", "sliding_window(window=64)+float32"
SNAPKV = "snapkv(budget=48,sinks=2,window=16)+float32"


def _letters() -> str:
    """A tokenizer with a token for each letter."""
    letters = [*string.printable[:95], "\n"]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return tokenizer.to_str()


SOURCE = tiny_model.source(tokenizer_json=_letters())
TEXT = "".join(np.random.default_rng(3).choice([*string.ascii_letters, " "], 800))


class Echo(Task):
    """What the full cache says after a few tokens: it solves all."""

    name = "echo"

    def contexts(self, hay, length, count, depths=5, seed=0):
        made = []
        for stretch in hay.stretches(length, count):
            starts = [hay.encode(text) for text in ("ab", "Xyz ")]
            questions = [
                Question(start, tiny_model.greedy([*stretch.tolist(), *start], 3), depth)
                for start, depth in zip(starts, evenly(depths), strict=True)
            ]
            made.append(Context(stretch, questions))
        return made


@pytest.fixture(autouse=True, scope="module")
def echo():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "echo", Echo())
        yield


def plan(**changes) -> EvalPlan:
    return EvalPlan(
        **{
            **{"tokens": (128, 192), "passages": 2, "continuations": 1, "contexts": 2, "depths": 2},
            **{"tasks": ("echo", "common_word"), "task_tokens": (160,)},
            **changes,
        }
    )


def run(out: pathlib.Path, caches: list[str], chosen: EvalPlan, **options) -> dict:
    scores = evaluate_caches(SOURCE, caches, out, TEXT, chosen, **{"baselines": False, **options})
    return {(score.cache, score.measure): score for score in scores}


@pytest.fixture(scope="module")
def found(echo, tmp_path_factory) -> tuple[pathlib.Path, dict]:
    out = tmp_path_factory.mktemp("eval")
    return out, run(out, [FULL, WINDOW, SNAPKV], plan())


def test_what_keeps_everything_loses_nothing(found):
    _, scores = found
    for length in (128, 192):
        text = scores[FULL, f"text of {length}"]
        assert isinstance(text, TextScore)
        assert text.kl == pytest.approx(0, abs=1e-9) and text.top1_percent == 100
        assert text.tokens == 2 * length
        after = scores[FULL, f"continuation at {length}"]
        assert isinstance(after, ContinuationScore)
        assert after.first_divergence == [length // 2] and after.agreement_percent == 100
    echo = scores[FULL, "echo in 160"]
    assert isinstance(echo, TaskScore)
    assert echo.scored == 4 and echo.percent() == echo.percent(aware=True) == 100
    assert echo.by_depth() == {depth: 100 for depth in evenly(2)}


def test_a_continuation_is_what_the_model_says_with_that_cache(found):
    _, scores = found
    after = scores[WINDOW, "continuation at 192"]
    ids = Tokenizer.from_str(SOURCE.tokenizer_json).encode(TEXT).ids
    (expected,), (made,) = after.expected, after.made
    assert list(expected[:20]) == tiny_model.greedy(ids[:96], 20)
    assert list(made[:20]) == tiny_model.greedy(ids[:96], 20, lambda q, k: 0 <= q - k < 64)
    assert after.agreement_percent < 50


def test_what_forgets_misses_what_the_full_cache_answers(found):
    _, scores = found
    window, evicts = (scores[cache, "echo in 160"] for cache in (WINDOW, SNAPKV))
    assert window.scored == evicts.scored == 4
    assert window.agnostic == window.aware
    assert window.percent() < 50
    assert 0 < evicts.percent() < 100, "a few entries answer a few"
    assert evicts.agnostic != evicts.aware
    assert scores[WINDOW, "text of 192"].kl > scores[WINDOW, "text of 128"].kl > 0.01
    assert scores[WINDOW, "text of 192"].bytes_per_token < 256


def test_a_task_that_the_full_cache_cannot_solve_asks_nothing(found):
    _, scores = found
    for cache in (FULL, WINDOW, SNAPKV):
        score = scores[cache, "common_word in 160"]
        assert len(score.solved) == 4 and score.scored == 0
        assert not any(score.agnostic) and np.isnan(score.percent())


def test_a_second_run_reads_nothing_again(found, monkeypatch):
    out, scores = found
    before = json.loads((out / "eval.json").read_text())

    def refuse(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(EngineReader, "read", refuse)
    again = run(out, [SNAPKV, FULL, WINDOW], plan())
    assert again == scores
    assert json.loads((out / "eval.json").read_text()) == before


def test_another_cache_does_not_ask_the_full_one_again(found, tmp_path, monkeypatch):
    out, scores = found
    (tmp_path / "eval.json").write_bytes((out / "eval.json").read_bytes())
    asked = []

    def watched(function):
        def call(reader, *arguments):
            asked.append(str(reader.engine.groups.first.cache))
            return function(reader, *arguments)

        return call

    for name in ("ask", "continuation"):
        monkeypatch.setattr(cache_eval, name, watched(getattr(cache_eval, name)))
    other = "sliding_window(window=80)+float32"
    more = run(tmp_path, [other], plan(tokens=(128,), tasks=("echo",)))
    assert asked == [other] * 3, "one passage and two contexts"
    for measure in ("echo in 160", "continuation at 128"):
        full, new = scores[FULL, measure], more[other, measure]
        for field in ("solved", "expected"):
            assert getattr(new, field, None) == getattr(full, field, None)


def test_windows_of_layers_are_held_to_one_window_of_their_bytes():
    model = dataclasses.replace(tiny_model.CONFIG, num_layers=4)
    form = normal_form("dense", 4, ["0-1=sliding_window(window=64)"])
    # Rings of 128 tokens, and all 512, in two layers each: 320 in the mean, of which a window
    # shows 64 less, and beside sinks 64 less again.
    assert cache_eval._windows(model, *form, 512) == [
        "sliding_window(window=256)+float32",
        "sliding_window(window=192,sinks=4)+float32",
    ]


@pytest.mark.slow
def test_baselines_get_the_same_measures(tmp_path):
    small = plan(tokens=(128,), passages=1, continuations=0, tasks=("echo",), contexts=1)
    steps = []
    scores = run(
        tmp_path, ["int8", SNAPKV], small, baselines=True, progress=lambda *s: steps.append(s)
    )
    common = "(budget=48,sinks=2,whole_prompt=True)+float32"
    measured = {cache for cache, measure in scores if measure == "echo in 160"}
    evictions = {f"{name}{common}" for name in ("random_eviction", "recent_tokens")}
    windows = {
        "sliding_window(window=128)+float32",
        "sliding_window(window=64,sinks=4)+float32",
    }
    assert measured == {"dense+int8", SNAPKV} | evictions | windows
    assert steps[-1][1:] == (6, 6) and {stage for stage, _, _ in steps} == {"caches", "tasks"}


def test_layers_with_another_codec_are_measured_under_their_names(tmp_path):
    small = plan(tokens=(384,), passages=1, continuations=0, tasks=("none",))
    caches = ["int8", "sliding_window(window=64)+int8"]
    mixed = run(tmp_path, caches, small, layer_caches=["1=float32"], baselines=True)
    alike = run(tmp_path, ["int8"], small, layer_caches=["0=float32", "1=float32"])
    plain = run(tmp_path, ["int8"], small)
    text = "text of 384"
    one, all_, none = mixed["dense+int8; 1=float32", text], alike[FULL, text], plain[INT8, text]
    assert all_.kl < 1e-9 < one.kl < none.kl
    # Heads of 8: 32 bytes, or 8 and two of two bytes.
    assert (all_.bytes_per_token, none.bytes_per_token) == (2 * 4 * 32, 2 * 4 * 12)
    assert one.bytes_per_token == 4 * 32 + 4 * 12
    # 11/16 of 384 in whole pieces of 64, less two that a window stores beyond what it shows.
    windows = {cache for cache, _ in mixed if cache.startswith("sliding") and ";" not in cache}
    assert windows == {
        "sliding_window(window=192)+float32",
        "sliding_window(window=128,sinks=4)+float32",
    }
    assert "sliding_window(window=64)+int8; 1=float32" in {cache for cache, _ in mixed}


def test_plans_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="`depths` must be at least 1"):
        EvalPlan(depths=0)
    with pytest.raises(ConfigError, match="of needle, passkey"):
        EvalPlan(tasks=("nedle",))
    with pytest.raises(ConfigError, match="one length at least"):
        EvalPlan(task_tokens=())
    with pytest.raises(ConfigError, match="must leave 128 of the model's 512"):
        run(tmp_path, [FULL], plan(task_tokens=(400,)))
    assert not (tmp_path / "eval.json").exists()
