"""Checkpoint to SavedModels: build one part at a time, write aside, reload, compare, rename.

An export is built in a hidden sibling folder. Each part is saved, run live, freed, reloaded, run again and
compared; only when all parts agree do renames make it visible, the manifest last. A killed or failed export
leaves nothing that a reader or a server would load.
"""

import contextlib
import ctypes
import datetime
import gc
import importlib.metadata
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from models import endpoints, layers, text_encoder, unet, vae
from models.config import ModelConfig
from models.errors import InputError
from models.export_spec import ExportSpec
from pipeline import manifest, precision
from pipeline.checkpoints.source import Source
from pipeline.compare import Difference, compare
from pipeline.manifest import Manifest, Signature
from pipeline.prompts import tokenizer
from pipeline.sampling import samplers, schedules
from pipeline.savedmodel import publish, warmup_records

# What users name -> part.
COMPONENTS = {"text_encoder": "text_encoder", "unet": "diffusion_model", "decoder": "decoder"}
TOKENIZER_FILES = (
    *("vocab.json", "merges.txt", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
# PSNR in dB of the reloaded export against the live model, below which nothing is published.
RELOAD_BARS = {"float32": 80.0, "bfloat16": 40.0, "float16": 50.0}


def export(
    source: Source,
    output_dir: Path,
    spec: ExportSpec,
    jit_components: tuple[str, ...] = (),
    version: int | None = None,
    image_encoder: bool = False,
    warmup_xla: bool = False,
    compare_float32: bool = True,
) -> Manifest:
    """Write one version of an export.

    Args:
        output_dir: the export's folder, e.g. exports/emoji.
        jit_components: names of COMPONENTS that also get XLA twins, `denoise_xla` and so on.
        version: None takes the highest existing one + 1.
        image_encoder: also write the autoencoder's other half, which image to image needs.
        warmup_xla: warm-up records for the XLA twins too; a server without XLA then refuses to load the export.
        compare_float32: in half precision, run each part in float32 as well, which takes the memory of float32.

    Returns:
        The manifest, as a reader would get it.

    Raises:
        InputError: whatever makes the export impossible; nothing is left behind.
    """
    spec.check(source.config)
    if image_encoder and not source.encodes_images:
        raise InputError(f"{source.name} has no image encoder; leave --image_encoder out")
    if spec.max_steps < source.config.defaults.num_steps:
        print(f"notice: --max_steps {spec.max_steps} is below the default of {source.config.defaults.num_steps} steps")
    empty_tokens = _empty_tokens(source)
    for notice in _sampler_notices(source.config):
        print(f"notice: {notice}")
    output_dir = output_dir.absolute()
    publish.check_path(output_dir)
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        with publish.lock(output_dir), publish.workspace(output_dir) as work:
            version = publish.next_version(output_dir, version)
            parts = builders(source, spec, empty_tokens, image_encoder)
            exact = {}
            if compare_float32 and spec != spec.exact and source.learned:
                exact = builders(source, spec.exact, empty_tokens, image_encoder)
            result = _write(source, work, spec, jit_components, version, parts, exact, warmup_xla)
            publish.publish(work, output_dir, result)
    except (
        OSError,
        tf.errors.ResourceExhaustedError,
        tf.errors.PermissionDeniedError,
        tf.errors.UnknownError,
    ) as error:
        reason = error.message if isinstance(error, tf.errors.OpError) else error.strerror or str(error)
        if isinstance(error, OSError) and error.filename:
            reason += f" ({error.filename})"
        raise InputError(f"{output_dir}: cannot write the export: {reason.splitlines()[0]}") from error
    return manifest.read(output_dir, version)


def _sampler_notices(config: ModelConfig) -> list[str]:
    """About the default sampler, and about DDIM, which serving_default runs. Raises InputError for an unknown one."""
    scheduler, chosen = config.scheduler, config.defaults.sampler
    name, notice = samplers.default_sampler(scheduler)
    own = [notice] if notice and name == chosen else []
    return own + [line for name in dict.fromkeys([chosen, "ddim"]) for line in samplers.notices(name, scheduler)]


def _empty_tokens(source: Source) -> np.ndarray:
    """The empty prompt's ids int32[77] for the first text encoder; a vocabulary that does not fit is an InputError."""
    found = []
    for folder, encoder in zip(source.tokenizers.values(), source.config.text_encoders, strict=True):
        found.append(tokenizer.load(folder, encoder.pad_token or tokenizer.EOS).encode("").ids)
        highest, rows = int(found[-1].max()), encoder.vocab_size
        if highest >= rows:
            raise InputError(f"{folder}: makes token id {highest}, but the text encoder has {rows} ids")
    return found[0]


def _write(
    source,
    work: Path,
    spec,
    jit_components,
    version: int,
    parts: dict[str, Callable],
    exact: dict[str, Callable],
    warmup_xla: bool,
) -> Manifest:
    for target, folder in source.tokenizers.items():
        (work / target).mkdir()
        for name in TOKENIZER_FILES:
            if (folder / name).exists():
                shutil.copyfile(folder / name, work / target / name)
        if source.embeddings:
            ids = json.dumps({added.token: added.ids for added in source.embeddings}, ensure_ascii=False)
            (work / target / tokenizer.ADDED_FILE).write_text(ids, encoding="utf-8")
    jit_parts = {COMPONENTS[name] for name in jit_components}
    signatures, differences, rounding, twins = {}, {}, {}, []
    export_id = uuid.uuid4().hex
    with _graphs_as_traced():
        for part, build in parts.items():
            folder = work / part / str(version)
            expected = _run_part(part, exact[part], source.config) if part in exact else {}
            jit = part in jit_parts
            signatures[part], live = _save_part(build, folder, source.config, jit, warmup_xla, export_id)
            outputs = {name: arrays for name, _, arrays in live}
            precision.check_finite(part, outputs, spec.dtype)
            rounding |= precision.differences(part, expected, outputs, spec.precision)
            differences |= _differences(folder, live, RELOAD_BARS[spec.dtype])
            twins += [f"{part}/{name}" for name in signatures[part] if name.endswith("_xla")]
    files = {str(p.relative_to(work)): manifest.sha256(p) for p in sorted(work.rglob("*")) if p.is_file()}
    result = Manifest(
        format=manifest.FORMAT,
        export_id=export_id,
        version=version,
        checkpoint=source.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        spec=spec,
        config=source.config,
        loras=source.loras,
        embeddings=source.embeddings,
        vae=source.vae,
        clip_skip=source.clip_skip,
        zero_unconditional=source.config.force_zeros_for_empty_prompt,
        xla_signatures=tuple(twins),
        signatures=signatures,
        reload_difference=differences,
        float32_difference=rounding,
        versions={name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy", "tokenizers")},
        files=files,
    )
    manifest.check_chain(result)
    (work / "manifests").mkdir()
    (work / "manifests" / f"{version}.json").write_text(manifest.dumps(result), encoding="utf-8")
    return result


def builders(source: Source, spec: ExportSpec, empty_tokens, image_encoder: bool) -> dict[str, Callable]:
    """Part -> function that builds and fills its layers: () -> ({name: variable to save}, endpoints)."""
    config, dtype = source.config, spec.dtype

    def store(model):
        if spec.weights == "int8":
            layers.quantise_network(model)
        if spec.target == "cpu":
            layers.tune_network_for_cpu(model)

    def build_text_encoder():
        models = [text_encoder.TextEncoder(encoder, dtype) for encoder in config.text_encoders]
        for model, component in zip(models, ("text_encoder", "text_encoder_2"), strict=False):
            _fill(source, component, [model])
            store(model)
        return _variables(*models), endpoints.text_encoder(models, config, spec, empty_tokens)

    def build_diffusion_model():
        model = unet.UNet(config.unet, dtype)
        _fill(source, "unet", [model])
        store(model)
        schedule = schedules.alphas_cumprod(config.scheduler)
        ddim = samplers.resolved("ddim", config.scheduler)
        return _variables(model), endpoints.diffusion_model(model, config, spec, ddim, schedule, _share)

    def build_decoder():
        model = vae.VAEDecoder(config.vae, dtype)
        # The file holds both halves and must be used up; only the decoder is kept.
        _fill(source, "vae", [model, vae.VAEEncoder(config.vae, dtype)])
        store(model)
        return _variables(model), endpoints.decoder(model, config, spec, _share)

    def build_image_encoder():
        model = vae.VAEEncoder(config.vae, dtype)
        _fill(source, "vae", [vae.VAEDecoder(config.vae, dtype), model])
        store(model)
        return _variables(model), endpoints.image_encoder(model, config, spec)

    return {
        "text_encoder": build_text_encoder,
        "diffusion_model": build_diffusion_model,
        "decoder": build_decoder,
        **({"image_encoder": build_image_encoder} if image_encoder else {}),
    }


def _variables(*models) -> dict:
    """Name in the SavedModel -> variable; those of a second model have its number in front."""
    prefixes = ("", *(f"{number}." for number in range(2, len(models) + 1)))
    return {
        prefix + variable.path.replace("/", "."): variable.value
        for prefix, model in zip(prefixes, models, strict=True)
        for variable in model.variables
    }


def _fill(source: Source, component: str, layers: list) -> None:
    print(f"{component}: loading weights", flush=True)
    ignored = source.fill(component, layers)
    if ignored:
        print(f"{component}: ignored: {', '.join(ignored)}")


def _share(function):
    """One traced body for all signatures that call it."""
    return tf.function(function, autograph=False)


def _run_part(part: str, build: Callable, config: ModelConfig) -> dict[str, dict[str, np.ndarray]]:
    """Run what `precision` compares: {signature name: outputs}. What holds weights is local, as in `_save_part`."""
    print(f"{part}: in float32, to compare", flush=True)
    # What loading says is said when the part itself is loaded.
    with contextlib.redirect_stdout(None):
        _, made = build()
    chosen = [endpoint for endpoint in made if endpoint.name in precision.COMPARED]
    results = {e.name: concrete_function(e)(**_tensors(_example(e, config))) for e in chosen}
    outputs = {name: {k: v.numpy() for k, v in found.items()} for name, found in results.items()}
    del made, chosen, results
    release_memory()
    return outputs


def _save_part(build: Callable, folder: Path, config: ModelConfig, jit: bool, warmup_xla: bool, export_id: str):
    """Save one part and run it live: ({signature name: Signature}, [(name, inputs, outputs)]).

    Everything that holds weights is local to this function, so that they are freed when it returns.
    """
    variables, made = build()
    module = tf.Module()
    module.weights = variables
    publish.check_space(folder, sum(v.dtype.size * int(np.prod(v.shape)) for v in variables.values()))
    functions = {e.name: concrete_function(e) for e in made}
    described = {e.name: Signature(e.inputs, e.outputs) for e in made}
    for endpoint in made:
        if jit and endpoint.compiled_variant:
            functions[f"{endpoint.name}_xla"] = concrete_function(endpoint, jit=True)
            described[f"{endpoint.name}_xla"] = described[endpoint.name]
    print(f"{folder.parent.name}: saving {', '.join(functions)}", flush=True)
    # Gradients through an export are of no use, and tracing them takes time.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    # A server shows the names of its signatures: that is how a client knows which export it talks to.
    identity = tf.function(lambda: {"export_id": tf.constant(export_id)}, autograph=False).get_concrete_function()
    every = {**functions, f"{manifest.ID_SIGNATURE}{export_id}": identity}
    tf.saved_model.save(module, str(folder), signatures=every, options=options)
    examples = {e.name: _example(e, config) for e in made}
    twins = {f"{name}_xla": value for name, value in examples.items() if f"{name}_xla" in functions}
    warmup_records.write(folder, examples | twins if warmup_xla else examples)
    live = []
    for endpoint in made:
        if endpoint.name != "serving_default" and not endpoint.png:
            inputs = examples[endpoint.name]
            outputs = {k: v.numpy() for k, v in functions[endpoint.name](**_tensors(inputs)).items()}
            live.append((endpoint.name, inputs, outputs))
    return described, live


def concrete_function(endpoint: endpoints.Endpoint, jit: bool = False):
    """An endpoint as a concrete function with named inputs and outputs.

    Shape guards and checks sit outside the compiled body: XLA would compile anew for another shape, and cannot raise.
    """
    body = tf.function(endpoint.function, jit_compile=True, autograph=False) if jit else endpoint.function

    def call(**inputs):
        inputs = {spec.name: tf.ensure_shape(inputs[spec.name], spec.shape) for spec in endpoint.inputs}
        if endpoint.preconditions is not None:
            with tf.control_dependencies(_assertions(endpoint.preconditions(**inputs))):
                inputs = {name: tf.identity(value) for name, value in inputs.items()}
        drawn = {spec.name: tf.random.normal(spec.shape, dtype=spec.dtype) for spec in endpoint.noise_inputs}
        outputs = body(**inputs, **drawn)
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


def _example(endpoint: endpoints.Endpoint, config: ModelConfig) -> dict[str, np.ndarray]:
    """Inputs to compare two runs of an endpoint, and to warm it up: noise, random tokens, one row of a steps table."""
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


def _tensors(inputs: dict[str, np.ndarray]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(value) for name, value in inputs.items()}


def _reload(folder: Path, live: list) -> Iterator[tuple[str, dict, dict]]:
    """Run the saved part on the live model's inputs: (signature, live outputs, reloaded outputs)."""
    release_memory()
    loaded = tf.saved_model.load(str(folder))
    for name, inputs, outputs in live:
        again = loaded.signatures[name](**_tensors(inputs))
        yield name, outputs, {k: v.numpy() for k, v in again.items()}
    del loaded, again
    release_memory()


def _differences(folder: Path, live: list, bar: float) -> dict[str, Difference]:
    """The saved part against the live model: {part/signature: difference}."""
    found = {}
    for name, before, after in _reload(folder, live):
        where = f"{folder.parent.name}/{name}"
        found[where] = compare(before, after)
        _report(where, found[where], bar)
    return found


@contextlib.contextmanager
def _graphs_as_traced():
    """Functions run unoptimised: each runs once to be compared, and optimising it would take longer than running it."""
    name = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(name, False)
    tf.config.optimizer.set_experimental_options({name: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


def _report(name: str, difference: Difference, bar: float) -> None:
    psnr = "equal" if difference.psnr is None else f"PSNR {difference.psnr:.1f} dB"
    print(f"{name}: reloaded against live: max abs {difference.max_abs:.3g}, {psnr}", flush=True)
    if difference.psnr is not None and not difference.psnr >= bar:
        raise InputError(f"{name}: the reloaded export differs from the live model: {psnr}, at least {bar:g} expected")


def release_memory() -> None:
    """Give freed weights back to the system, so that the next part does not come on top of them."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
