"""Layers and networks against exact values: where ports of Stable Diffusion go wrong by a little."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from models import layers, text_encoder, unet, vae
from models.families import FAMILIES, kerascv_numerics

SD1 = FAMILIES["sd1"]
UNET = dataclasses.replace(
    SD1.unet,
    block_out_channels=(16, 32),
    layers_per_block=1,
    transformer_layers=(1, 0),
    num_attention_heads=(2, 4),
    cross_attention_dim=8,
    norm_num_groups=4,
)
VAE = dataclasses.replace(SD1.vae, block_out_channels=(8, 16, 16, 16), layers_per_block=1, norm_num_groups=4)
CLIP = dataclasses.replace(
    SD1.text_encoder, vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@pytest.fixture(scope="module")
def networks():
    """UNet, decoder and encoder, never changed by a test."""
    return unet.UNet(UNET), vae.VAEDecoder(VAE), vae.VAEEncoder(VAE)


@pytest.mark.parametrize(("padding", "expected"), [((1, 1), [3.0, 9.0]), ((0, 1), [6.0, 7.0])])
def test_strided_convolutions_pad_as_pytorch_does(padding, expected):
    """Kernel of ones over 1, 2, 3, 4: the UNet pads both sides, the VAE encoder right and bottom only."""
    image = np.broadcast_to(np.float32([1, 2, 3, 4])[:, None], (4, 4))
    layer = layers.Downsample("down", 1, padding, "float32")
    kernel = np.zeros((3, 3, 1, 1), "float32")
    kernel[:, 1] = 1
    layer.conv.kernel.assign(kernel)
    down = np.array(layer(image.reshape(1, 4, 4, 1)))[0, :, :, 0]
    np.testing.assert_array_equal(down, np.array(expected)[:, None] * np.ones((1, 2)))
    layer.conv.kernel.assign(kernel.transpose(1, 0, 2, 3))
    np.testing.assert_array_equal(np.array(layer(image.T.reshape(1, 4, 4, 1)))[0, :, :, 0], down.T)


def test_networks_pad_their_strided_convolutions(networks):
    model, _, encoder = networks
    assert model.down_blocks[0].resample.conv.padding == ((1, 1), (1, 1))
    assert [d.conv.padding for d in encoder.downsamplers] == [((0, 1), (0, 1))] * 3


@pytest.mark.parametrize(("epsilon", "expected"), [(1e-5, 0.301511), (1e-6, 0.707107)])
def test_epsilon_of_group_norm(epsilon, expected):
    x = np.float32([0.001, -0.001]).reshape(1, 1, 1, 2)
    y = layers.GroupNorm("norm", 2, 1, epsilon, "float32")(x)
    np.testing.assert_allclose(np.ravel(y), [expected, -expected], rtol=2e-5)


def test_epsilons_of_the_profiles(networks):
    """diffusers: 1e-6 in the VAE and before transformers, 1e-5 in residual blocks; KerasCV: 1e-5 everywhere."""

    def epsilons(network):
        return {layer.epsilon for layer in network._flatten_layers() if isinstance(layer, layers.GroupNorm)}

    kerascv = kerascv_numerics(dataclasses.replace(SD1, unet=UNET, vae=VAE))
    model, decoder, encoder = networks
    transformers = [layer.norm for layer in model._flatten_layers() if isinstance(layer, unet.Transformer)]
    assert {norm.epsilon for norm in transformers} == {1e-6} and len(transformers) == 4
    assert epsilons(model) == {1e-5, 1e-6} and epsilons(unet.UNet(kerascv.unet)) == {1e-5}
    assert epsilons(decoder) == epsilons(encoder) == {1e-6}
    assert epsilons(vae.VAEDecoder(kerascv.vae)) == {1e-5}


def test_group_norm_in_half_precision():
    """300^2 is beyond float16, so statistics are taken in float32."""
    x = np.float16([300, -300, 300, -300]).reshape(1, 2, 1, 2)
    norm = layers.GroupNorm("norm", 2, 1, 1e-5, "float32")
    y = norm(ops.convert_to_tensor(x))
    assert y.dtype == tf.float16
    np.testing.assert_allclose(np.float32(y), norm(x.astype("float32")), atol=2e-3)


def test_group_norm_equals_its_definition():
    x, norm = normal(2, 3, 5, 6) * 3 + 2, layers.GroupNorm("norm", 6, 3, 1e-5, "float32")
    norm.gamma.assign(normal(6, seed=1))
    norm.beta.assign(normal(6, seed=2))
    grouped = x.astype("float64").reshape(2, 15, 3, 2)
    mean, variance = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    expected = ((grouped - mean) / np.sqrt(variance + 1e-5)).reshape(x.shape) * norm.gamma.numpy() + norm.beta.numpy()
    np.testing.assert_allclose(norm(x), expected, atol=2e-6)


GELU = {"gelu": (1.9544997, 2.6906392), "gelu_tanh": (1.9545977, 2.6911124), "quick_gelu": (1.9356586, None)}


def test_three_kinds_of_gelu():
    quick, erf = (text_encoder.ACTIVATIONS[name] for name in ("quick_gelu", "gelu"))
    two = ops.convert_to_tensor(2.0)
    assert float(quick(two)) == pytest.approx(GELU["quick_gelu"][0], abs=1e-6)
    assert float(erf(two)) == pytest.approx(GELU["gelu"][0], abs=1e-6)
    assert float(erf(ops.convert_to_tensor(2.7))) == pytest.approx(GELU["gelu"][1], abs=1e-6)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_of_the_gated_layer(name):
    """value * gelu(gate), value first, of the variant that the profile names."""
    block = unet.TransformerBlock("b", dataclasses.replace(UNET, geglu_act=name), 1, 1, "float32")
    for layer in (block.attn1.to_out, block.attn2.to_out, block.proj, block.out):
        layer.kernel.assign(np.zeros(layer.kernel.shape))
    block.proj.bias.assign([10, 0, 0, 0, 2.7, 5, 5, 5])  # values, then gates
    block.out.kernel.assign(np.ones((4, 1)))
    y = block(*[np.zeros((1, 2, 1), "float32")] * 3)
    assert float(y[0, 0, 0]) == pytest.approx(10 * GELU[name][1], abs=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_attention_logits_do_not_overflow(dtype):
    """40 * 40 * 64 is beyond float16: scaled first, the weights are exactly 1 / n."""
    q = ops.full((1, 8, 64), 40.0, dtype=dtype)
    value = ops.cast(normal(1, 8, 64), dtype)
    y = layers.attention(q, q, value, num_heads=1)
    assert y.dtype == value.dtype
    expected = np.broadcast_to(np.float32(value).mean(1, keepdims=True), (1, 8, 64))
    np.testing.assert_allclose(
        np.float32(y), expected, atol={"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-6}[dtype]
    )


@pytest.mark.parametrize(("rows", "chunks"), [(6, []), (5, [(2, 3)]), (2, [(3, 2)]), (1, [(6, 1)]), (0, [(6, 1)])])
def test_attention_equals_its_definition(monkeypatch, rows, chunks):
    """In one piece and, where there is room for the logits of `rows` of the 6 queries, in chunks of a divisor of 6."""
    monkeypatch.setattr(layers, "CHUNK_BYTES", rows * 4 * 2 * 3 * 7)
    found, plain_map = [], ops.map
    monkeypatch.setattr(
        ops, "map", lambda function, xs: found.append((xs.shape[0], xs.shape[3])) or plain_map(function, xs)
    )
    query, key, value = normal(2, 6, 12), normal(2, 7, 12, seed=1), normal(2, 7, 12, seed=2)
    expected = np.zeros((2, 6, 12))
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        logits = query[..., part].astype("float64") @ key[..., part].transpose(0, 2, 1) / 2.0
        weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        expected[..., part] = weights @ value[..., part]
    np.testing.assert_allclose(layers.attention(query, key, value, num_heads=3), expected, atol=2e-6)
    assert found == chunks


def test_masked_attention_blocks_exactly_the_future():
    """4 x 4: 6 entries forbidden, no NaN; identical keys give the mean of what may be seen."""
    ones = np.ones((1, 4, 2), "float32")
    value = np.float32([[[0, 0], [1, 1], [2, 2], [3, 3]]])
    mask = np.tril(np.ones((4, 4), bool))
    assert (~mask).sum() == 6
    y = layers.attention(ones, ones, value, 1, mask)
    np.testing.assert_array_equal(y[0, :, 0], [0, 0.5, 1, 1.5])


def test_text_encoder_is_causal():
    """Changing token j changes outputs from position j on and none before, bit for bit."""
    encoder = text_encoder.TextEncoder(CLIP)
    tokens = np.random.default_rng(0).integers(100, size=(1, 77)).astype("int32")
    before = np.array(encoder(tokens)[0])
    assert np.isfinite(before).all()
    for j in (0, 1, 40, 76):
        changed = tokens.copy()
        changed[0, j] = (tokens[0, j] + 1) % 100
        after = np.array(encoder(changed)[0])
        np.testing.assert_array_equal(after[:, :j], before[:, :j])
        assert (np.abs(after - before).max(-1)[0, j:] > 0).all()


def test_nearest_upsampling_cut_to_an_odd_size():
    """9 from 5 as PyTorch's nearest-neighbour resizing gives it: source floor(i * 5 / 9)."""
    layer = layers.Upsample("up", 1, "float32")
    kernel = np.zeros((3, 3, 1, 1), "float32")
    kernel[1, 1] = 1
    layer.conv.kernel.assign(kernel)
    x = normal(2, 5, 4, 1)
    for height, width in ((10, 8), (9, 7), (9, 8)):
        rows, columns = (np.floor(np.arange(n) * m / n).astype(int) for n, m in ((height, 5), (width, 4)))
        np.testing.assert_array_equal(layer(x, size=(height, width)), x[:, rows][:, :, columns])
    assert layer(x).shape == (2, 10, 8, 1)


