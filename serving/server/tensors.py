"""TensorProto to NumPy and back, with the rules of TensorFlow's C++ parser.

`tf.make_ndarray` and `tf.make_tensor_proto` cost more than a whole trivial call, and
are more lenient than the server that is emulated here, hence this module.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from tensorflow.core.framework import tensor_pb2, types_pb2

#: DataType number to (NumPy type, name of the typed field).
_KINDS: dict[int, tuple[Any, str]] = {
    types_pb2.DT_FLOAT: (np.dtype(np.float32), "float_val"),
    types_pb2.DT_DOUBLE: (np.dtype(np.float64), "double_val"),
    types_pb2.DT_INT32: (np.dtype(np.int32), "int_val"),
    types_pb2.DT_INT16: (np.dtype(np.int16), "int_val"),
    types_pb2.DT_INT8: (np.dtype(np.int8), "int_val"),
    types_pb2.DT_UINT16: (np.dtype(np.uint16), "int_val"),
    types_pb2.DT_UINT8: (np.dtype(np.uint8), "int_val"),
    types_pb2.DT_INT64: (np.dtype(np.int64), "int64_val"),
    types_pb2.DT_UINT32: (np.dtype(np.uint32), "uint32_val"),
    types_pb2.DT_UINT64: (np.dtype(np.uint64), "uint64_val"),
    types_pb2.DT_BOOL: (np.dtype(np.bool_), "bool_val"),
    types_pb2.DT_HALF: (np.dtype(np.float16), "half_val"),
    types_pb2.DT_BFLOAT16: (np.dtype(ml_dtypes.bfloat16), "half_val"),
    types_pb2.DT_COMPLEX64: (np.dtype(np.complex64), "scomplex_val"),
    types_pb2.DT_COMPLEX128: (np.dtype(np.complex128), "dcomplex_val"),
    types_pb2.DT_STRING: (np.dtype(object), "string_val"),
}
_NUMBER_OF = {dtype: number for number, (dtype, _) in _KINDS.items()}
_NAME_OF = {
    types_pb2.DT_DOUBLE: "double",
    types_pb2.DT_FLOAT: "float",
    types_pb2.DT_HALF: "half",
}
_REAL_PART = {"scomplex_val": np.float32, "dcomplex_val": np.float64}
#: Tags of the packed fields whose wire form is the array's own little-endian bytes.
_RAW_TAGS = {types_pb2.DT_FLOAT: b"\x2a", types_pb2.DT_DOUBLE: b"\x32"}
_MAX_DIMENSIONS = 254


def dtype_name(number: int) -> str:
    """Name TensorFlow uses for a data type in its messages, such as ``float``."""
    if number in _NAME_OF:
        return _NAME_OF[number]
    return types_pb2.DataType.Name(number).removeprefix("DT_").lower()


def dtype_number(dtype: np.dtype) -> int:
    """DataType number of a NumPy type; objects are strings.

    Raises:
        ValueError: No typed field carries this dtype.
    """
    try:
        return _NUMBER_OF[dtype]
    except KeyError:
        raise ValueError(f"a tensor of dtype {dtype} cannot be sent") from None


def parse_tensor(proto: tensor_pb2.TensorProto) -> np.ndarray:
    """Value of a TensorProto.

    As in `Tensor::FromProto`, values of the typed field fill the shape in order, the
    last one repeats where there are too few, and too many are ignored; raw content must
    fit exactly.

    Args:
        proto: Tensor of any rank.

    Returns:
        Array of the proto's shape; read-only where it shares the content's bytes.

    Raises:
        ValueError: The proto does not describe a tensor.
    """
    kind = _KINDS.get(proto.dtype)
    if kind is None:
        raise ValueError(f"unsupported dtype {proto.dtype}")
    shape = tuple(dim.size for dim in proto.tensor_shape.dim)
    if proto.tensor_shape.unknown_rank or len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise ValueError("shape is not fully defined")
    dtype, field = kind
    count = math.prod(shape)
    content = proto.tensor_content
    if content:
        if dtype.hasobject:
            return _string_array(_decode_strings(content, count), shape)
        if len(content) != count * dtype.itemsize:
            raise ValueError("content does not match the shape")
        return np.frombuffer(content, dtype).reshape(shape)
    return _from_field(getattr(proto, field), field, dtype, count).reshape(shape)


def _from_field(values: Any, field: str, dtype: np.dtype, count: int) -> np.ndarray:
    if dtype.hasobject:
        flat = list(values[:count]) if len(values) > count else list(values)
        flat += [flat[-1] if flat else b""] * (count - len(flat))
        return _string_array(flat, (count,))
    if field in _REAL_PART:
        given = np.fromiter(values, _REAL_PART[field]).view(dtype)
    elif field == "half_val":
        given = np.fromiter(values, np.int32).astype(np.uint16).view(dtype)
    else:
        wide = np.int32 if field == "int_val" else dtype
        given = np.fromiter(values, wide, len(values)).astype(dtype, copy=False)
    if len(given) >= count:
        return given[:count]
    filled = np.full(count, given[-1] if len(given) else np.zeros((), dtype), dtype)
    filled[: len(given)] = given
    return filled


def _string_array(values: list[bytes], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


def _decode_strings(content: bytes, count: int) -> list[bytes]:
    """Lengths as varints, then the strings one after the other."""
    sizes, offset = [], 0
    for _ in range(count):
        size = shift = 0
        while True:
            if offset >= len(content) or shift > 63:
                raise ValueError("truncated string content")
            byte = content[offset]
            offset += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        sizes.append(size)
    if offset + sum(sizes) != len(content):
        raise ValueError("content does not match the shape")
    values = []
    for size in sizes:
        values.append(content[offset : offset + size])
        offset += size
    return values


def fill_tensor(array: np.ndarray, proto: tensor_pb2.TensorProto) -> None:
    """Writes an array into an empty TensorProto, into the typed field.

    TensorFlow Serving answers with typed fields, not with raw content; a client that
    could read only one of the two must fail here as it would there.

    Args:
        array: Value of any rank, strings as an object array of ``bytes``.
        proto: Message to fill.

    Raises:
        ValueError: The dtype has no typed field.
    """
    number = dtype_number(array.dtype)
    proto.dtype = number
    for size in array.shape:
        proto.tensor_shape.dim.add().size = size
    if not array.size:
        return
    tag = _RAW_TAGS.get(number)
    if tag is not None:
        raw = np.ascontiguousarray(array).tobytes()
        proto.MergeFromString(tag + _varint(len(raw)) + raw)
        return
    field = _KINDS[number][1]
    flat = np.ascontiguousarray(array).ravel()
    if field in _REAL_PART:
        flat = flat.view(_REAL_PART[field])
    elif field == "half_val":
        flat = flat.view(np.uint16)
    getattr(proto, field).extend(flat.tolist())


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
