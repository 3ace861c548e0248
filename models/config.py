"""Sizes and settings of a Stable Diffusion model, as plain data.

Frozen dataclasses without defaults: families differ in every field, and a forgotten one must fail
instead of quietly describing another model. `FAMILIES` spells the known families out;
`from_diffusers` reads any checkpoint's own `config.json` files. No TensorFlow, no Keras.
"""

import dataclasses
import json
from pathlib import Path


class InputError(ValueError):
    """What the user gave cannot be used. The message is one line: expected, found, where, what to do."""


@dataclasses.dataclass(frozen=True)
class TextEncoderConfig:
    """CLIP text encoder (Radford et al. 2021, arXiv:2103.00020)."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str  # "quick_gelu" (x * sigmoid(1.702 x)) or "gelu" (erf)
    layer_norm_eps: float


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """UNet with cross-attention (Rombach et al. 2022, arXiv:2112.10752).

    Tuples have one entry per resolution, finest first.
    """

    in_channels: int
    out_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    transformer_layers: tuple[int, ...]  # 0 where the block has no attention
    mid_transformer_layers: int
    num_attention_heads: tuple[int, ...]
    cross_attention_dim: int
    norm_num_groups: int
    norm_eps: float  # of the residual blocks and conv_norm_out
    transformer_norm_eps: float  # of the GroupNorm before each transformer
    geglu_act: str  # "gelu" (erf) or "gelu_tanh"
    flip_sin_to_cos: bool
    freq_shift: int


@dataclasses.dataclass(frozen=True)
class VAEConfig:
    """KL-regularised autoencoder (Rombach et al. 2022, section 3.1)."""

    in_channels: int
    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    norm_num_groups: int
    norm_eps: float
    scaling_factor: float  # latent seen by the UNet = scaling_factor * encoder's latent
    force_upcast: bool  # True: decode in float32 whatever the export's dtype is

    @property
    def downscale(self) -> int:
        """Pixels per latent along each side."""
        return 2 ** (len(self.block_out_channels) - 1)


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """The noise schedule the model was trained on, and how its author samples it.

    None: the checkpoint's file does not say, so the sampler's own default applies
    (`pipeline.samplers`).
    """

    class_name: str  # diffusers' class, e.g. "DDIMScheduler"
    num_train_timesteps: int
    beta_schedule: str  # "scaled_linear" or "linear"
    beta_start: float
    beta_end: float
    prediction_type: str  # "epsilon" or "v_prediction"
    timestep_spacing: str | None  # "leading", "trailing" or "linspace"
    steps_offset: int | None
    set_alpha_to_one: bool | None
    final_sigmas_type: str | None  # "zero" or "sigma_min"


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What `pipeline.generate` uses when the caller does not say."""

    sampler: str  # a name in pipeline.samplers.SAMPLERS
    num_steps: int
    guidance_scale: float


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that tells one Stable Diffusion checkpoint's architecture from another's."""

    family: str  # a key of FAMILIES
    numerics: str  # "reference" (diffusers) or "kerascv"; see `kerascv_numerics`
    default_size: int  # pixels; height and width it was trained at
    text_encoder: TextEncoderConfig
    unet: UNetConfig
    vae: VAEConfig
    scheduler: SchedulerConfig
    defaults: Defaults


@dataclasses.dataclass(frozen=True)
class ExportSpec:
    """What an export fixes. Sampler, step count, spacing, guidance and seeds stay free."""

    height: int  # pixels
    width: int
    prompts: int  # P, prompts per call
    images_per_prompt: int  # M; image r belongs to prompt r // M
    dtype: str  # of the stored weights: "float32" or "bfloat16"
    max_steps: int  # S, rows of the steps table

    @property
    def num_images(self) -> int:
        """N, images per call."""
        return self.prompts * self.images_per_prompt

    def check(self, config: ModelConfig) -> None:
        """Raise InputError for a size, count or dtype that cannot be exported."""
        step = config.vae.downscale
        for name in ("height", "width"):
            value = getattr(self, name)
            if value < step or value % step:
                below = max(step, value // step * step)
                raise InputError(f"--{name} {value}: must be a multiple of {step}; nearest: {below} or {below + step}")
        for name, most in (("prompts", 1024), ("images_per_prompt", 1024)):
            if not 1 <= getattr(self, name) <= most:
                raise InputError(f"--{name} {getattr(self, name)}: must be 1..{most}")
        if not 1 <= self.max_steps <= config.scheduler.num_train_timesteps:
            raise InputError(f"--max_steps {self.max_steps}: must be 1..{config.scheduler.num_train_timesteps}")
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, shape (None: any size) and dtype of one tensor at a signature's border."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


DTYPES = ("float32", "bfloat16")

FAMILIES: dict[str, ModelConfig] = {
    "sd1": ModelConfig(
        family="sd1",
        numerics="reference",
        default_size=512,
        text_encoder=TextEncoderConfig(
            vocab_size=49408,
            max_position_embeddings=77,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            hidden_act="quick_gelu",
            layer_norm_eps=1e-5,
        ),
        unet=UNetConfig(
            in_channels=4,
            out_channels=4,
            block_out_channels=(320, 640, 1280, 1280),
            layers_per_block=2,
            transformer_layers=(1, 1, 1, 0),
            mid_transformer_layers=1,
            num_attention_heads=(8, 8, 8, 8),
            cross_attention_dim=768,
            norm_num_groups=32,
            norm_eps=1e-5,
            transformer_norm_eps=1e-6,
            geglu_act="gelu",
            flip_sin_to_cos=True,
            freq_shift=0,
        ),
        vae=VAEConfig(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            norm_num_groups=32,
            norm_eps=1e-6,
            scaling_factor=0.18215,
            force_upcast=True,
        ),
        scheduler=SchedulerConfig(
            class_name="PNDMScheduler",
            num_train_timesteps=1000,
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            beta_end=0.012,
            prediction_type="epsilon",
            timestep_spacing="leading",
            steps_offset=1,
            set_alpha_to_one=False,
            final_sigmas_type=None,
        ),
        defaults=Defaults(sampler="ddim", num_steps=50, guidance_scale=7.5),
    ),
}


def from_diffusers(folder: Path) -> ModelConfig:
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
    # In latents; diffusers also allows [height, width], which no Stable Diffusion 1.x checkpoint uses.
    sample_size = _Fields(folder / "unet" / "config.json").get("sample_size", int, family.default_size // 8)
    return ModelConfig(
        family=family.family,
        numerics=family.numerics,
        default_size=sample_size * vae.downscale,
        text_encoder=_text_encoder(folder / "text_encoder" / "config.json"),
        unet=_unet(folder / "unet" / "config.json"),
        vae=vae,
        scheduler=_scheduler(folder / "scheduler" / "scheduler_config.json"),
        defaults=_defaults(folder / "generation_config.json", family.defaults),
    )


def kerascv_numerics(config: ModelConfig) -> ModelConfig:
    """The same architecture computed as KerasCV computes it, so that its weights draw its pictures.

    KerasCV's named differences from diffusers: epsilon 1e-5 in every GroupNorm, tanh GELU in the UNet's
    feed-forward layers, pixels truncated to integers, and its own step grid: DDIM over timesteps spread evenly
    from 999 to 0, both included, whose last step ends at a signal of exactly 1.
    """
    return dataclasses.replace(
        config,
        numerics="kerascv",
        unet=dataclasses.replace(config.unet, transformer_norm_eps=1e-5, geglu_act="gelu_tanh"),
        vae=dataclasses.replace(config.vae, norm_eps=1e-5),
        scheduler=dataclasses.replace(
            config.scheduler,
            class_name="DDIMScheduler",
            timestep_spacing="linspace",
            steps_offset=0,
            set_alpha_to_one=True,
            final_sigmas_type="zero",
        ),
    )


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises InputError when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: expected a JSON file, found none ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: expected a JSON file, found something else ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


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


def _text_encoder(path: Path) -> TextEncoderConfig:
    fields = _Fields(path)
    fields.require(hidden_act=("quick_gelu", "gelu"), max_position_embeddings=(77,))
    return TextEncoderConfig(
        vocab_size=fields.get("vocab_size", int),
        max_position_embeddings=fields.get("max_position_embeddings", int),
        hidden_size=fields.get("hidden_size", int),
        intermediate_size=fields.get("intermediate_size", int),
        num_hidden_layers=fields.get("num_hidden_layers", int),
        num_attention_heads=fields.get("num_attention_heads", int),
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
    channels = tuple(fields.get("block_out_channels", list))
    blocks = len(channels)
    down = fields.get("down_block_types", list)
    up = fields.get("up_block_types", list)
    plain = {"CrossAttnDownBlock2D": True, "DownBlock2D": False, "CrossAttnUpBlock2D": True, "UpBlock2D": False}
    if (
        len(down) != blocks
        or any(b not in plain for b in down + up)
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
        num_attention_heads=fields.per_block(heads_key, blocks),
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
    channels = tuple(fields.get("block_out_channels", list))
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
    )
    # Not linear in the model's output, or another noise schedule: refused by name instead of drawn wrongly.
    fields.absent("clip_sample", "thresholding", "rescale_betas_zero_snr", "trained_betas")
    fields.absent("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
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
    )


def _defaults(path: Path, family: Defaults) -> Defaults:
    """A checkpoint may carry its own defaults in generation_config.json; the rest come from its family."""
    if not path.exists():
        return family
    fields = _Fields(path)
    return Defaults(
        sampler=fields.get("sampler", str, family.sampler),
        num_steps=fields.get("num_inference_steps", int, family.num_steps),
        guidance_scale=fields.get("guidance_scale", float, family.guidance_scale),
    )
