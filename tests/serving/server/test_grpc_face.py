"""Every row of the table of requests and errors, through a real socket."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, predict_pb2

F = np.float32
SID = np.array([b"a"], object)
X = np.array([1.5], F)


def _broken_tensor() -> tensor_pb2.TensorProto:
    proto = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_content=b"123")
    proto.tensor_shape.dim.add().size = 1
    return proto


def test_state_persists_between_calls(caller: Any) -> None:
    first = caller.predict("", {"sid": np.array([b"state"], object), "x": X})
    again = caller.predict("serving_default", {"sid": np.array([b"state"], object), "x": X})
    assert first["before"] == [-1]
    assert again["before"] == first["total"]
    assert again["total"] == first["total"] + 1
    np.testing.assert_array_equal(again["y"], [3.0])


def test_the_answer_names_model_signature_and_version(caller: Any) -> None:
    response = caller.prediction.Predict(caller.request("", {"sid": SID, "x": X}))
    spec = response.model_spec
    assert (spec.name, spec.signature_name, spec.version.value) == ("m", "serving_default", 1)
    assert sorted(response.outputs) == ["batch", "before", "total", "version", "y"]


def test_output_filter_and_pinned_version(caller: Any) -> None:
    answer = caller.predict("", {"sid": SID, "x": X}, version=1, outputs=("y",))
    assert list(answer) == ["y"]


def test_all_dtypes(caller: Any) -> None:
    answer = caller.predict(
        "typed", {"i": np.array([4], np.int32), "b": np.array([True]), "l": np.array([2**40])}
    )
    assert answer["i"] == [5] and answer["l"] == [2**40 + 1] and not answer["b"][0]
    assert answer["h"].dtype == np.float16 and answer["h"] == [1.0]


def test_scalars(caller: Any) -> None:
    answer = caller.predict("scalar", {"x": np.array([1, 2], F)})
    assert answer["sum"].shape == answer["name"].shape == ()
    assert (answer["sum"], answer["name"].item()) == (3.0, b"scalar")


def test_xla_compiled_function(caller: Any) -> None:
    np.testing.assert_array_equal(caller.predict("compiled", {"x": X})["y"], [4.5])


def test_defaults_of_the_signature(caller: Any) -> None:
    np.testing.assert_array_equal(caller.predict("scaled", {"x": X})["y"], [15.0])
    given = caller.predict("scaled", {"x": X, "scale": np.array([2.0], F)})
    np.testing.assert_array_equal(given["y"], [3.0])


def test_messages_beyond_4_mb(caller: Any) -> None:
    big = np.random.default_rng(0).random((3, 1_000_000), F)
    np.testing.assert_array_equal(caller.predict("wide", {"x": big})["same"], big)


OUTPUTS = "{batch,before,total,version,y}"
REFUSALS = {
    "unknown model": (
        dict(name="nope"),
        "NOT_FOUND",
        "Servable not found for request: Latest(nope)",
    ),
    "unknown version": (
        dict(version=7),
        "NOT_FOUND",
        "Servable not found for request: Specific(m, 7)",
    ),
    "no model name": (dict(name=""), "INVALID_ARGUMENT", "ModelSpec has no name specified."),
    "unknown signature": (
        dict(signature="nosig"),
        "FAILED_PRECONDITION",
        'Serving signature key "nosig" not found.',
    ),
    "missing input": (
        dict(inputs={"sid": SID}),
        "INVALID_ARGUMENT",
        "input size does not match signature: 1!=2 len({sid}) != len({sid,x}). "
        "Sent extra: {}. Missing but required: {x}.",
    ),
    "extra input": (
        dict(inputs={"sid": SID, "x": X, "z": X}),
        "INVALID_ARGUMENT",
        "input size does not match signature: 3!=2 len({sid,x,z}) != len({sid,x}). "
        "Sent extra: {z}. Missing but required: {}.",
    ),
    "misnamed input": (
        dict(inputs={"sid": SID, "z": X}),
        "INVALID_ARGUMENT",
        "Signature input alias: x(feed name: serving_default_x:0) not found in request and no "
        "default value provided. Inputs expected to be in the request {sid,z}, or default "
        "input alias set: ",
    ),
    "misnamed beside a default": (
        dict(signature="scaled", inputs={"x": X, "z": X}),
        "INVALID_ARGUMENT",
        "Inputs contains invalid name. Used request inputs: x, request input: x,z",
    ),
    "required beside a default": (
        dict(signature="scaled", inputs={"scale": X}),
        "INVALID_ARGUMENT",
        "Signature input alias: x(feed name: scaled_x:0) not found in request and no default "
        "value provided. Inputs expected to be in the request {scale}, or default input alias "
        "set: scale",
    ),
    "wrong dtype": (
        dict(inputs={"sid": SID, "x": np.array([1], np.int32)}),
        "INVALID_ARGUMENT",
        "Expects arg[1] to be float but int32 is provided",
    ),
    "bad tensor content": (
        dict(inputs={"sid": SID, "x": _broken_tensor()}),
        "INVALID_ARGUMENT",
        "tensor parsing error: x",
    ),
    "bad output_filter": (
        dict(outputs=("nope",)),
        "INVALID_ARGUMENT",
        "output tensor alias not found in signature: nope Outputs expected to be in the set "
        f"{OUTPUTS}.",
    ),
    "duplicate output_filter": (
        dict(outputs=("y", "y")),
        "INVALID_ARGUMENT",
        "duplicate output tensor alias: y",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(caller: Any, refused: Any, case: str) -> None:
    options, code, text = REFUSALS[case]
    options = {"signature": "", "inputs": {"sid": SID, "x": X}, **options}
    assert refused(caller.predict, **options) == (code, text)


def test_wrong_shape_is_what_trips_first(caller: Any, refused: Any) -> None:
    """The signature's shapes are not checked: an operation complains, or none does."""
    code, text = refused(caller.predict, "wide", {"x": np.zeros((), F)})
    assert code == "INVALID_ARGUMENT" and "node" in text


