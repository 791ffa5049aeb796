"""n-best sampling: the continuations of n single runs, ranked, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tfkv.errors import Finish, RowError, Status
from tfkv.serving import Candidate, Client, InputError

PROMPT = [5, 6, 7, 8, 9]
FAULTS = ["unavailable", "exhausted", "lost", "epoch", "busy", "full", "partial", "none"]


@pytest.fixture
def informed(server: Any, artifact: Any, fast_retry: Any) -> Iterator[Client]:
    """A client that has the manifest, so that it sends several rows a call."""
    with Client(server.target, artifact=artifact, retry=fast_retry, timeout=10.0) as made:
        yield made


def check(found: list[Candidate], expected: Any, count: int, seeds: range) -> None:
    assert sorted(candidate.seed for candidate in found) == list(seeds)
    for candidate in found:
        assert candidate.tokens == expected(PROMPT, count, candidate.seed)
        assert candidate.finish == Finish.LENGTH
        assert len(candidate.logprobs) == count
    scores = [candidate.score for candidate in found]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("which", ["client", "informed"])
def test_continuations_are_those_of_single_runs(
    server: Any, expected: Any, which: str, request: pytest.FixtureRequest
) -> None:
    client = request.getfixturevalue(which)
    with client.session() as session:
        found = session.generate_n(5, PROMPT, 9, seed=20)
        check(found, expected, 9, range(20, 25))
        assert session.tokens == [*PROMPT, *found[0].tokens]
        assert session.kinds[5:] == ["sampled"] * 9
        assert len(server.sessions) == 1
        history = [*session.tokens, 50]
        assert session.generate([50], 3).run().result.tokens == expected(history, 3)
    assert not server.sessions


def test_rows_share_calls(server: Any, informed: Client) -> None:
    with informed.session() as session:
        session.generate_n(8, PROMPT, 8, seed=1)
        # One prefill, eight forks, two rounds of eight rows, eight closes.
        assert server.predictions == 1 + 8 + 2 + 8
        session.generate_n(1, [50], 4, temperature=0)


def test_prompt_is_computed_once(server: Any, informed: Client) -> None:
    with informed.session() as session:
        session.generate_n(6, PROMPT, 8, seed=1)
        assert server.computed == 5 + 6 * 8


@pytest.mark.parametrize("rank", ["mean", "total"])
def test_rank(server: Any, client: Client, rank: str) -> None:
    server.next_token = lambda history, row: 1 if len(history) >= 6 + row["seed"] % 4 else 9
    with client.session() as session:
        found = session.generate_n(4, PROMPT, 9, seed=4, rank=rank, stop_tokens=[1])
    assert {len(candidate.tokens) for candidate in found} == {2, 3, 4, 5}
    assert all(candidate.finish == Finish.STOP for candidate in found)
    key = {"mean": "mean_logprob", "total": "total_logprob"}[rank]
    assert [c.score for c in found] == [getattr(c, key) for c in found]
    assert found == sorted(found, key=lambda c: -c.score)


@pytest.mark.parametrize("fault", [*FAULTS, "slow", "late"])
@pytest.mark.parametrize("at", [0, 1, 4, 5, 6])
def test_one_fault_changes_nothing(
    server: Any, informed: Client, expected: Any, fault: str, at: int
) -> None:
    server.faults.extend([None] * at + [fault])
    with informed.session() as session:
        check(session.generate_n(4, PROMPT, 9, seed=3), expected, 9, range(3, 7))
        server.faults.clear()
        history = session.tokens
        assert session.generate((), 3).run().result.tokens == expected(history, 3)


def test_conversation_goes_on_with_the_best(server: Any, informed: Client) -> None:
    with informed.session() as session:
        found = session.generate_n(3, [{"role": "user", "content": "hi"}], 5, seed=1)
        assert session.messages[-1] == {"role": "assistant", "content": found[0].text}
        assert isinstance(found[0].text, str)
        session.chat("more", 2).run()


def test_without_the_best_only_the_prompt_stays(client: Client) -> None:
    with client.session() as session:
        session.generate_n(2, PROMPT, 5, keep_best=False)
        assert session.tokens == PROMPT


def test_refusal_leaves_nothing_behind(
    server: Any, artifact: Any, fast_retry: Any, expected: Any
) -> None:
    with (
        Client(server.target, artifact=artifact, retry=fast_retry, timeout=0.2) as client,
        client.session() as session,
    ):
        first = session.generate(PROMPT, 3).run().result.tokens
        server.slots = 3
        with pytest.raises(RowError) as refused:
            session.generate_n(4, [50], 5)
        assert refused.value.status == Status.FULL
        assert len(server.sessions) == 1
        assert session.tokens == [*PROMPT, *first]
        after = session.generate([60], 3).run().result.tokens
        assert after == expected([*PROMPT, *first, 60], 3)


def test_what_makes_no_sense(server: Any, client: Client) -> None:
    with client.session() as session:
        for wrong, name in [
            ({"n": 0}, "n"),
            ({"temperature": 0.0}, "temperature"),
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"rank": "best"}, "rank"),
        ]:
            with pytest.raises(InputError, match=f"`{name}`"):
                session.generate_n(**{"n": 2, "prompt": PROMPT, **wrong})
        assert not server.calls
        largest = 2**63 - 1
        found = session.generate_n(3, PROMPT, 2, seed=largest)
        assert {candidate.seed for candidate in found} == {largest, 0, 1}
