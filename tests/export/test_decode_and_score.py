"""`decode` and `score`: logits for callers that sample by themselves, logprobs for evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_artifacts import feed
from tiny_model import greedy, log_softmax, logits, text

from tfkv.errors import Status


def test_decode_returns_the_reference_logits(plain):
    prompt = text(30)
    answer = plain.decode(plain.name(), prompt)
    np.testing.assert_allclose(answer["logits"], logits(prompt)[-1], atol=1e-3)
    assert (answer["position"], answer["status"]) == (30, Status.OK)


def test_decode_loop_of_the_caller_equals_generate(plain):
    prompt, session = text(30), plain.name()
    tokens = [int(plain.decode(session, prompt)["logits"].argmax())]
    for step in range(7):
        answer = plain.decode(session, tokens[-1:], 30 + step)
        tokens.append(int(answer["logits"].argmax()))
    assert tokens == list(plain.generate(plain.name(), prompt)["tokens"]) == greedy(prompt, 8)


def test_repeated_decode_is_read_only_and_equal(plain):
    prompt, session = text(30), plain.name()
    first = plain.decode(session, prompt)
    before = plain.stats()
    for _ in range(3):
        again = plain.decode(session, prompt)
        np.testing.assert_allclose(again["logits"], first["logits"], atol=1e-5)
        assert again["position"] == 30
    assert plain.counted(before) == {"calls": 3, "rows": 3}


def test_decode_without_tokens_gives_the_logits_of_the_last_held(plain):
    prompt, session = text(30), plain.name()
    sampled = list(plain.generate(session, prompt)["tokens"])
    answer = plain.decode(session, [], 38)
    np.testing.assert_allclose(answer["logits"], logits(prompt + sampled)[-1], atol=1e-3)


@pytest.mark.parametrize("end", [1, 16, 17, 29])
def test_decode_in_the_middle_of_a_session_reads_and_changes_nothing(plain, end):
    prompt, session = text(30), plain.name()
    plain.generate(session, prompt)
    answer = plain.decode(session, prompt[:end])
    np.testing.assert_allclose(answer["logits"], logits(prompt[:end])[-1], atol=1e-3)
    assert answer["position"] == 38
    assert list(plain.generate(session, prompt)["tokens"]) == greedy(prompt, 8)
    assert list(plain.generate(session, [], 38)["tokens"]) == greedy(prompt, 16)[8:]


def test_reading_in_the_middle_does_not_touch_the_cache(plain):
    """Read-only to the last bit: what is on pages is not written again."""
    prompt, session = text(70), plain.name()
    plain.generate(session, prompt[:-1], count=0)
    first = plain.decode(session, prompt[-1:], 69)["logits"]
    for end in (5, 33, 66):
        plain.decode(session, prompt[:end])
        plain.score(session, prompt[end:], end)
    np.testing.assert_array_equal(plain.decode(session, prompt)["logits"], first)


def test_generate_after_decode_goes_on_from_the_same_cache(plain):
    prompt, session = text(30), plain.name()
    plain.decode(session, prompt)
    before = plain.stats()
    assert list(plain.generate(session, [], 30)["tokens"]) == greedy(prompt, 8)
    assert "tokens_prefilled" not in plain.counted(before)


@pytest.mark.parametrize("cut", [1, 7, 64, 90])
def test_score_equals_the_reference_however_cut(plain, cut):
    tokens, session = text(90), plain.name()
    got = []
    for start in range(0, 90, cut):
        answer = plain.score(session, tokens[start : start + cut], start)
        count = len(tokens[start : start + cut])
        assert (answer["status"], answer["count"]) == (Status.OK, count)
        got += list(answer["logprobs"][:count])
        assert not answer["logprobs"][count:].any()
    expected = log_softmax(logits(tokens))[np.arange(89), tokens[1:]]
    assert got[0] == 1.0, "the first token of a session has no logprob"
    np.testing.assert_allclose(got[1:], expected, atol=1e-3)


def test_replayed_score_is_equal(plain):
    tokens, session = text(40), plain.name()
    first = plain.score(session, tokens)
    again = plain.score(session, tokens)
    np.testing.assert_allclose(again["logprobs"], first["logprobs"], atol=1e-5)
    part = plain.score(session, tokens[10:20], 10)
    np.testing.assert_allclose(part["logprobs"][:10], first["logprobs"][10:20], atol=1e-5)
    assert part["position"] == 40


def test_score_of_a_session_that_was_prefilled_or_sampled(plain):
    prompt, session = text(20), plain.name()
    sampled = [int(t) for t in plain.generate(session, prompt)["tokens"]]
    tokens = prompt + sampled
    answer = plain.score(session, tokens)
    expected = log_softmax(logits(tokens))[np.arange(27), tokens[1:]]
    np.testing.assert_allclose(answer["logprobs"][1:28], expected, atol=1e-3)
    assert list(plain.generate(session, [], 28)["tokens"]) == greedy(tokens, 8)


def test_scores_of_a_batch_equal_those_alone_within_the_budget(plain):
    rows = [text(n, seed) for seed, n in enumerate((50, 90, 20))]
    names = [plain.name() for _ in rows]
    collected = [[], [], []]
    for _ in range(3):
        answer = plain.score(names, rows)
        for row in range(3):
            count = int(answer["count"][row])
            assert count >= len(collected[row])
            collected[row] = list(answer["logprobs"][row][:count])
    for tokens, scores in zip(rows, collected, strict=True):
        expected = log_softmax(logits(tokens))[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(scores[1:], expected, atol=1e-3)


def test_tokens_scored_are_counted(plain):
    before = plain.stats()
    plain.score(plain.name(), text(25, seed=77))
    assert plain.counted(before) == {
        "prefix_lookups": 1,
        "calls": 1,
        "rows": 1,
        "sessions_opened": 1,
        "tokens_prefilled": 24,
        "tokens_scored": 25,
    }


def test_replayed_score_computes_nothing(plain):
    tokens, session = text(40), plain.name()
    first = plain.score(session, tokens)
    before = plain.stats()
    again = plain.score(session, tokens)
    np.testing.assert_array_equal(again["logprobs"], first["logprobs"])
    assert "tokens_prefilled" not in plain.counted(before)


def test_window_scores_and_logits_equal_a_masked_full_run(window):
    """transformers #37574, #39408: W−1, W, W+1 and 2W tokens; litgpt #2182: beyond the ring."""
    from tiny_model import window as masked

    sees, tokens, session = masked(20, 3), text(260), window.name()
    expected = logits(tokens, sees)
    done = 0
    for end in (19, 20, 21, 40, 41, 105, 200, 260):
        answer = window.decode(session, tokens[done:end], done)
        np.testing.assert_allclose(answer["logits"], expected[end - 1], atol=1e-3)
        done = end
    for cut in (64, 128):
        other = window.name()
        feed(window, other, tokens[:-1], cut)
        last = window.score(other, tokens[-1:], 259)
        logprob = log_softmax(expected)[258, tokens[-1]]
        np.testing.assert_allclose(last["logprobs"][0], logprob, atol=1e-3)
        window.close(other)
