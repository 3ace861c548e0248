"""The contract between an export and whoever runs it: `manifests/VERSION.json`, and the functions it promises.

    python -m pipeline.manifest exports/emoji

prints what an export can do. No TensorFlow.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Callable
from pathlib import Path

from models.config import ModelConfig
from models.errors import InputError
from models.export_spec import ExportSpec, Size, TensorSpec
from pipeline.compare import Difference

FORMAT = 5
PARTS = ("text_encoder", "diffusion_model", "decoder")  # the SavedModels that every export has
# The functions of a picture and the part each is in, in the order of the chain. Sizes other than the first have
# signatures of their own, see `ExportSpec.signature`; the text encoder knows no size.
CHAIN = {
    "encode": "text_encoder",
    "denoise": "diffusion_model",
    "denoise_unguided": "diffusion_model",
    "decode": "decoder",
}
# Functions beside the chain, in parts that an export may have.
OPTIONAL = {"encode_image": "image_encoder"}
TOKENIZERS = ("tokenizer/", "tokenizer_2/")  # how the names of their files begin
# What users call the parts that can be compiled; the text encoder runs once a picture and stays plain by default.
JIT_COMPONENTS = {"text_encoder": ("encode",), "unet": ("denoise", "denoise_unguided"), "decoder": ("decode",)}
DEFAULT_JIT_COMPONENTS = ("unet", "decoder")
# Every SavedModel also has a signature of this name and the export's id, which is not in the manifest's list: the
# names of signatures are what any server tells its clients.
ID_SIGNATURE = "export_id_"


def chain_signature(spec: ExportSpec, name: str, size: Size) -> tuple[str, str]:
    """Return part and signature of one function of CHAIN or OPTIONAL at a size."""
    part = (CHAIN | OPTIONAL)[name]
    return part, name if part == "text_encoder" else spec.signature(name, size)


def check_jit_components(names: tuple[str, ...]) -> None:
    """Raise InputError for a name that is not in JIT_COMPONENTS."""
    for name in names:
        if name not in JIT_COMPONENTS:
            raise InputError(f"--jit_components {name!r}: must be of {', '.join(JIT_COMPONENTS)}")


@dataclasses.dataclass(frozen=True)
class Signature:
    """One function of a SavedModel: what goes in and out, by name."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclasses.dataclass(frozen=True)
class MergedLora:
    """A LoRA file that is part of the weights."""

    name: str
    sha256: str
    weight: float


@dataclasses.dataclass(frozen=True)
class AddedEmbedding:
    """A textual-inversion file whose vectors are rows of the text encoder's table."""

    token: str  # as prompts are cleaned: lower case
    ids: tuple[int, ...]
    sha256: str


