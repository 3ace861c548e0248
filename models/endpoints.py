"""The exported functions: what each SavedModel computes, and the names, shapes and dtypes of its tensors.

The single source of the signatures and of the manifest. Names are the wiring: every output of `encode`
is, by name, an input of `denoise`, whose output `latent` is the input of `decode`. `encode_image` stands beside them:
a sample of what it returns is where `denoise` can start.

Written in keras.ops only. What needs TensorFlow is declared here as data and done by the exporter: inputs
drawn afresh on each call, checks that raise, PNG encoding.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from keras import ops

from models import loop
from models.config import ModelConfig, SchedulerConfig
from models.export_spec import ExportSpec, Size, TensorSpec
from models.steps import MEMORY, ROW_SIZE
from models.text_encoder import weigh

TIME_IDS = "time_ids"  # original height and width, crop's top and left, target height and width


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One signature of one SavedModel."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    function: Callable[..., dict]  # named tensors to named tensors, at least `outputs`
    noise_inputs: tuple[TensorSpec, ...] = ()  # inputs of the function filled with fresh normal noise
    preconditions: Callable[..., list[tuple]] | None = None  # inputs to [(bool[], message)], asserted before the call
    postconditions: Callable[..., list[tuple]] | None = None  # all outputs of the function to the same, after the call
    png: dict[str, str] = dataclasses.field(default_factory=dict)  # output -> uint8 image it is the PNG of
    compiled_variant: bool = False  # True: what an export for XLA also stores compiled, as NAME_xla


Share = Callable[[Callable], Callable]  # how endpoints reuse one traced body, e.g. tf.function


def text_encoder(models: Sequence, config: ModelConfig, spec: ExportSpec, empty_tokens: np.ndarray) -> list[Endpoint]:
    """`encode`, and `serving_default` for clients of the KerasCV SavedModels where one encoder reads one block.

    Args:
        models: one encoder, or two whose states are joined to one context; the last gives the pooled vector, if any.
        empty_tokens: int32[77], the empty prompt's ids.
    """
    block = config.text_encoder.max_position_embeddings
    length = spec.prompt_chunks * block
    prompts, per_prompt = spec.prompts, spec.images_per_prompt
    pairs = [pair for pair in conditioning(config, spec) if pair[0].name != TIME_IDS]
    suffixes = ("", "_2")[: len(models)]

    def encode(token_weights, negative_token_weights, **tokens):
        weights = ops.reshape(ops.concatenate([token_weights, negative_token_weights], axis=0), (-1, block))
        contexts, pooled = [], None
        for model, suffix in zip(models, suffixes, strict=True):
            # Each block of 77 is a text of its own to the encoder; together they are the context.
            both = ops.concatenate([tokens[f"tokens{suffix}"], tokens[f"negative_tokens{suffix}"]], axis=0)
            context, pooled = model(ops.reshape(both, (-1, block)))
            contexts.append(weigh(ops.cast(context, "float32"), weights))
        context = ops.reshape(ops.concatenate(contexts, axis=-1), (2 * prompts, length, -1))
        states = {"context": context}
        if pooled is not None:
            # The first block's, as everybody takes it.
            states["pooled"] = ops.reshape(ops.cast(pooled, "float32"), (2 * prompts, spec.prompt_chunks, -1))[:, 0]
        outputs = {}
        for positive, negative in pairs:
            value = states[positive.name]
            outputs[positive.name] = ops.repeat(value[:prompts], per_prompt, axis=0)
            outputs[negative.name] = ops.repeat(value[prompts:], per_prompt, axis=0)
        return outputs

    ids = [f"{name}{suffix}" for suffix in suffixes for name in ("tokens", "negative_tokens")]
    encode = Endpoint(
        name="encode",
        inputs=(
            *(TensorSpec(name, (prompts, length), "int32") for name in ids),
            TensorSpec("token_weights", (prompts, length), "float32"),
            TensorSpec("negative_token_weights", (prompts, length), "float32"),
        ),
        outputs=tuple(tensor for pair in pairs for tensor in pair),
        function=encode,
        compiled_variant=True,
    )
    if not _as_published(config, spec):
        return [encode]
    return [_published_encoder(models[0], spec, empty_tokens, encode.outputs), encode]


def _as_published(config: ModelConfig, spec: ExportSpec) -> bool:
    """Whether the KerasCV SavedModels' clients can use it: they send one block to one encoder."""
    return spec.prompt_chunks == 1 and config.text_encoder_2 is None


