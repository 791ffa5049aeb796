"""Every row status with its detail; a refused row changes nothing and disturbs nobody."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tiny_artifacts import feed
from tiny_model import greedy, text

from tfkv.errors import INVALID_INPUTS, Finish, Status

NUMBER = {name: number for number, name in INVALID_INPUTS.items()}
NAN, INFINITE = float("nan"), float("inf")

BAD_VALUES = [
    ("tokens", {"tokens": [5, -1]}),
    ("tokens", {"tokens": [97]}),
    ("position", {"position": -2}),
    ("max_new_tokens", {"max_new_tokens": -1}),
    ("max_new_tokens", {"max_new_tokens": 9}),
    ("temperature", {"temperature": NAN}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": INFINITE}),
    ("top_p", {"top_p": NAN}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.01}),
    ("min_p", {"min_p": NAN}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("repetition_penalty", {"repetition_penalty": NAN}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": INFINITE}),
    ("top_k", {"top_k": -1}),
    ("overflow", {"overflow": 3}),
    ("overflow", {"overflow": -1}),
    ("pin", {"pin": 2}),
    ("ttl_ms", {"ttl_ms": -1}),
    ("stop_tokens", {"stop_tokens": [[-2, *[-1] * 7]]}),
    ("stop_tokens", {"stop_tokens": [[97, *[-1] * 7]]}),
]


@pytest.mark.parametrize(("name", "bad"), BAD_VALUES, ids=[str(bad) for _, bad in BAD_VALUES])
def test_value_out_of_range_is_invalid_and_names_its_input(plain, name, bad):
    session, before = plain.name(), plain.stats()
    answer = plain.generate(session, **{"tokens": [5, 6], **bad})
    assert (answer["status"], answer["detail"]) == (Status.INVALID, NUMBER[name])
    assert (answer["count"], answer["finish"], answer["position"]) == (0, Finish.NONE, 0)
    assert plain.counted(before) == {"calls": 1, "rows": 1, "rejected_invalid": 1}
    assert plain.generate(session, [5], 1)["status"] == Status.UNKNOWN, "a session was made"


@pytest.mark.parametrize("length", [-1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("signature", ["generate", "decode", "score"])
def test_length_beyond_the_tokens_that_came_is_invalid(plain, length, signature):
    answer = plain.artifact.call(
        signature, session_id=[plain.name()], tokens=[[5, 6]], length=[length], position=[0]
    )
    assert (answer["status"][0], answer["detail"][0]) == (Status.INVALID, NUMBER["length"])


def test_prompt_longer_than_a_call_carries_is_invalid(plain):
    answer = plain.generate(plain.name(), text(129), overflow=2)
    assert (answer["status"], answer["detail"]) == (Status.INVALID, NUMBER["length"])
    assert plain.generate(plain.name(), text(128), overflow=2)["status"] == Status.OK


@pytest.mark.parametrize("signature", ["generate", "decode", "score", "truncate", "close"])
def test_empty_session_id_is_invalid(plain, signature):
    answer = plain.call(signature, "", [5])
    assert answer["status"] == Status.INVALID
    if signature != "close":
        assert answer["detail"] == NUMBER["session_id"]


def test_new_session_without_a_token_is_empty(plain):
    session = plain.name()
    for signature in ("generate", "decode", "score"):
        for position in (0, -1):
            answer = plain.call(signature, session, [], position)
            assert (answer["status"], answer["detail"]) == (Status.EMPTY, 0)
    assert plain.stats()["slots_used"] == 0


def test_position_beyond_nothing_is_unknown_and_allocates_nothing(plain):
    """TFS version swap: a client that goes on with a lost session is told so."""
    for signature in ("generate", "decode", "score", "truncate"):
        answer = plain.call(signature, plain.name(), [5], 7)
        assert (answer["status"], answer["detail"], answer["position"]) == (Status.UNKNOWN, 0, 0)
    assert plain.stats()["slots_used"] == 0


@pytest.mark.parametrize("position", [31, 400, 2**31 - 1])
def test_position_beyond_the_end_is_a_gap(plain, position):
    session = plain.name()
    plain.generate(session, text(30), count=0)
    for signature in ("generate", "decode", "score", "truncate"):
        answer = plain.call(signature, session, [5], position)
        assert (answer["status"], answer["detail"]) == (Status.GAP, 30)
        assert answer["position"] == 30


def test_differing_token_is_a_conflict_at_the_first_difference(plain):
    session, prompt = plain.name(), text(30)
    plain.generate(session, prompt)
    other = list(prompt)
    other[13] = other[20] = 1
    for signature in ("generate", "decode", "score"):
        answer = plain.call(signature, session, other, 0)
        assert (answer["status"], answer["detail"]) == (Status.CONFLICT, 13)
        assert answer["position"] == 38
        answer = plain.call(signature, session, other[14:], 14)
        assert (answer["status"], answer["detail"]) == (Status.CONFLICT, 20)
    assert list(plain.generate(session, prompt)["tokens"]) == greedy(prompt, 8)


def test_token_that_differs_from_a_sampled_one_is_a_conflict(plain):
    session, prompt = plain.name(), text(30)
    sampled = [int(t) for t in plain.generate(session, prompt)["tokens"]]
    other = [*sampled[:3], (sampled[3] + 1) % 97]
    answer = plain.generate(session, other, 30)
    assert (answer["status"], answer["detail"]) == (Status.CONFLICT, 33)


def test_older_than_the_history_is_forgotten(window):
    session, tokens = window.name(), text(300)
    feed(window, session, tokens, 100)
    answer = window.generate(session, tokens[:10], 0, count=0)
    oldest = answer["detail"]
    assert answer["status"] == Status.FORGOTTEN
    assert 300 - 160 <= oldest <= 300 - 160 + 1
    assert window.generate(session, tokens[oldest:260], oldest, count=0)["status"] == Status.OK
    before = window.generate(session, tokens[oldest - 1 : 260], oldest - 1, count=0)
    assert (before["status"], before["detail"]) == (Status.FORGOTTEN, oldest)


def test_whole_call_can_be_repeated_within_the_history(window):
    session, tokens = window.name(), text(300)
    feed(window, session, tokens[:172], 43)
    first = window.generate(session, tokens[172:], 172)
    again = window.generate(session, tokens[172:], 172)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])


def test_more_than_a_session_may_hold_overflows(plain):
    session = plain.name()
    plain.generate(session, text(80), count=0)
    for signature in ("generate", "decode", "score"):
        answer = plain.call(signature, session, text(17), 80)
        assert (answer["status"], answer["detail"]) == (Status.OVERFLOW, 96)
        assert answer["position"] == 80
    assert plain.generate(session, text(9, 1), 80, count=8)["status"] == Status.OVERFLOW
    assert plain.generate(session, text(8, 1), 80, count=8)["position"] == 96


def test_no_free_slot_is_full_and_says_when_to_come_back(plain):
    names = [plain.name() for _ in range(8)]
    for name in names:
        plain.generate(name, [5], count=0, ttl_ms=60_000 if name == names[3] else 90_000)
    before = plain.stats()
    answer = plain.generate(plain.name(), [5])
    assert answer["status"] == Status.FULL
    assert 50_000 < answer["detail"] <= 60_000
    assert plain.counted(before)["rejected_full"] == 1
    plain.close(names[5])
    assert plain.generate(plain.name(), [5])["status"] == Status.OK


def test_full_within_a_batch_says_when_to_come_back(plain):
    for _ in range(7):
        plain.generate(plain.name(), [5], count=0, ttl_ms=60_000)
    answer = plain.generate([plain.name(), plain.name()], [[5], [6]])
    assert list(answer["status"]) == [Status.OK, Status.FULL]
    assert 50_000 < answer["detail"][1] <= 60_000


def test_full_of_pinned_sessions_still_answers(plain):
    names = [plain.name() for _ in range(8)]
    for start in (0, 4):
        plain.generate(names[start : start + 4], [[5]] * 4, count=0, pin=1)
    answer = plain.generate(plain.name(), [5])
    assert (answer["status"], answer["detail"]) == (Status.FULL, 2**31 - 1)


def test_more_new_sessions_than_slots_in_one_batch(window):
    answer = window.generate([window.name() for _ in range(4)], [[5], [6], [7], [8]])
    assert list(answer["status"]) == [Status.OK] * 3 + [Status.FULL]
    assert 0 < answer["detail"][3] <= 600_000


def test_differing_rows_of_one_session_are_busy(plain):
    session, other = plain.name(), plain.name()
    before = plain.stats()
    answer = plain.generate([other, session, session, session], [[4], [5, 6], [7, 8], [5, 6]])
    assert list(answer["status"]) == [0, 0, Status.BUSY, 0]
    assert (answer["detail"][2], answer["count"][2]) == (1, 0)
    assert list(answer["tokens"][1]) == list(answer["tokens"][3]) == greedy([5, 6], 8)
    assert list(answer["tokens"][2]) == [-1] * 8
    assert plain.counted(before)["rejected_busy"] == 1
    assert plain.generate(session, [], -1, count=0)["position"] == 10


def test_bad_row_of_a_session_does_not_disturb_a_good_row_of_it(plain):
    session, prompt = plain.name(), text(5)
    for rows, good in (([[97], prompt], 1), ([prompt, [97]], 0)):
        answer = plain.generate([session] * 2, rows)
        assert answer["status"][good] == Status.OK
        assert answer["status"][1 - good] == Status.INVALID
        assert answer["detail"][1 - good] == NUMBER["tokens"]
        assert list(answer["tokens"][good]) == greedy(prompt, 8)
        assert answer["count"][1 - good] == 0


@pytest.mark.parametrize("signature", ["generate", "decode", "score"])
def test_adapter_that_is_not_there_is_refused(plain, signature):
    """vllm #30931, #42125: an adapter never meets a cache that was made without it."""
    answer = plain.call(signature, plain.name(), [5], adapter="style")
    assert (answer["status"], answer["detail"]) == (Status.ADAPTER, 0)
    assert plain.stats()["slots_used"] == 0


