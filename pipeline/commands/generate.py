"""Draw pictures from prompts, here or on a server, as PNG files that say how they were made.

    python -m pipeline.generate "a red apple on a blue background" --models exports/emoji

Prompts are given without a flag, as many as you like, each in quotes. Pictures are written as they are finished, so
that Ctrl-C keeps those there are.
"""

import logging
from pathlib import Path

import numpy as np
from absl import flags
from tqdm import tqdm

from models.errors import InputError
from models.export_spec import Size
from pipeline import cli, compile_cache, files, generate, manifest
from pipeline.generate import Pictures, Run
from pipeline.images import png
from pipeline.manifest import Functions, Manifest
from pipeline.sampling import samplers, schedules

FLAGS = flags.FLAGS
log = logging.getLogger(__name__)
# What people type who know other programs -> what it is called here.
HINTS = {
    **dict.fromkeys(
        ("prompt", "prompts", "p"), 'prompts are given without a flag: python -m pipeline.generate "a cat"'
    ),
    **dict.fromkeys(("steps", "num_inference_steps", "n_steps"), "did you mean --num_steps?"),
    **dict.fromkeys(("cfg", "cfg_scale", "guidance", "scale"), "did you mean --guidance_scale?"),
    **dict.fromkeys(("negative", "neg", "n"), "did you mean --negative_prompt?"),
    **dict.fromkeys(("model", "export", "checkpoint"), "did you mean --models, the folder of an export?"),
    **dict.fromkeys(("batch_size", "images", "n_iter"), "did you mean --num_images?"),
    **dict.fromkeys(("output_dir", "out", "o", "outdir"), "did you mean --output?"),
    **dict.fromkeys(("image", "init", "input"), "did you mean --init_image?"),
    **dict.fromkeys(("scheduler",), "did you mean --sampler?"),
}


def define_flags() -> None:
    """Define the flags of the command."""
    cli.define_path("models", "exports/emoji", "Export to draw with; made by serialize_savedmodels.py.")
    flags.DEFINE_integer("version", None, "Version of the export. Default: the newest.")
    flags.DEFINE_bool("verify", True, "Check the export's checksums first.")
    flags.DEFINE_multi_string("negative_prompt", [], "What not to draw: once for all prompts, or once per prompt.")
    cli.define_path("prompts_file", None, "Text file with more prompts, one a line.")
    flags.DEFINE_bool("prompt_weighting", True, "Read (word:1.3), (word) and [word] in prompts as weights.")
    flags.DEFINE_integer("seed", 0, "Seed of the first image; the next ones count on from it.")
    flags.DEFINE_integer("num_images", None, "Images per prompt. Default: the export's.", lower_bound=1)
    _define_sampling_flags()
    cli.define_path("init_image", None, "Picture to start from; needs an export made with --image_encoder.")
    flags.DEFINE_float("strength", None, "How much of --init_image changes: the share of the steps made. Default: 0.8.")
    flags.DEFINE_bool("init_crop", False, "Cut --init_image to the right proportions instead of stretching it.")
    flags.DEFINE_integer("height", None, "Height in pixels, of an export with several sizes. Default: its first size.")
    flags.DEFINE_integer("width", None, "Width in pixels, of an export with several sizes. Default: its first size.")
    flags.DEFINE_bool("jit_compile", False, "Compile with XLA.")
    flags.DEFINE_list("jit_components", "unet,decoder", "What --jit_compile compiles: text_encoder, unet, decoder.")
    cli.define_path("compile_cache", "default", compile_cache.HELP)
    flags.DEFINE_integer("steps_per_call", 5, "Calls of the UNet between two moves of the progress bar.", lower_bound=1)
    cli.define_path("output", "outputs", "Folder for the PNG files.")
    cli.define_path(
        "sheet", None, "PNG file that shows all pictures side by side, four in a row; an older one is replaced."
    )
    flags.DEFINE_integer("preview_every", None, "Write OUTPUT/previews/SEED-STEP.png every k steps.", lower_bound=1)
    flags.DEFINE_string("server", None, "Draw on this server, grpc://HOST:8500 or http://HOST:8501, not here.")
    flags.DEFINE_float("timeout", 600.0, "Seconds that one call of the server may take.", lower_bound=0.001)


def _define_sampling_flags() -> None:
    flags.DEFINE_enum("sampler", None, list(samplers.SAMPLERS), "Sampler. Default: the export's.")
    flags.DEFINE_integer("num_steps", None, "Denoising steps. Default: the export's.")
    flags.DEFINE_float("eta", 0.0, "Fresh noise of ddim: 0 none, 1 as much as DDPM.")
    flags.DEFINE_enum("timestep_spacing", None, schedules.SPACINGS, "Which timesteps. Default: the checkpoint's.")
    flags.DEFINE_enum("sigma_schedule", None, schedules.SIGMA_SCHEDULES, "Noise levels. Default: the checkpoint's.")
    flags.DEFINE_list("timesteps", None, "The timesteps themselves, falling: 999,749,499,249.")
    flags.DEFINE_list("sigmas", None, "The noise levels themselves, falling, the last where it ends: 14.6,3.1,0.7,0.")
    flags.DEFINE_list(
        "guidance_scale",
        None,
        "Classifier-free guidance, one or one per image; 1 or less: none. Default: the export's.",
    )
    flags.DEFINE_float("guidance_rescale", 0.0, "0..1: pull the contrast of guided pictures back.")
    flags.DEFINE_float("guidance_start", 0.0, "Guide from this fraction of the run on; before it, at half the work.")
    flags.DEFINE_float("guidance_end", 1.0, "Guide up to this fraction of the run.")


