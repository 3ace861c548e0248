"""Image to image: late starts, the image encoder, and whole runs against diffusers' (tests/goldens/img2img.npz)."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from models import endpoints
from models.errors import InputError
from models.export_spec import ExportSpec, Size
from models.families import FAMILIES
from models.steps import ROW, STATE
from pipeline import export, generate, load, manifest
from pipeline.checkpoints import source as sources
from pipeline.images import picture as images
from pipeline.sampling import noise, samplers, settings
from pipeline.savedmodel import publish, signatures

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "goldens" / "tiny_sd1"
GOLDENS = dict(np.load(ROOT / "tests" / "goldens" / "img2img.npz"))
CASES = [json.loads(case) for case in GOLDENS["cases"]]
PROMPTS, NEGATIVES = GOLDENS["prompts"].tolist(), GOLDENS["negative_prompts"].tolist()
SEED = int(GOLDENS["seed"])
SD1 = FAMILIES["sd1"]


@pytest.fixture(scope="module")
def functions(tiny_sd1_export):
    return load.local(tiny_sd1_export, verify=False)


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    Image.fromarray(GOLDENS["picture"]).save(path)
    return path


def draw(functions, picture=GOLDENS["picture"], **changes):
    chosen = {"sampler": "euler", "num_steps": 4, "strength": 0.5, "guidance_scale": 3.0, "seed": SEED} | changes
    return generate.generate(functions, chosen.pop("prompts", PROMPTS), init_image=picture, **chosen)


# === Late starts ===


def table(name, n, first_step=None, **changes):
    return samplers.steps(name, dataclasses.replace(SD1.scheduler, **changes), n, first_step=first_step)


@pytest.mark.parametrize("name", ["ddim", "euler", "euler_a", "lcm", "heun"])
def test_samplers_that_remember_nothing_make_the_last_rows_of_the_whole_run(name):
    whole, late = table(name, 10), table(name, 10, first_step=6)
    assert len(late.rows) == (7 if name == "heun" else 4)
    np.testing.assert_array_equal(late.rows, whole.rows[-len(late.rows) :])


@pytest.mark.parametrize("name", samplers.SAMPLERS)
def test_a_late_start_remembers_nothing(name):
    """The first row's latent does not look at the memory, and the start is at that row's own level."""
    for first in (0, 3, 9):
        late = table(name, 10, first)
        assert (late.rows[0, ROW["A"]].reshape(STATE, STATE)[0, 1:] == 0).all()
        assert late.signal**2 + late.noise**2 == pytest.approx(1)
        assert late.rows[0, ROW["p"]] == pytest.approx(1 / late.signal, rel=1e-6)
        assert late.rows[0, ROW["q"]] == pytest.approx(-late.noise / late.signal, rel=1e-6)
    assert len(table(name, 10, 9).rows) == 1


@pytest.mark.parametrize("name", samplers.SAMPLERS)
def test_starting_from_the_first_step_is_the_whole_run(name):
    """Only the start differs: there is a little of the picture left in the noise."""
    whole, late = table(name, 10), table(name, 10, 0)
    np.testing.assert_array_equal(late.rows, whole.rows)
    assert whole.signal == 0 < late.signal < 0.5


def test_late_rows_of_multistep_samplers_are_not_the_last_of_the_whole_run():
    for name in ("lms", "dpmpp_2m", "unipc", "deis"):
        assert np.abs(table(name, 10, 5).rows[0] - table(name, 10).rows[5]).max() > 1e-3
    assert table("pndm", 10, 6).rows[:, 0].tolist() == [301, 201, 201, 101, 1]


def test_karras_levels_are_cut_not_spread_anew():
    late, whole = (table("dpmpp_2m", 10, first, sigma_schedule="karras") for first in (6, None))
    np.testing.assert_array_equal(late.rows[:, 0], whole.rows[6:, 0])


@pytest.mark.parametrize("first", [-1, 10, 11])
def test_no_such_step(first):
    with pytest.raises(InputError, match=f"first_step is {first}, expected 0 to 9 for 10 steps"):
        table("ddim", 10, first)


# === The encoder ===


@pytest.mark.parametrize(("upcast", "compute"), [(True, "float32"), (False, "bfloat16")])
def test_the_encoder_in_the_scale_of_the_unet(upcast, compute):
    """A network of one line: the mean is every eighth pixel, the deviation twice that."""

    def model(image):
        assert image.dtype == compute
        mean = tf.repeat(image[:, ::8, ::8, :1], 4, axis=-1)
        return mean, 2 * mean

    spec = ExportSpec(16, 24, prompts=1, images_per_prompt=2, dtype="bfloat16", max_steps=1, more_sizes=(Size(8, 8),))
    config = dataclasses.replace(SD1, vae=dataclasses.replace(SD1.vae, force_upcast=upcast, scaling_factor=0.5))
    whole, small = endpoints.image_encoder(model, config, spec)
    assert (whole.name, small.name) == ("encode_image", "encode_image_8x8")
    assert [s.shape for s in whole.outputs] == [(2, 2, 3, 4)] * 2 and small.inputs[0].shape == (2, 8, 8, 3)
    result = whole.function(image=tf.constant(np.full((2, 16, 24, 3), 0.25, "float32")))
    assert [value.dtype for value in result.values()] == [tf.float32] * 2
    assert (result["mean"].numpy() == 0.125).all() and (result["std"].numpy() == 0.25).all()


def test_what_is_in_the_export(tiny_sd1_export):
    contract = manifest.read(tiny_sd1_export)
    assert list(contract.signatures["image_encoder"]) == ["encode_image"]
    signature = contract.signatures["image_encoder"]["encode_image"]
    assert [(s.name, s.shape, s.dtype) for s in signature.inputs] == [("image", (2, 32, 48, 3), "float32")]
    assert [(s.name, s.shape) for s in signature.outputs] == [("mean", (2, 8, 12, 4)), ("std", (2, 8, 12, 4))]
    assert contract.reload_difference["image_encoder/encode_image"].psnr is None
    assert "image_encoder/1/saved_model.pb" in contract.files
    assert "encode_image(image float32[2, 32, 48, 3])" in manifest.describe(contract)
    damaged = dataclasses.replace(contract, signatures=contract.signatures | {"image_encoder": {}})
    with pytest.raises(InputError, match="image_encoder has no signature 'encode_image'; export again"):
        manifest.check_chain(damaged)
    other = dataclasses.replace(signature, outputs=tuple(dataclasses.replace(s, shape=(1,)) for s in signature.outputs))
    damaged = contract.signatures["image_encoder"] | {"encode_image": other}
    damaged = dataclasses.replace(contract, signatures=contract.signatures | {"image_encoder": damaged})
    with pytest.raises(InputError, match="encode_image feeds denoise, but its outputs are no latents of it"):
        manifest.check_chain(damaged)


def test_the_picture_as_diffusers_prepares_it(picture):
    np.testing.assert_allclose(images.read(picture, 48, 32), GOLDENS["image"], rtol=0, atol=1e-7)


def test_the_encoder_against_diffusers(functions, picture):
    run = generate.plan(functions.manifest, PROMPTS, init_image=picture, num_steps=4)
    mean, std = generate.encode_image(functions, run)
    for found, expected in ((mean, GOLDENS["mean"]), (std, GOLDENS["std"])):
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_versions_of_an_export_with_an_image_encoder(tiny_sd1_export, tmp_path, monkeypatch):
    """The optional part is renamed with the others and cleared with the others."""
    described = manifest.read(tiny_sd1_export).signatures

    def save_part(build, folder, config, jit, warmup_xla, export_id):
        folder.mkdir(parents=True)
        (folder / "saved_model.pb").write_bytes(b"")
        return described[folder.parent.name], {}, {}

    monkeypatch.setattr(export, "_save_part", save_part)
    monkeypatch.setattr(signatures, "run_reloaded", lambda folder, calls: {})
    source, spec = sources.diffusers_source(TINY), manifest.read(tiny_sd1_export).spec
    for _ in range(2):
        export.export(source, tmp_path / "out", spec, image_encoder=True)
    # Announced, and killed before its manifest came.
    (tmp_path / "out" / "image_encoder" / "3").mkdir()
    (tmp_path / "out" / "manifests" / f"3{publish.PENDING}").touch()
    assert export.export(source, tmp_path / "out", spec, image_encoder=True).version == 3
    with pytest.raises(InputError, match="version 3 has another --image_encoder"):
        export.export(source, tmp_path / "out", spec)
    assert {p.name for p in (tmp_path / "out" / "image_encoder").iterdir()} == {"1", "2", "3"}
    with pytest.raises(InputError, match="tiny_sd1 has no image encoder; leave --image_encoder out"):
        export.export(dataclasses.replace(source, encodes_images=False), tmp_path / "b", spec, image_encoder=True)
    assert not (tmp_path / "b").exists()


# === Whole runs against diffusers ===


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_whole_runs_against_diffusers(functions, picture, case):
    sampler, num_steps, strength = CASES[case]
    latents = []

    def decode(latent):
        latents.append(np.asarray(latent))
        return functions.decode(latent=latent)

    drawn = generate.generate(
        dataclasses.replace(functions, decode=decode),
        PROMPTS,
        NEGATIVES,
        seed=SEED,
        init_image=picture,
        sampler=sampler,
        num_steps=num_steps,
        strength=strength,
        guidance_scale=float(GOLDENS["guidance_scale"]),
    )
    expected = GOLDENS["latents"][case]
    assert np.abs(latents[0] - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(drawn[0].astype(int) - GOLDENS["pictures"][case]).max() <= 1
    chosen = settings.settings(functions.manifest, sampler, num_steps, strength=strength, image_to_image=True)
    end = GOLDENS["calls"][: case + 1].sum()
    told = GOLDENS["timesteps"][end - GOLDENS["calls"][case] : end]
    np.testing.assert_array_equal(settings.table(functions.manifest, chosen)[0].rows[:, 0], told)


# === Seeds, batches, pictures ===


def test_an_image_depends_on_its_seed_alone(functions):
    """Not on its place, its prompt's place, or how many are drawn; fresh noise of the sampler included."""
    for sampler in ("ddim", "euler_a", "dpmpp_2m"):
        four = draw(functions, num_images=2, sampler=sampler)
        np.testing.assert_array_equal(draw(functions, num_images=2, sampler=sampler, steps_per_call=1), four)
        alone = draw(functions, prompts=PROMPTS[1], num_images=1, seed=SEED + 3, sampler=sampler)
        np.testing.assert_array_equal(alone[0], four[3])
        assert len({image.tobytes() for image in four}) == 4


