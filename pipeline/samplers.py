"""Samplers as tables of coefficients: one row per call of the UNet, in NumPy.

Every sampler here is a linear update of a small state whose coefficients depend on the noise schedule alone, so a
sampler is data. The state is z0..z4: z0 the latent in variance-preserving scale, z1..z4 memory. One row says

    out      = guided output of the UNet at (z0, timestep), guidance = 1 + g * max(guidance_scale - 1, 0)
    denoised = p * z0 + q * out
    z        = A z + B denoised + C noise(seed, row)

A row is 39 float32 numbers; `ROW` names its slices. Adding a sampler: one function and one line in `SAMPLERS` and
in `DEFAULTS`. No TensorFlow.
"""

import dataclasses
import numbers
from types import MappingProxyType

import numpy as np

from models.config import InputError, SchedulerConfig

STATE = 5
ROW = MappingProxyType(
    {
        "timestep": slice(0, 1),
        "p": slice(1, 2),
        "q": slice(2, 3),
        "g": slice(3, 4),
        "A": slice(4, 29),  # [5, 5] row-major: A[i, j] takes z_j into the next z_i
        "B": slice(29, 34),  # [5]
        "C": slice(34, 39),  # [5]
    }
)
ROW_SIZE = 39

# What diffusers' class of the same sampler does when scheduler_config.json lacks the key.
DEFAULTS = MappingProxyType(
    {
        "ddim": {"timestep_spacing": "leading", "steps_offset": 0, "set_alpha_to_one": True},
        "euler": {"timestep_spacing": "linspace", "steps_offset": 0, "final_sigmas_type": "zero"},
    }
)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A sampling run as data.

    The run starts at z0 = signal * x0 + noise * eps with eps ~ N(0, 1), z1..z4 = 0; text-to-image has signal 0.

    Attributes:
        signal: weight of a clean latent at the start.
        noise: weight of the initial noise; 1 up to the oddities of the sampler.
        rows: float32[n, 39], one per call of the UNet, in order; see `ROW`.
    """

    signal: float
    noise: float
    rows: np.ndarray


def alphas_cumprod(config: SchedulerConfig) -> np.ndarray:
    """The share of signal left at each training timestep (Ho et al. 2020, arXiv:2006.11239, section 2).

    PyTorch computes the betas in float32, each with one rounding (fused multiply-add), and multiplies the alphas up
    in float64. This does the same and reproduces diffusers' float32 table to the last bit: float32 keeps few digits
    of 1 - beta, so with betas in float64 1 - alphas_cumprod differs by up to 2.6e-5 relative at small timesteps, and
    a run's latents by 1.3e-5 (Euler, largest) instead of 4e-6.

    Returns:
        float64[num_train_timesteps] in (0, 1), strictly falling, each a float32 value.

    Raises:
        InputError: an unknown beta_schedule, or betas outside (0, 1).
    """
    start, end, count = config.beta_start, config.beta_end, config.num_train_timesteps
    if config.beta_schedule not in ("scaled_linear", "linear"):
        raise InputError(f"beta_schedule should be 'scaled_linear' or 'linear', found {config.beta_schedule!r}")
    if not (0 < start < 1 and 0 < end < 1) or count < 2:
        raise InputError(
            f"the noise schedule needs 2 or more timesteps and betas between 0 and 1, found num_train_timesteps "
            f"{count}, beta_start {start}, beta_end {end}; correct scheduler_config.json"
        )
    if config.beta_schedule == "scaled_linear":
        betas = _linspace_float32(start**0.5, end**0.5, count) ** 2
    else:
        betas = _linspace_float32(start, end, count)
    alphas = np.float32(1) - betas
    return np.cumprod(alphas, dtype=np.float64).astype(np.float32).astype(np.float64)


def timesteps(config: SchedulerConfig, spacing: str, num_steps: int, steps_offset: int) -> np.ndarray:
    """The whole training timesteps that a run of `num_steps` visits (Lin et al. 2023, arXiv:2305.08891, table 2).

    Args:
        config: gives num_train_timesteps T.
        spacing: "leading" (whole stride from the clean end, shifted by steps_offset), "trailing" (from the noisy
            end) or "linspace" (both ends).
        num_steps: 1..T.
        steps_offset: added to "leading" timesteps only.

    Returns:
        int64[num_steps], strictly falling, all in 0..T-1.

    Raises:
        InputError: num_steps is not an integer in 1..T, an unknown spacing, or a grid that leaves 0..T-1.
    """
    grid = _grid(config, spacing, num_steps, steps_offset)
    return np.round(grid).astype(np.int64)


def ddim(config: SchedulerConfig, num_steps: int) -> Steps:
    """DDIM with eta = 0 (Song et al. 2020, arXiv:2010.02502, equation 12).

    The alpha a step ends at is that of the next timestep in the list. diffusers' DDIMScheduler takes t - T // n
    instead; the two agree for "leading", and for "trailing" where n divides T, but for "linspace" diffusers' step
    ends at a noise level that the next step does not start from.

    Returns:
        Steps with rows float32[num_steps, 39] and noise = 1.

    Raises:
        InputError: see `timesteps`.
    """
    config = resolved("ddim", config)
    grid = timesteps(config, config.timestep_spacing, num_steps, config.steps_offset)
    schedule = alphas_cumprod(config)
    last = 1.0 if config.set_alpha_to_one else schedule[0]
    return Steps(0.0, 1.0, _first_order_rows(config, grid, np.append(schedule[grid], last)))


def euler(config: SchedulerConfig, num_steps: int) -> Steps:
    """Euler's method on the probability flow (Karras et al. 2022, arXiv:2206.00364, algorithm 1, no churn).

    diffusers' EulerDiscreteScheduler keeps the latent in sigma scale, x = z0 * sqrt(1 + sigma^2), and divides by
    that root before the UNet; here the state is z0 itself. "linspace" timesteps are not rounded; sigma is
    interpolated between whole timesteps.

    Returns:
        Steps with rows float32[num_steps, 39]. noise is 1 for "leading"; for "linspace" and "trailing" it is
        sigma_max / sqrt(1 + sigma_max^2), because diffusers starts those at sigma_max * eps.

    Raises:
        InputError: see `timesteps`; an unknown final_sigmas_type.
    """
    config = resolved("euler", config)
    spacing = config.timestep_spacing
    grid = _grid(config, spacing, num_steps, config.steps_offset)
    # diffusers interpolates at the float32 timestep that it also gives to the UNet.
    grid = (grid if spacing == "linspace" else np.round(grid)).astype(np.float32).astype(np.float64)
    schedule = alphas_cumprod(config)
    all_sigmas = np.sqrt((1 - schedule) / schedule)
    sigmas = np.interp(grid, np.arange(len(all_sigmas)), all_sigmas)
    if config.final_sigmas_type not in ("zero", "sigma_min"):
        raise InputError(f"final_sigmas_type should be 'zero' or 'sigma_min', found {config.final_sigmas_type!r}")
    last = 0.0 if config.final_sigmas_type == "zero" else all_sigmas[0]
    noise = 1.0 if spacing == "leading" else float(sigmas[0] / np.sqrt(1 + sigmas[0] ** 2))
    return Steps(0.0, noise, _first_order_rows(config, grid, 1 / (1 + np.append(sigmas, last) ** 2)))


SAMPLERS = MappingProxyType({"ddim": ddim, "euler": euler})

# The sampler that draws what the author of a checkpoint with this scheduler class meant; None: it is that class.
_SAMPLER_OF_CLASS = {
    "DDIMScheduler": ("ddim", None),
    "EulerDiscreteScheduler": ("euler", None),
    "EulerAncestralDiscreteScheduler": ("euler", "its deterministic form"),
}


def steps_table(name: str, config: SchedulerConfig, num_steps: int, max_steps: int) -> tuple[Steps, np.ndarray]:
    """The steps of a run, and its table at the fixed size an export takes.

    Args:
        name: a key of `SAMPLERS`.
        config: the checkpoint's scheduler.
        num_steps: 1..max_steps.
        max_steps: rows of the export's table.

    Returns:
        (steps, table): table is float32[max_steps, 39], its rows beyond steps.rows NaN, so that running one of them
        gives NaN latents and never a wrong picture.

    Raises:
        InputError: an unknown sampler, num_steps outside 1..max_steps, or a grid the schedule does not have.
    """
    if name not in SAMPLERS:
        raise InputError(f"unknown sampler {name!r}; available: {', '.join(SAMPLERS)}")
    _check_integer("num_steps", num_steps, max_steps, "of the export; ask for fewer steps or export with more")
    steps = SAMPLERS[name](config, int(num_steps))
    table = np.full((max_steps, ROW_SIZE), np.nan, np.float32)
    table[: len(steps.rows)] = steps.rows
    return steps, table


def notices(name: str, config: SchedulerConfig) -> list[str]:
    """What the user should know about settings that the checkpoint's scheduler file leaves open.

    Returns:
        No line when the file says everything that sampler `name` reads, else one.

    Raises:
        InputError: an unknown sampler.
    """
    if name not in SAMPLERS:
        raise InputError(f"unknown sampler {name!r}; available: {', '.join(SAMPLERS)}")
    spacing = resolved(name, config).timestep_spacing
    absent = [
        f"{key} = {value!r}"
        for key, value in DEFAULTS[name].items()
        if getattr(config, key) is None and not (key == "steps_offset" and spacing != "leading")
    ]
    if not absent:
        return []
    return [f"scheduler_config.json does not set everything {name} reads; using diffusers' {', '.join(absent)}"]


def default_sampler(class_name: str) -> tuple[str, str | None]:
    """The sampler for a checkpoint whose scheduler_config.json names `class_name`.

    Returns:
        (name, notice): name is a key of `SAMPLERS`; notice is one line where the class is not available and another
        sampler stands in for it, else None.
    """
    name, kind = _SAMPLER_OF_CLASS.get(class_name, ("ddim", "a deterministic sampler for the same noise schedule"))
    if kind is None:
        return name, None
    return name, f"the checkpoint asks for {class_name}, which is not available; using {name}, {kind}"


def resolved(name: str, config: SchedulerConfig) -> SchedulerConfig:
    """The same schedule with everything that sampler `name` reads filled in from its class's defaults."""
    absent = {key: value for key, value in DEFAULTS[name].items() if getattr(config, key) is None}
    return dataclasses.replace(config, **absent)


