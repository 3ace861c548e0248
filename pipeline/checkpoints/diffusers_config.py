"""The config files of diffusers' components, read into the dataclasses of `models.config`."""

import dataclasses
from pathlib import Path

from models.config import Defaults, ModelConfig, SchedulerConfig, TextEncoderConfig, UNetConfig, VAEConfig
from models.errors import InputError
from models.families import few_steps
from pipeline.files import read_json
from pipeline.sampling.samplers import default_sampler

TIME_IDS = 6  # original height and width, crop's top and left, target height and width
# Channels of the UNet's input other than a latent's 4.
LATENT_INPUTS = {
    5: "a depth-to-image model",
    7: "an upscaler",
    8: "an InstructPix2Pix model",
    9: "an inpainting model",
}


class Fields:
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


def text_encoder(path: Path, penultimate: bool = False, pooled: bool = False) -> TextEncoderConfig:
    """One text encoder.

    Args:
        penultimate: the context is the last layer's input, not normalised, as Stable Diffusion XL takes it.
        pooled: it gives the pooled text vector too.
    """
    fields = Fields(path)
    fields.require(hidden_act=("quick_gelu", "gelu"), max_position_embeddings=(77,))
    hidden_size, heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
    layers, vocab_size = fields.get("num_hidden_layers", int), fields.get("vocab_size", int)
    if layers < 1 + penultimate:
        raise InputError(f"{path}: num_hidden_layers is {layers}, expected at least {1 + penultimate}")
    eos = fields.get("eos_token_id", int, 49407)
    return TextEncoderConfig(
        vocab_size=vocab_size,
        max_position_embeddings=fields.get("max_position_embeddings", int),
        hidden_size=hidden_size,
        intermediate_size=fields.get("intermediate_size", int),
        num_hidden_layers=layers,
        num_attention_heads=fields.divides("num_attention_heads", (heads,), (hidden_size,))[0],
        hidden_act=fields.get("hidden_act", str),
        layer_norm_eps=fields.get("layer_norm_eps", float),
        skipped_layers=int(penultimate),
        context_norm=not penultimate,
        projection_dim=fields.get("projection_dim", int) if pooled else None,
        # 2 was a mistake in transformers' early config files; the largest id was meant.
        eos_token_id=vocab_size - 1 if eos == 2 else min(eos, vocab_size - 1),
        # OpenCLIP was trained with id 0, which its tokenizer files call "!".
        pad_token="!" if fields.get("hidden_act", str) == "gelu" else None,
    )


def unet(path: Path) -> UNetConfig:
    """The UNet. Raises InputError, by its name, for one that takes more than a latent."""
    fields = Fields(path)
    channels_in = fields.get("in_channels", int)
    if channels_in in LATENT_INPUTS:
        raise InputError(
            f"{path}: in_channels is {channels_in}: {LATENT_INPUTS[channels_in]}; supported are models with 4, which "
            "draw from text alone"
        )
    _refuse_other_unets(fields)
    pooled_dim, addition_time_embed_dim = _addition(fields)
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
        upcast_attention=fields.get("upcast_attention", bool, False),
        time_cond_proj_dim=fields.get("time_cond_proj_dim", int, None),
        addition_time_embed_dim=addition_time_embed_dim,
        pooled_dim=pooled_dim,
    )


def _refuse_other_unets(fields: Fields) -> None:
    """Every setting that this toolkit's UNet does not have."""
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
        addition_embed_type=("text_time",),
    )
    fields.absent(
        "class_embed_type",
        "encoder_hid_dim",
        "encoder_hid_dim_type",
        "num_class_embeds",
        "time_embedding_dim",
        "time_embedding_act_fn",
        "timestep_post_act",
        "center_input_sample",
        "dual_cross_attention",
        "only_cross_attention",
        "resnet_skip_time_act",
        "cross_attention_norm",
        "mid_block_only_cross_attention",
        "class_embeddings_concat",
        "reverse_transformer_layers_per_block",
    )


def _addition(fields: Fields) -> tuple[int | None, int | None]:
    """Widths of the pooled text vector and of each of time_ids' six embeddings; None where the UNet has neither."""
    if fields.values.get("addition_embed_type") is None:
        fields.absent("projection_class_embeddings_input_dim")
        return None, None
    width = fields.get("addition_time_embed_dim", int)
    pooled = fields.get("projection_class_embeddings_input_dim", int) - TIME_IDS * width
    if width < 2 or width % 2 or pooled < 1:
        raise InputError(
            f"{fields.path}: projection_class_embeddings_input_dim should be the pooled vector's width + {TIME_IDS} "
            f"embeddings of the even addition_time_embed_dim, found a rest of {pooled} and {width}"
        )
    return pooled, width


def sample_size(path: Path, family: ModelConfig, vae: VAEConfig) -> int:
    """The size in pixels that the UNet was trained at."""
    # In latents; diffusers also allows [height, width], which no Stable Diffusion checkpoint uses.
    return Fields(path).get("sample_size", int, family.default_size // family.vae.downscale) * vae.downscale


def vae(path: Path, scaling_factor: float) -> VAEConfig:
    """The autoencoder; `scaling_factor` where its file, as early ones, does not say."""
    fields = Fields(path)
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
        scaling_factor=fields.get("scaling_factor", float, scaling_factor),
        force_upcast=fields.get("force_upcast", bool, True),
    )


def scheduler(path: Path) -> SchedulerConfig:
    """The noise schedule. Raises InputError for what is not linear in the model's output, or another schedule."""
    fields = Fields(path)
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
    fields.absent("clip_sample", "thresholding", "trained_betas", "solver_p")
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
        rescale_betas_zero_snr=fields.get("rescale_betas_zero_snr", bool, False),
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


def defaults(path: Path, scheduler: SchedulerConfig, unet: UNetConfig, family: Defaults) -> Defaults:
    """A checkpoint's own generation_config.json goes first, then its scheduler's class, then its family."""
    own = few_steps(scheduler, unet) or family
    own = dataclasses.replace(own, sampler=default_sampler(scheduler)[0])
    if not path.exists():
        return own
    fields = Fields(path)
    return Defaults(
        sampler=fields.get("sampler", str, own.sampler),
        num_steps=fields.get("num_inference_steps", int, own.num_steps),
        guidance_scale=fields.get("guidance_scale", float, own.guidance_scale),
    )
