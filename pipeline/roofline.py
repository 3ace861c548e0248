"""Times that counted costs cannot fall below, and what others published for the same work. No TensorFlow.

The roofline model (Williams et al. 2009): a function takes at least its products' FLOPs over the device's peak, and at
least the bytes it must move over the bandwidth of its memory. That is the bound; a real program reaches a share of it.
"""

import dataclasses
import os
import sys
from pathlib import Path

from absl import flags

from models.config import ExportSpec, InputError, ModelConfig, Size
from models.families import FAMILIES
from pipeline import cli, manifest, report, timing
from pipeline.manifest import Manifest, pick_size

KINDS = ("convolution", "matmul", "attention", "rest")  # of FLOPs

FLAGS = flags.FLAGS
# Flags of benchmark.py that are for estimates alone, and all that count for one.
ESTIMATE_FLAGS = ("family", "dtype", "images_per_prompt")
USED = {*ESTIMATE_FLAGS, "estimate", "models", "width", "height", "num_steps", "tf32", "json"}
GIGA, TERA = 10**9, 10**12
HALVES = ("bfloat16", "float16")
# What programs reach of the bound: in half precision the median of the compiled ones below (10 to 63 %), in TF32 the
# best of TensorFlow's (10 to 15 %). Nothing is published without TF32: taken to be as in half precision.
REALISTIC = {"half": 0.37, "tf32": 0.15, "float32": 0.37}


