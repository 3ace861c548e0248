"""Checkpoints in diffusers' layout: a folder per component, a config file beside the weights.

What may be in the folder, how its config files become a `ModelConfig`, and which of its files hold the tensors.
"""

from collections.abc import Callable
from pathlib import Path

from models.config import ModelConfig
from models.errors import InputError
from models.families import FAMILIES
from pipeline.checkpoints import diffusers_config
from pipeline.checkpoints.loader import PICKLES, Tensor, read_safetensors, refused_pickle, some
from pipeline.checkpoints.weight_files import WEIGHT_STEMS, weight_files
from pipeline.files import read_json

ONE_ENCODER = ("text_encoder", "tokenizer", "unet", "vae", "scheduler")
TWO_ENCODERS = (*ONE_ENCODER, "text_encoder_2", "tokenizer_2")
# diffusers' pipelines that draw from text alone, and the folders each needs.
PIPELINES = {
    "StableDiffusionPipeline": ONE_ENCODER,
    "LatentConsistencyModelPipeline": ONE_ENCODER,
    "StableDiffusionXLPipeline": TWO_ENCODERS,
}
IGNORED_COMPONENTS = {"safety_checker", "feature_extractor", "image_encoder"}
SUPPORTED = "text-to-image checkpoints of Stable Diffusion 1.x, 2.x and XL are supported"
# Pipelines people try, and what they are.
OTHERS = {
    "StableDiffusionXLImg2ImgPipeline": "the refiner of Stable Diffusion XL",
    "StableDiffusionInpaintPipeline": "an inpainting model",
    "StableDiffusionXLInpaintPipeline": "an inpainting model",
    "StableDiffusionInstructPix2PixPipeline": "an InstructPix2Pix model",
    "StableDiffusionXLInstructPix2PixPipeline": "an InstructPix2Pix model",
    "StableDiffusionUpscalePipeline": "an upscaler",
    "StableDiffusionLatentUpscalePipeline": "an upscaler",
    "StableDiffusionDepth2ImgPipeline": "a depth-to-image model",
    "StableDiffusionImageVariationPipeline": "an image variation model",
    "StableUnCLIPPipeline": "an unCLIP model",
    "StableUnCLIPImg2ImgPipeline": "an unCLIP model",
}


def check_folder(folder: Path) -> list[str]:
    """Refuse a folder that is no diffusers checkpoint; return what it holds that is not used.

    Raises:
        InputError: not a folder, another kind of model, components missing or too many.
    """
    if folder.is_file():
        raise InputError(f"{folder}: is a file; expected a folder in diffusers' layout (model_index.json, unet/, ...)")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; expected a checkpoint in diffusers' layout")
    index, path = read_index(folder), folder / "model_index.json"
    known = set(PIPELINES[index["_class_name"]])
    used = {name for name, value in index.items() if isinstance(value, list) and any(value)}
    unknown = sorted(used - known - IGNORED_COMPONENTS)
    if unknown:
        raise InputError(f"{path}: components not supported: {', '.join(unknown)}")
    missing = sorted(name for name in known if not (folder / name).is_dir())
    if missing:
        raise InputError(f"{folder}: expected the folders {', '.join(sorted(known))}; missing {missing}")
    return [f"{name}/" for name in sorted(IGNORED_COMPONENTS) if (folder / name).exists()]


def read_index(folder: Path) -> dict:
    """model_index.json. Raises InputError, by its name, for another kind of model."""
    path = folder / "model_index.json"
    index = read_json(path)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str) or pipeline not in PIPELINES:
        what = f", {OTHERS[pipeline]}" if isinstance(pipeline, str) and pipeline in OTHERS else ""
        raise InputError(
            f"{path}: expected _class_name {' or '.join(PIPELINES)}, found {pipeline!r}{what}; {SUPPORTED}"
        )
    return index


