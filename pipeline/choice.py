"""--compile=auto: the fastest way to run an export on this machine, measured once and kept beside the export.

What a graph costs depends on who runs it: TensorFlow's own kernels, oneDNN's, XLA, or XLA for the parts between
convolutions and products only. VARIANTS are those ways. Each is measured in a process of its own, since what tells
them apart is read when TensorFlow starts; then UNet and decoder each get the fastest that can live in one process.
No TensorFlow here.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import sys
from pathlib import Path

from models.config import InputError, Size
from pipeline import compile_cache, manifest, settings, timing
from pipeline.manifest import Functions, Manifest

FOLDER = "choices"  # in the export, or in the user's cache folder where the export cannot be written
FORMAT = 1
STEPS, REPEATS = 2, 2  # of a measurement: steps of one call, and calls
COMPONENTS = ("unet", "decoder")
STAGES = {"unet": "diffusion", "decoder": "decoder"}
WORKER = [sys.executable, str(Path(__file__).resolve().parents[1] / "benchmark.py"), "--worker"]
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a function."""

    jit_compile: bool
    variables: dict[str, str]  # of the environment, which TensorFlow reads when it starts


ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "1"}
VARIANTS = {
    "plain": Variant(False, {"TF_ENABLE_ONEDNN_OPTS": "0"}),
    "plain, oneDNN": Variant(False, ONEDNN),
    # XLA for what is limited by memory: norms, activations, softmax.
    "plain, oneDNN, XLA islands": Variant(
        False,
        {**ONEDNN, "TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_ops_to_cluster=FUSIBLE"},
    ),
    "XLA": Variant(True, {}),
    "XLA, oneDNN": Variant(True, {"XLA_FLAGS": "--xla_cpu_use_onednn=true"}),
}
# oneDNN and the flags above are about CPUs.
ON_ACCELERATORS = ("plain", "XLA")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was measured and what follows from it."""

    key: dict  # what it holds for
    seconds: dict[str, dict[str, float]]  # variant -> component -> seconds of a picture with the default steps
    variants: dict[str, str]  # component -> variant

    @property
    def jit_components(self) -> tuple[str, ...]:
        """The components that XLA compiles whole."""
        return tuple(name for name in COMPONENTS if VARIANTS[self.variants[name]].jit_compile)

    @property
    def variables(self) -> dict[str, str]:
        """The environment that all of them need."""
        return merged([VARIANTS[name] for name in self.variants.values()]) or {}


def merged(variants: list[Variant]) -> dict[str, str] | None:
    """The environment of several variants in one process; None where two plain or two compiled ones differ in theirs.

    What compiled functions want is nothing to plain ones, and the other way round.
    """
    for compiled in (False, True):
        wanted = [variant.variables for variant in variants if variant.jit_compile is compiled]
        if any(variables != wanted[0] for variables in wanted):
            return None
    return {name: value for variant in variants for name, value in variant.variables.items()}


def fastest(seconds: dict[str, dict[str, float]]) -> dict[str, str]:
    """Component -> variant: the least sum of seconds among those that can live in one process.

    Args:
        seconds: variant -> component -> seconds; variants that failed are left out.

    Raises:
        InputError: none is left.
    """
    pairs = [
        dict(zip(COMPONENTS, names, strict=True))
        for names in itertools.product(seconds, repeat=len(COMPONENTS))
        if merged([VARIANTS[name] for name in names]) is not None
    ]
    if not pairs:
        raise InputError("--compile auto: nothing could be measured")
    return min(pairs, key=lambda pair: sum(seconds[variant][name] for name, variant in pair.items()))


# === Where it is kept ===


def key(contract: Manifest, size: Size) -> dict:
    """What a choice holds for: TensorFlow, the machine, the export, the size, and flags that the user set."""
    return {**compile_cache.key(contract.export_id), "size": str(size)}


def places(contract: Manifest, wanted: dict) -> list[Path]:
    """Files that may hold a choice, the first that can be written being the one to write."""
    name = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:20] + ".json"
    cache = compile_cache.folder("default")
    return [contract.folder / FOLDER / name, *([cache / FOLDER / name] if cache else [])]


def read(contract: Manifest, size: Size) -> Choice | None:
    """What was chosen for this export, size and machine before; None where nothing was, or it is damaged."""
    wanted = key(contract, size)
    for path in places(contract, wanted):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            choice = Choice(found["key"], found["seconds"], found["variants"])
            if found["format"] == FORMAT and choice.key == wanted and set(choice.variants) == set(COMPONENTS):
                if not set(choice.variants.values()) <= set(VARIANTS):
                    raise ValueError("names variants that are not there")
                return choice
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            log.warning("%s: not a choice of --compile auto; measuring again", path)
    return None


def write(contract: Manifest, choice: Choice) -> Path | None:
    """Keep a choice beside the export, else in the user's cache folder; None, with a notice, where neither can be."""
    for path in places(contract, choice.key):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            timing.write_json(path, {"format": FORMAT, **dataclasses.asdict(choice)})
            return path
        except (OSError, InputError):
            continue
    log.warning("--compile auto: the choice can be kept nowhere, so the next run measures again")
    return None


