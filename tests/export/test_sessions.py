"""Lifetimes, tenants, closing, truncating, and slots that are used again."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tiny_artifacts import feed
from tiny_model import greedy, logits, text
from tiny_model import window as masked

from tfkv.errors import Status


def test_expired_session_is_gone_and_its_slot_free(plain):
    """tensorflow/serving #724: sessions have a time to live, and are reaped in the graph."""
    before, session = plain.stats(), plain.name()
    plain.generate(session, [5], ttl_ms=1)
    time.sleep(0.05)
    assert plain.generate(session, [], 9)["status"] == Status.UNKNOWN
    counted = plain.counted(before)
    assert (counted["sessions_opened"], counted["sessions_reaped"]) == (1, 1)
    assert plain.stats()["slots_used"] == 0


def test_expired_sessions_make_room_in_the_call_that_needs_it(window):
    """vllm #46283, triton #3652: what was left behind is reaped by the next allocation."""
    for _ in range(3):
        for _ in range(3):
            assert window.generate(window.name(), [5], ttl_ms=20)["status"] == Status.OK
        time.sleep(0.08)
    assert window.generate(window.name(), [5])["status"] == Status.OK


def test_unexpired_sessions_are_never_evicted(window):
    names = [window.name() for _ in range(3)]
    for name in names:
        window.generate(name, [5], count=0)
    for _ in range(3):
        assert window.generate(window.name(), [6])["status"] == Status.FULL
    for name in names:
        assert window.generate(name, [], 1, count=0)["position"] == 1


def test_each_call_renews_the_lifetime(plain):
    session = plain.name()
    plain.generate(session, [5], count=0, ttl_ms=400)
    for _ in range(4):
        time.sleep(0.15)
        assert plain.generate(session, [], 1, count=0, ttl_ms=400)["status"] == Status.OK


def test_pinned_session_outlives_its_time_until_a_call_unpins_it(plain):
    session = plain.name()
    plain.generate(session, [5], count=0, pin=1, ttl_ms=1)
    time.sleep(0.05)
    assert plain.generate(session, [], 1, count=0, pin=0, ttl_ms=1)["status"] == Status.OK
    time.sleep(0.05)
    assert plain.generate(session, [], 1, count=0)["status"] == Status.UNKNOWN


@pytest.mark.parametrize("ttl", [2**62, 2**63 - 1])
def test_huge_lifetime_does_not_wrap_around(plain, ttl):
    session = plain.name()
    plain.generate(session, [5], count=0, ttl_ms=ttl)
    assert plain.generate(session, [], 1, count=0)["status"] == Status.OK


TRICKY = [
    (("a", "b"), ("ab", "")),
    (("a", ":b"), ("a:", "b")),
    (("", "1:ab"), ("a", "b")),
    (("1", "1:x"), ("11:1", "x")),
    (("é", "x"), ("\u0065\u0301", "x")),
]


@pytest.mark.parametrize(("one", "other"), TRICKY)
def test_sessions_of_two_tenants_never_meet(plain, one, other):
    prompts = {one: text(6, 1), other: text(9, 2)}
    for (tenant, name), prompt in prompts.items():
        if name:
            answer = plain.generate(name, prompt, tenant=tenant)
            assert list(answer["tokens"]) == greedy(prompt, 8)
    for (tenant, name), prompt in prompts.items():
        if name:
            answer = plain.generate(name, [], len(prompt), tenant=tenant, count=0)
            assert answer["position"] == len(prompt) + 8


def test_same_id_of_two_tenants_in_one_batch(plain):
    name, prompts = plain.name(), [text(4, 1), text(7, 2)]
    answer = plain.generate([name, name], prompts, tenant=["one", "two"])
    assert list(answer["status"]) == [0, 0]
    for row, prompt in enumerate(prompts):
        assert list(answer["tokens"][row]) == greedy(prompt, 8)
    plain.close(name, tenant="one")
    assert plain.generate(name, [], 15, tenant="two", count=0)["status"] == Status.OK


def test_ids_are_bytes_of_any_length(plain):
    for name in (b"\xff\x00\x01", b"x" * 5000):
        answer = plain.artifact.call(
            "generate", session_id=[name], tokens=[[5, 6]], length=[2], position=[0]
        )
        assert list(answer["tokens"][0]) == greedy([5, 6], 8)
        assert plain.artifact.call("close", session_id=[name])["detail"][0] == 1


