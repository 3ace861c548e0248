"""Timing that can be trusted: measured calls, their statistics, and the facts of the machine that go with every number.

Each configuration is measured in a process of its own (`isolated` in the parent, `answer` in the child), so that
memory peaks, caches and thread pools of one do not leak into the next. What a worker computes with is a `Runtime`, so
that one without TensorFlow can answer too; it needs NumPy and tqdm beside this file and models.config.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from models.errors import InputError

TOTAL = "total"
PACKAGES = ("tensorflow", "keras", "numpy", "keras-cv", "tokenizers")
POLL_SECONDS = 0.1
ANSWER, IMAGES = "answer.json", "images.npy"  # beside the request

Lap = Callable[[str], None]  # lap("decoder"): the stage "decoder" ends here


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The library that a worker computes with, as far as measuring must know it."""

    start: Callable[[], object]  # imports it
    facts: Callable[[dict], dict]  # of the row, once loaded: what it runs on and how
    peak_gpu_bytes: Callable[[], list[int]]  # the most memory it had in use on each GPU since it started


@dataclasses.dataclass(frozen=True)
class Measured:
    """What `measure` saw. Stages are in the order they first ended; the last one is `TOTAL`."""

    first: dict[str, float]  # stage -> seconds of the very first call, which traces and compiles
    samples: dict[str, list[float]]  # stage -> seconds of each measured call
    cores_busy: float  # CPU seconds of this process / seconds, over the measured calls
    result: object  # what the last call returned


def measure(function: Callable[[Lap], object], warmup: int, repeats: int, progress=lambda: None) -> Measured:
    """Time `function` once cold, `warmup` times for nothing, `repeats` times for the record.

    All calls are the same call: what varied between warm-up and measurement would be compiled inside the measurement.

    Args:
        function: calls `lap(stage)` when a stage's results are on the host; time since the previous lap is that
            stage's. What it does after the last lap counts towards the total only.
        warmup: 0 or more, not counting the first call.
        repeats: 1 or more.
        progress: called after each call, outside the clock.

    Raises:
        InputError: a count out of range.
    """
    if warmup < 0 or repeats < 1:
        raise InputError(f"--warmup must be 0 or more and --repeats 1 or more, found {warmup} and {repeats}")
    first, _, _, result = _call(function, progress)
    for _ in range(warmup):
        _call(function, progress)
    samples: dict[str, list[float]] = {}
    cpu_seconds = 0.0
    for _ in range(repeats):
        stages, wall, cpu, result = _call(function, progress)
        cpu_seconds += cpu
        for stage, seconds in {**stages, TOTAL: wall}.items():
            samples.setdefault(stage, []).append(seconds)
    return Measured(first, samples, cpu_seconds / sum(samples[TOTAL]), result)


def _call(function, progress) -> tuple[dict[str, float], float, float, object]:
    """One call: seconds per stage with the total, the total, CPU seconds of all threads, the call's result."""
    stages: dict[str, float] = {}
    cpu_start = time.process_time()
    start = last = time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal last
        now = time.perf_counter()
        stages[stage] = stages.get(stage, 0.0) + now - last
        last = now

    result = function(lap)
    wall = time.perf_counter() - start
    cpu = time.process_time() - cpu_start
    progress()
    return {**stages, TOTAL: wall}, wall, cpu, result


def summary(seconds: list[float]) -> dict[str, float]:
    """n, min, p50, p90, max and mean of one or more times; percentiles are interpolated linearly between ranks."""
    p50, p90 = np.percentile(seconds, [50, 90])
    return {
        "n": len(seconds),
        "min": float(np.min(seconds)),
        "p50": float(p50),
        "p90": float(p90),
        "max": float(np.max(seconds)),
        "mean": float(np.mean(seconds)),
    }


# === The machine and the software ===


def software(root: Path) -> dict:
    """Versions of Python and of `PACKAGES` (None: not installed), and the git commit of the tree at `root`."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"versions": versions, "commit": _git(root, "rev-parse", "HEAD"), "uncommitted_changes": bool(changed)}


def _git(root: Path, *arguments: str) -> str | None:
    """A git command's output; None where there is no git or no repository of that very folder."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    answer = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else None


def memory(pid: int | str = "self") -> dict[str, int | None]:
    """Bytes of a process: peak_rss (VmHWM, kept by the kernel) and anonymous (RssAnon now); None off Linux."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {"peak_rss": None, "anonymous": None}
    fields = dict(line.split(":", 1) for line in lines)
    found = {"peak_rss": fields.get("VmHWM"), "anonymous": fields.get("RssAnon")}
    return {name: int(value.split()[0]) * 1024 if value else None for name, value in found.items()}


# === A process per configuration ===


def isolated(command: list[str], request: dict) -> dict:
    """Run `command + [FILE]` with `request` in FILE as JSON and return what the process answered.

    The process is expected to call `answer`. Its stdout is dropped, its stderr is the caller's.

    Returns:
        The answer, with images (the pictures of its last call, uint8[N, H, W, 3]) and peak_anonymous_bytes (the
        largest RssAnon seen, looked at every 0.1 s from outside; None off Linux).
        {"error": one line, ...} when the process raised, or died without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file = Path(folder) / "request.json"
        # The clock is the system's, so the process can tell how long it took to start.
        file.write_text(json.dumps(request | {"started": time.perf_counter()}))
        peak = None
        environment = os.environ | request.get("environment", {})
        with subprocess.Popen([*command, str(file)], stdout=subprocess.DEVNULL, env=environment) as process:
            try:
                while process.poll() is None:
                    now = memory(process.pid)["anonymous"]
                    peak = max(peak or 0, now) if now is not None else peak
                    try:
                        process.wait(POLL_SECONDS)
                    except subprocess.TimeoutExpired:
                        pass
            finally:
                # Only on the way out of an exception, e.g. Ctrl-C: a worker must not outlive its parent.
                if process.poll() is None:
                    process.kill()
        try:
            result = json.loads(file.with_name(ANSWER).read_text())
            if "error" not in result:
                result["images"] = np.load(file.with_name(IMAGES))
        except (OSError, ValueError):
            result = {"error": _cause(process.returncode)}
    return {**result, "peak_anonymous_bytes": peak}


