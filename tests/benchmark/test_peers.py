"""Peers beside the exports: which rows, in which environment, what is refused, what the table says of them."""

import dataclasses
import importlib
import json
import sys

import numpy as np
import pytest

from models.errors import InputError
from pipeline.benchmark import differences, markdown, peers, report

SETTINGS = {"sampler": "ddim", "num_steps": 4, "guidance_scale": 3.0, "guidance_rescale": 0.0}
SIZES = {"images": 2, "height": 8, "width": 16, "unet_calls": 4}
FOUND = {"diffusers": "/d/python", "openvino": "/o/python"}


def export(dtype="float32", sampler="ddim", **spec):
    """What benchmark.py asks of an export that was made from a checkpoint called emoji."""
    spec = {"prompts": 1, "images_per_prompt": 2, "prompt_chunks": 1, **spec}
    facts = {"folder": "exports/a", "checkpoint": "emoji", "spec": spec}
    settings = SETTINGS | {"sampler": sampler}
    row = {"kind": "export", "of": "a", "approximate": "", "networks": dtype}
    return {**SIZES, **row, "dtype": dtype, "settings": settings, "export": facts}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "emoji"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    return folder


# === Rows ===


def test_a_row_per_peer_dtype_and_decoder(checkpoint):
    exports = [export(), export("bfloat16"), export()]
    rows = peers.workloads(["diffusers", "openvino"], exports, str(checkpoint), True, FOUND)
    assert [row["name"] for row in rows] == [
        *("diffusers float32 16x8 1x2", "OpenVINO float32 16x8 1x2"),
        *("diffusers bfloat16 16x8 1x2", "diffusers bfloat16 16x8 bfloat16 VAE 1x2"),
        *("OpenVINO bfloat16 16x8 1x2", "OpenVINO bfloat16 16x8 bfloat16 VAE 1x2"),
    ]
    assert [row["vae_dtype"] for row in rows] == ["float32"] * 3 + ["bfloat16", "float32", "bfloat16"]
    first = rows[0]
    assert first["checkpoint"] == str(checkpoint) and first["pipeline"] == "StableDiffusionPipeline"
    assert first["settings"] == SETTINGS and (first["prompts"], first["images_per_prompt"]) == (1, 2)
    assert first["command"] == ["/d/python", str(peers.SCRIPTS / "diffusers_torch.py")] and first["compile"] is False
    assert rows[1]["command"] == ["/o/python", str(peers.SCRIPTS / "openvino_peer.py")]
    assert len(peers.workloads(["diffusers"], exports, str(checkpoint), False, FOUND)) == 2
    (compiled,) = peers.workloads(["diffusers_compile"], exports[:1], str(checkpoint), False, FOUND)
    assert compiled["compile"] is True and compiled["name"].startswith("diffusers compiled float32")
    json.dumps(rows)


def test_peers_are_not_asked_for_approximations(checkpoint, caplog):
    fast = export("bfloat16") | {"of": "fast", "approximate": "int8 weights"}
    (row,) = peers.workloads(["openvino"], [fast, export()], str(checkpoint), False, FOUND)
    assert row["dtype"] == "float32" and "--peers draw exactly: none for fast (int8 weights)" in caplog.text
    with pytest.raises(InputError, match="add an exact export"):
        peers.workloads(["openvino"], [fast], str(checkpoint), False, FOUND)


def test_the_embedded_checkpoint_is_found_by_its_name():
    folder, pipeline = peers.checkpoint(None, "emoji")
    assert folder == peers.ROOT / "checkpoints" / "emoji" and pipeline == "StableDiffusionPipeline"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "exports/a holds float16; peers are timed in float32 and bfloat16"),
        ({"prompt_chunks": 3}, "exports/a takes 3 blocks of tokens a prompt; peers take 1"),
        ({"sampler": "heun"}, "--sampler ddim or euler, not heun"),
    ],
)
def test_work_that_peers_cannot_do(checkpoint, changes, message):
    with pytest.raises(InputError, match=message):
        peers.workloads(["diffusers"], [export(**changes)], str(checkpoint), False, FOUND)


