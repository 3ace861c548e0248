"""What both protocols give the client: a server as three functions, and types and shapes as it names them."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from models.export_spec import TensorSpec


@dataclasses.dataclass(frozen=True)
class Server:
    """One way to ask a server; all raise ServingError. Seconds count from the call."""

    url: str
    # (model, version, signature, {input: array}, its outputs, seconds) -> {output: array}
    predict: Callable[[str, int, str, dict[str, np.ndarray], tuple[TensorSpec, ...], float], dict[str, np.ndarray]]
    # (model, version, seconds) -> {signature: ({input: (dtype, shape)}, {output: (dtype, shape)})}; None: unknown size
    signatures: Callable[[str, int, float], dict[str, tuple[dict, dict]]]
    versions: Callable[[str, float], list[int]]  # (model, seconds) -> those that answer now


def dtype(name: str) -> str:
    """A dtype as TensorFlow's messages spell it, DT_FLOAT, as a manifest does: float32."""
    name = name.removeprefix("DT_").lower()
    return "float32" if name == "float" else name


def shape(sizes: Iterable[int]) -> tuple[int | None, ...]:
    """A shape as TensorFlow's messages spell it, with -1 for what is not known, as a manifest does, with None."""
    return tuple(None if size < 0 else size for size in sizes)
