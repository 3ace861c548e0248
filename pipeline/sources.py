"""Where the weights of an export come from: each kind of checkpoint as one `Source`."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import keras

from models import checkpoint, diffusers, embedding, keymaps, lora
from models.config import FAMILIES, ModelConfig, kerascv_numerics
from pipeline import manifest, tokenizer
from pipeline.manifest import AddedEmbedding, MergedLora


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the weights of an export come from."""

    name: str
    config: ModelConfig
    tokenizer: Path  # folder
    fill: Callable[[str, list], list[str]]  # (component, built layers) -> names that were ignored
    loras: tuple[MergedLora, ...] = ()  # what `fill` merges into the weights
    embeddings: tuple[AddedEmbedding, ...] = ()  # tokens whose vectors `fill` adds; `config` counts them already
    encodes_images: bool = True  # whether `fill` has weights for the autoencoder's encoder


def diffusers_source(
    folder: Path,
    variant: str | None = None,
    loras: Sequence[str] = (),
    embeddings: Sequence[str] = (),
    name: str | None = None,
) -> Source:
    """A checkpoint in diffusers' folder layout.

    Args:
        loras: FILE or FILE:WEIGHT each, merged into the weights in this order.
        embeddings: FILE or FILE:TOKEN each, textual inversion that prompts can use as TOKEN.
        name: what the checkpoint is called; None takes the folder's name.

    Raises:
        InputError: no such checkpoint, or files that do not fit it.
    """
    ignored_folders = diffusers.check_folder(folder)
    if ignored_folders:
        print(f"ignored: {', '.join(ignored_folders)}")
    config = diffusers.read_config(folder)
    tensors = {component: diffusers.read_weights(folder, component, variant) for component in diffusers.WEIGHT_NAMES}
    merged = [lora.parse(option) for option in loras]
    tensors = lora.merge(tensors, merged)
    added = [embedding.parse(option) for option in embeddings]
    if added:
        tensors["text_encoder"] = embedding.extend(tensors["text_encoder"], added)
        config, added = _with_tokens(config, folder / "tokenizer", added)

    def fill(component, layers):
        return checkpoint.load(layers, tensors[component], keymaps.DIFFUSERS[component], str(folder / component))

    used = tuple(MergedLora(file.path.stem, manifest.sha256(file.path), file.weight) for file in merged)
    name = name or folder.resolve().name
    return Source(name, config, folder / "tokenizer", fill, used, tuple(added))


def _with_tokens(config: ModelConfig, folder: Path, added: list[embedding.Embedding]):
    """The config with a row for each vector, and which ids the tokens have: the rows after the checkpoint's own."""
    words, rows, used = tokenizer.load(folder), config.text_encoder.vocab_size, []
    for file in added:
        ids = tuple(range(rows, rows + file.count))
        words, rows = tokenizer.with_added(words, {file.token: ids}), rows + file.count
        used.append(AddedEmbedding(tokenizer.clean(file.token), ids, manifest.sha256(file.path)))
    return dataclasses.replace(config, text_encoder=dataclasses.replace(config.text_encoder, vocab_size=rows)), used


def random_source(config: ModelConfig, tokenizer_folder: Path, seed: int = 0) -> Source:
    """The architecture with seeded random weights: speed and memory do not depend on what was learned."""

    def fill(component, layers):
        # Layers initialise themselves; only the seed is ours.
        return []

    keras.utils.set_random_seed(seed)
    # DDIM: as many calls of the UNet as steps.
    config = dataclasses.replace(config, defaults=dataclasses.replace(config.defaults, sampler="ddim"))
    return Source(f"{config.family}-random", config, tokenizer_folder, fill)


def kerascv_source(tokenizer_folder: Path, random_seed: int | None) -> Source:
    """KerasCV 0.9's Stable Diffusion 1.x, computed as KerasCV computes it.

    Args:
        random_seed: None takes KerasCV's own weights, downloaded; else seeded random ones.

    Raises:
        InputError: KerasCV is not installed. Filling raises it when the weights cannot be had.
    """
    from pipeline import kerascv

    def fill(component, layers):
        network = kerascv.build(component, random_seed)
        # Its autoencoder has no encoder; the decoder comes first.
        kept = layers[:1]
        tensors = checkpoint.read_kerascv(network.weights, component)
        return checkpoint.load(kept, tensors, keymaps.KERASCV[component], f"KerasCV's {component}")

    name = "kerascv-sd1" if random_seed is None else "kerascv-sd1-random"
    return Source(name, kerascv_numerics(FAMILIES["sd1"]), tokenizer_folder, fill, encodes_images=False)