@dataclasses.dataclass(frozen=True)
class Device:
    """Published peaks of one chip, dense (without sparsity)."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes/s
    peaks: dict[str, float]  # dtype, or tf32: float32 rounded to 10 bits of mantissa for products -> FLOP/s
    source: str


def _device(
    name: str, memory: int, bandwidth: float, float32: float, tf32: float, half: float, eight_bits, source: str
):
    teras = {"float32": float32, "tf32": tf32, "bfloat16": half, "float16": half, "8 bits": eight_bits}
    peaks = {dtype: teraflops * TERA for dtype, teraflops in teras.items()}
    return Device(name, memory * GIGA, bandwidth * GIGA, peaks, source)


_NVIDIA_A100 = "NVIDIA A100 data sheet, SXM4"
# XLA on a TPU multiplies float32 in bfloat16 unless it is asked for more, so that is float32's peak there.
DEVICES = (
    _device("A100-40GB", 40, 1555, 19.5, 156, 312, 624, _NVIDIA_A100),
    _device("A100-80GB", 80, 2039, 19.5, 156, 312, 624, _NVIDIA_A100),
    _device("H100", 80, 3350, 67, 494.5, 989, 1979, "NVIDIA H100 data sheet, SXM5"),
    _device("TPU v5e", 16, 819, 197, 197, 197, 393, "Google Cloud TPU v5e documentation"),
    _device("TPU v6e", 32, 1638, 918, 918, 918, 1836, "Google Cloud TPU v6e documentation"),
)


@dataclasses.dataclass(frozen=True)
class Published:
    """A whole chain that somebody timed: prompt to picture, with guidance."""

    device: str
    family: str
    size: int  # pixels, height and width
    dtype: str  # a key of Device.peaks
    steps: int
    images: int | None  # per chip and call; None: throughput of any batch
    seconds: float  # per call, or per image and chip where images is None
    what: str


_XB, _GUIDE, _FAL = "xla-benchmark-sd, ", "KerasCV guide, ", "fal.ai, "
_FAST, _MLPERF, _CARD = "diffusion-fast, ", "MLPerf v4.1 Offline, ", "SDXL-TensorRT model card"
# TensorFlow lets NVIDIA cards round float32 to TF32, as does diffusion-fast, so that is what these float32 rows are.
PUBLISHED = (
    Published("A100-40GB", "sd1", 512, "tf32", 50, 3, 13.69, _XB + "SavedModels without XLA"),
    Published("A100-40GB", "sd1", 512, "tf32", 50, 3, 12.40, _XB + "KerasCV with XLA"),
    Published("A100-40GB", "sd1", 512, "tf32", 50, 3, 10.29, _XB + "SavedModels with XLA"),
    Published("A100-40GB", "sd1", 512, "tf32", 25, 3, 8.17, _GUIDE + "plain"),
    Published("A100-40GB", "sd1", 512, "tf32", 25, 3, 6.27, _GUIDE + "XLA"),
    Published("A100-40GB", "sd1", 512, "float16", 25, 3, 6.02, _GUIDE + "mixed precision"),
    Published("A100-40GB", "sd1", 512, "float16", 25, 3, 4.25, _GUIDE + "mixed precision and XLA"),
    Published("A100-80GB", "sd1", 512, "float16", 50, 1, 1.604, _FAL + "diffusers"),
    Published("A100-80GB", "sd1", 512, "float16", 50, 1, 1.058, _FAL + "diffusers compiled"),
    Published("A100-80GB", "sd1", 512, "float16", 50, 1, 0.901, _FAL + "stable-fast"),
    Published("A100-80GB", "sd1", 512, "float16", 50, 1, 0.819, _FAL + "TensorRT 9"),
    Published("H100", "sd1", 512, "float16", 50, 1, 0.572, "ONNX Runtime"),
    Published("A100-80GB", "sdxl", 1024, "tf32", 30, 1, 7.36, _FAST + "float32"),
    Published("A100-80GB", "sdxl", 1024, "bfloat16", 30, 1, 3.31, _FAST + "bfloat16, SDPA"),
    Published("A100-80GB", "sdxl", 1024, "bfloat16", 30, 1, 2.52, _FAST + "compiled, fused QKV"),
    Published("A100-80GB", "sdxl", 1024, "8 bits", 30, 1, 2.43, _FAST + "int8"),
    Published("A100-80GB", "sdxl", 1024, "float16", 50, 1, 5.932, _FAL + "diffusers"),
    Published("A100-80GB", "sdxl", 1024, "float16", 50, 1, 5.136, _FAL + "diffusers compiled"),
    Published("A100-80GB", "sdxl", 1024, "float16", 50, 1, 4.102, _FAL + "TensorRT 9"),
    Published("A100-80GB", "sdxl", 1024, "float16", 30, 1, 2.742, _CARD),
    Published("H100", "sdxl", 1024, "float16", 30, 1, 1.471, _CARD),
    Published("H100", "sdxl", 1024, "8 bits", 20, None, 8 / 16.26, _MLPERF + "TensorRT, 8 chips"),
    Published("TPU v5e", "sdxl", 1024, "bfloat16", 20, None, 4 / 1.753, _MLPERF + "Flax, 4 chips"),
    Published("TPU v6e", "sdxl", 1024, "bfloat16", 20, None, 4 / 5.439, _MLPERF + "4 chips"),
    Published("TPU v5e", "sdxl", 1024, "bfloat16", 20, 1, 2.33, "Hugging Face blog, JAX, 4 chips"),
    Published("TPU v5e", "sdxl", 1024, "bfloat16", 20, 2, 4.99, "Hugging Face blog, JAX, 4 chips"),
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Counted costs, and what was counted."""

    name: str
    family: str
    size: Size
    images: int  # per call
    dtype: str
    steps: int  # rows of the steps table
    costs: dict  # function -> pipeline.cost.Cost

    @property
    def half(self) -> bool:
        """Whether its networks compute in half precision."""
        return self.dtype in HALVES

    def chain(self) -> list[tuple[int, str]]:
        """(times called, function) of one picture's way."""
        times = {"encode": 1, "denoise once": 1, "denoise per row": self.steps, "decode": 1}
        return [(count, name) for name, count in times.items()]


def bound(cost, device: Device, tf32: bool) -> tuple[float, float]:
    """Least seconds of one call: (computing products, moving bytes)."""
    names = {"float32": "tf32"} if tf32 else {}
    products = (counts.items() for kind, counts in cost.flops.items() if kind != "rest")
    seconds = sum(n / device.peaks[names.get(dtype, dtype)] for counts in products for dtype, n in counts)
    return seconds, (cost.weights + cost.fused) / device.bandwidth


