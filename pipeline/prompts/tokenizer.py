"""Prompts to token ids with the checkpoint's own vocabulary: CLIP's byte-pair encoding (Radford et al. 2021).

Text is cleaned as OpenAI's CLIP did when the encoder was trained: ftfy repairs it, HTML entities are resolved twice,
white space collapses to one blank, letters become lower case. transformers 5 only normalises (NFC), collapses white
space and lowers, so ids differ from its CLIPTokenizer's where the rest matters: HTML entities ("&amp;"), mojibake
("schÃ¶n"), curly quotes, ligatures, full-width letters, control characters, a capital sigma that ends a word, and
special tokens typed in capitals.
Special tokens typed in the prompt ("<|endoftext|>") become the special ids, as in both. No TensorFlow.
"""

import dataclasses
import html
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import ftfy
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from models.config import ModelConfig
from models.errors import InputError
from pipeline.files import read_json
from pipeline.prompts import weighting

LENGTH = 77  # ids per prompt: BOS, at most 75 tokens, EOS, padding
MAX_BYTES = 8192  # of a prompt; 75 tokens never need as much
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
LEARNED_FILE = "added_tokens.json"  # of a checkpoint: tokens that it learned beside its vocabulary, and their ids
ADDED_FILE = "textual_inversion.json"  # in an export: tokens of embeddings that were added to it, and their ids

