"""Prompts to pictures with the functions of an export, wherever they run.

    python -m pipeline.generate "a red apple on a blue background" --models exports/emoji

`plan` says from the manifest alone what a run will compute, `draw` computes it call by call, `generate` does both.
No TensorFlow here: an export is loaded by `pipeline.load`.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from models.errors import InputError
from models.export_spec import Size
from models.steps import MEMORY, ROW
from pipeline.images import picture
from pipeline.manifest import Functions, Manifest, chain_signature
from pipeline.prompts import tokenizer
from pipeline.sampling import noise
from pipeline.sampling.settings import Settings, settings, table
from pipeline.sampling.solvers import Steps

log = logging.getLogger(__name__)

Pictures = dict[int, np.ndarray]  # image number -> uint8[H, W, 3]
Preview = Callable[[int, Pictures], object]
Encoded = tuple[np.ndarray, np.ndarray]  # mean and standard deviation of a picture's latent, f32[h, w, 4] each


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of pictures will compute, known before anything is loaded.

    Attributes:
        size: of the pictures.
        num_images: per prompt; image i belongs to prompt i // num_images.
        seeds, guidance_scales: one per image.
        table: f32[S, 39], `steps` as the export takes them.
        tokens: inputs of `encode`, each with a row for every prompt.
        calls: the image numbers of the places of each call, see `batches`.
        image: f32[H, W, 3], the picture to start from; None: noise alone.
    """

    manifest: Manifest
    size: Size
    prompts: list[str]
    negatives: list[str | None]
    num_images: int
    seeds: list[int]
    guidance_scales: list[float]
    settings: Settings
    steps: Steps
    table: np.ndarray
    tokens: dict[str, np.ndarray]
    calls: list[list[int]]
    image: np.ndarray | None = None


def plan(
    manifest: Manifest,
    prompts: str | Sequence[str],
    negative_prompt: str | Sequence[str] | None = None,
    seed: int = 0,
    num_images: int | None = None,
    guidance_scale: float | Sequence[float] | None = None,
    prompt_weighting: bool = True,
    size: Size | None = None,
    init_image=None,
    init_crop: bool = False,
    **how,
) -> Run:
    """Plan a run; what is odd about a prompt is logged. For the arguments see `generate`.

    Args:
        size: of the pictures; None takes the export's first.

    Raises:
        InputError: settings, prompts or a picture that the export cannot serve.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts:
        raise InputError("no prompt given")
    spec, size = manifest.spec, size or manifest.spec.size
    num_images = spec.images_per_prompt if num_images is None else num_images
    _check_positive(num_images=num_images)
    total = len(prompts) * num_images
    negatives = per_prompt(negative_prompt, len(prompts))
    scales = per_image(guidance_scale, total, manifest.config.defaults.guidance_scale)
    chosen = settings(manifest, guidance_scale=scales[0], image_to_image=init_image is not None, **how)
    steps, rows = table(manifest, chosen)
    return Run(
        manifest=manifest,
        size=size,
        prompts=prompts,
        negatives=negatives,
        num_images=num_images,
        seeds=noise.image_seeds(seed, total),
        guidance_scales=scales,
        settings=chosen,
        steps=steps,
        table=rows,
        tokens=_tokenise(manifest, prompts, negatives, prompt_weighting),
        calls=batches(len(prompts), num_images, spec.prompts, spec.images_per_prompt),
        image=None if init_image is None else picture.prepare(manifest, size, init_image, init_crop),
    )


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
    preview: Preview | None = None,
    preview_every: int | None = None,
    **how,
) -> np.ndarray:
    """Draw pictures; any number of prompts and images, whatever the export's batch is.

    They are kept until the last is there; for more than fit into memory iterate over `draw(functions, plan(...))`.

    Args:
        prompts: one or several.
        negative_prompt: None, one for all prompts, or one per prompt.
        seed: of the first image; image i has seed + i, whatever batch it falls into.
        num_images: per prompt; None takes the export's.
        guidance_scale: one, or one per image; None takes the export's.
        prompt_weighting: read (brackets:1.2) in prompts as weights.
        init_image, init_crop: picture to start from, a path or an array, see `pipeline.images.picture`; None: noise.
        finished: called with the pictures of each call of `decode`, by image number.
        progress, steps_per_call, preview, preview_every: see `draw`.
        how: sampler, num_steps and whatever else `pipeline.sampling.settings.settings` takes.

    Returns:
        uint8[len(prompts) * num_images, H, W, 3]; image i belongs to prompt i // num_images.

    Raises:
        InputError: settings or prompts the export cannot serve, or pictures that are not finite.
    """
    run = plan(
        functions.manifest,
        prompts,
        negative_prompt,
        seed,
        num_images,
        guidance_scale,
        prompt_weighting,
        functions.size,
        init_image,
        init_crop,
        **how,
    )
    result = np.zeros((len(run.seeds), run.size.height, run.size.width, 3), np.uint8)
    for pictures in draw(functions, run, progress, steps_per_call, preview, preview_every):
        for i, image in pictures.items():
            result[i] = image
        if finished is not None:
            finished(pictures)
    return result


def draw(
    functions: Functions,
    run: Run,
    progress: Callable[[int], object] | None = None,
    steps_per_call: int | None = None,
    preview: Preview | None = None,
    preview_every: int | None = None,
) -> Iterator[Pictures]:
    """Yield the pictures of each call of the export as they are finished, and keep none.

    Args:
        progress: called with the number of rows (calls of the UNet) done, after each call of `denoise`.
        steps_per_call: rows of the steps table per call; None runs all in one. Pictures do not depend on it.
        preview: called with the row and what the pictures look like there, after every `preview_every` rows but the
            last.

    Raises:
        InputError: pictures that are not finite.
    """
    _check_positive(steps_per_call=steps_per_call, preview_every=preview_every)
    encoded = encode_image(functions, run)
    for images in run.calls:

        def show(row: int, latent, images=images) -> None:
            preview(row, dict(zip(images, decode(functions, latent), strict=True)))

        contexts = encode(functions, run, images)
        seen = show if preview else None
        latent = denoise(functions, run, images, contexts, encoded, progress, steps_per_call, seen, preview_every)
        yield dict(zip(images, decode(functions, latent), strict=True))


def _check_positive(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"{name} must be 1 or more, found {value}")


def batches(num_prompts: int, num_images: int, prompts: int, images_per_prompt: int) -> list[list[int]]:
    """Return which image goes into which place of which call.

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


