"""What is in an export: its manifest, its signatures, its graphs and its precision."""

import json
import platform

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from models.errors import InputError
from pipeline import export, load, manifest
from pipeline.checkpoints import source
from pipeline.manifest import Difference

PARTS = ("text_encoder", "diffusion_model", "decoder")


# === Manifest and signatures ===

N, LATENT = 4, [4, 9, 7, 4]
CONTEXTS = {"context": ("float32", [N, 77, 32]), "unconditional_context": ("float32", [N, 77, 32])}
IMAGES = {"generated_images": ("uint8", [N, 18, 14, 3])}
STATE = {"latent": ("float32", LATENT), "memory": ("float32", [4, *LATENT]), "denoised": ("float32", LATENT)}
ROWS = {
    "latent": ("float32", LATENT),
    "memory": ("float32", [4, *LATENT]),
    "steps": ("float32", [12, 39]),
    "first_step": ("int32", []),
    "last_step": ("int32", []),
    "seed": ("int32", [N, 2]),
}
# The contract's table for 2 prompts x 2 images of 18 x 14 pixels, 12 rows.
SIGNATURES = {
    "text_encoder": {
        "serving_default": ({"tokens": ("int32", [None, 77])}, CONTEXTS),
        "encode": (
            {
                "tokens": ("int32", [2, 77]),
                "negative_tokens": ("int32", [2, 77]),
                "token_weights": ("float32", [2, 77]),
                "negative_token_weights": ("float32", [2, 77]),
            },
            CONTEXTS,
        ),
    },
    "diffusion_model": {
        "serving_default": (
            CONTEXTS | {"num_steps": ("int32", []), "unconditional_guidance_scale": ("float32", [])},
            {"latent": ("float32", LATENT)},
        ),
        "denoise": (
            ROWS | CONTEXTS | {"guidance_scale": ("float32", [N]), "guidance_rescale": ("float32", [N])},
            STATE,
        ),
        "denoise_unguided": (ROWS | {"context": CONTEXTS["context"]}, STATE),
        "unet": (
            {"latent": ("float32", LATENT), "timestep": ("float32", [N]), "context": CONTEXTS["context"]},
            {"prediction": ("float32", LATENT)},
        ),
    },
    "decoder": {
        "serving_default": ({"latent": ("float32", LATENT)}, IMAGES),
        "decode": ({"latent": ("float32", LATENT)}, IMAGES | {"finite": ("bool", [N])}),
        "decode_float": ({"latent": ("float32", LATENT)}, {"image": ("float32", [N, 18, 14, 3])}),
        "decode_png": ({"latent": ("float32", LATENT)}, {"image_bytes": ("string", [N])}),
    },
}


def shapes(tensors):
    return {t.name: (t.dtype, [None if n is None else n for n in t.shape]) for t in tensors}


def test_signatures_are_the_contracts(tiny_export):
    contract = manifest.read(tiny_export)
    found = {
        part: {name: (shapes(s.inputs), shapes(s.outputs)) for name, s in signatures.items()}
        for part, signatures in contract.signatures.items()
    }
    assert found == SIGNATURES


@pytest.mark.parametrize("part", PARTS)
def test_the_files_say_what_the_manifest_says(tiny_export, part):
    """The protobuf that a server reads: names, dtypes and shapes, and no signature more."""
    found = {}
    for name, signature in saved_model(tiny_export / part / "1").meta_graphs[0].signature_def.items():
        if name != "__saved_model_init_op" and not name.startswith(manifest.ID_SIGNATURE):
            found[name] = tuple(
                {
                    key: (
                        tf.dtypes.as_dtype(t.dtype).name,
                        [None if d.size < 0 else d.size for d in t.tensor_shape.dim],
                    )
                    for key, t in tensors.items()
                }
                for tensors in (signature.inputs, signature.outputs)
            )
    assert found == SIGNATURES[part]


