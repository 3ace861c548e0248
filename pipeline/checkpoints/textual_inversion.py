"""Textual inversion (Gal et al. 2022, arXiv:2208.01618): learned vectors as new rows of the token embedding."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from models.errors import InputError
from pipeline.checkpoints.loader import Tensor, read_safetensors, some, split_option

MOST_VECTORS = 75  # a prompt has no more places
TABLE = "embeddings.token_embedding.weight"

# Names under which trainers store the vectors when the token is not the name: the file's name is the token then.
NAMELESS = ("emb_params", "*", "string_to_param.*")
# Names of vectors for two text encoders, as Stable Diffusion XL has.
TWO_ENCODERS = (
    {"clip_l": "text_encoder", "clip_g": "text_encoder_2"},
    {"text_encoders_0": "text_encoder", "text_encoders_1": "text_encoder_2"},
)


@dataclasses.dataclass(frozen=True)
class Embedding:
    """One token and the vectors it stands for."""

    path: Path
    token: str
    vectors: Mapping[str, Tensor]  # component -> [W] or [k, W]

    @property
    def count(self) -> int:
        """k, the number of ids that the token takes in a prompt."""
        return _count(next(iter(self.vectors.values())))


def parse(option: str) -> Embedding:
    """An embedding from FILE or FILE:TOKEN. Raises InputError for what `read` does not take."""
    path, token = split_option(option)
    return read(path, token)


def read(path: Path, token: str | None = None) -> Embedding:
    """An embedding file, its vectors unread.

    Args:
        token: what prompts call it; None takes the name inside the file, or the file's own where it has none.

    Raises:
        InputError: not a .safetensors file; or not one tensor [W] or [k, W], or two of as many vectors under the names
            of two text encoders.
    """
    tensors = read_safetensors(path)
    components = next((names for names in TWO_ENCODERS if names.keys() == tensors.keys()), None)
    if components is None and len(tensors) != 1:
        raise InputError(
            f"{path}: expected one tensor, named by its token, or clip_l and clip_g, found {len(tensors)}: "
            f"{some(list(tensors), 9)}"
        )
    for name, vectors in tensors.items():
        if len(vectors.shape) not in (1, 2) or 0 in vectors.shape or vectors.dtype.kind not in "fV":
            raise InputError(
                f"{path}: expected vectors [W] or [k, W], found {name!r}, {vectors.dtype} {list(vectors.shape)}"
            )
    counts = {name: _count(vectors) for name, vectors in tensors.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"{path}: expected as many vectors for one text encoder as for the other, found {counts}")
    own = path.stem if components or next(iter(tensors)) in NAMELESS else next(iter(tensors))
    vectors = {(components or {}).get(name, "text_encoder"): tensor for name, tensor in tensors.items()}
    embedding = Embedding(path, own if token is None else token, vectors)
    if embedding.count > MOST_VECTORS:
        raise InputError(f"{path}: {embedding.count} vectors, but a prompt has places for {MOST_VECTORS}")
    return embedding


def extend(
    components: Mapping[str, Mapping[str, Tensor]], embeddings: Sequence[Embedding]
) -> dict[str, Mapping[str, Tensor]]:
    """A model's tensors with the vectors as new rows of the token embedding of every text encoder, in order.

    Args:
        components: "text_encoder" and others -> diffusers' name, with or without "text_model." -> tensor.

    Returns:
        The same names; the tables [V, W] are float32 [V + all k, W] now.

    Raises:
        InputError: vectors for another number of text encoders, or of another width. Reading raises it for NaN.
    """
    encoders = [component for component in components if component.startswith("text_encoder")]
    for embedding in embeddings:
        if sorted(embedding.vectors) != sorted(encoders):
            raise InputError(
                f"{embedding.path}: holds vectors for {len(embedding.vectors)} text encoder(s), this model has "
                f"{len(encoders)}; it was made for another family"
            )
    return dict(components) | {c: _extended(components[c], c, embeddings) for c in encoders}


def _extended(tensors: Mapping[str, Tensor], component: str, embeddings: Sequence[Embedding]) -> dict[str, Tensor]:
    name = next((name for name in tensors if name.removeprefix("text_model.") == TABLE), None)
    if name is None:
        raise InputError(f"the text encoder has no {TABLE}, so no embedding can be added to it")
    table = tensors[name]
    for embedding in embeddings:
        found, expected = embedding.vectors[component].shape[-1], table.shape[-1]
        if found != expected:
            raise InputError(
                f"{embedding.path}: expected vectors of {expected} numbers, found {found}; made for another family"
            )

    def read() -> np.ndarray:
        rows = [_rows(embedding.path, embedding.vectors[component]) for embedding in embeddings]
        return np.concatenate([table.read().astype(np.float32), *rows])

    rows = table.shape[0] + sum(embedding.count for embedding in embeddings)
    return {**tensors, name: Tensor((rows, table.shape[1]), np.dtype(np.float32), read)}


def _count(vectors: Tensor) -> int:
    return vectors.shape[0] if len(vectors.shape) == 2 else 1


def _rows(path: Path, vectors: Tensor) -> np.ndarray:
    rows = vectors.read().astype(np.float32).reshape(_count(vectors), -1)
    if not np.isfinite(rows).all():
        raise InputError(f"{path}: holds NaN or infinite values")
    return rows
