"""What model a single file in the original naming holds, found from its keys and shapes; the file's name says nothing.

Shapes do not tell all: head counts, epsilons, the noise schedule and what is predicted are the family's.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping

from models.config import ModelConfig, TextEncoderConfig, UNetConfig, VAEConfig
from models.errors import InputError
from models.families import FAMILIES, few_steps
from pipeline.checkpoints.diffusers_config import LATENT_INPUTS, TIME_IDS
from pipeline.checkpoints.diffusers_folder import SUPPORTED
from pipeline.checkpoints.loader import Source

UNET, VAE = "model.diffusion_model.", "first_stage_model."
HEAD_SIZE = 64  # of every network but Stable Diffusion 1.x's UNet, which has 8 heads

# Family and naming of its text encoders -> component -> prefix. The first whose prefixes all occur is it.
TEXT_ENCODERS: list[tuple[str, dict[str, str]]] = [
    (
        "sdxl",
        {"text_encoder": "conditioner.embedders.0.transformer.", "text_encoder_2": "conditioner.embedders.1.model."},
    ),
    ("sd2", {"text_encoder": "cond_stage_model.model."}),
    ("sd2", {"text_encoder": "conditioner.embedders.0.model."}),  # SD-Turbo
    ("sd1", {"text_encoder": "cond_stage_model.transformer."}),
]
# Keys of single files that hold something else; the first match names it.
OTHERS = [
    (rf"(?:{re.escape(UNET)})?joint_blocks\..*", "Stable Diffusion 3"),
    (rf"(?:{re.escape(UNET)})?double_(?:blocks|layers|stream_blocks)\..*", "a transformer such as Flux or AuraFlow"),
    (r"control_model\..*|(?:input_hint_block|controlnet_cond_embedding)\..*", "a ControlNet"),
    (r".*\.(?:time_stack|temporal_transformer|time_mixer)\..*", "a video model"),
    (r"edm_mean|edm_std", "Playground 2.5, which has a noise schedule of its own"),
    (r"edm_vpred\..*", "CosXL, which has a noise schedule of its own"),
    (r"depth_model\..*", "a depth-to-image model"),
    (r"low_scale_model\..*", "an upscaler"),
    (r"(?:noise_augmentor|embedder\.model\.visual)\..*", "an unCLIP model"),
    (rf"{re.escape(UNET)}.*\.fuser\..*", "a GLIGEN model"),
    (r"lora_(?:unet|te\d?)_.*|.*\.lora_(?:A|B|up|down)\..*", "a LoRA, which goes into --lora"),
    (r"emb_params|string_to_param.*|clip_[lg]", "a textual inversion, which goes into --embedding"),
    (
        r"(?:down_blocks|encoder\.down_blocks|text_model\.encoder)\..*",
        "one component of a folder in diffusers' layout, which --checkpoint takes as a whole",
    ),
    (r"(?:encoder|decoder)\.(?:down|up|mid)\..*", "only a VAE, which goes into --vae"),
    (r"input_blocks\..*", "only a UNet"),
]
_OTHER = re.compile("|".join(f"({pattern})" for pattern, _ in OTHERS))
PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction"}  # as "modelspec.prediction_type" in the header says it


def find_family(names: Collection[str], where: str) -> tuple[str, dict[str, str]]:
    """(family, {text encoder: prefix of its names}).

    Raises:
        InputError: another kind of model, by its name, or not all parts of one.
    """
    others = [match.lastindex for name in names if (match := _OTHER.fullmatch(name))]
    if others:
        raise InputError(f"{where}: holds {OTHERS[min(others) - 1][1]}; {SUPPORTED}")

    def holds(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in names)

    found = [(family, prefixes) for family, prefixes in TEXT_ENCODERS if all(map(holds, prefixes.values()))]
    parts = {"text encoder": bool(found), "UNet": holds(UNET), "VAE": holds(VAE)}
    if not all(parts.values()):
        there = ", ".join(part for part, held in parts.items() if held)
        missing = ", ".join(part for part, held in parts.items() if not held)
        raise InputError(
            f"{where}: expected a text encoder, a UNet and a VAE in the original naming "
            f"({UNET}input_blocks.0.0.weight, ...), found {there or 'none of them'}; missing: {missing}"
        )
    family, prefixes = found[0]
    if family == "sd2" and f"{UNET}label_emb.0.0.weight" in names:
        what = "the refiner of Stable Diffusion XL" if "conditioner" in prefixes["text_encoder"] else "an unCLIP model"
        raise InputError(f"{where}: holds {what}; {SUPPORTED}")
    return family, prefixes


def config_of(family: str, components: Mapping[str, Source], where: str) -> ModelConfig:
    """The family's config with the sizes of these tensors.

    Args:
        components: "text_encoder", maybe "text_encoder_2", "unet", "vae" -> tensors by name below their prefix.

    Raises:
        InputError: a UNet that takes more than a latent, tensors missing that sizes are read from, or parts of
            different models.
    """
    known = FAMILIES[family]
    encoders = {
        name: (open_clip if "token_embedding.weight" in found else clip)(found, where, getattr(known, name))
        for name, found in components.items()
        if name.startswith("text_encoder")
    }
    config = dataclasses.replace(
        known,
        **encoders,
        unet=unet(components["unet"], where, known.unet),
        vae=vae(components["vae"], where, known.vae),
    )
    width = sum(encoder.hidden_size for encoder in config.text_encoders)
    pooled = config.text_encoder_2.projection_dim if config.text_encoder_2 else None
    if (width, pooled) != (config.unet.cross_attention_dim, config.unet.pooled_dim):
        raise InputError(
            f"{where}: parts of different models: the text encoders make a context of width {width} and a pooled "
            f"vector of width {pooled}, the UNet takes {config.unet.cross_attention_dim} and {config.unet.pooled_dim}"
        )
    return config


def clip(tensors: Source, where: str, known: TextEncoderConfig) -> TextEncoderConfig:
    """The sizes of a text encoder in transformers' naming, with or without `text_model.`."""
    prefix = "text_model." if any(name.startswith("text_model.") for name in tensors) else ""
    layers = count(tensors, rf"{prefix}encoder\.layers\.(\d+)\..*")
    vocabulary = shape(tensors, f"{prefix}embeddings.token_embedding.weight", 2, where)
    inner = shape(tensors, f"{prefix}encoder.layers.0.mlp.fc1.weight", 2, where)
    return _text_encoder(known, vocabulary, inner[0], layers, known.projection_dim)


