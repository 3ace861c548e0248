"""Write tiny_sd1/, a tiny checkpoint of diffusers' own classes, and tiny_sd1.npz, what diffusers computes with it.

.venv-peers/bin/python tests/goldens/write_tiny_sd1.py

The tokenizer is the real one cut to 1,000 ids: CLIP numbers its vocabulary bytes, bytes at the end of a word, merges
in order, two special tokens, so the first ids keep their meaning.

tiny_sd1.npz, channels last, float32 unless said:
    prompts, negative_prompts: strings [2]; height, width: pixels
    tokens, negative_tokens int32[2,77]; context, unconditional_context [2,77,32]
    latent [2,8,12,4]; timesteps [5,2], one per image; predictions [5,2,8,12,4], of the UNet on latent and context
    odd_latent [2,7,9,4], odd_prediction: a size that is no multiple of the UNet's 4, at timesteps[0]
    decoder_latent [2,8,12,4]; decoder_image [2,32,48,3], not clipped
    encoder_image [2,32,48,3]; encoder_mean, encoder_std [2,8,12,4], not scaled
    noise [2,8,12,4]; guidance_scale, num_steps; ddim/... and euler/... as in tests/peers/reference.py, on noise
    versions: JSON
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "peers"))

import reference  # noqa: E402
import write_checkpoint  # noqa: E402

VOCABULARY = 1000
# Every size differs from its neighbours where it can, so that no two can be mistaken for each other.
TINY = {
    "pipeline": "StableDiffusionPipeline",
    "text_encoder": write_checkpoint.SD1_TEXT_ENCODER
    | {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "projection_dim": 32,
        "bos_token_id": VOCABULARY - 2,
        "eos_token_id": VOCABULARY - 1,
        "pad_token_id": VOCABULARY - 1,
    },
    "unet": {
        "sample_size": 8,
        "block_out_channels": (8, 16, 24),
        "layers_per_block": 2,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "attention_head_dim": (2, 4, 3),
        "transformer_layers_per_block": (1, 2, 1),
        "cross_attention_dim": 32,
        "norm_num_groups": 4,
    },
    "vae": {
        "sample_size": 32,
        "block_out_channels": (8, 8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "scaling_factor": 0.4,
    },
    "scheduler": ("DDIMScheduler", write_checkpoint.SD1_SCHEDULER),
}
PROMPTS = ["a photo of a red house by the river at night", "two small dogs"]
NEGATIVE_PROMPTS = ["blurry, low quality", ""]
HEIGHT, WIDTH = 32, 48
TIMESTEPS = [[981.0, 501.0], [999.0, 0.0], [500.5, 500.5], [1.0, 1.0], [250.25, 0.5]]
NUM_STEPS, GUIDANCE_SCALE = 10, 7.5


def cut_tokenizer(source: Path, target: Path) -> None:
    """CLIP's tokenizer files with the first VOCABULARY - 2 ids and the two special tokens."""
    target.mkdir(parents=True)
    ids = json.loads((source / "vocab.json").read_text(encoding="utf-8"))
    kept = {text: i for text, i in ids.items() if i < VOCABULARY - 2}
    kept |= {"<|startoftext|>": VOCABULARY - 2, "<|endoftext|>": VOCABULARY - 1}
    lines = (source / "merges.txt").read_text(encoding="utf-8").splitlines()
    header, merges = lines[0], lines[1:]
    merges = merges[: VOCABULARY - 2 - 512]
    if not header.startswith("#version") or {"".join(m.split()) for m in merges} - kept.keys():
        raise SystemExit(f"{source}: not CLIP's tokenizer")
    (target / "vocab.json").write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")
    (target / "merges.txt").write_text("\n".join([header, *merges]) + "\n", encoding="utf-8")
    shutil.copyfile(source / "tokenizer_config.json", target / "tokenizer_config.json")


def inputs() -> dict[str, np.ndarray]:
    """Seeded arrays that every computation starts from."""
    random = np.random.default_rng(0)
    h, w = HEIGHT // 4, WIDTH // 4
    return {
        "noise": random.standard_normal((2, h, w, 4)).astype("float32"),
        "latent": random.standard_normal((2, h, w, 4)).astype("float32"),
        "odd_latent": random.standard_normal((2, 7, 9, 4)).astype("float32"),
        "decoder_latent": random.standard_normal((2, h, w, 4)).astype("float32"),
        "encoder_image": random.uniform(-1, 1, (2, HEIGHT, WIDTH, 3)).astype("float32"),
        "timesteps": np.array(TIMESTEPS, "float32"),
    }


def compute(checkpoint: Path, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Everything of tiny_sd1.npz but the inputs."""
    chain = {"num_steps": NUM_STEPS, "guidance_scale": GUIDANCE_SCALE}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(
            Path(folder) / "inputs.npz",
            noise=given["noise"],
            latent=given["decoder_latent"],
            image=given["encoder_image"],
        )
        outputs = reference.run(
            {
                "checkpoint": str(checkpoint),
                "height": HEIGHT,
                "width": WIDTH,
                "inputs": Path(folder) / "inputs.npz",
                "timestep": 501,
                "prompts": PROMPTS,
                "negative_prompts": NEGATIVE_PROMPTS,
                "chains": {name: {"sampler": name, **chain} for name in ("ddim", "euler")},
            }
        )
    del outputs["prediction"], outputs["request"]
    for name, renamed in (("image", "decoder_image"), ("mean", "encoder_mean"), ("std", "encoder_std")):
        outputs[renamed] = outputs.pop(name)
    unet = StableDiffusionPipeline.from_pretrained(checkpoint, safety_checker=None, local_files_only=True).unet
    context = torch.from_numpy(outputs["context"])

    def predict(latent, timesteps):
        sample = reference.to_torch(given[latent])
        return reference.to_numpy(unet(sample, torch.from_numpy(timesteps), encoder_hidden_states=context).sample)

    outputs["predictions"] = np.stack([predict("latent", t) for t in given["timesteps"]])
    outputs["odd_prediction"] = predict("odd_latent", given["timesteps"][0])
    return outputs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, default=HERE.parent.parent / "checkpoints/emoji/tokenizer")
    arguments = parser.parse_args()
    checkpoint = HERE / "tiny_sd1"
    shutil.rmtree(checkpoint, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        cut_tokenizer(arguments.tokenizer, Path(folder) / "tokenizer")
        write_checkpoint.write(checkpoint, TINY, Path(folder) / "tokenizer", seed=0)
    given = inputs()
    with torch.inference_mode():
        outputs = compute(checkpoint, given)
    settings = {"height": HEIGHT, "width": WIDTH, "num_steps": NUM_STEPS, "guidance_scale": np.float32(GUIDANCE_SCALE)}
    settings |= {"prompts": np.array(PROMPTS), "negative_prompts": np.array(NEGATIVE_PROMPTS)}
    np.savez_compressed(HERE / "tiny_sd1.npz", **settings, **given, **outputs)


if __name__ == "__main__":
    main()
