"""Write a full-size Stable Diffusion checkpoint with seeded random weights, by diffusers' own classes.

python tests/peers/write_checkpoint.py OUTPUT_DIR --family sd1 --tokenizer checkpoints/emoji/tokenizer [--seed 0]

The libraries' default initialisation draws the same grey noise for every prompt, so nothing measured on it means
anything. Here every layer gets a gain (tables below) such that the picture depends on prompt, guidance, timestep and
noise, that the UNet's output has unit scale, and that rounding errors do not grow into another picture.
Residual streams are kept small on purpose: a normalisation epsilon of 1e-5 where 1e-6 is right is then
far above the bars. Biases and normalisation weights are random as well, so that no tensor can be swapped unnoticed.
"""

import argparse
import json
import re
import shutil
import zlib
from pathlib import Path

import diffusers
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

SD1_TEXT_ENCODER = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "projection_dim": 768,
    "bos_token_id": 49406,
    "eos_token_id": 49407,
    "pad_token_id": 49407,
}
SD1_UNET = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
}
SD1_VAE = {
    "sample_size": 512,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 4,
    "scaling_factor": 0.18215,
}
SD1_SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "steps_offset": 1,
    "set_alpha_to_one": False,
    "clip_sample": False,
    "timestep_spacing": "leading",
}
SD1 = {
    "pipeline": "StableDiffusionPipeline",
    "text_encoder": SD1_TEXT_ENCODER,
    "unet": SD1_UNET,
    "vae": SD1_VAE,
    "scheduler": ("DDIMScheduler", SD1_SCHEDULER),
}
# OpenCLIP's ViT-H; its tokenizer fills up with "!".
SD2 = SD1 | {
    "text_encoder": SD1_TEXT_ENCODER
    | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 23,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "projection_dim": 512,
    },
    "unet": SD1_UNET
    | {
        "sample_size": 96,
        "attention_head_dim": (5, 10, 20, 20),
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
        "upcast_attention": True,
    },
    "vae": SD1_VAE | {"sample_size": 768},
    "scheduler": ("DDIMScheduler", SD1_SCHEDULER | {"prediction_type": "v_prediction"}),
}
SDXL = {
    "pipeline": "StableDiffusionXLPipeline",
    "text_encoder": SD1_TEXT_ENCODER,
    "text_encoder_2": SD1_TEXT_ENCODER
    | {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "hidden_act": "gelu",
        "projection_dim": 1280,
    },
    "unet": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 2,
        "attention_head_dim": (5, 10, 20),
        "transformer_layers_per_block": (1, 2, 10),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "vae": SD1_VAE | {"sample_size": 1024, "scaling_factor": 0.13025},
    # The published file holds DDIM's keys too.
    "scheduler": ("EulerDiscreteScheduler", SD1_SCHEDULER),
}
FAMILIES = {"sd1": SD1, "sd2": SD2, "sdxl": SDXL}

SILU = 1.68  # 1 / sqrt(E[silu(n)^2]), n standard normal: keeps unit scale through the activation
GEGLU = 1.53  # the same for n' * gelu(n)
STREAM = 0.02  # scale of the residual streams
TOKENS = 0.1  # scale of the residual streams within the UNet's transformers

# (pattern, gain, bias), first match wins. A weight's standard deviation is gain / sqrt(fan in), so gain 1 keeps unit
# scale; that of an embedding is gain itself; bias is a standard deviation.
UNET_GAINS = (
    (r"^conv_in\.", STREAM, 0.1 * STREAM),
    (r"^conv_out\.", SILU, 0.1),
    (r"_embedding\.linear_1\.", 1.4, 0.1),
    (r"_embedding\.linear_2\.", SILU, 0.1),
    (r"time_emb_proj\.", SILU, 0.1),
    (r"conv1\.", SILU, 0.1),
    (r"conv2\.", 0.5 * SILU * STREAM, 0.1 * STREAM),
    (r"(conv_shortcut|samplers\.0\.conv)\.", 1.0, 0.1 * STREAM),
    (r"attn1\.to_[qk]\.", 1.2, 0.1),
    (r"attn2\.to_[qk]\.", 1.4, 0.1),
    (r"proj_in\.", TOKENS, 0.1 * TOKENS),
    (r"attn1\.to_out\.", 1.5 * TOKENS, 0.1 * TOKENS),
    (r"attn2\.to_out\.", 2.0 * TOKENS, 0.1 * TOKENS),
    (r"ff\.net\.2\.", 0.5 * GEGLU * TOKENS, 0.1 * TOKENS),
    (r"proj_out\.", 0.2 * STREAM / TOKENS, 0.1 * STREAM),
    (r"", 1.0, 0.1),
)
TEXT_ENCODER_GAINS = (
    (r"token_embedding\.", STREAM, 0.0),
    (r"position_embedding\.", 0.3 * STREAM, 0.0),
    (r"(q|k)_proj\.", 1.2, 0.1),
    (r"(out_proj|fc2)\.", STREAM, 0.1 * STREAM),
    (r"", 1.0, 0.1),
)
VAE_GAINS = (
    (r"^encoder\.conv_in\.", STREAM, 0.1 * STREAM),
    (r"^decoder\.conv_in\.", 0.05 * STREAM, 0.1 * STREAM),
    (r"^encoder\.conv_out\.", SILU, 0.1),
    (r"^decoder\.conv_out\.", 0.4 * SILU, 0.1),
    (r"conv1\.", SILU, 0.1),
    (r"conv2\.", 0.5 * SILU * STREAM, 0.1 * STREAM),
    (r"(conv_shortcut|samplers\.0\.conv)\.", 1.0, 0.1 * STREAM),
    (r"to_[qk]\.", 1.2, 0.1),
    (r"to_out\.", STREAM, 0.1 * STREAM),
    (r"", 1.0, 0.1),
)
COUPLING = 1.0  # norm of the weights that lead the latent back into the output; see couple_output_to_input


