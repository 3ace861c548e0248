"""Pickles: refused with a command that converts them; read by PyTorch, where it is installed, without running them."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from models.errors import InputError
from pipeline.checkpoints import loader, pickles
from pipeline.checkpoints.weight_files import weight_files

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
needs_peers = pytest.mark.skipif(not PEERS.exists(), reason="PyTorch is not installed: make .venv-peers/run.stamp")

# Runs in the peers' environment: writes pickles as PyTorch does, and reads them as we do.
READ = """
import json, os, pickle, sys, types
from pathlib import Path
sys.path.append(sys.argv[2])  # our own packages, behind the peers'
import numpy as np, torch
from models.errors import InputError
from pipeline.checkpoints import diffusers_folder, pickles

folder, result = Path(sys.argv[1]), {}
values = torch.arange(-6, 6).reshape(3, 4) / 7
tensors = {
    "float32": values, "float64": values.double(), "float16": values.half(), "bfloat16": values.bfloat16(),
    "transposed": values.T, "a view": values[1:, ::2], "steps": torch.tensor(7), "empty": values[:0],
    "needs grad": values.clone().requires_grad_(),
}
lightning = types.ModuleType("pytorch_lightning.callbacks.model_checkpoint")
class ModelCheckpoint:
    def __init__(self): self.best = 0.5
ModelCheckpoint.__module__, ModelCheckpoint.__qualname__ = lightning.__name__, "ModelCheckpoint"
lightning.ModelCheckpoint = ModelCheckpoint
for name in ("pytorch_lightning", "pytorch_lightning.callbacks", lightning.__name__):
    sys.modules[name] = lightning
nested = {"state_dict": tensors, "epoch": 3, "callbacks": {"best": ModelCheckpoint()}, "loops": None}
torch.save(tensors, folder / "plain.bin")
torch.save(nested, folder / "nested.ckpt")
torch.save(tensors, folder / "old.pt", _use_new_zipfile_serialization=False)
for name in [n for n in sys.modules if n.startswith("pytorch_lightning")]:
    del sys.modules[name]

def bits(array):
    return np.asarray(array).tobytes()

def equal(found):
    kept = {name: tensor.read() for name, tensor in found.items()}
    wanted = {n: t.detach().view(torch.uint16) if t.dtype == torch.bfloat16 else t.detach() for n, t in tensors.items()}
    return kept.keys() == wanted.keys() and all(
        a.shape == tuple(tensors[n].shape) and str(a.dtype) == str(tensors[n].dtype).removeprefix("torch.")
        and bits(a) == bits(wanted[n].numpy()) for n, a in kept.items()
    )

for name in ("plain.bin", "nested.ckpt", "old.pt"):
    result[name] = equal(pickles.read(folder / name))

class Canary:
    def __reduce__(self):
        return os.mkdir, (str(folder / "executed"),)

torch.save({"state_dict": tensors, "x": Canary()}, folder / "hostile.ckpt")
(folder / "raw.pt").write_bytes(pickle.dumps(Canary()))
(folder / "cut.ckpt").write_bytes((folder / "nested.ckpt").read_bytes()[:-300])
(folder / "cut.pt").write_bytes((folder / "old.pt").read_bytes()[:200])
(folder / "text.bin").write_text("version https://git-lfs.github.com/spec/v1")
(folder / "empty.bin").write_bytes(b"")
torch.save({"epoch": 3}, folder / "none.ckpt")
torch.save(values, folder / "bare.bin")
torch.save({"x": values.to(torch.float8_e4m3fn)}, folder / "float8.bin")
for name in ("hostile.ckpt", "raw.pt", "cut.ckpt", "cut.pt", "text.bin", "empty.bin", "none.ckpt", "bare.bin",
             "float8.bin", "missing.ckpt"):
    try:
        result[name] = sorted(pickles.read(folder / name))
    except InputError as error:
        result[name] = str(error)
result["executed"] = (folder / "executed").exists()
pickle.loads(pickle.dumps(Canary()))
result["can sing"] = (folder / "executed").exists()

plain = Path(sys.argv[3])
for component, stem in (("text_encoder", "pytorch_model"), ("unet", "diffusion_pytorch_model")):
    source = diffusers_folder.read_weights(plain, component)
    (folder / component).mkdir()
    torch.save({n: torch.from_numpy(t.read()) for n, t in source.items()}, folder / component / f"{stem}.bin")
    again = diffusers_folder.read_weights(folder, component, read_pickle=pickles.read)
    same = (bits(again[n].read()) == bits(source[n].read()) for n in source)
    result[component] = again.keys() == source.keys() and all(same)
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def read_by_pytorch(tmp_path_factory, checkpoint_folder):
    """What a process with PyTorch found, and the folder of its files."""
    folder = tmp_path_factory.mktemp("pickles")
    site = Path(np.__file__).parents[1]
    command = [PEERS, "-c", READ, folder, site, checkpoint_folder]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout), folder


