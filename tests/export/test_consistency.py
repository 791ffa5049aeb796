"""Two systems side by side, on the tiny model and against its NumPy forward pass."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tiny_model
from tiny_artifacts import ENGINES

from tfkv.config import EngineConfig
from tfkv.consistency import check_consistency, read_prompts
from tfkv.errors import ConfigError, RowError
from tfkv.export.engine_calls import EngineCalls
from tfkv.export.speaker import Speaker

PROMPTS = [tiny_model.text(20, seed) for seed in range(4)]


def check(reference, candidate, model=None, prompts=PROMPTS, count=24, **options):
    return check_consistency(
        reference, candidate, model, prompts, max_new_tokens=count, meaning=False, **options
    )


@pytest.mark.slow
def test_an_artifact_agrees_with_itself_and_with_its_cache(exported):
    for candidate in (exported["plain"], "float32"):
        found = check(exported["plain"], candidate, tiny_model.source(), PROMPTS[:2])
        assert found.agreement_percent == 100
        assert found.first_divergence is None
        assert (found.kl, found.same_top_percent) == (pytest.approx(0, abs=1e-7), 100)


def test_answers_and_distributions_are_those_of_the_model():
    """The first divergence and the KL of an int8 cache, computed anew in float64."""
    found = check("float32", "int8", tiny_model.source(stop_tokens=()))
    for prompt, one in zip(PROMPTS, found.prompts, strict=True):
        expected = tiny_model.greedy(prompt, 24)
        given = tiny_model.greedy(prompt, 24, stored=tiny_model.int8)
        assert one.reference == " ".join(map(str, expected))
        assert one.candidate == " ".join(map(str, given))
        differs = [a != b for a, b in zip(expected, given, strict=True)]
        assert one.first_divergence == (differs.index(True) if any(differs) else None)
        text = prompt + expected[:-1]
        p, q = (
            tiny_model.log_softmax(tiny_model.logits(text, stored=stored)[len(prompt) - 1 :])
            for stored in (lambda x: x, tiny_model.int8)
        )
        kl = (np.exp(p) * (p - q)).sum(-1)
        assert one.kl == pytest.approx(kl.mean(), rel=0.02)
        assert one.kl_max == pytest.approx(kl.max(), rel=0.05)
        assert one.same_top == (p.argmax(-1) == q.argmax(-1)).sum()
    assert found.kl > 1e-5


@pytest.mark.slow
def test_a_codec_that_needs_a_calibration_gets_it():
    # Every direction, in float16: 2**-11 of a number, squared in the KL of a few logits.
    cache, source = "low_rank(rank=8,bits=16,recent=64,sinks=2)", tiny_model.source(stop_tokens=())
    calibration = tiny_model.calibration()
    prompts = [tiny_model.text(100, seed=7)]
    found = check("float32", cache, source, prompts, 8, calibration=calibration)
    assert 0 < found.kl < 1e-4
    with pytest.raises(ConfigError, match="tfkv calibrate"):
        check("float32", cache, source, prompts, 8)


def test_a_stop_token_ends_an_answer_and_belongs_to_it():
    expected = tiny_model.greedy(PROMPTS[0], 6)
    stop = expected[-1]
    calls = EngineCalls(tiny_model.source(stop_tokens=(stop,)), ENGINES["plain"])
    answer = Speaker(calls).answer(PROMPTS[0], 24)
    assert answer == expected[: expected.index(stop) + 1]


def test_prompts_of_any_length_are_handed_over_in_calls():
    """Of 128 tokens at most."""
    engine = dataclasses.replace(ENGINES["plain"], capacity=448, slots=1)
    speaker = Speaker(EngineCalls(tiny_model.source(stop_tokens=()), engine))
    for length in (1, 128, 129, 300):
        prompt = tiny_model.text(length)
        expected = tiny_model.greedy(prompt, 10)
        assert speaker.answer(prompt, 10) == expected
        rows = np.stack(list(speaker.logits(prompt, expected)))
        np.testing.assert_array_equal(rows.argmax(-1), expected)


def test_a_policy_that_wants_a_prompt_whole_gets_it_whole():
    """Evicted once the prompt was read, however many calls it took: logits as in one call."""
    cache = "snapkv(budget=40,sinks=2,window=16,whole_prompt=True)"
    prompt, rows = tiny_model.text(200), []
    for most in (64, 256):
        engine = EngineConfig(
            **{
                **ENGINES["plain"].to_dict(),
                **{"cache": cache, "capacity": 320, "prefill_tokens": most, "slots": 1},
            }
        )
        speaker = Speaker(EngineCalls(tiny_model.source(), engine))
        rows.append(np.stack(list(speaker.logits(prompt, prompt[:4]))))
    np.testing.assert_allclose(*rows, atol=1e-4)


def test_sessions_are_closed_after_each_question_even_a_refused_one():
    calls = EngineCalls(tiny_model.source(), dataclasses.replace(ENGINES["plain"], slots=1))
    speaker = Speaker(calls)
    with pytest.raises(RowError, match="'generate' at position 0 was refused: OVERFLOW"):
        speaker.answer(tiny_model.text(100), 8)
    speaker.answer(PROMPTS[0], 4)
    list(speaker.logits(PROMPTS[0], [5, 6]))
    assert int(calls.call("stats", session_id=["?"])["slots_used"][0]) == 0


@pytest.mark.parametrize(
    ("reference", "candidate", "model", "prompts", "message"),
    [
        ("float32", "int8", None, PROMPTS, "'float32' is no directory of an artifact"),
        ("plain", "int8", None, PROMPTS, "'int8' is no directory of an artifact"),
        ("float32", "int9", "tiny", PROMPTS, "Did you mean 'int8'"),
        ("float32", "int8", "tiny", ["text"], "Without a tokenizer"),
        ("float32", "int8", "tiny", [[]], "at least one token"),
        ("float32", "int8", "tiny", [], "must not be empty"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    exported, reference, candidate, model, prompts, message
):
    reference = exported[reference] if reference in ENGINES else reference
    with pytest.raises(ConfigError, match=message):
        check(reference, candidate, model and tiny_model.source(), prompts)


def test_two_vocabularies_are_not_compared(exported):
    config = dataclasses.replace(tiny_model.CONFIG, vocabulary_size=96)
    other = tiny_model.source(config=config, weights=tiny_model.make_weights(config))
    with pytest.raises(ConfigError, match=r"one vocabulary. Received: \[96, 97\]"):
        check(exported["plain"], "int8", other)


def test_meanings_need_texts():
    with pytest.raises(ConfigError, match="no tokenizer"):
        check_consistency("float32", "int8", tiny_model.source(), PROMPTS)


def test_prompts_are_read_a_line_each(tmp_path):
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text('What?\n\n"Why?"\n', encoding="utf-8")
    assert read_prompts(plain) == ["What?", '"Why?"']
    lines.write_text('"two\\nlines"\n[1, 2, 3]\n', encoding="utf-8")
    assert read_prompts(lines) == ["two\nlines", [1, 2, 3]]


@pytest.mark.parametrize("line", ["{}", "text", "[1.5]", "[true]", "3"])
def test_a_line_that_is_no_prompt_is_refused(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="a JSON string or a list of token ids"):
        read_prompts(path)