# === Measuring ===


def rows(contract: Manifest, size: Size) -> list[dict]:
    """What the measuring processes are asked: a row of benchmark.py for each variant."""
    functions = Functions(None, None, None, None, contract, size)
    defaults = contract.config.defaults
    steps = min(STEPS, contract.spec.max_steps)
    chosen = settings.settings(functions, None, steps, defaults.guidance_scale)
    return [
        {
            "name": name,
            "kind": "export",
            "jit_compile": variant.jit_compile,
            "jit_components": list(COMPONENTS),
            "environment": added(variant.variables),
            "settings": {k: v for k, v in dataclasses.asdict(chosen).items() if k != "options"},
            "images": contract.spec.num_images,
            **dataclasses.asdict(size),
            "export": {"folder": str(contract.folder), "version": contract.version, "export_id": contract.export_id},
            **{"prompt": "a red apple", "seed": 0, "warmup": 0, "repeats": REPEATS, "tf32": False},
        }
        for name, variant in variants().items()
    ]


def variants() -> dict[str, Variant]:
    """Those that are tried on this machine."""
    return {name: VARIANTS[name] for name in (ON_ACCELERATORS if timing.machine()["gpus"] else VARIANTS)}


def seconds(contract: Manifest, measured: dict) -> dict[str, float]:
    """Component -> seconds of a picture with the export's default steps.

    Args:
        measured: settings, and stages of `timing.summary`, whose minima count: they have the least of other work.
    """
    found = {name: measured["stages"][stage]["min"] for name, stage in STAGES.items()}
    found["unet"] *= contract.config.defaults.num_steps / measured["settings"]["num_steps"]
    return found


def of_row(row: dict) -> tuple[Manifest, Size]:
    """The export and size of a row of benchmark.py."""
    return manifest.read(row["export"]["folder"]), Size(row["width"], row["height"])


def keep_best(rows: list[dict]) -> list[str]:
    """Keep what follows from benchmark.py's rows of all variants, and say it, a line for each export and size."""
    lines = []
    for of in dict.fromkeys(row["of"] for row in rows if row["kind"] == "export" and "stages" in row):
        swept = [row for row in rows if row["of"] == of and "stages" in row]
        contract, size = of_row(swept[0])
        measured = {row["name"].removeprefix(f"{of} "): seconds(contract, row) for row in swept}
        found = Choice(key(contract, size), measured, fastest(measured))
        chosen = ", ".join(f"{component}: {variant}" for component, variant in found.variants.items())
        lines.append(f"--compile auto takes for {of}: {chosen} (kept in {write(contract, found)})")
    return lines


def added(variables: dict[str, str]) -> dict[str, str]:
    """A variant's environment: flags go behind those that the user has set, other variables replace them."""
    return {
        name: f"{os.environ.get(name, '')} {value}".strip() if name.endswith("_FLAGS") else value
        for name, value in variables.items()
    }


def measure(contract: Manifest, size: Size) -> Choice:
    """Measure every variant, a process each, and choose; progress goes to stderr.

    Raises:
        InputError: no variant could be measured.
    """
    asked, measured = rows(contract, size), {}
    print(f"--compile auto: measuring {len(asked)} ways to run {contract.folder} once", file=sys.stderr, flush=True)
    for number, row in enumerate(asked, 1):
        answer = timing.isolated(WORKER, row)
        where = f"[{number}/{len(asked)}] {row['name']}"
        if "error" in answer:
            print(f"{where}: failed: {answer['error']}", file=sys.stderr, flush=True)
            continue
        stages = {stage: timing.summary(samples) for stage, samples in answer["samples"].items()}
        found = measured[row["name"]] = seconds(contract, {**row, "stages": stages})
        print(f"{where}: UNet {found['unet']:.2f} s, decoder {found['decoder']:.2f} s", file=sys.stderr, flush=True)
    return Choice(key(contract, size), measured, fastest(measured))


def find(contract: Manifest, size: Size) -> Choice:
    """The choice for this machine, measured now if it never was. Raises InputError when nothing could be measured."""
    choice = read(contract, size)
    if choice is None:
        choice = measure(contract, size)
        write(contract, choice)
    return choice


def prepare(contract: Manifest, size: Size) -> Choice:
    """`find`, and the environment set for TensorFlow to start with. Raises InputError when it has started already."""
    if "tensorflow" in sys.modules:
        raise InputError("--compile auto: must be decided before TensorFlow is imported")
    choice = find(contract, size)
    os.environ.update(added(choice.variables))
    return choice


def slower(contract: Manifest, size: Size) -> str | None:
    """One line where an earlier measurement says that XLA's UNet takes longer here than the plain one; else None."""
    choice = read(contract, size)
    if choice is None:
        return None
    best = {
        jit: min((s["unet"] for name, s in choice.seconds.items() if VARIANTS[name].jit_compile is jit), default=None)
        for jit in (False, True)
    }
    if None in best.values() or best[True] <= 1.03 * best[False]:
        return None
    ratio = best[True] / best[False]
    return f"--jit_compile: XLA's UNet took {ratio:.2f} times the plain one's time on this machine; try --compile auto"
