"""Exports as functions: what they accept, how long they live, and what XLA changes (nothing but speed)."""

import gc
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from models.errors import InputError
from pipeline import load, manifest
from pipeline.manifest import Signature
from pipeline.sampling import noise, samplers

ROOT = Path(__file__).parents[1]
ALL = ("text_encoder", "unet", "decoder")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def denoise_inputs(images, num_steps=4, sampler="ddim", contract=None):
    latent = normal(images, 9, 7, 4)
    return {
        "latent": latent,
        "memory": np.zeros((4, *latent.shape), "float32"),
        "steps": samplers.steps_table(sampler, contract.config.scheduler, num_steps, 12)[1],
        "first_step": 0,
        "last_step": num_steps,
        "guidance_scale": np.full(images, 7.5, "float32"),
        "guidance_rescale": np.zeros(images, "float32"),
        "seed": noise.seed_words(list(range(images))),
        "context": normal(images, 77, 32, seed=1),
        "unconditional_context": normal(images, 77, 32, seed=2),
    }


def encode_inputs(prompts):
    random = np.random.default_rng(3)
    ones = np.ones((prompts, 77), "float32")
    tokens, negative = (random.integers(49408, size=(prompts, 77)).astype("int32") for _ in range(2))
    return {
        "tokens": tokens,
        "negative_tokens": negative,
        "token_weights": ones,
        "negative_token_weights": ones,
    }


def arrays(result):
    return {name: np.array(value) for name, value in result.items()}


@pytest.fixture(scope="module")
def plain(tiny_export):
    return load.local(tiny_export)


@pytest.fixture(scope="module")
def compiled(tiny_export):
    """All three parts compiled here: the export has no twins."""
    return load.local(tiny_export, jit_compile=True, jit_components=ALL)


# === Life ===


@pytest.mark.parametrize("jit_compile", [False, True])
def test_functions_outlive_everything_they_came_from(tiny_export, jit_compile):
    """A signature holds its variables weakly; only the callable is kept here, in a list."""
    latent = normal(4, 9, 7, 4)
    kept = [load.function(manifest.read(tiny_export), "decoder", "decode", jit_compile)]
    gc.collect()
    before = arrays(kept[0](latent=latent))
    for _ in range(2):
        gc.collect()
    after = arrays(kept[0](latent=latent))
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


# === Arguments ===


def test_outputs_are_what_the_manifest_says(plain):
    results = {
        "encode": plain.encode(**encode_inputs(2)),
        "denoise": plain.denoise(**denoise_inputs(4, contract=plain.manifest)),
        "decode": plain.decode(latent=normal(4, 9, 7, 4)),
    }
    for name, part in (("encode", "text_encoder"), ("denoise", "diffusion_model"), ("decode", "decoder")):
        specs = plain.manifest.signatures[part][name].outputs
        found = {key: (value.dtype.name, tuple(value.shape)) for key, value in results[name].items()}
        assert found == {spec.name: (spec.dtype, spec.shape) for spec in specs}


