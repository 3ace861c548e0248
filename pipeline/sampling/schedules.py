"""Noise levels: the schedule a model was trained on, and which of its levels a run visits.

Two traditions of choosing levels live on in the samplers, and checkpoints are tuned for them: `interpolated_levels`
(k-diffusion: Euler, Heun, LMS) and `whole_levels` (DPM-Solver: DPM++, UniPC, DEIS). DDIM and PNDM know nothing but
whole training timesteps (`timestep_levels`), LCM those it was distilled on (`distilled_levels`). NumPy, float64.
"""

import dataclasses
import numbers

import numpy as np

from models.config import SchedulerConfig
from models.errors import InputError

SPACINGS = ("leading", "trailing", "linspace")
SIGMA_SCHEDULES = ("uniform", "karras", "exponential")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose about a sampler beside its number of steps; None: as the checkpoint says.

    Attributes:
        eta: DDIM's share of fresh noise, 0 (none) to 1 (as much as DDPM).
        timestep_spacing: one of SPACINGS.
        sigma_schedule: one of SIGMA_SCHEDULES; "uniform" takes the levels of the timesteps as they are.
        timesteps: the timesteps themselves, falling, instead of a spacing.
        sigmas: the noise levels themselves, falling, the last one where the run ends (0: no noise left).
    """

    eta: float = 0.0
    timestep_spacing: str | None = None
    sigma_schedule: str | None = None
    timesteps: tuple[float, ...] | None = None
    sigmas: tuple[float, ...] | None = None

    @property
    def num_steps(self) -> int | None:
        """Steps that the lists make; None without a list."""
        if self.timesteps is not None:
            return len(self.timesteps)
        return None if self.sigmas is None else len(self.sigmas) - 1


DEFAULT = Options()


@dataclasses.dataclass(frozen=True)
class Levels:
    """The noise levels of a run of n steps.

    Attributes:
        timesteps: float64[n], what the UNet is told; float32 values.
        alphas: float64[n + 1] in (0, 1], squared share of signal at the start of each step and at the end.
        skipped: steps of the run that were left out before these, to start from a picture; None: start from noise.
    """

    timesteps: np.ndarray
    alphas: np.ndarray
    skipped: int | None = None

    def from_step(self, first: int | None) -> "Levels":
        """The same run without its first steps, starting from a picture; None: all of it, from noise."""
        return self if first is None else Levels(self.timesteps[first:], self.alphas[first:], first)

    @property
    def num_steps(self) -> int:
        """Steps to make."""
        return len(self.timesteps)

    @property
    def signal(self) -> np.ndarray:
        """float64[n + 1]: weight of the clean latent in variance-preserving scale."""
        return np.sqrt(self.alphas)

    @property
    def noise(self) -> np.ndarray:
        """float64[n + 1]: weight of the noise in variance-preserving scale."""
        return np.sqrt(1 - self.alphas)

    @property
    def sigma(self) -> np.ndarray:
        """float64[n + 1]: noise over signal."""
        return self.noise / self.signal


def alphas_cumprod(config: SchedulerConfig) -> np.ndarray:
    """The share of signal left at each training timestep (Ho et al. 2020, arXiv:2006.11239, section 2).

    PyTorch computes the betas in float32, each with one rounding (fused multiply-add), and multiplies the alphas up
    in float64. This does the same and reproduces diffusers' float32 table to the last bit: float32 keeps few digits
    of 1 - beta, so with betas in float64 1 - alphas_cumprod differs by up to 2.6e-5 relative at small timesteps, and
    a run's latents by 1.3e-5 (Euler, largest) instead of 4e-6.

    Returns:
        float64[num_train_timesteps] in (0, 1), strictly falling, each a float32 value. With rescale_betas_zero_snr the
        last is 0.

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
    if config.rescale_betas_zero_snr:
        alphas = _zero_snr(alphas)
    return np.cumprod(alphas, dtype=np.float64).astype(np.float32).astype(np.float64)


