"""The known families of Stable Diffusion spelled out, and what their schedulers' classes mean here. Plain data."""

import dataclasses

from models.config import Defaults, ModelConfig, SchedulerConfig, TextEncoderConfig, UNetConfig, VAEConfig

# What the three families share.
_CLIP_L = TextEncoderConfig(
    vocab_size=49408,
    max_position_embeddings=77,
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    hidden_act="quick_gelu",
    layer_norm_eps=1e-5,
    skipped_layers=0,
    context_norm=True,
    projection_dim=None,
    eos_token_id=49407,
    pad_token=None,
)
_UNET = UNetConfig(
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
    upcast_attention=False,
    time_cond_proj_dim=None,
    addition_time_embed_dim=None,
    pooled_dim=None,
)
_VAE = VAEConfig(
    in_channels=3,
    out_channels=3,
    latent_channels=4,
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
    norm_num_groups=32,
    norm_eps=1e-6,
    scaling_factor=0.18215,
    force_upcast=True,
)
_SCHEDULER = SchedulerConfig(
    class_name="PNDMScheduler",
    num_train_timesteps=1000,
    beta_schedule="scaled_linear",
    beta_start=0.00085,
    beta_end=0.012,
    prediction_type="epsilon",
    timestep_spacing="leading",
    steps_offset=1,
    set_alpha_to_one=False,
    rescale_betas_zero_snr=False,
    final_sigmas_type=None,
    sigma_schedule="uniform",
    algorithm_type=None,
    solver_order=None,
    solver_type=None,
    lower_order_final=None,
    euler_at_final=None,
    original_inference_steps=None,
    timestep_scaling=None,
)

FAMILIES: dict[str, ModelConfig] = {
    "sd1": ModelConfig(
        family="sd1",
        numerics="reference",
        default_size=512,
        text_encoder=_CLIP_L,
        text_encoder_2=None,
        unet=_UNET,
        vae=_VAE,
        scheduler=_SCHEDULER,
        force_zeros_for_empty_prompt=False,
        defaults=Defaults(sampler="pndm", num_steps=50, guidance_scale=7.5),
    ),
    # The 768 x 768 models; the base ones are 512 and predict epsilon.
    "sd2": ModelConfig(
        family="sd2",
        numerics="reference",
        default_size=768,
        # OpenCLIP's ViT-H without its last layer, which was not used in training.
        text_encoder=dataclasses.replace(
            _CLIP_L,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=23,
            num_attention_heads=16,
            hidden_act="gelu",
            pad_token="!",
        ),
        text_encoder_2=None,
        unet=dataclasses.replace(
            _UNET, num_attention_heads=(5, 10, 20, 20), cross_attention_dim=1024, upcast_attention=True
        ),
        vae=_VAE,
        scheduler=dataclasses.replace(_SCHEDULER, class_name="DDIMScheduler", prediction_type="v_prediction"),
        force_zeros_for_empty_prompt=False,
        defaults=Defaults(sampler="ddim", num_steps=50, guidance_scale=7.5),
    ),
    "sdxl": ModelConfig(
        family="sdxl",
        numerics="reference",
        default_size=1024,
        text_encoder=dataclasses.replace(_CLIP_L, skipped_layers=1, context_norm=False),
        # OpenCLIP's ViT-bigG.
        text_encoder_2=dataclasses.replace(
            _CLIP_L,
            hidden_size=1280,
            intermediate_size=5120,
            num_hidden_layers=32,
            num_attention_heads=20,
            hidden_act="gelu",
            skipped_layers=1,
            context_norm=False,
            projection_dim=1280,
            pad_token="!",
        ),
        unet=dataclasses.replace(
            _UNET,
            block_out_channels=(320, 640, 1280),
            transformer_layers=(0, 2, 10),
            mid_transformer_layers=10,
            num_attention_heads=(5, 10, 20),
            cross_attention_dim=2048,
            addition_time_embed_dim=256,
            pooled_dim=1280,
        ),
        vae=dataclasses.replace(_VAE, scaling_factor=0.13025),
        scheduler=dataclasses.replace(_SCHEDULER, class_name="EulerDiscreteScheduler"),
        force_zeros_for_empty_prompt=True,
        defaults=Defaults(sampler="euler", num_steps=50, guidance_scale=5.0),
    ),
}


def few_steps(scheduler: SchedulerConfig, unet: UNetConfig) -> Defaults | None:
    """Steps and guidance of a model distilled to few steps, as far as its files tell; None: it is none.

    LCM has a scheduler of its own. The Turbo models' files differ from others only in Euler steps with trailing
    timesteps over an ordinary schedule.
    """
    if scheduler.class_name == "LCMScheduler":
        return Defaults("lcm", 4, 8.5 if unet.time_cond_proj_dim else 1.0)
    euler = scheduler.class_name in ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")
    if euler and scheduler.timestep_spacing == "trailing" and not scheduler.rescale_betas_zero_snr:
        return Defaults("euler", 4, 0.0)
    return None


def kerascv_numerics(config: ModelConfig) -> ModelConfig:
    """The same architecture computed as KerasCV computes it, so that its weights draw its pictures.

    KerasCV's named differences from diffusers: epsilon 1e-5 in every GroupNorm, tanh GELU in the UNet's
    feed-forward layers and OpenCLIP's, pixels truncated to integers, prompts filled up with the end token, and its own
    step grid: DDIM over timesteps spread evenly from 999 to 0, both included, whose last step ends at a signal of
    exactly 1. Its Stable Diffusion 2.x is the base model, which predicts noise and draws 512 x 512.
    """
    act = {"gelu": "gelu_tanh"}.get(config.text_encoder.hidden_act, config.text_encoder.hidden_act)
    return dataclasses.replace(
        config,
        numerics="kerascv",
        default_size=512,
        text_encoder=dataclasses.replace(config.text_encoder, hidden_act=act, pad_token=None),
        unet=dataclasses.replace(config.unet, transformer_norm_eps=1e-5, geglu_act="gelu_tanh"),
        vae=dataclasses.replace(config.vae, norm_eps=1e-5),
        scheduler=dataclasses.replace(
            config.scheduler,
            class_name="DDIMScheduler",
            prediction_type="epsilon",
            timestep_spacing="linspace",
            steps_offset=0,
            set_alpha_to_one=True,
            final_sigmas_type="zero",
        ),
        defaults=dataclasses.replace(config.defaults, sampler="ddim"),
    )
