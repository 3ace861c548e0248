"""The commands as users run them: what goes wrong is one clear line and exit code 1, never a traceback."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from PIL import Image
from safetensors.numpy import load_file, save_file

import serialize_savedmodels
from models.errors import InputError
from pipeline import cli, manifest

ROOT = Path(__file__).parents[2]
UNET = "unet/diffusion_pytorch_model.safetensors"


def error_line(run):
    """What a refused command leaves on stderr."""
    assert run.returncode == 1, (run.stdout, run.stderr)
    assert "Traceback" not in run.stderr and "Traceback" not in run.stdout
    [line] = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    return line


# === Refused before TensorFlow starts ===


@pytest.fixture
def no_tensorflow(tmp_path, monkeypatch):
    """A folder first in the path of child processes whose `tensorflow` cannot be imported."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "tensorflow.py").write_text("raise SystemExit('TensorFlow was started')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))


@pytest.fixture
def copied(tiny_export, tmp_path):
    return shutil.copytree(tiny_export, tmp_path / "copied")


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "no such folder": (lambda e: shutil.rmtree(e), "no such folder; expected an export"),
    "half an export": (lambda e: shutil.rmtree(e / "manifests"), "not a finished export: it has no manifests"),
    "a part is missing": (lambda e: shutil.rmtree(e / "decoder"), "missing; the export is incomplete"),
    "flipped in the weights": (
        lambda e: flip_byte(e / "diffusion_model/1/variables/variables.data-00000-of-00001"),
        "variables.data-00000-of-00001: damaged: its sha256 is not the manifest's",
    ),
    "flipped in the manifest": (lambda e: flip_byte(e / "manifests/1.json"), "manifests/1.json: damaged"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_exports_that_cannot_be_drawn_with(run_command, no_tensorflow, copied, tmp_path, case):
    damage, message = DAMAGES[case]
    damage(copied)
    run = run_command("pipeline.generate", "a cat", "--models", copied, "--output", tmp_path / "out")
    assert message in error_line(run)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a prompt: python -m pipeline.generate"),
        (["--prompts_file", "/none.txt"], "--prompts_file /none.txt: cannot be read"),
        (["a cat", "--version", "7", "--models", "EXPORT"], "no version 7; found 1"),
    ],
)
def test_arguments_of_generate(run_command, no_tensorflow, tiny_export, arguments, message):
    arguments = [str(tiny_export) if a == "EXPORT" else a for a in arguments]
    assert message in error_line(run_command("pipeline.generate", *arguments))


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("pipeline.generate", ["a cat", "--num_step", "5"], "Did you mean: num_steps"),
        (
            "pipeline.generate",
            ["a cat", "--steps", "5"],
            "Unknown command line flag 'steps'; did you mean --num_steps?",
        ),
        ("pipeline.generate", ["--prompt", "a cat"], "prompts are given without a flag: python -m pipeline.generate"),
        ("pipeline.generate", ["--prompt=a cat"], "prompts are given without a flag: python -m pipeline.generate"),
        ("pipeline.generate", ["caf\udce9"], "expected arguments in UTF-8, found b'caf"),
        ("pipeline.generate", ["a cat", "--negative_prompt", "\udcff"], "expected arguments in UTF-8"),
        ("pipeline.generate", ["a cat", "--output=\udcff"], "expected arguments in UTF-8"),
        ("serialize_savedmodels.py", ["--checkpoint=\udcff"], "expected arguments in UTF-8"),
        ("pipeline.generate", ["a cat", "--num_steps", "many"], "flag --num_steps=many"),
        ("pipeline.generate", ["a cat", "--sampler", "plms2"], "flag --sampler=plms2: value should be one of"),
        ("pipeline.generate", ["a cat", "--num_images", "0"], "flag --num_images=0"),
        ("serialize_savedmodels.py", ["--dtype", "int8"], "flag --dtype=int8: value should be one of"),
        ("serialize_savedmodels.py", ["--nosuch"], "Unknown command line flag 'nosuch'"),
    ],
)
def test_flags_that_do_not_exist_or_do_not_parse(run_command, no_tensorflow, target, arguments, message):
    run = run_command(target, *arguments)
    assert message in error_line(run) and run.stderr.count("\n") == 1


@pytest.mark.parametrize("target", ["pipeline.generate", "pipeline.manifest", "serialize_savedmodels.py"])
@pytest.mark.parametrize("flag", ["--help", "-h", "--helpfull"])
def test_help(run_command, no_tensorflow, target, flag):
    run = run_command(target, "a cat", flag)
    assert run.returncode == 0 and run.stderr == ""
    assert target.removesuffix(".py") in run.stdout and "\n  --" in run.stdout
    if target == "pipeline.generate":
        assert run.stdout.startswith("Draw pictures from prompts")
        assert "\n  --num_steps\n        Denoising steps. Default: the export's.\n" in run.stdout


