"""How an export becomes visible: locked, written aside, synced, renamed, the manifest last. No TensorFlow."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from models.errors import InputError
from pipeline import manifest
from pipeline.manifest import Manifest


def check_path(output_dir: Path) -> None:
    """Raise InputError for a path that TensorFlow, which reads file names as patterns, could not load from."""
    found = sorted(set("*?[]\\") & set(str(output_dir)))
    if found:
        raise InputError(f"{output_dir}: TensorFlow cannot load from paths with {' '.join(found)}; name another folder")


@contextlib.contextmanager
def lock(output_dir: Path):
    """One exporter per export at a time."""
    with open(output_dir.parent / f".{output_dir.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{output_dir}: another export into it is running") from error
        yield


@contextlib.contextmanager
def workspace(output_dir: Path):
    """A hidden sibling of the export, on the same file system; removed however the export ends."""
    prefix = f".tmp-{output_dir.name}-"
    for left in output_dir.parent.iterdir():
        # Of a killed export: the lock says nobody works there. A process id and no more follows the prefix; another
        # export, whose name goes on where this one's ends, may well be running.
        if left.name.startswith(prefix) and left.name.removeprefix(prefix).isdecimal():
            shutil.rmtree(left)
    for part in (*manifest.PARTS, *manifest.OPTIONAL.values()):
        for orphan in (output_dir / part).glob("*"):
            if orphan.name.isdecimal() and int(orphan.name) not in manifest.list_versions(output_dir):
                shutil.rmtree(orphan)
    work = output_dir.parent / f"{prefix}{os.getpid()}"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def next_version(output_dir: Path, version: int | None) -> int:
    """The version to write; None takes the highest existing one + 1.

    Raises:
        InputError: the version exists or is below 1, or the folder is something other than an export that can be read.
    """
    existing = manifest.list_versions(output_dir)
    if version is None:
        version = max(existing, default=0) + 1
    if version < 1:
        raise InputError(f"--version {version}: must be 1 or more")
    if version in existing:
        raise InputError(f"--version {version}: {output_dir} already has it; leave the flag out to add the next one")
    if output_dir.exists() and not existing:
        raise InputError(f"{output_dir}: exists and is not an export; name another --output_dir")
    if existing:
        try:
            manifest.read(output_dir)
        except InputError as error:
            # Now, not after minutes of work: a new version must fit what is there.
            why = str(error).removesuffix("; export again")
            raise InputError(f"{why}; delete {output_dir} or name another --output_dir") from error
    return version


def check_space(folder: Path, weight_bytes: int) -> None:
    """Raise InputError where the file system of `folder`, a part in a workspace, has no room for its weights."""
    needed = int(1.02 * weight_bytes) + (64 << 20)
    free = shutil.disk_usage(folder.parents[1]).free
    if free < needed:
        raise InputError(f"{folder.parents[1].parent}: {needed >> 20} MiB needed for this part, {free >> 20} MiB free")


def publish(work: Path, output_dir: Path, result: Manifest) -> None:
    """Make a finished workspace visible; the manifest comes last, and readers know only versions that have one."""
    _sync(work)
    if not output_dir.exists():
        os.rename(work, output_dir)
    else:
        _check_same_contract(output_dir, work, result)
        for part in reversed(result.signatures):
            os.rename(work / part / str(result.version), output_dir / part / str(result.version))
            _sync_folder(output_dir / part)
        name = f"{result.version}.json"
        os.rename(work / "manifests" / name, output_dir / "manifests" / name)
        _sync_folder(output_dir / "manifests")
    _sync_folder(output_dir.parent)


def _check_same_contract(output_dir: Path, work: Path, result: Manifest) -> None:
    """A server may run parts of two versions for a moment, so versions of one export must fit each other."""
    newest = manifest.read(output_dir)
    old_tokenizer, new_tokenizer = (
        {name: digest for name, digest in m.files.items() if name.startswith("tokenizer/")} for m in (newest, result)
    )
    for what, same in (
        ("signatures or sizes", newest.signatures == result.signatures),
        ("family", newest.config.family == result.config.family),
        ("tokenizer", old_tokenizer == new_tokenizer),
    ):
        if not same:
            raise InputError(
                f"{output_dir}: version {newest.version} has other {what}; versions of one export must fit each other, "
                "so name another --output_dir"
            )


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
