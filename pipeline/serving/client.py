"""An export on a server, as the functions that `pipeline.load.local` gives: over gRPC or REST.

The server may be TensorFlow Serving or `python -m pipeline.serving serve`. Over REST nothing here imports TensorFlow;
gRPC's stubs load all of it, because the protocol's messages are TensorFlow's own.
"""

import math
import random
import time
import urllib.parse
from collections.abc import Callable

import numpy as np

from models.errors import InputError
from models.export_spec import TensorSpec
from pipeline import manifest
from pipeline.manifest import JIT_COMPONENTS, Functions, Manifest, chain_signature
from pipeline.savedmodel import arrays
from pipeline.serving import status
from pipeline.serving.protocol import Server
from pipeline.serving.status import ServingError

TIMEOUT_SECONDS = 600.0  # of one call; a server on a CPU may draw for minutes
PORTS = {"grpc": 8500, "http": 8501, "https": 443}
ATTEMPTS = 5
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.25, 8.0
# Not done at all, so worth another try. What ran out of time is not: it may be running still.
PASSING = (status.UNAVAILABLE, status.RESOURCE_EXHAUSTED)
# The one function whose answer differs from call to call: it draws its own noise.
NOT_REPEATABLE = ("diffusion_model", "serving_default")
MESSAGE_BYTES = 4 << 20  # gRPC's limit on what a client receives, unless raised
SPARE_BYTES = 64 << 10  # for names and shapes in a message
HINTS = {
    "XLA compilation disabled": "start the server with --xla_cpu_compilation_enabled=true (or gpu), or do not compile",
    "Servable not found": "the server has another version by now; copy its manifest here",
    "larger than max": "the server takes no message of this size; draw fewer images a call",
}
HINTS_BY_CODE = {
    status.DEADLINE_EXCEEDED: "allow more time (--timeout; REST: the server's --rest_api_timeout_in_ms) or run fewer "
    "steps a call",
    status.UNAVAILABLE: "is the server running there?",
    status.RESOURCE_EXHAUSTED: "the server has all the work it takes; try again later",
}


def remote(
    url: str,
    contract: Manifest,
    jit_compile: bool = False,
    jit_components: tuple[str, ...] = manifest.DEFAULT_JIT_COMPONENTS,
    timeout: float = TIMEOUT_SECONDS,
    width: int | None = None,
    height: int | None = None,
) -> Functions:
    """An export on a server as the functions of a picture; a copy of its manifest and tokenizer is enough here.

    Every call asks for the manifest's version, so that parts of two versions never meet. Calls are repeated where the
    server is away or full.

    Args:
        url: grpc://HOST:8500, http://HOST:8501 or https://HOST:443.
        contract: from `pipeline.manifest.read`.
        jit_compile: call the XLA twins of `jit_components`, which the export must have.
        timeout: seconds that one call may take, repetitions included.
        width, height: pixels, of an export with several sizes; None takes its first one.

    Raises:
        InputError: no such server, another export there than the manifest's, no twins. Calls raise it too.
    """
    manifest.check_jit_components(jit_components)
    size = manifest.pick_size(contract, width, height)
    compiled = {name for component in jit_components for name in JIT_COMPONENTS[component]} if jit_compile else set()
    found = {name: chain_signature(contract.spec, name, size) for name in manifest.function_names(contract)}
    wanted = {}
    for name, (part, signature) in found.items():
        wanted[name] = (part, f"{signature}_xla" if name in compiled else signature)
        if wanted[name][1] not in contract.signatures[part]:
            raise InputError(
                f"{contract.folder}: {part} has no {wanted[name][1]}, so a server cannot run it compiled; export again "
                "with --jit_compile"
            )
    server = connect(url, largest_answer(contract))
    for part in dict.fromkeys(part for part, _ in wanted.values()):
        check_export(server, contract, part, timeout)
    functions = {name: function(server, contract, *where, timeout) for name, where in wanted.items()}
    return Functions(**functions, manifest=contract, size=size)


