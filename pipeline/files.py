"""Small files, read whole."""

import json
from pathlib import Path

from models.errors import InputError


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
