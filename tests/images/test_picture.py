"""Pictures from files: exact pixels, every kind of file, hostile ones."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from models.errors import InputError
from pipeline.images import picture as images

RGB = np.array([[[255, 0, 0], [0, 128, 255], [7, 8, 9]], [[1, 2, 3], [254, 100, 50], [0, 0, 0]]], np.uint8)


def normalised(levels) -> np.ndarray:
    """0..255 to -1..1, one rounding per operation."""
    return np.float32(2) * (np.asarray(levels, np.float32) / np.float32(255)) - np.float32(1)


def write(path, image, **options):
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path, **options)
    return path


def png(width, height, bits, colour, data=b"", extra=()) -> bytes:
    """A PNG file by hand: colour 0 grey, 2 RGB, 4 grey and alpha, 6 RGBA."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def from_bytes(tmp_path, data: bytes, width=2, height=1):
    path = tmp_path / "picture"
    path.write_bytes(data)
    return images.read(path, width, height)


# === Pixels ===


def test_a_picture_of_the_right_size_keeps_its_pixels(tmp_path):
    image = images.read(write(tmp_path / "a.png", RGB), 3, 2)
    assert image.dtype == np.float32 and image.shape == (2, 3, 3)
    np.testing.assert_array_equal(image, normalised(RGB))
    assert image.min() == -1 and image.max() == 1
    np.testing.assert_array_equal(images.read(str(write(tmp_path / "a.webp", RGB, lossless=True)), 3, 2), image)
    np.testing.assert_array_equal(images.from_array(RGB, 3, 2), image)


def test_the_name_does_not_matter(tmp_path):
    np.testing.assert_array_equal(
        images.read(write(tmp_path / "a.txt", RGB, format="PNG"), 3, 2), images.from_array(RGB, 3, 2)
    )


def test_jpeg(tmp_path):
    flat = np.full((16, 16, 3), (200, 40, 90), np.uint8)
    image = images.read(write(tmp_path / "a.jpg", flat, quality=100, subsampling=0), 16, 16)
    np.testing.assert_allclose(image, normalised(flat), atol=2 / 127)


def test_stretching_and_cropping(tmp_path):
    """Grey in the middle, red on the left, blue on the right: 40 x 20 to 8 x 8."""
    wide = np.zeros((20, 40, 3), np.uint8)
    wide[:, :10], wide[:, 10:30], wide[:, 30:] = (255, 0, 0), (128, 128, 128), (0, 0, 255)
    path = write(tmp_path / "wide.png", wide)
    stretched, cropped = images.read(path, 8, 8), images.read(path, 8, 8, crop=True)
    np.testing.assert_array_equal(stretched[:, [0, 7]], normalised([[[255, 0, 0], [0, 0, 255]]] * 8))
    # Lanczos' filter is 3 source pixels of the small picture wide: the outermost columns see across the border.
    np.testing.assert_allclose(cropped[:, 2:6], normalised([[[128, 128, 128]] * 4] * 8), atol=3 / 127)
    assert abs(stretched[:, 1, 0].mean() - 1) < 0.2 and abs(cropped[:, 1].mean()) < 0.2
    tall = write(tmp_path / "tall.png", wide.transpose(1, 0, 2).copy())
    np.testing.assert_array_equal(images.read(tall, 8, 8, crop=True), cropped.transpose(1, 0, 2))
    # Nothing to cut off.
    np.testing.assert_array_equal(images.read(path, 16, 8, crop=True), images.read(path, 16, 8))
    np.testing.assert_array_equal(images.from_array(wide, 8, 8, crop=True), cropped)


def test_a_flat_picture_stays_flat(tmp_path):
    """Lanczos' weights add up to 1, whether the picture grows or shrinks."""
    flat = np.full((5, 9, 3), (13, 200, 77), np.uint8)
    for size in ((3, 3), (64, 32)):
        image = images.read(write(tmp_path / "flat.png", flat), *size)
        np.testing.assert_array_equal(image, np.broadcast_to(normalised([13, 200, 77]), image.shape))


