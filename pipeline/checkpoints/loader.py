"""Tensors in files to weights in our layers: a checked, lazy reader and one strict loader for every format.

Reading is lazy: a file's header is parsed and checked, tensors come one by one by `pread`, so loading needs
the memory of the model and of one tensor, never of the file.
"""

import dataclasses
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from tqdm import tqdm

from models.errors import InputError
from pipeline.checkpoints import keymaps

# safetensors' names; integer types appear in checkpoints only on ignored tensors (position_ids).
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
UNREAD_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4", "C64")
# What a file may make us hold before any of it is believed; the largest known checkpoint has 5,000 tensors.
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 20_000
MAX_AXES = 8
PICKLES = (".ckpt", ".bin", ".pt", ".pth")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


Source = Mapping[str, Tensor]  # source name -> tensor


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one .safetensors file, with its header checked against the file's size.

    Raises:
        InputError: not a safetensors file, truncated, or with offsets that do not describe the file.
    """

    def fail(why: str):
        raise InputError(f"{path}: not a usable safetensors file: {why}")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                fail(f"header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length), object_pairs_hook=_entries(MAX_TENSORS))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        fail(f"header is not JSON ({error})")
    if not isinstance(header, dict):
        fail("header is not a JSON object")
    header.pop("__metadata__", None)

    tensors, spans = {}, []
    for name, entry in header.items():
        try:
            shape, dtype, begin, end = _parse_entry(entry)
        except ValueError as error:
            fail(f"tensor {_short(name)} {error}")
        spans.append((begin, end, name))
        tensors[name] = Tensor(shape, dtype, _reader(path, 8 + length + begin, shape, dtype))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            fail(f"tensor {_short(name)} starts at byte {_short(begin)}, expected {position}")
        position = end
    if 8 + length + position != size:
        fail(f"expected {8 + length + position} bytes, found {size}; it may be truncated")
    return tensors


def _parse_entry(entry) -> tuple[tuple[int, ...], np.dtype, int, int]:
    """Shape, dtype, first byte and end of one tensor; ValueError says what is wrong with its entry."""
    try:
        name, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"has the entry {_short(entry)}") from error
    if name in UNREAD_DTYPES:
        raise ValueError(f"is of type {name}, which is not supported; get the file in float16, bfloat16 or float32")
    if not isinstance(name, str) or name not in DTYPES or not isinstance(shape, list) or len(shape) > MAX_AXES:
        raise ValueError(f"has the entry {_short(entry)}")
    if not all(type(n) is int for n in (*shape, begin, end)):
        raise ValueError(f"has the entry {_short(entry)}")
    dtype, count = np.dtype(DTYPES[name]), math.prod(shape)
    if min((0, *shape)) < 0 or end - begin != count * dtype.itemsize:
        raise ValueError(f"of shape {_short(shape)} and type {name} spans {_short(end - begin)} bytes")
    return tuple(shape), dtype, begin, end


def _short(value, most: int = 100) -> str:
    """A value in a message; what a file says may be megabytes long."""
    if isinstance(value, dict):
        value = {key[:most]: _cut(item, most) for key, item in list(value.items())[:most]}
    try:
        text = repr(_cut(value, most))
    except (ValueError, RecursionError):
        return "something that cannot be printed"
    return text if len(text) <= most else text[:most] + "..."


def _cut(value, most: int):
    return value[:most] if isinstance(value, list | str) else value


def read_metadata(path: Path) -> dict[str, str]:
    """The free text in the header of a file that `read_safetensors` accepts; {} where it has none."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata = header.get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def read_file(
    path: Path, read_pickle: Callable[[Path], dict[str, Tensor]] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and the text in its header.

    Args:
        read_pickle: reads a pickle, see `pipeline.checkpoints.pickles`; None refuses it.

    Raises:
        InputError: as `read_safetensors`; a pickle that is not to be read.
    """
    if path.suffix.lower() not in PICKLES:
        return read_safetensors(path), read_metadata(path)
    if read_pickle is None:
        raise refused_pickle(path, or_allow=True)
    return read_pickle(path), {}


def split_option(option: str) -> tuple[Path, str | None]:
    """FILE or FILE:TEXT from the command line to (FILE, TEXT or None); FILE may hold colons.

    Raises:
        InputError: no such file, or a pickle.
    """
    ends = [len(option), *(match.start() for match in re.finditer(":", option))]
    end = next((end for end in ends if Path(option[:end]).is_file()), None)
    if end is None:
        raise InputError(f"{option}: no such file")
    path = Path(option[:end])
    if path.suffix.lower() in PICKLES:
        raise refused_pickle(path)
    return path, option[end + 1 :] if end < len(option) else None


# A class that training left in published checkpoints; what it holds is not needed.
LEFT_OVER = "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
# Run where PyTorch and safetensors are installed: python -c PROGRAM FILE.ckpt FILE.safetensors
CONVERT = (
    "import sys, torch, safetensors.torch as s; "
    f'torch.serialization.add_safe_globals([(type("Inert", (), {{}}), "{LEFT_OVER}")]); '
    'd = torch.load(sys.argv[1], map_location="cpu", weights_only=True); d = d.get("state_dict", d); '
    "s.save_file({k: v.clone(memory_format=torch.contiguous_format) for k, v in d.items() if torch.is_tensor(v)}, "
    "sys.argv[2])"
)


def refused_pickle(path: Path, or_allow: bool = False) -> InputError:
    """The error for a pickle: why it is not read, and the command that makes a .safetensors file of it.

    Args:
        or_allow: the caller would read it, had it been told to by --allow_pickle.
    """
    # transformers calls its pickles otherwise than its safetensors files.
    stem = path.stem.replace("pytorch_model", "model") if path.stem.startswith("pytorch_model") else path.stem
    files = f"{shlex.quote(str(path))} {shlex.quote(str(path.with_name(stem + '.safetensors')))}"
    allow = "pass --allow_pickle, or " if or_allow else ""
    return InputError(
        f"{path}: pickle files can run code and are not read; {allow}convert it where PyTorch and safetensors are "
        f"installed: python -c '{CONVERT}' {files}"
    )


def _reader(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        array = np.empty(shape, dtype)
        view = memoryview(array.reshape(-1).view(np.uint8))
        done = 0
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise InputError(f"{path}: ended while a tensor was read")
                done += count
        finally:
            os.close(descriptor)
        return array

    return read


def _entries(most: int) -> Callable[[list], dict]:
    """A hook for JSON that refuses a key given twice, and objects without end while they are being parsed."""
    count = 0

    def hook(pairs: list) -> dict:
        nonlocal count
        count += 1
        if max(count, len(pairs)) > most:
            raise ValueError(f"it describes more than {most} tensors")
        result = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"duplicate keys: {_short(key)}")
            result[key] = value
        return result

    return hook


def read_kerascv(variables: Sequence, component: str) -> dict[str, Tensor]:
    """The weights of one of KerasCV's networks, named by their order.

    Args:
        variables: the `weights` of its Keras model, in its order.
        component: "text_encoder", "unet" or "vae" (the decoder).

    Raises:
        InputError: not as many variables as the table names.
    """
    names = keymaps.KERASCV_NAMES[component]
    if len(names) != len(variables):
        raise InputError(
            f"KerasCV's {component}: expected {len(names)} weights as in KerasCV 0.9, found {len(variables)}"
        )
    return {name: Tensor(tuple(v.shape), np.dtype(v.dtype), v.numpy) for name, v in zip(names, variables, strict=True)}


def load(layers: Sequence, source: Source, keymap: keymaps.KeyMap, where: str) -> list[str]:
    """Fill every variable of `layers` from `source`: total and strict.

    Args:
        layers: built layers; together they must use every tensor of the source.
        where: what the source is called in messages.

    Returns:
        The names that were ignored because the table says they carry no weights.

    Raises:
        InputError: listing all tensors that are unused, missing, assigned twice or of the wrong shape, or the
            first tensor that is not finite in the variable's dtype.
    """
    variables = {v.path.replace("/", "."): v for layer in layers for v in layer.variables}
    assignments, ignored, problems = plan(variables, source, keymap)
    if problems:
        raise InputError(f"{where}: " + "; ".join(problems))
    progress = tqdm(assignments.items(), desc=f"load {where}", unit="tensor", delay=2, leave=False)
    for name, (key, transform) in progress:
        array, variable = source[key].read(), variables[name]
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(TRANSFORMS[transform](array)).astype(variable.dtype, copy=False)
        if not np.isfinite(array).all():
            raise InputError(f"{where}: tensor {key} holds NaN or infinite values, or too large ones")
        variable.assign(array)
    return ignored


def plan(
    variables: Mapping, source: Source, keymap: keymaps.KeyMap
) -> tuple[dict[str, tuple[str, str]], list[str], list[str]]:
    """Match a source's names to variables, by names and shapes alone.

    Args:
        variables: LAYER.VARIABLE -> anything with a shape.

    Returns:
        ({our name: (source name, transform)}, names that were ignored, problems).
    """
    prefix = keymap.optional_prefix
    prefixed = [key for key in source if prefix and key.startswith(prefix)]
    assignments, ignored = {}, []
    unused, doubled, shapes, types = [], [], [], []
    for key, tensor in source.items():
        # A name without the prefix beside names with it is unknown, not a second spelling.
        bare = key
        if prefixed and not any(re.fullmatch(pattern, key) for pattern in keymap.beside_prefix):
            bare = key[len(prefix) :] if key.startswith(prefix) else None
        if bare is not None and any(re.fullmatch(pattern, bare) for pattern in keymap.ignored):
            ignored.append(key)
            continue
        found = keymaps.target(bare, keymap.rules) if bare is not None else None
        if found is None or found[0] not in variables:
            unused.append(key)
            continue
        name, transform = found
        expected = tuple(variables[name].shape)
        shape = _transformed_shape(tensor.shape, transform)
        if name in assignments:
            doubled.append(f"{key} and {assignments[name][0]}")
        elif tensor.dtype.kind not in "fV":
            types.append(f"{key} is {tensor.dtype}")
        elif shape != expected:
            shapes.append(f"{key} is {tensor.dtype} {list(tensor.shape)}, expected to fill {list(expected)}")
        assignments[name] = (key, transform)
    missing = sorted(set(variables) - set(assignments))
    lists = {"unused": unused, "missing": missing, "assigned twice": doubled, "wrong shape": shapes}
    lists["no floating-point numbers"] = types
    problems = [f"{len(names)} {what}: {some(names)}" for what, names in lists.items() if names]
    return assignments, ignored, problems


def _dense(array: np.ndarray) -> np.ndarray:
    return array.reshape(array.shape[:2]).T


TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "same": lambda array: array,
    "dense": _dense,
    "conv": lambda array: array.transpose(2, 3, 1, 0),
    "squeeze": lambda array: array.reshape(array.shape[-2:]),
}


def _transformed_shape(shape: tuple[int, ...], transform: str) -> tuple[int, ...] | None:
    """The shape after a transform; None when the transform does not apply."""
    if transform == "dense":
        return shape[1::-1] if len(shape) == 2 or (len(shape) == 4 and shape[2:] == (1, 1)) else None
    if transform == "conv":
        return (*shape[2:], shape[1], shape[0]) if len(shape) == 4 else None
    if transform == "squeeze":
        return shape[-2:] if shape[:-2] in ((), (1, 1)) and len(shape) >= 2 else None
    return shape


def some(names: Sequence[str], most: int = 500) -> str:
    """The names in one line; a checkpoint has fewer than `most`, but one line must not run for ever."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