def _tokenise(
    manifest: Manifest, prompts: list[str], negatives: list[str | None], weighting: bool
) -> dict[str, np.ndarray]:
    """Return the inputs of `encode` with a row for each prompt; logs what is dropped of long ones."""
    # Most negative prompts are the same one.
    distinct = list(dict.fromkeys(negative or "" for negative in negatives))
    rows = [distinct.index(negative or "") for negative in negatives]
    inputs = {}
    for number, words in enumerate(tokenizer.of_export(manifest.folder, manifest.config)):
        suffix = "_2" if number else ""
        ids, weights, notices = words.weigh_batch(prompts, manifest.spec.prompt_chunks, weighting)
        negative_ids, negative_weights, more = words.weigh_batch(distinct, manifest.spec.prompt_chunks, weighting)
        inputs |= {f"tokens{suffix}": ids, f"negative_tokens{suffix}": negative_ids[rows]}
        if number == 0:
            # The encoders' tokens differ in their padding only, so one row of weights serves both.
            inputs |= {"token_weights": weights, "negative_token_weights": negative_weights[rows]}
            for line in [*notices, *(f"negative {line}" for line in more)]:
                log.warning("%s", line)
    return inputs


def encode(functions: Functions, run: Run, images: list[int]) -> dict:
    """Return the inputs of `denoise` that depend on the prompts of one call and on the picture's size, by name.

    Args:
        images: one of `run.calls`.
    """
    spec = run.manifest.spec
    prompts = [image // run.num_images for image in images[:: spec.images_per_prompt]]
    contexts = functions.encode(**{name: rows[prompts] for name, rows in run.tokens.items()})
    if run.manifest.zero_unconditional:
        given = np.repeat([run.negatives[prompt] is not None for prompt in prompts], spec.images_per_prompt)
        for name in [name for name in contexts if name.startswith("unconditional_")]:
            value = np.asarray(contexts[name])
            contexts[name] = value * given.reshape(-1, *[1] * (value.ndim - 1)).astype(value.dtype)
    if run.manifest.config.unet.addition_time_embed_dim is not None:
        # Original size, crop and target size, height first (Podell et al. 2023, section 2.2): a picture not cut.
        size = (run.size.height, run.size.width)
        contexts["time_ids"] = np.tile(np.float32([*size, 0, 0, *size]), (spec.num_images, 1))
    return contexts


def encode_image(functions: Functions, run: Run) -> Encoded | None:
    """Return the distribution of the latent of the picture that the run starts from; None: it starts from noise."""
    if run.image is None:
        return None
    outputs = functions.encode_image(image=np.repeat(run.image[None], run.manifest.spec.num_images, axis=0))
    # One of N equal ones, so that no image depends on its place.
    return np.asarray(outputs["mean"])[0], np.asarray(outputs["std"])[0]


def denoise(
    functions: Functions,
    run: Run,
    images: list[int],
    contexts: dict,
    encoded: Encoded | None = None,
    progress: Callable[[int], object] | None = None,
    steps_per_call: int | None = None,
    preview: Callable[[int, np.ndarray], object] | None = None,
    preview_every: int | None = None,
):
    """Run the steps of one call, from noise to the final latent f32[N,h,w,4].

    Args:
        images: one of `run.calls`. contexts: what `encode` gave for it. encoded: what `encode_image` gave.
        preview: called with the row and the denoised latent f32[N,h,w,4] there, after every `preview_every` rows.

    Raises:
        InputError: a latent that is not finite.
    """
    part, signature = chain_signature(run.manifest.spec, "denoise", run.size)
    inputs = run.manifest.signatures[part][signature].inputs
    _, *shape = next(spec.shape for spec in inputs if spec.name == "latent")
    seeds = [run.seeds[image] for image in images]
    scales = np.float32([run.guidance_scales[image] for image in images])
    guidance = {
        "guidance_scale": scales,
        "guidance_rescale": np.full(scales.shape, run.settings.guidance_rescale, "float32"),
    }
    prompt_only = {name: value for name, value in contexts.items() if not name.startswith("unconditional_")}
    latent = start(run.steps, seeds, shape, encoded)
    state = {"latent": latent, "memory": np.zeros((MEMORY, *latent.shape), "float32")}
    # Without guidance half the work would be thrown away.
    guided = run.steps.rows[:, ROW["g"]][:, 0] * max(float(scales.max()) - 1.0, 0.0) > 0
    if run.manifest.config.unet.time_cond_proj_dim is not None:
        # Distilled with guidance: every call is told the scale.
        guided[:] = True
    for first, last in stretches(guided, steps_per_call, preview_every):
        rows = {"steps": run.table, "first_step": np.int32(first), "last_step": np.int32(last)}
        rows["seed"] = noise.seed_words(seeds)
        if guided[first]:
            result = functions.denoise(**state, **rows, **contexts, **guidance)
        else:
            result = functions.denoise_unguided(**state, **rows, **prompt_only)
        state = {"latent": result["latent"], "memory": result["memory"]}
        if progress is not None:
            progress(last - first)
        if preview is not None and preview_every and last % preview_every == 0 and last < len(guided):
            preview(last, result["denoised"])
    if not np.isfinite(np.asarray(state["latent"])).all():
        raise InputError("the latents hold NaN or infinite values: the weights or the dtype cannot draw this")
    return state["latent"]


def start(steps: Steps, seeds: list[int], shape: Sequence[int], encoded: Encoded | None = None) -> np.ndarray:
    """Return the latents f32[N,h,w,4] that a run begins with: noise of each seed, over a sample of a picture's latent.

    Args:
        shape: h, w and channels.
    """
    latent = np.float32(steps.noise) * noise.initial_latents(seeds, *shape)
    if encoded is None:
        return latent
    mean, std = encoded
    return latent + np.float32(steps.signal) * (mean + std * noise.initial_latents(seeds, *shape, noise.PICTURE_OFFSET))


def decode(functions: Functions, latent) -> np.ndarray:
    """Decode the final latent to uint8[N,H,W,3]. Raises InputError when a picture is not finite."""
    decoded = functions.decode(latent=latent)
    if not np.all(np.asarray(decoded["finite"])):
        raise InputError("the decoded pictures hold NaN or infinite values; try --dtype float32 at export")
    return np.asarray(decoded["generated_images"])


def stretches(guided: np.ndarray, most: int | None, every: int | None = None) -> list[tuple[int, int]]:
    """Cut a run into stretches that are all guided or all not, none longer than `most`, ending at each `every`-th row.

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
    """Return a guidance scale for each of `count` images from None, one, or one per image. Raises InputError."""
    if guidance_scale is None or isinstance(guidance_scale, int | float | np.number):
        return [default if guidance_scale is None else float(guidance_scale)] * count
    scales = [float(scale) for scale in guidance_scale]
    if len(scales) not in (1, count) or not np.isfinite(scales).all():
        raise InputError(f"expected one finite guidance_scale or one per image ({count}), found {scales}")
    return scales * (count if len(scales) == 1 else 1)


def per_prompt(negative_prompt, count: int) -> list[str | None]:
    """Return a negative prompt or None for each of `count` prompts, from None, one, or one each. Raises InputError."""
    if negative_prompt is None or isinstance(negative_prompt, str):
        return [negative_prompt] * count
    negatives = list(negative_prompt)
    if len(negatives) == 1:
        negatives *= count
    if len(negatives) != count:
        raise InputError(f"expected one negative prompt or one per prompt ({count}), found {len(negatives)}")
    return negatives


if __name__ == "__main__":
    from pipeline.commands import generate as command

    command.run()
