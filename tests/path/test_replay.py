"""Repeated calls, lost replies, lost sessions and a killed server.

Reports: gRPC retries that duplicate tokens; version swaps that lose every session.
"""

from __future__ import annotations

import pathlib
import time
from typing import Any

import numpy as np
import pytest
from path_support import LossyProxy, ServerProcess, greedy, one

from tfkv.errors import RowError, Status
from tfkv.serving import Client

SAMPLING = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, "seed": 7}
STABLE = ("tokens_prefilled", "tokens_decoded", "sessions_opened", "slots_used", "pages_used")


class Echo(Client):
    """Sends every call twice, and believes the second answer."""

    def _predict_once(self, request: Any, seconds: float) -> dict[str, np.ndarray]:
        super()._predict_once(request, seconds)
        return super()._predict_once(request, seconds)


def test_a_conversation_whose_calls_all_come_twice(client: Client, artifact: pathlib.Path):
    def talk(own: Client) -> tuple[list[int], list[float | None], dict[str, int]]:
        before = own.stats()
        with own.session() as session:
            session.chat("What is the capital of France?", stream=False)
            session.chat("Tell me a short story.", 40, **SAMPLING, stream=False)
            session.truncate(session.position - 5)
            session.generate([], 10, stop_tokens=(), stream=False)
            session.logits([100, 101])
            session.score([102, 103, 104])
            after = own.stats()
            worked = {name: after[name] - before[name] for name in STABLE}
            return session.tokens, session.logprobs, worked

    tokens, logprobs, worked = talk(client)
    # A tenant of its own: pages of the first talk are not shared with it.
    with Echo(client.target, artifact=artifact, tenant="echo") as echo:
        tokens_twice, logprobs_twice, worked_twice = talk(echo)
    assert tokens_twice == tokens
    assert logprobs_twice == logprobs
    # `score` computes again what it is asked for again; nothing else does.
    scored = worked_twice.pop("tokens_prefilled") - worked.pop("tokens_prefilled")
    assert 0 <= scored <= 4
    assert worked_twice == worked


@pytest.mark.parametrize(
    "signature", ["generate", "decode", "score", "truncate", "close", "generate_sampled"]
)
def test_any_call_replayed_changes_nothing(client: Client, signature: str):
    name = f"again-{signature}"
    one(client, "generate", session_id=name, tokens=[1, 2, 3], position=0, max_new_tokens=4)
    base = {"session_id": name}
    row: dict[str, Any] = {
        "generate": {**base, "tokens": [9, 8], "position": 7},
        "generate_sampled": {**base, "tokens": [9, 8], "position": 7, **SAMPLING},
        "decode": {**base, "tokens": [9, 8], "position": 7},
        "score": {**base, "tokens": [9, 8], "position": 7},
        "truncate": {**base, "position": 5},
        "close": base,
    }[signature]
    called = signature.partition("_")[0]
    first = one(client, called, **row)
    before = client.stats()
    for _ in range(3):
        again = one(client, called, **row)
        for output, value in first.items():
            if (called, output) != ("close", "detail"):  # whether there was one to close
                np.testing.assert_array_equal(again[output], value, output)
    after = client.stats()
    assert {n: after[n] for n in STABLE if n != "tokens_prefilled"} == {
        n: before[n] for n in STABLE if n != "tokens_prefilled"
    }
    if called != "score":
        assert after["tokens_prefilled"] == before["tokens_prefilled"]
    one(client, "close", session_id=name)


def test_a_late_duplicate_never_gives_the_next_turn_out_as_generated(client: Client):
    row = {"session_id": "late", "tokens": [1, 2, 3], "position": 0, "max_new_tokens": 4}
    first = one(client, "generate", **row)
    tokens = first["tokens"][:4].tolist()
    one(client, "generate", session_id="late", tokens=[50, 51], position=7, max_new_tokens=2)
    again = one(client, "generate", **row)
    assert again["tokens"][:4].tolist() == tokens
    row = {**row, "tokens": [1, 2, 3, *tokens], "max_new_tokens": 4}
    late = client.call("generate", [row])[0]
    assert (late["status"], late["detail"]) == (Status.CONFLICT, 7)
    one(client, "close", session_id="late")


