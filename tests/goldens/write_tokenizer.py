"""Write tokenizer.json: ids of some forty prompts from transformers' CLIPTokenizer and by the rules of OpenAI's CLIP.

Run with an environment that has transformers, ftfy and regex:

    python tests/goldens/write_tokenizer.py checkpoints/emoji/tokenizer

Both lists are ids from BOS to EOS, without padding. `openai` is made here in plain Python from the published rules
(ftfy, HTML entities twice, lower case, byte-pair merges by rank), independent of the `tokenizers` library.
"""

import html
import json
import sys
from pathlib import Path

import ftfy
import regex
import tokenizers
import transformers

PROMPTS = [
    "",
    " ",
    "test tokenization",
    "a photo of an astronaut riding a horse on mars",
    "A RED Apple",
    "  two   blanks\tand\na line  ",
    "! !! !!!",
    "a cat, a dog; (masterpiece:1.3), [ugly]",
    "it's they're I've we'll he'd can't I'm",
    "rock 'n' roll ''s 'quoted'",
    "2023 was 12345 days and 3.14 or 1,000,000",
    "4k 8k 16:9 1girl f/1.8 50mm",
    "café naïve coöperate",
    "cafe\u0301 decomposed",
    "Straße GROẞ İstanbul",
    "日本語のプロンプト",
    "一只红色的苹果",
    "사과 한 개",
    "красное яблоко",
    "تفاحة حمراء",
    "emoji 🍎🍏 and 👩‍🚀 and 🇫🇷 and ❤️",
    "½ cup ² ³ Ⅷ ٣",
    "under_score-hyphen/slash\\back",
    "<|endoftext|>",
    "a <|endoftext|> b",
    "<|startoftext|>x",
    "<b>bold</b> a<b",
    "zero\u200bwidth and\u00a0no-break",
    "x" * 100,
    "antidisestablishmentarianism supercalifragilisticexpialidocious",
    " ".join(["cat"] * 75),
    " ".join(["cat"] * 76),
    "a very long prompt, " * 40,
    "🍎" * 60,
    # Cleaning that transformers 5 skips:
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


def openai_ids(prompt: str, vocab: dict, ranks: dict) -> list[int]:
    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()
    text = regex.sub(r"\s+", " ", text).strip().lower()
    pattern = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
    ids = []
    for word in regex.findall(pattern, text, regex.IGNORECASE):
        if word in ("<|startoftext|>", "<|endoftext|>"):
            ids.append(vocab[word])
            continue
        parts = [BYTES[b] for b in word.encode("utf-8")]
        parts[-1] += "</w>"
        while len(parts) > 1:
            best = min(zip(parts, parts[1:], strict=False), key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                if tuple(parts[i : i + 2]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        ids += [vocab[part] for part in parts]
    return [vocab["<|startoftext|>"], *ids[:75], vocab["<|endoftext|>"]]


def byte_names() -> dict[int, str]:
    """Printable Latin-1 bytes are their own name, the others are numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


BYTES = byte_names()


def main(folder: Path):
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")[1:]
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(filter(None, lines))}
    peer = transformers.CLIPTokenizer.from_pretrained(folder)
    entries = [
        {
            "prompt": prompt,
            "transformers": peer(prompt, truncation=True, max_length=77).input_ids,
            "openai": openai_ids(prompt, vocab, ranks),
        }
        for prompt in PROMPTS
    ]
    versions = {module.__name__: module.__version__ for module in (transformers, tokenizers, ftfy, regex)}
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    text = f'{{"versions": {json.dumps(versions)},\n "prompts": [\n{lines}\n]}}\n'
    Path(__file__).with_suffix("").with_name("tokenizer.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
