"""The autoencoder stage: model, loss, sample sheet."""

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch.nn.functional import avg_pool2d

from training import data, loop, sheet

POSTERIOR = 0.1  # noise on the latents in training, as a share of their spread: a decoder that forgives small errors


def build():
    """The autoencoder: 64x64 pictures <-> 16x16x4 latents, 0.7 M parameters."""
    return AutoencoderKL(
        block_out_channels=(32, 32, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=16,
        sample_size=64,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )


def differences(images):
    """Neighbour differences, right and down: float32[b, c, h, w] -> two arrays."""
    return images[..., 1:] - images[..., :-1], images[..., 1:, :] - images[..., :-1, :]


def distance(output, target):
    """Absolute and squared error of the pixels, and the absolute error of their differences at three scales (edges)."""
    error = output - target
    loss = error.abs().mean() + 2 * error.square().mean()
    for _ in range(3):
        loss = loss + 0.5 * sum(d.abs().mean() for d in differences(error))
        error = avg_pool2d(error, 2)
    return loss


def loss(model, images):
    """Training loss of a batch: float32[b, 3, 64, 64] in [-1, 1] -> float32[]."""
    latents = model.encode(images).latent_dist.mean
    noise = POSTERIOR * latents.detach().std() * torch.randn_like(latents)
    output = model.decode(latents + noise).sample
    return distance(output, images) + 1e-3 * latents.square().mean()


def to_tensor(images):
    """uint8[b, 64, 64, 3] -> float32[b, 3, 64, 64] in [-1, 1]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def to_images(output):
    """float32[b, 3, 64, 64] in [-1, 1] -> uint8[b, 64, 64, 3]."""
    return ((output.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def load(folder, state=None):
    """The autoencoder of a checkpoint, its encoder frozen; `state`: file of a stage that went on from there, if any."""
    model = AutoencoderKL.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
    for part in (model.encoder, model.quant_conv):
        part.requires_grad_(False)
    if state is not None and state.exists():
        model.load_state_dict(torch.load(state)["averaged"])
    return model


def train(names, pictures, model, folder, budget, peak):
    """Trains what is not frozen of an autoencoder in `folder`; returns its average and the number of steps."""

    def batch(seed, start, size):
        return to_tensor([data.example(names, pictures, seed, start + i)[0] for i in range(size)])

    def step_loss(model, step, fraction):
        return loss(model, batch(loop.SEED, step * 16, 8 if fraction < 0.4 else 16))

    shown = batch(loop.SEED + 1, 0, 32)

    def draw(model):
        with torch.no_grad():
            output = model.decode(model.encode(shown).latent_dist.mean).sample
        return sheet.grid(np.concatenate([to_images(shown), to_images(output)]), columns=8, scale=2)

    return loop.train("vae", model, step_loss, draw, folder, budget, peak)