def _zero_snr(alphas: np.ndarray) -> np.ndarray:
    """The same schedule shifted to end at no signal at all (Lin et al. 2023, arXiv:2305.08891, algorithm 1).

    In float32 and by way of the betas, as diffusers computes it; PyTorch's square root differs in its last bit.
    """
    signal = np.sqrt(np.cumprod(alphas, dtype=np.float64).astype(np.float32))
    first, last = signal[0], signal[-1]
    products = ((signal - last) * (first / (first - last))) ** 2
    betas = np.float32(1) - np.concatenate([products[:1], products[1:] / products[:-1]])
    return np.float32(1) - betas


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
    return np.round(_grid(config, spacing, num_steps, steps_offset)).astype(np.int64)


def timestep_levels(config: SchedulerConfig, num_steps: int, options: Options) -> Levels:
    """Whole timesteps; the last step ends at alphas_cumprod[0], or at 1 with set_alpha_to_one (DDIM, PNDM).

    Args:
        config: timestep_spacing, steps_offset and set_alpha_to_one not None.

    Raises:
        InputError: see `timesteps`; a list of timesteps that is not whole, falling and known to the model.
    """
    grid = _listed(config, options, whole=True)
    if grid is None:
        grid = timesteps(config, config.timestep_spacing, num_steps, config.steps_offset).astype(np.float64)
    schedule = alphas_cumprod(config)
    last = 1.0 if config.set_alpha_to_one else schedule[0]
    return Levels(grid, np.append(_with_signal(config, schedule[grid.astype(np.int64)]), last))


def interpolated_levels(config: SchedulerConfig, num_steps: int, options: Options) -> Levels:
    """k-diffusion's levels: the last timestep is visited, "linspace" is not rounded, sigma is interpolated.

    Karras and exponential levels lie between those of the first and last timestep. The run ends at
    final_sigmas_type, at 0 where that is None.

    Raises:
        InputError: see `timesteps`; a bad list, sigma_schedule or final_sigmas_type.
    """
    table = _sigmas(config)
    if options.sigmas is not None:
        sigmas = _listed_sigmas(options.sigmas)
        return _sigma_levels(_timestep_of(sigmas[:-1], table), sigmas)
    grid = _listed(config, options, whole=False)
    if grid is None:
        grid = _grid(config, config.timestep_spacing, num_steps, config.steps_offset)
        grid = grid if config.timestep_spacing == "linspace" else np.round(grid)
    grid = grid.astype(np.float32)
    sigmas = np.interp(grid, np.arange(len(table)), table)
    schedule = "uniform" if options.timesteps is not None else config.sigma_schedule
    if schedule != "uniform":
        sigmas = _respaced(schedule, sigmas[0], sigmas[-1], num_steps)
        grid = _timestep_of(sigmas, table)
    return _sigma_levels(grid, np.append(sigmas, _final_sigma(config, table)))


def whole_levels(config: SchedulerConfig, num_steps: int, options: Options) -> Levels:
    """DPM-Solver's levels: n + 1 whole timesteps, the last of which is not visited ("trailing": n).

    Karras and exponential levels span the whole schedule; the timestep told to the UNet is rounded with Karras and
    cut off with exponential levels, as in diffusers. The run ends at final_sigmas_type.

    Raises:
        InputError: see `timesteps`; a bad list, sigma_schedule or final_sigmas_type.
    """
    table = _sigmas(config)
    if options.sigmas is not None:
        sigmas = _listed_sigmas(options.sigmas)
        return _sigma_levels(np.round(_timestep_of(sigmas[:-1], table)), sigmas)
    schedule = "uniform" if options.timesteps is not None else config.sigma_schedule
    if schedule != "uniform":
        check_integer("num_steps", num_steps, config.num_train_timesteps, "of the model's noise schedule")
        sigmas = _respaced(schedule, table[-1], table[0], num_steps)
        cut = np.round if schedule == "karras" else np.trunc
        return _sigma_levels(cut(_timestep_of(sigmas, table)), np.append(sigmas, _final_sigma(config, table)))
    grid = _listed(config, options, whole=True)
    if grid is None:
        extra = 0 if config.timestep_spacing == "trailing" else 1
        grid = np.round(_grid(config, config.timestep_spacing, num_steps, config.steps_offset, extra))
    sigmas = table[grid.astype(np.int64)]
    return _sigma_levels(grid, np.append(sigmas, _final_sigma(config, table)))


