"""What the server answers; the gRPC and REST faces only translate."""

from __future__ import annotations

import time

from google.protobuf import any_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    predict_pb2,
)

from tfkv.serving.server.call_error import CallError, invalid_argument
from tfkv.serving.server.metrics import Metrics
from tfkv.serving.server.servable_manager import ServableManager
from tfkv.serving.server.signature import Signature

_SIGNATURE_DEF = "signature_def"
_UNKNOWN_MODEL = "(unknown)"


def _version(spec: model_pb2.ModelSpec) -> int | None:
    return spec.version.value if spec.HasField("version") else None


class DataPlane:
    """The calls of TensorFlow Serving's API, over the versions of one model.

    Args:
        manager: Versions of the model.
        metrics: Where calls are counted.

    Raises:
        CallError: By every method, with the code and the text TensorFlow Serving sends.
    """

    def __init__(self, manager: ServableManager, metrics: Metrics) -> None:
        self.metrics = metrics
        self._manager = manager

    def predict(
        self, request: predict_pb2.PredictRequest, timeout_ms: int, entrypoint: str
    ) -> predict_pb2.PredictResponse:
        """Runs one Predict call.

        Args:
            request: The call.
            timeout_ms: Milliseconds until its run is cancelled, 0 = never.
            entrypoint: ``GRPC`` or ``REST``, for the metrics.
        """
        start = time.perf_counter()
        # Any client can invent names; each would be a series of the page for ever.
        name = request.model_spec.name
        model = name if name == self._manager.name else _UNKNOWN_MODEL
        try:
            if not request.HasField("model_spec"):
                raise invalid_argument("Missing ModelSpec")
            spec = request.model_spec
            if not name:
                raise invalid_argument("ModelSpec has no name specified.")
            with self._manager.acquire(name, _version(spec), spec.version_label) as servable:
                response = servable.predict(request, timeout_ms)
        except CallError as error:
            self.metrics.count_request(model, error.code.name)
            raise
        self.metrics.count_request(model, "OK")
        self.metrics.request_latency(model, entrypoint, (time.perf_counter() - start) * 1e6)
        return response

    def input_signature(self, spec: model_pb2.ModelSpec) -> Signature:
        """The signature a REST call means, for its inputs' types."""
        with self._manager.acquire(spec.name, _version(spec), spec.version_label) as servable:
            try:
                return servable.signature(spec.signature_name)
            except CallError as error:
                name = spec.signature_name or "serving_default"
                raise invalid_argument(
                    f'Serving signature name: "{name}" not found in signature def'
                ) from error

    def metadata(
        self, request: get_model_metadata_pb2.GetModelMetadataRequest
    ) -> get_model_metadata_pb2.GetModelMetadataResponse:
        """Signatures of a version."""
        if not request.HasField("model_spec"):
            raise invalid_argument("Missing ModelSpec")
        if not request.metadata_field:
            raise invalid_argument(
                "GetModelMetadataRequest must specify at least one metadata_field"
            )
        for field in request.metadata_field:
            if field != _SIGNATURE_DEF:
                raise invalid_argument(f"Metadata field {field} is not supported")
        spec = request.model_spec
        if not spec.name:
            raise invalid_argument("ModelSpec has no name specified.")
        signatures = get_model_metadata_pb2.SignatureDefMap()
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        with self._manager.acquire(spec.name, _version(spec), spec.version_label) as servable:
            for key, definition in servable.signature_defs.items():
                signatures.signature_def[key].CopyFrom(definition)
            response.model_spec.name = servable.name
            response.model_spec.version.value = servable.version
        packed = any_pb2.Any()
        packed.Pack(signatures)
        response.metadata[_SIGNATURE_DEF].CopyFrom(packed)
        return response

    def status(
        self, request: get_model_status_pb2.GetModelStatusRequest
    ) -> get_model_status_pb2.GetModelStatusResponse:
        """State of the versions seen so far."""
        if not request.HasField("model_spec"):
            raise invalid_argument("Missing ModelSpec")
        spec = request.model_spec
        if spec.version_label:
            raise invalid_argument(f"Unrecognized servable version label: {spec.version_label}")
        response = get_model_status_pb2.GetModelStatusResponse()
        for number, state, error in self._manager.states(spec.name, _version(spec)):
            entry = response.model_version_status.add(version=number, state=state)
            entry.status.error_code = error.code.value[0] if error else 0
            entry.status.error_message = error.message if error else ""
        return response
