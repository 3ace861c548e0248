"""Names of checkpoints to our variables: every published spelling fills the same weights, bit for bit."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import text_encoder, unet, vae
from models.errors import InputError
from models.families import FAMILIES
from pipeline.checkpoints import diffusers_folder, keymaps, loader

STEM = "diffusion_pytorch_model"
SD1 = FAMILIES["sd1"]
# Stable Diffusion 1.x's layers, few channels: its names do not depend on how wide they are.
NARROW = {
    "text_encoder": dataclasses.replace(
        SD1.text_encoder, vocab_size=8, hidden_size=12, intermediate_size=8, num_attention_heads=12
    ),
    "unet": dataclasses.replace(
        SD1.unet, block_out_channels=(8, 16, 32, 32), norm_num_groups=4, cross_attention_dim=12
    ),
    "vae": dataclasses.replace(SD1.vae, block_out_channels=(4, 8, 16, 16), norm_num_groups=4),
}
# As diffusers and transformers count the tensors of a published checkpoint (position_ids not among them).
COUNTS = {"text_encoder": 196, "unet": 686, "vae": 248}


@pytest.fixture(scope="module")
def variables():
    """Component -> {LAYER.VARIABLE: shape} of Stable Diffusion 1.x's architecture, narrow."""
    made = {
        "text_encoder": [text_encoder.TextEncoder(NARROW["text_encoder"])],
        "unet": [unet.UNet(NARROW["unet"])],
        "vae": [vae.VAEDecoder(NARROW["vae"]), vae.VAEEncoder(NARROW["vae"])],
    }
    return {
        name: {v.path.replace("/", "."): tuple(v.shape) for layer in parts for v in layer.variables}
        for name, parts in made.items()
    }


@pytest.mark.parametrize("component", COUNTS)
def test_as_many_weights_as_published(variables, component):
    assert len(variables[component]) == COUNTS[component]


# A name of each kind as published, the variable it fills and how.
NAMES = """
text_encoder embeddings.token_embedding.weight > embeddings.token_embedding.embeddings same
text_encoder embeddings.position_embedding.weight > embeddings.position_embedding.embeddings same
text_encoder encoder.layers.11.self_attn.q_proj.weight > encoder.layers.11.self_attn.q_proj.kernel dense
text_encoder encoder.layers.0.self_attn.out_proj.bias > encoder.layers.0.self_attn.out_proj.bias same
text_encoder encoder.layers.5.layer_norm2.weight > encoder.layers.5.layer_norm2.gamma same
text_encoder encoder.layers.5.mlp.fc1.weight > encoder.layers.5.mlp.fc1.kernel dense
text_encoder final_layer_norm.bias > final_layer_norm.beta same
unet conv_in.weight > conv_in.kernel conv
unet time_embedding.linear_1.weight > time_embedding.linear_1.kernel dense
unet time_embedding.linear_2.bias > time_embedding.linear_2.bias same
unet down_blocks.0.resnets.1.norm1.weight > down_blocks.0.resnets.1.norm1.gamma same
unet down_blocks.1.resnets.0.conv_shortcut.weight > down_blocks.1.resnets.0.conv_shortcut.kernel conv
unet down_blocks.1.resnets.0.time_emb_proj.weight > down_blocks.1.resnets.0.time_emb_proj.kernel dense
unet down_blocks.2.downsamplers.0.conv.bias > down_blocks.2.downsamplers.0.conv.bias same
unet down_blocks.0.attentions.1.proj_in.weight > down_blocks.0.attentions.1.proj_in.kernel dense
unet mid_block.attentions.0.norm.weight > mid_block.attentions.0.norm.gamma same
unet mid_block.attentions.0.transformer_blocks.0.norm3.bias > mid_block.attentions.0.transformer_blocks.0.norm3.beta same
unet up_blocks.3.attentions.2.transformer_blocks.0.attn2.to_out.0.weight > up_blocks.3.attentions.2.transformer_blocks.0.attn2.to_out.0.kernel dense
unet up_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj.weight > up_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj.kernel dense
unet up_blocks.1.attentions.0.transformer_blocks.0.ff.net.2.bias > up_blocks.1.attentions.0.transformer_blocks.0.ff.net.2.bias same
unet up_blocks.0.upsamplers.0.conv.weight > up_blocks.0.upsamplers.0.conv.kernel conv
unet conv_norm_out.weight > conv_norm_out.gamma same
unet conv_out.weight > conv_out.kernel conv
vae encoder.down_blocks.2.downsamplers.0.conv.weight > encoder.down_blocks.2.downsamplers.0.conv.kernel conv
vae encoder.mid_block.attentions.0.group_norm.weight > encoder.mid_block.attentions.0.group_norm.gamma same
vae decoder.mid_block.attentions.0.to_out.0.weight > decoder.mid_block.attentions.0.to_out.0.kernel dense
vae decoder.mid_block.attentions.0.proj_attn.weight > decoder.mid_block.attentions.0.to_out.0.kernel dense
vae decoder.mid_block.attentions.0.query.bias > decoder.mid_block.attentions.0.to_q.bias same
vae decoder.up_blocks.3.resnets.2.conv2.weight > decoder.up_blocks.3.resnets.2.conv2.kernel conv
vae decoder.conv_norm_out.bias > decoder.conv_norm_out.beta same
vae quant_conv.weight > quant_conv.kernel conv
vae post_quant_conv.bias > post_quant_conv.bias same
""".strip().splitlines()  # noqa: E501


