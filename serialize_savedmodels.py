"""Export a Stable Diffusion checkpoint as SavedModels: text encoder, UNet with the whole diffusion loop, decoder.

python serialize_savedmodels.py --checkpoint checkpoints/emoji
"""

import re
from pathlib import Path

from absl import flags

from models.errors import InputError
from models.export_spec import DTYPES, TARGETS, WEIGHTS, ExportSpec, Size
from models.families import FAMILIES
from pipeline import cli

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "checkpoint",
    "checkpoints/emoji",
    "Checkpoint to export: a folder in diffusers' layout, a single file, KerasCV's .h5 files, or org/name[@revision].",
)
flags.DEFINE_string("output_dir", None, "Folder of the export. Default: exports/NAME OF THE CHECKPOINT.")
flags.DEFINE_integer("height", None, "Height of the pictures in pixels. Default: the checkpoint's own size.")
flags.DEFINE_integer("width", None, "Width of the pictures in pixels. Default: the checkpoint's own size.")
flags.DEFINE_list("sizes", [], "Sizes from one copy of the weights, e.g. 512x512,768x512 (width x height).")
flags.DEFINE_integer("prompts", 1, "Prompts per call.")
flags.DEFINE_integer("images_per_prompt", 1, "Images per prompt and call.")
flags.DEFINE_integer("prompt_chunks", 1, "Blocks of 75 tokens that a prompt may fill.")
flags.DEFINE_bool("image_encoder", False, "Also write what image to image needs (--init_image).")
flags.DEFINE_integer("max_steps", 256, "Most denoising steps that a call can make.")
flags.DEFINE_enum("dtype", "float32", DTYPES, "Type the weights are stored and, the decoder apart, computed in.")
flags.DEFINE_enum("weights", "dtype", WEIGHTS, "int8: kernels as 8-bit integers, multiplied out at each use.")
flags.DEFINE_enum(
    "target",
    "any",
    TARGETS,
    "cpu: what processors compute faster, in larger files; float32 only, and pictures change by rounding.",
)
flags.DEFINE_bool(
    "jit_compile", False, "Store compiled (XLA) variants beside the plain functions, for servers that run them."
)
flags.DEFINE_list("jit_components", "unet,decoder", "Which parts get them: of text_encoder, unet, decoder.")
flags.DEFINE_bool("warmup_xla", False, "Warm-up records for those too: only for servers started with XLA.")
flags.DEFINE_integer("version", None, "Version of the export. Default: the highest existing one + 1.")
flags.DEFINE_string("variant", None, "Prefer weight files of this variant, e.g. fp16. Default: the plain files.")
flags.DEFINE_multi_string("lora", [], "LoRA to merge into the weights: FILE.safetensors or FILE.safetensors:WEIGHT.")
flags.DEFINE_multi_string("embedding", [], "Textual inversion to add: FILE.safetensors or FILE.safetensors:TOKEN.")
flags.DEFINE_string("vae", None, "Another VAE, e.g. one safe in float16: folder, file, or org/name on the Hub.")
flags.DEFINE_integer(
    "clip_skip", 0, "Last layers of the text encoders to leave out. Clip skip N elsewhere is N - 1 here."
)
flags.DEFINE_bool("ema", False, "Take the averaged copies of the UNet that some single files hold beside it.")
flags.DEFINE_enum(
    "prediction_type",
    None,
    ["epsilon", "v_prediction"],
    "What the UNet predicts, whatever the checkpoint says. Single files of Stable Diffusion 2.x do not say.",
)
flags.DEFINE_bool("allow_pickle", False, "Read .bin and .ckpt where there is nothing else; needs PyTorch.")
flags.DEFINE_bool("compare_float32", True, "Half precision: run each part in float32 too, in its memory, to compare.")
flags.DEFINE_bool("kerascv", False, "Export KerasCV's own Stable Diffusion 1.x weights instead of a checkpoint.")
flags.DEFINE_bool("random_weights", False, "A full-size model with seeded random weights instead: for timing.")
flags.DEFINE_enum("family", "sd1", list(FAMILIES), "Which model --random_weights makes.")
flags.DEFINE_integer("random_seed", 0, "Seed of --random_weights.")


