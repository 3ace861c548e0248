"""Stable Diffusion 2, XL, Turbo and LCM against diffusers' numbers on tiny checkpoints; goldens/write_families.py."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from models.errors import InputError
from models.export_spec import ExportSpec
from models.steps import MEMORY
from pipeline import export, generate, load, manifest
from pipeline.checkpoints import diffusers_config, diffusers_folder
from pipeline.checkpoints import source as sources
from pipeline.prompts import tokenizer
from pipeline.sampling import settings
from pipeline.savedmodel.signatures import concrete_function

FAMILIES = Path(__file__).parents[1] / "goldens" / "families"
# Cases that differ from another in their scheduler alone use its export.
EXPORTS = {"sd2": "sd2", "sd2_zero_snr": "sd2", "sdxl": "sdxl", "sdxl_turbo": "sdxl", "lcm": "lcm"}
CASES = [(case, chain) for case in EXPORTS for chain in json.loads(str(np.load(FAMILIES / f"{case}.npz")["chains"]))]


SPEC = ExportSpec(24, 32, prompts=1, images_per_prompt=1, dtype="float32", max_steps=10)


@pytest.fixture(scope="module")
def xl_export(tmp_path_factory):
    """Stable Diffusion XL as users export it."""
    folder = tmp_path_factory.mktemp("families") / "sdxl"
    export.export(sources.diffusers_source(FAMILIES / "sdxl"), folder, SPEC)
    return folder


@pytest.fixture(scope="module")
def signatures(xl_export):
    """Function (case, part, signature) -> the function: XL's loaded, the others' as the exporter saves them."""
    parts = {}

    @functools.cache
    def get(case, part, name):
        if case == "sdxl":
            return load.function(manifest.read(xl_export), part, name)
        if (case, part) not in parts:
            source = sources.diffusers_source(FAMILIES / case)
            build = export.builders(source, SPEC, export._empty_tokens(source), False)[part]
            parts[case, part] = build()
        return concrete_function(next(e for e in parts[case, part][1] if e.name == name))

    return get


@pytest.fixture(scope="module")
def exported(xl_export, signatures):
    """Function (case) -> its functions, with the case's own scheduler."""

    def get(case):
        name, contract = EXPORTS[case], manifest.read(xl_export)
        config = diffusers_folder.read_config(FAMILIES / name)
        scheduler = diffusers_config.scheduler(FAMILIES / case / "scheduler" / "scheduler_config.json")
        contract = dataclasses.replace(
            contract,
            config=dataclasses.replace(config, scheduler=scheduler),
            zero_unconditional=config.force_zeros_for_empty_prompt,
            folder=xl_export if name == "sdxl" else FAMILIES / name,
        )

        def call(signature):
            return lambda **inputs: signatures(name, manifest.CHAIN[signature], signature)(**as_tensors(inputs))

        return manifest.Functions(**{n: call(n) for n in manifest.CHAIN}, manifest=contract, size=SPEC.size)

    return get


def as_tensors(inputs):
    return {name: tf.convert_to_tensor(value) for name, value in inputs.items()}


def golden(case):
    return dict(np.load(FAMILIES / f"{case}.npz"))


def close(found, expected, bar=1e-5):
    """Largest difference relative to max(1, largest value)."""
    expected = np.asarray(expected, "float64")
    error = np.abs(np.asarray(found, "float64") - expected).max() / max(1.0, np.abs(expected).max())
    assert error <= bar, error


def contexts_of(functions, expected, negatives):
    run = generate.plan(functions.manifest, [str(p) for p in expected["prompts"]], negatives, num_images=1, num_steps=1)
    return generate.encode(functions, run, run.calls[0])


@pytest.mark.parametrize("case", ["sd2", "sdxl", "lcm"])
def test_components(exported, signatures, case):
    functions, expected = exported(case), golden(case)
    words = tokenizer.of_export(functions.manifest.folder, functions.manifest.config)
    for suffix, encoder in zip(("", "_2"), words, strict=False):
        np.testing.assert_array_equal(
            encoder.encode_batch(expected["prompts"].tolist())[0], expected[f"tokens{suffix}"]
        )
    contexts = contexts_of(functions, expected, expected["negative_prompts"].tolist())
    assert ("pooled" in contexts) == ("pooled" in expected) == (case == "sdxl")
    for name in contexts.keys() & expected.keys():
        close(contexts[name], expected[name])
    predict, decode = signatures(case, "diffusion_model", "unet"), signatures(case, "decoder", "decode_float")
    told = {name: contexts[name] for name in ("context", "pooled", "time_ids") if name in contexts}
    if case == "lcm":
        told["guidance_scale"] = np.float32([8.5])
    told |= {"latent": expected["noise"], "timestep": np.float32([501])}
    prediction = predict(**as_tensors(told))["prediction"]
    close(prediction, expected["prediction"])
    close(decode(latent=tf.constant(expected["decoder_latent"]))["image"], expected["decoder_image"])


