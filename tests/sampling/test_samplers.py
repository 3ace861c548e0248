"""The table of samplers: what a caller may ask for, what absent settings become, what is refused."""

import dataclasses

import numpy as np
import pytest

from models.errors import InputError
from models.families import FAMILIES
from models.steps import ROW
from pipeline.sampling import samplers
from pipeline.sampling.samplers import SAMPLERS, default_sampler, steps_table
from pipeline.sampling.schedules import Options
from pipeline.sampling.solvers import Steps

SD1 = FAMILIES["sd1"].scheduler


def scheduler(**changes):
    return dataclasses.replace(SD1, **changes)


def grid(name, config, n, **options):
    return samplers.steps(name, config, n, Options(**options)).rows[:, 0].tolist()


def test_options_are_what_samplers_read():
    fields = {field.name for field in dataclasses.fields(Options)}
    assert {option for sampler in SAMPLERS.values() for option in sampler.options} == fields
    for sampler in SAMPLERS.values():
        assert ("timestep_spacing" in sampler.options) == ("timestep_spacing" in sampler.defaults)
    assert len({sampler.label for sampler in SAMPLERS.values()}) == len(SAMPLERS)


def test_steps_table_pads_with_nan_so_that_unused_rows_cannot_draw():
    steps, table = steps_table("ddim", SD1, 4, 256)
    assert isinstance(steps, Steps) and steps.noise == 1 and steps.signal == 0
    assert table.dtype == np.float32 and table.shape == (256, 39)
    np.testing.assert_array_equal(table[:4], steps.rows)
    assert np.isnan(table[4:]).all()


def test_rows_are_calls_of_the_model():
    assert len(steps_table("heun", SD1, 5, 9)[0].rows) == 9
    assert len(steps_table("pndm", SD1, 5, 6)[0].rows) == 6
    with pytest.raises(InputError, match="heun calls the UNet 9 times in 5 steps, 8 is the limit of the export"):
        steps_table("heun", SD1, 5, 8)
    with pytest.raises(InputError, match="pndm calls the UNet 6 times in 5 steps, 5 is the limit of the export"):
        steps_table("pndm", SD1, 5, 5)


def test_options_change_the_grid():
    assert grid("ddim", SD1, 4) == [751, 501, 251, 1]
    assert grid("ddim", SD1, 4, timestep_spacing="trailing") == [999, 749, 499, 249]
    assert grid("ddim", SD1, 2, timesteps=(800, 3)) == [800, 3]
    assert grid("unipc", SD1, 2, timesteps=(800, 3)) == [800, 3]
    assert grid("dpmpp_2m", SD1, 3, sigma_schedule="karras") == [999, 427, 0]
    assert grid("euler", SD1, 2, sigmas=(20, 1, 0))[0] == 999
    assert grid("lcm", SD1, 2) == [999, 499]


def test_karras_in_a_file_is_for_the_classes_that_have_it():
    karras = scheduler(sigma_schedule="karras")
    assert grid("dpmpp_2m", karras, 3) == [999, 427, 0]
    assert grid("dpmpp_2m", karras, 3, sigma_schedule="uniform") == grid("dpmpp_2m", SD1, 3)
    assert grid("dpmpp_2m", karras, 2, timesteps=(800, 3)) == [800, 3]
    for name in ("ddim", "euler_a", "pndm"):
        assert grid(name, karras, 3) == grid(name, SD1, 3)
    # k-diffusion has Karras levels for all of its samplers, so that a user may ask for them.
    assert grid("euler_a", SD1, 3, sigma_schedule="karras") == grid("euler", karras, 3)


