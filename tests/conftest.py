"""A tiny checkpoint in diffusers' layout with random weights, and its exports, made once per test run.

Everything is small but real: two resolutions, odd latents of 9 x 7, height and width unequal, two prompts of two
images, CLIP's own vocabulary.
"""

import copy
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

# Before anything imports TensorFlow: no start-up chatter.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "checkpoints" / "emoji" / "tokenizer"

CONFIGS = {
    "model_index.json": {
        "_class_name": "StableDiffusionPipeline",
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    },
    "text_encoder/config.json": {
        "vocab_size": 49408,
        "max_position_embeddings": 77,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "unet/config.json": {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": [32, 64],
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "layers_per_block": 1,
        "attention_head_dim": [4, 8],
        "cross_attention_dim": 32,
        "norm_num_groups": 8,
        "norm_eps": 1e-5,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
    },
    "vae/config.json": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": [16, 32],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "scaling_factor": 0.18215,
        "force_upcast": True,
    },
    "scheduler/scheduler_config.json": {
        "_class_name": "DDIMScheduler",
        "num_train_timesteps": 1000,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "prediction_type": "epsilon",
        "timestep_spacing": "leading",
        "steps_offset": 1,
        "set_alpha_to_one": False,
        "clip_sample": False,
    },
    "generation_config.json": {"sampler": "ddim", "num_inference_steps": 4, "guidance_scale": 3.0},
}
SIZE = {"height": 18, "width": 14}  # latents of 9 x 7


def random_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that keep activations near unit scale, so that no path is dead; a function of name and shape."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    kind = name.rpartition("/")[2]
    if kind == "kernel":
        values /= np.prod(shape[:-1]) ** 0.5
    elif kind == "embeddings":
        values *= 0.3 if "position" in name else 1.0
    else:
        values = 0.1 * values + (kind == "gamma")
    return values.astype(np.float32)


def diffusers_tensor(component: str, path: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """A variable LAYER/VARIABLE of ours as diffusers stores it: its name and its layout."""
    layer, _, kind = path.rpartition("/")
    layer = layer.rpartition("/")[2]
    if kind == "kernel":
        values = values.transpose(3, 2, 0, 1) if values.ndim == 4 else values.T
        if component == "unet" and layer.endswith(("proj_in", "proj_out")):
            values = values[:, :, None, None]  # Stable Diffusion 1.x: 1x1 convolutions
    prefix = "text_model." if component == "text_encoder" else ""
    suffix = "bias" if kind in ("bias", "beta") else "weight"
    return f"{prefix}{layer}.{suffix}", np.ascontiguousarray(values)


@pytest.fixture(scope="session")
def write_checkpoint():
    """Function (folder, {file: {key: changed value}}) that writes a tiny checkpoint there and returns the folder."""

    def write(folder: Path, changes: dict[str, dict] | None = None) -> Path:
        from models import text_encoder, unet, vae
        from pipeline.checkpoints import diffusers_folder

        contents = copy.deepcopy(CONFIGS)
        for name, changed in (changes or {}).items():
            contents[name].update(changed)
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content))
        shutil.copytree(TOKENIZER, folder / "tokenizer")
        config = diffusers_folder.read_config(folder)
        layers = {
            "text_encoder": [text_encoder.TextEncoder(config.text_encoder)],
            "unet": [unet.UNet(config.unet)],
            "vae": [vae.VAEDecoder(config.vae), vae.VAEEncoder(config.vae)],
        }
        for component, parts in layers.items():
            variables = [variable for part in parts for variable in part.variables]
            tensors = dict(
                diffusers_tensor(component, v.path, random_values(v.path, tuple(v.shape))) for v in variables
            )
            save_file(tensors, folder / component / f"{weights_stem(component)}.safetensors")
        return folder

    return write


def weights_stem(component: str) -> str:
    return "model" if component == "text_encoder" else "diffusion_pytorch_model"


@pytest.fixture(scope="session")
def checkpoint_folder(write_checkpoint, tmp_path_factory) -> Path:
    """The tiny checkpoint; tests must not change it."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture
def damaged_checkpoint(checkpoint_folder, tmp_path) -> Path:
    """A copy of the tiny checkpoint to damage."""
    return Path(shutil.copytree(checkpoint_folder, tmp_path / "damaged"))


@pytest.fixture(scope="session")
def export_spec():
    """Function (**changes) -> ExportSpec of the tiny exports: 2 prompts x 2 images of 18 x 14 pixels."""
    from models.export_spec import ExportSpec

    def make(**changes):
        return ExportSpec(
            **{**SIZE, "prompts": 2, "images_per_prompt": 2, "dtype": "float32", "max_steps": 12} | changes
        )

    return make


@pytest.fixture(scope="session")
def exports(checkpoint_folder, export_spec, tmp_path_factory) -> Path:
    """Folder for other exports of one test process; tests must not change what is there."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Function (name, make) -> a folder of that name that make(folder) filled in the first test process to ask."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)

    def get(name: str, make) -> Path:
        folder, made = shared / name, shared / f".{name}.made"
        with open(shared / f".{name}.asked", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                make(folder)
                made.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def tiny_export(once, checkpoint_folder, export_spec) -> Path:
    """2 prompts x 2 images, float32, no twins."""
    from pipeline import export
    from pipeline.checkpoints import source

    return once("tiny", lambda folder: export.export(source.diffusers_source(checkpoint_folder), folder, export_spec()))


@pytest.fixture(scope="session")
def run_command():
    """Function (script or module, *arguments) -> finished process, in an environment with our requirements only."""

    def run(target: str, *arguments, **options) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", WITHOUT_PEERS, target, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)

    return run


# Runs a script (ends in .py) or a module as Python would, with everything that is not required out of reach.
WITHOUT_PEERS = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'transformers', 'diffusers', 'keras_cv', 'keras_hub', 'flax', 'jax',
                                      'safetensors', 'matplotlib'):
            raise ModuleNotFoundError(name + ' is blocked')
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
if sys.argv[0].endswith('.py'):
    runpy.run_path(sys.argv[0], run_name='__main__')
