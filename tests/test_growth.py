"""How time and memory grow, and what share of the machine's peak is reached, from results as they are written."""

import json

import pytest

from models.config import InputError
from pipeline import cost, growth, likeness, manifest, peak, timing


def row(side, images=1, steps=4, **changes):
    """A row whose step takes 2 pixels^1.5 images seconds, whose memory holds a constant."""
    step = 2 * side**3 * images
    stages = {"decoder": {"p50": 3.0 * side**2}, "total": {"p50": step * steps}}
    return {
        **{"name": f"a {side}x{side} XLA", "of": f"a {side}x{side}", "kind": "export", "jit_compile": True},
        **{"width": side, "height": side, "images": images, "dtype": "float32", "networks": "sd1", "unet_calls": steps},
        "settings": {"num_steps": steps, "guidance_scale": 3.0},
        "export": {"checkpoint": "emoji", "folder": "exports/a", "spec": {"target": "any"}},
        **{"stages": stages, "seconds_per_step": step, "peak_anonymous_bytes": None},
    } | changes


def test_exponents_are_those_that_made_the_numbers():
    rows = [row(8), row(16), row(32), row(8, images=2), row(16, images=4), row(8, steps=9)]
    (found,) = growth.points([{"rows": rows[:3]}, {"rows": rows[3:]}]).values()
    assert [point["size"] for point in found[:2]] == ["8x8", "8x8"] and len(found) == 6
    step = growth.fit(found, "s per step")
    assert step == pytest.approx({"pixels": 1.5, "images": 1.0, "steps": 0.0}, abs=1e-9)
    assert growth.fit(found, "chain s") == pytest.approx({"pixels": 1.5, "images": 1.0, "steps": 1.0}, abs=1e-9)
    assert growth.fit(found, "decoder s")["pixels"] == pytest.approx(1.0)
    assert growth.fit(found, "anonymous MB") == {}
    text = growth.text([{"rows": rows}])
    assert text.startswith("emoji, float32, XLA") and "grows with pixels" in text and "^1.50" in text


def test_what_cannot_be_told_apart_has_no_exponent():
    (found,) = growth.points([{"rows": [row(8), row(16, images=2)]}]).values()
    assert growth.fit(found, "s per step") == {}
    (found,) = growth.points([{"rows": [row(8), row(8)]}]).values()
    assert len(found) == 1 and growth.fit(found, "s per step") == {}


def test_ways_are_apart():
    others = [{"kind": "openvino"}, {"dtype": "bfloat16"}, {"approximate": "int8 weights"}, {"name": "a 8x8 plain"}]
    others.append({"export": {"checkpoint": "emoji", "spec": {"target": "cpu"}}})
    assert len(growth.points([{"rows": [row(8, **changes) for changes in others] + [row(8)]}])) == 6
    assert growth.points([{"rows": [{"error": "gone"}]}]) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "nothing to read"),
        ("[]", "expected a JSON object"),
        ('{"rows": 3}', "expected a result of benchmark.py --json"),
        ('{"rows": [{"stages": {}}]}', "of another version of benchmark.py: its rows lack 'width'"),
    ],
)
def test_bad_files(tmp_path, content, message):
    file = tmp_path / "a.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message):
        growth.main(["growth"] if content is None else ["growth", str(file)])


# === The peak ===


def test_both_products_are_measured(monkeypatch):
    monkeypatch.setattr(peak, "MATMUL", 8)
    monkeypatch.setattr(peak, "CONVOLUTION", (1, 4, 4, 8))
    for jit_compile in (False, True):
        measured = timing.measure(peak.load({"dtype": "bfloat16", "jit_compile": jit_compile}), warmup=0, repeats=2)
        assert tuple(measured.samples) == ("matmul", "convolution", "total")


def test_flops_of_the_products():
    """4096^3 multiply-adds; 9 x 1280 of them for each of 2 x 32 x 32 x 1280 outputs."""
    assert peak.FLOPS == {"matmul": 2 * 4096**3, "convolution": 2 * 9 * 1280 * 2 * 32 * 32 * 1280}


def test_shares_of_the_peak(single_export):
    contract = manifest.read(single_export)
    at = {"width": contract.spec.width, "height": contract.spec.height}
    ours = row(8, **at, export={"folder": str(single_export), "checkpoint": "tiny", "spec": {"target": "any"}})
    same, approximate = {**ours, "kind": "openvino"}, {**ours, "approximate": "int8 weights"}
    failed = {"kind": "export", "name": "b", "error": "gone"}
    # What is tuned to do less says nothing of a peer's work.
    (alone,) = peak.with_flops(
        [same | {"name": "peer"}, ours | {"export": ours["export"] | {"spec": {"target": "cpu"}}}]
    )[:1]
    assert "flops_per_step" not in alone
    rows = peak.with_flops([ours, same, approximate, failed])
    costs = cost.of_export(contract, contract.spec.size)["denoise per row"]
    assert rows[0]["flops_per_step"] == rows[1]["flops_per_step"] == costs.total("convolution", "matmul", "attention")
    assert "flops_per_step" not in rows[2] and rows[3] == failed
    most = 2 * rows[0]["flops_per_step"] / rows[0]["seconds_per_step"]
    rates = {"plain": {"matmul": most, "convolution": most / 2}, "XLA": {"matmul": most / 4, "convolution": 1.0}}
    lines = peak.text({"peak": {"float32": rates}, "rows": rows})
    assert peak.best(rates) == most and lines[-1].split()[-1] == lines[-2].split()[-1] == "50%"
    assert len(lines) == 3 + 1 + 3 and likeness.label(same) in lines[-1]


def test_a_peak_that_cannot_be_measured(monkeypatch, capsys):
    answers = iter([{"error": "gone"}] + [{"samples": {"matmul": [2.0, 1.0], "convolution": [4.0]}}] * 4)
    monkeypatch.setattr(timing, "isolated", lambda command, row: next(answers, {"error": "gone"}))
    found = peak.measure(["float32"], ["worker"])
    assert len(found["float32"]) == 4 and "failed: gone" in capsys.readouterr().err
    rate = next(iter(found["float32"].values()))
    assert rate == {"matmul": peak.FLOPS["matmul"], "convolution": peak.FLOPS["convolution"] / 4}
    with pytest.raises(InputError, match="no product could be measured in bfloat16"):
        peak.measure(["bfloat16"], ["worker"])


def test_results_are_read_as_they_are_written(tmp_path, capsys):
    file = tmp_path / "a.json"
    rows = [row(8, peak_anonymous_bytes=10**6, flops_per_step=10**12), row(16, peak_anonymous_bytes=int(2e6))]
    file.write_text(json.dumps({"rows": rows}))
    growth.main(["growth", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["8x8", "1", "4", "1024", "192", "4096", "1", f"{1000 / 1024:.4g}"]
    assert lines[-1].split() == ["grows", "with", "pixels", "^1.50", "^1.00", "^1.50", "^0.50"]
