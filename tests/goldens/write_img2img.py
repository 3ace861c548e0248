"""Write img2img.npz: what diffusers' image-to-image pipeline makes of one picture with tiny_sd1/.

Run from the project's folder with the peers' environment and scipy in it, which LMS needs:

    .venv-peers/bin/python -m tests.goldens.write_img2img

Two prompts over one picture, whose noise comes from pipeline.noise in place of torch's generator: image i has seed
SEED + i, offset 0 for the noise that is added to the latent, offset 2^32 - 1 for the sample of the encoder.

    picture uint8[37,61,3]; image f32[32,48,3], the picture as diffusers' VaeImageProcessor gives it to the encoder
    mean, std f32[8,12,4], of the latent, times scaling_factor
    prompts, negative_prompts: strings [2]; seed; guidance_scale
    cases: JSON, one [sampler, num_steps, strength] each, in the project's names
    calls int32[cases], of the UNet; timesteps f32[sum of calls], what it was told
    latents f32[cases,2,8,12,4], final; pictures uint8[cases,32,48,3], of the first prompt
    versions: JSON

Two schedulers lose their way when they start late, and are led back:

* PNDM's list repeats its second entry, for the second call of its first step. The pipeline cuts the list, and the
  scheduler takes the next entry for the repeated one: from there on the UNet is told a timestep that the latent is
  not at. Here the list is cut so that it begins as a whole one does.
* LMS takes the order from the number of the step, not from the slopes it has, and then leaves out the slopes it lacks:
  their weights no longer add up to the step. Here the order is that of the slopes.
"""

import json
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from diffusers import StableDiffusionImg2ImgPipeline
from diffusers.models.autoencoders import vae
from diffusers.pipelines.stable_diffusion import pipeline_stable_diffusion_img2img as module
from PIL import Image

from pipeline.sampling import noise

HERE = Path(__file__).resolve().parent
SEED, GUIDANCE_SCALE = 11, 7.5
HEIGHT, WIDTH = 32, 48
PROMPTS = ["a photo of a red house by the river at night", "two small dogs"]
NEGATIVE_PROMPTS = ["blurry, low quality", ""]


class PNDM(diffusers.PNDMScheduler):
    """PNDM whose late start is a start."""

    def late(self, first: int) -> None:
        # t0, t1, t1, t2, ... without its first entries is t1, t1, t2, ...
        kept = self.timesteps[1:][first:] if first else self.timesteps
        self.timesteps = torch.cat([kept[:2], kept[1:]]) if first and len(kept) > 1 else kept


class LMS(diffusers.LMSDiscreteScheduler):
    """LMS whose order is that of the slopes it has."""

    def step(self, *args, order: int = 4, **options):
        return super().step(*args, order=min(order, len(self.derivatives) + 1), **options)


CLASSES = {
    "ddim": (diffusers.DDIMScheduler, {}),
    "pndm": (PNDM, {"skip_prk_steps": True}),
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "heun": (diffusers.HeunDiscreteScheduler, {}),
    "lms": (LMS, {}),
    "dpmpp_2m": (diffusers.DPMSolverMultistepScheduler, {"solver_order": 2}),
    "dpmpp_3m": (diffusers.DPMSolverMultistepScheduler, {"solver_order": 3}),
    "unipc": (diffusers.UniPCMultistepScheduler, {}),
    "deis": (diffusers.DEISMultistepScheduler, {}),
}
# 10 steps, of which 3, 7 and 10 are made; 20, of which 12 are: fewer than 15, but of a run that is not short.
CASES = [
    *((sampler, 10, strength) for sampler in ("ddim", "euler", "dpmpp_2m") for strength in (0.3, 0.75, 1.0)),
    *((sampler, 10, 0.75) for sampler in ("heun", "pndm", "lms", "dpmpp_3m", "unipc", "deis")),
    *((sampler, 20, 0.6) for sampler in ("dpmpp_2m", "dpmpp_3m")),
    *((sampler, 10, 0.1) for sampler in ("heun", "pndm", "unipc")),
]


