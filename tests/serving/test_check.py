"""The linter of exports: what it says of ours, of damaged ones, and of graphs that must not be served."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session

from models.export_spec import TensorSpec
from pipeline import manifest
from pipeline.savedmodel import warmup_records
from pipeline.serving import check, client, graph

PARTS = ("text_encoder", "diffusion_model", "decoder")


def lines(contract, **how):
    return [str(finding) for finding in check.check(contract, **how)]


@pytest.fixture
def copied(tiny_export, tmp_path):
    return manifest.read(shutil.copytree(tiny_export, tmp_path / "copied"))


# === Our exports ===


def test_an_export_without_twins_has_notes_only(tiny_export):
    """N = 4: pictures leave the server in order, but loops take numbers and so cannot be batched."""
    found = lines(manifest.read(tiny_export))
    assert not [line for line in found if not line.startswith("note: ")]
    batched = "cannot be batched (--enable_batching): "
    numbers = "num_steps, unconditional_guidance_scale are numbers, which have no first size"
    assert f"note: diffusion_model/serving_default: {batched}{numbers}" in found
    assert f"note: text_encoder/encode: {batched}first sizes differ: " in "\n".join(found)
    assert not [line for line in found if "decoder/" in line or "diffusion_model/unet" in line]


def test_twins_need_a_server_with_xla(single_export):
    contract = manifest.read(single_export)
    found = lines(contract)
    text = "fails unless the server was started with --xla_cpu_compilation_enabled=true (or gpu)"
    assert sorted(line for line in found if not line.startswith("note: ")) == sorted(
        f"warning: {name}: {text}" for name in contract.xla_signatures
    )
    assert not [line for line in lines(contract, xla=True) if "xla_cpu" in line]
    unlisted = dataclasses.replace(contract, xla_signatures=("decoder/decode_xla",))
    errors = [line for line in lines(unlisted, xla=True) if line.startswith("error: ")]
    assert len(errors) == 3 and all("must be compiled by XLA, though it is not listed" in line for line in errors)


def test_warm_up_of_twins_fails_a_server_without_xla(single_export, tmp_path):
    folder = shutil.copytree(single_export, tmp_path / "copied")
    contract = manifest.read(folder)
    warmup_records.write(contract.path("decoder"), {"decode_xla": {"latent": np.zeros((1, 9, 7, 4), "float32")}})
    loads = "error: decoder: has warm-up records for decode_xla: it loads only with --xla_cpu_compilation_enabled"
    assert loads in "\n".join(lines(contract)) and loads not in "\n".join(lines(contract, xla=True))
    (contract.path("decoder") / warmup_records.FILE).write_bytes(b"nothing that can be read" * 9)
    assert "not a file of warm-up records" in "\n".join(lines(contract))


# === Files and versions ===


def add_version(folder, name):
    shutil.copytree(folder / "decoder" / "1", folder / "decoder" / name)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": (
        lambda e: flip(e / "decoder/1/variables/variables.data-00000-of-00001"),
        r"error: copied: decoder/1/variables/variables\.data-00000-of-00001: damaged",
    ),
    "added": (
        lambda e: (e / "decoder/1/assets.extra/more").write_text(""),
        "error: decoder/1/assets.extra/more: is not in the manifest",
    ),
    "no number": (
        lambda e: add_version(e, "new"),
        "warning: decoder/new: is no version: its name is not a whole number",
    ),
    "twice": (lambda e: add_version(e, "01"), "error: decoder/1: is version 1 as 01 is"),
    "unfinished": (lambda e: add_version(e, "2"), "error: decoder/2: has no manifest"),
    "missing": (lambda e: shutil.rmtree(e / "decoder/1"), "error: decoder: version 1 is missing"),
    "no graph": (
        lambda e: (e / "decoder/1/saved_model.pb").write_bytes(b"\xff" * 99),
        r"error: decoder: decoder/1/saved_model\.pb: not a SavedModel",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_exports(copied, case):
    damage, message = DAMAGES[case]
    damage(copied.folder)
    assert re.search(message, "\n".join(lines(copied)))


# === Sizes ===


@pytest.mark.parametrize(
    ("count", "size", "dtype", "expected"),
    [
        *((1, 1024, "uint8", 3145728), (2, 1024, "uint8", 6291456), (5, 512, "uint8", 3932160)),
        *((6, 512, "uint8", 4718592), (4, 512, "float32", 12582912)),
    ],
)
def test_bytes_of_pictures(count, size, dtype, expected):
    """Raw; in TF Serving's typed fields a level above 127 takes two bytes."""
    spec = TensorSpec("generated_images", (count, size, size, 3), dtype)
    assert client.message_bytes((spec,)) == expected * (2 if dtype == "uint8" else 1)


def test_answers_over_grpcs_limit(tiny_export):
    contract = manifest.read(tiny_export)
    large = manifest.Signature((), (TensorSpec("image", (4, 512, 512, 3), "float32"),))
    contract = dataclasses.replace(contract, signatures={"decoder": contract.signatures["decoder"] | {"large": large}})
    found = "\n".join(map(str, check._payloads(contract, "decoder")))
    assert found.startswith("warning: decoder/large: answers with up to 12.0 MiB; gRPC clients take 4")


# === Graphs ===


@pytest.fixture(scope="module")
def decoder(tiny_export):
    return (tiny_export / "decoder" / "1" / "saved_model.pb").read_bytes()


