"""Calls, typed errors, deadlines and retries over a real socket."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from tfkv.errors import (
    ArtifactError,
    DeadlineError,
    RowError,
    ServerError,
    Status,
    TfkvError,
    UnavailableError,
)
from tfkv.serving import (
    Client,
    InputError,
    NotFoundError,
    RefusedError,
    Retry,
    SessionError,
    TextError,
)
from tfkv.serving.failures import row_error
from tfkv.serving.retry import Deadline, is_uncertain


def row(**values: Any) -> dict[str, Any]:
    return {"session_id": "s", "position": 0, **values}


def test_status_stats_and_ready(client: Client) -> None:
    assert [(item.version, item.state) for item in client.status()] == [
        (2, "AVAILABLE"),
        (1, "END"),
    ]
    assert client.wait_ready(1.0).version == 2
    stats = client.stats()
    assert stats["slots_used"] == 0
    assert stats["epoch"] == 1


def test_low_level_rows_of_different_lengths(client: Client, expected: Any) -> None:
    rows = [row(session_id=f"s{n}", tokens=[5] * n, max_new_tokens=2) for n in (1, 4, 0)]
    answers = client.call("generate", rows)
    assert [answer["status"] for answer in answers] == [Status.OK, Status.OK, Status.EMPTY]
    for n, answer in zip((1, 4), answers, strict=False):
        assert answer["tokens"][:2].tolist() == expected([5] * n, 2)
        assert answer["position"] == n + 2


def test_predict_with_raw_arrays(client: Client) -> None:
    inputs = client.contract.encode("close", [{"session_id": "nobody"}])
    outputs = client.predict("close", {**inputs, "tenant": [b""]})
    assert outputs["status"].tolist() == [Status.UNKNOWN]


@pytest.mark.parametrize(
    ("signature", "rows", "words"),
    [
        ("generate", [], "at least one row"),
        ("generate", [{"session_id": "s"}], "`position` has no default"),
        ("generate", [row(tokens=[1], temprature=1.0)], "no input 'temprature'"),
        ("generate", [row(tokens=range(9))], "at most 8 tokens"),
        ("generate", [row(tokens=[2**40])], "int32"),
        ("generate", [row(tokens=[1], top_p="high")], "top_p"),
        ("generate", [row(tokens=[1], stop_tokens=[1])], "stop_tokens"),
        ("nosig", [row()], "No signature 'nosig'"),
    ],
)
def test_rows_that_do_not_fit(
    client: Client, signature: str, rows: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        client.call(signature, rows)


@pytest.mark.parametrize(
    ("signature", "inputs", "code"),
    [
        ("nosig", {}, "FAILED_PRECONDITION"),
        ("close", {"session_id": ["s"]}, "INVALID_ARGUMENT"),
        ("close", {"session_id": [1], "tenant": [""]}, "INVALID_ARGUMENT"),
    ],
)
def test_calls_the_server_refuses(
    client: Client, signature: str, inputs: dict[str, Any], code: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        client.predict(signature, inputs)
    assert caught.value.code == code
    assert signature in str(caught.value)


def test_unknown_model(server: Any) -> None:
    with Client(server.target, "nope") as client:
        with pytest.raises(NotFoundError, match="Check the model name"):
            client.predict("close", {"session_id": ["s"], "tenant": [""]})
        with pytest.raises(NotFoundError):
            client.status()
        with pytest.raises(DeadlineError, match="was not available within"):
            client.wait_ready(0.3, poll=0.05)


def test_nobody_listens(fast_retry: Retry) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            Client(target, timeout=0.4, retry=fast_retry) as client,
            pytest.raises(UnavailableError),
        ):
            client.status()


def test_deadline_over_all_attempts(server: Any) -> None:
    server.faults.extend(["late"] * 20)
    retry = Retry(first_wait=0.001, attempt_timeout=0.1)
    with Client(server.target, retry=retry) as client:
        with pytest.raises(DeadlineError):
            client.predict("close", {"session_id": ["s"], "tenant": [""]}, timeout=0.35)
        assert 16 <= len(server.faults) < 20
    server.faults.clear()


def test_report_grpc_retries_at_the_end_is_not_repeated(server: Any, client: Client) -> None:
    # position -1 appends wherever the end is: repeating it after a lost reply would append twice.
    inputs = client.contract.encode("generate", [row(position=-1, tokens=[5])])
    server.faults.append("lost")
    calls = len(server.calls)
    with pytest.raises(UnavailableError):
        client.predict("generate", {**inputs, "tenant": [""]})
    assert len(server.calls) == calls + 1
    server.faults.append("exhausted")
    client.predict("generate", {**inputs, "tenant": [""]})


def test_thread_pool_exhausted_is_waited_out(server: Any, client: Client) -> None:
    server.faults.extend(["exhausted"] * 5)
    assert client.stats()["epoch"] == 1
    server.faults.extend(["exhausted"] * 10_000)
    with pytest.raises(UnavailableError, match="grpc_max_threads"):
        client.stats(timeout=0.2)
    server.faults.clear()


def test_message_larger_than_allowed(server: Any, fast_retry: Retry) -> None:
    with (
        Client(server.target, max_message_bytes=1000, retry=fast_retry) as client,
        pytest.raises(RefusedError, match="max_message_bytes"),
    ):
        client.predict("close", {"session_id": [b"x" * 5000], "tenant": [""]})


def test_answers_that_break_the_contract(server: Any, client: Client) -> None:
    server._close = lambda *_: {"status": 99}
    assert client.call("close", [{"session_id": "s"}])[0]["status"] == 99
    session = client.session()
    session.generate([5], 1).run()
    with pytest.raises(ServerError, match="unknown status 99"):
        session.close()
    with pytest.raises(ServerError, match="must have 1 rows"):
        client.contract.decode("close", {"status": np.zeros(1, np.int32)}, 1)


def test_a_model_that_is_no_artifact(server: Any) -> None:
    server.table = {"serving_default": server.table["close"], "generate": server.table["close"]}
    with Client(server.target) as client, pytest.raises(ServerError, match="differ from"):
        client.session().generate([5], 1)


def test_metadata_not_allowed_falls_back_to_the_defaults(server: Any) -> None:
    server.metadata_allowed = False
    with Client(server.target) as client:
        assert (client.contract.decode_chunk, client.contract.prefill_tokens) == (16, 1024)


def test_closed_client(server: Any) -> None:
    client = Client(server.target)
    client.close()
    with pytest.raises(SessionError, match="client is closed"):
        client.status()


def test_version_and_label(server: Any, artifact: Any) -> None:
    with pytest.raises(InputError, match="not both"):
        Client(server.target, version=1, version_label="stable")
    with Client(server.target, version=3) as client:
        assert client._model_spec().version.value == 3
    with Client(server.target, version_label="stable") as client:
        assert client._model_spec().version_label == "stable"


def test_artifact_and_tokenizer_that_cannot_be_read(server: Any, tmp_path: Any) -> None:
    with pytest.raises(ArtifactError):
        Client(server.target, artifact=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match="not a readable tokenizer"):
        Client(server.target, tokenizer=tmp_path / "tokenizer.json")


def test_no_time_left(fast_retry: Retry) -> None:
    with pytest.raises(DeadlineError, match="No time left"):
        fast_retry.run(lambda _: 1, Deadline.after(0.0))
    assert fast_retry.run(lambda seconds: seconds, Deadline.after(None)) == 0.4


def test_the_telling_error_is_raised_at_the_deadline() -> None:
    full = RowError(Status.FULL, 1, "full")
    late = DeadlineError("late")

    def run(*errors: Exception) -> Exception:
        left = list(errors)

        def attempt(_: float) -> None:
            raise left.pop(0)

        with pytest.raises(TfkvError) as caught:
            Retry(first_wait=0.001, attempts=len(errors)).run(attempt, Deadline.after(5.0))
        return caught.value

    assert run(full, late) is full
    assert is_uncertain(full)
    assert run(full, late, late) is late
    refused = RowError(Status.OVERFLOW, 1, "no")
    assert run(late, refused) is refused
    assert is_uncertain(refused)
    assert not is_uncertain(RowError(Status.FULL, 1, "full"))


def test_one_shot_closes_its_session(server: Any, client: Client, expected: Any) -> None:
    assert list(client.generate([5, 6], 6)) == expected([5, 6], 6)
    assert not server.sessions
    assert client.generate([5, 6], 6, stream=False).result.tokens == expected([5, 6], 6)
    generation = client.generate([5, 6], 6)
    next(generation)
    assert server.sessions
    generation.close()
    assert not server.sessions


def test_an_adapter_that_the_manifest_does_not_list_is_an_error(server: Any, artifact: Any) -> None:
    with (
        Client(server.target, artifact=artifact) as client,
        pytest.raises(InputError, match="no adapter 'legal'. It has: none, only the base"),
    ):
        client.session(adapter="legal")


@pytest.mark.parametrize(
    ("detail", "words"), [(0, "the artifact has no such adapter"), (1, "made with another adapter")]
)
def test_a_refused_adapter_says_which_of_the_two_it_is(detail: int, words: str) -> None:
    error = row_error(Status.ADAPTER, detail, "`generate` of session 'ada'")
    assert words in str(error)
    assert (error.status, error.detail) == (Status.ADAPTER, detail)


def test_a_server_without_adapters_lists_none(client: Client) -> None:
    assert client.adapters() == {}
