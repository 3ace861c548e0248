"""Prompts to pictures: order, seeds, padding and progress, and what is refused before anything is drawn."""

import dataclasses
import logging
import weakref

import numpy as np
import pytest

from models.errors import InputError
from pipeline import generate, load
from pipeline.prompts import tokenizer
from pipeline.sampling import noise, settings


@pytest.fixture(scope="module")
def functions(tiny_export):
    """2 prompts x 2 images a call; 4 steps and guidance 3 by default."""
    return load.local(tiny_export)


@pytest.fixture(scope="module")
def encoder(tiny_export):
    return tokenizer.load(tiny_export / "tokenizer")


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch, encoder):
    """Read once; it is the same for every call here."""
    monkeypatch.setattr(generate.tokenizer, "load", lambda folder, *_: encoder)


@pytest.fixture
def stub(functions):
    """Function (**functions) -> the export with some of its functions replaced by Python."""
    return lambda **replaced: dataclasses.replace(functions, **replaced)


# === Batches ===

BATCHES = [
    # prompts, images each; places of the export: P, M; image numbers of each call.
    ((1, 1, 1, 1), [[0]]),
    ((1, 3, 1, 1), [[0], [1], [2]]),
    ((2, 1, 1, 1), [[0], [1]]),
    ((2, 2, 2, 2), [[0, 1, 2, 3]]),
    ((1, 2, 2, 2), [[0, 1, 0, 1]]),
    ((1, 1, 2, 2), [[0, 0, 0, 0]]),
    ((1, 3, 1, 2), [[0, 1], [2, 2]]),
    ((2, 3, 2, 2), [[0, 1, 2, 2], [3, 4, 5, 5]]),
    ((3, 1, 2, 2), [[0, 0, 1, 1], [2, 2, 2, 2]]),
    ((3, 2, 2, 3), [[0, 1, 1, 2, 3, 3], [4, 5, 5, 4, 5, 5]]),
    ((1, 5, 2, 2), [[0, 1, 2, 3], [4, 4, 4, 4]]),
]


@pytest.mark.parametrize(("arguments", "expected"), BATCHES)
def test_batches(arguments, expected):
    assert generate.batches(*arguments) == expected