def predict(work: Workload, device: Device, tf32: bool) -> dict:
    """Bounds of one guided step and of the whole chain on one chip, and times at a realistic share."""
    seconds = {name: bound(work.costs[name], device, tf32) for _, name in work.chain()}
    compute, memory = seconds["denoise per row"]
    chain = sum(count * max(seconds[name]) for count, name in work.chain())
    share = REALISTIC["half" if work.half else "tf32" if tf32 else "float32"]
    costs = [work.costs[name] for _, name in work.chain()]
    return {
        "device": device.name,
        "tf32": tf32,
        "step_bound_seconds": max(compute, memory),
        "step_limit": "compute" if compute >= memory else "memory",
        "chain_bound_seconds": chain,
        "share": share,
        "step_seconds": max(compute, memory) / share,
        "chain_seconds": chain / share,
        "memory_share": (sum(cost.weights for cost in costs) + max(cost.peak for cost in costs)) / device.memory,
    }


def published(work: Workload) -> list[dict]:
    """What others timed for this family and size in such a precision, each with the bound for what they ran."""
    rows = []
    for row in PUBLISHED:
        if (row.family, Size(row.size, row.size)) != (work.family, work.size) or (row.dtype == "tf32") == work.half:
            continue
        device = next(device for device in DEVICES if device.name == row.device)
        seconds = 0.0
        for count, name in dataclasses.replace(work, steps=row.steps).chain():
            cost = work.costs[name]
            # FLOPs and activations grow with the images of a call, weights do not.
            images = (row.images or 1) / work.images
            flops = cost.total("convolution", "matmul", "attention") * images
            moved = (cost.weights * (row.images is not None) + cost.fused * images) / (
                2 if row.dtype == "8 bits" else 1
            )
            seconds += count * max(flops / device.peaks[row.dtype], moved / device.bandwidth)
        rows.append({**dataclasses.asdict(row), "bound_seconds": seconds, "share": seconds / row.seconds})
    return rows


# === What is estimated ===


def of_family(family: str, size: Size, images: int, dtype: str, steps: int | None) -> Workload:
    """A full-size model that nobody has to have: one prompt, `images` pictures of it. None: the family's steps.

    Raises:
        InputError: a size, count or dtype that cannot be exported, or a step count out of range.
    """
    from pipeline import cost

    config = FAMILIES[family]
    steps = _checked(steps, config)
    spec = ExportSpec(size.height, size.width, 1, images, dtype, max_steps=config.scheduler.num_train_timesteps)
    return Workload(family, family, size, images, dtype, steps, cost.of_config(config, spec))


def of_export(contract: Manifest, width: int | None, height: int | None, steps: int | None) -> Workload:
    """An export at one of its sizes; None takes the first that fits, and the export's own steps.

    Raises:
        InputError: no such size, SavedModels that cannot be read, or a step count out of range.
    """
    from pipeline import cost

    config, spec = contract.config, contract.spec
    steps = _checked(steps, config)
    size = pick_size(contract, width, height)
    name = contract.folder.resolve().name
    return Workload(name, config.family, size, spec.num_images, spec.dtype, steps, cost.of_export(contract, size))


def _checked(steps: int | None, config: ModelConfig) -> int:
    steps = config.defaults.num_steps if steps is None else steps
    if not 1 <= steps <= config.scheduler.num_train_timesteps:
        raise InputError(f"--num_steps {steps}: must be 1..{config.scheduler.num_train_timesteps}")
    return steps


def estimate(work: Workload, tf32: bool) -> dict:
    """Counts, predictions for `DEVICES` and published numbers of one workload, as plain data."""
    return dataclasses.asdict(work) | {
        "tf32": tf32,
        "devices": [dataclasses.asdict(device) for device in DEVICES],
        "predictions": [predict(work, device, tf32) for device in DEVICES],
        "published": published(work),
    }


# === The command ===


def check_flags() -> None:
    """Refuse flags of --estimate without it, and beside it what is for measuring."""
    if not FLAGS.estimate:
        for name in ESTIMATE_FLAGS:
            if FLAGS[name].value is not None:
                raise InputError(f"--{name} is for --estimate only; what is measured is an export or KerasCV")
        return
    for name in FLAGS.get_key_flags_for_module(sys.argv[0]):
        if name.present and name.name not in USED:
            raise InputError(f"--{name.name} is for measuring; --estimate takes {', '.join(sorted(USED))}")
    if FLAGS.family and FLAGS["models"].present:
        raise InputError("--family and --models: give one or the other; --family needs no export")
    for name in ("dtype", "images_per_prompt"):
        if FLAGS[name].value is not None and not FLAGS.family:
            raise InputError(f"--{name} goes with --family; an export has its own")
    if not FLAGS.family and not FLAGS.models:
        raise InputError("nothing to estimate: expected --models EXPORT[,EXPORT...] or --family")
    timing.check_writable("--json", FLAGS.json)


