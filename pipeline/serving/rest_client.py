"""A server of TensorFlow Serving's protocol over REST, in the columnar format. No TensorFlow."""

import base64
import binascii
import json

import numpy as np
import urllib3

from models.export_spec import TensorSpec
from pipeline.serving import protocol, status
from pipeline.serving.status import ServingError

CONNECT_SECONDS = 10.0
CODES = {number: code for code, number in reversed(status.HTTP.items())}


def connect(url: str, base: str) -> protocol.Server:
    """A server at SCHEME://HOST:PORT; connects with the first call. See `pipeline.serving.protocol.Server`."""
    pool = urllib3.PoolManager(maxsize=16, retries=False)

    def ask(method: str, path: str, seconds: float, body: dict | None = None):
        timeout = urllib3.Timeout(connect=min(CONNECT_SECONDS, seconds), read=seconds)
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            answer = pool.request(method, f"{base}/v1/models/{path}", body=data, timeout=timeout)
        except urllib3.exceptions.ReadTimeoutError as error:
            raise ServingError(status.DEADLINE_EXCEEDED, f"no answer within {seconds:.0f} s") from error
        except urllib3.exceptions.HTTPError as error:
            raise ServingError(status.UNAVAILABLE, str(error)) from error
        if answer.status != 200:
            raise _error(answer)
        try:
            return json.loads(answer.data)
        except ValueError as error:
            raise _unexpected(answer.data) from error

    def predict(model: str, version: int, signature: str, inputs: dict, outputs: tuple[TensorSpec, ...], seconds):
        body = {"signature_name": signature, "inputs": {name: array.tolist() for name, array in inputs.items()}}
        answer = ask("POST", f"{model}/versions/{version}:predict", seconds, body)
        try:
            found = answer["outputs"]
            # A single output comes without its name.
            named = found if len(outputs) > 1 else {outputs[0].name: found}
            return {spec.name: _array(named[spec.name], spec) for spec in outputs}
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise _unexpected(answer) from error

    def signatures(model: str, version: int, seconds: float):
        answer = ask("GET", f"{model}/versions/{version}/metadata", seconds)
        try:
            found = answer["metadata"]["signature_def"]["signature_def"]
            return {name: (_tensors(s["inputs"]), _tensors(s["outputs"])) for name, s in found.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unexpected(answer) from error

    def versions(model: str, seconds: float):
        answer = ask("GET", model, seconds)
        try:
            states = answer["model_version_status"]
            return sorted(int(s["version"]) for s in states if s["state"] == "AVAILABLE")
        except (KeyError, TypeError, ValueError) as error:
            raise _unexpected(answer) from error

    return protocol.Server(url, predict, signatures, versions)


def _error(answer) -> ServingError:
    try:
        text = json.loads(answer.data)["error"]
    except (ValueError, KeyError, TypeError):
        text = answer.data[:200].decode(errors="replace")
    advice = answer.headers.get("Retry-After", "")
    # Gateways have codes that servers do not: 502 is a server that is away.
    code = CODES.get(answer.status, status.UNAVAILABLE if answer.status == 502 else status.UNKNOWN)
    return ServingError(
        code, f"{text or answer.reason} (HTTP {answer.status})", int(advice) if advice.isdecimal() else None
    )


def _unexpected(answer) -> ServingError:
    return ServingError(status.UNKNOWN, f"not an answer of TensorFlow Serving: {str(answer)[:200]}")


def _array(value, spec: TensorSpec) -> np.ndarray:
    if spec.dtype != "string":
        return np.array(value, spec.dtype)
    flat = [base64.b64decode(item["b64"], validate=True) if isinstance(item, dict) else item.encode() for item in value]
    return np.array(flat, object)


def _tensors(described: dict) -> dict[str, tuple[str, tuple]]:
    return {
        name: (protocol.dtype(t["dtype"]), protocol.shape(int(d["size"]) for d in t["tensor_shape"].get("dim", ())))
        for name, t in described.items()
    }
