"""LoRA merged into a checkpoint: W + weight * alpha / rank * up @ down (Hu et al. 2021, arXiv:2106.09685).

Merging acts on tensors that have not been read yet, by diffusers' names, so that loading stays strict and streaming.
The tables of names are made from the model's own: underscores in a key are never guessed back into dots.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from models.errors import InputError
from pipeline.checkpoints import single_file
from pipeline.checkpoints.loader import Tensor, read_metadata, read_safetensors, some, split_option
from pipeline.files import read_json

# What a key starts with. kohya writes lora_te1_ where there are two text encoders, diffusers' own converter always.
PREFIXES: dict[str, tuple[str, ...]] = {
    "unet": ("unet.", "", "base_model.model."),
    "text_encoder": ("text_encoder.", "", "base_model.model."),
    "text_encoder_2": ("text_encoder_2.",),
}
KOHYA_PREFIXES: dict[str, tuple[str, ...]] = {
    "unet": ("lora_unet_",),
    "text_encoder": ("lora_te_", "lora_te1_"),
    "text_encoder_2": ("lora_te2_",),
}
TWO_ENCODERS = ("lora_te2_", "text_encoder_2.")  # only models with two text encoders have these

# Other dotted names of a module: (pattern of diffusers' name, older name). Attention processors come first, of
# diffusers before 0.22; text encoders had the UNet's names then.
OLDER_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "unet": (
        (r"(.*\.attn\d)\.(to_[qkv])", r"\1.processor.\2_lora"),
        (r"(.*\.attn\d)\.to_out\.0", r"\1.processor.to_out_lora"),
    ),
    "text_encoder": (
        (r"(.*\.self_attn)\.([qkv])_proj", r"\1.to_\2_lora"),
        (r"(.*\.self_attn)\.out_proj", r"\1.to_out_lora"),
    ),
}
OLDER_NAMES["text_encoder_2"] = OLDER_NAMES["text_encoder"]

# What a key ends with: kohya's, peft's (with or without the adapter's name), diffusers' before peft.
PARTS: tuple[tuple[str, str], ...] = (
    (r"\.lora_down\.weight", "down"),
    (r"\.lora_up\.weight", "up"),
    (r"\.lora_A(?:\.[^.]+)?\.weight", "down"),
    (r"\.lora_B(?:\.[^.]+)?\.weight", "up"),
    (r"(?:\.lora|\.lora_linear_layer)?\.down\.weight", "down"),
    (r"(?:\.lora|\.lora_linear_layer)?\.up\.weight", "up"),
    (r"(?:\.lora|\.lora_linear_layer)?\.alpha", "alpha"),
)
# Keys of other methods: named, so that the message says more than "unknown".
UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (r".*\.(?:dora_scale|lora_magnitude_vector(?:\..*)?)", "DoRA"),
    (r".*\.lora_mid\.weight", "Tucker convolutions"),
    (r".*\.hada_\w+", "LoHa"),
    (r".*\.lokr_\w+", "LoKr"),
    (r".*\.(?:diff|diff_b)", "full differences"),
    (r".*\.lora_(?:A|B|up|down)(?:\.[^.]+)?\.bias", "biases"),
    (r".*\.lora_embedding_[AB](?:\..*)?", "embeddings"),
)

# diffusers' names -> CompVis', of layers within a residual block and of those outside numbered blocks.
_LDM_RESNET = {ours: theirs for theirs, ours in single_file.RESNET.items()}
_LDM_OUTSIDE = {ours: theirs for theirs, (ours, _) in single_file.UNET_OUTSIDE.items()}


@dataclasses.dataclass(frozen=True)
class Lora:
    """One LoRA file and how strongly it is applied."""

    path: Path
    weight: float
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, object]  # peft's configuration, where the file carries one; keys may start with COMPONENT.


@dataclasses.dataclass(frozen=True)
class _Update:
    """One module's W + scale * up @ down."""

    path: Path
    module: str
    down: Tensor  # [rank, in] or [rank, in, height, width]
    up: Tensor  # [out, rank] or [out, rank, 1, 1]
    scale: float


def parse(option: str) -> Lora:
    """A LoRA from FILE or FILE:WEIGHT. Raises InputError where the weight is no finite number, and as `read`."""
    path, text = split_option(option)
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise InputError(f"--lora {option}: expected FILE or FILE:WEIGHT with a number as weight, found {text!r}")
    return read(path, weight)