BAD_ROWS = {
    "length 0": {"tokens": []},
    "token out of range": {"tokens": [1000]},
    "unknown": {"position": 9},
    "NaN": {"temperature": NAN},
    "negative": {"top_p": -1.0},
    "too many": {"max_new_tokens": 100},
    "no name": {"session": ""},
    "over-long": {"tokens": text(100)},
    "adapter": {"adapter": "x"},
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_bad_row_never_disturbs_its_batch_mates(plain, bad, at):
    good = [{"tokens": text(30, 1)}, {"tokens": text(3, 2)}]
    good.insert(at, BAD_ROWS[bad])
    defaults = {"position": 0, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 8, "adapter": ""}
    columns = {name: [row.get(name, value) for row in good] for name, value in defaults.items()}
    names = [row.get("session", plain.name()) for row in good]
    answer = plain.generate(names, [row.get("tokens", [5]) for row in good], **columns)
    for row, inputs in enumerate(good):
        if row == at:
            assert answer["status"][row] != Status.OK
            assert answer["count"][row] == 0
        else:
            assert answer["status"][row] == Status.OK
            assert list(answer["tokens"][row]) == greedy(inputs["tokens"], 8)
    assert plain.stats()["slots_used"] == 2


def test_session_that_was_never_served_counts_as_neither_opened_nor_reaped(plain):
    before = plain.stats()
    assert plain.generate(plain.name(), text(100))["status"] == Status.OVERFLOW
    session = plain.name()
    plain.generate(session, [5])
    plain.close(session)
    counted = plain.counted(before)
    assert "sessions_reaped" not in counted
    assert (counted["sessions_opened"], counted["sessions_closed"]) == (1, 1)


def test_conflict_and_busy_leave_the_lifetime_alone(plain):
    session = plain.name()
    plain.generate(session, [5], count=0, ttl_ms=150)
    assert plain.generate(session, [6], count=0, ttl_ms=60_000)["status"] == Status.CONFLICT
    time.sleep(0.25)
    assert plain.generate(session, [], 1, count=0)["status"] == Status.UNKNOWN


def test_threads_that_call_at_once_are_batched_and_each_gets_its_own(plain):
    prompts = [text(3 + n, n) for n in range(8)]
    answers: list[dict] = [{}] * 8

    def work(n: int) -> None:
        name = plain.name()
        first = plain.generate(name, prompts[n])
        second = plain.generate(name, [], 11 + n)
        answers[n] = [*first["tokens"], *second["tokens"]]

    before = plain.stats()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(8):
        assert answers[n] == greedy(prompts[n], 16)
    counted = plain.counted(before)
    assert counted["rows"] == 16
    assert counted["calls"] < 16, "calls of several clients share batches"
    sizes = plain.batches(before)
    assert sum(sizes) == counted["calls"]
    assert sizes[3:] == [0, 0], "at most 4 rows are put together"


def test_batches_are_counted_by_their_rows(plain):
    before = plain.stats()
    for rows in (1, 2, 3, 4):
        plain.generate([plain.name() for _ in range(rows)], [[5]] * rows, count=0)
    assert plain.batches(before) == [1, 1, 2, 0, 0]