@pytest.mark.parametrize("line", NAMES)
def test_names_as_published(variables, line):
    component, name, _, variable, transform = line.split()
    assert keymaps.target(name, keymaps.DIFFUSERS[component].rules) == (variable, transform)
    assert variable in variables[component]


@pytest.mark.parametrize("component", COUNTS)
def test_one_rule_per_name(variables, component):
    """Every variable's name in diffusers' spelling comes back by exactly one rule."""
    suffixes = {"kernel": "weight", "gamma": "weight", "embeddings": "weight", "bias": "bias", "beta": "bias"}
    for variable in variables[component]:
        layer, _, kind = variable.rpartition(".")
        found = keymaps.target(f"{layer}.{suffixes[kind]}", keymaps.DIFFUSERS[component].rules)
        assert found is not None and found[0] == variable


@pytest.mark.parametrize("component", COUNTS)
@pytest.mark.parametrize(
    "name", ["", "x", "conv_in", "conv_in.weight.weight", "add_embedding.linear_1.weight", "lora.up"]
)
def test_other_names_fill_nothing(variables, component, name):
    found = keymaps.target(name, keymaps.DIFFUSERS[component].rules)
    assert found is None or found[0] not in variables[component]


def test_a_name_that_two_rules_match_is_a_mistake_in_the_table():
    with pytest.raises(ValueError, match="a.weight matches 2 rules"):
        keymaps.target("a.weight", [(r"a\.weight", "a.kernel", "same"), (r"(.*)\.weight", r"\1.kernel", "same")])


def source(arrays):
    return {name: loader.Tensor(array.shape, array.dtype, lambda array=array: array) for name, array in arrays.items()}


@pytest.fixture(scope="module")
def tiny(checkpoint_folder):
    """Config and tensors of the tiny checkpoint, component by component."""
    stems = {"text_encoder": "model", "unet": STEM, "vae": STEM}
    tensors = {name: load_file(checkpoint_folder / name / f"{stem}.safetensors") for name, stem in stems.items()}
    return diffusers_folder.read_config(checkpoint_folder), tensors


def loaded(made, arrays, component):
    ignored = loader.load(made, source(arrays), keymaps.DIFFUSERS[component], component)
    return [v.numpy() for layer in made for v in layer.variables], ignored