def test_missing_model_spec(caller: Any, refused: Any) -> None:
    wanted = ("INVALID_ARGUMENT", "Missing ModelSpec")
    assert refused(caller.prediction.Predict, predict_pb2.PredictRequest()) == wanted
    empty = get_model_status_pb2.GetModelStatusRequest()
    assert refused(caller.models.GetModelStatus, empty) == wanted
    empty = get_model_metadata_pb2.GetModelMetadataRequest()
    assert refused(caller.prediction.GetModelMetadata, empty) == wanted


def test_version_label(caller: Any, refused: Any) -> None:
    request = caller.request("", {"sid": SID, "x": X})
    request.model_spec.version_label = "stable"
    assert refused(caller.prediction.Predict, request) == (
        "INVALID_ARGUMENT",
        "Unrecognized servable version label: stable",
    )


def test_long_error_text_is_cut(caller: Any, refused: Any) -> None:
    code, text = refused(caller.predict, "long_error", {"x": X})
    assert code == "INVALID_ARGUMENT"
    assert len(text) == 1024 + len("...TRUNCATED") and text.endswith("...TRUNCATED")


def test_status(caller: Any, refused: Any) -> None:
    (entry,) = caller.status()
    assert entry.version == 1
    assert entry.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE
    assert entry.status.error_code == 0
    assert refused(caller.status, "nope") == (
        "NOT_FOUND",
        "Could not find any versions of model nope",
    )
    assert refused(caller.status, "m", 7) == (
        "NOT_FOUND",
        "Could not find version 7 of model m",
    )


def test_metadata(caller: Any, refused: Any) -> None:
    response = caller.metadata("signature_def")
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert response.model_spec.version.value == 1
    assert signatures.signature_def["scaled"].inputs["x"].dtype == types_pb2.DT_FLOAT
    assert refused(caller.metadata) == (
        "INVALID_ARGUMENT",
        "GetModelMetadataRequest must specify at least one metadata_field",
    )
    assert refused(caller.metadata, "bogus") == (
        "INVALID_ARGUMENT",
        "Metadata field bogus is not supported",
    )
    assert refused(caller.metadata, "signature_def", name="nope") == (
        "NOT_FOUND",
        "Servable not found for request: Latest(nope)",
    )