@pytest.fixture
def change(tiny_export, tmp_path, decoder):
    """Function (change of the MetaGraphDef) -> what is said of the decoder then."""

    def say(edit):
        path = tmp_path / "decoder" / "1"
        path.mkdir(parents=True)
        (path / "saved_model.pb").write_bytes(decoder)
        found = graph.read(path)
        edit(found.meta)
        contract = manifest.read(tiny_export)
        said = [
            *check._promises(contract, "decoder", found),
            *check._compiled(contract, "decoder", found, False),
            *check._nodes("decoder", found),
        ]
        return [str(finding) for finding in said]

    return say


def halve(meta):
    meta.signature_def["decode"].inputs["latent"].dtype = tf.float16.as_datatype_enum


def name_device(meta):
    for node in meta.graph_def.library.function[-1].node_def:
        node.device = "/device:GPU:0"


def add_constant(meta, size):
    node = meta.graph_def.node.add(name="table", op="Const")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.arange(size, dtype="float32")))


def mark(meta):
    for function in meta.graph_def.library.function:
        function.attr["_XlaMustCompile"].b = True


def nchw(meta):
    meta.graph_def.node.add(name="conv", op="Conv2D").attr["data_format"].s = b"NCHW"


CHANGES = {
    "nothing": (lambda meta: None, None),
    "half": (halve, "error: decoder/decode: input latent is half, which REST cannot carry"),
    "other dtype": (halve, "error: decoder/decode: inputs are not what the manifest says"),
    "lost": (lambda meta: meta.signature_def.pop("decode_png"), "decoder/decode_png: is promised by the manifest"),
    "more": (lambda meta: meta.signature_def["more"].SetInParent(), "error: decoder/more: is not in the manifest"),
    "device": (name_device, "are tied to /device:GPU:0, which the server may not have"),
    "64 KiB": (lambda meta: add_constant(meta, 16 << 10), "warning: decoder: table is a constant of 64 KiB"),
    "63 KiB": (lambda meta: add_constant(meta, 63 << 8), None),
    "compiled": (mark, "error: decoder/decode: must be compiled by XLA, though it is not listed as such"),
    "layout": (nchw, "error: decoder: 1 operation(s), such as conv, compute in NCHW"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_graphs(change, case):
    edit, message = CHANGES[case]
    found = change(edit)
    assert found == [] if message is None else message in "\n".join(found)


# === Operations that reach outside ===


def save(folder, function):
    module = tf.Module()
    module.variable = tf.Variable(1.0)
    concrete = tf.function(function).get_concrete_function(tf.TensorSpec([], tf.string, "name"))
    tf.saved_model.save(module, str(folder), signatures={"serving_default": concrete})
    return graph.read(folder)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda name: {"y": tf.io.read_file(name)}, ("ReadFile", "reads or writes files")),
        (lambda name: {"y": tf.py_function(lambda x: x, [name], tf.string)}, ("EagerPyFunc", "runs Python")),
        (lambda name: {"y": tf.strings.lower(name)}, None),
    ],
)
def test_dangerous_models(tmp_path, function, expected):
    """Also deep inside a function; saving and restoring the model's own variables is fine."""
    assert graph.dangers(save(tmp_path, function)) == ([expected] if expected else [])


def test_other_operations_that_are_dangerous(decoder, tiny_export):
    def dangers(**where):
        found = graph.read(tiny_export / "decoder" / "1")
        for op, function in where.items():
            nodes = found.functions[function].node_def if function else found.meta.graph_def.node
            nodes.add(name="added", op=op)
        return graph.dangers(found)

    found = graph.read(tiny_export / "decoder" / "1")
    body = next(name for name in found.functions if "signature_wrapper" in name)
    restore = next(name for name in found.functions if "traced_restore" in name)
    assert dangers() == [] and dangers(RestoreV2=restore) == []
    assert dangers(RestoreV2=body) == [("RestoreV2", "reads or writes files")]
    assert dangers(SaveV2="") == [("SaveV2", "reads or writes files")]
    assert dangers(WriteFile=restore, MyOp=body) == [
        ("MyOp", "is none of TensorFlow's public operations"),
        ("WriteFile", "reads or writes files"),
    ]
    found.functions["ReadFile"] = found.functions[body]
    found.meta.graph_def.node.add(name="call", op="ReadFile")
    assert graph.dangers(found) == [("ReadFile", "reads or writes files")]


# Take names that sound like a place, without going there.
HARMLESS = r"Cudnn.*|CTCBeamSearchDecoder|TensorSliceDataset|TPUReplicateMetadata|ApproxTopK"


def test_every_operation_that_takes_a_place_is_known():
    """All of TensorFlow's: whatever takes a file, a folder or an address is dangerous, or named above."""
    buffer = pywrap_tf_session.TF_GetAllOpList()
    operations = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(buffer)).op
    places = re.compile("file|path|dir|address|url|uri|host|descriptor_source|output_stream|server|target$", re.I)
    missed = [
        o.name
        for o in operations
        if any(places.search(a.name) for a in (*o.input_arg, *o.attr))
        and not graph.danger(o.name)
        and not re.fullmatch(HARMLESS, o.name)
    ]
    assert len(operations) > 1000 and missed == []


# === The command ===


def test_the_command(run_command, copied):
    shutil.rmtree(copied.path("decoder"))
    run = run_command("pipeline.serving", "check", copied.folder)
    assert run.returncode == 1 and "error: decoder: version 1 is missing" in run.stdout
    assert run.stdout.splitlines()[-1].endswith("version 1: 2 errors, 0 warnings, 5 notes")
    assert "Traceback" not in run.stderr
    run = run_command("pipeline.serving", "check")
    assert run.returncode == 1 and "expected one export, found 0" in run.stderr
