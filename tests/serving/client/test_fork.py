"""Branches of a session: the same transcript, whatever happens on the way."""

from __future__ import annotations

from typing import Any

import pytest

from tfkv.errors import RowError, Status, UnavailableError
from tfkv.serving import Client, InputError, Retry, SessionError

PROMPT = [5, 6, 7, 8, 9]
LONG = list(range(10, 30))
FAULTS = ["unavailable", "exhausted", "lost", "epoch", "busy", "full", "slow", "late"]


def forks(server: Any) -> list[Any]:
    return [row for signature, row in server.calls if signature == "fork"]


def held(server: Any, session: Any) -> list[int]:
    return server.sessions[(b"", session.session_id.encode())].tokens


def test_branches_go_on_independently(server: Any, client: Client, expected: Any) -> None:
    with client.session() as session:
        first = list(session.generate(PROMPT, 4))
        with session.fork() as branch:
            assert branch.tokens == session.tokens
            assert branch.kinds == session.kinds
            assert branch.logprobs == session.logprobs
            history = [*PROMPT, *first]
            computed = server.computed
            assert list(branch.generate([50], 3)) == expected([*history, 50], 3)
            assert list(session.generate([60], 3)) == expected([*history, 60], 3)
            assert server.computed == computed + 2 * 4
            assert held(server, branch) == branch.tokens
            assert held(server, session) == session.tokens
            assert branch.session_id != session.session_id
    assert not server.sessions
    assert [int(row["position"]) for row in forks(server)] == [9]


def test_fork_at_a_position(server: Any, client: Client, expected: Any) -> None:
    with client.session() as session:
        list(session.generate(PROMPT, 6))
        branch = session.fork("twin", 3)
        assert branch.session_id == "twin"
        assert branch.tokens == PROMPT[:3] == held(server, branch)
        assert list(branch.generate([40], 5)) == expected([*PROMPT[:3], 40], 5)


def test_what_was_not_sent_yet_is_sent_first(server: Any, client: Client, expected: Any) -> None:
    session = client.session(tokens=LONG)
    branch = session.fork()
    assert held(server, session) == held(server, branch) == LONG
    assert list(branch.generate((), 5)) == expected(LONG, 5)


def test_fork_of_nothing_sends_nothing(server: Any, client: Client, expected: Any) -> None:
    with client.session() as session, session.fork() as branch:
        assert not server.calls
        assert list(branch.generate(PROMPT, 3)) == expected(PROMPT, 3)


def test_branch_keeps_lifetime_and_messages(server: Any, client: Client) -> None:
    session = client.session(tokens=PROMPT, pin=True, ttl_ms=5000, overflow="slide")
    session.messages = [{"role": "user", "content": "hi"}]
    branch = session.fork()
    assert (int(forks(server)[0]["pin"]), int(forks(server)[0]["ttl_ms"])) == (1, 5000)
    branch.generate((), 1).run()
    assert int(server.calls[-1][1]["overflow"]) == 2
    assert branch.messages == session.messages
    assert session.fork(position=2).messages == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_one_fault_changes_nothing(
    server: Any, client: Client, expected: Any, fault: str, at: int
) -> None:
    with client.session() as session:
        first = list(session.generate(PROMPT, 4))
        server.faults.extend([None] * at + [fault])
        with session.fork() as branch:
            history = [*PROMPT, *first, 50]
            assert list(branch.generate([50], 3)) == expected(history, 3)
            assert held(server, branch) == branch.tokens
        assert list(session.generate([60], 3)) == expected([*PROMPT, *first, 60], 3)


def test_branch_outlives_the_epoch_and_its_origin(
    server: Any, client: Client, expected: Any
) -> None:
    session = client.session()
    first = list(session.generate(PROMPT, 4))
    branch = session.fork()
    session.close()
    server.forget()
    assert list(branch.generate([50], 3)) == expected([*PROMPT, *first, 50], 3)
    assert branch.replays == 1


def test_fork_after_a_restart_replays_the_origin(
    server: Any, client: Client, expected: Any
) -> None:
    session = client.session()
    first = list(session.generate(PROMPT, 4))
    server.forget()
    branch = session.fork()
    assert held(server, branch) == [*PROMPT, *first] == held(server, session)
    assert session.replays == 1
    assert list(branch.generate((), 3)) == expected([*PROMPT, *first], 3)


def test_another_session_of_that_name_after_a_restart(
    server: Any, client: Client, expected: Any
) -> None:
    """Its branch is not taken for one of ours."""
    session = client.session("mine")
    first = list(session.generate(PROMPT, 4))
    server.forget()
    with Client(server.target) as other:
        other.session("mine").generate(range(100, 107), 4).run()
    with pytest.raises(RowError) as refused:
        session.fork().generate((), 3).run()
    assert refused.value.status == Status.CONFLICT
    session.session_id = "free again"
    branch = session.fork()
    assert list(branch.generate((), 3)) == expected([*PROMPT, *first], 3)


def test_a_window_that_has_moved_on_means_replay(
    server: Any, client: Client, expected: Any
) -> None:
    server.rollback = 2
    with client.session() as session:
        list(session.generate(PROMPT, 8))
        with session.fork(position=5) as branch:
            assert list(branch.generate((), 3)) == expected(PROMPT, 3)


def test_branch_that_exists_already(server: Any, client: Client, expected: Any) -> None:
    session = client.session(tokens=PROMPT)
    session.fork("twin").generate([70, 71], 2).run()
    again = session.fork("twin")
    assert list(again.generate([50], 3)) == expected([*PROMPT, 50], 3)
    client.session("other").generate([90], 2).run()
    with pytest.raises(RowError) as refused:
        session.fork("other")
    assert refused.value.status == Status.CONFLICT


def test_refusals(server: Any, client: Client) -> None:
    session = client.session("one", tokens=PROMPT)
    for position in (-1, 6):
        with pytest.raises(InputError, match="within 0 and 5"):
            session.fork(position=position)
    with pytest.raises(InputError, match="name of its own"):
        session.fork("one")
    session.generate((), 1).run()
    server.slots = 1
    with (
        Client(server.target, timeout=0.2, retry=Retry(0.001, 0.01, 0.4)) as hasty,
        pytest.raises(RowError) as refused,
    ):
        hasty.session(tokens=session.tokens, session_id="one").fork()
    assert refused.value.status == Status.FULL
    session.close()
    with pytest.raises(SessionError, match="is closed"):
        session.fork()


def test_no_server_is_an_error(server: Any, client: Client) -> None:
    session = client.session(tokens=PROMPT)
    session.generate((), 1).run()
    server.faults.extend(["unavailable"] * 1000)
    with pytest.raises(UnavailableError):
        session.fork(timeout=0.2)
    server.faults.clear()
    assert session.fork().tokens == session.tokens
