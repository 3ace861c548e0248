"""How an export becomes visible: versions, locks, and what is left when it is killed or the disk is full."""

import dataclasses
import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from models import endpoints
from models.errors import InputError
from pipeline import export, manifest
from pipeline.checkpoints import source as sources
from pipeline.sampling import samplers
from pipeline.savedmodel import publish, signatures

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(checkpoint_folder):
    return sources.diffusers_source(checkpoint_folder)


@pytest.fixture
def no_tensorflow(monkeypatch):
    """Everything but TensorFlow's part: signatures are the real ones, a SavedModel is one small file."""

    def parts(source, spec, empty_tokens, image_encoder):
        config = source.config
        ddim = samplers.resolved("ddim", config.scheduler)
        return {
            "text_encoder": lambda: endpoints.text_encoder([None], config, spec, empty_tokens),
            "diffusion_model": lambda: endpoints.diffusion_model(None, config, spec, ddim, np.ones(1000) / 2),
            "decoder": lambda: endpoints.decoder(None, config, spec),
        }

    def save_part(build, folder, config, jit, warmup_xla, export_id):
        folder.mkdir(parents=True)
        (folder / "saved_model.pb").write_bytes(os.urandom(16))
        described = {e.name: manifest.Signature(e.inputs, e.outputs) for e in build()}
        return described | ({f"{name}_xla": s for name, s in described.items()} if jit else {}), {}, {}

    monkeypatch.setattr(export, "builders", parts)
    monkeypatch.setattr(export, "_save_part", save_part)
    monkeypatch.setattr(signatures, "run_reloaded", lambda folder, calls: {})
    monkeypatch.setattr(export, "_run_part", lambda build, config: {})


def visible(folder: Path) -> set[str]:
    """What a reader or a server could find: everything but the lock."""
    return {p.name for p in folder.iterdir() if not p.name.endswith(".lock")} if folder.exists() else set()


# === Versions ===


def test_versions_beside_each_other(no_tensorflow, source, export_spec, tmp_path):
    """The next free number by default; an existing one is refused; readers take the newest and keep the older."""
    folder = tmp_path / "out"
    first = export.export(source, folder, export_spec())
    second = export.export(source, folder, export_spec())
    fifth = export.export(source, folder, export_spec(), version=5)
    assert [m.version for m in (first, second, fifth)] == [1, 2, 5]
    assert manifest.list_versions(folder) == [1, 2, 5]
    assert manifest.read(folder) == fifth and manifest.read(folder, 2) == second and manifest.read(folder, 1) == first
    assert len({first.export_id, second.export_id, fifth.export_id}) == 3
    for version in (1, 2, 5):
        manifest.verify(manifest.read(folder, version))
    for part in manifest.PARTS:
        assert {p.name for p in (folder / part).iterdir()} == {"1", "2", "5"}
    assert visible(tmp_path) == {"out"}
    for version, message in (
        (2, "--version 2: .* already has it"),
        (0, "--version 0: must be 1 or more"),
        (-1, "--version -1"),
    ):
        with pytest.raises(InputError, match=message):
            export.export(source, folder, export_spec(), version=version)
    assert manifest.list_versions(folder) == [1, 2, 5] and visible(tmp_path) == {"out"}
    with pytest.raises(InputError, match="no version 3; found 1, 2, 5"):
        manifest.read(folder, 3)


