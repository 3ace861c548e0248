"""The cache of compiled programs: what is shown to TensorFlow is whole, and no process spoils another's.

Programs are any bytes here; one test at the end lets TensorFlow write and read them.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli, compile_cache, manifest
from pipeline.manifest import DEFAULT_JIT_COMPONENTS

ROOT = Path(__file__).parents[1]
KEY = {"tensorflow": "2", "export_id": "a"}


@pytest.fixture(autouse=True)
def notices(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def stored(place, name, contents):
    """A program as the cache keeps it."""
    path = place / f"{name}.{hashlib.sha256(contents).hexdigest()}"
    path.write_bytes(contents)
    return path


def filled(folder, **programs):
    """A cache of KEY into which one process has compiled these."""
    run = compile_cache.open_run(folder, KEY)
    for name, contents in programs.items():
        (run.links / f"{name}.pb").write_bytes(contents)
    compile_cache.close(run)
    return run.place


def shown(run):
    return {path.name: path.read_bytes() for path in run.links.glob("*.pb")}


def die(run):
    """What the kernel does for a process that is killed: its lock goes, its folder stays."""
    os.close(run.locked)


# === Which folder, which key ===


def test_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache.folder("default") == tmp_path / compile_cache.TOOLKIT
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compile_cache.folder("default") == tmp_path / "home" / ".cache" / compile_cache.TOOLKIT
    assert [compile_cache.folder(flag) for flag in ("", "off", "none", None)] == [None] * 4
    assert compile_cache.folder("~/x") == tmp_path / "home" / "x"
    assert compile_cache.folder("x") == Path.cwd() / "x"


def test_without_a_home_there_is_no_cache(monkeypatch, notices):
    def homeless():
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compile_cache.Path, "home", staticmethod(homeless))
    assert compile_cache.folder("default") is None
    assert notices() == ["compile cache: not used: no home folder to keep it in (no home); pass --compile_cache DIR"]


def test_keys_differ_where_programs_do(monkeypatch):
    for name in compile_cache.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compile_cache.machine, "nvidia_gpus", list)
    info = {"model name": "A CPU", "flags": "fpu sse sse4_2 avx2 amx_bf16 sha_ni ibpb pti avx512f"}
    monkeypatch.setattr(compile_cache.machine, "cpu_information", lambda: info)
    plain = compile_cache.key("a")
    assert (plain["cpu"], plain["export_id"], plain["variables"]) == ("A CPU", "a", {})
    # The kernel's flags say nothing about instructions.
    assert plain["instructions"] == "amx_bf16 avx2 avx512f sha_ni sse sse4_2"
    keys = [plain, compile_cache.key("b"), compile_cache.key("a", tf32=True)]
    monkeypatch.setenv("XLA_FLAGS", " --x=1   --y ")
    keys.append(compile_cache.key("a"))
    assert keys[-1]["variables"] == {"XLA_FLAGS": "--x=1 --y"}
    monkeypatch.setattr(compile_cache.machine, "cpu_information", lambda: {"Features": "fp asimd"})
    keys.append(compile_cache.key("a"))
    assert keys[-1]["instructions"] == "asimd fp"
    assert len({json.dumps(key) for key in keys}) == len(keys)


def test_a_tensorflow_that_nobody_installed(monkeypatch, tmp_path, notices):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delenv("TF_XLA_FLAGS", raising=False)
    monkeypatch.setattr(compile_cache, "DISTRIBUTIONS", ("no-such-distribution",))
    assert compile_cache.start(tmp_path, "a") is None
    assert notices() == ["compile cache: not used: none of no-such-distribution is installed"]


# === What is kept and shown ===


def test_the_next_process_finds_what_one_compiled(tmp_path, notices):
    place = filled(tmp_path / "new", a=b"first", b=b"second")
    assert json.loads((place / "key.json").read_text()) == KEY
    assert sorted(path.name for path in place.iterdir()) == [
        f"a.pb.{hashlib.sha256(b'first').hexdigest()}",
        f"b.pb.{hashlib.sha256(b'second').hexdigest()}",
        "key.json",
    ]
    run = compile_cache.open_run(tmp_path / "new", KEY)
    assert run.found == 2 and shown(run) == {"a.pb": b"first", "b.pb": b"second"}
    other = compile_cache.open_run(tmp_path / "new", KEY | {"export_id": "b"})
    assert other.found == 0 and other.place != place
    assert compile_cache.size_of(place) == len(b"firstsecond") and notices() == []


DAMAGES = {
    "flipped": lambda path: path.write_bytes(b"fIrst"),
    "truncated": lambda path: path.write_bytes(b"fir"),
    "empty": lambda path: path.write_bytes(b""),
    "without its hash": lambda path: path.rename(path.with_name("a.pb")),
    "a folder": lambda path: (path.unlink(), path.mkdir(), (path / "x").touch()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_programs_are_deleted(tmp_path, notices, damage):
    place = filled(tmp_path, a=b"first", b=b"second")
    damage(next(place.glob("a.pb.*")))
    run = compile_cache.open_run(tmp_path, KEY)
    assert shown(run) == {"b.pb": b"second"}
    compile_cache.close(run)
    assert sorted(path.name[:4] for path in place.iterdir()) == ["b.pb", "key."]
    assert notices() == [f"compile cache {place}: 1 damaged file(s) deleted; compiling again"]


def test_a_damaged_key_file_is_written_again(tmp_path):
    place = filled(tmp_path, a=b"first")
    (place / "key.json").write_text("{")
    run = compile_cache.open_run(tmp_path, KEY)
    assert run.found == 1 and json.loads((place / "key.json").read_text()) == KEY


# === Several processes ===


def test_two_processes_at_once(tmp_path, notices):
    """Both compile a; the one that runs on lends what it has to the one that starts later; nothing is lost."""
    server = compile_cache.open_run(tmp_path, KEY)
    other = compile_cache.open_run(tmp_path, KEY)
    for run, only in ((server, "s"), (other, "o")):
        (run.links / "a.pb").write_bytes(b"of " + only.encode())
        (run.links / f"{only}.pb").write_bytes(b"only")
    (server.links / "half.pb.tmp").write_bytes(b"TensorFlow is writing")
    compile_cache.close(other)
    assert not other.links.exists() and shown(server)["a.pb"] == b"of s"
    third = compile_cache.open_run(tmp_path, KEY)
    assert shown(third) == {"a.pb": b"of o", "o.pb": b"only", "s.pb": b"only"}
    assert (server.links / "half.pb.tmp").exists() and (server.links / "s.pb").read_bytes() == b"only"
    compile_cache.close(server)
    compile_cache.close(third)
    assert sorted(path.name[:4] for path in server.place.iterdir()) == ["a.pb", "key.", "o.pb", "s.pb"]
    assert notices() == []


def test_what_a_killed_process_left_is_deleted(tmp_path, notices):
    run = compile_cache.open_run(tmp_path, KEY)
    (run.links / "a.pb").write_bytes(b"whole or not, who knows")
    die(run)
    run = compile_cache.open_run(tmp_path, KEY)
    assert run.found == 0 and [p for p in run.place.iterdir() if p.is_dir()] == [run.links] and notices() == []


def test_a_fork_keeps_its_hands_off(tmp_path):
    run = compile_cache.open_run(tmp_path, KEY)
    compile_cache.close(run, process=os.getpid() + 1)
    assert run.links.exists()


# === Limits ===


def test_the_oldest_keys_go_first(tmp_path):
    places = {}
    for age, name in enumerate("abcd"):
        run = compile_cache.open_run(tmp_path, KEY | {"export_id": name})
        stored(run.place, "x.pb", name.encode() * 1000)
        os.utime(run.place / "key.json", (1e9 - age, 1e9 - age))
        places[name] = run
    for name in "abc":
        die(places[name])
    other = tmp_path / "not a key"
    other.mkdir()
    (other / "key.json").write_text("x" * 5000)

    def left():
        return "".join(name for name, run in places.items() if run.place.exists())

    compile_cache._trim(tmp_path, places["c"].place, limit=4000)
    assert left() == "abcd"
    # d, the oldest, is in use, and c is the caller's: so b, and nothing after it is needed.
    compile_cache._trim(tmp_path, places["c"].place, limit=3000)
    assert left() == "acd"
    compile_cache._trim(tmp_path, places["c"].place, limit=0)
    assert left() == "cd" and other.exists()


def test_adding_trims(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "LIMIT_BYTES", 3)
    old = filled(tmp_path, a=b"1234")
    run = compile_cache.open_run(tmp_path, KEY | {"export_id": "b"})
    compile_cache.close(run)
    assert old.exists()  # nothing was added
    run = compile_cache.open_run(tmp_path, KEY | {"export_id": "b"})
    (run.links / "b.pb").write_bytes(b"5678")
    compile_cache.close(run)
    assert not old.exists() and run.place.exists()


# === Folders that cannot be used ===


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not imported TensorFlow; nothing is left to be done at exit."""
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setenv("TF_XLA_FLAGS", "--other")
    monkeypatch.setattr(compile_cache.atexit, "register", lambda *_: None)
    monkeypatch.setattr(compile_cache, "key", lambda export_id, tf32: KEY | {"export_id": export_id})


