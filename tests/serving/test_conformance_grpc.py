"""gRPC as TF Serving's clients know it, case by case, on our server and, where it is installed, on the real one.

A case is a fact of the protocol: a status code and what the text of an error must hold.
"""

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.framework import tensor_pb2
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    predict_pb2,
    regression_pb2,
)

BYTES = b"\xfb\xff\x00end"


def cases(table):
    """Rows (id, *values) as arguments of parametrize."""
    return {"argvalues": [row[1:] for row in table], "ids": [row[0] for row in table]}


def request_of(text: str, **inputs) -> predict_pb2.PredictRequest:
    """A request: fields in protobuf's text format, and tensors as arrays or in that format as well."""
    request = text_format.Parse(text, predict_pb2.PredictRequest())
    for name, value in inputs.items():
        proto = text_format.Parse(value, tensor_pb2.TensorProto()) if isinstance(value, str) else None
        request.inputs[name].CopyFrom(proto or tf.make_tensor_proto(value))
    return request


def spec(fields: str = "") -> str:
    return f'model_spec {{ name: "toy" {fields} }} '


def sig(name: str) -> str:
    return f'signature_name: "{name}"'


def code_of(call, request) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=20)
    assert "Traceback" not in caught.value.details()
    return caught.value.code().name, caught.value.details()


X = np.float32([2.0, 4.0])
NAMED = {"a": X, "b": np.int32([1, 2])}
FLOATS = "dtype: DT_FLOAT tensor_shape {{ dim {{ size: {} }} }} {}".format
GRPC_ERRORS = [
    ("no_spec", "", {"x": X}, "INVALID_ARGUMENT", "Missing ModelSpec"),
    ("no_name", "model_spec {}", {"x": X}, "INVALID_ARGUMENT", "ModelSpec has no name specified."),
    ("model", 'model_spec { name: "no" }', {"x": X}, "NOT_FOUND", "Servable not found for request: Latest(no)"),
    ("version", spec("version { value: 9 }"), {"x": X}, "NOT_FOUND", "request: Specific(toy, 9)"),
    ("label", spec('version_label: "no"'), {"x": X}, "INVALID_ARGUMENT", "Unrecognized servable version label: no"),
    ("signature", spec(sig("no")), {"x": X}, "FAILED_PRECONDITION", ""),
    ("too_few", spec(sig("two")), {"a": X}, "INVALID_ARGUMENT", "Missing but required: {b}"),
    ("too_many", spec(), {"x": X, "z": X}, "INVALID_ARGUMENT", "Sent extra: {z}"),
    ("none", spec(), {}, "INVALID_ARGUMENT", "input size does not match signature"),
    ("wrong_input", spec(), {"z": X}, "INVALID_ARGUMENT", "input tensor alias not found in signature: z"),
    (
        "filter",
        spec() + 'output_filter: "z"',
        {"x": X},
        "INVALID_ARGUMENT",
        "output tensor alias not found in signature",
    ),
    (
        "filter_twice",
        spec() + 'output_filter: ["y", "y"]',
        {"x": X},
        "INVALID_ARGUMENT",
        "duplicate output tensor alias",
    ),
    ("dtype", spec(), {"x": np.int32([1])}, "INVALID_ARGUMENT", "float"),
    ("string", spec(), {"x": np.array([b"a"])}, "INVALID_ARGUMENT", "float"),
    ("shape", spec(sig("fixed")), {"x": np.float32([1, 2, 3])}, "INVALID_ARGUMENT", ""),
    ("content", spec(), {"x": FLOATS(2, 'tensor_content: "123"')}, "INVALID_ARGUMENT", "tensor parsing error: x"),
    ("negative", spec(), {"x": FLOATS(-1, "float_val: 1")}, "INVALID_ARGUMENT", "tensor parsing error: x"),
    ("no_dtype", spec(), {"x": "float_val: 1"}, "INVALID_ARGUMENT", "tensor parsing error: x"),
    ("xla", spec(sig("compiled")), {"x": X}, "INTERNAL", "XLA compilation disabled"),
    ("init_op", spec(sig("__saved_model_init_op")), {"x": X}, "INVALID_ARGUMENT", ""),
]


