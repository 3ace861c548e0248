"""benchmark.py over a server, with no more than a manifest and a tokenizer here."""

import json
import shutil

from pipeline import manifest


def test_a_server_under_load(run_command, server, tiny_export, tmp_path):
    for name in ("manifests", "tokenizer"):
        shutil.copytree(tiny_export / name, tmp_path / "copy" / name)
    url = f"http://127.0.0.1:{server.rest_port}"
    arguments = ("--models", tmp_path / "copy", "--server", url, "--json", tmp_path / "found.json")
    arguments += ("--nojit_compile", "--repeats", 2, "--warmup", 0, "--clients", 3, "--duration", 1)
    run = run_command("benchmark.py", *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "no SavedModels here: only the server is measured" in run.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    [row] = found["rows"]
    assert row["name"] == "copy over http plain" and row["stages"]["total"]["n"] == 2 and row["server"] == url
    assert row["export"]["export_id"] == manifest.read(tiny_export).export_id
    assert found["load"]["latency"]["n"] >= 3 and found["load"]["errors"] == {}
    line = run.stdout.splitlines()[-1]
    assert line.startswith("3 client(s) for ") and "p99" in line and line.endswith("; 0 error(s)")