def _published_encoder(model, spec: ExportSpec, empty_tokens: np.ndarray, outputs: tuple[TensorSpec, ...]) -> Endpoint:
    images, prompts = spec.num_images, spec.prompts

    def serving_default(tokens):
        rows = ops.shape(tokens)[0]
        # Image r takes token row r * B // N; the empty prompt is the last row.
        context, _ = model(ops.concatenate([tokens, empty_tokens[None]], axis=0))
        context = ops.cast(context, "float32")
        index = ops.arange(images, dtype="int32") * rows // images
        unconditional = ops.take(context, ops.zeros((images,), dtype="int32") + rows, axis=0)
        return {"context": ops.take(context, index, axis=0), "unconditional_context": unconditional}

    def batch_fits(tokens):
        rows = ops.shape(tokens)[0]
        fits = ops.logical_or(rows == 1, ops.logical_or(rows == prompts, rows == images))
        return [(fits, f"tokens must have 1, {prompts} or {images} rows")]

    return Endpoint(
        name="serving_default",
        inputs=(TensorSpec("tokens", (None, len(empty_tokens)), "int32"),),
        outputs=outputs,
        function=serving_default,
        preconditions=batch_fits,
    )


def conditioning(config: ModelConfig, spec: ExportSpec) -> tuple[tuple[TensorSpec, TensorSpec], ...]:
    """List what the UNet takes beside latent and timestep: (for the prompt, for the negative prompt) each."""
    images = spec.num_images
    length = spec.prompt_chunks * config.text_encoder.max_position_embeddings
    context = TensorSpec("context", (images, length, config.unet.cross_attention_dim), "float32")
    pairs = [(context, dataclasses.replace(context, name="unconditional_context"))]
    if config.unet.pooled_dim is not None:
        pooled = TensorSpec("pooled", (images, config.unet.pooled_dim), "float32")
        ids = TensorSpec(TIME_IDS, (images, 6), "float32")
        pairs += [(pooled, dataclasses.replace(pooled, name="unconditional_pooled")), (ids, ids)]
    return tuple(pairs)


def diffusion_model(
    model,
    config: ModelConfig,
    spec: ExportSpec,
    ddim: SchedulerConfig,
    alphas_cumprod: np.ndarray,
    share: Share = lambda function: function,
) -> list[Endpoint]:
    """`serving_default`; per size `denoise` (the whole loop), `denoise_unguided` (half the work) and `unet` (one call).

    Args:
        model: a `models.unet.UNet`, or whatever predicts as it does.
        ddim: the checkpoint's schedule with DDIM's own defaults filled in, for `serving_default`.
        alphas_cumprod: float64[num_train_timesteps].
    """
    every = []
    for size in spec.sizes:
        run, pure = _loops(model, config, spec, size, share)
        if size == spec.size and _as_published(config, spec):
            every.append(_published_loop(run, pure[0], spec, ddim, alphas_cumprod))
        every += [dataclasses.replace(e, name=spec.signature(e.name, size)) for e in pure]
    return every