# What is written at the end is tried before TensorFlow starts.
OUTPUTS = [
    (["--output", "FOLDER/file"], "--output .*/file: cannot be written .File exists"),
    (["--output", "FOLDER/file/below"], "--output .*/file/below: cannot be written .Not a directory"),
    (["--sheet", "FOLDER/file/sheet.png"], "--sheet .*/file: cannot be written"),
    (["--sheet", "FOLDER"], "--sheet .*: cannot be written .Is a directory"),
    (["--output", "FOLDER/taken", "--preview_every", "1"], "--output .*/previews: cannot be written .File exists"),
]


@pytest.mark.parametrize(("arguments", "message"), OUTPUTS)
def test_what_cannot_be_written_is_refused_first(run_command, no_tensorflow, tiny_export, tmp_path, arguments, message):
    folder = tmp_path / "out"
    (folder / "taken").mkdir(parents=True)
    for path in (folder / "file", folder / "taken" / "previews"):
        path.write_text("mine")
    arguments = [argument.replace("FOLDER", str(folder)) for argument in arguments]
    run = run_command("pipeline.generate", "a cat", "--models", tiny_export, "--output", folder, *arguments)
    assert re.search(message, error_line(run)), run.stderr
    assert {p.name for p in folder.rglob("*")} == {"taken", "file", "previews"}


def test_the_home_folder_in_flags(run_command, no_tensorflow, monkeypatch, tmp_path):
    """Also where no shell has replaced it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run = run_command("pipeline.generate", "a cat", "--models=~/none")
    assert error_line(run).startswith(f"error: {tmp_path}/none: no such folder")
    run = run_command("pipeline.generate", "a cat", "--prompts_file=~/none.txt")
    assert f"--prompts_file {tmp_path}/none.txt: cannot be read" in error_line(run)


def test_path_flags(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "DEFINE", functools.partial(flags.DEFINE, flag_values=values))
    monkeypatch.setattr(flags, "DEFINE_multi", functools.partial(flags.DEFINE_multi, flag_values=values))
    cli.define_path("one", None, "")
    cli.define_path("other", "~/default", "")
    cli.define_paths("list", "exports/emoji", "")
    cli.define_multi_path("several", "")
    values(["", "--one=~/a", "--list=~/a,b,~/c", "--several=~/a:0.5", "--several", "b"])
    assert (values.one, values.other) == ("/home/me/a", "/home/me/default")
    assert (values.list, values.several) == (["/home/me/a", "b", "/home/me/c"], ["/home/me/a:0.5", "b"])


def test_the_manifest_command(run_command, no_tensorflow, tiny_export, tmp_path):
    run = run_command("pipeline.manifest", tiny_export)
    assert run.returncode == 0 and "2 prompt(s) x 2 image(s)" in run.stdout and run.stderr == ""
    assert "expected one folder, found 0" in error_line(run_command("pipeline.manifest"))
    assert "not a finished export" in error_line(run_command("pipeline.manifest", tmp_path))


# === The whole way ===


def test_drawing_without_the_peers(run_command, single_export, tmp_path):
    """torch, transformers, diffusers, keras_cv and the rest out of reach; the export was made the same way."""
    out = tmp_path / "pictures"
    arguments = ["--models", single_export, "--output", out, "--seed", 41, "--num_images", 2, "--num_steps", 3]
    run = run_command("pipeline.generate", "a red apple", "--negative_prompt", "blue", *arguments)
    assert run.returncode == 0, run.stderr
    paths = [out / "00000-41.png", out / "00001-42.png"]
    assert run.stdout.splitlines() == list(map(str, paths))
    assert "Traceback" not in run.stderr and "Warning" not in run.stderr, run.stderr
    for path, seed in zip(paths, (41, 42), strict=True):
        with Image.open(path) as image:
            assert image.size == (14, 18) and np.array(image).std() > 5
            lines = image.text["parameters"].splitlines()
        assert lines[:2] == ["a red apple", "Negative prompt: blue"]
        assert lines[2].startswith(f"Steps: 3, Sampler: DDIM, CFG scale: 3, Seed: {seed}, ")


def test_too_many_steps(run_command, single_export, tmp_path):
    run = run_command(
        "pipeline.generate", "a cat", "--models", single_export, "--num_steps", 13, "--output", tmp_path / "out"
    )
    assert "num_steps should be between 1 and 12, found 13; 12 is the limit of the export" in error_line(run)
    assert not (tmp_path / "out").exists()


# === Checkpoints that cannot be exported ===


def write_unet(folder, change):
    tensors = load_file(folder / UNET)
    change(tensors)
    save_file(tensors, folder / UNET)


def truncate(folder):
    path = folder / UNET
    os.truncate(path, path.stat().st_size - 1)


def to_pickle(folder):
    (folder / UNET).rename((folder / UNET).with_suffix(".bin"))


def without_a_channel(tensors):
    tensors["conv_in.weight"] = tensors["conv_in.weight"][:, :3].copy()


def not_finite(tensors):
    tensors["conv_out.bias"][2] = np.nan


CHECKPOINTS = {
    "missing folder": (shutil.rmtree, "damaged: no such folder; expected a checkpoint in diffusers' layout"),
    "truncated": (truncate, "diffusion_pytorch_model.safetensors: not a usable safetensors file: expected"),
    "wrong shape": (
        lambda f: write_unet(f, without_a_channel),
        "1 wrong shape: conv_in.weight is float32 [32, 3, 3, 3], expected to fill [3, 3, 4, 32]",
    ),
    "unknown key": (
        lambda f: write_unet(f, lambda t: t.update({"extra.weight": np.zeros(1, "float32")})),
        "damaged/unet: 1 unused: extra.weight",
    ),
    "missing key": (lambda f: write_unet(f, lambda t: t.pop("conv_in.bias")), "unet: 1 missing: conv_in.bias"),
    "NaN": (lambda f: write_unet(f, not_finite), "damaged/unet: tensor conv_out.bias holds NaN or infinite values"),
    "pickle": (to_pickle, "diffusion_pytorch_model.bin: pickle files can run code and are not read"),
    "no tokenizer": (lambda f: shutil.rmtree(f / "tokenizer"), "missing ['tokenizer']"),
    "empty model_index": (lambda f: (f / "model_index.json").write_text(""), "model_index.json: expected a JSON file"),
}


@pytest.fixture
def serialize(capsys):
    """Function (**flags) that runs serialize_savedmodels.py's main here, where TensorFlow has started already."""

    def run(**flags):
        if not serialize_savedmodels.FLAGS.is_parsed():
            serialize_savedmodels.FLAGS(["serialize_savedmodels.py"])
        with flagsaver.flagsaver(**flags):
            serialize_savedmodels.main(["serialize_savedmodels.py"])

    return run


