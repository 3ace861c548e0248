"""What a single file holds, from its keys and shapes: sizes, what its UNet predicts, and other models by their name."""

import re

import numpy as np
import pytest

from models.config import Defaults
from models.errors import InputError
from models.families import FAMILIES
from pipeline.checkpoints import loader, single_file

UNET = "model.diffusion_model."

OTHERS = [
    ({f"{UNET}joint_blocks.0.x.weight": (1,)}, "holds Stable Diffusion 3;"),
    ({"double_blocks.0.img_attn.norm.key_norm.scale": (1,)}, "holds a transformer such as Flux or AuraFlow;"),
    ({"control_model.time_embed.0.weight": (1,)}, "holds a ControlNet;"),
    ({"edm_mean": (4,)}, "holds Playground 2.5, which"),
    ({"edm_vpred.sigma_max": ()}, "holds CosXL, which"),
    ({"depth_model.model.x.weight": (1,)}, "holds a depth-to-image model;"),
    ({"low_scale_model.betas": (1,)}, "holds an upscaler;"),
    ({"noise_augmentor.betas": (1,)}, "holds an unCLIP model;"),
    ({f"{UNET}input_blocks.1.1.transformer_blocks.0.fuser.alpha_attn": ()}, "holds a GLIGEN model;"),
    ({f"{UNET}input_blocks.1.1.time_stack.0.norm1.weight": (1,)}, "holds a video model;"),
    ({f"{UNET}input_blocks.0.0.weight": (320, 9, 3, 3)}, "the UNet takes 9 channels: an inpainting model;"),
    ({f"{UNET}input_blocks.0.0.weight": (320, 8, 3, 3)}, "the UNet takes 8 channels: an InstructPix2Pix model;"),
    ({f"{UNET}input_blocks.0.0.weight": (320, 5, 3, 3)}, "the UNet takes 5 channels: a depth-to-image model;"),
    ({f"{UNET}input_blocks.0.0.weight": (320, 7, 3, 3)}, "the UNet takes 7 channels: an upscaler;"),
    ({f"{UNET}input_blocks.0.0.weight": (320, 6, 3, 3)}, "the UNet takes 6 channels: another kind of model;"),
    ({f"{UNET}label_emb.weight": (1000, 1280)}, "the UNet takes a class label;"),
]
SUPPORTED = "text-to-image checkpoints of Stable Diffusion 1.x, 2.x and XL are supported"


@pytest.mark.parametrize(("changes", "message"), OTHERS, ids=[message for _, message in OTHERS])
def test_other_models_are_refused_by_name(single_file_keys, changes, message):
    with pytest.raises(InputError) as caught:
        single_file.read(single_file_keys("sd1", changes), "file")
    assert str(caught.value).startswith(f"file: {message}") and str(caught.value).endswith(SUPPORTED)


def test_the_refiner_and_unclip_are_refused_by_name(single_file_keys):
    """OpenCLIP's encoder alone: in XL's naming the refiner's, unless the UNet has no vector to add: then SD-Turbo."""
    tensors = single_file_keys("sd2", {f"{UNET}label_emb.0.0.weight": (1536, 2560)})
    with pytest.raises(InputError, match=f"file: holds an unCLIP model; {SUPPORTED}"):
        single_file.read(tensors, "file")
    with pytest.raises(InputError, match=f"file: holds the refiner of Stable Diffusion XL; {SUPPORTED}"):
        single_file.read(
            {n.replace("cond_stage_model", "conditioner.embedders.0"): t for n, t in tensors.items()}, "file"
        )


PARTS = [
    ("cond_stage_model.", "text encoder"),
    (UNET, "UNet"),
    ("first_stage_model.", "VAE"),
]


@pytest.mark.parametrize(("prefix", "part"), PARTS)
def test_files_with_some_of_the_parts(single_file_keys, prefix, part):
    """Each part alone and each missing, with the line that says which."""
    tensors = single_file_keys("sd1")
    others = [name for _, name in PARTS if name != part]
    alone = {n: t for n, t in tensors.items() if n.startswith(prefix)}
    with pytest.raises(InputError, match=rf"file: expected a .*, found {part}; missing: {', '.join(others)}"):
        single_file.read(alone, "file")
    without = {n: t for n, t in tensors.items() if n not in alone}
    with pytest.raises(InputError, match=rf"found {', '.join(others)}; missing: {part}"):
        single_file.read(without, "file")


STRANGERS = [
    ("x", "found none of them; missing: text encoder, UNet, VAE"),
    ("input_blocks.0.0.weight", "holds only a UNet;"),
    ("encoder.down.0.block.0.conv1.weight", "holds only a VAE, which goes into --vae;"),
    ("decoder.mid.block_1.conv1.weight", "holds only a VAE, which goes into --vae;"),
    (
        "down_blocks.0.resnets.0.conv1.weight",
        "holds one component of a folder in diffusers' layout, which --checkpoint takes as a whole;",
    ),
    (
        "text_model.encoder.layers.0.mlp.fc1.weight",
        "holds one component of a folder in diffusers' layout, which --checkpoint takes as a whole;",
    ),
    ("lora_unet_down_blocks_0.lora_up.weight", "holds a LoRA, which goes into --lora;"),
    ("unet.down_blocks.0.lora_A.weight", "holds a LoRA, which goes into --lora;"),
    ("emb_params", "holds a textual inversion, which goes into --embedding;"),
    ("clip_g", "holds a textual inversion, which goes into --embedding;"),
]


