"""The UNet with cross-attention that predicts noise (Rombach et al. 2022, arXiv:2112.10752)."""

import math

import numpy as np
from keras import ops

from models.config import UNetConfig
from models.layers import Conv2D, Dense, Downsample, GroupNorm, Layer, LayerNorm, ResnetBlock, Upsample, attention, silu


class UNet(Layer):
    """latent f32[N, h, w, 4], timestep f32[N], context f32[N, T, cross_attention_dim] to prediction f32[N, h, w, 4].

    Inside, everything but the time embedding runs in the dtype of the weights.
    """

    def __init__(self, config: UNetConfig, dtype: str = "float32"):
        super().__init__("unet", dtype)
        self.config = c = config
        channels = c.block_out_channels
        time_channels = 4 * channels[0]
        self.linear_1 = Dense("time_embedding.linear_1", channels[0], time_channels, dtype)
        self.linear_2 = Dense("time_embedding.linear_2", time_channels, time_channels, dtype)
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

    def call(self, latent, timestep, context):
        # Time embedding. Its angles reach 1000 radians, so it starts in float32 whatever the weights are.
        time = timestep_embedding(timestep, self.config)
        time = self.linear_2(silu(self.linear_1(ops.cast(time, self.dtype))))
        time = silu(time)
        context = ops.cast(context, self.dtype)

        # Down: every layer's output is kept for the way up.
        x = self.conv_in(ops.cast(latent, self.dtype))
        skips = [x]
        for block in self.down_blocks:
            for layer in range(len(block.resnets)):
                x = block(x, time, context, layer=layer)
                skips.append(x)
            if block.resample is not None:
                x = block.resample(x)
                skips.append(x)

        # Middle: resnet, transformer, resnet.
        x = self.mid_block.resnets[0](x, time)
        x = self.mid_block.attentions[0](x, context)
        x = self.mid_block.resnets[1](x, time)

        # Up: each layer also sees what the way down left at its size.
        for block in self.up_blocks:
            for layer in range(len(block.resnets)):
                x = block(ops.concatenate([x, skips.pop()], axis=-1), time, context, layer=layer)
            if block.resample is not None:
                x = block.resample(x, size=skips[-1].shape[1:3])

        x = self.conv_out(silu(self.conv_norm_out(x)))
        return ops.cast(x, "float32")


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

    def call(self, x, time, context, layer: int):
        x = self.resnets[layer](x, time)
        return self.attentions[layer](x, context) if self.attentions else x


class Transformer(Layer):
    """Pixels as tokens: [N, H, W, C] attends to itself and to context [N, T, D]; added to its input."""

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

    def call(self, x, context):
        _, height, width, channels = x.shape
        y = self.proj_in(ops.reshape(self.norm(x), (-1, height * width, channels)))
        for block in self.transformer_blocks:
            y = block(y, context)
        return x + ops.reshape(self.proj_out(y), (-1, height, width, channels))


class TransformerBlock(Layer):
    """Self-attention, cross-attention and a gated feed-forward layer, each pre-normed and added."""

    def __init__(self, name: str, config: UNetConfig, channels: int, num_heads: int, dtype: str):
        super().__init__(name, dtype)
        self.norm1 = LayerNorm(f"{name}.norm1", channels, 1e-5, dtype)
        self.attn1 = CrossAttention(f"{name}.attn1", channels, channels, num_heads, dtype)
        self.norm2 = LayerNorm(f"{name}.norm2", channels, 1e-5, dtype)
        self.attn2 = CrossAttention(f"{name}.attn2", channels, config.cross_attention_dim, num_heads, dtype)
        self.norm3 = LayerNorm(f"{name}.norm3", channels, 1e-5, dtype)
        self.approximate = config.geglu_act == "gelu_tanh"
        self.proj = Dense(f"{name}.ff.net.0.proj", channels, 8 * channels, dtype)
        self.out = Dense(f"{name}.ff.net.2", 4 * channels, channels, dtype)

    def call(self, x, context):
        y = self.norm1(x)
        x = x + self.attn1(y, y)
        x = x + self.attn2(self.norm2(x), context)
        # GEGLU (Shazeer 2020, arXiv:2002.05202).
        value, gate = ops.split(self.proj(self.norm3(x)), 2, axis=-1)
        return x + self.out(value * ops.gelu(gate, approximate=self.approximate))


class CrossAttention(Layer):
    """Multi-head attention of x [N, T, C] over context [N, S, D]."""

    def __init__(self, name: str, channels: int, context_channels: int, num_heads: int, dtype: str):
        super().__init__(name, dtype)
        self.num_heads = num_heads
        self.to_q = Dense(f"{name}.to_q", channels, channels, dtype, use_bias=False)
        self.to_k = Dense(f"{name}.to_k", context_channels, channels, dtype, use_bias=False)
        self.to_v = Dense(f"{name}.to_v", context_channels, channels, dtype, use_bias=False)
        self.to_out = Dense(f"{name}.to_out.0", channels, channels, dtype)

    def call(self, x, context):
        return self.to_out(attention(self.to_q(x), self.to_k(context), self.to_v(context), self.num_heads))


def timestep_embedding(timestep, config: UNetConfig):
    """Sines and cosines of the timestep f32[N] at geometric frequencies, f32[N, block_out_channels[0]].

    Vaswani et al. 2017, section 3.5, with period 10000.
    """
    half = config.block_out_channels[0] // 2
    exponent = np.arange(half, dtype="float32") * np.float32(-math.log(10000)) / np.float32(half - config.freq_shift)
    angles = ops.cast(timestep, "float32")[:, None] * np.exp(exponent)[None, :]
    parts = [ops.cos(angles), ops.sin(angles)]
    return ops.concatenate(parts if config.flip_sin_to_cos else parts[::-1], axis=-1)
