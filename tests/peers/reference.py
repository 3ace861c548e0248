"""Run diffusers (PyTorch, CPU, float32) on a checkpoint: every component once, and whole chains.

python tests/peers/reference.py REQUEST.json OUTPUT.npz

REQUEST.json:
    checkpoint, height, width      folder in diffusers' layout; pixels
    inputs                         npz with noise f32[N,h,w,4] and, optional, latent f32[N,h,w,4] (for the decoder)
                                   and image f32[N,H,W,3] in [-1, 1] (for the encoder); channels last
    timestep                       of the one UNet call, on `noise`
    prompts, negative_prompts      N each
    chains                         {name: {sampler ("ddim" or "euler"), num_steps, guidance_scale,
                                           prompts, negative_prompts (default: those above)}}

OUTPUT.npz, channels last:
    tokens, negative_tokens int32[N,77]; context, unconditional_context f32[N,77,D]; prediction f32[N,h,w,4];
    image f32[N,H,W,3], not clipped (where a latent is given); mean, std f32[N,h,w,4] (where an image is given; the
    encoder's, not scaled)
    NAME/timesteps f64[n]; NAME/sigmas f32[n] (Euler only: sigma after each step); NAME/latents f32[n,N,h,w,4] after
    each step, in the scheduler's own scale; NAME/unet_std f32[n] of the UNet's outputs;
    NAME/float_image f32[N,H,W,3]; NAME/image uint8[N,H,W,3]
    request, versions: JSON

Chains run through StableDiffusionPipeline itself. Its Euler multiplies the latents it is given by
init_noise_sigma, so the same noise goes to every sampler.
"""

import argparse
import json
import time
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionPipeline

SCHEDULERS = {"ddim": DDIMScheduler, "euler": EulerDiscreteScheduler}


def run(request: dict) -> dict[str, np.ndarray]:
    """The arrays of OUTPUT.npz."""
    pipe = StableDiffusionPipeline.from_pretrained(
        request["checkpoint"], dtype=torch.float32, local_files_only=True, safety_checker=None
    )
    pipe.set_progress_bar_config(disable=True)
    inputs = {name: to_torch(value) for name, value in np.load(request["inputs"]).items()}
    outputs = components(pipe, request, inputs)
    for name, chain in request.get("chains", {}).items():
        started = time.perf_counter()
        settings = {"prompts": request["prompts"], "negative_prompts": request["negative_prompts"], **chain}
        size = {"height": request["height"], "width": request["width"], "label": name}
        result = run_chain(pipe, request["checkpoint"], settings, inputs["noise"], **size)
        outputs |= {f"{name}/{key}": value for key, value in result.items()}
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    versions = {module.__name__: module.__version__ for module in (torch, diffusers, transformers, np)}
    outputs["request"] = np.array(json.dumps(request, default=str, sort_keys=True))
    outputs["versions"] = np.array(json.dumps(versions))
    return outputs


def components(pipe, request, inputs) -> dict[str, np.ndarray]:
    """Tokenizer, text encoder, UNet, decoder and encoder, once each."""
    tokens, negative_tokens = (tokenize(pipe, request[key]) for key in ("prompts", "negative_prompts"))
    context = pipe.text_encoder(tokens).last_hidden_state
    print("text encoder: done", flush=True)
    prediction = pipe.unet(inputs["noise"], request["timestep"], encoder_hidden_states=context).sample
    print("unet: done", flush=True)
    outputs = {
        "tokens": tokens.numpy().astype("int32"),
        "negative_tokens": negative_tokens.numpy().astype("int32"),
        "context": context.numpy(),
        "unconditional_context": pipe.text_encoder(negative_tokens).last_hidden_state.numpy(),
        "prediction": to_numpy(prediction),
    }
    if "latent" in inputs:
        outputs["image"] = to_numpy(pipe.vae.decode(inputs["latent"] / pipe.vae.config.scaling_factor).sample)
    if "image" in inputs:
        posterior = pipe.vae.encode(inputs["image"]).latent_dist
        outputs |= {"mean": to_numpy(posterior.mean), "std": to_numpy(posterior.std)}
    return outputs


def tokenize(pipe, prompts: list[str]) -> torch.Tensor:
    """The call that StableDiffusionPipeline.encode_prompt makes."""
    return pipe.tokenizer(
        prompts, padding="max_length", max_length=pipe.tokenizer.model_max_length, truncation=True, return_tensors="pt"
    ).input_ids


def run_chain(pipe, checkpoint: str, chain: dict, noise, height: int, width: int, label: str) -> dict[str, np.ndarray]:
    """One picture per prompt by StableDiffusionPipeline, and what it passed on the way."""
    # From the file each time: a configuration passed from class to class may lose keys.
    pipe.scheduler = SCHEDULERS[chain["sampler"]].from_pretrained(checkpoint, subfolder="scheduler")
    timesteps, latents, sigmas, unet_std = [], [], [], []

    def after_step(pipe, step, timestep, values):
        timesteps.append(float(timestep))
        latents.append(to_numpy(values["latents"]))
        if chain["sampler"] == "euler":
            sigmas.append(float(pipe.scheduler.sigmas[step + 1]))
        print(f"{label}: step {step + 1} of {chain['num_steps']}", flush=True)
        return {}

    def after_unet(module, arguments, output):
        unet_std.append(float(output[0].std()))

    hook = pipe.unet.register_forward_hook(after_unet)
    try:
        final = pipe(
            chain["prompts"],
            negative_prompt=chain["negative_prompts"],
            guidance_scale=chain["guidance_scale"],
            num_inference_steps=chain["num_steps"],
            height=height,
            width=width,
            latents=noise.clone(),
            output_type="latent",
            callback_on_step_end=after_step,
            callback_on_step_end_tensor_inputs=["latents"],
        ).images
    finally:
        hook.remove()
    # The pipeline's own last lines, taken apart to keep the picture before it is clipped as well.
    image = pipe.vae.decode(final / pipe.vae.config.scaling_factor).sample
    pictures = pipe.image_processor.postprocess(image, output_type="pil")
    return {
        "timesteps": np.array(timesteps),
        "sigmas": np.array(sigmas, "float32"),
        "latents": np.stack(latents),
        "unet_std": np.array(unet_std, "float32"),
        "float_image": to_numpy(image),
        "image": np.stack([np.asarray(picture) for picture in pictures]),
    }


def to_torch(array: np.ndarray) -> torch.Tensor:
    """[N,H,W,C] to [N,C,H,W]."""
    return torch.from_numpy(array.astype("float32")).permute(0, 3, 1, 2).contiguous()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """[N,C,H,W] to [N,H,W,C]."""
    return np.ascontiguousarray(tensor.permute(0, 2, 3, 1).float().numpy())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("request", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    request = json.loads(arguments.request.read_text(encoding="utf-8"))
    with torch.inference_mode():
        outputs = run(request)
    np.savez(arguments.output, **outputs)


if __name__ == "__main__":
    main()