@pytest.mark.parametrize(
    ("bits", "colour", "data", "levels"),
    [
        (16, 0, struct.pack(">2H", 0x12FF, 0xFE80), [[0x12] * 3, [0xFE] * 3]),
        (16, 2, struct.pack(">6H", 0x12FF, 0x0180, 0xFE7F, 0, 0xFFFF, 0x8000), [[0x12, 1, 0xFE], [0, 0xFF, 0x80]]),
        (16, 4, struct.pack(">4H", 0x12FF, 0xFFFF, 0x12FF, 0), [[0x12] * 3, [255] * 3]),
        (8, 0, bytes([3, 250]), [[3] * 3, [250] * 3]),
        (8, 4, bytes([100, 255, 100, 51]), [[100] * 3, [224] * 3]),  # 100 / 5 + 255 * 4 / 5
        (8, 6, bytes([100, 0, 255, 51, 9, 9, 9, 0]), [[224, 204, 255], [255] * 3]),
        (1, 0, b"\x40", [[0] * 3, [255] * 3]),
    ],
)
def test_kinds_of_png(tmp_path, bits, colour, data, levels):
    image = from_bytes(tmp_path, png(2, 1, bits, colour, b"\0" + data))
    np.testing.assert_array_equal(image, normalised([levels]))


def test_palettes(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([1, 0])
    image = images.read(write(tmp_path / "p.png", palette), 2, 1)
    np.testing.assert_array_equal(image, normalised([[[40, 50, 60], [10, 20, 30]]]))
    image = images.read(write(tmp_path / "t.png", palette, transparency=b"\0\xff"), 2, 1)
    np.testing.assert_array_equal(image, normalised([[[40, 50, 60], [255, 255, 255]]]))


def test_cmyk(tmp_path):
    flat = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    image = images.read(write(tmp_path / "a.jpg", flat, quality=100), 16, 16)
    np.testing.assert_allclose(image, np.broadcast_to([1, -1, -1], image.shape), atol=0.03)


# What the eight orientations mean (EXIF 2.3, tag 274): how the stored rows and columns lie in the upright picture.
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[::-1],
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a.transpose(1, 0, 2)[:, ::-1],
}


