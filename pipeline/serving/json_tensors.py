"""REST's JSON <-> arrays: rows ("instances" -> "predictions") and columns ("inputs" -> "outputs"). No HTTP here."""

import base64
import binascii
import itertools
import json

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from pipeline.serving import status, tensors
from pipeline.serving.status import ServingError

INTEGERS = {
    number: np.iinfo(tf.as_dtype(number).as_numpy_dtype)
    for number in (
        *(types_pb2.DT_INT8, types_pb2.DT_INT16, types_pb2.DT_INT32, types_pb2.DT_INT64),
        *(types_pb2.DT_UINT8, types_pb2.DT_UINT16, types_pb2.DT_UINT32, types_pb2.DT_UINT64),
    )
}
FLOATS = {types_pb2.DT_FLOAT: 24, types_pb2.DT_DOUBLE: 53}  # digits of their mantissa
NAMES = {
    type(None): "Null",
    bool: "Boolean",
    dict: "Object",
    list: "Array",
    str: "String",
    int: "Number",
    float: "Number",
}


def parse(body: bytes) -> dict:
    """The JSON object in a request. NaN, Infinity and -Infinity are numbers. Raises INVALID_ARGUMENT."""
    if not body:
        raise ServingError(status.INVALID_ARGUMENT, "JSON Parse error: The document is empty")
    try:
        document = json.loads(body)
    except RecursionError:
        raise ServingError(status.INVALID_ARGUMENT, "JSON Parse error: nested too deeply") from None
    except ValueError as error:
        where = f" at offset: {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ServingError(
            status.INVALID_ARGUMENT, f"JSON Parse error: {getattr(error, 'msg', error)}{where}"
        ) from None
    if not isinstance(document, dict):
        raise ServingError(status.INVALID_ARGUMENT, f"JSON Value: {_short(document)} Is not object")
    return document


def signature_name(document: dict) -> str:
    """Of a request, "" when it has none. Raises INVALID_ARGUMENT."""
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        text = f"JSON Value: {_short(document)} not formatted correctly. 'signature_name' key must be a string value."
        raise ServingError(status.INVALID_ARGUMENT, text)
    return name


def find_format(document: dict) -> str:
    """ "instances" or "inputs", whichever a request has. Raises INVALID_ARGUMENT for both, none or an empty list."""
    formats = [key for key in ("instances", "inputs") if key in document]
    if len(formats) == 2:
        text = "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist"
        raise ServingError(status.INVALID_ARGUMENT, f"JSON Value: {_short(document)} {text}")
    if not formats:
        raise ServingError(status.INVALID_ARGUMENT, "Missing 'inputs' or 'instances' key")
    if formats == ["instances"] and not isinstance(document["instances"], list):
        text = f"JSON Value: {_short(document)} Expecting 'instances' to be a list/array"
        raise ServingError(status.INVALID_ARGUMENT, text)
    if formats == ["instances"] and not document["instances"]:
        raise ServingError(status.INVALID_ARGUMENT, f"JSON Value: {_short(document)} No values in 'instances' array")
    return formats[0]


def read_inputs(document: dict, inputs) -> dict[str, np.ndarray]:
    """The arrays of a request.

    Args:
        inputs: {name: TensorInfo} of the signature.

    Raises:
        ServingError: INVALID_ARGUMENT for what does not fit; UNIMPLEMENTED for half types in columns.
    """
    if find_format(document) == "inputs":
        return _read_columns(document["inputs"], inputs)
    try:
        return _read_rows(document["instances"], inputs)
    except ServingError as error:  # rows wrap every error, whatever its code
        raise ServingError(status.INVALID_ARGUMENT, error.text) from None


def _read_columns(value, inputs) -> dict[str, np.ndarray]:
    if not isinstance(value, dict) or _is_base64(value):
        if len(inputs) > 1:
            text = "inputs is a plain value/list, but expecting an object as multiple input tensors required"
            raise ServingError(status.INVALID_ARGUMENT, text)
        [(name, info)] = inputs.items()
        return {name: to_array(value, info.dtype)}
    for name in inputs:
        if name not in value:
            raise ServingError(status.INVALID_ARGUMENT, f"Missing named input: {name} in 'inputs' object.")
    return {name: to_array(value[name], info.dtype) for name, info in inputs.items()}


