"""Write samplers.npz: every step of diffusers' DDIMScheduler and EulerDiscreteScheduler with a non-linear model.

Run with an environment that has torch and diffusers:  python tests/goldens/write_samplers.py

Each case is an entry "name/prediction/spacing/final/offset/n" of `cases` and n + 1 rows of `samples`, in that order:
float32[8] latents at the start and after each step, as diffusers keeps them (Euler: in sigma scale). Beside them
`timesteps` (NaN after the last step) and `sigmas` (1 / sqrt(1 + sigma^2) takes Euler's latents to the
variance-preserving scale; 0 for DDIM, which is in that scale). The model is out = tanh(0.5 x + t / 1000), x being
what the UNet is given.

diffusers' DDIM takes t - T // n as the timestep a step ends at, which for "linspace" and most "trailing" grids is not
the next one of its list. There the scheduler's own step is run with the list's stride in place of T // n; where the
two agree (all "leading" grids, "trailing" with n dividing T) the scheduler is untouched.
"""

import itertools
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler

COUNTS = (1, 2, 7, 10, 25, 50)
PREDICTIONS = ("epsilon", "v_prediction")
SPACINGS = ("leading", "trailing", "linspace")
BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
START = torch.tensor([-1.7, -0.9, -0.31, -0.02, 0.11, 0.64, 1.2, 2.3])


class Stride:
    """Stands in for num_inference_steps: T // Stride(s) is s."""

    def __init__(self, stride: int):
        self.stride = stride

    def __rfloordiv__(self, other) -> int:
        return self.stride


def model(x: torch.Tensor, t) -> torch.Tensor:
    return torch.tanh(0.5 * x + float(t) / 1000)


def ddim(prediction: str, spacing: str, set_alpha_to_one: bool, offset: int, n: int):
    scheduler = DDIMScheduler(
        **BETAS,
        prediction_type=prediction,
        timestep_spacing=spacing,
        set_alpha_to_one=set_alpha_to_one,
        steps_offset=offset,
        clip_sample=False,
    )
    scheduler.set_timesteps(n)
    # float ranges of "trailing" can have one entry too many, not for these counts
    assert len(scheduler.timesteps) == n
    grid = scheduler.timesteps.tolist()
    samples = [START * scheduler.init_noise_sigma]
    for t, following in zip(grid, grid[1:] + [-1], strict=True):
        own = t - 1000 // n
        if own != following and not (own < 0 and following < 0):
            assert spacing != "leading" and not (spacing == "trailing" and 1000 % n == 0), (spacing, n)
            scheduler.num_inference_steps = Stride(t - following)
        samples.append(scheduler.step(model(samples[-1], t), t, samples[-1]).prev_sample)
        scheduler.num_inference_steps = n
    return torch.stack(samples).numpy(), np.append(grid, np.nan), np.zeros(n + 1)


def euler(prediction: str, spacing: str, final: str, offset: int, n: int):
    scheduler = EulerDiscreteScheduler(
        **BETAS,
        prediction_type=prediction,
        timestep_spacing=spacing,
        final_sigmas_type=final,
        steps_offset=offset,
    )
    scheduler.set_timesteps(n)
    assert len(scheduler.timesteps) == n
    samples = [START * scheduler.init_noise_sigma]
    for t in scheduler.timesteps:
        out = model(scheduler.scale_model_input(samples[-1], t), t)
        samples.append(scheduler.step(out, t, samples[-1]).prev_sample)
    return torch.stack(samples).numpy(), np.append(scheduler.timesteps.numpy(), np.nan), scheduler.sigmas.numpy()


def main():
    cases, runs = [], []
    for prediction, spacing, n in itertools.product(PREDICTIONS, SPACINGS, COUNTS):
        for offset in (0, 1) if spacing == "leading" else (0,):
            for final in (True, False):
                cases.append(f"ddim/{prediction}/{spacing}/{final}/{offset}/{n}")
                runs.append(ddim(prediction, spacing, final, offset, n))
            for final in ("zero", "sigma_min"):
                cases.append(f"euler/{prediction}/{spacing}/{final}/{offset}/{n}")
                runs.append(euler(prediction, spacing, final, offset, n))
    samples, timesteps, sigmas = (np.concatenate(column).astype(np.float32) for column in zip(*runs, strict=True))
    linear = DDIMScheduler(beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
    np.savez_compressed(
        Path(__file__).with_name("samplers.npz"),
        versions=np.array([f"diffusers {diffusers.__version__}", f"torch {torch.__version__}"]),
        start=START.numpy(),
        cases=np.array(cases),
        samples=samples,
        timesteps=timesteps,
        sigmas=sigmas,
        alphas_cumprod=DDIMScheduler(**BETAS).alphas_cumprod.numpy(),
        alphas_cumprod_linear=linear.alphas_cumprod.numpy(),
    )


if __name__ == "__main__":
    main()