WRONG = [
    ({"latent": None}, r"diffusion_model/denoise: missing inputs \['latent'\], unknown inputs \[\]"),
    ({"latents": 1}, r"missing inputs \[\], unknown inputs \['latents'\]"),
    ({"latent": normal(1, 9, 7, 4)}, r"latent must have shape \[4, 9, 7, 4\], found \[1, 9, 7, 4\]"),
    ({"latent": normal(4, 4, 9, 7)}, r"latent must have shape \[4, 9, 7, 4\], found \[4, 4, 9, 7\]"),
    ({"latent": np.zeros((4, 9, 7, 4), complex)}, "latent must be float32, found complex128"),
    ({"latent": np.full((4, 9, 7, 4), "a")}, "latent must be float32, found <U1"),
    ({"latent": tf.zeros((4, 9, 7, 4), tf.float16)}, "latent must be float32, found float16"),
    ({"first_step": 0.0}, "first_step must be int32, found float64"),
    ({"first_step": True}, "first_step must be int32, found bool"),
    ({"first_step": 2**31}, "first_step has values outside int32"),
    ({"first_step": [0]}, r"first_step must have shape \[\], found \[1\]"),
    ({"first_step": None, "context": None}, r"missing inputs \['context', 'first_step'\]"),
    ({"seed": np.zeros((4, 2), "float32")}, "seed must be int32, found float32"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_arguments_that_do_not_fit(plain, changes, message):
    inputs = denoise_inputs(4, contract=plain.manifest) | changes
    inputs = {name: value for name, value in inputs.items() if value is not None}
    with pytest.raises(InputError, match=message) as error:
        plain.denoise(**inputs)
    assert "\n" not in str(error.value)


def test_order_of_arguments_does_not_matter(plain):
    """A model given a dictionary must match it by name: all orders, and positions, give the same numbers."""
    inputs = denoise_inputs(4, 1, contract=plain.manifest)
    expected = arrays(plain.denoise(**inputs))["latent"]
    for names in (sorted(inputs), sorted(inputs, reverse=True), [*inputs][3:] + [*inputs][:3]):
        np.testing.assert_array_equal(plain.denoise(**{name: inputs[name] for name in names})["latent"], expected)


@pytest.fixture(scope="module")
def published(single_export):
    return load.function(manifest.read(single_export), "diffusion_model", "serving_default")


@pytest.mark.parametrize(
    ("num_steps", "scale"),
    [
        (3, 7.5),
        (np.int64(3), np.float64(8.0)),
        (np.int32(3), np.float32(8.0)),
        (np.array(3), 8),
        (tf.constant(3), tf.constant(7.5)),
        (np.uint8(3), np.float16(7.5)),
    ],
)
def test_numbers_of_any_kind_are_taken_for_scalars(published, num_steps, scale):
    """Never retraced: the function is concrete."""
    contexts = {name: normal(1, 77, 32) for name in ("context", "unconditional_context")}
    result = published(num_steps=num_steps, unconditional_guidance_scale=scale, **contexts)
    assert result["latent"].dtype == tf.float32 and np.isfinite(result["latent"]).all()


@pytest.mark.parametrize("num_steps", [0, 13])
def test_plain_signatures_raise(published, num_steps):
    contexts = {name: normal(1, 77, 32) for name in ("context", "unconditional_context")}
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"num_steps must be in 1\.\.12"):
        published(num_steps=num_steps, unconditional_guidance_scale=7.5, **contexts)


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [(-1, 2, "first_step must be in"), (3, 2, "first_step must be in"), (0, 13, "last_step must be at most 12")],
)
def test_row_ranges(plain, compiled, first, last, message):
    """Plain signatures raise. Compiled bodies raise or give NaN; a picture they never give."""
    inputs = denoise_inputs(4, contract=plain.manifest) | {"first_step": first, "last_step": last}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        plain.denoise(**inputs)
    assert np.isnan(compiled.denoise(**inputs)["latent"]).all()


def test_token_rows(tiny_export):
    encode = load.function(manifest.read(tiny_export), "text_encoder", "serving_default")
    with pytest.raises(tf.errors.InvalidArgumentError, match="tokens must have 1, 2 or 4 rows"):
        encode(tokens=np.zeros((3, 77), "int32"))


def test_pictures_that_are_not_finite(tiny_export, plain):
    latent = normal(4, 9, 7, 4)
    latent[1, 3, 3] = np.nan
    result = arrays(plain.decode(latent=latent))
    assert result["finite"].tolist() == [True, False, True, True]
    for name in ("serving_default", "decode_png"):
        decode = load.function(manifest.read(tiny_export), "decoder", name)
        with pytest.raises(tf.errors.InvalidArgumentError, match="the decoded images hold NaN or infinite values"):
            decode(latent=latent)


