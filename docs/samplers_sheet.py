"""Draw docs/samplers.png: every sampler with several step counts, one prompt and seed, one export.

python -m docs.samplers_sheet --models exports/emoji
"""

from pathlib import Path

import numpy as np
from absl import flags
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from models.errors import InputError
from pipeline import cli, generate
from pipeline.sampling import samplers

COUNTS = (4, 8, 15, 25, 50)
CELL, GAP = 112, 8  # pixels
LEFT, TOP = 176, 64  # room for labels
INK, FAINT = "#202020", "#707070"


def sheet(functions, prompt: str, seed: int, guidance_scale: float) -> Image.Image:
    """One row per sampler, one column per step count; below each name, how often it calls the UNet."""
    names = list(samplers.SAMPLERS)
    size = (LEFT + len(COUNTS) * (CELL + GAP), TOP + len(names) * (CELL + GAP))
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    large, small = ImageFont.load_default(17), ImageFont.load_default(12)
    pen.text((8, 8), f'"{prompt}", seed {seed}, guidance {guidance_scale:g}', INK, large)
    for column, count in enumerate(COUNTS):
        pen.text((LEFT + column * (CELL + GAP) + CELL / 2, TOP - 8), f"{count} steps", INK, large, anchor="ms")
    for row, name in enumerate(tqdm(names, desc="samplers")):
        top = TOP + row * (CELL + GAP)
        calls = []
        for column, count in enumerate(COUNTS):
            chosen = generate.settings(functions.manifest, name, count, guidance_scale)
            calls.append(str(len(generate.table(functions.manifest, chosen)[0].rows)))
            settings = {"num_steps": count, "guidance_scale": guidance_scale, "seed": seed, "num_images": 1}
            image = generate.generate(functions, prompt, sampler=name, **settings)[0]
            place = (LEFT + column * (CELL + GAP), top)
            picture.paste(Image.fromarray(image).resize((CELL, CELL), Image.Resampling.LANCZOS), place)
        pen.text((8, top + CELL / 2), name, INK, large, anchor="ls")
        pen.text((8, top + CELL / 2 + 8), f"calls {' '.join(calls)}", FAINT, small)
    return picture


def main(argv):
    if len(argv) > 1:
        raise InputError(f"unexpected arguments: {' '.join(argv[1:])}; the prompt goes into --prompt")
    cli.import_tensorflow()
    from pipeline import load

    functions = load.local(FLAGS.models, jit_compile=FLAGS.jit_compile)
    picture = sheet(functions, FLAGS.prompt, FLAGS.seed, FLAGS.guidance_scale)
    path = Path(FLAGS.output)
    # 256 colours are enough to compare by eye, and a third of the size.
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KB, mean {np.asarray(picture).mean():.1f}")


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_string("models", "exports/emoji", "Export to draw with.")
    flags.DEFINE_string("prompt", "a red apple", "What to draw.")
    flags.DEFINE_integer("seed", 1, "Seed of every picture.")
    flags.DEFINE_float("guidance_scale", 3.0, "Classifier-free guidance.")
    flags.DEFINE_bool("jit_compile", False, "Compile with XLA.")
    flags.DEFINE_string("output", "docs/samplers.png", "Where to write the sheet.")
    cli.run(main)
