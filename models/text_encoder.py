"""The text encoders of CLIP and OpenCLIP (Radford et al. 2021, arXiv:2103.00020)."""

import numpy as np
from keras import ops

from models.config import TextEncoderConfig
from models.layers import Dense, Embedding, Layer, LayerNorm, attention

ACTIVATIONS = {
    "quick_gelu": lambda x: x * ops.sigmoid(1.702 * x),
    "gelu": lambda x: ops.gelu(x, approximate=False),
    "gelu_tanh": lambda x: ops.gelu(x, approximate=True),
}


class TextEncoder(Layer):
    """Token ids int32[N, 77] to the context [N, 77, hidden_size] and the pooled vector [N, projection_dim] or None.

    Layers that neither depends on are not built.
    """

    def __init__(self, config: TextEncoderConfig, dtype: str = "float32"):
        super().__init__("text_encoder", dtype)
        self.config = c = config
        self.token_embedding = Embedding("embeddings.token_embedding", c.vocab_size, c.hidden_size, dtype)
        self.position_embedding = Embedding(
            "embeddings.position_embedding", c.max_position_embeddings, c.hidden_size, dtype
        )
        self.blocks = [EncoderLayer(f"encoder.layers.{i}", c, dtype) for i in range(c.built_layers)]
        self.final_layer_norm = self.text_projection = None
        if c.context_norm or c.projection_dim is not None:
            self.final_layer_norm = LayerNorm("final_layer_norm", c.hidden_size, c.layer_norm_eps, dtype)
        if c.projection_dim is not None:
            self.text_projection = Dense("text_projection", c.hidden_size, c.projection_dim, dtype, use_bias=False)

    def call(self, tokens):
        length = tokens.shape[1]
        causal = np.tril(np.ones((length, length), dtype=bool))
        x = self.token_embedding(tokens) + self.position_embedding(np.arange(length, dtype="int32"))
        context = x
        for count, block in enumerate(self.blocks, start=1):
            x = block(x, causal)
            if count == self.config.context_layers:
                context = self.final_layer_norm(x) if self.config.context_norm else x
        if self.text_projection is None:
            return context, None
        # Its state at the first end of text stands for the whole text. Found by its id, not as the largest id: tokens
        # added by textual inversion have larger ones.
        ends = ops.argmax(ops.cast(tokens == self.config.eos_token_id, "int32"), axis=1)
        states = ops.take_along_axis(self.final_layer_norm(x), ends[:, None, None], axis=1)
        return context, self.text_projection(states[:, 0])


class EncoderLayer(Layer):
    """One pre-norm transformer layer: causal self-attention, then a two-layer perceptron."""

    def __init__(self, name: str, config: TextEncoderConfig, dtype: str):
        super().__init__(name, dtype)
        c, width = config, config.hidden_size
        self.num_heads = c.num_attention_heads
        self.activation = ACTIVATIONS[c.hidden_act]
        self.layer_norm1 = LayerNorm(f"{name}.layer_norm1", width, c.layer_norm_eps, dtype)
        self.q_proj = Dense(f"{name}.self_attn.q_proj", width, width, dtype)
        self.k_proj = Dense(f"{name}.self_attn.k_proj", width, width, dtype)
        self.v_proj = Dense(f"{name}.self_attn.v_proj", width, width, dtype)
        self.out_proj = Dense(f"{name}.self_attn.out_proj", width, width, dtype)
        self.layer_norm2 = LayerNorm(f"{name}.layer_norm2", width, c.layer_norm_eps, dtype)
        self.fc1 = Dense(f"{name}.mlp.fc1", width, c.intermediate_size, dtype)
        self.fc2 = Dense(f"{name}.mlp.fc2", c.intermediate_size, width, dtype)

    def call(self, x, mask):
        y = self.layer_norm1(x)
        x = x + self.out_proj(attention(self.q_proj(y), self.k_proj(y), self.v_proj(y), self.num_heads, mask))
        return x + self.fc2(self.activation(self.fc1(self.layer_norm2(x))))


def weigh(context, weights):
    """Multiply each token's vector f32[B,T,D] by its weight f32[B,T], keeping each row's mean over all numbers.

    A row whose weights are all 1 is returned as it is, bit for bit.
    """
    weighted = context * weights[..., None]
    before = ops.mean(context, axis=(1, 2), keepdims=True)
    after = ops.mean(weighted, axis=(1, 2), keepdims=True)
    unweighted = ops.all(weights == 1.0, axis=1)[:, None, None]
    return ops.where(unweighted, context, weighted * (before / ops.where(after == 0.0, 1.0, after)))
