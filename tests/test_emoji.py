"""The embedded checkpoint draws what a prompt says: 20 prompts x 3 seeds, 25 DDIM steps, measured by numbers."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.export_spec import ExportSpec
from pipeline import export, generate, load
from pipeline.checkpoints import source
from training import data

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "emoji"
GOLDENS = np.load(ROOT / "tests" / "goldens" / "emoji.npz")
NAMES, PICTURES = data.read_sheet(ROOT / "tests" / "goldens" / "emoji_objects.png")
DRAWN = [tuple(pair) for pair in GOLDENS["drawn"].tolist()]  # (name, colour)
PROMPTS, SEEDS, SEED = GOLDENS["prompts"].tolist(), 3, int(GOLDENS["seed"])
TIMES = len(PROMPTS) * SEEDS


@pytest.fixture(scope="module")
def make_export(tmp_path_factory):
    """Function (dtype) -> folder of an export of 4 prompts x 3 images."""

    def make(dtype="float32"):
        folder = tmp_path_factory.mktemp("emoji") / dtype
        spec = ExportSpec(64, 64, prompts=4, images_per_prompt=SEEDS, dtype=dtype, max_steps=25)
        export.export(source.diffusers_source(CHECKPOINT), folder, spec, compare_float32=False)
        return folder

    return make


@pytest.fixture(scope="module")
def emoji_export(make_export):
    return make_export()


@pytest.fixture(scope="module")
def functions(emoji_export):
    """Compiled: a third faster."""
    return load.local(emoji_export, jit_compile=True, verify=False)


@pytest.fixture(scope="module")
def images(functions):
    """What the checkpoint's own settings draw: uint8[60, 64, 64, 3], three seeds of each prompt."""
    return generate.generate(functions, PROMPTS, seed=SEED)


def psnr(images, others):
    """Of each picture, in dB: uint8[n, h, w, 3] twice -> float[n]; equal pictures count as 99."""
    error = np.square(images.astype("float64") - others).mean(axis=(1, 2, 3))
    return 10 * np.log10(255**2 / np.maximum(error, 255**2 / 10**9.9))


# === What is measured ===


def border_has_colour(image, colour):
    """Whether the mean of the outermost pixels is within 40 of the colour in each channel."""
    border = np.concatenate([image[0], image[-1], image[1:-1, 0], image[1:-1, -1]])
    return bool((np.abs(border.mean(axis=0) - data.COLOURS[colour]) <= 40).all())


def nearest_names(images, colour):
    """The object nearest to each picture, over that colour, whatever mirroring and shift: uint8[n, ...] -> n names."""
    flat = images.reshape(len(images), -1).astype("float32")
    best = np.full((len(images), len(NAMES)), np.inf, "float32")
    places = [(right, down, mirror) for right in data.SHIFTS for down in data.SHIFTS for mirror in (False, True)]
    for place in places:
        composed = data.compose(PICTURES, data.COLOURS[colour], *place).reshape(len(NAMES), -1).astype("float32")
        distance = np.square(composed).sum(axis=1) - 2 * flat @ composed.T  # less the picture's own square
        best = np.minimum(best, distance)
    return [NAMES[i] for i in best.argmin(axis=1)]


def rates(images):
    """Shares of 60 pictures with the named background, and whose nearest object is the named one."""
    expected = [pair for pair in DRAWN for _ in range(SEEDS)]
    backgrounds = [border_has_colour(image, colour) for image, (_, colour) in zip(images, expected, strict=True)]
    right = []
    for colour in data.COLOURS:
        chosen = [i for i, pair in enumerate(expected) if pair[1] == colour]
        found = nearest_names(images[chosen], colour)
        right += [name == expected[i][0] for i, name in zip(chosen, found, strict=True)]
    return np.mean(backgrounds), np.mean(right)


def test_the_measures_know_the_pictures_they_are_made_of():
    index = NAMES.index("red apple")
    image = data.compose(PICTURES[index], data.COLOURS["blue"], 2, -2, True)
    other = data.compose(PICTURES[NAMES.index("red heart")], data.COLOURS["blue"])
    assert nearest_names(np.stack([image, other]), "blue") == ["red apple", "red heart"]
    assert [colour for colour in data.COLOURS if border_has_colour(image, colour)] == ["blue"]


