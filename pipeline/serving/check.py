"""What TF Serving would choke on in an export: one line per finding, exit code 1 where one is an error.

python -m pipeline.serving check exports/emoji

error: it will not load, will not answer, or must not be trusted. warning: some clients or servers need a setting.
note: good to know. Graphs are read as messages; nothing of them runs, and the largest takes a second.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from models.errors import InputError
from models.export_spec import TensorSpec
from pipeline import cli, manifest
from pipeline.manifest import Manifest
from pipeline.serving import client, protocol

FLAGS = flags.FLAGS
SEVERITIES = ("error", "warning", "note")
CONSTANT_BYTES = 64 << 10
HALVES = ("half", "bfloat16")
XLA_FLAG = "--xla_cpu_compilation_enabled=true (or gpu)"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing about an export that a server or its clients may stumble over."""

    severity: str  # of SEVERITIES
    where: str
    text: str

    def __str__(self):
        return f"{self.severity}: {self.where}: {self.text}"


def check(contract: Manifest, xla: bool = False) -> list[Finding]:
    """Everything found in one version of an export, errors first.

    Args:
        xla: whether the server will be started with XLA enabled.
    """
    found = [*_files(contract)]
    for part in contract.signatures:
        found += _versions(contract, part)
        found += _payloads(contract, part)
        found += _batching(contract, part)
        if contract.path(part).is_dir():
            found += _part(contract, part, xla)
    return sorted(dict.fromkeys(found), key=lambda finding: SEVERITIES.index(finding.severity))


# === Files ===


def _files(contract: Manifest) -> Iterator[Finding]:
    try:
        manifest.verify(contract)
    except InputError as error:
        yield Finding("error", contract.folder.name, str(error).replace(f"{contract.folder}/", ""))
    for part in contract.signatures:
        for path in sorted(contract.path(part).rglob("*")):
            name = str(path.relative_to(contract.folder))
            if not path.is_dir() and name not in contract.files:
                yield Finding("error", name, "is not in the manifest: somebody added it after the export")


def _versions(contract: Manifest, part: str) -> Iterator[Finding]:
    """TF Serving takes every folder whose name is a number for a version, and no other."""
    finished, numbers = manifest.list_versions(contract.folder), {}
    for path in sorted((contract.folder / part).glob("*")):
        where = f"{part}/{path.name}"
        if not re.fullmatch("[0-9]+", path.name):
            yield Finding("warning", where, "is no version: its name is not a whole number, so servers skip it")
        elif int(path.name) in numbers:
            yield Finding("error", where, f"is version {int(path.name)} as {numbers[int(path.name)]} is; rename one")
        else:
            numbers[int(path.name)] = path.name
            if int(path.name) not in finished:
                yield Finding("error", where, "has no manifest, an export that was not finished; servers would load it")
    if contract.version not in numbers:
        yield Finding("error", part, f"version {contract.version} is missing")


# === Signatures, as the manifest has them ===


def _payloads(contract: Manifest, part: str) -> Iterator[Finding]:
    for name, signature in contract.signatures[part].items():
        size = client.message_bytes(signature.outputs)
        if size > client.MESSAGE_BYTES:
            yield Finding(
                "warning",
                f"{part}/{name}",
                f"answers with up to {size / (1 << 20):.1f} MiB; gRPC clients take 4 unless they raise "
                "grpc.max_receive_message_length (pipeline.serving.remote does)",
            )


def _batching(contract: Manifest, part: str) -> Iterator[Finding]:
    for name, signature in contract.signatures[part].items():
        reason = unbatchable(signature.inputs, signature.outputs)
        if reason:
            yield Finding("note", f"{part}/{name}", f"cannot be batched (--enable_batching): {reason}")