@pytest.mark.parametrize(("text", "inputs", "code", "fact"), **cases(GRPC_ERRORS))
def test_predict_refuses(server, text, inputs, code, fact):
    found, details = code_of(server.predictions.Predict, request_of(text, **inputs))
    assert found == code and fact in details


GRPC_ANSWERS = [
    ("newest", "", {"x": X}, {"y": [4.0, 5.0]}),
    ("version", "version { value: 1 }", {"x": X}, {"y": [3.0, 4.0]}),
    ("label", 'version_label: "stable"', {"x": X}, {"y": [3.0, 4.0]}),
    ("other_label", 'version_label: "canary"', {"x": X}, {"y": [4.0, 5.0]}),
    ("two", sig("two"), NAMED, {"a": [2.0, 4.0], "b": [2, 3]}),
    ("default", sig("defaulted"), {"a": X}, {"a": [2.0, 4.0], "b": [6]}),
    ("unused_default", sig("defaulted"), NAMED, {"a": [2.0, 4.0], "b": [2, 3]}),
    ("scalar", sig("scalar"), {"n": np.int32(6), "x": X}, {"n": 7, "x": [2.0, 4.0]}),
    ("empty", "", {"x": np.zeros(0, "float32")}, {"y": []}),
    ("bytes", sig("bytes"), {"s": np.array([BYTES, b""], object)}, {"s_bytes": [BYTES, b""]}),
    ("half", sig("half_in"), {"h": np.float16([1.5])}, {"y": [1.5]}),
    ("half_out", sig("half_out"), {"x": np.float32([1.5])}, {"h": [1.5]}),
    ("unchecked_shape", "", {"x": np.float32([[2.0], [4.0]])}, {"y": [[4.0], [5.0]]}),
    ("typed_field", "", {"x": FLOATS(2, "float_val: 2 float_val: 4")}, {"y": [4.0, 5.0]}),
    ("repeated_value", "", {"x": FLOATS(3, "float_val: 2")}, {"y": [4.0, 4.0, 4.0]}),
    ("no_value", "", {"x": FLOATS(1, "")}, {"y": [3.0]}),
]


@pytest.mark.parametrize(("fields", "inputs", "expected"), **cases(GRPC_ANSWERS))
def test_predict_answers(server, fields, inputs, expected):
    response = server.predictions.Predict(request_of(spec(fields), **inputs), timeout=20)
    assert {name: tf.make_ndarray(proto).tolist() for name, proto in response.outputs.items()} == expected


def test_predict_says_what_answered(server):
    """Name, effective signature and version; values in typed fields; only the outputs asked for."""
    response = server.predictions.Predict(request_of(spec(sig("two")) + 'output_filter: "b"', **NAMED), timeout=20)
    assert (
        response.model_spec
        == predict_pb2.PredictRequest.FromString(
            request_of(spec(sig("two") + "version { value: 2 }")).SerializeToString()
        ).model_spec
    )
    assert list(response.outputs) == ["b"] and list(response.outputs["b"].int_val) == [2, 3]
    plain = server.predictions.Predict(request_of(spec(), x=X), timeout=20)
    assert plain.model_spec.signature_name == "serving_default"
    assert list(plain.outputs["y"].float_val) == [4.0, 5.0] and not plain.outputs["y"].tensor_content


def test_metadata(server):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "toy"
    response = server.predictions.GetModelMetadata(request, timeout=20)
    found = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(found) and response.model_spec.version.value == 2
    assert found.signature_def["two"].inputs["b"].dtype == tf.int32.as_datatype_enum
    assert found.signature_def["serving_default"].method_name == "tensorflow/serving/predict"


METADATA_ERRORS = [
    ("no_field", spec(), "INVALID_ARGUMENT"),
    ("other_field", spec() + 'metadata_field: "weights"', "INVALID_ARGUMENT"),
    ("no_spec", 'metadata_field: "signature_def"', "INVALID_ARGUMENT"),
    ("model", 'model_spec { name: "no" } metadata_field: "signature_def"', "NOT_FOUND"),
]


