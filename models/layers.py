"""Layers that more than one network uses.

Weights live in the `dtype` a layer is built with; computing happens in the dtype of the inputs, so a
network decides its precision once, by casting what it is given. Norms and softmax always run in
float32. Layers are built when constructed and named after the diffusers state dict
(`down_blocks.0.resnets.1.conv1`), so a checkpoint's names are ours up to a suffix.
Arrays are channels-last: images and latents [N, H, W, C], token sequences [N, T, C].
"""

import keras
import numpy as np
from keras import ops

from models import winograd


class Layer(keras.layers.Layer):
    """A layer that never casts its inputs; see the module's docstring."""

    def __init__(self, name: str, dtype: str):
        super().__init__(name=name, dtype=dtype, autocast=False)
        self.built = True

    def weight(self, name: str, shape: tuple[int, ...], initializer: str) -> keras.Variable:
        """A variable whose path is LAYER/NAME."""
        return self.add_weight(name=name, shape=shape, initializer=initializer)

    def tune_for_cpu(self) -> None:
        """Change to what processors compute faster in float32, where this layer has such a way."""


def tune_network_for_cpu(model: Layer) -> None:
    """Change every layer of a network, its weights loaded, to what processors compute faster."""
    for layer in model._flatten_layers():
        layer.tune_for_cpu()


class Product(Layer):
    """A layer that multiplies by a kernel [..., inputs, outputs], which may be stored as 8-bit integers."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str):
        super().__init__(name, dtype)
        self.kernel = self.weight("kernel", shape, "glorot_uniform")
        self.scale = None

    def kernel_as(self, dtype):
        """The kernel as what is multiplied."""
        kernel = ops.cast(self.kernel, dtype)
        return kernel if self.scale is None else kernel * ops.cast(self.scale, dtype)

    def quantise(self) -> None:
        """Store the kernel as int8, times one float32 for each output: the largest magnitude becomes 127."""
        kernel = self.kernel.numpy().astype("float32")
        scale = np.abs(kernel).max(axis=tuple(range(kernel.ndim - 1))) / 127
        scale = np.where(scale == 0, 1, scale).astype("float32")
        self._store(np.rint(kernel / scale).astype("int8"))
        self.scale = self.add_weight(name="scale", shape=scale.shape, dtype="float32", initializer="zeros")
        self.scale.assign(scale)

    def _store(self, kernel: np.ndarray) -> None:
        self._untrack_variable(self.kernel)
        self.kernel = self.add_weight(name="kernel", shape=kernel.shape, dtype=str(kernel.dtype), initializer="zeros")
        self.kernel.assign(kernel)


def quantise_network(model: Layer) -> None:
    """Store the kernels of a network as 8-bit integers; norms, biases and embeddings stay."""
    for layer in model._flatten_layers():
        if isinstance(layer, Product):
            layer.quantise()


class Dense(Product):
    """y = x W + b on the last axis: [..., inputs] to [..., outputs]."""

    def __init__(self, name: str, inputs: int, outputs: int, dtype: str, use_bias: bool = True):
        super().__init__(name, (inputs, outputs), dtype)
        self.bias = self.weight("bias", (outputs,), "zeros") if use_bias else None

    def call(self, x):
        y = ops.matmul(x, self.kernel_as(x.dtype))
        return y if self.bias is None else y + ops.cast(self.bias, x.dtype)


class Conv2D(Product):
    """Convolution, [N, H, W, inputs] to [N, H', W', outputs]; `padding` is ((top, bottom), (left, right)) zeros."""

    def __init__(
        self, name: str, inputs: int, outputs: int, dtype: str, kernel_size: int = 3, strides: int = 1, padding=None
    ):
        super().__init__(name, (kernel_size, kernel_size, inputs, outputs), dtype)
        self.strides = strides
        # TensorFlow's "same" pads a strided convolution otherwise than PyTorch does: strided ones pad explicitly.
        self.padding = padding
        self.bias = self.weight("bias", (outputs,), "zeros")
        self.winograd = False

    @property
    def gains_by_winograd(self) -> bool:
        """Not where there are few channels, nor many: then the image is small, and reading the kernel takes longer."""
        height, _, inputs, outputs = self.kernel.shape
        plain = height == 3 and self.strides == 1 and self.padding is None
        return plain and inputs >= 32 and outputs in winograd.OUTPUTS

    def tune_for_cpu(self) -> None:
        """Store the kernel as `winograd.convolve` takes it, where that gains anything."""
        if self.gains_by_winograd:
            self._store(winograd.transform(self.kernel.numpy()))
            self.winograd = True

    def call(self, x):
        return self._convolve(x) + ops.cast(self.bias, x.dtype)

    def _convolve(self, x):
        kernel = self.kernel_as(x.dtype)
        if self.winograd:
            return winograd.convolve(x, kernel)
        if self.padding is not None:
            x = ops.pad(x, ((0, 0), *self.padding, (0, 0)))
        padding = "same" if self.padding is None else "valid"
        return ops.conv(x, kernel, strides=self.strides, padding=padding, data_format="channels_last")


class LayerNorm(Layer):
    """Layer normalisation over the last axis, in float32 (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, name: str, channels: int, epsilon: float, dtype: str):
        super().__init__(name, dtype)
        self.epsilon = epsilon
        self.gamma = self.weight("gamma", (channels,), "ones")
        self.beta = self.weight("beta", (channels,), "zeros")

    def call(self, x):
        y = ops.cast(x, "float32")
        centred = y - ops.mean(y, axis=-1, keepdims=True)
        variance = ops.mean(ops.square(centred), axis=-1, keepdims=True)
        y = centred * ops.rsqrt(variance + self.epsilon) * ops.cast(self.gamma, "float32")
        return ops.cast(y + ops.cast(self.beta, "float32"), x.dtype)