def test_png_is_the_picture(tiny_export, plain):
    latent = normal(4, 9, 7, 4)
    pngs = load.function(manifest.read(tiny_export), "decoder", "decode_png")(latent=latent)["image_bytes"]
    images = np.stack([tf.io.decode_png(png) for png in pngs])
    np.testing.assert_array_equal(images, plain.decode(latent=latent)["generated_images"])


# === What is loaded ===


def test_unknown_names(tiny_export):
    with pytest.raises(InputError, match=r"--jit_components 'vae': must be of text_encoder, unet, decoder"):
        load.local(tiny_export, jit_components=("vae",))
    with pytest.raises(InputError, match="decoder has no signature 'encode'; found .*decode_float"):
        load.function(manifest.read(tiny_export), "decoder", "encode")


def test_a_savedmodel_that_is_not_what_the_manifest_says(tiny_export):
    contract = manifest.read(tiny_export)
    other = contract.signatures["text_encoder"]["encode"]
    decode = contract.signatures["decoder"]["decode"]
    for wrong, what in (
        (Signature(other.inputs, decode.outputs), "inputs"),
        (Signature(decode.inputs, decode.outputs[:1]), "outputs"),
    ):
        contract.signatures["decoder"]["decode"] = wrong
        with pytest.raises(InputError, match=f"decode has the {what} .*, the manifest says"):
            load.function(contract, "decoder", "decode")


def test_a_savedmodel_that_does_not_load(tiny_export, tmp_path):
    folder = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(tiny_export), str(folder)], check=True)
    contract = manifest.read(folder)
    (contract.path("decoder") / "variables" / "variables.index").unlink()
    with pytest.raises(InputError, match="variables.index: missing; the export is incomplete"):
        load.local(folder)
    for damage in (lambda p: p.write_bytes(b"\xff" * 100), Path.unlink):
        damage(contract.path("decoder") / "saved_model.pb")
        with pytest.raises(InputError, match="decoder/1: cannot be loaded as a SavedModel") as error:
            load.function(contract, "decoder", "decode")
        assert "\n" not in str(error.value)


# === XLA ===


def close(a, b):
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    return np.abs(a - b).max() <= 1e-4 * max(1.0, np.abs(a).max())


def test_compiled_equals_plain(plain, compiled):
    """All three parts, the text encoder included, to 1e-4 x max(1, max|x|); pictures to one level."""
    for name, inputs in (
        ("encode", encode_inputs(2)),
        ("denoise", denoise_inputs(4, contract=plain.manifest)),
    ):
        expected, found = (getattr(functions, name)(**inputs) for functions in (plain, compiled))
        assert all(close(expected[key], found[key]) for key in expected)
    latent = normal(4, 9, 7, 4)
    expected, found = (f.decode(latent=latent) for f in (plain, compiled))
    assert np.abs(expected["generated_images"].numpy().astype(int) - found["generated_images"]).max() <= 1
    assert np.array_equal(expected["finite"], found["finite"])


def test_twins_are_used_where_the_export_has_them(single_export, monkeypatch):
    """Nothing is traced anew, and the twins give the plain signatures' numbers."""
    contract = manifest.read(single_export)
    inputs = {"denoise": denoise_inputs(1, contract=contract), "decode": {"latent": normal(1, 9, 7, 4)}}
    parts = {"denoise": "diffusion_model", "decode": "decoder"}
    expected = {name: load.function(contract, part, name)(**inputs[name]) for name, part in parts.items()}

    def refuse(*arguments, **options):
        raise AssertionError("compiled here although the export has a twin")

    with monkeypatch.context() as patch:
        patch.setattr(load.tf, "function", refuse)
        twins = {name: load.function(contract, part, name, jit_compile=True) for name, part in parts.items()}
    for name, twin in twins.items():
        for key, value in twin(**inputs[name]).items():
            if value.dtype == tf.uint8:
                assert np.abs(np.array(value, int) - np.array(expected[name][key], int)).max() <= 1
            else:
                assert close(expected[name][key], value)


