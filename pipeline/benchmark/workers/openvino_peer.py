"""Time the checkpoint's networks in OpenVINO (CPU): the worker behind `benchmark.py --peers openvino`.

Run by `benchmark.timing.isolated` in its own environment (openvino-requirements.txt), with the file of the request as
its argument; with --prepare before it, it converts the networks and measures nothing. Read from the request, beside
what every row has: checkpoint, pipeline (its class), prompts, images_per_prompt, dtype, vae_dtype, cache (a folder for
converted networks).

Networks have one fixed shape. The loop is that of diffusers' pipelines with diffusers' scheduler, in float32.
"""

import hashlib
import json
import sys
from pathlib import Path

import diffusers_torch
import numpy as np

from models.errors import InputError
from pipeline.benchmark import timing

# It would write to the home folder, ask the network, and hang at exit where there is none.
sys.modules["openvino_telemetry"] = None
PACKAGES = ("openvino", "torch", "diffusers", "transformers")
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def converted(row: dict) -> Path:
    """Where this row's converted networks lie: a folder per checkpoint, shapes and versions."""
    checkpoint = Path(row["checkpoint"]).resolve()
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    key = {
        "files": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "shapes": [row[name] for name in ("height", "width", "prompts", "images")],
        "guided": row["settings"]["guidance_scale"] > 1,
        "versions": diffusers_torch.versions(*PACKAGES),
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    return Path(row["cache"]) / f"{checkpoint.name}-{row['width']}x{row['height']}-{digest}"


def prepare(request: str) -> None:
    """Convert the networks, unless that has been done."""
    row = json.loads(Path(request).read_text(encoding="utf-8"))
    folder = converted(row)
    if folder.exists():
        return
    print(f"{row['name']}: converting to {folder}", file=sys.stderr)
    import openvino_convert

    start()
    openvino_convert.convert(row, folder)


def start() -> None:
    """Import what is measured."""
    import openvino  # noqa: F401

    diffusers_torch.start()


class Networks:
    """The compiled networks of one row and what they say of themselves."""

    def __init__(self):
        self.compiled = {}

    def load(self, row: dict):
        """The row as a function to be timed."""
        import openvino

        folder = converted(row)
        if not folder.exists():
            raise InputError(f"{row['checkpoint']} could not be converted for OpenVINO; see the messages above")
        core = openvino.Core()
        for path in sorted(folder.glob("*.xml")):
            dtype = row["vae_dtype"] if path.stem == "decoder" else row["dtype"]
            how = {"INFERENCE_PRECISION_HINT": PRECISIONS[dtype], "PERFORMANCE_HINT": "LATENCY"}
            self.compiled[path.stem] = core.compile_model(path, "CPU", how)
        return drawing(row, {name: caller(network) for name, network in self.compiled.items()})

    def facts(self, row: dict) -> dict:
        """How the row was run. OpenVINO computes in float32 where the processor has no bfloat16."""
        import openvino

        unet = self.compiled["unet"]
        used, hint = unet.get_property("INFERENCE_PRECISION_HINT").to_string(), PRECISIONS[row["dtype"]]
        capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        flags = [
            "CPU",
            f"INFERENCE_PRECISION_HINT {hint}" + ("" if used == hint else f" (computed in {used})"),
            f"VAE {PRECISIONS[row['vae_dtype']]}",
            "PERFORMANCE_HINT LATENCY",
            "static shapes",
            f"{unet.get_property('INFERENCE_NUM_THREADS')} threads",
        ]
        return {
            "flags": ", ".join(flags),
            "versions": diffusers_torch.versions(*PACKAGES),
            "bfloat16_native": "BF16" in capabilities,
            "optimization_capabilities": list(capabilities),
            "inference_precision": used,
        }


def caller(network):
    """Function (*torch tensors) -> list of torch tensors, valid until its next call."""
    import torch

    def call(*inputs):
        results = network([value.numpy() for value in inputs], share_inputs=True, share_outputs=True)
        return [torch.from_numpy(results[i]) for i in range(len(network.outputs))]

    return call


def drawing(row: dict, networks: dict):
    """What diffusers' pipelines do between the networks, as a function of `lap`."""
    import diffusers
    import torch
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

    frame = Frame(row)
    settings = row["settings"]
    kind = getattr(diffusers, diffusers_torch.SCHEDULERS[settings["sampler"]])
    scheduler = kind.from_pretrained(row["checkpoint"], subfolder="scheduler")
    latents = diffusers_torch.initial_latents(frame, row)
    scale, rescale = settings["guidance_scale"], settings["guidance_rescale"]

    def draw(lap):
        with torch.inference_mode():
            told = frame.encode(networks)
            lap("text_encoder")
            scheduler.set_timesteps(settings["num_steps"])
            latent = latents * scheduler.init_noise_sigma
            for t in scheduler.timesteps:
                given = torch.cat([latent] * 2) if scale > 1 else latent
                (output,) = networks["unet"](scheduler.scale_model_input(given, t), t.reshape(1).float(), *told)
                if scale > 1:
                    unconditional, conditional = output.chunk(2)
                    output = unconditional + scale * (conditional - unconditional)
                    if rescale > 0:
                        output = rescale_noise_cfg(output, conditional, guidance_rescale=rescale)
                latent = scheduler.step(output, t, latent).prev_sample
            lap("diffusion")
            (image,) = networks["decoder"](latent)
            pictures = diffusers_torch.to_uint8(image.numpy())
            lap("decoder")
        return pictures

    return draw


class Frame:
    """The pipeline without its networks: tokenizers, and what its files say."""

    def __init__(self, row: dict):
        from transformers import CLIPTokenizer

        folder = Path(row["checkpoint"])
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        vae = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
        self.row = row
        self.guided = row["settings"]["guidance_scale"] > 1
        self.zeros = index.get("force_zeros_for_empty_prompt", False)
        self.vae_scale_factor = 2 ** (len(vae["block_out_channels"]) - 1)
        names = [name for name in ("tokenizer", "tokenizer_2") if index.get(name)]
        self.tokenizers = [CLIPTokenizer.from_pretrained(folder / name, local_files_only=True) for name in names]

    def encode(self, networks: dict) -> list:
        """What the UNet is told beside latent and timestep: context, with two text encoders pooled and time_ids."""
        import torch

        texts = [""] * (self.row["prompts"] if self.guided and not self.zeros else 0)
        texts += [self.row["prompt"]] * self.row["prompts"]
        outputs = []
        for name, tokenizer in zip(("text_encoder", "text_encoder_2"), self.tokenizers, strict=False):
            tokens = tokenizer(texts, padding="max_length", max_length=77, truncation=True, return_tensors="pt")
            outputs.append(networks[name](tokens.input_ids))
        told = [torch.cat([output[0] for output in outputs], dim=-1)]
        if len(outputs) == 2:
            told.append(outputs[1][1])
        if self.guided and self.zeros:
            told = [torch.cat([torch.zeros_like(value), value]) for value in told]
        told = [value.repeat_interleave(self.row["images_per_prompt"], dim=0).contiguous() for value in told]
        if len(outputs) == 2:
            size = (self.row["height"], self.row["width"])
            told.append(torch.tensor(np.float32([[*size, 0, 0, *size]])).repeat(len(told[0]), 1))
        return told


if __name__ == "__main__":
    if sys.argv[1] == "--prepare":
        sys.exit(prepare(sys.argv[2]))
    networks = Networks()
    sys.exit(timing.answer(sys.argv[1], networks.load, timing.Runtime(start, networks.facts, list)))