def equal(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_old_names_and_convolutions_of_vae_attention(tiny):
    """query, key, value, proj_attn of diffusers before 0.14, and 1x1 convolutions: bit-equal weights."""
    config, tensors = tiny
    old_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    old = {}
    for name, array in tensors["vae"].items():
        layer = name.rpartition(".")[0].partition("attentions.0.")[2]
        if layer in old_names:
            name = name.replace(f"attentions.0.{layer}", f"attentions.0.{old_names[layer]}")
        old[name] = array
    assert len(old.keys() - tensors["vae"].keys()) == 16  # 4 layers x weight and bias x encoder and decoder
    convolutions = {
        name: a[:, :, None, None] if "mid_block.attentions.0.to_" in name and a.ndim == 2 else a
        for name, a in tensors["vae"].items()
    }
    made = [vae.VAEDecoder(config.vae), vae.VAEEncoder(config.vae)]
    expected = loaded(made, tensors["vae"], "vae")[0]
    assert equal(loaded(made, old, "vae")[0], expected)
    assert equal(loaded(made, convolutions, "vae")[0], expected)


def test_linear_projections_of_stable_diffusion_2(tiny):
    """proj_in and proj_out as matrices or as 1x1 convolutions: bit-equal weights."""
    config, tensors = tiny
    linear = {
        name: a[:, :, 0, 0] if name.endswith(("proj_in.weight", "proj_out.weight")) else a
        for name, a in tensors["unet"].items()
    }
    made = [unet.UNet(config.unet)]
    assert equal(loaded(made, linear, "unet")[0], loaded(made, tensors["unet"], "unet")[0])


def test_prefix_of_the_text_encoder_on_all_names_or_none(tiny):
    config, tensors = tiny
    made = [text_encoder.TextEncoder(config.text_encoder)]
    prefixed = tensors["text_encoder"]
    bare = {name.removeprefix("text_model."): array for name, array in prefixed.items()}
    assert not prefixed.keys() & bare.keys()
    expected = loaded(made, prefixed, "text_encoder")[0]
    assert equal(loaded(made, bare, "text_encoder")[0], expected)
    mixed = prefixed | {"final_layer_norm.bias": bare["final_layer_norm.bias"]}
    with pytest.raises(InputError, match=r"text_encoder: 1 unused: final_layer_norm\.bias"):
        loaded(made, mixed, "text_encoder")
    del mixed["text_model.final_layer_norm.bias"]
    with pytest.raises(InputError, match=r"1 unused: final_layer_norm\.bias; 1 missing: final_layer_norm\.beta"):
        loaded(made, mixed, "text_encoder")


def test_position_ids_are_ignored_and_reported(tiny):
    config, tensors = tiny
    made = [text_encoder.TextEncoder(config.text_encoder)]
    name = "text_model.embeddings.position_ids"
    assert loaded(made, tensors["text_encoder"] | {name: np.arange(77)[None]}, "text_encoder")[1] == [name]
    with pytest.raises(InputError, match="1 unused: embeddings.position_ids"):
        loaded(made, tensors["text_encoder"] | {"embeddings.position_ids": np.arange(77)[None]}, "text_encoder")


def test_precisions_of_parts_may_differ(tiny, damaged_checkpoint):
    """A folder with the UNet in fp16 only and the VAE in fp32 only loads, and its numbers are the files'."""
    config, tensors = tiny
    halves = {name: array.astype("float16") for name, array in tensors["unet"].items()}
    (damaged_checkpoint / "unet" / f"{STEM}.safetensors").unlink()
    save_file(halves, damaged_checkpoint / "unet" / f"{STEM}.fp16.safetensors")
    made = [unet.UNet(config.unet)]
    read = diffusers_folder.read_weights(damaged_checkpoint, "unet")
    loader.load(made, read, keymaps.DIFFUSERS["unet"], "unet")
    np.testing.assert_array_equal(made[0].conv_in.bias, halves["conv_in.bias"].astype("float32"))
    assert diffusers_folder.read_weights(damaged_checkpoint, "vae")["decoder.conv_in.bias"].dtype == np.float32
