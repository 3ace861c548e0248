"""What `python -m pipeline.generate` does: prompts and flags to PNG files, on this machine or on a server.

Pictures are written as they are finished, so that Ctrl-C, which acts between two calls, keeps them. No TensorFlow.
"""

import logging
from pathlib import Path

from absl import flags
from tqdm import tqdm

from models.errors import InputError
from pipeline import cli, compile_cache, generate, manifest
from pipeline.images import png
from pipeline.images import read as images
from pipeline.manifest import Functions, Manifest
from pipeline.sampling import noise, samplers
from pipeline.sampling.schedules import Options
from pipeline.sampling.settings import Settings, settings, table

FLAGS = flags.FLAGS
log = logging.getLogger(__name__)


def main(argv):
    prompts = argv[1:] + (generate.read_prompts(FLAGS.prompts_file) if FLAGS.prompts_file else [])
    if not prompts:
        raise InputError('expected a prompt: python -m pipeline.generate "a red apple" (or --prompts_file FILE)')
    # Before TensorFlow starts, which takes seconds.
    contract = manifest.read(FLAGS.models, FLAGS.version)
    if FLAGS.verify:
        manifest.verify(contract, "tokenizer/" if FLAGS.server else "")
    size = manifest.pick_size(contract, FLAGS.width, FLAGS.height)
    init_image = FLAGS.init_image
    if init_image is not None:
        init_image = images.prepare(contract, size, init_image, FLAGS.init_crop)
    functions = _functions(contract, size)
    spec, defaults = contract.spec, contract.config.defaults
    num_images = FLAGS.num_images or spec.images_per_prompt
    total = len(prompts) * num_images
    scales = generate.per_image(_numbers(FLAGS.guidance_scale) or None, total, defaults.guidance_scale)
    chosen = _settings(functions, scales[0])
    negatives = generate.per_prompt(FLAGS.negative_prompt or None, len(prompts))
    calls = len(generate.batches(len(prompts), num_images, spec.prompts, spec.images_per_prompt))
    rows = len(table(contract, chosen)[0].rows)
    seeds, saved = noise.image_seeds(FLAGS.seed, total), []

    def finished(made: generate.Pictures) -> None:
        for i, image in made.items():
            prompt = i // num_images
            text = png.parameters(functions, prompts[prompt], negatives[prompt], seeds[i], chosen, scales[i])
            saved.append(png.save(image, seeds[i], text, Path(FLAGS.output)))
            tqdm.write(str(saved[-1]))

    def preview(row: int, made: generate.Pictures) -> None:
        for i, image in made.items():
            png.save_preview(image, f"{seeds[i]}-{row:04}", Path(FLAGS.output))

    try:
        with tqdm(total=calls * rows, desc="denoise", unit="call") as bar:
            drawn = generate.generate(
                *(functions, prompts, negatives, FLAGS.seed, num_images, scales, FLAGS.prompt_weighting),
                progress=bar.update,
                steps_per_call=FLAGS.steps_per_call,
                init_image=init_image,
                finished=finished,
                preview=preview if FLAGS.preview_every else None,
                preview_every=FLAGS.preview_every,
                **{name: value for name, value in vars(chosen).items() if name != "guidance_scale"},
            )
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"{len(saved)} of {total} pictures are finished") from error
    if FLAGS.sheet:
        print(png.save_sheet(drawn, min(4, total), Path(FLAGS.sheet)))


def _functions(contract: Manifest, size) -> Functions:
    """The export, here or on --server."""
    compiled = {"jit_compile": FLAGS.jit_compile, "jit_components": tuple(FLAGS.jit_components)}
    place = {"width": size.width, "height": size.height}
    if FLAGS.server:
        from pipeline import serving

        return serving.remote(FLAGS.server, contract, timeout=FLAGS.timeout, **compiled, **place)
    if compiled["jit_compile"]:
        compile_cache.start(compile_cache.folder(FLAGS.compile_cache), contract.export_id)
    cli.import_tensorflow()
    from pipeline import load

    return load.local(contract.folder, version=contract.version, verify=False, **compiled, **place)


def _settings(functions: Functions, guidance_scale: float) -> Settings:
    """What the flags say, with notices of what the checkpoint leaves open."""
    chosen = settings(
        *(functions.manifest, FLAGS.sampler, FLAGS.num_steps, guidance_scale, FLAGS.guidance_rescale),
        *(FLAGS.guidance_start, FLAGS.guidance_end, _options(), FLAGS.strength, FLAGS.init_image is not None),
    )
    for notice in samplers.notices(chosen.sampler, functions.manifest.config.scheduler, chosen.options):
        log.warning("%s", notice)
    return chosen


def _options() -> Options:
    """The sampler's options as the flags say them."""
    lists = {}
    for name in ("timesteps", "sigmas"):
        try:
            lists[name] = None if FLAGS[name].value is None else tuple(map(float, FLAGS[name].value))
        except ValueError as error:
            raise InputError(f"--{name}: expected numbers with commas between them ({error})") from error
    return Options(FLAGS.eta, FLAGS.timestep_spacing, FLAGS.sigma_schedule, **lists)


def _numbers(texts: list[str]) -> list[float]:
    for text in texts:
        try:
            float(text)
        except ValueError as error:
            raise InputError(f"--guidance_scale {text!r}: expected a number") from error
    return [float(text) for text in texts]
