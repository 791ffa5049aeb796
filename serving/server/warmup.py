"""Replays the warmup records of a version before it becomes available."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import grpc
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

from tfkv.manifest import WARMUP_PATH
from tfkv.serving.server.call_error import CallError, invalid_argument
from tfkv.serving.server.servable import Servable

MAX_RECORDS = 1000


def read_warmup(version_dir: pathlib.Path) -> list[prediction_log_pb2.PredictionLog]:
    """The warmup records of a version, in order; none where it has no file.

    Raises:
        CallError: The file is damaged, or holds more than `MAX_RECORDS` records.
    """
    path = version_dir / WARMUP_PATH
    if not path.exists():
        return []
    logs: list[prediction_log_pb2.PredictionLog] = []
    try:
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            if len(logs) == MAX_RECORDS:
                raise invalid_argument(
                    f"Number of warmup records exceeds the maximum ({MAX_RECORDS}) at {path}"
                )
            logs.append(prediction_log_pb2.PredictionLog.FromString(record))
    except tf.errors.OpError as error:
        raise CallError.from_number(error.error_code, error.message) from error
    except ValueError as error:  # protobuf's DecodeError is one
        raise invalid_argument(f"Failed to parse warmup record: {path}: {error}") from error
    return logs


def replay_warmup(
    servable: Servable,
    logs: list[prediction_log_pb2.PredictionLog],
    progress: Callable[[int, int], None],
) -> None:
    """Runs the records one after the other.

    Args:
        servable: Version that is being loaded.
        logs: Records of `read_warmup`.
        progress: Called with records done and records in all.

    Raises:
        CallError: A record failed; the version must not become available.
    """
    for done, log in enumerate(logs):
        progress(done, len(logs))
        if log.WhichOneof("log_type") != "predict_log":
            raise CallError(
                grpc.StatusCode.UNIMPLEMENTED,
                f"Unsupported log_type for warmup: {log.WhichOneof('log_type')}",
            )
        servable.predict(log.predict_log.request)
    if logs:
        progress(len(logs), len(logs))