def test_the_samples_of_a_picture_have_noise_of_their_own():
    offsets = [noise.initial_latents([7], 4, 4), noise.initial_latents([7], 4, 4, offset=noise.PICTURE_OFFSET)]
    assert noise.PICTURE_OFFSET == 2**32 - 1 and np.abs(offsets[0] - offsets[1]).max() > 1
    np.testing.assert_array_equal(offsets[1][0], noise.normal(7, 2**32 - 1, (4, 4, 4)).transpose(1, 2, 0))


def test_the_start(functions):
    steps, shape = table("euler", 10, 3), (8, 12, 4)
    mean, std = np.full(shape, 2, "float32"), np.zeros(shape, "float32")
    fresh = noise.initial_latents([1, 2], *shape)
    found = generate.start(steps, [1, 2], shape, (mean, std))
    np.testing.assert_allclose(found, 2 * steps.signal + steps.noise * fresh, atol=1e-6)
    found = generate.start(steps, [1, 2], shape, (mean, std + 3)) - found
    sample = noise.initial_latents([1, 2], *shape, noise.PICTURE_OFFSET)
    np.testing.assert_allclose(found, 3 * steps.signal * sample, atol=1e-5)
    np.testing.assert_array_equal(generate.start(table("ddim", 10), [1, 2], shape), fresh)


