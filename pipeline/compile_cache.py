"""XLA's compiled programs, kept on disk so that the next process need not compile them again. No TensorFlow.

TensorFlow keeps such a cache itself, but takes whatever lies there for good: a damaged file ends the run. So it is
shown only files that were checked, through links in a folder of the process's own:

    DIR/KEY/key.json        what the programs in this folder are for, in clear; used last at its time of change
    DIR/KEY/NAME.SHA256     a program: TensorFlow's file NAME, whose contents must have this hash
    DIR/KEY/run-XXXX/       of a running process, which holds a lock in it: links to the programs that were whole when
                            it started, and the files that TensorFlow adds; those are moved up, one rename each, when
                            the process ends or the next one starts

A name that holds its own hash is whole or recognised as not: there is no list that two processes could spoil for each
other. The folder of a process that was killed is deleted: what lies there was never hashed, and compiling again costs
less than running a torn program. Hashes find damage, not malice: a folder that others can write to is code of theirs.
"""

import atexit
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from models.errors import InputError
from pipeline import cli, machine, manifest

TOOLKIT = "stable-diffusion-tensorflow"  # our folder in the user's cache folder
LIMIT_BYTES = 2 << 30  # of all keys together; see `_trim`
FLAG = "--tf_xla_persistent_cache_directory"
HELP = "Folder for what XLA compiled, for the next run; default: in the user's cache folder; off: none."
# Distributions that bring the package tensorflow.
DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu", "tensorflow-macos")
# Variables that change what XLA makes of the same function.
VARIABLES = ("XLA_FLAGS", "TF_XLA_FLAGS", "NVIDIA_TF32_OVERRIDE", "CUDA_VISIBLE_DEVICES", "TF_NUM_INTRAOP_THREADS")
# Of an x86 CPU's flags those that a compiler uses; the rest also changes with the kernel.
INSTRUCTIONS = re.compile(r"s*sse\w*|avx\w*|amx\w*|fma4?|f16c|bmi\d|abm|adx|popcnt|movbe|v?aes|v?pclmulqdq|gfni|sha\w*")
ENTRY = re.compile(r"(?P<name>[\w.-]+\.pb)\.(?P<sha256>[0-9a-f]{64})")
KEY_FOLDER = re.compile(r"[0-9a-f]{20}")
KEY_FILE, WARM_FILE, LOCK_FILE = "key.json", "warm.json", ".lock"
RUNS = "run-"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
    """This process's view of one key."""

    folder: Path  # the cache
    place: Path  # the key's folder in it
    links: Path  # where TensorFlow reads and writes
    found: int  # programs that were there and whole
    locked: int | None  # file descriptor that holds the lock; None where nothing can be written


def folder(flag: str | None) -> Path | None:
    """The folder that --compile_cache means: default is in the user's cache folder; off, none or nothing is None."""
    if not flag or flag in ("off", "none"):
        return None
    if flag != "default":
        return Path(flag).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # Relative ones must be ignored (XDG Base Directory Specification).
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / TOOLKIT
    except RuntimeError as error:
        log.warning("compile cache: not used: no home folder to keep it in (%s); pass --compile_cache DIR", error)
        return None


