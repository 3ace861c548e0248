"""PNG files that say how they were made and never replace one another."""

import dataclasses
import errno
import io
import json
import os
import re
import struct

import numpy as np
import pytest
from PIL import Image

from models.errors import InputError
from pipeline import generate, load, manifest
from pipeline.images import png


@pytest.fixture(scope="module")
def functions(tiny_export):
    return load.local(tiny_export, verify=False)


PICTURE = np.random.default_rng(0).integers(256, size=(18, 14, 3)).astype("uint8")


def test_numbers_go_on_and_nothing_is_overwritten(tmp_path):
    folder = tmp_path / "new" / "outputs"
    paths = [png.save(PICTURE, seed, "a", folder) for seed in (7, 7, 2**64 - 1)]
    assert [p.name for p in paths] == ["00000-7.png", "00001-7.png", "00002-18446744073709551615.png"]
    (folder / "00041-3.png").write_text("mine")
    (folder / "notes-1.png").write_text("mine")
    (folder / "99.png").write_text("mine")
    assert png.save(PICTURE, 5, "a", folder).name == "00042-5.png"
    (folder / "100000-1.png").write_text("mine")
    assert png.save(PICTURE, 5, "a", folder).name == "100001-5.png"
    assert all(
        (folder / name).read_text() == "mine" for name in ("00041-3.png", "notes-1.png", "99.png", "100000-1.png")
    )
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_another_process_may_take_the_number_in_between(tmp_path, monkeypatch):
    """The next free one is taken; the other's picture stays."""
    (tmp_path / "00000-1.png").write_text("theirs")
    monkeypatch.setattr(png.Path, "glob", lambda *_: iter(()))  # as if it had come after the look around
    assert png.save(PICTURE, 1, "a", tmp_path).name == "00001-1.png"
    assert (tmp_path / "00000-1.png").read_text() == "theirs"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_file_systems_without_links(tmp_path, monkeypatch, number):
    """exFAT, cloud drives and the like."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    for name in ("link", "symlink"):
        monkeypatch.setattr(os, name, refuse)
    assert png.save(PICTURE, 1, "a", tmp_path).name == "00000-1.png"
    assert png.save_preview(PICTURE, "1-0001", tmp_path).name == "1-0001.png"
    assert sorted(p.name for p in tmp_path.rglob("*.png")) == ["00000-1.png", "1-0001.png"]
    with Image.open(tmp_path / "00000-1.png") as image:
        np.testing.assert_array_equal(np.array(image), PICTURE)


def test_what_could_not_be_written_whole_is_not_left_behind(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    def fill(path, mode="r", *arguments, **others):
        path.touch()
        return Full()

    monkeypatch.setattr(png.Path, "open", fill)
    with pytest.raises(InputError, match="cannot write pictures there \\(No space left on device\\)"):
        png.save(PICTURE, 1, "a", tmp_path)
    monkeypatch.setattr(png.os, "replace", lambda *_: Full().write(b""))
    with pytest.raises(InputError, match="cannot write previews there \\(No space left on device\\)"):
        png.save_preview(PICTURE, "1-0001", tmp_path)
    assert [p.name for p in tmp_path.rglob("*")] == ["previews"]


def chunks(path):
    data, position = path.read_bytes(), 8
    while position < len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        yield kind, data[position + 8 : position + 8 + length]
        position += 12 + length


@pytest.mark.parametrize(("text", "kind"), [("a cat\nSteps: 4", b"tEXt"), ("Käse 猫 🐈\nSteps: 4", b"iTXt")])
def test_the_picture_and_its_text_come_back(tmp_path, text, kind):
    """A plain tEXt chunk where it can hold the text, which every reader knows, else iTXt in UTF-8."""
    path = png.save(PICTURE, 1, text, tmp_path)
    with Image.open(path) as image:
        np.testing.assert_array_equal(np.array(image), PICTURE)
        assert image.text == {"parameters": text} and image.mode == "RGB"
    found = dict(chunks(path))
    assert found[kind].startswith(b"parameters\0") and found[kind].endswith(text.encode())


def parsed(text):
    """As AUTOMATIC1111's readers take it apart: prompt, negative prompt, fields of the last line."""
    *lines, last = text.split("\n")
    items = re.findall(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)', last)
    fields = {key: json.loads(value) if value[:1] == '"' else value for key, value in items}
    prompt = [line for line in lines if not line.startswith("Negative prompt: ")]
    negative = [line.removeprefix("Negative prompt: ") for line in lines if line.startswith("Negative prompt: ")]
    return "\n".join(prompt), "\n".join(negative), fields


def test_parameters(functions):
    chosen = generate.settings(functions.manifest, "euler", 5, 7.5)
    text = png.parameters(functions, "a cat, red", "dog", 2**40, chosen, 7.5)
    prompt, negative, fields = parsed(text)
    assert (prompt, negative) == ("a cat, red", "dog")
    assert fields == {
        "Steps": "5",
        "Sampler": "Euler",
        "CFG scale": "7.5",
        "Seed": str(2**40),
        "Size": "14x18",
        "Model": "tiny",
        "Model hash": functions.manifest.export_id[:10],
        "RNG": "NV",
    }
    assert parsed(png.parameters(functions, "a cat", None, 1, chosen, 7.5))[1] == ""


@pytest.mark.parametrize(
    "name", ["plain name-1.5", "a, CFG scale: 99", "time: 10:30", 'say "x"', '"x"', "two\nlines", "back\\slash, ü猫"]
)
def test_any_name_of_a_model_leaves_the_other_fields_alone(functions, name):
    vae = manifest.ReplacedVae(name, "0" * 64)
    contract = dataclasses.replace(functions.manifest, checkpoint=name, vae=vae)
    chosen = generate.settings(contract, "euler", 5, 7.5)
    text = png.parameters(dataclasses.replace(functions, manifest=contract), "a", None, 1, chosen, 7.5)
    fields = parsed(text)[2]
    assert (fields["Model"], fields["VAE"], fields["CFG scale"], fields["RNG"]) == (name, name, "7.5", "NV")
    names = "Steps, Sampler, CFG scale, Seed, Size, Model, Model hash, VAE hash, VAE, RNG"
    assert ", ".join(fields) == names
    assert (f", Model: {name}, " in text) == (name == "plain name-1.5")


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: cannot write pictures there") as error:
        png.save(PICTURE, 1, "a", tmp_path / "file")
    assert "None" not in str(error.value)
    with pytest.raises(InputError, match="cannot write pictures there"):
        png.save(PICTURE, 1, "a", tmp_path / "file" / "below")


def test_a_sheet_shows_all_pictures_in_rows(tmp_path):
    """Five flat pictures of 64 x 32 pixels, each enlarged three times: two rows of three, the last place white."""
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 8, 7), (70, 80, 90)]
    flat = np.broadcast_to(np.array(colours, "uint8")[:, None, None], (5, 64, 32, 3))
    path = png.save_sheet(flat, 3, tmp_path / "new" / "sheet.png")
    with Image.open(path) as opened:
        sheet = np.array(opened)
    assert sheet.shape == (2 * 192, 3 * 96, 3)
    centres = sheet[96::192, 48::96].reshape(-1, 3).tolist()
    assert centres == [*map(list, colours), [255, 255, 255]]
    png.save_sheet(flat[:1], 1, path)
    with Image.open(path) as opened:
        assert opened.size == (96, 192)
    with pytest.raises(InputError, match=f"--sheet {tmp_path}: cannot be written"):
        png.save_sheet(flat, 3, tmp_path)
