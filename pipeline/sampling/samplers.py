"""Samplers as tables of coefficients: one row per call of the UNet, in NumPy.

Every sampler here is a linear update of a small state whose coefficients depend on the noise schedule alone, so a
sampler is data: `sampling.solvers` makes its rows, `models.loop` runs them. Adding one: a function there, a line in
`SAMPLERS`, in `OPTIONS` and in `DEFAULTS`. No TensorFlow.
"""

import dataclasses
from types import MappingProxyType

import numpy as np

from models.config import SchedulerConfig
from models.errors import InputError
from pipeline.sampling import schedules, solvers
from pipeline.sampling.schedules import DEFAULT, Options
from pipeline.sampling.solvers import ROW_SIZE, Steps

# Which noise levels a run visits, and what is computed between them.
SAMPLERS = MappingProxyType(
    {
        "ddim": (schedules.timestep_levels, solvers.ddim),
        "pndm": (schedules.timestep_levels, solvers.pndm),
        "euler": (schedules.interpolated_levels, solvers.euler),
        "euler_a": (schedules.interpolated_levels, solvers.euler_a),
        "heun": (schedules.interpolated_levels, solvers.heun),
        "lms": (schedules.interpolated_levels, solvers.lms),
        "dpmpp_2m": (schedules.whole_levels, solvers.dpmpp_2m),
        "dpmpp_2m_sde": (schedules.whole_levels, solvers.dpmpp_2m_sde),
        "dpmpp_3m": (schedules.whole_levels, solvers.dpmpp_3m),
        "unipc": (schedules.whole_levels, solvers.unipc),
        "deis": (schedules.smallest_noise_levels, solvers.deis),
        "lcm": (schedules.distilled_levels, solvers.lcm),
    }
)

# The options each sampler takes.
_LEVELS = ("timestep_spacing", "sigma_schedule", "timesteps", "sigmas")
OPTIONS = MappingProxyType(
    dict.fromkeys(SAMPLERS, _LEVELS)
    | {"ddim": ("eta", "timestep_spacing", "timesteps"), "pndm": ("timestep_spacing",), "lcm": ("timesteps",)}
)

# The fields of SchedulerConfig each sampler reads, and what diffusers' class of the same sampler does when
# scheduler_config.json lacks the key.
_GRID = {"timestep_spacing": "linspace", "steps_offset": 0}
_SIGMAS = {**_GRID, "sigma_schedule": "uniform"}
_MULTISTEP = {**_SIGMAS, "lower_order_final": True}
_DPMPP = {**_MULTISTEP, "final_sigmas_type": "zero", "solver_type": "midpoint", "euler_at_final": False}
DEFAULTS = MappingProxyType(
    {
        "ddim": {"timestep_spacing": "leading", "steps_offset": 0, "set_alpha_to_one": True},
        "pndm": {"timestep_spacing": "leading", "steps_offset": 0, "set_alpha_to_one": False},
        "euler": {**_SIGMAS, "final_sigmas_type": "zero"},
        "euler_a": _GRID,
        "heun": _SIGMAS,
        "lms": _SIGMAS,
        "dpmpp_2m": _DPMPP,
        "dpmpp_2m_sde": _DPMPP,
        "dpmpp_3m": _DPMPP,
        "unipc": {**_MULTISTEP, "final_sigmas_type": "zero", "solver_order": 2, "solver_type": "bh2"},
        "deis": {**_MULTISTEP, "solver_order": 2},
        "lcm": {"original_inference_steps": 50, "timestep_scaling": 10.0},
    }
)


