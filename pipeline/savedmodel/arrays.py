"""Arrays against the tensors that a signature names: the one check before anything runs, here or on a server.

No TensorFlow.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from models.errors import InputError
from models.export_spec import TensorSpec


def fit(specs: tuple[TensorSpec, ...], inputs: Mapping, where: str) -> dict[str, np.ndarray]:
    """Arrays, or Python numbers for scalars, with exactly the names, dtypes and shapes of `specs`.

    Raises:
        InputError: says which one does not fit and why.
    """
    check_names(specs, inputs, where)
    return {spec.name: fit_one(spec, inputs[spec.name], where) for spec in specs}


def check_names(specs: tuple[TensorSpec, ...], names: Iterable[str], where: str) -> None:
    """Raise InputError unless the names are those of `specs`."""
    expected, names = {spec.name for spec in specs}, set(names)
    if names != expected:
        raise InputError(
            f"{where}: missing inputs {sorted(expected - names)}, unknown inputs {sorted(names - expected)}"
        )


def fit_one(spec: TensorSpec, value, where: str) -> np.ndarray:
    """As `fit`, for one tensor."""
    wanted, array = np.dtype(spec.dtype), np.asarray(value)
    # Whole numbers fit floats; floats never fit whole numbers. Wider types of a kind are narrowed.
    kinds = "fiu" if wanted.kind == "f" else "iu"
    if array.dtype.kind not in kinds:
        raise InputError(f"{where}: {spec.name} must be {spec.dtype}, found {array.dtype}")
    narrowed = array.astype(wanted)
    if wanted.kind in "iu" and not np.array_equal(narrowed, array):
        raise InputError(f"{where}: {spec.name} has values outside {spec.dtype}")
    if not fits(spec, narrowed):
        raise InputError(f"{where}: {spec.name} must have shape {list(spec.shape)}, found {list(array.shape)}")
    return narrowed


def fits(spec: TensorSpec, array: np.ndarray) -> bool:
    """Whether an array is what `spec` says; strings are arrays of objects."""
    same = array.ndim == len(spec.shape) and all(
        n is None or n == size for n, size in zip(spec.shape, array.shape, strict=True)
    )
    return same and array.dtype == (object if spec.dtype == "string" else np.dtype(spec.dtype))
