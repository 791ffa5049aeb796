"""Beam search against brute force, and against the textbook's algorithm."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tfkv.errors import Finish, RowError, Status
from tfkv.serving import Client, InputError, beam_search

PROMPT = [5, 6, 7]
STOP = 1
LETTERS = [STOP, 10, 11, 12]

Logits = Callable[[Sequence[int]], np.ndarray]
Scored = list[tuple[float, tuple[int, ...]]]


def toy(seed: int) -> Logits:
    """A model of four letters whose logits depend on all that came before."""

    def logits(history: Sequence[int]) -> np.ndarray:
        key = zlib.crc32(np.array([*history, seed], np.int64).tobytes())
        found = np.full(300, -1e9, np.float32)
        found[LETTERS] = np.random.default_rng(key).normal(0.0, 1.5, len(LETTERS))
        return found

    return logits


def logprobs_of(logits: Logits, tokens: Sequence[int]) -> list[float]:
    found = []
    for at, token in enumerate(tokens):
        row = logits([*PROMPT, *tokens[:at]]).astype(np.float64)
        found.append(float(row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()))
    return found


def brute_force(logits: Logits, longest: int, penalty: float) -> Scored:
    """Every continuation there is, best first."""
    words = [
        word
        for length in range(1, longest + 1)
        for word in itertools.product(LETTERS, repeat=length)
        if STOP not in word[:-1] and (word[-1] == STOP or length == longest)
    ]
    scored = [(math.fsum(logprobs_of(logits, word)) / len(word) ** penalty, word) for word in words]
    return sorted(scored, reverse=True)


def textbook(logits: Logits, width: int, longest: int, penalty: float) -> Scored:
    """Beam search without branches and without an early end."""
    live: list[tuple[int, ...]] = [()]
    ended: list[tuple[int, ...]] = []
    for _ in range(longest):
        longer = [(*word, letter) for word in live for letter in LETTERS]
        longer.sort(key=lambda word: -math.fsum(logprobs_of(logits, word)))
        ended += [word for word in longer if word[-1] == STOP]
        live = [word for word in longer if word[-1] != STOP][:width]
    scored = [
        (math.fsum(logprobs_of(logits, word)) / len(word) ** penalty, word)
        for word in [*ended, *live]
    ]
    return sorted(scored, reverse=True)[:width]


@pytest.fixture
def informed(server: Any, artifact: Any, fast_retry: Any) -> Iterator[Client]:
    with Client(server.target, artifact=artifact, retry=fast_retry, timeout=10.0) as made:
        yield made


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_wide_enough_it_is_brute_force(
    server: Any, informed: Client, seed: int, penalty: float
) -> None:
    server.logits = toy(seed)
    with informed.session(tokens=PROMPT) as session:
        # Of three letters that go on there are 27 words of three.
        found = beam_search(session, 27, 4, penalty, stop_tokens=[STOP], keep_best=False)
        best = brute_force(server.logits, 4, penalty)[: len(found)]
    assert len(found) == 27
    assert [tuple(one.tokens) for one in found] == [word for _, word in best]
    assert [one.score for one in found] == pytest.approx([score for score, _ in best], rel=1e-5)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("which", ["client", "informed"])
def test_narrow_it_is_the_textbook(
    server: Any, width: int, seed: int, which: str, request: pytest.FixtureRequest
) -> None:
    server.logits = toy(seed)
    client = request.getfixturevalue(which)
    with client.session() as session:
        found = beam_search(session, width, 6, 1.0, prompt=PROMPT, stop_tokens=[STOP])
        best = textbook(server.logits, width, 6, 1.0)
        assert [tuple(one.tokens) for one in found] == [word for _, word in best]
        for one in found:
            assert one.logprobs == pytest.approx(logprobs_of(server.logits, one.tokens), rel=1e-5)
            assert one.finish == (Finish.STOP if one.tokens[-1] == STOP else Finish.LENGTH)
        assert session.tokens == [*PROMPT, *found[0].tokens]
        assert len(server.sessions) == 1


def test_width_one_is_greedy(server: Any, client: Client, expected: Any) -> None:
    with client.session() as session:
        (found,) = beam_search(session, 1, 7, prompt=PROMPT, stop_tokens=[])
        assert found.tokens == expected(PROMPT, 7)


def test_never_more_branches_than_beams(server: Any, informed: Client) -> None:
    server.logits = toy(1)
    server.slots = 4
    with informed.session() as session:
        beam_search(session, 3, 8, prompt=PROMPT, stop_tokens=[])
    assert not server.sessions


@pytest.mark.parametrize("fault", ["unavailable", "lost", "epoch", "busy", "full", "slow"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 6])
def test_one_fault_changes_nothing(server: Any, informed: Client, fault: str, at: int) -> None:
    server.logits = toy(2)
    server.faults.extend([None] * at + [fault])
    with informed.session() as session:
        found = beam_search(session, 3, 5, prompt=PROMPT, stop_tokens=[STOP])
        best = textbook(server.logits, 3, 5, 1.0)
        assert [tuple(one.tokens) for one in found] == [word for _, word in best]


def test_it_ends_when_nothing_can_change(server: Any, informed: Client) -> None:
    """A model that wants to stop is not asked for 60 more tokens."""

    def logits(history: Sequence[int]) -> np.ndarray:
        found = np.full(300, -1e9, np.float32)
        found[[STOP, 10, 11]] = [3.0, 0.0, -1.0] if len(history) > 3 else [-9.0, 1.0, 0.0]
        return found

    server.logits = logits
    with informed.session() as session:
        found = beam_search(session, 2, 60, 0.0, prompt=PROMPT, stop_tokens=[STOP])
    assert [one.tokens for one in found] == [[10, STOP], [11, STOP]]
    assert len([row for signature, row in server.calls if signature == "decode"]) < 10


def test_refusal_leaves_nothing_behind(server: Any, artifact: Any, fast_retry: Any) -> None:
    server.logits = toy(1)
    server.slots = 2
    with (
        Client(server.target, artifact=artifact, retry=fast_retry, timeout=0.2) as client,
        client.session() as session,
    ):
        with pytest.raises(RowError) as refused:
            beam_search(session, 3, 5, prompt=PROMPT)
        assert refused.value.status == Status.FULL
        assert session.tokens == []
        assert len(server.sessions) == 1


def test_what_makes_no_sense(client: Client) -> None:
    with client.session() as session:
        for wrong, name in [
            ({"width": 0}, "width"),
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"length_penalty": -1.0}, "length_penalty"),
            ({"length_penalty": float("nan")}, "length_penalty"),
        ]:
            with pytest.raises(InputError, match=f"`{name}`"):
                beam_search(session, **wrong)
