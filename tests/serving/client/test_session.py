"""Sessions under every injected fault: no token lost, none twice, the same continuation."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tfkv.config import EngineConfig
from tfkv.errors import DeadlineError, Finish, RowError, Status, UnavailableError
from tfkv.serving import Client, InputError, Retry, SessionError, TextError

PROMPT = [5, 6, 7, 8, 9]
LONG = list(range(10, 45))
FAULTS = ["unavailable", "exhausted", "lost", "epoch", "busy", "full", "partial", "none"]


def only_session(server: Any) -> Any:
    (held,) = server.sessions.values()
    return held


def test_tokens_positions_and_inputs(server: Any, client: Client, expected: Any) -> None:
    with client.session() as session:
        generation = session.generate(PROMPT, 10)
        assert list(generation) == expected(PROMPT, 10)
        assert generation.result.finish == Finish.LENGTH
        assert len(generation.result.logprobs) == 10
        assert session.tokens == PROMPT + expected(PROMPT, 10)
        assert session.kinds == ["given"] * 5 + ["sampled"] * 10
        assert session.position == 15
        assert only_session(server).tokens == session.tokens
    assert not server.sessions
    for signature, row in server.calls:
        assert set(row) == set(server.table[signature].inputs)
        assert row.get("position", 0) >= 0


def test_second_turn_computes_new_tokens_only(server: Any, client: Client, expected: Any) -> None:
    with client.session() as session:
        first = session.generate(PROMPT, 6).run().result.tokens
        computed = server.computed
        history = [*PROMPT, *first, 50, 51]
        assert list(session.generate([50, 51], 6)) == expected(history, 6)
        assert server.computed == computed + 2 + 6


def test_long_prompt_goes_in_pieces(server: Any, client: Client, expected: Any) -> None:
    with client.session() as session:
        assert list(session.generate(LONG, 5)) == expected(LONG, 5)
    rows = [row for signature, row in server.calls if signature == "generate"]
    assert all(len(row["tokens"]) <= server.engine.prefill_tokens for row in rows)
    assert [row["max_new_tokens"] for row in rows] == [0, 0, 0, 0, 1, 4]


def test_first_token_comes_early(server: Any, client: Client) -> None:
    with client.session() as session:
        generation = session.generate(PROMPT, 9)
        next(generation)
        assert len(session.tokens) == 6
        result = generation.run().result
    assert result.first_tokens == 1
    assert 0 < result.time_to_first_token < result.seconds
    assert result.tokens_per_second > 0


@pytest.mark.parametrize("fault", [*FAULTS, "slow", "late"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 6])
def test_one_fault_changes_nothing(
    server: Any, client: Client, expected: Any, fault: str, at: int
) -> None:
    server.faults.extend([None] * at + [fault])
    with client.session() as session:
        first = list(session.generate(LONG[:12], 9))
        assert first == expected(LONG[:12], 9)
        history = [*LONG[:12], *first, 99]
        assert list(session.generate([99], 5, temperature=0.7, seed=3)) == expected(history, 5, 3)
        assert only_session(server).tokens == session.tokens


@pytest.mark.parametrize("seed", range(25))
def test_any_schedule_of_faults_changes_nothing(
    server: Any, client: Client, expected: Any, seed: int
) -> None:
    chance = random.Random(seed)
    server.faults.extend(
        chance.choice(FAULTS) if chance.random() < 0.4 else None for _ in range(120)
    )
    with client.session() as session:
        history: list[int] = []
        for turn in range(4):
            given = [chance.randrange(2, 300) for _ in range(chance.randrange(1, 20))]
            count = chance.randrange(1, 12)
            history += given
            got = list(session.generate(given, count, temperature=1.0, seed=turn))
            assert got == expected(history, count, turn)
            history += got
            assert session.tokens == history
        server.faults.clear()
        held = only_session(server)
        assert held.tokens == history


def test_replay_after_epoch_gives_the_same_continuation(
    server: Any, client: Client, expected: Any
) -> None:
    with client.session() as session:
        generation = session.generate(LONG, 12, temperature=1.0, seed=9)
        pieces = [next(generation) for _ in range(5)]
        epoch = session.epoch
        server.forget()
        assert pieces + list(generation) == expected(LONG, 12, 9)
        assert session.replays == 1
        assert session.epoch == epoch + 1


def test_report_tfs_version_swap_with_a_foreign_session_of_the_same_name(
    server: Any, client: Client, expected: Any
) -> None:
    # The new epoch holds a session of that name, long enough for the call to be accepted.
    session = client.session("shared")
    first = session.generate(PROMPT, 4).run().result.tokens
    server.forget()
    client.session("shared").generate([77, *PROMPT[1:], *first], 0).run()
    with pytest.raises(RowError) as caught:
        list(session.generate(max_new_tokens=4))
    assert caught.value.status == Status.CONFLICT
    assert session.tokens == PROMPT + first


def test_replay_when_the_session_expired(server: Any, client: Client, expected: Any) -> None:
    with client.session() as session:
        first = list(session.generate(PROMPT, 4))
        server.sessions.clear()
        assert list(session.generate(max_new_tokens=4)) == expected([*PROMPT, *first], 4)


def test_recompute_sends_transcript_and_question_as_one_prompt(
    server: Any, client: Client, expected: Any
) -> None:
    with client.session() as session:
        first = list(session.generate(PROMPT, 4))
        session.recompute()
        assert server.sessions == {}
        history = [*PROMPT, *first, 40]
        assert list(session.generate([40], 4)) == expected(history, 4)
        assert session.replays == 0  # nothing was lost
        assert only_session(server).tokens == session.tokens


def test_server_killed_and_restarted(server: Any, client: Client, expected: Any) -> None:
    with client.session() as session:
        generation = session.generate(LONG, 12)
        pieces = [next(generation) for _ in range(5)]
        server.stop()
        server.forget()
        threading.Timer(0.3, server.start).start()
        assert pieces + list(generation) == expected(LONG, 12)
        assert session.replays == 1


def test_replicas_without_affinity_are_reported(server: Any, client: Client) -> None:
    session = client.session()
    session.generate(LONG, 2).run()
    server.faults.extend(["epoch", None] * 100)
    with pytest.raises(SessionError, match="session affinity"):
        session.generate(LONG, 2).run()


def test_a_failed_prompt_is_taken_back(server: Any, expected: Any) -> None:
    retry = Retry(first_wait=0.001, attempts=3)
    with Client(server.target, retry=retry) as client, client.session() as session:
        first = list(session.generate(PROMPT, 4))
        before = session.tokens
        # Two pieces arrive, then the server is gone for good.
        server.faults.extend([None, None] + ["unavailable"] * 10_000)
        with pytest.raises(UnavailableError):
            list(session.generate(LONG, 4))
        assert session.tokens == before
        server.faults.clear()
        history = [*PROMPT, *first, 200]
        assert list(session.generate([200], 4)) == expected(history, 4)
        assert only_session(server).tokens == session.tokens


@pytest.mark.parametrize("rollback", [None, 0])
def test_unseen_samples_of_a_lost_call_are_dropped(
    server: Any, expected: Any, rollback: int | None
) -> None:
    # The call is applied but never answered; other sampling must not get its tokens.
    server.rollback = rollback
    retry = Retry(first_wait=0.001, attempts=1, attempt_timeout=0.4)
    with Client(server.target, retry=retry) as client, client.session() as session:
        first = list(session.generate(PROMPT, 1))
        server.faults.append("lost")
        with pytest.raises(UnavailableError):
            list(session.generate([40], 4))
        assert len(only_session(server).tokens) > session.position
        history = [*PROMPT, *first, 41]
        assert list(session.generate([41], 5, temperature=1.0, seed=2)) == expected(history, 5, 2)
        assert only_session(server).tokens == session.tokens


def test_unseen_samples_are_not_taken_for_other_sampling(server: Any, expected: Any) -> None:
    retry = Retry(first_wait=0.001, attempts=1)
    with Client(server.target, retry=retry) as client, client.session() as session:
        first = list(session.generate(PROMPT, 1))
        server.faults.append("lost")
        with pytest.raises(UnavailableError):
            list(session.generate(max_new_tokens=4))
        got = list(session.generate(max_new_tokens=4, temperature=1.0, seed=5))
        assert got == expected([*PROMPT, *first], 4, 5)


def test_a_session_replaced_behind_our_back_is_noticed(server: Any, client: Client) -> None:
    session = client.session("shared")
    session.generate(PROMPT, 4).run()
    held = only_session(server)
    held.tokens[-1] = 299
    with pytest.raises(RowError, match="another token at position 8"):
        list(session.generate(max_new_tokens=4))


def test_a_straggler_applied_after_its_tokens_were_dropped(server: Any, expected: Any) -> None:
    retry = Retry(first_wait=0.001, attempts=1, attempt_timeout=0.2)
    with Client(server.target, retry=retry) as client, client.session() as session:
        first = list(session.generate(PROMPT, 1))
        server.faults.append("late")
        with pytest.raises(DeadlineError, match="repeating it is safe"):
            list(session.generate(max_new_tokens=4))
        session.truncate(session.position)
        time.sleep(0.7)
        assert len(only_session(server).tokens) > session.position
        history = [*PROMPT, *first, 41]
        assert list(session.generate([41], 5)) == expected(history, 5)
        assert only_session(server).tokens == session.tokens


def test_abandoned_generation_leaves_what_was_seen(
    server: Any, client: Client, expected: Any
) -> None:
    with client.session() as session:
        generation = session.generate(PROMPT, 100)
        for _ in range(3):
            next(generation)
        generation.close()
        held = session.tokens
        assert held == PROMPT + expected(PROMPT, len(held) - len(PROMPT))
        assert list(session.generate([3], 4)) == expected([*held, 3], 4)


def test_generation_that_never_began_changes_nothing(client: Client) -> None:
    with client.session() as session:
        session.generate(PROMPT, 4)
        session.generate([8, 9], 4).run()
        assert session.tokens[:2] == [8, 9]


def test_stop_token_ends_and_is_included(server: Any, client: Client) -> None:
    server.next_token = lambda history, row: 1 if len(history) >= 8 else 70
    with client.session() as session:
        result = session.generate(PROMPT, 50).run().result
        assert result.tokens == [70, 70, 70, 1]
        assert result.finish == Finish.STOP
        other = session.generate([2], 3, stop_tokens=[]).run().result
        assert other.tokens == [1, 1, 1]
        assert other.finish == Finish.LENGTH


def test_prefill_only_and_capacity(server: Any, client: Client) -> None:
    server.limit = 12
    with client.session(overflow="stop") as session:
        assert session.generate(PROMPT, 0).run().result.tokens == []
        assert session.position == 5
        result = session.generate(max_new_tokens=50).run().result
        assert len(result.tokens) == 7
        assert result.finish == Finish.CAPACITY
        with pytest.raises(RowError, match="12 tokens") as caught:
            session.generate([4, 4], 1).run()
        assert caught.value.status == Status.OVERFLOW
        assert session.position == 12


@pytest.mark.parametrize("rollback", [None, 0])
def test_truncate(server: Any, client: Client, expected: Any, rollback: int | None) -> None:
    server.rollback = rollback
    with client.session() as session:
        session.generate(LONG, 6).run()
        session.truncate(20)
        assert session.tokens == LONG[:20]
        assert list(session.generate([7], 4)) == expected([*LONG[:20], 7], 4)
        session.truncate(0)
        assert not server.sessions
        assert list(session.generate(PROMPT, 4)) == expected(PROMPT, 4)
        with pytest.raises(InputError, match="within 0 and 9"):
            session.truncate(10)


@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("at", range(4))
def test_score_and_logits(
    server: Any, client: Client, expected: Any, fault: str | None, at: int
) -> None:
    with client.session() as calm:
        wanted = calm.score(LONG)
    assert wanted.shape == (len(LONG),) and np.isnan(wanted[0]) and (wanted[1:] <= 0).all()
    server.faults.extend([None] * at + [fault])
    with client.session() as session:
        np.testing.assert_array_equal(session.score(LONG), wanted)
        assert session.logprobs[0] is None
        np.testing.assert_allclose(session.logprobs[1:], wanted[1:], rtol=1e-6)
        server.faults.append(fault)
        logits = session.logits([66] * 10)
        assert logits.argmax() == expected([*LONG, *[66] * 10], 1)[0]
        assert session.logits().argmax() == logits.argmax()
        assert session.position == 45


def test_resume_from_a_saved_transcript(server: Any, client: Client, expected: Any) -> None:
    with client.session("kept", keep=True) as session:
        first = list(session.generate(LONG, 4))
        saved = session.tokens
    assert server.sessions
    computed = server.computed
    with client.session("kept", tokens=saved) as session:
        assert list(session.generate([9], 4)) == expected([*LONG, *first, 9], 4)
    assert server.computed == computed + 5
    assert not server.sessions


def test_resume_drops_what_was_never_seen(server: Any, client: Client, expected: Any) -> None:
    session = client.session("crashed")
    saved = [*PROMPT, *session.generate(PROMPT, 3)]
    session.generate(max_new_tokens=6).run()
    with client.session("crashed", tokens=saved) as resumed:
        assert list(resumed.generate([9], 4)) == expected([*saved, 9], 4)
        assert only_session(server).tokens == resumed.tokens


def test_more_samples_than_asked_for_are_dropped_later(
    server: Any, client: Client, expected: Any
) -> None:
    session = client.session("ahead")
    session.generate(PROMPT, 9).run()
    with client.session("ahead") as other:
        first = list(other.generate(PROMPT, 2))
        assert first == expected(PROMPT, 2)
        history = [*PROMPT, *first, 9]
        assert list(other.generate([9], 4)) == expected(history, 4)


def test_session_ids_cannot_be_guessed(client: Client) -> None:
    ids = {client.session().session_id for _ in range(50)}
    assert len(ids) == 50
    assert all(len(name) >= 22 for name in ids)


def test_tenants_never_meet(server: Any, client: Client, fast_retry: Retry) -> None:
    with Client(server.target, tenant="other", retry=fast_retry) as other:
        client.session("same").generate(PROMPT, 1).run()
        other.session("same").generate(LONG, 1).run()
    assert set(server.sessions) == {(b"", b"same"), (b"other", b"same")}


def test_one_client_from_many_threads(server: Any, client: Client, expected: Any) -> None:
    server.faults.extend(random.Random(1).choices([None, "unavailable", "lost", "busy"], k=80))
    wrong: list[int] = []

    def talk(number: int) -> None:
        with client.session() as session:
            history = [number + 2, 5]
            got = list(session.generate(history, 9))
            history += [*got, 8]
            got2 = list(session.generate([8], 9))
            if got != expected(history[:2], 9) or got2 != expected(history, 9):
                wrong.append(number)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not server.sessions


def test_one_session_from_two_threads_is_refused(server: Any, client: Client) -> None:
    session = client.session()
    session.generate(PROMPT, 1).run()
    server.faults.append("late")
    caught: list[Exception] = []

    def first() -> None:
        try:
            session.score([5])
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    time.sleep(0.1)
    with pytest.raises(SessionError, match="two threads"):
        session.score([6])
    thread.join()


def test_full_until_the_deadline(server: Any, client: Client) -> None:
    server.faults.extend(["full"] * 10_000)
    with pytest.raises(RowError, match="earliest session expires in 5 ms") as caught:
        list(client.session().generate(PROMPT, 4, timeout=0.3))
    assert caught.value.status == Status.FULL
    assert server.faults
    server.faults.clear()


@pytest.mark.parametrize(
    ("prompt", "status", "words"),
    [
        ([], Status.EMPTY, "at least one token"),
        ([5, 300], Status.INVALID, "`tokens`"),
        ([-1], Status.INVALID, "`tokens`"),
    ],
)
def test_rows_that_the_server_refuses(
    server: Any, client: Client, prompt: list[int], status: Status, words: str
) -> None:
    with client.session() as session:
        with pytest.raises(RowError, match=words) as caught:
            session.generate(prompt, 4).run()
        assert caught.value.status == status
        assert session.tokens == []
        assert list(session.generate(PROMPT, 1))


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda s: s.generate("text"), TextError, "artifact="),
        (lambda s: s.generate([{"role": "user", "content": "x"}]), TextError, "tokenizer"),
        (lambda s: s.generate([1.5]), InputError, "integers"),
        (lambda s: s.generate([True]), InputError, "integers"),
        (lambda s: s.generate([2**31]), InputError, "int32"),
        (lambda s: s.generate([5], -1), InputError, "must not be negative"),
        (lambda s: s.generate([5], temperature=float("nan")), InputError, "finite"),
        (lambda s: s.generate([5], stop_tokens=range(9)), InputError, "at most 8"),
        (lambda s: s.generate([5], overflow="wrap"), InputError, "error, stop, slide"),
        (lambda s: s.generate([5], seed=2**63).run(), InputError, "seed"),
        (lambda s: s.generate([5], top_k=1.5).run(), InputError, "top_k"),
        (lambda s: s.generate([5], temperature=-1.0).run(), RowError, "`temperature`"),
    ],
)
def test_arguments_that_cannot_be_sent(
    client: Client, use: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    with client.session() as session:
        with pytest.raises(error, match=words):
            use(session)
        assert session.tokens == []
        assert len(list(session.generate(PROMPT, 2))) == 2


def test_attention_lies_by_position(client: Client) -> None:
    """The server's entries lie backwards, and some are empty."""
    with client.session() as session:
        session.generate(PROMPT, 3).run()
        weights = session.attention(2)
        assert weights.shape == (4, 8)
        np.testing.assert_allclose(weights[1], [0.6, 0, 0, 0, 0, 0, 0, 0.4])
        np.testing.assert_allclose(session.attention(0, position=4)[0], [0.5, 0, 0, 0, 0.5])


