"""Samplers as tables of coefficients: one row per call of the UNet, in NumPy.

Every sampler here is a linear update of a small state whose coefficients depend on the noise schedule alone, so a
sampler is data: `sampling.solvers` makes its rows, `models.loop` runs them. Adding one: a function there and an entry
in `SAMPLERS`. No TensorFlow.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from models.config import SchedulerConfig
from models.errors import InputError
from models.steps import ROW_SIZE
from pipeline.sampling import schedules, solvers
from pipeline.sampling.schedules import DEFAULT, Levels, Options
from pipeline.sampling.solvers import Steps

_LEVELS = ("timestep_spacing", "sigma_schedule", "timesteps", "sigmas")


@dataclasses.dataclass(frozen=True)
class Sampler:
    """All there is to know about one sampler.

    Attributes:
        label: what AUTOMATIC1111 calls it.
        class_name: of the scheduler in diffusers that asks for it; see `default_sampler`.
        levels: chooses the noise levels a run visits.
        rows: computes what is done between them, see `sampling.solvers`.
        defaults: the fields of SchedulerConfig it reads, and what diffusers' class does when scheduler_config.json
            lacks the key.
        options: the fields of Options it takes.
    """

    label: str
    class_name: str
    levels: Callable[[SchedulerConfig, int, Options], Levels]
    rows: Callable[[SchedulerConfig, Levels, Options], Steps]
    defaults: Mapping[str, object]
    options: tuple[str, ...] = _LEVELS


_GRID = {"timestep_spacing": "linspace", "steps_offset": 0}
_LEADING = {"timestep_spacing": "leading", "steps_offset": 0}
_SIGMAS = {**_GRID, "sigma_schedule": "uniform"}
_MULTISTEP = {**_SIGMAS, "lower_order_final": True}
_DPMPP = {**_MULTISTEP, "final_sigmas_type": "zero", "solver_type": "midpoint", "euler_at_final": False}
_UNIPC = {**_MULTISTEP, "final_sigmas_type": "zero", "solver_order": 2, "solver_type": "bh2"}
_LCM = {"original_inference_steps": 50, "timestep_scaling": 10.0}
_DPM_SOLVER = "DPMSolverMultistepScheduler"

SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        "ddim": Sampler(
            "DDIM",
            "DDIMScheduler",
            schedules.timestep_levels,
            solvers.ddim,
            {**_LEADING, "set_alpha_to_one": True},
            ("eta", "timestep_spacing", "timesteps"),
        ),
        "pndm": Sampler(
            "PLMS",
            "PNDMScheduler",
            schedules.timestep_levels,
            solvers.pndm,
            {**_LEADING, "set_alpha_to_one": False},
            ("timestep_spacing",),
        ),
        "euler": Sampler(
            "Euler",
            "EulerDiscreteScheduler",
            schedules.interpolated_levels,
            solvers.euler,
            {**_SIGMAS, "final_sigmas_type": "zero"},
        ),
        "euler_a": Sampler(
            "Euler a", "EulerAncestralDiscreteScheduler", schedules.interpolated_levels, solvers.euler_a, _GRID
        ),
        "heun": Sampler("Heun", "HeunDiscreteScheduler", schedules.interpolated_levels, solvers.heun, _SIGMAS),
        "lms": Sampler("LMS", "LMSDiscreteScheduler", schedules.interpolated_levels, solvers.lms, _SIGMAS),
        "dpmpp_2m": Sampler("DPM++ 2M", _DPM_SOLVER, schedules.whole_levels, solvers.dpmpp_2m, _DPMPP),
        "dpmpp_2m_sde": Sampler("DPM++ 2M SDE", _DPM_SOLVER, schedules.whole_levels, solvers.dpmpp_2m_sde, _DPMPP),
        "dpmpp_3m": Sampler("DPM++ 3M", _DPM_SOLVER, schedules.whole_levels, solvers.dpmpp_3m, _DPMPP),
        "unipc": Sampler("UniPC", "UniPCMultistepScheduler", schedules.whole_levels, solvers.unipc, _UNIPC),
        "deis": Sampler(
            "DEIS",
            "DEISMultistepScheduler",
            schedules.smallest_noise_levels,
            solvers.deis,
            {**_MULTISTEP, "solver_order": 2},
        ),
        "lcm": Sampler("LCM", "LCMScheduler", schedules.distilled_levels, solvers.lcm, _LCM, ("timesteps",)),
    }
)


def default_sampler(scheduler: SchedulerConfig) -> tuple[str, str | None]:
    """Return the sampler for a checkpoint with this scheduler.

    Returns:
        (name, notice): name is a key of SAMPLERS; notice is one line where the class is not available and another
        sampler stands in for it, else None.
    """
    asked = f"the checkpoint asks for {scheduler.class_name}"
    if scheduler.class_name == _DPM_SOLVER:
        sde, order = scheduler.algorithm_type == "sde-dpmsolver++", scheduler.solver_order or 2
        name = {(False, 3): "dpmpp_3m", (True, order): "dpmpp_2m_sde"}.get((sde, order), "dpmpp_2m")
        fits = order == 2 or name == "dpmpp_3m"
        return name, None if fits else f"{asked} of order {order}; using {name}, of order 2"
    for name, sampler in SAMPLERS.items():
        if sampler.class_name == scheduler.class_name:
            return name, None
    stand_in = "a deterministic sampler for the same noise schedule"
    return "ddim", f"{asked}, which is not available; using ddim, {stand_in}"


def steps(
    name: str,
    config: SchedulerConfig,
    num_steps: int,
    options: Options = DEFAULT,
    first_step: int | None = None,
) -> Steps:
    """Make the run of a sampler, as data.

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
        if getattr(options, field.name) != field.default and field.name not in SAMPLERS[name].options:
            able = ", ".join(other for other, sampler in SAMPLERS.items() if field.name in sampler.options)
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
    levels = SAMPLERS[name].levels(config, num_steps, options).from_step(first_step)
    return SAMPLERS[name].rows(config, levels, options)


def steps_table(
    name: str,
    config: SchedulerConfig,
    num_steps: int,
    max_steps: int,
    options: Options = DEFAULT,
    first_step: int | None = None,
) -> tuple[Steps, np.ndarray]:
    """Make the steps of a run, and its table at the fixed size an export takes.

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
    """Return what the user should know about settings that the checkpoint's scheduler file leaves open.

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
        for key, value in SAMPLERS[name].defaults.items()
        if getattr(config, key) is None and not (key == "steps_offset" and spacing != "leading")
    ]
    if not absent:
        return []
    return [f"scheduler_config.json does not set everything {name} reads; using diffusers' {', '.join(absent)}"]


def resolved(name: str, config: SchedulerConfig, options: Options = DEFAULT) -> SchedulerConfig:
    """Return the same schedule as sampler `name` reads it: the user's options, the file, else its class's defaults.

    What the sampler does not read is None, and its sigma_schedule "uniform": a file's Karras sigmas are meant for the
    classes that have them.
    """
    known = SAMPLERS[name].defaults
    every = {key for sampler in SAMPLERS.values() for key in sampler.defaults}
    read = {key: getattr(config, key) if key in known else None for key in every}
    read = {key: known.get(key) if value is None else value for key, value in read.items()}
    read["sigma_schedule"] = options.sigma_schedule or read["sigma_schedule"] or "uniform"
    read["timestep_spacing"] = options.timestep_spacing or read["timestep_spacing"]
    return dataclasses.replace(config, **read)


def _check_name(name: str) -> None:
    if name not in SAMPLERS:
        raise InputError(f"unknown sampler {name!r}; available: {', '.join(SAMPLERS)}")