@pytest.mark.parametrize("orientation", STORED)
def test_orientation(tmp_path, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    path = write(tmp_path / "a.png", np.ascontiguousarray(STORED[orientation](RGB)), exif=exif)
    np.testing.assert_array_equal(images.read(path, 3, 2), normalised(RGB))


def test_orientation_of_a_photograph(tmp_path):
    """Row 0 of the stored picture is the right side of the scene (6): a camera held upright."""
    exif = Image.Exif()
    exif[274] = 6
    stored = np.zeros((16, 32, 3), np.uint8)
    stored[:8] = 255
    image = images.read(write(tmp_path / "a.jpg", stored, exif=exif, quality=95), 16, 32)
    assert image[:, 9:].min() > 0.9 and image[:, :7].max() < -0.9


@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0garbage", b"\xff" * 40])
def test_broken_metadata_is_ignored(tmp_path, exif):
    path = write(tmp_path / "a.png", RGB, exif=exif)
    np.testing.assert_array_equal(images.read(path, 3, 2), normalised(RGB))


def test_colour_profiles_are_ignored(tmp_path):
    path = write(tmp_path / "a.png", RGB, icc_profile=b"no profile")
    np.testing.assert_array_equal(images.read(path, 3, 2), normalised(RGB))


# === Hostile files ===


def refused(path, match, width=8, height=8):
    """One line, and nothing else on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=match) as caught:
            images.read(path, width, height)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_not_a_picture(tmp_path):
    refused(tmp_path / "none.png", "expected a picture, found no such file")
    refused(tmp_path, "found no such file")
    for name, content in (("empty.png", b""), ("text.png", b"hello"), ("half.png", b"\x89PNG\r\n\x1a\n")):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "expected a PNG, JPEG or WebP picture, found something else or a damaged one")


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM", "ICO", "TGA"])
def test_other_formats(tmp_path, kind):
    refused(write(tmp_path / "a.png", RGB, format=kind), "expected a PNG, JPEG or WebP picture")


@pytest.mark.parametrize(
    ("width", "height"), [(7072, 7072), (10000, 10000), (30000, 30000), (2**31 - 1, 2**31 - 1), (65537, 1), (1, 65537)]
)
def test_bombs(tmp_path, width, height):
    """Below and above the sizes at which Pillow warns and gives up itself; never decoded."""
    path = tmp_path / "bomb.png"
    path.write_bytes(png(width, height, 8, 2, b"\0" * 100))
    refused(path, "more than 50 million pixels or 65536 along a side; make the picture smaller")


def test_the_largest_pictures_that_are_taken(tmp_path):
    """Up to the limits the file is decoded: what is missing is the data."""
    for width, height in ((7071, 7071), (65536, 1)):
        path = tmp_path / "large.png"
        path.write_bytes(png(width, height, 1, 0, b"\0" * 100))
        refused(path, "cannot be read as a picture .*truncated")


def test_large_files(tmp_path, monkeypatch):
    path = write(tmp_path / "a.png", RGB)
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    refused(path, "has 0 MiB, at most 0 are read")


def test_text_bombs(tmp_path):
    """100 MB of text in 100 kB."""
    text = b"Comment\0\0" + zlib.compress(b"a" * 100_000_000, 1)
    path = tmp_path / "text.png"
    path.write_bytes(png(2, 1, 8, 0, b"\0\1\2", [(b"zTXt", text)]))
    refused(path, "cannot be read as a picture .*too large")


@pytest.mark.parametrize("kind", images.FORMATS)
def test_truncated(tmp_path, kind):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = write(tmp_path / "a", noise, format=kind)
    whole = path.read_bytes()
    for share in (0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        refused(path, "cannot be read as a picture|something else or a damaged one")
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_animations(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    for kind in ("PNG", "WEBP"):
        path = tmp_path / "a"
        frames[0].save(path, format=kind, save_all=True, append_images=frames[1:], duration=100)
        refused(path, "is an animation of 3 frames; save one of them as PNG")


def test_photographs_with_a_second_picture_behind_the_first(tmp_path):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green")]
    frames[0].save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=frames[1:], quality=100)
    image = images.read(tmp_path / "a.jpg", 16, 16)
    np.testing.assert_allclose(image, np.broadcast_to([1, -1, -1], image.shape), atol=0.03)


@pytest.mark.parametrize("kind", images.FORMATS)
def test_any_bytes_give_a_picture_or_one_line(tmp_path, kind):
    random = np.random.default_rng(0)
    file = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (9, 11, 3), dtype=np.uint8)).save(file, kind, exif=b"Exif\0\0MM\0*")
    whole, refusals = np.frombuffer(file.getvalue(), np.uint8), 0
    path = tmp_path / "a"
    for _ in range(200):
        damaged = whole.copy()
        damaged[random.integers(len(whole), size=3)] = random.integers(256, size=3)
        path.write_bytes(damaged.tobytes())
        try:
            image = images.read(path, 8, 8)
        except InputError as error:
            refusals += 1
            assert "\n" not in str(error)
        else:
            assert image.shape == (8, 8, 3) and np.abs(image).max() <= 1
    assert refusals > 10


# === Arrays ===


def test_float_arrays_are_taken_as_they_are():
    given = np.linspace(-1, 1, 18).reshape(2, 3, 3)
    image = images.from_array(given, 3, 2)
    assert image.dtype == np.float32
    np.testing.assert_array_equal(image, given.astype(np.float32))


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros((2, 3), np.uint8), r"shape \[height, width, 3\], found \[2, 3\]"),
        (np.zeros((2, 3, 4), np.uint8), r"found \[2, 3, 4\]"),
        (np.zeros((0, 3, 3), np.uint8), r"found \[0, 3, 3\]"),
        (np.zeros((2, 3, 3), np.int64), r"expected uint8 or floats in \[-1, 1\], found int64"),
        (np.zeros((3, 2, 3), np.float32), r"floats must be 2 high and 3 wide, found \[3, 2, 3\]"),
        (np.full((2, 3, 3), 1.01), r"floats must be in \[-1, 1\]; give uint8 for 0..255"),
        (np.full((2, 3, 3), np.nan), r"floats must be in \[-1, 1\]"),
        (np.full((2, 3, 3), "a"), "expected uint8 or floats"),
    ],
)
def test_bad_arrays(array, match):
    with pytest.raises(InputError, match=f"^init_image: .*{match}"):
        images.from_array(array, 3, 2)
