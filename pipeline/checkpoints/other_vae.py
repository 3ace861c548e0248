"""Another autoencoder than the checkpoint's own: one that is safe in float16, or one that draws better eyes."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from models.config import VAEConfig
from models.errors import InputError
from pipeline import manifest
from pipeline.checkpoints import diffusers_config, diffusers_folder, hub, single_file
from pipeline.checkpoints.loader import Tensor, read_file
from pipeline.checkpoints.weight_files import WEIGHT_STEMS, weight_files
from pipeline.manifest import ReplacedVae

Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class OtherVae:
    """An autoencoder and its weights, under diffusers' names."""

    config: VAEConfig
    tensors: Tensors
    where: str  # in messages
    used: ReplacedVae


def find(
    option: str | None,
    own: VAEConfig,
    variant: str | None = None,
    read_pickle: Callable[[Path], Tensors] | None = None,
) -> OtherVae | None:
    """The autoencoder that --vae names: a folder in diffusers' layout, a file, or org/name on the Hub; None: none.

    Args:
        option: a VAE's folder, a whole checkpoint's, a file in diffusers' or the original naming, or a name on the Hub.
        own: the checkpoint's; a single file does not say how its latents are scaled, nor whether it needs float32.
        variant: of weight files to prefer.
        read_pickle: reads a pickle; None refuses it.

    Raises:
        InputError: no autoencoder there, or one for other latents.
    """
    if not option:
        return None
    path = Path(option)
    if not path.exists() and hub.is_id(option):
        path, name = _from_hub(option, variant, read_pickle is not None), option.partition("@")[0].rpartition("/")[2]
    else:
        name = path.resolve().stem if path.is_file() else path.resolve().name
    if path.is_file():
        config, tensors, file = *_single_file(path, own, read_pickle), path
    elif path.is_dir():
        # A whole checkpoint holds its VAE in a folder.
        folder = path / "vae" if (path / "model_index.json").exists() else path
        config = diffusers_config.vae(folder / "config.json", own.scaling_factor)
        tensors, file = diffusers_folder.read_folder(folder, WEIGHT_STEMS["vae"], variant, read_pickle)
        path = folder
    else:
        raise InputError(
            f"--vae {option}: no such folder or file; expected a VAE's folder in diffusers' layout or file"
        )
    for what in ("scaling_factor", "latent_channels", "downscale"):
        found, wanted = getattr(config, what), getattr(own, what)
        if found != wanted:
            raise InputError(
                f"--vae {option}: made for other latents than the checkpoint's: its {what} is {found:g}, the "
                f"checkpoint's is {wanted:g}; take a VAE of the same family"
            )
    return OtherVae(config, tensors, str(path), ReplacedVae(name, manifest.sha256(file)))


def _single_file(path: Path, own: VAEConfig, read_pickle) -> tuple[VAEConfig, Tensors]:
    """Config and tensors of a file in either naming."""
    tensors, _ = read_file(path, read_pickle)
    if not any(re.search(r"(?:en|de)coder\.(?:up|down)\.\d", name) for name in tensors):
        # diffusers' naming; that its sizes are the checkpoint's is seen when it is loaded.
        return own, tensors
    tensors, config = single_file.read_vae(tensors, str(path))
    return dataclasses.replace(config, **_unsaid(own)), tensors


def _unsaid(own: VAEConfig) -> dict:
    """What no single file says."""
    return {name: getattr(own, name) for name in ("scaling_factor", "force_upcast", "norm_eps", "norm_num_groups")}


def _from_hub(option: str, variant: str | None, pickles: bool) -> Path:
    """A VAE's own repository, fetched, or the VAE's part of a checkpoint's."""
    repository = hub.find(option)
    prefix = "vae/" if "model_index.json" in repository.files else ""
    names = [name.removeprefix(prefix) for name in repository.files if name.startswith(prefix)]
    chosen = weight_files(names, WEIGHT_STEMS["vae"], variant, pickles)
    if not chosen or "config.json" not in names:
        raise InputError(
            f"--vae {option}: expected config.json and {WEIGHT_STEMS['vae']}.safetensors, found no such files"
        )
    return hub.fetch(repository, [f"{prefix}{name}" for name in ("config.json", *chosen)]) / prefix
