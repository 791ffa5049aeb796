"""Messages of the TensorFlow Serving API, without TensorFlow.

The official Python modules import the TensorFlow runtime, and their messages live
in protobuf's default descriptor pool, where a second definition is refused. This
module describes the few messages a client needs in a pool of its own: the same
bytes on the wire, and no collision in a process that uses TensorFlow as well.

`to_proto` and `to_array` turn NumPy arrays into ``TensorProto`` and back.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

from tfkv.serving.failures import InputError

PREDICT = "/tensorflow.serving.PredictionService/Predict"
GET_MODEL_METADATA = "/tensorflow.serving.PredictionService/GetModelMetadata"
GET_MODEL_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"

#: Numbers of ``tensorflow.DataType``.
DATA_TYPES = {
    "DT_INVALID": 0,
    "DT_FLOAT": 1,
    "DT_DOUBLE": 2,
    "DT_INT32": 3,
    "DT_UINT8": 4,
    "DT_INT16": 5,
    "DT_INT8": 6,
    "DT_STRING": 7,
    "DT_COMPLEX64": 8,
    "DT_INT64": 9,
    "DT_BOOL": 10,
    "DT_BFLOAT16": 14,
    "DT_UINT16": 17,
    "DT_COMPLEX128": 18,
    "DT_HALF": 19,
    "DT_UINT32": 22,
    "DT_UINT64": 23,
}

#: States of ``tensorflow.serving.ModelVersionStatus``.
VERSION_STATES = {
    "UNKNOWN": 0,
    "START": 10,
    "LOADING": 20,
    "AVAILABLE": 30,
    "UNLOADING": 40,
    "END": 50,
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}

# Message -> fields, each (number, name, type). A type is a scalar, a full message name,
# `repeated X`, `map X` (string keys), or `oneof X` (all of a message in one group).
_TENSOR_MESSAGES = {
    "TensorShapeProto.Dim": [(1, "size", "int64"), (2, "name", "string")],
    "TensorShapeProto": [
        (2, "dim", "repeated .tensorflow.TensorShapeProto.Dim"),
        (3, "unknown_rank", "bool"),
    ],
    "TensorProto": [
        (1, "dtype", "enum .tensorflow.DataType"),
        (2, "tensor_shape", ".tensorflow.TensorShapeProto"),
        (3, "version_number", "int32"),
        (4, "tensor_content", "bytes"),
        (5, "float_val", "repeated float"),
        (6, "double_val", "repeated double"),
        (7, "int_val", "repeated int32"),
        (8, "string_val", "repeated bytes"),
        (9, "scomplex_val", "repeated float"),
        (10, "int64_val", "repeated int64"),
        (11, "bool_val", "repeated bool"),
        (12, "dcomplex_val", "repeated double"),
        (13, "half_val", "repeated int32"),
        (16, "uint32_val", "repeated uint32"),
        (17, "uint64_val", "repeated uint64"),
    ],
    "TensorInfo": [
        (1, "name", "string"),
        (2, "dtype", "enum .tensorflow.DataType"),
        (3, "tensor_shape", ".tensorflow.TensorShapeProto"),
    ],
    "SignatureDef": [
        (1, "inputs", "map .tensorflow.TensorInfo"),
        (2, "outputs", "map .tensorflow.TensorInfo"),
        (3, "method_name", "string"),
        (4, "defaults", "map .tensorflow.TensorProto"),
    ],
}
_SERVING_MESSAGES = {
    "ModelSpec": [
        (1, "name", "string"),
        (2, "version", "oneof .google.protobuf.Int64Value"),
        (4, "version_label", "oneof string"),
        (3, "signature_name", "string"),
    ],
    "PredictRequest": [
        (1, "model_spec", ".tensorflow.serving.ModelSpec"),
        (2, "inputs", "map .tensorflow.TensorProto"),
        (3, "output_filter", "repeated string"),
    ],
    "PredictResponse": [
        (2, "model_spec", ".tensorflow.serving.ModelSpec"),
        (1, "outputs", "map .tensorflow.TensorProto"),
    ],
    "StatusProto": [(1, "error_code", "int32"), (2, "error_message", "string")],
    "GetModelStatusRequest": [(1, "model_spec", ".tensorflow.serving.ModelSpec")],
    "ModelVersionStatus": [
        (1, "version", "int64"),
        (2, "state", "enum .tensorflow.serving.VersionState"),
        (3, "status", ".tensorflow.serving.StatusProto"),
    ],
    "GetModelStatusResponse": [
        (1, "model_version_status", "repeated .tensorflow.serving.ModelVersionStatus"),
    ],
    "SignatureDefMap": [(1, "signature_def", "map .tensorflow.SignatureDef")],
    "GetModelMetadataRequest": [
        (1, "model_spec", ".tensorflow.serving.ModelSpec"),
        (2, "metadata_field", "repeated string"),
    ],
    "GetModelMetadataResponse": [
        (1, "model_spec", ".tensorflow.serving.ModelSpec"),
        (2, "metadata", "map .google.protobuf.Any"),
    ],
}


def _set_type(field: Any, kind: str) -> None:
    """Fills in the type of a field descriptor."""
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    elif kind.startswith("enum "):
        field.type, field.type_name = _Field.TYPE_ENUM, kind.removeprefix("enum ")
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, kind


def _add_map_entry(message: Any, field: Any, full_name: str, kind: str) -> None:
    """Describes a map field the way protoc does: a repeated nested entry message."""
    camel = "".join(part.capitalize() for part in field.name.split("_"))
    entry = message.nested_type.add(name=f"{camel}Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    value = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL)
    _set_type(value, kind)
    field.label = _Field.LABEL_REPEATED
    field.type, field.type_name = _Field.TYPE_MESSAGE, f".{full_name}.{entry.name}"


def _describe(message: Any, full_name: str, fields: list[tuple[int, str, str]]) -> None:
    """Adds the fields of one message to its descriptor."""
    for number, name, kind in fields:
        field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
        how, _, rest = kind.partition(" ")
        if how == "map":
            _add_map_entry(message, field, full_name, rest)
        elif how == "repeated":
            field.label = _Field.LABEL_REPEATED
            _set_type(field, rest)
        elif how == "oneof":
            if not message.oneof_decl:
                message.oneof_decl.add(name="version_choice")
            field.oneof_index = 0
            _set_type(field, rest)
        else:
            _set_type(field, kind)


def _add_enum(file: Any, name: str, values: dict[str, int]) -> None:
    enum = file.enum_type.add(name=name)
    for label, number in values.items():
        enum.value.add(name=label, number=number)


def _file(name: str, package: str, messages: dict[str, list[tuple[int, str, str]]]) -> Any:
    """A file descriptor with the given messages; a dot in a name nests it."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
    made: dict[str, Any] = {}
    for path in sorted(messages, key=lambda path: path.count(".")):
        outer, _, inner = path.rpartition(".")
        message = (
            made[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=path)
        )
        made[path] = message
        _describe(message, f"{package}.{path}", messages[path])
    return file


