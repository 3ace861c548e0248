"""The exported functions around networks of one line each, whose right results are known."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from models import endpoints, loop, steps, text_encoder
from models.export_spec import ExportSpec
from models.families import FAMILIES, kerascv_numerics
from pipeline.sampling import samplers, schedules

SD1 = FAMILIES["sd1"]
SPEC = ExportSpec(height=16, width=24, prompts=2, images_per_prompt=2, dtype="float32", max_steps=12)
EMPTY = np.full(77, 9, "int32")
ALPHAS = schedules.alphas_cumprod(SD1.scheduler)
SPACINGS = ("leading", "trailing", "linspace")


def by_name(made):
    return {endpoint.name: endpoint for endpoint in made}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


# === DDIM's rows, made in the graph ===


def scheduler(**changes):
    return samplers.resolved("ddim", dataclasses.replace(SD1.scheduler, **changes))


@pytest.mark.parametrize("final_alpha_one", [True, False])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("spacing", SPACINGS)
def test_ddim_rows_equal_the_samplers_for_every_step_count(spacing, prediction_type, final_alpha_one):
    """Bit for bit. Timesteps depend on the spacing alone, so every count is tried once for each."""
    config = scheduler(timestep_spacing=spacing, prediction_type=prediction_type, set_alpha_to_one=final_alpha_one)
    function = tf.function(lambda n: loop.ddim_rows(n, 1000, config, ALPHAS), autograph=False)
    counts = range(1, 1000) if (prediction_type, final_alpha_one) == ("epsilon", False) else range(1, 256, 7)
    for n in counts:
        _, expected = samplers.steps_table("ddim", config, n, 1000)
        found = function(tf.constant(n)).numpy()
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found[:n], expected[:n], err_msg=f"{n} steps")
        assert np.isnan(found[n:]).all()
    assert function.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("spacing", SPACINGS)
def test_ddim_rows_under_xla(spacing):
    """48 and 96 trailing steps meet timesteps of half a step, where the order of rounding decides."""
    config = scheduler(timestep_spacing=spacing)
    function = tf.function(lambda n: loop.ddim_rows(n, 256, config, ALPHAS), jit_compile=True, autograph=False)
    for n in (1, 4, 16, 48, 50, 61, 96, 256):
        _, expected = samplers.steps_table("ddim", config, n, 256)
        np.testing.assert_array_equal(function(tf.constant(n))[:n], expected[:n], err_msg=f"{n} steps")


def test_ddim_rows_of_kerascvs_grid():
    """999, 979, 958, ..., 0, ending at a signal of exactly 1."""
    config = kerascv_numerics(SD1).scheduler
    rows = loop.ddim_rows(tf.constant(50), 50, config, ALPHAS).numpy()
    np.testing.assert_array_equal(rows, samplers.steps_table("ddim", config, 50, 50)[1])
    assert rows[[0, 1, 2, -1], 0].tolist() == [999, 979, 958, 0]
    assert rows[-1, 4] == 0 and rows[-1, 29] == 1


def test_a_grid_that_leaves_the_schedule_gives_nan():
    """1000 steps with steps_offset 1 ask for timestep 1000: the sampler raises, the graph cannot."""
    rows = loop.ddim_rows(tf.constant(1000), 1000, scheduler(), ALPHAS).numpy()
    assert np.isnan(rows[0, 1:3]).all()


def test_the_schedule_keeps_its_digits():
    """In half precision alphas_cumprod[0] = 0.99915 would be 1 and the last step would divide by nothing."""
    rows = loop.ddim_rows(tf.constant(50), 50, scheduler(), ALPHAS).numpy().astype("float64")
    alpha = 1 / rows[-1, 1] ** 2  # p = 1 / sqrt(alpha) at timestep 1
    final = 1 - rows[-1, 4] ** 2 * (1 - alpha)
    assert 1 - final == pytest.approx(8.5e-4, abs=1e-7)


# === Text encoder ===


def encode_tokens(tokens):
    """[B, 77] to [B, 77, 768]: each vector is its token."""
    return ops.repeat(ops.cast(tokens, "float32")[..., None], SD1.text_encoder.hidden_size, axis=-1), None


@pytest.fixture(scope="module")
def text():
    return by_name(endpoints.text_encoder([encode_tokens], SD1, SPEC, EMPTY))


def test_contexts_come_in_the_order_of_prompts(text):
    """Two prompts of two images: a, a, b, b, and the negative prompts likewise."""
    ones = np.ones((2, 77), "float32")
    a, b, na, nb = (np.full(77, value, "int32") for value in (1, 2, 3, 4))
    result = text["encode"].function(ones, ones, tokens=np.stack([a, b]), negative_tokens=np.stack([na, nb]))
    assert result["context"].shape == (4, 77, 768)
    assert result["context"][:, 0, 0].numpy().tolist() == [1, 1, 2, 2]
    assert result["unconditional_context"][:, 0, 0].numpy().tolist() == [3, 3, 4, 4]


@pytest.mark.parametrize(
    ("rows", "expected"), [([5], [5, 5, 5, 5]), ([5, 6], [5, 5, 6, 6]), ([5, 6, 7, 8], [5, 6, 7, 8])]
)
def test_token_rows_of_published_clients(text, rows, expected):
    """One row, one per prompt or one per image; image r takes row r * B // N; the rest is the empty prompt."""
    tokens = np.repeat(np.int32(rows)[:, None], 77, axis=1)
    result = text["serving_default"].function(ops.convert_to_tensor(tokens))
    assert result["context"][:, 0, 0].numpy().tolist() == expected
    np.testing.assert_array_equal(result["unconditional_context"], np.full((4, 77, 768), 9))
    assert [bool(fits) for fits, _ in text["serving_default"].preconditions(tokens)] == [True]


