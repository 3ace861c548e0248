"""A server of TensorFlow Serving's protocol over gRPC. The stubs import all of TensorFlow."""

import grpc

from models.export_spec import TensorSpec
from pipeline import cli
from pipeline.serving.status import ServingError

cli.import_tensorflow()

from tensorflow.core.framework import types_pb2  # noqa: E402
from tensorflow_serving.apis import (  # noqa: E402
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from pipeline.serving import protocol, tensors  # noqa: E402


def connect(url: str, place: str, answer_bytes: int) -> protocol.Server:
    """A server at HOST:PORT, without TLS; connects with the first call. See `pipeline.serving.protocol.Server`."""
    options = [("grpc.max_receive_message_length", answer_bytes), ("grpc.max_send_message_length", -1)]
    channel = grpc.insecure_channel(place, options)
    prediction = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    models = model_service_pb2_grpc.ModelServiceStub(channel)

    def predict(model: str, version: int, signature: str, inputs: dict, outputs: tuple[TensorSpec, ...], seconds):
        request = predict_pb2.PredictRequest()
        _name(request.model_spec, model, version)
        request.model_spec.signature_name = signature
        for name, array in inputs.items():
            request.inputs[name].CopyFrom(tensors.to_proto(array, as_content=True))
        answer = _ask(prediction.Predict, request, seconds)
        # As large as the message was allowed to be, whatever its shapes say.
        return {name: tensors.to_array(value, name, answer_bytes) for name, value in answer.outputs.items()}

    def signatures(model: str, version: int, seconds: float):
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        _name(request.model_spec, model, version)
        answer = _ask(prediction.GetModelMetadata, request, seconds)
        found = get_model_metadata_pb2.SignatureDefMap()
        answer.metadata["signature_def"].Unpack(found)
        return {name: (_tensors(s.inputs), _tensors(s.outputs)) for name, s in found.signature_def.items()}

    def versions(model: str, seconds: float):
        request = get_model_status_pb2.GetModelStatusRequest()
        _name(request.model_spec, model, None)
        answer = _ask(models.GetModelStatus, request, seconds)
        available = get_model_status_pb2.ModelVersionStatus.AVAILABLE
        return sorted(s.version for s in answer.model_version_status if s.state == available)

    return protocol.Server(url, predict, signatures, versions)


def _name(spec, model: str, version: int | None) -> None:
    spec.name = model
    if version is not None:
        spec.version.value = version


def _ask(method, request, seconds: float):
    """The answer; a call that is given up, by Ctrl-C say, is cancelled."""
    call = method.future(request, timeout=seconds)
    try:
        return call.result()
    except grpc.RpcError as error:
        advice = dict(error.trailing_metadata() or ()).get("retry-after", "")
        seconds = int(advice) if advice.isdecimal() else None
        raise ServingError(error.code().value[0], error.details() or "", seconds) from error
    finally:
        call.cancel()  # of no effect on one that is done


def _tensors(described) -> dict[str, tuple[str, tuple]]:
    return {
        name: (protocol.dtype(types_pb2.DataType.Name(t.dtype)), protocol.shape(d.size for d in t.tensor_shape.dim))
        for name, t in described.items()
    }