def steps(
    name: str,
    config: SchedulerConfig,
    num_steps: int,
    options: Options = DEFAULT,
    first_step: int | None = None,
) -> Steps:
    """The run of a sampler as data.

    Args:
        name: a key of `SAMPLERS`.
        config: the checkpoint's scheduler.
        num_steps: 1..num_train_timesteps; LCM: 1..original_inference_steps.
        first_step: 0..num_steps - 1, image to image: the run without the steps before, started afresh from a picture
            with as much noise as that step expects. None: the whole run, from noise.

    Returns:
        Steps; n steps make 2 n - 1 rows of heun, n + 1 of pndm (1 for one step), n of the others.

    Raises:
        InputError: an unknown sampler, an option that it does not take, a list that is not num_steps long, or levels
            the schedule does not have.
    """
    _check_name(name)
    for field in dataclasses.fields(Options):
        if getattr(options, field.name) != field.default and field.name not in OPTIONS[name]:
            able = ", ".join(other for other in SAMPLERS if field.name in OPTIONS[other])
            raise InputError(f"{name} has no {field.name}; samplers with it: {able}")
    if options.num_steps is not None:
        ways = [options.timesteps, options.sigmas, options.sigma_schedule or options.timestep_spacing]
        if sum(way is not None for way in ways) > 1:
            raise InputError("give either timesteps or sigmas; with them, no timestep_spacing and no sigma_schedule")
        if num_steps != options.num_steps:
            raise InputError(f"num_steps is {num_steps}, but the list makes {options.num_steps} steps; leave it out")
    if first_step is not None and not 0 <= first_step < num_steps:
        raise InputError(f"first_step is {first_step}, expected 0 to {num_steps - 1} for {num_steps} steps")
    config = resolved(name, config, options)
    find_levels, solve = SAMPLERS[name]
    return solve(config, find_levels(config, num_steps, options).from_step(first_step), options)


def steps_table(
    name: str,
    config: SchedulerConfig,
    num_steps: int,
    max_steps: int,
    options: Options = DEFAULT,
    first_step: int | None = None,
) -> tuple[Steps, np.ndarray]:
    """The steps of a run, and its table at the fixed size an export takes.

    Args:
        max_steps: rows of the export's table. For the others see `steps`.

    Returns:
        (steps, table): table is float32[max_steps, 39], its rows beyond steps.rows NaN, so that running one of them
        gives NaN latents and never a wrong picture.

    Raises:
        InputError: see `steps`; more rows than max_steps.
    """
    _check_name(name)
    whose = "of the export; ask for fewer steps or export with more"
    schedules.check_integer("num_steps", num_steps, max_steps, whose)
    run = steps(name, config, int(num_steps), options, first_step)
    if len(run.rows) > max_steps:
        raise InputError(
            f"{name} calls the UNet {len(run.rows)} times in {num_steps} steps, {max_steps} is the limit {whose}"
        )
    table = np.full((max_steps, ROW_SIZE), np.nan, np.float32)
    table[: len(run.rows)] = run.rows
    return run, table


def notices(name: str, config: SchedulerConfig, options: Options = DEFAULT) -> list[str]:
    """What the user should know about settings that the checkpoint's scheduler file leaves open.

    Returns:
        No line when the file and the options say everything that sampler `name` reads, else one.

    Raises:
        InputError: an unknown sampler.
    """
    _check_name(name)
    spacing = resolved(name, config, options).timestep_spacing
    if options.timestep_spacing is not None:
        config = dataclasses.replace(config, timestep_spacing=spacing)
    absent = [
        f"{key} = {value!r}"
        for key, value in DEFAULTS[name].items()
        if getattr(config, key) is None and not (key == "steps_offset" and spacing != "leading")
    ]
    if not absent:
        return []
    return [f"scheduler_config.json does not set everything {name} reads; using diffusers' {', '.join(absent)}"]


def resolved(name: str, config: SchedulerConfig, options: Options = DEFAULT) -> SchedulerConfig:
    """The same schedule as sampler `name` reads it: the user's options, the file, else its class's defaults.

    What the sampler does not read is None, and its sigma_schedule "uniform": a file's Karras sigmas are meant for the
    classes that have them.
    """
    known = DEFAULTS[name]
    every = {key for keys in DEFAULTS.values() for key in keys}
    read = {key: getattr(config, key) if key in known else None for key in every}
    read = {key: known.get(key) if value is None else value for key, value in read.items()}
    read["sigma_schedule"] = options.sigma_schedule or read["sigma_schedule"] or "uniform"
    read["timestep_spacing"] = options.timestep_spacing or read["timestep_spacing"]
    return dataclasses.replace(config, **read)


def _check_name(name: str) -> None:
    if name not in SAMPLERS:
        raise InputError(f"unknown sampler {name!r}; available: {', '.join(SAMPLERS)}")