def test_what_a_picture_can_be_given_as(functions, picture):
    expected = draw(functions, picture)
    for given in (str(picture), GOLDENS["picture"], images.read(picture, 48, 32)):
        np.testing.assert_array_equal(draw(functions, given), expected)
    assert (draw(functions, picture, init_crop=True) != expected).any()


def test_half_the_work_without_guidance(functions):
    guided = dataclasses.replace(functions, denoise=None)
    assert draw(guided, guidance_scale=1.0).shape == (2, 32, 48, 3)


# === Settings and refusals ===


def test_strength_in_steps(functions):
    def first(num_steps, strength):
        return settings.settings(
            functions.manifest, "ddim", num_steps, strength=strength, image_to_image=True
        ).first_step

    # diffusers' rounding: 10 * 0.75 is 7.5, 20 * 0.29 is 5.8.
    assert [first(10, s) for s in (1.0, 0.75, 0.3, 0.1)] == [0, 3, 7, 9]
    assert [first(20, s) for s in (0.29, 0.05)] == [15, 19]
    assert first(10, None) == 2
    plain = settings.settings(functions.manifest, num_steps=4)
    assert plain.strength is None and plain.first_step is None


@pytest.mark.parametrize(
    ("strength", "match"),
    [
        (1.5, "strength must be above 0 and at most 1, found 1.5"),
        (0.0, "strength must be above 0 and at most 1, found 0"),
        (-0.1, "found -0.1"),
        (float("nan"), "found nan"),
        (0.09, "strength 0.09 makes none of 10 steps; it must be at least 1/10, or give more steps"),
    ],
)
def test_strengths_that_make_no_sense(functions, strength, match):
    with pytest.raises(InputError, match=match):
        draw(functions, num_steps=10, strength=strength)


