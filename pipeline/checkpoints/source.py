"""Where the weights of an export come from: each kind of checkpoint as one `Source`."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from models.config import ModelConfig
from models.errors import InputError
from models.families import FAMILIES, kerascv_numerics
from pipeline import manifest
from pipeline.checkpoints import (
    diffusers_folder,
    kerascv_h5,
    keymaps,
    loader,
    lora,
    other_vae,
    pickles,
    single_file,
    textual_inversion,
)
from pipeline.manifest import AddedEmbedding, MergedLora, ReplacedVae
from pipeline.prompts import tokenizer

# CLIP's vocabulary, which all families share. Its files name no padding: that is the text encoder's affair.
CLIP_VOCABULARY = Path(__file__).parents[2] / "checkpoints" / "emoji" / "tokenizer"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the weights of an export come from."""

    name: str
    config: ModelConfig
    tokenizer: Path  # folder
    fill: Callable[[str, list], list[str]]  # (component, built layers) -> names that were ignored
    loras: tuple[MergedLora, ...] = ()  # what `fill` merges into the weights
    vae: ReplacedVae | None = None  # in the place of the checkpoint's own
    clip_skip: int = 0  # last layers of the text encoders that `config` leaves out
    learned: bool = True  # False: the same weights cannot be had twice
    embeddings: tuple[AddedEmbedding, ...] = ()  # tokens whose vectors `fill` adds; `config` counts them already
    encodes_images: bool = True  # whether `fill` has weights for the autoencoder's encoder
    tokenizer_2: Path | None = None  # of the second text encoder, where there is one

    @property
    def tokenizers(self) -> dict[str, Path]:
        """Folder in the export -> folder it is copied from, in the order of the text encoders."""
        found = {"tokenizer": self.tokenizer, "tokenizer_2": self.tokenizer_2}
        return {name: folder for name, folder in found.items() if folder is not None}


@dataclasses.dataclass(frozen=True)
class _Found:
    """A checkpoint as it is on disk, its weights unread under diffusers' names."""

    name: str
    config: ModelConfig
    tensors: dict[str, loader.Source]  # component ->
    where: dict[str, str]  # component -> what messages call it
    tokenizer: Path
    tokenizer_2: Path | None


def diffusers_source(
    folder: Path,
    variant: str | None = None,
    loras: Sequence[str] = (),
    embeddings: Sequence[str] = (),
    name: str | None = None,
    vae: str | None = None,
    clip_skip: int = 0,
    allow_pickle: bool = False,
    prediction_type: str | None = None,
) -> Source:
    """A checkpoint in diffusers' folder layout.

    Args:
        loras: FILE or FILE:WEIGHT each, merged into the weights in this order.
        embeddings: FILE or FILE:TOKEN each, textual inversion that prompts can use as TOKEN.
        name: what the checkpoint is called; None takes the folder's name.
        vae: folder, file or name on the Hub of another autoencoder, see `pipeline.checkpoints.other_vae`.
        clip_skip: last layers of each text encoder to leave out, as diffusers counts.
        allow_pickle: read weights from pickles where there are no others.
        prediction_type: "epsilon" or "v_prediction", whatever the checkpoint says; None: as it says.

    Raises:
        InputError: no such checkpoint, or files that do not fit it.
    """
    read_pickle = pickles.reader(allow_pickle)
    ignored_folders = diffusers_folder.check_folder(folder)
    if ignored_folders:
        print(f"ignored: {', '.join(ignored_folders)}")
    config = diffusers_folder.read_config(folder)
    if prediction_type not in (None, config.scheduler.prediction_type):
        said = config.scheduler.prediction_type
        print(f"notice: --prediction_type {prediction_type} is used, although the checkpoint says {said}")
        scheduler = dataclasses.replace(config.scheduler, prediction_type=prediction_type)
        config = dataclasses.replace(config, scheduler=scheduler)
    two = config.text_encoder_2 is not None
    components = ("text_encoder", *(("text_encoder_2",) if two else ()), "unet", *(() if vae else ("vae",)))
    found = _Found(
        name=name or folder.resolve().name,
        config=config,
        tensors={
            component: diffusers_folder.read_weights(folder, component, variant, read_pickle)
            for component in components
        },
        where={component: str(folder / component) for component in components},
        tokenizer=folder / "tokenizer",
        tokenizer_2=folder / "tokenizer_2" if two else None,
    )
    return _changed(found, loras, embeddings, other_vae.find(vae, config.vae, variant, read_pickle), clip_skip)


