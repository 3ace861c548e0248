"""pipeline.roofline: the arithmetic of bounds, and no published time below one."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.config import InputError, Size
from pipeline import roofline

ROOT = Path(__file__).parents[1]
TERA = 10**12


@dataclasses.dataclass(frozen=True)
class Cost:
    """The fields of pipeline.cost.Cost, without TensorFlow."""

    flops: dict
    weights: int = 0
    moved: int = 0
    fused: int = 0
    peak: int = 0

    def total(self, *kinds):
        return sum(sum(self.flops.get(kind, {}).values()) for kind in kinds)


def work(dtype="bfloat16", family="sd1", size=512, images=1, steps=10, **costs):
    costs = {name: Cost({}) for name in ("encode", "denoise once", "denoise per row", "decode")} | costs
    return roofline.Workload("it", family, Size(size, size), images, dtype, steps, costs)


def device(**changes):
    peaks = {"float32": 1.0 * TERA, "tf32": 4.0 * TERA, "bfloat16": 10.0 * TERA}
    return roofline.Device(**{"name": "it", "memory": 1000, "bandwidth": 100.0, "peaks": peaks, "source": ""} | changes)


def test_bound():
    """Products at the peak of the type they compute in; element-wise work is free; weights and activations move."""
    flops = {"convolution": {"bfloat16": 20 * TERA, "float32": TERA}, "attention": {"float32": 3 * TERA}}
    flops["rest"] = {"float32": 1000 * TERA}
    cost = Cost(flops, weights=50, moved=9999, fused=250)
    assert roofline.bound(cost, device(), tf32=False) == (2.0 + 4.0, 3.0)
    assert roofline.bound(cost, device(), tf32=True) == (2.0 + 1.0, 3.0)


def test_prediction():
    step = Cost({"matmul": {"bfloat16": 5 * TERA}}, weights=100, fused=20, peak=300)  # 0.5 s computing, 1.2 s moving
    decode = Cost({"convolution": {"float32": 2 * TERA}})  # 2 s computing
    row = roofline.predict(work(**{"denoise per row": step, "decode": decode}), device(), tf32=False)
    assert (row["step_bound_seconds"], row["step_limit"]) == (1.2, "memory")
    assert row["chain_bound_seconds"] == pytest.approx(10 * 1.2 + 2.0)
    assert row["chain_seconds"] == pytest.approx(row["chain_bound_seconds"] / roofline.REALISTIC["half"])
    assert row["memory_share"] == 0.4
    assert [roofline.predict(work(dtype="float32"), device(), tf32)["share"] for tf32 in (False, True)] == [0.37, 0.15]


def test_published_numbers_of_the_same_work():
    """Of the same family, size and kind of precision; scaled to the images and steps that were published."""
    step = Cost({"matmul": {"float16": 312 * 10**9}}, weights=10)  # a millisecond for one image at an A100's peak
    rows = roofline.published(work(dtype="float16", images=2, **{"denoise per row": step}))
    assert {row["dtype"] for row in rows} == {"float16"} and {row["family"] for row in rows} == {"sd1"}
    bounds = {row["what"]: row["bound_seconds"] for row in rows}
    assert bounds["fal.ai, TensorRT 9"] == pytest.approx(50 * 0.001 / 2)
    assert bounds["KerasCV guide, mixed precision"] == pytest.approx(25 * 0.001 / 2 * 3)
    assert {row["dtype"] for row in roofline.published(work(dtype="float32"))} == {"tf32"}
    assert roofline.published(work(size=256)) == [] and roofline.published(work(family="sd2")) == []


@pytest.mark.parametrize(("family", "size"), [("sd1", 512), ("sdxl", 1024)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_published_is_faster_than_its_bound(family, size, dtype):
    """By PyTorch's counts of the full-size networks. If a bound is beaten, a peak, steps or a precision is wrong."""
    golden = json.loads((ROOT / "tests" / "goldens" / "flops.json").read_text())
    counts = {name: golden[f"{family} {size}x{size} 1/{name}"] for name in ("unet", "decode")}
    unet, decode = (Cost({"matmul": {dtype: sum(found.values())}}) for found in counts.values())
    step = Cost({"matmul": {dtype: 2 * unet.total("matmul")}})
    rows = roofline.published(work(dtype, family, size, **{"denoise per row": step, "decode": decode}))
    assert len(rows) >= 1
    for row in rows:
        assert 0.02 < row["share"] < 0.9, row


def test_known_devices_and_families():
    names = {device.name for device in roofline.DEVICES}
    for row in roofline.PUBLISHED:
        assert row.device in names and row.dtype in roofline.DEVICES[0].peaks


def test_step_counts_are_checked():
    with pytest.raises(InputError, match="--num_steps 0: must be 1..1000"):
        roofline.of_family("sd1", Size(512, 512), 1, "float32", 0)


def test_text_and_json():
    step = Cost({kind: {"bfloat16": 312 * 10**9} for kind in roofline.KINDS}, 10**6, 10**7, 10**8, 10**9)
    none = Cost({kind: {} for kind in roofline.KINDS})
    costs = dict.fromkeys(("encode", "denoise once", "decode"), none) | {"denoise per row": step}
    found = roofline.estimate(work(**costs), tf32=False)
    assert json.loads(json.dumps(found))["costs"]["denoise per row"]["flops"]["rest"] == {"bfloat16": 312 * 10**9}
    text = roofline.text([found])
    assert text.startswith("it: 1 x 512x512, bfloat16, 10 steps with guidance\n")
    (step_line,) = (line for line in text.splitlines() if line.startswith("denoise per row"))
    assert step_line.split()[3:] == ["312", "312", "312", "312", "1", "10", "100", "1000"]
    (chip,) = (line for line in text.splitlines() if line.startswith("A100-80GB "))
    # Three of the four kinds are products: 3 ms at the peak.
    assert chip.split()[1:5] == ["312", "3", "compute", "0.03"] and chip.endswith("1%")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family=sdxl"], "--family is for --estimate only"),
        (["--estimate", "--kerascv"], "--kerascv is for measuring; --estimate takes dtype, estimate, family, height"),
        (["--estimate", "--family=sd1", "--models=exports/emoji"], "--family and --models: give one or the other"),
        (["--estimate", "--models="], "nothing to estimate: expected --models EXPORT[,EXPORT...] or --family"),
    ],
)
def test_flags_that_do_not_go_together(arguments, message):
    command = [sys.executable, str(ROOT / "benchmark.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
