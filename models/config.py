"""Sizes and settings of a Stable Diffusion model, as plain data.

Frozen dataclasses without defaults: families differ in every field, and a forgotten one must fail
instead of quietly describing another model. `FAMILIES` spells the known families out;
`models.diffusers` reads any checkpoint's own `config.json` files. No TensorFlow, no Keras.
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
    sigma_schedule: str  # "uniform" (the timesteps' own noise levels), "karras" or "exponential"
    algorithm_type: str | None  # "dpmsolver++", "sde-dpmsolver++" or "deis"
    solver_order: int | None  # 1..3
    solver_type: str | None  # "midpoint", "heun", "logrho", "bh1" or "bh2"; each class knows its own
    lower_order_final: bool | None
    euler_at_final: bool | None
    original_inference_steps: int | None  # LCM's, as it was distilled
    timestep_scaling: float | None  # LCM's


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
class Size:
    """Pixels of a picture."""

    width: int
    height: int

    def __str__(self):
        return f"{self.width}x{self.height}"


@dataclasses.dataclass(frozen=True)
class ExportSpec:
    """What an export fixes. Sampler, step count, spacing, guidance and seeds stay free."""

    height: int  # pixels
    width: int
    prompts: int  # P, prompts per call
    images_per_prompt: int  # M; image r belongs to prompt r // M
    dtype: str  # of the stored weights: "float32" or "bfloat16"
    max_steps: int  # S, rows of the steps table
    prompt_chunks: int = 1  # k, blocks of 77 tokens in a prompt
    more_sizes: tuple[Size, ...] = ()  # pictures that the same weights also draw, each by signatures of its own

    @property
    def size(self) -> Size:
        """The size that signatures without a suffix have."""
        return Size(self.width, self.height)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """All sizes, the main one first."""
        return (self.size, *self.more_sizes)

    def signature(self, name: str, size: Size) -> str:
        """What signature `name` is called for one of the sizes: denoise, denoise_768x512."""
        return name if size == self.size else f"{name}_{size}"

    @property
    def num_images(self) -> int:
        """N, images per call."""
        return self.prompts * self.images_per_prompt

    def check(self, config: ModelConfig) -> None:
        """Raise InputError for a size, count or dtype that cannot be exported."""
        step = config.vae.downscale
        for size in self.sizes:
            for name in ("height", "width"):
                value = getattr(size, name)
                if value < step or value % step:
                    below = max(step, value // step * step)
                    nearest = f"{below} or {below + step}"
                    raise InputError(f"--{name} {value}: must be a multiple of {step}; nearest: {nearest}")
        if len(set(self.sizes)) < len(self.sizes):
            raise InputError(f"--sizes {','.join(map(str, self.sizes))}: names a size twice")
        for name, most in (("prompts", 1024), ("images_per_prompt", 1024), ("prompt_chunks", 16)):
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
            sigma_schedule="uniform",
            algorithm_type=None,
            solver_order=None,
            solver_type=None,
            lower_order_final=None,
            euler_at_final=None,
            original_inference_steps=None,
            timestep_scaling=None,
        ),
        defaults=Defaults(sampler="pndm", num_steps=50, guidance_scale=7.5),
    ),
}

# The sampler that is a scheduler class of diffusers.
SAMPLERS_OF_CLASSES = {
    "DDIMScheduler": "ddim",
    "PNDMScheduler": "pndm",
    "EulerDiscreteScheduler": "euler",
    "EulerAncestralDiscreteScheduler": "euler_a",
    "HeunDiscreteScheduler": "heun",
    "LMSDiscreteScheduler": "lms",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    "UniPCMultistepScheduler": "unipc",
    "DEISMultistepScheduler": "deis",
    "LCMScheduler": "lcm",
}


def default_sampler(scheduler: SchedulerConfig) -> tuple[str, str | None]:
    """The sampler for a checkpoint with this scheduler.

    Returns:
        (name, notice): name is a key of pipeline.samplers.SAMPLERS; notice is one line where the class is not
        available and another sampler stands in for it, else None.
    """
    name = SAMPLERS_OF_CLASSES.get(scheduler.class_name)
    if name == "dpmpp_2m":
        sde, order = scheduler.algorithm_type == "sde-dpmsolver++", scheduler.solver_order or 2
        name = {(False, 2): "dpmpp_2m", (False, 3): "dpmpp_3m", (True, 2): "dpmpp_2m_sde"}.get((sde, order))
        if name is None:
            name = "dpmpp_2m_sde" if sde else "dpmpp_2m"
            return name, f"the checkpoint asks for {scheduler.class_name} of order {order}; using {name}, of order 2"
    if name is None:
        stand_in = "a deterministic sampler for the same noise schedule"
        return "ddim", f"the checkpoint asks for {scheduler.class_name}, which is not available; using ddim, {stand_in}"
    return name, None


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
        defaults=dataclasses.replace(config.defaults, sampler="ddim"),
    )


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises InputError when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: expected a JSON file, found none ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected a JSON file, found something else ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
