"""Questions of samples and their answers: how they are stored, and what is asked of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kiloword.types import BadSample, Record, Source

QUESTION, ANSWERS = "question", "answers"  # keys of `Record.info`


def parse_answers(info: dict[str, Any]) -> list[str] | None:
    """The answers of a sample's json, one an annotator, which become `info["answers"]`; None where there are none.

    They are named by `answers`, a list of strings or of objects with `answer` (as VQAv2's annotations), or by `answer`,
    a string. Beside captions a question without answers is no question of this kind.
    Raises: BadSample when a question or an answer is no text, or there is a question and no answer.
    """
    if info.get(QUESTION) is None:
        return None
    named = next((info.pop(name) for name in (ANSWERS, "answer") if info.get(name) is not None), None)
    if named is None and (info.get("captions") or info.get("caption")):
        return None
    listed = [named] if isinstance(named, str) else named
    if not isinstance(info[QUESTION], str) or not info[QUESTION].strip():
        raise BadSample("the question is no text")
    if not listed:
        raise BadSample("a question without an answer")
    found = [a.get("answer") if isinstance(a, dict) else a for a in listed] if isinstance(listed, list) else [None]
    answers = [a for a in found if isinstance(a, str)]
    if len(answers) < len(found):
        raise BadSample('the answers are not strings (write "3" for 3)')
    if not any(a.strip() for a in answers):
        raise BadSample("a question without an answer")
    info[QUESTION], info[ANSWERS] = info[QUESTION].strip(), answers
    return answers


def question_of(record: Record) -> str | None:
    """What the record asks; None where it has no question, or no answers to it."""
    return question_in(record.info)


def question_in(info: Mapping[str, Any]) -> str | None:
    """What `Record.info` asks; None where it has no question, or no answers to it."""
    return info.get(QUESTION) if ANSWERS in info else None


def question(source: Source, row: int) -> str | None:
    """What a row asks, without its image where the source can tell. Raises BadSample."""
    read = getattr(source, "question", None)
    found: str | None = read(row) if callable(read) else question_of(source.record(row))
    return found


def check_asks(source: Source) -> None:
    """Raises: ValueError when the first readable row has no question."""
    for row in range(len(source)):
        try:
            asked = question(source, row)
        except BadSample:
            continue
        if asked is None:
            raise ValueError(
                f"{source.name} asks no questions: expected a question and its answers beside every image, such as "
                "scenes:train?task=vqa, tars whose json holds `question` and `answers`, or a table with these columns."
            )
        return


def majority(pairs: Iterable[tuple[str | None, str]]) -> Mapping[str | None, str]:
    """The most frequent answer by question type, and over all questions under None; of equally frequent ones the first.

    Args: question type and answer, one pair a question.
    """
    counts: dict[str | None, dict[str, int]] = {None: {}}
    for kind, answer in pairs:
        for group in {None, kind}:
            found = counts.setdefault(group, {})
            found[answer] = found.get(answer, 0) + 1
    return {kind: max(sorted(found), key=found.__getitem__) for kind, found in counts.items() if found}
