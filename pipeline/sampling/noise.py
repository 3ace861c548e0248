"""Gaussian noise from a seed, in NumPy: the numbers that torch.randn draws on NVIDIA cards.

Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns (seed, offset, position) into
random words, so a number depends on nothing but these three: not on the batch, the device or what was drawn before.
Offset 0 is the initial latent; the denoising loop uses offset r + 1 for the noise of row r; the last offset is the
sample of a picture's latent. No TensorFlow.

The order is that of torch's CUDA generator: within a draw, position i is its own thread; the offset counts the draws.
They agree as long as a draw has no more numbers than the card has threads (2,048 per multiprocessor).
"""

import numbers

import numpy as np

from models.errors import InputError

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF
PICTURE_OFFSET = 2**32 - 1


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox 4x32.

    Args:
        counter: uint32[4, ...].
        key: uint32[2].

    Returns:
        uint32[4, ...].
    """
    # 64-bit words hold the products of 32-bit ones.
    c0, c1, c2, c3 = (np.asarray(word).astype(np.uint64) for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0), second & np.uint64(LOW)
        c2, c3 = (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1), first & np.uint64(LOW)
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def normal(seed: int, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers, equal to the draw number `offset` of torch.randn(shape) on CUDA within 2e-6.

    The counter of number i is (offset, 0, i, 0), the key the seed; words 0 and 1 give one number by Box and Muller
    (1958): n = sqrt(-2 ln u) sin v with u = w0 2^-32 + 2^-33 and v = 2 pi (w1 2^-32 + 2^-33), both rounded to
    float32 as on the card.

    Args:
        seed: 0..2^64 - 1.
        offset: 0..2^32 - 1.
        shape: filled in C order.

    Returns:
        float32[shape].

    Raises:
        InputError: a seed outside its range.
    """
    words = _seed_uint32(seed)
    size = int(np.prod(shape))
    counter = np.zeros((4, size), np.uint32)
    counter[0] = offset
    counter[2] = np.arange(size)
    random = philox(counter, words)
    scale = np.float32(2**-32)
    u = random[0].astype(np.float32) * scale + scale / np.float32(2)
    # The card multiplies and adds with one rounding; float64 holds the product exactly.
    scale = np.float64(np.float32(2**-32 * 2 * np.pi))
    v = (random[1].astype(np.float32) * scale + scale / 2).astype(np.float32)
    result = np.sqrt(-2 * np.log(u.astype(np.float64))) * np.sin(v.astype(np.float64))
    return result.astype(np.float32).reshape(shape)


def initial_latents(seeds: list[int], height: int, width: int, channels: int = 4, offset: int = 0) -> np.ndarray:
    """The noise each image starts from: one seed per image, whatever its place in the batch.

    Args:
        seeds: N seeds, each 0..2^64 - 1.
        height, width: size of the latent (pixels / 8 for Stable Diffusion).
        channels: of the latent.
        offset: PICTURE_OFFSET for the sample of a picture's latent.

    Returns:
        float32[N, height, width, channels], standard normal. Drawn as [channels, height, width] and then transposed,
        so that a seed gives the picture it gives in diffusers.

    Raises:
        InputError: a seed outside its range.
    """
    drawn = [normal(seed, offset, (channels, height, width)).transpose(1, 2, 0) for seed in seeds]
    return np.stack(drawn) if drawn else np.zeros((0, height, width, channels), np.float32)


def seed_words(seeds: list[int]) -> np.ndarray:
    """The seeds as the denoising loop takes them.

    Returns:
        int32[N, 2]: low and high word of each seed, to be read as uint32.

    Raises:
        InputError: a seed outside 0..2^64 - 1.
    """
    return np.array([_seed_uint32(seed) for seed in seeds], np.uint32).reshape(-1, 2).view(np.int32)


def image_seeds(seed: int, count: int) -> list[int]:
    """One seed per image: seed, seed + 1, ...; after 2^64 - 1 comes 0.

    Raises:
        InputError: a seed outside 0..2^64 - 1.
    """
    _seed_uint32(seed)
    return [(int(seed) + i) % 2**64 for i in range(count)]


def _seed_uint32(seed: int) -> np.ndarray:
    """uint32[2]: low and high word of a seed; raises InputError when it is none."""
    if isinstance(seed, bool | np.bool_) or not isinstance(seed, numbers.Integral):
        raise InputError(f"seed should be a whole number, found {seed!r}")
    if not 0 <= seed < 2**64:
        raise InputError(f"seed should be between 0 and 2^64 - 1 = {2**64 - 1}, found {seed}")
    return np.array([int(seed) & LOW, int(seed) >> 32], np.uint32)
