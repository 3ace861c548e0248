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
SHEET_COLUMNS = 16
COLOURS = {
    "white": (255, 255, 255),
    "black": (20, 20, 20),
    "red": (220, 48, 48),
    "green": (60, 170, 80),
    "blue": (60, 110, 220),
    "yellow": (250, 220, 80),
    "purple": (150, 90, 200),
    "gray": (150, 150, 150),
}
SHIFTS = (-2, 2)  # pixels, right and down; a whole latent apart, so the networks see every object in one phase only
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


def _rows():
    with open(OBJECTS_FILE, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_objects(archive):
    """Names (list of n) and pictures uint8[n, 64, 64, 4] (RGBA) of the objects in objects.csv, in its order."""
    rows = _rows()
    pictures = []
    with tarfile.open(archive) as tar:
        files = {member.name: member for member in tar.getmembers()}
        for row in rows:
            png = tar.extractfile(files[f"package/img/google/64/{row['image']}"]).read()
            pictures.append(np.array(Image.open(io.BytesIO(png)).convert("RGBA")))
    return [row["name"] for row in rows], np.stack(pictures)


def write_sheet(pictures, file):
    """Writes pictures uint8[n, 64, 64, 4] as one PNG, 16 a row; what is fully transparent loses its colour."""
    rows = -(-len(pictures) // SHEET_COLUMNS)
    padded = np.zeros((rows * SHEET_COLUMNS, SIZE, SIZE, 4), np.uint8)
    padded[: len(pictures)] = pictures * (pictures[..., 3:] > 0)
    grid = padded.reshape(rows, SHEET_COLUMNS, SIZE, SIZE, 4).transpose(0, 2, 1, 3, 4)
    Image.fromarray(grid.reshape(rows * SIZE, SHEET_COLUMNS * SIZE, 4)).save(file, optimize=True)


def read_sheet(file):
    """Names and pictures, as read_objects gives them, from what write_sheet wrote."""
    names = [row["name"] for row in _rows()]
    with Image.open(file) as opened:
        grid = np.array(opened)
    tiles = grid.reshape(-1, SIZE, SHEET_COLUMNS, SIZE, 4).transpose(0, 2, 1, 3, 4).reshape(-1, SIZE, SIZE, 4)
    return names, tiles[: len(names)]


def compose(pictures, colour, right=0, down=0, mirror=False):
    """Pictures over a plain background, mirrored, then shifted: uint8[..., 64, 64, 4] -> uint8[..., 64, 64, 3].

    colour: RGB, 0..255; right, down: pixels.
    """
    if mirror:
        pictures = pictures[..., ::-1, :]
    moved = np.zeros_like(pictures)
    rows, columns = (slice(max(d, 0), SIZE + min(d, 0)) for d in (down, right))
    from_rows, from_columns = (slice(max(-d, 0), SIZE + min(-d, 0)) for d in (down, right))
    moved[..., rows, columns, :] = pictures[..., from_rows, from_columns, :]
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