def read_config(folder: Path) -> ModelConfig:
    """Read the sizes of a checkpoint in diffusers' folder layout.

    Args:
        folder: holds model_index.json and a folder with a config file for each component.

    Raises:
        InputError: a file is missing or is not JSON, describes something this toolkit does not build, or describes
            parts that do not belong together.
    """
    index = read_index(folder)
    two = "text_encoder_2" in PIPELINES[index["_class_name"]]
    text_encoder = diffusers_config.text_encoder(folder / "text_encoder" / "config.json", penultimate=two)
    text_encoder_2 = None
    if two:
        path = folder / "text_encoder_2" / "config.json"
        text_encoder_2 = diffusers_config.text_encoder(path, penultimate=True, pooled=True)
    # OpenCLIP's encoders are what sets Stable Diffusion 2.x apart: they compute GELU exactly.
    family = FAMILIES["sdxl" if two else "sd2" if text_encoder.hidden_act == "gelu" else "sd1"]
    unet = diffusers_config.unet(folder / "unet" / "config.json")
    vae = diffusers_config.vae(folder / "vae" / "config.json", family.vae.scaling_factor)
    scheduler = diffusers_config.scheduler(folder / "scheduler" / "scheduler_config.json")
    zeros = index.get("force_zeros_for_empty_prompt", family.force_zeros_for_empty_prompt)
    config = ModelConfig(
        family=family.family,
        numerics=family.numerics,
        default_size=diffusers_config.sample_size(folder / "unet" / "config.json", family, vae),
        text_encoder=text_encoder,
        text_encoder_2=text_encoder_2,
        unet=unet,
        vae=vae,
        scheduler=scheduler,
        force_zeros_for_empty_prompt=two and bool(zeros),
        defaults=diffusers_config.defaults(folder / "generation_config.json", scheduler, unet, family.defaults),
    )
    _check_parts_fit(folder, config)
    return config


def _check_parts_fit(folder: Path, config: ModelConfig) -> None:
    """Refuse components of different models in one folder."""
    widths = [encoder.hidden_size for encoder in config.text_encoders]
    pooled = config.text_encoder_2.projection_dim if config.text_encoder_2 else None
    for what, made, wanted in (
        ("context of width", sum(widths), config.unet.cross_attention_dim),
        ("pooled text vector of width", pooled, config.unet.pooled_dim),
    ):
        if made != wanted:
            raise InputError(
                f"{folder / 'unet' / 'config.json'}: parts of different models: the text encoders make a {what} "
                f"{made}, the unet takes {wanted}; get the folder again, or take all parts from one model"
            )


def read_weights(
    folder: Path,
    component: str,
    variant: str | None = None,
    read_pickle: Callable[[Path], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """The tensors of one component of a diffusers folder: one file, or shards listed by an index.json.

    Args:
        component: "text_encoder", "unet" or "vae".
        variant: file name infix to prefer, e.g. "fp16"; None prefers the plain file and falls back to fp16.
        read_pickle: reads a pickle where there is no other file; None refuses pickles.

    Raises:
        InputError: no weights, only pickles, a missing shard, or a tensor in two shards.
    """
    return read_folder(folder / component, WEIGHT_STEMS[component], variant, read_pickle)[0]


def read_folder(
    directory: Path,
    stem: str,
    variant: str | None = None,
    read_pickle: Callable[[Path], dict[str, Tensor]] | None = None,
) -> tuple[dict[str, Tensor], Path]:
    """As `read_weights`, of one component's folder by itself; also the file that was chosen, or the shards' index."""
    found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    chosen = weight_files(found, stem, variant, pickles=read_pickle is not None)
    if chosen:
        first = directory / chosen[0]
        if read_pickle is not None and first.suffix in PICKLES:
            return read_pickle(first), first
        return _read_shards(first) if first.suffix == ".json" else read_safetensors(first), first
    pickles = weight_files(found, stem, variant, pickles=True) or [n for n in found if n.endswith(PICKLES)]
    if pickles:
        raise refused_pickle(directory / pickles[0], or_allow=True)
    raise InputError(
        f"{directory}: expected {stem}.safetensors, its .fp16 variant or {stem}.safetensors.index.json, found "
        f"{', '.join(found) or 'nothing'}"
    )


def _read_shards(index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index}: expected a weight_map from tensor names to file names")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise InputError(f"{index}: shard {shard!r} is not a plain file name")
        for name, tensor in read_safetensors(index.parent / shard).items():
            if weight_map.get(name) != shard:
                raise InputError(f"{index}: says {name!r} is in {weight_map.get(name)}, found it in {shard}")
            tensors[name] = tensor
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise InputError(f"{index}: lists tensors that its shards do not hold: {some(missing)}")
    return tensors
