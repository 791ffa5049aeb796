"""More sessions than slots: the idle ones wait in files, and come back as they were."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

import pytest

from tfkv.errors import RowError
from tfkv.serving import Client

SESSIONS = 80  # ten times the slots
FIRST, SECOND, NEW = 70, 9, 8


@pytest.fixture
def tiered(client: Client, artifact: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Client]:
    """A client that moves idle sessions out, of a tenant that shares no page with others."""
    with Client(client.target, artifact=artifact, tenant="tiered", offload=tmp_path) as own:
        yield own


def _turns(text: Sequence[int], number: int) -> tuple[list[int], list[int]]:
    start = 23 * number
    return list(text[start : start + FIRST]), list(text[start + FIRST : start + FIRST + SECOND])


def _alone(client: Client, turns: Sequence[list[int]]) -> list[int]:
    with client.session() as session:
        for turn in turns:
            session.generate(turn, NEW, stop_tokens=(), stream=False)
        return session.tokens


def test_sessions_beyond_the_slots_go_on_without_computing_anything_again(
    client: Client, tiered: Client, real_text: list[int], tmp_path: pathlib.Path
):
    sessions = [tiered.session() for _ in range(SESSIONS)]
    for number, session in enumerate(sessions):
        session.generate(_turns(real_text, number)[0], NEW, stop_tokens=(), stream=False)
    slots = tiered.stats()["slots"]
    assert tiered.offload.waiting == len(list(tmp_path.iterdir())) == SESSIONS - slots

    before = tiered.stats()["tokens_prefilled"]
    for number, session in enumerate(sessions):
        session.generate(_turns(real_text, number)[1], NEW, stop_tokens=(), stream=False)
    computed = tiered.stats()["tokens_prefilled"] - before
    assert computed == SESSIONS * SECOND, "the new tokens; the last sampled one among them"
    assert [session.replays for session in sessions] == [0] * SESSIONS
    assert tiered.offload.moved_in >= SESSIONS - slots

    for session in sessions:
        session.close()
    assert not list(tmp_path.iterdir()), "a closed session leaves no file"
    for number in range(0, SESSIONS, 20):
        assert sessions[number].tokens == _alone(client, _turns(real_text, number))


def test_a_damaged_file_costs_a_replay_and_nothing_else(
    client: Client, tiered: Client, real_text: list[int], tmp_path: pathlib.Path
):
    slots = tiered.stats()["slots"]
    sessions = [tiered.session() for _ in range(slots + 1)]
    for number, session in enumerate(sessions):
        session.generate(_turns(real_text, number)[0], NEW, stop_tokens=(), stream=False)
    (path,) = tmp_path.iterdir()
    whole = bytearray(path.read_bytes())
    whole[-100] ^= 1
    path.write_bytes(whole)
    sessions[0].generate(_turns(real_text, 0)[1], NEW, stop_tokens=(), stream=False)
    assert sessions[0].replays == 1
    for session in sessions:
        session.close()
    assert sessions[0].tokens == _alone(client, _turns(real_text, 0))


def test_pinned_sessions_stay_and_the_newcomer_is_refused(
    client: Client, tiered: Client, real_text: list[int], tmp_path: pathlib.Path
):
    pinned = [tiered.session(pin=True) for _ in range(tiered.stats()["slots"])]
    for number, session in enumerate(pinned):
        session.generate(_turns(real_text, number)[0], 1, stop_tokens=(), stream=False)
    with pytest.raises(RowError, match="FULL"):
        tiered.session().generate([5], 1, stream=False, timeout=1)
    assert not list(tmp_path.iterdir())
    for session in pinned:
        session.close()
