"""Endpoints as the signatures of a SavedModel: traced, saved, run and reloaded."""

import contextlib
import ctypes
import gc
from pathlib import Path

import numpy as np
import tensorflow as tf

from models.config import ModelConfig
from models.endpoints import Endpoint
from pipeline import manifest
from pipeline.sampling import samplers

Arrays = dict[str, np.ndarray]


def share(function):
    """Trace a body once for all signatures that call it."""
    return tf.function(function, autograph=False)


def save(folder: Path, variables: dict, functions: dict, export_id: str) -> None:
    """Write one SavedModel.

    Args:
        variables: name -> variable that the functions read.
        functions: signature -> concrete function.
        export_id: a server shows the names of its signatures, so a signature of this name tells its clients which
            export they talk to.
    """
    module = tf.Module()
    module.weights = variables
    identity = tf.function(lambda: {"export_id": tf.constant(export_id)}, autograph=False).get_concrete_function()
    signatures = {**functions, f"{manifest.ID_SIGNATURE}{export_id}": identity}
    # Gradients through an export are of no use, and tracing them takes time.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(module, str(folder), signatures=signatures, options=options)


def run(function, inputs: Arrays) -> Arrays:
    """Call a concrete function with arrays and return arrays."""
    outputs = function(**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in outputs.items()}


def run_reloaded(folder: Path, calls: dict[str, Arrays]) -> dict[str, Arrays]:
    """Load a SavedModel, call some of its signatures and free it again.

    Args:
        calls: signature -> inputs.

    Returns:
        signature -> outputs.
    """
    release_memory()
    loaded = tf.saved_model.load(str(folder))
    outputs = {name: run(loaded.signatures[name], inputs) for name, inputs in calls.items()}
    del loaded
    release_memory()
    return outputs


def concrete_function(endpoint: Endpoint, jit: bool = False):
    """Trace an endpoint as a concrete function with named inputs and outputs.

    Shape guards and checks sit outside the compiled body: XLA would compile anew for another shape, and cannot raise.
    """
    body = tf.function(endpoint.function, jit_compile=True, autograph=False) if jit else endpoint.function

    def call(**inputs):
        inputs = {spec.name: tf.ensure_shape(inputs[spec.name], spec.shape) for spec in endpoint.inputs}
        if endpoint.preconditions is not None:
            with tf.control_dependencies(_assertions(endpoint.preconditions(**inputs))):
                inputs = {name: tf.identity(value) for name, value in inputs.items()}
        noise = {spec.name: tf.random.normal(spec.shape, dtype=spec.dtype) for spec in endpoint.noise_inputs}
        outputs = body(**inputs, **noise)
        checks = [] if endpoint.postconditions is None else _assertions(endpoint.postconditions(**outputs))
        with tf.control_dependencies(checks):
            for name, image in endpoint.png.items():
                outputs[name] = tf.map_fn(tf.io.encode_png, outputs[image], fn_output_signature=tf.string)
            return {spec.name: tf.identity(outputs[spec.name]) for spec in endpoint.outputs}

    specs = {spec.name: tf.TensorSpec(spec.shape, spec.dtype, spec.name) for spec in endpoint.inputs}
    return tf.function(call, autograph=False).get_concrete_function(**specs)


def _assertions(checks: list[tuple]) -> list:
    # The bare operation: tf.debugging.Assert would add a conditional, which XLA may not compile.
    return [tf.raw_ops.Assert(condition=condition, data=[message]) for condition, message in checks]


def example_inputs(endpoint: Endpoint, config: ModelConfig) -> dict[str, np.ndarray]:
    """Make inputs to compare two runs of an endpoint, and to warm it up: noise, random tokens, one row of steps."""
    random = np.random.default_rng(0)
    inputs = {}
    for spec in endpoint.inputs:
        shape = [1 if n is None else n for n in spec.shape]
        inputs[spec.name] = random.standard_normal(shape).astype("float32")
        if "tokens" in spec.name:
            inputs[spec.name] = random.integers(config.text_encoder.vocab_size, size=shape).astype("int32")
        elif spec.name in ("memory", "guidance_rescale", "seed"):
            inputs[spec.name] = np.zeros(shape, spec.dtype)
        elif "weights" in spec.name:
            inputs[spec.name] = np.ones(shape, spec.dtype)
        elif spec.name == "steps":
            inputs[spec.name] = samplers.steps_table("ddim", config.scheduler, 1, shape[0])[1]
    replaced = {"first_step": np.int32(0), "last_step": np.int32(1), "num_steps": np.int32(1)}
    replaced["unconditional_guidance_scale"] = np.float32(7.5)
    for name in ("guidance_scale", "timestep"):
        if name in inputs:
            replaced[name] = np.full_like(inputs[name], {"guidance_scale": 7.5, "timestep": 500.0}[name])
    return {name: replaced.get(name, value) for name, value in inputs.items()}


@contextlib.contextmanager
def graphs_as_traced():
    """Run functions unoptimised: each runs once to be compared, and optimising it would take longer than running it."""
    name = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(name, False)
    tf.config.optimizer.set_experimental_options({name: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


def release_memory() -> None:
    """Give freed weights back to the system, so that the next part does not come on top of them."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
