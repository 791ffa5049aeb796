"""JSON of the REST API to tensors and back.

Reference: tensorflow_serving/util/json_tensor.cc, whose error texts these are.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import predict_pb2

from tfkv.serving.server.call_error import CallError, invalid_argument
from tfkv.serving.server.tensors import dtype_name, fill_tensor, parse_tensor

Inputs = Mapping[str, meta_graph_pb2.TensorInfo]

_INTEGERS: dict[int, Any] = {
    types_pb2.DT_INT32: np.int32,
    types_pb2.DT_INT16: np.int16,
    types_pb2.DT_INT8: np.int8,
    types_pb2.DT_UINT8: np.uint8,
    types_pb2.DT_INT64: np.int64,
    types_pb2.DT_UINT32: np.uint32,
    types_pb2.DT_UINT64: np.uint64,
}
_FLOATS: dict[int, Any] = {types_pb2.DT_FLOAT: np.float32, types_pb2.DT_DOUBLE: np.float64}
#: TensorFlow Serving checks the small types against the range of int32 only.
_RANGES: dict[int, Any] = {
    types_pb2.DT_INT16: np.int32,
    types_pb2.DT_INT8: np.int32,
    types_pb2.DT_UINT8: np.int32,
}


def parse_predict(
    body: bytes, request: predict_pb2.PredictRequest, inputs_of: Callable[[str], Inputs]
) -> bool:
    """Fills a request from the body of a ``:predict`` call.

    Args:
        body: JSON with ``instances`` (row form) or ``inputs`` (column form), and maybe
            ``signature_name``.
        request: Request whose model is set.
        inputs_of: Inputs of the signature with that name, empty for the default one.

    Returns:
        Whether the row form was used; the answer has the same form.

    Raises:
        CallError: INVALID_ARGUMENT, the body does not fit the signature.
    """
    document = _parse_document(body)
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise invalid_argument(
            f"JSON Value: {_text(document)} not formatted correctly. 'signature_name' key must "
            "be a string value."
        )
    request.model_spec.signature_name = name
    inputs = inputs_of(name)
    if not inputs:
        raise invalid_argument(f"Failed to get input map for signature: {name or 'DEFAULT'}")
    if "instances" in document and "inputs" in document:
        raise invalid_argument(
            f"JSON Value: {_text(document)} Not formatted correctly expecting only one of "
            "'inputs' or 'instances' keys to exist "
        )
    if "instances" in document:
        _fill_rows(document, inputs, request)
        return True
    if "inputs" in document:
        _fill_columns(document["inputs"], inputs, request)
        return False
    raise invalid_argument("Missing 'inputs' or 'instances' key")


def format_predict(response: predict_pb2.PredictResponse, rows: bool) -> bytes:
    """Body of the answer, in row or column form; a single output loses its name.

    Raises:
        CallError: INVALID_ARGUMENT, the outputs cannot be put in rows.
    """
    outputs = {name: response.outputs[name] for name in sorted(response.outputs)}
    if not outputs:
        raise invalid_argument("Cannot convert empty tensor map to JSON")
    values = {name: _to_lists(name, proto) for name, proto in outputs.items()}
    if rows:
        sizes = _row_count(outputs)
        if len(values) == 1:
            answer = next(iter(values.values()))
        else:
            answer = [{name: values[name][row] for name in values} for row in range(sizes)]
        document = {"predictions": answer}
    else:
        document = {"outputs": values if len(values) > 1 else next(iter(values.values()))}
    # Strings pass through byte by byte, whether they are UTF-8 or not.
    text = json.dumps(document, ensure_ascii=False, indent=4)
    return text.encode("utf-8", "surrogateescape")


def _parse_document(body: bytes) -> dict[str, Any]:
    if not body:
        raise invalid_argument("JSON Parse error: The document is empty")
    try:
        document = json.loads(body)
    except json.JSONDecodeError as error:
        raise invalid_argument(f"JSON Parse error: {error.msg} at offset: {error.pos}") from error
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise invalid_argument(f"JSON Parse error: {error}") from error
    if not isinstance(document, dict):
        raise invalid_argument(f"JSON Value: {_text(document)} Is not object")
    return document


def _fill_rows(
    document: dict[str, Any], inputs: Inputs, request: predict_pb2.PredictRequest
) -> None:
    instances = document["instances"]
    if not isinstance(instances, list):
        raise invalid_argument(
            f"JSON Value: {_text(document)} Excepting 'instances' to be an list/array"
        )
    if not instances:
        raise invalid_argument(f"JSON Value: {_text(document)} No values in 'instances' array")
    if not isinstance(instances[0], dict) and len(inputs) > 1:
        raise invalid_argument(
            "instances is a plain list, but expecting list of objects as multiple input "
            "tensors required as per tensorinfo_map"
        )
    named = _is_object(instances[0])
    columns: dict[str, list[np.ndarray]] = {}
    for number, element in enumerate(instances):
        if named and not _is_object(element):
            raise invalid_argument(f"Expecting object but got list at item {number} of input list")
        if not named and _is_object(element):
            raise invalid_argument(
                f"Expecting value/list but got object at item {number} of input list"
            )
        items = element if named else {next(iter(inputs)): element}
        _add_row(number, items, named, inputs, columns)
    for name, column in columns.items():
        fill_tensor(_cast(np.stack(column), inputs[name].dtype), request.inputs[name])


def _add_row(
    number: int,
    items: dict[str, Any],
    named: bool,
    inputs: Inputs,
    columns: dict[str, list[np.ndarray]],
) -> None:
    for name, value in items.items():
        try:
            if name not in inputs:
                raise invalid_argument(f"JSON object: does not have named input: {name}")
            array = _to_array(value, inputs[name].dtype)
            column = columns.setdefault(name, [])
            if column and column[0].size != array.size:
                raise invalid_argument(
                    f"Expecting tensor size: {column[0].size} but got: {array.size}"
                )
            if column and column[0].shape != array.shape:
                raise invalid_argument(
                    f"Expecting shape {_shape(column[0])} but got: {_shape(array)}"
                )
        except CallError as error:
            key = f" key: {name}" if named else ""
            raise invalid_argument(
                f"Failed to process element: {number}{key} of 'instances' list. Error: {error}"
            ) from error
        column.append(array)
    if set(items) != set(inputs):
        raise invalid_argument(
            f"Failed to process element: {number} of 'instances' list. JSON object: "
            f"{_text(items)} keys must be equal to: {','.join(sorted(inputs))}"
        )


def _fill_columns(value: Any, inputs: Inputs, request: predict_pb2.PredictRequest) -> None:
    if not _is_object(value):
        if len(inputs) > 1:
            raise invalid_argument(
                "inputs is a plain value/list, but expecting an object as multiple input "
                "tensors required as per tensorinfo_map"
            )
        value = {next(iter(inputs)): value}
    for name, info in inputs.items():
        if name not in value:
            raise invalid_argument(f"Missing named input: {name} in 'inputs' object.")
        array = _cast(_to_array(value[name], info.dtype), info.dtype)
        fill_tensor(array, request.inputs[name])


def _to_array(value: Any, dtype: int) -> np.ndarray:
    """Values of a nested list, uncast; the first element of each list gives the shape."""
    shape = []
    first = value
    while isinstance(first, list):
        shape.append(len(first))
        if not first:
            break
        first = first[0]
    flat: list[Any] = []
    _collect(value, 0, shape, dtype, flat)
    array = np.empty(len(flat), object)
    array[:] = flat
    return array.reshape(shape)


def _collect(value: Any, level: int, shape: list[int], dtype: int, flat: list[Any]) -> None:
    if not isinstance(value, list):
        if level != len(shape):
            raise invalid_argument(
                f"JSON Value: {_text(value)} found at incorrect level: {level + 1} in the JSON "
                f"DOM. Expected at level: {len(shape)}"
            )
        flat.append(_leaf(value, dtype))
        return
    if level >= len(shape):
        raise invalid_argument(
            f"Encountered list at unexpected level: {level} expected < {len(shape)}"
        )
    if len(value) != shape[level]:
        raise invalid_argument(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected "
            f"size: {shape[level]}"
        )
    for element in value:
        _collect(element, level + 1, shape, dtype, flat)


def _leaf(value: Any, dtype: int) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if dtype == types_pb2.DT_STRING:
        if isinstance(value, dict):
            return _decode_base64(value)
        if isinstance(value, str):
            return value.encode("utf-8", "surrogatepass")
    elif dtype in _FLOATS:
        if number:
            return _lossless(value, dtype)
    elif dtype in _INTEGERS:
        limits = np.iinfo(_RANGES.get(dtype, _INTEGERS[dtype]))
        if number and isinstance(value, int) and limits.min <= value <= limits.max:
            return value
    elif dtype == types_pb2.DT_BOOL:
        if isinstance(value, bool):
            return value
    else:
        raise CallError.from_number(
            12, f"Conversion of JSON Value: {_text(value)} to type: {dtype_name(dtype)}"
        )
    raise invalid_argument(
        f"JSON Value: {_text(value)} Type: {_json_type(value)} is not of expected type: "
        f"{dtype_name(dtype)}"
    )


def _lossless(value: float, dtype: int) -> float:
    limits = np.finfo(_FLOATS[dtype])
    fits = (
        abs(value) < 2 ** (limits.nmant + 1)
        if isinstance(value, int)
        else not math.isfinite(value) or abs(value) <= float(limits.max)
    )
    if not fits:
        raise invalid_argument(
            f"Cannot convert JSON value: {_text(value)} to {dtype_name(dtype)} without loss "
            "of precision."
        )
    return value


def _cast(array: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == types_pb2.DT_STRING:
        return array
    if dtype == types_pb2.DT_BOOL:
        return array.astype(np.bool_)
    if dtype in _RANGES:
        return array.astype(np.int64).astype(_INTEGERS[dtype])  # wraps as int_val does
    return array.astype(_FLOATS.get(dtype) or _INTEGERS[dtype])


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not _is_base64(value)


def _decode_base64(value: dict[str, Any]) -> bytes:
    if not _is_base64(value):
        raise invalid_argument(
            f"JSON Value: {_text(value)} not formatted correctly for base64 data"
        )
    text = value["b64"].rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_argument("Unable to base64 decode") from error


def _to_lists(name: str, proto: tensor_pb2.TensorProto) -> Any:
    array = parse_tensor(proto)
    if array.dtype == object:
        as_bytes = name.endswith("_bytes")
        encode = np.frompyfunc(lambda value: _string(value, as_bytes), 1, 1)
        return encode(array).tolist() if array.ndim else _string(array.item(), as_bytes)
    if array.dtype in (np.float32, np.float16) or array.dtype.name == "bfloat16":
        # The shortest text that reads back as the same float32, not as its double.
        wide = array.astype(np.float32)
        shortest = np.array([float(str(x)) for x in wide.ravel()], np.float64)
        return shortest.reshape(wide.shape).tolist()
    if array.dtype.kind == "c":
        raise invalid_argument(
            f"Failed to write JSON value for tensor type: {dtype_name(proto.dtype)}"
        )
    return array.tolist()


def _string(value: bytes, as_bytes: bool) -> Any:
    if as_bytes:
        return {"b64": base64.b64encode(value).decode()}
    return value.decode("utf-8", "surrogateescape")


def _row_count(outputs: Mapping[str, tensor_pb2.TensorProto]) -> int:
    rows = -1
    for name, proto in outputs.items():
        if not proto.tensor_shape.dim:
            raise invalid_argument(f"Tensor name: {name} has no shape information ")
        size = proto.tensor_shape.dim[0].size
        if rows not in (-1, size):
            raise invalid_argument(
                f"Tensor name: {name} has inconsistent batch size: {size} expecting: {rows}"
            )
        rows = size
    return rows


def _json_type(value: Any) -> str:
    if value is None:
        return "Null"
    if isinstance(value, bool):
        return str(value)
    names: dict[type, str] = {dict: "Object", list: "Array", str: "String"}
    return names.get(type(value), "Number")


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=4)


def _shape(array: np.ndarray) -> str:
    return f"[{','.join(map(str, array.shape))}]"