def test_every_object_is_told_from_the_others():
    """The nearest object to each picture over gray is itself: no two look alike to the measure."""
    gray = data.COLOURS["gray"]
    assert nearest_names(data.compose(PICTURES, gray, 2, -2, True), "gray") == NAMES
    assert len(NAMES) >= 200 and len(set(NAMES)) == len(NAMES)


# === What the checkpoint draws ===


def test_backgrounds_and_objects_are_the_named_ones(functions, images):
    background, right = rates(images)
    print(f"guidance 3: background {background:.3f}, object {right:.3f}")
    assert background >= 0.95 and right >= 0.8
    plain_background, plain_right = rates(generate.generate(functions, PROMPTS, seed=SEED, guidance_scale=1))
    print(f"guidance 1: background {plain_background:.3f}, object {plain_right:.3f}")
    assert background >= plain_background and right >= plain_right


def test_a_negative_prompt_takes_the_background_away(functions, images):
    coloured = [i for i, (_, colour) in enumerate(DRAWN) if colour != "white"][:12]
    names = [DRAWN[i][0] for i in coloured]
    negatives = [f"{DRAWN[i][0]} on a {DRAWN[i][1]} background" for i in coloured]
    without = generate.generate(functions, names, negatives, seed=SEED)

    def count(drawn):
        return sum(border_has_colour(drawn[j], DRAWN[coloured[j // SEEDS]][1]) for j in range(len(drawn)))

    with_colour = np.concatenate([images[i * SEEDS : (i + 1) * SEEDS] for i in coloured])
    assert count(with_colour) >= 30
    assert count(without) <= count(with_colour) / 2


def test_the_empty_prompt_draws_something(functions):
    image = generate.generate(functions, "", seed=SEED, num_images=1)
    assert image.shape == (1, 64, 64, 3) and image.std() > 5


def test_a_seed_draws_its_picture_in_every_place_and_in_chunks(functions, images):
    """Prompt 5's second image, seed SEED + 16, is drawn alone, in the first place of a call, two steps at a time."""
    alone = generate.generate(functions, PROMPTS[5], seed=SEED + 16, num_images=1, steps_per_call=2)
    assert np.abs(alone[0].astype(int) - images[16]).max() <= 1


def test_a_plain_graph_draws_the_same(emoji_export, images):
    drawn = generate.generate(load.local(emoji_export, verify=False), PROMPTS[:4], seed=SEED)
    assert psnr(drawn, images[: len(drawn)]).min() >= 45


def test_bfloat16_draws_nearly_the_same(make_export, images):
    functions = load.local(make_export("bfloat16"), jit_compile=True, verify=False)
    quality = psnr(generate.generate(functions, PROMPTS, seed=SEED), images)
    print(f"bfloat16: median {np.median(quality):.1f} dB, 30 dB or more {np.mean(quality >= 30):.3f}")
    assert np.median(quality) >= 45 and np.mean(quality >= 30) >= 0.95


# === What diffusers draws with it ===


def test_the_goldens_are_of_this_checkpoint():
    files = json.loads(str(GOLDENS["sha256"]))
    assert set(files) == {p.relative_to(CHECKPOINT).as_posix() for p in CHECKPOINT.rglob("*.safetensors")}
    for name, digest in files.items():
        found = hashlib.sha256((CHECKPOINT / name).read_bytes()).hexdigest()
        assert found == digest, f"{name} has changed: run tests/goldens/write_emoji.py"


def test_diffusers_draws_the_same(images):
    """StableDiffusionPipeline, same noise, 25 DDIM steps, guidance 3: the first four prompts, three seeds each."""
    drawn = GOLDENS["images"]
    assert len(drawn) == 12
    assert psnr(images[:12], drawn).min() >= 50


def test_the_checkpoint_is_small():
    assert sum(p.stat().st_size for p in CHECKPOINT.rglob("*") if p.is_file()) <= 30e6
    assert not (CHECKPOINT / "tokenizer" / "tokenizer.json").exists()


def test_the_sheet_of_objects_is_small():
    path = ROOT / "tests" / "goldens" / "emoji_objects.png"
    assert path.stat().st_size <= 1.5e6
    with Image.open(path) as opened:
        assert opened.mode == "RGBA"