def connect(url: str, answer_bytes: int = MESSAGE_BYTES) -> Server:
    """A server by its URL; nothing is sent yet.

    Args:
        answer_bytes: the largest message to be received.

    Raises:
        InputError: not the URL of a server, or a package that gRPC needs is missing.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme = host = port = None
    if scheme not in PORTS or not host or parts.query or parts.fragment or parts.username:
        raise InputError(f"server {url!r}: expected grpc://HOST:8500 or http://HOST:8501")
    place = f"{f'[{host}]' if ':' in host else host}:{port or PORTS[scheme]}"
    if scheme == "grpc":
        try:
            from pipeline.serving import grpc_client
        except ModuleNotFoundError as error:
            raise InputError(
                f"server {url}: gRPC needs {error.name}: python -m pip install -r requirements-serving.txt; http:// "
                "needs nothing more"
            ) from error
        return grpc_client.connect(url, place, answer_bytes)
    from pipeline.serving import rest_client

    return rest_client.connect(url, f"{scheme}://{place}{parts.path.rstrip('/')}")


def check_export(server: Server, contract: Manifest, part: str, timeout: float = TIMEOUT_SECONDS) -> None:
    """Raise InputError unless the server has this very part of the export, by the id that its signatures tell."""
    where = f"{server.url}: {part}"
    try:
        found = _patiently(lambda left: server.signatures(part, contract.version, left), timeout)
    except ServingError as error:
        if error.code == status.NOT_FOUND:
            raise InputError(f"{where}: {_what_is_there(server, contract, part, timeout)}") from error
        raise InputError(f"{where}: {_explained(error)}") from error
    ids = [name.removeprefix(manifest.ID_SIGNATURE) for name in found if name.startswith(manifest.ID_SIGNATURE)]
    if ids != [contract.export_id]:
        there = f"export {ids[0]}" if ids else "no export of this toolkit, or of an older one"
        raise InputError(
            f"{where} is {there}; the manifest in {contract.folder} is of export {contract.export_id}: copy manifests/ "
            "and tokenizer/ of what is served"
        )
    for name, described in contract.signatures[part].items():
        expected = tuple({s.name: (s.dtype, s.shape) for s in specs} for specs in (described.inputs, described.outputs))
        if found.get(name) != expected:
            raise InputError(f"{where}: {name} has {found.get(name)}, the manifest says {expected}")


def _what_is_there(server: Server, contract: Manifest, part: str, timeout: float) -> str:
    try:
        there = server.versions(part, timeout)
    except ServingError:
        there = []
    if not there:
        return "the server has no such model; python -m pipeline.serving config writes the list of them"
    return (
        f"the server has version {', '.join(map(str, there))}, the manifest in {contract.folder} is version "
        f"{contract.version}: copy the served version's manifest here, or choose with --version"
    )


def function(
    server: Server, contract: Manifest, part: str, name: str, timeout: float = TIMEOUT_SECONDS
) -> Callable[..., dict]:
    """One signature on a server as a function of named arrays, checked against the manifest before anything is sent.

    Raises:
        InputError: no such signature; and in calls, arrays that do not fit or a server that did not answer.
    """
    if name not in contract.signatures[part]:
        raise InputError(f"{contract.folder}: {part} has no signature {name!r}")
    described, where = contract.signatures[part][name], f"{part}/{name}"
    attempts = 1 if (part, name) == NOT_REPEATABLE else ATTEMPTS

    def call(**inputs) -> dict[str, np.ndarray]:
        fitting = arrays.fit(described.inputs, inputs, where)

        def ask(left):
            return server.predict(part, contract.version, name, fitting, described.outputs, left)

        try:
            outputs = _patiently(ask, timeout, attempts)
        except ServingError as error:
            raise InputError(f"{server.url}: {where}: {_explained(error)}") from error
        for spec in described.outputs:
            value = outputs.get(spec.name)
            if value is None or not arrays.fits(spec, value):
                told = "nothing" if value is None else f"{value.dtype.name}{list(value.shape)}"
                raise InputError(
                    f"{server.url}: {where}: {spec.name} should be {spec.dtype}{list(spec.shape)}, found {told}"
                )
        return outputs

    return call


def _patiently(ask: Callable[[float], object], timeout: float, attempts: int = ATTEMPTS):
    """`ask(seconds left)`, again after longer and longer waits where the server says that it did nothing."""
    end = time.monotonic() + timeout
    for attempt in range(attempts):
        try:
            return ask(max(end - time.monotonic(), 0.001))
        except ServingError as error:
            # By chance, so that many clients do not come back all at once.
            wait = min(FIRST_WAIT_SECONDS * 2**attempt, LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0)
            wait = max(wait, error.retry_after or 0)
            last = attempt + 1 == attempts or time.monotonic() + wait >= end
            if last or error.code not in PASSING or "larger than max" in error.text:
                raise
            time.sleep(wait)


def _explained(error: ServingError) -> str:
    """An error in one line, with what to do about it."""
    line = " ".join(str(error).split())
    hints = [hint for text, hint in HINTS.items() if text in error.text] or [HINTS_BY_CODE.get(error.code)]
    return f"{line}; {hints[0]}" if hints[0] else line


def largest_answer(contract: Manifest) -> int:
    """Bytes of the largest answer of an export over gRPC, and some to spare; at least gRPC's own limit."""
    # A picture as PNG is hardly ever larger than its pixels.
    png = max(3 * size.height * size.width for size in contract.spec.sizes) + SPARE_BYTES
    signatures = [signature for part in contract.signatures.values() for signature in part.values()]
    needed = [message_bytes(signature.outputs, png) + SPARE_BYTES for signature in signatures]
    return max(MESSAGE_BYTES, *needed)


def message_bytes(specs: tuple[TensorSpec, ...], string_bytes: int = 0) -> int:
    """Bytes that the values of tensors take in a message of TensorFlow Serving at most; unknown sizes count as 1.

    Values lie in typed fields: floats as they are, integers in a byte for every 7 bits, so that a pixel takes 1 or 2.
    """
    widest = {"uint8": 2, "bool": 1, "int32": 10, "string": string_bytes}
    return sum(math.prod(n or 1 for n in spec.shape) * widest.get(spec.dtype, 4) for spec in specs)