def _read_rows(rows: list, inputs) -> dict[str, np.ndarray]:
    named = isinstance(rows[0], dict) and not _is_base64(rows[0])
    if not named and len(inputs) > 1:
        text = "instances is a plain list, but expecting list of objects as multiple input tensors required"
        raise ServingError(status.INVALID_ARGUMENT, text)
    columns = {name: [] for name in inputs}
    for i, row in enumerate(rows):
        if (isinstance(row, dict) and not _is_base64(row)) != named:
            found, expected = ("list", "object") if named else ("object", "value/list")
            text = f"Expecting {expected} but got {found} at item {i} of input list"
            raise ServingError(status.INVALID_ARGUMENT, text)
        if not named:
            row = {next(iter(inputs)): row}
        if row.keys() != columns.keys():
            text = f"Failed to process element: {i} of 'instances' list. {_short(row)} keys must be equal to: "
            raise ServingError(status.INVALID_ARGUMENT, text + ",".join(sorted(columns)))
        for name, column in columns.items():
            try:
                column.append(to_array(row[name], inputs[name].dtype))
            except ServingError as error:
                text = f"Failed to process element: {i} key: {name} of 'instances' list. Error: {error}"
                raise ServingError(status.INVALID_ARGUMENT, text) from None
            if column[-1].shape != column[0].shape:
                text = f"Failed to process element: {i} of 'instances' list. Expecting shape "
                text += f"{list(column[0].shape)} but got: {list(column[-1].shape)}"
                raise ServingError(status.INVALID_ARGUMENT, text)
    return {name: np.stack(column) for name, column in columns.items()}


def to_array(value, dtype: int) -> np.ndarray:
    """A JSON value, plain or lists of lists, as an array of a dtype. Raises ServingError where it does not fit."""
    shape, leaves, first = [], [value], value
    while isinstance(first, list):
        shape.append(len(first))
        for item in leaves:
            if not isinstance(item, list):
                text = f"JSON Value: {_short(item)} found at incorrect level: {len(shape)} in the JSON DOM"
                raise ServingError(status.INVALID_ARGUMENT, text)
            if len(item) != len(first):
                text = f"Encountered list at unexpected size: {len(item)} at level: {len(shape) - 1} expected size: "
                raise ServingError(status.INVALID_ARGUMENT, text + str(len(first)))
        leaves = list(itertools.chain.from_iterable(leaves))
        first = leaves[0] if leaves else None
    kinds = set(map(type, leaves))
    if list in kinds:
        raise ServingError(status.INVALID_ARGUMENT, f"Encountered list at unexpected level: {len(shape)}")
    if dtype == types_pb2.DT_STRING:
        flat = np.empty(len(leaves), object)
        flat[:] = [_to_bytes(leaf) for leaf in leaves]
    else:
        _check_numbers(leaves, kinds, dtype)
        flat = np.array(leaves, tf.as_dtype(dtype).as_numpy_dtype)
    return flat.reshape(shape)


