"""REST forms and errors, through a real socket."""

from __future__ import annotations

import base64
import http.client
import threading
from typing import Any

import pytest

PREDICT = "/v1/models/m:predict"


def _predict(caller: Any, signature: str, **body: Any) -> tuple[int, Any]:
    return caller.http(PREDICT, {"signature_name": signature, **body})


def test_row_form(caller: Any) -> None:
    rows = [{"sid": "r1", "x": 0.1}, {"sid": {"b64": base64.b64encode(b"r2").decode()}, "x": 2}]
    status, answer = caller.http("/v1/models/m/versions/1:predict", {"instances": rows})
    assert status == 200
    assert [row["y"] for row in answer["predictions"]] == [0.2, 4.0]
    assert answer["predictions"][0]["batch"] == "r1,r2"


def test_row_form_of_one_input_and_one_output(caller: Any) -> None:
    status, answer = _predict(caller, "loops_done", instances=[1.0, 2.0])
    assert status == 200
    assert len(answer["predictions"]) == 2 and isinstance(answer["predictions"][0], int)


def test_column_form(caller: Any) -> None:
    status, answer = _predict(caller, "", inputs={"sid": ["c"], "x": [1.5]})
    assert (status, answer["outputs"]["y"]) == (200, [3.0])
    status, answer = _predict(caller, "loops_done", inputs=[1.0])
    assert status == 200 and len(answer["outputs"]) == 1
    status, answer = _predict(caller, "wide", inputs=[[1, 2], [3, 4]])
    assert answer == {"outputs": {"sum": [3.0, 7.0], "same": [[1.0, 2.0], [3.0, 4.0]]}}


def test_types_and_bytes(caller: Any) -> None:
    status, answer = _predict(caller, "typed", inputs={"i": [4], "b": [True], "l": [2**40]})
    assert answer == {"outputs": {"i": [5], "b": [False], "l": [2**40 + 1], "h": [1.0]}}
    status, answer = _predict(caller, "text", instances=["é"])
    assert answer["predictions"][0]["raw_bytes"] == {"b64": base64.b64encode("é".encode()).decode()}
    assert answer["predictions"][0]["upper"] == "é"  # strings.upper is ASCII only
    status, answer = _predict(caller, "wide", instances=[[float("nan"), 1.0]])
    assert status == 200 and answer["predictions"][0]["sum"] != answer["predictions"][0]["sum"]