def test_attention_of_a_session_that_the_server_lost(server: Any, client: Client) -> None:
    with client.session(tokens=PROMPT) as session:
        assert session.attention(0).shape == (4, 5), "nothing was sent before"
        session.generate([20], 0).run()
        before = session.replays
        server.forget()
        assert session.attention(0).shape == (4, 6)
        assert session.replays == before + 1
        assert only_session(server).tokens == session.tokens


def test_attention_of_what_is_not_there_is_refused(client: Client) -> None:
    with client.session() as session:
        with pytest.raises(InputError, match="`position`"):
            session.attention(0)
        session.generate(PROMPT, 0).run()
        with pytest.raises(InputError, match="from 0 to 4"):
            session.attention(0, position=5)
        with pytest.raises(RowError, match="`layer`"):
            session.attention(3)


def test_closed_session(client: Client) -> None:
    session = client.session()
    session.generate(PROMPT, 1).run()
    session.close()
    session.close()
    with pytest.raises(SessionError, match="is closed"):
        session.generate(PROMPT, 1)


def test_close_survives_a_dead_server(server: Any, fast_retry: Retry) -> None:
    client = Client(server.target, retry=fast_retry, timeout=0.2)
    with client.session() as session:
        session.generate(PROMPT, 1).run()
        server.stop()


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_limits_come_from_the_server(make_server: Any, expected: Any, chunk: int) -> None:
    server = make_server(EngineConfig(decode_chunk=chunk, prefill_tokens=5))
    with Client(server.target) as client:
        assert client.contract.decode_chunk == chunk
        assert client.contract.prefill_tokens == 5
        assert client.contract.stop_tokens == (1,)
        assert list(client.session().generate(LONG, 7)) == expected(LONG, 7)