def key(export_id: str, tf32: bool = False) -> dict:
    """What a compiled program depends on beside the function itself, in clear.

    Raises:
        InputError: TensorFlow's version is not known, because no distribution of it is installed.
    """
    information = machine.cpu_information()
    versions = [v for name in DISTRIBUTIONS if (v := _version(name))]
    if not versions:
        raise InputError(f"none of {', '.join(DISTRIBUTIONS)} is installed")
    x86 = [flag for flag in information.get("flags", "").split() if INSTRUCTIONS.fullmatch(flag)]
    facts = machine.describe()
    return {
        "tensorflow": versions[0],
        "cpu": facts["cpu"],
        "instructions": " ".join(sorted(x86 or information.get("Features", "").split())),
        # XLA divides loops among them when it compiles.
        "cores": facts["usable_cores"],
        "gpus": facts["gpus"],
        "tf32": tf32,
        "variables": {name: " ".join(os.environ[name].split()) for name in VARIABLES if os.environ.get(name)},
        "export_id": export_id,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def start(folder: Path | None, export_id: str, tf32: bool = False) -> Run | None:
    """Let TensorFlow, which must not be imported yet, find and keep its compiled programs in `folder`.

    What cannot be used is said in one notice, and the process compiles as without a cache.

    Args:
        folder: None does nothing.
        export_id: of the manifest. tf32: whether NVIDIA cards round factors, which is compiled in.

    Returns:
        None without a cache. What is compiled from now on is kept when the process ends.
    """
    if folder is None:
        return None
    if "tensorflow" in sys.modules:
        log.warning("compile cache %s: not used: it must be started before TensorFlow is imported", folder)
        return None
    if started():
        log.warning("TF_XLA_FLAGS names a cache of its own, so --compile_cache does nothing")
        return None
    try:
        run = open_run(folder, key(export_id, tf32))
        quoted = '"' + re.sub(r'(["\\])', r"\\\1", str(run.links)) + '"'
        cli.set_flags_before_tensorflow(
            None, f"{FLAG}={quoted}" + ("" if run.locked is not None else " --tf_xla_persistent_cache_read_only")
        )
    except InputError as error:
        log.warning("compile cache: not used: %s", error)
        return None
    except OSError as error:
        log.warning("compile cache %s: cannot be used (%s); compiling without it", folder, error.strerror)
        return None
    atexit.register(close, run, os.getpid())
    return run


def started() -> bool:
    """Whether this process was started with a cache, ours or TensorFlow's own flag."""
    return FLAG in os.environ.get("TF_XLA_FLAGS", "")


def open_run(folder: Path, wanted: dict) -> Run:
    """Check the programs of a key and link those that are whole; others are deleted, with one notice.

    Where nothing can be written, as in an image, its programs are used as they are and none is added.

    Raises:
        OSError: no folder there, and none can be made.
    """
    text = json.dumps(wanted, indent=1, sort_keys=True) + "\n"
    place = folder / hashlib.sha256(text.encode()).hexdigest()[:20]
    try:
        with lock(folder):
            place.mkdir(exist_ok=True)
            _sweep(place)
            links = Path(tempfile.mkdtemp(prefix=RUNS, dir=place))
            locked = _flock(links / LOCK_FILE, wait=False)
        # Also where there is one: the time of its change says when the key was used.
        (links / KEY_FILE).write_text(text, encoding="utf-8")
        os.replace(links / KEY_FILE, place / KEY_FILE)
    except OSError:
        if not folder.is_dir():
            raise
        if not place.is_dir():
            log.warning("compile cache %s: cannot be written and holds nothing for this; compiling without it", folder)
        locked, links = None, Path(tempfile.mkdtemp(prefix=f"{TOOLKIT}-"))
    whole, damaged = check(place)
    for name, path in whole.items():
        os.symlink(path, links / name)
    if damaged:
        for path in damaged:
            _delete(path)
        left = [path.name for path in damaged if path.exists()]
        fate = "ignored" if left else "deleted"
        log.warning("compile cache %s: %d damaged file(s) %s; compiling again", place, len(damaged), fate)
    return Run(folder, place, links, len(whole), locked)


def check(place: Path) -> tuple[dict[str, Path], list[Path]]:
    """The programs of a key's folder whose contents have the hash in their name, by TensorFlow's name; all else."""
    whole, damaged = {}, []
    for path in sorted(place.iterdir()) if place.is_dir() else []:
        if path.name in (KEY_FILE, WARM_FILE) or path.name.startswith(RUNS):
            continue
        match = ENTRY.fullmatch(path.name)
        try:
            if match and manifest.sha256(path) == match["sha256"]:
                whole[match["name"]] = path
            else:
                damaged.append(path)
        except FileNotFoundError:
            continue  # deleted by a process that found it damaged at the same time
        except OSError:
            damaged.append(path)
    return whole, damaged


def close(run: Run, process: int | None = None) -> None:
    """Keep what was compiled, drop what is too much, and give the folder of links back. Never raises OSError.

    Args:
        process: do nothing in another one: a fork inherits what is to be done at exit.
    """
    if process not in (None, os.getpid()):
        return
    try:
        if run.locked is None:
            shutil.rmtree(run.links, ignore_errors=True)
            return
        with lock(run.folder):
            if keep(run.place, run.links):
                _trim(run.folder, run.place, LIMIT_BYTES)
            shutil.rmtree(run.links, ignore_errors=True)
        os.close(run.locked)
    except OSError as error:
        log.warning("compile cache %s: what was compiled could not be kept (%s)", run.folder, error.strerror)


def keep(place: Path, links: Path) -> int:
    """Move what TensorFlow wrote into `links` up to `place`, with its hash, and link it; how many. Under the lock.

    TensorFlow renames a finished file to *.pb, so those are whole also while their process is running.
    """
    present = {match["name"] for path in place.iterdir() if (match := ENTRY.fullmatch(path.name))}
    moved = 0
    for path in sorted(links.glob("*.pb")):
        if path.is_symlink() or path.name in present:  # present: another process was first
            continue
        target = place / f"{path.name}.{manifest.sha256(path)}"
        os.rename(path, target)
        os.symlink(target, path)
        moved += 1
    return moved


def _sweep(place: Path) -> None:
    """Keep what processes that run have compiled so far, and delete the folders of those that are gone."""
    for links in place.glob(f"{RUNS}*"):
        try:
            descriptor = _flock(links / LOCK_FILE, wait=False)
        except BlockingIOError:
            keep(place, links)
            continue
        shutil.rmtree(links, ignore_errors=True)
        os.close(descriptor)


def _in_use(place: Path) -> bool:
    for links in place.glob(f"{RUNS}*"):
        try:
            os.close(_flock(links / LOCK_FILE, wait=False))
        except OSError:
            return True
    return False


def _trim(folder: Path, mine: Path, limit: int) -> None:
    """Delete whole keys, the one used longest ago first, until no more than `limit` bytes are left. Under the lock.

    Never a key in use. Only folders that are keys of ours, whatever else lies in `folder`.
    """
    keys = [p.parent for p in folder.glob(f"*/{KEY_FILE}") if KEY_FOLDER.fullmatch(p.parent.name)]
    sizes = {place: size_of(place) for place in keys}
    for place in sorted(keys, key=lambda place: (place / KEY_FILE).stat().st_mtime):
        if sum(sizes.values()) <= limit:
            return
        if place != mine and not _in_use(place):
            shutil.rmtree(place, ignore_errors=True)
            del sizes[place]


def size_of(place: Path) -> int:
    """Bytes of the programs of one key."""
    return sum(path.lstat().st_size for path in place.iterdir() if ENTRY.fullmatch(path.name))


@contextlib.contextmanager
def lock(folder: Path):
    """One process at a time moves and deletes; nothing is compiled meanwhile, so waiting is short."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _flock(folder / LOCK_FILE, wait=True)
    try:
        yield
    finally:
        os.close(descriptor)


def _flock(path: Path, wait: bool) -> int:
    """A file descriptor that holds the lock until it is closed. Raises BlockingIOError where another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
