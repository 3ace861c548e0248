"""Prompts to pictures with the functions of an export, wherever they run.

    python -m pipeline.generate "a red apple on a blue background" --models exports/emoji

No TensorFlow here: an export is loaded by `pipeline.load`.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from PIL import Image, PngImagePlugin
from tqdm import tqdm

from models.config import InputError
from pipeline import noise, samplers, schedules, solvers, tokenizer
from pipeline.manifest import Functions
from pipeline.schedules import Options

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to draw: everything but the prompt and the seed."""

    sampler: str
    num_steps: int
    guidance_scale: float
    guidance_rescale: float = 0.0
    options: Options = schedules.DEFAULT


def settings(
    functions: Functions,
    sampler: str | None = None,
    num_steps: int | None = None,
    guidance_scale: float | None = None,
    guidance_rescale: float = 0.0,
    options: Options = schedules.DEFAULT,
) -> Settings:
    """Settings with the export's defaults for whatever is None; a list in `options` has its own number of steps.

    Raises:
        InputError: an unknown sampler, an option it does not take, a step count outside the export's 1..max_steps, or
            a guidance that is no finite number.
    """
    defaults = functions.manifest.config.defaults
    if num_steps is None:
        num_steps = defaults.num_steps if options.num_steps is None else options.num_steps
    chosen = Settings(
        sampler=sampler or defaults.sampler,
        num_steps=num_steps,
        guidance_scale=float(defaults.guidance_scale if guidance_scale is None else guidance_scale),
        guidance_rescale=float(guidance_rescale),
        options=options,
    )
    if not np.isfinite(chosen.guidance_scale) or not 0 <= chosen.guidance_rescale <= 1:
        raise InputError(
            f"guidance_scale must be a finite number and guidance_rescale within 0..1, found "
            f"{chosen.guidance_scale} and {chosen.guidance_rescale}"
        )
    table(functions, chosen)
    return chosen


def table(functions: Functions, chosen: Settings) -> tuple[samplers.Steps, np.ndarray]:
    """The steps of a run and their table f32[S, 39]. Raises InputError where there is none."""
    spec, scheduler = functions.manifest.spec, functions.manifest.config.scheduler
    return samplers.steps_table(chosen.sampler, scheduler, chosen.num_steps, spec.max_steps, chosen.options)


