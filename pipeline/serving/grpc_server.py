"""TF Serving's gRPC services, and gRPC's own health service, over one event loop."""

import asyncio
import contextlib
import logging

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from pipeline.serving import examples, predict, status, tensors
from pipeline.serving.predict import Core
from pipeline.serving.status import ServingError

CODES = {code.value[0]: code for code in grpc.StatusCode}
# "" is the whole server; the others are the names TF Serving uses.
HEALTH_NAMES = ("", "ModelService", "PredictionService")

log = logging.getLogger(__name__)


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    """Predict and its kin."""

    def __init__(self, core: Core):
        self._core = core

    async def Predict(self, request, context):  # noqa: N802
        """Run a signature on tensors."""
        async with _answer(self._core, context, request.model_spec.name, "Predict"):
            arrays, name, number = await predict.predict(self._core, request, _deadline(context))
            size = sum(array.nbytes for array in arrays.values())
            return await predict.convert(size, self._response, request, arrays, name, number)

    def _response(self, request, arrays, name, number):
        response = predict_pb2.PredictResponse()
        _fill_spec(response.model_spec, request.model_spec.name, name, number)
        for alias, array in arrays.items():
            response.outputs[alias].CopyFrom(tensors.to_proto(array, self._core.tensor_content))
        return response

    async def GetModelMetadata(self, request, context):  # noqa: N802
        """The signatures of a model."""
        async with _answer(self._core, context, request.model_spec.name, "GetModelMetadata"):
            return get_metadata(self._core, request)

    async def Classify(self, request, context):  # noqa: N802
        """Run a signature on examples; answers classes and scores."""
        async with _answer(self._core, context, request.model_spec.name, "Classify"):
            result, name, number = await examples.run(self._core, request, examples.classify, _deadline(context))
            response = classification_pb2.ClassificationResponse(result=result)
            _fill_spec(response.model_spec, request.model_spec.name, name, number)
            return response

    async def Regress(self, request, context):  # noqa: N802
        """Run a signature on examples; answers one number each."""
        async with _answer(self._core, context, request.model_spec.name, "Regress"):
            result, name, number = await examples.run(self._core, request, examples.regress, _deadline(context))
            response = regression_pb2.RegressionResponse(result=result)
            _fill_spec(response.model_spec, request.model_spec.name, name, number)
            return response

    async def MultiInference(self, request, context):  # noqa: N802
        """Several of the above on the same examples."""
        model = request.tasks[0].model_spec.name if request.tasks else ""
        async with _answer(self._core, context, model, "MultiInference"):
            response = inference_pb2.MultiInferenceResponse()
            for field, spec, result, name, number in await examples.run_many(self._core, request, _deadline(context)):
                answer = response.results.add()
                _fill_spec(answer.model_spec, spec.name, name, number)
                getattr(answer, field).CopyFrom(result)
            return response


class ModelService(model_service_pb2_grpc.ModelServiceServicer):
    """What is loaded, and what should be."""

    def __init__(self, core: Core, reload):
        """`reload`: async function (ModelServerConfig) that raises ServingError."""
        self._core, self._reload = core, reload

    async def GetModelStatus(self, request, context):  # noqa: N802
        """States of the versions of a model."""
        async with _answer(self._core, context, request.model_spec.name, "GetModelStatus"):
            return get_status(self._core, request)

    async def HandleReloadConfigRequest(self, request, context):  # noqa: N802
        """Serve other models from now on."""
        async with _answer(self._core, context, "", "HandleReloadConfigRequest"):
            if request.config.WhichOneof("config") != "model_config_list":
                raise ServingError(status.INVALID_ARGUMENT, "only a model_config_list can be reloaded")
            await self._reload(request.config)
            return model_management_pb2.ReloadConfigResponse()


def get_status(core: Core, request) -> get_model_status_pb2.GetModelStatusResponse:
    """States of all versions of a model, or of the one asked for. Raises NOT_FOUND when none was ever seen."""
    predict.check_spec(request)
    number, label = predict.version_of(request.model_spec)
    if label:
        number = core.models.find(request.model_spec.name, None, label).number
    versions = [v for v in core.models.list_versions(request.model_spec.name) if number in (None, v.number)]
    if not versions:
        text = f"Could not find version {number} of model {request.model_spec.name}"
        if number is None:
            text = f"Could not find any versions of model {request.model_spec.name}"
        raise ServingError(status.NOT_FOUND, text)
    response = get_model_status_pb2.GetModelStatusResponse()
    for version in versions:
        found = response.model_version_status.add(version=version.number, state=version.state)
        found.status.error_code = version.error.code if version.error else status.OK
        found.status.error_message = version.error.text if version.error else ""
    return response


def get_metadata(core: Core, request) -> get_model_metadata_pb2.GetModelMetadataResponse:
    """Signatures of a model. Raises INVALID_ARGUMENT for other kinds of metadata than signature_def."""
    predict.check_spec(request)
    if not request.metadata_field:
        raise ServingError(status.INVALID_ARGUMENT, "GetModelMetadataRequest must specify at least one metadata_field")
    for field in request.metadata_field:
        if field != "signature_def":
            raise ServingError(status.INVALID_ARGUMENT, f"Metadata field {field} is not supported")
    version = core.models.find(request.model_spec.name, *predict.version_of(request.model_spec))
    response = get_model_metadata_pb2.GetModelMetadataResponse()
    _fill_spec(response.model_spec, request.model_spec.name, "", version.number)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    for name, signature in version.servable.signatures.items():
        signatures.signature_def[name].CopyFrom(signature)
    response.metadata["signature_def"].Pack(signatures)
    return response


def make_server(
    core: Core, reload, options: list[tuple[str, object]]
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """The services, not listening yet, and the health service to tell of changes."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", core.most_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a port in use is an error, not a share
            *options,
        ]
    )
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(PredictionService(core), server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(core, reload), server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    return server, checks


async def set_health(checks: health.aio.HealthServicer, serving: bool) -> None:
    """Tell the health service whether requests are taken."""
    state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in HEALTH_NAMES:
        await checks.set(name, state)


@contextlib.asynccontextmanager
async def _answer(core: Core, context, model: str, entrypoint: str):
    """Count a request, and end it with the status of what it raises; no trace of ours reaches the client."""
    try:
        with core.request(model, "GRPC", entrypoint):
            yield
    except ServingError as error:
        trailing = (("retry-after", str(error.retry_after)),) if error.retry_after else ()
        await context.abort(CODES[error.code], error.text, trailing)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("%s failed", entrypoint)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the server's log")


def _deadline(context) -> float | None:
    """When the client stops waiting, as a time of the event loop."""
    remaining = context.time_remaining()
    return None if remaining is None else asyncio.get_running_loop().time() + remaining


def _fill_spec(spec, name: str, signature_name: str, number: int) -> None:
    spec.name = name
    spec.signature_name = signature_name
    spec.version.value = number
