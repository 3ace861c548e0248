"""Checkpoint to SavedModels: build one part at a time, write aside, reload, compare, rename.

An export is built in a hidden sibling folder. Each part is saved, run live, freed, reloaded, run again and
compared; only when all parts agree do renames make it visible, the manifest last. A killed or failed export
leaves nothing that a reader or a server would load.
"""

import datetime
import importlib.metadata
import json
import logging
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from models import endpoints, layers, text_encoder, unet, vae
from models.config import ModelConfig
from models.errors import InputError, first_line
from models.export_spec import ExportSpec
from pipeline import manifest
from pipeline.checkpoints.source import Source
from pipeline.compare import Difference, compare
from pipeline.manifest import Manifest, Signature
from pipeline.prompts import tokenizer
from pipeline.sampling import samplers, schedules
from pipeline.savedmodel import publish, signatures, warmup_records
from pipeline.savedmodel.signatures import Arrays

# What users name -> part.
COMPONENTS = {"text_encoder": "text_encoder", "unet": "diffusion_model", "decoder": "decoder"}
TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# PSNR in dB of the reloaded export against the live model, below which nothing is published.
RELOAD_BARS = {"float32": 80.0, "bfloat16": 40.0, "float16": 50.0}
# Signatures that show a part's numbers as they are: once through the network, nothing rounded to pixels.
COMPARED_WITH_FLOAT32 = ("encode", "unet", "decode_float", "encode_image")
log = logging.getLogger(__name__)


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
        jit_components: names of COMPONENTS whose functions are also stored compiled, as `denoise_xla` and so on.
        version: None takes the highest existing one + 1.
        image_encoder: also write the autoencoder's other half, which image to image needs.
        warmup_xla: warm-up records for the compiled ones too; a server without XLA then refuses to load the export.
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
        log.warning("--max_steps %d is below the default of %d steps", spec.max_steps, source.config.defaults.num_steps)
    empty_tokens = _empty_tokens(source)
    for notice in _sampler_notices(source.config):
        log.warning("%s", notice)
    output_dir = output_dir.absolute()
    publish.check_path(output_dir)
    compiled = {COMPONENTS[name] for name in jit_components}
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        with publish.lock(output_dir), publish.workspace(output_dir) as work:
            publish.remove_interrupted(output_dir)
            version = publish.next_version(output_dir, version)
            publish.check_fits(output_dir, spec, source.config.family, compiled, image_encoder)
            parts = builders(source, spec, empty_tokens, image_encoder)
            exact = {}
            if compare_float32 and spec != spec.exact and source.learned:
                exact = builders(source, spec.exact, empty_tokens, image_encoder)
            result = _write(source, work, spec, compiled, version, parts, exact, warmup_xla)
            publish.publish(work, output_dir, result)
    except (
        OSError,
        tf.errors.ResourceExhaustedError,
        tf.errors.PermissionDeniedError,
        tf.errors.UnknownError,
    ) as error:
        raise InputError(f"{output_dir}: cannot write the export: {_reason(error)}") from error
    return manifest.read(output_dir, version)


def _reason(error: OSError | tf.errors.OpError) -> str:
    """Return what the system or TensorFlow says, in one line."""
    if isinstance(error, tf.errors.OpError):
        return next(iter((error.message or "").splitlines()), "") or type(error).__name__
    reason = error.strerror or first_line(error)
    return f"{reason} ({error.filename})" if error.filename else reason


def _sampler_notices(config: ModelConfig) -> list[str]:
    """List notices about the default sampler and DDIM, which serving_default runs; refuse an unknown sampler."""
    scheduler, default = config.scheduler, config.defaults.sampler
    name, notice = samplers.default_sampler(scheduler)
    own = [notice] if notice and name == default else []
    return own + [line for name in dict.fromkeys([default, "ddim"]) for line in samplers.notices(name, scheduler)]


def _empty_tokens(source: Source) -> np.ndarray:
    """Tokenise the empty prompt to int32[77] for the first text encoder; refuse a vocabulary that does not fit."""
    empty = []
    for folder, encoder in zip(source.tokenizers.values(), source.config.text_encoders, strict=True):
        empty.append(tokenizer.load(folder, encoder.pad_token or tokenizer.EOS).encode("").ids)
        highest, rows = int(empty[-1].max()), encoder.vocab_size
        if highest >= rows:
            raise InputError(f"{folder}: makes token id {highest}, but the text encoder has {rows} ids")
    return empty[0]


def _write(
    source: Source,
    work: Path,
    spec: ExportSpec,
    compiled: set[str],
    version: int,
    parts: dict[str, Callable],
    exact: dict[str, Callable],
    warmup_xla: bool,
) -> Manifest:
    _copy_tokenizers(source, work)
    described, differences, rounding = {}, {}, {}
    export_id = uuid.uuid4().hex
    with signatures.graphs_as_traced():
        for part, build in parts.items():
            expected = {}
            if part in exact:
                log.info("%s: in float32, to compare", part)
                expected = _run_part(exact[part], source.config)
            folder = work / part / str(version)
            described[part], calls, outputs = _save_part(
                build, folder, source.config, part in compiled, warmup_xla, export_id
            )
            check_finite(part, outputs, spec.dtype)
            rounding |= _differences(part, expected, outputs, f"{spec.precision} against float32")
            reloaded = signatures.run_reloaded(folder, calls)
            difference = _differences(part, outputs, reloaded, "reloaded against live")
            _check_reloaded(difference, RELOAD_BARS[spec.dtype])
            differences |= difference
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
        xla_signatures=tuple(f"{part}/{name}" for part in described for name in described[part] if _is_compiled(name)),
        signatures=described,
        reload_difference=differences,
        float32_difference=rounding,
        versions={name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy", "tokenizers")},
        files=files,
    )
    manifest.check_chain(result)
    (work / "manifests").mkdir()
    (work / "manifests" / f"{version}.json").write_text(manifest.dumps(result), encoding="utf-8")
    return result