@pytest.mark.parametrize(("height", "width"), [(9, 7), (8, 8), (5, 12)])
def test_odd_latents(networks, height, width):
    """72 x 56 pixels are latents of 9 x 7: every size comes out as it went in."""
    model, decoder, encoder = networks
    latent = normal(2, height, width, 4)
    prediction = model(latent, np.float32([999, 0]), normal(2, 77, 8))
    assert prediction.shape == latent.shape and np.isfinite(prediction).all()
    image = decoder(latent)
    assert image.shape == (2, 8 * height, 8 * width, 3)
    mean, deviation = encoder(image)
    assert mean.shape == deviation.shape == latent.shape and (np.array(deviation) > 0).all()


def test_time_embedding():
    """Cosines first, frequencies 10000^(-i/half): 0 gives half ones, then half zeros."""
    zero, later = np.array(unet.sinusoidal(np.float32([0, 981]), 320, freq_shift=0, cosine_first=True))
    np.testing.assert_array_equal(zero, [1] * 160 + [0] * 160)
    angles = 981 * 10000.0 ** (-np.arange(160) / 160)
    np.testing.assert_allclose(later, np.concatenate([np.cos(angles), np.sin(angles)]), atol=1e-4)
    swapped = unet.sinusoidal(np.float32([981]), 320, freq_shift=0, cosine_first=False)
    np.testing.assert_array_equal(swapped[0], np.roll(later, 160))


