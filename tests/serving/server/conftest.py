"""Small stateful SavedModels, and a client that speaks only the official protos."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_log_pb2,
    prediction_service_pb2_grpc,
)

from tfkv.serving.server import Server

F32 = tf.float32
SIGNATURES = (
    "slow",
    "loops_done",
    "compiled",
    "scaled",
    "wide",
    "scalar",
    "text",
    "typed",
    "together",
    "long_error",
)


def _spec(dtype: tf.DType, name: str, *axes: int | None) -> tf.TensorSpec:
    return tf.TensorSpec([None, *axes], dtype, name=name)


class StatefulModel(tf.Module):
    """A row counter, a hash table, a timed loop, and signatures that misbehave."""

    def __init__(self, version: int = 1) -> None:
        super().__init__()
        self.version = tf.constant(version, tf.int64)
        self.rows = tf.Variable(0, dtype=tf.int64)
        self.loops = tf.Variable(0, dtype=tf.int64)
        self.compiled_calls = tf.Variable(0.0)
        self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)

    @tf.function(input_signature=[_spec(tf.string, "sid"), _spec(F32, "x")])
    def step(self, sid: tf.Tensor, x: tf.Tensor) -> dict[str, tf.Tensor]:
        """Counts rows, remembers the last count of each sid, and shows the whole batch."""
        before = self.table.lookup(sid)
        total = self.rows.assign_add(tf.size(sid, tf.int64))
        with tf.control_dependencies([before]):
            insert = self.table.insert(sid, tf.fill(tf.shape(sid), total))
        with tf.control_dependencies([insert]):
            batch = tf.fill(tf.shape(sid), tf.strings.reduce_join(sid, separator=","))
            return {
                "y": x * 2.0,
                "total": tf.fill(tf.shape(sid), total),
                "before": tf.identity(before),
                "batch": batch,
                "version": tf.fill(tf.shape(sid), self.version),
            }

    @tf.function(input_signature=[_spec(F32, "seconds")])
    def slow(self, seconds: tf.Tensor) -> dict[str, tf.Tensor]:
        end = tf.timestamp() + tf.cast(tf.reduce_max(seconds), tf.float64)

        def body(i: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([self.loops.assign_add(1)]):
                return i + 1

        tf.while_loop(lambda i: tf.timestamp() < end, body, [tf.constant(0)])
        return {"version": tf.fill(tf.shape(seconds), self.version)}

    @tf.function(input_signature=[_spec(F32, "x")])
    def loops_done(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"loops": tf.fill(tf.shape(x), self.loops + 0)}

    @tf.function(jit_compile=True)
    def _compiled(self, x: tf.Tensor) -> tf.Tensor:
        return x * 3.0 + 0.0 * self.compiled_calls.assign_add(1.0)

    @tf.function(input_signature=[_spec(F32, "x")])
    def compiled(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": self._compiled(x)}

    @tf.function(input_signature=[_spec(F32, "x"), _spec(F32, "scale")])
    def scaled(
        self,
        x: tf.Tensor,
        scale: tf.Tensor = tf.constant([10.0]),  # noqa: B008
    ) -> dict[str, tf.Tensor]:
        return {"y": x * scale}

    @tf.function(input_signature=[_spec(F32, "x", None)])
    def wide(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sum": tf.reduce_sum(x, 1), "same": tf.identity(x)}

    @tf.function(input_signature=[_spec(F32, "x")])
    def scalar(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sum": tf.reduce_sum(x), "name": tf.constant("scalar")}

    @tf.function(input_signature=[_spec(tf.string, "text")])
    def text(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"upper": tf.strings.upper(text), "raw_bytes": tf.identity(text)}

    @tf.function(input_signature=[_spec(tf.int32, "i"), _spec(tf.bool, "b"), _spec(tf.int64, "l")])
    def typed(self, i: tf.Tensor, b: tf.Tensor, l: tf.Tensor) -> dict[str, tf.Tensor]:  # noqa: E741
        return {"i": i + 1, "b": tf.logical_not(b), "l": l + 1, "h": tf.cast(i, tf.float16) / 4}

    @tf.function(input_signature=[_spec(tf.string, "sid")])
    def together(self, sid: tf.Tensor) -> dict[str, tf.Tensor]:
        """Batches in the graph, as artifacts do."""

        @tf.nondifferentiable_batch_function(
            num_batch_threads=2,
            max_batch_size=8,
            batch_timeout_micros=400_000,
            allowed_batch_sizes=[4, 8],
            max_enqueued_batches=64,
        )
        def body(sid: tf.Tensor) -> tf.Tensor:
            return tf.fill(tf.shape(sid), tf.strings.reduce_join(sid, separator=","))

        return {"batch": body(sid)}

    @tf.function(input_signature=[_spec(F32, "x")])
    def long_error(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        check = tf.debugging.Assert(tf.reduce_all(x < 0), ["e" * 3000], summarize=5000)
        with tf.control_dependencies([check]):
            return {"y": tf.identity(x)}


def save_model(path: pathlib.Path, version: int) -> None:
    model = StatefulModel(version)
    signatures = {"serving_default": model.step}
    for name in SIGNATURES:
        signatures[name] = getattr(model, name)
    tf.saved_model.save(model, str(path), signatures=signatures)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model directory with version 1. Read-only: copy it to change it."""
    root = tmp_path_factory.mktemp("model")
    save_model(root / "1", 1)
    return root