@dataclasses.dataclass(frozen=True)
class ReplacedVae:
    """The file of an autoencoder that stands in for the checkpoint's own."""

    name: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What one version of an export is, what it was made from and what its files must hash to."""

    format: int
    export_id: str  # unique to this version of this export
    version: int
    checkpoint: str  # name of what was exported
    created: str  # UTC, ISO 8601
    spec: ExportSpec
    config: ModelConfig
    loras: tuple[MergedLora, ...]
    embeddings: tuple[AddedEmbedding, ...]
    vae: ReplacedVae | None
    clip_skip: int  # last layers of each text encoder that the context leaves out
    zero_unconditional: bool  # True: without a negative prompt the unconditional outputs are zeros
    xla_signatures: tuple[str, ...]  # signatures that a server runs only with XLA enabled
    signatures: dict[str, dict[str, Signature]]  # part -> signature name -> tensors
    reload_difference: dict[str, Difference]  # PART/SIGNATURE -> reloaded export against the live model
    float32_difference: dict[str, Difference]  # PART/SIGNATURE -> half precision against float32; {} if not compared
    versions: dict[str, str]  # of the packages that made it
    files: dict[str, str]  # path relative to the export -> sha256
    folder: Path = dataclasses.field(default=Path(), compare=False)  # where it was read from; not stored

    def path(self, part: str) -> Path:
        """Folder of one SavedModel."""
        return self.folder / part / str(self.version)


@dataclasses.dataclass(frozen=True)
class Functions:
    """An export that is ready to run: named arrays to named arrays, as `manifest.signatures` lists them."""

    encode: Callable[..., dict]
    denoise: Callable[..., dict]
    denoise_unguided: Callable[..., dict]  # rows whose guidance is 0 for every image, at half the work
    decode: Callable[..., dict]
    manifest: Manifest
    size: Size  # of the pictures
    encode_image: Callable[..., dict] | None = None  # None: the export has no image encoder


def pick_size(manifest: Manifest, width: int | None = None, height: int | None = None) -> Size:
    """Choose the export's size of this width and height; None leaves it open, and the first that fits is taken.

    Raises:
        InputError: no such size; names those there are.
    """
    for size in manifest.spec.sizes:
        if width in (None, size.width) and height in (None, size.height):
            return size
    raise InputError(
        f"{manifest.folder}: draws {', '.join(map(str, manifest.spec.sizes))}, not {width or 'any'}x{height or 'any'}; "
        "export again with --sizes for others"
    )


def read(folder: Path | str, version: int | None = None) -> Manifest:
    """Read the manifest of an export, checked against its own hash.

    Args:
        folder: the export, e.g. exports/emoji.
        version: None takes the highest one that has a manifest.

    Raises:
        InputError: no export, an unfinished one, no such version, or a damaged manifest.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; expected an export (make one with serialize_savedmodels.py)")
    versions = list_versions(folder)
    if not versions:
        raise InputError(f"{folder}: not a finished export: it has no manifests/VERSION.json; export again")
    if version is None:
        version = versions[-1]
    if version not in versions:
        raise InputError(f"{folder}: no version {version}; found {', '.join(map(str, versions))}")
    path = folder / "manifests" / f"{version}.json"
    try:
        text = path.read_text(encoding="utf-8")
        body = json.loads(text)
        if isinstance(body, dict) and body.get("format", FORMAT) != FORMAT:
            raise InputError(f"{path}: has format {body['format']}, this toolkit reads {FORMAT}; export again")
        manifest = _build(Manifest, body, "")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({error}); export again") from error
    # Byte for byte, so that no change at all goes unnoticed.
    if text != dumps(manifest):
        raise InputError(f"{path}: damaged: its contents do not match its own sha256; export again")
    manifest = dataclasses.replace(manifest, folder=folder)
    check_chain(manifest)
    return manifest


def list_versions(folder: Path) -> list[int]:
    """List the finished versions of an export, ascending."""
    return sorted(int(p.stem) for p in (folder / "manifests").glob("*.json") if p.stem.isdecimal())


def verify(manifest: Manifest, prefix: str | tuple[str, ...] = "") -> None:
    """Check every file of the export, or those whose names start so, against the manifest.

    Raises:
        InputError: names the first that differs.
    """
    # Here, because a client of a server is to start at once.
    from tqdm import tqdm

    files = {name: digest for name, digest in manifest.files.items() if name.startswith(prefix)}
    total = sum(p.stat().st_size for name in files if (p := manifest.folder / name).exists())
    with tqdm(total=total, desc="verify", unit="B", unit_scale=True, delay=2, leave=False) as progress:
        for name, expected in files.items():
            path = manifest.folder / name
            if not path.exists():
                raise InputError(f"{path}: missing; the export is incomplete, export again")
            if sha256(path, progress.update) != expected:
                raise InputError(f"{path}: damaged: its sha256 is not the manifest's; export again")