def test_strength_without_a_picture(functions):
    with pytest.raises(InputError, match="strength is 0.5, but there is no init_image to change"):
        draw(functions, None)


def test_pictures_that_cannot_be_used(functions, tmp_path):
    with pytest.raises(InputError, match="none.png: expected a picture, found no such file"):
        draw(functions, tmp_path / "none.png")
    with pytest.raises(InputError, match=r"init_image: expected an array of shape \[height, width, 3\]"):
        draw(functions, np.zeros((32, 48), np.uint8))


def test_exports_without_an_image_encoder(tiny_export):
    functions = load.local(tiny_export, verify=False)
    assert functions.encode_image is None
    with pytest.raises(InputError, match="tiny: has no image encoder; export again with --image_encoder"):
        draw(functions)


def test_how_the_picture_was_made(functions):
    from pipeline.images import png

    chosen = settings.settings(functions.manifest, "ddim", 10, strength=0.6, image_to_image=True)
    assert "Steps: 10, Sampler: DDIM" in (text := png.parameters(functions, "a", None, 1, chosen, 3.0))
    assert ", Denoising strength: 0.6, " in text
    text = png.parameters(functions, "a", None, 1, settings.settings(functions.manifest, "ddim", 10), 3.0)
    assert "strength" not in text


def command(*arguments):
    run = [sys.executable, "-m", "pipeline.generate", *map(str, arguments)]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True)


def test_command(tiny_sd1_export, picture, tmp_path):
    common = (
        "two small dogs",
        f"--models={tiny_sd1_export}",
        f"--output={tmp_path / 'out'}",
        "--noverify",
        "--num_steps=5",
    )
    run = command(*common, f"--init_image={picture}", "--strength=0.6", "--sampler=heun", "--init_crop")
    assert run.returncode == 0, run.stderr
    assert "5/5" in run.stderr  # 3 steps of 5: 2 calls each but the last
    (path,) = (tmp_path / "out").glob("*.png")
    with Image.open(path) as image:
        assert image.size == (48, 32) and "Denoising strength: 0.6" in image.text["parameters"]
    bomb = tmp_path / "bomb.gif"
    Image.new("L", (8, 8)).save(bomb)
    run = command(*common, f"--init_image={bomb}")
    assert run.returncode == 1 and run.stderr.count("\n") == 1
    assert f"error: {bomb}: expected a PNG, JPEG or WebP picture" in run.stderr
