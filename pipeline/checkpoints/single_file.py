"""Single files in the original naming (ldm's for Stable Diffusion 1.x and 2.x, sgm's for XL), read as diffusers' names.

What model a file holds is found from its keys and shapes, never from its name. Its tensors get the names that
diffusers gives them, so that everything after this module knows one naming; nothing is read here.
"""

import dataclasses
import re
from collections.abc import Mapping

from models.config import ModelConfig, TextEncoderConfig, UNetConfig, VAEConfig
from models.errors import InputError
from models.families import FAMILIES
from pipeline.checkpoints import single_file_config
from pipeline.checkpoints.loader import Source, Tensor, some
from pipeline.checkpoints.single_file_config import UNET, VAE

AVERAGED = "model_ema."
# OpenCLIP's encoder of Stable Diffusion 2.x has a layer more than is used; diffusers' has not.
LAST_LAYER_OF_SD2 = 23

# What carries no weights of these networks, or none that are used. It is reported.
IGNORED = (
    r"(?:sqrt_|log_)?(?:one_minus_|recip_|recipm1_)?(?:alphas_cumprod|alphas_cumprod_prev|betas)",
    r"posterior_(?:variance|log_variance_clipped|mean_coef[12])",
    *(r"lvlb_weights", r"logvar", r"scale_factor", r"global_step", r"denoiser\.sigmas"),
    *(r"v_pred", r"ztsnr"),  # read by their presence
    rf"{re.escape(AVERAGED)}(?:decay|num_updates)",
    rf"{re.escape(VAE)}(?:loss|model_ema)\..*",
    r"(?:cond_stage_model|conditioner\.embedders\.\d)\.(?:model\.)?logit_scale",
    r"(?:cond_stage_model|conditioner\.embedders\.0)\.transformer\.(?:text_model\.)?embeddings\.position_ids",
    r"(?:cond_stage_model|conditioner\.embedders\.0)\.transformer\.text_projection\.weight",
)
_IGNORED = re.compile("|".join(IGNORED))

# Layers of blocks: the original's name -> diffusers'. What is not listed does not belong there.
RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_VAE_RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")} | {"nin_shortcut": "conv_shortcut"}
# Files that were converted back from diffusers hold its names, before and after 0.14, among the original's.
_VAE_ATTENTION = {
    **dict.fromkeys(("norm", "group_norm"), "group_norm"),
    **dict.fromkeys(("q", "to_q", "query"), "to_q"),
    **dict.fromkeys(("k", "to_k", "key"), "to_k"),
    **dict.fromkeys(("v", "to_v", "value"), "to_v"),
    **dict.fromkeys(("proj_out", "to_out.0", "proj_attn"), "to_out.0"),
}
_OPEN_CLIP_LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
# Prefix of names -> (diffusers' prefix, the names of the layers below it; None: the same ones).
Table = Mapping[str, tuple[str, Mapping[str, str] | None]]
# The UNet's layers outside its numbered blocks.
UNET_OUTSIDE: Table = {
    "time_embed.0": ("time_embedding.linear_1", None),
    "time_embed.2": ("time_embedding.linear_2", None),
    "label_emb.0.0": ("add_embedding.linear_1", None),
    "label_emb.0.2": ("add_embedding.linear_2", None),
    "input_blocks.0.0": ("conv_in", None),
    "middle_block.0": ("mid_block.resnets.0", RESNET),
    "middle_block.1": ("mid_block.attentions.0", None),
    "middle_block.2": ("mid_block.resnets.1", RESNET),
    "out.0": ("conv_norm_out", None),
    "out.2": ("conv_out", None),
}


@dataclasses.dataclass(frozen=True)
class SingleFile:
    """A whole checkpoint from one file."""

    config: ModelConfig
    tensors: dict[str, Source]  # component -> diffusers' name -> tensor
    ignored: list[str]  # names; many of a kind in one entry with their number
    notices: list[str]  # lines for the user: what was assumed


