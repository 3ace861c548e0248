"""TensorProto <-> NumPy, as TensorFlow itself reads and writes it, and with a bound on what one message may ask for."""

import math

import ml_dtypes
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2

from pipeline.serving import status
from pipeline.serving.status import ServingError

# Number of a dtype -> the field of TensorProto that holds its values.
FIELDS = {
    types_pb2.DT_FLOAT: "float_val",
    types_pb2.DT_DOUBLE: "double_val",
    types_pb2.DT_INT8: "int_val",
    types_pb2.DT_INT16: "int_val",
    types_pb2.DT_INT32: "int_val",
    types_pb2.DT_UINT8: "int_val",
    types_pb2.DT_UINT16: "int_val",
    types_pb2.DT_INT64: "int64_val",
    types_pb2.DT_UINT32: "uint32_val",
    types_pb2.DT_UINT64: "uint64_val",
    types_pb2.DT_BOOL: "bool_val",
    types_pb2.DT_STRING: "string_val",
    types_pb2.DT_HALF: "half_val",
    types_pb2.DT_BFLOAT16: "half_val",
}
HALVES = {types_pb2.DT_HALF: np.float16, types_pb2.DT_BFLOAT16: ml_dtypes.bfloat16}
FLOAT_VAL_TAG = bytes([tensor_pb2.TensorProto.FLOAT_VAL_FIELD_NUMBER << 3 | 2])  # a packed field in protobuf's encoding


def dtype_name(number: int) -> str:
    """As TensorFlow's errors name it: float, int32, string."""
    return types_pb2.DataType.Name(number).removeprefix("DT_").lower()


def to_array(proto: tensor_pb2.TensorProto, name: str, most_bytes: int) -> np.ndarray:
    """The values of a message.

    Args:
        name: of the input, for errors.
        most_bytes: a shape of a few bytes may stand for gigabytes, since a last value is repeated to fill it.

    Raises:
        ServingError: INVALID_ARGUMENT where it holds no such tensor; RESOURCE_EXHAUSTED where it is too large.
    """
    shape = [dim.size for dim in proto.tensor_shape.dim]
    if proto.dtype not in FIELDS or proto.tensor_shape.unknown_rank or min(shape, default=0) < 0 or len(shape) > 254:
        raise ServingError(status.INVALID_ARGUMENT, f"tensor parsing error: {name}")
    dtype = np.dtype(HALVES.get(proto.dtype) or tf.as_dtype(proto.dtype).as_numpy_dtype)
    count = math.prod(shape)
    if count * dtype.itemsize > most_bytes:
        raise ServingError(status.RESOURCE_EXHAUSTED, f"tensor {name} of shape {shape} is over {most_bytes} bytes")
    if proto.tensor_content and proto.dtype != types_pb2.DT_STRING:
        if len(proto.tensor_content) != count * dtype.itemsize:
            raise ServingError(status.INVALID_ARGUMENT, f"tensor parsing error: {name}")
        return np.frombuffer(proto.tensor_content, dtype).reshape(shape)
    values = getattr(proto, FIELDS[proto.dtype])
    if proto.dtype in HALVES:
        flat = np.array(values, np.uint32).astype(np.uint16).view(dtype)
    else:
        flat = np.array(values, dtype) if len(values) else np.zeros(0, dtype)
    if len(flat) < count:
        filler = flat[-1] if len(flat) else (b"" if proto.dtype == types_pb2.DT_STRING else dtype.type(0))
        flat = np.concatenate([flat, np.full(count - len(flat), filler, dtype)])
    return flat[:count].reshape(shape)


def to_proto(array: np.ndarray, as_content: bool) -> tensor_pb2.TensorProto:
    """A message: values in typed fields, which is what clients of TF Serving expect, or as raw bytes."""
    number = types_pb2.DT_STRING if array.dtype == object else tf.as_dtype(array.dtype).as_datatype_enum
    proto = tensor_pb2.TensorProto(dtype=number)
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    array = np.ascontiguousarray(array)
    if number == types_pb2.DT_STRING:
        proto.string_val.extend(array.ravel().tolist())
    elif as_content:
        proto.tensor_content = array.tobytes()
    elif number == types_pb2.DT_FLOAT:
        # Packed floats are their bytes; adding them one by one would take a hundred times as long.
        data = array.astype("<f4").tobytes()
        proto.MergeFromString(FLOAT_VAL_TAG + _varint(len(data)) + data)
    elif number in HALVES:
        proto.half_val.extend(array.view(np.uint16).ravel().tolist())
    else:
        getattr(proto, FIELDS[number]).extend(array.ravel().tolist())
    return proto


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])
