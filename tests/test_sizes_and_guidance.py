"""Several sizes over one copy of the weights; where and how much guidance acts."""

import dataclasses

import numpy as np
import pytest

from models.errors import InputError
from models.export_spec import ExportSpec, Size
from models.steps import ROW
from pipeline import generate, load, manifest
from pipeline.sampling import settings

OTHER = Size(width=20, height=12)


@pytest.fixture(scope="module")
def sized_export(exports, checkpoint_folder, export_spec):
    """1 prompt x 2 images of two blocks, at 14x18 and at 20x12."""
    from pipeline import export
    from pipeline.checkpoints import source

    spec = export_spec(prompts=1, more_sizes=(OTHER,), prompt_chunks=2)
    export.export(source.diffusers_source(checkpoint_folder), exports / "sized", spec)
    return exports / "sized"


@pytest.fixture(scope="module")
def functions(sized_export):
    return load.local(sized_export)


def test_sizes_share_their_weights(sized_export, exports, checkpoint_folder, export_spec, tiny_export):
    contract = manifest.read(sized_export)
    names = contract.signatures["diffusion_model"]
    assert {"denoise", "denoise_20x12", "denoise_unguided_20x12", "unet_20x12"} <= set(names)
    assert {"decode_20x12", "decode_float_20x12", "decode_png_20x12"} <= set(contract.signatures["decoder"])
    one = tiny_export / "diffusion_model" / "1" / "variables" / "variables.data-00000-of-00001"
    two = sized_export / one.relative_to(tiny_export)
    # The same numbers; only the index of objects has more entries.
    assert two.stat().st_size < 1.001 * one.stat().st_size
    # Clients of the published SavedModels know one size and one block of 77 tokens.
    assert "serving_default" not in names and "serving_default" in contract.signatures["decoder"]


def test_each_size_draws_its_own(sized_export, functions):
    wide = load.local(sized_export, width=20)
    assert generate.generate(functions, "a").shape == (2, 18, 14, 3)
    assert generate.generate(wide, "a").shape == (2, 12, 20, 3)
    assert wide.size == OTHER and load.local(sized_export, height=18).size == Size(14, 18)


def test_other_sizes_are_refused_by_name(sized_export):
    with pytest.raises(InputError, match="sized: draws 14x18, 20x12, not 20x18; export again with --sizes"):
        load.local(sized_export, width=20, height=18)


def test_sizes_are_checked_at_export(checkpoint_folder):
    from pipeline.checkpoints import diffusers_folder

    config = diffusers_folder.read_config(checkpoint_folder)

    def check(*sizes):
        ExportSpec(18, 14, 1, 1, "float32", 4, more_sizes=sizes).check(config)

    check(OTHER)
    with pytest.raises(InputError, match="--width 21: must be a multiple of 2; nearest: 20 or 22"):
        check(Size(21, 12))
    with pytest.raises(InputError, match="--sizes 14x18,14x18: names a size twice"):
        check(Size(14, 18))


def test_stretches():
    rows = np.array([False, False, True, True, True, False])
    assert generate.stretches(rows, None) == [(0, 2), (2, 5), (5, 6)]
    assert generate.stretches(rows, 2) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert generate.stretches(np.ones(3, bool), 2) == [(0, 2), (2, 3)]


def counted(functions):
    """The same functions, noting which loop ran which rows."""
    calls = []

    def note(name):
        def call(**inputs):
            calls.append((name, int(inputs["first_step"]), int(inputs["last_step"])))
            return getattr(functions, name)(**inputs)

        return call

    names = ("denoise", "denoise_unguided")
    return dataclasses.replace(functions, **{name: note(name) for name in names}), calls


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [("denoise", 0, 4)]),
        ({"guidance_scale": 1.0}, [("denoise_unguided", 0, 4)]),
        ({"guidance_scale": 0.0}, [("denoise_unguided", 0, 4)]),
        ({"guidance_scale": [1.0, 2.0]}, [("denoise", 0, 4)]),
        ({"guidance_end": 0.5}, [("denoise", 0, 2), ("denoise_unguided", 2, 4)]),
        ({"guidance_start": 0.5}, [("denoise_unguided", 0, 2), ("denoise", 2, 4)]),
        ({"guidance_start": 0.25, "guidance_end": 0.5, "steps_per_call": 1}, "one by one"),
    ],
)
def test_rows_without_guidance_cost_half(functions, how, expected):
    watched, calls = counted(functions)
    generate.generate(watched, "a", **how)
    if expected == "one by one":
        names = ["denoise_unguided", "denoise", "denoise_unguided", "denoise_unguided"]
        expected = [(name, i, i + 1) for i, name in enumerate(names)]
    assert calls == expected


def test_the_interval_is_the_tables_g_column(functions):
    chosen = settings.settings(functions.manifest, guidance_start=0.25, guidance_end=0.75)
    steps, rows = settings.table(functions.manifest, chosen)
    assert steps.rows[:, ROW["g"]].ravel().tolist() == [0, 1, 1, 0]
    np.testing.assert_array_equal(rows[:4], steps.rows)


def test_unguided_rows_equal_guidance_one(functions):
    """The loop of half the work computes what the guided one computes at scale 1."""
    run = generate.plan(functions.manifest, "a red apple", seed=1, guidance_scale=1.0)
    contexts = generate.encode(functions, run, run.calls[0])
    half = np.asarray(generate.denoise(functions, run, run.calls[0], contexts))

    def guided(**inputs):
        scale = np.ones(2, "float32")
        guidance = {"guidance_scale": scale, "guidance_rescale": 0 * scale}
        return functions.denoise(**inputs, **negative(contexts), **guidance)

    watched = dataclasses.replace(functions, denoise_unguided=guided)
    full = np.asarray(generate.denoise(watched, run, run.calls[0], contexts))
    np.testing.assert_allclose(half, full, atol=1e-5)


def negative(contexts):
    return {name: value for name, value in contexts.items() if name.startswith("unconditional_")}


def test_guidance_per_image_equals_each_alone(functions):
    both = generate.generate(functions, "a red apple", guidance_scale=[1.5, 4.0])
    for image, scale in enumerate((1.5, 4.0)):
        alone = generate.generate(functions, "a red apple", guidance_scale=scale)
        np.testing.assert_array_equal(both[image], alone[image])
    assert (both[0] != generate.generate(functions, "a red apple", guidance_scale=4.0)[0]).any()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"guidance_scale": [1.0, 2.0, 3.0]}, r"expected one finite guidance_scale or one per image \(2\)"),
        ({"guidance_scale": float("nan")}, "guidance_scale must be a finite number"),
        ({"guidance_start": 0.6, "guidance_end": 0.5}, "must be 0 <= start <= end <= 1, found 0.6 and 0.5"),
        ({"guidance_end": 1.5}, "must be 0 <= start <= end <= 1"),
        ({"negative_prompt": ["a", "b"]}, r"expected one negative prompt or one per prompt \(1\), found 2"),
    ],
)
def test_bad_guidance(functions, how, message):
    with pytest.raises(InputError, match=message):
        generate.generate(functions, "a", **how)


def test_weighted_and_long_prompts_change_the_picture(functions):
    plain = generate.generate(functions, "a red apple")
    np.testing.assert_array_equal(plain, generate.generate(functions, "a (red:1.0) apple"))
    assert (plain != generate.generate(functions, "a (red:1.5) apple")).any()
    long = " ".join(["apple"] * 80)
    assert (generate.generate(functions, long) != generate.generate(functions, " ".join(["apple"] * 75))).any()
