"""Time exports of this toolkit, with and without XLA, and KerasCV's own Stable Diffusion beside them.

python benchmark.py --models exports/emoji --json results.json --plot results.png

Every row (an export or KerasCV, plain or XLA) runs in a process of its own: load, one cold call that compiles, warm-up
calls with the measured arguments, then the measured calls. Stages end when their results are on the host.
"""

import dataclasses
import datetime
import importlib.util
import logging
import sys
import time
from pathlib import Path

import numpy as np
from absl import flags

from models.errors import InputError
from models.export_spec import Size
from pipeline import cli, compile_cache, generate, machine, manifest, serving
from pipeline.benchmark import differences, markdown, peers, report, server_load, timing
from pipeline.prompts import tokenizer
from pipeline.sampling import noise, samplers

FLAGS = flags.FLAGS
ROOT = Path(__file__).resolve().parent
# Commands that measure one row in a process of their own; they take a file, see `timing.isolated`.
WORKERS = {
    "export": [sys.executable, str(ROOT / "benchmark.py"), "--worker"],
    "kerascv": [sys.executable, str(peers.SCRIPTS / "kerascv.py")],
}
JIT_COMPONENTS = tuple(manifest.JIT_COMPONENTS)
CALL_PATH = "encode, denoise and decode of pipeline.load.local, the whole loop in one call"
log = logging.getLogger(__name__)


def main(argv):
    if len(argv) > 1:
        raise InputError(f"unexpected arguments: {' '.join(argv[1:])}; exports go into --models")
    if FLAGS.worker:
        return timing.answer(FLAGS.worker, load_export, timing.with_compile_cache(FLAGS.worker))
    check_flags()
    cli.set_flags_before_tensorflow(FLAGS.xla_flags, FLAGS.tf_xla_flags)
    rows = plan()
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        **timing.software(ROOT),
        "machine": machine.describe(),
        "order": report.order(len(rows), FLAGS.rounds),
        "rows": [],
    }
    peers.prepare(rows)
    try:
        measure_rows(rows, result, FLAGS.json, FLAGS.price_per_hour)
        if FLAGS.clients:
            result["load"] = load_server(rows)
            if FLAGS.json:
                timing.write_json(FLAGS.json, result)
    finally:
        # Also after Ctrl-C: what was measured is not lost.
        print(report.text(result))
        lines = server_load.overhead(result["rows"])
        lines += server_load.text(result["load"], rows[0]["images"]) if "load" in result else []
        print("\n".join(lines))
    if FLAGS.markdown:
        markdown.write(result, FLAGS.markdown)
    if FLAGS.plot and any("stages" in row for row in result["rows"]):
        report.plot(result, FLAGS.plot)
    return int(any("error" in row for row in result["rows"]))


def check_flags() -> None:
    """Refuse what would fail only after something was measured."""
    if not FLAGS.models and not FLAGS.kerascv:
        raise InputError("nothing to measure: expected --models EXPORT[,EXPORT...] or --kerascv")
    if len({Path(name).resolve() for name in FLAGS.models}) < len(FLAGS.models):
        raise InputError(f"--models {','.join(FLAGS.models)}: the same export twice; --rounds repeats rows")
    if not FLAGS.jit_components or not set(FLAGS.jit_components) <= set(JIT_COMPONENTS):
        found = ",".join(FLAGS.jit_components)
        raise InputError(f"--jit_components {found!r}: must be one or more of {','.join(JIT_COMPONENTS)}")
    if FLAGS.peers and not FLAGS.models:
        raise InputError("--peers are asked for what an export is asked for: pass --models EXPORT")
    if FLAGS.guidance_interval is not None:
        check_interval(FLAGS.guidance_interval)
    if FLAGS.all_sizes and (FLAGS.height or FLAGS.width):
        raise InputError("--all_sizes and --height/--width: give one or the other")
    if FLAGS.clients and not FLAGS.server:
        raise InputError("--clients needs a server to ask: --server grpc://HOST:8500")
    if FLAGS.random_weights and not FLAGS.kerascv:
        raise InputError("--random_weights is for --kerascv only; an export's weights are fixed")
    for name, wanted in (("keras_cv", FLAGS.kerascv), ("matplotlib", FLAGS.plot)):
        if wanted and importlib.util.find_spec(name) is None:
            flag, package = ("--kerascv", "keras-cv==0.9.0") if name == "keras_cv" else ("--plot", "matplotlib")
            raise InputError(f"{flag} needs {name}, which is not installed: python -m pip install {package}")
    for name in ("json", "plot", "markdown"):
        timing.check_writable(f"--{name}", FLAGS[name].value)
    noise.image_seeds(FLAGS.seed, 1)