def test_checkpoints_that_peers_cannot_load(checkpoint, caplog):
    with pytest.raises(InputError, match="no model_index.json; pass --checkpoint FOLDER.* made from .'mine'"):
        peers.checkpoint(None, "mine")
    assert peers.checkpoint(str(checkpoint), "mine")[0] == checkpoint
    assert "the export was made from 'mine'" in caplog.text
    (checkpoint / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(InputError, match="FluxPipeline: the peers draw with StableDiffusionPipeline and"):
        peers.checkpoint(str(checkpoint), "emoji")


def test_kerascv_in_every_size():
    exports = [{**export(), "width": width, "height": 128} for width in (256, 128, 256)]
    rows = peers.kerascv_workloads(exports, {"num_steps": 7, "height": None}, random_weights=True)
    assert [(row["of"], row["width"]) for row in rows] == [("KerasCV 256x128", 256), ("KerasCV 128x128", 128)]
    assert all(row["settings"]["num_steps"] == 7 and row["random_seed"] == 0 for row in rows)
    (alone,) = peers.kerascv_workloads([], {}, random_weights=False)
    assert (alone["of"], alone["width"], alone["random_seed"]) == ("KerasCV", 512, None)


# === Environments ===


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (["torch"], [], "--peers torch: expected some of diffusers,diffusers_compile,openvino"),
        (["openvino"], ["openvino"], "--peer_python openvino: expected diffusers=PATH,openvino=PATH"),
        (["openvino"], ["torch=/x"], "--peer_python torch=/x: expected"),
        (["openvino"], ["openvino=/no/such"], "/no/such cannot be run .*run `make peers`, or pass --peer_python open"),
    ],
)
def test_environments_that_are_none(names, given, message):
    with pytest.raises(InputError, match=message):
        peers.pythons(names, given)


def test_packages_are_looked_for(monkeypatch):
    mine = dataclasses.replace(peers.ENVIRONMENTS["openvino"], packages=("numpy", "not_there"))
    monkeypatch.setitem(peers.ENVIRONMENTS, "openvino", mine)
    with pytest.raises(InputError, match="lacks not_there: run `make peers`, or .*workers/openvino-requirements"):
        peers.pythons(["openvino"], [f"openvino={sys.executable}"])
    monkeypatch.setitem(peers.ENVIRONMENTS, "openvino", dataclasses.replace(mine, packages=("numpy",)))
    assert peers.pythons(["openvino"], [f"openvino={sys.executable}"]) == {"openvino": sys.executable}


def test_only_peers_that_keep_something_prepare(tmp_path):
    program = f"import sys; open({str(tmp_path / 'seen')!r}, 'a').write(sys.argv[1] + open(sys.argv[2]).read()[:8])"
    command = [sys.executable, "-c", program]
    peers.prepare([{"kind": kind, "command": command} for kind in ("export", "diffusers", "openvino")])
    assert (tmp_path / "seen").read_text() == '--prepare{"kind":'