# Contractions, runs of letters, single digits, runs of anything else; the special tokens are split off before.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One prompt as ids.

    Attributes:
        ids: int32[77 k]: k blocks of BOS, at most 75 tokens, EOS, padding.
        weights: float32[77 k], of each id; 1 for BOS, EOS and padding.
        dropped: the end of the (cleaned) prompt that found no place; "" when all of it did.
        notices: a line for each part that is read as text though it looks like more.
    """

    ids: np.ndarray
    weights: np.ndarray
    dropped: str
    notices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's vocabulary, ready to encode; made by `load`."""

    backend: tokenizers.Tokenizer
    bos: int
    eos: int
    pad: int
    vocab_size: int  # largest id + 1; the text encoder needs at least as many embeddings
    added: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # cleaned token -> its ids

    def encode(self, prompt: str, blocks: int = 1, weigh: bool = False) -> Tokens:
        """Turn one prompt into `blocks` x 77 ids; each block has its own BOS and EOS, kept where the prompt is cut.

        Args:
            weigh: read brackets as weights, see `pipeline.prompts.weighting`.

        Raises:
            InputError: the prompt is not a str, or is over 8 KiB or no UTF-8.
        """
        clean(prompt)  # its size and type, as a whole
        parts, notices = weighting.parse(prompt) if weigh else ([(prompt, 1.0)], [])
        texts = [(clean(text), weight) for text, weight in parts]
        pieces = [
            (piece, weight, number, start)
            for number, (text, weight) in enumerate(texts)
            for piece, start in self._pieces(text)
        ]
        room = LENGTH - 2
        ids = np.full((blocks, LENGTH), self.pad, np.int32)
        weights = np.ones((blocks, LENGTH), np.float32)
        for block in range(blocks):
            inside = pieces[block * room : (block + 1) * room]
            ids[block, : len(inside) + 2] = [self.bos, *(piece[0] for piece in inside), self.eos]
            weights[block, 1 : len(inside) + 1] = [piece[1] for piece in inside]
        dropped = ""
        if len(pieces) > blocks * room:
            _, _, number, start = pieces[blocks * room]
            dropped = " ".join([texts[number][0][start:], *(text for text, _ in texts[number + 1 :] if text)])
        return Tokens(ids.reshape(-1), weights.reshape(-1), dropped, tuple(notices))

    def _pieces(self, text: str) -> list[tuple[int, int]]:
        """Return (id, where it starts in the text); added tokens are found first, the rest is byte-pair encoded."""
        pieces, start = [], 0
        matches = re.finditer(_pattern(self.added), text) if self.added else ()
        for match in (*matches, None):
            end = match.start() if match else len(text)
            encoding = self.backend.encode(text[start:end], add_special_tokens=False)
            pieces += [(i, start + begin) for i, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True)]
            if match:
                pieces += [(i, end) for i in self.added[match.group()]]
                start = match.end()
        return pieces

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, list[str]]:
        """Turn prompts into one block each, without weights: (ids int32[P, 77], notices); see `weigh_batch`."""
        ids, _, notices = self.weigh_batch(texts, 1, weigh=False)
        return ids, notices

    def weigh_batch(
        self, texts: list[str], blocks: int = 1, weigh: bool = True
    ) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Turn several prompts into ids and weights.

        Returns:
            (ids, weights, notices): int32[P, 77 k], float32[P, 77 k], and a line for each part that is read as text
            though it looks like more, and for each prompt that was cut, quoting the part dropped.

        Raises:
            InputError: as `encode`; `texts` is one str instead of a list.
        """
        if isinstance(texts, str):
            raise InputError(f"expected a list of prompts, found the text {texts[:40]!r}; put it in a list")
        tokens = [self.encode(text, blocks, weigh) for text in texts]
        most = blocks * (LENGTH - 2)
        notices = []
        for number, encoded in enumerate(tokens, start=1):
            notices += [f"prompt {number}: {notice}" for notice in encoded.notices]
            if encoded.dropped:
                dropped = json.dumps(encoded.dropped, ensure_ascii=False)
                notices.append(f"prompt {number} is longer than {most} tokens; dropped: {dropped}")
        shape = (len(tokens), blocks * LENGTH)
        ids = np.array([t.ids for t in tokens], np.int32).reshape(shape)
        return ids, np.array([t.weights for t in tokens], np.float32).reshape(shape), notices


def clean(prompt: str) -> str:
    """Return the text CLIP sees: repaired, entities resolved, single blanks, lower case.

    Raises:
        InputError: the prompt is not a str, or is over 8 KiB or no UTF-8.
    """
    if not isinstance(prompt, str):
        raise InputError(f"prompt should be text, found {type(prompt).__name__}")
    try:
        size = len(prompt.encode())
    except UnicodeEncodeError as error:
        raise InputError(f"prompt {ascii(prompt)[:80]} is no UTF-8 text; type it again in a UTF-8 terminal") from error
    if size > MAX_BYTES:
        raise InputError(f"prompt has {size} bytes, at most {MAX_BYTES} are read; only 75 tokens count, shorten it")
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(prompt))).split()).lower()


def with_added(
    tokenizer: Tokenizer, added: Mapping[str, tuple[int, ...]], advice: str = "name another: --embedding FILE:TOKEN"
) -> Tokenizer:
    """Return the tokenizer with new tokens, each of one or more ids; prompts find them in any case, as whole words.

    Args:
        advice: what to do about a token that cannot be added.

    Raises:
        InputError: a token is empty, holds white space, is in the vocabulary, or is there twice.
    """
    result = dict(tokenizer.added)
    for token, ids in added.items():
        cleaned = clean(token)
        if not cleaned or " " in cleaned:
            raise InputError(f"an added token should be one word, found {token!r}; {advice}")
        known = any(tokenizer.backend.token_to_id(word) is not None for word in (cleaned, f"{cleaned}</w>"))
        if known or cleaned in result:
            raise InputError(f"an added token should be new, {token!r} is in the vocabulary already; {advice}")
        result[cleaned] = tuple(ids)
    size = max([tokenizer.vocab_size, *(i + 1 for ids in result.values() for i in ids)])
    return dataclasses.replace(tokenizer, added=result, vocab_size=size)


def _pattern(tokens: Iterable[str]) -> str:
    """Longest first, and never a part of a longer word: transformers finds "my-style" in "my-styles" too."""

    def whole(token):
        begin, end = (r"\b" if re.match(r"\w", character) else "" for character in (token[0], token[-1]))
        return f"{begin}{re.escape(token)}{end}"

    return "|".join(map(whole, sorted(tokens, key=len, reverse=True)))


def load(folder: Path, default_pad_token: str = EOS) -> Tokenizer:
    """Read a checkpoint's tokenizer/ folder.

    Args:
        folder: holds vocab.json and merges.txt, or tokenizer.json alone; maybe LEARNED_FILE; of an export,
            ADDED_FILE as well. Special tokens are named, as text or as {"content": text}, in special_tokens_map.json
            or else tokenizer_config.json; both may be absent.
        default_pad_token: padding where neither they nor tokenizer.json name any.

    Raises:
        InputError: a file is missing, damaged, or does not fit the others.
    """
    folder = Path(folder)
    vocab_file, merges_file, whole_file = (folder / n for n in ("vocab.json", "merges.txt", "tokenizer.json"))
    if vocab_file.is_file() and merges_file.is_file():
        vocab, merges, source = read_json(vocab_file), _read_merges(merges_file), merges_file
        learned, own_pad = _optional_json(folder / LEARNED_FILE), None
    elif whole_file.is_file():
        vocab, merges, learned, own_pad = _read_tokenizer_json(whole_file)
        source = whole_file
    else:
        raise InputError(f"{folder}: expected vocab.json and merges.txt, or tokenizer.json; found {_listing(folder)}")
    _check_vocabulary(folder, source, vocab, merges, learned)

    def special(kind: str, default: str) -> tuple[str, int]:
        token = _special_token(folder, kind) or default
        if token not in vocab:
            raise InputError(f"{folder}: {kind} {token!r} is not in the vocabulary; correct tokenizer_config.json")
        return token, vocab[token]

    (bos_token, bos), (eos_token, eos) = special("bos_token", BOS), special("eos_token", EOS)
    _, pad = special("pad_token", own_pad or default_pad_token)
    unknown, _ = special("unk_token", eos_token)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=unknown,
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
            fuse_unk=False,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # Not the padding token: where that is "!", a typed "!" must stay the word it is.
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in (bos_token, eos_token)])
    tokenizer = Tokenizer(backend, bos, eos, pad, max(vocab.values()) + 1)
    new = {token: (i,) for token, i in learned.items() if token not in vocab}
    tokenizer = with_added(tokenizer, new, f"correct the added tokens in {folder}")
    return with_added(tokenizer, _read_embeddings(folder / ADDED_FILE))


def of_export(folder: Path, config: ModelConfig) -> tuple[Tokenizer, ...]:
    """The tokenizers of an export, one per text encoder. Raises InputError as `load`."""
    names = ("tokenizer", "tokenizer_2")
    return tuple(
        load(folder / name, encoder.pad_token or EOS)
        for name, encoder in zip(names, config.text_encoders, strict=False)
    )


def _read_embeddings(path: Path) -> dict[str, tuple[int, ...]]:
    added = _optional_json(path)
    for token, ids in added.items():
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise InputError(f"{path}: expected a list of ids for {token!r}, found {str(ids)[:40]}; export again")
    return {token: tuple(ids) for token, ids in added.items()}


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a list of merges in UTF-8, found something else ({error})") from error
    # Not splitlines(): it would also split at characters that are none of the file's line ends.
    lines = [line.rstrip("\r") for line in text.split("\n")]
    return [_pair(path, line.split(" ")) for line in lines if line and not line.startswith("#version")]


def _read_tokenizer_json(path: Path) -> tuple[dict, list[tuple[str, str]], dict, str | None]:
    """Vocabulary, merges, added tokens and the padding token of the `tokenizers` library's own file."""
    content = read_json(path)
    model = content.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or not model.get("merges"):
        raise InputError(f"{path}: expected a byte-pair encoding with model.vocab and model.merges, found none")
    merges = [_pair(path, m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    try:
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        return model["vocab"], merges, added, (content.get("padding") or {}).get("pad_token")
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: added_tokens or padding is damaged ({error!r}); get the file again") from error


def _pair(path: Path, parts) -> tuple[str, str]:
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
        raise InputError(f"{path}: a merge should be two tokens, found {parts!r}; the file is damaged, get it again")
    return parts[0], parts[1]


def _check_vocabulary(folder: Path, source: Path, vocab: dict, merges: list[tuple[str, str]], learned: dict) -> None:
    ids = set(vocab.values()) if all(type(value) is int and value >= 0 for value in vocab.values()) else set()
    if not vocab or len(ids) != len(vocab):
        raise InputError(f"{folder}: the vocabulary should give each token its own number from 0; it is damaged")
    merged = {first + second for first, second in merges}
    for first, second in merges:
        if first not in vocab or second not in vocab or first + second not in vocab:
            raise InputError(
                f"{source}: the merge {first!r} {second!r} does not fit the vocabulary; the files are damaged or from "
                f"different checkpoints, get them again"
            )
    # In CLIP's vocabulary a merge makes every word but the special ones. A few others are let pass: small vocabularies
    # made for tests have some.
    words = [token for token in vocab if len(token.removesuffix("</w>")) > 1 and not token.startswith("<|")]
    unmade = [token for token in words if token not in merged]
    if len(unmade) > len(learned) + 64:
        raise InputError(
            f"{source}: no merge makes {len(unmade)} of {len(words)} words in the vocabulary; the file is cut short, "
            f"get it again"
        )
    for token, value in learned.items():
        # An id of its own, or the one that the vocabulary gives the token as well.
        if type(value) is not int or value < 0 or (vocab.get(token) != value if token in vocab else value in ids):
            raise InputError(
                f"{folder}: the added token {token!r} should have a number of its own, found {str(value)[:40]}; "
                f"get the files again"
            )


def _special_token(folder: Path, kind: str) -> str | None:
    """The token the folder names for `kind`; special_tokens_map.json wins, as in transformers."""
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        token = _optional_json(folder / name).get(kind)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise InputError(f"{folder / name}: {kind} should be text or {{'content': text}}, found {token!r}")
        if token:
            return token
    return None


def _optional_json(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    return ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "an empty folder"