def _cause(returncode: int) -> str:
    """Why a process left no answer."""
    if returncode >= 0:
        return f"the measuring process ended with exit code {returncode} and no result"
    name = signal.Signals(-returncode).name
    hint = "; out of memory?" if name == "SIGKILL" else ""
    return f"the measuring process was ended by {name}{hint}"


def answer(request_file: str, load: Callable[[dict], Callable[[Lap], object]], runtime: Runtime | None = None) -> int:
    """The child's half of `isolated`: time the requested row, answer with its numbers or its error in one line.

    Args:
        request_file: JSON with name, warmup, repeats and what `load` and `runtime` need.
        load: the request to the function that `measure` times; it returns uint8 pictures.
        runtime: None is `TENSORFLOW`, which needs tf32 in the request.

    Returns:
        The exit code, 0 or 1.
    """
    path = Path(request_file)
    try:
        request = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a request as JSON ({error}); this is for internal use") from error
    try:
        result = _measure_row(request, load, runtime or TENSORFLOW)
    except InputError as error:
        result = {"error": str(error)}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        result = {"error": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"}
    if "images" in result:
        np.save(path.with_name(IMAGES), result.pop("images"))
    write_json(path.with_name(ANSWER), result)
    return int("error" in result)


def _measure_row(row: dict, load: Callable[[dict], Callable[[Lap], object]], runtime: Runtime) -> dict:
    """Load and time one row."""
    start = row.get("started", time.perf_counter())
    runtime.start()
    imported = time.perf_counter()
    draw = load(row)
    loaded = time.perf_counter()
    device = runtime.facts(row)
    calls = 1 + row["warmup"] + row["repeats"]
    with tqdm(total=calls, desc=row["name"], unit="call", leave=False, disable=None) as progress:
        measured = measure(draw, row["warmup"], row["repeats"], progress.update)
    images = np.asarray(measured.result)
    return {
        "import_seconds": imported - start,  # from the start of the process
        "load_seconds": loaded - imported,
        "first": measured.first,
        "samples": measured.samples,
        "cores_busy": measured.cores_busy,
        "peak_rss_bytes": memory()["peak_rss"],
        "peak_gpu_bytes": runtime.peak_gpu_bytes(),
        "device": device,
        "images": images,
    }


def _start_tensorflow() -> None:
    from pipeline import cli

    cli.import_tensorflow()
    from pipeline.load import prepare_device

    prepare_device()


def _device(row: dict) -> dict:
    """What TensorFlow runs on and how; sets TF32 as asked for, after everything that sets it otherwise."""
    import tensorflow as tf

    from pipeline.load import xla_available

    tf.config.experimental.enable_tensor_float_32_execution(row["tf32"])
    devices = tf.config.get_visible_devices()
    details = {d.name: tf.config.experimental.get_device_details(d) for d in devices if d.device_type == "GPU"}
    return {
        "devices": [{"name": d.name, **{k: str(v) for k, v in details.get(d.name, {}).items()}} for d in devices],
        "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
        # 0: TensorFlow takes all cores.
        "intra_op_threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "inter_op_threads": tf.config.threading.get_inter_op_parallelism_threads(),
        "xla_available": xla_available(),
    }


def _peak_gpu_bytes() -> list[int]:
    """The most memory TensorFlow had in use on each GPU since it started."""
    import tensorflow as tf

    devices = range(len(tf.config.get_visible_devices("GPU")))
    return [tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"] for i in devices]


TENSORFLOW = Runtime(_start_tensorflow, _device, _peak_gpu_bytes)


def with_compile_cache(request_file: str) -> Runtime:
    """Return TensorFlow with the cache that an export's XLA row names; facts say how much was in it."""
    from pipeline import compile_cache

    programs = None

    def begin():
        nonlocal programs
        row = json.loads(Path(request_file).read_text())
        if row["jit_compile"] and row.get("compile_cache") and not row.get("server"):
            run = compile_cache.start(Path(row["compile_cache"]), row["export"]["export_id"], row["tf32"])
            programs = run and run.found
        TENSORFLOW.start()

    def facts(row):
        return {**TENSORFLOW.facts(row), "compile_cache": programs}

    return dataclasses.replace(TENSORFLOW, start=begin, facts=facts)


# === Files ===


def check_writable(flag: str, path: str | None) -> None:
    """Raise InputError when a file to be written at the end could not be: better before an hour of measuring."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{flag} {path}: expected a file in an existing folder that can be written")


def write_json(path: Path | str, value: dict) -> None:
    """Write JSON so that the file is whole at every moment. Raises InputError when it cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