def check_interval(given: list[str]) -> None:
    """Refuse what is no part of a run."""
    try:
        start, end = map(float, given)
    except ValueError:
        start, end = 1.0, 0.0
    if not 0 <= start < end <= 1:
        found = ",".join(given)
        raise InputError(f"--guidance_interval {found}: expected START,END with 0 <= START < END <= 1, e.g. 0.1,0.7")


def plan() -> list[dict]:
    """One row per configuration, as plain data: what its worker needs and what its reader wants to know."""
    exports = [each for contract in [manifest.read(name) for name in FLAGS.models] for each in of_export(contract)]
    if FLAGS.guidance_interval:
        exports += [within_interval(each, *map(float, FLAGS.guidance_interval)) for each in exports]
    workloads = list(exports)
    if FLAGS.kerascv:
        asked = {name: FLAGS[name].value for name in ("height", "width", "num_steps", "guidance_scale")}
        workloads += peers.kerascv_workloads(exports if FLAGS.all_sizes else exports[:1], asked, FLAGS.random_weights)
    if FLAGS.server:
        workloads = [each for workload in workloads for each in with_server(workload)]
    common = {name: FLAGS[name].value for name in ("prompt", "seed", "warmup", "repeats", "tf32")}
    cache = compile_cache.folder(FLAGS.compile_cache)
    common["compile_cache"] = cache and str(cache)
    rows = [
        {**workload, **common, **way, "name": f"{workload['of']} {name}"}
        for workload in workloads
        for name, way in ways(workload)
        # A server runs compiled what the export has compiled.
        if not (way["jit_compile"] and workload.get("server") and not workload["twins"])
    ]
    if FLAGS.peers:
        found = peers.pythons(FLAGS.peers, FLAGS.peer_python)
        given = (FLAGS.checkpoint, FLAGS.peer_bfloat16_vae, found)
        rows += [row | common for row in peers.workloads(FLAGS.peers, exports, *given)]
    return rows


def within_interval(workload: dict, start: float, end: float) -> dict:
    """The same workload, guided in a part of the run only."""
    changed = ", ".join(filter(None, [workload["approximate"], f"guided in {start:g}..{end:g} of the run"]))
    settings = workload["settings"] | {"guidance_start": start, "guidance_end": end}
    of = f"{workload['of']} guided {start:g}..{end:g}"
    return {**workload, "of": of, "settings": settings, "approximate": changed}


def ways(workload: dict) -> list[tuple[str, dict]]:
    """How one workload is run: plain and compiled, ."""
    modes = (False, True) if FLAGS.jit_compile is None else (FLAGS.jit_compile,)
    return [("XLA" if jit else "plain", {"jit_compile": jit}) for jit in modes]


def with_server(workload: dict) -> list[dict]:
    """An export's workload here, where its SavedModels are here, and over --server."""
    if workload["kind"] != "export":
        return [workload]
    contract = manifest.read(workload["export"]["folder"])
    scheme = FLAGS.server.partition(":")[0]
    there = {
        **workload,
        "of": f"{workload['of']} over {scheme}",
        "call_path": f"encode, denoise and decode of pipeline.serving.remote over {scheme}, the whole loop in one call",
        "server": FLAGS.server,
    }
    if not is_here(contract):
        log.warning("%s: no SavedModels here: only the server is measured", contract.folder)
        return [there]
    return [workload, there]


def is_here(contract: manifest.Manifest) -> bool:
    """Whether the SavedModels lie beside the manifest; a client of a server needs none."""
    return any(contract.path(part).exists() for part in contract.signatures)


def of_export(contract: manifest.Manifest) -> list[dict]:
    """What one export will be asked for, per size. Checks its files once, so that loading is timed without it."""
    manifest.verify(contract, "" if is_here(contract) or not FLAGS.server else "tokenizer/")
    for warning in tokenizer.load(contract.folder / "tokenizer").encode_batch([FLAGS.prompt])[1]:
        log.warning("%s", warning)
    wanted = Size(FLAGS.width or contract.spec.width, FLAGS.height or contract.spec.height)
    if FLAGS.all_sizes:
        sizes = contract.spec.sizes
    elif FLAGS.kerascv and wanted not in contract.spec.sizes:
        # Beside KerasCV the flags are its size; an export that lacks it keeps its own.
        sizes = (contract.spec.size,)
    else:
        sizes = (manifest.pick_size(contract, FLAGS.width, FLAGS.height),)
    return [export_workload(contract, size, f" {size}" if len(sizes) > 1 else "") for size in sizes]