def generate(
    functions: Functions,
    prompts: str | Sequence[str],
    negative_prompt: str | Sequence[str] | None = None,
    seed: int = 0,
    num_images: int | None = None,
    sampler: str | None = None,
    num_steps: int | None = None,
    guidance_scale: float | None = None,
    guidance_rescale: float = 0.0,
    options: Options = schedules.DEFAULT,
    progress: Callable[[int], object] | None = None,
    steps_per_call: int | None = None,
) -> np.ndarray:
    """Draw pictures; any number of prompts and images, whatever the export's batch is.

    Args:
        prompts: one or several.
        negative_prompt: None, one for all prompts, or one per prompt.
        seed: of the first image; image i has seed + i, whatever batch it falls into.
        num_images: per prompt; None takes the export's images_per_prompt.
        sampler, num_steps, guidance_scale: None takes the export's defaults.
        options: of the sampler: eta, spacing, sigma schedule or lists.
        progress: told the number of rows (calls of the UNet) done after each call of `denoise`.
        steps_per_call: rows of the steps table per call; None runs all in one. Pictures do not depend on it.

    Returns:
        uint8[len(prompts) * num_images, H, W, 3]; image i belongs to prompt i // num_images.

    Raises:
        InputError: settings or prompts the export cannot serve, or pictures that are not finite.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts:
        raise InputError("no prompt given")
    spec = functions.manifest.spec
    num_images = spec.images_per_prompt if num_images is None else num_images
    if num_images < 1:
        raise InputError(f"num_images must be 1 or more, found {num_images}")
    negatives = _per_prompt(negative_prompt, len(prompts))
    chosen = settings(functions, sampler, num_steps, guidance_scale, guidance_rescale, options)
    seeds = noise.image_seeds(seed, len(prompts) * num_images)
    encoder = tokenizer.load(functions.manifest.folder / "tokenizer")

    images: dict[int, np.ndarray] = {}
    for rows in batches(len(prompts), num_images, spec.prompts, spec.images_per_prompt):
        # rows: image number for each of the N places, repeated where the last call is not full.
        places = [row // num_images for row in rows[:: spec.images_per_prompt]]
        contexts = encode(functions, encoder, [prompts[p] for p in places], [negatives[p] for p in places])
        latent = denoise(functions, contexts, [seeds[row] for row in rows], chosen, progress, steps_per_call)
        decoded = functions.decode(latent=latent)
        if not np.all(np.asarray(decoded["finite"])):
            raise InputError("the decoded pictures hold NaN or infinite values; try --dtype float32 at export")
        for row, image in zip(rows, np.asarray(decoded["generated_images"]), strict=True):
            images[row] = image
    return np.stack([images[row] for row in range(len(seeds))])


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


def encode(functions: Functions, encoder, prompts: list[str], negatives: list[str | None]) -> dict:
    """P prompts and negative prompts to the inputs of `denoise` that depend on them, by name.

    Warns of prompts that are too long, quoting the part that is dropped.
    """
    tokens, warnings = encoder.encode_batch(prompts)
    negative_tokens, more = encoder.encode_batch([negative or "" for negative in negatives])
    for warning in dict.fromkeys([*warnings, *more]):
        log.warning("%s", warning)
    weights = np.ones(tokens.shape, "float32")
    contexts = functions.encode(
        tokens=tokens, negative_tokens=negative_tokens, token_weights=weights, negative_token_weights=weights
    )
    if functions.manifest.zero_unconditional:
        given = np.repeat([negative is not None for negative in negatives], functions.manifest.spec.images_per_prompt)
        for name in [name for name in contexts if name.startswith("unconditional_")]:
            value = np.asarray(contexts[name])
            contexts[name] = value * given.reshape(-1, *[1] * (value.ndim - 1)).astype(value.dtype)
    return contexts


def denoise(
    functions: Functions,
    contexts: dict,
    seeds: list[int],
    chosen: Settings,
    progress: Callable[[int], object] | None = None,
    steps_per_call: int | None = None,
):
    """Initial noise from `seeds` to the final latent f32[N,h,w,4]. Raises InputError when it is not finite."""
    steps, rows = table(functions, chosen)
    latent_spec = next(s for s in functions.manifest.signatures["decoder"]["decode"].inputs if s.name == "latent")
    images, height, width, channels = latent_spec.shape
    latent = np.float32(steps.noise) * noise.initial_latents(seeds, height, width, channels)
    state = {"latent": latent, "memory": np.zeros((solvers.STATE - 1, *latent.shape), "float32")}
    total = len(steps.rows)
    stride = steps_per_call or total
    for first in range(0, total, stride):
        last = min(first + stride, total)
        result = functions.denoise(
            **state,
            steps=rows,
            first_step=np.int32(first),
            last_step=np.int32(last),
            guidance_scale=np.full((images,), chosen.guidance_scale, "float32"),
            guidance_rescale=np.full((images,), chosen.guidance_rescale, "float32"),
            seed=noise.seed_words(seeds),
            **contexts,
        )
        state = {"latent": result["latent"], "memory": result["memory"]}
        if progress is not None:
            progress(last - first)
    if not np.isfinite(np.asarray(state["latent"])).all():
        raise InputError("the latents hold NaN or infinite values: the weights or the dtype cannot draw this")
    return state["latent"]


def _per_prompt(negative_prompt, count: int) -> list[str | None]:
    if negative_prompt is None or isinstance(negative_prompt, str):
        return [negative_prompt] * count
    negatives = list(negative_prompt)
    if len(negatives) != count:
        raise InputError(f"expected one negative prompt or one per prompt ({count}), found {len(negatives)}")
    return negatives


# === Files ===


def parameters(functions: Functions, prompt: str, negative: str | None, seed: int, chosen: Settings) -> str:
    """How a picture was made, as the `parameters` text that AUTOMATIC1111's readers understand."""
    contract = functions.manifest
    lines = [prompt] + ([f"Negative prompt: {negative}"] if negative else [])
    fields = {
        "Steps": chosen.num_steps,
        "Sampler": SAMPLER_LABELS.get(chosen.sampler, chosen.sampler),
        "CFG scale": f"{chosen.guidance_scale:g}",
        "Seed": seed,
        **_sampling_fields(functions, chosen),
        "Size": f"{contract.spec.width}x{contract.spec.height}",
        "Model": contract.checkpoint,
        "Model hash": contract.export_id[:10],
        "RNG": "NV",
    }
    return "\n".join([*lines, ", ".join(f"{key}: {value}" for key, value in fields.items())])


# What AUTOMATIC1111 calls them.
SAMPLER_LABELS = {
    "ddim": "DDIM",
    "pndm": "PLMS",
    "euler": "Euler",
    "euler_a": "Euler a",
    "heun": "Heun",
    "lms": "LMS",
    "dpmpp_2m": "DPM++ 2M",
    "dpmpp_2m_sde": "DPM++ 2M SDE",
    "dpmpp_3m": "DPM++ 3M",
    "unipc": "UniPC",
    "deis": "DEIS",
    "lcm": "LCM",
}


def _sampling_fields(functions: Functions, chosen: Settings) -> dict[str, object]:
    """The options that made a difference, by AUTOMATIC1111's names where it has them."""
    options = chosen.options
    schedule = samplers.resolved(chosen.sampler, functions.manifest.config.scheduler, options).sigma_schedule
    fields = {
        "Schedule type": schedule.capitalize() if schedule != "uniform" and options.num_steps is None else None,
        "Eta DDIM": f"{options.eta:g}" if options.eta else None,
        "Timestep spacing": options.timestep_spacing,
        # No commas, which separate the fields.
        "Timesteps": " ".join(f"{value:g}" for value in options.timesteps or ()),
        "Sigmas": " ".join(f"{value:g}" for value in options.sigmas or ()),
    }
    return {key: value for key, value in fields.items() if value}