def test_batches_hold_every_image_and_one_prompt_per_group():
    for num_prompts in range(1, 5):
        for num_images in range(1, 6):
            for prompts in range(1, 4):
                for per_prompt in range(1, 4):
                    calls = generate.batches(num_prompts, num_images, prompts, per_prompt)
                    assert {i for call in calls for i in call} == set(range(num_prompts * num_images))
                    for call in calls:
                        assert len(call) == prompts * per_prompt
                        for start in range(0, len(call), per_prompt):
                            assert len({i // num_images for i in call[start : start + per_prompt]}) == 1


# === Pictures ===


@pytest.fixture(scope="module")
def nine(functions, encoder):
    """Three prompts of three images, seeds 10..18: two calls, both padded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate.tokenizer, "load", lambda folder, *_: encoder)
        return generate.generate(functions, ["a red apple", "a cat", "the sea"], seed=10, num_images=3)


def same(a, b):
    """Rows of a batch may differ in a float's last bits, since kernels cut batches into blocks: one level at most."""
    return np.abs(a.astype(int) - b).max() <= 1 and np.mean(a != b) < 0.01


def test_pictures_do_not_depend_on_their_place(functions, nine):
    """a, a, a, b, b, b, c, c, c; each equals the one drawn alone with its seed."""
    assert nine.shape == (9, 18, 14, 3) and nine.dtype == np.uint8
    assert len({image.tobytes() for image in nine}) == 9
    for i, prompt in ((0, "a red apple"), (2, "a red apple"), (3, "a cat"), (8, "the sea")):
        alone = generate.generate(functions, prompt, seed=10 + i, num_images=1)
        assert same(alone[0], nine[i])
    pair = generate.generate(functions, ["a cat", "the sea"], seed=14, num_images=1)
    assert same(pair[0], nine[4])
    assert not same(nine[0], nine[1])


def test_the_same_call_gives_the_same_pictures(functions):
    first, again = (generate.generate(functions, ["a cat"], seed=0) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (2, 18, 14, 3)  # the export's images per prompt
    other = generate.generate(functions, ["a cat"], seed=2)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("steps_per_call", [1, 2, 3, 4, 100])
def test_pictures_do_not_depend_on_the_chunks(functions, steps_per_call):
    """Bit for bit."""
    calls = []
    images = generate.generate(
        functions, ["a red apple"], seed=10, num_images=2, progress=calls.append, steps_per_call=steps_per_call
    )
    np.testing.assert_array_equal(images, generate.generate(functions, ["a red apple"], seed=10, num_images=2))
    assert sum(calls) == 4 and max(calls) == min(steps_per_call, 4) and len(calls) == -(-4 // steps_per_call)


def test_progress_over_several_calls(functions):
    calls = []
    generate.generate(functions, ["a", "b", "c"], num_images=1, num_steps=3, progress=calls.append, steps_per_call=2)
    assert calls == [2, 1, 2, 1]


def test_the_negative_prompt_counts_and_goes_with_its_prompt(functions, nine):
    def draw(negative, prompts=("a red apple",), **options):
        return generate.generate(functions, list(prompts), negative, seed=10, num_images=1, **options)

    assert same(draw(None)[0], nine[0])
    np.testing.assert_array_equal(draw(""), draw(None))  # no negative prompt is the empty prompt
    cat = draw("cat")
    assert not same(cat[0], nine[0])
    both = draw(["cat", None], prompts=["a red apple", "a cat"])
    assert same(both[0], cat[0]) and same(both[1], draw(None, prompts=["a red apple", "a cat"])[1])
    # Without guidance there is nothing that it could act on.
    np.testing.assert_array_equal(draw("cat", guidance_scale=1.0), draw(None, guidance_scale=0.0))
    with pytest.raises(InputError, match=r"expected one negative prompt or one per prompt \(3\), found 2"):
        draw(["cat", "dog"], prompts=["a", "b", "c"])


def test_settings_change_the_picture(functions, nine):
    base = {"seed": 10, "num_images": 1}
    for changes in ({"guidance_scale": 7.5}, {"num_steps": 5}, {"sampler": "euler"}, {"guidance_rescale": 0.7}):
        image = generate.generate(functions, "a red apple", **base, **changes)[0]
        assert not same(image, nine[0]), changes


def test_initial_noise_is_the_seeds(functions, stub):
    """What goes into denoise: one seed per image, its words, and noise of pipeline.sampling.noise in [h, w, 4]."""
    seen = []

    def denoise(**inputs):
        seen.append(inputs)
        return functions.denoise(**inputs)

    generate.generate(stub(denoise=denoise), "a", seed=2**64 - 1, num_images=3)
    seeds = [2**64 - 1, 0, 1, 1]  # after the last seed comes 0; the short group repeats its last image
    np.testing.assert_array_equal(seen[0]["latent"], noise.initial_latents(seeds, 9, 7))
    np.testing.assert_array_equal(seen[0]["seed"], noise.seed_words(seeds))
    assert seen[0]["memory"].shape == (4, 4, 9, 7, 4) and not seen[0]["memory"].any()
    assert (seen[0]["first_step"], seen[0]["last_step"]) == (0, 4)
    np.testing.assert_array_equal(seen[0]["guidance_scale"], np.full(4, 3.0, "float32"))


def test_zero_unconditional(functions, stub):
    """Where the export says so, no negative prompt means zeros, per prompt; "" is encoded."""
    seen = []

    def denoise(**inputs):
        seen.append(np.array(inputs["unconditional_context"]))
        return functions.denoise(**inputs)

    contract = dataclasses.replace(functions.manifest, zero_unconditional=True)
    generate.generate(stub(denoise=denoise, manifest=contract), ["a", "b"], [None, ""], num_steps=1)
    assert not seen[0][:2].any() and seen[0][2:].any()
    generate.generate(stub(denoise=denoise), ["a", "b"], [None, ""], num_steps=1)
    np.testing.assert_allclose(seen[1][:2], seen[1][2:], atol=1e-5)


# === The plan ===


def test_a_plan_needs_no_functions(functions):
    """Everything about a run is known from the manifest: prompts, places, seeds, scales, steps, ids."""
    run = generate.plan(functions.manifest, ["a red apple", "a cat"], ["blue", None], 7, 3, [2.0], num_steps=5)
    assert run.calls == [[0, 1, 2, 2], [3, 4, 5, 5]] and run.seeds == [7, 8, 9, 10, 11, 12]
    assert run.guidance_scales == [2.0] * 6 and run.settings.num_steps == 5 and run.image is None
    assert run.table.shape == (12, 39) and len(run.steps.rows) == 5
    assert {name: rows.shape for name, rows in run.tokens.items()} == dict.fromkeys(
        ("tokens", "negative_tokens", "token_weights", "negative_token_weights"), (2, 77)
    )
    assert run.tokens["tokens"][:, 1:5].tolist() == [[320, 736, 3055, 49407], [320, 2368, 49407, 49407]]
    assert run.tokens["negative_tokens"][:, :3].tolist() == [[49406, 1746, 49407], [49406, 49407, 49407]]


def test_everything_is_planned_once(functions, encoder, monkeypatch):
    """However many calls the pictures need: one steps table, each text tokenised once."""
    tables, texts, encode = [], [], tokenizer.Tokenizer.encode
    monkeypatch.setattr(generate, "table", lambda *of: tables.append(of) or settings.table(*of))
    monkeypatch.setattr(tokenizer.Tokenizer, "encode", lambda *of: texts.append(of[1]) or encode(*of))
    generate.generate(functions, ["a", "b", "c"], "d", num_images=2, num_steps=1)
    assert len(tables) == 1 and texts == ["a", "b", "c", "d"]


def test_pictures_handed_on_are_not_kept(functions, stub):
    """Any number of pictures takes no more memory than the calls at hand."""
    made, most = [], []

    class Picture(np.ndarray):
        """An array that can be watched."""

    def decode(latent):
        pictures = np.zeros((4, 18, 14, 3), "uint8").view(Picture)
        made.append(weakref.ref(pictures))
        most.append(sum(reference() is not None for reference in made))
        return {"generated_images": pictures, "finite": np.ones(4, bool)}

    still = stub(
        encode=lambda **inputs: {},
        denoise=lambda **inputs: {"latent": inputs["latent"], "memory": inputs["memory"]},
        decode=decode,
    )
    run = generate.plan(functions.manifest, ["a"] * 10, num_images=50, num_steps=1)
    assert sum(len(pictures) for pictures in generate.draw(still, run)) == 500
    assert len(most) == 125 and max(most) <= 2


# === Warnings and errors ===


def test_long_prompts_are_cut_with_a_warning_that_quotes_the_rest(functions, caplog):
    words = ["apple"] * 75
    with caplog.at_level(logging.WARNING, generate.__name__):
        generate.generate(functions, " ".join(words), num_steps=1)
        assert caplog.text == ""
        generate.generate(functions, " ".join([*words, "zebra", "lion"]), num_steps=1)
    cut = 'prompt 1 is longer than 75 tokens; dropped: "zebra lion"'
    assert [r.getMessage() for r in caplog.records] == [cut]
    caplog.clear()
    with caplog.at_level(logging.WARNING, generate.__name__):
        generate.generate(functions, ["a"] * 3, " ".join([*words, "zebra", "lion"]), num_images=3, num_steps=1)
    assert [r.getMessage() for r in caplog.records] == [f"negative {cut}"]


def test_pictures_that_are_not_finite_raise(functions, stub):
    def nan_latents(**inputs):
        result = dict(functions.denoise(**inputs))
        latent = np.array(result["latent"])
        latent[3, 8, 6, 3] = np.nan
        return result | {"latent": latent}

    with pytest.raises(InputError, match="the latents hold NaN or infinite values"):
        generate.generate(stub(denoise=nan_latents), "a")

    def nan_picture(latent):
        return functions.decode(latent=latent) | {"finite": np.array([True, True, True, False])}

    with pytest.raises(InputError, match="the decoded pictures hold NaN or infinite values"):
        generate.generate(stub(decode=nan_picture), "a")


REFUSED = [
    ({"num_steps": 0}, "num_steps should be between 1 and 12, found 0"),
    ({"num_steps": 13}, "num_steps should be between 1 and 12, found 13; 12 is the limit of the export"),
    ({"num_steps": -1}, "num_steps should be between 1 and 12"),
    ({"num_steps": 2.5}, "num_steps should be a whole number, found 2.5"),
    ({"guidance_scale": float("nan")}, "guidance_scale must be a finite number"),
    ({"guidance_scale": float("inf")}, "guidance_scale must be a finite number"),
    ({"guidance_rescale": 1.5}, "guidance_rescale within 0..1"),
    ({"guidance_rescale": -0.1}, "guidance_rescale within 0..1"),
    ({"sampler": "plms2"}, "unknown sampler 'plms2'; available: ddim, "),
    ({"num_images": 0}, "num_images must be 1 or more, found 0"),
    ({"seed": -1}, "seed should be between 0 and"),
    ({"seed": 2**64}, "seed should be between 0 and"),
    ({"seed": 1.0}, "seed should be a whole number, found 1.0"),
    ({"steps_per_call": 0}, "steps_per_call must be 1 or more, found 0"),
    ({"steps_per_call": -1}, "steps_per_call must be 1 or more, found -1"),
    ({"prompts": []}, "no prompt given"),
    ({"prompts": ["a", 5]}, "prompt should be text, found int"),
    ({"prompts": "caf\udce9"}, "is no UTF-8 text"),
    ({"negative_prompt": "caf\udce9"}, "is no UTF-8 text"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_refused(functions, stub, changes, message):
    """Before anything is drawn."""

    def refuse(**inputs):
        raise AssertionError("drawn")

    nothing_drawn = stub(denoise=refuse, decode=refuse)
    with pytest.raises(InputError, match=message) as error:
        generate.generate(nothing_drawn, **{"prompts": "a"} | changes)
    assert "\n" not in str(error.value)
