"""What a request means: the checks and answers that gRPC and REST have in common."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable

import numpy as np
from tensorflow.core.protobuf import meta_graph_pb2

from pipeline.serving import status, tensors
from pipeline.serving.admission import Admission
from pipeline.serving.metrics import Metrics
from pipeline.serving.models import Models
from pipeline.serving.status import ServingError

DEFAULT_SIGNATURE = "serving_default"
QUICK_BYTES = 1 << 18  # of tensors; a fraction of a millisecond
JSON_FACTOR = 8  # a byte of JSON takes about as long as so many of a tensor


@dataclasses.dataclass
class Core:
    """What the two front ends share."""

    models: Models
    admission: Admission
    metrics: Metrics
    most_bytes: int  # of a request, and of each tensor in it
    tensor_content: bool = False  # answer gRPC with raw bytes instead of typed fields
    ready: bool = False  # every model has answered; and the server is not about to stop
    draining: bool = False
    receiving: int = 0  # bytes of REST bodies on their way
    active: int = 0  # requests being worked on, of either kind
    idle: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def request(self, model: str, api: str, entrypoint: str):
        """Count one request, its time and how it ends; refuse it while the server stops.

        Raises:
            ServingError: what the body raised; UNAVAILABLE when draining.
        """
        start, code = time.perf_counter(), status.OK
        self.active += 1
        try:
            if self.draining:
                raise ServingError(status.UNAVAILABLE, "the server is shutting down")
            yield
        except ServingError as error:
            code = error.code
            raise
        except asyncio.CancelledError:
            code = status.CANCELLED
            raise
        except BaseException:
            code = status.INTERNAL
            raise
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()
            known = model if model in self.models.names() else ""
            self.metrics.count(known, api, entrypoint, status.NAMES[code], time.perf_counter() - start)

    async def run(
        self,
        name: str,
        number: int | None,
        label: str | None,
        prepare: Callable[[dict], Awaitable["Call"]],
        deadline: float | None,
    ) -> tuple["Call", list[np.ndarray], int]:
        """One run of one signature.

        Args:
            name, number, label: of the model, as the request says.
            prepare: signatures of the model -> what to run; called with a place in the queue.
            deadline: time of the event loop after which nobody wants the answer.

        Returns:
            the call, its fetched arrays and the version that ran.
        """
        version = self.models.find(name, number, label)
        with version.lease() as servable:
            with self.admission.place() as run:
                call = await prepare(servable.signatures)
                feeds = await convert(call.size, call.feeds)
                fetched = await run(lambda seconds: servable.run(feeds, call.fetches, seconds), deadline)
        return call, fetched, version.number


@dataclasses.dataclass(frozen=True)
class Call:
    """A signature to run: `feeds`, where it takes long in a thread, decodes the inputs to {tensor name: array}."""

    signature_name: str
    size: int  # bytes to decode, or what takes as long
    feeds: Callable[[], dict[str, np.ndarray]]
    aliases: list[str]  # of the outputs
    fetches: list[str]  # their tensors


async def convert(size: int, function: Callable, *arguments):
    """Call a function that encodes or decodes `size` bytes: here when that is quick, else beside the event loop."""
    return function(*arguments) if size < QUICK_BYTES else await asyncio.to_thread(function, *arguments)


def find_signature(signatures: dict, name: str, code: int = status.FAILED_PRECONDITION):
    """(effective name, SignatureDef). Raises ServingError with `code`: gRPC and REST differ here."""
    name = name or DEFAULT_SIGNATURE
    if name not in signatures:
        if code == status.FAILED_PRECONDITION:
            raise ServingError(code, f'Serving signature key "{name}" not found.')
        raise ServingError(code, f'Serving signature name: "{name}" not found in signature def')
    return name, signatures[name]


def check_inputs(signature: meta_graph_pb2.SignatureDef, given: Iterable[str]) -> None:
    """Raise INVALID_ARGUMENT unless exactly the signature's inputs are given; those with a default may be left out."""
    given, expected = set(given), set(signature.inputs)
    missing = expected - given - set(signature.defaults)
    if len(given) != len(expected) and (missing or given - expected):
        raise ServingError(
            status.INVALID_ARGUMENT,
            f"input size does not match signature: {len(given)}!={len(expected)}. "
            f"Sent extra: {{{','.join(sorted(given - expected))}}}. "
            f"Missing but required: {{{','.join(sorted(missing))}}}.",
        )
    if given - expected:
        raise ServingError(
            status.INVALID_ARGUMENT,
            f"input tensor alias not found in signature: {min(given - expected)}. "
            f"Inputs expected to be in the set {{{','.join(sorted(expected))}}}.",
        )


def choose_outputs(signature: meta_graph_pb2.SignatureDef, wanted: list[str]) -> list[str]:
    """Names of the outputs a request asks for; none asked for means all. Raises INVALID_ARGUMENT."""
    for i, alias in enumerate(wanted):
        if alias not in signature.outputs:
            expected = ",".join(sorted(signature.outputs))
            text = (
                f"output tensor alias not found in signature: {alias} Outputs expected to be in the set {{{expected}}}."
            )
            raise ServingError(status.INVALID_ARGUMENT, text)
        if alias in wanted[:i]:
            raise ServingError(status.INVALID_ARGUMENT, f"duplicate output tensor alias: {alias}")
    return list(wanted) or sorted(signature.outputs)


def with_defaults(signature: meta_graph_pb2.SignatureDef, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{tensor name: array} of the inputs given and of the defaults of those left out."""
    left_out = {name: proto for name, proto in signature.defaults.items() if name not in arrays}
    arrays = arrays | {name: tensors.to_array(proto, name, 1 << 31) for name, proto in left_out.items()}
    return {signature.inputs[name].name: array for name, array in arrays.items()}


async def predict(core: Core, request, deadline: float | None):
    """PredictRequest -> (arrays by alias, signature name, version). Raises ServingError."""
    spec = request.model_spec
    check_spec(request)

    async def prepare(signatures):
        name, signature = find_signature(signatures, spec.signature_name)
        check_inputs(signature, request.inputs)
        aliases = choose_outputs(signature, request.output_filter)

        def feeds():
            arrays = {key: tensors.to_array(proto, key, core.most_bytes) for key, proto in request.inputs.items()}
            return with_defaults(signature, arrays)

        return Call(name, request.ByteSize(), feeds, aliases, [signature.outputs[alias].name for alias in aliases])

    call, fetched, number = await core.run(spec.name, *version_of(spec), prepare, deadline)
    return dict(zip(call.aliases, fetched, strict=True)), call.signature_name, number


def check_spec(request) -> None:
    """Raise INVALID_ARGUMENT for a request that names no model."""
    if not request.HasField("model_spec"):
        raise ServingError(status.INVALID_ARGUMENT, "Missing ModelSpec")
    if not request.model_spec.name:
        raise ServingError(status.INVALID_ARGUMENT, "ModelSpec has no name specified.")


def version_of(spec) -> tuple[int | None, str | None]:
    """Number and label of a ModelSpec, None where it has none."""
    return (
        spec.version.value if spec.HasField("version") else None,
        spec.version_label if spec.WhichOneof("version_choice") == "version_label" else None,
    )
