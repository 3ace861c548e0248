"""LoRA and textual-inversion files as diffusers and peft write them, and what diffusers makes of them: lora.npz.

    .venv-peers/bin/python tests/goldens/write_lora.py

The models are tiny and their weights a function of the name, so that only files, samples of merged weights and outputs
are stored. The test reads this module for `values` and the inputs; torch is imported where it is needed.

Each case: files and their weights, which a pipeline loads and fuses; six numbers of each merged weight (`sample`); both
networks' outputs after that. diffusers 0.42 misreads kohya's alphas where they differ: every attention layer gets the
most frequent one, even when its own converter wrote the file. So each of those files has one alpha; ranks differ.
"""

import importlib.metadata
import json
import tempfile
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
TOKENIZER = HERE.parents[1] / "checkpoints" / "emoji" / "tokenizer"
UNET = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [16, 32],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 2,
    "attention_head_dim": 4,
    "cross_attention_dim": 16,
    "norm_num_groups": 8,
    "norm_eps": 1e-5,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
}
TEXT_ENCODER = {
    "vocab_size": 100,
    "max_position_embeddings": 77,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
VOCABULARY = 49408
PROMPTS = ["a photo of <x>", "<X> in my-style, <multi> & <multi>!", "my-styles are not my style", "a <multi>"]


def values(name: str, shape) -> np.ndarray:
    """Weights float32 that keep activations near unit scale, from diffusers' name and the shape alone."""
    array = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if "embedding" in name and "embeddings" in name:
        array *= 0.5
    elif len(shape) > 1:
        array /= np.prod(shape[1:]) ** 0.5
    else:
        array = 0.1 * array + ("norm" in name and name.endswith("weight"))
    return array.astype(np.float32)


def inputs() -> dict[str, np.ndarray]:
    """latent [1, 8, 8, 4], context [1, 6, 16], tokens int32[1, 9]; timestep is 301."""
    random = np.random.default_rng(5)
    latent = random.standard_normal((1, 8, 8, 4)).astype(np.float32)
    context = random.standard_normal((1, 6, 16)).astype(np.float32)
    return {"latent": latent, "context": context, "tokens": random.integers(100, size=(1, 9)).astype(np.int32)}


def sample(weight: np.ndarray) -> np.ndarray:
    """Six numbers of a weight that every swap or wrong scale changes: two norms and four elements."""
    flat = weight.astype(np.float64).ravel()
    ramp = np.linspace(1, 2, flat.size)
    picked = flat[np.linspace(0, flat.size - 1, 4).astype(int)]
    return np.array([np.linalg.norm(flat), flat @ ramp, *picked], np.float32)


def main():
    from transformers import CLIPTextModel

    CLIPTextModel.load_adapter = load_adapter
    result = {"versions": json.dumps({n: importlib.metadata.version(n) for n in ("diffusers", "peft", "transformers")})}
    pipe = pipeline(TEXT_ENCODER)
    shapes = {name: {k: list(v.shape) for k, v in getattr(pipe, name).state_dict().items()} for name in COMPONENTS}
    result["shapes"] = json.dumps(shapes)
    result["outputs/plain/unet"], result["outputs/plain/text_encoder"] = outputs(pipe)
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        for name, path in files.items():
            result[f"file/{name}"] = np.frombuffer(path.read_bytes(), np.uint8)
        peft_config = Path(folder) / "peft" / "adapter_config.json"
        result["file/peft_config"] = np.frombuffer(peft_config.read_bytes(), np.uint8)
        for case, used in CASES.items():
            result |= fused(case, {files[name]: weight for name, weight in used.items()})
        result |= fused_by_peft(Path(folder) / "peft")
        result |= inverted(Path(folder))
    np.savez_compressed(HERE / "lora.npz", **result)
    print(f"{(HERE / 'lora.npz').stat().st_size} bytes")


def load_adapter(self, adapter_name, adapter_state_dict, peft_config, **_):
    """What transformers 5.24 does with peft 0.22; with 0.21.2, the newest there is, its own method loads nothing."""
    from peft import inject_adapter_in_model, set_peft_model_state_dict

    inject_adapter_in_model(peft_config, self, adapter_name)
    result = set_peft_model_state_dict(self, adapter_state_dict, adapter_name)
    assert not result.unexpected_keys and not [key for key in result.missing_keys if adapter_name in key], result
    self._hf_peft_config_loaded = True


COMPONENTS = ("unet", "text_encoder")
# Files of a case and their weights.
CASES: dict[str, dict[str, float]] = {
    "peft_metadata": {"peft_metadata": 1.0},
    "peft_no_alpha": {"peft_no_alpha": 0.7},
    "diffusers": {"diffusers": 1.0},
    "processor": {"processor": 1.0},
    "kohya": {"kohya": 0.8},
    "kohya_te1": {"kohya_te1": 1.0},
    "kohya_ldm": {"kohya_ldm": 1.0},
    "locon": {"locon": 1.0},
    "two_files": {"peft_metadata": 0.8, "kohya": -0.5},
}


def pipeline(text_config):
    import torch
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    parts = {
        "unet": UNet2DConditionModel(**UNET),
        "text_encoder": CLIPTextModel(CLIPTextConfig(**text_config, projection_dim=16)),
    }
    for part in parts.values():
        for name, parameter in part.named_parameters():
            parameter.data = torch.from_numpy(values(name, tuple(parameter.shape)))
        part.eval()
    return StableDiffusionPipeline(
        vae=None,
        tokenizer=CLIPTokenizer.from_pretrained(TOKENIZER),
        scheduler=DDIMScheduler(clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **parts,
    )


def outputs(pipe):
    """The UNet's [1, 8, 8, 4] and the text encoder's [1, 9, 16]."""
    import torch

    given = {name: torch.from_numpy(value) for name, value in inputs().items()}
    with torch.no_grad():
        drawn = pipe.unet(given["latent"].permute(0, 3, 1, 2), 301, given["context"]).sample.permute(0, 2, 3, 1)
        states = pipe.text_encoder(given["tokens"]).last_hidden_state
    return drawn.contiguous().numpy(), states.numpy()


def state(name, lora_config):
    """A network's LoRA as peft makes it, with random numbers: (state dict without component, settings)."""
    import torch
    from peft import get_peft_model_state_dict, inject_adapter_in_model

    module = getattr(pipeline(TEXT_ENCODER), name)
    inject_adapter_in_model(lora_config, module, "default")
    tensors = get_peft_model_state_dict(module, adapter_name="default")
    for key, tensor in tensors.items():
        random = np.random.default_rng(zlib.crc32(f"{key}{lora_config.r}".encode()))
        drawn = random.standard_normal(tuple(tensor.shape)) * (0.6 / np.prod(tensor.shape[1:]) ** 0.5)
        tensors[key] = torch.from_numpy(drawn.astype(np.float32))
    return tensors, module.peft_config["default"].to_dict()


ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TEXT_ATTENTION = ["q_proj", "k_proj", "v_proj", "out_proj"]


def write_files(folder):
    """Name -> file, written by the library whose names it has, or renamed where none writes them any more."""
    import torch
    from diffusers import StableDiffusionPipeline
    from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya
    from peft import LoraConfig
    from safetensors.torch import save_file

    files = {}

    def save(name, unet=None, text_encoder=None, **metadata):
        StableDiffusionPipeline.save_lora_weights(folder / name, unet, text_encoder, **metadata)
        files[name] = folder / name / "pytorch_lora_weights.safetensors"

    def save_plain(name, tensors):
        files[name] = folder / f"{name}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, files[name])

    # diffusers today: peft's names, alpha in the metadata, patterns for some modules.
    many = ATTENTION + ["ff.net.0.proj", "proj_in", "conv1", "time_emb_proj"]
    patterns = {"rank_pattern": {"to_k": 3, "conv1": 1}, "alpha_pattern": {"to_k": 6, "mid_block.resnets.0.conv1": 5}}
    unet, unet_settings = state("unet", LoraConfig(r=2, lora_alpha=3, target_modules=many, **patterns))
    text, text_settings = state("text_encoder", LoraConfig(r=4, lora_alpha=2, target_modules=[*TEXT_ATTENTION, "fc1"]))
    settings = {"unet_lora_adapter_metadata": unet_settings, "text_encoder_lora_adapter_metadata": text_settings}
    save("peft_metadata", unet, text, **settings)

    # The same without metadata: alpha is each module's own rank.
    unet, _ = state("unet", LoraConfig(r=2, target_modules=ATTENTION, rank_pattern={"to_v": 4}))
    text, _ = state("text_encoder", LoraConfig(r=1, target_modules=["q_proj", "fc2"], rank_pattern={"fc2": 3}))
    save("peft_no_alpha", unet, text)

    # diffusers before peft: .lora.down, .lora_linear_layer.down; earlier still: attention processors.
    save("diffusers", convert_state_dict_to_diffusers(unet), convert_state_dict_to_diffusers(text))
    text, _ = state("text_encoder", LoraConfig(r=2, target_modules=TEXT_ATTENTION))
    save("processor", {old_name(k): v for k, v in unet.items()}, {old_name(k): v for k, v in text.items()})

    # kohya's names: by diffusers' converter, with alpha = rank and lora_te1_; as kohya's own trainer writes them, with
    # one alpha and ranks that differ.
    unet, _ = state("unet", LoraConfig(r=3, target_modules=["to_q", "to_out.0"]))
    text, _ = state("text_encoder", LoraConfig(r=3, target_modules=TEXT_ATTENTION))
    save_plain("kohya_te1", convert_state_dict_to_kohya(both(unet, text)))
    targets = [*ATTENTION, "ff.net.2", "proj_out"]
    unet, _ = state("unet", LoraConfig(r=2, target_modules=targets, rank_pattern={"to_q": 3}))
    text, _ = state("text_encoder", LoraConfig(r=2, target_modules=[*TEXT_ATTENTION, "fc1"], rank_pattern={"fc1": 4}))
    converted = convert_state_dict_to_kohya(both(unet, text))
    renamed = {k.replace("lora_te1_", "lora_te_text_model_"): v for k, v in converted.items()}
    alphas = {k: torch.tensor(1.5) if k.endswith(".alpha") else v for k, v in renamed.items()}
    save_plain("kohya", alphas)

    # CompVis' block names; renamed by hand, read by diffusers.
    text_part = {k: v for k, v in alphas.items() if k.startswith("lora_te_")}
    save_plain("kohya_ldm", {ldm_name(k): v for k, v in alphas.items() if k.startswith("lora_unet_")} | text_part)

    # LoCon: convolutions 3x3, strided and 1x1, each kind with its own rank and alpha.
    convs = ["conv1", "conv2", "conv_shortcut", "proj_in", "conv", "conv_in", "linear_1"]
    unet, _ = state("unet", LoraConfig(r=2, target_modules=convs, rank_pattern={"conv_shortcut": 1, "conv2": 3}))
    converted = convert_state_dict_to_kohya({f"unet.{k}": v for k, v in unet.items()})
    for key in converted:
        if key.endswith(".alpha"):
            converted[key] = torch.tensor(2.0 if "conv_shortcut" in key else 0.5)
    save_plain("locon", converted)

    from peft import get_peft_model

    config = LoraConfig(
        r=2, lora_alpha=5, target_modules=ATTENTION, rank_pattern={"to_k": 1}, alpha_pattern={"to_k": 4}
    )
    model = get_peft_model(pipeline(TEXT_ENCODER).unet, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.from_numpy(values(name, tuple(parameter.shape)))
    model.save_pretrained(folder / "peft")
    files["peft"] = folder / "peft" / "adapter_model.safetensors"
    return files


def both(unet, text_encoder):
    """One state dict, by component."""
    return {f"unet.{k}": v for k, v in unet.items()} | {f"text_encoder.{k}": v for k, v in text_encoder.items()}


def old_name(key):
    """peft's name of an attention layer to that of diffusers' attention processors."""
    import re

    key = re.sub(r"(attn\d)\.to_([qkv])\.", r"\1.processor.to_\2_lora.", key)
    key = re.sub(r"(attn\d)\.to_out\.0\.", r"\1.processor.to_out_lora.", key)
    key = re.sub(r"self_attn\.([qkv])_proj\.", r"self_attn.to_\1_lora.", key)
    key = re.sub(r"self_attn\.out_proj\.", r"self_attn.to_out_lora.", key)
    return key.replace("lora_A", "down").replace("lora_B", "up")


def ldm_name(key):
    """kohya's name of a transformer's layer with CompVis' numbers of blocks, for `UNET`."""
    import re

    key = re.sub(r"down_blocks_0_attentions_(\d)", lambda m: f"input_blocks_{1 + int(m[1])}_1", key)
    key = key.replace("mid_block_attentions_0", "middle_block_1")
    return re.sub(r"up_blocks_1_attentions_(\d)", lambda m: f"output_blocks_{3 + int(m[1])}_1", key)


def fused(case, files):
    """What diffusers makes of the files: merged weights and outputs."""
    pipe = pipeline(TEXT_ENCODER)
    names = []
    for i, path in enumerate(files):
        names.append(f"adapter{i}")
        pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name=names[-1], unet_config=pipe.unet.config)
    pipe.set_adapters(names, list(files.values()))
    pipe.fuse_lora(adapter_names=names)
    pipe.unload_lora_weights()
    return recorded(case, pipe)


def fused_by_peft(folder):
    from peft import PeftModel

    pipe = pipeline(TEXT_ENCODER)
    pipe.unet = PeftModel.from_pretrained(pipe.unet, folder).merge_and_unload()
    return recorded("peft", pipe)


def recorded(case, pipe):
    merged, plain = {}, pipeline(TEXT_ENCODER)
    for name in COMPONENTS:
        before, after = (getattr(p, name).state_dict() for p in (plain, pipe))
        assert before.keys() == after.keys(), set(before) ^ set(after)
        changed = [k for k in after if not after[k].equal(before[k])]
        merged |= {f"{name}/{k}": sample(after[k].numpy()) for k in changed}
    drawn, states = outputs(pipe)
    print(f"{case}: {len(merged)} weights changed")
    assert np.abs(drawn - outputs(plain)[0]).max() > 0.05
    return {
        f"merged/{case}/names": json.dumps(list(merged)),
        f"merged/{case}/samples": np.stack(list(merged.values())),
        f"outputs/{case}/unet": drawn,
        f"outputs/{case}/text_encoder": states,
    }


def inverted(folder):
    """Textual inversion in three dialects, loaded by diffusers: ids and states of the prompts."""
    import torch
    from safetensors.torch import save_file

    random = np.random.default_rng(9)
    vectors = {
        "x": ("<x>", None, random.standard_normal(16)),
        "multi": ("<multi>", None, random.standard_normal((3, 16))),
        "my-style": ("emb_params", "my-style", random.standard_normal((2, 16))),
    }
    pipe = pipeline(TEXT_ENCODER | {"vocab_size": VOCABULARY})
    result = {}
    for name, (key, token, array) in vectors.items():
        path = folder / f"{name}.safetensors"
        save_file({key: torch.from_numpy(array.astype(np.float32))}, path)
        pipe.load_textual_inversion(folder, weight_name=path.name, token=token)
        result[f"file/embedding_{name}"] = np.frombuffer(path.read_bytes(), np.uint8)
    prompts = [pipe.maybe_convert_prompt(prompt, pipe.tokenizer) for prompt in PROMPTS]
    ids = pipe.tokenizer(prompts, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    with torch.no_grad():
        states = pipe.text_encoder(ids[:, :20]).last_hidden_state
    return result | {"embedding/ids": ids.numpy().astype(np.int32), "embedding/states": states.numpy()}


if __name__ == "__main__":
    main()
