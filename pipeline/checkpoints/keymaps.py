"""How tensors are called in each checkpoint format: one table per format, data only.

A rule is (pattern, target, transform). The pattern must match a source name completely; exactly one rule
matches each name. The target is our variable name, LAYER.VARIABLE. Transforms are a closed set:

    same     the array as it is
    dense    [out, in] to [in, out]; a 1x1 convolution [out, in, 1, 1] counts as the same layer
    conv     [out, in, height, width] to [height, width, in, out]
    squeeze  [1, 1, in, out] to [in, out]: a 1x1 convolution already in Keras' layout counts as the dense layer; so
             does [in, out] itself
"""

import dataclasses
import re

from models.config import ModelConfig

Rule = tuple[str, str, str]

_CONV = r"((?:.*\.)?(?:post_)?(?:quant_)?conv(?!_norm)\w*)"
_NORM = r"((?:.*\.)?(?:\w+_)?(?:layer_)?norm(?:\d|_out)?)"

NORMS: list[Rule] = [
    (_NORM + r"\.weight", r"\1.gamma", "same"),
    (_NORM + r"\.bias", r"\1.beta", "same"),
]
CONVS: list[Rule] = [
    (_CONV + r"\.weight", r"\1.kernel", "conv"),
    (_CONV + r"\.bias", r"\1.bias", "same"),
]


@dataclasses.dataclass(frozen=True)
class KeyMap:
    """The names of one network in one checkpoint format."""

    rules: list[Rule]
    ignored: tuple[str, ...] = ()  # patterns of names that carry no weights; they are reported
    optional_prefix: str = ""  # on every name or on none
    beside_prefix: tuple[str, ...] = ()  # patterns of names that never have it


DIFFUSERS: dict[str, KeyMap] = {
    "text_encoder": KeyMap(
        rules=[
            *NORMS,
            (r"(embeddings\.(?:token|position)_embedding)\.weight", r"\1.embeddings", "same"),
            (r"(.*\.(?:[qkv]_proj|out_proj|fc[12]))\.weight", r"\1.kernel", "dense"),
            (r"(.*\.(?:[qkv]_proj|out_proj|fc[12]))\.bias", r"\1.bias", "same"),
            (r"(text_projection)\.weight", r"\1.kernel", "dense"),
        ],
        ignored=(r"embeddings\.position_ids",),
        # transformers 5 dropped it in memory and, in some files, on disk.
        optional_prefix="text_model.",
        beside_prefix=(r"text_projection\.weight",),
    ),
    "unet": KeyMap(
        rules=[
            *NORMS,
            *CONVS,
            (r"(.*\.(?:to_[qkv]|to_out\.0|proj_in|proj_out|proj|net\.2))\.weight", r"\1.kernel", "dense"),
            (r"(.*\.(?:to_out\.0|proj_in|proj_out|proj|net\.2))\.bias", r"\1.bias", "same"),
            (r"(.*\.(?:linear_[12]|time_emb_proj))\.weight", r"\1.kernel", "dense"),
            (r"(.*\.(?:linear_[12]|time_emb_proj))\.bias", r"\1.bias", "same"),
            (r"(time_embedding\.cond_proj)\.weight", r"\1.kernel", "dense"),
        ],
    ),
    "vae": KeyMap(
        rules=[
            *NORMS,
            *CONVS,
            (r"(.*\.(?:to_[qkv]|to_out\.0))\.weight", r"\1.kernel", "dense"),
            (r"(.*\.(?:to_[qkv]|to_out\.0))\.bias", r"\1.bias", "same"),
            # Names from before diffusers 0.14.
            (r"(.*\.)query\.weight", r"\1to_q.kernel", "dense"),
            (r"(.*\.)query\.bias", r"\1to_q.bias", "same"),
            (r"(.*\.)key\.weight", r"\1to_k.kernel", "dense"),
            (r"(.*\.)key\.bias", r"\1to_k.bias", "same"),
            (r"(.*\.)value\.weight", r"\1to_v.kernel", "dense"),
            (r"(.*\.)value\.bias", r"\1to_v.bias", "same"),
            (r"(.*\.)proj_attn\.weight", r"\1to_out.0.kernel", "dense"),
            (r"(.*\.)proj_attn\.bias", r"\1to_out.0.bias", "same"),
        ],
    ),
}


