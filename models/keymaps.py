"""How tensors are called in each checkpoint format: one table per format, data only.

A rule is (pattern, target, transform). The pattern must match a source name completely; exactly one rule
matches each name. The target is our variable name, LAYER.VARIABLE. Transforms are a closed set:

    same     the array as it is
    dense    [out, in] to [in, out]; a 1x1 convolution [out, in, 1, 1] counts as the same layer
    conv     [out, in, height, width] to [height, width, in, out]
"""

import dataclasses
import re

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


DIFFUSERS: dict[str, KeyMap] = {
    "text_encoder": KeyMap(
        rules=[
            *NORMS,
            (r"(embeddings\.(?:token|position)_embedding)\.weight", r"\1.embeddings", "same"),
            (r"(.*\.(?:[qkv]_proj|out_proj|fc[12]))\.weight", r"\1.kernel", "dense"),
            (r"(.*\.(?:[qkv]_proj|out_proj|fc[12]))\.bias", r"\1.bias", "same"),
        ],
        ignored=(r"embeddings\.position_ids",),
        # transformers 5 dropped it in memory and, in some files, on disk.
        optional_prefix="text_model.",
    ),
    "unet": KeyMap(
        rules=[
            *NORMS,
            *CONVS,
            (r"(.*\.(?:to_[qkv]|to_out\.0|proj_in|proj_out|proj|net\.2))\.weight", r"\1.kernel", "dense"),
            (r"(.*\.(?:to_out\.0|proj_in|proj_out|proj|net\.2))\.bias", r"\1.bias", "same"),
            (r"(.*\.(?:linear_[12]|time_emb_proj))\.weight", r"\1.kernel", "dense"),
            (r"(.*\.(?:linear_[12]|time_emb_proj))\.bias", r"\1.bias", "same"),
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


def target(name: str, rules: list[Rule]) -> tuple[str, str] | None:
    """Our name and the transform for a source name; None when no rule matches.

    Raises ValueError when two rules match: the table is wrong, not the file.
    """
    found = [(match, rule) for rule in rules if (match := re.fullmatch(rule[0], name))]
    if len(found) > 1:
        raise ValueError(f"{name} matches {len(found)} rules: {[rule[0] for _, rule in found]}")
    return (found[0][0].expand(found[0][1][1]), found[0][1][2]) if found else None