def test_lost_replies_change_nothing(
    client: Client, lossy_proxy: LossyProxy, artifact: pathlib.Path, prompts: list[list[int]]
):
    expected = greedy(client, prompts[1], 40)
    with Client(lossy_proxy.target, artifact=artifact, timeout=60) as lossy:
        before, lost = client.stats(), lossy_proxy.losses
        with lossy.session() as session:
            tokens: list[int] = []
            generation = session.generate(prompts[1], 40, stop_tokens=())
            lossy_proxy.lose_next_reply()
            for _ in generation:
                lossy_proxy.lose_next_reply()
            tokens = generation.result.tokens
            lossy_proxy.lose_next_reply()
            session.truncate(session.position - 1)
        after = client.stats()
    assert tokens == expected
    assert lossy_proxy.losses - lost >= 4
    assert after["tokens_decoded"] - before["tokens_decoded"] == 40
    assert after["sessions_opened"] - before["sessions_opened"] == 1


def test_an_expired_session_is_replayed(client: Client, prompts: list[list[int]]):
    expected = greedy(client, prompts[2], 20)
    with client.session(ttl_ms=1500) as session:
        first = session.generate(prompts[2], 10, stop_tokens=(), stream=False).result.tokens
        time.sleep(1.7)
        rest = session.generate([], 10, stop_tokens=(), stream=False).result.tokens
        assert session.replays >= 1
    assert first + rest == expected


def test_an_expired_session_is_unknown_to_a_raw_call(raw_client: Client):
    row = {"session_id": "brief", "tokens": [1, 2, 3], "position": 0, "ttl_ms": 100}
    answer = one(raw_client, "generate", **row, max_new_tokens=1)
    time.sleep(0.3)
    row = {"session_id": "brief", "tokens": [4], "position": answer["position"]}
    refused = raw_client.call("generate", [row])[0]
    assert refused["status"] == Status.UNKNOWN
    assert refused["position"] == 0
    reaped = raw_client.stats()
    assert reaped["slots_used"] == 0
    assert reaped["sessions_reaped"] >= 1


def test_a_killed_server_is_survived(
    server: ServerProcess, raw_client: Client, prompts: list[list[int]]
):
    """kill -9 in the middle of an answer; the client replays and goes on as if nothing was."""
    sampled = {**SAMPLING, "stop_tokens": ()}
    expected = greedy(raw_client, prompts[5], 48)
    drawn = raw_client.generate(prompts[6], 24, stream=False, **sampled).result.tokens
    client = raw_client
    client.timeout = 240
    with client.session() as calm, client.session() as session:
        first = calm.generate(prompts[6], 8, stream=False, **sampled).result.tokens
        generation = session.generate(prompts[5], 48, stop_tokens=())
        pieces = [next(generation), next(generation)]
        old = session.epoch
        server.kill()
        server.start()
        pieces += generation
        assert generation.result.tokens == expected
        assert "".join(pieces) == generation.text
        assert session.epoch != old
        assert session.replays >= 1
        rest = calm.generate([], 16, stream=False, **sampled).result.tokens
        assert first + rest == drawn
        assert client.stats()["epoch"] == session.epoch == calm.epoch


def test_a_session_that_differs_from_what_is_stored_is_told_where(client: Client):
    with client.session("mine") as session:
        session.generate([1, 2, 3], 2, stop_tokens=(), stream=False)
        row = {"session_id": "mine", "tokens": [1, 9, 3], "position": 0}
        answer = client.call("generate", [row])[0]
        assert (answer["status"], answer["detail"]) == (Status.CONFLICT, 1)
        with pytest.raises(RowError, match="another token at position 0"):
            client.session("mine", keep=True).generate([7], 1, stream=False)