def set_weights(module, gains, seed):
    """Overwrite every parameter: weights by `gains`, biases and normalisation weights around 0 and 1."""
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        values = torch.randn(parameter.shape, generator=generator)
        gain, bias = next((gain, bias) for pattern, gain, bias in gains if re.search(pattern, name))
        if "embedding.weight" in name:
            values *= gain
        elif parameter.ndim >= 2:
            values *= gain / parameter[0].numel() ** 0.5
        elif "norm" in name:
            values = 0.1 * values + name.endswith("weight")
        else:
            values *= bias
        parameter.data.copy_(values)


def couple_output_to_input(unet, strength):
    """Let the UNet's output follow its input, as every trained one's does: latents then stay of moderate scale.

    The latent travels linearly from conv_in over the last skip connection to the last feature map; conv_out's
    centre tap gets the way back.
    """
    first = unet.conv_in.weight.data[:, :, 1, 1]
    shortcut = unet.up_blocks[-1].resnets[-1].conv_shortcut.weight.data[:, -first.shape[0] :, 0, 0]
    path = shortcut @ first
    last = unet.conv_out.weight.data
    last -= last.mean(1, keepdim=True)  # SiLU's positive mean would be a constant that a chain adds up
    last[:, :, 1, 1] += strength * (path / path.norm(dim=0)).T


def build(component, config, seed):
    """One component with its weights set, ready to run."""
    if component == "text_encoder":
        module, gains = CLIPTextModel(CLIPTextConfig(**config)), TEXT_ENCODER_GAINS
    elif component == "text_encoder_2":
        module, gains = CLIPTextModelWithProjection(CLIPTextConfig(**config)), TEXT_ENCODER_GAINS
    elif component == "unet":
        module, gains = UNet2DConditionModel(**config), UNET_GAINS
    else:
        module, gains = AutoencoderKL(**config), VAE_GAINS
    set_weights(module, gains, seed)
    if component == "unet":
        couple_output_to_input(module, COUPLING)
    return module.eval()


def write(folder, configs, tokenizer, seed):
    """Write a checkpoint, one component at a time in memory; the folder appears when it is complete.

    Args:
        configs: {"text_encoder" | "text_encoder_2" | "unet" | "vae": keyword arguments of its class; "scheduler":
            (class, keyword arguments); "pipeline": class}
        tokenizer: folder whose vocab.json, merges.txt and tokenizer_config.json are copied.
    """
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    components = [c for c in ("text_encoder", "text_encoder_2", "unet", "vae") if c in configs]
    for component in components:
        module = build(component, configs[component], seed)
        module.save_pretrained(work / component)
        millions = sum(p.numel() for p in module.parameters()) / 1e6
        print(f"{component}: {millions:.1f} million parameters", flush=True)
        del module
    scheduler, settings = configs["scheduler"]
    write_scheduler(work / "scheduler", getattr(diffusers, scheduler), settings)
    for component in components:
        if component.startswith("text_encoder"):
            write_tokenizer(work / component.replace("text_encoder", "tokenizer"), configs[component], tokenizer)
    index = model_index(configs["pipeline"], components, scheduler)
    (work / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    work.rename(folder)


def write_scheduler(folder, kind, settings):
    """scheduler_config.json; settings that are other classes' stand in it as they do in published files."""
    own = {name: value for name, value in settings.items() if name in kind().config}
    kind(**own).save_pretrained(folder)
    path = folder / "scheduler_config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_tokenizer(folder, config, source):
    """The tokenizer of one text encoder: OpenCLIP's, which compute GELU exactly, fill prompts up with "!"."""
    folder.mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(source / name, folder / name)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if config["hidden_act"] == "gelu":
        settings["pad_token"] = "!"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def model_index(pipeline, components, scheduler):
    """What diffusers' save_pretrained writes into model_index.json."""
    classes = {
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    index = {"_class_name": pipeline, "_diffusers_version": diffusers.__version__}
    index |= {component: classes[component] for component in components}
    index |= {"scheduler": ["diffusers", scheduler], "tokenizer": ["transformers", "CLIPTokenizer"]}
    index |= {"feature_extractor": [None, None], "image_encoder": [None, None]}
    if "text_encoder_2" in components:
        return index | {"tokenizer_2": ["transformers", "CLIPTokenizer"], "force_zeros_for_empty_prompt": True}
    return index | {"safety_checker": [None, None], "requires_safety_checker": False}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to write; must not exist")
    parser.add_argument("--family", choices=FAMILIES, default="sd1")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with CLIP's vocab.json and merges.txt")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.output.exists():
        parser.error(f"{arguments.output} exists")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write(arguments.output, FAMILIES[arguments.family], arguments.tokenizer, arguments.seed)


if __name__ == "__main__":
    main()
