"""Steps tables against diffusers' schedulers (tests/goldens/samplers.npz) and against exact values."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from models.config import FAMILIES, InputError, kerascv_numerics
from pipeline import samplers
from pipeline.samplers import ROW, SAMPLERS, Steps, steps_table

SD1 = FAMILIES["sd1"].scheduler
SPACINGS = ("leading", "trailing", "linspace")
GOLDENS = np.load(Path(__file__).parent / "goldens" / "samplers.npz")


def scheduler(**changes):
    return dataclasses.replace(SD1, **changes)


def run_rows(rows, z0, model, first=0, last=None, memory=None):
    """The recurrence of the module's docstring in float32 without noise; also every z0 on the way."""
    z = np.zeros((samplers.STATE, *z0.shape), np.float32)
    z[0] = z0
    if memory is not None:
        z[1:] = memory
    seen = [z[0]]
    for row in rows[first:last]:
        timestep, p, q = (row[ROW[name]][0] for name in ("timestep", "p", "q"))
        denoised = p * z[0] + q * model(z[0], timestep)
        A = row[ROW["A"]].reshape(samplers.STATE, samplers.STATE)
        z = np.tensordot(A, z, 1) + np.multiply.outer(row[ROW["B"]], denoised)
        seen.append(z[0])
    return z, np.stack(seen)


def dummy_model(x, timestep):
    return np.tanh(np.float32(0.5) * x + timestep / np.float32(1000))


def grid(name, config, n):
    return SAMPLERS[name](config, n).rows[:, ROW["timestep"]][:, 0]


def golden_cases():
    first = 0
    for case in GOLDENS["cases"]:
        n = int(case.split("/")[-1])
        yield pytest.param(case, slice(first, first + n + 1), id=case)
        first += n + 1


@pytest.mark.parametrize(("case", "where"), list(golden_cases()))
def test_every_step_equals_diffusers(case, where):
    name, prediction, spacing, final, offset, n = case.split("/")
    final_key = {"ddim": "set_alpha_to_one", "euler": "final_sigmas_type"}[name]
    config = scheduler(
        prediction_type=prediction,
        timestep_spacing=spacing,
        steps_offset=int(offset),
        **{final_key: final == "True" if name == "ddim" else final},
    )
    steps = SAMPLERS[name](config, int(n))
    np.testing.assert_array_equal(steps.rows[:, ROW["timestep"]][:, 0], GOLDENS["timesteps"][where][:-1])
    scale = np.sqrt(1 + GOLDENS["sigmas"][where].astype(np.float64) ** 2)
    expected = GOLDENS["samples"][where] / scale[:, None]
    _, seen = run_rows(steps.rows, np.float32(steps.noise) * GOLDENS["start"], dummy_model)
    error = np.abs(seen - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() <= 1e-5


def test_alphas_cumprod_is_diffusers_table_to_the_bit():
    np.testing.assert_array_equal(samplers.alphas_cumprod(SD1), GOLDENS["alphas_cumprod"])
    linear = scheduler(beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
    np.testing.assert_array_equal(samplers.alphas_cumprod(linear), GOLDENS["alphas_cumprod_linear"])


def test_alphas_cumprod_known_values():
    table = samplers.alphas_cumprod(SD1)
    known = {0: 0.99915, 1: 0.99829603, 20: 0.98131436, 981: 0.0057755, 999: 0.0046601}
    for timestep, value in known.items():
        assert table[timestep] == pytest.approx(value, rel=1e-5)
    assert table.dtype == np.float64 and table.shape == (1000,)
    assert 1 - table[0] == pytest.approx(8.5e-4, abs=1e-7)
    assert (np.diff(table) < 0).all()


def test_rows_are_float32_and_keep_the_small_noise_of_the_last_steps():
    rows = SAMPLERS["ddim"](scheduler(prediction_type="v_prediction", steps_offset=0), 1000).rows
    assert rows.dtype == np.float32 and rows.shape == (1000, samplers.ROW_SIZE)
    assert rows[-1, ROW["q"]][0] ** 2 == pytest.approx(8.5e-4, abs=1e-7)


@pytest.mark.parametrize("spacing", SPACINGS)
def test_every_count_gives_that_many_falling_timesteps(spacing):
    config = scheduler(timestep_spacing=spacing, steps_offset=0, set_alpha_to_one=False)
    schedule = samplers.alphas_cumprod(config)
    for n in range(1, 1001):
        rows = SAMPLERS["ddim"](config, n).rows
        steps = rows[:, ROW["timestep"]][:, 0].astype(np.int64)
        np.testing.assert_array_equal(steps, samplers.timesteps(config, spacing, n, 0))
        assert len(steps) == n and (np.diff(steps) < 0).all() and steps.min() >= 0 and steps.max() <= 999
        # Each step ends at the alpha of the next timestep in the list, the last at the configured final alpha.
        after = np.append(schedule[steps[1:]], schedule[0])
        np.testing.assert_allclose(rows[:, ROW["A"]][:, 0], np.sqrt((1 - after) / (1 - schedule[steps])), rtol=1e-6)
        euler_steps = grid("euler", config, n)
        assert len(euler_steps) == n and (np.diff(euler_steps) < 0).all()
        assert euler_steps.min() >= 0 and euler_steps.max() <= 999
        if spacing != "linspace":
            np.testing.assert_array_equal(euler_steps, steps)


def test_leading_with_offset_fits_every_count_but_1000():
    for n in range(1, 1000):
        steps = samplers.timesteps(SD1, "leading", n, 1)
        assert len(steps) == n and steps[-1] == 1 and steps[0] <= 999 and (np.diff(steps) < 0).all()
    with pytest.raises(InputError, match=r"1000 steps with leading .*offset 1 ask for timestep 1000.*999 steps fit"):
        samplers.timesteps(SD1, "leading", 1000, 1)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (30, list(range(958, 0, -33))),
        (50, list(range(981, 0, -20))),
        (20, list(range(951, 0, -50))),
        (4, [751, 501, 251, 1]),
        (1, [1]),
    ],
)
@pytest.mark.parametrize("name", SAMPLERS)
def test_leading_grids(name, n, expected):
    assert grid(name, SD1, n).tolist() == expected