def test_rows_of_a_batch_do_not_see_each_other(networks):
    model = networks[0]
    latent, timestep, context = normal(3, 4, 4, 4), np.float32([900, 500, 1]), normal(3, 77, 8, seed=1)
    together = np.array(model(latent, timestep, context))
    for i in range(3):
        alone = model(latent[i : i + 1], timestep[i : i + 1], context[i : i + 1])
        np.testing.assert_allclose(together[i : i + 1], alone, atol=1e-5)


def test_the_prompt_and_the_time_matter(networks):
    model = networks[0]
    latent = np.repeat(normal(1, 4, 4, 4), 2, axis=0)
    same = np.repeat(normal(1, 77, 8), 2, axis=0)
    by_prompt = np.array(model(latent, np.float32([9, 9]), normal(2, 77, 8)))
    by_time = np.array(model(latent, np.float32([9, 10]), same))
    for prediction in (by_prompt, by_time):
        assert np.abs(prediction[0] - prediction[1]).max() > 1e-4


def test_bfloat16_weights_compute_in_bfloat16_and_give_float32(networks):
    """The UNet follows its weights, the decoder its input; time embedding and norms start from float32."""
    exact, half = networks[0], unet.UNet(UNET, "bfloat16")
    for source, target in zip(exact.variables, half.variables, strict=True):
        target.assign(ops.cast(source, "bfloat16"))
    inputs = (normal(2, 8, 8, 4), np.float32([981, 1]), normal(2, 77, 8, seed=1))
    a, b = np.array(exact(*inputs)), half(*inputs)
    assert b.dtype == tf.float32
    error = np.abs(np.array(b) - a).max() / np.abs(a).max()
    assert 1e-4 < error < 0.05
    decoder = vae.VAEDecoder(VAE, "bfloat16")
    assert decoder(normal(1, 2, 2, 4)).dtype == tf.float32
    assert decoder(ops.cast(normal(1, 2, 2, 4), "bfloat16")).dtype == tf.bfloat16


