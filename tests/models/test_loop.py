"""The denoising loop against an independent run of the same recurrence in NumPy, plain and compiled by XLA."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from models import loop
from models.steps import MEMORY, ROW_SIZE, STATE
from pipeline.sampling import noise

N, H, W, C = 2, 3, 2, 4
SHAPE = (N, H, W, C)
S = 6
SEEDS = [3, 2**63 + 5]
CALLS = []  # (latent shape, timestep shape, context shape) of each trace of `dummy`


def dummy(latent, timestep, context):
    """A UNet that is not linear in anything."""
    CALLS.append((tuple(latent.shape), tuple(timestep.shape), tuple(context.shape)))
    shift = ops.mean(context, axis=(1, 2))[:, None, None, None]
    return ops.tanh(0.5 * latent + timestep[:, None, None, None] / 1000 + shift)


def dummy_numpy(latent, timestep, context):
    return np.tanh(0.5 * latent + timestep / 1000 + context.mean((1, 2))[:, None, None, None])


def random_table(noisy=True, seed=0):
    """Rows in which every coefficient of every memory counts."""
    random = np.random.default_rng(seed)
    rows = random.uniform(-0.4, 0.4, (S, ROW_SIZE))
    rows[:, 0] = np.linspace(999, 1, S)
    rows[:, 1:4] = random.uniform(0.5, 1.5, (S, 3))  # p, q, g
    if not noisy:
        rows[:, -STATE:] = 0
    return rows.astype("float32")


def make_inputs(**changes):
    random = np.random.default_rng(1)
    inputs = {
        "latent": random.standard_normal(SHAPE),
        "memory": random.standard_normal((MEMORY, *SHAPE)),
        "steps": random_table(),
        "guidance": [6.5, 1.0],
        "guidance_rescale": [0.0, 0.7],
        "context": random.standard_normal((N, 5, 3)),
        "unconditional_context": random.standard_normal((N, 5, 3)),
    }
    inputs = {name: np.asarray(value, "float32") for name, value in (inputs | changes).items()}
    inputs["seed"] = noise.seed_words(SEEDS)
    return {name: tf.constant(value) for name, value in inputs.items()}


def body(
    latent, memory, steps, first_step, last_step, guidance, guidance_rescale, seed, context, unconditional_context
):
    conditioning = {"context": (context, unconditional_context)}
    return loop.denoise(
        *(dummy, latent, memory, steps, first_step, last_step, guidance, guidance_rescale, seed, conditioning)
    )


@pytest.fixture(scope="module", params=["graph", "xla"])
def run(request):
    """Function (inputs, first, last) -> latent, memory, denoised; one trace serves all tests."""
    function = tf.function(body, jit_compile=request.param == "xla", autograph=False)

    def call(inputs, first=0, last=S):
        results = function(first_step=tf.constant(first), last_step=tf.constant(last), **inputs)
        return [result.numpy() for result in results]

    call.function = function
    return call


def run_numpy(inputs, first=0, last=S):
    """The recurrence of the docstring of models.loop in float64."""
    inputs = {name: value.numpy().astype("float64") for name, value in inputs.items() if name != "seed"}
    guidance = inputs["guidance"].reshape(-1, 1, 1, 1)
    amount = inputs["guidance_rescale"].reshape(-1, 1, 1, 1)
    z = np.concatenate([inputs["latent"][None], inputs["memory"]])
    denoised = np.zeros(SHAPE)
    for index in range(first, last):
        timestep, p, q, g, *rest = inputs["steps"][index]
        a, b, c = np.split(np.array(rest), [25, 30])
        conditional = dummy_numpy(z[0], timestep, inputs["context"])
        unconditional = dummy_numpy(z[0], timestep, inputs["unconditional_context"])
        out = conditional + g * guidance * (conditional - unconditional)
        deviations = [x.std((1, 2, 3), keepdims=True) for x in (conditional, out)]
        out = np.where(amount > 0, amount * out * deviations[0] / deviations[1] + (1 - amount) * out, out)
        denoised = p * z[0] + q * out
        eps = np.stack([noise.normal(seed, index + 1, (C, H, W)).transpose(1, 2, 0) for seed in SEEDS])
        z = np.einsum("ij,j...->i...", a.reshape(5, 5), z)
        z = z + np.multiply.outer(b, denoised) + np.multiply.outer(c, eps)
    return z[0], z[1:], denoised


@pytest.mark.parametrize(("first", "last"), [(0, S), (2, 5), (5, 6)])
def test_rows_equal_numpy(run, first, last):
    """All coefficients, all five tensors of the state, noise, guidance and its rescaling at once."""
    inputs = make_inputs()
    for found, expected in zip(run(inputs, first, last), run_numpy(inputs, first, last), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [(1,), (3,), (2, 4), (1, 2, 3, 4, 5)])
def test_chunks_equal_the_whole_bit_for_bit(run, cuts):
    inputs = make_inputs()
    whole = run(inputs)
    borders = [0, *cuts, S]
    for first, last in zip(borders, borders[1:], strict=False):
        latent, memory, denoised = run(inputs, first, last)
        inputs = inputs | {"latent": tf.constant(latent), "memory": tf.constant(memory)}
    for found, expected in zip((latent, memory, denoised), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_no_rows_change_nothing(run):
    inputs = make_inputs()
    latent, memory, denoised = run(inputs, 2, 2)
    np.testing.assert_array_equal(latent, inputs["latent"])
    np.testing.assert_array_equal(memory, inputs["memory"])
    np.testing.assert_array_equal(denoised, 0)


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (3, 2), (0, S + 1), (S + 1, S + 2), (-5, -2), (0, 2**31 - 1)])
def test_a_wrong_range_gives_nan_and_never_a_picture(run, first, last):
    assert np.isnan(run(make_inputs(), first, last)[0]).all()


def test_unused_rows_of_a_table_are_not_touched(run):
    table = random_table()
    table[3:] = np.nan
    assert all(np.isfinite(result).all() for result in run(make_inputs(steps=table), 0, 3))
    assert np.isnan(run(make_inputs(steps=table), 0, 4)[0]).all()


def test_without_guidance_only_the_prompt_counts(run):
    """guidance 0, which guidance_scale 1 and 0 become: exactly the conditional prediction, whatever the other is."""
    first = run(make_inputs(guidance=[0, 0]))
    other = run(make_inputs(guidance=[0, 0], unconditional_context=np.full((N, 5, 3), 0.3)))
    for a, b in zip(first, other, strict=True):
        np.testing.assert_array_equal(a, b)
    guided = run(make_inputs(guidance=[0, 1]))[0]
    np.testing.assert_array_equal(guided[0], first[0][0])
    assert np.abs(guided[1] - first[0][1]).max() > 1e-3


@pytest.mark.parametrize(("guidance", "expected"), [(6.5, 8.5), (0.0, 2.0), (-1.0, 1.0)])
def test_guidance_by_hand(guidance, expected):
    """Unconditional 1, conditional 2: scale 7.5 gives 8.5, scale 1 gives 2; -1 is KerasCV's scale 0."""

    def model(latent, timestep, context):
        return ops.zeros_like(latent) + context[:, :1, :1, None]

    row = np.zeros((1, ROW_SIZE), "float32")
    row[0, [2, 3, 29]] = 1  # q, g, B[0]: the next latent is the guided prediction
    inputs = make_inputs(guidance=[guidance] * 2, guidance_rescale=[0, 0])
    ones = tf.ones((N, 5, 3))
    latent, _, denoised = loop.denoise(
        *(model, inputs["latent"], inputs["memory"], tf.constant(row), tf.constant(0), tf.constant(1)),
        *(inputs["guidance"], inputs["guidance_rescale"], inputs["seed"], {"context": (2 * ones, ones)}),
    )
    np.testing.assert_array_equal(latent, np.full(SHAPE, expected))
    np.testing.assert_array_equal(denoised, latent)


