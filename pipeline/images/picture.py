"""Pictures from files and arrays as the image encoder takes them. No TensorFlow.

Files come from anywhere: only three formats are tried, size and number of frames are checked before anything is
decoded, and whatever a decoder stumbles over is one line for the user. Metadata is ignored but for the orientation;
colour profiles are not applied.
"""

import os
import warnings
from pathlib import Path
from types import MappingProxyType

import numpy as np
from PIL import ExifTags, Image, ImageOps

from models.errors import InputError
from models.export_spec import Size
from pipeline.manifest import Manifest

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_BYTES = 256 << 20
# Pillow takes 4 bytes a pixel, and up to four copies exist at a time: 800 MB. Phones' cameras make up to 48 million.
MAX_PIXELS = 50_000_000
# A resampling filter takes 48 bytes per pixel along the side.
MAX_SIDE = 1 << 16

# EXIF orientation -> what sets the picture upright.
UPRIGHT = MappingProxyType(
    {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
)


def prepare(manifest: Manifest, size: Size, init_image, crop: bool = False) -> np.ndarray:
    """Make what `encode_image` of an export takes, f32[H, W, 3], from a path (see `read`) or an array (`from_array`).

    Raises:
        InputError: the export has no image encoder, or the picture cannot be used.
    """
    if "image_encoder" not in manifest.signatures:
        raise InputError(f"{manifest.folder}: has no image encoder; export again with --image_encoder")
    if isinstance(init_image, str | os.PathLike):
        return read(init_image, size.width, size.height, crop)
    return from_array(init_image, size.width, size.height, crop)


def read(path: str | Path, width: int, height: int, crop: bool = False) -> np.ndarray:
    """Read a PNG, JPEG or WebP file as an image of the given size.

    Transparent parts become white, 16-bit channels keep their high byte, the EXIF orientation is applied. Resized with
    Lanczos' filter as diffusers does it.

    Args:
        width, height: pixels of the result.
        crop: False stretches the picture to the size, as diffusers does by default; True keeps its proportions and
            cuts off, equally on both sides, what does not fit.

    Returns:
        float32[height, width, 3] in [-1, 1].

    Raises:
        InputError: no such file, another format, more than MAX_PIXELS, MAX_SIDE or MAX_BYTES, several frames
            (animations), or a damaged or cut file.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: expected a picture, found no such file")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path}: has {path.stat().st_size >> 20} MiB, at most {MAX_BYTES >> 20} are read")
    # Pillow's warnings of large pictures and odd metadata: our own limits are lower, and metadata is not used.
    with warnings.catch_warnings(action="ignore"):
        try:
            with Image.open(path, formats=FORMATS) as image:
                _check(image, path)
                picture = _upright(image)
        except InputError:
            raise
        except Image.DecompressionBombError as error:
            raise InputError(f"{path}: {_too_large()}") from error
        except Image.UnidentifiedImageError as error:
            raise InputError(
                f"{path}: expected a PNG, JPEG or WebP picture, found something else or a damaged one"
            ) from error
        except Exception as error:  # a decoder raises whatever the bytes make it stumble over
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{path}: cannot be read as a picture ({reason}); save it again as PNG") from error
    return _normalise(_resize(picture, width, height, crop))


def from_array(array, width: int, height: int, crop: bool = False) -> np.ndarray:
    """Make an image of the given size from an array.

    Args:
        array: uint8[h, w, 3] of any size, resized as a file is; or float[height, width, 3] in [-1, 1], taken as it is.

    Returns:
        float32[height, width, 3] in [-1, 1].

    Raises:
        InputError: another shape, dtype or range.
    """
    array = np.asarray(array)
    if array.ndim != 3 or array.shape[2] != 3 or array.size == 0:
        raise InputError(f"init_image: expected an array of shape [height, width, 3], found {list(array.shape)}")
    if array.dtype == np.uint8:
        return _normalise(_resize(Image.fromarray(array), width, height, crop))
    if array.dtype.kind != "f":
        raise InputError(f"init_image: expected uint8 or floats in [-1, 1], found {array.dtype}")
    if array.shape[:2] != (height, width):
        raise InputError(f"init_image: floats must be {height} high and {width} wide, found {list(array.shape)}")
    if not np.abs(array).max() <= 1:
        raise InputError("init_image: floats must be in [-1, 1]; give uint8 for 0..255")
    return array.astype(np.float32)


def _check(image: Image.Image, path: Path) -> None:
    """Refuse what the header says is too large or moves; nothing has been decoded yet."""
    if image.width * image.height > MAX_PIXELS or max(image.size) > MAX_SIDE:
        raise InputError(f"{path}: {image.width} x {image.height}: {_too_large()}")
    # MPO is a JPEG with further pictures behind the first, as phones write it.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise InputError(f"{path}: is an animation of {image.n_frames} frames; save one of them as PNG")


def _too_large() -> str:
    return f"more than {MAX_PIXELS // 10**6} million pixels or {MAX_SIDE} along a side; make the picture smaller"


def _upright(image: Image.Image) -> Image.Image:
    """The decoded picture in RGB, over white, turned as its EXIF data says."""
    image.load()
    turn = UPRIGHT.get(_orientation(image))
    if image.mode.startswith("I;16"):
        # Pillow's own conversion makes everything above 255 white.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        image = Image.new("RGB", image.size, "white")
        image.paste(with_alpha, mask=with_alpha)
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # broken metadata is no reason to refuse a picture
        return 1


def _resize(image: Image.Image, width: int, height: int, crop: bool) -> Image.Image:
    if crop:
        return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _normalise(image: Image.Image) -> np.ndarray:
    # diffusers' arithmetic, rounding for rounding.
    return 2.0 * (np.asarray(image).astype(np.float32) / 255.0) - 1.0
