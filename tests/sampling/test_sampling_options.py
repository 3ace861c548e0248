"""Samplers with real networks: diffusers' pipeline, one compiled program, flags, labels, what progress counts."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.errors import InputError
from pipeline import generate, load
from pipeline.images import png
from pipeline.sampling import noise, samplers
from pipeline.sampling.schedules import Options

ROOT = Path(__file__).parents[2]
GOLDENS = np.load(ROOT / "tests" / "goldens" / "samplers.npz")
RUNS = [
    *((name, {}) for name in samplers.SAMPLERS),
    ("ddim", {"eta": 1.0}),
    ("euler", {"sigma_schedule": "karras"}),
    ("dpmpp_2m", {"timestep_spacing": "trailing"}),
    ("lms", {"timesteps": (900, 500, 100)}),
    ("unipc", {"sigmas": (12.0, 3.0, 0.5, 0.0)}),
]
# Draws with all of RUNS, and prints how many programs XLA has compiled after each.
COUNT_PROGRAMS = """
import os, sys
from pathlib import Path
import numpy as np
from pipeline import generate, load
from pipeline.sampling.schedules import Options

functions = load.local(sys.argv[1], jit_compile=True, jit_components=("unet",), verify=False)
inputs = functions.manifest.signatures["diffusion_model"]["denoise"].inputs
contexts = {s.name: np.ones(s.shape, "float32") for s in inputs if "context" in s.name}
for name, options in RUNS:
    run = generate.plan(functions.manifest, ["", ""], seed=1, sampler=name, num_steps=3, options=Options(**options))
    for rows in (None, 2):
        latent = generate.denoise(functions, run, run.calls[0], contexts, steps_per_call=rows)
    print(len(list(Path(sys.argv[2]).glob("*before_optimizations.txt"))))
"""


@pytest.fixture(scope="module")
def functions(tiny_export):
    return load.local(tiny_export, verify=False)


def test_every_sampler_draws_what_diffusers_pipeline_draws():
    """The embedded checkpoint's own UNet in our loop: latents after 10 steps, fresh noise included."""
    import tensorflow as tf

    from models import loop, unet
    from pipeline.checkpoints import source as sources

    source = sources.diffusers_source(ROOT / "checkpoints" / "emoji")
    model = unet.UNet(source.config.unet)
    source.fill("unet", [model])
    seeds, n = [int(GOLDENS["pipeline_seed"])], int(GOLDENS["pipeline_steps"])
    conditional, unconditional = GOLDENS["context"][:1], GOLDENS["context"][1:]
    guidance = GOLDENS["pipeline_guidance_scale"].astype("float32")[None] - 1

    @tf.function
    def run(latent, rows, last):
        zeros = tf.zeros((4, *latent.shape))
        return loop.denoise(
            *(model, latent, zeros, rows, 0, last, guidance, np.zeros(1, "float32"), noise.seed_words(seeds)),
            {"context": (conditional, unconditional)},
        )[0]

    _, height, width, channels = GOLDENS["latents"].shape
    for name, expected in zip(GOLDENS["pipeline_samplers"], GOLDENS["latents"], strict=True):
        steps, table = samplers.steps_table(str(name), source.config.scheduler, n, 20)
        start = np.float32(steps.noise) * noise.initial_latents(seeds, height, width, channels)
        found = run(tf.constant(start), tf.constant(table), tf.constant(len(steps.rows)))[0]
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max(), name
    assert run.experimental_get_tracing_count() == 1


def draw(functions, name, options, **changes):
    arguments = {"seed": 3, "num_steps": 3, "num_images": 1, "guidance_scale": 3.0} | changes
    return generate.generate(functions, "a red apple", sampler=name, options=Options(**options), **arguments)


