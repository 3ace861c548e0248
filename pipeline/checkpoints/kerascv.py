"""KerasCV 0.9's Stable Diffusion 1.x: its networks as a source of weights, its class as a peer to measure.

KerasCV is optional and imported only when asked for. Its class runs unchanged on the Keras we pin: dictionaries are
matched by the inputs' names again, and its causal mask holds no NaN. tests/test_kerascv.py would notice otherwise.
"""

import math

import numpy as np

from models.errors import InputError
from pipeline.prompts.tokenizer import LENGTH, Tokenizer

COMPONENTS = ("text_encoder", "unet", "vae")  # "vae" is the decoder; KerasCV draws without an encoder
SIZE_STEP = 128  # its class rounds height and width to multiples of this, silently


def build(component: str, random_seed: int | None, height: int = SIZE_STEP, width: int = SIZE_STEP):
    """One of KerasCV's networks, a functional keras.Model in float32.

    Inputs: text_encoder {"tokens", "positions"} int32[N, 77]; unet {"latent" f32[N, h, w, 4], "timestep_embedding"
    f32[N, 320], "context" f32[N, 77, 768]}; vae f32[N, h, w, 4], not yet divided by 0.18215.

    Args:
        component: one of `COMPONENTS`.
        random_seed: None fills it with KerasCV's own weights, downloaded or from Keras' cache; else `random_weight`.
        height, width: pixels, multiples of 64; the weights are the same for all.

    Raises:
        InputError: KerasCV is not installed, or its weights cannot be had.
    """
    networks = _import().stable_diffusion
    download = random_seed is None
    try:
        if component == "text_encoder":
            model = networks.TextEncoder(LENGTH, download_weights=download)
        elif component == "unet":
            model = networks.DiffusionModel(height, width, LENGTH, download_weights=download)
        else:
            model = networks.Decoder(height, width, download_weights=download)
    except Exception as error:
        # Keras raises a bare Exception when a download fails.
        if not download:
            raise
        raise InputError(
            f"KerasCV's {component}: expected its weights by download or in ~/.keras/datasets, found neither "
            f"({str(error).splitlines()[0]}); try again with a network, or pass --random_weights"
        ) from error
    if random_seed is not None:
        for index, variable in enumerate(model.weights):
            name = variable.path.rpartition("/")[2]
            variable.assign(random_weight(random_seed, component, index, name, tuple(variable.shape)))
    return model


def random_weight(random_seed: int, component: str, index: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random values for one variable, the same on every machine and whatever was made before.

    Kernels keep the variance of what they multiply (LeCun et al. 1998, "Efficient BackProp", section 4.6), so no
    activation explodes and the UNet's output has a standard deviation near 0.6. Biases and norms differ from zero and
    one, so that a misplaced one shows.

    Args:
        random_seed: 0 or more.
        component: one of `COMPONENTS`.
        index: place among the network's weights.
        name: "kernel", "bias", "gamma", "beta" or "embeddings".

    Returns:
        float32[shape], uniform.
    """
    generator = np.random.Generator(np.random.SFC64([random_seed, COMPONENTS.index(component), index]))
    values = generator.random(shape, dtype=np.float32)
    mean = 1.0 if name == "gamma" else 0.0
    deviation = {"kernel": 1 / math.sqrt(math.prod(shape[:-1])), "embeddings": 1.0}.get(name, 0.1)
    # In place: the largest variable has 150 MB.
    width = math.sqrt(12) * deviation
    values *= np.float32(width)
    values += np.float32(mean - width / 2)
    return values


def stable_diffusion(height: int, width: int, tokenizer: Tokenizer, random_seed: int | None, jit_compile: bool):
    """KerasCV's own StableDiffusion, to be called as its users do.

    `text_to_image(prompt, batch_size=, num_steps=, unconditional_guidance_scale=, seed=)` gives uint8[N, H, W, 3].
    Networks and tokenizer are injected where its properties would build and download them.

    Args:
        height, width: pixels, multiples of 128; the class itself would round others without a word.
        random_seed: as in `build`.
        jit_compile: compile all three networks with XLA, or none of them.

    Raises:
        InputError: a size KerasCV does not draw, or as `build`. `text_to_image` raises it for a prompt over 75 tokens.
    """
    for name, value in (("height", height), ("width", width)):
        if value < SIZE_STEP or value % SIZE_STEP:
            below = max(SIZE_STEP, value // SIZE_STEP * SIZE_STEP)
            raise InputError(
                f"--{name} {value}: KerasCV draws multiples of {SIZE_STEP} pixels; nearest: {below} or "
                f"{below + SIZE_STEP}"
            )
    model = _import().StableDiffusion(height, width, jit_compile=jit_compile)
    model._tokenizer = _Tokenizer(tokenizer)
    model._text_encoder = build("text_encoder", random_seed)
    model._diffusion_model = build("unet", random_seed, height, width)
    model._decoder = build("vae", random_seed, height, width)
    for network in (model._text_encoder, model._diffusion_model, model._decoder):
        # Said in both cases: left alone, Keras 3 compiles with XLA on every accelerator.
        network.compile(jit_compile=jit_compile)
    return model


class _Tokenizer:
    """Our tokenizer behind the one method that KerasCV's class calls."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def encode(self, prompt: str) -> list[int]:
        """BOS, tokens, EOS, padding: 77 ids. KerasCV would pad with 49407, as Stable Diffusion 1.x's tokenizer does."""
        tokens = self.tokenizer.encode(prompt)
        if tokens.dropped:
            raise InputError(
                f"KerasCV takes prompts of at most {LENGTH - 2} tokens, found more: {tokens.dropped[:80]!r} does not "
                "fit; shorten the prompt"
            )
        return tokens.ids.tolist()


def _import():
    """keras_cv.models, or InputError."""
    try:
        import keras_cv.models as models
    except ImportError as error:
        raise InputError(
            f"--kerascv needs KerasCV, which cannot be imported ({error}); install it with: "
            "python -m pip install keras-cv==0.9.0"
        ) from error
    return models