def open_clip(tensors: Source, where: str, known: TextEncoderConfig) -> TextEncoderConfig:
    """The sizes of a text encoder in OpenCLIP's naming."""
    layers = count(tensors, r"transformer\.resblocks\.(\d+)\..*")
    vocabulary = shape(tensors, "token_embedding.weight", 2, where)
    inner = shape(tensors, "transformer.resblocks.0.mlp.c_fc.weight", 2, where)
    projection = known.projection_dim
    if projection is not None and "text_projection" in tensors:
        projection = shape(tensors, "text_projection", 2, where)[1]
    elif projection is not None:
        projection = shape(tensors, "text_projection.weight", 2, where)[0]
    return _text_encoder(known, vocabulary, inner[0], layers, projection)


def _text_encoder(known: TextEncoderConfig, vocabulary, inner: int, layers: int, projection: int | None):
    return dataclasses.replace(
        known,
        vocab_size=vocabulary[0],
        hidden_size=vocabulary[1],
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=max(1, vocabulary[1] // HEAD_SIZE),
        projection_dim=projection,
        eos_token_id=min(known.eos_token_id, vocabulary[0] - 1),
    )


def unet(tensors: Source, where: str, known: UNetConfig) -> UNetConfig:
    """The UNet's sizes: one block after the other until all are seen."""
    first = shape(tensors, "input_blocks.0.0.weight", 4, where)
    if first[1] != known.in_channels:
        what = LATENT_INPUTS.get(first[1], "another kind of model")
        raise InputError(f"{where}: the UNet takes {first[1]} channels: {what}; {SUPPORTED}")
    if "label_emb.weight" in tensors:
        raise InputError(f"{where}: the UNet takes a class label; {SUPPORTED}")
    channels, depths, layers = [], [], [0]
    for number in range(1, count(tensors, r"input_blocks\.(\d+)\..*")):
        if f"input_blocks.{number}.0.op.weight" in tensors:
            layers.append(0)
            continue
        width = shape(tensors, f"input_blocks.{number}.0.in_layers.2.weight", 4, where)[0]
        depth = count(tensors, rf"input_blocks\.{number}\.1\.transformer_blocks\.(\d+)\..*")
        if layers[-1] == 0:
            channels.append(width)
            depths.append(depth)
        if (width, depth) != (channels[-1], depths[-1]):
            raise InputError(f"{where}: {UNET}input_blocks.{number} is not like the one before; {SUPPORTED}")
        layers[-1] += 1
    if len(set(layers)) != 1 or not channels:
        raise InputError(f"{where}: the UNet's resolutions have {layers} blocks; {SUPPORTED}")
    attention = "middle_block.1.transformer_blocks.0.attn2.to_k.weight"
    one_size = known.num_attention_heads[0] == known.num_attention_heads[-1]
    pooled = known.pooled_dim
    if pooled is not None:
        added = shape(tensors, "label_emb.0.0.weight", 2, where)[1]
        pooled = added - TIME_IDS * known.addition_time_embed_dim
    return dataclasses.replace(
        known,
        out_channels=shape(tensors, "out.2.weight", 4, where)[0],
        block_out_channels=tuple(channels),
        layers_per_block=layers[0],
        transformer_layers=tuple(depths),
        mid_transformer_layers=count(tensors, r"middle_block\.1\.transformer_blocks\.(\d+)\..*"),
        num_attention_heads=tuple(
            known.num_attention_heads[0] if one_size else max(1, width // HEAD_SIZE) for width in channels
        ),
        cross_attention_dim=shape(tensors, attention, 2, where)[1],
        pooled_dim=pooled,
    )


def vae(tensors: Source, where: str, known: VAEConfig) -> VAEConfig:
    """The autoencoder's sizes."""
    latent = shape(tensors, "decoder.conv_in.weight", 4, where)[1]
    if latent != known.latent_channels:
        raise InputError(f"{where}: the VAE's latents have {latent} channels, expected {known.latent_channels}")
    blocks = count(tensors, r"encoder\.down\.(\d+)\..*")
    channels = [shape(tensors, f"encoder.down.{i}.block.0.conv1.weight", 4, where)[0] for i in range(blocks)]
    return dataclasses.replace(
        known,
        in_channels=shape(tensors, "encoder.conv_in.weight", 4, where)[1],
        out_channels=shape(tensors, "decoder.conv_out.weight", 4, where)[0],
        block_out_channels=tuple(channels),
        layers_per_block=count(tensors, r"encoder\.down\.0\.block\.(\d+)\..*"),
    )


def with_prediction(
    config: ModelConfig,
    names: Collection[str],
    metadata: Mapping[str, str],
    prefixes: Mapping[str, str],
    prediction_type: str | None,
) -> tuple[ModelConfig, list[str]]:
    """The config with what the UNet predicts, and notices about it.

    Weights do not show it. What counts, in this order: `prediction_type`; the marker keys `v_pred` and `ztsnr`; the
    header; the family's default. For Stable Diffusion 2.x that is v_prediction at 768 x 768, as diffusers takes it,
    but SD-Turbo, alone in its naming, predicts epsilon at 512.
    """
    turbo = config.family == "sd2" and prefixes["text_encoder"].startswith("conditioner.")
    marked = "v_prediction" if "v_pred" in names else PREDICTIONS.get(metadata.get("modelspec.prediction_type", ""))
    default = "epsilon" if turbo else config.scheduler.prediction_type
    chosen, notices = prediction_type or marked or default, []
    if prediction_type is not None and prediction_type != (marked or default):
        said = "the file says" if marked else "such files usually mean"
        notices.append(f"--prediction_type {prediction_type} is used, although {said} {marked or default}")
    elif config.family == "sd2" and prediction_type is None and marked is None:
        other = "v_prediction" if turbo else "epsilon"
        notices.append(
            f"the file does not say what it predicts; {default} is assumed; if pictures are noise, add "
            f"--prediction_type {other}"
        )
    zero_snr = "ztsnr" in names
    scheduler = dataclasses.replace(
        config.scheduler,
        class_name="EulerDiscreteScheduler" if turbo else config.scheduler.class_name,
        prediction_type=chosen,
        rescale_betas_zero_snr=zero_snr,
        # Only the last timestep is pure noise; other spacings would not start there.
        timestep_spacing="trailing" if zero_snr or turbo else config.scheduler.timestep_spacing,
    )
    if zero_snr:
        notices.append("the file is marked ztsnr: its noise schedule ends at pure noise, timesteps are trailing")
    size = 512 if config.family == "sd2" and chosen == "epsilon" else config.default_size
    defaults = few_steps(scheduler, config.unet) or config.defaults
    return dataclasses.replace(config, scheduler=scheduler, default_size=size, defaults=defaults), notices


def count(names: Collection[str], pattern: str) -> int:
    """How many blocks there are: the largest number that the pattern's group finds, plus one."""
    return max((int(match[1]) + 1 for name in names if (match := re.fullmatch(pattern, name))), default=0)


def shape(tensors: Source, name: str, rank: int, where: str) -> tuple[int, ...]:
    """The shape of a tensor that must be there with this rank."""
    if name not in tensors or len(tensors[name].shape) != rank or 0 in tensors[name].shape:
        found = list(tensors[name].shape) if name in tensors else "none"
        raise InputError(f"{where}: expected a tensor {name} of {rank} axes, found {found}")
    return tensors[name].shape