@pytest.mark.parametrize(("text", "code"), **cases(METADATA_ERRORS))
def test_metadata_refuses(server, text, code):
    request = text_format.Parse(text, get_model_metadata_pb2.GetModelMetadataRequest())
    assert code_of(server.predictions.GetModelMetadata, request)[0] == code


def test_status(server):
    request = text_format.Parse(spec(), get_model_status_pb2.GetModelStatusRequest())
    found = server.models.GetModelStatus(request, timeout=20).model_version_status
    assert {(v.version, v.state, v.status.error_code) for v in found} == {(1, 30, 0), (2, 30, 0)}
    request.model_spec.version.value = 1
    assert [v.version for v in server.models.GetModelStatus(request, timeout=20).model_version_status] == [1]


STATUS_ERRORS = [
    ("no_spec", "", "INVALID_ARGUMENT"),
    ("model", 'model_spec { name: "no" }', "NOT_FOUND"),
    ("version", spec("version { value: 9 }"), "NOT_FOUND"),
]


@pytest.mark.parametrize(("text", "code"), **cases(STATUS_ERRORS))
def test_status_refuses(server, text, code):
    request = text_format.Parse(text, get_model_status_pb2.GetModelStatusRequest())
    assert code_of(server.models.GetModelStatus, request)[0] == code


def test_reload_needs_a_list(server):
    assert code_of(server.models.HandleReloadConfigRequest, model_management_pb2.ReloadConfigRequest())[0] == (
        "INVALID_ARGUMENT"
    )


EXAMPLES = (
    "input { example_list { examples { features { feature { key: 'x' value { float_list { value: 2 } } } } } } } "
)


def task(method: str, signature: str = "regress") -> str:
    return f"tasks {{ {spec(sig(signature))} method_name: 'tensorflow/serving/{method}' }} "


def test_examples(server):
    """The calls that take tf.Examples; signatures made for tensors refuse them."""
    text = spec(sig("classify")) + EXAMPLES
    answer = server.predictions.Classify(
        text_format.Parse(text, classification_pb2.ClassificationRequest()), timeout=20
    )
    classes = answer.result.classifications[0].classes
    assert [(c.label, c.score) for c in classes] == [("plus", 2.0), ("minus", -2.0)]
    text = spec(sig("regress")) + EXAMPLES
    answer = server.predictions.Regress(text_format.Parse(text, regression_pb2.RegressionRequest()), timeout=20)
    assert [r.value for r in answer.result.regressions] == [4.0] and answer.model_spec.version.value == 2
    text = task("regress") + task("classify", "classify") + EXAMPLES
    results = server.predictions.MultiInference(
        text_format.Parse(text, inference_pb2.MultiInferenceRequest()), timeout=20
    )
    assert results.results[0].regression_result.regressions[0].value == 4.0
    assert results.results[1].classification_result.classifications[0].classes[0].label == "plus"


EXAMPLE_ERRORS = [
    ("tensors", "Classify", classification_pb2.ClassificationRequest, spec() + EXAMPLES, "INVALID_ARGUMENT"),
    ("no_examples", "Classify", classification_pb2.ClassificationRequest, spec(sig("classify")), "INVALID_ARGUMENT"),
    ("classes", "Regress", regression_pb2.RegressionRequest, spec(sig("classify")) + EXAMPLES, "INVALID_ARGUMENT"),
    ("same", "MultiInference", inference_pb2.MultiInferenceRequest, 2 * task("regress"), "INVALID_ARGUMENT"),
    ("method", "MultiInference", inference_pb2.MultiInferenceRequest, task("rank") + EXAMPLES, "UNIMPLEMENTED"),
]


@pytest.mark.parametrize(("method", "kind", "text", "code"), **cases(EXAMPLE_ERRORS))
def test_examples_refuse(server, method, kind, text, code):
    assert code_of(getattr(server.predictions, method), text_format.Parse(text, kind()))[0] == code
