"""Textual inversion (Gal et al. 2022, arXiv:2208.01618): learned vectors as new rows of the token embedding."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from models.checkpoint import Tensor, read_safetensors, some, split_option
from models.config import InputError

MOST_VECTORS = 75  # a prompt has no more places
TABLE = "embeddings.token_embedding.weight"

# Names under which trainers store the vectors when the token is not the name: the file's name is the token then.
NAMELESS = ("emb_params", "*", "string_to_param.*")
# Vectors for two text encoders, as Stable Diffusion XL has.
TWO_ENCODERS = ("clip_l", "clip_g", "text_encoders_0", "text_encoders_1")


@dataclasses.dataclass(frozen=True)
class Embedding:
    """One token and the vectors it stands for."""

    path: Path
    token: str
    vectors: Tensor  # [W] or [k, W]

    @property
    def count(self) -> int:
        """k, the number of ids that the token takes in a prompt."""
        return self.vectors.shape[0] if len(self.vectors.shape) == 2 else 1


def parse(option: str) -> Embedding:
    """An embedding from FILE or FILE:TOKEN. Raises InputError for what `read` does not take."""
    path, token = split_option(option)
    return read(path, token)


def read(path: Path, token: str | None = None) -> Embedding:
    """An embedding file, its vectors unread.

    Args:
        token: what prompts call it; None takes the name inside the file, or the file's own where it has none.

    Raises:
        InputError: not a .safetensors file, vectors for two text encoders, or not one tensor [W] or [k, W].
    """
    tensors = read_safetensors(path)
    if tensors.keys() & set(TWO_ENCODERS):
        raise InputError(
            f"{path}: holds vectors for two text encoders ({', '.join(sorted(tensors))}), as Stable Diffusion XL has; "
            "this model has one"
        )
    if len(tensors) != 1:
        raise InputError(
            f"{path}: expected one tensor, named by its token, found {len(tensors)}: {some(list(tensors), 9)}"
        )
    ((name, vectors),) = tensors.items()
    if len(vectors.shape) not in (1, 2) or 0 in vectors.shape or vectors.dtype.kind not in "fV":
        raise InputError(
            f"{path}: expected vectors [W] or [k, W], found {name!r}, {vectors.dtype} {list(vectors.shape)}"
        )
    if token is None:
        token = path.stem if name in NAMELESS else name
    embedding = Embedding(path, token, vectors)
    if embedding.count > MOST_VECTORS:
        raise InputError(f"{path}: {embedding.count} vectors, but a prompt has places for {MOST_VECTORS}")
    return embedding


def extend(tensors: Mapping[str, Tensor], embeddings: Sequence[Embedding]) -> dict[str, Tensor]:
    """A text encoder's tensors with the vectors as new rows of its token embedding, in order.

    Args:
        tensors: by diffusers' names, with or without "text_model.".

    Returns:
        The same names; the table [V, W] is float32 [V + all k, W] now.

    Raises:
        InputError: vectors of another width. Reading raises it for NaN.
    """
    name = next((name for name in tensors if name.removeprefix("text_model.") == TABLE), None)
    if name is None:
        raise InputError(f"the text encoder has no {TABLE}, so no embedding can be added to it")
    table = tensors[name]
    for embedding in embeddings:
        found, expected = embedding.vectors.shape[-1], table.shape[-1]
        if found != expected:
            raise InputError(
                f"{embedding.path}: expected vectors of {expected} numbers, found {found}; made for another family"
            )

    def read() -> np.ndarray:
        return np.concatenate([table.read().astype(np.float32), *map(_rows, embeddings)])

    rows = table.shape[0] + sum(embedding.count for embedding in embeddings)
    return {**tensors, name: Tensor((rows, table.shape[1]), np.dtype(np.float32), read)}


def _rows(embedding: Embedding) -> np.ndarray:
    rows = embedding.vectors.read().astype(np.float32).reshape(embedding.count, -1)
    if not np.isfinite(rows).all():
        raise InputError(f"{embedding.path}: holds NaN or infinite values")
    return rows