def test_other_grids():
    trailing = samplers.timesteps(SD1, "trailing", 13, 0)
    assert trailing.tolist() == [999, 922, 845, 768, 691, 614, 537, 461, 384, 307, 230, 153, 76]
    trailing = samplers.timesteps(SD1, "trailing", 50, 0)
    assert trailing.tolist() == list(range(999, 0, -20))
    linspace = samplers.timesteps(SD1, "linspace", 50, 0)
    assert linspace[:3].tolist() == [999, 979, 958] and linspace[-1] == 0
    # Euler does not round: the second of 50 is 978.612...
    assert grid("euler", scheduler(timestep_spacing="linspace"), 50)[1] == np.float32(999 - 999 / 49)


def test_kerascv_has_a_grid_of_its_own():
    kerascv = kerascv_numerics(FAMILIES["sd1"]).scheduler
    steps = SAMPLERS["ddim"](kerascv, 50).rows
    expected = np.round(np.arange(49, -1, -1) * 999 / 49)
    assert steps[:3, 0].tolist() == [999, 979, 958]
    np.testing.assert_array_equal(steps[:, 0], expected)
    assert steps[-1, ROW["A"]][0] == 0  # ends at a signal of 1
    # KerasCV before 2024 walked the "leading" grid with offset 1, and ended there too.
    legacy = scheduler(timestep_spacing="leading", steps_offset=1, set_alpha_to_one=True)
    assert grid("ddim", legacy, 50).tolist() == list(range(981, 0, -20))


def test_model_is_called_with_exactly_the_list():
    called = []

    def model(x, timestep):
        called.append(int(timestep))
        return x

    run_rows(SAMPLERS["ddim"](SD1, 30).rows, np.ones(1, np.float32), model)
    assert called == list(range(958, 0, -33))