def sha256(path: Path, progress: Callable[[int], object] = lambda count: None) -> str:
    """Return the hex digest of a file; `progress` is called with the bytes of each block read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def dumps(manifest: Manifest) -> str:
    """Write the manifest as JSON, with the sha256 of its canonical form (sorted keys, no spaces, no hash)."""
    body = dataclasses.asdict(manifest)
    del body["folder"]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    body["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def function_names(manifest: Manifest) -> tuple[str, ...]:
    """List the functions that an export has: those of CHAIN, and of OPTIONAL those whose part is there."""
    return (*CHAIN, *(name for name, part in OPTIONAL.items() if part in manifest.signatures))


def has_twins(manifest: Manifest, jit_components: tuple[str, ...]) -> bool:
    """Whether the export has all functions of these components compiled, for the first of its sizes."""
    names = [name for component in jit_components for name in JIT_COMPONENTS[component]]
    found = [chain_signature(manifest.spec, name, manifest.spec.size) for name in names]
    return all(f"{part}/{signature}_xla" in manifest.xla_signatures for part, signature in found)


def check_chain(manifest: Manifest) -> None:
    """Refuse an export whose parts do not fit: outputs of `encode` feed `denoise`, its `latent` feeds `decode`.

    Where it has an image encoder, that one's outputs are latents too.
    """
    for size in manifest.spec.sizes:
        functions = {}
        for name in function_names(manifest):
            part, signature = chain_signature(manifest.spec, name, size)
            if signature not in manifest.signatures.get(part, {}):
                raise InputError(f"{manifest.folder}: {part} has no signature {signature!r}; export again")
            functions[name] = manifest.signatures[part][signature]
        latents = tuple(spec for spec in functions["denoise"].outputs if spec.name == "latent")
        encoded = functions["encode_image"].outputs if "encode_image" in functions else ()
        if any(dataclasses.replace(spec, name="latent") not in latents for spec in encoded):
            raise InputError(f"{manifest.folder}: encode_image feeds denoise, but its outputs are no latents of it")
        for outputs, inputs, what in (
            (functions["encode"].outputs, functions["denoise"].inputs, "encode feeds denoise"),
            (latents, functions["decode"].inputs, "denoise feeds decode"),
        ):
            unfit = [spec.name for spec in outputs if spec not in inputs]
            if unfit or not outputs:
                raise InputError(f"{manifest.folder}: {what}, but {', '.join(unfit) or 'latent'} is not an input of it")


def _build(kind, value, where: str):
    """Build a dataclass from parsed JSON, strictly; ValueError names the field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{where or 'manifest'} should be an object")
        hints = typing.get_type_hints(kind)
        fields = {f.name: hints[f.name] for f in dataclasses.fields(kind) if hints[f.name] is not Path}
        extra = set(value) - set(fields) - ({"sha256"} if kind is Manifest else set())
        if extra or set(fields) - set(value):
            raise ValueError(f"{where or 'manifest'} has the wrong keys: {sorted(extra ^ (set(fields) - set(value)))}")
        return kind(**{name: _build(hint, value[name], f"{where}.{name}") for name, hint in fields.items()})
    if origin is tuple and isinstance(value, list):
        return tuple(_build(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _build(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(kind, types.UnionType):
        return None if value is None else _build(arguments[0], value, where)
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{where} holds {str(value)[:40]!r}")


def describe(manifest: Manifest) -> str:
    """Describe in words what an export can do and how exact it is."""
    spec, defaults = manifest.spec, manifest.config.defaults
    lines = [
        f"{manifest.folder} version {manifest.version}: {manifest.checkpoint} ({manifest.config.family}, "
        f"{manifest.config.numerics} numerics), made {manifest.created}",
        f"  pictures   {', '.join(map(str, spec.sizes))}, {spec.num_images} a call: {spec.prompts} prompt(s) x "
        f"{spec.images_per_prompt} image(s)",
        f"  weights    {spec.precision}"
        + "".join(f", + {lora.weight:g} x {lora.name}" for lora in manifest.loras)
        + (f", VAE {manifest.vae.name}" if manifest.vae else "")
        + (f", without the last {manifest.clip_skip} layers of text" if manifest.clip_skip else ""),
        f"  tokens     {', '.join(f'{e.token} ({len(e.ids)} ids)' for e in manifest.embeddings) or 'none added'}",
        f"  steps      1..{spec.max_steps}; defaults: {defaults.sampler}, {defaults.num_steps} steps, "
        f"guidance {defaults.guidance_scale:g}",
        f"  XLA        {', '.join(manifest.xla_signatures) or 'nothing stored (compiled on loading where asked)'}",
        "  reloaded export against the live model:",
    ]
    for name, d in manifest.reload_difference.items():
        lines.append(f"    {name:32} {d}")
    if manifest.float32_difference:
        lines.append(f"  {spec.precision} against float32:")
    for name, d in manifest.float32_difference.items():
        lines.append(f"    {name:32} {d}")
    for part, signatures in manifest.signatures.items():
        lines.append(f"  {part}")
        for name, signature in signatures.items():
            ins, outs = (
                ", ".join(f"{t.name} {t.dtype}{list(t.shape)}" for t in tensors)
                for tensors in (signature.inputs, signature.outputs)
            )
            lines.append(f"    {name}({ins})\n      -> {outs}")
    return "\n".join(lines)


if __name__ == "__main__":
    from pipeline.commands import manifest

    manifest.run()
