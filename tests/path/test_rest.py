"""The REST face of the artifact, as curl would use it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from path_support import ServerProcess, one

from tfkv.config import EngineConfig
from tfkv.errors import Status
from tfkv.export import export
from tfkv.export.importers import ModelSource
from tfkv.manifest import STATS
from tfkv.serving import Client


def post(url: str, **document: Any) -> tuple[int, dict[str, Any]]:
    """Status code and JSON of `url`:predict."""
    request = urllib.request.Request(f"{url}:predict", json.dumps(document).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def plain(inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in inputs.items()}


def test_row_and_column_form_answer_as_grpc_does(client: Client, server: ServerProcess):
    row = {"session_id": "rest", "tokens": [504, 3575, 282], "position": 0, "max_new_tokens": 4}
    expected = one(client, "generate", **row)
    columns = plain(client.contract.encode("generate", [row]))
    in_columns = post(server.url, signature_name="generate", inputs=columns)
    instance = {name: column[0] for name, column in columns.items()}
    in_rows = post(server.url, signature_name="generate", instances=[instance, instance])
    one(client, "close", session_id="rest")
    assert (in_columns[0], in_rows[0]) == (200, 200)
    columns, rows = in_columns[1]["outputs"], in_rows[1]["predictions"]
    assert rows[0] == rows[1]
    assert set(columns) == set(rows[0]) == set(expected)
    for name, value in expected.items():
        # The text of a float32 is its shortest, read back as a double.
        for answer in (columns[name][0], rows[0][name]):
            np.testing.assert_array_equal(np.array(answer, np.asarray(value).dtype), value, name)


def test_a_refused_row_is_an_answer_and_a_malformed_call_an_error(
    client: Client, server: ServerProcess
):
    row = {"session_id": "rest", "tokens": [1], "position": 3}
    columns = plain(client.contract.encode("generate", [row]))
    code, answer = post(server.url, signature_name="generate", inputs=columns)
    assert code == 200
    assert answer["outputs"]["status"] == [Status.UNKNOWN]
    columns["tokens"] = [["one"]]
    code, answer = post(server.url, signature_name="generate", inputs=columns)
    assert code == 400
    assert "error" in answer
    code, answer = post(server.url, signature_name="sing", inputs=columns)
    assert code == 400
    assert '"sing" not found in signature def' in answer["error"]


def test_rest_needs_every_input_as_tensorflow_serving_does(server: ServerProcess):
    """Defaults of a signature reach gRPC callers alone: the REST parser asks for all inputs."""
    few = {"session_id": ["rest"], "tokens": [[504, 3575]], "length": [2], "position": [0]}
    code, answer = post(server.url, signature_name="generate", inputs=few)
    assert code == 400
    assert "Missing named input" in answer["error"]
    code, answer = post(
        server.url, signature_name="generate", instances=[{n: v[0] for n, v in few.items()}]
    )
    assert code == 400


def test_grpc_fills_in_defaults(client: Client):
    few = {
        "session_id": np.array([b"few"], object),
        "tokens": np.array([[504, 3575, 282]], np.int32),
        "length": np.array([3], np.int32),
        "position": np.array([0], np.int32),
    }
    answer = client.predict("generate", few)
    assert answer["status"].tolist() == [Status.OK]
    assert answer["count"].tolist() == [client.contract.decode_chunk]
    expected = one(client, "generate", session_id="few", tokens=[504, 3575, 282], position=0)
    np.testing.assert_array_equal(answer["tokens"][0], expected["tokens"])
    # Two rows take the one default each.
    few["session_id"] = np.array([b"few", b"more"], object)
    for name in ("tokens", "length", "position"):
        few[name] = np.repeat(few[name], 2, axis=0)
    answer = client.predict("generate", few)
    assert answer["status"].tolist() == [Status.OK, Status.OK]
    client.call("close", [{"session_id": "few"}, {"session_id": "more"}])


def test_stats_status_metadata_and_metrics(client: Client, server: ServerProcess):
    stats = client.stats()
    assert set(stats) == {*STATS, "epoch"}
    assert stats["slots"] == 8
    assert stats["bytes_pool"] > 0
    code, answer = post(server.url, signature_name="stats", instances=["any"])
    assert code == 200
    assert answer["predictions"][0]["epoch"] == stats["epoch"]
    with urllib.request.urlopen(server.url, timeout=10) as reply:
        assert json.load(reply)["model_version_status"][0]["state"] == "AVAILABLE"
    with urllib.request.urlopen(f"{server.url}/metadata", timeout=10) as reply:
        signatures = json.load(reply)["metadata"]["signature_def"]["signature_def"]
    assert set(client.contract.signatures) <= set(signatures)
    page = f"http://127.0.0.1:{server.rest_port}/monitoring/prometheus/metrics"
    with urllib.request.urlopen(page, timeout=10) as reply:
        assert b":tensorflow:serving:request_count" in reply.read()


def test_stats_tell_what_a_session_holds(client: Client):
    manifest = client.manifest
    before = client.stats()
    assert (before["slots_used"], before["pages_used"], before["bytes_used"]) == (0, 0, 0)
    with client.session() as session:
        session.generate(list(range(100, 200)), 1, stop_tokens=(), stream=False)
        held = client.stats()
        assert (held["slots_used"], held["pages_used"]) == (1, 2)
        assert held["bytes_used"] == 2 * 64 * manifest.bytes_per_token
        # 100 given, of which the last is fed by the first decode step.
        assert held["tokens_prefilled"] - before["tokens_prefilled"] == 99
    assert client.stats()["sessions_closed"] == before["sessions_closed"] + 1


@pytest.fixture(scope="module")
def speaking(
    source: ModelSource, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of an artifact that takes text."""
    directory = tmp_path_factory.mktemp("speaking") / "smollm2"
    export(source, directory, EngineConfig(text=True, batch_sizes=(1,), slots=2))
    process = ServerProcess(directory).start()
    yield process
    assert process.stop() == 0


def ask(server: ServerProcess, session: str, text: str, **others: Any) -> dict[str, Any]:
    """The answer to a text, as curl would get it."""
    row = {"session_id": session, "tenant": "", "adapter": "", "text": text, "system": ""}
    row |= {"max_new_tokens": 64, "temperature": 0.0, "top_p": 1.0, "seed": 0, **others}
    code, answer = post(server.url, signature_name="generate_text", instances=[row])
    assert code == 200, answer
    return answer["predictions"][0]


def test_text_is_answered_with_the_text_that_the_client_gets(
    client: Client, speaking: ServerProcess
):
    question = "What is the capital of France?"
    alone = ask(speaking, "", question)
    assert (alone["text"], alone["status"]) == ("The capital of France is Paris.", Status.OK)
    turns = [("Who wrote Faust?", 24), ("Say that in German: café, 12 Äpfel!", 9), ("Why?", 40)]
    with client.session() as session:
        for text, count in turns:
            expected = session.chat(text, count, stream=False).result
            got = ask(speaking, "by curl", text, max_new_tokens=count)
            assert (got["text"], got["count"]) == (expected.text, len(expected.tokens))


def test_a_long_text_is_read_in_several_calls(speaking: ServerProcess):
    text = "The launch code is 4711. " + "Nothing else matters in this line. " * 160
    got = ask(speaking, "", f"{text}\nWhat is the launch code?")
    assert got["status"] == Status.OK
    assert "4711" in got["text"]
