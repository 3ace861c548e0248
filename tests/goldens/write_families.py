"""Write tiny checkpoints of each family by diffusers' own classes, and what diffusers computes with them.

.venv-peers/bin/python tests/goldens/write_families.py

FAMILIES/NAME/ for NAME in CASES: a checkpoint in diffusers' layout; FAMILIES/NAME.npz, channels last, float32 unless
said: prompts, negative_prompts: strings [2]; height, width: pixels; noise [2,h,w,4]; decoder_latent [2,h,w,4] and
decoder_image; chains: JSON, {name: {sampler, num_steps, guidance_scale, ...}}; the rest as tests/peers/reference.py
says. The vocabulary is CLIP's cut to 1,000 ids; see write_tiny_sd1.py.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "peers"), str(HERE)]

import reference  # noqa: E402
import write_checkpoint  # noqa: E402
import write_tiny_sd1  # noqa: E402

FAMILIES = HERE / "families"
TINY = write_tiny_sd1.TINY
TEXT = TINY["text_encoder"]
OPEN_CLIP = {"hidden_act": "gelu", "num_hidden_layers": 3}
SCHEDULER = write_checkpoint.SD1_SCHEDULER
LINEAR = {"use_linear_projection": True, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
VAE = TINY["vae"] | {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
SD2_UNET = LINEAR | {
    "sample_size": 16,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": (2, 4),
    "cross_attention_dim": 32,
    "upcast_attention": True,
}
V_PREDICTION = SCHEDULER | {"prediction_type": "v_prediction"}
SD2 = {
    "pipeline": "StableDiffusionPipeline",
    "text_encoder": TEXT | OPEN_CLIP,
    "unet": SD2_UNET,
    "vae": VAE,
    "scheduler": ("DDIMScheduler", V_PREDICTION),
}
SDXL = {
    "pipeline": "StableDiffusionXLPipeline",
    "text_encoder": TEXT | {"num_hidden_layers": 3},
    "text_encoder_2": TEXT | OPEN_CLIP | {"hidden_size": 48, "projection_dim": 40, "num_hidden_layers": 3},
    "unet": LINEAR
    | {
        "sample_size": 16,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (2, 4),
        "transformer_layers_per_block": (1, 2),
        "cross_attention_dim": 80,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 40 + 6 * 8,
    },
    "vae": VAE | {"scaling_factor": 0.13025},
    "scheduler": ("EulerDiscreteScheduler", SCHEDULER),
}
GUIDED = {"num_steps": 5, "guidance_scale": 6.0}
# Name -> (parts, chains).
CASES = {
    "sd2": (SD2, {"ddim": {"sampler": "ddim", **GUIDED}, "euler": {"sampler": "euler", **GUIDED}}),
    "sd2_zero_snr": (
        SD2
        | {
            "scheduler": (
                "DDIMScheduler",
                V_PREDICTION | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
            )
        },
        {"ddim": {"sampler": "ddim", **GUIDED}},
    ),
    "sdxl": (
        SDXL,
        {
            "euler": {"sampler": "euler", **GUIDED},
            "no negative": {"sampler": "euler", **GUIDED, "negative_prompts": None},
        },
    ),
    "sdxl_turbo": (
        SDXL | {"scheduler": ("EulerAncestralDiscreteScheduler", SCHEDULER | {"timestep_spacing": "trailing"})},
        {"euler_a": {"sampler": "euler_a", "num_steps": 4, "guidance_scale": 0.0, "seed": 5}},
    ),
    "lcm": (
        SD2
        | {
            "pipeline": "LatentConsistencyModelPipeline",
            "text_encoder": TEXT,
            "unet": SD2_UNET | {"time_cond_proj_dim": 10, "upcast_attention": False},
            "scheduler": ("LCMScheduler", {k: v for k, v in SCHEDULER.items() if k != "timestep_spacing"}),
        },
        {"lcm": {"sampler": "lcm", "num_steps": 4, "guidance_scale": 8.5, "seed": 5}},
    ),
}
# Checkpoints that differ in their scheduler alone lend their weights.
SAME_WEIGHTS = {"sd2_zero_snr": "sd2", "sdxl_turbo": "sdxl"}
HEIGHT, WIDTH = 24, 32
PROMPTS, NEGATIVE_PROMPTS = write_tiny_sd1.PROMPTS, write_tiny_sd1.NEGATIVE_PROMPTS


def compute(checkpoint: Path, chains: dict) -> dict[str, np.ndarray]:
    """Everything of NAME.npz."""
    random = np.random.default_rng(0)
    noise, latent = random.standard_normal((2, 2, HEIGHT // 2, WIDTH // 2, 4)).astype("float32")
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.npz"
        # One image's fresh noise for both: the pipelines draw for the batch, we per image.
        np.savez(inputs, noise=noise[:1], latent=latent[:1])
        request = {
            "checkpoint": str(checkpoint),
            "height": HEIGHT,
            "width": WIDTH,
            "inputs": inputs,
            "timestep": 501,
            "guidance_scale": 8.5,
            "prompts": PROMPTS[:1],
            "negative_prompts": NEGATIVE_PROMPTS[:1],
            "chains": chains,
        }
        outputs = reference.run(request)
    outputs["decoder_image"] = outputs.pop("image")
    del outputs["request"]
    given = {"height": HEIGHT, "width": WIDTH, "noise": noise[:1], "decoder_latent": latent[:1]}
    given |= {"prompts": np.array(PROMPTS[:1]), "negative_prompts": np.array(NEGATIVE_PROMPTS[:1])}
    return given | {"chains": np.array(json.dumps(chains))} | outputs


def main():
    FAMILIES.mkdir(exist_ok=True)
    for name, (parts, chains) in CASES.items():
        checkpoint = FAMILIES / name
        shutil.rmtree(checkpoint, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_sd1.cut_tokenizer(HERE.parents[1] / "checkpoints/emoji/tokenizer", Path(folder) / "tokenizer")
            write_checkpoint.write(checkpoint, parts, Path(folder) / "tokenizer", seed=0)
        with torch.inference_mode():
            outputs = compute(checkpoint, chains)
        np.savez_compressed(FAMILIES / f"{name}.npz", **outputs)
        if name in SAME_WEIGHTS:
            for component in checkpoint.iterdir():
                if component.name != "scheduler":
                    shutil.rmtree(component) if component.is_dir() else component.unlink()


if __name__ == "__main__":
    main()