def test_twins_have_the_signatures_of_what_they_compile(single_export):
    contract = manifest.read(single_export)
    loops = ("diffusion_model/denoise_xla", "diffusion_model/denoise_unguided_xla")
    assert contract.xla_signatures == ("text_encoder/encode_xla", *loops, "decoder/decode_xla")
    for part, name in (twin.split("/") for twin in contract.xla_signatures):
        assert contract.signatures[part][name] == contract.signatures[part][name.removesuffix("_xla")]
    assert contract.signatures["diffusion_model"]["denoise"].inputs[0].shape == (1, 9, 7, 4)


def test_manifest(tiny_export, export_spec, checkpoint_folder):
    contract = manifest.read(tiny_export)
    assert (contract.format, contract.version, contract.checkpoint) == (manifest.FORMAT, 1, "tiny")
    assert contract.spec == export_spec() and contract.xla_signatures == () and not contract.zero_unconditional
    assert (contract.config.family, contract.config.numerics, contract.config.vae.downscale) == ("sd1", "reference", 2)
    assert contract.config.defaults.num_steps == 4
    assert len(contract.export_id) == 32 and contract.versions["tensorflow"] == tf.__version__
    # Reloading loses nothing: the same kernels on the same weights.
    compared = {f"{part}/{name}" for part, s in SIGNATURES.items() for name in s} - {
        *(f"{part}/serving_default" for part in PARTS),
        "decoder/decode_png",
    }
    assert contract.reload_difference == dict.fromkeys(compared, Difference(0.0, 0.0, None))
    # Nothing of the machine: no absolute path, no host name.
    text = (tiny_export / "manifests" / "1.json").read_text()
    assert str(checkpoint_folder.parent) not in text and platform.node() not in text


def test_every_file_has_a_checksum(tiny_export):
    contract = manifest.read(tiny_export)
    on_disk = {str(p.relative_to(tiny_export)) for p in tiny_export.rglob("*") if p.is_file()}
    assert on_disk - set(contract.files) == {"manifests/1.json"} and set(contract.files) <= on_disk
    for part in PARTS:
        assert f"{part}/1/saved_model.pb" in contract.files
        assert f"{part}/1/variables/variables.index" in contract.files
    assert {"tokenizer/vocab.json", "tokenizer/merges.txt"} <= set(contract.files)


# === Graphs ===


def saved_model(folder):
    return saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())


def graph_nodes(graph_def):
    return [*graph_def.node, *(node for f in graph_def.library.function for node in f.node_def)]


def nodes(folder):
    [graph] = saved_model(folder).meta_graphs
    return graph_nodes(graph.graph_def)


@pytest.mark.parametrize("part", PARTS)
def test_graphs_run_anywhere(tiny_export, part):
    """No accelerator's name, no layout that a CPU cannot run, no Python, no weights outside variables."""
    for node in nodes(tiny_export / part / "1"):
        assert not {"GPU", "TPU"} & set(node.device.upper().replace(":", "/").split("/")), node.name
        assert node.attr["data_format"].s in (b"", b"NHWC"), node.name
        assert node.op not in ("PyFunc", "PyFuncStateless", "EagerPyFunc", "ResizeBicubic"), node.name
        if node.op == "Const":
            assert node.attr["value"].tensor.ByteSize() <= 64 << 10, node.name


def test_the_text_encoder_has_no_branch(tiny_export, single_export):
    """Both branches of a conditional must fit under XLA; published exporters' do not (tensorflow 59818)."""
    for folder in (tiny_export, single_export):
        assert not {"If", "StatelessIf", "Switch", "Case"} & {node.op for node in nodes(folder / "text_encoder" / "1")}


@pytest.mark.parametrize("part", PARTS)
def test_only_an_export_with_twins_needs_a_server_that_compiles(tiny_export, single_export, part):
    plain = [node for node in functions(tiny_export / part / "1") if node.attr["_XlaMustCompile"].b]
    twins = [node for node in functions(single_export / part / "1") if node.attr["_XlaMustCompile"].b]
    assert plain == [] and len(twins) >= 1


def functions(folder):
    return saved_model(folder).meta_graphs[0].graph_def.library.function