@pytest.mark.parametrize(("name", "message"), STRANGERS)
def test_files_of_other_kinds(name, message):
    with pytest.raises(InputError, match=re.escape(message)):
        single_file.read({name: loader.Tensor((4,), np.dtype("float32"), None)}, "file")


DAMAGED = [
    ("sd1", "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight", (49408, 1024), "width 1024"),
    ("sdxl", f"{UNET}label_emb.0.0.weight", (1280, 2817), "takes 2048 and 1281"),
    ("sd2", f"{UNET}out.2.weight", None, r"expected a tensor out\.2\.weight of 4 axes, found none"),
    ("sd2", f"{UNET}input_blocks.4.0.in_layers.2.weight", (640, 0, 3, 3), r"of 4 axes, found \[640, 0, 3, 3\]"),
    ("sd1", f"{UNET}input_blocks.5.0.in_layers.2.weight", (320, 640, 3, 3), r"input_blocks\.5 is not like the one"),
    ("sd1", f"{UNET}input_blocks.6.0.op.weight", None, r"expected a tensor input_blocks\.6\.0\.in_layers\.2\.weight"),
    ("sd1", "first_stage_model.decoder.conv_in.weight", (512, 16, 3, 3), "latents have 16 channels, expected 4"),
    ("sdxl", "conditioner.embedders.1.model.text_projection", None, r"expected a tensor text_projection\.weight"),
]


@pytest.mark.parametrize(("family", "name", "shape", "message"), DAMAGED)
def test_shapes_that_do_not_fit(single_file_keys, family, name, shape, message):
    with pytest.raises(InputError, match=f"file: .*{message}"):
        single_file.read(single_file_keys(family, {name: shape}), "file")


MARKED, BOTH = {"v_pred": (0,)}, {"v_pred": (0,), "ztsnr": (0,)}
SAYS_V, SAYS_EPSILON = ({"modelspec.prediction_type": t} for t in ("v", "epsilon"))
# family, extra tensors, header, flag -> prediction, size, first word of each notice
PREDICTIONS = [
    ("sd1", {}, {}, None, "epsilon", 512, []),
    ("sd1", {}, {}, "v_prediction", "v_prediction", 512, ["--prediction_type v_prediction is used, although such"]),
    ("sd1", MARKED, {}, None, "v_prediction", 512, []),
    ("sd2", {}, {}, None, "v_prediction", 768, ["the file does not say what it predicts; v_prediction is assumed"]),
    ("sd2", {}, {}, "epsilon", "epsilon", 512, ["--prediction_type epsilon is used, although such files usually mean"]),
    ("sd2", {}, {}, "v_prediction", "v_prediction", 768, []),
    ("sd2", {}, SAYS_EPSILON, None, "epsilon", 512, []),
    ("sd2", {}, SAYS_V, "epsilon", "epsilon", 512, ["--prediction_type epsilon is used, although the file says v_pr"]),
    ("sd2", {}, {"modelspec.prediction_type": "?"}, None, "v_prediction", 768, ["the file does not say"]),
    ("sdxl", {}, {}, None, "epsilon", 1024, []),
    ("sdxl", MARKED, SAYS_EPSILON, None, "v_prediction", 1024, []),
    ("sdxl", MARKED, {}, "epsilon", "epsilon", 1024, ["--prediction_type epsilon is used, although the file says"]),
    ("sdxl", BOTH, {}, None, "v_prediction", 1024, ["the file is marked ztsnr"]),
]


@pytest.mark.parametrize(("family", "extra", "metadata", "flag", "prediction", "size", "notices"), PREDICTIONS)
def test_what_the_unet_predicts(single_file_keys, family, extra, metadata, flag, prediction, size, notices):
    read = single_file.read(single_file_keys(family, extra), "file", prediction_type=flag, metadata=metadata)
    assert (read.config.scheduler.prediction_type, read.config.default_size) == (prediction, size)
    assert len(read.notices) == len(notices)
    assert all(found.startswith(start) for found, start in zip(read.notices, notices, strict=True))
    zero_snr = "ztsnr" in extra
    assert read.config.scheduler.rescale_betas_zero_snr is zero_snr
    assert read.config.scheduler.timestep_spacing == ("trailing" if zero_snr else "leading")


def test_sd_turbo(single_file_keys):
    """Stable Diffusion 2.x in XL's naming: distilled from the 512 x 512 model that predicts epsilon."""
    tensors = single_file_keys("sd2")
    turbo = {n.replace("cond_stage_model", "conditioner.embedders.0"): t for n, t in tensors.items()}
    read = single_file.read(turbo, "file")
    assert read.config.text_encoder == FAMILIES["sd2"].text_encoder and read.config.default_size == 512
    assert (read.config.scheduler.prediction_type, read.config.scheduler.timestep_spacing) == ("epsilon", "trailing")
    assert read.config.defaults == Defaults(sampler="euler", num_steps=4, guidance_scale=0.0)
    assert read.notices[0].endswith("epsilon is assumed; if pictures are noise, add --prediction_type v_prediction")