# KerasCV 0.9's StableDiffusion. Keras numbers layers per process, so its variables have an order but no lasting
# names, and its weight files are read by that order too. These lists name the variables in that order.
_KERASCV_NORM, _KERASCV_LINEAR, _KERASCV_MATRIX = ("gamma", "beta"), ("kernel", "bias"), ("kernel",)
_KERASCV_RESNET = {
    "norm1": _KERASCV_NORM,
    "conv1": _KERASCV_LINEAR,
    "norm2": _KERASCV_NORM,
    "conv2": _KERASCV_LINEAR,
}
_KERASCV_TIME_RESNET = {
    "norm1": _KERASCV_NORM,
    "conv1": _KERASCV_LINEAR,
    "time_emb_proj": _KERASCV_LINEAR,
    "norm2": _KERASCV_NORM,
    "conv2": _KERASCV_LINEAR,
}
_KERASCV_SHORTCUT = {"conv_shortcut": _KERASCV_LINEAR}
_KERASCV_TRANSFORMER = {
    "norm": _KERASCV_NORM,
    "proj_in": _KERASCV_LINEAR,
    "transformer_blocks.0.norm1": _KERASCV_NORM,
    **{f"transformer_blocks.0.attn1.{name}": _KERASCV_MATRIX for name in ("to_q", "to_k", "to_v")},
    "transformer_blocks.0.attn1.to_out.0": _KERASCV_LINEAR,
    "transformer_blocks.0.norm2": _KERASCV_NORM,
    **{f"transformer_blocks.0.attn2.{name}": _KERASCV_MATRIX for name in ("to_q", "to_k", "to_v")},
    "transformer_blocks.0.attn2.to_out.0": _KERASCV_LINEAR,
    "transformer_blocks.0.norm3": _KERASCV_NORM,
    "transformer_blocks.0.ff.net.0.proj": _KERASCV_LINEAR,
    "transformer_blocks.0.ff.net.2": _KERASCV_LINEAR,
    "proj_out": _KERASCV_LINEAR,
}
_KERASCV_ENCODER_LAYER = {
    "layer_norm1": _KERASCV_NORM,
    **{f"self_attn.{name}": _KERASCV_LINEAR for name in ("q_proj", "k_proj", "v_proj", "out_proj")},
    "layer_norm2": _KERASCV_NORM,
    "mlp.fc1": _KERASCV_LINEAR,
    "mlp.fc2": _KERASCV_LINEAR,
}


def _kerascv(prefix: str, layers: dict[str, tuple[str, ...]]) -> list[str]:
    return [f"{prefix}{layer}.{variable}" for layer, variables in layers.items() for variable in variables]


def _kerascv_unet_block(name: str, layers: int, shortcuts: int, attention: bool, resample: str | None) -> list[str]:
    """One resolution; its first `shortcuts` residual blocks change the number of channels."""
    names = []
    for i in range(layers):
        names += _kerascv(f"{name}.resnets.{i}.", _KERASCV_TIME_RESNET | (_KERASCV_SHORTCUT if i < shortcuts else {}))
        if attention:
            names += _kerascv(f"{name}.attentions.{i}.", _KERASCV_TRANSFORMER)
    return names + (_kerascv(f"{name}.{resample}.0.", {"conv": _KERASCV_LINEAR}) if resample else [])


def _kerascv_vae_block(name: str, layers: int, shortcuts: int, resample: str | None) -> list[str]:
    names = []
    for i in range(layers):
        names += _kerascv(f"{name}.resnets.{i}.", _KERASCV_RESNET | (_KERASCV_SHORTCUT if i < shortcuts else {}))
    return names + (_kerascv(f"{name}.{resample}.0.", {"conv": _KERASCV_LINEAR}) if resample else [])


def _kerascv_vae_middle(half: str) -> list[str]:
    attention = f"{half}.mid_block.attentions.0."
    return [
        *_kerascv(f"{half}.mid_block.resnets.0.", _KERASCV_RESNET),
        *_kerascv(attention, {"group_norm": _KERASCV_NORM}),
        *_kerascv(attention, dict.fromkeys(("to_q", "to_k", "to_v", "to_out.0"), _KERASCV_LINEAR)),
        *_kerascv(f"{half}.mid_block.resnets.1.", _KERASCV_RESNET),
    ]


def _kerascv_text_encoder(layers: int) -> list[str]:
    return [
        "embeddings.token_embedding.embeddings",
        "embeddings.position_embedding.embeddings",
        *[name for i in range(layers) for name in _kerascv(f"encoder.layers.{i}.", _KERASCV_ENCODER_LAYER)],
        *_kerascv("", {"final_layer_norm": _KERASCV_NORM}),
    ]