def main(argv):
    if len(argv) > 1:
        raise InputError(f"unexpected arguments: {' '.join(argv[1:])}; the checkpoint goes into --checkpoint")
    if FLAGS.warmup_xla and not FLAGS.jit_compile:
        raise InputError("--warmup_xla warms up the compiled variants of --jit_compile, which was not given")
    cli.print_logs()
    cli.import_tensorflow()
    from pipeline import export, load
    from pipeline.checkpoints import locate
    from pipeline.checkpoints import source as sources

    jit_components = tuple(FLAGS.jit_components) if FLAGS.jit_compile else ()
    load.check_jit_components(jit_components)
    source = find_source(sources, locate)
    first, *more = find_sizes(source.config.default_size)
    spec = ExportSpec(
        height=first.height,
        width=first.width,
        prompts=FLAGS.prompts,
        images_per_prompt=FLAGS.images_per_prompt,
        dtype=FLAGS.dtype,
        max_steps=FLAGS.max_steps,
        prompt_chunks=FLAGS.prompt_chunks,
        more_sizes=tuple(more),
        weights=FLAGS.weights,
        target=FLAGS.target,
    )
    output_dir = Path(FLAGS.output_dir or default_output_dir(source))
    manifest = export.export(
        source,
        output_dir,
        spec,
        jit_components=jit_components,
        version=FLAGS.version,
        image_encoder=FLAGS.image_encoder,
        warmup_xla=FLAGS.warmup_xla,
        compare_float32=FLAGS.compare_float32,
    )
    print(
        f"exported {manifest.folder} version {manifest.version}; see what it can do: "
        f"python -m pipeline.manifest {output_dir}"
    )


def default_output_dir(source) -> str:
    """Name an export after all that sets it apart: versions of one differ in the checkpoint's own weights only."""
    changes = [*(lora.name for lora in source.loras), *(["embedded"] if source.embeddings else [])]
    changes += [source.vae.name] if source.vae else []
    changes += [f"clip_skip_{source.clip_skip}"] if source.clip_skip else []
    changes += [FLAGS.prediction_type] if FLAGS.prediction_type else []
    changes += [FLAGS.dtype] if FLAGS.dtype != "float32" else []
    changes += [FLAGS.weights] if FLAGS.weights != "dtype" else []
    changes += [FLAGS.target] if FLAGS.target != "any" else []
    return "exports/" + "-".join([source.name, *changes])


def find_sizes(default: int) -> list[Size]:
    """What --sizes or --height and --width ask for; the first is the one without a suffix."""
    if not FLAGS.sizes:
        width = FLAGS.width if FLAGS.width is not None else default
        return [Size(width, FLAGS.height if FLAGS.height is not None else default)]
    if FLAGS.height is not None or FLAGS.width is not None:
        raise InputError("--sizes and --height/--width: give one or the other")
    found = [re.fullmatch(r"(\d+)x(\d+)", size.strip()) for size in FLAGS.sizes]
    if not all(found):
        raise InputError(f"--sizes {','.join(FLAGS.sizes)}: expected WIDTHxHEIGHT,WIDTHxHEIGHT, e.g. 512x512,768x512")
    return [Size(int(match[1]), int(match[2])) for match in found]


def refuse_changes(why: str) -> None:
    """Raise InputError if a flag asks for other weights than those that are there."""
    for name in ("lora", "embedding", "vae", "clip_skip", "ema", "prediction_type"):
        if FLAGS[name].value:
            raise InputError(f"--{name} {why}")


def find_source(sources, locate):
    """The weights that the flags ask for."""
    if not FLAGS.kerascv and not FLAGS.random_weights:
        path, name = locate.checkpoint(FLAGS.checkpoint, FLAGS.variant, FLAGS.allow_pickle)
        if sources.is_kerascv(path):
            refuse_changes("does not go with KerasCV's files")
            return sources.h5_source(path)
        options = {option: FLAGS[option].value for option in ("vae", "clip_skip", "allow_pickle", "prediction_type")}
        given = (path, FLAGS.variant, FLAGS.lora, FLAGS.embedding, name)
        if path.is_file():
            return sources.single_file_source(*given, **options, ema=FLAGS.ema)
        if FLAGS.ema:
            raise InputError(f"--ema: {path} is a folder; averaged copies are taken from single files")
        return sources.diffusers_source(*given, **options)
    refuse_changes("changes a checkpoint; leave --kerascv and --random_weights out")
    tokenizer = Path(FLAGS.checkpoint) / "tokenizer"
    if FLAGS.kerascv:
        return sources.kerascv_source(tokenizer, FLAGS.random_seed if FLAGS.random_weights else None)
    return sources.random_source(FAMILIES[FLAGS.family], tokenizer, FLAGS.random_seed)


if __name__ == "__main__":
    cli.run(main)
