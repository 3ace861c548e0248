"""KerasCV's weight files: HDF5 as Keras 2 wrote it, whose weights have an order but no lasting names.

What a file holds is seen from how many weights it has and from their shapes, never from its name.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from models.errors import InputError
from pipeline.checkpoints import keymaps
from pipeline.checkpoints.loader import Tensor, some

COMPONENTS = {"text_encoder": "text encoder", "unet": "diffusion model", "vae": "decoder", "vae_encoder": "encoder"}
KINDS = {"kernel", "bias", "gamma", "beta", "embeddings"}
FAMILIES = ("sd1", "sd2")


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight by its place in a file."""

    name: str  # LAYER/WEIGHT, as the process that wrote the file happened to number them
    tensor: Tensor


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """KerasCV's files of one model."""

    family: str
    paths: dict[str, Path]  # component of COMPONENTS -> file
    tensors: dict[str, dict[str, Tensor]]  # component -> name in keymaps.KERASCV_NAMES -> tensor


def read_h5(path: Path) -> list[Weight]:
    """The weights of a legacy Keras .h5 file in the order of its `layer_names` and `weight_names`; nothing is read yet.

    Raises:
        InputError: no HDF5 file, truncated, or not in this form.
    """
    try:
        with h5py.File(path, "r") as file:
            names = [f"{layer}/{weight}" for layer, weight in _names(file, path)]
            return [Weight(name, _tensor(file, name, path)) for name in names]
    except OSError as error:
        first = str(error).splitlines()[0]
        raise InputError(f"{path}: not a usable HDF5 file; it may be truncated ({first[:200]})") from error


def _names(file: h5py.File, path: Path) -> list[tuple[str, str]]:
    """(layer, weight) of every weight, in order."""
    # Keras' models of several parts keep their weights one level down.
    group = file["model_weights"] if "model_weights" in file else file
    layers = _attribute(group, "layer_names")
    if not layers:
        raise InputError(
            f"{path}: has no layer_names: expected the HDF5 files that KerasCV publishes (Keras 2's save_weights), not "
            "Keras 3's .weights.h5; write it with keras.src.legacy.saving.legacy_h5_format"
        )
    found, prefix = [], "" if group is file else "model_weights/"
    for layer in layers:
        if not isinstance(group.get(layer), h5py.Group):
            raise InputError(f"{path}: names the layer {layer!r}, which it does not hold; it may be truncated")
        found += [(prefix + layer, weight) for weight in _attribute(group[layer], "weight_names")]
    return found


def _attribute(group: h5py.Group, name: str) -> list[str]:
    """A list of names; long ones are in pieces, name0, name1, ..."""
    pieces = [name] if name in group.attrs else []
    while not pieces or pieces[0] != name:
        piece = f"{name}{len(pieces)}"
        if piece not in group.attrs:
            break
        pieces.append(piece)
    return [n.decode() if isinstance(n, bytes) else str(n) for piece in pieces for n in group.attrs[piece]]


def _tensor(file: h5py.File, name: str, path: Path) -> Tensor:
    try:
        dataset = file[name]
    except KeyError:
        dataset = None
    # Data elsewhere than in this file is none of its weights.
    if not isinstance(dataset, h5py.Dataset) or dataset.file != file or dataset.is_virtual or dataset.external:
        raise InputError(f"{path}: names the weight {name!r}, which it does not hold; it may be truncated")

    def read() -> np.ndarray:
        try:
            with h5py.File(path, "r") as again:
                return again[name][()]
        except (OSError, KeyError) as error:
            raise InputError(f"{path}: ended or changed while {name!r} was read") from error

    return Tensor(tuple(dataset.shape), dataset.dtype, read)


def identify(weights: Sequence[Weight]) -> tuple[str, tuple[str, ...]] | None:
    """(component, families it belongs to) of a file's weights; None: not one of KerasCV's networks."""
    for family in FAMILIES:
        if len(weights) == len(keymaps.kerascv_names("text_encoder", family)):
            return "text_encoder", (family,)
    for component in ("vae", "vae_encoder"):
        if len(weights) == len(keymaps.kerascv_names(component, FAMILIES[0])):
            return component, FAMILIES
    names = keymaps.kerascv_names("unet", "sd1")
    if len(weights) != len(names):
        return None
    # Stable Diffusion 1.x goes into its transformers by a 1x1 convolution, 2.x by a matrix.
    axes = len(weights[names.index("down_blocks.0.attentions.0.proj_in.kernel")].tensor.shape)
    return "unet", (("sd1",) if axes == 4 else ("sd2",))


def named(weights: Sequence[Weight], component: str, family: str, where: str) -> dict[str, Tensor]:
    """Weights under the names of their places.

    Raises:
        InputError: a kernel where a bias belongs and so on: another order. Shapes are checked on loading.
    """
    names = keymaps.kerascv_names(component, family)
    wrong = []
    for number, (name, weight) in enumerate(zip(names, weights, strict=True)):
        kind = weight.name.rpartition("/")[2].partition(":")[0]
        if kind in KINDS and kind != name.rpartition(".")[2]:
            wrong.append(f"number {number}, {weight.name}, where {name} is expected")
    if wrong:
        raise InputError(f"{where}: {len(wrong)} weights out of KerasCV's order: {some(wrong, 3)}")
    return {name: weight.tensor for name, weight in zip(names, weights, strict=True)}


def find(path: Path) -> Checkpoint:
    """KerasCV's files of one model in a folder; or, of a folder with several models, those that go with one file.

    Raises:
        InputError: a part is missing or there twice, or two models are there and none is chosen.
    """
    candidates = sorted(path.glob("*.h5")) if path.is_dir() else sorted({path, *path.parent.glob("*.h5")})
    found, weights, others = [], {}, []
    for file in candidates:
        try:
            weights[file] = read_h5(file)
            kind = identify(weights[file])
        except InputError:
            if file == path:
                raise
            kind = None
        if kind:
            found.append((file, *kind))
        elif file == path:
            raise InputError(f"{path}: {len(weights[file])} weights: none of KerasCV 0.9's Stable Diffusion networks")
        else:
            others.append(file.name)
    family = _family(path, found)
    paths = {}
    for component, title in COMPONENTS.items():
        fitting = [file for file, kind, families in found if kind == component and family in families]
        fitting = [path] if path in fitting else fitting
        if len(fitting) > 1:
            raise InputError(f"{path}: two files hold a {title}: {fitting[0].name} and {fitting[1].name}; keep one")
        if fitting:
            paths[component] = fitting[0]
        elif component != "vae_encoder":
            unknown = f"; not KerasCV's: {', '.join(others)}" if others else ""
            held = ", ".join(file.name for file, _, _ in found)
            raise InputError(f"{path}: no .h5 file holds the {title} of {family}; found {held or 'none'}{unknown}")
    tensors = {c: named(weights[file], c, family, str(file)) for c, file in paths.items()}
    return Checkpoint(family, paths, tensors)


def _family(path: Path, found: list[tuple[Path, str, tuple[str, ...]]]) -> str:
    """The family of the file that was named, or the one that there are files of."""
    own = [families for file, _, families in found if file == path]
    chosen = {family for families in own or [f for _, _, f in found] if len(families) == 1 for family in families}
    if not chosen:
        chosen = {family for _, _, families in found if len(families) == 1 for family in families}
    if len(chosen) > 1:
        files = ", ".join(file.name for file, component, _ in found if component in ("text_encoder", "unet"))
        raise InputError(f"{path}: holds two models ({files}); give one of these files as --checkpoint")
    return chosen.pop() if chosen else FAMILIES[0]
