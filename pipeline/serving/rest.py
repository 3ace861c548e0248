"""TF Serving's REST interface, and pages for probes and monitoring."""

import asyncio
import json
import logging
import re
import urllib.parse

from aiohttp import web
from google.protobuf import json_format
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    regression_pb2,
)

from pipeline.serving import examples, grpc_server, json_tensors, predict, status
from pipeline.serving.predict import Call, Core
from pipeline.serving.status import ServingError

_MODEL = r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
POST = re.compile(rf"{_MODEL}:(?P<method>classify|regress|predict)", re.IGNORECASE | re.ASCII)
GET = re.compile(rf"(?:{_MODEL}|/v1/models)(?P<metadata>/metadata)?", re.IGNORECASE | re.ASCII)
# Messages of whole numbers are JSON strings; fields keep the names of the protocol.
TO_JSON = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "POST, GET",
    "Access-Control-Allow-Headers": "Content-Type",
}
BODIES = 16  # of the largest size that may arrive at once
IDLE_SECONDS = 20  # a connection that sends no whole request head for this long is closed

log = logging.getLogger(__name__)


def make_runner(core: Core, timeout: float, monitoring_path: str | None, cors: bool = False) -> web.AppRunner:
    """The HTTP server, not listening yet.

    Args:
        timeout: seconds for a request, from its first line to its answer.
        monitoring_path: of Prometheus' page; None: no such page.
        cors: let pages of other origins read answers.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        if path == "/healthz":
            return web.Response(text="alive\n")
        if path == "/readyz":
            return web.Response(text="ready\n" if core.ready else "not ready\n", status=200 if core.ready else 503)
        if path == monitoring_path and request.method == "GET":
            return web.Response(body=core.metrics.page(), headers={"Content-Type": "text/plain; version=0.0.4"})
        if not path.lower().startswith("/v1/"):
            raise web.HTTPNotFound
        headers = dict(CORS) if cors else {}
        code = 200
        try:
            body = await _answer(core, request, path, timeout, cors)
        except Exception as error:
            if not isinstance(error, ServingError):
                log.exception("%s failed", path)
                error = ServingError(status.INTERNAL, "internal error; see the server's log")
            code = 413 if isinstance(error, BodyTooLarge) else status.HTTP[error.code]
            body = json.dumps({"error": error.text}, indent=4).encode()
            if error.retry_after:
                headers["Retry-After"] = str(error.retry_after)
        response = web.Response(body=body, status=code, content_type="application/json", headers=headers)
        if code == 413 or (code != 200 and not request.content.is_eof()):
            response.force_close()  # what is left of the body is not worth reading
        return response

    app = web.Application(client_max_size=core.most_bytes)
    app.router.add_route("*", "/{path:.*}", handle)
    # A handler whose client leaves is cancelled, and so leaves the queue.
    options = {"access_log": None, "handler_cancellation": True, "shutdown_timeout": 1.0}
    return web.AppRunner(app, handle_signals=False, keepalive_timeout=IDLE_SECONDS, **options)


class BodyTooLarge(ServingError):
    """A request over the limit; HTTP has a status of its own for it."""


async def _answer(core: Core, request: web.Request, path: str, timeout: float, cors: bool) -> bytes:
    if cors and request.method == "OPTIONS":
        if not request.headers.get("Origin", "").startswith(("http://", "https://")):
            raise ServingError(status.INVALID_ARGUMENT, "OPTIONS needs an Origin of http or https")
        return b""
    patterns = {"POST": POST, "GET": GET}
    found = request.method in patterns and patterns[request.method].fullmatch(path)
    if not found:
        raise ServingError(status.INVALID_ARGUMENT, f"Malformed request: {request.method} {path}")
    spec = _model_spec(found)
    entrypoint = found["method"].lower() if request.method == "POST" else "metadata" if found["metadata"] else "status"
    with core.request(spec.name, "REST", entrypoint):
        if request.method == "GET":
            return _describe(core, spec, entrypoint)
        deadline = asyncio.get_running_loop().time() + timeout
        core.models.find(spec.name, *predict.version_of(spec))
        core.admission.check()  # before the body takes memory
        body = await _read(core, request, deadline)
        if entrypoint == "predict":
            return await _predict(core, spec, body, deadline)
        return await _run_examples(core, spec, body, entrypoint, deadline)


def _model_spec(found: re.Match) -> model_pb2.ModelSpec:
    if not found["name"]:
        raise ServingError(status.INVALID_ARGUMENT, "Missing model name in request.")
    spec = model_pb2.ModelSpec(name=urllib.parse.unquote(found["name"], errors="replace"))
    if found["version"]:
        digits = found["version"].lstrip("0") or "0"
        if len(digits) > 19 or int(digits) >= 2**63:
            raise ServingError(status.INVALID_ARGUMENT, f"Failed to convert version: {digits} to numeric.")
        spec.version.value = int(digits)
    if found["label"]:
        spec.version_label = urllib.parse.unquote(found["label"], errors="replace")
    return spec


async def _read(core: Core, request: web.Request, deadline: float) -> bytes:
    """The whole body. Raises ServingError when it is too large, too slow or not what its head says."""
    most = core.most_bytes
    if (request.content_length or 0) > most:
        raise BodyTooLarge(status.INVALID_ARGUMENT, f"the body is over {most} bytes")
    share = most if request.content_length is None else request.content_length
    if core.receiving + share > BODIES * most:
        raise ServingError(status.RESOURCE_EXHAUSTED, "too many large bodies arrive at once", retry_after=1)
    core.receiving += share
    try:
        async with asyncio.timeout_at(deadline):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise BodyTooLarge(status.INVALID_ARGUMENT, f"the body is over {most} bytes") from None
    except TimeoutError:
        raise ServingError(status.DEADLINE_EXCEEDED, "the body did not arrive in time") from None
    except web.RequestPayloadError as error:
        raise ServingError(status.INVALID_ARGUMENT, f"the body cannot be read: {error}") from None
    finally:
        core.receiving -= share


async def _predict(core: Core, spec: model_pb2.ModelSpec, body: bytes, deadline: float) -> bytes:
    size, kind = predict.JSON_FACTOR * len(body), ""

    async def prepare(signatures):
        nonlocal kind
        document = await predict.convert(size, json_tensors.parse, body)
        name = json_tensors.signature_name(document)
        effective, signature = predict.find_signature(signatures, name, status.INVALID_ARGUMENT)
        if not signature.inputs:
            text = f"Failed to get input map for signature: {name or 'DEFAULT'}"
            raise ServingError(status.INVALID_ARGUMENT, text)
        kind = json_tensors.find_format(document)

        def feeds():
            return predict.with_defaults(signature, json_tensors.read_inputs(document, signature.inputs))

        aliases = sorted(signature.outputs)
        return Call(effective, size, feeds, aliases, [signature.outputs[alias].name for alias in aliases])

    call, fetched, _ = await core.run(spec.name, *predict.version_of(spec), prepare, deadline)
    arrays = dict(zip(call.aliases, fetched, strict=True))
    size = predict.JSON_FACTOR * sum(array.nbytes for array in arrays.values())
    return await predict.convert(size, json_tensors.write_outputs, arrays, kind)


async def _run_examples(core: Core, spec: model_pb2.ModelSpec, body: bytes, entrypoint: str, deadline: float) -> bytes:
    document = await predict.convert(predict.JSON_FACTOR * len(body), json_tensors.parse, body)
    spec.signature_name = json_tensors.signature_name(document)
    kinds = {
        "classify": (classification_pb2.ClassificationRequest, examples.classify),
        "regress": (regression_pb2.RegressionRequest, examples.regress),
    }
    make, answer = kinds[entrypoint]
    request = make(model_spec=spec)
    examples.fill(request.input, document)
    result, _, _ = await examples.run(core, request, answer, deadline)
    if entrypoint == "regress":
        results = [regression.value for regression in result.regressions]
    else:
        results = [[[c.label, c.score] for c in row.classes] for row in result.classifications]
    return json.dumps({"results": results}, indent=4).encode()


def _describe(core: Core, spec: model_pb2.ModelSpec, what: str) -> bytes:
    if what == "status":
        answer = grpc_server.get_status(core, get_model_status_pb2.GetModelStatusRequest(model_spec=spec))
        return json_format.MessageToJson(answer, indent=1, **TO_JSON).encode()
    request = get_model_metadata_pb2.GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"])
    answer = grpc_server.get_metadata(core, request)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    answer.metadata["signature_def"].Unpack(signatures)
    parts = {
        "model_spec": json_format.MessageToDict(answer.model_spec, **TO_JSON),
        "metadata": {"signature_def": json_format.MessageToDict(signatures, **TO_JSON)},
    }
    return json.dumps(parts, indent=1).encode()