def test_health(caller: Any) -> None:
    stub = health_pb2_grpc.HealthStub(caller.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_batching_in_the_graph_pads_with_the_first_call(caller: Any) -> None:
    """tensorflow/serving's two kinds of batching pad differently; this one is TensorFlow's."""
    first = caller.start("together", {"sid": np.array([b"a", b"b"], object)})
    time.sleep(0.1)
    second = caller.predict("together", {"sid": np.array([b"c"], object)})
    batch = second["batch"].item()
    assert batch in (b"a,b,c,a", b"c,a,b,c")  # whichever call came first
    assert tf.make_ndarray(first.result().outputs["batch"]).tolist() == [batch] * 2


def test_two_servers_do_not_share_batch_queues(model_dir: pathlib.Path, serve: Any) -> None:
    with serve(model_dir) as one, serve(model_dir) as other:
        first = one.start("together", {"sid": np.array([b"one"], object)})
        second = other.predict("together", {"sid": np.array([b"other"], object)})
        assert second["batch"].tolist() == [b"other,other,other,other"]
        answer = tf.make_ndarray(first.result().outputs["batch"])
        assert answer.tolist() == [b"one,one,one,one"]


def test_deadline_stops_a_loop_and_leaves_partial_state(
    caller: Any, refused: Any, until: Any
) -> None:
    code, _ = refused(caller.predict, "slow", {"seconds": np.array([30], F)}, timeout=0.3)
    assert code == "DEADLINE_EXCEEDED"
    loops = caller.predict("loops_done", {"x": X})["loops"][0]

    def stands_still() -> bool:
        nonlocal loops
        before, loops = loops, caller.predict("loops_done", {"x": X})["loops"][0]
        return before == loops

    until(stands_still, 3)
    assert loops > 0


def test_a_generous_deadline_changes_nothing(caller: Any) -> None:
    assert caller.predict("slow", {"seconds": np.array([0.05], F)}, timeout=None)["version"] == [1]


def test_the_call_after_the_last_thread_fails_at_once(
    model_dir: pathlib.Path, serve: Any, refused: Any, until: Any
) -> None:
    with serve(model_dir, grpc_max_threads=3) as own:  # one of them is the server's own
        calls = [own.start("slow", {"seconds": np.array([3.0], F)}) for _ in range(2)]
        wanted = ("RESOURCE_EXHAUSTED", "Server Threadpool Exhausted")

        def exhausted() -> bool:
            try:
                own.status()
            except grpc.RpcError as error:
                return (error.code().name, error.details()) == wanted
            return False

        until(exhausted, 1)
        assert refused(own.predict, "", {"sid": SID, "x": X}) == wanted
        assert not any(call.done() for call in calls)
        assert [tf.make_ndarray(c.result().outputs["version"])[0] for c in calls] == [1, 1]
        assert own.status()[0].version == 1


def test_xla_refusal_of_a_server_without_the_flag(
    model_dir: pathlib.Path, serve: Any, refused: Any
) -> None:
    """tensorflow/serving #2214: a server that cannot compile loads the model all the same."""
    with serve(model_dir, xla_cpu_compilation_enabled=False) as own:
        code, text = refused(own.predict, "compiled", {"x": np.array([1, 2, 3], F)})
        assert code == "INTERNAL" and "XLA compilation disabled" in text
        np.testing.assert_array_equal(own.predict("", {"sid": SID, "x": X})["y"], [3.0])
    with serve(model_dir) as own:
        np.testing.assert_array_equal(own.predict("compiled", {"x": X})["y"], [4.5])


def test_a_taken_port_is_an_error(caller: Any, model_dir: pathlib.Path) -> None:
    from tfkv.errors import ServerError
    from tfkv.serving.server import Server

    with pytest.raises(ServerError, match="Cannot listen on"):
        Server(model_dir, port=caller.server.port, rest_port=0).start()
