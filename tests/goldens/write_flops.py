"""Write flops.json: FLOPs that PyTorch counts for diffusers' and transformers' own models.

    .venv-peers/bin/python tests/goldens/write_flops.py

The models are on the meta device: only shapes are computed. A multiply-add counts as 2. Attention is written
as matrix products, so that it is counted on every device.

    CASE/FUNCTION: {"convolution and matmul": with weights, "attention": products of two activations}

CASE is FOLDER or FAMILY, then width x height, then rows of the UNet and pictures of the decoder; the text encoder reads
two rows for each picture, prompt and negative prompt.
"""

import json
import sys
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers.models.attention_processor import AttnProcessor
from torch.utils.flop_counter import FlopCounterMode

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "peers"))
from write_checkpoint import FAMILIES  # noqa: E402

# (folder here or family, width, height, rows)
CASES = [
    ("tiny_sd1", 48, 32, 2),
    ("families/sdxl", 48, 32, 2),
    ("sd1", 256, 256, 2),
    ("sd1", 512, 512, 1),
    ("sd2", 512, 512, 1),
    ("sdxl", 1024, 1024, 1),
]
ATTENTION = ("bmm", "baddbmm")


def configs(name):
    """Component -> configuration."""
    if name in FAMILIES:
        return FAMILIES[name]
    found = {folder.parent.name: json.loads(folder.read_text()) for folder in (HERE / name).glob("*/config.json")}
    return {key: {k: v for k, v in values.items() if not k.startswith("_")} for key, values in found.items()}


def count(function, *arguments, **options):
    """FLOPs of one call."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        function(*arguments, **options)
    flops = {str(op).removeprefix("aten."): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops.pop(op, 0) for op in ATTENTION)
    assert set(flops) <= {"convolution", "mm", "addmm"}, flops
    return {"convolution and matmul": sum(flops.values()), "attention": attention}


def case(name, width, height, rows):
    """Function -> FLOPs."""
    found = configs(name)
    vae = diffusers.AutoencoderKL(**found["vae"])
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    latent = torch.empty(rows, 4, height // scale, width // scale)
    vae.set_attn_processor(AttnProcessor())
    yield "decode", count(vae.decode, latent)
    yield "encode_image", count(vae.encode, torch.empty(rows, 3, height, width))

    unet = diffusers.UNet2DConditionModel(**found["unet"])
    unet.set_attn_processor(AttnProcessor())
    options = {}
    if unet.config.addition_embed_type == "text_time":
        pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        options["added_cond_kwargs"] = {"text_embeds": torch.empty(rows, pooled), "time_ids": torch.empty(rows, 6)}
    context = torch.empty(rows, 77, unet.config.cross_attention_dim)
    yield "unet", count(unet, latent, torch.empty(rows), context, **options)

    if "text_encoder_2" not in found:
        config = transformers.CLIPTextConfig(**found["text_encoder"], attn_implementation="eager")
        encoder = transformers.CLIPTextModel(config)
        yield "encode", count(encoder, torch.zeros(2 * rows, 77, dtype=torch.int64))


def main():
    flops = {}
    with torch.device("meta"):
        for name, width, height, rows in CASES:
            for function, counts in case(name, width, height, rows):
                flops[f"{name} {width}x{height} {rows}/{function}"] = counts
                print(name, function, counts, flush=True)
    modules = (diffusers, transformers, torch)
    flops["versions"] = {module.__name__: module.__version__ for module in modules}
    (HERE / "flops.json").write_text(json.dumps(flops, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
