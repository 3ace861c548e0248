"""Measuring: what counts, what does not, and what is kept when a process dies. Nothing here depends on real time."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from models.errors import InputError
from pipeline import machine
from pipeline.benchmark import timing


class Clock:
    """Stands in for the module `time`; the test moves it."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def process_time(self):
        return 2 * self.now  # two cores busy


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_summary_of_fixed_numbers():
    assert timing.summary([4.0, 1.0, 3.0, 2.0, 10.0]) == {
        **{"n": 5, "min": 1.0, "p50": 3.0, "max": 10.0, "mean": 4.0},
        "p90": pytest.approx(7.6),  # rank 3.6 of 0..4: 4 + 0.6 * (10 - 4)
    }
    assert timing.summary([2.0]) == {"n": 1, "min": 2.0, "p50": 2.0, "p90": 2.0, "max": 2.0, "mean": 2.0}
    json.dumps(timing.summary([1.0, 2.0]))


def test_first_call_and_warmup_are_not_counted(clock):
    seconds = iter([50.0, 9.0, 8.0, 1.0, 2.0, 3.0])

    def function(lap):
        clock.now += next(seconds)
        lap("work")
        return clock.now

    progress = []
    measured = timing.measure(function, warmup=2, repeats=3, progress=lambda: progress.append(clock.now))
    assert measured.first == {"work": 50.0, "total": 50.0}
    assert measured.samples == {"work": [1.0, 2.0, 3.0], "total": [1.0, 2.0, 3.0]}
    assert measured.result == 173.0 and len(progress) == 6
    assert measured.cores_busy == 2.0


def test_stages_add_up_and_the_rest_counts_as_total_only(clock):
    def function(lap):
        for seconds, stage in ((1.0, "a"), (2.0, "b"), (4.0, "a")):
            clock.now += seconds
            lap(stage)
        clock.now += 8.0

    # Progress takes its time outside the clock.
    def progress():
        clock.now += 1000.0

    measured = timing.measure(function, warmup=0, repeats=2, progress=progress)
    assert measured.samples == {"a": [5.0, 5.0], "b": [2.0, 2.0], "total": [15.0, 15.0]}
    assert list(measured.samples) == ["a", "b", "total"]


@pytest.mark.parametrize(("warmup", "repeats"), [(-1, 1), (0, 0)])
def test_counts_out_of_range(warmup, repeats):
    with pytest.raises(InputError, match="--warmup must be 0 or more and --repeats 1 or more"):
        timing.measure(lambda lap: None, warmup, repeats)


def test_machine_facts(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=nowhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    facts = machine.describe()
    assert facts["environment"]["XLA_FLAGS"] == "--xla_dump_to=nowhere"
    assert facts["environment"]["OMP_NUM_THREADS"] is None
    assert facts["cpu"] and facts["usable_cores"] >= 1 and len(facts["load_average"]) == 3
    assert facts["cpu_flags"] is None or facts["cpu_flags"].keys() == set(machine.CPU_FLAGS)
    json.dumps(facts)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_software_names_the_commit(tmp_path):
    def git(*arguments):
        settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *settings, *arguments], check=True, capture_output=True)

    # A folder that is no repository itself must not be taken for the one around it.
    assert timing.software(tmp_path)["commit"] is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    facts = timing.software(tmp_path)
    assert len(facts["commit"]) == 40 and facts["uncommitted_changes"] is False
    assert facts["versions"]["numpy"] == np.__version__
    (tmp_path / "file").write_text("2")
    assert timing.software(tmp_path)["uncommitted_changes"] is True


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux only")
def test_memory_peak_stays_after_memory_is_freed():
    size, slack = 256 << 20, 64 << 20
    before = timing.memory()
    block = np.ones(size, np.uint8)
    with_block = timing.memory()
    del block
    after = timing.memory()
    assert with_block["anonymous"] > before["anonymous"] + size - slack
    assert after["anonymous"] < with_block["anonymous"] - size + slack
    assert after["peak_rss"] > with_block["anonymous"] - slack
    assert timing.memory("no such process") == {"peak_rss": None, "anonymous": None}


ANSWER = """
import json, sys, numpy
from pathlib import Path
file = Path(sys.argv[-1])
request = json.loads(file.read_text())
print("noise on stdout is not an answer")
numpy.save(file.with_name("images.npy"), numpy.full((1, 2, 2, 3), request["value"], numpy.uint8))
file.with_name("answer.json").write_text(json.dumps({"twice": 2 * request["value"]}))
"""


