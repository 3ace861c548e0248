"""Run diffusers (PyTorch, CPU, float32) on a checkpoint: every component once, and whole chains.

python tests/peers/reference.py REQUEST.json OUTPUT.npz

REQUEST.json:
    checkpoint, height, width      folder in diffusers' layout; pixels
    inputs                         npz with noise f32[N,h,w,4] and, optional, latent f32[N,h,w,4] (for the decoder)
                                   and image f32[N,H,W,3] in [-1, 1] (for the encoder); channels last
    timestep                       of the one UNet call, on `noise`
    guidance_scale                 told to the UNet in that call, where it was distilled with guidance
    prompts, negative_prompts      N each
    chains                         {name: {sampler (of SCHEDULERS), num_steps, guidance_scale, seed (of fresh noise),
                                           prompts, negative_prompts (default: those above; null: none)}}

OUTPUT.npz, channels last:
    tokens, negative_tokens int32[N,77]; context, unconditional_context f32[N,77,D]; prediction f32[N,h,w,4];
    with two text encoders also tokens_2, negative_tokens_2, pooled, unconditional_pooled f32[N,D'];
    image f32[N,H,W,3], not clipped (where a latent is given); mean, std f32[N,h,w,4] (where an image is given; the
    encoder's, not scaled)
    NAME/timesteps f64[n]; NAME/sigmas f32[n] (Euler only: sigma after each step); NAME/latents f32[n,N,h,w,4] after
    each step, in the scheduler's own scale; NAME/unet_std f32[n] of the UNet's outputs;
    NAME/float_image f32[N,H,W,3]; NAME/image uint8[N,H,W,3]
    request, versions: JSON

Chains run through the checkpoint's own pipeline. Its Euler multiplies the latents it is given by init_noise_sigma, so
the same noise goes to every sampler. Fresh noise is pipeline.sampling.noise.normal(seed, row + 1) in place of torch's.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from diffusers import DiffusionPipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.sampling import noise  # noqa: E402

SCHEDULERS = {
    "ddim": diffusers.DDIMScheduler,
    "euler": diffusers.EulerDiscreteScheduler,
    "euler_a": diffusers.EulerAncestralDiscreteScheduler,
    "lcm": diffusers.LCMScheduler,
}
SIGMA_SCALE = ("euler", "euler_a")


def run(request: dict) -> dict[str, np.ndarray]:
    """The arrays of OUTPUT.npz."""
    pipe = DiffusionPipeline.from_pretrained(request["checkpoint"], dtype=torch.float32, local_files_only=True)
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
    """Tokenizers, text encoders, UNet, decoder and encoder, once each."""
    prompts, negative_prompts = request["prompts"], request["negative_prompts"]
    outputs = {}
    for suffix in ("", "_2") if hasattr(pipe, "tokenizer_2") else ("",):
        for name, texts in (("tokens", prompts), ("negative_tokens", negative_prompts)):
            ids = tokenize(getattr(pipe, f"tokenizer{suffix}"), texts)
            outputs[f"{name}{suffix}"] = ids.numpy().astype("int32")
    settings = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": True}
    encoded = pipe.encode_prompt(prompts, negative_prompt=negative_prompts, **settings)
    context, pooled = encoded[0], encoded[2] if len(encoded) == 4 else None
    outputs |= {"context": context.numpy(), "unconditional_context": encoded[1].numpy()}
    if pooled is not None:
        outputs |= {"pooled": pooled.numpy(), "unconditional_pooled": encoded[3].numpy()}
    print("text encoder: done", flush=True)
    told = unet_extras(pipe, request, pooled, len(prompts))
    prediction = pipe.unet(inputs["noise"], request["timestep"], encoder_hidden_states=context, **told).sample
    outputs["prediction"] = to_numpy(prediction)
    print("unet: done", flush=True)
    if "latent" in inputs:
        outputs["image"] = to_numpy(pipe.vae.decode(inputs["latent"] / pipe.vae.config.scaling_factor).sample)
    if "image" in inputs:
        posterior = pipe.vae.encode(inputs["image"]).latent_dist
        outputs |= {"mean": to_numpy(posterior.mean), "std": to_numpy(posterior.std)}
    return outputs


def unet_extras(pipe, request, pooled, count: int) -> dict:
    """What the pipelines tell the UNet beside latent, timestep and context."""
    extras = {}
    if pooled is not None:
        size = (request["height"], request["width"])
        ids = pipe._get_add_time_ids(size, (0, 0), size, torch.float32, pipe.text_encoder_2.config.projection_dim)
        extras["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": ids.repeat(count, 1)}
    if pipe.unet.config.time_cond_proj_dim is not None:
        scale = torch.full((count,), request["guidance_scale"] - 1)
        extras["timestep_cond"] = pipe.get_guidance_scale_embedding(scale, pipe.unet.config.time_cond_proj_dim)
    return extras


def tokenize(tokenizer, prompts: list[str]) -> torch.Tensor:
    """The call that the pipelines' encode_prompt makes."""
    return tokenizer(
        prompts, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    ).input_ids


def run_chain(pipe, checkpoint: str, chain: dict, start, height: int, width: int, label: str) -> dict[str, np.ndarray]:
    """One picture per prompt by the checkpoint's pipeline, and what it passed on the way."""
    sampler = chain["sampler"]
    # From the file each time: a configuration passed from class to class may lose keys.
    pipe.scheduler = SCHEDULERS[sampler].from_pretrained(checkpoint, subfolder="scheduler")
    timesteps, latents, sigmas, unet_std = [], [], [], []

    def fresh(shape, **_):
        return torch.from_numpy(noise.normal(chain["seed"], len(timesteps) + 1, tuple(shape)))

    sys.modules[SCHEDULERS[sampler].__module__].randn_tensor = fresh

    def after_step(pipe, step, timestep, values):
        timesteps.append(float(timestep))
        latents.append(to_numpy(values["latents"]))
        if sampler in SIGMA_SCALE:
            sigmas.append(float(pipe.scheduler.sigmas[step + 1]))
        print(f"{label}: step {step + 1} of {chain['num_steps']}", flush=True)
        return {}

    def after_unet(module, arguments, output):
        unet_std.append(float(output[0].std()))

    # The pipeline of distilled models knows no negative prompt.
    lcm = type(pipe).__name__.startswith("LatentConsistency")
    negative = {} if lcm else {"negative_prompt": chain["negative_prompts"]}
    hook = pipe.unet.register_forward_hook(after_unet)
    try:
        final = pipe(
            chain["prompts"],
            **negative,
            guidance_scale=chain["guidance_scale"],
            num_inference_steps=chain["num_steps"],
            height=height,
            width=width,
            latents=start.clone(),
            output_type="latent",
            callback_on_step_end=after_step,
            callback_on_step_end_tensor_inputs=["latents"],
        ).images
    finally:
        hook.remove()
    # The pipelines' own last lines, taken apart to keep the picture before it is clipped as well.
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