class GroupNorm(Layer):
    """Group normalisation of [N, H, W, C], in float32 (Wu and He 2018, arXiv:1803.08494)."""

    def __init__(self, name: str, channels: int, groups: int, epsilon: float, dtype: str):
        super().__init__(name, dtype)
        if channels % groups:
            raise ValueError(f"channels (={channels}) must be divisible by groups (={groups})")
        self.groups, self.epsilon = groups, epsilon
        self.gamma = self.weight("gamma", (channels,), "ones")
        self.beta = self.weight("beta", (channels,), "zeros")

    def call(self, x):
        _, height, width, channels = x.shape
        y = ops.cast(x, "float32")
        grouped = ops.reshape(y, (-1, height, width, self.groups, channels // self.groups))
        mean = _mean_per_group(grouped)
        variance = _mean_per_group(ops.square(grouped - mean))
        gamma = ops.reshape(ops.cast(self.gamma, "float32"), (1, 1, 1, self.groups, -1))
        beta = ops.reshape(ops.cast(self.beta, "float32"), (1, 1, 1, self.groups, -1))
        scale = ops.rsqrt(variance + self.epsilon) * gamma
        shift = beta - mean * scale
        # One multiply-add over the image; the statistics stay small.
        scale = ops.reshape(scale, (-1, 1, 1, channels))
        shift = ops.reshape(shift, (-1, 1, 1, channels))
        return ops.cast(y * scale + shift, x.dtype)


def _mean_per_group(x):
    """Mean over height, width and channels of [N, H, W, groups, C], kept as axes of 1.

    One axis at a time: over several at once TensorFlow adds up all numbers in a row, and a large image in float32
    loses four digits that way (decoder at 512x512: 84 dB against diffusers instead of over 120).
    """
    for axis in (1, 2, 4):
        x = ops.mean(x, axis=axis, keepdims=True)
    return x


class Embedding(Layer):
    """A table of vectors: integer [...] to [..., channels]."""

    def __init__(self, name: str, rows: int, channels: int, dtype: str):
        super().__init__(name, dtype)
        self.embeddings = self.weight("embeddings", (rows, channels), "random_normal")

    def call(self, indices):
        return ops.take(self.embeddings, indices, axis=0)


class ResnetBlock(Layer):
    """Residual block: norm, SiLU, conv, (+ time), norm, SiLU, conv, + shortcut (He et al. 2016, arXiv:1512.03385)."""

    def __init__(
        self, name: str, inputs: int, outputs: int, groups: int, epsilon: float, dtype: str, time_channels: int = 0
    ):
        super().__init__(name, dtype)
        self.inputs = inputs
        self.norm1 = GroupNorm(f"{name}.norm1", inputs, groups, epsilon, dtype)
        self.conv1 = Conv2D(f"{name}.conv1", inputs, outputs, dtype)
        self.time_emb_proj = Dense(f"{name}.time_emb_proj", time_channels, outputs, dtype) if time_channels else None
        self.norm2 = GroupNorm(f"{name}.norm2", outputs, groups, epsilon, dtype)
        self.conv2 = Conv2D(f"{name}.conv2", outputs, outputs, dtype)
        self.conv_shortcut = None
        if inputs != outputs:
            self.conv_shortcut = Conv2D(f"{name}.conv_shortcut", inputs, outputs, dtype, kernel_size=1)

    def call(self, x, time=None):
        """x [N, H, W, inputs], time [N, time_channels] already through SiLU."""
        y = self.conv1(silu(self.norm1(x)))
        if self.time_emb_proj is not None:
            y = y + self.time_emb_proj(time)[:, None, None, :]
        y = self.conv2(silu(self.norm2(y)))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Downsample(Layer):
    """Halve height and width by a strided convolution; `padding` tells the UNet's from the VAE encoder's."""

    def __init__(self, name: str, channels: int, padding: tuple[int, int], dtype: str):
        super().__init__(name, dtype)
        self.conv = Conv2D(f"{name}.conv", channels, channels, dtype, strides=2, padding=(padding, padding))

    def call(self, x):
        return self.conv(x)


class Upsample(Layer):
    """Double height and width (nearest neighbour), cut to `size` where a skip connection is odd, then convolve."""

    def __init__(self, name: str, channels: int, dtype: str):
        super().__init__(name, dtype)
        self.conv = Conv2D(f"{name}.conv", channels, channels, dtype)

    def call(self, x, size=None):
        _, height, width, channels = x.shape
        x = ops.broadcast_to(x[:, :, None, :, None, :], (x.shape[0], height, 2, width, 2, channels))
        x = ops.reshape(x, (-1, 2 * height, 2 * width, channels))
        if size is not None:
            x = x[:, : size[0], : size[1]]
        return self.conv(x)


def silu(x):
    """x sigmoid(x) (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Not ops.silu: TensorFlow's registers its own gradient for good at each use, and with it the whole traced
    graph and its weights, so a model that was exported could never be freed.
    """
    return x * ops.sigmoid(x)


CHUNK_BYTES = 2**27  # of float32 logits, beyond which attention works through its queries in chunks
TILE_BYTES = 2**22  # of one head's, where what fits into a processor's cache is faster than many at once


def attention(query, key, value, num_heads: int, mask=None, upcast: bool = False, tiled: bool = False):
    """Scaled dot-product attention, softmax in float32 (Vaswani et al. 2017, arXiv:1706.03762).

    Logits of more than CHUNK_BYTES are never there at once: queries do not see each other, so they go chunk by chunk.

    Args:
        query: [N, T, C]; key, value: [N, S, C]; any float dtype.
        num_heads: divides C.
        mask: bool [T, S], False where attention is forbidden; None allows all. Not with queries in chunks.
        upcast: multiply queries and keys in float32; some models' products are too large for float16.
        tiled: where one head's logits fill TILE_BYTES, heads one by one in chunks of that, for processors.

    Returns:
        [N, T, C] in the dtype of `query`.
    """
    images, length, channels = query.shape
    head_size = channels // num_heads

    def split(x):
        return ops.transpose(ops.reshape(x, (-1, x.shape[1], num_heads, head_size)), (0, 2, 1, 3))

    dtype = query.dtype
    if upcast:
        query, key = ops.cast(query, "float32"), ops.cast(key, "float32")
    # Scaling the query first keeps float16 logits finite.
    queries, keys, values = split(query * head_size**-0.5), ops.transpose(split(key), (0, 1, 3, 2)), split(value)

    def mix(queries, keys, values):
        logits = ops.cast(ops.matmul(queries, keys), "float32")
        if mask is not None:
            # Selection, never 0 * inf: that would be NaN.
            logits = ops.where(mask, logits, -1e9)
        return ops.matmul(ops.cast(ops.softmax(logits, axis=-1), dtype), values)

    row_bytes = 4 * key.shape[1]
    if mask is not None:
        mixed = mix(queries, keys, values)
    elif tiled and length * row_bytes >= TILE_BYTES:
        rows = _rows_per_chunk(length, row_bytes, TILE_BYTES)
        heads = tuple(ops.reshape(x, (-1, *x.shape[2:])) for x in (queries, keys, values))
        mixed = ops.map(lambda head: _by_rows(_mix_undivided, *head, rows), heads)
        mixed = ops.reshape(mixed, (-1, num_heads, length, head_size))
    else:
        rows = _rows_per_chunk(length, (images or 1) * num_heads * row_bytes, CHUNK_BYTES)
        mixed = _by_rows(mix, queries, keys, values, rows)
    return ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (-1, length, channels))


def _rows_per_chunk(length: int, row_bytes: int, most: int) -> int:
    """The largest divisor of `length` whose logits fit into so many bytes, at least 1."""
    fitting = min(length, most // row_bytes)
    return next((rows for rows in range(fitting, 0, -1) if length % rows == 0), 1)


def _by_rows(mix, queries, keys, values, rows: int):
    """mix(queries [..., T, d], keys [..., d, S], values [..., S, d]) for so many of the T queries at a time."""
    *outer, length, size = queries.shape
    if rows == length:
        return mix(queries, keys, values)
    axes = len(outer)
    chunks = ops.moveaxis(ops.reshape(queries, (*outer, length // rows, rows, size)), axes, 0)
    mixed = ops.map(lambda chunk: mix(chunk, keys, values), chunks)
    return ops.reshape(ops.moveaxis(mixed, 0, axes), (*outer, length, size))


def _mix_undivided(queries, keys, values):
    """Attention that divides by the softmax's sum last: fewer numbers then, and less to read and write for XLA."""
    logits = ops.matmul(queries, keys)
    weights = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    return ops.matmul(weights, values) / ops.sum(weights, axis=-1, keepdims=True)