def test_a_row_can_switch_guidance_off(run):
    table = random_table()
    table[:, 3] = 0
    guided, unguided = run(make_inputs(steps=table)), run(make_inputs(steps=table, guidance=[0, 0]))
    np.testing.assert_allclose(guided[0], unguided[0], rtol=1e-6, atol=1e-6)


def test_one_batched_call_of_the_unet(run):
    """One trace for all of this file's calls, and in it one UNet of 2N rows: the prompt's first."""
    CALLS.clear()
    run(make_inputs())
    run(make_inputs(), 1, 2)
    assert CALLS == [] and run.function.experimental_get_tracing_count() == 1
    tf.function(body, autograph=False).get_concrete_function(
        first_step=tf.constant(0), last_step=tf.constant(S), **make_inputs()
    )
    assert CALLS == [((2 * N, H, W, C), (2 * N,), (2 * N, 5, 3))]


def test_the_loop_is_not_unrolled():
    """As many nodes for 50 rows as for 4."""
    counts = []
    for rows in (4, 50):
        table = np.zeros((rows, ROW_SIZE), "float32")
        function = tf.function(body, autograph=False).get_concrete_function(
            first_step=tf.constant(0), last_step=tf.constant(rows), **make_inputs(steps=table)
        )
        graph = function.graph.as_graph_def()
        counts.append(len(graph.node) + sum(len(f.node_def) for f in graph.library.function))
    assert counts[0] == counts[1] > 0


