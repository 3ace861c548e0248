"""How far two results are apart. No TensorFlow."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two arrays are apart."""

    max_abs: float
    mean_abs: float
    psnr: float | None  # dB; peak is max - min of the reference; None when equal

    def __str__(self):
        return f"max abs {self.max_abs:.3g}, " + ("equal" if self.psnr is None else f"PSNR {self.psnr:.1f} dB")


def compare(reference: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> Difference:
    """The largest differences and the lowest PSNR over all arrays of two results.

    Arrays are compared as float64. NaN or infinity anywhere makes PSNR NaN or -infinity, which no bar lets pass.
    """
    if reference.keys() != other.keys() or any(reference[k].shape != other[k].shape for k in reference):
        raise ValueError(f"results differ in names or shapes: {sorted(reference)} and {sorted(other)}")
    largest, means, psnrs = [0.0], [0.0], []
    for name, expected in reference.items():
        expected, found = (np.asarray(a[name], "float64") for a in (reference, other))
        with np.errstate(divide="ignore", invalid="ignore"):
            error = np.abs(found - expected)
            mean_square = np.mean(error**2)
            psnr = 10 * np.log10(np.ptp(expected) ** 2 / mean_square)
        largest.append(error.max())
        means.append(error.mean())
        if mean_square != 0:
            psnrs.append(psnr)
    # NumPy's minimum and maximum keep NaN.
    return Difference(float(np.max(largest)), float(np.max(means)), float(np.min(psnrs)) if psnrs else None)


def ssim(reference: np.ndarray, other: np.ndarray) -> float:
    """Structural similarity of pictures uint8[N, H, W, C], 1 for equal ones; mean over pixels, channels and pictures.

    Windows are Gaussians of 11 x 11 pixels with a deviation of 1.5 that lie within the picture, constants 0.01 and
    0.03 (Wang et al. 2004, IEEE Transactions on Image Processing 13(4), equation 13).

    Raises:
        ValueError: other shapes, or less than 11 pixels.
    """
    if reference.shape != other.shape or min(reference.shape[1:3]) < len(WINDOW):
        raise ValueError(
            f"expected pictures of one shape, {len(WINDOW)} pixels or more: {reference.shape}, {other.shape}"
        )
    x, y = np.asarray(reference, "float64"), np.asarray(other, "float64")
    mean_x, mean_y = _windowed(x), _windowed(y)
    variances = _windowed(x**2) + _windowed(y**2) - mean_x**2 - mean_y**2
    covariance = _windowed(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return float(np.mean(luminance * (2 * covariance + c2) / (variances + c2)))


WINDOW = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
WINDOW /= WINDOW.sum()


def _windowed(x: np.ndarray) -> np.ndarray:
    """Weighted means of [N, H, W, C] over the windows."""
    for axis in (1, 2):
        x = np.lib.stride_tricks.sliding_window_view(x, len(WINDOW), axis) @ WINDOW
    return x
