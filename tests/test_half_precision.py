"""Float16 exports, other VAEs and fewer text layers: what is stored, what it costs, what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from models import vae
from models.errors import InputError
from models.text_encoder import TextEncoder
from pipeline import export, generate, load, manifest
from pipeline.checkpoints import diffusers_folder, hub, keymaps, loader, other_vae, single_file
from pipeline.checkpoints import source as sources
from pipeline.images import png
from pipeline.sampling import noise, settings

GOLDENS = Path(__file__).parent / "goldens"
CLIP_SKIP = GOLDENS / "clip_skip.npz"
VAE_FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def other_folder(checkpoint_folder, tmp_path_factory):
    """A VAE in a folder of its own: the tiny checkpoint's, doubled where it ends, and safe in float16."""
    folder = Path(shutil.copytree(checkpoint_folder / "vae", tmp_path_factory.mktemp("vaes") / "bright"))
    tensors = load_file(folder / VAE_FILE)
    tensors["decoder.conv_out.weight"] = 2 * tensors["decoder.conv_out.weight"]
    save_file(tensors, folder / VAE_FILE)
    config = json.loads((folder / "config.json").read_text()) | {"force_upcast": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def half_export(exports, checkpoint_folder, other_folder, export_spec):
    """1 prompt x 1 image in float16, with another VAE and without the last text layer; and what was printed."""
    spec = export_spec(prompts=1, images_per_prompt=1, dtype="float16", max_steps=4)
    source = sources.diffusers_source(checkpoint_folder, vae=str(other_folder), clip_skip=1)
    export.export(source, exports / "half", spec)
    return exports / "half"


# === Float16 ===


def size_of_variables(folder, part):
    return sum(p.stat().st_size for p in (folder / part / "1" / "variables").glob("variables.data-*"))


@pytest.mark.parametrize("part", ["diffusion_model", "decoder"])
def test_float16_halves_the_files(single_export, half_export, part):
    ratio = size_of_variables(half_export, part) / size_of_variables(single_export, part)
    assert ratio == pytest.approx(0.5, abs=0.02)


def test_the_manifest_says_what_half_precision_costs(half_export):
    contract = manifest.read(half_export)
    found = contract.float32_difference
    assert found.keys() == {"text_encoder/encode", "diffusion_model/unet", "decoder/decode_float"}
    for name, difference in found.items():
        # Rounded to 11 bits: not equal, and not far.
        assert 50 < difference.psnr < 100, name
    text = manifest.describe(contract)
    assert "float16 against float32:" in text and "VAE bright, without the last 1 layers of text" in text
    for name in found:
        assert text.count(name) == 2


def test_no_half_precision_at_the_border(half_export):
    signatures = [s for part in manifest.read(half_export).signatures.values() for s in part.values()]
    found = {t.dtype for s in signatures for t in (*s.inputs, *s.outputs)}
    assert found == {"float32", "int32", "uint8", "bool", "string"}


def test_float16_draws_and_says_so(half_export, tmp_path):
    functions = load.local(half_export)
    drawn = generate.generate(functions, "a red apple", seed=3, num_steps=3)
    assert drawn.shape == (1, 18, 14, 3) and drawn.std() > 5
    chosen = settings.settings(functions.manifest, None, 3, 3.0)
    text = png.parameters(functions, "a red apple", None, noise.image_seeds(3, 1)[0], chosen, 3.0)
    digest = functions.manifest.vae.sha256
    assert f"VAE hash: {digest[:10]}, VAE: bright, Clip skip: 2, " in text
    path = png.save(drawn[0], 3, text, tmp_path)
    with Image.open(path) as image:
        assert "Clip skip: 2" in image.text["parameters"]


def test_an_export_that_is_not_finite_is_refused(checkpoint_folder, export_spec, tmp_path):
    """A norm that scales to 1e5: fine in float32, beyond float16."""
    folder = Path(shutil.copytree(checkpoint_folder, tmp_path / "loud"))
    tensors = load_file(folder / "text_encoder" / "model.safetensors")
    tensors["text_model.final_layer_norm.weight"] = np.full(32, 6e4, "float32")
    save_file(tensors, folder / "text_encoder" / "model.safetensors")
    spec = export_spec(prompts=1, images_per_prompt=1, dtype="float16", max_steps=4)
    with pytest.raises(InputError) as error:
        export.export(sources.diffusers_source(folder), tmp_path / "export", spec, compare_float32=False)
    assert str(error.value) == (
        "text_encoder/encode: NaN or infinite values in float16: numbers too large for it; try --dtype bfloat16"
    )
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("part", "dtype", "advice"),
    [
        ("diffusion_model", "float16", "try --dtype bfloat16$"),
        ("decoder", "float16", "try --dtype bfloat16, or --vae with one that is safe in float16$"),
        ("diffusion_model", "bfloat16", "try --dtype float32$"),
        ("decoder", "float32", "try another checkpoint; these weights cannot draw$"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_to_try(part, dtype, advice, value):
    fine = {"x": np.ones(2, "float32"), "n": np.ones(2, "int32"), "ok": np.zeros(1, bool)}
    export.check_finite(part, {"f": fine}, dtype)
    with pytest.raises(InputError, match=f"^{part}/g: NaN or infinite values in {dtype}: .*{advice}"):
        export.check_finite(part, {"f": fine, "g": {"x": np.float32([1, value])}}, dtype)


# === Another VAE ===


@pytest.fixture(scope="module")
def own(checkpoint_folder):
    return diffusers_folder.read_config(checkpoint_folder).vae


def decoder_weights(found):
    layers = [vae.VAEDecoder(found.config), vae.VAEEncoder(found.config)]
    assert loader.load(layers, found.tensors, keymaps.DIFFUSERS["vae"], found.where) == []
    return {v.path: v.numpy() for layer in layers for v in layer.variables}


def test_a_folder_a_checkpoint_and_a_file_hold_the_same(other_folder, checkpoint_folder, own, tmp_path):
    """Also a whole checkpoint's folder, and a single file in either naming."""
    expected = decoder_weights(other_vae.find(str(other_folder), own))
    found = other_vae.find(str(other_folder), own)
    assert found.config == dataclasses.replace(own, force_upcast=False) and found.used.name == "bright"
    assert found.used.sha256 == manifest.sha256(other_folder / VAE_FILE)

    whole = Path(shutil.copytree(checkpoint_folder, tmp_path / "whole"))
    shutil.rmtree(whole / "vae")
    shutil.copytree(other_folder, whole / "vae")
    tensors = load_file(other_folder / VAE_FILE)
    save_file(tensors, tmp_path / "plain.safetensors")
    save_file(original_names(own, tensors), tmp_path / "original.safetensors")
    for option in (whole, tmp_path / "plain.safetensors", tmp_path / "original.safetensors"):
        found = other_vae.find(str(option), own)
        weights = decoder_weights(found)
        assert weights.keys() == expected.keys() and found.used.name == option.stem
        assert all((weights[name] == expected[name]).all() for name in expected)
        # A file says nothing of how it may be computed.
        assert found.config.force_upcast is (option.suffix == ".safetensors")


def original_names(config, tensors):
    """diffusers' names to the original's, by the table that is used the other way round."""
    table = sorted(single_file.vae_table(config).items(), key=lambda entry: -len(entry[1][0]))

    def original(name):
        for theirs, (ours, inner) in table:
            layer, _, kind = name.removeprefix(f"{ours}.").rpartition(".")
            if name.startswith(f"{ours}.") and (inner is None or layer in inner.values()):
                layer = layer if inner is None else next(k for k, v in inner.items() if v == layer)
                return ".".join(filter(None, (theirs, layer, kind)))
        raise KeyError(name)

    return {original(name): array for name, array in tensors.items()}


REFUSED = {
    "nothing there": ("no/such/vae.safetensors", {}, "--vae .*: no such folder or file; expected a VAE's folder"),
    "other latents": ("", {"scaling_factor": 0.13025}, "its scaling_factor is 0.13025, the checkpoint's is 0.18215"),
    "four times smaller": (
        "",
        {
            "block_out_channels": [16, 32, 32],
            "down_block_types": ["DownEncoderBlock2D"] * 3,
            "up_block_types": ["UpDecoderBlock2D"] * 3,
        },
        "its downscale is 4, the checkpoint's is 2; take a VAE of the same family",
    ),
    "no weights": ("", {"_file": None}, "expected diffusion_pytorch_model.safetensors"),
    "a pickle": ("vae.ckpt", {}, "vae.ckpt: pickle files can run code and are not read; pass --allow_pickle, or"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_vaes_that_are_refused(other_folder, own, tmp_path, case):
    name, changes, message = REFUSED[case]
    folder = Path(shutil.copytree(other_folder, tmp_path / "vae"))
    if changes.pop("_file", "kept") is None:
        (folder / VAE_FILE).unlink()
    (tmp_path / "vae.ckpt").write_bytes(b"")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        other_vae.find(str(tmp_path / name if name else folder), own)


@pytest.mark.parametrize("whole", [True, False])
def test_a_vae_from_the_hub(other_folder, own, monkeypatch, tmp_path, whole):
    """Its two files, from a repository of its own or from a checkpoint's."""
    prefix = "vae/" if whole else ""
    files = [f"{prefix}config.json", f"{prefix}{VAE_FILE}", f"{prefix}diffusion_pytorch_model.bin", "README.md"]
    files += ["model_index.json", "unet/" + VAE_FILE] if whole else ["vae.safetensors"]
    repository = hub.Repository("org/bright", "main", "c" * 40, dict.fromkeys(files, 1), None, tmp_path)
    (tmp_path / "snapshot").mkdir()
    shutil.copytree(other_folder, tmp_path / "snapshot" / prefix, dirs_exist_ok=True)
    fetched = []
    monkeypatch.setattr(hub, "find", lambda option: repository)
    monkeypatch.setattr(hub, "fetch", lambda _, names: fetched.extend(names) or tmp_path / "snapshot")
    found = other_vae.find("org/bright@v1", own)
    assert fetched == files[:2] and found.used.name == "bright"
    assert (decoder_weights(found)["decoder.conv_in/kernel"] != 0).any()


# === Fewer text layers ===


@pytest.mark.parametrize(
    ("name", "skip"),
    [
        ("tiny_sd1", 0),
        ("tiny_sd1", 1),
        *(("families/sd2", n) for n in range(3)),
        *(("families/sdxl", n) for n in (0, 1)),
    ],
)
def test_clip_skip_is_diffusers(name, skip):
    """Context and pooled vector of its pipelines; layers that nothing depends on are not even built."""
    with np.load(CLIP_SKIP) as golden:
        config = sources.skip_layers(diffusers_folder.read_config(GOLDENS / name), skip)
        contexts, pooled = [], None
        for encoder, suffix in zip(config.text_encoders, ("", "_2"), strict=False):
            model, component = TextEncoder(encoder), f"text_encoder{suffix}"
            tensors = diffusers_folder.read_weights(GOLDENS / name, component)
            ignored = loader.load([model], tensors, keymaps.of_component(component, config), name)
            assert len(model.blocks) == encoder.built_layers
            assert any("encoder.layers" in key for key in ignored) == (encoder.built_layers < encoder.num_hidden_layers)
            context, pooled = model(golden[f"{name}/tokens{suffix}"])
            contexts.append(np.asarray(context))
        np.testing.assert_allclose(np.concatenate(contexts, -1), golden[f"{name}/{skip}/context"], rtol=0, atol=1e-5)
        if pooled is not None:
            np.testing.assert_allclose(pooled, golden[f"{name}/{skip}/pooled"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("skip", [-1, 2, 12])
def test_clip_skip_out_of_range(checkpoint_folder, skip):
    with pytest.raises(InputError, match=f"^--clip_skip {skip}: must be 0..1$"):
        sources.diffusers_source(checkpoint_folder, clip_skip=skip)
