"""Small files, read whole, and places that must be writable."""

import json
import tempfile
from pathlib import Path

from models.errors import InputError


def check_folder(flag: str, folder: Path) -> None:
    """Make a folder and try to write into it. Raises InputError when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        raise InputError(f"{flag} {folder}: cannot be written ({error.strerror or type(error).__name__})") from error


def check_file(flag: str, path: Path) -> None:
    """Try whether a file can be written, as far as that is possible without changing it. Raises InputError."""
    if path.is_dir():
        raise InputError(f"{flag} {path}: cannot be written (Is a directory)")
    check_folder(flag, path.absolute().parent)
    try:
        if path.exists():
            path.open("ab").close()
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written ({error.strerror or type(error).__name__})") from error


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises InputError when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: expected a JSON file, found none ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected a JSON file, found something else ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