@pytest.mark.parametrize(("case", "chain"), CASES)
def test_chain_step_by_step(exported, case, chain):
    functions, expected = exported(case), golden(case)
    how = json.loads(str(expected["chains"]))[chain]
    chosen = settings.settings(functions.manifest, how["sampler"], how["num_steps"], how["guidance_scale"])
    steps, rows = settings.table(functions.manifest, chosen)
    np.testing.assert_array_equal(rows[: len(steps.rows), 0], expected[f"{chain}/timesteps"].astype("float32"))
    negatives = how.get("negative_prompts", expected["negative_prompts"].tolist()) or [None]
    contexts = contexts_of(functions, expected, negatives)
    latent = np.float32(steps.noise) * expected["noise"]
    state = {"latent": latent, "memory": np.zeros((MEMORY, *latent.shape), "float32")}
    scale, seed = np.float32([chosen.guidance_scale]), np.int32([[how.get("seed", 0), 0]])
    for i, wanted in enumerate(expected[f"{chain}/latents"]):
        step = {"steps": rows, "first_step": np.int32(i), "last_step": np.int32(i + 1), "seed": seed}
        result = functions.denoise(
            **state, **step, **contexts, guidance_scale=scale, guidance_rescale=np.zeros((1,), "float32")
        )
        state = {"latent": np.asarray(result["latent"]), "memory": result["memory"]}
        if f"{chain}/sigmas" in expected and len(expected[f"{chain}/sigmas"]):
            # Euler's latents are in sigma's scale in diffusers.
            wanted = wanted / np.sqrt(expected[f"{chain}/sigmas"][i] ** 2 + 1)
        close(state["latent"], wanted, 2e-5)
    image = np.asarray(functions.decode(latent=state["latent"])["generated_images"])
    difference = np.abs(image.astype(int) - expected[f"{chain}/image"])
    assert difference.max() <= 1 and difference.mean() < 0.01


def test_without_a_negative_prompt_xl_gets_zeros_and_others_the_empty_text(exported):
    functions, expected = exported("sdxl"), golden("sdxl")
    none, empty = (contexts_of(functions, expected, [negative]) for negative in (None, ""))
    for name in ("unconditional_context", "unconditional_pooled"):
        assert not np.asarray(none[name]).any() and np.asarray(empty[name]).any()
    functions, expected = exported("sd2"), golden("sd2")
    none, empty = (contexts_of(functions, expected, [negative])["unconditional_context"] for negative in (None, ""))
    np.testing.assert_array_equal(none, empty)


def test_size_ids_have_the_height_first(exported):
    ids = contexts_of(exported("sdxl"), golden("sdxl"), [None])["time_ids"]
    np.testing.assert_array_equal(ids, [[24, 32, 0, 0, 24, 32]])


def test_signatures_follow_from_the_configuration(xl_export):
    """No serving_default of the KerasCV SavedModels where their clients cannot feed it."""
    signatures = manifest.read(xl_export).signatures
    assert all("serving_default" not in signatures[part] for part in ("text_encoder", "diffusion_model"))
    names = [t.name for t in signatures["text_encoder"]["encode"].inputs]
    assert names[:4] == ["tokens", "negative_tokens", "tokens_2", "negative_tokens_2"]
    told = [t.name for t in signatures["diffusion_model"]["denoise_unguided"].inputs]
    assert told[-3:] == ["context", "pooled", "time_ids"]
    text = manifest.describe(manifest.read(xl_export))
    assert "(sdxl, reference numerics)" in text and "tokens_2 int32[1, 77]" in text


def test_defaults_of_each_kind():
    found = {case: diffusers_folder.read_config(FAMILIES / case) for case in ("sd2", "sdxl", "lcm")}
    assert [config.family for config in found.values()] == ["sd2", "sdxl", "sd1"]
    kinds = [dataclasses.astuple(config.defaults) for config in found.values()]
    assert kinds == [("ddim", 50, 7.5), ("euler", 50, 5.0), ("lcm", 4, 8.5)]
    turbo = diffusers_config.scheduler(FAMILIES / "sdxl_turbo" / "scheduler" / "scheduler_config.json")
    unet = found["sdxl"].unet
    none = Path("nowhere")
    assert diffusers_config.defaults(none, turbo, unet, found["sdxl"].defaults).guidance_scale == 0
    assert [config.force_zeros_for_empty_prompt for config in found.values()] == [False, True, False]


def test_a_distilled_model_is_told_its_guidance(exported):
    """In every call, guided or not, at the work of one prediction; another scale is another picture."""
    functions = exported("lcm")
    images = [generate.generate(functions, "two small dogs", num_steps=2, guidance_scale=s) for s in (1.0, 8.5)]
    assert np.abs(images[0].astype(int) - images[1]).max() > 1


def test_an_unfinished_xl_folder(tmp_path):
    index = json.loads((FAMILIES / "sdxl" / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for name in ("scheduler", "text_encoder", "tokenizer", "unet", "vae"):
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=r"missing \['text_encoder_2', 'tokenizer_2'\]"):
        diffusers_folder.check_folder(tmp_path)
