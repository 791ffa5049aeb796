"""The least work that makes a call true: every small case against sequential Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tiny_model

from tfkv.config import EngineConfig
from tfkv.errors import Status
from tfkv.export.layer_groups import LayerGroups
from tfkv.export.plan import Plan, PrefillBudget, Remembered, make_plan, oldest_start
from tfkv.export.rows import (
    DECODE,
    GENERATE,
    GIVEN,
    NO_LOGPROB,
    SAMPLED,
    SCORE,
    STOPPED,
    Admission,
    Request,
)
from tfkv.manifest import MAX_STOP_TOKENS

WIDTH, CHUNK, HISTORY = 3, 2, 8
ENGINE = EngineConfig(capacity=8, page_size=2, decode_chunk=CHUNK, prefill_tokens=WIDTH)
GROUPS = LayerGroups.of(tiny_model.CONFIG, ENGINE, 4)
PATTERNS = [
    (GIVEN,) * 6,
    (GIVEN, SAMPLED, SAMPLED, SAMPLED, SAMPLED, SAMPLED),
    (GIVEN, GIVEN, SAMPLED, STOPPED, GIVEN, SAMPLED),
    (GIVEN, STOPPED, STOPPED, SAMPLED, GIVEN, GIVEN),
]


def token_at(position: int) -> int:
    return 10 + position


def session(held: int, filled: int, reached: int, kinds) -> dict:
    """What is stored: token 10 + position, kinds by pattern, logprobs of what was sampled."""
    tokens, stored = np.full(HISTORY, 99), np.zeros(HISTORY, int)
    logprobs = np.full(HISTORY, NO_LOGPROB, np.float32)
    for p in range(reached):
        kind = kinds[p % len(kinds)]
        tokens[p % HISTORY] = token_at(p) if p < held else 99
        stored[p % HISTORY] = kind
        logprobs[p % HISTORY] = NO_LOGPROB if kind == GIVEN else -1.0
    return {
        "held": held, "filled": filled, "reached": reached, "tokens": tokens, "kinds": stored,
        "logprobs": logprobs,
    }  # fmt: skip


def plan_all(cases: list[dict], budget: int = 10**6) -> Plan:
    """One eager plan with a case a row."""

    def column(name, default=0, dtype=np.int32):
        return tf.constant(np.array([case.get(name, default) for case in cases], dtype))

    rows = len(cases)
    zeros = tf.zeros([rows], tf.int32)
    request = Request(
        mode=column("mode"),
        tokens=column("given", [0] * WIDTH),
        length=column("length"),
        position=column("position"),
        max_new_tokens=column("count"),
        temperature=tf.zeros([rows]),
        top_p=tf.ones([rows]),
        min_p=tf.zeros([rows]),
        repetition_penalty=tf.ones([rows]),
        top_k=zeros,
        seed=tf.zeros([rows], tf.int64),
        stop_tokens=tf.fill([rows, MAX_STOP_TOKENS], -1),
        overflow=column("overflow"),
        pin=zeros,
        ttl_ms=tf.zeros([rows], tf.int64),
    )
    first = tf.constant([case.get("first", row) for row, case in enumerate(cases)])
    admission = Admission(
        slot=zeros,
        fresh=zeros > 0,
        first=first,
        status=column("refused"),
        detail=column("why"),
        tenant=tf.cast(zeros, tf.int64),
        retry_ms=zeros[:1],
        now_ms=tf.zeros([1], tf.int64),
    )
    stored = Remembered(
        column("held"), column("filled"), column("reached"), zeros, column("tokens"),
        column("kinds"), column("logprobs", 0, np.float32),
    )  # fmt: skip
    plan = make_plan(request, admission, stored, GROUPS, PrefillBudget(budget, 99, 1), CHUNK)
    return Plan(*(value.numpy() for value in plan))


def expected(case: dict) -> dict:
    """What a patient reader of the contract would decide."""
    held, filled, mode = case["held"], case["filled"], case["mode"]
    position = held if case["position"] < 0 else case["position"]
    end = position + case["length"]
    oldest = int(oldest_start(tf.constant(case["reached"]), HISTORY))
    if position > held:
        return {"status": Status.GAP, "detail": held}
    if position < oldest:
        return {"status": Status.FORGOTTEN, "detail": oldest}
    for index in range(case["length"]):
        if position + index < held and case["given"][index] != token_at(position + index):
            return {"status": Status.CONFLICT, "detail": position + index}
    if end == 0 and (held == 0 or mode == DECODE):
        return {"status": Status.EMPTY, "detail": 0}
    replayed, stopped = 0, False
    for place in range(end, min(end + case["count"], held)):
        kind = case["kinds"][place % HISTORY]
        if kind == GIVEN:
            if place == end:
                return {"status": Status.CONFLICT, "detail": end}
            break
        replayed += 1
        if kind == STOPPED:
            stopped = True
            break
    wanted = case["count"] - replayed if end + replayed >= held and not stopped else 0
    limit = 512 if case["overflow"] == 2 else 8
    whole = max(held, end)
    if end > limit or (case["overflow"] == 0 and wanted and whole + wanted > limit):
        return {"status": Status.OVERFLOW, "detail": limit}
    sampled = min(wanted, max(limit - whole, 0))
    target = whole if mode == GENERATE else max(end, 1)
    start = min(filled, target - 1)
    if mode == SCORE:
        for place in range(max(position, 1), end):
            if place >= held or case["logprobs"][place % HISTORY] > 0:
                start = min(start, place - 1)
                break
    return {
        "status": Status.OK, "position": position, "held": whole, "start": start,
        "fill": target - 1 - start, "steps": 1 if mode == DECODE else sampled,
        "replayed": replayed, "stopped": stopped, "capped": sampled < wanted,
        "unfinished": False,
    }  # fmt: skip


def check(cases: list[dict]) -> None:
    plan = plan_all(cases)
    for row, case in enumerate(cases):
        want = expected(case)
        got = {name: getattr(plan, name)[row] for name in want}
        assert got == want, (case, got, want)
        if want["status"] != Status.OK:
            assert (plan.fill[row], plan.steps[row]) == (0, 0), case


def all_cases():
    sessions = [
        session(held, filled, reached, kinds)
        for kinds in PATTERNS
        for held in range(7)
        for filled in {max(held - 1, 0), held}
        for reached in {held, 8}
        if reached >= held
    ]
    for stored, position, length, wrong in itertools.product(
        sessions, range(-1, 8), range(WIDTH + 1), range(-1, WIDTH)
    ):
        if wrong >= length:
            continue
        start = stored["held"] if position < 0 else position
        given = [token_at(start + i) + 50 * (i == wrong) for i in range(WIDTH)]
        yield {**stored, "position": position, "length": length, "given": given}


@pytest.mark.parametrize("mode", [GENERATE, DECODE, SCORE])
def test_every_small_case_equals_sequential_python(mode):
    cases = [
        {**case, "mode": mode, "count": count, "overflow": overflow}
        for case in all_cases()
        for count in (range(CHUNK + 1) if mode == GENERATE else [0])
        for overflow in (0, 1)
    ]
    assert len(cases) > 5000
    check(cases)


def test_forgotten_places_are_never_answered_from():
    """The history is shorter than the session: its places hold newer tokens."""
    cases = []
    for held in (9, 12, 20):
        stored = session(held, held - 1, held, PATTERNS[0])
        for position in range(held + 2):
            given = [token_at(position + i) for i in range(WIDTH)]
            for mode in (GENERATE, DECODE):
                cases.append(
                    {**stored, "position": position, "length": 2, "given": given, "mode": mode,
                     "count": 0, "overflow": 2}
                )  # fmt: skip
    plan = plan_all(cases)
    for row, case in enumerate(cases):
        oldest = case["held"] - HISTORY + 1
        forgotten = plan.status[row] == Status.FORGOTTEN
        assert forgotten == (case["position"] < oldest), case
        if forgotten:
            assert plan.detail[row] == oldest
        elif plan.status[row] == Status.OK:
            assert plan.start[row] >= case["held"] - HISTORY


def test_copies_and_refused_rows_do_no_work():
    stored = session(0, 0, 0, PATTERNS[0])
    call = {"position": 0, "length": 3, "given": [10, 11, 12], "mode": GENERATE, "count": 2}
    row = {**stored, **call}
    refused = {**row, "refused": int(Status.FULL), "why": 77}
    plan = plan_all([row, {**row, "first": 0}, refused])
    assert list(plan.fill) == [2, 0, 0]
    assert list(plan.steps) == [2, 0, 0]
    assert (plan.status[2], plan.detail[2]) == (Status.FULL, 77)


@pytest.mark.parametrize("budget", range(8))
def test_prefill_budget_goes_to_the_first_rows_and_the_rest_is_unfinished(budget):
    stored = session(0, 0, 0, PATTERNS[0])
    row = {**stored, "position": 0, "length": 3, "given": [10, 11, 12], "count": 2}
    plan = plan_all([{**row, "mode": mode} for mode in (GENERATE, DECODE, SCORE)], budget)
    left = budget
    for index in range(3):
        fill = min(left, 2)
        left -= fill
        assert plan.fill[index] == fill
        assert plan.unfinished[index] == (fill < 2)
        assert plan.held[index] == fill + 1
        if fill < 2:
            assert plan.steps[index] == 0


BUDGET = PrefillBudget(most=1024, shared=128, piece=64)


@pytest.mark.parametrize(
    ("needs", "gets"),
    [
        ([4000], [1024]),  # alone: all of it
        ([4000, 2000], [512, 512]),  # long rows among themselves share alike
        ([4000, 0], [128, 0]),  # somebody waits for a token
        ([4000, 40, 100], [128, 40, 100]),  # short rows are never cut
        ([900, 128, 4000], [64, 128, 64]),
        ([4000] * 7 + [0], [64] * 7 + [0]),  # a piece each, at least
        ([128] * 9, [128] * 8 + [0]),  # the short ones have a budget, too
        ([128] * 8 + [5], [128] * 7 + [123, 5]),  # ... the shortest first
        ([0, 0], [0, 0]),
    ],
)
def test_long_prompts_share_the_budget_and_never_hold_up_short_ones(needs, gets):
    fill = tf.constant(needs)
    assert BUDGET.share_out(fill, tf.ones_like(fill, tf.bool)).numpy().tolist() == gets


def test_a_refused_row_is_no_company():
    allowed = BUDGET.share_out(tf.constant([4000, 0]), tf.constant([True, False]))
    assert allowed.numpy().tolist() == [1024, 0]