def isolated(program: str, **request) -> dict:
    return timing.isolated([sys.executable, "-c", program], request)


def test_isolated_answers(capfd):
    answer = isolated(ANSWER, value=21)
    assert answer["twice"] == 42
    assert np.array_equal(answer["images"], np.full((1, 2, 2, 3), 21))
    assert answer["peak_anonymous_bytes"] is None or answer["peak_anonymous_bytes"] > 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(3)", "ended with exit code 3 and no result"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL; out of memory?"),
        ("import os; os.kill(os.getpid(), 6)", "ended by SIGABRT"),
        (ANSWER + "\nfile.with_name('answer.json').write_text('{')", "ended with exit code 0 and no result"),
        (ANSWER + "\nfile.with_name('images.npy').unlink()", "ended with exit code 0 and no result"),
    ],
)
def test_isolated_tells_how_a_process_died(program, message):
    assert message in isolated(program, value=1)["error"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputError("--height 3: too small"), "--height 3: too small"),
        (MemoryError("first line\nsecond line"), "MemoryError: first line"),
        (ValueError(), "ValueError: no message"),
    ],
)
def test_answer_passes_errors_on_in_one_line(tmp_path, monkeypatch, error, expected):
    def fail(row, load, runtime):
        raise error

    monkeypatch.setattr(timing, "_measure_row", fail)
    request = tmp_path / "request.json"
    request.write_text("{}")
    assert timing.answer(str(request), load=None) == 1
    assert json.loads((tmp_path / "answer.json").read_text()) == {"error": expected}


def test_answer_keeps_pictures_beside_the_numbers(tmp_path, monkeypatch):
    images = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    monkeypatch.setattr(timing, "_measure_row", lambda row, load, runtime: {"images": images, "row": row})
    request = tmp_path / "request.json"
    request.write_text('{"name": "x"}')
    assert timing.answer(str(request), load=None) == 0
    assert json.loads((tmp_path / "answer.json").read_text()) == {"row": {"name": "x"}}
    assert np.array_equal(np.load(tmp_path / "images.npy"), images)


def test_a_worker_needs_no_tensorflow():
    """Another library's runtime answers with its own facts where TensorFlow, Keras and absl cannot be imported."""
    program = """
import sys
sys.modules |= dict.fromkeys(("tensorflow", "keras", "absl"))
from pipeline.benchmark import timing
import numpy

def load(row):
    return lambda lap: (lap("work"), numpy.full((1, 2, 2, 3), row["value"], numpy.uint8))[1]

runtime = timing.Runtime(lambda: None, lambda row: {"flags": row["name"]}, lambda: [])
raise SystemExit(timing.answer(sys.argv[-1], load, runtime))
"""
    answer = isolated(program, name="a", value=3, warmup=0, repeats=2)
    assert answer["device"] == {"flags": "a"} and answer["peak_gpu_bytes"] == []
    assert list(answer["samples"]) == ["work", "total"] and len(answer["samples"]["total"]) == 2
    assert np.array_equal(answer["images"], np.full((1, 2, 2, 3), 3))


def test_answer_needs_a_request(tmp_path):
    with pytest.raises(InputError, match="expected a request as JSON"):
        timing.answer(str(tmp_path / "none.json"), load=None)


def test_json_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    timing.write_json(path, {"a": 1})

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timing.os, "replace", full)
    with pytest.raises(InputError, match="results.json: cannot be written .No space left on device."):
        timing.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_unwritable_outputs_are_found_before_measuring(tmp_path):
    timing.check_writable("--json", None)
    timing.check_writable("--json", str(tmp_path / "new.json"))
    for path in (tmp_path, tmp_path / "missing" / "new.json"):
        with pytest.raises(InputError, match="--json .*: expected a file in an existing folder"):
            timing.check_writable("--json", str(path))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA L4, 550.54, 23034 MiB'", ["NVIDIA L4, 550.54, 23034 MiB"]),
        ("sleep 600", []),
        ("echo no driver; exit 9", []),
        (r"printf '\377\376'; exit 1", []),
    ],
    ids=["works", "hangs", "fails", "rubbish"],
)
def test_a_broken_nvidia_smi_is_no_card(tmp_path, monkeypatch, script, expected):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "SECONDS", 0.3)
    assert machine.nvidia_gpus() == expected
