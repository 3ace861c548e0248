"""benchmark.py: what is asked of each row, what survives a failing one, what is claimed. No test looks at times."""

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import benchmark
from models.errors import InputError
from pipeline import manifest
from pipeline.benchmark import differences, report, timing
from pipeline.manifest import Functions

ROOT = Path(__file__).parents[2]


def run(*arguments, timeout=300):
    command = [sys.executable, str(ROOT / "benchmark.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


# === One call of an export ===


class Recorder:
    """Functions of an export that note what they are called with and give zeros of the promised shapes."""

    def __init__(self, folder, finite=True):
        self.contract, self.finite, self.calls = manifest.read(folder), finite, []

    def functions(self) -> Functions:
        called = {name: self.function(part, name) for name, part in manifest.CHAIN.items()}
        return Functions(**called, manifest=self.contract, size=self.contract.spec.size)

    def function(self, part, name):
        def call(**inputs):
            self.calls.append((name, copy.deepcopy(inputs)))
            outputs = self.contract.signatures[part][name].outputs
            result = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in outputs}
            return result | ({"finite": np.full(len(result["finite"]), self.finite)} if name == "decode" else {})

        return call


ROW = {
    "prompt": "a red apple",
    "seed": 5,
    "settings": {"sampler": "euler", "num_steps": 3, "guidance_scale": 2.5, "guidance_rescale": 0.0},
}


def test_every_call_has_the_measured_arguments(tiny_export):
    """Cold call, warm-up and measured calls are the same call, so nothing is compiled while the clock counts."""
    recorder = Recorder(tiny_export)
    measured = timing.measure(benchmark.picture(recorder.functions(), ROW), warmup=2, repeats=2)
    assert [name for name, _ in recorder.calls] == ["encode", "denoise", "decode"] * 5
    cold = recorder.calls[:3]
    for i, (name, inputs) in enumerate(recorder.calls[3:]):
        expected = cold[i % 3][1]
        assert inputs.keys() == expected.keys()
        for key, value in inputs.items():
            np.testing.assert_array_equal(value, expected[key], err_msg=f"{name} {key}")
    denoise = cold[1][1]
    assert (denoise["first_step"], denoise["last_step"]) == (0, 3)
    assert np.all(denoise["guidance_scale"] == 2.5)
    assert denoise["seed"][:, 0].tolist() == [5, 6, 7, 8]
    assert tuple(measured.samples) == report.STAGES
    assert measured.result.shape == (4, 18, 14, 3)


def test_pictures_that_are_not_finite_have_no_time(tiny_export):
    draw = benchmark.picture(Recorder(tiny_export, finite=False).functions(), ROW)
    with pytest.raises(InputError, match="NaN or infinite"):
        draw(lambda stage: None)


def test_components_are_those_of_load():
    from pipeline import load

    assert benchmark.JIT_COMPONENTS == tuple(load.JIT_COMPONENTS)


def test_kerascv_is_called_as_its_users_call_it(monkeypatch):
    """text_to_image with the row's arguments; stages end where the next network is called for the first time."""
    spec = importlib.util.spec_from_file_location("peer", benchmark.WORKERS["kerascv"][1])
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    events = []

    class Network:
        def __init__(self, name):
            self.name = name

        def predict_on_batch(self, inputs):
            events.append(self.name)

    class StableDiffusion:
        text_encoder, diffusion_model, decoder = Network("text"), Network("unet"), Network("decoder")

        def text_to_image(self, prompt, **settings):
            events.append((prompt, settings))
            calls = [self.text_encoder] * 2 + [self.diffusion_model] * 2 * settings["num_steps"] + [self.decoder]
            for network in calls:
                network.predict_on_batch(None)
            return "images"

    built = []
    monkeypatch.setattr(peer.kerascv, "stable_diffusion", lambda *given: built.append(given) or StableDiffusion())
    row = ROW | {"height": 128, "width": 256, "random_seed": 0, "jit_compile": True, "images": 2}
    draw = peer.load(row | {"tokenizer": str(ROOT / "checkpoints" / "emoji" / "tokenizer")})
    assert built[0][:2] == (128, 256) and built[0][3:] == (0, True)
    settings = {"batch_size": 2, "num_steps": 3, "unconditional_guidance_scale": 2.5, "seed": 5}
    expected = [
        *(("a red apple", settings), "text", "text", "LAP text_encoder", *["unet"] * 6),
        *("LAP diffusion", "decoder", "LAP decoder"),
    ]
    for _ in range(2):
        events.clear()
        assert draw(lambda stage: events.append(f"LAP {stage}")) == "images"
        assert events == expected


# === Rows ===


def row(name, of="a", kind="export", jit=False, networks="sd1", **changes):
    settings = {"sampler": "ddim", "num_steps": 4, "guidance_scale": 3.0}
    common = {
        "images": 2,
        "width": 8,
        "height": 8,
        "dtype": "float32",
        "settings": settings,
        "call_path": f"via {kind}",
    }
    common |= {"kind": kind, "jit_compile": jit, "networks": networks, "unet_calls": 4}
    return {"name": name, "of": of, **common, **changes}


def answer(total, images=None):
    """What a worker would say: all stages are `total` but the text encoder, always 0.5."""
    stages = {"text_encoder": [0.5] * len(total), "diffusion": total, "decoder": total, "total": total}
    return {
        "samples": stages,
        "first": {stage: 99.0 for stage in stages},
        **{"import_seconds": 3.0, "load_seconds": 7.0},
        "cores_busy": 1.5,
        "peak_rss_bytes": 3_000_000,
        "peak_anonymous_bytes": None,
        "device": {"tf32": False, "intra_op_threads": 0, "inter_op_threads": 2, "xla_available": True},
        "images": np.zeros((2, 8, 8, 3), np.uint8) if images is None else images,
    }


def result(rows, order=(0,), load=0.0):
    machine = {
        **{"cpu": "A CPU", "usable_cores": 2, "gpus": ["A card"], "load_average": [load, 0, 0]},
        **{
            "cpu_flags": {"avx2": True, "amx_tile": False},
            "environment": {"XLA_FLAGS": "--x", "OMP_NUM_THREADS": None},
        },
    }
    software = {
        "versions": {"tensorflow": "2", "keras-cv": None},
        "commit": "0123456789abc",
        "uncommitted_changes": True,
    }
    return {"machine": machine, **software, "order": list(order), "rows": rows}


def test_pooled_numbers():
    entry = report.pooled(row("a"), [answer([2.0, 4.0]), answer([6.0])], price_per_hour=1.8)
    assert entry["stages"]["total"] == timing.summary([2.0, 4.0, 6.0])
    assert entry["seconds_per_step"] == 1.0  # 4 s by the median, 4 steps
    assert entry["images_per_second"] == 0.5  # 2 images in 4 s
    assert entry["images_per_dollar"] == 1000.0
    assert entry["first"]["total"] == 99.0 and entry["peak_rss_bytes"] == 3_000_000
    assert entry["peak_anonymous_bytes"] is None
    # The first call took 99 s, a warm one 4: the rest is compiling.
    assert entry["cold_start"] == {"import": 3.0, "load": 7.0, "compile": 95.0, "run": 4.0, "total": 109.0}
    assert [r["samples"]["total"] for r in entry["rounds"]] == [[2.0, 4.0], [6.0]]
    json.dumps(entry)
    assert "images_per_dollar" not in report.pooled(row("a"), [answer([2.0])], None)


def test_xla_pictures_are_compared_with_the_plain_ones():
    black, off = np.zeros((2, 8, 8, 3), np.uint8), np.zeros((2, 8, 8, 3), np.uint8)
    off[0, 0, 0, 0] = 200  # uint8 differences must not wrap around
    plain, xla, other = row("plain"), row("xla", jit=True), row("other", of="b", jit=True)
    done = [(plain, [answer([1.0], black)]), (xla, [answer([1.0], off)]), (other, [answer([1.0], off)])]
    assert differences.expected(plain, done) is None and differences.expected(other, done) is None
    entry = report.pooled(xla, done[1][1], None, differences.expected(xla, done))
    assert entry["picture"]["max_levels_from_plain"] == 200
    assert entry["picture"]["mean_levels_from_plain"] == pytest.approx(200 / 384)
    assert "xla draws the plain row's picture to 200 of 255 levels" in report.text(result([entry]))


@pytest.mark.parametrize(("rounds", "expected"), [(1, [0, 1, 2]), (3, [0, 1, 2, 2, 1, 0, 0, 1, 2])])
def test_rounds_go_back_and_forth(rounds, expected):
    assert report.order(3, rounds) == expected


STUB = """
import json, shutil, sys
from pathlib import Path
file = Path(sys.argv[-1])
request = json.loads(file.read_text())
if request["name"] == "bad":
    raise SystemExit(9)
shutil.copy(request["images_file"], file.with_name("images.npy"))
file.with_name("answer.json").write_text(json.dumps(request["answer"]))
"""


def test_a_failing_row_keeps_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "WORKERS", {"export": [sys.executable, "-c", STUB]})
    numbers = answer([1.0])
    np.save(tmp_path / "images.npy", numbers.pop("images"))
    given = {"answer": numbers, "images_file": str(tmp_path / "images.npy")}
    rows = [row("good", **given), row("bad", **given), row("fine", **given)]
    outcome, path = result([], order=[0, 1, 2]), tmp_path / "results.json"
    kept = []
    write = timing.write_json
    monkeypatch.setattr(timing, "write_json", lambda *given: (write(*given), kept.append(path.read_text())))
    benchmark.measure_rows(rows, outcome, str(path), None)

    names = [[r["name"] for r in json.loads(text)["rows"]] for text in kept]
    assert names == [["good"], ["good", "bad"], ["good", "bad", "fine"]]
    good, bad, fine = json.loads(path.read_text())["rows"]
    assert good["stages"]["total"]["p50"] == fine["stages"]["total"]["p50"] == 1.0
    assert "stages" not in bad and "exit code 9 and no result" in bad["error"]
    assert "failed: bad: the measuring process ended with exit code 9" in report.text(outcome)
    progress = capsys.readouterr().err.splitlines()
    assert progress[0] == "[1/3] good: started" and progress[1].startswith("[1/3] good: done; ")
    assert progress[3].startswith("[2/3] bad: failed: ")