@pytest.mark.parametrize(
    ("changes", "options", "flag"),
    [
        ({"width": 16}, {}, "--width"),
        ({"prompts": 1}, {}, "--prompts"),
        ({"max_steps": 13}, {}, "--max_steps"),
        ({"dtype": "bfloat16"}, {}, "--dtype (float32, not bfloat16)"),
        ({"weights": "int8"}, {}, "--weights (dtype, not int8)"),
        ({"target": "cpu"}, {}, "--target (any, not cpu)"),
        ({}, {"jit_components": ("decoder",)}, "--jit_compile, --jit_components (none, not decoder)"),
        ({}, {"image_encoder": True}, "--image_encoder"),
    ],
)
def test_versions_differ_in_weights_only(
    no_tensorflow, source, export_spec, tmp_path, monkeypatch, changes, options, flag
):
    """A server may run parts of two versions for a moment, and nobody asked for another picture; said before work."""
    folder = tmp_path / "out"
    export.export(source, folder, export_spec())
    monkeypatch.setattr(export, "builders", lambda *arguments: pytest.fail("weights were loaded first"))
    message = re.escape(f"version 1 has another {flag}") + ".* so name another --output_dir"
    with pytest.raises(InputError, match=message):
        export.export(source, folder, export_spec(**changes), **options)
    assert manifest.list_versions(folder) == [1] and visible(tmp_path) == {"out"}
    for part in manifest.PARTS:
        assert {p.name for p in (folder / part).iterdir()} == {"1"}


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2"])
def test_versions_share_every_tokenizer(no_tensorflow, source, export_spec, tmp_path, name):
    """Only parts and manifests are added to a folder, so other tokens would fail the new version's own checksums."""
    folder = tmp_path / "out"
    words = source.tokenizer
    source = dataclasses.replace(
        source,
        tokenizer_2=words,
        config=dataclasses.replace(source.config, text_encoder_2=source.config.text_encoder),
    )
    export.export(source, folder, export_spec())
    other = tmp_path / "other"
    shutil.copytree(words, other)
    (other / "tokenizer_config.json").write_text("{}")
    changed = dataclasses.replace(source, **{name: other})
    with pytest.raises(InputError, match=f"another tokenizer \\({name}/tokenizer_config.json\\)"):
        export.export(changed, folder, export_spec())
    assert manifest.list_versions(folder) == [1]
    manifest.verify(manifest.read(folder))
    assert export.export(source, folder, export_spec()).version == 2


def test_a_folder_that_is_no_export_is_left_alone(no_tensorflow, source, export_spec, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("mine", "file"):
        with pytest.raises(InputError, match="exists and is not an export; name another --output_dir"):
            export.export(source, tmp_path / name, export_spec())
    assert (tmp_path / "mine" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "precious"


def test_an_export_of_another_format_is_said_at_once(source, export_spec, tmp_path):
    (tmp_path / "old" / "manifests").mkdir(parents=True)
    (tmp_path / "old" / "manifests" / "1.json").write_text('{"format": 1}')
    message = r"1.json: has format 1, this toolkit reads \d+; delete .*old or name another --output_dir$"
    with pytest.raises(InputError, match=message):
        export.export(source, tmp_path / "old", export_spec())
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["manifests"]


@pytest.mark.parametrize("extra", [(), ("image_encoder",), ("manifests",)])
def test_savedmodels_of_others_are_never_deleted(no_tensorflow, source, export_spec, tmp_path, extra):
    """A base path of TensorFlow Serving with the same three names, or an export whose manifests were lost."""
    folder = tmp_path / "served"
    for part in (*manifest.PARTS, *extra):
        (folder / part / "1").mkdir(parents=True)
        (folder / part / "1" / "saved_model.pb").write_text("precious")
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError, match="served: exists and is not an export; name another --output_dir"):
        export.export(source, folder, export_spec())
    assert sorted(folder.rglob("*")) == before


def test_what_killed_exports_leave_is_cleared_and_nothing_else(no_tensorflow, source, export_spec, tmp_path):
    """Only what an export announced: a version that somebody else put beside ours stays, and its number is taken."""
    folder = tmp_path / "out"
    export.export(source, folder, export_spec())
    # Killed between the renames: a server would load it, our readers do not, the next export removes it.
    shutil.copytree(folder / "decoder" / "1", folder / "decoder" / "2")
    shutil.copy(folder / "manifests" / "1.json", folder / "manifests" / f"2{publish.PENDING}")
    shutil.copytree(folder / "decoder" / "1", folder / "decoder" / "7")
    (folder / "decoder" / "notes").mkdir()
    (folder / "serving").mkdir()
    (tmp_path / ".tmp-out-123").mkdir()
    (tmp_path / ".tmp-out-2-123").mkdir()  # of the export out-2, which may be running
    assert manifest.read(folder).version == 1
    assert export.export(source, folder, export_spec()).version == 8
    assert {p.name for p in (folder / "decoder").iterdir()} == {"1", "7", "8", "notes"}
    assert {p.name for p in (folder / "manifests").iterdir()} == {"1.json", "8.json"}
    assert visible(tmp_path) == {"out", ".tmp-out-2-123"} and (folder / "serving").is_dir()
    with pytest.raises(InputError, match="--version 7: .* already has it"):
        export.export(source, folder, export_spec(), version=7)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL])
