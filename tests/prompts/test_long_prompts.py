"""Prompts of several blocks and weighted prompts: ids, weights, and what the exported encoder makes of them."""

from pathlib import Path

import numpy as np
import pytest

from models import endpoints
from models.errors import InputError
from models.export_spec import ExportSpec
from models.text_encoder import TextEncoder
from pipeline.checkpoints import diffusers_folder, keymaps, loader
from pipeline.prompts import tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "goldens" / "tiny_sd1"
BOS, EOS, APPLE, RED = 49406, 49407, 3055, 736


@pytest.fixture(scope="module")
def words():
    return tokenizer.load(ROOT / "checkpoints" / "emoji" / "tokenizer")


def test_each_block_has_its_own_ends(words):
    tokens = words.encode(" ".join(["apple"] * 76), blocks=2)
    first, second = tokens.ids.reshape(2, 77)
    assert tokens.dropped == ""
    assert first.tolist() == [BOS, *[APPLE] * 75, EOS]
    assert second.tolist() == [BOS, APPLE, *[EOS] * 75]
    assert words.encode("apple", blocks=2).ids.reshape(2, 77)[1].tolist() == [BOS, *[EOS] * 76]


@pytest.mark.parametrize(("count", "dropped"), [(150, ""), (151, "red"), (152, "red apple")])
def test_what_finds_no_place_is_quoted(words, count, dropped):
    prompt = " ".join([*["apple"] * 150, "red", "apple"][:count])
    ids, weights, warnings = words.weigh_batch([prompt], blocks=2)
    assert ids.shape == weights.shape == (1, 154)
    assert ids[0, 76] == ids[0, 153] == EOS
    assert warnings == ([f'prompt 1 is longer than 150 tokens; dropped: "{dropped}"'] if dropped else [])


def test_weights_stand_at_their_tokens(words):
    tokens = words.encode("a (red:1.5) apple [apple]", weigh=True)
    assert tokens.ids[:6].tolist() == [BOS, 320, RED, APPLE, APPLE, EOS]
    np.testing.assert_allclose(tokens.weights[:6], [1, 1, 1.5, 1, 1 / 1.1, 1], rtol=1e-6)
    assert (tokens.weights[6:] == 1).all() and tokens.weights.dtype == np.float32
    # Without weighting brackets are text; without brackets weighting changes nothing.
    assert words.encode("a (red:1.5) apple").ids[2] != RED
    assert words.encode("a red apple", weigh=True).ids.tolist() == words.encode("a red apple").ids.tolist()


def test_dropped_text_goes_on_over_pieces(words):
    prompt = " ".join(["apple"] * 75) + " (red) apple, (red:2)"
    assert words.encode(prompt, weigh=True).dropped == "red apple, red"


def test_bad_prompts_with_weights(words):
    _, weights, notices = words.weigh_batch(["a", "(red:900)"])
    assert (weights == 1).all() and notices == [
        "prompt 2: 900 in brackets is no weight from 0 to 5 and is read as text"
    ]
    with pytest.raises(InputError, match="prompt has 9000 bytes"):
        words.encode("(" * 9000, weigh=True)


@pytest.fixture(scope="module")
def encoder():
    """The tiny checkpoint that diffusers wrote, and the outputs transformers gave for it."""
    config = diffusers_folder.read_config(TINY)
    model = TextEncoder(config.text_encoder)
    source = diffusers_folder.read_weights(TINY, "text_encoder")
    loader.load([model], source, keymaps.DIFFUSERS["text_encoder"], "tiny")
    return model, config, np.load(TINY.with_suffix(".npz"))


def encode(encoder, blocks, **inputs):
    model, config, _ = encoder
    spec = ExportSpec(32, 48, prompts=2, images_per_prompt=1, dtype="float32", max_steps=4, prompt_chunks=blocks)
    made = {e.name: e for e in endpoints.text_encoder([model], config, spec, np.zeros(77, "int32"))}
    assert ("serving_default" in made) == (blocks == 1)
    return {name: np.asarray(value) for name, value in made["encode"].function(**inputs).items()}


def test_weighting_against_numpy_on_the_peers_outputs(encoder):
    """Each token's vector times its weight, then the block's mean is what it was before."""
    golden = encoder[2]
    weights = np.ones((2, 77), np.float32)
    weights[0, 3:6], weights[1, 1] = 1.4, 0.25
    outputs = encode(
        encoder,
        1,
        tokens=golden["tokens"],
        negative_tokens=golden["negative_tokens"],
        token_weights=weights,
        negative_token_weights=np.ones_like(weights),
    )
    before = golden["context"].astype(np.float64)
    expected = before * weights[..., None]
    expected *= (before.mean(axis=(1, 2)) / expected.mean(axis=(1, 2)))[:, None, None]
    assert np.abs(expected - before).max() > 0.1
    np.testing.assert_allclose(outputs["context"], expected, atol=1e-4)
    np.testing.assert_allclose(outputs["unconditional_context"], golden["unconditional_context"], atol=1e-5)


def test_blocks_are_encoded_and_weighed_apart(encoder):
    golden = encoder[2]
    both = np.concatenate([golden["tokens"], golden["negative_tokens"]], axis=1)
    weights = np.ones((2, 154), np.float32)
    weights[0, 80] = 2.0  # in the second block of the first prompt only
    two = encode(
        encoder,
        2,
        tokens=both,
        negative_tokens=both,
        token_weights=weights,
        negative_token_weights=np.ones_like(weights),
    )
    plain = two["unconditional_context"]
    assert plain.shape == (2, 154, 32)
    np.testing.assert_allclose(plain[:, :77], golden["context"], atol=1e-5)
    np.testing.assert_allclose(plain[:, 77:], golden["unconditional_context"], atol=1e-5)
    changed = np.abs(two["context"] - plain).reshape(2, 2, -1).max(axis=-1)
    assert changed[0, 1] > 0.01
    # Not bit-equal here: the two halves of a batch are rounded differently.
    assert max(changed[0, 0], changed[1, 0], changed[1, 1]) < 1e-5
