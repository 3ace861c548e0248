"""Write clip_skip.npz: what diffusers' pipelines encode when they leave out the last layers of their text encoders.

    .venv-peers/bin/python tests/goldens/write_clip_skip.py

For each checkpoint of CASES and clip_skip n:
    NAME/n/context f32[2,77,width]; NAME/n/pooled f32[2,width] where the model has one
    NAME/tokens, NAME/tokens_2 int32[2,77], as its tokenizers make them
    prompts: strings [2]; versions: JSON
"""

import json
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
CASES = {"tiny_sd1": (0, 1), "families/sd2": (0, 1, 2), "families/sdxl": (0, 1)}
PROMPTS = ["a photo of a red house by the river at night", "two small dogs"]


def main():
    arrays = {"prompts": np.array(PROMPTS)}
    for name, skips in CASES.items():
        pipeline = diffusers.DiffusionPipeline.from_pretrained(HERE / name, dtype=torch.float32)
        # diffusers 0.42 looks for the final norm where transformers 5 no longer has it.
        if not hasattr(pipeline.text_encoder, "text_model"):
            object.__setattr__(pipeline.text_encoder, "text_model", pipeline.text_encoder)
        for suffix in ("", "_2"):
            tokenizer = getattr(pipeline, f"tokenizer{suffix}", None)
            if tokenizer is not None:
                ids = tokenizer(PROMPTS, padding="max_length", max_length=77, truncation=True).input_ids
                arrays[f"{name}/tokens{suffix}"] = np.array(ids, "int32")
        for skip in skips:
            with torch.no_grad():
                encoded = pipeline.encode_prompt(
                    PROMPTS,
                    device="cpu",
                    num_images_per_prompt=1,
                    do_classifier_free_guidance=False,
                    clip_skip=skip or None,
                )
            arrays[f"{name}/{skip}/context"] = encoded[0].numpy()
            if len(encoded) == 4:
                arrays[f"{name}/{skip}/pooled"] = encoded[2].numpy()
    versions = {
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    np.savez_compressed(HERE / "clip_skip.npz", versions=json.dumps(versions), **arrays)


if __name__ == "__main__":
    main()