def single_file_source(
    path: Path,
    variant: str | None = None,
    loras: Sequence[str] = (),
    embeddings: Sequence[str] = (),
    name: str | None = None,
    vae: str | None = None,
    clip_skip: int = 0,
    allow_pickle: bool = False,
    prediction_type: str | None = None,
    ema: bool = False,
) -> Source:
    """A checkpoint in one file, in the original naming; it has no vocabulary, so CLIP's own is taken.

    Args:
        variant: of --vae's files.
        prediction_type: "epsilon" or "v_prediction"; None: as the file says, see `single_file_config`.
        ema: take the UNet's averaged copies.
        The rest is as for `diffusers_source`.

    Raises:
        InputError: no such file, or not a checkpoint of the supported families.
    """
    read_pickle = pickles.reader(allow_pickle)
    tensors, metadata = loader.read_file(path, read_pickle)
    read = single_file.read(tensors, str(path), ema, prediction_type, metadata)
    if read.ignored:
        print(f"ignored: {', '.join(read.ignored)}")
    for notice in read.notices:
        print(f"notice: {notice}")
    found = _Found(
        name=(name or path.resolve().stem) + ("-ema" if ema else ""),
        config=read.config,
        tensors=read.tensors,
        where={component: f"{path}: {component}" for component in read.tensors},
        tokenizer=CLIP_VOCABULARY,
        tokenizer_2=CLIP_VOCABULARY if "text_encoder_2" in read.tensors else None,
    )
    return _changed(found, loras, embeddings, other_vae.find(vae, read.config.vae, variant, read_pickle), clip_skip)


def _changed(
    found: _Found,
    loras: Sequence[str],
    embeddings: Sequence[str],
    other: other_vae.OtherVae | None,
    clip_skip: int,
) -> Source:
    """The checkpoint with what the user adds to it."""
    config, tensors, where = skip_layers(found.config, clip_skip), found.tensors, found.where
    if other:
        config = dataclasses.replace(config, vae=other.config)
        tensors, where = tensors | {"vae": other.tensors}, where | {"vae": other.where}
    merged = [lora.parse(option) for option in loras]
    tensors = lora.merge(tensors, merged)
    added = [textual_inversion.parse(option) for option in embeddings]
    if added:
        tensors = textual_inversion.extend(tensors, added)
        config, added = _with_tokens(config, found.tokenizer, added)

    def fill(component, layers):
        keymap = keymaps.of_component(component, config)
        return loader.load(layers, tensors[component], keymap, where[component])

    return Source(
        name=found.name,
        config=config,
        tokenizer=found.tokenizer,
        fill=fill,
        loras=tuple(MergedLora(file.path.stem, manifest.sha256(file.path), file.weight) for file in merged),
        vae=other.used if other else None,
        clip_skip=clip_skip,
        embeddings=tuple(added),
        tokenizer_2=found.tokenizer_2,
    )


