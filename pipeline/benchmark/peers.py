"""Peers to measure beside exports: who they are, in which environment they run, what each is asked for.

A peer is a script of `workers/` that speaks the protocol of `pipeline.benchmark.timing.isolated`; what it needs is
installed in an environment of its own (`make peers`), KerasCV in ours. No TensorFlow.
"""

import dataclasses
import json
import logging
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from models.errors import InputError
from models.families import FAMILIES
from pipeline import manifest
from pipeline.checkpoints import kerascv
from pipeline.files import read_json

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "workers"
CACHE = ROOT / "build" / "peers"  # what a peer makes of a checkpoint once
PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
SAMPLERS = ("ddim", "euler")  # those that the peers' scripts know
DTYPES = ("float32", "bfloat16")
MISSING = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where a peer's script runs."""

    script: str  # in workers/
    folder: str  # of the virtual environment that `make peers` builds
    packages: tuple[str, ...]  # what its Python must be able to import
    requirements: str  # in workers/


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way of drawing that is not ours."""

    label: str
    environment: str
    call_path: str
    options: dict  # for its script


ENVIRONMENTS = {
    "diffusers": Environment(
        "diffusers_torch.py", ".venv-peers", ("torch", "diffusers", "transformers"), "diffusers-requirements.txt"
    ),
    "openvino": Environment(
        "openvino_peer.py", ".venv-openvino", ("openvino", "torch", "diffusers"), "openvino-requirements.txt"
    ),
}
PIPELINE_PATH = "diffusers' pipeline in PyTorch: encode_prompt, the pipeline from its embeddings to the latent, decode"
PEERS = {
    "diffusers": Peer("diffusers", "diffusers", PIPELINE_PATH, {"compile": False}),
    "diffusers_compile": Peer("diffusers compiled", "diffusers", PIPELINE_PATH, {"compile": True}),
    "openvino": Peer(
        "OpenVINO", "openvino", "networks compiled by OpenVINO, diffusers' loop and scheduler between them", {}
    ),
}


def pythons(names: list[str], given: list[str]) -> dict[str, str]:
    """The Python of each environment that the peers need, looked into before anything is measured.

    Args:
        names: keys of `PEERS`.
        given: "ENVIRONMENT=PATH" each, instead of those that `make peers` builds.

    Raises:
        InputError: no such peer, no such Python, or one that lacks a package.
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise InputError(f"--peers {','.join(unknown)}: expected some of {','.join(PEERS)}")
    pairs = dict(entry.partition("=")[::2] for entry in given)
    if not all(pairs.values()) or not set(pairs) <= set(ENVIRONMENTS):
        expected = ",".join(f"{name}=PATH" for name in ENVIRONMENTS)
        raise InputError(f"--peer_python {','.join(given)}: expected {expected}, or one of them")
    needed = dict.fromkeys(PEERS[name].environment for name in names)
    found = {name: pairs.get(name, str(ROOT / ENVIRONMENTS[name].folder / "bin" / "python")) for name in needed}
    for name, python in found.items():
        _check_packages(name, python)
    return found


def _check_packages(name: str, python: str) -> None:
    environment = ENVIRONMENTS[name]
    try:
        answer = subprocess.run([python, "-c", MISSING, *environment.packages], capture_output=True, text=True)
    except OSError as error:
        raise InputError(
            f"--peers: {name} needs a Python of its own, and {python} cannot be run ({error.strerror}): run `make "
            f"peers`, or pass --peer_python {name}=PATH"
        ) from error
    if answer.returncode or answer.stdout.strip():
        what = ", ".join(answer.stdout.split()) or "a working Python"
        file = (SCRIPTS / environment.requirements).relative_to(ROOT)
        raise InputError(f"--peers: {python} lacks {what}: run `make peers`, or {python} -m pip install -r {file}")


def checkpoint(given: str | None, name: str) -> tuple[Path, str]:
    """The folder that the peers load, and the class of its pipeline.

    Args:
        given: None takes checkpoints/NAME.
        name: what the export says its checkpoint was called.

    Raises:
        InputError: no folder in diffusers' layout, or a pipeline that the peers' scripts do not know.
    """
    folder = Path(given) if given else ROOT / "checkpoints" / name
    if not (folder / "model_index.json").is_file():
        raise InputError(
            f"--peers load the checkpoint itself: {folder} has no model_index.json; pass --checkpoint FOLDER, in "
            f"diffusers' layout, the one that the export was made from ({name!r})"
        )
    pipeline = read_json(folder / "model_index.json").get("_class_name")
    if pipeline not in PIPELINES:
        raise InputError(f"--checkpoint {folder}: {pipeline}: the peers draw with {' and '.join(PIPELINES)}")
    if folder.resolve().name != name:
        log.warning("%s: the export was made from %r; the pictures' differences tell", folder, name)
    return folder.resolve(), pipeline