def _is_compiled(signature: str) -> bool:
    return signature.endswith("_xla")


def _copy_tokenizers(source: Source, work: Path) -> None:
    for target, folder in source.tokenizers.items():
        (work / target).mkdir()
        for name in TOKENIZER_FILES:
            if (folder / name).exists():
                shutil.copyfile(folder / name, work / target / name)
        if source.embeddings:
            ids = json.dumps({added.token: added.ids for added in source.embeddings}, ensure_ascii=False)
            (work / target / tokenizer.ADDED_FILE).write_text(ids, encoding="utf-8")


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
        return _variables(model), endpoints.diffusion_model(model, config, spec, ddim, schedule, signatures.share)

    def build_decoder():
        model = vae.VAEDecoder(config.vae, dtype)
        # The file holds both halves and must be used up; only the decoder is kept.
        _fill(source, "vae", [model, vae.VAEEncoder(config.vae, dtype)])
        store(model)
        return _variables(model), endpoints.decoder(model, config, spec, signatures.share)

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
    log.info("%s: loading weights", component)
    ignored = source.fill(component, layers)
    if ignored:
        log.info("%s: ignored: %s", component, ", ".join(ignored))


def _run_part(build: Callable, config: ModelConfig) -> dict[str, Arrays]:
    """Run what is compared with float32: {signature: outputs}. What holds weights is local, as in `_save_part`."""
    _, every = build()
    outputs = {
        endpoint.name: signatures.run(
            signatures.concrete_function(endpoint), signatures.example_inputs(endpoint, config)
        )
        for endpoint in every
        if endpoint.name in COMPARED_WITH_FLOAT32
    }
    del every
    signatures.release_memory()
    return outputs


def _save_part(
    build: Callable, folder: Path, config: ModelConfig, jit: bool, warmup_xla: bool, export_id: str
) -> tuple[dict[str, Signature], dict[str, Arrays], dict[str, Arrays]]:
    """Save one part and run it live.

    Everything that holds weights is local to this function, so that they are freed when it returns.

    Returns:
        Signature -> its tensors; of those that a reloaded part is compared in: signature -> inputs, and -> outputs.
    """
    variables, every = build()
    publish.check_space(folder, sum(v.dtype.size * int(np.prod(v.shape)) for v in variables.values()))
    functions = {e.name: signatures.concrete_function(e) for e in every}
    described = {e.name: Signature(e.inputs, e.outputs) for e in every}
    examples = {e.name: signatures.example_inputs(e, config) for e in every}
    warm_up = dict(examples)
    for endpoint in every:
        if jit and endpoint.compiled_variant:
            name = f"{endpoint.name}_xla"
            functions[name] = signatures.concrete_function(endpoint, jit=True)
            described[name] = described[endpoint.name]
            if warmup_xla:
                warm_up[name] = examples[endpoint.name]
    log.info("%s: saving %s", folder.parent.name, ", ".join(functions))
    signatures.save(folder, variables, functions, export_id)
    warmup_records.write(folder, warm_up)
    # Noise drawn anew, or PNG files, cannot be compared.
    calls = {e.name: examples[e.name] for e in every if e.name != "serving_default" and not e.png}
    return described, calls, {name: signatures.run(functions[name], inputs) for name, inputs in calls.items()}


def check_finite(part: str, outputs: dict[str, Arrays], dtype: str) -> None:
    """Refuse a part whose results hold NaN or infinity.

    Args:
        outputs: signature -> output name -> array.

    Raises:
        InputError: names the signature and what to do.
    """
    for name, arrays in outputs.items():
        if all(np.isfinite(a).all() for a in arrays.values() if a.dtype.kind == "f"):
            continue
        vae = part in ("decoder", "image_encoder")
        advice = {
            "float16": "--dtype bfloat16" + (", or --vae with one that is safe in float16" if vae else ""),
            "bfloat16": "--dtype float32",
            "float32": "another checkpoint; these weights cannot draw",
        }[dtype]
        raise InputError(f"{part}/{name}: NaN or infinite values in {dtype}: numbers too large for it; try {advice}")


def _differences(
    part: str, expected: dict[str, Arrays], outputs: dict[str, Arrays], what: str
) -> dict[str, Difference]:
    """PART/SIGNATURE -> how far results are from what is expected; each is logged, `what` saying which results."""
    differences = {}
    for name, arrays in expected.items():
        difference = differences[f"{part}/{name}"] = compare(arrays, outputs[name])
        log.info("%s/%s: %s: %s", part, name, what, difference)
    return differences


def _check_reloaded(differences: dict[str, Difference], bar: float) -> None:
    for name, difference in differences.items():
        if difference.psnr is not None and not difference.psnr >= bar:
            raise InputError(
                f"{name}: the reloaded export differs from the live model: {difference}, at least {bar:g} dB expected"
            )