def test_start_names_the_folder_to_tensorflow(fresh, tmp_path, notices):
    run = compile_cache.start(tmp_path / 'a "b"', "a")
    quoted = str(run.links).replace('"', '\\"')
    assert os.environ["TF_XLA_FLAGS"] == f'--other --tf_xla_persistent_cache_directory="{quoted}"'
    assert compile_cache.started() and notices() == []
    assert compile_cache.start(tmp_path, "a") is None
    assert notices() == ["TF_XLA_FLAGS names a cache of its own, so --compile_cache does nothing"]


def test_programs_that_are_found_are_not_called_errors(fresh, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", object())
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    for flags, level in (("--other", "2"), (f"{compile_cache.FLAG}=x", "3")):
        monkeypatch.setenv("TF_XLA_FLAGS", flags)
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
        cli.import_tensorflow()
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == level


def test_no_cache_is_asked_for(fresh, notices):
    assert compile_cache.start(None, "a") is None
    assert os.environ["TF_XLA_FLAGS"] == "--other" and notices() == []


def test_too_late(fresh, tmp_path, monkeypatch, notices):
    monkeypatch.setitem(sys.modules, "tensorflow", object())
    assert compile_cache.start(tmp_path, "a") is None
    late = "not used: it must be started before TensorFlow is imported"
    assert notices() == [f"compile cache {tmp_path}: {late}"] and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(fresh, tmp_path, notices):
    (tmp_path / "file").touch()
    assert compile_cache.start(tmp_path / "file" / "cache", "a") is None
    expected = f"compile cache {tmp_path}/file/cache: cannot be used (Not a directory); compiling without it"
    assert notices() == [expected] and os.environ["TF_XLA_FLAGS"] == "--other"


def test_a_read_only_folder_is_used(fresh, tmp_path, monkeypatch, notices):
    place = filled(tmp_path, a=b"first", b=b"second")
    next(place.glob("b.pb.*")).write_bytes(b"damaged")
    before = sorted(place.iterdir())

    def refuse(*_):
        raise PermissionError(30, "Read-only file system")

    # Root may write anywhere, so that permissions would not do here.
    monkeypatch.setattr(compile_cache, "lock", refuse)
    monkeypatch.setattr(compile_cache, "_delete", lambda path: None)
    run = compile_cache.start(tmp_path, "a")
    assert shown(run) == {"a.pb": b"first"} and place not in run.links.parents
    assert os.environ["TF_XLA_FLAGS"].endswith('" --tf_xla_persistent_cache_read_only')
    assert notices() == [f"compile cache {place}: 1 damaged file(s) ignored; compiling again"]
    compile_cache.close(run)
    assert not run.links.exists() and sorted(place.iterdir()) == before
    other = compile_cache.open_run(tmp_path, KEY | {"export_id": "b"})
    assert other.found == 0 and "holds nothing for this" in notices()[-1]
    compile_cache.close(other)


# === Commands and TensorFlow itself ===


def run_python(*arguments, **environment):
    changed = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"} | environment
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=changed, capture_output=True, text=True)