@needs_peers
@pytest.mark.parametrize("name", ["plain.bin", "nested.ckpt", "old.pt", "text_encoder", "unet"])
def test_tensors_are_bit_equal(read_by_pytorch, name):
    """Every type, views, a state_dict among what training left, the format before PyTorch 1.6, whole components."""
    assert read_by_pytorch[0][name] is True


@needs_peers
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hostile.ckpt", "holds more than tensors, which could run code when read, so it is not read"),
        ("raw.pt", "holds more than tensors"),
        ("cut.ckpt", "may be damaged or truncated"),
        ("cut.pt", "may be damaged or truncated"),
        ("text.bin", "not a usable PyTorch file|holds more than tensors"),
        ("empty.bin", "may be damaged or truncated"),
        ("none.ckpt", "expected named tensors, or a state_dict of them; found none"),
        ("bare.bin", "expected named tensors"),
        ("float8.bin", "float8_e4m3fn, which is not supported"),
        ("missing.ckpt", "cannot be read \\(No such file"),
    ],
)
def test_what_is_refused_by_pytorch_or_by_us(read_by_pytorch, name, message):
    found = read_by_pytorch[0][name]
    assert isinstance(found, str) and re.search(message, found) and "\n" not in found


@needs_peers
def test_nothing_in_a_pickle_is_executed(read_by_pytorch):
    assert read_by_pytorch[0]["executed"] is False
    assert read_by_pytorch[0]["can sing"] is True


@needs_peers
def test_the_command_to_convert_works_as_written(read_by_pytorch):
    path = read_by_pytorch[1] / "nested.ckpt"
    command = str(loader.refused_pickle(path)).partition(" are installed: ")[2]
    environment = os.environ | {"PATH": f"{PEERS.parent}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, env=environment, check=True, timeout=100)
    tensors = loader.read_safetensors(path.with_suffix(".safetensors"))
    expected = np.arange(-6, 6, dtype="float32").reshape(3, 4) / np.float32(7)
    np.testing.assert_array_equal(tensors["float32"].read(), expected)
    np.testing.assert_array_equal(tensors["transposed"].read(), expected.T)
    np.testing.assert_array_equal(tensors["bfloat16"].read(), expected.astype(ml_dtypes.bfloat16))


def test_the_refusal(tmp_path):
    """One line: why, and what to do; nothing is opened."""
    path = tmp_path / "my model.ckpt"
    message = str(loader.refused_pickle(path, or_allow=True))
    assert message.startswith(f"{path}: pickle files can run code and are not read; pass --allow_pickle, or convert it")
    assert message.endswith(f" '{path}' '{path.with_suffix('.safetensors')}'") and "\n" not in message
    assert "--allow_pickle" not in str(loader.refused_pickle(path))
    # In a folder, the name it is looked for under.
    assert str(loader.refused_pickle(Path("pytorch_model.fp16.bin"))).endswith(" model.fp16.safetensors")
    # What it runs is a program.
    compile(loader.CONVERT, "convert", "exec")


def test_without_pytorch_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "w.ckpt").write_bytes(pickle.dumps({}))
    with pytest.raises(InputError, match=r"w\.ckpt: --allow_pickle needs PyTorch, .*python -m pip install torch$"):
        pickles.reader(True)(tmp_path / "w.ckpt")
    assert pickles.reader(False) is None


@pytest.mark.parametrize(
    ("names", "stem", "chosen"),
    [
        (["pytorch_model.bin", "model.safetensors"], "model", ["model.safetensors"]),
        (["pytorch_model.bin", "model.bin"], "model", ["pytorch_model.bin"]),
        (["pytorch_model.fp16.bin"], "model", ["pytorch_model.fp16.bin"]),
        (["diffusion_pytorch_model.bin"], "diffusion_pytorch_model", ["diffusion_pytorch_model.bin"]),
        (["model.ckpt", "diffusion_flax_model.msgpack"], "model", []),
    ],
)
def test_pickles_stand_behind_safetensors(names, stem, chosen):
    assert weight_files(names, stem, pickles=True) == chosen
    assert weight_files(names, stem) == [name for name in chosen if name.endswith(".safetensors")]