def skip_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The config whose context leaves out the last `count` layers of each text encoder, as diffusers' clip_skip does.

    What is normalised at the end still is, and a pooled vector still comes from the last layer. AUTOMATIC1111 and
    others count from 1: their "Clip skip 2" is 1 here.

    Raises:
        InputError: no layer would be left.
    """
    most = min(encoder.context_layers for encoder in config.text_encoders) - 1
    if not 0 <= count <= most:
        raise InputError(f"--clip_skip {count}: must be 0..{most}")
    fewer = {
        name: dataclasses.replace(encoder, skipped_layers=encoder.skipped_layers + count)
        for name, encoder in zip(("text_encoder", "text_encoder_2"), config.text_encoders, strict=False)
    }
    return dataclasses.replace(config, **fewer)


def _with_tokens(config: ModelConfig, folder: Path, added: list[textual_inversion.Embedding]):
    """The config with a row for each vector, and which ids the tokens have: the rows after the checkpoint's own."""
    words, rows, used = tokenizer.load(folder), config.text_encoder.vocab_size, []
    for file in added:
        ids = tuple(range(rows, rows + file.count))
        words, rows = tokenizer.with_added(words, {file.token: ids}), rows + file.count
        used.append(AddedEmbedding(tokenizer.clean(file.token), ids, manifest.sha256(file.path)))
    grown = {
        name: dataclasses.replace(encoder, vocab_size=rows)
        for name, encoder in zip(("text_encoder", "text_encoder_2"), config.text_encoders, strict=False)
    }
    return dataclasses.replace(config, **grown), used


def random_source(config: ModelConfig, tokenizer_folder: Path, seed: int = 0) -> Source:
    """The architecture with seeded random weights: speed and memory do not depend on what was learned."""

    def fill(component, layers):
        # Layers initialise themselves; only the seed is ours.
        return []

    import keras  # here: readers of a folder or file need none of it

    keras.utils.set_random_seed(seed)
    # DDIM: as many calls of the UNet as steps.
    config = dataclasses.replace(config, defaults=dataclasses.replace(config.defaults, sampler="ddim"))
    second = None if config.text_encoder_2 is None else tokenizer_folder
    return Source(f"{config.family}-random", config, tokenizer_folder, fill, tokenizer_2=second, learned=False)


def is_kerascv(path: Path) -> bool:
    """Whether a checkpoint is KerasCV's weight files: a .h5 file, or a folder of them that is no other checkpoint."""
    if path.suffix.lower() == ".h5":
        return True
    return path.is_dir() and not (path / "model_index.json").exists() and any(path.glob("*.h5"))


def h5_source(path: Path) -> Source:
    """KerasCV's weight files of Stable Diffusion 1.x or 2.x, computed as KerasCV computes them.

    Args:
        path: a folder that holds them, or the text encoder's or diffusion model's file beside the others.

    Raises:
        InputError: a file is missing, damaged or not KerasCV's.
    """
    found = kerascv_h5.find(path)
    for component, file in found.paths.items():
        print(f"{kerascv_h5.COMPONENTS[component]}: {file}")

    def fill(component, layers):
        # The autoencoder's halves are files of their own; the decoder comes first.
        parts = ("vae", "vae_encoder") if component == "vae" else (component,)
        for layer, part in zip(layers, parts, strict=True):
            if part in found.tensors:
                loader.load([layer], found.tensors[part], keymaps.KERASCV[part], str(found.paths[part]))
        return []

    config = kerascv_numerics(FAMILIES[found.family])
    return Source(f"kerascv-{found.family}", config, CLIP_VOCABULARY, fill, encodes_images="vae_encoder" in found.paths)


def kerascv_source(tokenizer_folder: Path, random_seed: int | None) -> Source:
    """KerasCV 0.9's Stable Diffusion 1.x, computed as KerasCV computes it.

    Args:
        random_seed: None takes KerasCV's own weights, downloaded; else seeded random ones.

    Raises:
        InputError: KerasCV is not installed. Filling raises it when the weights cannot be had.
    """
    from pipeline.checkpoints import kerascv

    def fill(component, layers):
        network = kerascv.build(component, random_seed)
        # Its autoencoder has no encoder; the decoder comes first.
        kept = layers[:1]
        tensors = loader.read_kerascv(network.weights, component)
        return loader.load(kept, tensors, keymaps.KERASCV[component], f"KerasCV's {component}")

    name = "kerascv-sd1" if random_seed is None else "kerascv-sd1-random"
    return Source(name, kerascv_numerics(FAMILIES["sd1"]), tokenizer_folder, fill, encodes_images=False)