def test_close_is_idempotent_and_says_whether_there_was_one(plain):
    session = plain.name()
    plain.generate(session, [5])
    for detail in (1, 0, 0):
        answer = plain.close(session)
        assert (answer["status"], answer["detail"], answer["position"]) == (0, detail, 0)
    assert plain.generate(session, [], 9)["status"] == Status.UNKNOWN


def test_close_twice_in_one_call_counts_once(plain):
    before, names = plain.stats(), [plain.name(), plain.name()]
    plain.generate(names, [[5], [6]])
    answer = plain.close([names[0], names[1], names[0]])
    assert list(answer["status"]) == [0, 0, 0]
    assert plain.counted(before)["sessions_closed"] == 2


def test_close_of_an_expired_session_finds_none(plain):
    session, before = plain.name(), plain.stats()
    plain.generate(session, [5], ttl_ms=1)
    time.sleep(0.05)
    assert plain.close(session)["detail"] == 0
    counted = plain.counted(before)
    assert counted["sessions_reaped"] == 1
    assert "sessions_closed" not in counted


def test_slot_used_again_leaves_no_trace_of_the_old_session(plain):
    long, short = text(88, 1), text(3, 2)
    for round_ in range(3):
        old = plain.name()
        plain.score(old, long)
        plain.generate(old, [], 88)
        plain.close(old)
        new = plain.name()
        answer = plain.generate(new, short, repetition_penalty=1.5)
        assert list(answer["tokens"]) == greedy(short, 8, penalty=1.5)
        assert plain.score(new, short)["logprobs"][0] == 1.0
        assert plain.generate(new, [], 12)["status"] == Status.GAP
        plain.close(new)
        assert round_ >= 0 and plain.stats()["slots_used"] == 0


def test_slot_used_again_after_a_ring_wrapped(window):
    for seed in range(2):
        old = window.name()
        feed(window, old, text(200, seed), 100)
        window.close(old)
    prompt, new = text(30, 5), window.name()
    assert list(window.generate(new, prompt)["tokens"]) == greedy(prompt, 8, masked(20, 3))
    assert window.truncate(new, 3)["status"] == Status.OK


# --- truncate ------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 15, 16, 17, 30, 37, 38])
def test_truncate_then_continue_equals_a_fresh_session(plain, keep):
    session, prompt = plain.name(), text(30)
    transcript = prompt + [int(t) for t in plain.generate(session, prompt)["tokens"]]
    answer = plain.truncate(session, keep)
    assert (answer["status"], answer["position"]) == (Status.OK, keep)
    turn = text(5, 3)
    expected = greedy(transcript[:keep] + turn, 8)
    assert list(plain.generate(session, turn, keep)["tokens"]) == expected
    assert list(plain.generate(plain.name(), transcript[:keep] + turn)["tokens"]) == expected


def test_truncate_and_resample_at_once(plain):
    session, prompt = plain.name(), text(30)
    first = plain.generate(session, prompt)
    plain.truncate(session, 30)
    before = plain.stats()
    assert list(plain.generate(session, [], 30)["tokens"]) == list(first["tokens"])
    assert "tokens_prefilled" not in plain.counted(before)
    plain.truncate(session, 30)
    other = plain.generate(session, [], 30, temperature=5.0, seed=3)
    assert list(other["tokens"]) != list(first["tokens"])


def test_truncate_may_be_repeated(plain):
    session = plain.name()
    plain.generate(session, text(30))
    for _ in range(3):
        assert plain.truncate(session, 12)["position"] == 12
    assert plain.generate(session, [], 12, count=0)["position"] == 12


def test_truncate_to_nothing_keeps_an_empty_session(plain):
    session = plain.name()
    plain.generate(session, text(30))
    assert (plain.truncate(session, 0)["status"], plain.stats()["integrity"]) == (0, 0)
    assert plain.generate(session, [], 0)["status"] == Status.EMPTY
    prompt = text(7, 9)
    assert list(plain.generate(session, prompt)["tokens"]) == greedy(prompt, 8)