def test_a_row_that_fails_in_a_later_round_keeps_its_numbers():
    entry = report.pooled(row("a"), [answer([2.0]), {"error": "gone", "peak_anonymous_bytes": None}], None)
    assert entry["error"] == "gone" and entry["stages"]["total"]["n"] == 1


# === What is claimed ===


def entries(*given):
    return [report.pooled(r, [answer(total)], None) for r, total in given]


def test_xla_against_plain():
    rows = entries(
        (row("a plain"), [3.0, 4.0, 4.0]),
        (row("a XLA", jit=True), [1.0, 2.0, 2.0]),
        (row("b XLA", of="b", jit=True), [1.0]),
    )
    (line,) = report.ratios(rows)
    ratios = "2.00 x (diffusion 2.00 x) by medians, 3.00 x (diffusion 3.00 x) by minima"
    assert line == f"speed of a XLA to a plain: {ratios}"


def test_other_call_paths_are_marked():
    rows = entries((row("a plain"), [3.0]), (row("KerasCV plain", of="KerasCV", kind="kerascv"), [6.0]))
    (line,) = report.ratios(rows)
    assert line.startswith("speed of a plain to KerasCV plain*: 2.00 x (") and line.endswith("(* different call paths)")
    text = report.text(result(rows))
    assert "\nKerasCV plain*" in text and "\na plain " in text
    assert "* another call path: via kerascv" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"networks": "tiny"},
        {"height": 16},
        {"images": 1},
        {"dtype": "bfloat16"},
        {"unet_calls": 5},
        {"settings": {"sampler": "ddim", "num_steps": 4, "guidance_scale": 2.0}},
        {"jit": True},
    ],
)
def test_different_work_gets_no_ratio(changes):
    rows = entries((row("a", **changes), [3.0]), (row("KerasCV", of="KerasCV", kind="kerascv"), [6.0]))
    assert report.ratios(rows) == []