def save(image: np.ndarray, seed: int, text: str, folder: Path) -> Path:
    """Write one picture as NNNNN-SEED.png, NNNNN the next free number; nothing is ever overwritten.

    Args:
        image: uint8[H, W, 3]. text: goes into the PNG's `parameters` chunk.

    Raises:
        InputError: the folder cannot be written.
    """
    information = PngImagePlugin.PngInfo()
    # Latin-1 fits a tEXt chunk, which every reader knows; anything else needs iTXt.
    if text.isascii():
        information.add_text("parameters", text)
    else:
        information.add_itxt("parameters", text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(p.name.split("-")[0]) for p in folder.glob("*-*.png") if p.name.split("-")[0].isdecimal()]
        number = max(numbers, default=-1) + 1
        temporary = folder / f".{os.getpid()}.png"
        Image.fromarray(image).save(temporary, pnginfo=information)
        while True:
            path = folder / f"{number:05}-{seed}.png"
            try:
                # A link fails where a rename would overwrite what another process just wrote.
                os.link(temporary, path)
            except FileExistsError:
                number += 1
            else:
                temporary.unlink()
                return path
    except OSError as error:
        raise InputError(f"{folder}: cannot write pictures there ({error.strerror})") from error


def read_prompts(path: str) -> list[str]:
    """Prompts from a text file, one a line, blank lines left out. Raises InputError when there are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts_file {path}: cannot be read as UTF-8 text ({error})") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--prompts_file {path}: holds no prompt")
    return prompts


def _options() -> Options:
    """The sampler's options as the flags say them."""
    lists = {}
    for name in ("timesteps", "sigmas"):
        try:
            lists[name] = None if FLAGS[name].value is None else tuple(map(float, FLAGS[name].value))
        except ValueError as error:
            raise InputError(f"--{name}: expected numbers with commas between them ({error})") from error
    return Options(FLAGS.eta, FLAGS.timestep_spacing, FLAGS.sigma_schedule, **lists)


def main(argv):
    prompts = argv[1:] + (read_prompts(FLAGS.prompts_file) if FLAGS.prompts_file else [])
    if not prompts:
        raise InputError('expected a prompt: python -m pipeline.generate "a red apple" (or --prompts_file FILE)')
    cli.import_tensorflow()
    from pipeline import load

    functions = load.local(FLAGS.models, FLAGS.jit_compile, tuple(FLAGS.jit_components), FLAGS.version, FLAGS.verify)
    num_images = FLAGS.num_images or functions.manifest.spec.images_per_prompt
    chosen = settings(
        functions, FLAGS.sampler, FLAGS.num_steps, FLAGS.guidance_scale, FLAGS.guidance_rescale, _options()
    )
    for notice in samplers.notices(chosen.sampler, functions.manifest.config.scheduler, chosen.options):
        log.warning("%s", notice)
    spec = functions.manifest.spec
    calls = len(batches(len(prompts), num_images, spec.prompts, spec.images_per_prompt))
    rows = len(table(functions, chosen)[0].rows)
    with tqdm(total=calls * rows, desc="denoise", unit="call") as bar:
        images = generate(
            functions,
            prompts,
            FLAGS.negative_prompt,
            FLAGS.seed,
            num_images,
            chosen.sampler,
            chosen.num_steps,
            chosen.guidance_scale,
            chosen.guidance_rescale,
            chosen.options,
            progress=bar.update,
            steps_per_call=FLAGS.steps_per_call,
        )
    for i, (image, seed) in enumerate(zip(images, noise.image_seeds(FLAGS.seed, len(images)), strict=True)):
        text = parameters(functions, prompts[i // num_images], FLAGS.negative_prompt, seed, chosen)
        print(save(image, seed, text, Path(FLAGS.output)))


if __name__ == "__main__":
    from pipeline import cli

    FLAGS = flags.FLAGS
    flags.DEFINE_string("models", "exports/emoji", "Export to draw with; made by serialize_savedmodels.py.")
    flags.DEFINE_string("negative_prompt", None, "What not to draw.")
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
    flags.DEFINE_float("guidance_scale", None, "Classifier-free guidance; 1 or less: none. Default: the export's.")
    flags.DEFINE_float("guidance_rescale", 0.0, "0..1: pull the contrast of guided pictures back.")
    flags.DEFINE_bool("jit_compile", False, "Compile with XLA.")
    flags.DEFINE_list("jit_components", "unet,decoder", "What --jit_compile compiles: text_encoder, unet, decoder.")
    flags.DEFINE_integer("steps_per_call", 5, "Calls of the UNet between two moves of the progress bar.", lower_bound=1)
    flags.DEFINE_string("output", "outputs", "Folder for the PNG files.")
    flags.DEFINE_integer("version", None, "Version of the export. Default: the newest.")
    flags.DEFINE_bool("verify", True, "Check the export's checksums first.")
    cli.run(main)
