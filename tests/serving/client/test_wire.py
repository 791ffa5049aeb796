"""The private messages are the official ones, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from google.protobuf import any_pb2

from tfkv.serving import InputError, wire

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(4, dtype=np.float64) - 1.5,
    np.array([[1, -2, 2**31 - 1]], np.int32),
    np.array([2**62, -1], np.int64),
    np.array([True, False, True]),
    np.array([1, 2, 255], np.uint8),
    np.array([-128, 127], np.int8),
    np.array([-5, 5], np.int16),
    np.array([5, 65535], np.uint16),
    np.array([5, 2**32 - 1], np.uint32),
    np.array([5, 2**64 - 1], np.uint64),
    np.array([0.5, -2.25], np.float16),
    np.array([1 + 2j, 3 - 4j], np.complex64),
    np.array([1 + 2j, 3 - 4j], np.complex128),
    np.array([[b"a\x00", b""], ["hé".encode(), b"\xff"]], object),
    np.zeros((0, 3), np.float32),
]
IDS = [f"{array.dtype}-{array.shape}" for array in ARRAYS]


@pytest.fixture(scope="module")
def tf() -> Any:
    return pytest.importorskip("tensorflow")


def test_import_of_client_without_tensorflow() -> None:
    code = (
        "import sys, tfkv.serving, tfkv.serving.client, tfkv.serving.session\n"
        "from tfkv.serving import Client\n"
        "client = Client('localhost:1'); client.session(); client.close()\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in "
        "('tensorflow', 'tensorflow_serving', 'keras', 'tfkv.layers', 'tfkv.export')]\n"
        "assert not bad, bad\n"
        "from google.protobuf import descriptor_pool\n"
        "try: descriptor_pool.Default().FindMessageTypeByName('tensorflow.TensorProto')\n"
        "except KeyError: pass\n"
        "else: raise SystemExit('registered in the default pool')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("array", ARRAYS, ids=IDS)
def test_tensor_bytes_are_tensorflows(array: np.ndarray, tf: Any) -> None:
    ours = wire.to_proto(array).SerializeToString(deterministic=True)
    official = tf.make_tensor_proto(array)
    if array.dtype != object and array.size and not official.tensor_content:
        # TensorFlow's helper writes some types as values only; its C++ reads both.
        for name in ("bool_val", "int_val", "scomplex_val", "dcomplex_val"):
            official.ClearField(name)
        official.tensor_content = array.tobytes()
    assert ours == official.SerializeToString(deterministic=True)


@pytest.mark.parametrize("array", ARRAYS, ids=IDS)
def test_tensors_parse_both_ways(array: np.ndarray, tf: Any) -> None:
    from tensorflow.core.framework import tensor_pb2

    official = tensor_pb2.TensorProto.FromString(wire.to_proto(array).SerializeToString())
    np.testing.assert_array_equal(tf.make_ndarray(official), array)
    back = wire.to_array(wire.TensorProto.FromString(official.SerializeToString()))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "float64", "int32", "int64", "bool", "uint8", "int8", "int16", "uint16"),
        *("uint32", "uint64", "float16", "complex64", "complex128"),
    ],
)
def test_value_fields_and_repeated_last_value(dtype: str, tf: Any) -> None:
    # TensorFlow writes tensors of one element, and equal tails, into the repeated fields.
    one = tf.make_tensor_proto(np.ones((1,), dtype))
    assert not one.tensor_content
    proto = wire.TensorProto.FromString(one.SerializeToString())
    np.testing.assert_array_equal(wire.to_array(proto), np.ones((1,), dtype))
    del proto.tensor_shape.dim[:]
    for size in (2, 3):
        proto.tensor_shape.dim.add(size=size)
    filled = wire.to_array(proto)
    assert filled.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(filled, np.ones((2, 3), dtype))
    np.testing.assert_array_equal(filled, tf.make_ndarray(_official(proto)))


def _official(proto: Any) -> Any:
    from tensorflow.core.framework import tensor_pb2

    return tensor_pb2.TensorProto.FromString(proto.SerializeToString())


def test_no_values_mean_zeros_as_in_tensorflow(tf: Any) -> None:
    proto = wire.TensorProto(dtype=wire.DATA_TYPES["DT_INT64"])
    proto.tensor_shape.dim.add(size=3)
    np.testing.assert_array_equal(wire.to_array(proto), np.zeros(3, np.int64))


@pytest.mark.parametrize("values", [[1.5], [1.5, -2.0, 3.25]])
def test_bfloat16_reads_as_float32(values: list[float], tf: Any) -> None:
    official = tf.make_tensor_proto(np.array(values, ml_dtypes.bfloat16))
    array = wire.to_array(wire.TensorProto.FromString(official.SerializeToString()))
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, np.array(values, np.float32))


def test_scalar_and_big_endian_arrays(tf: Any) -> None:
    scalar = wire.to_array(wire.to_proto(np.float32(2.5)))
    assert scalar.shape == () and scalar == 2.5
    big = np.array([1, 2], ">i4")
    np.testing.assert_array_equal(tf.make_ndarray(_official(wire.to_proto(big))), [1, 2])


@pytest.mark.parametrize("value", [[[1, 2], [3]], [None], ["a", 3], np.array(["2020"], "M8[D]")])
def test_values_that_no_tensor_holds(value: Any) -> None:
    with pytest.raises(InputError):
        wire.to_proto(value)


def test_damaged_tensors_are_refused() -> None:
    proto = wire.to_proto(np.arange(4, dtype=np.int32))
    proto.tensor_content = proto.tensor_content[:-1]
    with pytest.raises(InputError, match="needs 16 bytes. Received: 15"):
        wire.to_array(proto)
    many = wire.TensorProto(dtype=wire.DATA_TYPES["DT_FLOAT"], float_val=[1, 2, 3])
    many.tensor_shape.dim.add(size=2)
    with pytest.raises(InputError, match="2 elements carries 3"):
        wire.to_array(many)
    with pytest.raises(InputError, match="no NumPy counterpart"):
        wire.to_array(wire.TensorProto(dtype=21))
    open_shape = wire.TensorProto(dtype=1)
    open_shape.tensor_shape.dim.add(size=-1)
    with pytest.raises(InputError, match="known shape"):
        wire.to_array(open_shape)


def _fill_request(request: Any, proto: Any, label: str) -> Any:
    request.model_spec.name = "tfkv"
    request.model_spec.signature_name = "generate"
    if label:
        request.model_spec.version_label = label
    else:
        request.model_spec.version.value = 7
    for name in ("tokens", "length", "a"):
        request.inputs[name].CopyFrom(proto)
    request.output_filter.append("tokens")
    return request


@pytest.mark.parametrize("label", ["", "stable"])
def test_request_bytes_are_official(label: str, tf: Any) -> None:
    from tensorflow_serving.apis import predict_pb2

    array = np.arange(3, dtype=np.int32)
    ours = _fill_request(wire.PredictRequest(), wire.to_proto(array), label)
    theirs = _fill_request(predict_pb2.PredictRequest(), tf.make_tensor_proto(array), label)
    data = theirs.SerializeToString(deterministic=True)
    assert ours.SerializeToString(deterministic=True) == data
    assert wire.PredictRequest.FromString(data) == ours
    assert predict_pb2.PredictRequest.FromString(ours.SerializeToString()) == theirs


def test_response_bytes_are_official(tf: Any) -> None:
    from tensorflow_serving.apis import predict_pb2

    array = np.arange(3, dtype=np.int32)
    ours, theirs = wire.PredictResponse(), predict_pb2.PredictResponse()
    for reply, proto in ((ours, wire.to_proto(array)), (theirs, tf.make_tensor_proto(array))):
        reply.model_spec.name = "m"
        reply.outputs["x"].CopyFrom(proto)
    data = theirs.SerializeToString(deterministic=True)
    assert ours.SerializeToString(deterministic=True) == data
    assert wire.PredictResponse.FromString(data) == ours


def test_status_and_metadata_bytes_are_official(tf: Any) -> None:
    from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2

    def fill_status(reply: Any) -> bytes:
        item = reply.model_version_status.add(version=3, state=30)
        item.status.error_code = 5
        item.status.error_message = "gone"
        return bytes(reply.SerializeToString(deterministic=True))

    assert fill_status(wire.GetModelStatusResponse()) == fill_status(
        get_model_status_pb2.GetModelStatusResponse()
    )

    def fill_metadata(reply: Any, signatures: Any) -> bytes:
        signature = signatures.signature_def["generate"]
        signature.method_name = "tensorflow/serving/predict"
        info = signature.inputs["tokens"]
        info.name, info.dtype = "generate_tokens:0", 3
        info.tensor_shape.dim.add(size=-1)
        signature.defaults["seed"].dtype = 9
        packed = any_pb2.Any(
            type_url="type.googleapis.com/tensorflow.serving.SignatureDefMap",
            value=signatures.SerializeToString(deterministic=True),
        )
        reply.metadata["signature_def"].ParseFromString(packed.SerializeToString())
        return bytes(reply.SerializeToString(deterministic=True))

    assert fill_metadata(wire.GetModelMetadataResponse(), wire.SignatureDefMap()) == fill_metadata(
        get_model_metadata_pb2.GetModelMetadataResponse(),
        get_model_metadata_pb2.SignatureDefMap(),
    )


def test_enum_numbers_are_official(tf: Any) -> None:
    from tensorflow.core.framework import types_pb2
    from tensorflow_serving.apis import get_model_status_pb2

    for name, number in wire.DATA_TYPES.items():
        assert types_pb2.DataType.Value(name) == number
    states = get_model_status_pb2.ModelVersionStatus.State
    assert dict(states.items()) == wire.VERSION_STATES


def test_methods_are_official(tf: Any) -> None:
    from tensorflow_serving.apis import model_service_pb2, prediction_service_pb2

    predict = prediction_service_pb2.DESCRIPTOR.services_by_name["PredictionService"]
    models = model_service_pb2.DESCRIPTOR.services_by_name["ModelService"]
    names = {f"/{s.full_name}/{m.name}" for s in (predict, models) for m in s.methods}
    assert {wire.PREDICT, wire.GET_MODEL_METADATA, wire.GET_MODEL_STATUS} <= names
