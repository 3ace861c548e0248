"""Time diffusers' own pipeline (PyTorch, CPU): the worker behind `benchmark.py --peers diffusers`.

Run by `benchmark.timing.isolated` in the peers' environment (diffusers-requirements.txt), with the file of
the request as its argument. Read from the request, beside what every row has: checkpoint, pipeline (its class),
prompts, images_per_prompt, dtype, vae_dtype, compile.
"""

import importlib.metadata
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from models.errors import InputError  # noqa: E402
from pipeline.benchmark import timing  # noqa: E402
from pipeline.sampling import noise  # noqa: E402

SCHEDULERS = {"ddim": "DDIMScheduler", "euler": "EulerDiscreteScheduler"}
# What encode_prompt returns; two without pooled vectors.
EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")


def start() -> None:
    """Import what is measured, without its remarks."""
    import diffusers
    import torch  # noqa: F401
    import transformers

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def load(row: dict):
    """The checkpoint's pipeline as a function to be timed: encode_prompt, the pipeline up to the latent, decode."""
    import torch

    pipe = pipeline(row, getattr(torch, row["dtype"]))
    vae_dtype = getattr(torch, row["vae_dtype"])
    pipe.vae.to(vae_dtype)
    for network in (pipe.unet, pipe.vae):
        network.to(memory_format=torch.channels_last)
    if row["compile"]:
        import torch._inductor.config

        torch._inductor.config.freezing = True  # weights become constants, packed once
        pipe.unet.forward = torch.compile(pipe.unet.forward)
        pipe.vae.decoder.forward = torch.compile(pipe.vae.decoder.forward)
    settings, latents = row["settings"], initial_latents(pipe, row).to(pipe.unet.dtype)
    guided = settings["guidance_scale"] > 1

    def draw(lap):
        # What inductor has frozen may not run in inference mode.
        with torch.no_grad() if row["compile"] else torch.inference_mode():
            prompts = [row["prompt"]] * row["prompts"]
            encoded = pipe.encode_prompt(
                prompts,
                device=torch.device("cpu"),
                num_images_per_prompt=row["images_per_prompt"],
                do_classifier_free_guidance=guided,
            )
            lap("text_encoder")
            latent = pipe(
                **dict(zip(EMBEDDINGS, encoded, strict=False)),
                latents=latents.clone(),
                guidance_scale=settings["guidance_scale"],
                guidance_rescale=settings["guidance_rescale"],
                num_inference_steps=settings["num_steps"],
                height=row["height"],
                width=row["width"],
                output_type="latent",
            ).images
            lap("diffusion")
            image = pipe.vae.decode(latent.to(vae_dtype) / pipe.vae.config.scaling_factor).sample
            pictures = to_uint8(image.permute(0, 2, 3, 1).float().numpy())
            lap("decoder")
        return pictures

    return draw


def pipeline(row: dict, dtype):
    """The checkpoint's pipeline with the row's scheduler, silent and without a safety checker."""
    import diffusers

    off = {"safety_checker": None, "requires_safety_checker": False}
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        row["checkpoint"],
        dtype=dtype,
        local_files_only=True,
        **(off if row["pipeline"] == "StableDiffusionPipeline" else {}),
    )
    pipe.set_progress_bar_config(disable=True)
    # From the file: a configuration passed from class to class may lose keys.
    kind = getattr(diffusers, SCHEDULERS[row["settings"]["sampler"]])
    pipe.scheduler = kind.from_pretrained(row["checkpoint"], subfolder="scheduler")
    return pipe


def initial_latents(pipe, row: dict):
    """The noise that the exports start from, torch.float32[N, 4, h, w]."""
    import torch

    size = (row["height"] // pipe.vae_scale_factor, row["width"] // pipe.vae_scale_factor)
    start = noise.initial_latents(noise.image_seeds(row["seed"], row["images"]), *size)
    return torch.from_numpy(start.transpose(0, 3, 1, 2).copy())


def to_uint8(image: np.ndarray) -> np.ndarray:
    """f32[N, H, W, 3] in [-1, 1] to uint8, rounded as diffusers' image processor does."""
    if not np.isfinite(image).all():
        raise InputError("the decoded pictures hold NaN or infinite values; their time means nothing")
    return (np.clip(image / 2 + 0.5, 0, 1) * 255).round().astype("uint8")


def versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages."""
    return {name: importlib.metadata.version(name) for name in packages}


def facts(row: dict) -> dict:
    """How the row was run."""
    import torch

    flags = ["CPU", row["dtype"], f"VAE {row['vae_dtype']}", "channels_last", "SDPA"]
    flags += ["torch.compile with frozen weights"] if row["compile"] else []
    flags += [f"{torch.get_num_threads()} threads", torch.backends.cpu.get_cpu_capability()]
    return {
        "flags": ", ".join(flags),
        "versions": versions("torch", "diffusers", "transformers"),
        # False: computed by converting to float32 and back.
        "bfloat16_native": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    }


if __name__ == "__main__":
    sys.exit(timing.answer(sys.argv[1], load, timing.Runtime(start, facts, list)))
