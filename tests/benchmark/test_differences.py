"""What a benchmark's rows should draw, and how far approximations are off."""

import dataclasses

import numpy as np
import pytest

import benchmark
from models.errors import InputError
from models.export_spec import ExportSpec
from pipeline import compare
from pipeline.benchmark import differences, report

SPEC = ExportSpec(16, 16, 1, 1, "bfloat16", 10)


def pictures(seed, size=24):
    return np.random.default_rng(seed).integers(0, 256, (2, size, size + 8, 3), dtype=np.uint8)


def test_ssim_is_tensorflows():
    import tensorflow as tf

    a, b = pictures(0), pictures(1)
    for other in (b, a, a // 2, 255 - a, ((a.astype(int) + b) // 2).astype(np.uint8)):
        expected = float(np.mean(tf.image.ssim(a, other, max_val=255)))
        assert compare.ssim(a, other) == pytest.approx(expected, abs=2e-6)
    assert compare.ssim(a, a) == 1.0


def test_ssim_of_what_cannot_be_compared():
    with pytest.raises(ValueError, match="11 pixels or more"):
        compare.ssim(pictures(0, 10), pictures(1, 10))
    with pytest.raises(ValueError, match="of one shape"):
        compare.ssim(pictures(0, 24), pictures(1, 32))


def test_what_an_export_leaves_out():
    assert (
        differences.approximations(SPEC) == "" == differences.approximations(dataclasses.replace(SPEC, dtype="float32"))
    )
    assert differences.approximations(dataclasses.replace(SPEC, weights="int8")) == "bfloat16, int8 weights"
    assert (
        differences.approximations(dataclasses.replace(SPEC, dtype="float32", target="cpu")) == ""
    )  # but for rounding


def entry(name, seconds, images, jit=False, **changes):
    row = {
        **{"name": name, "of": name, "kind": "export", "jit_compile": jit, "jit_components": ["unet"]},
        **{"networks": name, "images": 2, "height": 24, "width": 32, "dtype": "float32", "unet_calls": 4},
        "settings": {"sampler": "ddim", "num_steps": 4, "guidance_scale": 3.0, "guidance_start": 0.0},
        "export": {"checkpoint": "emoji"},
        "approximate": "",
    } | changes
    stages = report.STAGES
    answer = {"samples": {stage: [seconds] for stage in stages}, "first": dict.fromkeys(stages, 9.0), "images": images}
    answer |= {"import_seconds": 1.0, "load_seconds": 1.0, "cores_busy": 2.0, "device": {}}
    return row, [answer | {"peak_rss_bytes": None, "peak_anonymous_bytes": None}]


def pooled(*done):
    return [report.pooled(row, answers, None, differences.expected(row, done)) for row, answers in done]


def test_approximations_are_compared_with_the_exact_export():
    exact, off = pictures(0), pictures(0)
    off[0, 0, 0, 0] ^= 64
    rows = pooled(
        entry("exact", 4.0, exact),
        entry("fast", 1.0, off, approximate="int8 weights"),
        entry("fast XLA", 1.0, off, jit=True, approximate="int8 weights"),
        entry("same", 2.0, exact, approximate="int8 weights"),
    )
    assert rows[0]["picture"].keys() == {"sha256"}
    found = rows[1]["picture"]
    assert found["exact"] == "exact" and found["max_levels_from_exact"] == 64
    assert found["psnr"] == pytest.approx(10 * np.log10(255**2 / (64**2 / exact.size)))
    assert found["ssim"] == compare.ssim(exact, off) < 1
    # What was compiled is not said to be fast beside what was not.
    first, second, third = differences.notes(rows)
    assert first.startswith("fast draws the exact picture to 64 of 255 levels, ")
    assert first.endswith(f"SSIM {found['ssim']:.3f}, in 0.25 x the seconds of exact (diffusion 0.25 x)")
    assert "x the seconds" not in second and "equal, SSIM 1.000" in third


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"export": {"checkpoint": "other"}},
        {"height": 16},
        {"settings": {"sampler": "ddim", "num_steps": 5, "guidance_scale": 3.0}},
        {"approximate": "int8 weights"},
        {"kind": "openvino"},
    ],
)
def test_what_is_not_the_exact_row(changes):
    other = entry("other", 4.0, pictures(0), **changes)
    assert differences.expected(entry("fast", 1.0, pictures(0), approximate="int8 weights")[0], [other]) is None


def test_guidance_in_a_part_of_the_run():
    workload, _ = entry("a", 1.0, pictures(0))
    changed = benchmark.within_interval(workload, 0.1, 0.7)
    assert changed["of"] == "a guided 0.1..0.7" and changed["approximate"] == "guided in 0.1..0.7 of the run"
    chosen = changed["settings"]
    assert (chosen["guidance_start"], chosen["guidance_end"]) == (0.1, 0.7) and chosen["num_steps"] == 4
    assert not differences.same_work(workload, changed) and differences.same_work(workload, workload)
    exact = [entry("a", 1.0, pictures(0))]
    assert differences.expected(changed, exact).name == "a"


@pytest.mark.parametrize("given", [["0.7", "0.1"], ["0.5"], ["0", "2"], ["nan", "1"], ["a", "b"], []])
def test_what_is_no_part_of_a_run(given):
    with pytest.raises(InputError, match="expected START,END with 0 <= START < END <= 1"):
        benchmark.check_interval(given)
