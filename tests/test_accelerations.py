"""What is faster or smaller and changes pictures: kept features, downsampled attention, int8 weights. All opt-in."""

import dataclasses

import numpy as np
import pytest
from keras import ops

from models import layers, unet
from models.config import InputError
from models.families import FAMILIES
from pipeline import export, generate, load, manifest, sources

CONFIG = dataclasses.replace(
    FAMILIES["sd1"].unet,
    block_out_channels=(16, 32),
    layers_per_block=1,
    transformer_layers=(1, 1),
    num_attention_heads=(2, 4),
    cross_attention_dim=8,
    norm_num_groups=4,
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@pytest.fixture(scope="module")
def model():
    return unet.UNet(CONFIG)


INPUTS = (normal(2, 8, 6, 4), np.float32([500, 500]))
CONTEXT = normal(2, 77, 8, seed=1)

# === Features kept from step to step ===


def test_fresh_features_change_nothing(model):
    prepared = model.prepare(CONTEXT)
    expected = np.array(model.predict(*INPUTS, **prepared))
    zeros = np.zeros((2, 8, 6, model.deep_channels), "float32")
    found, features = model.predict_again(*INPUTS, zeros, True, **prepared)
    np.testing.assert_array_equal(found, expected)
    again, kept = model.predict_again(*INPUTS, features, False, **prepared)
    np.testing.assert_array_equal(again, expected)
    np.testing.assert_array_equal(kept, features)


def test_kept_features_stand_for_all_but_three_layers(model):
    """Other features, another picture; and the layers around them still see the new latent."""
    prepared = model.prepare(CONTEXT)
    _, features = model.predict_again(*INPUTS, None, None, **prepared)
    first = np.array(model.predict_again(*INPUTS, features, False, **prepared)[0])
    other = np.array(model.predict_again(*INPUTS, features + 1, False, **prepared)[0])
    moved = np.array(model.predict_again(INPUTS[0] + 1, INPUTS[1], features, False, **prepared)[0])
    exact = np.array(model.predict(INPUTS[0] + 1, INPUTS[1], **prepared))
    assert min(np.abs(first - other).max(), np.abs(first - moved).max(), np.abs(moved - exact).max()) > 1e-3


# === Attention to some pixels ===


def test_every_second_row_and_column_is_seen(monkeypatch):
    """Every pixel attends, to (0, 0), (0, 2), ... (4, 4) of 5 x 6; the coarser level sees all of its own."""
    seen = []
    original = unet.attention

    def watched(query, key, value, *rest, **more):
        seen.append((query.shape[1], key.shape[1]))
        return original(query, key, value, *rest, **more)

    monkeypatch.setattr(unet, "attention", watched)
    latent = normal(1, 5, 6, 4)
    unet.UNet(CONFIG, attention_downsample=2)(latent, np.float32([500]), CONTEXT[:1])
    fine, coarse, text = (30, 9), (9, 9), 77
    down = [fine, (30, text), coarse, (9, text)]
    assert seen == [*down, coarse, (9, text), *[coarse, (9, text)] * 2, *[fine, (30, text)] * 2]


def test_the_seen_pixels_are_those_of_even_rows_and_columns():
    block = unet.Transformer("t", CONFIG, 16, 1, 2, 2, "float32")
    block.norm = lambda x: x
    keys_values = {block.transformer_blocks[0].attn2.name: (np.zeros((1, 2, 16), "float32"),) * 2}
    image = normal(1, 4, 4, 16)
    before = np.array(block(image, keys_values))
    for row, column, others_change in ((1, 1, False), (2, 1, False), (1, 2, False), (2, 2, True)):
        changed = image.copy()
        changed[0, row, column] += 1
        after = np.array(block(changed, keys_values))
        after[0, row, column] = before[0, row, column]
        assert (after != before).any() == others_change


# === Weights as 8-bit integers ===


def test_kernels_are_kept_to_half_a_step():
    layer = layers.Dense("d", 3, 2, "float32")
    layer.kernel.assign([[1.0, 0.0], [-127.0, 0.0], [63.4, 0.0]])
    layer.quantise()
    assert layer.kernel.dtype == "int8" and [v.name for v in layer.variables] == ["bias", "kernel", "scale"]
    np.testing.assert_array_equal(layer.kernel.numpy(), [[1, 0], [-127, 0], [63, 0]])
    np.testing.assert_array_equal(layer.scale.numpy(), [1.0, 1.0])
    np.testing.assert_allclose(layer(np.float32([[0, 1, 1]])), [[-64.0, 0.0]])


def test_a_network_of_8_bit_kernels():
    """Every kernel, none of the rest; each weight within half a step of its channel's largest."""
    exact, model = unet.UNet(CONFIG), unet.UNet(CONFIG)
    for variable, other in zip(model.variables, exact.variables, strict=True):
        variable.assign(other)
    before = {v.path: v.numpy() for v in model.variables}
    expected = np.array(exact(*INPUTS, CONTEXT))
    layers.quantise(model)
    after = {v.path: v for v in model.variables}
    kernels = {path for path in before if path.endswith("/kernel")}
    assert {path for path, v in after.items() if v.dtype == "int8"} == kernels
    assert set(after) - set(before) == {path.replace("/kernel", "/scale") for path in kernels}
    for path in kernels:
        scale = after[path.replace("/kernel", "/scale")].numpy()
        assert (np.abs(after[path].numpy() * scale - before[path]) <= 0.51 * scale).all()
    error = np.array(model(*INPUTS, CONTEXT)) - expected
    assert 30 < 20 * np.log10(np.ptp(expected) / np.sqrt(np.mean(error**2))) < 60
    assert ops.dtype(model(*INPUTS, CONTEXT)) == "float32"


# === Exports ===


@pytest.fixture(scope="module")
def fast_export(exports, checkpoint_folder, export_spec):
    spec = export_spec(
        prompts=1, images_per_prompt=1, max_steps=8, feature_cache=3, attention_downsample=2, weights="int8"
    )
    export.export(sources.diffusers_source(checkpoint_folder), exports / "fast", spec, compare_float32=False)
    return exports / "fast"


def test_files_of_8_bit_weights_are_a_quarter(single_export, fast_export):
    def size(folder):
        return sum(p.stat().st_size for p in folder.glob("diffusion_model/1/variables/variables.data-*"))

    assert size(fast_export) == pytest.approx(0.25 * size(single_export), rel=0.2)


def test_the_manifest_says_what_was_changed(fast_export, export_spec):
    contract = manifest.read(fast_export)
    words = "float32, int8 weights, attention downsampled by 2, features cached for 3 steps"
    assert contract.spec.precision == words and f"  weights    {words}\n" in manifest.describe(contract)
    assert contract.spec.exact == export_spec(prompts=1, images_per_prompt=1, max_steps=8) != contract.spec


def test_pictures_do_not_depend_on_the_bar(fast_export):
    """Calls of whole intervals: 2 steps a call become 3, and the picture that of one call for all, bit for bit."""
    functions = load.local(fast_export, verify=False)
    calls = []
    whole = generate.generate(functions, "a red apple", num_steps=7)
    chunked = generate.generate(functions, "a red apple", num_steps=7, steps_per_call=2, progress=calls.append)
    np.testing.assert_array_equal(chunked, whole)
    assert calls == [3, 3, 1]


def test_an_export_for_cpus_draws_the_same(single_export, exports, checkpoint_folder, export_spec):
    """Its numbers are the exact export's but for rounding, and it says so; peers are asked for it as for that."""
    spec = export_spec(prompts=1, images_per_prompt=1, max_steps=8, target="cpu")
    export.export(sources.diffusers_source(checkpoint_folder), exports / "cpu", spec)
    contract = manifest.read(exports / "cpu")
    assert contract.spec.precision == "float32, tuned for processors" and contract.spec.exact.target == "any"
    found = contract.float32_difference
    assert set(found) == {"text_encoder/encode", "diffusion_model/unet", "decoder/decode_float"}
    assert all(difference.psnr is None or difference.psnr > 100 for difference in found.values())
    pictures = [generate.generate(load.local(f), "a red apple", num_steps=3) for f in (single_export, exports / "cpu")]
    levels = np.abs(pictures[0].astype(int) - pictures[1].astype(int))
    assert levels.max() <= 1 and len(np.unique(pictures[0])) > 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_cache": 0}, r"--feature_cache 0: must be 1..256"),
        ({"attention_downsample": 9}, r"--attention_downsample 9: must be 1..8"),
        ({"weights": "int4"}, r"--weights int4: must be one of dtype, int8"),
        ({"target": "gpu"}, r"--target gpu: must be one of any, cpu"),
        ({"target": "cpu", "weights": "int8"}, r"--target cpu computes in float32: .* nor --weights int8"),
        ({"target": "cpu", "dtype": "bfloat16"}, r"--target cpu computes in float32: give it neither another --dtype"),
    ],
)
def test_what_cannot_be(export_spec, change, message):
    with pytest.raises(InputError, match=message):
        export_spec(height=16, width=16, **change).check(FAMILIES["sd1"])
