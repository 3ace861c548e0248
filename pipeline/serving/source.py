"""Where the versions of served models come from: an export, or folders as TF Serving reads them. No TensorFlow."""

import dataclasses
from pathlib import Path

from models.errors import InputError
from pipeline import manifest


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which of the versions on disk are served: the newest `latest` of them, all (`latest` None), or those named."""

    latest: int | None = 1
    specific: tuple[int, ...] = ()

    def choose(self, found: dict[int, Path] | list[int]) -> list[int]:
        """Of the versions found, those to serve."""
        if self.specific:
            return [number for number in self.specific if number in found]
        newest = sorted(found, reverse=True)
        return newest if self.latest is None else newest[: self.latest]


@dataclasses.dataclass(frozen=True)
class Source:
    """Models whose versions change together.

    Attributes:
        base_paths: (name of a model, folder of its versions).
        export: the export they are the parts of; None: one model, any SavedModel.
        labels: (name of a model, label, version).
    """

    base_paths: tuple[tuple[str, Path], ...]
    export: Path | None = None
    policy: Policy = Policy()
    labels: tuple[tuple[str, str, int], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the models."""
        return tuple(name for name, _ in self.base_paths)

    @property
    def where(self) -> Path:
        """The folder to name in messages."""
        return self.export or self.base_paths[0][1]

    def list_versions(self) -> list[int] | None:
        """Versions on disk: of an export those with a manifest, else every child with a number for a name.

        None: the folder cannot be read, which says nothing about its versions.
        """
        if self.export is not None:
            return manifest.list_versions(self.export) if self.export.is_dir() else None
        return sorted(found) if (found := _numbered(self.base_paths[0][1])) is not None else None

    def path(self, name: str, number: int) -> Path:
        """Folder of one version. Raises InputError when it is gone."""
        base = dict(self.base_paths)[name]
        found = (_numbered(base) or {}).get(number)
        if found is None:
            raise InputError(f"{base}: version {number} is gone")
        return found


def from_export(folder: Path, policy: Policy) -> Source:
    """The parts of an export as models. Raises InputError when it is none."""
    contract = manifest.read(folder)
    return Source(tuple((part, folder / part) for part in contract.signatures), folder, policy)


def _numbered(base: Path) -> dict[int, Path] | None:
    """Children with a decimal number for a name; of two with the same number, one."""
    try:
        children = sorted(child for child in base.iterdir() if child.is_dir())
    except OSError:
        return None
    return {int(c.name): c for c in children if c.name.isascii() and c.name.isdecimal() and int(c.name) < 2**63}
