"""Rows of every sampler against diffusers' schedulers (tests/goldens/samplers.npz) and against exact values."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from models.errors import InputError
from models.families import FAMILIES
from models.steps import ROW, ROW_SIZE, STATE
from pipeline.sampling import noise, samplers, schedules
from pipeline.sampling.samplers import SAMPLERS
from pipeline.sampling.schedules import SPACINGS, Options

SD1 = FAMILIES["sd1"].scheduler
GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "samplers.npz")
SEED = int(GOLDENS["seed"])
STOCHASTIC = ("euler_a", "dpmpp_2m_sde", "lcm")
MEMORY = {"heun": 2, "lms": 3, "pndm": 4, "dpmpp_2m": 1, "dpmpp_2m_sde": 1, "dpmpp_3m": 2, "unipc": 4, "deis": 1}


def scheduler(**changes):
    return dataclasses.replace(SD1, **changes)


def make(name, n, options=None, **changes):
    return samplers.steps(name, scheduler(**changes), n, Options(**(options or {})))


def run_rows(rows, z0, model, first=0, last=None, memory=None):
    """The recurrence of the solvers' docstring in float32; also every z0 on the way."""
    z = np.zeros((STATE, *z0.shape), np.float32)
    z[0] = z0
    if memory is not None:
        z[1:] = memory
    seen = [z[0]]
    for number, row in list(enumerate(rows))[first:last]:
        timestep, p, q = (row[ROW[name]][0] for name in ("timestep", "p", "q"))
        denoised = p * z[0] + q * model(z[0], timestep)
        z = np.tensordot(row[ROW["A"]].reshape(STATE, STATE), z, 1) + np.multiply.outer(row[ROW["B"]], denoised)
        if row[ROW["C"]].any():
            z = z + np.multiply.outer(row[ROW["C"]], noise.normal(SEED, number + 1, z0.shape))
        seen.append(z[0])
    return z, np.stack(seen)


def dummy_model(x, timestep):
    return np.tanh(np.float32(0.5) * x + timestep / np.float32(1000))


def golden_cases():
    ends = np.cumsum(GOLDENS["rows"])
    for case, end, count in zip(GOLDENS["cases"], ends, GOLDENS["rows"], strict=True):
        name, n, changes, options = json.loads(case)
        words = [name, n, *(v for v in changes.values()), *(f"{k}" for k in options)]
        yield pytest.param(name, n, changes, options, slice(end - count, end), id="-".join(map(str, words)))


@pytest.mark.parametrize(("name", "n", "changes", "options", "where"), list(golden_cases()))
def test_every_step_equals_diffusers(name, n, changes, options, where):
    steps = make(name, n, {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}, **changes)
    told = GOLDENS["timesteps"][where][:-1]
    # Whole timesteps are equal; others differ in the last bit of 999, as logarithms do.
    whole = (told == np.round(told)).all()
    np.testing.assert_allclose(steps.rows[:, 0], told, rtol=0, atol=0 if whole else 7e-5)
    expected = GOLDENS["samples"][where]
    _, seen = run_rows(steps.rows, np.float32(steps.noise) * GOLDENS["start"], dummy_model)
    error = np.abs(seen - expected).max(axis=1) / np.abs(expected).max(axis=1)
    # Where outputs or slopes are remembered, diffusers' float32 coefficients lose more.
    bar = 5e-5 if name in ("pndm", "heun", "deis") or "rescale_betas_zero_snr" in changes else 1e-5
    if name in ("euler", "euler_a") and "rescale_betas_zero_snr" in changes:
        bar = 2e-4  # there its latents, in sigma's scale, start 4096 times as large
    assert error.max() <= bar


def test_every_sampler_has_its_goldens():
    """Each with both predictions, and with 10 and 25 steps; those with Karras sigmas with those, too."""
    cases = [json.loads(case) for case in GOLDENS["cases"]]
    for name in SAMPLERS:
        for prediction in ("epsilon", "v_prediction"):
            counts = {c[1] for c in cases if c[0] == name and c[2]["prediction_type"] == prediction}
            assert {1, 2, 3, 10, 25} <= counts
        if "sigma_schedule" in SAMPLERS[name].options:
            assert {c[3].get("sigma_schedule") for c in cases if c[0] == name} == {None, "karras", "exponential"}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_count_gives_finite_rows(name):
    calls = {"heun": lambda n: 2 * n - 1, "pndm": lambda n: n + 1 if n > 1 else 1}.get(name, lambda n: n)
    for n in range(1, 51 if name == "lcm" else 61):
        rows = make(name, n).rows
        assert rows.shape == (calls(n), ROW_SIZE) and rows.dtype == np.float32 and np.isfinite(rows).all()
        assert (rows[:, ROW["g"]] == 1).all()
        # Fresh noise goes into the latent alone, and never into the last picture.
        assert (rows[:, ROW["C"]][:, 1:] == 0).all() and (rows[-1, ROW["C"]] == 0).all()
        assert (rows[:-1, ROW["C"]][:, 0] != 0).all() == (name in STOCHASTIC or n == 1)


