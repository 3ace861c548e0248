"""The toolkit against diffusers' numbers on a tiny checkpoint; goldens/write_tiny_sd1.py wrote both."""

from pathlib import Path

import numpy as np
import pytest

from models import unet, vae
from models.steps import MEMORY
from pipeline import load, manifest
from pipeline.checkpoints import diffusers_folder, keymaps, loader
from pipeline.prompts import tokenizer
from pipeline.sampling import settings

GOLDENS = Path(__file__).parent / "goldens"
CHECKPOINT = GOLDENS / "tiny_sd1"


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDENS / "tiny_sd1.npz"))


def close(found, expected, bar):
    """Largest difference relative to max(1, largest value)."""
    expected = np.asarray(expected, "float64")
    error = np.abs(np.asarray(found, "float64") - expected).max() / max(1.0, np.abs(expected).max())
    assert error <= bar


def test_tokens(golden):
    encoder = tokenizer.load(CHECKPOINT / "tokenizer")
    for key in ("prompts", "negative_prompts"):
        expected = golden["tokens" if key == "prompts" else "negative_tokens"]
        np.testing.assert_array_equal(encoder.encode_batch([str(p) for p in golden[key]])[0], expected)


def test_text_encoder(golden, tiny_sd1_export):
    encode = load.function(manifest.read(tiny_sd1_export), "text_encoder", "encode")
    ones = np.ones((2, 77), "float32")
    contexts = encode(
        tokens=golden["tokens"],
        negative_tokens=golden["negative_tokens"],
        token_weights=ones,
        negative_token_weights=ones,
    )
    for name in ("context", "unconditional_context"):
        close(contexts[name], golden[name], 1e-5)


def test_unet(golden, tiny_sd1_export):
    predict = load.function(manifest.read(tiny_sd1_export), "diffusion_model", "unet")
    for timestep, expected in zip(golden["timesteps"], golden["predictions"], strict=True):
        found = predict(latent=golden["latent"], timestep=timestep, context=golden["context"])
        close(found["prediction"], expected, 1e-5)


def test_unet_at_a_size_that_is_no_multiple_of_its_own(golden):
    config = diffusers_folder.read_config(CHECKPOINT)
    model = unet.UNet(config.unet)
    tensors = diffusers_folder.read_weights(CHECKPOINT, "unet", None)
    loader.load([model], tensors, keymaps.DIFFUSERS["unet"], "unet")
    close(model(golden["odd_latent"], golden["timesteps"][0], golden["context"]), golden["odd_prediction"], 1e-5)


def test_decoder(golden, tiny_sd1_export):
    decode = load.function(manifest.read(tiny_sd1_export), "decoder", "decode_float")
    close(decode(latent=golden["decoder_latent"])["image"], golden["decoder_image"], 1e-5)


def test_encoder(golden):
    config = diffusers_folder.read_config(CHECKPOINT)
    parts = [vae.VAEDecoder(config.vae), vae.VAEEncoder(config.vae)]
    tensors = diffusers_folder.read_weights(CHECKPOINT, "vae", None)
    loader.load(parts, tensors, keymaps.DIFFUSERS["vae"], "vae")
    mean, std = parts[1](golden["encoder_image"])
    close(mean, golden["encoder_mean"], 1e-5)
    close(std, golden["encoder_std"], 1e-5)


@pytest.mark.parametrize("sampler", ["ddim", "euler"])
def test_chain_step_by_step(golden, tiny_sd1_export, sampler):
    functions = load.local(tiny_sd1_export, verify=False)
    chosen = settings.settings(functions.manifest, sampler, int(golden["num_steps"]), float(golden["guidance_scale"]))
    steps, rows = settings.table(functions.manifest, chosen)
    np.testing.assert_array_equal(rows[: len(steps.rows), 0], golden[f"{sampler}/timesteps"].astype("float32"))
    latent = np.float32(steps.noise) * golden["noise"]
    memory = np.zeros((MEMORY, *latent.shape), "float32")
    for i, expected in enumerate(golden[f"{sampler}/latents"]):
        state = functions.denoise(
            latent=latent,
            memory=memory,
            steps=rows,
            first_step=np.int32(i),
            last_step=np.int32(i + 1),
            guidance_scale=np.full((2,), chosen.guidance_scale, "float32"),
            guidance_rescale=np.zeros((2,), "float32"),
            seed=np.zeros((2, 2), "int32"),
            context=golden["context"],
            unconditional_context=golden["unconditional_context"],
        )
        latent, memory = np.asarray(state["latent"]), state["memory"]
        if sampler == "euler":  # diffusers' Euler keeps the latent in sigma's scale
            sigma = golden["euler/sigmas"][i]
            expected = expected / np.sqrt(sigma**2 + 1)
        close(latent, expected, 1e-5)
    image = functions.decode(latent=latent)["generated_images"]
    difference = np.abs(np.asarray(image).astype(int) - golden[f"{sampler}/image"])
    assert difference.max() <= 1 and difference.mean() < 0.01
