"""Checkpoints in diffusers' layout: a folder per component, a config file beside the weights.

What may be in the folder, how its config files become a `ModelConfig`, and which of its files hold the tensors.
"""

import dataclasses
from pathlib import Path

from models.checkpoint import PICKLES, Tensor, read_safetensors, some
from models.config import (
    FAMILIES,
    Defaults,
    InputError,
    ModelConfig,
    SchedulerConfig,
    TextEncoderConfig,
    UNetConfig,
    VAEConfig,
    default_sampler,
    read_json,
)

WEIGHT_NAMES = {"text_encoder": "model", "unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}
KNOWN_COMPONENTS = {"text_encoder", "tokenizer", "unet", "vae", "scheduler"}
IGNORED_COMPONENTS = {"safety_checker", "feature_extractor"}


def check_folder(folder: Path) -> list[str]:
    """Refuse a folder that is no diffusers checkpoint; return what it holds that is not used.

    Raises:
        InputError: not a folder, a pickle or single file, components missing, or a component we do not build.
    """
    if folder.is_file():
        kind = "pickle files can run code and are not read" if folder.suffix in PICKLES else "single files are not read"
        raise InputError(f"{folder}: {kind}; expected a folder in diffusers' layout (model_index.json, unet/, ...)")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; expected a checkpoint in diffusers' layout")
    index = read_json(folder / "model_index.json")
    used = {name for name, value in index.items() if isinstance(value, list) and any(value)}
    unknown = sorted(used - KNOWN_COMPONENTS - IGNORED_COMPONENTS)
    if unknown:
        raise InputError(f"{folder / 'model_index.json'}: components not supported: {', '.join(unknown)}")
    missing = sorted(name for name in KNOWN_COMPONENTS if not (folder / name).is_dir())
    if missing:
        raise InputError(f"{folder}: expected the folders {', '.join(sorted(KNOWN_COMPONENTS))}; missing {missing}")
    return [f"{name}/" for name in sorted(IGNORED_COMPONENTS) if (folder / name).exists()]


def read_config(folder: Path) -> ModelConfig:
    """Read the sizes of a checkpoint in diffusers' folder layout.

    Args:
        folder: holds model_index.json and text_encoder/, unet/, vae/ and scheduler/ with their config files.

    Raises:
        InputError: a file is missing or is not JSON, or describes something this toolkit does not build.
    """
    index = read_json(folder / "model_index.json")
    if index.get("_class_name") != "StableDiffusionPipeline":
        raise InputError(
            f"{folder / 'model_index.json'}: expected _class_name StableDiffusionPipeline, found "
            f"{index.get('_class_name')!r}; text-to-image checkpoints of Stable Diffusion 1.x are supported"
        )
    family = FAMILIES["sd1"]
    vae = _vae(folder / "vae" / "config.json")
    scheduler = _scheduler(folder / "scheduler" / "scheduler_config.json")
    # In latents; diffusers also allows [height, width], which no Stable Diffusion 1.x checkpoint uses.
    sample_size = _Fields(folder / "unet" / "config.json").get("sample_size", int, family.default_size // 8)
    return ModelConfig(
        family=family.family,
        numerics=family.numerics,
        default_size=sample_size * vae.downscale,
        text_encoder=_text_encoder(folder / "text_encoder" / "config.json"),
        unet=_unet(folder / "unet" / "config.json"),
        vae=vae,
        scheduler=scheduler,
        defaults=_defaults(folder / "generation_config.json", scheduler, family.defaults),
    )


def read_weights(folder: Path, component: str, variant: str | None = None) -> dict[str, Tensor]:
    """The tensors of one component of a diffusers folder: one file, or shards listed by an index.json.

    Args:
        component: "text_encoder", "unet" or "vae".
        variant: file name infix to prefer, e.g. "fp16"; None prefers the plain file and falls back to fp16.

    Raises:
        InputError: no weights, only pickles, a missing shard, or a tensor in two shards.
    """
    directory, stem = folder / component, WEIGHT_NAMES[component]
    variants = ["", ".fp16"] if variant is None else [f".{variant}", ""]
    for infix in variants:
        single = directory / f"{stem}{infix}.safetensors"
        # Both spellings of a sharded variant's index occur.
        indexes = [directory / f"{stem}.safetensors.index{infix}.json"]
        indexes.append(directory / f"{stem}{infix}.safetensors.index.json")
        if single.exists():
            return read_safetensors(single)
        for index in indexes:
            if index.exists():
                return _read_shards(index)
    found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    pickles = [name for name in found if name.endswith(PICKLES)]
    if pickles:
        raise InputError(
            f"{directory / pickles[0]}: pickle files can run code and are not read; convert it with "
            "diffusers' save_pretrained(..., safe_serialization=True)"
        )
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


class _Fields:
    """One config file, read field by field; every complaint names the file and the key."""

    def __init__(self, path: Path):
        self.path, self.values = path, read_json(path)

    def get(self, key: str, kind, default=...):
        """The value of `key`, checked against `kind`; `default` where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            if default is ...:
                raise InputError(f"{self.path}: key {key!r} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InputError(f"{self.path}: {key} should be {kind.__name__}, found {value!r}")
        if kind is int and value < 0:
            raise InputError(f"{self.path}: {key} should be 0 or more, found {value}")
        return value

    def require(self, **expected):
        """Refuse a file that asks for something other than the only values this toolkit builds."""
        for key, allowed in expected.items():
            value = self.values.get(key)
            if value is not None and value not in allowed:
                wanted = " or ".join(repr(a) for a in allowed)
                raise InputError(f"{self.path}: {key} is {value!r}; supported: {wanted}")

    def absent(self, *keys: str):
        """Refuse a file that sets any of `keys` (absent, null and false mean 'not used')."""
        for key in keys:
            if self.values.get(key) not in (None, False):
                raise InputError(f"{self.path}: {key} = {self.values[key]!r} is not supported")

    def per_block(self, key: str, blocks: int, default=...) -> tuple[int, ...]:
        """An integer per resolution, written as one number or as a list."""
        value = self.values.get(key)
        if isinstance(value, list):
            if len(value) != blocks or not all(type(v) is int for v in value):
                raise InputError(f"{self.path}: {key} should be {blocks} integers, found {value!r}")
            return tuple(value)
        return (self.get(key, int, default),) * blocks

    def channels(self) -> tuple[int, ...]:
        """Channels per resolution; group normalisation must be able to divide them."""
        value, groups = self.get("block_out_channels", list), self.get("norm_num_groups", int)
        if not value or not all(type(v) is int and v > 0 and groups and v % groups == 0 for v in value):
            raise InputError(
                f"{self.path}: block_out_channels should be multiples of norm_num_groups, found {value!r} and {groups}"
            )
        return tuple(value)

    def divides(self, key: str, parts: tuple[int, ...], wholes: tuple[int, ...]) -> tuple[int, ...]:
        """`parts`, refused where one does not divide its whole."""
        if not all(part > 0 and whole % part == 0 for part, whole in zip(parts, wholes, strict=True)):
            raise InputError(f"{self.path}: {key} {list(parts)} should divide the channels {list(wholes)}")
        return parts


def _text_encoder(path: Path) -> TextEncoderConfig:
    fields = _Fields(path)
    fields.require(hidden_act=("quick_gelu", "gelu"), max_position_embeddings=(77,))
    hidden_size, heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
    return TextEncoderConfig(
        vocab_size=fields.get("vocab_size", int),
        max_position_embeddings=fields.get("max_position_embeddings", int),
        hidden_size=hidden_size,
        intermediate_size=fields.get("intermediate_size", int),
        num_hidden_layers=fields.get("num_hidden_layers", int),
        num_attention_heads=fields.divides("num_attention_heads", (heads,), (hidden_size,))[0],
        hidden_act=fields.get("hidden_act", str),
        layer_norm_eps=fields.get("layer_norm_eps", float),
    )


def _unet(path: Path) -> UNetConfig:
    fields = _Fields(path)
    fields.require(
        in_channels=(4,),
        out_channels=(4,),
        act_fn=("silu",),
        mid_block_type=("UNetMidBlock2DCrossAttn",),
        resnet_time_scale_shift=("default",),
        time_embedding_type=("positional",),
        attention_type=("default",),
        conv_in_kernel=(3,),
        conv_out_kernel=(3,),
        downsample_padding=(1,),
        mid_block_scale_factor=(1,),
        resnet_out_scale_factor=(1.0,),
    )
    fields.absent(
        *("class_embed_type", "addition_embed_type", "encoder_hid_dim", "encoder_hid_dim_type", "num_class_embeds"),
        *("time_cond_proj_dim", "time_embedding_dim", "time_embedding_act_fn", "timestep_post_act"),
        *("center_input_sample", "dual_cross_attention", "only_cross_attention", "resnet_skip_time_act"),
        *("cross_attention_norm", "mid_block_only_cross_attention", "class_embeddings_concat"),
        *("reverse_transformer_layers_per_block", "projection_class_embeddings_input_dim"),
    )
    channels = fields.channels()
    blocks = len(channels)
    down = fields.get("down_block_types", list)
    up = fields.get("up_block_types", list)
    plain = {"CrossAttnDownBlock2D": True, "DownBlock2D": False, "CrossAttnUpBlock2D": True, "UpBlock2D": False}
    if (
        len(down) != blocks
        or any(not isinstance(b, str) or b not in plain for b in down + up)
        or [plain[b] for b in up[::-1]] != [plain[b] for b in down]
    ):
        raise InputError(
            f"{path}: {blocks} block_out_channels need as many down_block_types of CrossAttnDownBlock2D or DownBlock2D "
            f"and up_block_types mirroring them, found {down} and {up}"
        )
    layers = fields.per_block("transformer_layers_per_block", blocks, 1)
    # diffusers keeps the number of heads under this misleading name (its issue 2011).
    heads_key = "num_attention_heads" if fields.values.get("num_attention_heads") else "attention_head_dim"
    return UNetConfig(
        in_channels=fields.get("in_channels", int),
        out_channels=fields.get("out_channels", int),
        block_out_channels=channels,
        layers_per_block=fields.get("layers_per_block", int),
        transformer_layers=tuple(n if plain[b] else 0 for n, b in zip(layers, down, strict=True)),
        mid_transformer_layers=layers[-1],
        num_attention_heads=fields.divides(heads_key, fields.per_block(heads_key, blocks), channels),
        cross_attention_dim=fields.get("cross_attention_dim", int),
        norm_num_groups=fields.get("norm_num_groups", int),
        norm_eps=fields.get("norm_eps", float),
        transformer_norm_eps=1e-6,
        geglu_act="gelu",
        flip_sin_to_cos=fields.get("flip_sin_to_cos", bool),
        freq_shift=fields.get("freq_shift", int),
    )


def _vae(path: Path) -> VAEConfig:
    fields = _Fields(path)
    fields.require(
        act_fn=("silu",),
        latent_channels=(4,),
        mid_block_add_attention=(True,),
        use_quant_conv=(True,),
        use_post_quant_conv=(True,),
    )
    fields.absent("shift_factor", "latents_mean", "latents_std")
    channels = fields.channels()
    fields.require(
        down_block_types=(["DownEncoderBlock2D"] * len(channels),),
        up_block_types=(["UpDecoderBlock2D"] * len(channels),),
    )
    return VAEConfig(
        in_channels=fields.get("in_channels", int),
        out_channels=fields.get("out_channels", int),
        latent_channels=fields.get("latent_channels", int),
        block_out_channels=channels,
        layers_per_block=fields.get("layers_per_block", int),
        norm_num_groups=fields.get("norm_num_groups", int),
        norm_eps=1e-6,
        # Stable Diffusion 1.x's early config files lack the key; diffusers' default is their value.
        scaling_factor=fields.get("scaling_factor", float, 0.18215),
        force_upcast=fields.get("force_upcast", bool, True),
    )


def _scheduler(path: Path) -> SchedulerConfig:
    fields = _Fields(path)
    fields.require(
        beta_schedule=("scaled_linear", "linear"),
        prediction_type=("epsilon", "v_prediction"),
        timestep_spacing=("leading", "trailing", "linspace"),
        final_sigmas_type=("zero", "sigma_min"),
        algorithm_type=("dpmsolver++", "sde-dpmsolver++", "deis"),
        solver_order=(1, 2, 3),
        solver_type=("midpoint", "heun", "logrho", "bh1", "bh2"),
        # The rest of what changes the numbers has one supported value.
        interpolation_type=("linear",),
        timestep_type=("discrete",),
        skip_prk_steps=(True,),
        predict_x0=(True,),
        disable_corrector=([],),
        lambda_min_clipped=(-float("inf"),),
    )
    # Not linear in the model's output, or another noise schedule: refused by name instead of drawn wrongly.
    fields.absent("clip_sample", "thresholding", "rescale_betas_zero_snr", "trained_betas", "solver_p")
    fields.absent("use_beta_sigmas", "use_lu_lambdas", "use_flow_sigmas", "use_dynamic_shifting")
    fields.absent("sigma_min", "sigma_max", "shift_terminal")
    karras, exponential = (fields.get(f"use_{name}_sigmas", bool, False) for name in ("karras", "exponential"))
    if karras and exponential:
        raise InputError(f"{path}: use_karras_sigmas and use_exponential_sigmas exclude each other")
    return SchedulerConfig(
        class_name=fields.get("_class_name", str),
        num_train_timesteps=fields.get("num_train_timesteps", int),
        beta_schedule=fields.get("beta_schedule", str),
        beta_start=fields.get("beta_start", float),
        beta_end=fields.get("beta_end", float),
        prediction_type=fields.get("prediction_type", str, "epsilon"),
        timestep_spacing=fields.get("timestep_spacing", str, None),
        steps_offset=fields.get("steps_offset", int, None),
        set_alpha_to_one=fields.get("set_alpha_to_one", bool, None),
        final_sigmas_type=fields.get("final_sigmas_type", str, None),
        sigma_schedule="karras" if karras else "exponential" if exponential else "uniform",
        algorithm_type=fields.get("algorithm_type", str, None),
        solver_order=fields.get("solver_order", int, None),
        solver_type=fields.get("solver_type", str, None),
        lower_order_final=fields.get("lower_order_final", bool, None),
        euler_at_final=fields.get("euler_at_final", bool, None),
        original_inference_steps=fields.get("original_inference_steps", int, None),
        timestep_scaling=fields.get("timestep_scaling", float, None),
    )


def _defaults(path: Path, scheduler: SchedulerConfig, family: Defaults) -> Defaults:
    """A checkpoint's own generation_config.json goes first, then its scheduler's class, then its family."""
    own = dataclasses.replace(family, sampler=default_sampler(scheduler)[0])
    if not path.exists():
        return own
    fields = _Fields(path)
    return Defaults(
        sampler=fields.get("sampler", str, own.sampler),
        num_steps=fields.get("num_inference_steps", int, own.num_steps),
        guidance_scale=fields.get("guidance_scale", float, own.guidance_scale),
    )
