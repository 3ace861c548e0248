"""From what --checkpoint says to files on this machine: a path is itself, `org/name[@revision]` is fetched."""

from pathlib import Path

from models.errors import InputError
from pipeline.checkpoints import diffusers_folder, hub
from pipeline.checkpoints.weight_files import WEIGHT_STEMS, folder_names, small_files, weight_files
from pipeline.files import read_json


def checkpoint(option: str, variant: str | None = None, pickles: bool = False) -> tuple[Path, str]:
    """The folder or file of a checkpoint, and what an export of it is called.

    A path that exists goes first; text that can only be a path is left to those who read paths.

    Args:
        option: path, or org/name[@revision] on the Hub.
        variant: of weight files to prefer, e.g. "fp16".
        pickles: also take weights in pickles, where there are no others.

    Raises:
        InputError: neither here nor on the Hub, or nothing that can be exported.
    """
    path = Path(option)
    if path.exists() or not hub.is_id(option):
        return path, path.resolve().stem if path.is_file() else path.resolve().name
    return from_hub(option, variant, pickles), option.partition("@")[0].rpartition("/")[2]


def from_hub(
    option: str,
    variant: str | None = None,
    pickles: bool = False,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """Fetch a checkpoint in diffusers' layout: first what says what it is, then one file of weights per part.

    Raises:
        InputError: as `hub.find`, `hub.fetch`, and of what is there, before its weights are fetched.
    """
    repository = hub.find(option, endpoint, cache_dir)
    if "model_index.json" not in repository.files:
        raise InputError(
            f"{option}: not a checkpoint in diffusers' layout: has no model_index.json; if it holds a single file, run "
            f"`hf download {repository.id} FILE --local-dir FOLDER` and give --checkpoint FOLDER/FILE"
        )
    index = read_json(hub.fetch(repository, ["model_index.json"]) / "model_index.json")
    components = {name for name, value in index.items() if isinstance(value, list) and any(value)}
    folder = hub.fetch(repository, small_files(repository.files, components - diffusers_folder.IGNORED_COMPONENTS))
    diffusers_folder.read_config(folder)
    wanted = []
    for component in sorted(components & WEIGHT_STEMS.keys()):
        names = folder_names(repository.files, component)
        chosen = weight_files(names, WEIGHT_STEMS[component], variant, pickles)
        if not chosen:
            raise InputError(
                f"{option}: {component}/: no safetensors weights among {', '.join(sorted(names)) or 'nothing'}; "
                f"expected {WEIGHT_STEMS[component]}.safetensors"
            )
        wanted += [f"{component}/{name}" for name in chosen]
    return hub.fetch(repository, wanted)
