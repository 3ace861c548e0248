"""Convolutions through six points and attention head by head: --target cpu computes what is computed without."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

from models import layers, unet, vae, winograd
from models.families import FAMILIES


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def test_matrices_of_the_paper():
    """F(4x4, 3x3) of Lavin and Gray, section 4.3: points 0, 1, -1, 2, -2 and infinity."""
    outputs, kernel, inputs = winograd.matrices(tuple(map(Fraction, (0, 1, -1, 2, -2))))
    np.testing.assert_array_equal(
        outputs, [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
    )
    np.testing.assert_allclose(24 * kernel[:3], [[6, 0, 0], [-4, -4, -4], [-4, 4, -4]], rtol=1e-15)
    np.testing.assert_allclose(24 * kernel[3:], [[1, 2, 4], [1, -2, 4], [0, 0, 24]], rtol=1e-15)
    np.testing.assert_array_equal(inputs[:2], [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0]])
    np.testing.assert_array_equal(inputs[3:], [[0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]])


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 14), (4, 7), (1, 2)])
def test_convolution_equals_its_definition(height, width):
    """Zeros around it, whole tiles or not; errors as rounding leaves them, for unit results."""
    image, kernel = normal(2, height, width, 40), normal(3, 3, 40, 48, seed=1) / np.float32(np.sqrt(9 * 40))
    expected = tf.nn.conv2d(image.astype("float64"), kernel.astype("float64"), 1, "SAME").numpy()
    found = np.array(winograd.convolve(image, winograd.transform(kernel)))
    assert found.dtype == np.float32 and found.shape == (2, height, width, 48)
    assert 1e-8 < np.sqrt(np.mean((found - expected) ** 2)) < 2e-6


def test_which_convolutions_of_a_full_size_model_are_tuned(monkeypatch):
    """3x3, neither strided nor with few channels, up to 640 outputs: in 1.x, those of the two finest resolutions."""
    # Shapes only.
    monkeypatch.setattr(layers.Layer, "weight", lambda self, name, shape, initializer: np.broadcast_to(0.0, shape))

    def tuned(model):
        kernels = {layer.name: layer for layer in model._flatten_layers() if isinstance(layer, layers.Conv2D)}
        return {name for name, layer in kernels.items() if layer.gains_by_winograd}, set(kernels)

    found, every = tuned(unet.UNet(FAMILIES["sd1"].unet))
    fine = {f"{way}.{i}.resnets.{j}.conv{k}" for k in (1, 2) for way, i, n in FINE for j in range(n)}
    assert found == fine | {"up_blocks.2.upsamplers.0.conv"}
    assert every > found | {"conv_in", "conv_out", "down_blocks.0.downsamplers.0.conv", "down_blocks.2.resnets.0.conv1"}
    found, every = tuned(vae.VAEDecoder(FAMILIES["sd1"].vae))
    assert {name for name in every - found if "shortcut" not in name} == {
        *("post_quant_conv", "decoder.conv_in", "decoder.conv_out")
    }


FINE = (("down_blocks", 0, 2), ("down_blocks", 1, 2), ("up_blocks", 2, 3), ("up_blocks", 3, 3))


@pytest.mark.parametrize(("rows", "maps"), [(4, [6, 3, 3, 3, 3, 3, 3]), (99, [])])
def test_attention_head_by_head(monkeypatch, rows, maps):
    """12 queries of 2 images x 3 heads in chunks of 4 where one head's logits fill TILE_BYTES, else all at once."""
    monkeypatch.setattr(layers, "TILE_BYTES", rows * 4 * 7)
    found, plain_map = [], layers.ops.map

    def watched(function, xs):
        found.append(len(xs[0]) if isinstance(xs, tuple) else xs.shape[0])
        return plain_map(function, xs)

    monkeypatch.setattr(layers.ops, "map", watched)
    query, key, value = normal(2, 12, 24), 3 * normal(2, 7, 24, seed=1), normal(2, 7, 24, seed=2)
    given = layers.attention(query, key, value, 3)
    np.testing.assert_allclose(layers.attention(query, key, value, 3, tiled=True), given, atol=2e-6)
    assert sorted(found, reverse=True)[: len(maps)] == maps and bool(found) == bool(maps)


def test_large_logits_stay_finite():
    query = np.full((1, 1024, 8), 100, "float32")
    value = normal(1, 1024, 8)
    found = np.array(layers.attention(query, query, value, 1, tiled=True))
    np.testing.assert_allclose(found, np.broadcast_to(value.mean(1), found.shape[1:])[None], atol=1e-5)


def test_a_network_tuned_for_cpus():
    """The same numbers but for rounding; kernels at six by six points; all else as before."""
    config = FAMILIES["sd1"].unet
    small = {"block_out_channels": (32, 672), "layers_per_block": 1, "transformer_layers": (1, 0)}
    small |= {"norm_num_groups": 4, "num_attention_heads": (2, 4), "cross_attention_dim": 8}
    exact, model = (unet.UNet(dataclasses.replace(config, **small)) for _ in range(2))
    before = {v.path: v.numpy() for v in exact.variables}
    for variable, value in zip(model.variables, before.values(), strict=True):
        variable.assign(value)
    inputs = (normal(2, 10, 6, 4), np.float32([500, 20]), normal(2, 77, 8, seed=1))
    expected = np.array(exact(*inputs))
    layers.tune_network_for_cpu(model)
    after = {v.path: v for v in model.variables}
    assert set(after) == set(before)
    changed = {path for path, v in after.items() if v.shape != before[path].shape}
    assert "down_blocks.0.resnets.0.conv1/kernel" in changed and "up_blocks.1.resnets.0.conv1/kernel" in changed
    assert not any(name in path for path in changed for name in ("conv_in", "conv_out", "samplers", "down_blocks.1"))
    assert all(after[path].shape == (36, *before[path].shape[2:]) for path in changed)
    error = np.array(model(*inputs)) - expected
    assert 100 < 20 * np.log10(np.ptp(expected) / np.sqrt(np.mean(error**2))) < 160
