"""Noise levels and timesteps against exact values and diffusers' table (tests/goldens/samplers.npz)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from models.errors import InputError
from models.families import FAMILIES, kerascv_numerics
from pipeline.sampling import samplers, schedules
from pipeline.sampling.schedules import DEFAULT, SPACINGS, Options

SD1 = FAMILIES["sd1"].scheduler
GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "samplers.npz")


def scheduler(name="euler", **changes):
    return samplers.resolved(name, dataclasses.replace(SD1, **changes))


def test_alphas_cumprod_is_diffusers_table():
    np.testing.assert_array_equal(schedules.alphas_cumprod(SD1), GOLDENS["alphas_cumprod"])
    linear = dataclasses.replace(SD1, beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
    np.testing.assert_array_equal(schedules.alphas_cumprod(linear), GOLDENS["alphas_cumprod_linear"])
    zero_snr = schedules.alphas_cumprod(dataclasses.replace(SD1, rescale_betas_zero_snr=True))
    # The square root's last bit.
    np.testing.assert_allclose(zero_snr, GOLDENS["alphas_cumprod_zero_snr"], rtol=5e-6, atol=0)
    assert zero_snr[-1] == 0


def test_alphas_cumprod_known_values():
    table = schedules.alphas_cumprod(SD1)
    known = {0: 0.99915, 1: 0.99829603, 20: 0.98131436, 981: 0.0057755, 999: 0.0046601}
    for timestep, value in known.items():
        assert table[timestep] == pytest.approx(value, rel=1e-5)
    assert table.dtype == np.float64 and table.shape == (1000,)
    assert 1 - table[0] == pytest.approx(8.5e-4, abs=1e-7)
    assert (np.diff(table) < 0).all()


@pytest.mark.parametrize("spacing", SPACINGS)
def test_every_count_gives_that_many_falling_timesteps(spacing):
    config = scheduler("ddim", timestep_spacing=spacing, steps_offset=0, set_alpha_to_one=False)
    table = schedules.alphas_cumprod(config)
    for n in range(1, 1001):
        steps = schedules.timesteps(config, spacing, n, 0)
        assert len(steps) == n and (np.diff(steps) < 0).all() and steps.min() >= 0 and steps.max() <= 999
        levels = schedules.timestep_levels(config, n, DEFAULT)
        np.testing.assert_array_equal(levels.timesteps, steps)
        # Each step ends at the alpha of the next timestep in the list, the last at the configured final alpha.
        np.testing.assert_array_equal(levels.alphas, np.append(table[steps], table[0]))
        levels = schedules.interpolated_levels(config, n, DEFAULT)
        assert len(levels.timesteps) == n == len(levels.alphas) - 1 and (np.diff(levels.timesteps) < 0).all()
        assert levels.timesteps.min() >= 0 and levels.timesteps.max() <= 999 and levels.alphas[-1] == 1
        if spacing != "linspace":
            np.testing.assert_array_equal(levels.timesteps, steps)
        if n < 1000:
            levels = schedules.whole_levels(config, n, DEFAULT)
            assert len(levels.timesteps) == n == len(levels.alphas) - 1
            assert (np.diff(levels.timesteps) < 0).all() and (np.diff(levels.alphas) > 0).all()
            assert (levels.timesteps == np.round(levels.timesteps)).all() and levels.timesteps.min() >= 0


def test_leading_with_offset_fits_every_count_but_1000():
    for n in range(1, 1000):
        steps = schedules.timesteps(SD1, "leading", n, 1)
        assert len(steps) == n and steps[-1] == 1 and steps[0] <= 999 and (np.diff(steps) < 0).all()
    with pytest.raises(InputError, match=r"1000 steps with leading .*offset 1 ask for timestep 1000.*999 steps fit"):
        schedules.timesteps(SD1, "leading", 1000, 1)


def test_one_more_than_is_visited():
    config = scheduler("dpmpp_2m")
    assert schedules.whole_levels(config, 4, DEFAULT).timesteps.tolist() == [801, 601, 401, 201]
    config = dataclasses.replace(config, timestep_spacing="linspace")
    assert schedules.whole_levels(config, 4, DEFAULT).timesteps.tolist() == [999, 749, 500, 250]
    with pytest.raises(InputError, match="between 1 and 999, found 1000; 999 is the limit of the model"):
        schedules.whole_levels(config, 1000, DEFAULT)
    config = dataclasses.replace(config, timestep_spacing="leading")
    with pytest.raises(InputError, match=r"999 steps with leading .* ask for timestep 1000.*998 steps fit"):
        schedules.whole_levels(config, 999, DEFAULT)
    assert schedules.whole_levels(config, 998, DEFAULT).timesteps[[0, -1]].tolist() == [999, 2]


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
def test_leading_grids(n, expected):
    assert schedules.timesteps(SD1, "leading", n, 1).tolist() == expected


def test_other_grids():
    trailing = schedules.timesteps(SD1, "trailing", 13, 0)
    assert trailing.tolist() == [999, 922, 845, 768, 691, 614, 537, 461, 384, 307, 230, 153, 76]
    assert schedules.timesteps(SD1, "trailing", 50, 0).tolist() == list(range(999, 0, -20))
    linspace = schedules.timesteps(SD1, "linspace", 50, 0)
    assert linspace[:3].tolist() == [999, 979, 958] and linspace[-1] == 0
    # Euler does not round: the second of 50 is 978.612...
    levels = schedules.interpolated_levels(scheduler(timestep_spacing="linspace"), 50, DEFAULT)
    assert levels.timesteps[1] == np.float32(999 - 999 / 49)


def test_kerascv_has_a_grid_of_its_own():
    kerascv = kerascv_numerics(FAMILIES["sd1"]).scheduler
    levels = schedules.timestep_levels(samplers.resolved("ddim", kerascv), 50, DEFAULT)
    assert levels.timesteps[:3].tolist() == [999, 979, 958]
    np.testing.assert_array_equal(levels.timesteps, np.round(np.arange(49, -1, -1) * 999 / 49))
    assert levels.alphas[-1] == 1
    # KerasCV before 2024 walked the "leading" grid with offset 1, and ended there too.
    legacy = scheduler("ddim", timestep_spacing="leading", steps_offset=1, set_alpha_to_one=True)
    assert schedules.timestep_levels(legacy, 50, DEFAULT).timesteps.tolist() == list(range(981, 0, -20))


def test_karras_and_exponential_levels():
    table = np.sqrt(1 / schedules.alphas_cumprod(SD1) - 1)
    largest, smallest = table[-1], table[0]
    karras = schedules.whole_levels(scheduler("dpmpp_2m", sigma_schedule="karras"), 3, DEFAULT)
    middle = ((largest ** (1 / 7) + smallest ** (1 / 7)) / 2) ** 7
    np.testing.assert_allclose(karras.sigma, [largest, middle, smallest, 0], rtol=1e-6)
    middle_timestep = np.interp(np.log(middle), np.log(table), np.arange(1000))
    assert karras.timesteps.tolist() == [999, round(middle_timestep), 0] == [999, 427, 0]
    exponential = schedules.whole_levels(scheduler("dpmpp_2m", sigma_schedule="exponential"), 3, DEFAULT)
    np.testing.assert_allclose(exponential.sigma, [largest, (largest * smallest) ** 0.5, smallest, 0], rtol=1e-6)
    # k-diffusion spans what the timesteps span, and does not round.
    spanned = schedules.interpolated_levels(scheduler("euler", sigma_schedule="karras"), 3, DEFAULT)
    np.testing.assert_allclose(spanned.sigma[[0, 2]], table[[667, 1]], rtol=1e-6)
    assert spanned.timesteps[1] != round(spanned.timesteps[1])
    assert np.interp(spanned.timesteps[1], np.arange(1000), np.log(table)) == pytest.approx(np.log(spanned.sigma[1]))


def test_distilled_grid():
    config = scheduler("lcm")
    assert schedules.distilled_levels(config, 4, DEFAULT).timesteps.tolist() == [999, 759, 499, 259]
    assert schedules.distilled_levels(config, 50, DEFAULT).timesteps.tolist() == list(range(999, 0, -20))
    with pytest.raises(InputError, match=r"between 1 and 50, found 51; 50 is the limit .*original_inference_steps"):
        schedules.distilled_levels(config, 51, DEFAULT)
    with pytest.raises(InputError, match="original_inference_steps should be between 1 and 1000, found 0"):
        schedules.distilled_levels(dataclasses.replace(config, original_inference_steps=0), 1, DEFAULT)


def test_lists():
    config = scheduler("euler", sigma_schedule="karras")
    levels = schedules.interpolated_levels(config, 3, Options(timesteps=(999, 500.5, 3)))
    assert levels.timesteps.tolist() == [999, 500.5, 3] and levels.alphas[-1] == 1
    levels = schedules.interpolated_levels(config, 2, Options(sigmas=(20.0, 1.0, 0.25)))
    np.testing.assert_allclose(levels.sigma, [20, 1, 0.25])
    assert levels.timesteps[0] == 999
    rounded = schedules.whole_levels(config, 2, Options(sigmas=(20.0, 1.0, 0.25)))
    np.testing.assert_array_equal(rounded.timesteps, np.round(levels.timesteps))


@pytest.mark.parametrize(
    ("levels", "options", "message"),
    [
        (
            schedules.interpolated_levels,
            {"timesteps": (1000, 1)},
            "numbers falling from at most 999 to .*found 1000, 1",
        ),
        (schedules.interpolated_levels, {"timesteps": (5, -1)}, "found 5, -1"),
        (schedules.interpolated_levels, {"timesteps": (5, 5)}, "found 5, 5"),
        (schedules.interpolated_levels, {"timesteps": (float("nan"),)}, "found nan"),
        (schedules.interpolated_levels, {"timesteps": ()}, "found none"),
        (schedules.interpolated_levels, {"timesteps": tuple(range(20))}, r"found 0, 1, 2, 3, 4, 5, 6, 7, \.\.\."),
        (schedules.whole_levels, {"timesteps": (5.5,)}, "whole numbers falling .*found 5.5"),
        (schedules.timestep_levels, {"timesteps": (5.5,)}, "whole numbers falling .*found 5.5"),
        (schedules.distilled_levels, {"timesteps": (5.5,)}, "whole numbers falling .*found 5.5"),
        (schedules.interpolated_levels, {"sigmas": (1.0,)}, "2 or more numbers falling to 0 or above, found 1"),
        (schedules.whole_levels, {"sigmas": (1.0, -1.0)}, "found 1, -1"),
        (schedules.whole_levels, {"sigmas": (1.0, 1.0)}, "found 1, 1"),
        (schedules.whole_levels, {"sigmas": (float("inf"), 1.0)}, "found inf, 1"),
    ],
)
def test_bad_lists(levels, options, message):
    with pytest.raises(InputError, match=message) as error:
        levels(scheduler("lcm", timestep_spacing="leading"), 2, Options(**options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"timestep_spacing": "karras"},
            "timestep_spacing should be 'leading', 'trailing' or 'linspace', found 'karras'",
        ),
        ({"sigma_schedule": "beta"}, "sigma_schedule should be 'uniform', 'karras' or 'exponential', found 'beta'"),
        ({"beta_schedule": "cosine"}, "beta_schedule should be"),
        ({"beta_end": 1.5}, "betas between 0 and 1"),
        ({"beta_start": float("nan")}, "betas between 0 and 1"),
        ({"steps_offset": -1}, "ask for timestep -1, .*correct steps_offset"),
        ({"final_sigmas_type": "one"}, "final_sigmas_type should be"),
    ],
)
def test_bad_schedulers(changes, message):
    with pytest.raises(InputError, match=message):
        schedules.interpolated_levels(scheduler("euler", **changes), 4, DEFAULT)
