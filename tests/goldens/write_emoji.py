"""Write emoji.npz: what diffusers draws with checkpoints/emoji, and emoji_objects.png: the pictures it learned from.

Run from the project's folder with the peers' environment; the argument is the npm package's archive, which
`npm pack emoji-datasource-google@16.0.0` downloads:

    .venv-peers/bin/python -m tests.goldens.write_emoji emoji-datasource-google-16.0.0.tgz

    drawn: strings [20,2], object and colour; prompts: strings [20], in all the forms the checkpoint knows
    seed: of the first picture; picture i of prompt p has seed + 3 p + i
    images uint8[12,64,64,3]: the first four prompts, three seeds each; 25 DDIM steps, guidance 3, float32,
        noise by pipeline.sampling.noise
    sha256: JSON, of the checkpoint's weight files; versions: JSON
"""

import hashlib
import json
import sys
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers

from pipeline.sampling import noise
from training import data

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE.parents[1] / "checkpoints" / "emoji"
SEED, SEEDS, COMPARED, STEPS, GUIDANCE_SCALE = 1000, 3, 4, 25, 3.0
DRAWN = [
    ("red apple", "blue"),
    ("panda", "red"),
    ("sunflower", "purple"),
    ("laughing face with tears", "black"),
    ("fox", "green"),
    ("banana", "blue"),
    ("purple heart", "yellow"),
    ("slice of pizza", "gray"),
    ("octopus", "white"),
    ("rocket", "yellow"),
    ("skull", "red"),
    ("birthday cake", "green"),
    ("butterfly", "gray"),
    ("cactus", "white"),
    ("owl", "purple"),
    ("guitar", "black"),
    ("strawberry", "blue"),
    ("penguin", "yellow"),
    ("mug of beer", "red"),
    ("face with sunglasses", "green"),
]


def main(archive: str):
    _, pictures = data.read_objects(archive)
    data.write_sheet(pictures, HERE / "emoji_objects.png")
    prompts = [data.caption(name, colour, i % len(data.TEMPLATES)) for i, (name, colour) in enumerate(DRAWN)]
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(
        CHECKPOINT, dtype=torch.float32, local_files_only=True, safety_checker=None
    )
    pipe.set_progress_bar_config(disable=True)
    side = pipe.unet.config.sample_size
    latents = noise.initial_latents([SEED + i for i in range(COMPARED * SEEDS)], side, side)
    images = pipe(
        prompts[:COMPARED],
        num_images_per_prompt=SEEDS,
        latents=torch.from_numpy(latents).permute(0, 3, 1, 2),
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE_SCALE,
        output_type="np",
    ).images
    weights = sorted(CHECKPOINT.rglob("*.safetensors"))
    digests = {p.relative_to(CHECKPOINT).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in weights}
    versions = {m.__name__: m.__version__ for m in (torch, diffusers, transformers, np)}
    np.savez_compressed(
        HERE / "emoji.npz",
        drawn=np.array(DRAWN),
        prompts=np.array(prompts),
        seed=SEED,
        images=np.round(images * 255).astype("uint8"),
        sha256=np.array(json.dumps(digests)),
        versions=np.array(json.dumps(versions)),
    )


if __name__ == "__main__":
    main(sys.argv[1])