@pytest.fixture(scope="session")
def other_version(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A complete version directory that answers with version 2."""
    root = tmp_path_factory.mktemp("other")
    save_model(root / "version", 2)
    return root / "version"


@pytest.fixture
def own_dir(model_dir: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the model directory that the test may change."""
    shutil.copytree(model_dir, tmp_path / "model")
    return tmp_path / "model"


class Caller:
    """Calls one server over sockets, with nothing but the official messages."""

    def __init__(self, target: str, rest_port: int | None = None) -> None:
        self.rest = f"http://127.0.0.1:{rest_port}"
        self.channel = grpc.insecure_channel(
            target, options=[("grpc.max_receive_message_length", -1)]
        )
        self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)

    def request(
        self,
        signature: str = "",
        inputs: dict[str, Any] | None = None,
        name: str = "m",
        version: int | None = None,
        outputs: tuple[str, ...] = (),
    ) -> predict_pb2.PredictRequest:
        request = predict_pb2.PredictRequest(output_filter=outputs)
        request.model_spec.name = name
        request.model_spec.signature_name = signature
        if version is not None:
            request.model_spec.version.value = version
        for alias, value in (inputs or {}).items():
            proto = value
            if not isinstance(value, tensor_pb2.TensorProto):
                proto = tf.make_tensor_proto(value)
            request.inputs[alias].CopyFrom(proto)
        return request

    def predict(
        self, signature: str = "", inputs: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        timeout = options.pop("timeout", 20)
        response = self.prediction.Predict(
            self.request(signature, inputs, **options), timeout=timeout
        )
        return {key: tf.make_ndarray(value) for key, value in response.outputs.items()}

    def start(
        self, signature: str = "", inputs: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        """A call under way."""
        timeout = options.pop("timeout", 20)
        return self.prediction.Predict.future(
            self.request(signature, inputs, **options), timeout=timeout
        )

    def status(self, name: str = "m", version: int | None = None) -> Any:
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = name
        if version is not None:
            request.model_spec.version.value = version
        return self.models.GetModelStatus(request, timeout=20).model_version_status

    def metadata(self, *fields: str, name: str = "m") -> Any:
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=fields)
        request.model_spec.name = name
        return self.prediction.GetModelMetadata(request, timeout=20)

    def http(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.rest + path, data)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()


ServerFactory = Callable[..., contextlib.AbstractContextManager[Caller]]


@contextlib.contextmanager
def _serve(directory: pathlib.Path, **options: Any) -> Iterator[Caller]:
    options = {"poll_seconds": 0, "grpc_max_threads": 24, **options}
    with Server(directory, name="m", port=0, rest_port=0, **options) as server:
        caller = Caller(server.target, server.rest_port)
        caller.server = server  # type: ignore[attr-defined]
        with caller.channel:
            yield caller


@pytest.fixture(scope="session")
def serve() -> ServerFactory:
    """Starts a server of one's own."""
    return _serve


@pytest.fixture(scope="session")
def caller(model_dir: pathlib.Path) -> Iterator[Caller]:
    """A caller of the server that all tests share."""
    with _serve(model_dir) as shared:
        yield shared


@pytest.fixture(scope="session")
def refused() -> Callable[..., tuple[str, str]]:
    """Code and text with which a call fails."""

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, str]:
        with pytest.raises(grpc.RpcError) as caught:
            function(*args, **options)
        return caught.value.code().name, caught.value.details()

    return call


@pytest.fixture(scope="session")
def write_warmup() -> Callable[[pathlib.Path, list[predict_pb2.PredictRequest]], None]:
    """Writes a warmup file into a version directory."""

    def write(version_dir: pathlib.Path, requests: list[predict_pb2.PredictRequest]) -> None:
        folder = version_dir / "assets.extra"
        folder.mkdir(exist_ok=True)
        with tf.io.TFRecordWriter(str(folder / "tf_serving_warmup_requests")) as writer:
            for request in requests:
                log = prediction_log_pb2.PredictionLog()
                log.predict_log.request.CopyFrom(request)
                writer.write(log.SerializeToString())

    return write


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], Any]], Any]:
    """Waits for a condition."""

    def wait(condition: Callable[[], Any], seconds: float = 15) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError("the condition did not come true in time")

    return wait