def workloads(
    names: list[str], exports: list[dict], given: str | None, bfloat16_vae: bool, found: dict[str, str]
) -> list[dict]:
    """Every peer asked for what each export is asked for, in its dtype and size; the same work only once.

    Args:
        names: keys of `PEERS`.
        exports: workloads of benchmark.py.
        given: --checkpoint.
        bfloat16_vae: beside rows in bfloat16 with a float32 decoder, rows with one in bfloat16.
        found: of `pythons`.

    Raises:
        InputError: an export whose work the peers cannot do, only approximate ones, or as `checkpoint`.
    """
    for export in exports:
        if export["approximate"]:
            log.warning("--peers draw exactly: none for %s (%s)", export["of"], export["approximate"])
    exports = [export for export in exports if not export["approximate"]]
    if not exports:
        raise InputError("--peers draw exactly, and every row asked for is an approximation: add an exact export")
    rows: dict[tuple, dict] = {}
    folders: dict[str, tuple[Path, str]] = {}
    for export in exports:
        _check_comparable(export)
        made_from = export["export"]["checkpoint"]
        folder, pipeline = folders.setdefault(made_from, folders.get(made_from) or checkpoint(given, made_from))
        spec = export["export"]["spec"]
        for name in names:
            peer = PEERS[name]
            for vae_dtype in DTYPES if bfloat16_vae and export["dtype"] == "bfloat16" else DTYPES[:1]:
                label = f"{peer.label} {export['dtype']} {export['width']}x{export['height']}"
                label += f" {vae_dtype} VAE" if vae_dtype != "float32" else ""
                label += f" {spec['prompts']}x{spec['images_per_prompt']}" if export["images"] > 1 else ""
                kept = ("networks", "settings", "unet_calls", "images", "height", "width", "dtype")
                row = {
                    **{"of": label, "name": label, "kind": name, "call_path": peer.call_path},
                    **{"jit_compile": False, "jit_components": [], "same_noise": True},
                    **{key: export[key] for key in kept},
                    **{key: spec[key] for key in ("prompts", "images_per_prompt")},
                    **{"checkpoint": str(folder), "pipeline": pipeline, "vae_dtype": vae_dtype, "cache": str(CACHE)},
                    "command": [found[peer.environment], str(SCRIPTS / ENVIRONMENTS[peer.environment].script)],
                    **peer.options,
                }
                rows.setdefault(label, row)
    return list(rows.values())


def _check_comparable(export: dict) -> None:
    folder, spec = export["export"]["folder"], export["export"]["spec"]
    if export["dtype"] not in DTYPES:
        raise InputError(f"--peers: {folder} holds {export['dtype']}; peers are timed in {' and '.join(DTYPES)}")
    if spec["prompt_chunks"] != 1:
        raise InputError(f"--peers: {folder} takes {spec['prompt_chunks']} blocks of tokens a prompt; peers take 1")
    if export["settings"]["sampler"] not in SAMPLERS:
        raise InputError(f"--peers draw with --sampler {' or '.join(SAMPLERS)}, not {export['settings']['sampler']}")


def prepare(rows: list[dict]) -> None:
    """Let peers make what they keep of a checkpoint, before anything is timed; `measure_rows` meets their failures."""
    for row in rows:
        if row["kind"] == "openvino":
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                file = Path(folder) / "request.json"
                file.write_text(json.dumps(row))
                subprocess.run([*row["command"], "--prepare", str(file)], stdout=subprocess.DEVNULL)


def kerascv_workloads(exports: list[dict], flags: dict, random_weights: bool) -> list[dict]:
    """KerasCV in each of the exports' sizes, or alone; arguments as for `kerascv_workload`."""
    by_size: dict[tuple[int, int], dict] = {}
    for export in exports:
        by_size.setdefault((export["width"], export["height"]), export)
    firsts = list(by_size.values()) or [None]
    if len(firsts) == 1:
        return [kerascv_workload(firsts[0], flags, random_weights)]
    return [
        kerascv_workload(export, flags, random_weights, f"KerasCV {export['width']}x{export['height']}")
        for export in firsts
    ]


def kerascv_workload(first: dict | None, flags: dict, random_weights: bool, of: str = "KerasCV") -> dict:
    """KerasCV asked for what an export is asked for, else for Stable Diffusion 1.x's defaults.

    Args:
        first: the export's workload, or None.
        flags: height, width, num_steps and guidance_scale that the user gave; None where not.

    Raises:
        InputError: a size it does not draw, or a setting out of range.
    """
    asked = {
        "height": 512,
        "width": 512,
        **dataclasses.asdict(FAMILIES["sd1"].defaults),
        **(first or {}),
        **(first["settings"] if first else {}),
    }
    asked |= {name: value for name, value in flags.items() if value is not None}
    for name in ("height", "width"):
        if asked[name] % kerascv.SIZE_STEP:
            step = kerascv.SIZE_STEP
            raise InputError(f"--{name} {asked[name]}: KerasCV draws multiples of {step} pixels; pass another --{name}")
    if not 1 <= asked["num_steps"] <= 1000 or not np.isfinite(asked["guidance_scale"]):
        raise InputError("--num_steps must be 1..1000 and --guidance_scale a finite number")
    folder = Path(first["export"]["folder"]) if first else ROOT / "checkpoints" / "emoji"
    return {
        "of": of,
        "kind": "kerascv",
        "call_path": "StableDiffusion.text_to_image of keras_cv, two UNet calls from Python per step",
        "jit_components": list(manifest.JIT_COMPONENTS),
        "networks": "sd1",
        "settings": {
            "sampler": "ddim (its own steps)",
            **{name: asked[name] for name in ("num_steps", "guidance_scale")},
        },
        "unet_calls": asked["num_steps"],  # pairs of them, for the guidance
        "images": first["images"] if first else 1,
        **{name: asked[name] for name in ("height", "width")},
        "dtype": "float32",
        "random_seed": 0 if random_weights else None,
        "tokenizer": str(folder / "tokenizer"),
    }
