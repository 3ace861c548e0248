"""The diffusion stage: UNet and text encoder, trained together on latents that are computed once."""

import itertools
from typing import NamedTuple

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from training import data, loop, sheet
from training.vae import to_images, to_tensor

BATCH = 32
EMPTY = 0.1  # share of examples without a caption, for guidance
GAMMA = 5.0  # min-SNR weighting (Hang et al. 2023): errors at low noise count at most this signal-to-noise ratio
MOST = 10.0  # most that an error at high noise, where shapes are decided, counts
STEPS, GUIDANCE = 25, 3.0  # of the sample sheets, and of the checkpoint's generation_config.json
SHOWN = (
    ("red apple", "blue"),
    ("owl", "white"),
    ("laughing face with tears", "black"),
    ("purple heart", "yellow"),
    ("sunflower", "purple"),
    ("fox", "green"),
    ("slice of pizza", "gray"),
    ("rocket", "red"),
    ("butterfly", "yellow"),
    ("panda", "red"),
    ("birthday cake", "blue"),
    ("octopus", "green"),
    ("cactus", "white"),
    ("guitar", "black"),
    ("skull", "purple"),
    ("doughnut", "gray"),
)


class Texts(NamedTuple):
    """Token ids of every caption, int64[object, colour, template, 77], and of the empty one, int64[77]."""

    captions: torch.Tensor
    empty: torch.Tensor


def build():
    """UNet for 16x16 latents (8.8 M parameters) and text encoder (3.3 M), as one module."""
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(48, 64, 128, 192),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=4,  # diffusers' name for the number of heads
        norm_num_groups=16,
    )
    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=64,
        bos_token_id=49406,
        eos_token_id=49407,
        pad_token_id=49407,
    )
    return torch.nn.ModuleDict({"unet": unet, "text_encoder": CLIPTextModel(config)})


def load(folder):
    """UNet and text encoder of a checkpoint, as one module."""
    unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", torch_dtype=torch.float32)
    text_encoder = CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", torch_dtype=torch.float32)
    return torch.nn.ModuleDict({"unet": unet, "text_encoder": text_encoder})


def schedule():
    """The noise schedule of Stable Diffusion 1, drawn by DDIM."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def tokenise(tokenizer, names):
    """Texts of all captions; white has more templates, the other colours repeat theirs to fill the array."""

    def ids(texts):
        return tokenizer(texts, padding="max_length", max_length=77, return_tensors="pt").input_ids

    width = len(data.WHITE_TEMPLATES)
    captions = [
        data.caption(name, colour, t if colour == "white" else t % len(data.TEMPLATES))
        for name, colour, t in itertools.product(names, data.COLOURS, range(width))
    ]
    return Texts(ids(captions).view(len(names), len(data.COLOURS), width, 77), ids([""])[0])


def encode_all(autoencoder, pictures, file):
    """Latents of every possible picture: float32[object, colour, right, down, mirror, 4, h, w]; kept in `file`."""
    if file.exists():
        return torch.load(file)
    variants = list(itertools.product(data.COLOURS.values(), data.SHIFTS, data.SHIFTS, (False, True)))
    latents = []
    with torch.no_grad():
        for picture in pictures:
            images = to_tensor([data.compose(picture, *variant) for variant in variants])
            latents.append(autoencoder.encode(images).latent_dist.mean)
    shape = (len(pictures), len(data.COLOURS), len(data.SHIFTS), len(data.SHIFTS), 2, *latents[0].shape[1:])
    latents = torch.stack(latents).view(shape)
    loop.write_aside(file, lambda path: torch.save(latents, path))
    return latents


def pick(latents, texts, seed, start, size):
    """Examples start..start+size-1 of a run: latents float32[size, 4, h, w], token ids int64[size, 77]."""
    choices = [data.choose(len(latents), seed, start + i) for i in range(size)]
    shift = data.SHIFTS.index
    columns = [(c.object, c.colour, shift(c.right), shift(c.down), c.mirror, c.template) for c in choices]
    thing, colour, right, down, mirror, template = torch.tensor(columns).T
    ids = texts.captions[thing, colour, template]
    ids[torch.rand(size) < EMPTY] = texts.empty
    return latents[thing, colour, right, down, mirror], ids


def loss(networks, alphas, latents, ids):
    """Weighted squared error of the predicted noise; alphas: cumulative products float32[1000]; -> float32[]."""
    noise = torch.randn_like(latents)
    timesteps = torch.randint(len(alphas), (len(latents),))
    signal = alphas[timesteps].view(-1, 1, 1, 1)
    noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
    context = networks["text_encoder"](ids).last_hidden_state
    output = networks["unet"](noisy, timesteps, context, return_dict=False)[0]
    ratio = alphas[timesteps] / (1 - alphas[timesteps])
    weight = ratio.clamp(max=GAMMA) / ratio * (1 + 1 / ratio).sqrt().clamp(max=MOST)
    return ((output - noise).square().mean((1, 2, 3)) * weight).mean()


@torch.no_grad()
def draw(networks, autoencoder, ids, empty, seed):
    """Pictures of prompts by DDIM with guidance: int64[n, 77], int64[77] -> uint8[n, 64, 64, 3]."""
    scheduler = schedule()
    scheduler.set_timesteps(STEPS)
    context = networks["text_encoder"](torch.cat([empty.expand_as(ids), ids])).last_hidden_state
    config = networks["unet"].config
    shape = (len(ids), config.in_channels, config.sample_size, config.sample_size)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for timestep in scheduler.timesteps:
        output = networks["unet"](torch.cat([latents, latents]), timestep, context, return_dict=False)[0]
        plain, conditional = output.chunk(2)
        guided = plain + GUIDANCE * (conditional - plain)
        latents = scheduler.step(guided, timestep, latents).prev_sample
    return to_images(autoencoder.decode(latents / autoencoder.config.scaling_factor).sample)


def train(names, latents, texts, autoencoder, networks, folder, budget, peak):
    """Trains UNet and text encoder on scaled latents; returns their average, in one module, and the number of steps."""
    alphas = schedule().alphas_cumprod
    colours = list(data.COLOURS)
    shown = torch.stack([texts.captions[names.index(name), colours.index(colour), 0] for name, colour in SHOWN])

    def step_loss(networks, step, fraction):
        return loss(networks, alphas, *pick(latents, texts, loop.SEED, step * BATCH, BATCH))

    def draw_sheet(networks):
        return sheet.grid(draw(networks, autoencoder, shown, texts.empty, seed=0), columns=4, scale=3)

    return loop.train("diffusion", networks, step_loss, draw_sheet, folder, budget, peak)