ROWS = "Failed to process element: 0 key: x of 'instances' list. Error: INVALID_ARGUMENT: "
REFUSALS: dict[str, tuple[str, Any, int, str]] = {
    "unknown model": (
        "/v1/models/nope:predict",
        {"inputs": [1]},
        404,
        "Servable not found for request: Latest(nope)",
    ),
    "unknown version": (
        "/v1/models/m/versions/7:predict",
        {"inputs": [1]},
        404,
        "Servable not found for request: Specific(m, 7)",
    ),
    "label": (
        "/v1/models/m/labels/stable:predict",
        {"inputs": [1]},
        400,
        "Unrecognized servable version label: stable",
    ),
    "unknown signature": (
        PREDICT,
        {"signature_name": "zz", "inputs": [1]},
        400,
        'Serving signature name: "zz" not found in signature def',
    ),
    "defaults do not help": (
        PREDICT,
        {"signature_name": "scaled", "inputs": {"x": [1.0]}},
        400,
        "Missing named input: scale in 'inputs' object.",
    ),
    "rows lack an input": (
        PREDICT,
        {"signature_name": "scaled", "instances": [{"x": 1.0}]},
        400,
        "Failed to process element: 0 of 'instances' list. JSON object: {\n    \"x\": 1.0\n} keys "
        "must be equal to: scale,x",
    ),
    "unknown input in a row": (
        PREDICT,
        {"instances": [{"x": 1.0, "sid": "a", "q": 1}]},
        400,
        ROWS.replace("key: x", "key: q") + "JSON object: does not have named input: q",
    ),
    "wrong type": (
        PREDICT,
        {"instances": [{"x": "one", "sid": "a"}]},
        400,
        ROWS + 'JSON Value: "one" Type: String is not of expected type: float',
    ),
    "float for an integer": (
        PREDICT,
        {"signature_name": "typed", "inputs": {"i": [1.5], "b": [True], "l": [1]}},
        400,
        "JSON Value: 1.5 Type: Number is not of expected type: int32",
    ),
    "ragged": (
        PREDICT,
        {"signature_name": "wide", "inputs": [[1], [1, 2]]},
        400,
        "Encountered list at unexpected size: 2 at level: 1 expected size: 1",
    ),
    "ragged rows": (
        PREDICT,
        {"signature_name": "wide", "instances": [[1], [1, 2]]},
        400,
        "Failed to process element: 1 of 'instances' list. Error: INVALID_ARGUMENT: Expecting "
        "tensor size: 1 but got: 2",
    ),
    "plain list for two inputs": (
        PREDICT,
        {"instances": [1.0]},
        400,
        "instances is a plain list, but expecting list of objects as multiple input tensors "
        "required as per tensorinfo_map",
    ),
    "no rows": (
        PREDICT,
        {"instances": []},
        400,
        "JSON Value: {\n    \"instances\": []\n} No values in 'instances' array",
    ),
    "neither form": (PREDICT, {}, 400, "Missing 'inputs' or 'instances' key"),
    "empty body": (PREDICT, b"", 400, "JSON Parse error: The document is empty"),
    "bad base64": (
        PREDICT,
        {"signature_name": "text", "inputs": [{"b64": "?"}]},
        400,
        "Unable to base64 decode",
    ),
    "scalar in row form": (
        PREDICT,
        {"signature_name": "scalar", "instances": [1.0]},
        400,
        "Tensor name: name has no shape information ",
    ),
    "status of an unknown model": (
        "/v1/models/nope",
        None,
        404,
        "Could not find any versions of model nope",
    ),
    "unknown route": ("/v1/nothing", None, 400, "Malformed request: GET /v1/nothing"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(caller: Any, case: str) -> None:
    path, body, status, text = REFUSALS[case]
    assert caller.http(path, body) == (status, {"error": text})


def test_not_json(caller: Any) -> None:
    status, answer = caller.http(PREDICT, b"{nonsense")
    assert status == 400 and answer["error"].startswith("JSON Parse error: ")


def test_graph_errors_map_to_http(caller: Any) -> None:
    status, answer = _predict(caller, "long_error", instances=[1.0])
    assert status == 400 and len(answer["error"]) > 1024  # only gRPC cuts


def test_timeout_is_504(model_dir: Any, serve: Any) -> None:
    with serve(model_dir, rest_timeout_seconds=0.2) as own:
        status, answer = _predict(own, "slow", instances=[30.0])
        assert status == 504, answer


def test_status_and_metadata_routes(caller: Any) -> None:
    entry = {
        "version": "1",
        "state": "AVAILABLE",
        "status": {"error_code": "OK", "error_message": ""},
    }
    for path in ("/v1/models/m", "/v1/models/m/versions/1"):
        assert caller.http(path) == (200, {"model_version_status": [entry]})
    status, answer = caller.http("/v1/models/m/metadata")
    assert status == 200
    assert answer["model_spec"] == {"name": "m", "version": "1", "signature_name": ""}
    signatures = answer["metadata"]["signature_def"]["signature_def"]
    assert signatures["scaled"]["inputs"]["x"]["dtype"] == "DT_FLOAT"


def test_prometheus_page(model_dir: Any, serve: Any) -> None:
    with serve(model_dir) as own:
        _predict(own, "loops_done", instances=[1.0])
        own.predict("loops_done", {"x": [1.0]})
        own.http("/v1/models/nope:predict", {"inputs": [1]})
        with pytest.raises(Exception, match="nosig"):
            own.predict("nosig", {})
        status, page = own.http("/monitoring/prometheus/metrics")
        assert status == 200
        lines = page.splitlines()
        prefix = ":tensorflow:serving:"
        assert f"# TYPE {prefix}request_count counter" in lines
        assert f'{prefix}request_count{{model_name="m",status="OK"}} 2' in lines
        assert f'{prefix}request_count{{model_name="m",status="FAILED_PRECONDITION"}} 1' in lines
        for face in ("GRPC", "REST"):
            labels = f'model_name="m",API="Predict",entrypoint="{face}"'
            assert f'{prefix}request_latency_bucket{{{labels},le="+Inf"}} 1' in lines
            assert f"{prefix}request_latency_count{{{labels}}} 1" in lines
        labels = 'model_name="m",API="Predict",runtime="TF1"'
        assert f"{prefix}runtime_latency_count{{{labels}}} 2" in lines
        assert f'{prefix}runtime_latency_bucket{{{labels},le="32.4"}}' in page


def test_a_connection_carries_many_calls_at_once_with_others(caller: Any) -> None:
    port = caller.server.rest_port
    failures: list[object] = []

    def talk() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        for _ in range(20):
            connection.request("GET", "/v1/models/m")
            answer = connection.getresponse()
            if answer.status != 200 or b"AVAILABLE" not in answer.read():
                failures.append(answer)
        connection.close()

    threads = [threading.Thread(target=talk) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