@pytest.mark.parametrize(("to_one", "expected"), [(True, 0.98019587), (False, 0.99435658)])
def test_last_step_ends_at_the_configured_alpha(to_one, expected):
    rows = SAMPLERS["ddim"](scheduler(set_alpha_to_one=to_one), 50).rows
    assert rows[-1, ROW["timestep"]] == 1
    z, _ = run_rows(rows[-1:], np.ones(1, np.float32), lambda x, timestep: np.float32(0.5))
    assert z[0, 0] == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize(
    ("spacing", "factor"), [("linspace", 14.614641), ("trailing", 14.614641), ("leading", 14.648814)]
)
def test_euler_initial_noise(spacing, factor):
    steps = SAMPLERS["euler"](scheduler(timestep_spacing=spacing, steps_offset=0), 1000)
    a = 1 / np.float64(steps.rows[0, ROW["p"]][0]) ** 2
    assert steps.rows[0, ROW["timestep"]] == 999
    sigma_max = np.sqrt((1 - a) / a)
    assert sigma_max == pytest.approx(14.614641, rel=1e-6)
    assert steps.noise * np.sqrt(1 + sigma_max**2) == pytest.approx(factor, rel=1e-6)
    assert steps.signal == 0


@pytest.mark.parametrize("spacing", SPACINGS)
def test_euler_with_a_silent_model_leaves_diffusers_latent_unchanged(spacing):
    rows = SAMPLERS["euler"](scheduler(timestep_spacing=spacing, final_sigmas_type="sigma_min"), 10).rows
    _, seen = run_rows(rows, np.ones(1, np.float32), lambda x, timestep: np.zeros_like(x))
    signal = 1 / rows[:, ROW["p"]][:, 0]  # 1 / sqrt(1 + sigma^2) of each row
    np.testing.assert_allclose(seen[:-1, 0] / signal, seen[0, 0] / signal[0], rtol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_perfect_model_reaches_its_point_in_any_number_of_steps(name, prediction):
    point = np.array([0.7, -1.3], np.float32)
    config = scheduler(
        prediction_type=prediction, timestep_spacing="trailing", set_alpha_to_one=True, final_sigmas_type="zero"
    )
    table = samplers.alphas_cumprod(config)

    def model(x, timestep):
        a = np.float32(table[int(timestep)])
        eps = (x - np.sqrt(a) * point) / np.sqrt(1 - a)
        return eps if prediction == "epsilon" else np.sqrt(a) * eps - np.sqrt(1 - a) * point

    for n in (1, 3, 10):
        z, _ = run_rows(SAMPLERS[name](config, n).rows, np.array([2.0, -0.4], np.float32), model)
        np.testing.assert_allclose(z[0], point, rtol=1e-5)


def test_row_layout():
    assert sorted((part.start, part.stop) for part in ROW.values()) == [
        *((0, 1), (1, 2), (2, 3), (3, 4)),
        *((4, 29), (29, 34), (34, 39)),
    ]
    rows = SAMPLERS["ddim"](SD1, 7).rows
    assert (rows[:, ROW["g"]] == 1).all() and (rows[:, ROW["C"]] == 0).all()
    # One latent of state: no coefficient touches the memory.
    assert (rows[:, ROW["A"]][:, 1:] == 0).all() and (rows[:, ROW["B"]][:, 1:] == 0).all()


def test_chunks_of_rows_equal_the_whole_run():
    rows = SAMPLERS["euler"](SD1, 7).rows
    start = GOLDENS["start"]
    whole, _ = run_rows(rows, start, dummy_model)
    half, _ = run_rows(rows, start, dummy_model, 0, 3)
    rest, _ = run_rows(rows, half[0], dummy_model, 3, 7, memory=half[1:])
    np.testing.assert_array_equal(rest, whole)


def test_steps_table_pads_with_nan_so_that_unused_rows_cannot_draw():
    steps, table = steps_table("ddim", SD1, 4, 256)
    assert isinstance(steps, Steps) and steps.noise == 1 and steps.signal == 0
    assert table.dtype == np.float32 and table.shape == (256, 39)
    np.testing.assert_array_equal(table[:4], steps.rows)
    assert np.isnan(table[4:]).all()
    beyond, _ = run_rows(table, np.ones(2, np.float32), dummy_model, 0, 5)
    assert np.isnan(beyond[0]).all()


@pytest.mark.parametrize(
    ("name", "n", "message"),
    [
        ("heun", 4, r"unknown sampler 'heun'; available: ddim, euler"),
        ("ddim", 0, r"num_steps should be between 1 and 256, found 0"),
        ("euler", -3, r"num_steps should be between 1 and 256, found -3"),
        ("ddim", 257, r"between 1 and 256, found 257; 256 is the limit of the export"),
        ("ddim", 4.0, r"num_steps should be a whole number, found 4.0"),
        ("ddim", "4", r"num_steps should be a whole number, found '4'"),
        ("ddim", True, r"num_steps should be a whole number, found True"),
        ("ddim", None, r"num_steps should be a whole number, found None"),
    ],
)
def test_bad_requests(name, n, message):
    with pytest.raises(InputError, match=message) as error:
        steps_table(name, SD1, n, 256)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", SAMPLERS)
def test_counts_beyond_the_schedule(name):
    with pytest.raises(InputError, match="between 1 and 1000, found 1001; 1000 is the limit of the model"):
        SAMPLERS[name](SD1, 1001)
    with pytest.raises(InputError, match="999 steps fit"):
        steps_table(name, SD1, np.int64(1000), 2000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestep_spacing": "karras"}, "timestep_spacing should be"),
        ({"prediction_type": "sample"}, "prediction_type should be"),
        ({"beta_schedule": "cosine"}, "beta_schedule should be"),
        ({"beta_end": 1.5}, "betas between 0 and 1"),
        ({"beta_start": float("nan")}, "betas between 0 and 1"),
        ({"steps_offset": -1}, "ask for timestep -1, .*correct steps_offset"),
        ({"final_sigmas_type": "one"}, "final_sigmas_type should be"),
    ],
)
def test_bad_schedulers(changes, message):
    with pytest.raises(InputError, match=message):
        SAMPLERS["euler"](scheduler(**changes), 4)