# === Noise ===


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_random_words_equal_the_hosts(jit_compile):
    seeds = [0, 1, 2**32 - 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF]
    words = tf.constant(noise.seed_words(seeds))
    index = np.array([0, 1, 2, 16383, 2**31 - 1, 2**32 - 1], "uint32")
    function = tf.function(
        lambda words, offset, index: loop.philox_pair(ops.cast(words, "uint32"), offset, index), jit_compile=jit_compile
    )
    for offset in (0, 1, 1000, 2**32 - 1):
        found = np.stack(function(words, tf.constant(offset, tf.uint32), tf.constant(index)))
        assert found.dtype == np.uint32
        for i, seed in enumerate(seeds):
            counter = np.stack([np.full(6, offset), np.zeros(6), index, np.zeros(6)]).astype("uint32")
            expected = noise.philox(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], "uint32"))
            np.testing.assert_array_equal(found[:, i], expected[:2])


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_normal_numbers_equal_the_hosts(jit_compile):
    """Row r has offset r + 1 (the initial noise has 0), drawn per image as [channels, h, w]."""
    seeds, (height, width) = [7, 2**40 + 3], (48, 40)
    function = tf.function(
        lambda row, wanted: loop.noise(tf.constant(noise.seed_words(seeds)), row, (2, height, width, 4), wanted),
        jit_compile=jit_compile,
    )
    for row in (0, 1, 255):
        found = function(tf.constant(row), tf.constant(True))
        for i, seed in enumerate(seeds):
            expected = noise.normal(seed, row + 1, (4, height, width)).transpose(1, 2, 0)
            np.testing.assert_allclose(found[i], expected, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(function(tf.constant(0), tf.constant(False)), 0)


def test_noise_of_an_image_depends_on_its_seed_alone(run):
    inputs = make_inputs(guidance=[1, 1], guidance_rescale=[0, 0])
    swapped = {
        name: value[:, ::-1] if name == "memory" else value if name == "steps" else value[::-1]
        for name, value in inputs.items()
    }
    there, back = run(inputs), run(swapped)
    np.testing.assert_allclose(back[0][::-1], there[0], rtol=1e-6, atol=1e-6)
    other = run(inputs | {"seed": tf.constant(noise.seed_words([SEEDS[0], 1]))})[0]
    np.testing.assert_array_equal(other[0], there[0][0])
    assert np.abs(other[1] - there[0][1]).max() > 0.1


# === Guidance rescaling ===


def test_rescaling_by_hand():
    """Lin et al. 2023: to the conditional prediction's deviation, mixed back by the amount; 0 changes nothing."""
    conditional = np.random.default_rng(0).standard_normal(SHAPE).astype("float32")
    out = 5 * conditional + 1
    rescaled = loop.rescale(out, conditional, np.float32([1, 0.5])).numpy()
    np.testing.assert_allclose(rescaled.std((1, 2, 3)), conditional.std((1, 2, 3)) * [1, 3], rtol=1e-5)
    np.testing.assert_array_equal(loop.rescale(out, conditional, np.float32([0, 0])), out)
    # A prediction without any contrast stays what it is where nothing is rescaled.
    flat = np.ones(SHAPE, "float32")
    np.testing.assert_array_equal(loop.rescale(flat, flat, np.float32([0, 0])), flat)
