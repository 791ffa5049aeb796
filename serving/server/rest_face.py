"""REST over the data plane: predict, status, metadata and the Prometheus page."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from google.protobuf import json_format, message
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    predict_pb2,
)

from tfkv.errors import ServerError
from tfkv.serving.server.call_error import CallError, invalid_argument
from tfkv.serving.server.data_plane import DataPlane
from tfkv.serving.server.rest_json import Inputs, format_predict, parse_predict

_LOG = logging.getLogger(__name__)

METRICS_PATH = "/monitoring/prometheus/metrics"
_MODEL = (
    r"(?i:/v1/models)/(?P<name>[^/:]+)(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
)
_PREDICT = re.compile(_MODEL + ":predict")
_STATUS = re.compile(_MODEL)
_METADATA = re.compile(_MODEL + "/metadata")
_IDLE_SECONDS = 60
_MAX_VERSION = 2**63 - 1

_HTTP = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}


def _spec(match: re.Match[str]) -> model_pb2.ModelSpec:
    spec = model_pb2.ModelSpec(name=match["name"])
    if match["version"] is not None:
        if int(match["version"]) > _MAX_VERSION:
            raise invalid_argument(f"Failed to convert version: {match['version']} to numeric.")
        spec.version.value = int(match["version"])
    if match["label"] is not None:
        spec.version_label = match["label"]
    return spec


def _to_json(proto: message.Message) -> Any:
    return json_format.MessageToDict(
        proto, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _dump(document: Any) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True
    timeout = _IDLE_SECONDS
    server: _HttpServer

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        content_type = "application/json"
        with self.server.call_under_way():
            try:
                body = self._body()
                path = self.path.partition("?")[0]
                if method == "GET" and path == METRICS_PATH:
                    content_type = "text/plain"
                    status, answer = HTTPStatus.OK, self.server.plane.metrics.exposition().encode()
                else:
                    status, answer = HTTPStatus.OK, self._route(method, path, body)
            except CallError as error:
                status = _HTTP.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
                text = json.dumps({"error": error.message}, ensure_ascii=False, indent=4)
                answer = text.encode("utf-8", "replace")
            except Exception as error:
                _LOG.exception("%s %s failed", method, self.path)
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                answer = _dump({"error": f"{type(error).__name__}: {error}"})
            self._send(status, content_type, answer)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            raise invalid_argument("Transfer-Encoding is not supported; send a Content-Length.")
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if length < 0:
            self.close_connection = True
            raise invalid_argument("Malformed Content-Length.")
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            raise invalid_argument(f"Body ended after {len(body)} of {length} bytes.")
        return body

    def _route(self, method: str, path: str, body: bytes) -> bytes:
        if method == "POST" and (match := _PREDICT.fullmatch(path)):
            return self._predict(_spec(match), body)
        if method == "GET" and (match := _METADATA.fullmatch(path)):
            return self._metadata(_spec(match))
        if method == "GET" and (match := _STATUS.fullmatch(path)):
            request = get_model_status_pb2.GetModelStatusRequest(model_spec=_spec(match))
            return _dump(_to_json(self.server.plane.status(request)))
        raise invalid_argument(f"Malformed request: {method} {path}")

    def _predict(self, spec: model_pb2.ModelSpec, body: bytes) -> bytes:
        request = predict_pb2.PredictRequest(model_spec=spec)

        def inputs_of(signature_name: str) -> Inputs:
            wanted = model_pb2.ModelSpec()
            wanted.CopyFrom(spec)
            wanted.signature_name = signature_name
            return self.server.plane.input_signature(wanted).definition.inputs

        rows = parse_predict(body, request, inputs_of)
        response = self.server.plane.predict(request, self.server.timeout_ms, "REST")
        return format_predict(response, rows)

    def _metadata(self, spec: model_pb2.ModelSpec) -> bytes:
        response = self.server.plane.metadata(
            get_model_metadata_pb2.GetModelMetadataRequest(
                model_spec=spec, metadata_field=["signature_def"]
            )
        )
        signatures = get_model_metadata_pb2.SignatureDefMap()
        response.metadata["signature_def"].Unpack(signatures)
        return _dump(
            {
                "model_spec": _to_json(response.model_spec),
                "metadata": {"signature_def": _to_json(signatures)},
            }
        )

    def _send(self, status: HTTPStatus, content_type: str, answer: bytes) -> None:
        if self.server.stopping:
            self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(answer)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.debug(format, *args)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], plane: DataPlane, timeout_ms: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.plane = plane
        self.timeout_ms = timeout_ms
        self.stopping = False
        self._calls = 0
        self._ended = threading.Condition()
        super().__init__(address, _Handler)

    def call_under_way(self) -> _Call:
        return _Call(self)

    def change_calls(self, by: int) -> None:
        with self._ended:
            self._calls += by
            self._ended.notify_all()

    def drain(self, seconds: float) -> bool:
        with self._ended:
            return self._ended.wait_for(lambda: not self._calls, seconds)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.debug("Connection of %s failed", client_address, exc_info=True)


class _Call:
    """Counts a call from its first byte to the last of its answer."""

    def __init__(self, server: _HttpServer) -> None:
        self._server = server

    def __enter__(self) -> None:
        self._server.change_calls(1)

    def __exit__(self, *_: object) -> None:
        self._server.change_calls(-1)


class RestFace:
    """The REST port, on the standard library's threading server.

    REST is for curl and dashboards; the fast path is gRPC, so no web framework is needed.

    Args:
        plane: Data plane.
        host: Address to listen on.
        port: Port, 0 = a free one; see the attribute `port` afterwards.
        timeout_seconds: Seconds after which a call's run is cancelled.

    Raises:
        ServerError: The port cannot be bound.
    """

    def __init__(
        self, plane: DataPlane, host: str, port: int, timeout_seconds: float = 30.0
    ) -> None:
        try:
            self._server = _HttpServer((host, port), plane, int(timeout_seconds * 1000))
        except OSError as error:
            raise ServerError(
                f"Cannot listen on {host}:{port} for REST: {error}. Choose another port, or 0 "
                "for a free one."
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="rest"
        )

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def stop(self, grace: float) -> None:
        """Refuses new connections and waits up to `grace` seconds for calls under way."""
        deadline = time.monotonic() + grace
        self._server.stopping = True
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.drain(max(0.0, deadline - time.monotonic()))
