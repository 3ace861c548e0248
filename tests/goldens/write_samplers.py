"""Write samplers.npz: every step of diffusers' schedulers with a non-linear model.

Run from the project's folder with an environment that has torch, diffusers and scipy:

    python -m tests.goldens.write_samplers

Each case is a line of JSON in `cases`: the sampler's name, the number of steps, the scheduler's settings and the
user's options, in the project's words. Its steps are calls + 1 rows of `samples`, in that order: float32[4] latents at
the start and after each call, in variance-preserving scale (schedulers that keep them in sigma scale: divided by
sqrt(1 + sigma^2)); `timesteps` is what the model was told, NaN after the last call. The model is
out = tanh(0.5 x + t / 1000), x being what the UNet is given.

Where the scheduler itself is not run as it is:

* DDIM and PNDM take t - T // n as the timestep a step ends at, which for "linspace" and most "trailing" grids is not
  the next one of the list. There the scheduler's own step is run with the list's stride in place of T // n; where the
  two agree (all "leading" grids, "trailing" with n dividing T) it is untouched.
* Fresh noise is pipeline.sampling.noise.normal(SEED, row + 1) in place of torch's, row counting the calls.
* Euler ancestral has no Karras or exponential sigmas and no lists in diffusers: there it gets those of
  EulerDiscreteScheduler (k-diffusion does the same). LMS takes lists the same way, UniPC those of DPM-Solver.
* A list of timesteps that begins with a repeated one would start at its second entry; none does.

Beside them what diffusers' pipeline draws with the checkpoint in checkpoints/emoji: `latents` float32[sampler, h, w, 4]
after PIPELINE_STEPS steps of each class in `pipeline_samplers`, from the noise of PIPELINE_SEED, and the `context`
float32[2, 77, D] of the prompt and of no prompt that went into the UNet.
"""

import itertools
import json
import sys
from pathlib import Path

import diffusers
import numpy as np
import torch

from pipeline.sampling import noise

SEED = 5
PIPELINE_SEED, PIPELINE_STEPS, GUIDANCE_SCALE, PROMPT = 1, 10, 3.0, "a red apple"
START = torch.tensor([[-1.7, -0.31, 0.64, 2.3]])  # one image; UniPC's sums need the axis
BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
CLASSES = {
    "ddim": (diffusers.DDIMScheduler, {"clip_sample": False}),
    "pndm": (diffusers.PNDMScheduler, {"skip_prk_steps": True}),
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "euler_a": (diffusers.EulerAncestralDiscreteScheduler, {}),
    "heun": (diffusers.HeunDiscreteScheduler, {}),
    "lms": (diffusers.LMSDiscreteScheduler, {}),
    "dpmpp_2m": (diffusers.DPMSolverMultistepScheduler, {"solver_order": 2}),
    "dpmpp_2m_sde": (
        diffusers.DPMSolverMultistepScheduler,
        {"solver_order": 2, "algorithm_type": "sde-dpmsolver++"},
    ),
    "dpmpp_3m": (diffusers.DPMSolverMultistepScheduler, {"solver_order": 3}),
    "unipc": (diffusers.UniPCMultistepScheduler, {}),
    "deis": (diffusers.DEISMultistepScheduler, {}),
    "lcm": (diffusers.LCMScheduler, {}),
}
SIGMA_SCALE = ("euler", "euler_a", "heun", "lms")
BORROWED = {"euler_a": "euler", "lms": "euler", "unipc": "dpmpp_2m"}
PREDICTIONS = ("epsilon", "v_prediction")
SPACINGS = ("leading", "trailing", "linspace")
COUNTS = (1, 2, 3, 10, 25)


class Stride:
    """Stands in for num_inference_steps: T // Stride(s) is s."""

    def __init__(self, stride: int):
        self.stride = stride

    def __rfloordiv__(self, other) -> int:
        return self.stride


def model(x: torch.Tensor, t) -> torch.Tensor:
    return torch.tanh(0.5 * x + float(t) / 1000)