def export_workload(contract: manifest.Manifest, size: Size, suffix: str) -> dict:
    """What one export will be asked for in one of its sizes; `suffix` goes behind its name."""
    chosen = generate.settings(contract, FLAGS.sampler, FLAGS.num_steps, FLAGS.guidance_scale)
    spec = contract.spec
    names = [Path(name).resolve().name for name in FLAGS.models]
    folder, name = str(contract.folder), contract.folder.resolve().name
    return {
        "of": (name if names.count(name) == 1 else folder) + suffix,
        "kind": "export",
        "call_path": CALL_PATH,
        "jit_components": FLAGS.jit_components,
        "twins": manifest.has_twins(contract, tuple(FLAGS.jit_components)),
        "networks": differences.networks(contract),
        "approximate": differences.approximations(spec),
        # No flag here sets a sampler's options.
        "settings": {name: value for name, value in dataclasses.asdict(chosen).items() if name != "options"},
        "unet_calls": len(generate.table(contract, chosen)[0].rows),
        "images": spec.num_images,
        **dataclasses.asdict(size),
        "dtype": spec.dtype,
        "export": {
            "folder": folder,
            **{name: getattr(contract, name) for name in ("version", "export_id", "checkpoint", "created")},
            "family": contract.config.family,
            "spec": dataclasses.asdict(spec),
            "made_with": contract.versions,
        },
    }


def measure_rows(rows: list[dict], result: dict, json: str | None, price_per_hour: float | None) -> None:
    """Measure rows in result["order"] into result["rows"]; the JSON file is whole after each, so a crash loses none."""
    answers: list[list[dict]] = [[] for _ in rows]
    for count, i in enumerate(result["order"], 1):
        where = f"[{count}/{len(result['order'])}] {rows[i]['name']}"
        print(f"{where}: started", file=sys.stderr)
        start = time.perf_counter()
        answer = timing.isolated(rows[i].get("command") or WORKERS[rows[i]["kind"]], rows[i])
        answers[i].append(answer)
        outcome = f"failed: {answer['error']}" if "error" in answer else "done"
        print(f"{where}: {outcome}; {time.perf_counter() - start:.0f} s", file=sys.stderr)
        done = [(row, tries) for row, tries in zip(rows, answers, strict=True) if tries]
        pooled = [report.pooled(row, tries, price_per_hour, differences.expected(row, done)) for row, tries in done]
        result["rows"] = report.with_ratios(pooled)
        if json:
            timing.write_json(json, result)


def load_server(rows: list[dict]) -> dict:
    """Many clients at once, drawing what the first row over the server draws."""
    row = next(row for row in rows if row.get("server"))
    print(f"load: {FLAGS.clients} client(s) for {FLAGS.duration:g} s", file=sys.stderr)

    def connect():
        draw = load_export(row)
        return lambda: draw(lambda stage: None)

    return server_load.run(connect, FLAGS.clients, FLAGS.duration)


# === In the worker ===


def load_export(row: dict):
    """An export, here or on a server, as a function to be timed."""
    jit = {"jit_compile": row["jit_compile"], "jit_components": tuple(row["jit_components"])}
    size = {"width": row["width"], "height": row["height"]}
    export = row["export"]
    if row.get("server"):
        contract = manifest.read(export["folder"], export["version"])
        return picture(serving.remote(row["server"], contract, **jit, **size), row)
    from pipeline import load

    return picture(load.local(export["folder"], **jit, version=export["version"], verify=False, **size), row)


def picture(functions: manifest.Functions, row: dict):
    """What `pipeline.generate` does for one full call of an export, as a function of `lap`; always the same call."""
    prompts = [row["prompt"]] * functions.manifest.spec.prompts
    run = generate.plan(functions.manifest, prompts, seed=row["seed"], size=functions.size, **row["settings"])

    def draw(lap):
        contexts = generate.encode(functions, run, run.calls[0])
        for context in contexts.values():
            np.asarray(context)  # waits until it is there
        lap("text_encoder")
        latent = generate.denoise(functions, run, run.calls[0], contexts)
        np.asarray(latent)
        lap("diffusion")
        decoded = {name: np.asarray(value) for name, value in functions.decode(latent=latent).items()}
        lap("decoder")
        if not decoded["finite"].all():
            raise InputError("the decoded pictures hold NaN or infinite values; their time means nothing")
        return decoded["generated_images"]

    return draw