def test_warming_twice_does_nothing(tiny_export, tmp_path, monkeypatch):
    """A folder that holds all that is asked for is left as it is, and TensorFlow is not even started."""
    monkeypatch.delenv("TF_XLA_FLAGS", raising=False)
    contract = manifest.read(tiny_export)
    run = compile_cache.open_run(tmp_path, compile_cache.key(contract.export_id))
    program = stored(run.place, "a.pb", b"1" * 5000)
    compile_cache.close(run)
    names = [name for component in DEFAULT_JIT_COMPONENTS for name in manifest.JIT_COMPONENTS[component]]
    record = {"functions": [f"{name} {contract.spec.size}" for name in names], "programs": ["a.pb"]}
    (run.place / "warm.json").write_text(json.dumps(record))
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "tensorflow.py").write_text("raise SystemExit('TensorFlow was started')")

    def warm():
        arguments = ("--warm", str(tmp_path), "--models", str(tiny_export))
        return run_python("-m", "pipeline.load", *arguments, PYTHONPATH=str(blocked))

    done = warm()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"nothing to do: {', '.join(names)} at {contract.spec.size} are there",
        f"{run.place}: 1 programs, 0.0 MB",
    ]
    program.write_bytes(b"damaged")
    assert "TensorFlow was started" in warm().stderr


