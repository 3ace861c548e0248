"""Classify, Regress and MultiInference: signatures that take serialized tf.Examples. Ours take tensors instead."""

import base64
import binascii

import numpy as np
from tensorflow.core.example import example_pb2
from tensorflow_serving.apis import classification_pb2, inference_pb2, input_pb2, regression_pb2

from pipeline.serving import predict, status
from pipeline.serving.predict import Call, Core
from pipeline.serving.status import ServingError

INPUT = "inputs"
METHODS = {"tensorflow/serving/classify": "classification_result", "tensorflow/serving/regress": "regression_result"}


async def run(core: Core, request, answer, deadline: float | None):
    """(result, signature name, version) of a classification or regression request.

    Args:
        answer: `classify` or `regress`.

    Raises:
        ServingError: INVALID_ARGUMENT where there are no examples, or the signature is not of that kind.
    """
    predict.check_spec(request)
    return await _run(core, request.model_spec, request.input, answer, deadline)


async def run_many(core: Core, request: inference_pb2.MultiInferenceRequest, deadline: float | None) -> list[tuple]:
    """[(field of the answer, model spec, result, signature name, version)], a task each; all of one model."""
    if not request.tasks:
        raise ServingError(status.INVALID_ARGUMENT, "Inference request size is zero")
    seen = set()
    for task in request.tasks:
        predict.check_spec(task)
        if task.model_spec.name != request.tasks[0].model_spec.name:
            raise ServingError(
                status.INVALID_ARGUMENT, "All ModelSpecs in a MultiInferenceRequest must access one model"
            )
        if task.model_spec.signature_name in seen:
            text = f"Duplicate evaluation of signature: {task.model_spec.signature_name}"
            raise ServingError(status.INVALID_ARGUMENT, text)
        seen.add(task.model_spec.signature_name)
        if task.method_name not in METHODS:
            raise ServingError(status.UNIMPLEMENTED, f"Unsupported signature method_name: {task.method_name}")
    answers = []
    for task in request.tasks:
        field = METHODS[task.method_name]
        answer = classify if field == "classification_result" else regress
        answers.append((field, task.model_spec, *await _run(core, task.model_spec, request.input, answer, deadline)))
    return answers


async def _run(core: Core, spec, data: input_pb2.Input, answer, deadline: float | None):
    rows = _serialize(data)
    if not rows:
        raise ServingError(status.INVALID_ARGUMENT, "Input is empty.")

    async def prepare(signatures):
        name, signature = predict.find_signature(signatures, spec.signature_name, status.INVALID_ARGUMENT)
        if set(signature.inputs) != {INPUT}:
            raise ServingError(
                status.INVALID_ARGUMENT, f"signature {name} takes no tf.Examples: it needs one input {INPUT}"
            )
        aliases = [alias for alias in OUTPUTS[answer] if alias in signature.outputs]
        if not aliases:
            raise ServingError(status.INVALID_ARGUMENT, f"signature {name} has none of the outputs {OUTPUTS[answer]}")
        feeds = {signature.inputs[INPUT].name: np.array(rows, object)}
        return Call(name, 0, lambda: feeds, aliases, [signature.outputs[alias].name for alias in aliases])

    call, fetched, number = await core.run(spec.name, *predict.version_of(spec), prepare, deadline)
    for alias, array in zip(call.aliases, fetched, strict=True):
        if not array.ndim or array.shape[0] != len(rows):
            text = f"output {alias} has shape {list(array.shape)}, but there are {len(rows)} examples"
            raise ServingError(status.INVALID_ARGUMENT, text)
    return answer(dict(zip(call.aliases, fetched, strict=True))), call.signature_name, number


def _serialize(data: input_pb2.Input) -> list[bytes]:
    """Each example as bytes, with the features that all share."""
    if data.WhichOneof("kind") == "example_list":
        return [example.SerializeToString() for example in data.example_list.examples]
    shared = data.example_list_with_context
    rows = []
    for example in shared.examples:
        merged = type(example)()
        merged.CopyFrom(shared.context)
        for name, feature in example.features.feature.items():
            merged.features.feature[name].CopyFrom(feature)
        rows.append(merged.SerializeToString())
    return rows


def classify(outputs: dict[str, np.ndarray]) -> classification_pb2.ClassificationResult:
    """Arrays `classes` string[B,C] and `scores` f32[B,C], either of which may be missing, as a message."""
    shape = next(iter(outputs.values())).shape
    if len(shape) != 2 or any(array.shape != shape for array in outputs.values()):
        text = f"classes and scores must have one shape [batch, classes], found {[a.shape for a in outputs.values()]}"
        raise ServingError(status.INVALID_ARGUMENT, text)
    result = classification_pb2.ClassificationResult()
    for row in range(shape[0]):
        classes = result.classifications.add().classes
        for column in range(shape[1]):
            entry = classes.add()
            if "classes" in outputs:
                entry.label = bytes(outputs["classes"][row, column]).decode(errors="replace")
            if "scores" in outputs:
                entry.score = float(outputs["scores"][row, column])
    return result


def regress(outputs: dict[str, np.ndarray]) -> regression_pb2.RegressionResult:
    """Array `outputs` f32[B] or f32[B,1] as a message."""
    array = outputs["outputs"]
    if array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1):
        raise ServingError(
            status.INVALID_ARGUMENT, f"outputs must have shape [batch] or [batch, 1], found {array.shape}"
        )
    result = regression_pb2.RegressionResult()
    for value in array.ravel().tolist():
        result.regressions.add(value=value)
    return result


def fill(data: input_pb2.Input, document: dict) -> None:
    """The examples of a REST request: objects of features, each a value or a list. Raises INVALID_ARGUMENT."""
    rows = document.get("examples")
    if not isinstance(rows, list) or not rows:
        raise ServingError(status.INVALID_ARGUMENT, "key 'examples' is expected and must be a list that is not empty")
    kept = data.example_list
    if "context" in document:
        kept = data.example_list_with_context
        kept.context.CopyFrom(_to_example(document["context"]))
    for row in rows:
        kept.examples.append(_to_example(row))


def _to_example(row) -> example_pb2.Example:
    if not isinstance(row, dict):
        raise ServingError(status.INVALID_ARGUMENT, "Example must be JSON object")
    example = example_pb2.Example()
    for name, value in row.items():
        feature = example.features.feature[name]
        for item in value if isinstance(value, list) else [value]:
            kind, item = _to_feature(name, item)
            if feature.WhichOneof("kind") not in (None, kind):
                text = f"Unexpected element type in feature: {name} expecting type: {feature.WhichOneof('kind')}"
                raise ServingError(status.INVALID_ARGUMENT, text)
            getattr(feature, kind).value.append(item)
    return example


def _to_feature(name: str, item) -> tuple[str, object]:
    """Field of a tf.Feature and the value to put there."""
    try:
        if isinstance(item, dict) and item.keys() == {"b64"}:
            return "bytes_list", base64.b64decode(item["b64"], validate=True)
        if isinstance(item, str):
            return "bytes_list", item.encode("utf-8", "surrogatepass")
        if isinstance(item, float):
            return "float_list", item
        if isinstance(item, int) and -(2**63) <= item < 2**63:  # True and False are 1 and 0
            return "int64_list", int(item)
    except (binascii.Error, TypeError, ValueError):
        raise ServingError(status.INVALID_ARGUMENT, "Unable to base64 decode") from None
    raise ServingError(status.INVALID_ARGUMENT, f"Feature: {name} has element with unexpected JSON type")


OUTPUTS = {classify: ("classes", "scores"), regress: ("outputs",)}
