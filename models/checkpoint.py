"""Checkpoints on disk to weights in our layers: reading per format, then one strict loader.

Reading is lazy: a file's header is parsed and checked, tensors come one by one by `pread`, so loading needs
the memory of the model and of one tensor, never of the file.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from tqdm import tqdm

from models import keymaps
from models.config import InputError, read_json

# safetensors' names; 8-byte and integer types appear in checkpoints only on ignored tensors (position_ids).
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
MAX_HEADER_BYTES = 16 << 20
PICKLES = (".ckpt", ".bin", ".pt", ".pth")
WEIGHT_NAMES = {"text_encoder": "model", "unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}
KNOWN_COMPONENTS = {"text_encoder", "tokenizer", "unet", "vae", "scheduler"}
IGNORED_COMPONENTS = {"safety_checker", "feature_extractor"}


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
            header = json.loads(file.read(length), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        fail(f"header is not JSON ({error})")
    if not isinstance(header, dict):
        fail("header is not a JSON object")
    header.pop("__metadata__", None)

    tensors, spans = {}, []
    for name, entry in header.items():
        try:
            dtype = np.dtype(DTYPES[entry["dtype"]])
            shape = tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            fail(f"tensor {name!r} has the entry {str(entry)[:100]}")
        count = 1
        for n in shape:
            count *= n
        if min((0, *shape)) < 0 or end - begin != count * dtype.itemsize:
            fail(f"tensor {name!r} of shape {list(shape)} and type {entry['dtype']} spans {end - begin} bytes")
        spans.append((begin, end, name))
        tensors[name] = Tensor(shape, dtype, _reader(path, 8 + length + begin, shape, dtype))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            fail(f"tensor {name!r} starts at byte {begin}, expected {position}")
        position = end
    if 8 + length + position != size:
        fail(f"expected {8 + length + position} bytes, found {size}; it may be truncated")
    return tensors


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


def _no_duplicates(pairs):
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate keys")
    return result


def read_diffusers(folder: Path, component: str, variant: str | None = None) -> dict[str, Tensor]:
    """The tensors of one component of a diffusers folder: one file, or shards listed by an index.json.

    Args:
        component: "text_encoder", "unet" or "vae".
        variant: file name infix to prefer, e.g. "fp16"; None prefers the plain file and falls back to fp16.

    Raises:
        InputError: no weights, only pickles, a missing shard, or a tensor in two shards.
    """
    directory, stem = folder / component, WEIGHT_NAMES[component]
    variants = ["", ".fp16"] if variant is None else [f".{variant}", ""]
    for infix in variants:
        single = directory / f"{stem}{infix}.safetensors"
        # Both spellings of a sharded variant's index occur.
        indexes = [directory / f"{stem}.safetensors.index{infix}.json"]
        indexes.append(directory / f"{stem}{infix}.safetensors.index.json")
        if single.exists():
            return read_safetensors(single)
        for index in indexes:
            if index.exists():
                return _read_shards(index)
    found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    pickles = [name for name in found if name.endswith(PICKLES)]
    if pickles:
        raise InputError(
            f"{directory / pickles[0]}: pickle files can run code and are not read; convert it with "
            "diffusers' save_pretrained(..., safe_serialization=True)"
        )
    raise InputError(
        f"{directory}: expected {stem}.safetensors, its .fp16 variant or {stem}.safetensors.index.json, found "
        f"{', '.join(found) or 'nothing'}"
    )


def _read_shards(index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index}: expected a weight_map from tensor names to file names")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise InputError(f"{index}: shard {shard!r} is not a plain file name")
        for name, tensor in read_safetensors(index.parent / shard).items():
            if weight_map.get(name) != shard:
                raise InputError(f"{index}: says {name!r} is in {weight_map.get(name)}, found it in {shard}")
            tensors[name] = tensor
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise InputError(f"{index}: lists tensors that its shards do not hold: {_some(missing)}")
    return tensors


def check_diffusers_folder(folder: Path) -> list[str]:
    """Refuse a folder that is no diffusers checkpoint; return what it holds that is not used.

    Raises:
        InputError: not a folder, a pickle or single file, components missing, or a component we do not build.
    """
    if folder.is_file():
        kind = "pickle files can run code and are not read" if folder.suffix in PICKLES else "single files are not read"
        raise InputError(f"{folder}: {kind}; expected a folder in diffusers' layout (model_index.json, unet/, ...)")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; expected a checkpoint in diffusers' layout")
    index = read_json(folder / "model_index.json")
    used = {name for name, value in index.items() if isinstance(value, list) and any(value)}
    unknown = sorted(used - KNOWN_COMPONENTS - IGNORED_COMPONENTS)
    if unknown:
        raise InputError(f"{folder / 'model_index.json'}: components not supported: {', '.join(unknown)}")
    missing = sorted(name for name in KNOWN_COMPONENTS if not (folder / name).is_dir())
    if missing:
        raise InputError(f"{folder}: expected the folders {', '.join(sorted(KNOWN_COMPONENTS))}; missing {missing}")
    return [f"{name}/" for name in sorted(IGNORED_COMPONENTS) if (folder / name).exists()]


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
            first tensor that is not finite.
    """
    variables = {v.path.replace("/", "."): v for layer in layers for v in layer.variables}
    plan, ignored, problems = _plan(variables, source, keymap)
    if problems:
        raise InputError(f"{where}: " + "; ".join(problems))
    progress = tqdm(plan.items(), desc=f"load {where}", unit="tensor", delay=2, leave=False)
    for name, (key, transform) in progress:
        array = source[key].read()
        if not np.isfinite(array).all():
            raise InputError(f"{where}: tensor {key} holds NaN or infinite values")
        variable = variables[name]
        variable.assign(np.ascontiguousarray(TRANSFORMS[transform](array)).astype(variable.dtype, copy=False))
    return ignored


