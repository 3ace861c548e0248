"""Token ids against transformers' and OpenAI's (tests/goldens/tokenizer.json), and folders that must be refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from models.errors import InputError
from pipeline.prompts import tokenizer

FOLDER = Path(__file__).parents[1].parent / "checkpoints" / "emoji" / "tokenizer"
GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "tokenizer.json").read_text(encoding="utf-8"))["prompts"]
BOS, EOS = 49406, 49407

# Where OpenAI's cleaning matters and transformers 5 skips it.
CLEANED = [
    "a &amp; b &lt;3",
    "a &amp;amp; b",
    "<3 &amp;amp; &amp;lt;",
    "schÃ¶n mojibake â€œquotedâ€\x9d",
    "“curly” ‘quotes’ don’t",
    "ﬁre ｆｕｌｌ ｗｉｄｔｈ",
    "bell\x07 control",
    "a <|ENDOFTEXT|> b",
    "ΣΊΣΥΦΟΣ",
]


@pytest.fixture(scope="module")
def clip():
    return tokenizer.load(FOLDER)


@pytest.fixture
def folder(tmp_path):
    """A copy that a test may damage."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(FOLDER / name, tmp_path / name)
    return tmp_path


def write_tokenizer_json(path, *, pair=list, **changes):
    """What transformers 5 writes, as far as it matters: vocabulary, merges, added tokens, padding."""
    vocab = json.loads((FOLDER / "vocab.json").read_text(encoding="utf-8"))
    lines = (FOLDER / "merges.txt").read_text(encoding="utf-8").split("\n")[1:]
    content = {
        "version": "1.0",
        "padding": {"strategy": {"Fixed": 77}, "pad_id": EOS, "pad_token": "<|endoftext|>"},
        "added_tokens": [{"id": BOS, "content": "<|startoftext|>"}, {"id": EOS, "content": "<|endoftext|>"}],
        "model": {"type": "BPE", "vocab": vocab, "merges": [pair(line.split(" ")) for line in lines if line]},
    }
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def padded(ids, pad=EOS):
    return ids + [pad] * (77 - len(ids))


@pytest.mark.parametrize("entry", GOLDENS, ids=lambda entry: repr(entry["prompt"][:30]))
def test_ids_equal_the_peers(clip, entry):
    tokens = clip.encode(entry["prompt"])
    assert tokens.ids.dtype == np.int32 and tokens.ids.shape == (77,)
    assert tokens.ids.tolist() == padded(entry["openai"])
    assert (entry["openai"] == entry["transformers"]) == (entry["prompt"] not in CLEANED)


def test_goldens_hold_the_cases_named_above():
    assert set(CLEANED) < {entry["prompt"] for entry in GOLDENS} and len(GOLDENS) >= 40


def test_entities_are_resolved_where_transformers_keeps_their_letters(clip):
    (entry,) = (entry for entry in GOLDENS if entry["prompt"] == "a &amp;amp; b")
    assert clip.encode("a &amp;amp; b").ids[:5].tolist() == clip.encode("a & b").ids[:5].tolist()
    assert len(entry["transformers"]) > len(entry["openai"]) == 5


def test_padding_follows_the_family(folder):
    words = [BOS, 1628, 32634, 10847, EOS]
    assert tokenizer.load(folder).encode("test tokenization").ids.tolist() == padded(words)
    sd2 = tokenizer.load(folder, default_pad_token="!")
    assert sd2.encode("test tokenization").ids.tolist() == padded(words, 0)


@pytest.mark.parametrize("form", ["!", {"content": "!", "__type": "AddedToken", "lstrip": False}])
@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_a_typed_exclamation_mark_stays_one_where_it_pads(folder, name, form):
    (folder / name).write_text(json.dumps({"pad_token": form}))
    tokens = tokenizer.load(folder).encode("! !! !!!")
    assert tokens.ids.tolist() == padded([BOS, 256, 748, 995, EOS], 0)


def test_special_tokens_map_wins_over_tokenizer_config(folder):
    (folder / "special_tokens_map.json").write_text('{"pad_token": "!"}')
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<|endoftext|>"}')
    assert tokenizer.load(folder).pad == 0
    (folder / "special_tokens_map.json").write_text('{"pad_token": null}')
    assert tokenizer.load(folder, default_pad_token="!").pad == EOS


@pytest.mark.parametrize("pair", [list, " ".join])
def test_tokenizer_json_alone_gives_the_same_ids(clip, tmp_path, pair):
    write_tokenizer_json(tmp_path / "tokenizer.json", pair=pair)
    alone = tokenizer.load(tmp_path)
    for entry in GOLDENS:
        np.testing.assert_array_equal(alone.encode(entry["prompt"]).ids, clip.encode(entry["prompt"]).ids)
    assert (alone.bos, alone.eos, alone.pad, alone.vocab_size) == (BOS, EOS, EOS, 49408)


