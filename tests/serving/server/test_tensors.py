"""TensorProto conversions agree with TensorFlow's own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2

from tfkv.serving.server.tensors import fill_tensor, parse_tensor

FLOATS = ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"]
INTEGERS = ["int32", "int16", "int8", "uint16", "uint8", "int64", "uint32", "uint64", "bool"]
DTYPES = FLOATS + INTEGERS


def _array(dtype: str) -> np.ndarray:
    return (np.arange(6).reshape(2, 3) - 2 * (dtype[0] not in "ub")).astype(
        tf.as_dtype(dtype).as_numpy_dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_and_both_encodings(dtype: str) -> None:
    array = _array(dtype)
    proto = tensor_pb2.TensorProto()
    fill_tensor(array, proto)
    assert not proto.tensor_content  # the real server answers with typed fields
    np.testing.assert_array_equal(tf.make_ndarray(proto), array)
    for given in (proto, tf.make_tensor_proto(array)):
        parsed = parse_tensor(given)
        assert parsed.dtype == array.dtype
        np.testing.assert_array_equal(parsed, array)


def test_strings_and_empty_and_scalars() -> None:
    for array in (
        np.array([[b"", b"\xff\x00"], [b"a", b"b" * 300]], object),
        np.zeros((0, 3), np.float32),
        np.zeros((0,), object),
        np.array(7, np.int64),
        np.array(2.5, np.float32),
    ):
        proto = tensor_pb2.TensorProto()
        fill_tensor(array, proto)
        np.testing.assert_array_equal(tf.make_ndarray(proto), array)
        np.testing.assert_array_equal(parse_tensor(proto), array)


def _proto(dtype: int, shape: list[int], **fields: object) -> tensor_pb2.TensorProto:
    proto = tensor_pb2.TensorProto(dtype=dtype, **fields)
    for size in shape:
        proto.tensor_shape.dim.add().size = size
    return proto


def test_the_last_value_repeats_and_extra_values_are_ignored() -> None:
    few = _proto(types_pb2.DT_INT32, [4], int_val=[1, 2])
    np.testing.assert_array_equal(parse_tensor(few), [1, 2, 2, 2])
    many = _proto(types_pb2.DT_FLOAT, [2], float_val=[1, 2, 3])
    np.testing.assert_array_equal(parse_tensor(many), [1, 2])
    none = _proto(types_pb2.DT_INT64, [2])
    np.testing.assert_array_equal(parse_tensor(none), [0, 0])
    text = _proto(types_pb2.DT_STRING, [3], string_val=[b"a"])
    assert parse_tensor(text).tolist() == [b"a"] * 3


def test_string_content() -> None:
    long = b"x" * 200
    content = b"\x01\x00\xc8\x01" + b"a" + long
    proto = _proto(types_pb2.DT_STRING, [3], tensor_content=content)
    assert parse_tensor(proto).tolist() == [b"a", b"", long]


@pytest.mark.parametrize(
    "proto",
    [
        _proto(types_pb2.DT_FLOAT, [2], tensor_content=b"12345"),
        _proto(types_pb2.DT_STRING, [2], tensor_content=b"\x05a"),
        _proto(types_pb2.DT_FLOAT, [-1]),
        _proto(types_pb2.DT_RESOURCE, [1]),
        _proto(types_pb2.DT_INVALID, []),
    ],
)
def test_what_is_not_a_tensor_is_refused(proto: tensor_pb2.TensorProto) -> None:
    with pytest.raises(ValueError):
        parse_tensor(proto)