def test_absent_keys_take_the_default_of_the_samplers_class_with_one_notice():
    silent = scheduler(timestep_spacing=None, steps_offset=None, set_alpha_to_one=None, final_sigmas_type=None)
    filled = samplers.resolved("ddim", silent)
    assert (filled.timestep_spacing, filled.steps_offset, filled.set_alpha_to_one) == ("leading", 0, True)
    assert filled.final_sigmas_type is None and samplers.resolved("ddim", SD1) == SD1
    assert grid("ddim", silent, 4).tolist() == [750, 500, 250, 0]
    assert SAMPLERS["ddim"](silent, 4).rows[-1, ROW["A"]][0] == 0  # set_alpha_to_one: ends without noise
    assert grid("euler", silent, 4).tolist() == [999, 666, 333, 0]
    assert SAMPLERS["euler"](silent, 4).rows[-1, ROW["A"]][0] == 0
    (notice,) = samplers.notices("ddim", silent)
    assert "timestep_spacing = 'leading', steps_offset = 0, set_alpha_to_one = True" in notice
    (notice,) = samplers.notices("euler", silent)
    assert "timestep_spacing = 'linspace', final_sigmas_type = 'zero'" in notice and "steps_offset" not in notice
    assert samplers.notices("ddim", SD1) == []
    assert len(samplers.notices("euler", SD1)) == 1
    with pytest.raises(InputError, match="available: ddim, euler"):
        samplers.notices("heun", SD1)


@pytest.mark.parametrize(
    ("class_name", "name", "mapped"),
    [
        ("DDIMScheduler", "ddim", False),
        ("EulerDiscreteScheduler", "euler", False),
        ("PNDMScheduler", "ddim", True),
        ("EulerAncestralDiscreteScheduler", "euler", True),
        ("DPMSolverMultistepScheduler", "ddim", True),
    ],
)
def test_default_sampler(class_name, name, mapped):
    found, notice = samplers.default_sampler(class_name)
    assert found == name and found in SAMPLERS
    assert (notice is not None) == mapped
    if mapped:
        assert class_name in notice and f"using {name}" in notice
