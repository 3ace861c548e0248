"""The UNet with cross-attention that predicts noise (Rombach et al. 2022, arXiv:2112.10752)."""

import math

import numpy as np
from keras import ops

from models.config import UNetConfig
from models.layers import Conv2D, Dense, Downsample, GroupNorm, Layer, LayerNorm, ResnetBlock, Upsample, attention, silu


class UNet(Layer):
    """latent f32[N, h, w, 4], timestep f32[N], context f32[N, T, cross_attention_dim] to prediction f32[N, h, w, 4].

    Where the config asks for them there are also pooled f32[N, pooled_dim] and time_ids f32[N, 6] (Podell et al. 2023,
    arXiv:2307.01952, section 2.2), and guidance f32[N], guidance_scale - 1 of a model distilled with guidance (Meng et
    al. 2022, arXiv:2210.03142). Inside, everything but the embeddings of numbers runs in the dtype of the weights.
    """

    def __init__(self, config: UNetConfig, dtype: str = "float32"):
        super().__init__("unet", dtype)
        self.config = c = config
        channels = c.block_out_channels
        self.embedding = Embeddings(c, dtype)
        self.conv_in = Conv2D("conv_in", c.in_channels, channels[0], dtype)

        last = len(channels) - 1
        skips = [channels[0]]  # channels of what each up block takes over, last in first out
        self.down_blocks = []
        for i, outputs in enumerate(channels):
            block = Block(
                name=f"down_blocks.{i}",
                config=c,
                inputs=[skips[-1]] + [outputs] * (c.layers_per_block - 1),
                outputs=outputs,
                transformer_layers=[c.transformer_layers[i]] * c.layers_per_block,
                num_heads=c.num_attention_heads[i],
                resample="down" if i < last else None,
                dtype=dtype,
            )
            self.down_blocks.append(block)
            skips += [outputs] * (c.layers_per_block + (i < last))
        self.mid_block = Block(
            name="mid_block",
            config=c,
            inputs=[channels[-1]] * 2,
            outputs=channels[-1],
            transformer_layers=[0, c.mid_transformer_layers],
            num_heads=c.num_attention_heads[-1],
            resample=None,
            dtype=dtype,
        )
        self.up_blocks = []
        x_channels = channels[-1]
        for i, outputs in enumerate(reversed(channels)):
            taken = [skips.pop() for _ in range(c.layers_per_block + 1)]
            block = Block(
                name=f"up_blocks.{i}",
                config=c,
                inputs=[(x_channels if j == 0 else outputs) + skip for j, skip in enumerate(taken)],
                outputs=outputs,
                transformer_layers=[c.transformer_layers[last - i]] * (c.layers_per_block + 1),
                num_heads=c.num_attention_heads[last - i],
                resample="up" if i < last else None,
                dtype=dtype,
            )
            self.up_blocks.append(block)
            x_channels = outputs
        self.conv_norm_out = GroupNorm("conv_norm_out", channels[0], c.norm_num_groups, c.norm_eps, dtype)
        self.conv_out = Conv2D("conv_out", channels[0], c.out_channels, dtype)

    def call(self, latent, timestep, context, **numbers):
        """Predict from a context; `numbers` are pooled, time_ids and guidance where the config has them."""
        return self.predict(latent, timestep, **self.prepare(context, **numbers))

    def prepare(self, context, **numbers):
        """Compute what is the same at every step: keys and values of the context, in its place.

        Returns:
            {"keys_values": {name of a cross-attention: (key, value), each [N, T, C]}, **numbers}.
        """
        context = ops.cast(context, self.dtype)
        blocks = (*self.down_blocks, self.mid_block, *self.up_blocks)
        transformers = [transformer for block in blocks for transformer in block.attentions]
        crossed = [block.attn2 for transformer in transformers for block in transformer.transformer_blocks]
        return {"keys_values": {attention.name: attention.keys_values(context) for attention in crossed}, **numbers}

    def predict(self, latent, timestep, keys_values, pooled=None, time_ids=None, guidance=None):
        """Predict from what `prepare` made of the context."""
        time = silu(self.embedding(timestep, pooled, time_ids, guidance))

        # Down: the output of every layer is kept for the way up.
        x = self.conv_in(ops.cast(latent, self.dtype))
        skips = [x]
        for block in self.down_blocks:
            for layer in range(len(block.resnets)):
                x = block(x, time, keys_values, layer=layer)
                skips.append(x)
            if block.resample is not None:
                x = block.resample(x)
                skips.append(x)

        # Middle: resnet, transformer, resnet.
        x = self.mid_block.resnets[0](x, time)
        x = self.mid_block.attentions[0](x, keys_values)
        x = self.mid_block.resnets[1](x, time)

        # Up: each layer also sees what the way down left at its size.
        for block in self.up_blocks:
            for layer in range(len(block.resnets)):
                x = block(ops.concatenate([x, skips.pop()], axis=-1), time, keys_values, layer=layer)
            if block.resample is not None:
                x = block.resample(x, size=skips[-1].shape[1:3])

        x = self.conv_out(silu(self.conv_norm_out(x)))
        return ops.cast(x, "float32")


