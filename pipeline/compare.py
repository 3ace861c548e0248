"""How far two results are apart. No TensorFlow."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two arrays are apart."""

    max_abs: float
    mean_abs: float
    psnr: float | None  # dB; peak is max - min of the reference; None when equal


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
