"""Noise against published numbers: Random123's known answers for Philox and torch's CUDA generator for normals."""

import numpy as np
import pytest

from models.errors import InputError
from pipeline.sampling import noise

SEED_0 = np.array(
    [
        *(-0.92466259, -0.42534414, -2.6438458, 0.14518388, -0.12086648, -0.5797256),
        *(-0.6228512, -0.32838708, -1.0745423, -0.36314407, -1.6710507, 2.265505),
    ]
)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter, key, expected):
    result = noise.philox(np.array(counter, np.uint32)[:, None], np.array(key, np.uint32))
    assert result.dtype == np.uint32 and result.shape == (4, 1)
    assert result[:, 0].tolist() == expected


@pytest.mark.parametrize("shape", [(12,), (3, 4), (4, 64, 64)])
def test_seed_0_is_torchs_cuda_draw(shape):
    drawn = noise.normal(0, 0, shape)
    assert drawn.dtype == np.float32 and drawn.shape == shape
    np.testing.assert_allclose(drawn.reshape(-1)[:12], SEED_0, atol=2e-6)


def test_counter_is_the_draw_and_the_position_and_the_key_is_the_seed():
    counter = np.array([[3, 3], [0, 0], [0, 1], [0, 0]], np.uint32)
    first, second, _, _ = noise.philox(counter, np.array([5, 9], np.uint32)).astype(np.float64)
    expected = np.sqrt(-2 * np.log((first + 0.5) / 2**32)) * np.sin(2 * np.pi * (second + 0.5) / 2**32)
    np.testing.assert_allclose(noise.normal((9 << 32) + 5, 3, (2,)), expected, atol=2e-6)


def test_latents_are_drawn_in_channel_order_and_transposed():
    latents = noise.initial_latents([0], 3, 4)
    assert latents.shape == (1, 3, 4, 4) and latents.dtype == np.float32
    np.testing.assert_allclose(latents[0, :, :, 0].reshape(-1), SEED_0, atol=2e-6)
    np.testing.assert_array_equal(latents[0].transpose(2, 0, 1), noise.normal(0, 0, (4, 3, 4)))
    assert noise.initial_latents([], 3, 4).shape == (0, 3, 4, 4)
    assert noise.initial_latents([5], 3, 4, channels=16).shape == (1, 3, 4, 16)


def test_an_image_does_not_depend_on_its_place_in_the_batch():
    batch = noise.initial_latents([11, 12, 13, 14], 8, 8)
    for i, seed in enumerate([11, 12, 13, 14]):
        np.testing.assert_array_equal(noise.initial_latents([seed], 8, 8)[0], batch[i])
    assert len(np.unique(batch)) > 0.99 * batch.size


def test_number_depends_on_seed_both_words_and_offset():
    draws = [noise.normal(*request, (256,)) for request in ((1, 0), (1 << 32, 0), (1, 1), (1, 2), (0, 0))]
    for i, first in enumerate(draws):
        for second in draws[i + 1 :]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.25
    np.testing.assert_array_equal(draws[0], noise.normal(1, 0, (256,)))
    # Position, not shape: a longer draw starts with the shorter one.
    np.testing.assert_array_equal(noise.normal(1, 0, (1000,))[:256], draws[0])


def test_numbers_are_standard_normal():
    drawn = noise.normal(2**63 + 12345, 7, (200_000,)).astype(np.float64)
    assert np.isfinite(drawn).all()
    assert abs(drawn.mean()) < 0.01 and abs(drawn.std() - 1) < 0.01
    assert abs((drawn**3).mean()) < 0.03 and abs((drawn**4).mean() - 3) < 0.06
    for bound, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert (np.abs(drawn) < bound).mean() == pytest.approx(share, abs=0.004)


def test_extreme_words_give_finite_numbers(monkeypatch):
    words = np.array([[0, 0xFFFFFFFF, 0, 0xFFFFFFFF], [0, 0xFFFFFFFF, 0x40000000, 0x40000000]], np.uint32)
    monkeypatch.setattr(noise, "philox", lambda counter, key: np.concatenate([words, words]))
    drawn = noise.normal(0, 0, (4,))
    assert np.isfinite(drawn).all()
    # u = 2^-33 and v = pi / 2: the largest number there is.
    assert drawn[2] == pytest.approx(np.sqrt(66 * np.log(2)), rel=1e-6)


def test_seed_words():
    words = noise.seed_words([0, 1, 2**32 + 5, 2**64 - 1, np.int64(7)])
    assert words.dtype == np.int32
    assert words.tolist() == [[0, 0], [1, 0], [5, 1], [-1, -1], [7, 0]]
    np.testing.assert_array_equal(words.view(np.uint32)[3], [0xFFFFFFFF, 0xFFFFFFFF])
    assert noise.seed_words([]).shape == (0, 2)


def test_image_seeds_count_up_and_wrap():
    assert noise.image_seeds(0, 3) == [0, 1, 2]
    assert noise.image_seeds(2**64 - 2, 4) == [2**64 - 2, 2**64 - 1, 0, 1]
    assert noise.image_seeds(np.int64(5), 1) == [5]


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (-1, r"seed should be between 0 and 2\^64 - 1 = 18446744073709551615, found -1"),
        (2**64, r"between 0 .* found 18446744073709551616"),
        (1.0, r"seed should be a whole number, found 1.0"),
        ("1", r"whole number, found '1'"),
        (True, r"whole number, found True"),
        (None, r"whole number, found None"),
    ],
)
def test_bad_seeds(seed, message):
    for call in (
        lambda: noise.normal(seed, 0, (1,)),
        lambda: noise.initial_latents([0, seed], 1, 1),
        lambda: noise.seed_words([0, seed]),
        lambda: noise.image_seeds(seed, 1),
    ):
        with pytest.raises(InputError, match=message):
            call()
