"""What this machine computes at the most, and the share of it that a benchmark's rows reach (`benchmark.py --peak`).

The most is measured, not looked up: the two products that networks are made of, so large that arithmetic alone limits
them, in every way that TensorFlow can run them here. FLOPs of a step are counted from the export's graph.
"""

import os
import sys

import numpy as np

from models.config import InputError
from pipeline import choice, cli, report, timing
from pipeline.likeness import label, same_work
from pipeline.roofline import GIGA

MATMUL = 4096  # rows and columns
CONVOLUTION = (2, 32, 32, 1280)  # images, height, width, channels in and out; 3x3
FLOPS = {"matmul": 2 * MATMUL**3, "convolution": 2 * 9 * int(np.prod(CONVOLUTION)) * CONVOLUTION[-1]}
REPEATS = 3


def measure(dtypes: list[str], command: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Measure, a process for each way; progress goes to stderr.

    Args:
        command: a worker that takes `load` for rows whose kind is "peak".

    Returns:
        dtype -> way of `choice.VARIANTS` -> "matmul" or "convolution" -> FLOP/s.

    Raises:
        InputError: nothing could be measured in a dtype.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in dtypes:
        for name, variant in choice.variants().items():
            environment = choice.added(variant.variables)
            row = {"kind": "peak", "name": f"peak {dtype} {name}", "dtype": dtype, "environment": environment}
            row |= {"jit_compile": variant.jit_compile, "warmup": 0, "repeats": REPEATS, "tf32": False}
            answer = timing.isolated(command, row)
            if "error" in answer:
                print(f"{row['name']}: failed: {answer['error']}", file=sys.stderr)
                continue
            rates = {kind: flops / min(answer["samples"][kind]) for kind, flops in FLOPS.items()}
            found.setdefault(dtype, {})[name] = rates
            told = ", ".join(f"{kind} {rate / GIGA:.0f} GFLOP/s" for kind, rate in rates.items())
            print(f"{row['name']}: {told}", file=sys.stderr)
        if dtype not in found:
            raise InputError(f"--peak: no product could be measured in {dtype}")
    return found


def load(row: dict):
    """In the worker: both products as a function of `lap`."""
    import tensorflow as tf

    dtype, compiled = tf.as_dtype(row["dtype"]), {"jit_compile": row["jit_compile"]}
    generator = np.random.default_rng(0)

    def normal(*shape):
        return tf.cast(generator.standard_normal(shape, "float32"), dtype)

    matrix, image = normal(MATMUL, MATMUL), normal(*CONVOLUTION)
    kernel = normal(3, 3, CONVOLUTION[-1], CONVOLUTION[-1])
    matmul = tf.function(tf.matmul, **compiled)
    convolve = tf.function(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), **compiled)

    def draw(lap):
        # One number waits for all of them; to copy them would count.
        float(matmul(matrix, matrix)[0, 0])
        lap("matmul")
        float(convolve(image, kernel)[0, 0, 0, 0])
        lap("convolution")
        return np.zeros((1, 1, 1, 3), np.uint8)

    return draw


def best(peaks: dict[str, dict[str, float]]) -> float:
    """The largest FLOP/s of a dtype."""
    return max(rate for rates in peaks.values() for rate in rates.values())


def with_flops(rows: list[dict]) -> list[dict]:
    """Measured rows with flops_per_step (a guided step's products), counted for exact exports.

    Peers do the same work as an export that is not tuned to do less.

    Raises:
        InputError: SavedModels that cannot be read, or a graph that cannot be counted.
    """
    # Counting needs no card.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cli.import_tensorflow()
    from pipeline import cost

    counted: dict[tuple, int] = {}
    ours = [row for row in rows if row["kind"] == "export" and not row.get("approximate") and "stages" in row]
    for row in ours:
        key = (row["export"]["folder"], row["width"], row["height"])
        if key not in counted:
            step = cost.of_export(*choice.of_row(row))[f"{cost.LOOP} per row"]
            counted[key] = step.total("convolution", "matmul", "attention")
    plain = [row for row in ours if row["export"]["spec"]["target"] == "any"]
    result = []
    for row in rows:
        exact = "stages" in row and not row.get("approximate")
        same = [row] if row in ours else [entry for entry in plain if exact and same_work(entry, row)]
        if same:
            row = {**row, "flops_per_step": counted[same[0]["export"]["folder"], row["width"], row["height"]]}
        result.append(row)
    return result


def text(result: dict) -> list[str]:
    """What was measured of the machine, and each row's share of the best."""
    ways = list(dict.fromkeys(name for peaks in result["peak"].values() for name in peaks))
    cells = [["GFLOP/s", "", *ways]]
    for dtype, peaks in result["peak"].items():
        for kind in FLOPS:
            cells.append([f"{kind} {dtype}", f"{FLOPS[kind] / GIGA:.0f} GFLOP"])
            cells[-1] += [report.number(peaks[name][kind] / GIGA) if name in peaks else "" for name in ways]
    shares = [["share of the peak", "GFLOP a step", "GFLOP/s", "peak", "share"]]
    for row in result["rows"]:
        if "flops_per_step" in row:
            rate, most = row["flops_per_step"] / row["seconds_per_step"], best(result["peak"][row["dtype"]])
            numbers = [report.number(value / GIGA) for value in (row["flops_per_step"], rate, most)]
            shares.append([label(row), *numbers, f"{rate / most:.0%}"])
    return [*report.table(cells, left=(0,)), "", *report.table(shares, left=(0,))]