def test_group_norm_refuses_channels_it_cannot_split():
    with pytest.raises(ValueError, match=r"channels \(=10\) must be divisible by groups \(=4\)"):
        layers.GroupNorm("norm", 10, 4, 1e-5, "float32")


def test_group_norm_keeps_its_digits_on_large_images():
    """Summed in one float32 row, a million numbers lose four digits; every picture would be a little off."""
    x = np.random.default_rng(0).standard_normal((1, 256, 256, 64)).astype("float32") + 3
    found = np.asarray(layers.GroupNorm("norm", 64, 4, 1e-6, "float32")(x))
    grouped = x.astype("float64").reshape(1, -1, 4, 16)
    centred = grouped - grouped.mean(axis=(1, 3), keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=(1, 3), keepdims=True) + 1e-6)
    assert np.abs(found - expected.reshape(x.shape)).max() < 3e-6


# === Our own networks learn ===


def train(networks, loss, steps=6):
    """Losses of `steps` steps of Adam on one batch, and the variables whose first gradient is missing or all zero."""
    variables = [v for network in networks for v in network.trainable_variables]
    optimiser = keras.optimizers.Adam(3e-3)
    losses, dead = [], []
    for i in range(steps):
        with tf.GradientTape() as tape:
            value = loss()
        gradients = [g if g is None else tf.convert_to_tensor(g) for g in tape.gradient(value, variables)]
        if i == 0:
            dead = [v.path for v, g in zip(variables, gradients, strict=True) if g is None or not np.any(g)]
        optimiser.apply(
            [tf.zeros(v.shape) if g is None else g for g, v in zip(gradients, variables, strict=True)], variables
        )
        losses.append(float(value))
    return losses, dead


def test_unet_and_text_encoder_learn():
    """Every weight has a part in the noise that is predicted."""
    keras.utils.set_random_seed(0)
    model, encoder = (
        unet.UNet(dataclasses.replace(UNET, cross_attention_dim=CLIP.hidden_size)),
        text_encoder.TextEncoder(CLIP),
    )
    tokens = tf.constant(np.arange(2 * 77).reshape(2, 77) % 100, "int32")
    latent, timestep = normal(2, 8, 8, 4, seed=4), tf.constant([10.0, 600.0])
    noise = latent[::-1]

    def loss():
        return tf.reduce_mean(tf.square(model(latent, timestep, encoder(tokens)[0]) - noise))

    losses, dead = train((model, encoder), loss)
    assert losses[-1] < 0.85 * losses[0]
    # A bias of the keys moves all logits of a query alike, which softmax does not see.
    assert [path for path in dead if not path.endswith("k_proj/bias")] == []


def test_the_autoencoder_learns():
    keras.utils.set_random_seed(0)
    encoder, decoder = vae.VAEEncoder(VAE), vae.VAEDecoder(VAE)
    image = tf.image.resize(normal(2, 4, 4, 3, seed=4), (32, 32))

    def loss():
        mean, std = encoder(image)
        output = decoder(mean + std * normal(*mean.shape, seed=4))
        return tf.reduce_mean(tf.abs(output - image))

    losses, dead = train((encoder, decoder), loss)
    assert losses[-1] < 0.9 * losses[0]
    assert [path for path in dead if not path.endswith("to_k/bias")] == []
