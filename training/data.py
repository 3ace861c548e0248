"""The pictures and captions that the embedded checkpoint learns: emoji over plain backgrounds.

The pictures come from the npm package emoji-datasource-google (64x64 PNGs with alpha); objects.csv names the ones that
are used. Every example is a pure function of (seed, index), so a run can stop and go on anywhere.
"""

import csv
import io
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

PACKAGE = "emoji-datasource-google@16.0.0"
OBJECTS_FILE = Path(__file__).with_name("objects.csv")
SIZE = 64
COLOURS = {
    "white": (255, 255, 255),
    "black": (20, 20, 20),
    "red": (220, 45, 45),
    "green": (60, 170, 80),
    "blue": (60, 105, 220),
    "yellow": (250, 220, 80),
    "purple": (150, 85, 200),
    "gray": (145, 145, 145),
}
SHIFTS = (-2, 0, 2)  # pixels, right and down
TEMPLATES = (
    "{article} {name} on a {colour} background",
    "{name} on a {colour} background",
    "{name}, {colour} background",
    "{name} on {colour}",
)
WHITE_TEMPLATES = (*TEMPLATES, "{article} {name}", "{name}")


class Choice(NamedTuple):
    """What is drawn: indices into the objects, COLOURS and the templates; right and down in pixels."""

    object: int
    colour: int
    right: int
    down: int
    mirror: bool
    template: int


def pack(folder):
    """Downloads PACKAGE with npm into `folder`; returns the path of the archive, which is kept and used again."""
    archive = Path(folder) / (PACKAGE.replace("@", "-") + ".tgz")
    if not archive.exists():
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return archive


def read_objects(archive):
    """Names (list of n) and pictures uint8[n, 64, 64, 4] (RGBA) of the objects in objects.csv, in its order."""
    with open(OBJECTS_FILE, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    pictures = []
    with tarfile.open(archive) as tar:
        files = {member.name: member for member in tar.getmembers()}
        for row in rows:
            png = tar.extractfile(files[f"package/img/google/64/{row['image']}"]).read()
            pictures.append(np.array(Image.open(io.BytesIO(png)).convert("RGBA")))
    return [row["name"] for row in rows], np.stack(pictures)


def compose(picture, colour, right=0, down=0, mirror=False):
    """A picture over a plain background: uint8[64, 64, 4], RGB 0..255 -> uint8[64, 64, 3]; mirrored, then shifted."""
    if mirror:
        picture = picture[:, ::-1]
    moved = np.zeros_like(picture)
    rows, columns = (slice(max(d, 0), SIZE + min(d, 0)) for d in (down, right))
    from_rows, from_columns = (slice(max(-d, 0), SIZE + min(-d, 0)) for d in (down, right))
    moved[rows, columns] = picture[from_rows, from_columns]
    alpha = moved[..., 3:].astype(np.float32) / 255
    return np.round(moved[..., :3] * alpha + np.float32(colour) * (1 - alpha)).astype(np.uint8)


def caption(name, colour, template):
    """The text of an example, e.g. "an owl on a blue background"; colour is a key of COLOURS."""
    article = "an" if name[0] in "aeiou" and not name.startswith("uni") else "a"
    templates = WHITE_TEMPLATES if colour == "white" else TEMPLATES
    return templates[template].format(article=article, name=name, colour=colour)


def choose(objects, seed, index):
    """The index-th Choice of a run, for a number of objects: uniform in every part, a pure function of its inputs."""
    random = np.random.default_rng((seed, index))
    colour = int(random.integers(len(COLOURS)))
    templates = WHITE_TEMPLATES if colour == 0 else TEMPLATES
    right, down = (SHIFTS[i] for i in random.integers(len(SHIFTS), size=2))
    return Choice(
        int(random.integers(objects)),
        colour,
        right,
        down,
        bool(random.integers(2)),
        int(random.integers(len(templates))),
    )


def example(names, pictures, seed, index):
    """The index-th example of a run: (image uint8[64, 64, 3], caption)."""
    choice = choose(len(names), seed, index)
    colour, rgb = list(COLOURS.items())[choice.colour]
    image = compose(pictures[choice.object], rgb, choice.right, choice.down, choice.mirror)
    return image, caption(names[choice.object], colour, choice.template)
