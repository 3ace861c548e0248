"""Textual inversion: ids and states against diffusers', exact rows, every dialect, and files that must be refused."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from models import text_encoder
from models.errors import InputError
from models.families import FAMILIES
from pipeline.checkpoints import loader as checkpoint
from pipeline.checkpoints import textual_inversion
from pipeline.checkpoints.keymaps import DIFFUSERS
from pipeline.checkpoints.loader import Tensor
from pipeline.prompts import tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens"
VOCABULARY = Path(__file__).parents[2] / "checkpoints" / "emoji" / "tokenizer"
IDS = {"<x>": (49408,), "<multi>": (49409, 49410, 49411), "my-style": (49412, 49413)}


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDENS / "lora.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def writer():
    """The script that wrote the goldens: its prompts and weights."""
    spec = importlib.util.spec_from_file_location("write_lora", GOLDENS / "write_lora.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def clip():
    return tokenizer.load(VOCABULARY)


@pytest.fixture(scope="module")
def inverted(clip):
    return tokenizer.with_added(clip, IDS)


def table(rows=100, width=16, name="text_model.embeddings.token_embedding.weight") -> dict[str, Tensor]:
    array = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    return {name: Tensor(array.shape, array.dtype, array.copy)}


def saved(path, tensors) -> Path:
    save_file({name: np.asarray(value) for name, value in tensors.items()}, path)
    return path


def words(tokens) -> list[int]:
    """Ids between BOS and the first EOS."""
    ids = tokens.ids.tolist()
    return ids[1 : ids.index(49407)]


# === Against diffusers ===


def test_ids_equal_the_peers(golden, writer, inverted):
    for prompt, expected in zip(writer.PROMPTS, golden["embedding/ids"], strict=True):
        found = inverted.encode(prompt).ids.tolist()
        # transformers finds the token inside the word, as "my-style" and "s".
        assert (found == expected.tolist()) == ("my-styles" not in prompt), prompt
        if "my-styles" in prompt:
            assert expected.tolist()[1:4] == [49412, 49413, 338] and not set(IDS["my-style"]) & set(found)


def test_states_equal_the_peers(golden, writer, tmp_path):
    """The files diffusers loaded, through our reader, table, strict loader and encoder."""
    shapes = json.loads(str(golden["shapes"]))["text_encoder"]
    shapes["embeddings.token_embedding.weight"] = [writer.VOCABULARY, 16]
    tensors = {}
    for name, shape in shapes.items():
        array = writer.values(name, shape)
        tensors[name] = Tensor(array.shape, array.dtype, lambda array=array: array)
    options = []
    for name, token in {"x": "", "multi": "", "my-style": ":my-style"}.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(golden[f"file/embedding_{name}"].tobytes())
        options.append(f"{path}{token}")
    embeddings = [textual_inversion.parse(option) for option in options]
    assert [(e.token, e.count) for e in embeddings] == [(token, len(ids)) for token, ids in IDS.items()]
    tensors = textual_inversion.extend({"text_encoder": tensors}, embeddings)["text_encoder"]
    sizes = writer.TEXT_ENCODER | {"vocab_size": 49414}
    model = text_encoder.TextEncoder(dataclasses.replace(FAMILIES["sd1"].text_encoder, **sizes))
    checkpoint.load([model], tensors, DIFFUSERS["text_encoder"], "text_encoder")
    found = np.asarray(model(golden["embedding/ids"][:, :20])[0])
    np.testing.assert_allclose(found, golden["embedding/states"], rtol=0, atol=2e-5)


# === Rows ===


def test_rows_are_added_at_the_end(tmp_path):
    vectors = -np.arange(48, dtype=np.float32).reshape(3, 16)
    three = textual_inversion.read(saved(tmp_path / "a.safetensors", {"<x>": vectors}))
    one = textual_inversion.read(saved(tmp_path / "b.safetensors", {"<y>": np.full(16, 7, np.float16)}))
    assert (three.token, three.count, one.token, one.count) == ("<x>", 3, "<y>", 1)
    ((name, extended),) = textual_inversion.extend({"text_encoder": table()}, [three, one])["text_encoder"].items()
    assert name == "text_model.embeddings.token_embedding.weight" and extended.shape == (104, 16)
    rows = extended.read()
    assert rows.dtype == np.float32 and rows.shape == (104, 16)
    np.testing.assert_array_equal(rows[:100], np.arange(1600, dtype=np.float32).reshape(100, 16))
    np.testing.assert_array_equal(rows[100:103], vectors)
    np.testing.assert_array_equal(rows[103], np.full(16, 7))


def test_other_tensors_and_the_flat_name_stay(tmp_path):
    e = textual_inversion.read(saved(tmp_path / "a.safetensors", {"<x>": np.zeros((2, 16), np.float32)}))
    tensors = table(name="embeddings.token_embedding.weight") | {"final_layer_norm.weight": Tensor((16,), None, None)}
    extended = textual_inversion.extend({"text_encoder": tensors}, [e])["text_encoder"]
    assert list(extended) == list(tensors) and extended["final_layer_norm.weight"] is tensors["final_layer_norm.weight"]
    assert extended["embeddings.token_embedding.weight"].shape == (102, 16)


@pytest.mark.parametrize(
    ("key", "option", "token"),
    [
        ("<x>", "", "<x>"),
        ("<x>", ":<y>", "<y>"),
        ("<x>", ":a:b", "a:b"),
        ("emb_params", "", "file-name"),
        ("*", "", "file-name"),
        ("string_to_param.*", ":<z>", "<z>"),
    ],
)
def test_dialects_name_the_token(tmp_path, key, option, token):
    path = saved(tmp_path / "file-name.safetensors", {key: np.zeros((2, 16), np.float32)})
    assert textual_inversion.parse(f"{path}{option}").token == token


# === Tokens ===


def test_a_token_is_found_in_any_case_and_between_anything(inverted):
    assert words(inverted.encode("<x>")) == [49408]
    assert words(inverted.encode("a <X>, <x><x>")) == [320, 49408, 267, 49408, 49408]
    assert words(inverted.encode("&lt;multi&gt;")) == [49409, 49410, 49411]
    cat = words(inverted.encode("cat"))
    assert words(inverted.encode("cat<x>cat")) == [*cat, 49408, *cat]


def test_a_word_is_found_as_a_whole_only(inverted, clip):
    assert words(inverted.encode("(MY-STYLE)"))[1:3] == [49412, 49413]
    for text in ("my-styles", "amy-style", "my-style_2", "my style", "my-stylé"):
        assert words(inverted.encode(text)) == words(clip.encode(text)), text


def test_the_longest_token_wins(clip):
    both = tokenizer.with_added(clip, {"art-x": (49408,), "art-x-2": (49409,)})
    assert words(both.encode("art-x art-x-2")) == [49408, 49409]


def test_regular_expression_characters_are_letters(clip):
    odd = tokenizer.with_added(clip, {"s.*(+": (49408,), "[v]$": (49409,)})
    assert words(odd.encode("s.*(+ [v]$")) == [49408, 49409]
    assert words(odd.encode("sxx(+ v")) == words(clip.encode("sxx(+ v"))


def test_what_does_not_fit_is_quoted(inverted):
    tokens = inverted.encode("a " * 73 + "<multi> <x> end")
    assert tokens.ids[74:77].tolist() == [49409, 49410, 49407]
    assert tokens.dropped == "<multi> <x> end"
    assert inverted.encode("a " * 74 + "<x> end").dropped == "end"


def test_prompts_without_tokens_keep_their_ids(clip, inverted):
    for text in ("a red apple", "", "don't <y> my-", "日本 😀"):
        assert inverted.encode(text).ids.tolist() == clip.encode(text).ids.tolist()


def test_tokens_come_back_from_an_exports_folder(tmp_path, inverted):
    folder = shutil.copytree(VOCABULARY, tmp_path / "tokenizer")
    (folder / tokenizer.ADDED_FILE).write_text(json.dumps(IDS), encoding="utf-8")
    loaded = tokenizer.load(folder)
    assert loaded.added == IDS == inverted.added and loaded.vocab_size == 49414
    assert words(loaded.encode("<x> <multi>")) == [49408, 49409, 49410, 49411]


# === Bad input ===


@pytest.mark.parametrize("token", ["cat", "CAT", "<|endoftext|>", "!", "ca", "&lt;"])
def test_known_tokens_are_refused(clip, token):
    with pytest.raises(InputError, match="should be new, .* is in the vocabulary already; name another"):
        tokenizer.with_added(clip, {token: (49408,)})


@pytest.mark.parametrize("token", ["", " ", "my style", "a\tb"])
def test_tokens_are_one_word(clip, token):
    with pytest.raises(InputError, match="should be one word, found"):
        tokenizer.with_added(clip, {token: (49408,)})


def test_the_same_token_twice(clip, inverted):
    with pytest.raises(InputError, match="'<X>' is in the vocabulary already"):
        tokenizer.with_added(clip, {"<x>": (49408,), "<X>": (49409,)})
    with pytest.raises(InputError, match="'<x>' is in the vocabulary already"):
        tokenizer.with_added(inverted, {"<x>": (49420,)})


@pytest.mark.parametrize("ids", ["49408", 49408, [], [-1], [True], ["a"]])
def test_damaged_ids(tmp_path, ids):
    folder = shutil.copytree(VOCABULARY, tmp_path / "tokenizer")
    (folder / tokenizer.ADDED_FILE).write_text(json.dumps({"<x>": ids}))
    with pytest.raises(InputError, match="textual_inversion.json: expected a list of ids for '<x>'"):
        tokenizer.load(folder)


def test_another_width(tmp_path):
    e = textual_inversion.read(saved(tmp_path / "a.safetensors", {"<x>": np.zeros((3, 1024), np.float32)}))
    with pytest.raises(InputError, match="expected vectors of 768 numbers, found 1024; made for another family"):
        textual_inversion.extend({"text_encoder": table(width=768)}, [e])


@pytest.mark.parametrize("names", [("clip_l", "clip_g"), ("text_encoders_0", "text_encoders_1")])
def test_two_text_encoders(tmp_path, names):
    """Each gets its own vectors, as rows of the same ids."""
    vectors = {names[0]: np.full((3, 16), 7, np.float32), names[1]: np.full((3, 24), 8, np.float16)}
    e = textual_inversion.read(saved(tmp_path / "style.safetensors", vectors))
    assert (e.token, e.count) == ("style", 3)
    both = {"text_encoder": table(), "text_encoder_2": table(width=24), "unet": {"conv_in.bias": None}}
    extended = textual_inversion.extend(both, [e])
    assert extended["unet"] is both["unet"]
    for component, value in (("text_encoder", 7), ("text_encoder_2", 8)):
        (rows,) = extended[component].values()
        np.testing.assert_array_equal(rows.read()[100:], np.full((3, rows.shape[1]), value, np.float32))


def test_another_number_of_text_encoders(tmp_path):
    two = dict.fromkeys(("clip_l", "clip_g"), np.zeros((3, 16), np.float32))
    one = {"<x>": np.zeros((3, 16), np.float32)}
    models = {"text_encoder": table()}, {"text_encoder": table(), "text_encoder_2": table()}
    for vectors, model, message in (
        (two, models[0], r"2 text encoder\(s\), this model has 1"),
        (one, models[1], "has 2"),
    ):
        e = textual_inversion.read(saved(tmp_path / "a.safetensors", vectors))
        with pytest.raises(InputError, match=message):
            textual_inversion.extend(model, [e])
    uneven = {"clip_l": np.zeros((3, 16), np.float32), "clip_g": np.zeros((2, 16), np.float32)}
    with pytest.raises(InputError, match="expected as many vectors for one text encoder as for the other"):
        textual_inversion.read(saved(tmp_path / "a.safetensors", uneven))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "expected one tensor, named by its token, or clip_l and clip_g, found 0"),
        ({"<x>": np.zeros(16, "float32"), "<y>": np.zeros(16, "float32")}, "found 2: <x>, <y>"),
        (
            {"<x>": np.zeros((1, 1, 16), "float32")},
            r"\[W\] or \[k, W\], found '<x>', float32 \[1, 1, 16\]",
        ),
        ({"<x>": np.zeros((0, 16), "float32")}, r"found '<x>', float32 \[0, 16\]"),
        ({"<x>": np.float32(1)}, r"found '<x>', float32 \[\]"),
        ({"<x>": np.zeros(16, "int32")}, "found '<x>', int32"),
        ({"<x>": np.zeros((76, 16), "float32")}, "76 vectors, but a prompt has places for 75"),
    ],
)
def test_files_that_hold_no_embedding(tmp_path, tensors, message):
    with pytest.raises(InputError, match=message):
        textual_inversion.read(saved(tmp_path / "a.safetensors", tensors))


def test_values_that_are_not_finite(tmp_path):
    e = textual_inversion.read(saved(tmp_path / "a.safetensors", {"<x>": np.full(16, np.nan, "float32")}))
    (extended,) = textual_inversion.extend({"text_encoder": table()}, [e])["text_encoder"].values()
    with pytest.raises(InputError, match="a.safetensors: holds NaN or infinite values"):
        extended.read()


def test_no_table(tmp_path):
    e = textual_inversion.read(saved(tmp_path / "a.safetensors", {"<x>": np.zeros(16, "float32")}))
    with pytest.raises(InputError, match="has no embeddings.token_embedding.weight"):
        textual_inversion.extend({"text_encoder": {"other": None}}, [e])


def test_pickles_and_absent_files(tmp_path):
    (tmp_path / "learned_embeds.bin").write_bytes(b"\x80")
    with pytest.raises(InputError, match="learned_embeds.bin: pickle files can run code"):
        textual_inversion.parse(f"{tmp_path / 'learned_embeds.bin'}:<x>")
    with pytest.raises(InputError, match="nowhere.safetensors: no such file"):
        textual_inversion.parse(f"{tmp_path}/nowhere.safetensors")