def _build_pool() -> descriptor_pool.DescriptorPool:
    tensors = _file("tfkv/tensor.proto", "tensorflow", _TENSOR_MESSAGES)
    _add_enum(tensors, "DataType", DATA_TYPES)
    serving = _file("tfkv/serving.proto", "tensorflow.serving", _SERVING_MESSAGES)
    _add_enum(serving, "VersionState", VERSION_STATES)
    wrappers, any_file = wrappers_pb2.DESCRIPTOR, any_pb2.DESCRIPTOR
    serving.dependency.extend([tensors.name, wrappers.name, any_file.name])
    pool = descriptor_pool.DescriptorPool()
    for known in (wrappers, any_file):
        pool.AddSerializedFile(known.serialized_pb)
    for file in (tensors, serving):
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _build_pool()


def _message(full_name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(full_name))


TensorProto = _message("tensorflow.TensorProto")
SignatureDef = _message("tensorflow.SignatureDef")
SignatureDefMap = _message("tensorflow.serving.SignatureDefMap")
ModelSpec = _message("tensorflow.serving.ModelSpec")
PredictRequest = _message("tensorflow.serving.PredictRequest")
PredictResponse = _message("tensorflow.serving.PredictResponse")
GetModelStatusRequest = _message("tensorflow.serving.GetModelStatusRequest")
GetModelStatusResponse = _message("tensorflow.serving.GetModelStatusResponse")
GetModelMetadataRequest = _message("tensorflow.serving.GetModelMetadataRequest")
GetModelMetadataResponse = _message("tensorflow.serving.GetModelMetadataResponse")

