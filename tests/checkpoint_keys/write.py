"""Writes the lists beside this file: every tensor of public checkpoints, by name and shape. No weights are made.

    .venv-peers/bin/python tests/checkpoint_keys/write.py     sd1, sd2, sdxl in both layouts
    .venv/bin/python tests/checkpoint_keys/write.py kerascv   KerasCV's networks of Stable Diffusion 1.x and 2.x

diffusers and transformers build their own modules with the public checkpoints' sizes; their state dicts are the lists
in diffusers' layout. The original (ldm, sgm) layout is spelled out below from the structure of the original code,
and diffusers' single-file converter is the judge: each tensor goes in marked with a number of its own, so that what
comes out shows where it came from, which rows of it, and whether it was transposed. The list is written only if the
converter gives exactly the names and shapes of diffusers' modules and uses every tensor, but for those that it
ignores by name and those that hold no weights.

Lines: `[component] PREFIX` starts a network; then `name shape`, in the original layout `name shape > name in
diffusers' layout`, followed by the rows it takes, or T for a transposed matrix; `> -` for one that is not used.
KerasCV's: the layer's place in the network, its class, the weight's name in the layer, its shape.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
Shapes = dict[str, tuple[int, ...]]

CLIP_L = {"width": 768, "layers": 12, "act": "quick_gelu"}
CLIP_H = {"width": 1024, "layers": 24, "act": "gelu"}
CLIP_G = {"width": 1280, "layers": 32, "act": "gelu"}
# depths: transformer blocks per resolution, 0 where there are none; heads as in diffusers' config files.
FAMILIES = {
    "sd1": {
        "unet": {"mult": (1, 2, 4, 4), "depths": (1, 1, 1, 0), "context": 768, "linear": False, "added": None},
        "heads": 8,
        "text_encoder": ("cond_stage_model.transformer.", "clip", CLIP_L),
    },
    "sd2": {
        "unet": {"mult": (1, 2, 4, 4), "depths": (1, 1, 1, 0), "context": 1024, "linear": True, "added": None},
        "heads": [5, 10, 20, 20],
        "text_encoder": ("cond_stage_model.model.", "open_clip", CLIP_H),
    },
    "sdxl": {
        "unet": {"mult": (1, 2, 4), "depths": (0, 2, 10), "context": 2048, "linear": True, "added": 2816},
        "heads": [5, 10, 20],
        "text_encoder": ("conditioner.embedders.0.transformer.", "clip", CLIP_L),
        "text_encoder_2": ("conditioner.embedders.1.model.", "open_clip", CLIP_G),
    },
}
CHANNELS = 320  # of the UNet's first resolution
VAE_CHANNELS, VAE_MULT = 128, (1, 2, 4, 4)
WITHOUT_WEIGHTS = ("text_model.embeddings.position_ids", "logit_scale")


# The original layout, from the structure of its code.


def affine(name: str, *shape: int) -> Shapes:
    """A weight and its bias."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def unet_resnet(name: str, inputs: int, outputs: int) -> Shapes:
    time = affine(f"{name}.emb_layers.1", outputs, 4 * CHANNELS)
    skip = affine(f"{name}.skip_connection", outputs, inputs, 1, 1) if inputs != outputs else {}
    return {
        **affine(f"{name}.in_layers.0", inputs),
        **affine(f"{name}.in_layers.2", outputs, inputs, 3, 3),
        **time,
        **affine(f"{name}.out_layers.0", outputs),
        **affine(f"{name}.out_layers.3", outputs, outputs, 3, 3),
        **skip,
    }


def unet_transformer(name: str, channels: int, depth: int, context: int, linear: bool) -> Shapes:
    projection = (channels, channels) if linear else (channels, channels, 1, 1)
    shapes = affine(f"{name}.norm", channels) | affine(f"{name}.proj_in", *projection)
    for block in (f"{name}.transformer_blocks.{i}" for i in range(depth)):
        for attention, seen in (("attn1", channels), ("attn2", context)):
            shapes[f"{block}.{attention}.to_q.weight"] = (channels, channels)
            shapes[f"{block}.{attention}.to_k.weight"] = (channels, seen)
            shapes[f"{block}.{attention}.to_v.weight"] = (channels, seen)
            shapes |= affine(f"{block}.{attention}.to_out.0", channels, channels)
        shapes |= affine(f"{block}.ff.net.0.proj", 8 * channels, channels)
        shapes |= affine(f"{block}.ff.net.2", channels, 4 * channels)
        for norm in ("norm1", "norm2", "norm3"):
            shapes |= affine(f"{block}.{norm}", channels)
    return shapes | affine(f"{name}.proj_out", *projection)