class Embeddings(Layer):
    """Timestep, and pooled text, sizes or guidance beside it, as one vector [N, 4 block_out_channels[0]]."""

    def __init__(self, config: UNetConfig, dtype: str):
        super().__init__("embeddings", dtype)
        self.config = c = config
        channels, outputs = c.block_out_channels[0], 4 * c.block_out_channels[0]
        self.linear_1 = Dense("time_embedding.linear_1", channels, outputs, dtype)
        self.linear_2 = Dense("time_embedding.linear_2", outputs, outputs, dtype)
        self.cond_proj = self.add_1 = self.add_2 = None
        if c.time_cond_proj_dim:
            self.cond_proj = Dense("time_embedding.cond_proj", c.time_cond_proj_dim, channels, dtype, use_bias=False)
        if c.addition_time_embed_dim:
            inputs = c.pooled_dim + 6 * c.addition_time_embed_dim
            self.add_1 = Dense("add_embedding.linear_1", inputs, outputs, dtype)
            self.add_2 = Dense("add_embedding.linear_2", outputs, outputs, dtype)

    def call(self, timestep, pooled=None, time_ids=None, guidance=None):
        c = self.config
        # Angles reach 1000 radians, so they are float32 whatever the weights are.
        x = ops.cast(sinusoidal(timestep, c.block_out_channels[0], c.freq_shift, c.flip_sin_to_cos), self.dtype)
        if self.cond_proj is not None:
            scale = sinusoidal(guidance * 1000.0, c.time_cond_proj_dim, freq_shift=1, cosine_first=False)
            x = x + self.cond_proj(ops.cast(scale, self.dtype))
        x = self.linear_2(silu(self.linear_1(x)))
        if self.add_1 is None:
            return x
        ids = sinusoidal(ops.reshape(time_ids, (-1,)), c.addition_time_embed_dim, c.freq_shift, c.flip_sin_to_cos)
        ids = ops.reshape(ids, (-1, 6 * c.addition_time_embed_dim))
        added = ops.cast(ops.concatenate([ops.cast(pooled, "float32"), ids], axis=-1), self.dtype)
        return x + self.add_2(silu(self.add_1(added)))


class Block(Layer):
    """The layers of one resolution: residual blocks, each followed by a transformer where the config asks for one."""

    def __init__(
        self,
        name: str,
        config: UNetConfig,
        inputs: list[int],
        outputs: int,
        transformer_layers: list[int],
        num_heads: int,
        resample: str | None,
        dtype: str,
    ):
        super().__init__(name, dtype)
        c = config
        time_channels = 4 * c.block_out_channels[0]
        self.resnets = [
            ResnetBlock(f"{name}.resnets.{i}", n, outputs, c.norm_num_groups, c.norm_eps, dtype, time_channels)
            for i, n in enumerate(inputs)
        ]
        depths = [depth for depth in transformer_layers if depth]
        self.attentions = [
            Transformer(f"{name}.attentions.{i}", c, outputs, depth, num_heads, dtype) for i, depth in enumerate(depths)
        ]
        self.resample = None
        if resample == "down":
            self.resample = Downsample(f"{name}.downsamplers.0", outputs, (1, 1), dtype)
        elif resample == "up":
            self.resample = Upsample(f"{name}.upsamplers.0", outputs, dtype)

    def call(self, x, time, keys_values, layer: int):
        x = self.resnets[layer](x, time)
        return self.attentions[layer](x, keys_values) if self.attentions else x