def test_text_says_on_what_and_warns():
    rows = entries((row("a plain"), [4.0, 5.0]))
    text = report.text(result(rows, load=1.5))
    lines = text.splitlines()
    assert lines[0].split() == ["seconds", "stage", "first", "call", "min", "p50", "p90", "mean", "n"]
    assert lines[1].split() == ["a", "plain", "text", "encoder", "99", "0.5", "0.5", "0.5", "0.5", "2"]
    assert lines[4].split() == ["total", "99", "4", "4.5", "4.9", "4.5", "2"]
    assert len({len(line) for line in lines[:5]}) == 1  # numbers end in one column
    assert "on A CPU, 2 cores (avx2); tensorflow 2, commit 0123456789 with changes\non A card\n" in text
    assert "TF32 off; threads: all intra-op, 2 inter-op; XLA_FLAGS=--x" in text
    assert "careful: load average 1.50 on 2 cores" in text
    assert "careful" not in report.text(result(rows, load=0.5))
    assert "rows ran one after another" in report.text(result(rows, order=[0, 1]))
    assert "rows alternated" in report.text(result(rows, order=[0, 1, 1, 0]))


def test_unsteady_rows_say_so():
    assert "careful" not in report.text(result(entries((row("a plain"), [4.0, 5.0]))))
    text = report.text(result(entries((row("a plain"), [4.0, 6.0]))))
    assert "careful: a plain is unsteady: p90 is 1.45 x the minimum" in text


