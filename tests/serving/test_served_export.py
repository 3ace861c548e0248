"""An export behind the server: its parts, and what happens beside it."""

import json
import shutil
import time

import numpy as np
import pytest

from models.errors import InputError
from pipeline import export, manifest
from pipeline.checkpoints import source
from pipeline.savedmodel import publish


def test_an_export_is_served_as_its_parts(serve, tiny_export):
    """Every signature has run before the server is ready; the manifest says what the names of the models are."""
    client = serve(tiny_export)
    assert client.states("toy") == {}
    for part, signatures in manifest.read(tiny_export).signatures.items():
        assert client.states(part) == {1: "AVAILABLE"}
        found = json.loads(client.rest("GET", f"/v1/models/{part}/metadata")[1])["metadata"]["signature_def"]
        assert signatures.keys() <= found["signature_def"].keys()
    shapes = client.metric("input_shapes")
    assert shapes >= 3
    code, answer = client.rest("POST", "/v1/models/decoder:predict", {"inputs": [[[[0.0] * 4] * 7] * 9] * 4})
    assert code == 200 and len(json.loads(answer)["outputs"]) == 4
    assert client.rest("POST", "/v1/models/decoder:predict", {"inputs": [[[[0.0] * 4] * 7] * 8] * 4})[0] == 400
    assert client.metric("input_shapes") == shapes  # nothing new for a server that is warm


def test_a_disk_that_fills_up_during_an_export_leaves_the_old_version(
    serve, tiny_export, checkpoint_folder, export_spec, small_disk, monkeypatch
):
    used = sum(path.stat().st_size for path in tiny_export.rglob("*") if path.is_file())
    disk = small_disk(used + (2 << 20))
    shutil.copytree(tiny_export, disk / "tiny")
    client = serve(disk / "tiny", file_system_poll_wait_seconds=0.05)
    monkeypatch.setattr(publish, "check_space", lambda folder, weight_bytes: None)
    with pytest.raises(InputError, match="cannot write the export: .*pace left"):
        export.export(source.diffusers_source(checkpoint_folder), disk / "tiny", export_spec())
    time.sleep(0.3)
    assert all(client.states(part) == {1: "AVAILABLE"} for part in manifest.PARTS)
    latent = np.zeros((4, 9, 7, 4), "float32").tolist()
    assert client.rest("POST", "/v1/models/decoder:predict", {"inputs": latent})[0] == 200