def test_truncate_to_nothing_of_no_session_is_fine(plain):
    answer = plain.truncate(plain.name(), 0)
    assert (answer["status"], answer["position"]) == (Status.OK, 0)


def test_truncate_refuses_a_negative_position(plain):
    session = plain.name()
    plain.generate(session, text(5), count=0)
    answer = plain.truncate(session, -1)
    assert (answer["status"], answer["detail"]) == (Status.INVALID, 4)


def test_truncate_of_several_rows(plain):
    names = [plain.name() for _ in range(3)]
    plain.generate(names, [text(20, n) for n in range(3)], count=0)
    answer = plain.truncate([*names, plain.name()], [5, 25, 20, 3])
    assert list(answer["status"]) == [0, Status.GAP, 0, Status.UNKNOWN]
    assert list(answer["position"]) == [5, 20, 20, 0]


def test_rows_that_truncate_one_session_differently(plain):
    session = plain.name()
    plain.generate(session, text(20), count=0)
    answer = plain.truncate([session, session, session], [15, 5, 15])
    assert list(answer["status"]) == [0, Status.BUSY, 0]
    assert list(answer["detail"]) == [0, 0, 0]
    assert plain.generate(session, [], -1, count=0)["position"] == 15


def test_truncate_within_the_rollback_of_a_ring(window):
    """What the ring still holds can be taken back, and no more: it says how far."""
    session, tokens = window.name(), text(200)
    feed(window, session, tokens, 100)
    rollback = window.artifact.manifest.rollback
    assert rollback > 0
    answer = window.truncate(session, 200 - rollback - 5)
    assert answer["status"] == Status.NOT_REVERSIBLE
    smallest = int(answer["detail"])
    assert smallest <= 200 - rollback + 1
    assert window.truncate(session, smallest - 1)["status"] == Status.NOT_REVERSIBLE
    assert window.truncate(session, smallest)["status"] == Status.OK
    turn = text(4, 8)
    expected = greedy(tokens[:smallest] + turn, 8, masked(20, 3))
    assert list(window.generate(session, turn, smallest)["tokens"]) == expected


def test_truncate_twice_remembers_what_the_ring_has_lost(window):
    session, tokens = window.name(), text(200)
    feed(window, session, tokens, 100)
    rollback = window.artifact.manifest.rollback
    assert window.truncate(session, 200 - rollback + 1)["status"] == Status.OK
    again = window.truncate(session, 200 - 2 * rollback)
    assert again["status"] == Status.NOT_REVERSIBLE
    smallest = int(again["detail"])
    assert window.truncate(session, smallest)["status"] == Status.OK
    expected = logits(tokens[:smallest], masked(20, 3))[-1]
    answer = window.decode(session, [], smallest)
    np.testing.assert_allclose(answer["logits"], expected, atol=1e-3)


def test_decode_in_the_middle_of_a_ring_reads_right_or_refuses(window):
    session, tokens = window.name(), text(200)
    feed(window, session, tokens, 100)
    expected = logits(tokens, masked(20, 3))
    read = refused = 0
    for end in range(105, 200, 7):
        answer = window.decode(session, tokens[end - 3 : end], end - 3)
        if answer["status"] == Status.NOT_REVERSIBLE:
            assert end < answer["detail"]
            refused += 1
        else:
            np.testing.assert_allclose(answer["logits"], expected[end - 1], atol=1e-3)
            assert answer["status"] == Status.OK
            read += 1
    assert read and refused


def test_score_in_the_middle_of_a_ring_is_right_or_says_it_has_none(window):
    from tiny_model import log_softmax

    session, tokens = window.name(), text(200)
    feed(window, session, tokens, 100)
    expected = log_softmax(logits(tokens, masked(20, 3)))[np.arange(199), tokens[1:]]
    scored = 0
    for start in range(60, 200, 20):
        given = tokens[start : start + 128]
        answer = window.score(session, given, start)
        assert answer["status"] == Status.OK
        got = answer["logprobs"][: len(given)]
        known = got <= 0
        right = expected[start - 1 : start - 1 + len(given)]
        np.testing.assert_allclose(got[known], right[known], atol=1e-3)
        assert (got[~known] == 1.0).all()
        scored += known.any()
    assert scored