def _loops(model, config: ModelConfig, spec: ExportSpec, size: Size, share: Share) -> tuple[Callable, list[Endpoint]]:
    """The guided loop as a function of effective guidance, and the pure endpoints of one size."""
    images, steps = spec.num_images, spec.max_steps
    latent = _latent(config, spec, size)
    memory = TensorSpec("memory", (MEMORY, *latent.shape), "float32")
    pairs = conditioning(config, spec)
    prompt_contexts = tuple(positive for positive, _ in pairs)
    contexts = {tensor.name: tensor for pair in pairs for tensor in pair}
    # A model distilled with guidance takes the scale as an input, and needs no unconditional prediction.
    distilled = config.unet.time_cond_proj_dim is not None

    def unet(latent, timestep, **prepared):
        return {"prediction": model.predict(latent, timestep, **prepared)}

    unet = share(unet)

    def run_loop(predict, state, rows, guidance, guidance_rescale, seed, inputs):
        results = loop.denoise(predict, *state, *rows, guidance, guidance_rescale, seed, inputs, model.prepare)
        return dict(zip(STATE, results, strict=True))

    def unguided(state, rows, seed, inputs):
        def predict(latent, timestep, **prepared):
            return unet(latent=latent, timestep=timestep, **prepared)["prediction"]

        return run_loop(predict, state, rows, None, None, seed, {name: (value,) for name, value in inputs.items()})

    def run(latent, memory, steps, first_step, last_step, guidance, guidance_rescale, seed, **contexts):
        state, rows = (latent, memory), (steps, first_step, last_step)
        if distilled:
            inputs = {positive.name: contexts[positive.name] for positive, _ in pairs}
            return unguided(state, rows, seed, inputs | {"guidance": guidance})
        inputs = {positive.name: (contexts[positive.name], contexts[negative.name]) for positive, negative in pairs}
        return run_loop(model.predict, state, rows, guidance, guidance_rescale, seed, inputs)

    run = share(run)

    def denoise(guidance_scale, **inputs):
        guidance = guidance_scale - 1.0
        # A scale of 1 or less means the conditional prediction alone, as in diffusers.
        return run(guidance=guidance if distilled else ops.maximum(guidance, 0.0), **inputs)

    def denoise_unguided(latent, memory, steps, first_step, last_step, seed, **inputs):
        if distilled:
            inputs["guidance"] = ops.zeros((images,), dtype="float32")
        return unguided((latent, memory), (steps, first_step, last_step), seed, inputs)

    def unet_call(latent, timestep, guidance_scale=None, **inputs):
        if distilled:
            inputs["guidance"] = guidance_scale - 1.0
        return unet(latent=latent, timestep=timestep, **model.prepare(**inputs))

    def rows_fit(first_step, last_step, **_):
        return [
            (ops.logical_and(first_step >= 0, first_step <= last_step), "first_step must be in 0..last_step"),
            (last_step <= steps, f"last_step must be at most {steps}, the rows of the steps table"),
        ]

    scale = TensorSpec("guidance_scale", (images,), "float32")
    rows = (
        latent,
        memory,
        TensorSpec("steps", (steps, ROW_SIZE), "float32"),
        TensorSpec("first_step", (), "int32"),
        TensorSpec("last_step", (), "int32"),
    )
    distilled_scale = (scale,) if distilled else ()
    guidance = (scale, dataclasses.replace(scale, name="guidance_rescale"))
    seed = TensorSpec("seed", (images, 2), "int32")
    state = (latent, memory, dataclasses.replace(latent, name="denoised"))
    return run, [
        Endpoint(
            name="denoise",
            inputs=(*rows, *guidance, seed, *contexts.values()),
            outputs=state,
            function=denoise,
            preconditions=rows_fit,
            compiled_variant=True,
        ),
        Endpoint(
            name="denoise_unguided",
            inputs=(*rows, seed, *prompt_contexts),
            outputs=state,
            function=denoise_unguided,
            preconditions=rows_fit,
            compiled_variant=True,
        ),
        Endpoint(
            name="unet",
            inputs=(latent, TensorSpec("timestep", (images,), "float32"), *prompt_contexts, *distilled_scale),
            outputs=(dataclasses.replace(latent, name="prediction"),),
            function=unet_call,
        ),
    ]


STATE = ("latent", "memory", "denoised")  # what the loops return