@pytest.mark.parametrize("rows", [0, 3, 5, 8])
def test_other_numbers_of_token_rows_are_refused(text, rows):
    [(fits, message)] = text["serving_default"].preconditions(np.zeros((rows, 77), "int32"))
    assert not bool(fits) and message == "tokens must have 1, 2 or 4 rows"


def test_weights_of_one_change_nothing():
    """Bit for bit, row by row; otherwise each vector is multiplied and the row's mean restored."""
    context = normal(3, 77, 8) + 0.1
    weights = np.ones((3, 77), "float32")
    np.testing.assert_array_equal(text_encoder.weigh(context, weights), context)
    weights[1, 5] = 1.5
    found = text_encoder.weigh(context, weights).numpy()
    np.testing.assert_array_equal(found[[0, 2]], context[[0, 2]])
    expected = context[1].astype("float64") * weights[1][:, None]
    expected *= context[1].mean(dtype="float64") / expected.mean()
    np.testing.assert_allclose(found[1], expected, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(found.mean((1, 2)), context.mean((1, 2)), rtol=1e-4)


def test_weights_that_leave_no_mean_give_no_nan():
    """Zero weights make a zero mean."""
    assert np.isfinite(text_encoder.weigh(normal(1, 77, 8), np.zeros((1, 77), "float32"))).all()


# === UNet ===


class Tanh:
    """In the place of a UNet."""

    def prepare(self, context):
        return {"words": ops.mean(context, axis=(1, 2))[:, None, None, None]}

    def predict(self, latent, timestep, words):
        return ops.tanh(latent + timestep[:, None, None, None] / 1000 + words)


@pytest.fixture(scope="module")
def diffusion():
    return by_name(endpoints.diffusion_model(Tanh(), SD1, SPEC, scheduler(), ALPHAS))


def contexts():
    return {"context": normal(4, 77, 768) + 1, "unconditional_context": normal(4, 77, 768, seed=1) - 1}


def denoise_inputs(num_steps, guidance_scale):
    return {
        "latent": normal(4, 2, 3, 4, seed=2),
        "memory": np.zeros((4, 4, 2, 3, 4), "float32"),
        "steps": samplers.steps_table("ddim", SD1.scheduler, num_steps, SPEC.max_steps)[1],
        "first_step": np.int32(0),
        "last_step": np.int32(num_steps),
        "guidance_scale": np.full(4, guidance_scale, "float32"),
        "guidance_rescale": np.zeros(4, "float32"),
        "seed": np.zeros((4, 2), "int32"),
        **contexts(),
    }


@pytest.mark.parametrize(("num_steps", "scale"), [(1, 7.5), (5, 7.5), (12, 2.0), (4, 1.0)])
def test_the_published_signature_runs_the_same_loop(diffusion, num_steps, scale):
    """serving_default from given noise equals denoise with DDIM's table, for scales of 1 and more."""
    inputs = denoise_inputs(num_steps, scale)
    expected = diffusion["denoise"].function(**inputs)["latent"]
    found = diffusion["serving_default"].function(
        inputs["latent"], tf.constant(num_steps), tf.constant(scale, tf.float32), **contexts()
    )["latent"]
    np.testing.assert_array_equal(found, expected)
    assert [spec.name for spec in diffusion["serving_default"].noise_inputs] == ["latent"]


def test_what_does_not_change_is_computed_once(diffusion):
    """`prepare` runs before the loop, on both halves at once, and what it returns is what the UNet gets."""
    prepared = []

    class Doubled(Tanh):
        def prepare(self, context):
            prepared.append(context.shape)
            return super().prepare(2 * context)

    made = by_name(endpoints.diffusion_model(Doubled(), SD1, SPEC, scheduler(), ALPHAS))
    inputs = denoise_inputs(3, 7.5)
    found = made["denoise"].function(**inputs)["latent"]
    assert prepared == [(8, 77, 768)]
    expected = diffusion["denoise"].function(**inputs | {name: 2 * value for name, value in contexts().items()})
    np.testing.assert_array_equal(found, expected["latent"])


def test_scales_below_one(diffusion):
    """denoise: conditional only, as in diffusers. serving_default: u + s (c - u), as published; 0 is u alone."""
    conditional = diffusion["denoise"].function(**denoise_inputs(3, 1.0))["latent"]
    for scale in (0.0, 0.5, -3.0):
        np.testing.assert_array_equal(diffusion["denoise"].function(**denoise_inputs(3, scale))["latent"], conditional)
    swapped = denoise_inputs(3, 1.0)
    swapped["context"] = swapped["unconditional_context"]
    unconditional = diffusion["denoise"].function(**swapped)["latent"]
    published = diffusion["serving_default"].function(
        denoise_inputs(3, 0)["latent"], tf.constant(3), tf.constant(0.0), **contexts()
    )["latent"]
    np.testing.assert_allclose(published, unconditional, atol=2e-6)
    assert np.abs(np.array(conditional) - np.array(unconditional)).max() > 0.1


@pytest.mark.parametrize("num_steps", [0, -1, 13, 2**31 - 1, -(2**31)])
def test_step_counts_outside_the_table(diffusion, num_steps):
    """Asserted where the graph can, NaN where it cannot."""
    endpoint = diffusion["serving_default"]
    [(fits, message)] = endpoint.preconditions(num_steps=tf.constant(num_steps))
    assert not bool(fits) and message == "num_steps must be in 1..12, the rows this export was made with"
    result = endpoint.function(normal(4, 2, 3, 4), tf.constant(num_steps), tf.constant(7.5), **contexts())
    assert np.isnan(result["latent"]).all()


@pytest.mark.parametrize(
    ("first", "last", "fits"), [(0, 12, True), (5, 5, True), (-1, 3, False), (4, 3, False), (0, 13, False)]
)
def test_row_ranges_outside_the_table(diffusion, first, last, fits):
    checks = diffusion["denoise"].preconditions(first_step=tf.constant(first), last_step=tf.constant(last))
    assert all(bool(check) for check, _ in checks) == fits


def test_one_prediction(diffusion):
    latent, timestep, context = normal(4, 2, 3, 4), np.float32([1, 20, 500, 981]), contexts()["context"]
    found = diffusion["unet"].function(latent, timestep, context=context)["prediction"]
    unet = Tanh()
    np.testing.assert_array_equal(found, unet.predict(latent, timestep, **unet.prepare(context)))


# === Decoder ===


def decoder(model, config=SD1, **changes):
    return by_name(endpoints.decoder(model, config, dataclasses.replace(SPEC, **changes)))


LEVELS = np.float32([-1, -0.5, 0, 0.5, 0.999, 1])
TRUNCATED, ROUNDED = [0, 63, 127, 191, 254, 255], [0, 64, 128, 191, 255, 255]


def constant_image(values):
    """A decoder that draws these values, cycled over the picture's numbers, whatever it is given."""
    return lambda latent: ops.convert_to_tensor(np.resize(np.float32(values), (4, 16, 24, 3)))


@pytest.mark.parametrize(("config", "expected"), [(SD1, ROUNDED), (kerascv_numerics(SD1), TRUNCATED)])
def test_pixels(config, expected):
    """diffusers rounds, KerasCV truncates; both cut what lies outside -1..1."""
    decode = decoder(constant_image(LEVELS), config)["decode"].function
    result = decode(normal(4, 2, 3, 4))
    assert result["generated_images"].dtype == tf.uint8
    assert np.ravel(result["generated_images"])[:6].tolist() == expected
    beyond = decoder(constant_image([-7, 7, -1e30, 1e30]), config)["decode"].function(normal(4, 2, 3, 4))
    assert np.ravel(beyond["generated_images"])[:4].tolist() == [0, 255, 0, 255]
    assert np.array(beyond["finite"]).all()


def test_every_level_comes_back():
    levels = np.arange(256)
    image = decoder(constant_image(levels / 127.5 - 1))["decode"].function(normal(4, 2, 3, 4))["generated_images"]
    np.testing.assert_array_equal(np.ravel(image)[:256], levels)


@pytest.mark.parametrize(("factor", "expected"), [(0.18215, 5.489981), (0.13025, 7.677543)])
def test_the_scaling_factor_is_divided_out_once(factor, expected):
    """An identity decoder on latents of 1."""
    config = dataclasses.replace(SD1, vae=dataclasses.replace(SD1.vae, scaling_factor=factor))
    ones = np.ones((4, 2, 3, 4), "float32")
    image = decoder(lambda latent: latent[..., :3], config)["decode_float"].function(ones)["image"]
    np.testing.assert_allclose(image, np.full((4, 2, 3, 3), expected), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_pictures_that_are_not_finite_are_marked(bad):
    """Image by image; serving_default and decode_png check it."""
    image = np.zeros((4, 16, 24, 3), "float32")
    image[2, 15, 23, 2] = bad
    made = decoder(lambda latent: ops.convert_to_tensor(image))
    result = made["decode"].function(normal(4, 2, 3, 4))
    assert result["finite"].numpy().tolist() == [True, True, False, True]
    assert made["decode"].postconditions is None
    for name in ("serving_default", "decode_png"):
        [(fits, message)] = made[name].postconditions(**result)
        assert not bool(fits) and message == "the decoded images hold NaN or infinite values"


@pytest.mark.parametrize(
    ("force_upcast", "dtype", "expected"), [(True, "bfloat16", "float32"), (False, "bfloat16", "bfloat16")]
)
def test_precision_of_decoding(force_upcast, dtype, expected):
    """float32 unless the VAE's config allows the export's own dtype."""
    seen = []

    def model(latent):
        seen.append(latent.dtype.name)
        return ops.zeros((4, 16, 24, 3), dtype=latent.dtype)

    config = dataclasses.replace(SD1, vae=dataclasses.replace(SD1.vae, force_upcast=force_upcast))
    image = decoder(model, config, dtype=dtype)["decode_float"].function(normal(4, 2, 3, 4))["image"]
    assert seen == [expected] and image.dtype == tf.float32


def test_names_are_the_wiring(text, diffusion):
    """Every output of encode is an input of denoise, its latent the input of decode; sizes are the spec's."""
    decode = decoder(lambda latent: latent)["decode"]
    assert set(text["encode"].outputs) <= set(diffusion["denoise"].inputs)
    latent = next(spec for spec in diffusion["denoise"].outputs if spec.name == "latent")
    assert decode.inputs == (latent,) and latent.shape == (4, 2, 3, 4)
    assert steps.ROW_SIZE == samplers.steps_table("ddim", SD1.scheduler, 1, 1)[1].shape[1]