def reachable(concrete):
    """All nodes that calling a signature may run."""
    library = {f.signature.name: f for f in concrete.graph.as_graph_def().library.function}
    seen, found, waiting = set(), [], list(concrete.graph.as_graph_def().node)
    while waiting:
        node = waiting.pop()
        found.append(node)
        for attribute in node.attr.values():
            for name in [attribute.func.name, *(f.name for f in attribute.list.func)]:
                if name in library and name not in seen:
                    seen.add(name)
                    waiting += library[name].node_def
    return found


def test_only_the_published_signature_draws_numbers(tiny_export):
    for part in PARTS:
        loaded = tf.saved_model.load(str(tiny_export / part / "1"))
        for name, concrete in loaded.signatures.items():
            ops = {node.op for node in reachable(concrete)}
            random = {op for op in ops if "Random" in op or "Multinomial" in op or "Rng" in op}
            assert random == (
                {"RandomStandardNormal"} if (part, name) == ("diffusion_model", "serving_default") else set()
            )
            strings = {op for op in ops if "String" in op or "EncodePng" in op}
            assert strings == ({"EncodePng"} if name == "decode_png" else set())
            unchecked = ("encode", "unet", "decode", "decode_float")
            assert ("Assert" in ops) == (name not in unchecked and not name.startswith(manifest.ID_SIGNATURE))


def test_one_loop_whatever_the_number_of_steps(tiny_export):
    """Two bodies in the library: the guided one, which serving_default shares, and the unguided one."""
    bodies = [f for f in functions(tiny_export / "diffusion_model" / "1") if "while_body" in f.signature.name]
    assert len(bodies) == 2


# === Precision ===


def size_of_variables(folder, part):
    return sum(p.stat().st_size for p in (folder / part / "1" / "variables").glob("variables.data-*"))


@pytest.mark.parametrize("part", PARTS)
def test_half_precision_halves_the_files(single_export, bfloat16_export, part):
    assert size_of_variables(bfloat16_export, part) / size_of_variables(single_export, part) == pytest.approx(
        0.5, abs=0.02
    )


def test_no_half_precision_at_the_border(bfloat16_export):
    """Signatures hold float32, int32, uint8, bool and string only."""
    found = {
        t.dtype
        for signatures in manifest.read(bfloat16_export).signatures.values()
        for s in signatures.values()
        for t in (*s.inputs, *s.outputs)
    }
    assert found == {"float32", "int32", "uint8", "bool", "string"}


def function(folder, part, name):
    return load.function(manifest.read(folder), part, name)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@pytest.mark.parametrize(
    ("part", "name", "inputs", "worst", "least"),
    [
        ("diffusion_model", "unet", {"latent": (1, 9, 7, 4), "timestep": (1,), "context": (1, 77, 32)}, 0.05, 1e-4),
        ("decoder", "decode_float", {"latent": (1, 9, 7, 4)}, 0.02, 1e-5),
    ],
)
def test_half_precision_stays_close(single_export, bfloat16_export, part, name, inputs, worst, least):
    inputs = {key: normal(*shape) for key, shape in inputs.items()}
    exact, half = (
        next(iter(function(f, part, name)(**inputs).values())).numpy() for f in (single_export, bfloat16_export)
    )
    assert least < np.abs(exact - half).max() / np.abs(exact).max() < worst


def test_half_precision_of_the_text_encoder(single_export, bfloat16_export):
    tokens = np.random.default_rng(0).integers(49408, size=(1, 77)).astype("int32")
    exact, half = (
        function(f, "text_encoder", "serving_default")(tokens=tokens) for f in (single_export, bfloat16_export)
    )
    for name in ("context", "unconditional_context"):
        error = np.abs(exact[name] - half[name]).max() / np.abs(exact[name]).max()
        assert 1e-4 < error < 0.05