def _check_integer(what: str, value, most: int, whose: str) -> None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise InputError(f"{what} should be a whole number, found {value!r}")
    if not 1 <= value <= most:
        raise InputError(f"{what} should be between 1 and {most}, found {value}; {most} is the limit {whose}")


def _grid(config: SchedulerConfig, spacing: str, num_steps: int, steps_offset: int) -> np.ndarray:
    """diffusers' timesteps float64[num_steps], falling; "linspace" not rounded yet, "trailing" made whole."""
    count = config.num_train_timesteps
    _check_integer("num_steps", num_steps, count, "of the model's noise schedule; ask for fewer steps")
    if spacing == "leading":
        grid = (np.arange(num_steps) * float(count // num_steps))[::-1] + steps_offset
    elif spacing == "trailing":
        # The float range can have one entry too many (n = 61, 103, ...); the first n are right.
        grid = np.round(np.arange(count, 0, -count / num_steps))[:num_steps] - 1
    elif spacing == "linspace":
        grid = np.linspace(0, count - 1, num_steps)[::-1]
    else:
        raise InputError(f"timestep_spacing should be 'leading', 'trailing' or 'linspace', found {spacing!r}")
    outside = grid[(grid < 0) | (grid > count - 1)]
    if len(outside):
        fits = [n for n in range(1, num_steps) if 0 <= steps_offset <= count - 1 - (n - 1) * (count // n)]
        raise InputError(
            f"{num_steps} steps with {spacing} spacing and steps_offset {steps_offset} ask for timestep "
            f"{outside[0]:.0f}, the model knows 0 to {count - 1}; "
            + (f"{fits[-1]} steps fit" if fits else "correct steps_offset in scheduler_config.json")
        )
    return grid


def _first_order_rows(config: SchedulerConfig, grid: np.ndarray, alphas: np.ndarray) -> np.ndarray:
    """Rows of the first-order step from noise level alphas[i] to alphas[i + 1], float32[n, 39].

    DDIM's equation 12 and Euler's method in sigma are the same line in variance-preserving scale:
    z0' = sqrt(a') denoised + sqrt(1 - a') eps, with eps = (z0 - sqrt(a) denoised) / sqrt(1 - a).
    """
    signal, noise = np.sqrt(alphas), np.sqrt(1 - alphas)
    here, after = slice(None, -1), slice(1, None)
    if config.prediction_type == "epsilon":
        p, q = 1 / signal[here], -noise[here] / signal[here]
    elif config.prediction_type == "v_prediction":
        p, q = signal[here], -noise[here]  # Salimans and Ho 2022, arXiv:2202.00512, appendix D
    else:
        raise InputError(f"prediction_type should be 'epsilon' or 'v_prediction', found {config.prediction_type!r}")
    keep = noise[after] / noise[here]
    rows = np.zeros((len(grid), ROW_SIZE))
    rows[:, ROW["timestep"]] = grid[:, None]
    rows[:, ROW["p"]] = p[:, None]
    rows[:, ROW["q"]] = q[:, None]
    rows[:, ROW["g"]] = 1
    rows[:, ROW["A"].start] = keep  # A[0, 0]
    rows[:, ROW["B"].start] = signal[after] - signal[here] * keep  # B[0]
    return rows.astype(np.float32)


def _linspace_float32(start: float, end: float, count: int) -> np.ndarray:
    """torch.linspace in float32, bit for bit: counted from the nearer end, one rounding per value."""
    first, last = np.float32(start), np.float32(end)
    step = np.float64((last - first) / np.float32(count - 1))
    index = np.arange(count)
    values = np.where(index < count // 2, first + step * index, last - step * (count - 1 - index))
    return values.astype(np.float32)
