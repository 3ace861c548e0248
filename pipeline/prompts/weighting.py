"""Prompt weighting: which parts of a prompt count more or less. No TensorFlow.

    (word)       1.1 times        [word]   1 / 1.1 times       nested brackets multiply
    (word:1.3)   1.3 times        \\( \\) \\[ \\] \\\\   the characters themselves

the notation of AUTOMATIC1111's web interface. A bracket that is never closed reaches to the end of the prompt, a
closing one that closes nothing is a character like any other.
"""

import math
import re

from models.errors import InputError

STEP = 1.1  # of one pair of brackets
MOST = 100.0  # a larger weight is a typing mistake

_PIECE = re.compile(r"\\[\\()\[\]]|[()\[\]]|:\s*([+-]?\d*\.?\d+)\s*\)|[^\\()\[\]:]+|.", re.DOTALL)


def parse(prompt: str) -> list[tuple[str, float]]:
    """A prompt as pieces of text with their weights, neighbours of equal weight joined.

    Returns:
        [(text, weight)], in order; [("", 1.0)] for an empty prompt.

    Raises:
        InputError: a weight that is negative or over 100.
    """
    pieces: list[tuple[str, float]] = []
    open_brackets: list[tuple[str, int]] = []  # (bracket, first piece inside it)

    def multiply(start: int, factor: float) -> None:
        pieces[start:] = [(text, weight * factor) for text, weight in pieces[start:]]

    for match in _PIECE.finditer(prompt):
        piece, number = match.group(0), match.group(1)
        inside = open_brackets[-1][0] if open_brackets else ""
        if piece in ("(", "["):
            open_brackets.append((piece, len(pieces)))
        elif number is not None and inside == "(":
            weight = float(number)
            if not 0 <= weight <= MOST:
                raise InputError(f"prompt weight {number} in {prompt!r}: must be 0 to {MOST:g}")
            multiply(open_brackets.pop()[1], weight)
        elif number is not None:
            pieces.append((piece, 1.0))
        elif (inside, piece) in (("(", ")"), ("[", "]")):
            multiply(open_brackets.pop()[1], STEP if piece == ")" else 1 / STEP)
        else:
            pieces.append((piece[1:] if len(piece) == 2 and piece[0] == "\\" else piece, 1.0))
    for bracket, start in open_brackets:
        multiply(start, STEP if bracket == "(" else 1 / STEP)
    return _joined(pieces) or [("", 1.0)]


def _joined(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    joined: list[tuple[str, float]] = []
    for text, weight in pieces:
        # Nested pairs of both kinds meet at 1 up to rounding.
        if joined and math.isclose(joined[-1][1], weight, rel_tol=1e-9):
            joined[-1] = (joined[-1][0] + text, joined[-1][1])
        else:
            joined.append((text, 1.0 if math.isclose(weight, 1.0, rel_tol=1e-9) else weight))
    return joined
