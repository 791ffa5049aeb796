"""A session that is full: error, stop or slide; never a silent overwrite."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_artifacts import feed
from tiny_model import greedy, logits, sliding_pages, text

from tfkv.errors import Finish, Status

ERROR, STOP, SLIDE = 0, 1, 2
SEES = sliding_pages(96, 16)


def test_error_refuses_and_changes_nothing(plain):
    session, prompt = plain.name(), text(90)
    plain.generate(session, prompt, count=0)
    for count in (7, 8):
        answer = plain.generate(session, [], 90, count=count, overflow=ERROR)
        assert (answer["status"], answer["detail"], answer["count"]) == (Status.OVERFLOW, 96, 0)
    answer = plain.generate(session, [], 90, count=6)
    assert list(answer["tokens"][:6]) == greedy(prompt, 6)
    assert (answer["finish"], answer["position"]) == (Finish.LENGTH, 96)


def test_stop_samples_what_fits_and_says_why(plain):
    session, prompt = plain.name(), text(90)
    for _ in range(2):
        answer = plain.generate(session, prompt, overflow=STOP)
        assert (answer["status"], answer["count"]) == (Status.OK, 6)
        assert (answer["finish"], answer["position"]) == (Finish.CAPACITY, 96)
        assert list(answer["tokens"][:6]) == greedy(prompt, 6)
    answer = plain.generate(session, [], 96, overflow=STOP)
    assert (answer["status"], answer["count"]) == (Status.OK, 0)
    assert (answer["finish"], answer["position"]) == (Finish.CAPACITY, 96)
    answer = plain.generate(session, [5], 96, overflow=STOP)
    assert (answer["status"], answer["detail"]) == (Status.OVERFLOW, 96)


def test_full_session_still_answers_its_replays_and_logits(plain):
    session, prompt = plain.name(), text(96)
    plain.generate(session, prompt, count=0)
    answer = plain.decode(session, [], 96)
    np.testing.assert_allclose(answer["logits"], logits(prompt)[-1], atol=1e-3)


@pytest.mark.parametrize("cut", [1, 7, 64, 100, 128])
def test_slide_equals_the_reference_however_cut(plain, cut):
    """llama.cpp #3969, #4097: sliding never renumbers, and repeated sliding does not degrade."""
    tokens, session = text(300 if cut > 1 else 125), plain.name()
    feed(plain, session, tokens, cut, overflow=SLIDE)
    answer = plain.generate(session, [], len(tokens), overflow=SLIDE)
    assert list(answer["tokens"]) == greedy(tokens, 8, SEES)


def test_slide_while_sampling_equals_the_reference(plain):
    prompt, session = text(88), plain.name()
    tokens: list[int] = []
    for _ in range(5):
        answer = (
            plain.generate(session, [], 88 + len(tokens), overflow=SLIDE)
            if tokens
            else (plain.generate(session, prompt, overflow=SLIDE))
        )
        tokens += [int(t) for t in answer["tokens"]]
    assert tokens == greedy(prompt, 40, SEES)


@pytest.mark.parametrize("length", [95, 96, 97, 111, 112, 113, 128])
def test_slide_at_the_edges_of_pages(plain, length):
    tokens, session = text(length), plain.name()
    answer = plain.decode(session, tokens, overflow=SLIDE)
    np.testing.assert_allclose(answer["logits"], logits(tokens, SEES)[-1], atol=1e-3)


def test_slide_holds_no_more_pages_than_the_capacity(plain):
    session = plain.name()
    feed(plain, session, text(300), 100, overflow=SLIDE)
    assert plain.stats()["pages_used"] == 6


def test_slide_ends_at_the_trained_context(plain):
    session, tokens = plain.name(), text(505)
    feed(plain, session, tokens, 101, overflow=SLIDE)
    answer = plain.generate(session, [], 505, overflow=SLIDE)
    assert (answer["status"], answer["count"]) == (Status.OK, 7)
    assert (answer["finish"], answer["position"]) == (Finish.CAPACITY, 512)
    answer = plain.generate(session, [5], 512, overflow=SLIDE)
    assert (answer["status"], answer["detail"]) == (Status.OVERFLOW, 512)


def test_session_that_slid_does_not_fit_without_sliding(plain):
    session = plain.name()
    feed(plain, session, text(120), 60, overflow=SLIDE)
    answer = plain.generate(session, [5], 120, overflow=ERROR)
    assert (answer["status"], answer["detail"]) == (Status.OVERFLOW, 96)


def test_truncate_of_a_session_that_slid(plain):
    """A page that was dropped cannot come back; what is still seen in whole can."""
    session, tokens = plain.name(), text(200)
    feed(plain, session, tokens, 100, overflow=SLIDE)
    answer = plain.truncate(session, 100)
    assert answer["status"] == Status.NOT_REVERSIBLE
    smallest = int(answer["detail"])
    assert 100 < smallest <= 200
    assert plain.truncate(session, smallest - 1)["status"] == Status.NOT_REVERSIBLE
    assert plain.truncate(session, smallest)["status"] == Status.OK
    answer = plain.generate(session, [], smallest, overflow=SLIDE)
    assert list(answer["tokens"]) == greedy(tokens[:smallest], 8, SEES)


def test_overflow_of_one_row_leaves_the_others_alone(plain):
    """llama.cpp #6617: one overflow must not abort all generations."""
    prompts = [text(96, 1), text(96, 2), text(20, 3)]
    answer = plain.generate(
        [plain.name() for _ in prompts], prompts, overflow=[ERROR, STOP, ERROR], count=2
    )
    assert list(answer["status"]) == [Status.OVERFLOW, 0, 0]
    session = plain.name()
    assert list(plain.generate(session, prompts[2])["tokens"]) == greedy(prompts[2], 8)


def test_window_session_may_grow_to_the_trained_context_in_a_ring(window):
    session = window.name()
    feed(window, session, text(510), 102)
    assert window.stats()["pages_used"] == 7
    answer = window.generate(session, [], 510, count=3, overflow=STOP)
    assert (answer["count"], answer["finish"]) == (2, Finish.CAPACITY)
    assert window.generate(session, [], 512, count=3)["status"] == Status.OVERFLOW
