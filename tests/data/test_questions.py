"""Questions: on scenes against an oracle that reads the words, from disk, and on their way into a batch."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kiloword.config.recipes import AugmentConfig, DataConfig, TextConfig
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.reading import captions_of
from kiloword.data.sampler import Order
from kiloword.data.scenes.source import SceneQuestions, open_scenes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import Batch, Source
from sources import decoded
from tars import photo, write_tar

NOUNS = "object|shape|thing"
SHAPES = "circle|square|triangle|diamond|star|heart|cross|moon"
COLOURS = "red|orange|yellow|green|cyan|blue|purple|pink"
PLURAL = re.compile(rf"\b({SHAPES}|{NOUNS})(?:e?s)\b")
KIND = rf"(?:(?P<size>small|large) )?(?:(?P<fill>solid|striped|hollow) )?(?:(?P<colour>{COLOURS}) )?"
WHERE = r"(?: in the (?P<place>(?:top|middle|bottom) (?:left|centre|right)|centre))?"
THE = re.compile(rf"^the {KIND}(?P<shape>{SHAPES}|{NOUNS}){WHERE}$")
A = re.compile(rf"^(?:an? )?{KIND}(?P<shape>{SHAPES}|{NOUNS})$")
WORD_COUNTS = {"one": 1, "two": 2, "three": 3}


def where(thing: dict[str, str]) -> str:
    words = f"{thing['row']} {thing['column']}"
    return "centre" if words == "middle centre" else words


def fitting(words: str, things: Sequence[dict[str, str]], form: re.Pattern[str]) -> list[dict[str, str]]:
    said = form.match(words)
    assert said, words
    facts = {k: v for k, v in said.groupdict().items() if v and v not in NOUNS.split("|")}
    return [t for t in things if all((where(t) if k == "place" else t[k]) == v for k, v in facts.items())]


def the(words: str, things: Sequence[dict[str, str]]) -> dict[str, str]:
    """The one thing that a definite description names."""
    found = fitting(words, things, THE)
    assert len(found) == 1, (words, things)
    return found[0]


def oracle(question: str, scene: dict[str, Any]) -> str:
    """The answer, from the words of the question and of the scene alone."""
    things, q = scene["objects"], question.removesuffix("?")
    if "background" in q:
        return str(scene["background"])
    for kind in ("colour", "shape", "size"):
        if found := re.match(rf"what {kind} is (.*)|which {kind} does (.*) have", q):
            return the(found[1] or found[2], things)[kind]
    if found := re.match(r"how is (.*) filled|which fill does (.*) have", q):
        return the(found[1] or found[2], things)["fill"]
    if found := re.match(r"(?:where is|in which part of the picture is) (.*)", q):
        return where(the(found[1], things))
    if found := re.match(r"how many (.*) (?:are there|does the picture show)", q):
        return str(len(fitting(PLURAL.sub(r"\1", found[1]), things, A)))
    if found := re.match(rf"(?:is|are) there exactly (one|two|three) (?:{NOUNS})s?", q):
        return "yes" if WORD_COUNTS[found[1]] == len(things) else "no"
    if found := re.match(r"(?:is there|does the picture show) (.*)", q):
        return "yes" if fitting(found[1], things, A) else "no"
    if found := re.match(r"is (.*) (left of|right of|above|below) (.*)", q):
        return related(the(found[1], things), found[2], the(found[3], things))
    found = re.match(r"is (.*) (\w+)", q)
    assert found, question
    return "yes" if found[2] in the(found[1], things).values() else "no"


def related(a: dict[str, str], words: str, b: dict[str, str]) -> str:
    axis, order = ("column", "left centre right") if "of" in words else ("row", "top middle bottom")
    before = order.index(a[axis]) - order.index(b[axis])
    return "yes" if (before < 0 if words in ("left of", "above") else before > 0) else "no"


@pytest.mark.parametrize("src", ["scenes:train?task=vqa", "scenes:test?task=vqa", "scenes:test?task=vqa&hard=shape"])
def test_answers_are_those_of_an_oracle_that_reads_the_question(src: str) -> None:
    source = open_source(src, 32)
    found = [source.record(row) for row in range(300)]
    for r in found:
        assert r.captions == r.info["answers"] == [oracle(r.info["question"], r.info["scene"])], r.info
        assert r.captions[0] in SceneQuestions.answers
    kinds = Counter(r.info["question_type"] for r in found)
    assert kinds.keys() == {"colour", "shape", "size", "fill", "place", "background", "count", "yes/no"}
    assert {r.info["answer_type"] for r in found} == {"yes/no", "number", "other"}


def test_questions_are_frozen_and_captions_are_as_before() -> None:
    assert open_source("scenes").fingerprint == "scenes-v1-5d536c354736738c"
    source = open_scenes("scenes:train?task=vqa")
    assert source.fingerprint == "questions-v1-3c1524440e58e11b"
    said = "\n".join(f"{q.words} {q.answer}" for q in map(source.asked, range(300)))
    assert hashlib.blake2b(said.encode(), digest_size=8).hexdigest() == "f58a540dd953ec4d"
    single, other = (open_scenes(f"scenes:{split}?task=vqa&objects=1&n=9").majority() for split in ("train", "test"))
    assert single == other, "of the train split, whatever is evaluated"


def asks(**more: Any) -> bytes:
    return json.dumps({"question": "is it red?", **more}).encode()


TEXT = TextConfig(context=24, vocab=400)


def loader_of(source: Source, batch: int = 8, questions: bool = True, **more: Any) -> Loader:
    tokenizer = Tokenizer.train(captions_of(source), 400)
    order = Order(len(source), batch, 0)
    return Loader(source, order, DataConfig(), TEXT, 32, tokenizer, questions=questions, **more)


def test_a_batch_carries_one_question_a_image() -> None:
    source = open_source("scenes:train?task=vqa&n=64", 32)
    loader = loader_of(source)
    batch = loader.batch(1)
    assert batch.questions is not None
    rows = loader.order.batch_rows(1)[1].tolist()
    asked = decoded(loader.tokenizer, batch.questions)
    assert asked == [source.record(row).info["question"] for row in rows]
    assert decoded(loader.tokenizer, batch.texts) == [source.record(row).captions[0] for row in rows]
    halves: list[Batch] = batch.split(2)
    assert [question for half in halves for question in decoded(loader.tokenizer, half.questions)] == asked
    assert loader_of(source, questions=False).batch(1).questions is None


def test_answers_take_turns_over_the_epochs_and_keep_their_words(tmp_path: Path) -> None:
    answers = ["deep blue", "dark sea green", "a b c d e f"]
    members = [m for k in range(4) for m in ((f"{k}.png", photo(k)), (f"{k}.json", asks(answers=answers)))]
    source = open_source(str(write_tar(tmp_path / "0.tar", members)))
    loader = loader_of(source, 4)
    loader.data = DataConfig(augment=AugmentConfig(drop_words=0.9))
    drawn = Counter(answer for epoch in range(3) for answer in decoded(loader.tokenizer, loader.batch(epoch).texts))
    assert drawn == dict.fromkeys(answers, 4)


def test_rows_without_questions_are_skipped(tmp_path: Path) -> None:
    members = [m for k in range(3) for m in ((f"{k}.png", photo(k)), (f"{k}.json", asks(answer="yes")))]
    members += [("3.png", photo(3)), ("3.txt", b"a caption")]
    loader = loader_of(open_source(str(write_tar(tmp_path / "0.tar", members))), 4)
    batch = loader.batch(0)
    assert {s.reason for s in batch.skipped} == {"no question with an answer"}
    assert batch.questions is not None
    assert len(batch.questions) == 4
