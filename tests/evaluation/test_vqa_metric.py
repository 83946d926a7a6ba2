"""VQA accuracy against a slow transcription of the official rules (visualqa.org)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kiloword.evaluation.vqa import CONTRACTIONS, accuracy, means, normalise

MARKS = [";", "/", "[", "]", '"', "{", "}", "(", ")", "=", "+", "\\", "_", "-", ">", "<", "@", "`", ",", "?", "!"]
DIGITS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip


def literal_normalise(text: str) -> str:
    """The rules one after the other, letter by letter."""
    in_number = any(text[i] == "," and text[i - 1].isdigit() and text[i + 1].isdigit() for i in range(1, len(text) - 1))
    out = text
    for mark in MARKS:
        beside_space = any(
            text[i] == mark and (text[i + 1 : i + 2] == " " or (i > 0 and text[i - 1] == " ")) for i in range(len(text))
        )
        out = "".join(("" if beside_space or in_number else " ") if letter == mark else letter for letter in out)
    kept, dropped = "", 0
    for i, letter in enumerate(out):
        if letter == "." and not out[i + 1 : i + 2].isdigit() and dropped < 32:
            dropped += 1
        else:
            kept += letter
    words = [DIGITS.get(word, word) for word in kept.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ("a", "an", "the"))


def literal_accuracy(answer: str, answers: list[str]) -> float:
    """Ten annotators, each left out once."""
    said = [a.replace("\n", " ").replace("\t", " ").strip() for a in [answer, *answers]]
    if any(a != said[1] for a in said[1:]):
        said = [literal_normalise(a) for a in said]
    found = []
    for left_out in range(len(answers)):
        others = [a for n, a in enumerate(said[1:]) if n != left_out]
        found.append(min(1.0, sum(a == said[0] for a in others) / 3))
    return sum(found) / len(found)


words = st.sampled_from(
    ["red", "The", "a", "two", "TEN", "none", "dont", "couldnt've", "1,000", "3.", ".5", "2.5", "u.s.a.", "x-ray", "it"]
)
texts = st.one_of(st.lists(words, max_size=4).map(" ".join), st.text("ab 1,.-?'\"/\n\t", max_size=8))
answers = st.lists(texts, min_size=1, max_size=3).flatmap(
    lambda few: st.lists(st.sampled_from(few), min_size=10, max_size=10)
)


@given(texts)
@example("1,000 - 2")
@example("." * 40)
def test_normalise_is_the_rules_letter_by_letter(text: str) -> None:
    assert normalise(text) == literal_normalise(text)


@given(texts, answers)
def test_accuracy_is_the_transcription(answer: str, ten: list[str]) -> None:
    for said in (answer, ten[0]):
        assert accuracy(said, ten) == pytest.approx(literal_accuracy(said, ten), abs=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  two dogs.", "2 dogs"),
        ("x-?y?z", "x y z"),  # the space that a hyphen leaves does not count
        ("black/white /x", "blackwhite x"),  # a slash beside a space takes all slashes away
        ("1,000-2", "10002"),  # and so does a comma within a number
        ("u.s.a. 1.5", "usa 1.5"),
        ("somebody'd 'ows'at ow's'at", "somebodyd 'ow's'at 'ow's'at"),
        ("ill shes wed", "ill shes wed"),  # which the evaluator does not spell out
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected
    assert len(CONTRACTIONS) == 114  # of the evaluator's 120, six change nothing


@pytest.mark.parametrize(
    ("answer", "answers", "expected"),
    [
        ("2", ["two"] * 10, 0),  # equal answers are compared as they are: the evaluator's own quirk
        ("2", ["two"] * 9 + ["three"], 1),
        (" two\n", ["two"] * 10, 1),
        ("red", ["red"], 1),
        ("red", ["blue"], 0),
        ("red", ["red", "red"], 1),
        ("red", ["red", "blue"], 0.5),
    ],
)
def test_accuracy_by_hand(answer: str, answers: list[str], expected: float) -> None:
    assert accuracy(answer, answers) == expected


def test_means() -> None:
    kinds = [("colour", "other"), ("colour", "other"), ("count", "number")]
    rows = [
        ("red" if n else "blue", {"answers": ["red"] * 10, "question_type": question, "answer_type": answer})
        for n, (question, answer) in enumerate(kinds)
    ]
    assert dict(means(rows)) == {
        "accuracy": 2 / 3,
        "accuracy/question/colour": 0.5,
        "accuracy/question/count": 1,
        "accuracy/answer/number": 1,
        "accuracy/answer/other": 0.5,
    }
    assert dict(means([("red", {"answers": ["red", "blue"]})])) == {"accuracy": 0.5}
