"""Checkpoints on the Hugging Face Hub: `org/name[@revision]`, and of it only the files that are asked for.

Files are kept in the Hub's own cache (HF_HOME), where other tools find them too; a second run fetches nothing.
"""

import contextlib
import dataclasses
import errno
import glob
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from models.errors import InputError

_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
FIRST_FILES = ("model_index.json", "config.json")  # say what a repository is
_FILE_SUFFIXES = (".safetensors", ".ckpt", ".bin", ".pt", ".pth", ".h5", ".json")


@dataclasses.dataclass(frozen=True)
class Repository:
    """One commit of a model on the Hub."""

    id: str  # org/name
    revision: str  # branch, tag or commit as asked for; knows its commit
    commit: str
    files: dict[str, int]  # path -> bytes
    endpoint: str | None  # None: HF_ENDPOINT or the public Hub
    cache_dir: Path


def is_id(option: str) -> bool:
    """Whether a command line's text can mean org/name or org/name@revision."""
    return re.fullmatch(rf"{_NAME}(@[\w./-]+)?", option) is not None and not option.lower().endswith(_FILE_SUFFIXES)


def find(option: str, endpoint: str | None = None, cache_dir: Path | None = None) -> Repository:
    """Look `org/name[@revision]` up: what it holds, at which commit. From the cache where the Hub is out of reach.

    Args:
        endpoint: of another Hub than HF_ENDPOINT or the public one.
        cache_dir: of files that are there already. Default: the Hub's own, HF_HUB_CACHE.

    Raises:
        InputError: no such model or revision, one that needs a login, or no way to the Hub and nothing in the cache.
    """
    name, _, revision = option.partition("@")
    cache_dir = Path(cache_dir or constants.HF_HUB_CACHE)
    with _clear_errors(option, cache_dir):
        api = huggingface_hub.HfApi(endpoint=endpoint)
        found = api.resolve_revision(name, revision=revision or None, cache_dir=cache_dir)
        repository = Repository(name, found, found.resolved, {}, endpoint, cache_dir)
        folder = Path(_download(repository, list(FIRST_FILES)))
        try:
            listing = huggingface_hub.get_cached_repo_tree(name, revision=found, cache_dir=cache_dir)
            files = {file.path: file.size for file in listing}
        except errors.CachedRepoTreeNotFoundError:
            # Offline, and another tool or version filled the cache: what is there is all we know.
            present = (path for path in folder.rglob("*") if path.is_file())
            files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in present}
    return dataclasses.replace(repository, files=files)


def fetch(repository: Repository, files: Collection[str]) -> Path:
    """Fetch these files, with progress; a cut connection is taken up where it was cut. Those present stay.

    Returns:
        The folder that holds them, laid out as the repository is.

    Raises:
        InputError: not enough room on the disk, or as `find`.
    """
    folder = repository.cache_dir / f"models--{repository.id.replace('/', '--')}" / "snapshots" / repository.commit
    missing = {name: repository.files[name] for name in files if not (folder / name).exists()}
    if not missing:
        return folder
    size, free = sum(missing.values()), shutil.disk_usage(_existing(repository.cache_dir)).free
    if size > free:
        raise InputError(
            f"{repository.id}: needs {_gigabytes(size)} in {repository.cache_dir}, {_gigabytes(free)} are free; set "
            "HF_HOME to a folder on a larger disk"
        )
    print(f"{repository.id}@{repository.commit[:12]}: fetching {len(missing)} files, {_gigabytes(size)}", flush=True)
    with _clear_errors(f"{repository.id}@{repository.revision}", repository.cache_dir, missing):
        return Path(_download(repository, [glob.escape(name) for name in missing]))


def _download(repository: Repository, patterns: list[str]) -> str:
    return huggingface_hub.snapshot_download(
        repository.id,
        revision=repository.revision,
        allow_patterns=patterns,
        cache_dir=repository.cache_dir,
        endpoint=repository.endpoint,
    )


@contextlib.contextmanager
def _clear_errors(option: str, cache_dir: Path, files: Collection[str] = ()) -> Iterator[None]:
    """What goes wrong between here and the Hub as one line that says what to do."""
    name, _, revision = option.partition("@")
    # Derived classes go first: a gated model is a kind of missing one.
    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name}: its authors ask for consent: accept the terms on its page on the Hub, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{name}: has no revision {revision!r}; its branches and tags are on its page") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{option}: no such file or folder here, and no model {name} on the Hub; if it is private, log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise InputError(f"{option}: no such file or folder here, and no name for a model on the Hub") from error
    except OSError as error:
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
            raise InputError(
                f"{name}: the Hub does not know your token; run `hf auth login` or correct HF_TOKEN"
            ) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{cache_dir}: no space left; set HF_HOME to a folder on a larger disk") from error
        if error.errno is not None:
            raise InputError(
                f"{cache_dir}: cannot be written ({error.strerror}); set HF_HOME to another folder"
            ) from error
        raise _unreachable(option, cache_dir, error, files) from error
    except (errors.RevisionResolutionError, errors.HTTPError) as error:
        raise _unreachable(option, cache_dir, error, files) from error


def _unreachable(option: str, cache_dir: Path, error: Exception, files: Collection[str]) -> InputError:
    name, _, revision = option.partition("@")
    if constants.is_offline_mode():
        reason, way = "HF_HUB_OFFLINE forbids to ask the Hub", "unset HF_HUB_OFFLINE"
    else:
        cause = error.__cause__ or error
        first = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
        reason, way = f"the Hub cannot be asked ({first[:200]})", "try again when the network is back"
    lacking = f"{len(files)} of its files are not" if files else "it is not"
    revision = f" --revision {revision}" if revision else ""
    return InputError(
        f"{option}: no such file or folder here, {lacking} in the Hub's cache ({cache_dir}), and {reason}; {way}, or "
        f"where there is one run `hf download {name}{revision} --local-dir FOLDER` and give FOLDER instead"
    )


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
