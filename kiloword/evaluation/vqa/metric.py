"""VQA accuracy as the official evaluator counts it, so that numbers compare. Source: arXiv:1505.00468, visualqa.org."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
AGREE = 3  # number of annotators with the same answer that make it right
MOST_PERIODS = 32  # the evaluator hands its flag for Unicode over as this limit
_WORDS = "zero one two three four five six seven eight nine ten"
NUMBERS = {"none": "0", **{word: str(n) for n, word in enumerate(_WORDS.split())}}
ARTICLES = ("a", "an", "the")

# The evaluator writes "(?!<=\d)" before this, which was meant to spare the period of "3." and never does.
_PERIOD = re.compile(r"\.(?!\d)")
_COMMA = re.compile(r"\d,\d")
_WHOLE = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""


def _contractions() -> dict[str, str]:
    """Words that lack one apostrophe, and the words; and one that is the wrong way round in the evaluator's table."""
    table = {
        word[:k] + word[k + 1 :]: word for word in _WHOLE.split() for k, letter in enumerate(word) if letter == "'"
    }
    return {**table, "somebody'd": "somebodyd"}


CONTRACTIONS = _contractions()


@dataclass(frozen=True)
class JudgedAnswer:
    """One question's accuracy, and what kind of question it is, where the data says so."""

    accuracy: float  # in [0, 1]
    question_type: str | None = None
    answer_type: str | None = None


def accuracy(answer: str, answers: Sequence[str]) -> float:
    """How right an answer is, in [0, 1]: the mean over the annotators of min(1, agreeing others / 3).

    The others are all but one annotator, by place in the list: two who say the same are two. Where fewer than four
    answered, so that three others cannot agree, all others must; the answer of a single annotator must be met.

    Args: answer: the model's; answers: one an annotator, as stored (officially ten).
    Raises: ValueError without an annotator's answer.
    """
    if not answers:
        raise ValueError("no annotator's answer came: at least one is needed, officially ten")
    guess, references = _spaced(answer), [_spaced(a) for a in answers]
    if len(set(references)) > 1:  # else the evaluator compares them as they are
        guess, references = normalise(guess), [normalise(a) for a in references]
    agree = [a == guess for a in references]
    if len(agree) == 1:
        return float(agree[0])
    needed = min(AGREE, len(agree) - 1)
    return sum(min(1.0, (sum(agree) - one_agrees) / needed) for one_agrees in agree) / len(agree)


def normalise(answer: str) -> str:
    """An answer as the evaluator compares it where annotators differ: "The  two dogs." -> "2 dogs"."""
    words = [NUMBERS.get(word, word) for word in _unpunctuated(answer).lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def means(judged: Iterable[JudgedAnswer]) -> Iterator[tuple[str, float]]:
    """The mean accuracy over all questions, then by question type and by answer type, in order of their names.

    Names: "accuracy", "accuracy/question/NAME", "accuracy/answer/NAME".
    """
    rows = list(judged)
    groups: dict[str, list[float]] = {}
    for kind in ("question_type", "answer_type"):
        for name in sorted({n for row in rows if (n := getattr(row, kind)) is not None}):
            accuracies = [row.accuracy for row in rows if getattr(row, kind) == name]
            groups[f"accuracy/{kind.removesuffix('_type')}/{name}"] = accuracies
    for name, accuracies in {"accuracy": [row.accuracy for row in rows], **groups}.items():
        yield name, sum(accuracies) / len(accuracies) if accuracies else float("nan")


def _spaced(answer: str) -> str:
    return answer.replace("\n", " ").replace("\t", " ").strip()


def _unpunctuated(answer: str) -> str:
    """A mark beside a space anywhere, or a comma within a number, and all of its kind go; else it becomes a space."""
    out, numbers = answer, _COMMA.search(answer) is not None
    for mark in PUNCTUATION:
        goes = numbers or f"{mark} " in answer or f" {mark}" in answer
        out = out.replace(mark, "" if goes else " ")
    return _PERIOD.sub("", out, count=MOST_PERIODS)
