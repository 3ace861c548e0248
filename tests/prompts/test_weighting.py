"""Prompt weighting by exact cases."""

import pytest

from models.errors import InputError
from pipeline.prompts.weighting import parse


@pytest.mark.parametrize(
    ("prompt", "pieces"),
    [
        ("", [("", 1.0)]),
        ("a red apple", [("a red apple", 1.0)]),
        ("a (red) apple", [("a ", 1.0), ("red", 1.1), (" apple", 1.0)]),
        ("a ((red)) apple", [("a ", 1.0), ("red", 1.1 * 1.1), (" apple", 1.0)]),
        ("a [red] apple", [("a ", 1.0), ("red", 1 / 1.1), (" apple", 1.0)]),
        ("(red:1.3) apple", [("red", 1.3), (" apple", 1.0)]),
        ("(a (red:1.5) apple:2)", [("a ", 2.0), ("red", 3.0), (" apple", 2.0)]),
        ("((red:1.5) apple)", [("red", 1.5 * 1.1), (" apple", 1.1)]),
        ("(red:0) apple", [("red", 0.0), (" apple", 1.0)]),
        ("(red: .5 )", [("red", 0.5)]),
        (r"a \(red\) \[apple\] \\", [(r"a (red) [apple] " + "\\", 1.0)]),
        ("ratio 1:2, 16:9", [("ratio 1:2, 16:9", 1.0)]),
        ("[red:1.3]", [("red:1.3", 1 / 1.1)]),
        ("time: 10:30) late", [("time: 10:30) late", 1.0)]),
        ("a (red apple", [("a ", 1.0), ("red apple", 1.1)]),
        ("a red) apple", [("a red) apple", 1.0)]),
        ("([x])", [("x", 1.0)]),
        ("(a)(b)", [("ab", 1.1)]),
    ],
)
def test_pieces(prompt, pieces):
    assert [(text, pytest.approx(weight)) for text, weight in parse(prompt)] == pieces


def test_absurd_weights_are_refused():
    with pytest.raises(InputError, match=r"prompt weight 1000 in '\(red:1000\)': must be 0 to 100"):
        parse("(red:1000)")
    with pytest.raises(InputError, match="must be 0 to 100"):
        parse("(red:-1)")