def test_warm_needs_a_folder():
    done = run_python("-m", "pipeline.load", "--warm", "")
    assert (
        done.returncode == 1 and done.stderr.startswith("error: expected --warm DIR") and done.stderr.count("\n") == 1
    )


PROGRAM = """
import logging, sys
from pathlib import Path
from pipeline import compile_cache
logging.basicConfig(format="%(message)s")
run = compile_cache.start(Path(sys.argv[1]), "tiny")
import tensorflow as tf
for power in (2.0, 3.0):
    function = tf.function(lambda x: tf.tanh(x) ** power, jit_compile=True, autograph=False)
    print(round(float(function(tf.constant(0.5))), 4))
print("found", run.found)
"""


def test_tensorflow_keeps_finds_and_survives(tmp_path, monkeypatch):
    """Two processes: the second compiles only what was damaged between them, and adds nothing."""
    monkeypatch.delenv("TF_XLA_FLAGS", raising=False)
    folder = tmp_path / "with a 'quote' and a space"

    def process():
        done = run_python("-c", PROGRAM, str(folder), PYTHONHASHSEED=str(len(os.listdir(tmp_path))))
        assert done.returncode == 0, done.stderr
        [place] = [path for path in folder.iterdir() if path.is_dir()]
        programs = sorted(path for path in place.iterdir() if path.name != "key.json")
        return done, {path.name.partition(".pb")[0]: path for path in programs}

    done, first = process()
    assert done.stdout.split() == ["0.2136", "0.0987", "found", "0"] and len(first) == 2
    damaged, kept = first.values()
    damaged.write_bytes(damaged.read_bytes()[:-100])
    untouched = kept.stat().st_mtime_ns
    done, second = process()
    assert done.stdout.split() == ["0.2136", "0.0987", "found", "1"]
    assert "1 damaged file(s) deleted; compiling again" in done.stderr
    assert second.keys() == first.keys() and kept.stat().st_mtime_ns == untouched
    assert hashlib.sha256(next(iter(second.values())).read_bytes()).hexdigest() in next(iter(second.values())).name