def test_file_systems_without_locks_or_fsync_of_folders(
    no_tensorflow, source, export_spec, tmp_path, monkeypatch, caplog, number
):
    """exFAT, FUSE, network and cloud drives: the export is made all the same."""
    fsync = os.fsync

    def only_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    def no_locks(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(publish.os, "fsync", only_files)
    monkeypatch.setattr(publish.fcntl, "flock", no_locks)
    assert [export.export(source, tmp_path / "out", export_spec()).version for _ in range(2)] == [1, 2]
    assert "has no locks; run one export into it at a time" in caplog.text


@pytest.mark.parametrize("name", ["a[b]", "a*", "a?", "a\\b"])
def test_names_that_tensorflow_takes_for_patterns(source, export_spec, tmp_path, name):
    with pytest.raises(InputError, match="TensorFlow cannot load from paths with"):
        export.export(source, tmp_path / name, export_spec())
    assert visible(tmp_path) == set()


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_failure_between_the_renames_of_a_second_version(
    no_tensorflow, source, export_spec, tmp_path, monkeypatch, number
):
    """Readers go on with version 1, whichever rename fails; the next export tidies up."""
    folder = tmp_path / "out"
    export.export(source, folder, export_spec())
    rename, calls = os.rename, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise OSError(errno.EIO, "Input/output error")
        rename(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(publish.os, "rename", failing)
        with pytest.raises(InputError, match="cannot write the export: Input/output error"):
            export.export(source, folder, export_spec())
    assert len(calls) == number
    assert manifest.read(folder).version == 1 and manifest.list_versions(folder) == [1]
    assert visible(tmp_path) == {"out"}
    assert export.export(source, folder, export_spec()).version == 2
    for part in manifest.PARTS:
        assert {p.name for p in (folder / part).iterdir()} == {"1", "2"}
    manifest.verify(manifest.read(folder))


def test_the_manifest_comes_last(no_tensorflow, source, export_spec, tmp_path, monkeypatch):
    """Announced aside, decoder, diffusion_model, text_encoder, manifest: readers never see a version without a part."""
    folder = tmp_path / "out"
    export.export(source, folder, export_spec())
    rename, order = os.rename, []
    monkeypatch.setattr(publish.os, "rename", lambda a, b: (order.append(Path(b).relative_to(folder)), rename(a, b)))
    export.export(source, folder, export_spec())
    assert list(map(str, order)) == [
        "manifests/2.json.pending",
        "decoder/2",
        "diffusion_model/2",
        "text_encoder/2",
        "manifests/2.json",
    ]


# === Failures ===


def test_a_difference_after_reloading_fails_the_export(source, export_spec, tmp_path, monkeypatch):
    def damaged(path):
        loaded = real(path)
        for variable in loaded.weights.values():
            variable.assign(variable * 1.01)
        return loaded

    real = tf.saved_model.load
    monkeypatch.setattr(tf.saved_model, "load", damaged)
    with pytest.raises(InputError, match="text_encoder/encode: the reloaded export differs from the live model: "):
        export.export(source, tmp_path / "out", export_spec())
    assert visible(tmp_path) == set()


def test_the_lock(no_tensorflow, source, export_spec, tmp_path):
    with open(tmp_path / ".out.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="out: another export into it is running"):
            export.export(source, tmp_path / "out", export_spec())
    assert export.export(source, tmp_path / "out", export_spec()).version == 1


def test_a_killed_export_leaves_nothing_that_loads(no_tensorflow, source, checkpoint_folder, export_spec, tmp_path):
    """SIGKILL with the text encoder written and the UNet loading; meanwhile another export is refused."""
    folder = tmp_path / "out"
    program = f"""
import dataclasses, time
from pathlib import Path
from models.export_spec import ExportSpec
from pipeline import export
from pipeline.checkpoints import source as sources
source = sources.diffusers_source(Path({str(checkpoint_folder)!r}))
def slow(component, layers):
    if component == "unet":
        print("READY", flush=True)
        time.sleep(600)
    return source.fill(component, layers)
export.export(dataclasses.replace(source, fill=slow), Path({str(folder)!r}), {export_spec()!r})
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert any("READY" in line for line in process.stdout)
        [work] = [p for p in tmp_path.iterdir() if p.is_dir()]
        assert work.name == f".tmp-out-{process.pid}" and (work / "text_encoder" / "1" / "saved_model.pb").exists()
        with pytest.raises(InputError, match="another export into it is running"):
            export.export(source, folder, export_spec())
        assert work.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert not folder.exists() and visible(tmp_path) == {work.name}
    with pytest.raises(InputError, match="not a finished export"):
        manifest.read(work)
    assert export.export(source, folder, export_spec()).version == 1
    assert visible(tmp_path) == {"out"}


def one_line(error):
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


def test_too_little_space_is_said_at_once(source, export_spec, small_disk):
    disk = small_disk("8m")
    with pytest.raises(InputError, match="MiB needed for this part, [0-9]+ MiB free") as error:
        export.export(source, disk / "out", export_spec())
    one_line(error)
    assert visible(disk) == set()


@pytest.mark.parametrize(("size", "written"), [("1m", "the tokenizer"), ("1600k", "the graph"), ("4m", "the weights")])
def test_a_disk_that_fills_up_leaves_nothing(source, export_spec, small_disk, monkeypatch, size, written):
    """Whatever is being written then."""
    disk = small_disk(size)
    monkeypatch.setattr(publish, "check_space", lambda folder, weight_bytes: None)
    with pytest.raises(InputError, match="cannot write the export: ") as error:
        export.export(source, disk / "out", export_spec())
    assert "pace left" in one_line(error)
    assert visible(disk) == set()


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("no reason given"),
        OSError(),
        tf.errors.UnknownError(None, None, ""),
        tf.errors.ResourceExhaustedError(None, None, "variables.data; No space left on device\n\t [[node]]"),
        tf.errors.UnknownError(None, None, "close() failed"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_failures_to_write_are_one_line(no_tensorflow, source, export_spec, tmp_path, monkeypatch, failure):
    def fail(*arguments):
        raise failure

    monkeypatch.setattr(export, "_save_part", fail)
    with pytest.raises(InputError, match="out: cannot write the export: ") as error:
        export.export(source, tmp_path / "out", export_spec())
    assert "None" not in one_line(error) and not one_line(error).endswith(": ")
    assert visible(tmp_path) == set()


def test_output_that_cannot_be_written(no_tensorflow, source, export_spec, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the export: Not a directory") as error:
        export.export(source, tmp_path / "file" / "exports" / "out", export_spec())
    one_line(error)
    with pytest.raises(InputError, match="cannot write the export: "):
        export.export(source, Path("/proc/none/out"), export_spec())


def test_an_interrupted_export_leaves_nothing(no_tensorflow, source, export_spec, tmp_path, monkeypatch):
    def interrupt(folder, calls):
        raise KeyboardInterrupt

    monkeypatch.setattr(signatures, "run_reloaded", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export.export(source, tmp_path / "out", export_spec())
    assert visible(tmp_path) == set()
