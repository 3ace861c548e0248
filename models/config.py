"""Sizes and settings of a Stable Diffusion model, as plain data.

Frozen dataclasses without defaults: families differ in every field, and a forgotten one must fail
instead of quietly describing another model. `models.families` spells the known families out;
`pipeline.checkpoints.diffusers_folder` reads any checkpoint's own `config.json` files. No TensorFlow, no Keras.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TextEncoderConfig:
    """CLIP text encoder (Radford et al. 2021, arXiv:2103.00020)."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str  # "quick_gelu" (x * sigmoid(1.702 x)), "gelu" (erf) or "gelu_tanh"
    layer_norm_eps: float
    skipped_layers: int  # last layers that the context does not go through; 0 takes it from the last
    context_norm: bool  # whether it goes through final_layer_norm too
    projection_dim: int | None  # width of the pooled vector; None: the model has none
    eos_token_id: int  # where the pooled vector is taken
    pad_token: str | None  # what fills prompts up where the tokenizer's files do not say; None: EOS

    @property
    def context_layers(self) -> int:
        """Layers that the context has gone through."""
        return self.num_hidden_layers - self.skipped_layers

    @property
    def built_layers(self) -> int:
        """Layers that anything depends on; the pooled vector comes from the last."""
        return self.context_layers if self.projection_dim is None else self.num_hidden_layers


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
    upcast_attention: bool  # True: queries and keys are multiplied in float32 whatever the export's dtype is
    time_cond_proj_dim: int | None  # width of the guidance embedding of a model distilled with guidance (LCM)
    addition_time_embed_dim: int | None  # width of each of time_ids' six embeddings (Stable Diffusion XL)
    pooled_dim: int | None  # width of the pooled text vector beside them


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
    (`pipeline.sampling.samplers`).
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
    rescale_betas_zero_snr: bool  # shift the schedule to end at pure noise (arXiv:2305.08891, algorithm 1)
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

    sampler: str  # a name in pipeline.sampling.samplers.SAMPLERS
    num_steps: int
    guidance_scale: float


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that tells one Stable Diffusion checkpoint's architecture from another's."""

    family: str  # a key of models.families.FAMILIES
    numerics: str  # "reference" (diffusers) or "kerascv"; see `models.families`
    default_size: int  # pixels; height and width it was trained at
    text_encoder: TextEncoderConfig
    text_encoder_2: TextEncoderConfig | None
    unet: UNetConfig
    vae: VAEConfig
    scheduler: SchedulerConfig
    force_zeros_for_empty_prompt: bool  # True: without a negative prompt the unconditional context is zeros
    defaults: Defaults

    @property
    def text_encoders(self) -> tuple[TextEncoderConfig, ...]:
        """One, or two whose states are joined to one context."""
        return (self.text_encoder,) if self.text_encoder_2 is None else (self.text_encoder, self.text_encoder_2)