def unet(mult, depths, context, linear, added) -> Shapes:
    """The UNet, two residual blocks per resolution; resampling layers count as blocks of their own on the way down."""
    c = CHANNELS
    shapes = affine("time_embed.0", 4 * c, c) | affine("time_embed.2", 4 * c, 4 * c)
    if added is not None:
        shapes |= affine("label_emb.0.0", 4 * c, added) | affine("label_emb.0.2", 4 * c, 4 * c)
    shapes |= affine("input_blocks.0.0", c, 4, 3, 3)
    number, channels, skips = 1, c, [c]
    for level, (times, depth) in enumerate(zip(mult, depths, strict=True)):
        for _ in range(2):
            shapes |= unet_resnet(f"input_blocks.{number}.0", channels, c * times)
            channels = c * times
            if depth:
                shapes |= unet_transformer(f"input_blocks.{number}.1", channels, depth, context, linear)
            skips.append(channels)
            number += 1
        if level < len(mult) - 1:
            shapes |= affine(f"input_blocks.{number}.0.op", channels, channels, 3, 3)
            skips.append(channels)
            number += 1
    shapes |= unet_resnet("middle_block.0", channels, channels)
    shapes |= unet_transformer("middle_block.1", channels, depths[-1] or depths[-2], context, linear)
    shapes |= unet_resnet("middle_block.2", channels, channels)
    number = 0
    for level, (times, depth) in reversed(list(enumerate(zip(mult, depths, strict=True)))):
        for layer in range(3):
            shapes |= unet_resnet(f"output_blocks.{number}.0", channels + skips.pop(), c * times)
            channels = c * times
            if depth:
                shapes |= unet_transformer(f"output_blocks.{number}.1", channels, depth, context, linear)
            if level and layer == 2:
                shapes |= affine(f"output_blocks.{number}.{2 if depth else 1}.conv", channels, channels, 3, 3)
            number += 1
    return shapes | affine("out.0", c) | affine("out.2", 4, c, 3, 3)


def vae_resnet(name: str, inputs: int, outputs: int) -> Shapes:
    shortcut = affine(f"{name}.nin_shortcut", outputs, inputs, 1, 1) if inputs != outputs else {}
    return {
        **affine(f"{name}.norm1", inputs),
        **affine(f"{name}.conv1", outputs, inputs, 3, 3),
        **affine(f"{name}.norm2", outputs),
        **affine(f"{name}.conv2", outputs, outputs, 3, 3),
        **shortcut,
    }


def vae_middle(name: str, channels: int) -> Shapes:
    shapes = vae_resnet(f"{name}.block_1", channels, channels) | affine(f"{name}.attn_1.norm", channels)
    for layer in ("q", "k", "v", "proj_out"):
        shapes |= affine(f"{name}.attn_1.{layer}", channels, channels, 1, 1)
    return shapes | vae_resnet(f"{name}.block_2", channels, channels)


def vae() -> Shapes:
    """The autoencoder of 4 latent channels."""
    widths = [VAE_CHANNELS * m for m in VAE_MULT]
    shapes, channels = affine("encoder.conv_in", widths[0], 3, 3, 3), widths[0]
    for level, width in enumerate(widths):
        for layer in range(2):
            shapes |= vae_resnet(f"encoder.down.{level}.block.{layer}", channels, width)
            channels = width
        if level < len(widths) - 1:
            shapes |= affine(f"encoder.down.{level}.downsample.conv", channels, channels, 3, 3)
    shapes |= vae_middle("encoder.mid", channels) | affine("encoder.norm_out", channels)
    shapes |= affine("encoder.conv_out", 8, channels, 3, 3) | affine("decoder.conv_in", channels, 4, 3, 3)
    shapes |= vae_middle("decoder.mid", channels)
    for level, width in reversed(list(enumerate(widths))):
        for layer in range(3):
            shapes |= vae_resnet(f"decoder.up.{level}.block.{layer}", channels, width)
            channels = width
        if level:
            shapes |= affine(f"decoder.up.{level}.upsample.conv", channels, channels, 3, 3)
    shapes |= affine("decoder.norm_out", channels) | affine("decoder.conv_out", 3, channels, 3, 3)
    return shapes | affine("quant_conv", 8, 8, 1, 1) | affine("post_quant_conv", 4, 4, 1, 1)


