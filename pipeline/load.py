"""An export on disk to functions that run: reload, check, compile with XLA where asked.

    python -m pipeline.load --warm DIR --models exports/emoji

compiles ahead of time into a folder for --compile_cache, to be shipped with an image of the same kind of machine.
"""

if __name__ == "__main__":
    # Here, because the cache must be named before TensorFlow, which is imported below, starts.
    from pipeline.commands import warm

    warm.run()

import logging
import os
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf
from tensorflow.python.framework import ops

from models.errors import InputError
from models.export_spec import TensorSpec
from pipeline import manifest
from pipeline.compile_cache import start, started
from pipeline.manifest import (
    DEFAULT_JIT_COMPONENTS,
    JIT_COMPONENTS,
    Functions,
    Manifest,
    chain_signature,
    check_jit_components,
)
from pipeline.savedmodel import arrays

# Platforms whose TensorFlow plugins bring no XLA compiler (Apple Metal, DirectML).
PLATFORMS_WITHOUT_XLA = ("METAL", "DML")
NAME_GRID = 1 << 16  # see `_align_names`

log = logging.getLogger(__name__)


def local(
    export: Path | str | Manifest,
    jit_compile: bool = False,
    jit_components: tuple[str, ...] = DEFAULT_JIT_COMPONENTS,
    version: int | None = None,
    verify: bool = True,
    width: int | None = None,
    height: int | None = None,
    compile_cache: Path | str | None = None,
) -> Functions:
    """Load an export as the functions of a picture.

    Args:
        export: its folder, e.g. exports/emoji, or its manifest where that has been read already.
        jit_compile: compile `jit_components` with XLA. Compilation happens at the first call of each.
        jit_components: of text_encoder, unet, decoder.
        version: None takes the newest.
        verify: check every file's sha256 first.
        width, height: pixels, of an export with several sizes; None takes its first one.
        compile_cache: the folder that `pipeline.compile_cache.start` was given before TensorFlow was imported; where
            that was not done, one line says that it is too late.

    Raises:
        InputError: no such export or version, a damaged file, an unknown component.
    """
    check_jit_components(jit_components)
    contract = export if isinstance(export, Manifest) else manifest.read(export, version)
    if verify:
        manifest.verify(contract)
    if compile_cache is not None and jit_compile and not started():
        start(Path(compile_cache), contract.export_id)  # says that it is too late
    prepare_device()
    size = manifest.pick_size(contract, width, height)
    compiled = {name for component in jit_components for name in JIT_COMPONENTS[component]} if jit_compile else set()
    found = {name: chain_signature(contract.spec, name, size) for name in manifest.function_names(contract)}
    # In the same order in every process, see `_align_names`.
    loaded = {part: load_part(contract, part) for part in dict.fromkeys(part for part, _ in found.values())}
    functions = {
        name: function(contract, part, signature, name in compiled, loaded[part])
        for name, (part, signature) in found.items()
    }
    return Functions(**functions, manifest=contract, size=size)


def function(contract: Manifest, part: str, name: str, jit_compile: bool = False, loaded=None) -> Callable[..., dict]:
    """One signature of an export as a function of named arrays.

    Arrays are checked against the manifest (names, shapes, dtypes) before anything runs; Python and NumPy numbers
    are taken for scalars. The function keeps the loaded model, and so its variables, alive.

    Args:
        loaded: what `load_part` gave for this part; None loads it.

    Raises:
        InputError: no such signature, or a SavedModel that is not what the manifest says.
    """
    signatures = contract.signatures[part]
    if name not in signatures:
        raise InputError(f"{contract.folder}: {part} has no signature {name!r}; found {', '.join(signatures)}")
    described = signatures[name]
    if loaded is None:
        loaded = load_part(contract, part)
    twin = f"{name}_xla"
    compile_here = jit_compile and xla_available()
    if compile_here and twin in signatures:
        name, compile_here = twin, False
    concrete = loaded.signatures[name]
    _check_signature(contract, part, name, concrete)
    _align_names()
    run = concrete
    if compile_here:
        specs = {spec.name: tf.TensorSpec(spec.shape, spec.dtype, spec.name) for spec in described.inputs}
        run = tf.function(lambda **inputs: concrete(**inputs), jit_compile=True, autograph=False)
        run = run.get_concrete_function(**specs)
    where = f"{part}/{name}"

    def call(**inputs) -> dict:
        # A concrete function holds its variables weakly; `loaded` holds them for as long as this closure lives.
        assert loaded is not None
        return run(**to_tensors(described.inputs, inputs, where))

    return call


