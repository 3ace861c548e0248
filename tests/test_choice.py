"""--compile=auto: what is measured, which pair is chosen, where it is kept."""

import dataclasses
import json
import os
import sys

import numpy as np
import pytest

from models.config import InputError
from pipeline import choice, manifest, timing


@pytest.fixture
def contract(tiny_export, tmp_path, monkeypatch):
    """The tiny export in a folder that a choice may be written to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return dataclasses.replace(manifest.read(tiny_export), folder=tmp_path / "export")


SECONDS = {
    "plain": {"unet": 9.0, "decoder": 1.0},
    "plain, oneDNN": {"unet": 5.0, "decoder": 4.0},
    "plain, oneDNN, XLA islands": {"unet": 4.0, "decoder": 4.5},
    "XLA": {"unet": 6.0, "decoder": 3.0},
    "XLA, oneDNN": {"unet": 7.0, "decoder": 2.0},
}


PLAIN, ISLANDS = "plain, oneDNN", "plain, oneDNN, XLA islands"


@pytest.mark.parametrize(
    ("left_out", "unet", "decoder", "variables", "compiled"),
    [
        # The decoder's best, plain without oneDNN, cannot live beside the UNet's.
        ([], ISLANDS, "XLA, oneDNN", "TF_ENABLE_ONEDNN_OPTS TF_XLA_FLAGS XLA_FLAGS", ["decoder"]),
        ([ISLANDS, PLAIN], "XLA", "plain", "TF_ENABLE_ONEDNN_OPTS", ["unet"]),
        (["plain", PLAIN, ISLANDS], "XLA", "XLA", "", ["unet", "decoder"]),
        (["plain", "XLA", "XLA, oneDNN"], ISLANDS, ISLANDS, "TF_ENABLE_ONEDNN_OPTS TF_XLA_FLAGS", []),
    ],
)
def test_the_least_sum_that_fits_into_one_process(left_out, unet, decoder, variables, compiled):
    measured = {name: seconds for name, seconds in SECONDS.items() if name not in left_out}
    found = choice.Choice({}, measured, choice.fastest(measured))
    assert found.variants == {"unet": unet, "decoder": decoder}
    assert " ".join(sorted(found.variables)) == variables and list(found.jit_components) == compiled


def test_nothing_measured():
    with pytest.raises(InputError, match="--compile auto: nothing could be measured"):
        choice.fastest({})


@pytest.fixture
def answers(monkeypatch):
    """What the measuring processes answer, from SECONDS, without a process; their requests. "XLA" fails."""
    asked = []

    def isolated(command, row):
        asked.append(row)
        if row["name"] == "XLA":
            return {"error": "no such device"}
        seconds = SECONDS[row["name"]]
        return {"samples": {"diffusion": [seconds["unet"] + 1, seconds["unet"]], "decoder": [seconds["decoder"]]}}

    monkeypatch.setattr(timing, "isolated", isolated)
    here = timing.machine()
    monkeypatch.setattr(timing, "machine", lambda: {**here, "gpus": []})
    return asked


def test_every_variant_is_measured_once_and_never_again(contract, answers, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_user=1")
    monkeypatch.delenv("TF_XLA_FLAGS", raising=False)
    size = contract.spec.size
    first = choice.find(contract, size)
    assert [row["name"] for row in answers] == list(choice.VARIANTS)
    assert [row["environment"].get("XLA_FLAGS") for row in answers] == [
        *[None] * 4,
        "--xla_of_the_user=1 --xla_cpu_use_onednn=true",
    ]
    # Steps were 2 of the export's 12 at most.
    steps = contract.config.defaults.num_steps
    assert first.seconds["plain"] == {"unet": 9.0 * steps / 2, "decoder": 1.0} and "XLA" not in first.seconds
    assert "[4/5] XLA: failed: no such device" in capsys.readouterr().err
    assert choice.find(contract, size) == first and len(answers) == len(choice.VARIANTS)
    [file] = (contract.folder / choice.FOLDER).iterdir()
    assert json.loads(file.read_text())["variants"] == first.variants
    # Another size, other flags of the user, another export: measured anew.
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_user=2")
    assert choice.read(contract, size) is None


def test_accelerators_are_asked_for_what_concerns_them(contract, answers, monkeypatch):
    here = timing.machine()
    monkeypatch.setattr(timing, "machine", lambda: {**here, "gpus": ["H200"]})
    assert [row["name"] for row in choice.rows(contract, contract.spec.size)] == ["plain", "XLA"]


@pytest.mark.parametrize("content", ["", "[]", "null", '{"format": 1}'])
def test_damaged_choices_are_measured_again(contract, answers, caplog, content):
    size = contract.spec.size
    choice.find(contract, size)
    [file] = (contract.folder / choice.FOLDER).iterdir()
    file.write_text(content)
    assert choice.read(contract, size) is None
    assert "not a choice of --compile auto" in caplog.text
    choice.find(contract, size)
    assert choice.read(contract, size) is not None


def test_exports_that_cannot_be_written(contract, answers, tmp_path):
    contract.folder.write_text("in the way")
    first = choice.find(contract, contract.spec.size)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1
    assert choice.read(contract, contract.spec.size) == first


def test_the_environment_is_set_before_tensorflow_or_not_at_all(contract, answers, monkeypatch):
    with pytest.raises(InputError, match="must be decided before TensorFlow is imported"):
        choice.prepare(contract, contract.spec.size)
    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    found = choice.prepare(contract, contract.spec.size)
    assert {name: os.environ[name] for name in found.variables} == choice.added(found.variables) | found.variables


def test_a_notice_where_xla_was_slower(contract, answers, monkeypatch):
    size = contract.spec.size
    assert choice.slower(contract, size) is None  # not known yet
    choice.find(contract, size)
    line = choice.slower(contract, size)
    assert line == "--jit_compile: XLA's UNet took 1.75 times the plain one's time on this machine; try --compile auto"
    found = choice.read(contract, size)
    quick = dataclasses.replace(found, seconds={**found.seconds, "XLA": {"unet": 4.0, "decoder": 1.0}})
    monkeypatch.setattr(choice, "read", lambda *_: quick)
    assert choice.slower(contract, size) is None


def test_a_sweep_is_kept(contract, answers, monkeypatch):
    """As measured by benchmark.py: minima of the stages, for the export's default steps."""
    size, steps = contract.spec.size, contract.config.defaults.num_steps
    monkeypatch.setattr(manifest, "read", lambda folder: contract)
    rows = [
        {
            **row,
            "of": "tiny",
            "name": f"tiny {row['name']}",
            "settings": {"num_steps": 4},
            "stages": {s: {"min": SECONDS[row["name"]][c], "p50": 99.0} for c, s in choice.STAGES.items()},
        }
        for row in choice.rows(contract, size)
    ]
    [line] = choice.keep_best([*rows, {"kind": "kerascv", "of": "KerasCV", "stages": {}}])
    assert line.startswith(f"--compile auto takes for tiny: unet: {ISLANDS}, decoder: XLA, oneDNN (kept in ")
    assert choice.read(contract, size).seconds["plain"] == {"unet": 9.0 * steps / 4, "decoder": 1.0}
    assert choice.find(contract, size).variants["unet"] == ISLANDS and answers == []


def test_rows_are_what_the_worker_reads(contract):
    for row in choice.rows(contract, contract.spec.size):
        assert json.loads(json.dumps(row)) == row
        assert row["settings"]["num_steps"] == choice.STEPS and np.isfinite(row["settings"]["guidance_scale"])