def test_rows_that_ran_without_a_compiler_say_so():
    without = answer([1.0])
    without["device"]["xla_available"] = False
    rows = [report.pooled(row("a XLA", jit=True), [without], None)]
    assert "careful: a XLA ran without XLA" in report.text(result(rows))


def test_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    rows = entries((row("a plain"), [3.0, 5.0]), (row("KerasCV XLA", of="KerasCV", kind="kerascv", jit=True), [6.0]))
    report.plot(result(rows), str(tmp_path / "plot"))  # PNG whatever it is called
    with Image.open(tmp_path / "plot") as image:
        assert image.format == "PNG" and image.width > 600
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10
    with pytest.raises(InputError, match="--plot .*: cannot be written"):
        report.plot(result(rows), str(tmp_path / "missing" / "plot.png"))


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="--plot needs matplotlib"):
        report.plot(result([]), str(tmp_path / "plot.png"))


# === The command ===


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exports/emoji"], "unexpected arguments: exports/emoji; exports go into --models"),
        (["--models=no/such"], "no/such: no such folder"),
        (["--models="], "nothing to measure"),
        (["--jit_components=vae"], "--jit_components 'vae': must be one or more of text_encoder,unet,decoder"),
        (["--json=no/such/file.json"], "--json no/such/file.json: expected a file in an existing folder"),
        (["--random_weights"], "--random_weights is for --kerascv only"),
        (["--models=", "--kerascv", "--width=200"], "--width 200: KerasCV draws multiples of 128 pixels"),
        (["--models=", "--kerascv", "--num_steps=0"], "--num_steps must be 1..1000"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    if "--kerascv" in arguments:
        pytest.importorskip("keras_cv" if importlib.util.find_spec("keras_cv") else "keras_cv_is_not_installed")
    done = run(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_steps_outside_the_export(tiny_export):
    done = run(f"--models={tiny_export}", "--num_steps=13")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "between 1 and 12, found 13" in done.stderr


def test_the_parent_imports_no_tensorflow():
    code = (
        "import sys, benchmark; print(sorted({'tensorflow', 'keras', 'keras_cv', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_end_to_end(single_export, tmp_path):
    """Plain and XLA rows of a real export, numbers and pictures and all."""
    path = tmp_path / "results.json"
    settings = ("--num_steps=2", "--sampler=euler", "--warmup=0", "--repeats=2", "--price_per_hour=0.5")
    done = run(
        f"--models={single_export}", *settings, f"--json={path}", "--tf_xla_flags=--tf_xla_clustering_debug=false"
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads(path.read_text())
    assert [r["name"] for r in saved["rows"]] == ["single plain", "single XLA"]
    for entry in saved["rows"]:
        assert entry["export"]["export_id"] == manifest.read(single_export).export_id
        assert entry["settings"]["num_steps"] == entry["unet_calls"] == 2 and entry["settings"]["sampler"] == "euler"
        assert {stage: s["n"] for stage, s in entry["stages"].items()} == dict.fromkeys(report.STAGES, 2)
        (only,) = entry["rounds"]
        for stages in (entry["first"], {stage: s["p50"] for stage, s in entry["stages"].items()}):
            assert all(seconds > 0 for seconds in stages.values())
        total = only["samples"]["total"]
        assert all(sum(only["samples"][s][i] for s in report.STAGES[:3]) <= total[i] for i in range(2))
        assert only["device"]["tf32"] is False and only["device"]["devices"]
    assert saved["rows"][1]["picture"]["max_levels_from_plain"] <= 1
    assert "--tf_xla_clustering_debug=false" in saved["machine"]["environment"]["TF_XLA_FLAGS"]
    assert "speed of single XLA to single plain: " in done.stdout and "images/$" in done.stdout