def load_part(contract: Manifest, part: str):
    """One SavedModel of an export, with its variables. Raises InputError when it cannot be loaded."""
    path = contract.path(part)
    _align_names()
    try:
        return tf.saved_model.load(str(path))
    except (OSError, tf.errors.OpError, ValueError) as error:
        raise InputError(f"{path}: cannot be loaded as a SavedModel ({str(error).splitlines()[0]})") from error


def _align_names() -> None:
    """Give what is made next the same names in every process, so that XLA's persistent cache knows it again.

    TensorFlow ends the names of functions with a count of all that was made before; this moves it to a round number.
    """
    while ops.uid() % NAME_GRID:
        pass


def to_tensors(specs: tuple[TensorSpec, ...], inputs: dict, where: str) -> dict[str, tf.Tensor]:
    """Arrays as tensors of exactly the dtypes and shapes of `specs`; InputError says which one does not fit and why."""
    arrays.check_names(specs, inputs, where)
    return {spec.name: _to_tensor(spec, inputs[spec.name], where) for spec in specs}


def _to_tensor(spec: TensorSpec, value, where: str) -> tf.Tensor:
    if not tf.is_tensor(value):
        return tf.constant(arrays.fit_one(spec, value, where))
    if value.dtype != tf.dtypes.as_dtype(spec.dtype):
        raise InputError(f"{where}: {spec.name} must be {spec.dtype}, found {value.dtype.name}")
    if not tf.TensorShape(spec.shape).is_compatible_with(value.shape):
        raise InputError(f"{where}: {spec.name} must have shape {list(spec.shape)}, found {list(value.shape)}")
    return value


def _check_signature(contract: Manifest, part: str, name: str, concrete) -> None:
    """The SavedModel must be what the manifest says: same names, shapes and dtypes."""
    described = contract.signatures[part][name]
    inputs = {s.name: (s.shape, s.dtype) for s in described.inputs}
    outputs = {s.name: (s.shape, s.dtype) for s in described.outputs}
    found_inputs = {k: (tuple(v.shape), v.dtype.name) for k, v in concrete.structured_input_signature[1].items()}
    found_outputs = {k: (tuple(v.shape), v.dtype.name) for k, v in concrete.structured_outputs.items()}
    for what, expected, found in (("inputs", inputs, found_inputs), ("outputs", outputs, found_outputs)):
        if expected != found:
            raise InputError(f"{contract.path(part)}: {name} has the {what} {found}, the manifest says {expected}")


def xla_available() -> bool:
    """Whether the device that would run has an XLA compiler; says so where it has not."""
    for device in accelerators():
        # Plugins register as plain GPUs; what they are is in the details.
        name = tf.config.experimental.get_device_details(device).get("device_name", "")
        for platform in PLATFORMS_WITHOUT_XLA:
            if platform in name.upper() or platform in device.device_type.upper():
                log.warning("%s has no XLA compiler: running without it", platform)
                return False
    return True


def accelerators() -> list:
    """Visible devices other than the CPU; TensorFlow places work on the first."""
    return [device for device in tf.config.get_visible_devices() if device.device_type != "CPU"]


def prepare_device() -> None:
    """Memory growth on GPUs, so that a picture does not take the whole card, and TF32 off, so that numbers match."""
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    for device in tf.config.get_visible_devices("GPU"):
        try:
            tf.config.experimental.set_memory_growth(device, True)
        except RuntimeError:
            log.warning("%s is in use already: its memory growth stays as it is", device.name)
