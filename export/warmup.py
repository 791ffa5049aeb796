"""The calls that TensorFlow Serving replays while it loads an artifact."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfkv.manifest import SignatureSpec


def warmup_inputs(spec: SignatureSpec, rows: int) -> dict[str, np.ndarray]:
    """A call that compiles a batch size and leaves nothing behind.

    A row without a session id is a probe: it runs through everything, is answered as
    INVALID, and is neither stored nor counted.

    Args:
        spec: The signature's contract.
        rows: Batch size.
    """
    inputs: dict[str, np.ndarray] = {}
    for name, tensor in spec.inputs.items():
        value: Any = tensor.default
        if value is None:
            value = b"" if tensor.dtype == "string" else 0
        shape = [1 if isinstance(axis, str) else axis for axis in tensor.shape]
        dtype = object if tensor.dtype == "string" else tensor.dtype
        value = value.encode() if isinstance(value, str) else value
        inputs[name] = np.broadcast_to(np.array(value, dtype), [rows, *shape])
    return inputs


def write_warmup(
    path: pathlib.Path, table: dict[str, SignatureSpec], batch_sizes: tuple[int, ...]
) -> int:
    """Writes the warm-up file. Returns the number of its records.

    Args:
        path: ``assets.extra/tf_serving_warmup_requests``.
        table: The contract.
        batch_sizes: Compiled batch sizes.
    """
    from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

    count = 0
    with tf.io.TFRecordWriter(str(path)) as writer:
        for name, spec in table.items():
            sizes = batch_sizes if "length" in spec.inputs else (1,)
            for rows in sizes:
                request = predict_pb2.PredictRequest()
                request.model_spec.signature_name = name
                for key, value in warmup_inputs(spec, rows).items():
                    request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
                log = prediction_log_pb2.PredictionLog()
                log.predict_log.request.CopyFrom(request)
                writer.write(log.SerializeToString())
                count += 1
    return count