_NUMPY_NAMES = {
    "DT_FLOAT": "float32",
    "DT_DOUBLE": "float64",
    "DT_INT32": "int32",
    "DT_UINT8": "uint8",
    "DT_INT16": "int16",
    "DT_INT8": "int8",
    "DT_COMPLEX64": "complex64",
    "DT_INT64": "int64",
    "DT_BOOL": "bool",
    "DT_UINT16": "uint16",
    "DT_COMPLEX128": "complex128",
    "DT_HALF": "float16",
    "DT_UINT32": "uint32",
    "DT_UINT64": "uint64",
}
_TO_NUMPY = {DATA_TYPES[label]: np.dtype(name) for label, name in _NUMPY_NAMES.items()}
_FROM_NUMPY = {dtype: number for number, dtype in _TO_NUMPY.items()}
_STRING = DATA_TYPES["DT_STRING"]
_BFLOAT16 = DATA_TYPES["DT_BFLOAT16"]
_VALUE_FIELDS = {
    "float32": "float_val",
    "float64": "double_val",
    "int64": "int64_val",
    "bool": "bool_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
    "float16": "half_val",
    "complex64": "scomplex_val",
    "complex128": "dcomplex_val",
}


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8")
    if isinstance(value, bytes):
        return value
    raise InputError(f"A string tensor holds str or bytes. Received: {type(value).__name__}.")


def to_proto(value: Any) -> Any:
    """A ``TensorProto`` of anything NumPy can make an array of.

    Numbers go into ``tensor_content``; ``str`` (as UTF-8) and ``bytes`` into ``string_val``.

    Raises:
        InputError: The values are ragged, or of a type that no tensor has.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(f"Not a rectangular array: {error}") from error
    proto = TensorProto()
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    if not array.shape:
        proto.tensor_shape.SetInParent()
    if array.dtype.kind in "OSU":
        proto.dtype = _STRING
        # Through a list of the caller's own values: NumPy drops trailing NULs of bytes.
        proto.string_val.extend(_as_bytes(item) for item in np.asarray(value, object).ravel())
        return proto
    number = _FROM_NUMPY.get(array.dtype.newbyteorder("="))
    if number is None:
        raise InputError(
            f"No tensor type for dtype {array.dtype}. Known: {', '.join(_NUMPY_NAMES.values())}."
        )
    proto.dtype = number
    proto.tensor_content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return proto


def _fill(values: list[Any], count: int) -> list[Any]:
    """Undoes TensorFlow's compression: the last value stands for all that follow."""
    if len(values) > count:
        raise InputError(f"Tensor of {count} elements carries {len(values)} values.")
    if values and len(values) < count:
        values = values + [values[-1]] * (count - len(values))
    return values


def _bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _numbers(proto: Any, dtype: np.dtype, count: int) -> np.ndarray:
    """Flat values of a numeric tensor, whichever field carries them."""
    if proto.tensor_content:
        if len(proto.tensor_content) != count * dtype.itemsize:
            raise InputError(
                f"Tensor of {count} {dtype} needs {count * dtype.itemsize} bytes. "
                f"Received: {len(proto.tensor_content)}."
            )
        flat = np.frombuffer(proto.tensor_content, dtype.newbyteorder("<"))
        return flat.astype(dtype) if sys.byteorder == "big" else flat
    values = list(getattr(proto, _VALUE_FIELDS.get(dtype.name, "int_val")))
    if dtype.kind == "c":
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [complex(real, imaginary) for real, imaginary in pairs]
    filled = _fill(values, count) or [0] * count
    if dtype == np.float16:
        return np.array(filled, np.uint16).view(np.float16)
    return np.array(filled, dtype)


def to_array(proto: Any) -> np.ndarray:
    """The NumPy array of a ``TensorProto``.

    Strings become an object array of ``bytes``; bfloat16, which NumPy lacks, becomes
    float32 of the same values. The array may be read-only: it shares the message's bytes.

    Raises:
        InputError: The message's type, shape and values don't belong together.
    """
    shape = tuple(dim.size for dim in proto.tensor_shape.dim)
    if proto.tensor_shape.unknown_rank or any(size < 0 for size in shape):
        raise InputError(f"A tensor with values has a known shape. Received: shape={shape}.")
    count = int(np.prod(shape, dtype=np.int64))
    if proto.dtype == _STRING:
        strings = np.empty(count, object)
        strings[:] = _fill(list(proto.string_val), count) or [b""] * count
        return strings.reshape(shape)
    if proto.dtype == _BFLOAT16:
        if proto.tensor_content:
            bits = _numbers(proto, np.dtype(np.uint16), count)
        else:
            bits = np.array(_fill(list(proto.half_val), count) or [0] * count, np.uint16)
        return _bfloat16_to_float32(bits).reshape(shape)
    if proto.dtype not in _TO_NUMPY:
        raise InputError(f"Tensor type {proto.dtype} has no NumPy counterpart.")
    return _numbers(proto, _TO_NUMPY[proto.dtype], count).reshape(shape)
