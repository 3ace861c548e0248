"""Prompts to pictures with the functions of an export, wherever they run.

    python -m pipeline.generate "a red apple on a blue background" --models exports/emoji

No TensorFlow here: an export is loaded by `pipeline.load`.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from absl import flags

from models.errors import InputError
from pipeline.images import read
from pipeline.manifest import Functions, chain_signature
from pipeline.prompts import tokenizer
from pipeline.sampling import noise, samplers, schedules, solvers
from pipeline.sampling.settings import Settings, settings, table

log = logging.getLogger(__name__)


Pictures = dict[int, np.ndarray]  # image number -> uint8[H, W, 3]


def generate(
    functions: Functions,
    prompts: str | Sequence[str],
    negative_prompt: str | Sequence[str] | None = None,
    seed: int = 0,
    num_images: int | None = None,
    guidance_scale: float | Sequence[float] | None = None,
    prompt_weighting: bool = True,
    progress: Callable[[int], object] | None = None,
    steps_per_call: int | None = None,
    init_image=None,
    init_crop: bool = False,
    finished: Callable[[Pictures], object] | None = None,
    preview: Callable[[int, Pictures], object] | None = None,
    preview_every: int | None = None,
    **how,
) -> np.ndarray:
    """Draw pictures; any number of prompts and images, whatever the export's batch is.

    Args:
        prompts: one or several.
        negative_prompt: None, one for all prompts, or one per prompt.
        seed: of the first image; image i has seed + i, whatever batch it falls into.
        num_images: per prompt; None takes the export's.
        guidance_scale: one, or one per image; None takes the export's.
        prompt_weighting: read (brackets:1.2) in prompts as weights.
        progress: told the number of rows (calls of the UNet) done after each call of `denoise`.
        steps_per_call: rows of the steps table per call; None runs all in one. Pictures do not depend on it.
        init_image, init_crop: picture to start from, a path or an array, see `pipeline.images.read`; None: noise alone.
        finished: told the pictures of each call of `decode`, by image number.
        preview: told the row and what the pictures look like there, after every `preview_every` rows but the last.
        how: sampler, num_steps and whatever else `pipeline.sampling.settings.settings` takes.

    Returns:
        uint8[len(prompts) * num_images, H, W, 3]; image i belongs to prompt i // num_images.

    Raises:
        InputError: settings or prompts the export cannot serve, or pictures that are not finite.
    """
    prompts = _listed(prompts)
    spec = functions.manifest.spec
    num_images = spec.images_per_prompt if num_images is None else num_images
    _check_positive(num_images=num_images, steps_per_call=steps_per_call, preview_every=preview_every)
    total = len(prompts) * num_images
    negatives = per_prompt(negative_prompt, len(prompts))
    scales = per_image(guidance_scale, total, functions.manifest.config.defaults.guidance_scale)
    chosen = settings(functions.manifest, guidance_scale=scales[0], image_to_image=init_image is not None, **how)
    picture = read.encode(functions, init_image, init_crop)
    seeds = noise.image_seeds(seed, total)
    tokenizers = tokenizer.of_export(functions.manifest.folder, functions.manifest.config)
    warn_of_cuts(functions, tokenizers[0], prompts, negatives, prompt_weighting)

    def draw(rows: list[int]) -> Pictures:
        # rows: image number for each of the N places, repeated where the last call is not full.
        places = [row // num_images for row in rows[:: spec.images_per_prompt]]
        texts = [[given[place] for place in places] for given in (prompts, negatives)]
        contexts = encode(functions, tokenizers, *texts, prompt_weighting)
        latent = denoise(
            *(functions, contexts, [seeds[row] for row in rows], chosen, progress, steps_per_call),
            *([scales[row] for row in rows], picture, _shown(functions, rows, preview), preview_every),
        )
        made = dict(zip(rows, decode(functions, latent), strict=True))
        if finished is not None:
            finished(made)
        return made

    drawn: Pictures = {}
    for rows in batches(len(prompts), num_images, spec.prompts, spec.images_per_prompt):
        drawn |= draw(rows)
    return np.stack([drawn[row] for row in range(total)])


def _shown(functions: Functions, rows: list[int], preview: Callable[[int, Pictures], object] | None):
    """`preview` in the terms of `denoise`: told the latent of each of the N places."""
    return preview and (lambda row, latent: preview(row, dict(zip(rows, decode(functions, latent), strict=True))))


def _listed(prompts: str | Sequence[str]) -> list[str]:
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts:
        raise InputError("no prompt given")
    return prompts


def _check_positive(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"{name} must be 1 or more, found {value}")


def batches(num_prompts: int, num_images: int, prompts: int, images_per_prompt: int) -> list[list[int]]:
    """Which image goes into which place of which call.

    A call has `prompts` x `images_per_prompt` places; every prompt's images are cut into groups of
    `images_per_prompt`, a short group and a short call are filled up by repeating their last entry.

    Returns:
        One list per call of N image numbers, 0..num_prompts*num_images-1, in order of place.
    """
    groups = []
    for prompt in range(num_prompts):
        for start in range(0, num_images, images_per_prompt):
            group = list(range(start, min(start + images_per_prompt, num_images)))
            group += group[-1:] * (images_per_prompt - len(group))
            groups.append([prompt * num_images + image for image in group])
    calls = []
    for start in range(0, len(groups), prompts):
        call = groups[start : start + prompts]
        call += call[-1:] * (prompts - len(call))
        calls.append([row for group in call for row in group])
    return calls


def warn_of_cuts(
    functions: Functions, encoder, prompts: list[str], negatives: list[str | None], prompt_weighting: bool = True
) -> None:
    """Log one line for each prompt and negative prompt that is too long, quoting the part that is dropped."""
    blocks = functions.manifest.spec.prompt_chunks
    _, _, lines = encoder.weigh_batch(prompts, blocks, prompt_weighting)
    _, _, more = encoder.weigh_batch(list(dict.fromkeys(n or "" for n in negatives)), blocks, prompt_weighting)
    for line in [*lines, *(f"negative {line}" for line in more)]:
        log.warning("%s", line)


def encode(
    functions: Functions,
    tokenizers: Sequence[tokenizer.Tokenizer],
    prompts: list[str],
    negatives: list[str | None],
    prompt_weighting: bool = True,
) -> dict:
    """P prompts and negative prompts, and the picture's size, to the inputs of `denoise` that depend on them, by name.

    Args:
        tokenizers: of the export, one per text encoder; see `pipeline.prompts.tokenizer.of_export`.
    """
    contract, inputs = functions.manifest, {}
    spec = contract.spec
    for suffix, words in zip(("", "_2"), tokenizers, strict=False):
        for sign, texts in (("", prompts), ("negative_", [negative or "" for negative in negatives])):
            ids, weights, _ = words.weigh_batch(texts, spec.prompt_chunks, prompt_weighting)
            # The encoders' tokens differ in their padding only, so one row of weights serves both.
            inputs |= {f"{sign}tokens{suffix}": ids, f"{sign}token_weights": weights}
    contexts = functions.encode(**inputs)
    if contract.zero_unconditional:
        given = np.repeat([negative is not None for negative in negatives], spec.images_per_prompt)
        for name in [name for name in contexts if name.startswith("unconditional_")]:
            value = np.asarray(contexts[name])
            contexts[name] = value * given.reshape(-1, *[1] * (value.ndim - 1)).astype(value.dtype)
    if contract.config.unet.addition_time_embed_dim is not None:
        # Original size, crop and target size, height first (Podell et al. 2023, section 2.2): a picture not cut.
        size = (functions.size.height, functions.size.width)
        contexts["time_ids"] = np.tile(np.float32([*size, 0, 0, *size]), (spec.num_images, 1))
    return contexts


def denoise(
    functions: Functions,
    contexts: dict,
    seeds: list[int],
    chosen: Settings,
    progress: Callable[[int], object] | None = None,
    steps_per_call: int | None = None,
    guidance_scales: Sequence[float] | None = None,
    picture: tuple[np.ndarray, np.ndarray] | None = None,
    preview: Callable[[int, np.ndarray], object] | None = None,
    preview_every: int | None = None,
):
    """Initial noise from `seeds` to the final latent f32[N,h,w,4]. Raises InputError when it is not finite.

    Args:
        guidance_scales: of each of the N images; None takes `chosen.guidance_scale` for all.
        picture: mean and standard deviation of the latent f32[h,w,4] to start from, where `chosen` has a strength.
        preview: told the row and the denoised latent f32[N,h,w,4] there, after every `preview_every` rows.
    """
    steps, rows = table(functions.manifest, chosen)
    part, signature = chain_signature(functions.manifest.spec, "denoise", functions.size)
    inputs = functions.manifest.signatures[part][signature].inputs
    count, *shape = next(spec.shape for spec in inputs if spec.name == "latent")
    scales = np.full((count,), chosen.guidance_scale, "float32")
    if guidance_scales is not None:
        scales[:] = guidance_scales
    if (picture is None) != (chosen.strength is None):
        raise InputError("a strength needs a picture to start from, and a picture a strength")
    latent = start(steps, seeds, shape, picture)
    state = {"latent": latent, "memory": np.zeros((solvers.STATE - 1, *latent.shape), "float32")}
    # Without guidance half the work would be thrown away.
    guided = steps.rows[:, solvers.ROW["g"]][:, 0] * max(float(scales.max()) - 1.0, 0.0) > 0
    if functions.manifest.config.unet.time_cond_proj_dim is not None:
        # Distilled with guidance: every call is told the scale.
        guided[:] = True
    for first, last in stretches(guided, steps_per_call, preview_every):
        every = {
            "steps": rows,
            "first_step": np.int32(first),
            "last_step": np.int32(last),
            "seed": noise.seed_words(seeds),
        }
        if guided[first]:
            rescale = np.full((count,), chosen.guidance_rescale, "float32")
            result = functions.denoise(**state, **every, **contexts, guidance_scale=scales, guidance_rescale=rescale)
        else:
            prompt_only = {name: value for name, value in contexts.items() if not name.startswith("unconditional_")}
            result = functions.denoise_unguided(**state, **every, **prompt_only)
        state = {"latent": result["latent"], "memory": result["memory"]}
        if progress is not None:
            progress(last - first)
        if preview is not None and preview_every and last % preview_every == 0 and last < len(guided):
            preview(last, result["denoised"])
    if not np.isfinite(np.asarray(state["latent"])).all():
        raise InputError("the latents hold NaN or infinite values: the weights or the dtype cannot draw this")
    return state["latent"]


def start(
    steps: samplers.Steps, seeds: list[int], shape: Sequence[int], picture: tuple[np.ndarray, np.ndarray] | None = None
) -> np.ndarray:
    """The latents f32[N,h,w,4] a run begins with: noise of each seed, and over a picture a sample of its latent.

    Args:
        shape: h, w and channels. picture: mean and standard deviation of the latent, f32[h,w,4] each.
    """
    latent = np.float32(steps.noise) * noise.initial_latents(seeds, *shape)
    if picture is None:
        return latent
    mean, std = picture
    return latent + np.float32(steps.signal) * (mean + std * noise.initial_latents(seeds, *shape, noise.PICTURE_OFFSET))


def decode(functions: Functions, latent) -> np.ndarray:
    """The final latent to uint8[N,H,W,3]. Raises InputError when a picture is not finite."""
    decoded = functions.decode(latent=latent)
    if not np.all(np.asarray(decoded["finite"])):
        raise InputError("the decoded pictures hold NaN or infinite values; try --dtype float32 at export")
    return np.asarray(decoded["generated_images"])


def stretches(guided: np.ndarray, most: int | None, every: int | None = None) -> list[tuple[int, int]]:
    """Runs of rows that are all guided or all not, none longer than `most`, with an end after each `every` rows.

    Returns:
        [(first, end)], in order.
    """
    changes = {i for i in range(1, len(guided)) if guided[i] != guided[i - 1]}
    cuts = sorted({0, *changes, *range(0, len(guided), every or len(guided)), len(guided)})
    return [
        (start, min(start + (most or len(guided)), end))
        for begin, end in zip(cuts, cuts[1:], strict=False)
        for start in range(begin, end, most or len(guided))
    ]


def per_image(guidance_scale, count: int, default: float) -> list[float]:
    """A guidance scale for each of `count` images from None, one, or one per image. Raises InputError."""
    if guidance_scale is None or isinstance(guidance_scale, int | float | np.number):
        return [default if guidance_scale is None else float(guidance_scale)] * count
    scales = [float(scale) for scale in guidance_scale]
    if len(scales) not in (1, count) or not np.isfinite(scales).all():
        raise InputError(f"expected one finite guidance_scale or one per image ({count}), found {scales}")
    return scales * (count if len(scales) == 1 else 1)


def per_prompt(negative_prompt, count: int) -> list[str | None]:
    """A negative prompt, or None, for each of `count` prompts from None, one, or one per prompt. Raises InputError."""
    if negative_prompt is None or isinstance(negative_prompt, str):
        return [negative_prompt] * count
    negatives = list(negative_prompt)
    if len(negatives) == 1:
        negatives *= count
    if len(negatives) != count:
        raise InputError(f"expected one negative prompt or one per prompt ({count}), found {len(negatives)}")
    return negatives


def read_prompts(path: str) -> list[str]:
    """Prompts from a text file, one a line, blank lines left out. Raises InputError when there are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts_file {path}: cannot be read as UTF-8 text ({error})") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--prompts_file {path}: holds no prompt")
    return prompts