def _plan(variables: Mapping, source: Source, keymap: keymaps.KeyMap):
    """Match source names to variables: ({our name: (source name, transform)}, ignored names, problems)."""
    prefix = keymap.optional_prefix
    prefixed = [key for key in source if prefix and key.startswith(prefix)]
    plan, ignored = {}, []
    unused, doubled, shapes = [], [], []
    for key, tensor in source.items():
        # A name without the prefix beside names with it is unknown, not a second spelling.
        bare = key[len(prefix) :] if prefixed and key.startswith(prefix) else None if prefixed else key
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
        if name in plan:
            doubled.append(f"{key} and {plan[name][0]}")
        elif shape != expected or tensor.dtype.kind not in "fV":
            shapes.append(f"{key} is {tensor.dtype} {list(tensor.shape)}, expected to fill {list(expected)}")
        plan[name] = (key, transform)
    missing = sorted(set(variables) - set(plan))
    lists = {"unused": unused, "missing": missing, "assigned twice": doubled, "wrong shape": shapes}
    problems = [f"{len(names)} {what}: {_some(names)}" for what, names in lists.items() if names]
    return plan, ignored, problems


def _dense(array: np.ndarray) -> np.ndarray:
    return array.reshape(array.shape[:2]).T


TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "same": lambda array: array,
    "dense": _dense,
    "conv": lambda array: array.transpose(2, 3, 1, 0),
    "squeeze": lambda array: array.reshape(array.shape[2:]),
}


def _transformed_shape(shape: tuple[int, ...], transform: str) -> tuple[int, ...] | None:
    """The shape after a transform; None when the transform does not apply."""
    if transform == "dense":
        return shape[1::-1] if len(shape) == 2 or (len(shape) == 4 and shape[2:] == (1, 1)) else None
    if transform == "conv":
        return (*shape[2:], shape[1], shape[0]) if len(shape) == 4 else None
    if transform == "squeeze":
        return shape[2:] if len(shape) == 4 and shape[:2] == (1, 1) else None
    return shape


def _some(names: Sequence[str], most: int = 500) -> str:
    """The names in one line; a checkpoint has fewer than `most`, but one line must not run for ever."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
