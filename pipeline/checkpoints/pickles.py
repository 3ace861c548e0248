"""Weights in pickles (.ckpt, .bin, .pt): read only when asked for, and only by PyTorch's reader that runs nothing."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from models.errors import InputError
from pipeline.checkpoints.loader import LEFT_OVER, Tensor

DTYPES = {
    **{name: name for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")},
    "bfloat16": ml_dtypes.bfloat16,
}


class Inert:
    """Stands in for `LEFT_OVER`: takes its state and does nothing."""


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, found in its `state_dict` where it has one; everything else is left out.

    PyTorch's `weights_only` reader builds tensors and plain containers, and refuses to call anything else.

    Raises:
        InputError: PyTorch is not installed; the file cannot be read, wants to call something, or holds no tensors.
    """
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path}: --allow_pickle needs PyTorch, which cannot be imported ({error}); install it with: "
            "python -m pip install torch"
        ) from error

    def fail(why: str, error: Exception | None = None):
        raise InputError(f"{path}: {why}") from error

    try:
        with torch.serialization.safe_globals([(Inert, LEFT_OVER)]):
            # A file of the old format is no archive that could be mapped into memory.
            mapped = zipfile.is_zipfile(path)
            content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error).lower() and "unsupported" not in str(error).lower():
            fail("not a usable PyTorch file; it may be damaged or truncated", error)
        fail("holds more than tensors, which could run code when read, so it is not read", error)
    except OSError as error:
        fail(f"cannot be read ({error.strerror or error})", error)
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        fail("not a usable PyTorch file; it may be damaged or truncated", error)
    tensors = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(tensors, dict) or not any(torch.is_tensor(value) for value in tensors.values()):
        fail("expected named tensors, or a state_dict of them; found none")
    named = {str(name): value for name, value in tensors.items() if torch.is_tensor(value)}
    unread = next((name for name, value in named.items() if _dtype(value) is None), None)
    if unread is not None:
        fail(f"tensor {unread!r} is of type {named[unread].dtype}, which is not supported")
    return {name: Tensor(tuple(value.shape), _dtype(value), _reader(value)) for name, value in named.items()}


def _dtype(tensor) -> np.dtype | None:
    name = str(tensor.dtype).removeprefix("torch.")
    return np.dtype(DTYPES[name]) if name in DTYPES else None


def _reader(tensor) -> Callable[[], np.ndarray]:
    dtype = _dtype(tensor)

    def read() -> np.ndarray:
        plain = tensor.detach().contiguous()
        if dtype == ml_dtypes.bfloat16:
            # NumPy has no such type of its own: the same 16 bits under ml_dtypes' name.
            import torch

            return plain.view(torch.uint16).numpy().view(dtype)
        return plain.numpy()

    return read


def reader(allowed: bool) -> Callable[[Path], dict[str, Tensor]] | None:
    """`read` where pickles are allowed, else None: what readers of checkpoints take."""
    return read if allowed else None