class Transformer(Layer):
    """Pixels as tokens: [N, H, W, C] attends to itself and to the context's keys and values; added to its input."""

    def __init__(self, name: str, config: UNetConfig, channels: int, depth: int, num_heads: int, dtype: str):
        super().__init__(name, dtype)
        c = config
        self.norm = GroupNorm(f"{name}.norm", channels, c.norm_num_groups, c.transformer_norm_eps, dtype)
        # A 1x1 convolution in SD 1, a linear layer in SD 2: the same product, so the same layer.
        self.proj_in = Dense(f"{name}.proj_in", channels, channels, dtype)
        self.transformer_blocks = [
            TransformerBlock(f"{name}.transformer_blocks.{i}", c, channels, num_heads, dtype) for i in range(depth)
        ]
        self.proj_out = Dense(f"{name}.proj_out", channels, channels, dtype)

    def call(self, x, keys_values):
        _, height, width, channels = x.shape
        y = self.proj_in(ops.reshape(self.norm(x), (-1, height * width, channels)))
        for block in self.transformer_blocks:
            y = block(y, *keys_values[block.attn2.name])
        return x + ops.reshape(self.proj_out(y), (-1, height, width, channels))


class TransformerBlock(Layer):
    """Self-attention, cross-attention and a gated feed-forward layer, each pre-normed and added."""

    def __init__(self, name: str, config: UNetConfig, channels: int, num_heads: int, dtype: str):
        super().__init__(name, dtype)
        self.norm1 = LayerNorm(f"{name}.norm1", channels, 1e-5, dtype)
        upcast = config.upcast_attention
        self.attn1 = CrossAttention(f"{name}.attn1", channels, channels, num_heads, upcast, dtype)
        self.norm2 = LayerNorm(f"{name}.norm2", channels, 1e-5, dtype)
        self.attn2 = CrossAttention(f"{name}.attn2", channels, config.cross_attention_dim, num_heads, upcast, dtype)
        self.norm3 = LayerNorm(f"{name}.norm3", channels, 1e-5, dtype)
        self.approximate = config.geglu_act == "gelu_tanh"
        self.proj = Dense(f"{name}.ff.net.0.proj", channels, 8 * channels, dtype)
        self.out = Dense(f"{name}.ff.net.2", 4 * channels, channels, dtype)

    def call(self, x, key, value):
        y = self.norm1(x)
        x = x + self.attn1(y, *self.attn1.keys_values(y))
        x = x + self.attn2(self.norm2(x), key, value)
        # GEGLU (Shazeer 2020, arXiv:2002.05202).
        value, gate = ops.split(self.proj(self.norm3(x)), 2, axis=-1)
        return x + self.out(value * ops.gelu(gate, approximate=self.approximate))


class CrossAttention(Layer):
    """Multi-head attention of x [N, T, C] over the keys and values [N, S, C] of a context [N, S, D]."""

    def __init__(self, name: str, channels: int, context_channels: int, num_heads: int, upcast: bool, dtype: str):
        super().__init__(name, dtype)
        self.num_heads, self.upcast, self.tiled = num_heads, upcast, False
        self.to_q = Dense(f"{name}.to_q", channels, channels, dtype, use_bias=False)
        self.to_k = Dense(f"{name}.to_k", context_channels, channels, dtype, use_bias=False)
        self.to_v = Dense(f"{name}.to_v", context_channels, channels, dtype, use_bias=False)
        self.to_out = Dense(f"{name}.to_out.0", channels, channels, dtype)

    def tune_for_cpu(self) -> None:
        self.tiled = True

    def keys_values(self, context):
        return self.to_k(context), self.to_v(context)

    def call(self, x, key, value):
        mixed = attention(self.to_q(x), key, value, self.num_heads, upcast=self.upcast, tiled=self.tiled)
        return self.to_out(mixed)


def sinusoidal(values, width: int, freq_shift: int, cosine_first: bool):
    """Cosines and sines of values f32[N] at geometric frequencies, f32[N, width].

    Vaswani et al. 2017, section 3.5, with period 10000.
    """
    half = width // 2
    exponent = np.arange(half, dtype="float32") * np.float32(-math.log(10000)) / np.float32(half - freq_shift)
    angles = ops.cast(values, "float32")[:, None] * np.exp(exponent)[None, :]
    parts = [ops.cos(angles), ops.sin(angles)]
    return ops.concatenate(parts if cosine_first else parts[::-1], axis=-1)