def picture() -> np.ndarray:
    """uint8[37,61,3]: smooth colours, a hard edge and some noise."""
    y, x = np.mgrid[:37, :61]
    colours = np.stack([4 * x, 6 * y, 128 + 100 * np.sin(x / 5 + y / 9)], axis=-1)
    colours[8:20, 20:45] = (250, 30, 5)
    colours += np.random.default_rng(0).normal(0, 5, colours.shape)
    return np.clip(colours, 0, 255).astype("uint8")


def given_noise(offset: int) -> torch.Tensor:
    """f32[2,4,h,w]."""
    return torch.from_numpy(
        np.stack([noise.normal(SEED + i, offset, (4, HEIGHT // 4, WIDTH // 4)) for i in range(len(PROMPTS))])
    )


def draw(pipe, picture, sampler: str, num_steps: int, strength: float):
    """Final latents, the first picture, and the timesteps that the UNet was told."""
    kind, settings = CLASSES[sampler]
    pipe.scheduler = kind.from_pretrained(HERE / "tiny_sd1", subfolder="scheduler", **settings)
    told = []
    hook = pipe.unet.register_forward_pre_hook(lambda module, arguments: told.append(float(arguments[1])))
    get_timesteps = type(pipe).get_timesteps

    def late(num_inference_steps, strength, device):
        if sampler != "pndm":
            return get_timesteps(pipe, num_inference_steps, strength, device)
        made = min(int(num_inference_steps * strength), num_inference_steps)
        pipe.scheduler.late(num_inference_steps - made)
        return pipe.scheduler.timesteps, made

    pipe.get_timesteps = late
    # In the order in which the pipeline asks: a sample of each image's latent, then noise for all.
    samples = given_noise(2**32 - 1)
    waiting = [samples[:1], samples[1:], given_noise(0)]

    def randn_tensor(shape, **options):
        drawn = waiting.pop(0)
        assert tuple(shape) == tuple(drawn.shape)
        return drawn

    vae.randn_tensor = module.randn_tensor = randn_tensor
    latent = pipe(
        PROMPTS,
        negative_prompt=NEGATIVE_PROMPTS,
        image=[picture] * len(PROMPTS),
        strength=strength,
        num_inference_steps=num_steps,
        guidance_scale=GUIDANCE_SCALE,
        generator=[torch.Generator() for _ in PROMPTS],
        output_type="latent",
    ).images
    hook.remove()
    assert not waiting
    decoded = pipe.vae.decode(latent[:1] / pipe.vae.config.scaling_factor).sample
    first = pipe.image_processor.postprocess(decoded, output_type="pil")[0]
    return to_numpy(latent), np.asarray(first), told


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """[N,C,H,W] to [N,H,W,C]."""
    return np.ascontiguousarray(tensor.permute(0, 2, 3, 1).float().numpy())


def main():
    pipe = StableDiffusionImg2ImgPipeline.from_pretrained(
        HERE / "tiny_sd1", dtype=torch.float32, local_files_only=True, safety_checker=None
    )
    pipe.set_progress_bar_config(disable=True)
    given = Image.fromarray(picture())
    image = pipe.image_processor.preprocess(given, height=HEIGHT, width=WIDTH)
    resized = given.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    with torch.inference_mode():
        posterior, scale = pipe.vae.encode(image).latent_dist, pipe.vae.config.scaling_factor
        runs = [draw(pipe, resized, *case) for case in CASES]
    latents, pictures, told = zip(*runs, strict=True)
    versions = {m.__name__: m.__version__ for m in (torch, diffusers, transformers, np)}
    np.savez_compressed(
        HERE / "img2img.npz",
        picture=np.asarray(given),
        image=to_numpy(image)[0],
        mean=to_numpy(posterior.mean * scale)[0],
        std=to_numpy(posterior.std * scale)[0],
        prompts=np.array(PROMPTS),
        negative_prompts=np.array(NEGATIVE_PROMPTS),
        seed=SEED,
        guidance_scale=np.float32(GUIDANCE_SCALE),
        cases=np.array([json.dumps(case) for case in CASES]),
        calls=np.array([len(timesteps) for timesteps in told], "int32"),
        timesteps=np.concatenate(told).astype("float32"),
        latents=np.stack(latents),
        pictures=np.stack(pictures),
        versions=np.array(json.dumps(versions)),
    )


if __name__ == "__main__":
    main()
