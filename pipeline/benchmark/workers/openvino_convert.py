"""A checkpoint's networks as OpenVINO models: float32, one fixed shape each; see openvino_peer.py."""

import gc
import os
import shutil
import warnings
from pathlib import Path

import diffusers_torch
import openvino
import torch


class TextEncoder(torch.nn.Module):
    """tokens int64[B, 77] to the context f32[B, 77, D]; with `hidden` that of the last layer but one, and pooled."""

    def __init__(self, encoder, hidden: bool):
        super().__init__()
        self.encoder, self.hidden = encoder, hidden

    def forward(self, tokens):
        outputs = self.encoder(tokens, output_hidden_states=self.hidden)
        return (outputs.hidden_states[-2], outputs[0]) if self.hidden else outputs[0]


class UNet(torch.nn.Module):
    """latent f32[B, 4, h, w], timestep f32[1], context f32[B, 77, D] (XL: pooled, time_ids) to the prediction."""

    def __init__(self, unet):
        super().__init__()
        self.unet = unet

    def forward(self, latent, timestep, context, pooled=None, time_ids=None):
        added = None if pooled is None else {"text_embeds": pooled, "time_ids": time_ids}
        return self.unet(latent, timestep, context, added_cond_kwargs=added, return_dict=False)[0]


class Decoder(torch.nn.Module):
    """latent f32[N, 4, h, w] to the image f32[N, H, W, 3]."""

    def __init__(self, vae):
        super().__init__()
        self.vae = vae

    def forward(self, latent):
        image = self.vae.decode(latent / self.vae.config.scaling_factor, return_dict=False)[0]
        return image.permute(0, 2, 3, 1)


def text_rows(row: dict, pipe) -> int:
    """Token rows of one call of a text encoder: the prompts and, where they are encoded, as many negative ones."""
    zeros = getattr(pipe.config, "force_zeros_for_empty_prompt", False)
    return row["prompts"] * (2 if row["settings"]["guidance_scale"] > 1 and not zeros else 1)


def parts(row: dict, pipe):
    """(name, module, example inputs, which fix the shapes) of each network."""
    two = hasattr(pipe, "text_encoder_2")
    tokens = torch.zeros((text_rows(row, pipe), 77), dtype=torch.int64)
    for name in ("text_encoder", "text_encoder_2")[: 2 if two else 1]:
        yield name, TextEncoder(getattr(pipe, name), two), (tokens,)
    start, batch = diffusers_torch.initial_latents(pipe, row), 2 if row["settings"]["guidance_scale"] > 1 else 1
    count = batch * row["images"]
    inputs = (
        start.repeat(batch, 1, 1, 1),
        torch.full((1,), 500.0),
        torch.zeros((count, 77, pipe.unet.config.cross_attention_dim)),
    )
    if two:
        inputs += (torch.zeros((count, pipe.text_encoder_2.config.projection_dim)), torch.zeros((count, 6)))
    yield "unet", UNet(pipe.unet), inputs
    yield "decoder", Decoder(pipe.vae), (start,)


@torch.no_grad()
def convert(row: dict, folder: Path) -> None:
    """Trace each network and save it, weights uncompressed; the folder appears when it is complete.

    It gets text_encoder.xml (with two: text_encoder_2.xml), unet.xml and decoder.xml.
    """
    # That values become constants is meant: shapes are fixed.
    warnings.simplefilter("ignore")
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    work.mkdir(parents=True)
    try:
        pipe = diffusers_torch.pipeline(row, torch.float32)
        for name, module, inputs in parts(row, pipe):
            shapes = [tuple(value.shape) for value in inputs]
            model = openvino.convert_model(module.eval(), example_input=inputs, input=shapes)
            openvino.save_model(model, work / f"{name}.xml", compress_to_fp16=False)
            del model
            gc.collect()
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
