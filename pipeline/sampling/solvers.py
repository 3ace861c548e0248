"""What each sampler computes: one row of coefficients per call of the UNet.

`models.steps` says what a row holds. Below, every quantity of a step is a vector of its weights in (z0, ..., z4,
denoised), float64[6], so that the papers' formulas can be written as they are; the next z0..z4 in these weights are the
row. No TensorFlow.
"""

import dataclasses
from math import factorial

import numpy as np

from models.config import SchedulerConfig
from models.errors import InputError
from models.steps import ROW, ROW_SIZE, STATE
from pipeline.sampling.schedules import Levels, Options

# The weights of the state's parts themselves: z0, (z1, z2, z3, z4), denoised.
X, *MEMORY, DENOISED = np.eye(STATE + 1)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A sampling run as data.

    The run starts at z0 = signal * x0 + noise * eps with eps ~ N(0, 1), z1..z4 = 0; text-to-image has signal 0.

    Attributes:
        signal: weight of a clean latent at the start.
        noise: weight of the initial noise; 1 up to the oddities of the sampler.
        rows: float32[rows, 39], one per call of the UNet, in order; see `models.steps`.
    """

    signal: float
    noise: float
    rows: np.ndarray


# === One step, one call, nothing remembered ===


def ddim(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """DDIM (Song et al. 2020, arXiv:2010.02502, equations 12 and 16).

    The alpha a step ends at is that of the next timestep in the list. diffusers' DDIMScheduler takes t - T // n
    instead; the two agree for "leading", and for "trailing" where n divides T, but for "linspace" diffusers' step
    ends at a noise level that the next step does not start from.
    """
    if not 0 <= options.eta <= 1:
        raise InputError(f"eta should be between 0 and 1, found {options.eta}")
    signal, noise, after = levels.signal[:-1], levels.noise[:-1], levels.noise[1:]
    fresh = options.eta * after / noise * np.sqrt(1 - levels.alphas[:-1] / levels.alphas[1:])
    keep = np.sqrt(after**2 - fresh**2) / noise
    return Steps(*_start(levels), _first_order_rows(config, levels, keep, levels.signal[1:] - signal * keep, fresh))


def euler(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """Euler's method on the probability flow (Karras et al. 2022, arXiv:2206.00364, algorithm 1, no churn).

    diffusers' EulerDiscreteScheduler keeps the latent in sigma scale, x = z0 * sqrt(1 + sigma^2), and divides by
    that root before the UNet; here the state is z0 itself.
    """
    keep = levels.noise[1:] / levels.noise[:-1]
    rows = _first_order_rows(config, levels, keep, levels.signal[1:] - levels.signal[:-1] * keep)
    return Steps(*_start(levels, config), rows)


def euler_a(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """Euler ancestral: a step to a level below the next one, then fresh noise up to it (k-diffusion, eta = 1).

    sigma_down = sigma'^2 / sigma and sigma_up = sigma' sqrt(1 - sigma'^2 / sigma^2), whose squares add up to sigma'^2.
    """
    ratio = levels.sigma[1:] / levels.sigma[:-1]
    signal, noise = levels.signal[1:], levels.noise[1:]
    keep = noise * ratio / levels.noise[:-1]
    rows = _first_order_rows(config, levels, keep, signal * (1 - ratio**2), noise * np.sqrt(1 - ratio**2))
    return Steps(*_start(levels, config), rows)


def lcm(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """Latent consistency model (Luo et al. 2023, arXiv:2310.04378, algorithm 3): jump to the end, add noise again.

    The jump is c_skip z0 + c_out denoised, the boundary conditions of a consistency model with sigma_data = 0.5.
    """
    scaled = levels.timesteps * config.timestep_scaling
    skip, out = 0.25 / (scaled**2 + 0.25), scaled / np.sqrt(scaled**2 + 0.25)
    signal = levels.signal[1:]
    return Steps(*_start(levels), _first_order_rows(config, levels, signal * skip, signal * out, levels.noise[1:]))


# === Steps of sigma scale: x = z0 / signal, dx / dsigma = (x - denoised) / sigma ===


def heun(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """Heun's second-order method (Karras et al. 2022, arXiv:2206.00364, algorithm 1): two calls a step but the last.

    z1 remembers where the step began, z2 the slope there; between the calls z0 is the trial at the step's end.
    """
    signal, noise, sigma = levels.signal, levels.noise, levels.sigma
    which, update = [], []
    for i in range(levels.num_steps):
        slope, step = (X - signal[i] * DENOISED) / noise[i], sigma[i + 1] - sigma[i]
        which.append(i)
        update.append([signal[i + 1] * (X / signal[i] + step * slope), X / signal[i], slope])
        if i + 1 < levels.num_steps:
            second = (X - signal[i + 1] * DENOISED) / noise[i + 1]
            which.append(i + 1)
            update.append([signal[i + 1] * (MEMORY[0] + step * (MEMORY[1] + second) / 2)])
    return Steps(*_start(levels, config), _rows(config, levels, which, update))


def lms(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """Linear multistep of order 4: the polynomial through the last slopes, integrated over the step (k-diffusion).

    z1, z2, z3 remember the slopes of the steps before.
    """
    signal, noise, sigma = levels.signal, levels.noise, levels.sigma
    update = []
    for i in range(levels.num_steps):
        slopes = [(X - signal[i] * DENOISED) / noise[i], *MEMORY[:3]]
        weights = _adams_bashforth(sigma[max(i - 3, 0) : i + 1][::-1], sigma[i + 1])
        moved = sum(w * slope for w, slope in zip(weights, slopes[: len(weights)], strict=True))
        update.append([signal[i + 1] * (X / signal[i] + moved), *slopes[:3]])
    return Steps(*_start(levels, config), _rows(config, levels, range(levels.num_steps), update))


def pndm(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """Pseudo linear multistep, PLMS (Liu et al. 2022, arXiv:2202.09778, equations 9 and 12): n + 1 calls.

    The second call repeats the first step with the mean of two outputs. The paper's Runge-Kutta start is left out,
    as Stable Diffusion's skip_prk_steps says. z1, z2, z3 remember outputs of the UNet, z4 where the first step began.
    """
    which = [0, 1, 1, *range(2, levels.num_steps)] if levels.num_steps > 1 else [0]
    combine = {1: (1,), 2: (3 / 2, -1 / 2), 3: (23 / 12, -16 / 12, 5 / 12), 4: (55 / 24, -59 / 24, 37 / 24, -9 / 24)}
    update = []
    for row, i in enumerate(which):
        p, q = _denoiser(config, levels.signal[i], levels.noise[i])
        outputs = [(DENOISED - p * X) / q, *MEMORY[:3]]
        if row == 1:
            after = _ddim_step(config, levels, 0, MEMORY[3], (outputs[0] + outputs[1]) / 2)
            update.append([after, MEMORY[0]])
            continue
        weights = combine[min(max(row, 1), 4)]
        output = sum(w * out for w, out in zip(weights, outputs[: len(weights)], strict=True))
        update.append([_ddim_step(config, levels, i, X, output), *outputs[:3], X])
    return Steps(*_start(levels), _rows(config, levels, which, update))


# === Steps of log-SNR scale: lambda = -log(sigma), h = lambda' - lambda ===


def dpmpp_2m(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """DPM-Solver++(2M), the multistep solver of order 2 (Lu et al. 2022, arXiv:2211.01095, algorithm 2)."""
    return _dpmpp(config, levels, order=2)


def dpmpp_3m(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """DPM-Solver++ as a multistep solver of order 3 (Lu et al. 2022, arXiv:2211.01095, appendix)."""
    return _dpmpp(config, levels, order=3)


def dpmpp_2m_sde(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """SDE-DPM-Solver++(2M): order 2 with fresh noise in every step (Lu et al. 2022, arXiv:2211.01095, section 5)."""
    return _dpmpp(config, levels, order=2, sde=True)


def _dpmpp(config, levels: Levels, order: int, sde: bool = False) -> Steps:
    """z1 and z2 remember the estimates of the steps before. With `sde`, h is doubled: exp(-2h) for exp(-h)."""
    signal, noise, sigma = levels.signal, levels.noise, levels.sigma
    update, fresh = [], np.zeros(levels.num_steps)
    for i in range(levels.num_steps):
        ratio = sigma[i + 1] / sigma[i]  # exp(-h)
        decay = ratio**2 if sde else ratio
        kept = noise[i + 1] / noise[i] * (ratio if sde else 1)
        after = kept * X + signal[i + 1] * (1 - decay) * DENOISED
        here = _order(config, levels, i, order)
        if here > 1:
            h, before = -np.log(ratio), np.log(sigma[i - 1] / sigma[i])
            scale = 2 * h if sde else h
            slope = h / before * (DENOISED - MEMORY[0])
            second = (decay - 1) / scale + 1 if here == 3 or config.solver_type == "heun" else (1 - decay) / 2
        if here == 3:
            earlier = np.log(sigma[i - 2] / sigma[i - 1])
            difference = slope - h / earlier * (MEMORY[0] - MEMORY[1])
            slope = slope + before / (before + earlier) * difference
            third = (decay - 1 + h) / h**2 - 0.5
            after = after - signal[i + 1] * third * h / (before + earlier) * difference
        if here > 1:
            after = after + signal[i + 1] * second * slope
        update.append([after, DENOISED, MEMORY[0]])
        fresh[i] = noise[i + 1] * np.sqrt(1 - decay) if sde else 0.0
    return Steps(*_start(levels), _rows(config, levels, range(levels.num_steps), update, fresh))


def deis(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """DEIS, log-rho multistep (Zhang and Chen 2022, arXiv:2204.13902, section 3.3), of solver_order.

    z1 and z2 remember the noise estimates of the steps before. The run ends at the schedule's smallest noise.
    """
    signal, noise, sigma = levels.signal, levels.noise, levels.sigma
    update = []
    for i in range(levels.num_steps):
        slopes = [(X - signal[i] * DENOISED) / noise[i], *MEMORY[:2]]
        here = _order(config, levels, i, config.solver_order)
        weights = _log_rho(sigma[i - here + 1 : i + 1][::-1], sigma[i + 1])
        moved = sum(w * slope for w, slope in zip(weights, slopes[:here], strict=True))
        update.append([signal[i + 1] * (X / signal[i] + moved), *slopes[:2]])
    return Steps(*_start(levels), _rows(config, levels, range(levels.num_steps), update))


def unipc(config: SchedulerConfig, levels: Levels, options: Options) -> Steps:
    """UniPC of solver_order: each call also corrects the step before (Zhao et al. 2023, arXiv:2302.04867, alg. 5, 6).

    z1, z2, z3 remember the estimates of the steps before, z4 the latent that the last step began with.
    """
    if levels.alphas[-1] == 1 and not config.lower_order_final and min(config.solver_order, levels.num_steps) > 1:
        raise InputError("unipc cannot end at a noise of 0 with lower_order_final false; correct scheduler_config.json")
    update, order = [], 0
    for i in range(levels.num_steps):
        latent, past = X, [DENOISED, *MEMORY[:3]]
        if i > 0:
            latent = _uni_step(config, levels, i - 1, MEMORY[3], past[1:], order, corrected=DENOISED)
        order = min(config.solver_order, i + 1, levels.num_steps - i if config.lower_order_final else i + 1)
        order = 1 if levels.alphas[i + 1] == levels.alphas[i] else order
        after = _uni_step(config, levels, i, latent, past, order)
        update.append([after, *past[:3], latent])
    return Steps(*_start(levels), _rows(config, levels, range(levels.num_steps), update))


def _uni_step(config, levels: Levels, i: int, latent, past, order: int, corrected=None) -> np.ndarray:
    """UniP from level i to i + 1, or UniC when the estimate there is known: equations 3, 9 and 10 of the paper.

    Args:
        latent: at level i. past: estimates at levels i, i - 1, ... corrected: the estimate at level i + 1.
    """
    signal, noise, sigma = levels.signal[i + 1], levels.noise, levels.sigma
    decay = sigma[i + 1] / sigma[i] - 1  # exp(-h) - 1
    after = noise[i + 1] / noise[i] * latent - signal * decay * past[0]
    unknowns = order if corrected is not None else order - 1
    if unknowns == 0:
        return after
    h = np.log(sigma[i] / sigma[i + 1])
    basis = -h if config.solver_type == "bh1" else decay
    # Steps back in units of h, as 1 / r, which exists for h = 0 too.
    inverse = [h / np.log(sigma[i] / sigma[i - k]) for k in range(1, order)]
    differences = [r * (past[k] - past[0]) for k, r in enumerate(inverse, 1)]
    if corrected is not None:
        inverse, differences = [*inverse, 1.0], [*differences, corrected - past[0]]
    if unknowns == 1:
        weights = np.array([0.5])  # the paper's choice for the lowest order, not the solution
    else:
        phi, right = decay / -h - 1, []
        for k in range(1, unknowns + 1):
            right.append(phi * factorial(k) / basis)
            phi = phi / -h - 1 / factorial(k + 1)
        weights = np.linalg.solve(np.vander(1 / np.array(inverse), increasing=True).T, right)
    return after - signal * basis * sum(w * d for w, d in zip(weights, differences, strict=True))


# === Shared ===


def _order(config: SchedulerConfig, levels: Levels, i: int, most: int) -> int:
    """The order of step i: it rises with what is remembered, and falls at the end of a short run."""
    # How short the whole run is, whatever part of it is made: as diffusers counts.
    short = config.lower_order_final and levels.num_steps + (levels.skipped or 0) < 15
    left, sigma = levels.num_steps - i, levels.sigma
    if left == 1 and (short or config.euler_at_final or sigma[i + 1] in (0, sigma[i])):
        return 1
    return min(i + 1, most, left if short else most)


def _start(levels: Levels, k_diffusion: SchedulerConfig | None = None) -> tuple[float, float]:
    """Weights of a picture's latent and of the noise at the start.

    diffusers starts "linspace" and "trailing" runs of k-diffusion's samplers at sigma * eps, a little low.
    """
    if levels.skipped is not None:
        return float(levels.signal[0]), float(levels.noise[0])
    low = k_diffusion is not None and k_diffusion.timestep_spacing != "leading"
    return 0.0, float(levels.noise[0]) if low else 1.0


def _denoiser(config: SchedulerConfig, signal, noise) -> tuple:
    """p and q of denoised = p z0 + q out."""
    if config.prediction_type == "epsilon":
        return 1 / signal, -noise / signal
    if config.prediction_type == "v_prediction":
        return signal, -noise  # Salimans and Ho 2022, arXiv:2202.00512, appendix D
    raise InputError(f"prediction_type should be 'epsilon' or 'v_prediction', found {config.prediction_type!r}")


def _ddim_step(config: SchedulerConfig, levels: Levels, i: int, latent, output) -> np.ndarray:
    """From level i to i + 1 along what the UNet's `output` says of the latent."""
    (signal, after), (noise, noise_after) = levels.signal[i : i + 2], levels.noise[i : i + 2]
    p, q = _denoiser(config, signal, noise)
    denoised = p * latent + q * output
    return after * denoised + noise_after / noise * (latent - signal * denoised)


def _adams_bashforth(nodes: np.ndarray, end: float) -> np.ndarray:
    """Weights of slopes known at `nodes` (up to 4, the newest first) in the integral from nodes[0] to `end`."""
    half = (end - nodes[0]) / 2
    at = nodes[0] + half * (1 + np.array([-1, 1]) / np.sqrt(3))  # two Gauss points are exact for cubics
    weights = []
    for k, node in enumerate(nodes):
        others = np.delete(nodes, k)
        # The polynomial that is 1 at this node and 0 at the others.
        weights.append(half * np.prod((at[:, None] - others) / (node - others), axis=1).sum())
    return np.array(weights)


def _log_rho(nodes: np.ndarray, end: float) -> np.ndarray:
    """As `_adams_bashforth`, for slopes that are polynomials in log(sigma): integrals of log(s)^k, in closed form."""
    logs = np.log(nodes / nodes[0])
    fit = np.linalg.inv(np.vander(logs, increasing=True))  # column k: coefficients of the k-th Lagrange polynomial
    s, u = end / nodes[0], np.log(end / nodes[0])
    integrals = [s - 1, s * (u - 1) + 1, s * (u * u - 2 * u + 2) - 2]
    return nodes[0] * np.array(integrals[: len(nodes)]) @ fit


def _first_order_rows(config: SchedulerConfig, levels: Levels, keep, gain, fresh=0.0) -> np.ndarray:
    """Rows of z0' = keep z0 + gain denoised + fresh noise, each float64[n]; float32[n, 39]."""
    update = keep[:, None] * X + gain[:, None] * DENOISED
    return _rows(config, levels, range(len(keep)), update[:, None], fresh)


def _rows(config: SchedulerConfig, levels: Levels, which, update, fresh=0.0) -> np.ndarray:
    """The table of a run, float32[rows, 39].

    Args:
        which: the step of `levels` at which each row calls the UNet.
        update: per row the next z0, z1, ..., as weights; what is left out is 0.
        fresh: weight of new noise in z0, per row.
    """
    which = np.asarray(which)
    weights = np.zeros((len(which), STATE, STATE + 1))
    for row, vectors in enumerate(update):
        weights[row, : len(vectors)] = vectors
    p, q = _denoiser(config, levels.signal[which], levels.noise[which])
    rows = np.zeros((len(which), ROW_SIZE))
    rows[:, ROW["timestep"].start] = levels.timesteps[which]
    rows[:, ROW["p"].start], rows[:, ROW["q"].start], rows[:, ROW["g"].start] = p, q, 1
    rows[:, ROW["A"]] = weights[:, :, :STATE].reshape(len(which), -1)
    rows[:, ROW["B"]] = weights[:, :, STATE]
    rows[:, ROW["C"].start] = fresh
    return rows.astype(np.float32)