def test_one_compiled_program_serves_every_sampler(tiny_export, tmp_path):
    dump = tmp_path / "xla"
    run = subprocess.run(
        [sys.executable, "-c", f"RUNS = {RUNS}\n{COUNT_PROGRAMS}", str(tiny_export), str(dump)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text", "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    counts = [int(line) for line in run.stdout.split()]
    assert len(counts) == len(RUNS) and set(counts) == {1}


def test_latents_do_not_depend_on_the_calls_they_were_made_in(functions):
    inputs = functions.manifest.signatures["diffusion_model"]["denoise"].inputs
    contexts = {s.name: np.ones(s.shape, "float32") for s in inputs if "context" in s.name}
    found = {}
    for name, options in RUNS:
        run = generate.plan(functions.manifest, ["", ""], seed=1, sampler=name, num_steps=3, options=Options(**options))
        whole, cut = (
            np.asarray(generate.denoise(functions, run, run.calls[0], contexts, steps_per_call=rows))
            for rows in (None, 2)
        )
        np.testing.assert_array_equal(cut, whole)
        found[name, str(options)] = whole.tobytes()
    # Below 5 steps DPM++ 3M never gets to order 3.
    assert found.pop(("dpmpp_3m", "{}")) == found["dpmpp_2m", "{}"]
    assert len(set(found.values())) == len(found)


def test_fresh_noise_is_the_seed_s(functions):
    """An image's noise depends on its own seed alone, not on its place in the batch."""
    two = draw(functions, "euler_a", {}, num_images=2)
    np.testing.assert_array_equal(draw(functions, "euler_a", {}, seed=4), two[1:])
    assert (two[0] != two[1]).any()


def test_progress_counts_calls_of_the_unet(functions):
    for name, calls in (("ddim", [2, 1]), ("heun", [2, 2, 1]), ("pndm", [2, 2])):
        told = []
        draw(functions, name, {}, progress=told.append, steps_per_call=2)
        assert told == calls


def test_settings_take_the_number_of_steps_from_a_list(functions):
    contract = functions.manifest
    assert generate.settings(contract, "euler", options=Options(timesteps=(9, 5, 1))).num_steps == 3
    assert generate.settings(contract, "euler", options=Options(sigmas=(9, 5, 1))).num_steps == 2
    assert generate.settings(contract, "euler").num_steps == contract.config.defaults.num_steps
    for message, settings in (
        (
            "num_steps is 4, but the list makes 3 steps",
            generate.settings(contract, "euler", 4, options=Options(timesteps=(9, 5, 1))),
        ),
        (
            "heun calls the UNet 13 times in 7 steps, 12 is the limit of the export",
            generate.settings(contract, "heun", 7),
        ),
        ("unknown sampler 'plms'; available: ddim, pndm, ", generate.settings(contract, "plms")),
    ):
        with pytest.raises(InputError, match=message):
            generate.table(contract, settings)


@pytest.mark.parametrize(
    ("name", "options", "fields"),
    [
        (
            "dpmpp_2m",
            {"sigma_schedule": "karras"},
            "Sampler: DPM++ 2M, CFG scale: 3, Seed: 1, Schedule type: Karras, Size",
        ),
        ("euler_a", {}, "Sampler: Euler a, CFG scale: 3, Seed: 1, Size"),
        ("ddim", {"eta": 0.5}, "Sampler: DDIM, CFG scale: 3, Seed: 1, Eta DDIM: 0.5, Size"),
        (
            "pndm",
            {"timestep_spacing": "trailing"},
            "Sampler: PLMS, CFG scale: 3, Seed: 1, Timestep spacing: trailing, ",
        ),
        ("lms", {"timesteps": (9.5, 5, 1)}, "Sampler: LMS, CFG scale: 3, Seed: 1, Timesteps: 9.5 5 1, Size"),
        ("unipc", {"sigmas": (9.0, 5, 1, 0)}, "Sampler: UniPC, CFG scale: 3, Seed: 1, Sigmas: 9 5 1 0, Size"),
    ],
)
def test_how_a_picture_was_made(functions, name, options, fields):
    chosen = generate.settings(functions.manifest, name, 3, 3.0, options=Options(**options))
    assert fields in png.parameters(functions, "a red apple", None, 1, chosen, 3.0)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pipeline.generate", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_command(tiny_export, tmp_path):
    common = ("a red apple", f"--models={tiny_export}", f"--output={tmp_path}", "--noverify", "--num_images=1")
    run = command(*common, "--sampler=heun", "--sigma_schedule=karras", "--num_steps=3")
    assert run.returncode == 0, run.stderr
    assert "5/5" in run.stderr and "call" in run.stderr
    (picture,) = tmp_path.glob("*.png")
    assert (
        "Steps: 3, Sampler: Heun, CFG scale: 3, Seed: 0, Schedule type: Karras"
        in Image.open(picture).text["parameters"]
    )
    run = command(*common, "--sampler=dpmpp_2m", "--timesteps=900,500,x")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    message = "error: --timesteps: expected numbers with commas between them (could not convert string to float: 'x')"
    assert run.stderr.splitlines()[-1] == message