def open_clip(width: int, layers: int, act: str) -> Shapes:
    """OpenCLIP's text encoder: queries, keys and values in one matrix."""
    shapes = {"positional_embedding": (77, width), "text_projection": (width, width), "logit_scale": ()}
    for block in (f"transformer.resblocks.{i}" for i in range(layers)):
        shapes |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
        shapes |= affine(f"{block}.attn.out_proj", width, width)
        shapes |= affine(f"{block}.ln_1", width) | affine(f"{block}.ln_2", width)
        shapes |= affine(f"{block}.mlp.c_fc", 4 * width, width) | affine(f"{block}.mlp.c_proj", width, 4 * width)
    return shapes | {"token_embedding.weight": (49408, width)} | affine("ln_final", width)


# diffusers' layout, from its modules, and the judgement.


def text_model(kind: str, width: int, layers: int, act: str):
    import transformers

    projected = kind == "open_clip" and width == CLIP_G["width"]
    config = transformers.CLIPTextConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        # Stable Diffusion 2.x reads the layer before the last one; diffusers leaves the last one out.
        num_hidden_layers=layers - 1 if kind == "open_clip" and not projected else layers,
        num_attention_heads=width // 64,
        hidden_act=act,
        projection_dim=width,
    )
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def modules(family: dict) -> dict:
    """diffusers' and transformers' own modules, without memory for weights."""
    import diffusers
    import torch

    u = family["unet"]
    with torch.device("meta"):
        made = {
            name: text_model(*family[name][1:2], **family[name][2])
            for name in ("text_encoder", "text_encoder_2")
            if name in family
        }
        made["unet"] = diffusers.UNet2DConditionModel(
            block_out_channels=[CHANNELS * m for m in u["mult"]],
            down_block_types=["CrossAttnDownBlock2D" if d else "DownBlock2D" for d in u["depths"]],
            up_block_types=["CrossAttnUpBlock2D" if d else "UpBlock2D" for d in reversed(u["depths"])],
            transformer_layers_per_block=[d or 1 for d in u["depths"]],
            attention_head_dim=family["heads"],
            cross_attention_dim=u["context"],
            use_linear_projection=u["linear"],
            addition_embed_type="text_time" if u["added"] else None,
            addition_time_embed_dim=256 if u["added"] else None,
            projection_class_embeddings_input_dim=u["added"],
        )
        made["vae"] = diffusers.AutoencoderKL(
            block_out_channels=[VAE_CHANNELS * m for m in VAE_MULT],
            down_block_types=["DownEncoderBlock2D"] * len(VAE_MULT),
            up_block_types=["UpDecoderBlock2D"] * len(VAE_MULT),
            layers_per_block=2,
            latent_channels=4,
        )
    return made


def original(family: dict) -> dict[str, tuple[str, Shapes]]:
    """Component -> (prefix, shapes without it) in the original layout."""
    made = {"unet": ("model.diffusion_model.", unet(**family["unet"])), "vae": ("first_stage_model.", vae())}
    for name in ("text_encoder", "text_encoder_2"):
        if name in family:
            prefix, kind, sizes = family[name]
            if kind == "open_clip":
                made[name] = prefix, open_clip(**sizes)
            else:
                # The original code holds transformers' CLIPTextModel, as it was named then.
                inner = {
                    f"text_model.{key}": tuple(v.shape) for key, v in text_model(kind, **sizes).state_dict().items()
                }
                made[name] = prefix, inner | {"text_model.embeddings.position_ids": (1, 77)}
    return made


def convert(component: str, module, prefix: str, state: dict, extract_ema: bool = False) -> dict:
    """diffusers' single-file converter on one component."""
    from diffusers.loaders import single_file_utils as peer

    if component == "unet":
        return peer.convert_ldm_unet_checkpoint(state, module.config, extract_ema=extract_ema)
    if component == "vae":
        return peer.convert_ldm_vae_checkpoint(state, module.config)
    if prefix.endswith(".model."):
        converted = peer.convert_open_clip_checkpoint(module, state, prefix=prefix)
    else:
        converted = peer.convert_ldm_clip_checkpoint(state)
    if hasattr(module, "text_model"):
        return converted
    return {name.removeprefix("text_model."): tensor for name, tensor in converted.items()}