def _latent(config: ModelConfig, spec: ExportSpec, size: Size) -> TensorSpec:
    scale = config.vae.downscale
    shape = (spec.num_images, size.height // scale, size.width // scale, config.vae.latent_channels)
    return TensorSpec("latent", shape, "float32")


def _published_loop(
    run: Callable, denoise: Endpoint, spec: ExportSpec, ddim: SchedulerConfig, alphas_cumprod: np.ndarray
) -> Endpoint:
    """`serving_default` as clients of the published KerasCV SavedModels know it: fresh noise, DDIM, one guidance."""
    images, steps = spec.num_images, spec.max_steps
    tensors = {tensor.name: tensor for tensor in denoise.inputs}
    contexts = (tensors["context"], tensors["unconditional_context"])

    def serving_default(latent, num_steps, unconditional_guidance_scale, **contexts):
        # The published SavedModels' guidance, u + s (c - u) at every s.
        return run(
            latent=latent,
            memory=ops.zeros(tensors["memory"].shape, dtype="float32"),
            steps=loop.ddim_rows(num_steps, steps, ddim, alphas_cumprod),
            first_step=ops.zeros((), dtype="int32"),
            # A count outside the table becomes a range outside it, which gives NaN.
            last_step=ops.where(num_steps < 1, steps + 1, num_steps),
            guidance=ops.broadcast_to(unconditional_guidance_scale - 1.0, (images,)),
            guidance_rescale=ops.zeros((images,), dtype="float32"),
            seed=ops.zeros((images, 2), dtype="int32"),
            **contexts,
        )

    def count_fits(num_steps, **_):
        fits = ops.logical_and(num_steps >= 1, num_steps <= steps)
        return [(fits, f"num_steps must be in 1..{steps}, the rows this export was made with")]

    return Endpoint(
        name="serving_default",
        inputs=(
            *contexts,
            TensorSpec("num_steps", (), "int32"),
            TensorSpec("unconditional_guidance_scale", (), "float32"),
        ),
        outputs=(tensors["latent"],),
        function=serving_default,
        noise_inputs=(tensors["latent"],),
        preconditions=count_fits,
    )


def decoder(model, config: ModelConfig, spec: ExportSpec, share: Share = lambda function: function) -> list[Endpoint]:
    """`serving_default`; per size `decode`, `decode_float` and `decode_png`."""
    every = []
    for size in spec.sizes:
        endpoints = _decoders(model, config, spec, size, share)
        if size == spec.size:
            every.append(_published_decoder(endpoints[0]))
        every += [dataclasses.replace(e, name=spec.signature(e.name, size)) for e in endpoints]
    return every


def _decoders(model, config: ModelConfig, spec: ExportSpec, size: Size, share: Share) -> list[Endpoint]:
    images, latent = spec.num_images, _latent(config, spec, size)
    compute = _vae_dtype(config, spec)
    # KerasCV truncates, diffusers rounds.
    to_integer = ops.floor if config.numerics == "kerascv" else ops.round

    def decode_float(latent):
        image = model(ops.cast(latent / config.vae.scaling_factor, compute))
        return {"image": ops.cast(image, "float32")}

    decode_float = share(decode_float)

    def decode(latent):
        image = decode_float(latent=latent)["image"]
        finite = ops.all(ops.isfinite(image), axis=(1, 2, 3))
        levels = to_integer(ops.clip(image * 0.5 + 0.5, 0.0, 1.0) * 255.0)
        # Casting NaN to an integer gives whatever the machine likes; `finite` tells that it was there.
        levels = ops.where(ops.isfinite(image), levels, 0.0)
        return {"generated_images": ops.cast(levels, "uint8"), "finite": finite}

    shape = (images, size.height, size.width, config.vae.out_channels)
    return [
        Endpoint(
            name="decode",
            inputs=(latent,),
            outputs=(TensorSpec("generated_images", shape, "uint8"), TensorSpec("finite", (images,), "bool")),
            function=decode,
            compiled_variant=True,
        ),
        Endpoint(
            name="decode_float",
            inputs=(latent,),
            outputs=(TensorSpec("image", shape, "float32"),),
            function=lambda latent: decode_float(latent=latent),
        ),
        Endpoint(
            name="decode_png",
            inputs=(latent,),
            outputs=(TensorSpec("image_bytes", (images,), "string"),),
            function=decode,
            postconditions=_all_finite,
            png={"image_bytes": "generated_images"},
        ),
    ]


def _all_finite(finite, **_):
    return [(ops.all(finite), "the decoded images hold NaN or infinite values")]


def _published_decoder(decode: Endpoint) -> Endpoint:
    """`serving_default`: pictures only, since a second output would change the shape of a REST answer."""
    return dataclasses.replace(
        decode, name="serving_default", outputs=decode.outputs[:1], postconditions=_all_finite, compiled_variant=False
    )


def image_encoder(model, config: ModelConfig, spec: ExportSpec) -> list[Endpoint]:
    """Per size `encode_image`: distribution of the latent in the UNet's scale, to be sampled as mean + std * noise."""
    compute = _vae_dtype(config, spec)

    def encode_image(image):
        mean, std = model(ops.cast(image, compute))
        scale = config.vae.scaling_factor
        return {"mean": ops.cast(mean, "float32") * scale, "std": ops.cast(std, "float32") * scale}

    every = []
    for size in spec.sizes:
        image = TensorSpec("image", (spec.num_images, size.height, size.width, config.vae.in_channels), "float32")
        latent = _latent(config, spec, size)
        outputs = tuple(dataclasses.replace(latent, name=name) for name in ("mean", "std"))
        every.append(Endpoint(spec.signature("encode_image", size), (image,), outputs, encode_image))
    return every


def _vae_dtype(config: ModelConfig, spec: ExportSpec) -> str:
    return "float32" if config.vae.force_upcast else spec.dtype