def smallest_noise_levels(config: SchedulerConfig, num_steps: int, options: Options) -> Levels:
    """As `whole_levels`, always ending at the schedule's smallest noise.

    Raises:
        InputError: as there; sigmas that end at 0.
    """
    levels = whole_levels(dataclasses.replace(config, final_sigmas_type="sigma_min"), num_steps, options)
    if levels.alphas[-1] == 1:
        raise InputError("deis cannot end at a noise of 0; let sigmas end above")
    return levels


def distilled_levels(config: SchedulerConfig, num_steps: int, options: Options) -> Levels:
    """LCM's timesteps: n out of the original_inference_steps it was distilled on; the run ends without noise.

    Luo et al. 2023, arXiv:2310.04378, section 4.3: the skipping-step timesteps k - 1, 2k - 1, ...

    Raises:
        InputError: more steps than original_inference_steps, or a bad list.
    """
    grid = _listed(config, options, whole=True)
    if grid is None:
        count, original = config.num_train_timesteps, config.original_inference_steps
        check_integer("original_inference_steps", original, count, "of the model's noise schedule")
        check_integer("num_steps", num_steps, original, "that LCM was distilled on (original_inference_steps)")
        taught = np.arange(original, 0, -1) * (count // original) - 1
        grid = taught[np.floor(np.linspace(0, original, num_steps, endpoint=False)).astype(np.int64)]
        grid = grid.astype(np.float64)
    return Levels(grid, np.append(_with_signal(config, alphas_cumprod(config)[grid.astype(np.int64)]), 1.0))


def _with_signal(config: SchedulerConfig, alphas: np.ndarray) -> np.ndarray:
    """Refuse levels without any signal where the model predicts the noise: it says nothing about the picture there."""
    if config.prediction_type == "epsilon" and np.any(alphas == 0):
        raise InputError(
            "with rescale_betas_zero_snr the run starts without any signal, where a model that predicts epsilon says "
            "nothing; use euler, or correct prediction_type in scheduler_config.json"
        )
    return alphas


def check_integer(what: str, value, most: int, whose: str) -> None:
    """Raise InputError unless `value` is a whole number in 1..most; `whose` says whose limit that is."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise InputError(f"{what} should be a whole number, found {value!r}")
    if not 1 <= value <= most:
        raise InputError(f"{what} should be between 1 and {most}, found {value}; {most} is the limit {whose}")


def _grid(config: SchedulerConfig, spacing: str, num_steps: int, steps_offset: int, extra: int = 0) -> np.ndarray:
    """diffusers' timesteps float64[num_steps], falling; "linspace" not rounded yet, "trailing" made whole.

    `extra` = 1 makes one more, the last, and leaves it out.
    """
    count = config.num_train_timesteps
    check_integer("num_steps", num_steps, count - extra, "of the model's noise schedule; ask for fewer steps")
    points = num_steps + extra
    if spacing == "leading":
        grid = (np.arange(points) * float(count // points))[::-1] + steps_offset
    elif spacing == "trailing":
        # The float range can have one entry too many (n = 61, 103, ...); the first n are right.
        grid = np.round(np.arange(count, 0, -count / num_steps)) - 1
    elif spacing == "linspace":
        grid = np.linspace(0, count - 1, points)[::-1]
    else:
        raise InputError(f"timestep_spacing should be {_either(SPACINGS)}, found {spacing!r}")
    grid = grid[:num_steps]
    outside = grid[(grid < 0) | (grid > count - 1)]
    if len(outside):
        strides = ((n, count // (n + extra)) for n in range(1, num_steps))
        fits = [n for n, s in strides if 0 <= steps_offset + extra * s <= count - 1 - (n - 1) * s]
        raise InputError(
            f"{num_steps} steps with {spacing} spacing and steps_offset {steps_offset} ask for timestep "
            f"{outside[0]:.0f}, the model knows 0 to {count - 1}; "
            + (f"{fits[-1]} steps fit" if fits else "correct steps_offset in scheduler_config.json")
        )
    return grid


def _sigmas(config: SchedulerConfig) -> np.ndarray:
    """float64[T], rising: noise over signal at each training timestep, in float32 as diffusers computes it.

    Exponential levels are made from these and their timesteps cut off, so that one bit decides between 999 and 998.
    """
    # With zero terminal SNR the last level would be infinite; diffusers takes float16's smallest number for 0.
    schedule = np.maximum(alphas_cumprod(config).astype(np.float32), np.float32(2**-24))
    return np.sqrt((1 - schedule) / schedule).astype(np.float64)


def _sigma_levels(timesteps: np.ndarray, sigmas: np.ndarray) -> Levels:
    return Levels(timesteps.astype(np.float32).astype(np.float64), 1 / (1 + sigmas**2))


def _final_sigma(config: SchedulerConfig, table: np.ndarray) -> float:
    if config.final_sigmas_type not in (None, "zero", "sigma_min"):
        raise InputError(f"final_sigmas_type should be 'zero' or 'sigma_min', found {config.final_sigmas_type!r}")
    return table[0] if config.final_sigmas_type == "sigma_min" else 0.0


def _respaced(schedule: str, largest: float, smallest: float, num_steps: int) -> np.ndarray:
    """float64[num_steps] noise levels from `largest` down to `smallest`."""
    ramp = np.linspace(0, 1, num_steps)
    if schedule == "karras":  # Karras et al. 2022, arXiv:2206.00364, equation 5, rho = 7
        return (largest ** (1 / 7) + ramp * (smallest ** (1 / 7) - largest ** (1 / 7))) ** 7
    if schedule == "exponential":
        return np.exp(np.linspace(np.log(largest), np.log(smallest), num_steps))
    raise InputError(f"sigma_schedule should be {_either(SIGMA_SCHEDULES)}, found {schedule!r}")


def _timestep_of(sigmas: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The timestep of a noise level, float64: linear in log sigma between whole timesteps, cut at both ends."""
    # Logarithms of float32 values in float32: see _sigmas.
    known, wanted = np.log(table.astype(np.float32)).astype(np.float64), np.log(sigmas)
    low = np.clip(np.searchsorted(known, wanted, side="right") - 1, 0, len(table) - 2)
    share = np.clip((known[low] - wanted) / (known[low] - known[low + 1]), 0, 1)
    return (1 - share) * low + share * (low + 1)


def _listed(config: SchedulerConfig, options: Options, whole: bool) -> np.ndarray | None:
    """The user's list of timesteps, float64[n]; None without one."""
    if options.timesteps is None:
        return None
    grid, most = np.array(options.timesteps, np.float64), config.num_train_timesteps - 1
    inside = np.all((grid >= 0) & (grid <= most))
    if not len(grid) or not inside or np.any(np.diff(grid) >= 0) or (whole and np.any(grid != np.round(grid))):
        raise InputError(
            f"timesteps should be {'whole numbers' if whole else 'numbers'} falling from at most {most} to at least "
            f"0, found {_some(options.timesteps)}"
        )
    return grid


def _listed_sigmas(sigmas: tuple[float, ...]) -> np.ndarray:
    """The user's list of noise levels, float64[n + 1]."""
    levels = np.array(sigmas, np.float64)
    if len(levels) < 2 or not np.all(np.isfinite(levels)) or levels[-1] < 0 or np.any(np.diff(levels) >= 0):
        raise InputError(f"sigmas should be 2 or more numbers falling to 0 or above, found {_some(sigmas)}")
    return levels


def _some(values: tuple) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:8])
    return f"{shown}, ..." if len(values) > 8 else shown or "none"


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"


def _linspace_float32(start: float, end: float, count: int) -> np.ndarray:
    """torch.linspace in float32, bit for bit: counted from the nearer end, one rounding per value."""
    first, last = np.float32(start), np.float32(end)
    step = np.float64((last - first) / np.float32(count - 1))
    index = np.arange(count)
    values = np.where(index < count // 2, first + step * index, last - step * (count - 1 - index))
    return values.astype(np.float32)