@pytest.mark.parametrize("schedule", ["karras", "exponential"])
@pytest.mark.parametrize("final", ["zero", "sigma_min"])
@pytest.mark.parametrize("name", [name for name in SAMPLERS if "sigma_schedule" in SAMPLERS[name].options])
def test_respaced_levels_give_finite_rows(name, schedule, final):
    changes = {"final_sigmas_type": final, "solver_type": "bh1" if name == "unipc" else "heun", "solver_order": 3}
    for n in range(1, 61):
        assert np.isfinite(make(name, n, {"sigma_schedule": schedule}, **changes).rows).all()


def test_eta_is_fresh_noise():
    assert (make("ddim", 10).rows[:, ROW["C"]] == 0).all()
    some = make("ddim", 10, {"eta": 0.5}).rows[:, ROW["C"]][:, 0]
    full = make("ddim", 10, {"eta": 1.0}).rows[:, ROW["C"]][:, 0]
    assert (some > 0).all()
    np.testing.assert_allclose(full, 2 * some, rtol=1e-6)
    # From 1 to 0 of DDPM: sqrt((1 - a') / (1 - a) (1 - a / a')).
    table = schedules.alphas_cumprod(SD1)
    expected = np.sqrt((1 - table[0]) / (1 - table[1]) * (1 - table[1] / table[0]))
    assert full[-1] == pytest.approx(expected, rel=1e-6)
    assert make("ddim", 10, {"eta": 1.0}, set_alpha_to_one=True).rows[-1, ROW["C"]][0] == 0
    for eta in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="eta should be between 0 and 1, found"):
            make("ddim", 10, {"eta": eta})


@pytest.mark.parametrize("name", SAMPLERS)
def test_memory_is_what_the_sampler_says(name):
    rows = make(name, 20).rows
    A, B = rows[:, ROW["A"]].reshape(-1, STATE, STATE), rows[:, ROW["B"]]
    read = A[:, :, 1:].any(axis=(0, 1))
    written = A[:, 1:].any(axis=(0, 2)) | B[:, 1:].any(axis=0)
    known = MEMORY.get(name, 0)
    assert not read[known:].any() and (written[:known] | (known == 4)).all()
    # Nothing is read before it was written: the memory starts at zero.
    start = GOLDENS["start"]
    junk = np.full((STATE - 1, *start.shape), np.nan if not known else 1e6, np.float32)
    if known:
        clean, _ = run_rows(rows, start, dummy_model)
        dirty, _ = run_rows(rows, start, dummy_model, memory=junk)
        np.testing.assert_allclose(dirty[0], clean[0], rtol=1e-6)


@pytest.mark.parametrize("name", SAMPLERS)
def test_chunks_of_rows_equal_the_whole_run(name):
    rows = make(name, 9, {"eta": 0.5} if name == "ddim" else None).rows
    start = GOLDENS["start"]
    whole, _ = run_rows(rows, start, dummy_model)
    for stride in (1, 2, 4):
        state = np.zeros((STATE, *start.shape), np.float32)
        state[0] = start
        for first in range(0, len(rows), stride):
            state, _ = run_rows(rows, state[0], dummy_model, first, first + stride, memory=state[1:])
        np.testing.assert_array_equal(state, whole)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_perfect_model_reaches_its_point_in_any_number_of_steps(name, prediction):
    point = np.array([0.7, -1.3], np.float32)
    changes = {
        "prediction_type": prediction,
        "timestep_spacing": "trailing",
        "set_alpha_to_one": True,
        "final_sigmas_type": "zero",
    }
    table = schedules.alphas_cumprod(SD1)

    def model(x, timestep):
        a = np.float32(table[int(timestep)])
        eps = (x - np.sqrt(a) * point) / np.sqrt(1 - a)
        return eps if prediction == "epsilon" else np.sqrt(a) * eps - np.sqrt(1 - a) * point

    # PLMS mixes outputs of different levels, which are equal for epsilon alone.
    for n in (1,) if name == "pndm" and prediction == "v_prediction" else (1, 3, 10):
        start = np.array([2.0, -0.4], np.float32)
        z, _ = run_rows(make(name, n, **changes).rows, start, model)
        # DEIS stops at the schedule's smallest noise, of which the start is made.
        last = table[0] if name == "deis" else 1
        left = (start - np.sqrt(table[999]) * point) / np.sqrt(1 - table[999])
        np.testing.assert_allclose(z[0], np.sqrt(last) * point + np.sqrt(1 - last) * left, rtol=2e-5)


