"""Pictures on their way: previews, and what is finished before the rest."""

import numpy as np
import pytest

from models.errors import InputError
from pipeline import generate, load
from pipeline.commands import generate as command
from pipeline.images import png

CUTS = [
    # guided rows, most rows a call, previews every; stretches.
    ("1111111", None, 3, [(0, 3), (3, 6), (6, 7)]),
    ("1111111", 2, 3, [(0, 2), (2, 3), (3, 5), (5, 6), (6, 7)]),
    ("1111111", 5, 10, [(0, 5), (5, 7)]),
    ("0011110", None, 3, [(0, 2), (2, 3), (3, 6), (6, 7)]),
    ("11", None, 1, [(0, 1), (1, 2)]),
    ("1111", None, None, [(0, 4)]),
]


@pytest.mark.parametrize(("guided", "most", "every", "expected"), CUTS)
def test_stretches_end_where_previews_are(guided, most, every, expected):
    assert generate.stretches(np.array([g == "1" for g in guided]), most, every) == expected


@pytest.fixture(scope="module")
def functions(tiny_export):
    return load.local(tiny_export)


def test_previews_and_finished_pictures(functions):
    """Previews are what the loop sees as the picture, in every batch; the result does not depend on them."""
    told = []

    def preview(row, made):
        told.append(("preview", row, sorted(made)))
        assert all(image.shape == (18, 14, 3) and image.dtype == np.uint8 for image in made.values())

    def finished(made):
        told.append(("finished", None, sorted(made)))
        drawn.update(made)

    drawn = {}
    how = {"seed": 5, "num_steps": 6}
    found = generate.generate(
        functions, ["a", "b", "c"], finished=finished, preview=preview, preview_every=2, steps_per_call=4, **how
    )
    assert told == [
        *(("preview", 2, [0, 1, 2, 3]), ("preview", 4, [0, 1, 2, 3]), ("finished", None, [0, 1, 2, 3])),
        *(("preview", 2, [4, 5]), ("preview", 4, [4, 5]), ("finished", None, [4, 5])),
    ]
    np.testing.assert_array_equal(found, [drawn[i] for i in range(6)])
    np.testing.assert_array_equal(found, generate.generate(functions, ["a", "b", "c"], **how))


def test_a_preview_is_the_denoised_latent(functions):
    seen = {}
    first = generate.generate(
        functions,
        "a",
        seed=5,
        num_steps=2,
        num_images=1,
        preview=lambda row, made: seen.update(made),
        preview_every=1,
    )
    assert seen[0].shape == first[0].shape and not np.array_equal(seen[0], first[0])
    run = generate.plan(functions.manifest, "a", seed=5, num_steps=2, num_images=1)
    contexts, denoised = generate.encode(functions, run, run.calls[0]), []
    generate.denoise(
        functions, run, run.calls[0], contexts, preview=lambda row, latent: denoised.append(latent), preview_every=1
    )
    np.testing.assert_array_equal(generate.decode(functions, denoised[0])[0], seen[0])


def test_previews_every_nothing(functions):
    with pytest.raises(InputError, match="preview_every must be 1 or more, found 0"):
        generate.generate(functions, "a", preview=lambda *_: None, preview_every=0)


def test_previews_are_replaced(tmp_path):
    images = [np.full((4, 5, 3), level, "uint8") for level in (10, 200)]
    paths = {png.save_preview(image, "7-0002", tmp_path) for image in images}
    assert paths == {tmp_path / "previews" / "7-0002.png"} and len(list(tmp_path.rglob("*"))) == 2
    from PIL import Image

    with Image.open(paths.pop()) as found:
        np.testing.assert_array_equal(np.asarray(found), images[1])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="previews: cannot write previews there"):
        png.save_preview(images[0], "x", tmp_path / "file")


# === Files of prompts ===


def test_prompts_from_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffa red apple\r\n\n  \nein Käse\n".encode())
    assert command.read_prompts(str(path)) == ["a red apple", "ein Käse"]
    for content, message in ((b"\n \n", "holds no prompt"), (b"\xff\xfe", "cannot be read as UTF-8 text")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            command.read_prompts(str(path))
    with pytest.raises(InputError, match=r"--prompts_file .*none\.txt: cannot be read"):
        command.read_prompts(str(tmp_path / "none.txt"))