def unbatchable(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> str | None:
    """Why TF Serving cannot put requests together, or None: it needs one first size for all inputs and outputs."""
    scalars = [spec.name for spec in (*inputs, *outputs) if not spec.shape]
    if scalars:
        return f"{', '.join(scalars)} {'is a number' if len(scalars) == 1 else 'are numbers'}, which have no first size"
    sizes = {spec.name: spec.shape[0] for spec in (*inputs, *outputs)}
    if len(set(sizes.values())) == 1:
        return None
    return "first sizes differ: " + ", ".join(f"{name} {size or 'any'}" for name, size in sizes.items())


# === The graph ===


def _part(contract: Manifest, part: str, xla: bool) -> Iterator[Finding]:
    cli.import_tensorflow()
    from pipeline.savedmodel import warmup_records
    from pipeline.serving import graph

    try:
        found = graph.read(contract.path(part))
    except InputError as error:
        yield Finding("error", part, str(error).replace(f"{contract.folder}/", ""))
        return
    yield from _promises(contract, part, found)
    yield from _compiled(contract, part, found, xla)
    yield from _nodes(part, found)
    for op, reason in graph.dangers(found):
        yield Finding("error", part, f"holds {op}, which {reason}: do not serve it")
    try:
        warmed = [name for name, _ in warmup_records.read(contract.path(part))]
    except InputError as error:
        yield Finding("error", part, f"{str(error).replace(f'{contract.folder}/', '')}, so a server cannot load it")
        return
    twins = [name for name in warmed if f"{part}/{name}" in contract.xla_signatures]
    if twins and not xla:
        yield Finding("error", part, f"has warm-up records for {', '.join(twins)}: it loads only with {XLA_FLAG}")
    if len(warmed) > 1000:
        yield Finding("error", part, f"has {len(warmed)} warm-up records; TF Serving loads no more than 1000")


def _promises(contract: Manifest, part: str, found) -> Iterator[Finding]:
    """Signatures of the file against the manifest, and types that cannot travel."""
    served = found.meta.signature_def
    for name in sorted(contract.signatures[part].keys() - served.keys()):
        yield Finding("error", f"{part}/{name}", "is promised by the manifest, but the SavedModel does not have it")
    for name, signature in served.items():
        for kind, tensors in (("input", signature.inputs), ("output", signature.outputs)):
            for alias, tensor in tensors.items():
                if _dtype(tensor) in HALVES:
                    text = f"{kind} {alias} is {_dtype(tensor)}, which REST cannot carry; cast to float32 inside"
                    yield Finding("error", f"{part}/{name}", text)
        if name in contract.signatures[part]:
            described = contract.signatures[part][name]
            for kind, specs, tensors in (
                ("inputs", described.inputs, signature.inputs),
                ("outputs", described.outputs, signature.outputs),
            ):
                there = {
                    alias: (_dtype(t), protocol.shape(d.size for d in t.tensor_shape.dim))
                    for alias, t in tensors.items()
                }
                if there != {spec.name: (spec.dtype, spec.shape) for spec in specs}:
                    yield Finding("error", f"{part}/{name}", f"{kind} are not what the manifest says: {there}")
        elif not name.startswith((manifest.ID_SIGNATURE, "__saved_model_")):
            yield Finding("error", f"{part}/{name}", "is not in the manifest")


def _dtype(tensor) -> str:
    from tensorflow.core.framework import types_pb2

    return protocol.dtype(types_pb2.DataType.Name(tensor.dtype))


def _compiled(contract: Manifest, part: str, found, xla: bool) -> Iterator[Finding]:
    """Functions that must be compiled fail in a server that was not told to compile."""
    marked = {
        (where, node.name)
        for where, node in found.nodes()
        if any(_must(called) for called in (node, *(found.functions[name] for name in found.calls(node))))
    }
    for name, signature in found.meta.signature_def.items():
        if not marked & found.reachable(tensor.name for tensor in signature.outputs.values()):
            continue
        if f"{part}/{name}" not in contract.xla_signatures:
            text = f"must be compiled by XLA, though it is not listed as such: servers need {XLA_FLAG} for it"
            yield Finding("error", f"{part}/{name}", text)
        elif not xla:
            yield Finding("warning", f"{part}/{name}", f"fails unless the server was started with {XLA_FLAG}")


def _must(function) -> bool:
    # A look at what is not there would add it.
    return "_XlaMustCompile" in function.attr and function.attr["_XlaMustCompile"].b


def _nodes(part: str, found) -> Iterator[Finding]:
    """Whatever is the same in many nodes is one finding, with an example."""
    devices, formats = collections.defaultdict(list), collections.defaultdict(list)
    for where, node in found.nodes():
        place = f"{where + '/' if where else ''}{node.name}"
        # Every machine has a CPU; TensorFlow itself ties saving and restoring to it.
        if node.device and "CPU" not in node.device.upper():
            devices[node.device].append(place)
        if "data_format" in node.attr and node.attr["data_format"].s in (b"NCHW", b"NCDHW"):
            formats[node.attr["data_format"].s.decode()].append(place)
        size = node.attr["value"].tensor.ByteSize() if node.op == "Const" else 0
        # Strings are no weights: the largest describes the variables to TensorFlow's own loader.
        if size > CONSTANT_BYTES and _dtype(node.attr["value"].tensor) != "string":
            size >>= 10
            text = f"{place} is a constant of {size} KiB; weights belong into variables, a graph holds 2 GiB at most"
            yield Finding("warning", part, text)
    for device, places in devices.items():
        text = f"{len(places)} operation(s), such as {places[0]}, are tied to {device}, which the server may not have"
        yield Finding("error", part, text)
    for layout, places in formats.items():
        yield Finding(
            "error", part, f"{len(places)} operation(s), such as {places[0]}, compute in {layout}: not on CPUs"
        )


# === The command ===


def define_flags() -> None:
    """Flags of the command."""
    flags.DEFINE_integer("version", None, "Version of the export. Default: the newest.")
    flags.DEFINE_bool("xla", False, "The server will be started with XLA enabled.")


def main(argv):
    if len(argv) != 2:
        raise InputError(f"expected one export, found {len(argv) - 1}: python -m pipeline.serving check exports/emoji")
    contract = manifest.read(Path(argv[1]), FLAGS.version)
    found = check(contract, FLAGS.xla)
    for finding in found:
        print(finding)
    counts = {severity: sum(finding.severity == severity for finding in found) for severity in SEVERITIES}
    print(
        f"{contract.folder} version {contract.version}: "
        + ", ".join(f"{number} {name}{'' if number == 1 else 's'}" for name, number in counts.items())
    )
    return int(counts["error"] > 0)