KERASCV_NAMES: dict[str, list[str]] = {
    "text_encoder": _kerascv_text_encoder(12),
    "unet": [
        *_kerascv("", {"time_embedding.linear_1": _KERASCV_LINEAR}),
        *_kerascv("", {"conv_in": _KERASCV_LINEAR}),
        *_kerascv("", {"time_embedding.linear_2": _KERASCV_LINEAR}),
        *_kerascv_unet_block("down_blocks.0", 2, shortcuts=0, attention=True, resample="downsamplers"),
        *_kerascv_unet_block("down_blocks.1", 2, shortcuts=1, attention=True, resample="downsamplers"),
        *_kerascv_unet_block("down_blocks.2", 2, shortcuts=1, attention=True, resample="downsamplers"),
        *_kerascv_unet_block("down_blocks.3", 2, shortcuts=0, attention=False, resample=None),
        *_kerascv("mid_block.resnets.0.", _KERASCV_TIME_RESNET),
        *_kerascv("mid_block.attentions.0.", _KERASCV_TRANSFORMER),
        *_kerascv("mid_block.resnets.1.", _KERASCV_TIME_RESNET),
        *_kerascv_unet_block("up_blocks.0", 3, shortcuts=3, attention=False, resample="upsamplers"),
        *_kerascv_unet_block("up_blocks.1", 3, shortcuts=3, attention=True, resample="upsamplers"),
        *_kerascv_unet_block("up_blocks.2", 3, shortcuts=3, attention=True, resample="upsamplers"),
        *_kerascv_unet_block("up_blocks.3", 3, shortcuts=3, attention=True, resample=None),
        *_kerascv("", {"conv_norm_out": _KERASCV_NORM, "conv_out": _KERASCV_LINEAR}),
    ],
    # The decoder only: KerasCV's text-to-image has no VAE encoder.
    "vae": [
        *_kerascv("", {"post_quant_conv": _KERASCV_LINEAR, "decoder.conv_in": _KERASCV_LINEAR}),
        *_kerascv_vae_middle("decoder"),
        *_kerascv_vae_block("decoder.up_blocks.0", 3, shortcuts=0, resample="upsamplers"),
        *_kerascv_vae_block("decoder.up_blocks.1", 3, shortcuts=0, resample="upsamplers"),
        *_kerascv_vae_block("decoder.up_blocks.2", 3, shortcuts=1, resample="upsamplers"),
        *_kerascv_vae_block("decoder.up_blocks.3", 3, shortcuts=1, resample=None),
        *_kerascv("", {"decoder.conv_norm_out": _KERASCV_NORM, "decoder.conv_out": _KERASCV_LINEAR}),
    ],
    "vae_encoder": [
        *_kerascv("", {"encoder.conv_in": _KERASCV_LINEAR}),
        *_kerascv_vae_block("encoder.down_blocks.0", 2, shortcuts=0, resample="downsamplers"),
        *_kerascv_vae_block("encoder.down_blocks.1", 2, shortcuts=1, resample="downsamplers"),
        *_kerascv_vae_block("encoder.down_blocks.2", 2, shortcuts=1, resample="downsamplers"),
        *_kerascv_vae_block("encoder.down_blocks.3", 2, shortcuts=0, resample=None),
        *_kerascv_vae_middle("encoder"),
        *_kerascv("", {"encoder.conv_norm_out": _KERASCV_NORM, "encoder.conv_out": _KERASCV_LINEAR}),
        *_kerascv("", {"quant_conv": _KERASCV_LINEAR}),
    ],
}
_KERASCV_TEXT_ENCODER_2 = _kerascv_text_encoder(23)


def kerascv_names(component: str, family: str) -> list[str]:
    """The names of a network's weights in KerasCV's order; its Stable Diffusion 2.x has a deeper text encoder."""
    return _KERASCV_TEXT_ENCODER_2 if (component, family) == ("text_encoder", "sd2") else KERASCV_NAMES[component]


DIFFUSERS["text_encoder_2"] = DIFFUSERS["text_encoder"]


def of_component(component: str, config: ModelConfig) -> KeyMap:
    """diffusers' table for one component; a text encoder's layers that nothing depends on are ignored."""
    keymap = DIFFUSERS[component]
    if component not in ("text_encoder", "text_encoder_2"):
        return keymap
    encoder = getattr(config, component)
    unused = "|".join(map(str, range(encoder.built_layers, encoder.num_hidden_layers)))
    ignored = [rf"encoder\.layers\.(?:{unused})\..*"] if unused else []
    if not encoder.context_norm and encoder.projection_dim is None:
        ignored.append(r"final_layer_norm\.(?:weight|bias)")
    if encoder.projection_dim is None:
        ignored.append(r"text_projection\.weight")
    return dataclasses.replace(keymap, ignored=(*keymap.ignored, *ignored))


_POINTWISE = r".*\.(?:attentions\.\d+\.(?:proj_in|proj_out)|mid_block\.attentions\.0\.to_(?:[qkv]|out\.0))\.kernel"

KERASCV: dict[str, KeyMap] = {
    component: KeyMap(rules=[(f"({_POINTWISE})", r"\1", "squeeze"), (rf"((?!{_POINTWISE}).*)", r"\1", "same")])
    for component in KERASCV_NAMES
}


def target(name: str, rules: list[Rule]) -> tuple[str, str] | None:
    """Our name and the transform for a source name; None when no rule matches.

    Raises ValueError when two rules match: the table is wrong, not the file.
    """
    found = [(match, rule) for rule in rules if (match := re.fullmatch(rule[0], name))]
    if len(found) > 1:
        raise ValueError(f"{name} matches {len(found)} rules: {[rule[0] for _, rule in found]}")
    return (found[0][0].expand(found[0][1][1]), found[0][1][2]) if found else None