def scheduler_for(name: str, n: int, config: dict, options: dict):
    """diffusers' scheduler with its timesteps set."""
    kind, settings = CLASSES[name]
    config = {key: value for key, value in config.items() if key in kind().config}
    schedule = options.get("sigma_schedule")
    if "timestep_spacing" in options:
        config["timestep_spacing"] = options["timestep_spacing"]
    lists = {key: options[key] for key in ("timesteps", "sigmas") if key in options}
    lender = None
    if name in BORROWED and (lists or (schedule and f"use_{schedule}_sigmas" not in kind().config)):
        lender = scheduler_for(BORROWED[name], n, config, options)
    elif schedule:
        config[f"use_{schedule}_sigmas"] = True
    scheduler = kind(**BETAS, **settings, **config)
    if lender:
        scheduler.set_timesteps(n)
        scheduler.timesteps, scheduler.sigmas = lender.timesteps, lender.sigmas
    elif lists:
        scheduler.set_timesteps(**lists)
    else:
        scheduler.set_timesteps(n)
    return scheduler


def run(name: str, n: int, config: dict, options: dict):
    """Latents float64[calls + 1, 4] in variance-preserving scale, timesteps float64[calls + 1]."""
    scheduler = scheduler_for(name, n, config, options)
    calls = []

    def fresh(shape, **_):
        return torch.from_numpy(noise.normal(SEED, len(calls), tuple(shape)))

    sys.modules[type(scheduler).__module__].randn_tensor = fresh
    grid = scheduler.timesteps.tolist()
    following = sorted(set(grid), reverse=True)
    sample, told = START * scheduler.init_noise_sigma, scheduler.timesteps
    samples = [sample]
    for row, t in enumerate(told):
        calls.append(t)
        if name in ("ddim", "pndm"):
            here = 0 if name == "pndm" and row == 1 else following.index(int(t))
            after = following[here + 1] if here + 1 < len(following) else -1
            own = following[here] - 1000 // n
            if own != after and not (own < 0 and after < 0):
                spacing = config["timestep_spacing"]
                assert spacing != "leading" and not (spacing == "trailing" and 1000 % n == 0), (spacing, n)
                scheduler.num_inference_steps = Stride(following[here] - after)
        out = model(scheduler.scale_model_input(sample, t), t)
        extra = {"eta": options["eta"]} if "eta" in options else {}
        t = int(t) if name in ("ddim", "pndm", "lcm") else t
        sample = scheduler.step(out, t, sample, **extra).prev_sample
        samples.append(sample)
        if name in ("ddim", "pndm"):
            scheduler.num_inference_steps = n
    samples = torch.cat(samples).numpy().astype(np.float64)
    if name in SIGMA_SCALE:
        samples /= np.sqrt(1 + scheduler.sigmas.numpy().astype(np.float64) ** 2)[:, None]
    return samples, np.append(grid, np.nan)