def run() -> None:
    """Run the command."""
    define_flags()
    cli.run(main, HINTS)


def main(argv):
    prompts = argv[1:] + (read_prompts(FLAGS.prompts_file) if FLAGS.prompts_file else [])
    if not prompts:
        raise InputError('expected a prompt: python -m pipeline.generate "a red apple" (or --prompts_file FILE)')
    # Everything that can be refused is refused before TensorFlow starts, which takes seconds.
    contract = manifest.read(FLAGS.models, FLAGS.version)
    if FLAGS.verify:
        manifest.verify(contract, "tokenizer" if FLAGS.server else "")
    plan = _plan(contract, prompts)
    for notice in samplers.notices(plan.settings.sampler, contract.config.scheduler, plan.settings.options):
        log.warning("%s", notice)
    _try_outputs()
    _draw(_functions(contract, plan.size), plan)


def _plan(contract: Manifest, prompts: list[str]) -> Run:
    """Return the run that the flags describe."""
    options = schedules.Options(
        eta=FLAGS.eta,
        timestep_spacing=FLAGS.timestep_spacing,
        sigma_schedule=FLAGS.sigma_schedule,
        timesteps=_numbers("timesteps"),
        sigmas=_numbers("sigmas"),
    )
    return generate.plan(
        contract,
        prompts,
        FLAGS.negative_prompt or None,
        FLAGS.seed,
        FLAGS.num_images,
        _numbers("guidance_scale") or None,
        FLAGS.prompt_weighting,
        manifest.pick_size(contract, FLAGS.width, FLAGS.height),
        FLAGS.init_image,
        FLAGS.init_crop,
        sampler=FLAGS.sampler,
        num_steps=FLAGS.num_steps,
        guidance_rescale=FLAGS.guidance_rescale,
        guidance_start=FLAGS.guidance_start,
        guidance_end=FLAGS.guidance_end,
        options=options,
        strength=FLAGS.strength,
    )


def _numbers(flag: str) -> tuple[float, ...] | None:
    try:
        return None if FLAGS[flag].value is None else tuple(map(float, FLAGS[flag].value))
    except ValueError as error:
        raise InputError(f"--{flag}: expected numbers with commas between them ({error})") from error


def _try_outputs() -> None:
    """Refuse what cannot be written while nothing has been drawn yet."""
    files.check_folder("--output", Path(FLAGS.output))
    if FLAGS.preview_every:
        files.check_folder("--output", png.previews(Path(FLAGS.output)))
    if FLAGS.sheet:
        files.check_file("--sheet", Path(FLAGS.sheet))


def _functions(contract: Manifest, size: Size) -> Functions:
    """Load the export here, or connect to --server."""
    components = tuple(FLAGS.jit_components)
    if FLAGS.server:
        from pipeline import serving

        return serving.remote(
            FLAGS.server,
            contract,
            timeout=FLAGS.timeout,
            jit_compile=FLAGS.jit_compile,
            jit_components=components,
            width=size.width,
            height=size.height,
        )
    if FLAGS.jit_compile:
        compile_cache.start(compile_cache.folder(FLAGS.compile_cache), contract.export_id)
    cli.import_tensorflow()
    from pipeline import load

    return load.local(contract, FLAGS.jit_compile, components, verify=False, width=size.width, height=size.height)


def _draw(functions: Functions, plan: Run) -> None:
    """Draw the pictures and write each as it is finished."""
    folder, total, count = Path(FLAGS.output), len(plan.seeds), 0
    shown: Pictures = {}  # on the sheet, which holds all pictures anyway

    def preview(row: int, pictures: Pictures) -> None:
        for i, image in pictures.items():
            png.save_preview(image, f"{plan.seeds[i]}-{row:04}", folder)

    try:
        with tqdm(total=len(plan.calls) * len(plan.steps.rows), desc="denoise", unit="call") as bar:
            for pictures in generate.draw(
                functions,
                plan,
                bar.update,
                FLAGS.steps_per_call,
                preview if FLAGS.preview_every else None,
                FLAGS.preview_every,
            ):
                for i, image in pictures.items():
                    tqdm.write(str(png.save(image, plan.seeds[i], _parameters(functions, plan, i), folder)))
                count += len(pictures)
                if FLAGS.sheet:
                    shown |= pictures
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{count} of {total} pictures are finished") from error
    if FLAGS.sheet:
        print(png.save_sheet(np.stack([shown[i] for i in range(total)]), min(4, total), Path(FLAGS.sheet)))


def _parameters(functions: Functions, plan: Run, image: int) -> str:
    """Return what a picture's PNG file says about how it was made."""
    prompt = image // plan.num_images
    return png.parameters(
        functions,
        plan.prompts[prompt],
        plan.negatives[prompt],
        plan.seeds[image],
        plan.settings,
        plan.guidance_scales[image],
    )


def read_prompts(path: str) -> list[str]:
    """Read prompts from a text file, one a line, blank lines left out. Raises InputError when there are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts_file {path}: cannot be read as UTF-8 text ({error})") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--prompts_file {path}: holds no prompt")
    return prompts