if __name__ == "__main__":
    from pipeline import cli, compile_cache
    from pipeline.commands import generate as draw

    flags.DEFINE_string("models", "exports/emoji", "Export to draw with; made by serialize_savedmodels.py.")
    flags.DEFINE_multi_string("negative_prompt", [], "What not to draw: once for all prompts, or once per prompt.")
    flags.DEFINE_string("prompts_file", None, "Text file with more prompts, one a line.")
    flags.DEFINE_integer("seed", 0, "Seed of the first image; the next ones count on from it.")
    flags.DEFINE_integer("num_images", None, "Images per prompt. Default: the export's.", lower_bound=1)
    flags.DEFINE_enum("sampler", None, list(samplers.SAMPLERS), "Sampler. Default: the export's.")
    flags.DEFINE_integer("num_steps", None, "Denoising steps. Default: the export's.")
    flags.DEFINE_float("eta", 0.0, "Fresh noise of ddim: 0 none, 1 as much as DDPM.")
    flags.DEFINE_enum("timestep_spacing", None, schedules.SPACINGS, "Which timesteps. Default: the checkpoint's.")
    flags.DEFINE_enum("sigma_schedule", None, schedules.SIGMA_SCHEDULES, "Noise levels. Default: the checkpoint's.")
    flags.DEFINE_list("timesteps", None, "The timesteps themselves, falling: 999,749,499,249.")
    flags.DEFINE_list("sigmas", None, "The noise levels themselves, falling, the last where it ends: 14.6,3.1,0.7,0.")
    flags.DEFINE_list(
        "guidance_scale", [], "Classifier-free guidance, one or one per image; 1 or less: none. Default: the export's."
    )
    flags.DEFINE_float("guidance_rescale", 0.0, "0..1: pull the contrast of guided pictures back.")
    flags.DEFINE_float("guidance_start", 0.0, "Guide from this fraction of the run on; before it, at half the work.")
    flags.DEFINE_float("guidance_end", 1.0, "Guide up to this fraction of the run.")
    flags.DEFINE_string("init_image", None, "Picture to start from; needs an export made with --image_encoder.")
    flags.DEFINE_float("strength", None, "How much of --init_image changes: the share of the steps made. Default: 0.8.")
    flags.DEFINE_bool("init_crop", False, "Cut --init_image to the right proportions instead of stretching it.")
    flags.DEFINE_bool("prompt_weighting", True, "Read (word:1.3), (word) and [word] in prompts as weights.")
    flags.DEFINE_integer("height", None, "Height in pixels, of an export with several sizes. Default: its first size.")
    flags.DEFINE_integer("width", None, "Width in pixels, of an export with several sizes. Default: its first size.")
    flags.DEFINE_bool("jit_compile", False, "Compile with XLA.")
    flags.DEFINE_list("jit_components", "unet,decoder", "What --jit_compile compiles: text_encoder, unet, decoder.")
    flags.DEFINE_string("compile_cache", "default", compile_cache.HELP)
    flags.DEFINE_integer("steps_per_call", 5, "Calls of the UNet between two moves of the progress bar.", lower_bound=1)
    flags.DEFINE_string("output", "outputs", "Folder for the PNG files.")
    flags.DEFINE_string(
        "sheet", None, "PNG file that shows all pictures side by side, four in a row; an older one is replaced."
    )
    flags.DEFINE_integer("preview_every", None, "Write OUTPUT/previews/SEED-STEP.png every k steps.", lower_bound=1)
    flags.DEFINE_string("server", None, "Draw on this server, grpc://HOST:8500 or http://HOST:8501, not here.")
    flags.DEFINE_float("timeout", 600.0, "Seconds that one call of the server may take.", lower_bound=0.001)
    flags.DEFINE_integer("version", None, "Version of the export. Default: the newest.")
    flags.DEFINE_bool("verify", True, "Check the export's checksums first.")
    cli.run(draw.main)