def read(path: Path, weight: float = 1.0) -> Lora:
    """A LoRA file, its tensors unread.

    Raises:
        InputError: not a .safetensors file; or peft's settings are damaged, missing beside peft's own file, or ask
            for another way of scaling.
    """
    tensors = read_safetensors(path)
    text = read_metadata(path).get("lora_adapter_metadata")
    settings = {}
    if text is not None:
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path}: its lora_adapter_metadata is not JSON ({error})") from error
        if not isinstance(settings, dict):
            raise InputError(f"{path}: its lora_adapter_metadata should be an object, found {type(settings).__name__}")
    elif any(key.startswith("base_model.model.") for key in tensors):
        # peft keeps alpha outside the file; without it the strength would be a guess.
        settings = read_json(path.with_name("adapter_config.json"))
    refused = [key for key in settings if key.rpartition(".")[2] in ("use_rslora", "use_dora") and settings[key]]
    if refused:
        raise InputError(
            f"{path}: its settings ask for {', '.join(refused)}, which is not supported; merge it with peft"
        )
    return Lora(path, weight, tensors, settings)


def merge(components: Mapping[str, Mapping[str, Tensor]], loras: Sequence[Lora]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a model with every LoRA added, in order, in float32.

    Args:
        components: "text_encoder", "unet" and others -> diffusers' name -> tensor.

    Returns:
        The same names. Tensors that change are float32; those that do not, and all where a weight is 0, are as given.

    Raises:
        InputError: keys that fit no module of the model, are of a method not supported, lack their other half, come
            twice, or have a shape that does not fit: all of one file in one message. Reading raises it for NaN.
    """
    merged = {component: dict(tensors) for component, tensors in components.items()}
    table = _stems(components)
    for lora in loras:
        updates = _updates(lora, components, table)
        for (component, name), update in updates.items():
            if lora.weight != 0:
                merged[component][name] = _added(merged[component][name], update)
    return merged


def _added(tensor: Tensor, update: _Update) -> Tensor:
    def read() -> np.ndarray:
        up, down = (part.read().astype(np.float32) for part in (update.up, update.down))
        delta = np.float32(update.scale) * (up.reshape(up.shape[:2]) @ down.reshape(len(down), -1))
        if not np.isfinite(delta).all():
            raise InputError(f"{update.path}: the update of {update.module} holds NaN or infinite values")
        return tensor.read().astype(np.float32) + delta.reshape(tensor.shape)

    return Tensor(tensor.shape, np.dtype(np.float32), read)


# === Names ===


def _stems(components: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[str, str]]:
    """Every way to spell every module: what stands before the suffix of a key -> (component, name of its tensor)."""
    table: dict[str, tuple[str, str]] = {}
    for component in components.keys() & PREFIXES.keys():
        modules = _modules(components[component])
        ldm = _ldm_names(modules) if component == "unet" else {}
        for module, name in modules.items():
            dotted = [module] + [re.sub(f"^{p}$", older, module) for p, older in OLDER_NAMES[component]]
            underscored = [module, ldm.get(module, module)]
            if component != "unet":
                # transformers 5 dropped this prefix; files from before have it.
                dotted += [f"text_model.{spelled}" for spelled in dotted]
                underscored.append(f"text_model.{module}")
            stems = {prefix + spelled for prefix in PREFIXES[component] for spelled in dotted}
            for prefix in KOHYA_PREFIXES[component]:
                stems |= {prefix + spelled.replace(".", "_") for spelled in underscored}
            for stem in stems:
                if table.setdefault(stem, (component, name)) != (component, name):
                    raise ValueError(f"{stem} is both {table[stem]} and {(component, name)}")
    return table


def _modules(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Linear and convolutional layers of one component: module -> name of its weight."""
    return {
        name.removesuffix(".weight").removeprefix("text_model."): name
        for name, tensor in tensors.items()
        if name.endswith(".weight") and len(tensor.shape) in (2, 4) and "embeddings." not in name
    }


def _ldm_names(modules: Iterable[str]) -> dict[str, str]:
    """diffusers' name -> CompVis' name of the UNet's modules; CompVis numbers the blocks of each half through."""
    layers: dict[tuple[str, int], set[int]] = {}
    for module in modules:
        if match := re.match(r"(down|up)_blocks\.(\d+)\.resnets\.(\d+)\.", module):
            layers.setdefault((match[1], int(match[2])), set()).add(int(match[3]))
    present = {".".join(module.split(".")[:3]) for module in modules}
    renamed, count = dict(_LDM_OUTSIDE), {"down": 1, "up": 0}
    for (half, block), numbers in sorted(layers.items()):
        ldm, ours = {"down": "input_blocks", "up": "output_blocks"}[half], f"{half}_blocks.{block}"
        for layer in sorted(numbers):
            renamed[f"{ours}.resnets.{layer}"] = f"{ldm}.{count[half]}.0"
            renamed[f"{ours}.attentions.{layer}"] = f"{ldm}.{count[half]}.1"
            count[half] += 1
        if half == "down" and f"{ours}.downsamplers" in present:
            renamed[f"{ours}.downsamplers.0.conv"] = f"{ldm}.{count[half]}.0.op"
            count[half] += 1
        elif half == "up":
            place = 1 + (f"{ours}.attentions" in present)
            renamed[f"{ours}.upsamplers.0.conv"] = f"{ldm}.{count[half] - 1}.{place}.conv"
    names = {}
    for module in modules:
        block = next((b for b in renamed if module == b or module.startswith(f"{b}.")), None)
        if block is not None:
            inside = module[len(block) + 1 :]
            names[module] = ".".join(filter(None, (renamed[block], _LDM_RESNET.get(inside, inside))))
    return names


# === One file against the model ===


def _updates(lora: Lora, components, table) -> dict[tuple[str, str], _Update]:
    """Every key of a file used, or one InputError: (component, name of the tensor) -> update."""
    foreign = [key for key in lora.tensors if key.startswith(TWO_ENCODERS)]
    if foreign and "text_encoder_2" not in components:
        raise InputError(
            f"{lora.path}: made for a model with two text encoders (Stable Diffusion XL), this one has one; found "
            f"{some(foreign, 3)}"
        )
    found: dict[tuple[str, str], dict[str, str]] = {}
    problems: dict[str, list[str]] = {}
    for key in lora.tensors:
        method = next((method for pattern, method in UNSUPPORTED if re.fullmatch(pattern, key)), None)
        target, part = _find(key, table)
        if method is not None:
            problems.setdefault(f"of {method}, which is not supported", []).append(key)
        elif target is None:
            problems.setdefault("fitting no module of this model", []).append(key)
        elif part in found.setdefault(target, {}):
            problems.setdefault("given twice", []).append(f"{found[target][part]} and {key}")
        else:
            found[target][part] = key
    updates = {}
    for (component, name), keys in found.items():
        if "up" not in keys or "down" not in keys:
            problems.setdefault("without its other half", []).extend(keys.values())
            continue
        up, down = lora.tensors[keys["up"]], lora.tensors[keys["down"]]
        if not _fits(up, down, components[component][name]):
            found_shapes = f"{keys['up']} {list(up.shape)} and {keys['down']} {list(down.shape)}"
            expected = list(components[component][name].shape)
            problems.setdefault("not fitting in shape", []).append(f"{found_shapes} for {name} {expected}")
            continue
        module, rank = name.removesuffix(".weight"), down.shape[0]
        scale = lora.weight * _alpha(lora, keys.get("alpha"), component, module, rank) / rank
        updates[component, name] = _Update(lora.path, f"{component}.{module}", down, up, scale)
    if problems or not updates:
        lists = "; ".join(f"{len(keys)} keys {what}: {some(keys)}" for what, keys in problems.items())
        raise InputError(
            f"{lora.path}: does not fit this model: {lists or 'it holds no LoRA'}; expected a LoRA made for its family"
        )
    return updates


def _find(key: str, table: Mapping[str, tuple[str, str]]) -> tuple[tuple[str, str] | None, str]:
    """Which module's part a key is: ((component, name of the tensor), part); (None, "") where it is none."""
    for pattern, part in PARTS:
        match = re.fullmatch(rf"(.+?){pattern}", key)
        if match and match[1] in table:
            return table[match[1]], part
    return None, ""


def _fits(up: Tensor, down: Tensor, weight: Tensor) -> bool:
    """Whether up @ down has the shape of a weight; a 1x1 convolution counts as a linear layer."""
    if any(len(t.shape) not in (2, 4) or t.dtype.kind not in "fV" for t in (up, down)):
        return False
    out, *inputs = weight.shape
    return up.shape == (out, down.shape[0], *up.shape[2:]) and (
        down.shape[0] > 0 and set(up.shape[2:]) <= {1} and _linear(down.shape[1:]) == _linear(tuple(inputs))
    )


def _linear(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:1] if shape[1:] == (1, 1) else shape


def _alpha(lora: Lora, key: str | None, component: str, module: str, rank: int) -> float:
    """A module's alpha: its own key, else peft's settings, else its rank."""
    if key is not None:
        tensor = lora.tensors[key]
        alpha = float(tensor.read().reshape(-1)[0]) if math.prod(tensor.shape) == 1 else math.nan
    else:
        settings = {name.removeprefix(f"{component}."): value for name, value in lora.settings.items()}
        alpha = settings.get("lora_alpha", rank)
        patterns = settings.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise InputError(f"{lora.path}: alpha_pattern should be an object, found {type(patterns).__name__}")
        for pattern, value in patterns.items():
            # peft takes regular expressions; what it and diffusers write are names or ends of names.
            if not re.fullmatch(r"\^?[\w.]+", pattern):
                raise InputError(f"{lora.path}: alpha_pattern {pattern!r} is not the name of a module")
            name = pattern.removeprefix("^").removeprefix("text_model.")
            if f".{module}".endswith(f".{name}"):
                alpha = value
                break
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise InputError(f"{lora.path}: {key or f'lora_alpha of {module}'} should be one finite number, found {alpha}")
    return float(alpha)
