"""gRPC over the data plane: TensorFlow Serving's own services."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from tfkv.errors import ServerError
from tfkv.serving.server.call_error import CallError
from tfkv.serving.server.data_plane import DataPlane

_MAX_MESSAGE = 1024
_REFUSING_THREADS = 4
_FOREVER_SECONDS = 1e8

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
]


def _abort(context: grpc.ServicerContext, error: CallError) -> NoReturn:
    message = error.message
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "...TRUNCATED"
    context.abort(error.code, message)
    raise error  # not reached: abort raises


def _timeout_ms(context: grpc.ServicerContext) -> int:
    remaining = context.time_remaining()
    if remaining is None or not math.isfinite(remaining) or remaining > _FOREVER_SECONDS:
        return 0
    return max(1, int(remaining * 1000))


class _Prediction(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def Predict(
        self, request: predict_pb2.PredictRequest, context: grpc.ServicerContext
    ) -> predict_pb2.PredictResponse:
        try:
            return self._plane.predict(request, _timeout_ms(context), "GRPC")
        except CallError as error:
            _abort(context, error)

    def GetModelMetadata(
        self,
        request: get_model_metadata_pb2.GetModelMetadataRequest,
        context: grpc.ServicerContext,
    ) -> get_model_metadata_pb2.GetModelMetadataResponse:
        try:
            return self._plane.metadata(request)
        except CallError as error:
            _abort(context, error)


class _Models(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def GetModelStatus(
        self, request: get_model_status_pb2.GetModelStatusRequest, context: grpc.ServicerContext
    ) -> get_model_status_pb2.GetModelStatusResponse:
        try:
            return self._plane.status(request)
        except CallError as error:
            _abort(context, error)


class _ThreadLimit(grpc.ServerInterceptor):
    """Refuses the call after the last thread at once, instead of queueing it."""

    def __init__(self, calls: int) -> None:
        self._free = threading.BoundedSemaphore(calls)

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        if handler.unary_unary:
            return handler._replace(unary_unary=self._limited(handler.unary_unary))
        # Streams are health watches, which hold no thread.
        return handler

    def _limited(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(behavior)
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            self._take(context)
            try:
                return behavior(request, context)
            finally:
                self._free.release()

        return call

    def _take(self, context: grpc.ServicerContext) -> None:
        if not self._free.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Server Threadpool Exhausted")


class GrpcFace:
    """PredictionService, ModelService and gRPC health on one port.

    Args:
        plane: Data plane.
        host: Address to listen on.
        port: Port, 0 = a free one; see the attribute `port` afterwards.
        max_threads: As ``--grpc_max_threads``: one is the server's own, so
            ``max_threads - 1`` calls run at once and the next gets RESOURCE_EXHAUSTED.

    Raises:
        ServerError: The port cannot be bound.
    """

    def __init__(self, plane: DataPlane, host: str, port: int, max_threads: int) -> None:
        calls = max(1, max_threads - 1)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(calls + _REFUSING_THREADS, thread_name_prefix="grpc"),
            interceptors=(_ThreadLimit(calls),),
            options=_OPTIONS,
        )
        prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
            _Prediction(plane), self._server
        )
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(_Models(plane), self._server)
        self._health = health.HealthServicer()
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ServerError(
                f"Cannot listen on {address}: {error}. Is the port taken? Choose another, or 0 "
                "for a free one."
            ) from error

    def start(self) -> None:
        """Begins to answer."""
        self._server.start()

    def stop(self, grace: float) -> None:
        """Refuses new calls and waits up to `grace` seconds for those under way."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace).wait()