def test_pndm_calls_once_more():
    called = []

    def model(x, timestep):
        called.append(int(timestep))
        return x

    run_rows(make("pndm", 20).rows, np.ones(1, np.float32), model)
    assert called == [951, 901, 901, *range(851, 0, -50)] and len(called) == 21
    assert len(make("pndm", 50).rows) == 51
    assert make("pndm", 1).rows[:, 0].tolist() == [1]


def test_heun_calls_twice_but_at_the_end():
    assert make("heun", 4).rows[:, 0].tolist() == [751, 501, 501, 251, 251, 1, 1]


def test_model_is_called_with_exactly_the_list():
    called = []

    def model(x, timestep):
        called.append(int(timestep))
        return x

    run_rows(make("ddim", 30).rows, np.ones(1, np.float32), model)
    assert called == list(range(958, 0, -33))


def test_rows_keep_the_small_noise_of_the_last_steps():
    rows = make("ddim", 1000, prediction_type="v_prediction", steps_offset=0).rows
    assert rows.dtype == np.float32 and rows.shape == (1000, ROW_SIZE)
    assert rows[-1, ROW["q"]][0] ** 2 == pytest.approx(8.5e-4, abs=1e-7)


@pytest.mark.parametrize(("to_one", "expected"), [(True, 0.98019587), (False, 0.99435658)])
def test_last_step_ends_at_the_configured_alpha(to_one, expected):
    rows = make("ddim", 50, set_alpha_to_one=to_one).rows
    assert rows[-1, ROW["timestep"]] == 1
    z, _ = run_rows(rows[-1:], np.ones(1, np.float32), lambda x, timestep: np.float32(0.5))
    assert z[0, 0] == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize("name", ["euler", "euler_a", "heun", "lms"])
@pytest.mark.parametrize(
    ("spacing", "factor"), [("linspace", 14.614641), ("trailing", 14.614641), ("leading", 14.648814)]
)
def test_initial_noise(name, spacing, factor):
    steps = make(name, 1000, timestep_spacing=spacing, steps_offset=0)
    a = 1 / np.float64(steps.rows[0, ROW["p"]][0]) ** 2
    assert steps.rows[0, ROW["timestep"]] == 999
    sigma_max = np.sqrt((1 - a) / a)
    assert sigma_max == pytest.approx(14.614641, rel=1e-6)
    assert steps.noise * np.sqrt(1 + sigma_max**2) == pytest.approx(factor, rel=1e-6)
    assert steps.signal == 0


@pytest.mark.parametrize("name", ["euler", "heun", "lms"])
@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_silent_model_leaves_diffusers_latent_unchanged(name, spacing):
    rows = make(name, 10, timestep_spacing=spacing).rows
    _, seen = run_rows(rows, np.ones(1, np.float32), lambda x, timestep: np.zeros_like(x))
    signal = 1 / rows[:, ROW["p"]][:, 0]  # 1 / sqrt(1 + sigma^2) of each row
    np.testing.assert_allclose(seen[:-1, 0] / signal, seen[0, 0] / signal[0], rtol=1e-5)


def test_row_layout():
    assert sorted((part.start, part.stop) for part in ROW.values()) == [
        *((0, 1), (1, 2), (2, 3), (3, 4)),
        *((4, 29), (29, 34), (34, 39)),
    ]


@pytest.mark.parametrize(
    ("name", "options", "changes", "message"),
    [
        ("euler", {}, {"prediction_type": "sample"}, "prediction_type should be"),
        ("unipc", {}, {"lower_order_final": False, "final_sigmas_type": "zero"}, "unipc cannot end at a noise of 0"),
        ("deis", {"sigmas": (9.0, 3.0, 1.0, 0.5, 0.0)}, {}, "deis cannot end at a noise of 0"),
    ],
)
def test_bad_requests(name, options, changes, message):
    with pytest.raises(InputError, match=message):
        make(name, 4, options, **changes)
