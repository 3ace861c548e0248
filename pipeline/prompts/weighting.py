"""Prompt weighting: which parts of a prompt count more or less. No TensorFlow.

    (word)       1.1 times        [word]   1 / 1.1 times       nested brackets multiply
    (word:1.3)   1.3 times        \\( \\) \\[ \\] \\\\   the characters themselves

the notation of AUTOMATIC1111's web interface. A bracket that is never closed reaches to the end of the prompt, a
closing one that closes nothing is a character like any other. What else that interface reads in prompts is text here,
which a notice says.
"""

import math
import re

STEP = 1.1  # of one pair of brackets
MOST = 5.0  # a larger number is no weight: a time of day, a ratio

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)"
_PIECE = re.compile(rf"\\[\\()\[\]]|[()\[\]]|:\s*({_NUMBER})\s*\)|[^\\()\[\]:]+|.", re.DOTALL)
_OTHERS_SYNTAX = re.compile(rf"\bBREAK\b|<(?:lora|lyco|hypernet):[^<>]*>|\[[^\[\]]*:\s*{_NUMBER}\s*\]")


def parse(prompt: str) -> tuple[list[tuple[str, float]], list[str]]:
    """Cut a prompt into pieces of text with their weights, neighbours of equal weight joined.

    Returns:
        (pieces, notices): [(text, weight)], in order; [("", 1.0)] for an empty prompt; and a line for each part that
        looks like more than text and is none.
    """
    pieces: list[tuple[str, float]] = []
    notices = [f"{match.group()} has no meaning here and is read as text" for match in _OTHERS_SYNTAX.finditer(prompt)]
    open_brackets: list[tuple[str, int]] = []  # (bracket, first piece inside it)

    def multiply(start: int, factor: float) -> None:
        pieces[start:] = [(text, weight * factor) for text, weight in pieces[start:]]

    for match in _PIECE.finditer(prompt):
        piece, number = match.group(0), match.group(1)
        inside = open_brackets[-1][0] if open_brackets else ""
        if piece in ("(", "["):
            open_brackets.append((piece, len(pieces)))
        elif number is not None and inside == "(":
            start = open_brackets.pop()[1]
            if 0 <= float(number) <= MOST:
                multiply(start, float(number))
            else:
                pieces[start:] = [("(", 1.0), *pieces[start:], (piece, 1.0)]
                notices.append(f"{number} in brackets is no weight from 0 to {MOST:g} and is read as text")
        elif number is not None:
            pieces.append((piece, 1.0))
        elif (inside, piece) in (("(", ")"), ("[", "]")):
            multiply(open_brackets.pop()[1], STEP if piece == ")" else 1 / STEP)
        else:
            pieces.append((piece[1:] if len(piece) == 2 and piece[0] == "\\" else piece, 1.0))
    for bracket, start in open_brackets:
        multiply(start, STEP if bracket == "(" else 1 / STEP)
    return _joined(pieces) or [("", 1.0)], notices


def _joined(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    joined: list[tuple[str, float]] = []
    for text, weight in pieces:
        # Nested pairs of both kinds meet at 1 up to rounding.
        if joined and math.isclose(joined[-1][1], weight, rel_tol=1e-9):
            joined[-1] = (joined[-1][0] + text, joined[-1][1])
        else:
            joined.append((text, 1.0 if math.isclose(weight, 1.0, rel_tol=1e-9) else weight))
    return joined
