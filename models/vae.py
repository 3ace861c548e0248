"""The KL autoencoder between pixels and latents (Rombach et al. 2022, section 3.1).

Encoder and decoder are separate networks: drawing needs the decoder only. Both compute in the dtype of
their input, so float32 inputs give float32 pictures from half-precision weights.
"""

from keras import ops

from models.config import VAEConfig
from models.layers import Conv2D, Dense, Downsample, GroupNorm, Layer, ResnetBlock, Upsample, attention, silu


class VAEEncoder(Layer):
    """image [N, H, W, 3] in [-1, 1] to mean and standard deviation of the latent, each [N, h, w, 4], not yet scaled."""

    def __init__(self, config: VAEConfig, dtype: str = "float32"):
        super().__init__("vae_encoder", dtype)
        c, channels = config, config.block_out_channels
        self.conv_in = Conv2D("encoder.conv_in", c.in_channels, channels[0], dtype)
        self.resnets, self.downsamplers = [], []
        inputs = channels[0]
        for i, outputs in enumerate(channels):
            name = f"encoder.down_blocks.{i}"
            self.resnets.append(_resnets(name, inputs, outputs, c.layers_per_block, c, dtype))
            if i < len(channels) - 1:
                # PyTorch's VAE pads right and bottom only.
                self.downsamplers.append(Downsample(f"{name}.downsamplers.0", outputs, (0, 1), dtype))
            inputs = outputs
        self.mid_block = MidBlock("encoder.mid_block", channels[-1], c, dtype)
        self.conv_norm_out = GroupNorm("encoder.conv_norm_out", channels[-1], c.norm_num_groups, c.norm_eps, dtype)
        self.conv_out = Conv2D("encoder.conv_out", channels[-1], 2 * c.latent_channels, dtype)
        self.quant_conv = Conv2D("quant_conv", 2 * c.latent_channels, 2 * c.latent_channels, dtype, kernel_size=1)

    def call(self, image):
        x = self.conv_in(image)
        for i, resnets in enumerate(self.resnets):
            for resnet in resnets:
                x = resnet(x)
            if i < len(self.downsamplers):
                x = self.downsamplers[i](x)
        x = self.mid_block(x)
        x = self.quant_conv(self.conv_out(silu(self.conv_norm_out(x))))
        mean, log_variance = ops.split(x, 2, axis=-1)
        return mean, ops.exp(0.5 * ops.clip(log_variance, -30.0, 20.0))


class VAEDecoder(Layer):
    """latent [N, h, w, 4], already divided by scaling_factor, to image [N, H, W, 3], not clipped to [-1, 1]."""

    def __init__(self, config: VAEConfig, dtype: str = "float32"):
        super().__init__("vae_decoder", dtype)
        c, channels = config, config.block_out_channels[::-1]
        self.post_quant_conv = Conv2D("post_quant_conv", c.latent_channels, c.latent_channels, dtype, kernel_size=1)
        self.conv_in = Conv2D("decoder.conv_in", c.latent_channels, channels[0], dtype)
        self.mid_block = MidBlock("decoder.mid_block", channels[0], c, dtype)
        self.resnets, self.upsamplers = [], []
        inputs = channels[0]
        for i, outputs in enumerate(channels):
            name = f"decoder.up_blocks.{i}"
            self.resnets.append(_resnets(name, inputs, outputs, c.layers_per_block + 1, c, dtype))
            if i < len(channels) - 1:
                self.upsamplers.append(Upsample(f"{name}.upsamplers.0", outputs, dtype))
            inputs = outputs
        self.conv_norm_out = GroupNorm("decoder.conv_norm_out", channels[-1], c.norm_num_groups, c.norm_eps, dtype)
        self.conv_out = Conv2D("decoder.conv_out", channels[-1], c.out_channels, dtype)

    def call(self, latent):
        x = self.mid_block(self.conv_in(self.post_quant_conv(latent)))
        for i, resnets in enumerate(self.resnets):
            for resnet in resnets:
                x = resnet(x)
            if i < len(self.upsamplers):
                x = self.upsamplers[i](x)
        return self.conv_out(silu(self.conv_norm_out(x)))


class MidBlock(Layer):
    """Residual block, single-head attention over all pixels, residual block, at the coarsest size."""

    def __init__(self, name: str, channels: int, config: VAEConfig, dtype: str):
        super().__init__(name, dtype)
        self.resnets = _resnets(name, channels, channels, 2, config, dtype)
        attn = f"{name}.attentions.0"
        self.group_norm = GroupNorm(f"{attn}.group_norm", channels, config.norm_num_groups, config.norm_eps, dtype)
        self.to_q = Dense(f"{attn}.to_q", channels, channels, dtype)
        self.to_k = Dense(f"{attn}.to_k", channels, channels, dtype)
        self.to_v = Dense(f"{attn}.to_v", channels, channels, dtype)
        self.to_out = Dense(f"{attn}.to_out.0", channels, channels, dtype)

    def call(self, x):
        x = self.resnets[0](x)
        _, height, width, channels = x.shape
        y = ops.reshape(self.group_norm(x), (-1, height * width, channels))
        y = self.to_out(attention(self.to_q(y), self.to_k(y), self.to_v(y), num_heads=1))
        x = x + ops.reshape(y, (-1, height, width, channels))
        return self.resnets[1](x)


def _resnets(name: str, inputs: int, outputs: int, count: int, config: VAEConfig, dtype: str) -> list[ResnetBlock]:
    sizes = [inputs] + [outputs] * (count - 1)
    groups, epsilon = config.norm_num_groups, config.norm_eps
    return [ResnetBlock(f"{name}.resnets.{i}", n, outputs, groups, epsilon, dtype) for i, n in enumerate(sizes)]