def judge(component: str, module, prefix: str, shapes: Shapes) -> list[str]:
    """The lines of one component, from what the converter makes of numbered tensors."""
    import torch
    from diffusers.loaders import single_file_utils as peer

    names = list(shapes)
    # One number per tensor, repeated over its shape without taking memory; then one number per row.
    marks = {prefix + n: torch.tensor(i, dtype=torch.int16).expand(s) for i, (n, s) in enumerate(shapes.items())}
    expected = {n: tuple(t.shape) for n, t in module.state_dict().items()}
    converted = {n: t for n, t in convert(component, module, prefix, dict(marks)).items() if n not in WITHOUT_WEIGHTS}
    converted.pop("embeddings.position_ids", None)
    found = {n: tuple(t.shape) for n, t in converted.items()}
    assert found == expected, f"{component}: {sorted(set(found.items()) ^ set(expected.items()))[:9]}"
    origin = {target: int(tensor.reshape(-1)[0]) for target, tensor in converted.items()}

    rows = {
        prefix + n: torch.arange(s[0], dtype=torch.int16).reshape(-1, *[1] * (len(s) - 1)).expand(s)
        for n, s in shapes.items()
        if s and s[0] < 32768
    }
    numbered = convert(component, module, prefix, marks | rows)
    lines, used = {n: [] for n in names}, set()
    for target, source in origin.items():
        name, tensor = names[source], numbered[target]
        used.add(name)
        how = ""
        if prefix + name in rows:
            column = tensor.reshape(len(tensor), -1)[:, 0].tolist()
            if shapes[name] and column == [0] * len(column) and len(column) > 1:
                assert tensor.shape == shapes[name][::-1] and tensor[0].tolist() == list(range(tensor.shape[1]))
                how = " T"
            elif column != list(range(shapes[name][0])):
                assert column == list(range(column[0], column[-1] + 1))
                how = f" {column[0]}:{column[-1] + 1}"
        lines[name].append(f"{name} {written(shapes[name])} > {target}{how}")
    for name in set(names) - used:
        ignored = prefix + name in peer.SD_2_TEXT_ENCODER_KEYS_TO_IGNORE or name in WITHOUT_WEIGHTS
        assert ignored, f"{prefix}{name}: the converter does not use it"
        lines[name] = [f"{name} {written(shapes[name])} > -"]
    if component == "unet":
        # The averaged copies are called as the plain ones, without dots; one number per tensor again.
        copies = {"model_ema.diffusion_model" + n.replace(".", ""): marks[prefix + n] for n in names}
        plain = {prefix + n: torch.zeros(()) for n in names}
        averaged = convert(component, module, prefix, plain | copies, extract_ema=True)
        assert {t: int(tensor.reshape(-1)[0]) for t, tensor in averaged.items()} == origin
    return [line for name in names for line in lines[name]]


def written(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def write(path: Path, sections: dict[str, list[str]]) -> None:
    path.write_text("".join(f"[{head}\n" + "".join(f"{line}\n" for line in lines) for head, lines in sections.items()))
    print(path.name, sum(map(len, sections.values())), "lines", path.stat().st_size, "bytes")


# KerasCV's networks: their files name layers and weights by the order they were made in, so only the order lasts.


def kerascv_lines(network) -> list[str]:
    """Layer by layer, as Keras' .h5 files are written: the place of the layer, the kind of weight, its shape."""
    layers = [layer for layer in network.layers if layer.weights]
    return [
        f"{number} {type(layer).__name__} {weight.name} {written(tuple(weight.shape))}"
        for number, layer in enumerate(layers)
        for weight in layer.weights
    ]


def write_kerascv() -> None:
    import keras
    from keras_cv.src.models.stable_diffusion import decoder, diffusion_model, image_encoder, text_encoder

    # No memory for weights.
    with keras.StatelessScope(initialize_variables=False):
        vae = {
            "decoder]": decoder.Decoder(512, 512, download_weights=False),
            "image_encoder]": image_encoder.ImageEncoder(download_weights=False),
        }
        versions = {
            "kerascv1": (text_encoder.TextEncoder, diffusion_model.DiffusionModel),
            "kerascv2": (text_encoder.TextEncoderV2, diffusion_model.DiffusionModelV2),
        }
        for name, (encoder, unet_class) in versions.items():
            networks = {
                "text_encoder]": encoder(77, download_weights=False),
                "unet]": unet_class(512, 512, 77, download_weights=False),
            }
            lists = {head: kerascv_lines(network) for head, network in {**networks, **vae}.items()}
            write(FOLDER / f"{name}.txt", lists)


def main() -> None:
    if sys.argv[1:] == ["kerascv"]:
        return write_kerascv()
    for name, family in FAMILIES.items():
        made, ldm = modules(family), original(family)
        lists = {
            f"{component}]": [f"{key} {written(tuple(t.shape))}" for key, t in module.state_dict().items()]
            for component, module in made.items()
        }
        judged = {
            f"{component}] {ldm[component][0]}": judge(component, module, *ldm[component])
            for component, module in made.items()
        }
        write(FOLDER / f"{name}.diffusers.txt", lists)
        write(FOLDER / f"{name}.ldm.txt", judged)


if __name__ == "__main__":
    main()