def refused(serialize, **flags):
    with pytest.raises(InputError) as error:
        serialize(**flags)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_that_cannot_be_exported(serialize, damaged_checkpoint, tmp_path, case):
    damage, message = CHECKPOINTS[case]
    damage(damaged_checkpoint)
    found = refused(serialize, checkpoint=str(damaged_checkpoint), output_dir=str(tmp_path / "out" / "export"))
    assert message in found
    assert not (tmp_path / "out").exists() or {p.name for p in (tmp_path / "out").iterdir()} == {".export.lock"}


def test_flags_that_cannot_be_exported(serialize, checkpoint_folder, tmp_path, tiny_export):
    flags = {"checkpoint": str(checkpoint_folder), "output_dir": str(tmp_path / "out")}
    (tmp_path / "file").write_text("")
    for changes, message in (
        ({"height": 101}, "--height 101: must be a multiple of 2; nearest: 100 or 102"),
        ({"width": 0}, "--width 0: must be a multiple of 2"),
        ({"max_steps": 0}, "--max_steps 0: must be 1..1000"),
        ({"max_steps": 1001}, "--max_steps 1001: must be 1..1000"),
        ({"prompts": 0}, "--prompts 0: must be 1..1024"),
        ({"jit_compile": True, "jit_components": ["vae"]}, "--jit_components 'vae': must be of"),
        ({"checkpoint": str(checkpoint_folder / UNET)}, "holds one component of a folder in diffusers' layout"),
        ({"ema": True}, "--ema: .* is a folder; averaged copies are taken from single files"),
        ({"output_dir": str(tmp_path / "file" / "out")}, "cannot write the export: File exists (.*file)"),
        ({"output_dir": str(tiny_export), "version": 1}, "--version 1: .* already has it"),
        ({"output_dir": str(tmp_path)}, "exists and is not an export"),
    ):
        found = refused(serialize, **flags | changes)
        assert message.replace(".*", "") in found or all(part in found for part in message.split(".*")), found
    assert {p.name for p in tmp_path.iterdir()} == {"file"}


def test_an_export_that_fails_is_one_line_for_its_user(run_command, damaged_checkpoint, tmp_path):
    """The same from outside: exit code, stderr, and nothing that a server could load."""
    write_unet(damaged_checkpoint, not_finite)
    run = run_command("serialize_savedmodels.py", "--checkpoint", damaged_checkpoint, "--output_dir", tmp_path / "out")
    assert "tensor conv_out.bias holds NaN" in error_line(run)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp-*"))


# === cli ===


def test_flags_for_xla_go_in_before_tensorflow(monkeypatch):
    import tensorflow  # noqa: F401

    with pytest.raises(InputError, match="XLA_FLAGS must be set before TensorFlow is imported"):
        cli.set_flags_before_tensorflow("--xla_dump_to=x", None)
    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.setenv("TF_XLA_FLAGS", "--a")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    cli.set_flags_before_tensorflow(None, "--b")
    assert os.environ["TF_XLA_FLAGS"] == "--a --b" and "XLA_FLAGS" not in os.environ


def test_exported_manifests_are_json_for_other_tools(single_export):
    """What `jq` and a server's deployment scripts read."""
    body = json.loads(Path(single_export, "manifests", "1.json").read_text())
    assert body["spec"]["height"] == 18 and body["signatures"]["decoder"]["decode"]["inputs"][0]["name"] == "latent"
    assert manifest.read(single_export).checkpoint == "tiny"


def test_a_reader_that_has_seen_enough(tiny_export):
    """`python -m pipeline.manifest EXPORT | head` ends quietly."""
    command = [sys.executable, "-m", "pipeline.manifest", str(tiny_export)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.close()
        assert run.stderr.read() == "" and run.wait() == 141