def test_tokenizer_json_that_pads_with_an_exclamation_mark(tmp_path):
    specials = [{"id": BOS, "content": "<|startoftext|>"}, {"id": EOS, "content": "<|endoftext|>"}]
    write_tokenizer_json(
        tmp_path / "tokenizer.json",
        padding={"pad_token": "!", "pad_id": 0},
        added_tokens=[{"id": 0, "content": "!", "special": True}, *specials],
    )
    assert tokenizer.load(tmp_path).encode("! !! !!!").ids.tolist() == padded([BOS, 256, 748, 995, EOS], 0)


def test_75_tokens_fit_and_the_76th_is_reported(clip):
    full = clip.encode(" ".join(["cat"] * 75))
    assert full.dropped == "" and full.ids[75] == 2368 and full.ids[76] == EOS
    cut = clip.encode(" ".join(["cat"] * 75) + "  DOG")
    np.testing.assert_array_equal(cut.ids, full.ids)
    assert cut.dropped == "dog"


@pytest.mark.parametrize("tail", ["the end, it's 100 % cut!", "naïve 日本語 🍎 end", "<|endoftext|> x"])
def test_dropped_text_is_the_rest_of_the_prompt(clip, tail):
    assert clip.encode("cat " * 75 + tail).dropped == tail
    # Counted from inside: what is kept and what is dropped make the whole.
    kept = "cat " * 70
    whole = clip.encode(kept + tail + " dog" * 70)
    room = 5
    alone = [i for i in clip.encode(tail + " dog" * 70).ids.tolist() if i != BOS][:room]
    assert whole.ids[71:76].tolist() == alone
    assert (kept + tail + " dog" * 70).endswith(whole.dropped) and whole.dropped


def test_a_character_cut_in_half_is_reported_whole(clip):
    # Three tokens each after the one of "cat": the 25th keeps two of its three.
    tokens = clip.encode("cat " + "龘" * 60)
    assert tokens.ids[:5].tolist() == [BOS, 2368, 165, 122, 246] and tokens.ids[74:].tolist() == [165, 122, EOS]
    assert tokens.dropped == "龘" * 36


def test_batch(clip):
    long = "cat " * 75 + 'a "quoted" dog'
    ids, warnings = clip.encode_batch(["a red apple", long, ""])
    assert ids.dtype == np.int32 and ids.shape == (3, 77)
    for row, prompt in zip(ids, ["a red apple", long, ""], strict=True):
        np.testing.assert_array_equal(row, clip.encode(prompt).ids)
    assert warnings == ['prompt 2 is longer than 75 tokens; dropped: "a \\"quoted\\" dog"']
    empty, warnings = clip.encode_batch([])
    assert empty.shape == (0, 77) and warnings == []
    with pytest.raises(InputError, match="expected a list of prompts, found the text 'a red apple'"):
        clip.encode_batch("a red apple")


@pytest.mark.parametrize("prompt", [None, 5, b"cat", ["cat"]])
def test_a_prompt_that_is_not_text(clip, prompt):
    with pytest.raises(InputError, match=f"prompt should be text, found {type(prompt).__name__}"):
        clip.encode(prompt)


def test_a_huge_prompt(clip):
    clip.encode("x" * 8192)
    with pytest.raises(InputError, match="prompt has 8193 bytes, at most 8192"):
        clip.encode("x" * 8193)
    with pytest.raises(InputError, match="prompt has 8193 bytes"):
        clip.encode("語" * 2731)


def test_bytes_that_are_no_text_are_refused_and_control_characters_dropped(clip):
    for prompt in ("caf\udce9", "a \ud800 cat"):  # what Python makes of a command line's bytes that are no UTF-8
        with pytest.raises(InputError, match=r"prompt '.*\\ud.*' is no UTF-8 text; type it again"):
            clip.encode(prompt)
    assert clip.encode("\x00\x01").ids[:2].tolist() == [BOS, EOS]