def read(
    tensors: Source,
    where: str,
    ema: bool = False,
    prediction_type: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> SingleFile:
    """Sort a single file's tensors into components under diffusers' names.

    Args:
        tensors: all of the file's.
        where: what the file is called in messages.
        ema: take the UNet's averaged copies instead of its plain weights.
        prediction_type: "epsilon" or "v_prediction"; None: what the file says, else its family's.
        metadata: the text in the file's header.

    Raises:
        InputError: another kind of model, by its name; parts missing or of different models; no averaged copies; or
            tensors that are neither used nor known to carry no weights, all of them.
    """
    family, prefixes = single_file_config.find_family(tensors, where)
    ignored = dict.fromkeys(name for name in tensors if _IGNORED.fullmatch(name))
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    kept, unused = _choose_copies(kept, where, ema)
    prefixes = {**prefixes, "unet": UNET, "vae": VAE}
    components = {component: _below(kept, prefix) for component, prefix in prefixes.items()}
    if family == "sd2":
        last = rf"transformer\.resblocks\.{LAST_LAYER_OF_SD2}\..*|text_projection(?:\.weight)?"
        found = components["text_encoder"]
        unused += [prefixes["text_encoder"] + name for name in found if re.fullmatch(last, name)]
        components["text_encoder"] = {name: t for name, t in found.items() if not re.fullmatch(last, name)}
    config = single_file_config.config_of(family, components, where)
    config, notices = single_file_config.with_prediction(config, tensors, metadata or {}, prefixes, prediction_type)
    tables = {"unet": unet_table(config.unet), "vae": vae_table(config.vae)}
    unknown = [name for name in kept if not name.startswith(tuple(prefixes.values()))]
    for component, prefix in prefixes.items():
        # Stable Diffusion 1.x and XL hold transformers' own encoder, whose names diffusers keeps.
        if not prefix.endswith(".transformer."):
            table = tables.get(component) or open_clip_table(getattr(config, component))
            components[component], strange = rename(components[component], table)
            unknown += [prefix + name for name in strange]
    if unknown:
        raise InputError(f"{where}: {len(unknown)} tensors that are not known: {some(unknown)}")
    return SingleFile(config, components, [*ignored, *unused], notices)


def read_vae(tensors: Source, where: str) -> tuple[Source, VAEConfig]:
    """The autoencoder of a single file, or of one that holds nothing else, with or without its prefix.

    Returns:
        (diffusers' name -> tensor, config); its scaling_factor and force_upcast are Stable Diffusion 1.x's.

    Raises:
        InputError: no autoencoder, or tensors that do not belong to it.
    """
    found = _below(tensors, VAE) or dict(tensors)
    found = {name: t for name, t in found.items() if not re.fullmatch(r"(?:loss|model_ema)\..*", name)}
    config = single_file_config.vae(found, where, FAMILIES["sd1"].vae)
    renamed, unknown = rename(found, vae_table(config))
    if unknown:
        raise InputError(f"{where}: {len(unknown)} tensors that are not a VAE's: {some(unknown)}")
    return renamed, config


def _choose_copies(tensors: Source, where: str, ema: bool) -> tuple[Source, list[str]]:
    """The tensors with one set of the UNet's weights, and what was left out, in one entry.

    The averaged copies are called as the plain weights, but without dots: only the plain ones tell what they are.
    """
    copies = {name: tensor for name, tensor in tensors.items() if name.startswith(AVERAGED)}
    kept = {name: tensor for name, tensor in tensors.items() if name not in copies}
    if not ema:
        return kept, [f"{AVERAGED}* ({len(copies)} tensors)"] if copies else []
    plain = [name for name in tensors if name.startswith(UNET)]
    found = {name: AVERAGED + name.removeprefix("model.").replace(".", "") for name in plain}
    missing = [copy for copy in found.values() if copy not in copies]
    if missing:
        what = "no averaged copies" if len(missing) == len(found) else f"no {some(missing)}"
        raise InputError(f"{where}: --ema takes {AVERAGED}*, found {what}; leave --ema out")
    averaged = {name: copies.pop(copy) for name, copy in found.items()}
    return kept | averaged | copies, [f"{UNET}* ({len(plain)} tensors)"]


def _below(tensors: Source, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def unet_table(config: UNetConfig) -> Table:
    """The UNet's names. The original counts resampling layers as blocks on the way down, diffusers does not."""
    table = dict(UNET_OUTSIDE)
    last, depths, number = len(config.block_out_channels) - 1, config.transformer_layers, 1
    for block, depth in enumerate(depths):
        for layer in range(config.layers_per_block):
            table[f"input_blocks.{number}.0"] = (f"down_blocks.{block}.resnets.{layer}", RESNET)
            if depth:
                table[f"input_blocks.{number}.1"] = (f"down_blocks.{block}.attentions.{layer}", None)
            number += 1
        if block < last:
            table[f"input_blocks.{number}.0.op"] = (f"down_blocks.{block}.downsamplers.0.conv", None)
            number += 1
    number = 0
    for block, depth in enumerate(reversed(depths)):
        for layer in range(config.layers_per_block + 1):
            table[f"output_blocks.{number}.0"] = (f"up_blocks.{block}.resnets.{layer}", RESNET)
            if depth:
                table[f"output_blocks.{number}.1"] = (f"up_blocks.{block}.attentions.{layer}", None)
            number += 1
        if block < last:
            place = 2 if depth else 1
            table[f"output_blocks.{number - 1}.{place}.conv"] = (f"up_blocks.{block}.upsamplers.0.conv", None)
    return table


def vae_table(config: VAEConfig) -> Table:
    """The autoencoder's names. The original numbers the decoder's resolutions from the finest, diffusers as it runs."""
    table = {name: (name, None) for name in ("quant_conv", "post_quant_conv")}
    for half in ("encoder", "decoder"):
        table[f"{half}.conv_in"] = (f"{half}.conv_in", None)
        table[f"{half}.norm_out"] = (f"{half}.conv_norm_out", None)
        table[f"{half}.conv_out"] = (f"{half}.conv_out", None)
        table[f"{half}.mid.block_1"] = (f"{half}.mid_block.resnets.0", _VAE_RESNET)
        table[f"{half}.mid.attn_1"] = (f"{half}.mid_block.attentions.0", _VAE_ATTENTION)
        table[f"{half}.mid.block_2"] = (f"{half}.mid_block.resnets.1", _VAE_RESNET)
    blocks = len(config.block_out_channels)
    for block in range(blocks):
        for layer in range(config.layers_per_block + 1):  # the encoder has one less
            down, up = f"encoder.down_blocks.{block}", f"decoder.up_blocks.{blocks - 1 - block}"
            table[f"encoder.down.{block}.block.{layer}"] = (f"{down}.resnets.{layer}", _VAE_RESNET)
            table[f"decoder.up.{block}.block.{layer}"] = (f"{up}.resnets.{layer}", _VAE_RESNET)
        table[f"encoder.down.{block}.downsample"] = (f"{down}.downsamplers.0", None)
        table[f"decoder.up.{block}.upsample"] = (f"{up}.upsamplers.0", None)
    return table


def open_clip_table(config: TextEncoderConfig) -> Table:
    """OpenCLIP's names, apart from those that `rename` takes apart or turns."""
    table = {
        "token_embedding": ("embeddings.token_embedding", None),
        "ln_final": ("final_layer_norm", None),
        "text_projection": ("text_projection", None),  # with ".weight": as diffusers stores it
    }
    for layer in range(config.num_hidden_layers):
        table[f"transformer.resblocks.{layer}"] = (f"encoder.layers.{layer}", _OPEN_CLIP_LAYER)
    return table


def rename(tensors: Source, table: Table) -> tuple[Source, list[str]]:
    """(diffusers' name -> tensor, names that the table does not have).

    OpenCLIP keeps queries, keys and values in one tensor, and a projection that is multiplied from the left; its
    position embedding has no layer.
    """
    renamed, unknown = {}, []
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind in ("in_proj_weight", "in_proj_bias"):
            target = _target(f"{layer}.out_proj.{kind.removeprefix('in_proj_')}", table)
            parts = {} if target is None else _thirds(tensor, target)
        elif name == "text_projection":
            parts = {"text_projection.weight": _turned(tensor)}
        elif name == "positional_embedding":
            parts = {"embeddings.position_embedding.weight": tensor}
        else:
            target = _target(name, table)
            parts = {} if target is None else {target: tensor}
        if not parts or parts.keys() & renamed.keys():
            unknown.append(name)
        renamed |= parts
    return renamed, unknown


def _target(name: str, table: Table) -> str | None:
    """diffusers' name: that of the longest prefix in the table, and of the layer below it."""
    for end in (match.start() for match in reversed(list(re.finditer(r"\.", name)))):
        if name[:end] in table:
            prefix, layers = table[name[:end]]
            layer, _, kind = name[end + 1 :].rpartition(".")
            if layers is not None and layer not in layers:
                return None
            return ".".join(filter(None, (prefix, layers[layer] if layers is not None else layer, kind)))
    return None


def _thirds(tensor: Tensor, target: str) -> dict[str, Tensor]:
    """Queries, keys and values, each a third of the rows."""
    if not tensor.shape or tensor.shape[0] % 3:
        return {}
    rows = tensor.shape[0] // 3

    def part(index: int) -> Tensor:
        span = slice(index * rows, (index + 1) * rows)
        return Tensor((rows, *tensor.shape[1:]), tensor.dtype, lambda: tensor.read()[span])

    return {target.replace("out_proj", f"{name}_proj"): part(i) for i, name in enumerate("qkv")}


def _turned(tensor: Tensor) -> Tensor:
    return Tensor(tensor.shape[::-1], tensor.dtype, lambda: tensor.read().T)