def test_state_and_table_stay_float32_in_every_precision(bfloat16_export):
    """A row that multiplies by a number bfloat16 does not have: the result is float32's."""
    row = np.full((12, 39), np.nan, "float32")
    row[0] = 0
    row[0, 4::6][:5] = 0.123456789  # the diagonal of A
    latent, memory = normal(1, 9, 7, 4), normal(4, 1, 9, 7, 4, seed=1)
    result = function(bfloat16_export, "diffusion_model", "denoise")(
        latent=latent,
        memory=memory,
        steps=row,
        first_step=0,
        last_step=1,
        guidance_scale=np.ones(1, "float32"),
        guidance_rescale=np.zeros(1, "float32"),
        seed=np.zeros((1, 2), "int32"),
        context=normal(1, 77, 32),
        unconditional_context=normal(1, 77, 32),
    )
    np.testing.assert_array_equal(result["latent"], latent * np.float32(0.123456789))
    np.testing.assert_array_equal(result["memory"], memory * np.float32(0.123456789))


# === Comparison ===


def test_comparing_by_hand():
    """Peak is the reference's range: 4 / 0.1 is 32.04 dB."""
    reference = {"a": np.float32([-2, 0, 2, 1])}
    found = export.compare(reference, {"a": reference["a"] + np.float32([0.1, -0.1, 0.1, -0.1])})
    assert found.max_abs == pytest.approx(0.1) and found.mean_abs == pytest.approx(0.1)
    assert found.psnr == pytest.approx(20 * np.log10(4 / 0.1), abs=1e-4)
    assert export.compare(reference, reference) == Difference(0.0, 0.0, None)


def test_the_worst_of_several_counts():
    reference = {"a": np.float32([0, 1]), "b": np.float32([0, 1]), "c": np.float32([0, 1])}
    other = {"a": np.float32([0, 1]), "b": np.float32([0, 0.5]), "c": np.float32([0, 0.9])}
    found = export.compare(reference, other)
    assert found.max_abs == 0.5 and found.psnr == pytest.approx(10 * np.log10(1 / 0.125))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite_never_passes(bad):
    for reference, other in (([0, 1], [bad, 1]), ([bad, 1], [0, 1]), ([bad, 1], [bad, 1])):
        fine = {"first": np.float32([0, 1]), "last": np.float32([0, 1])}
        almost = {"first": np.float32([0, 1.0001]), "last": np.float32([0, 1.0001])}
        found = export.compare(
            {"first": fine["first"], "a": np.float32(reference), "last": fine["last"]},
            {"first": almost["first"], "a": np.float32(other), "last": almost["last"]},
        )
        assert not np.isfinite(found.max_abs) and not np.isfinite(found.mean_abs)
        with pytest.raises(InputError, match="the reloaded export differs from the live model"):
            export._check_reloaded({"decoder/decode": found}, 80.0)


def test_constant_references_and_other_names():
    flat = {"a": np.zeros(3, "float32")}
    assert export.compare(flat, {"a": np.float32([0, 0, 1])}).psnr == -np.inf
    with pytest.raises(ValueError, match="results differ in names or shapes"):
        export.compare(flat, {"b": np.zeros(3)})
    with pytest.raises(ValueError, match="results differ in names or shapes"):
        export.compare(flat, {"a": np.zeros(4)})


def test_the_reload_bar():
    export._check_reloaded({"a": Difference(1e-3, 1e-4, 80.0)}, 80.0)
    with pytest.raises(InputError, match=r"a: the reloaded export differs .*PSNR 79\.9 dB, at least 80 dB expected"):
        export._check_reloaded({"a": Difference(1e-3, 1e-4, 79.9)}, 80.0)


# === Refused before anything is written ===


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 17}, "--height 17: must be a multiple of 2; nearest: 16 or 18"),
        ({"max_steps": 1001}, "--max_steps 1001"),
    ],
)
def test_specs_are_checked_first(checkpoint_folder, export_spec, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        export.export(source.diffusers_source(checkpoint_folder), tmp_path / "out", export_spec(**changes))
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_larger_than_the_text_encoders(damaged_checkpoint, export_spec, tmp_path):
    path = damaged_checkpoint / "text_encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 49400}))
    with pytest.raises(InputError, match="makes token id 49407, but the text encoder has 49400 ids"):
        export.export(source.diffusers_source(damaged_checkpoint), tmp_path / "out", export_spec())