def cases():
    """(name, n, scheduler settings, options)"""
    for name, prediction, spacing, n in itertools.product(CLASSES, PREDICTIONS, SPACINGS, COUNTS):
        if name == "lcm" and spacing != "leading":
            continue
        config = {"prediction_type": prediction, "timestep_spacing": spacing}
        if spacing == "leading":
            config["steps_offset"] = n % 2
        if name in ("ddim", "pndm", "lcm"):
            config["set_alpha_to_one"] = n == 3
        yield name, n, config, {}
    plain = {"prediction_type": "epsilon", "timestep_spacing": "leading", "steps_offset": 1}
    for final, n in itertools.product((True, False), (3, 10)):
        yield "ddim", n, {**plain, "set_alpha_to_one": final}, {"eta": 1.0}
        yield "ddim", n, {**plain, "set_alpha_to_one": final, "prediction_type": "v_prediction"}, {"eta": 0.3}
        yield "ddim", n, {**plain, "set_alpha_to_one": final, "timestep_spacing": "trailing"}, {"eta": 0.7}
    for name, schedule, n in itertools.product(CLASSES, ("karras", "exponential"), (1, 2, 10, 25)):
        # DEIS repeats the last of its own levels, so that a single step would do nothing.
        if name not in ("ddim", "pndm", "lcm") and not (name == "deis" and n == 1):
            yield name, n, plain, {"sigma_schedule": schedule}
    for name, final, n in itertools.product(CLASSES, ("sigma_min",), (1, 10, 25)):
        if name in ("euler", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m", "unipc"):
            yield name, n, {**plain, "timestep_spacing": "trailing", "final_sigmas_type": final}, {}
    # What only some classes have.
    for n in (2, 10, 16):
        for name in ("dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m"):
            yield name, n, {**plain, "solver_type": "heun", "euler_at_final": True}, {}
            yield name, n, {**plain, "lower_order_final": False, "final_sigmas_type": "sigma_min"}, {}
        for order in (1, 3):
            # Not down to a noise of 0, where diffusers' bh1 is NaN.
            settings = {"solver_order": order, "solver_type": "bh1", "final_sigmas_type": "sigma_min"}
            yield "unipc", n, {**plain, **settings}, {}
            yield "deis", n, {**plain, "solver_order": order}, {}
        yield "unipc", n, {**plain, "solver_order": 3}, {}
        yield "unipc", n, {**plain, "lower_order_final": False, "final_sigmas_type": "sigma_min"}, {}
        yield "deis", n, {**plain, "lower_order_final": False}, {}
        yield "lcm", n, {**plain, "original_inference_steps": 20, "timestep_scaling": 1.0}, {}
    listed = {"timesteps": [999, 850, 736, 645, 545, 455, 343, 233, 124, 24]}
    for name in ("euler", "euler_a", "heun", "lms", "dpmpp_2m", "dpmpp_3m", "unipc", "lcm"):
        yield name, 10, plain, listed
    listed = {"sigmas": [14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029, 0.0]}
    for name in ("euler", "euler_a", "lms"):
        yield name, 11, plain, listed
    yield "euler", 3, plain, {"sigmas": [5.5, 2.25, 1.0, 0.5]}
    zero_snr = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    for name, n in itertools.product(("ddim", "euler", "euler_a", "dpmpp_2m", "unipc"), (1, 3, 10)):
        yield name, n, {**zero_snr, "set_alpha_to_one": True} if name == "ddim" else zero_snr, {}


def pipeline_latents():
    """context float32[2, 77, D], latents float32[sampler, h, w, 4]"""
    checkpoint = Path(__file__).parents[2] / "checkpoints" / "emoji"
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(checkpoint, safety_checker=None).to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    own, size = pipe.scheduler.config, pipe.unet.config.sample_size
    start = torch.from_numpy(noise.normal(PIPELINE_SEED, 0, (1, 4, size, size)))
    latents = []
    for kind, settings in CLASSES.values():
        calls = []

        def fresh(shape, calls=calls, **_):
            return torch.from_numpy(noise.normal(PIPELINE_SEED, len(calls), tuple(shape)))

        pipe.scheduler = kind.from_config(own, **settings)
        sys.modules[kind.__module__].randn_tensor = fresh

        def step(*arguments, made=pipe.scheduler.step, calls=calls, **keywords):
            calls.append(arguments)
            return made(*arguments, **keywords)

        pipe.scheduler.step = step
        settings = {"num_inference_steps": PIPELINE_STEPS, "guidance_scale": GUIDANCE_SCALE, "output_type": "latent"}
        latents.append(pipe(PROMPT, latents=start.clone(), **settings).images[0].permute(1, 2, 0).numpy())
    contexts = pipe.encode_prompt(PROMPT, "cpu", 1, True)
    return torch.cat(contexts).detach().numpy(), np.stack(latents)


def main():
    torch.set_num_threads(1)  # sums in the same order everywhere; and these are small
    chosen = list(cases())
    runs = [run(*case) for case in chosen]
    samples, timesteps = (np.concatenate(column).astype(np.float32) for column in zip(*runs, strict=True))
    linear = diffusers.DDIMScheduler(beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
    context, latents = pipeline_latents()
    assert np.isfinite(samples).all() and np.isfinite(latents).all()
    np.savez_compressed(
        Path(__file__).with_name("samplers.npz"),
        versions=np.array([f"diffusers {diffusers.__version__}", f"torch {torch.__version__}"]),
        seed=np.array(SEED),
        start=START[0].numpy(),
        cases=np.array([json.dumps(case) for case in chosen]),
        rows=np.array([len(latents) for latents, _ in runs]),
        samples=samples,
        timesteps=timesteps,
        pipeline_seed=np.array(PIPELINE_SEED),
        pipeline_steps=np.array(PIPELINE_STEPS),
        pipeline_guidance_scale=np.array(GUIDANCE_SCALE),
        pipeline_samplers=np.array(list(CLASSES)),
        context=context,
        latents=latents,
        alphas_cumprod=diffusers.DDIMScheduler(**BETAS).alphas_cumprod.numpy(),
        alphas_cumprod_linear=linear.alphas_cumprod.numpy(),
        alphas_cumprod_zero_snr=diffusers.DDIMScheduler(**BETAS, rescale_betas_zero_snr=True).alphas_cumprod.numpy(),
    )


if __name__ == "__main__":
    main()