# === The scripts, as far as they go without torch ===


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(peers.SCRIPTS))
    monkeypatch.setitem(sys.modules, "openvino_telemetry", None)
    for name in ("diffusers_torch", "openvino_peer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ("diffusers_torch", "openvino_peer"):
        sys.modules.pop(name, None)


def test_samplers_are_those_of_the_scripts(script):
    assert tuple(script("diffusers_torch").SCHEDULERS) == peers.SAMPLERS


def test_pixels_are_rounded(script):
    levels = script("diffusers_torch").to_uint8(np.float32([-2, -1, -0.5, 0, 0.5, 0.999, 1, 2]))
    assert levels.tolist() == [0, 0, 64, 128, 191, 255, 255, 255] and levels.dtype == np.uint8
    with pytest.raises(InputError, match="NaN or infinite"):
        script("diffusers_torch").to_uint8(np.float32([np.nan]))


def test_networks_are_converted_anew_when_they_differ(script, monkeypatch, checkpoint):
    peer = script("openvino_peer")
    monkeypatch.setattr(script("diffusers_torch"), "versions", lambda *names: dict.fromkeys(names, "1"))
    row = {
        **SIZES,
        "prompts": 1,
        "settings": SETTINGS,
        "checkpoint": str(checkpoint),
        "cache": "/c",
        "dtype": "float32",
    }
    first = peer.converted(row)
    assert first.parent.name == "c" and first.name.startswith("emoji-16x8-")
    assert peer.converted(row | {"dtype": "bfloat16"}) == first
    others = [row | {"images": 1}, row | {"height": 16}, row | {"settings": SETTINGS | {"guidance_scale": 1.0}}]
    assert len({first, *map(peer.converted, others)}) == 4
    (checkpoint / "model_index.json").write_text("{}")
    assert peer.converted(row) != first


# === What is claimed ===


def entry(name, total, kind="export", jit=False, images=0, **changes):
    answer = {
        "samples": {stage: [total] for stage in report.STAGES},
        "first": dict.fromkeys(report.STAGES, 9.0),
        **{
            "import_seconds": 1.0,
            "load_seconds": 7.0,
            "cores_busy": changes.pop("busy", 1.5),
            "peak_anonymous_bytes": None,
        },
        **{"peak_rss_bytes": 3_000_000, "device": changes.pop("device", {})},
        "images": np.full((2, 8, 16, 3), images, np.uint8),
    }
    row = {"name": name, "of": name, "kind": kind, "jit_compile": jit, "jit_components": ["unet"], "networks": "sd1"}
    return {**row, **SIZES, "call_path": kind, "dtype": "float32", "settings": SETTINGS, **changes}, [answer]


def pooled(*entries):
    done = list(entries)
    return report.with_ratios([report.pooled(row, got, None, differences.expected(row, done)) for row, got in done])


def result(rows):
    machine = {"cpu": "A CPU", "usable_cores": 2, "gpus": [], "load_average": [0, 0, 0], "cpu_flags": {"avx2": True}}
    machine["environment"] = {"XLA_FLAGS": "--x", "TF_XLA_FLAGS": None}
    software = {"versions": {"tensorflow": "2"}, "commit": None, "uncommitted_changes": False, "date": "2026-01-02"}
    return {"machine": machine, **software, "order": [0], "rows": rows}


PEER = {"kind": "openvino", "same_noise": True, "device": {"flags": "f32, LATENCY", "versions": {"openvino": "2026"}}}


def test_peers_are_compared_with_our_best():
    ours = (entry("a plain", 4.0), entry("a XLA", 2.0, jit=True), entry("a over http", 1.0, server="http://a:1"))
    rows = pooled(*ours, entry("OpenVINO", 3.0, **PEER), entry("k", 6.0, kind="kerascv"))
    found = {row["name"]: row.get("to_ours") for row in rows}
    assert found["OpenVINO"] == {"of": "a XLA", "seconds_per_step": 1.5, "total": 1.5}
    assert found["a plain"]["total"] == 2.0 and found["a XLA"]["total"] == 1.0
    assert found["k"] == {"of": "a plain", "seconds_per_step": 1.5, "total": 1.5}  # without XLA as well
    assert "to_ours" not in pooled(*ours, entry("p", 3.0, **PEER, dtype="bfloat16"))[-1]
    text = report.text(result(rows))
    assert "to ours" in text and "1.50 x" in text
    assert "speed of a XLA to OpenVINO*: 1.50 x" in text and "speed of a plain to OpenVINO*: 0.75 x" in text
    assert "speed of a XLA to k*" not in text
    assert "\nOpenVINO*: f32, LATENCY; openvino 2026\n" in text
    assert "to ours" not in report.text(result(pooled(*ours)))


def test_peers_pictures_are_compared_with_ours():
    rows = pooled(entry("a plain", 4.0, images=10), entry("p", 3.0, images=12, **PEER), entry("k", 6.0, kind="kerascv"))
    assert rows[1]["picture"]["max_levels_from_ours"] == rows[1]["picture"]["mean_levels_from_ours"] == 2
    assert rows[2]["picture"].keys() == {"sha256"}
    assert "p* draws our picture to 2 of 255 levels, 2 on average, from the same noise" in report.text(result(rows))
    failed = {"error": "gone"}
    row, _ = entry("p", 3.0, **PEER)
    assert report.pooled(row, [failed], None, differences.expected(row, [(row, [failed])]))["error"] == "gone"


def test_rows_that_were_starved_say_so():
    text = report.text(result(pooled(entry("a plain", 4.0, busy=0.1), entry("p", 3.0, **PEER))))
    assert "careful: a plain had 0.1 cores" in text and "careful: p had" not in text


def test_markdown(tmp_path):
    rows = pooled(entry("a XLA", 2.0, jit=True), entry("OpenVINO", 3.0, **PEER))
    path = tmp_path / "table.md"
    markdown.write(result(rows), str(path))
    lines = path.read_text().splitlines()
    assert lines[:2] == [f"| {' | '.join(markdown.HEAD)} |", "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    assert lines[2] == "| a XLA | float32 | 16x8 | 0.5 | 2 | 3 | 1.00 x | 1.00 x | XLA: unet; XLA_FLAGS=--x |"
    assert lines[3] == (
        "| OpenVINO\\* | float32 | 16x8 | 0.75 | 3 | 3 | 1.50 x | 1.50 x | f32, LATENCY; openvino 2026 |"
    )
    assert lines[5] == "2026-01-02:" and all(line.startswith("* ") for line in lines[7:])
    with pytest.raises(InputError, match="--markdown .*: cannot be written"):
        markdown.write(result(rows), str(tmp_path / "missing" / "table.md"))