COUNT = """
import json, os, sys
from pathlib import Path
dump, folder, inputs = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*"
import numpy as np
from pipeline import load, manifest
from pipeline.sampling import samplers
contract = manifest.read(folder)
denoise = load.function(contract, "diffusion_model", "denoise", jit_compile=True)
arrays = dict(np.load(inputs))
results = {}
def run(label, sampler, n, first, last, state=()):
    table = samplers.steps_table(sampler, contract.config.scheduler, n, 12)[1]
    changed = arrays | {"steps": table, "first_step": first, "last_step": last} | dict(state)
    result = {k: v.numpy() for k, v in denoise(**changed).items()}
    compilations = len(list(dump.glob("*before_optimizations.txt")))
    print(json.dumps([label, compilations, np.isfinite(result["latent"]).all().item()]))
    return result
run("n = 4", "ddim", 4, 0, 4)
run("n = 5", "ddim", 5, 0, 5)
whole = run("n = 4 again", "ddim", 4, 0, 4)
run("euler", "euler", 4, 0, 4)
half = run("rows 0..2", "ddim", 4, 0, 2)
rest = run("rows 2..4", "ddim", 4, 2, 4, {k: half[k] for k in ("latent", "memory")}.items())
print(json.dumps(["chunks equal the whole", all(np.array_equal(rest[k], whole[k]) for k in whole)]))
load.function(contract, "decoder", "decode", jit_compile=True)(latent=arrays["latent"])
print(json.dumps(["another program", len(list(dump.glob("*before_optimizations.txt")))]))
"""


def test_one_program_serves_every_step_count_sampler_and_range(tiny_export, tmp_path):
    """XLA itself is asked: it writes down every program that it compiles. The decoder's is the proof that it does."""
    inputs = denoise_inputs(4, contract=manifest.read(tiny_export))
    np.savez(tmp_path / "inputs.npz", **inputs)
    command = [sys.executable, "-c", COUNT, str(tmp_path / "dump"), str(tiny_export), str(tmp_path / "inputs.npz")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": ""})
    assert run.returncode == 0, run.stderr
    assert [json.loads(line) for line in run.stdout.splitlines()] == [
        ["n = 4", 1, True],
        ["n = 5", 1, True],
        ["n = 4 again", 1, True],
        ["euler", 1, True],
        ["rows 0..2", 1, True],
        ["rows 2..4", 1, True],
        ["chunks equal the whole", True],
        ["another program", 2],
    ]


# === Devices ===


@pytest.mark.parametrize("platform", ["METAL", "DML"])
def test_devices_without_a_compiler(single_export, monkeypatch, caplog, platform):
    """Apple's and DirectML's plugins register as plain GPUs; their name tells. Same numbers, with a notice."""
    device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(load, "accelerators", lambda: [device])
    monkeypatch.setattr(load.tf.config.experimental, "get_device_details", lambda d: {"device_name": platform})
    contract = manifest.read(single_export)
    latent = normal(1, 9, 7, 4)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, load.__name__):
        patch.setattr(load, "_check_signature", lambda contract, part, name, concrete: names.append(name))
        names = []
        decode = load.function(contract, "decoder", "decode", jit_compile=True)
    assert names == ["decode"] and f"{platform} has no XLA compiler: running without it" in caplog.text
    expected = load.function(contract, "decoder", "decode")(latent=latent)
    for name, value in decode(latent=latent).items():
        np.testing.assert_array_equal(value, expected[name])


def test_other_devices_compile(monkeypatch, caplog):
    assert load.xla_available() and caplog.text == ""
    device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(load, "accelerators", lambda: [device])
    details = {"device_name": "NVIDIA H100", "compute_capability": (9, 0)}
    monkeypatch.setattr(load.tf.config.experimental, "get_device_details", lambda d: details)
    assert load.xla_available() and caplog.text == ""


def test_tf32_is_off(plain):
    assert not tf.config.experimental.tensor_float_32_execution_enabled()
