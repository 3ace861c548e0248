"""A server under load, with clients that need none: what is counted, and what is said of it."""

import time

import pytest

import benchmark
from models.errors import InputError
from pipeline import manifest
from pipeline.benchmark import server_load, timing


def test_clients_draw_at_the_same_time_until_the_end():
    """Three clients, each with its own connection."""
    connected, active, most = [], set(), []

    def connect():
        client = len(connected)
        connected.append(client)

        def draw():
            active.add(client)
            most.append(len(active))
            time.sleep(0.02)
            active.discard(client)

        return draw

    found = server_load.run(connect, 3, 0.3)
    assert connected == [0, 1, 2] and max(most) == 3 and found["errors"] == {}
    count = found["latency"]["n"]
    assert count == len(most) >= 3 and found["seconds"] >= 0.3
    assert found["calls_per_second"] == pytest.approx(count / found["seconds"])
    assert 0.01 <= found["latency"]["min"] <= found["latency"]["p50"] <= found["latency"]["p99"] <= 10


def test_errors_are_counted_and_do_not_stop_a_client():
    calls = []

    def draw():
        calls.append(0)
        time.sleep(0.001)
        if len(calls) % 2:
            raise InputError("full")

    found = server_load.run(lambda: draw, 1, 0.1)
    assert found["errors"] == {"full": (len(calls) + 1) // 2} and found["latency"]["n"] == len(calls) // 2
    only_errors = server_load.run(lambda: lambda: calls.append(0) or _fail(), 2, 0.05)
    assert only_errors["latency"] is None and only_errors["calls_per_second"] == 0
    assert server_load.text(only_errors, 4)[0].endswith(f"none; {sum(only_errors['errors'].values())} error(s)")


def _fail():
    time.sleep(0.001)
    raise InputError("away")


@pytest.mark.parametrize(("clients", "duration"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_no_load(clients, duration):
    with pytest.raises(InputError, match="--clients must be 1 or more and --duration above 0"):
        server_load.run(lambda: None, clients, duration)


def test_text():
    load = {
        "clients": 8,
        "seconds": 60.04,
        "latency": {**timing.summary([1.0, 2.0, 3.0, 4.0]), "p99": 3.97},
        "calls_per_second": 0.5,
        "errors": {"b": 1, "a": 2},
    }
    assert server_load.text(load, 4) == [
        "8 client(s) for 60.0 s: 4 calls, 2 images/s; seconds per call: p50 2.5, p90 3.7, p99 3.97, max 4; 3 error(s)",
        "  2 x a",
        "  1 x b",
    ]


def row(name, added=0.0, server=None, picture="x", **changes):
    stages = {"text_encoder": 0.01, "diffusion": 0.9, "decoder": 0.09, "total": 1.0}
    return {
        "name": name,
        "kind": "export",
        "server": server,
        "jit_compile": False,
        "settings": {"num_steps": 4},
        "height": 64,
        "width": 64,
        "export": {"export_id": "1"},
        "picture": {"sha256": picture},
        "stages": {stage: timing.summary([s + added, s + added]) for stage, s in stages.items()},
    } | changes


def test_overhead():
    here, there = row("emoji plain"), row("emoji over grpc plain", 0.004, "grpc://a:1")
    expected = (
        "grpc://a:1 adds to emoji plain: text encoder +4.0 ms (+4.0 by minima), diffusion +4.0 ms (+4.0 by minima), "
        "decoder +4.0 ms (+4.0 by minima), total +4.0 ms (+4.0 by minima; +0.4 % of 1 s); the same picture, bit for bit"
    )
    assert server_load.overhead([here, there]) == [expected]
    assert server_load.overhead([here, row("x", 0, "grpc://a:1", "y")])[0].endswith("careful: another picture")
    for changes in ({"jit_compile": True}, {"height": 32}, {"export": {"export_id": "2"}}, {"kind": "kerascv"}):
        assert server_load.overhead([here, there | changes]) == []
    failed = {key: value for key, value in there.items() if key != "stages"}
    assert server_load.overhead([here, failed]) == []


# === What benchmark.py asks for ===


@pytest.fixture
def flagged(monkeypatch):
    """Function (**flags) that sets what benchmark.py's functions read."""

    def give(**values):
        class Flags:
            def __getitem__(self, name):
                return type("Flag", (), {"value": getattr(self, name)})

        given = Flags()
        usual = {"kerascv": False, "sampler": None, "num_steps": None, "guidance_scale": None, "prompt": "a cat"}
        usual |= {"width": None, "height": None, "jit_components": ["unet", "decoder"], "jit_compile": None}
        usual |= {"seed": 0, "warmup": 0, "repeats": 1, "tf32": False, "server": None, "clients": None}
        usual |= {"compile_cache": "off", "guidance_interval": None}
        usual |= {"peers": [], "all_sizes": False, "sweep": False, "compile": None}
        for name, value in (usual | values).items():
            setattr(given, name, value)
        monkeypatch.setattr(benchmark, "FLAGS", given)

    return give


def test_rows_over_a_server(flagged, tiny_export, single_export):
    """Here and there; compiled there only where the export has twins."""
    flagged(models=[str(tiny_export), str(single_export)], server="http://a:1")
    rows = [(r["name"], r.get("server"), r["jit_compile"]) for r in benchmark.plan()]
    assert rows == [
        ("tiny plain", None, False),
        ("tiny XLA", None, True),
        ("tiny over http plain", "http://a:1", False),
        ("single plain", None, False),
        ("single XLA", None, True),
        ("single over http plain", "http://a:1", False),
        ("single over http XLA", "http://a:1", True),
    ]
    contract = manifest.read(single_export)
    assert manifest.has_twins(contract, ("text_encoder", "unet")) and not manifest.has_twins(
        manifest.read(tiny_export), ("decoder",)
    )


def test_clients_need_a_server(flagged, tiny_export):
    flagged(models=[str(tiny_export)], clients=2)
    with pytest.raises(InputError, match="--clients needs a server to ask"):
        benchmark.check_flags()