@pytest.mark.parametrize("form", ["added_tokens.json", "tokenizer.json"])
def test_learned_tokens_have_their_ids(folder, form):
    """As a pipeline with a textual inversion is saved: one more token, one more row of the text encoder."""
    if form == "added_tokens.json":
        (folder / form).write_text('{"<cat-toy>": 49408, "<|endoftext|>": 49407}')
    else:
        (folder / "merges.txt").unlink()
        write_tokenizer_json(folder / form, added_tokens=[{"id": 49408, "content": "<cat-toy>"}])
    learned = tokenizer.load(folder)
    assert learned.vocab_size == 49409
    assert learned.encode("cat <cat-toy> <Cat-Toy>,").ids[:6].tolist() == [BOS, 2368, 49408, 49408, 267, EOS]
    # And those of embeddings that an export adds beside them.
    (folder / "textual_inversion.json").write_text('{"<mine>": [49409, 49410]}')
    both = tokenizer.load(folder)
    assert both.encode("<mine><cat-toy>").ids[:5].tolist() == [BOS, 49409, 49410, 49408, EOS]
    assert both.vocab_size == 49411


def damage_nothing_there(folder):
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()


def damage_half(folder):
    (folder / "merges.txt").unlink()


def damage_json(folder):
    text = (folder / "vocab.json").read_text(encoding="utf-8")
    (folder / "vocab.json").write_text(text[: len(text) // 2], encoding="utf-8")


def damage_list(folder):
    (folder / "vocab.json").write_text("[1, 2]")


def damage_id(folder):
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    (folder / "vocab.json").write_text(json.dumps(vocab | {"cat</w>": "2368"}))


def damage_twice(folder):
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    (folder / "vocab.json").write_text(json.dumps(vocab | {"cat</w>": 2369}))


def damage_no_bos(folder):
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    del vocab["<|startoftext|>"]
    (folder / "vocab.json").write_text(json.dumps(vocab))


def damage_lost_word(folder):
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    del vocab["cat</w>"]
    (folder / "vocab.json").write_text(json.dumps(vocab))


def damage_merge_line(folder):
    with (folder / "merges.txt").open("a", encoding="utf-8") as file:
        file.write("c a t\n")


def damage_short_merges(folder):
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    (folder / "merges.txt").write_text("\n".join(lines[:-2000]) + "\n", encoding="utf-8")


def damage_empty_merges(folder):
    (folder / "merges.txt").write_text("")


def damage_binary(folder):
    (folder / "merges.txt").write_bytes(b"\xff\xfe\x00garbage")


def damage_pad(folder):
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')


def damage_pad_kind(folder):
    (folder / "tokenizer_config.json").write_text('{"pad_token": 5}')


def damage_added(folder):
    (folder / "added_tokens.json").write_text('{"<my-style>": 49407}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_nothing_there, r"expected vocab.json and merges.txt, or tokenizer.json; found an empty folder"),
        (damage_half, r"expected vocab.json and merges.txt, or tokenizer.json; found vocab.json"),
        (damage_json, r"vocab.json: expected a JSON file"),
        (damage_list, r"vocab.json: expected a JSON object, found list"),
        (damage_id, r"its own number"),
        (damage_twice, r"its own number"),
        (damage_no_bos, r"bos_token '<\|startoftext\|>' is not in the vocabulary"),
        (damage_lost_word, r"merges.txt: the merge 'c' 'at</w>' does not fit the vocabulary"),
        (damage_merge_line, r"a merge should be two tokens, found \['c', 'a', 't'\]"),
        (damage_short_merges, r"merges.txt: no merge makes 1999 of 48894 words.*cut short"),
        (damage_empty_merges, r"no merge makes 48894 of 48894 words"),
        (damage_binary, r"merges.txt: expected a list of merges in UTF-8"),
        (damage_pad, r"pad_token '<pad>' is not in the vocabulary"),
        (damage_pad_kind, r"tokenizer_config.json: pad_token should be text"),
        (damage_added, r"the added token '<my-style>' should have a number of its own, found 49407"),
    ],
)
def test_damaged_folders(folder, damage, message):
    damage(folder)
    with pytest.raises(InputError, match=message) as error:
        tokenizer.load(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_missing_folder(tmp_path):
    with pytest.raises(InputError, match="found no such folder"):
        tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "expected a byte-pair encoding"),
        ({"model": None}, "expected a byte-pair encoding"),
        ({"model": {"vocab": {"a": 0}, "merges": [["a"]]}}, "a merge should be two tokens"),
        ({"added_tokens": [{"id": 1}]}, "added_tokens or padding is damaged"),
        ({"padding": "yes"}, "added_tokens or padding is damaged"),
        ({"added_tokens": [{"id": "5", "content": "<x>"}]}, "the added token '<x>' should have a number of its own"),
    ],
)
def test_damaged_tokenizer_json(tmp_path, changes, message):
    write_tokenizer_json(tmp_path / "tokenizer.json", **changes)
    with pytest.raises(InputError, match=message):
        tokenizer.load(tmp_path)
