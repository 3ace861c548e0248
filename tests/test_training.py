"""The data of the embedded checkpoint's training."""

from pathlib import Path

import numpy as np
import pytest

from training import data

NAMES, PICTURES = data.read_sheet(Path(__file__).parent / "goldens" / "emoji_objects.png")


# === Pictures and captions ===


def test_a_picture_over_a_colour():
    """A picture of one opaque and one half transparent pixel, mirrored, then moved by (2, -1)."""
    picture = np.zeros((64, 64, 4), np.uint8)
    picture[10, 20], picture[10, 22] = (200, 100, 0, 255), (200, 100, 0, 128)
    image = data.compose(picture, (0, 0, 255), right=2, down=-1, mirror=True)
    assert image.dtype == np.uint8 and image.shape == (64, 64, 3)
    assert image[9, 45].tolist() == [200, 100, 0]
    assert image[9, 43].tolist() == [100, 50, 127]
    image[9, [45, 43]] = (0, 0, 255)
    assert (image == (0, 0, 255)).all()


@pytest.mark.parametrize(("right", "down"), [(-2, 0), (0, 2), (2, -2)])
def test_what_is_moved_out_is_gone(right, down):
    picture = np.full((64, 64, 4), 255, np.uint8)
    image = data.compose(picture, (0, 0, 0), right, down)
    assert (image > 0).all(axis=2).sum() == (64 - abs(right)) * (64 - abs(down))
    assert (image[0] == 0).all() == (down > 0) and (image[-1] == 0).all() == (down < 0)
    assert (image[:, 0] == 0).all() == (right > 0) and (image[:, -1] == 0).all() == (right < 0)


def test_many_pictures_at_once():
    both = data.compose(PICTURES[:2], (1, 2, 3), -2, 2, True)
    assert (both == [data.compose(picture, (1, 2, 3), -2, 2, True) for picture in PICTURES[:2]]).all()


@pytest.mark.parametrize(
    ("name", "colour", "template", "expected"),
    [
        ("red apple", "blue", 0, "a red apple on a blue background"),
        ("owl", "gray", 0, "an owl on a gray background"),
        ("unicorn", "black", 0, "a unicorn on a black background"),
        ("grapes", "green", 1, "grapes on a green background"),
        ("fox", "white", 2, "fox, white background"),
        ("fox", "red", 3, "fox on red"),
        ("egg", "white", 4, "an egg"),
        ("egg", "white", 5, "egg"),
    ],
)
def test_captions(name, colour, template, expected):
    assert data.caption(name, colour, template) == expected


def test_only_white_goes_unnamed():
    assert all("{colour}" in template for template in data.TEMPLATES)
    with pytest.raises(IndexError):
        data.caption("fox", "red", len(data.TEMPLATES))


def test_an_example_is_a_function_of_seed_and_index():
    image, caption = data.example(NAMES, PICTURES, 3, 17)
    again, same = data.example(NAMES, PICTURES, 3, 17)
    assert caption == same and (image == again).all()
    choice = data.choose(len(NAMES), 3, 17)
    assert NAMES[choice.object] in caption
    colour = list(data.COLOURS.values())[choice.colour]
    expected = data.compose(PICTURES[choice.object], colour, choice.right, choice.down, choice.mirror)
    assert (image == expected).all()
    others = {data.choose(len(NAMES), seed, index) for seed in (3, 4) for index in range(17, 27)}
    assert len(others) == 20


def test_every_choice_is_made():
    choices = [data.choose(len(NAMES), 0, index) for index in range(5000)]
    assert {c.object for c in choices} == set(range(len(NAMES)))
    assert {c.colour for c in choices} == set(range(len(data.COLOURS)))
    assert {(c.right, c.down, c.mirror) for c in choices} == {
        (right, down, mirror) for right in data.SHIFTS for down in data.SHIFTS for mirror in (False, True)
    }
    assert {c.template for c in choices if c.colour == 0} == set(range(len(data.WHITE_TEMPLATES)))
    assert {c.template for c in choices if c.colour == 4} == set(range(len(data.TEMPLATES)))


def test_the_sheet_gives_the_pictures_back(tmp_path):
    """But for the colour of what cannot be seen."""
    data.write_sheet(PICTURES, tmp_path / "sheet.png")
    names, pictures = data.read_sheet(tmp_path / "sheet.png")
    assert names == NAMES and (pictures == PICTURES).all()
    assert (PICTURES[PICTURES[..., 3] == 0] == 0).all() and PICTURES.shape == (len(NAMES), 64, 64, 4)