@pytest.mark.parametrize(
    ("name", "n", "options", "message"),
    [
        ("plms", 4, {}, r"unknown sampler 'plms'; available: ddim, pndm, euler, .*lcm"),
        ("ddim", 0, {}, r"num_steps should be between 1 and 256, found 0"),
        ("euler", -3, {}, r"num_steps should be between 1 and 256, found -3"),
        ("ddim", 257, {}, r"between 1 and 256, found 257; 256 is the limit of the export"),
        ("ddim", 4.0, {}, r"num_steps should be a whole number, found 4.0"),
        ("ddim", "4", {}, r"num_steps should be a whole number, found '4'"),
        ("ddim", True, {}, r"num_steps should be a whole number, found True"),
        ("ddim", None, {}, r"num_steps should be a whole number, found None"),
        ("euler", 4, {"eta": 0.5}, r"euler has no eta; samplers with it: ddim"),
        ("lcm", 4, {"timestep_spacing": "leading"}, r"lcm has no timestep_spacing; samplers with it: ddim, pndm"),
        ("ddim", 4, {"sigma_schedule": "karras"}, r"ddim has no sigma_schedule; samplers with it: euler, "),
        ("pndm", 2, {"timesteps": (5, 4)}, r"pndm has no timesteps"),
        ("euler", 3, {"timesteps": (5, 4)}, r"num_steps is 3, but the list makes 2 steps"),
        ("euler", 3, {"sigmas": (5, 4, 0)}, r"num_steps is 3, but the list makes 2 steps"),
        ("euler", 2, {"timesteps": (5, 4), "sigma_schedule": "karras"}, r"no timestep_spacing and no sigma_schedule"),
        ("euler", 2, {"timesteps": (5, 4), "sigmas": (5, 4, 0)}, r"either timesteps or sigmas"),
        ("euler", 2, {"sigma_schedule": "beta"}, r"sigma_schedule should be 'uniform', 'karras' or 'exponential'"),
    ],
)
def test_bad_requests(name, n, options, message):
    with pytest.raises(InputError, match=message) as error:
        steps_table(name, SD1, n, 256, Options(**options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", SAMPLERS)
def test_counts_beyond_the_schedule(name):
    most = {"lcm": 50, "dpmpp_2m": 999}.get(name, None)
    most = most or (999 if "lower_order_final" in SAMPLERS[name].defaults else 1000)
    with pytest.raises(InputError, match=f"between 1 and {most}, found {most + 1}; {most} is the limit"):
        steps_table(name, SD1, most + 1, 2000)
    if name != "lcm":
        with pytest.raises(InputError, match=f"{most - 1} steps fit"):
            steps_table(name, SD1, np.int64(most), 2000)


def test_absent_keys_take_the_default_of_the_samplers_class_with_one_notice():
    silent = scheduler(timestep_spacing=None, steps_offset=None, set_alpha_to_one=None, final_sigmas_type=None)
    filled = samplers.resolved("ddim", silent)
    assert (filled.timestep_spacing, filled.steps_offset, filled.set_alpha_to_one) == ("leading", 0, True)
    assert filled.final_sigmas_type is None and samplers.resolved("ddim", SD1) == SD1
    assert grid("ddim", silent, 4) == [750, 500, 250, 0]
    assert samplers.steps("ddim", silent, 4).rows[-1, ROW["A"]][0] == 0  # set_alpha_to_one: ends without noise
    assert grid("euler", silent, 4) == [999, 666, 333, 0]
    assert samplers.steps("euler", silent, 4).rows[-1, ROW["A"]][0] == 0
    assert grid("dpmpp_2m", silent, 4) == [999, 749, 500, 250]
    (notice,) = samplers.notices("ddim", silent)
    assert "timestep_spacing = 'leading', steps_offset = 0, set_alpha_to_one = True" in notice
    (notice,) = samplers.notices("euler", silent)
    assert "timestep_spacing = 'linspace', final_sigmas_type = 'zero'" in notice and "steps_offset" not in notice
    assert samplers.notices("ddim", SD1) == samplers.notices("pndm", SD1) == []
    assert samplers.notices("heun", SD1) == samplers.notices("euler_a", SD1) == []
    for name in ("euler", "dpmpp_2m", "unipc", "deis", "lcm"):
        assert len(samplers.notices(name, SD1)) == 1
    with pytest.raises(InputError, match="available: ddim, "):
        samplers.notices("plms", SD1)


def test_what_a_sampler_does_not_read_does_not_change_it():
    """As in diffusers: Euler ancestral ends at 0 whatever final_sigmas_type a file of another class gives."""
    changes = {"final_sigmas_type": "sigma_min", "solver_type": "heun", "solver_order": 3, "lower_order_final": False}
    for name in ("euler_a", "heun", "lms", "ddim", "pndm", "lcm"):
        rows = samplers.steps(name, scheduler(**changes), 6).rows
        np.testing.assert_array_equal(rows, samplers.steps(name, SD1, 6).rows)


@pytest.mark.parametrize(
    ("changes", "name", "mapped"),
    [
        ({"class_name": "DDIMScheduler"}, "ddim", False),
        ({"class_name": "PNDMScheduler"}, "pndm", False),
        ({"class_name": "EulerDiscreteScheduler"}, "euler", False),
        ({"class_name": "EulerAncestralDiscreteScheduler"}, "euler_a", False),
        ({"class_name": "HeunDiscreteScheduler"}, "heun", False),
        ({"class_name": "LMSDiscreteScheduler"}, "lms", False),
        ({"class_name": "UniPCMultistepScheduler"}, "unipc", False),
        ({"class_name": "DEISMultistepScheduler"}, "deis", False),
        ({"class_name": "LCMScheduler"}, "lcm", False),
        ({"class_name": "DPMSolverMultistepScheduler"}, "dpmpp_2m", False),
        ({"class_name": "DPMSolverMultistepScheduler", "solver_order": 3}, "dpmpp_3m", False),
        ({"class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}, "dpmpp_2m_sde", False),
        ({"class_name": "DPMSolverMultistepScheduler", "solver_order": 1}, "dpmpp_2m", True),
        ({"class_name": "DPMSolverSDEScheduler"}, "ddim", True),
        ({"class_name": "DDPMScheduler"}, "ddim", True),
    ],
)
def test_default_sampler(changes, name, mapped):
    found, notice = default_sampler(scheduler(**changes))
    assert found == name and found in SAMPLERS
    assert (notice is not None) == mapped
    if mapped:
        assert changes["class_name"] in notice and f"using {name}" in notice
