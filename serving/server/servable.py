"""One loaded version of a SavedModel."""

from __future__ import annotations

import gc
import pathlib
import time
from collections.abc import Callable
from typing import Any

import grpc
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.saved_model import loader_impl
from tensorflow_serving.apis import predict_pb2

from tfkv.serving.server.batching_parameters import BatchingParameters
from tfkv.serving.server.batching_session import BatchingSession
from tfkv.serving.server.call_error import CallError, failed_precondition
from tfkv.serving.server.session_options import SessionOptions
from tfkv.serving.server.session_runner import SessionRunner
from tfkv.serving.server.signature import Signature
from tfkv.serving.server.tensors import fill_tensor

DEFAULT_SIGNATURE = "serving_default"


class Servable:
    """A SavedModel version in a graph and a TF1 session of its own.

    It is loaded as TensorFlow Serving's C++ loader does: the MetaGraph tagged ``serve``,
    restore, init op. `tf.saved_model.load` is eager and shares batch queues and named
    resources between two loads; a session keeps each version's state to itself.

    Args:
        name: Model name, for answers.
        version: Version number.
        path: Version directory.
        options: Session threads.
        batching: Emulate ``--enable_batching`` with these parameters.
        on_runtime: Called with the microseconds of each session run.

    Call arguments of `predict`:
        request: PredictRequest; its model name is not looked at.
        timeout_ms: Milliseconds until the run is cancelled, 0 = never.

    Returns:
        PredictResponse.

    Raises:
        CallError: The model cannot be loaded, or the call failed.
    """

    def __init__(
        self,
        name: str,
        version: int,
        path: pathlib.Path,
        options: SessionOptions | None = None,
        batching: BatchingParameters | None = None,
        on_runtime: Callable[[float], None] | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.path = path
        self._on_runtime = on_runtime
        session, meta_graph = _load(path, options or SessionOptions())
        self._signatures = {
            key: Signature(definition) for key, definition in meta_graph.signature_def.items()
        }
        runner = SessionRunner(session)
        self._runner: Any = runner if batching is None else BatchingSession(runner, batching)

    @property
    def signature_defs(self) -> dict[str, meta_graph_pb2.SignatureDef]:
        """Signature name to its definition."""
        return {key: signature.definition for key, signature in self._signatures.items()}

    def signature(self, name: str) -> Signature:
        """The signature of that name; the empty name means ``serving_default``.

        Raises:
            CallError: FAILED_PRECONDITION, there is none.
        """
        key = name or DEFAULT_SIGNATURE
        try:
            return self._signatures[key]
        except KeyError:
            raise failed_precondition(f'Serving signature key "{key}" not found.') from None

    def predict(
        self, request: predict_pb2.PredictRequest, timeout_ms: int = 0
    ) -> predict_pb2.PredictResponse:
        spec = request.model_spec
        signature = self.signature(spec.signature_name)
        feeds = signature.feeds(request.inputs)
        aliases, fetches = signature.fetches(tuple(request.output_filter))
        start = time.perf_counter()
        values = self._runner.run(feeds, fetches, timeout_ms)
        if self._on_runtime is not None:
            self._on_runtime((time.perf_counter() - start) * 1e6)
        response = predict_pb2.PredictResponse()
        response.model_spec.name = spec.name
        response.model_spec.signature_name = spec.signature_name or DEFAULT_SIGNATURE
        response.model_spec.version.value = self.version
        for alias, value in zip(aliases, values, strict=True):
            try:
                fill_tensor(value, response.outputs[alias])
            except ValueError as error:
                raise CallError(grpc.StatusCode.UNIMPLEMENTED, f"{alias}: {error}") from error
        return response

    def close(self) -> None:
        """Frees weights and state. No call may be under way."""
        self._runner.close()
        self._runner = None
        gc.collect()  # the Python graph is full of cycles


def _load(
    path: pathlib.Path, options: SessionOptions
) -> tuple[tf.compat.v1.Session, meta_graph_pb2.MetaGraphDef]:
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=options.inter_op_threads,
        intra_op_parallelism_threads=options.intra_op_threads,
    )
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph, config=config)
    try:
        with graph.as_default():
            meta_graph = loader_impl.SavedModelLoader(str(path)).load(session, ["serve"])
    except tf.errors.OpError as error:
        session.close()
        raise CallError.from_number(error.error_code, error.message) from error
    except Exception as error:
        session.close()
        raise failed_precondition(f"{path}: {type(error).__name__}: {error}") from error
    graph.finalize()
    meta_graph.ClearField("graph_def")  # the session holds the graph
    return session, meta_graph
