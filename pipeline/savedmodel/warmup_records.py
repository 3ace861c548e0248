"""Warm-up records: calls that TensorFlow Serving makes itself while it loads a SavedModel, before clients can.

It reads them from `assets.extra/tf_serving_warmup_requests`, a TFRecord file of PredictionLog messages, and replays
them on the session: the signature matters, the model's name does not. A record that fails makes the load fail, so
functions compiled by XLA, which servers refuse unless told otherwise, have records only where asked for.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from tensorflow.core.framework import tensor_pb2

from models.errors import InputError

FILE = Path("assets.extra", "tf_serving_warmup_requests")
# The part of PredictionLog that a warm-up needs: message -> (field, number, type). So an export needs no
# tensorflow-serving-api; a tensor stands as its bytes, which are the same on the wire as the message.
MESSAGES = {
    "ModelSpec": (("name", 1, "string"), ("signature_name", 3, "string")),
    "Input": (("key", 1, "string"), ("value", 2, "bytes")),  # an entry of map<string, TensorProto>
    "PredictRequest": (("model_spec", 1, "ModelSpec"), ("inputs", 2, "Input")),
    "PredictLog": (("request", 1, "PredictRequest"),),
    "PredictionLog": (("predict_log", 6, "PredictLog"),),
}


def write(saved_model: Path, calls: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write the warm-up records of one SavedModel.

    Args:
        saved_model: its folder, PART/VERSION.
        calls: signature -> the arrays of one call, with the dtypes and shapes of the signature.
    """
    path = saved_model / FILE
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as file:
        for signature, inputs in calls.items():
            file.write(_record(saved_model.parent.name, signature, inputs))


def _record(model: str, signature: str, inputs: Mapping[str, np.ndarray]) -> bytes:
    log = _prediction_log()()
    request = log.predict_log.request
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for name, value in inputs.items():
        request.inputs.add(key=name, value=tf.make_tensor_proto(value).SerializeToString())
    return log.SerializeToString(deterministic=True)


def read(saved_model: Path) -> list[tuple[str, dict[str, np.ndarray]]]:
    """The warm-up records of one SavedModel as (signature, arrays), in order; none where there is no such file.

    Raises:
        InputError: the file is damaged, or holds something other than calls of Predict.
    """
    path, log, found = saved_model / FILE, _prediction_log(), []
    if not path.exists():
        return found
    try:
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            request = log.FromString(record).predict_log.request
            inputs = {i.key: tf.make_ndarray(tensor_pb2.TensorProto.FromString(i.value)) for i in request.inputs}
            found.append((request.model_spec.signature_name or "serving_default", inputs))
    except (tf.errors.DataLossError, message.DecodeError, TypeError) as error:
        raise InputError(f"{path}: not a file of warm-up records ({str(error).splitlines()[0]})") from error
    return found


def _prediction_log():
    """The message class PredictionLog, made from MESSAGES."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="warmup.proto", package="warmup", syntax="proto3")
    for name, fields in MESSAGES.items():
        made = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            label = field.LABEL_REPEATED if kind == "Input" else field.LABEL_OPTIONAL
            added = made.field.add(name=field_name, number=number, label=label)
            if kind in MESSAGES:
                added.type, added.type_name = field.TYPE_MESSAGE, f".warmup.{kind}"
            else:
                added.type = {"string": field.TYPE_STRING, "bytes": field.TYPE_BYTES}[kind]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("warmup.PredictionLog"))