if __name__ == "__main__":
    flags.DEFINE_list("models", "exports/emoji", "Exports, separated by commas; made by serialize_savedmodels.py.")
    flags.DEFINE_bool("kerascv", False, "Time KerasCV's own Stable Diffusion 1.x too; --models= times it alone.")
    flags.DEFINE_bool("jit_compile", None, "Compile with XLA; --nojit_compile: do not. Default: both, and their ratio.")
    flags.DEFINE_list("jit_components", "unet,decoder", "What XLA compiles: text_encoder, unet, decoder. KerasCV: all.")
    flags.DEFINE_string("prompt", "a red apple on a blue background", "The same prompt for every row and image.")
    flags.DEFINE_enum("sampler", None, list(samplers.SAMPLERS), "Sampler. Default: the export's. KerasCV has its own.")
    flags.DEFINE_integer("num_steps", None, "Denoising steps. Default: the export's; KerasCV takes the first export's.")
    flags.DEFINE_float("guidance_scale", None, "Classifier-free guidance. Default: as for --num_steps.")
    flags.DEFINE_list(
        "guidance_interval", None, "START,END: rows guided in that part of the run only, beside the others."
    )
    flags.DEFINE_integer("seed", 0, "Seed of the first image; the same in every call.")
    flags.DEFINE_integer("warmup", 1, "Calls that are not counted, after the first, cold one.", lower_bound=0)
    flags.DEFINE_integer("repeats", 5, "Calls that are counted, per row and round.", lower_bound=1)
    flags.DEFINE_integer("rounds", 1, "Times through all rows, every other one backwards; pooled.", lower_bound=1)
    flags.DEFINE_bool("tf32", False, "NVIDIA cards may round float32 factors to 10 bits of mantissa, in every row.")
    flags.DEFINE_string("server", None, "Time the exports over this server too: grpc://HOST:8500 or http://HOST:8501.")
    flags.DEFINE_integer("clients", None, "Then let so many clients draw over --server at once.", lower_bound=1)
    flags.DEFINE_float("duration", 60.0, "Seconds for which they do.", lower_bound=0.001)
    flags.DEFINE_string("json", None, "Write everything measured, and on what, to this file; kept after every row.")
    flags.DEFINE_string("plot", None, "Write a bar chart per stage to this PNG file; needs matplotlib.")
    flags.DEFINE_string("markdown", None, "Write the table as Markdown to this file.")
    flags.DEFINE_list("peers", [], f"Time these too, in what the exports are asked for: {', '.join(peers.PEERS)}.")
    flags.DEFINE_list(
        "peer_python", [], "Where they are installed, e.g. diffusers=PATH. Default: as `make peers` does."
    )
    flags.DEFINE_string("checkpoint", None, "Folder that --peers load. Default: checkpoints/NAME OF THE EXPORT'S.")
    flags.DEFINE_bool("peer_bfloat16_vae", False, "Rows of --peers whose decoder is bfloat16 too, beside the usual.")
    flags.DEFINE_bool("all_sizes", False, "Every size that the exports hold, instead of one.")
    flags.DEFINE_float("price_per_hour", None, "Dollars for this machine: adds images per dollar.", lower_bound=1e-9)
    flags.DEFINE_string("xla_flags", None, "Added to XLA_FLAGS before TensorFlow starts.")
    flags.DEFINE_string("tf_xla_flags", None, "Added to TF_XLA_FLAGS before TensorFlow starts.")
    flags.DEFINE_string("compile_cache", "off", "Folder for what XLA compiled. Default: none, compiling is measured.")
    flags.DEFINE_bool("random_weights", False, "KerasCV with seeded random weights: for timing without a download.")
    for name in ("height", "width"):
        help_text = f"{name.capitalize()} in pixels. Default: the export's first size; KerasCV: the first export's."
        flags.DEFINE_integer(name, None, help_text, lower_bound=1)
    flags.DEFINE_string("worker", None, "Internal: measure the one row that this file describes.")
    cli.run(main)