else:
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
"""


@pytest.fixture(scope="session")
def single_export(once, checkpoint_folder, run_command) -> Path:
    """1 prompt x 1 image with XLA twins of all three parts, made by the command line without the peers' libraries."""

    def make(folder):
        arguments = ["--checkpoint", checkpoint_folder, "--output_dir", folder, "--max_steps", 12]
        arguments += ["--height", SIZE["height"], "--width", SIZE["width"]]
        twins = ["--jit_compile", "--jit_components", "text_encoder,unet,decoder"]
        run = run_command("serialize_savedmodels.py", *arguments, *twins)
        assert run.returncode == 0, run.stderr
        assert "Traceback" not in run.stderr and f"exported {folder} version 1" in run.stdout

    return once("single", make)


@pytest.fixture(scope="session")
def bfloat16_export(once, checkpoint_folder, export_spec) -> Path:
    """1 prompt x 1 image, weights in bfloat16."""
    from pipeline import export
    from pipeline.checkpoints import source

    spec = export_spec(prompts=1, images_per_prompt=1, dtype="bfloat16")

    def make(folder):
        export.export(source.diffusers_source(checkpoint_folder), folder, spec, compare_float32=False)

    return once("bfloat16", make)


@pytest.fixture(scope="session")
def tiny_sd1_export(once, run_command) -> Path:
    """The tiny checkpoint that diffusers wrote: 2 prompts x 1 image of 48 x 32 pixels, with an image encoder."""

    def make(folder):
        sizes = ("--height", 32, "--width", 48, "--prompts", 2, "--max_steps", 20)
        checkpoint = ROOT / "tests" / "goldens" / "tiny_sd1"
        given = ("--checkpoint", checkpoint, "--output_dir", folder, *sizes, "--image_encoder")
        run = run_command("serialize_savedmodels.py", *given)
        assert run.returncode == 0, run.stderr

    return once("tiny_sd1", make)


@pytest.fixture(scope="session")
def checkpoint_list():
    """Function (name) -> {component: (prefix, lines split at blanks)} of a list in tests/checkpoint_keys/."""

    @functools.cache
    def read(name: str) -> dict[str, tuple[str, list[list[str]]]]:
        sections = {}
        for line in (ROOT / "tests" / "checkpoint_keys" / f"{name}.txt").read_text().splitlines():
            if line.startswith("["):
                component, _, prefix = line[1:].partition("]")
                sections[component] = prefix.strip(), []
            else:
                sections[component][1].append(line.split(" "))
        return sections

    return read


@pytest.fixture(scope="session")
def single_file_keys(checkpoint_list):
    """Function (family, {name: shape or None}) -> a public single file's tensors, changed; there is nothing to read."""
    from pipeline.checkpoints.loader import Tensor

    def make(family: str, changes: dict[str, tuple | None] | None = None) -> dict[str, Tensor]:
        shapes = {
            prefix + row[0]: tuple(map(int, row[1].split("x"))) if row[1] != "scalar" else ()
            for prefix, rows in checkpoint_list(f"{family}.ldm").values()
            for row in rows
        }
        shapes |= changes or {}
        return {n: Tensor(s, np.dtype("float32"), None) for n, s in shapes.items() if s is not None}

    return make


@pytest.fixture(scope="session")
def variable_shapes():
    """Function (config) -> {component: {LAYER/VARIABLE: shape}} of a model of any size; no weights are allocated."""
    import keras

    from models import text_encoder, unet, vae

    @functools.cache
    def build(config) -> dict[str, dict[str, tuple[int, ...]]]:
        # Variables made in this scope have no values until someone asks for them.
        with keras.StatelessScope(initialize_variables=False):
            made = {
                "text_encoder": [text_encoder.TextEncoder(config.text_encoder)],
                "unet": [unet.UNet(config.unet)],
                "vae": [vae.VAEDecoder(config.vae), vae.VAEEncoder(config.vae)],
            }
            if config.text_encoder_2 is not None:
                made["text_encoder_2"] = [text_encoder.TextEncoder(config.text_encoder_2)]
        shapes = {c: {v.path: tuple(v.shape) for part in parts for v in part.variables} for c, parts in made.items()}
        # Nobody shall ask for them later.
        keras.utils.clear_session(free_memory=False)
        return shapes

    return build


@pytest.fixture
def small_disk(tmp_path):
    """Function (size) -> folder on a file system of that size; skips where none may be mounted."""
    mounted = []

    def make(size):
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