def _check_numbers(leaves: list, kinds: set[type], dtype: int) -> None:
    """Integers must be written as such, and fit; floats take both; halves do not exist in REST."""
    if dtype == types_pb2.DT_BOOL:
        allowed = {bool}
    elif dtype in INTEGERS:
        allowed = {int}
    elif dtype in FLOATS:
        allowed = {int, float}
    else:
        first = _short(leaves[0] if leaves else None)
        text = f"Conversion of JSON Value: {first} to type: {tensors.dtype_name(dtype)}"
        raise ServingError(status.UNIMPLEMENTED, text)
    if kinds - allowed:
        wrong = next(leaf for leaf in leaves if type(leaf) not in allowed)
        text = f"JSON Value: {_short(wrong)} Type: {NAMES.get(type(wrong), 'Null')} is not of expected type: "
        raise ServingError(status.INVALID_ARGUMENT, text + tensors.dtype_name(dtype))
    if dtype in INTEGERS:
        for value in (min(leaves, default=0), max(leaves, default=0)):
            if not INTEGERS[dtype].min <= value <= INTEGERS[dtype].max:
                text = f"JSON Value: {value} Type: Number is not of expected type: {tensors.dtype_name(dtype)}"
                raise ServingError(status.INVALID_ARGUMENT, text)
    elif dtype in FLOATS:
        most = np.finfo(tf.as_dtype(dtype).as_numpy_dtype).max
        whole = [leaf for leaf in leaves if type(leaf) is int] if int in kinds else []
        lossy = [value for value in (min(whole, default=0), max(whole, default=0)) if abs(value) >= 2 ** FLOATS[dtype]]
        broken = np.array([leaf for leaf in leaves if type(leaf) is float] if float in kinds else [], np.float64)
        lossy += broken[np.isfinite(broken) & (np.abs(broken) > most)].tolist()
        if lossy:
            text = f"Cannot convert JSON value: {lossy[0]} to {tensors.dtype_name(dtype)} without loss of precision."
            raise ServingError(status.INVALID_ARGUMENT, text)


def _is_base64(value) -> bool:
    return isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str)


def _to_bytes(leaf) -> bytes:
    if isinstance(leaf, str):
        return leaf.encode("utf-8", "surrogatepass")
    if isinstance(leaf, dict):
        if not _is_base64(leaf):
            text = f"JSON Value: {_short(leaf)} not formatted correctly for base64 data"
            raise ServingError(status.INVALID_ARGUMENT, text)
        try:
            encoded = leaf["b64"]
            return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise ServingError(status.INVALID_ARGUMENT, "Unable to base64 decode") from None
    text = f"JSON Value: {_short(leaf)} Type: {NAMES.get(type(leaf), 'Null')} is not of expected type: string"
    raise ServingError(status.INVALID_ARGUMENT, text)


def _short(value) -> str:
    """A JSON value for an error's text; what the client sent, cut."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:200] + "..."


def write_outputs(arrays: dict[str, np.ndarray], kind: str) -> bytes:
    """The answer to a request of the given format, as JSON. Raises INVALID_ARGUMENT for what REST cannot say."""
    values = {name: _to_json(name, array) for name, array in sorted(arrays.items())}
    if kind == "inputs":
        key, value = "outputs", values if len(values) > 1 else next(iter(values.values()))
    else:
        if any(not array.ndim for array in arrays.values()):
            raise ServingError(status.INVALID_ARGUMENT, "Tensor name: a scalar output has no batch dimension for rows")
        sizes = {array.shape[0] for array in arrays.values()}
        if len(sizes) != 1:
            text = f"Tensors have inconsistent batch size: {sorted(sizes)}; use the columnar format"
            raise ServingError(status.INVALID_ARGUMENT, text)
        key = "predictions"
        if len(values) > 1:
            value = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        else:
            value = next(iter(values.values()))
    return f'{{\n    "{key}": {json.dumps(value, ensure_ascii=False)}\n}}'.encode("utf-8", "surrogateescape")


def _to_json(name: str, array: np.ndarray):
    """Nested lists. Strings of outputs whose name ends in _bytes become base64 objects, others are written raw."""
    if array.dtype == object:
        convert = _base64 if name.endswith("_bytes") else lambda value: value.decode("utf-8", "surrogateescape")
        converted = np.empty(array.size, object)
        converted[:] = [convert(bytes(value)) for value in array.ravel()]
        return converted.reshape(array.shape).tolist()
    if array.dtype.kind not in "iufb" or array.dtype == np.float16:
        raise ServingError(status.INVALID_ARGUMENT, f"Tensor {name} has type {array.dtype}, which REST does not know")
    return array.tolist()


def _base64(value: bytes) -> dict:
    return {"b64": base64.b64encode(value).decode()}
