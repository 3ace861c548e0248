"""Convolutions of 3x3 with a quarter of the multiplications (Winograd 1980; Lavin and Gray 2015, arXiv:1509.09308).

A tile of 4x4 outputs depends on 6x6 inputs. As polynomials, both are known by their values at six points; there a
convolution is one product per point. So 36 matrix products take the place of 9 with sixteen times as many rows:
Y = A^T [(G g G^T) * (B^T d B)] A, section 4.1, with a kernel g that is carried over to the points once.
Each number of the result is rounded more often than by convolving: errors are about six times as large in float32.
"""

import functools
import operator
from fractions import Fraction

import numpy as np
from keras import ops

TILE = 4  # rows and columns of outputs that are computed together
OUTPUTS = range(32, 641)  # channels for which it pays, see Conv2D
# Beside infinity. Of the small binary fractions that were tried, those that round least: half the error of 0, 1, 2.
POINTS = tuple(Fraction(p) for p in ("0", "5/8", "-5/8", "3/2", "-3/2"))


@functools.cache
def matrices(points: tuple[Fraction, ...] = POINTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A^T f64[4, 6], G f64[6, 3] and B^T f64[6, 6] of five points and infinity (Toom and Cook)."""
    outputs = [[p**i for p in points] + [Fraction(i == TILE - 1)] for i in range(TILE)]
    kernel, inputs = [], []
    for p in points:
        others = [q for q in points if q != p]
        scale = np.prod([p - q for q in others])
        kernel.append([p**i / scale for i in range(3)])
        inputs.append([*_from_roots(others), 0])
    kernel.append([0, 0, 1])
    inputs.append(_from_roots(points))
    return tuple(np.array(rows, "float64") for rows in (outputs, kernel, inputs))


def _from_roots(roots) -> list[Fraction]:
    """Coefficients of the product of (x - root), lowest power first."""
    coefficients = [Fraction(1)]
    for root in roots:
        coefficients = [low - root * high for low, high in zip([0, *coefficients], [*coefficients, 0], strict=True)]
    return coefficients


def transform(kernel: np.ndarray) -> np.ndarray:
    """A kernel f32[3, 3, inputs, outputs] at all points, f32[36, inputs, outputs]."""
    _, to_points, _ = matrices()
    half = np.tensordot(to_points, kernel.astype("float64"), 1)  # [6, 3, inputs, outputs]
    points = np.einsum("bj,ajio->abio", to_points, half, optimize=True)
    return points.reshape(-1, *kernel.shape[2:]).astype("float32")


def convolve(x, kernel):
    """f32[N, H, W, inputs] and `transform`'s f32[36, inputs, outputs] to f32[N, H, W, outputs]; zeros lie around."""
    _, height, width, inputs = x.shape
    rows, columns = -(-height // TILE), -(-width // TILE)
    from_points, _, to_points = matrices()

    # Blocks of 4x4: a tile is one of them, shifted by the padding, with the first two rows and columns of the next.
    x = ops.pad(x, ((0, 0), (1, TILE * (rows + 1) - height - 1), (1, TILE * (columns + 1) - width - 1), (0, 0)))
    x = ops.reshape(x, (-1, rows + 1, TILE, TILE * (columns + 1), inputs))
    x = _combine(to_points, [*(x[:, :-1, i] for i in range(TILE)), x[:, 1:, 0], x[:, 1:, 1]])
    x = ops.reshape(ops.stack(x), (6, -1, rows, columns + 1, TILE, inputs))
    x = _combine(to_points, [*(x[:, :, :, :-1, i] for i in range(TILE)), x[:, :, :, 1:, 0], x[:, :, :, 1:, 1]])
    x = ops.reshape(ops.stack(x, axis=1), (36, -1, inputs))

    y = ops.matmul(x, kernel)

    both = np.kron(from_points, from_points).astype("float32")
    y = ops.reshape(ops.matmul(both, ops.reshape(y, (36, -1))), (TILE, TILE, -1, rows, columns, kernel.shape[-1]))
    y = ops.reshape(ops.transpose(y, (2, 3, 0, 4, 1, 5)), (-1, TILE * rows, TILE * columns, kernel.shape[-1]))
    return y[:, :height, :width]


def _combine(matrix: np.ndarray, parts: list) -> list:
    """Each row of the matrix times the parts."""
    return [_weighted_sum(row, parts) for row in matrix]


def _weighted_sum(row: np.ndarray, parts: list):
    # The plain graph would pay for zeros and ones as for any other factor.
    terms = [part if factor == 1 else float(factor) * part for factor, part in zip(row, parts, strict=True) if factor]
    return functools.reduce(operator.add, terms)
