"""Prompt weighting by exact cases."""

import pytest

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
        ("(red:1.)(apple:.5)(cat:+1.2)", [("red", 1.0), ("apple", 0.5), ("cat", 1.2)]),
        ("(red:5)", [("red", 5.0)]),
        ("time: 10:30) late", [("time: 10:30) late", 1.0)]),
        ("a (red apple", [("a ", 1.0), ("red apple", 1.1)]),
        ("a red) apple", [("a red) apple", 1.0)]),
        ("([x])", [("x", 1.0)]),
        ("(a)(b)", [("ab", 1.1)]),
    ],
)
def test_pieces(prompt, pieces):
    assert [(text, pytest.approx(weight)) for text, weight in parse(prompt)[0]] == pieces
    assert parse(prompt)[1] == []


@pytest.mark.parametrize(
    ("prompt", "number"),
    [("a clock (at 12:30)", "30"), ("(red:5.01)", "5.01"), ("((red) cat:1000)", "1000"), ("(red:-1)", "-1")],
)
def test_numbers_that_are_no_weights_are_text(prompt, number):
    """The brackets, too; what is weighed inside of them stays so."""
    pieces, notices = parse(prompt)
    assert "".join(text for text, _ in pieces) == prompt.replace("(red)", "red")
    assert [(text, weight) for text, weight in pieces if weight != 1] == ([("red", 1.1)] if "(red)" in prompt else [])
    assert notices == [f"{number} in brackets is no weight from 0 to 5 and is read as text"]


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ("a cat BREAK a dog", "BREAK"),
        ("a cat <lora:style:0.8>", "<lora:style:0.8>"),
        ("a [cat:dog:0.5]", "[cat:dog:0.5]"),
        ("a [red:1.3] cat", "[red:1.3]"),
    ],
)
def test_what_means_something_elsewhere_gets_a_notice(prompt, part):
    pieces, notices = parse(prompt)
    assert "".join(text for text, _ in pieces) == prompt.replace("[", "").replace("]", "")
    assert notices == [f"{part} has no meaning here and is read as text"]
    assert parse("breakfast at 12:30, BREAKING [news], 2:1 <b>")[1] == []
