"""How an export becomes visible: locked, written aside, synced, renamed, the manifest last. No TensorFlow.

A later version is announced before its first rename: its manifest lies in `manifests/VERSION.json.pending`, which no
reader knows, until the last rename makes it `VERSION.json`. So what an interrupted export left is known by name: the
folders of a pending version, and nothing else, are removed by the next one.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from pathlib import Path

from models.errors import InputError
from models.export_spec import ExportSpec
from pipeline import manifest
from pipeline.manifest import Manifest

PENDING = ".json.pending"
# What file systems without locks, or without fsync of folders, answer (exFAT, FUSE, network and cloud drives).
NOT_SUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK, errno.EPERM, errno.EACCES, errno.EBADF)
# Fields of an ExportSpec -> the flags that set them.
FLAGS = {"height": "--height", "width": "--width", "more_sizes": "--sizes"}

log = logging.getLogger(__name__)


def check_path(output_dir: Path) -> None:
    """Raise InputError for a path that TensorFlow, which reads file names as patterns, could not load from."""
    special = sorted(set("*?[]\\") & set(str(output_dir)))
    if special:
        raise InputError(
            f"{output_dir}: TensorFlow cannot load from paths with {' '.join(special)}; name another folder"
        )


@contextlib.contextmanager
def lock(output_dir: Path):
    """Hold the only export into a folder; where the file system knows no locks, go on with a warning."""
    with open(output_dir.parent / f".{output_dir.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{output_dir}: another export into it is running") from error
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            log.warning("%s: this file system has no locks; run one export into it at a time", output_dir.parent)
        yield


@contextlib.contextmanager
def workspace(output_dir: Path):
    """Make a hidden sibling of the export, on the same file system; remove it however the export ends."""
    prefix = f".tmp-{output_dir.name}-"
    for left in output_dir.parent.iterdir():
        # Of a killed export: the lock says nobody works there. A process id and no more follows the prefix; another
        # export, whose name goes on where this one's ends, may well be running.
        if left.name.startswith(prefix) and left.name.removeprefix(prefix).isdecimal():
            shutil.rmtree(left)
    work = output_dir.parent / f"{prefix}{os.getpid()}"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def remove_interrupted(output_dir: Path) -> None:
    """Remove the folders of versions that an interrupted export announced and did not finish; touch nothing else."""
    if not manifest.list_versions(output_dir):
        return  # no export of ours: what lies there is somebody's
    for pending in (output_dir / "manifests").glob(f"*{PENDING}"):
        version = pending.name.removesuffix(PENDING)
        if not version.isdecimal() or int(version) in manifest.list_versions(output_dir):
            continue
        for part in (*manifest.PARTS, *manifest.OPTIONAL.values()):
            if (output_dir / part / version).is_dir():
                shutil.rmtree(output_dir / part / version)
        pending.unlink()


def next_version(output_dir: Path, version: int | None) -> int:
    """Choose the version to write; None takes the highest number in use + 1.

    Raises:
        InputError: the version exists or is below 1, or the folder is something other than an export that can be read.
    """
    finished = manifest.list_versions(output_dir)
    if output_dir.exists() and not finished:
        raise InputError(f"{output_dir}: exists and is not an export; name another --output_dir")
    parts = [output_dir / part for part in (*manifest.PARTS, *manifest.OPTIONAL.values())]
    taken = {int(path.name) for part in parts for path in part.glob("*") if path.name.isdecimal()} | set(finished)
    if version is None:
        version = max(taken, default=0) + 1
    if version < 1:
        raise InputError(f"--version {version}: must be 1 or more")
    if version in taken:
        raise InputError(f"--version {version}: {output_dir} already has it; leave the flag out to add the next one")
    return version


def check_fits(output_dir: Path, spec: ExportSpec, family: str, compiled: set[str], image_encoder: bool) -> None:
    """Refuse, before any work, what cannot be another version of an existing export: versions differ in weights only.

    Args:
        compiled: parts whose compiled variants are stored too.

    Raises:
        InputError: the export cannot be read, or names the first flag in which the two differ.
    """
    if not output_dir.exists():
        return
    try:
        newest = manifest.read(output_dir)
    except InputError as error:
        why = str(error).removesuffix("; export again")
        raise InputError(f"{why}; delete {output_dir} or name another --output_dir") from error
    old = {FLAGS.get(name, f"--{name}"): value for name, value in vars(newest.spec).items()}
    new = {FLAGS.get(name, f"--{name}"): value for name, value in vars(spec).items()}
    old["--jit_compile, --jit_components"] = sorted({name.partition("/")[0] for name in newest.xla_signatures})
    new["--jit_compile, --jit_components"] = sorted(compiled)
    old["--image_encoder"], new["--image_encoder"] = "image_encoder" in newest.signatures, image_encoder
    old["family"], new["family"] = newest.config.family, family
    for what, value in new.items():
        if value != old[what]:
            raise _other(output_dir, newest, what, f"{_in_words(old[what])}, not {_in_words(value)}")


def _in_words(value) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _other(output_dir: Path, newest: Manifest, what: str, values: str) -> InputError:
    return InputError(
        f"{output_dir}: version {newest.version} has another {what} ({values}); versions of one export differ in "
        "weights only, so name another --output_dir"
    )


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
        _check_same_contract(output_dir, result)
        folder, pending = output_dir / "manifests", f"{result.version}{PENDING}"
        os.rename(work / "manifests" / f"{result.version}.json", folder / pending)
        _sync_folder(folder)
        for part in reversed(result.signatures):
            os.rename(work / part / str(result.version), output_dir / part / str(result.version))
            _sync_folder(output_dir / part)
        os.rename(folder / pending, folder / f"{result.version}.json")
        _sync_folder(folder)
    _sync_folder(output_dir.parent)


def _check_same_contract(output_dir: Path, result: Manifest) -> None:
    """A server may run parts of two versions for a moment, and all versions share the tokenizers."""
    newest = manifest.read(output_dir)
    if newest.signatures != result.signatures:
        raise _other(output_dir, newest, "set of signatures", f"{len(newest.signatures)} parts")
    tokenizers = [
        {name: digest for name, digest in each.files.items() if name.startswith(manifest.TOKENIZERS)}
        for each in (newest, result)
    ]
    changed = sorted({name for name, _ in tokenizers[0].items() ^ tokenizers[1].items()})
    if changed:
        raise _other(output_dir, newest, "tokenizer", ", ".join(changed))


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)
