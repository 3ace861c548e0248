"""Which files of a checkpoint in diffusers' layout are read: one format, one precision, once each.

From names alone, so that the same choice is made in a folder and in a listing of the Hub before anything is fetched.
"""

import re
from collections.abc import Collection

WEIGHT_STEMS = {
    "text_encoder": "model",
    "text_encoder_2": "model",
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
PICKLE_STEMS = {"model": "pytorch_model"}  # where a pickle is called otherwise
# Small files: settings, vocabularies. generation_config.json is ours: how a checkpoint likes to be sampled.
ROOT_FILES = ("model_index.json", "generation_config.json")
COMPONENT_FILES = (
    *("config.json", "scheduler_config.json"),
    *("vocab.json", "merges.txt", "tokenizer.json", "added_tokens.json"),
    *("tokenizer_config.json", "special_tokens_map.json"),
)


def weight_files(names: Collection[str], stem: str, variant: str | None = None, pickles: bool = False) -> list[str]:
    """The files among `names`, those of one component's folder, that hold its tensors.

    Args:
        stem: a value of `WEIGHT_STEMS`.
        variant: file name infix to prefer, e.g. "fp16"; None prefers the plain file and falls back to fp16.
        pickles: also take pickles where there is no safetensors file.

    Returns:
        One file; or an index and the shards that belong to it; or none.
    """
    for suffix in ("safetensors", "bin") if pickles else ("safetensors",):
        name = stem if suffix == "safetensors" else PICKLE_STEMS.get(stem, stem)
        for infix in ("", ".fp16") if variant is None else (f".{variant}", ""):
            if f"{name}{infix}.{suffix}" in names:
                return [f"{name}{infix}.{suffix}"]
            # Both spellings of a sharded variant's index occur.
            for index in (f"{name}.{suffix}.index{infix}.json", f"{name}{infix}.{suffix}.index.json"):
                shard = re.compile(rf"{re.escape(name + infix)}-\d+-of-\d+\.{suffix}")
                if index in names and suffix == "safetensors":
                    return [index, *sorted(filter(shard.fullmatch, names))]
    return []


def small_files(names: Collection[str], components: Collection[str]) -> list[str]:
    """Paths among `names` with settings and vocabularies: all that is needed to know what a checkpoint is."""
    wanted = {*ROOT_FILES, *(f"{component}/{name}" for component in components for name in COMPONENT_FILES)}
    return sorted(wanted & set(names))


def folder_names(names: Collection[str], folder: str) -> list[str]:
    """The names directly in one folder, without it."""
    return [rest for name in names if (rest := name.removeprefix(f"{folder}/")) != name and "/" not in rest]