def print_estimates(root: Path) -> None:
    """Count, predict, print; nothing is measured. `root`: the repository, for the versions."""
    # Counting needs no card, and whoever uses it shall keep it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cli.import_tensorflow()
    if FLAGS.family:
        side = FAMILIES[FLAGS.family].default_size
        size = Size(FLAGS.width or side, FLAGS.height or side)
        given = (size, FLAGS.images_per_prompt or 1, FLAGS.dtype or "float32", FLAGS.num_steps)
        works = [of_family(FLAGS.family, *given)]
    else:
        given = (FLAGS.width, FLAGS.height, FLAGS.num_steps)
        works = [of_export(manifest.read(name), *given) for name in FLAGS.models]
    found = [estimate(work, FLAGS.tf32) for work in works]
    if FLAGS.json:
        timing.write_json(FLAGS.json, {"command": sys.argv, **timing.software(root), "estimates": found})
    print(text(found))


# === For people ===


def text(estimates: list[dict]) -> str:
    """Aligned tables and what they stand on."""
    lines = []
    for found in estimates:
        what = f"{found['images']} x {found['size']['width']}x{found['size']['height']}, {found['dtype']}"
        lines += [f"{found['name']}: {what}, {found['steps']} steps with guidance", ""]
        lines += [*report.table(_count_cells(found), left=(0,)), ""]
        lines += [*report.table(_prediction_cells(found), left=(0, 3)), ""]
        if found["published"]:
            lines += [*report.table(_published_cells(found), left=(0, 1, 2)), ""]
    peaks = "; ".join(dict.fromkeys(device.source for device in DEVICES))
    return "\n".join([*lines, *NOTES, f"Peaks, dense: {peaks}."])


NOTES = [
    "Counted from the graph; nothing was measured. A multiply-add is 2 FLOPs; rest: one per number written or reduced.",
    "moved: every operation reads its inputs and writes its outputs. fused: only convolutions and products do, without",
    "attention's logits. peak: live activations. Bound: products' FLOPs / peak or (weights + fused) / bandwidth, the",
    "larger. At a share of the bound: what published programs typically reach. memory: all weights and the top peak.",
]


def _count_cells(found: dict) -> list[list[str]]:
    cells = [["per call", *(f"{kind} GFLOP" for kind in KINDS), "weights MB", "moved MB", "fused MB", "peak MB"]]
    for name, cost in found["costs"].items():
        counts = [sum(cost["flops"][kind].values()) for kind in KINDS]
        flops = [report.number(n / GIGA) if n else "0" for n in counts]
        cells.append([name, *flops, *(report.megabytes(cost[key]) for key in ("weights", "moved", "fused", "peak"))])
    return cells


def _prediction_cells(found: dict) -> list[list[str]]:
    share = f"at {found['predictions'][0]['share']:.0%}"
    dtype = "tf32" if found["tf32"] and found["dtype"] == "float32" else found["dtype"]
    head = [f"peak {dtype} TFLOP/s", "bound: step ms", "limit", "chain s", f"{share}: step ms", "chain s", "memory"]
    cells = [["predicted", *head]]
    for device, row in zip(DEVICES, found["predictions"], strict=True):
        bounds = [report.number(row["step_bound_seconds"] * 1000), row["step_limit"]]
        bounds.append(report.number(row["chain_bound_seconds"]))
        likely = [report.number(row["step_seconds"] * 1000), report.number(row["chain_seconds"])]
        cells.append([row["device"], report.number(device.peaks[dtype] / TERA), *bounds, *likely])
        cells[-1].append(f"{row['memory_share']:.0%}")
    return cells


def _published_cells(found: dict) -> list[list[str]]:
    cells = [["published", "chip", "precision", "steps", "images", "seconds", "bound", "bound / published"]]
    for row in found["published"]:
        images = "per image" if row["images"] is None else str(row["images"])
        cells.append([row["what"], row["device"], row["dtype"], str(row["steps"]), images])
        cells[-1] += [report.number(row["seconds"]), report.number(row["bound_seconds"]), f"{row['share']:.0%}"]
    return cells
