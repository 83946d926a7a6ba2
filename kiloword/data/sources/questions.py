"""Questions of samples and their answers: parsing, access and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kiloword.types import BadSample, Record, Source

QUESTION, ANSWERS = "question", "answers"  # keys of `Record.info`


def parse_answers(info: dict[str, Any]) -> list[str] | None:
    """The answers of a sample's JSON, one per annotator, which become `info["answers"]`; None without answers.

    They are in `answers`, a list of strings or of objects with `answer` (as VQAv2's annotations), or in `answer`, a
    string. In a sample with captions a question without answers is ignored.
    Raises: BadSample when a question or an answer is not text, or a question has no answer.
    """
    if info.get(QUESTION) is None:
        return None
    named = next((info.pop(name) for name in (ANSWERS, "answer") if info.get(name) is not None), None)
    if named is None and (info.get("captions") or info.get("caption")):
        return None
    listed = [named] if isinstance(named, str) else named
    if not isinstance(info[QUESTION], str) or not info[QUESTION].strip():
        raise BadSample("the question is not text")
    if not listed:
        raise BadSample("a question without an answer")
    texts = [a.get("answer") if isinstance(a, dict) else a for a in listed] if isinstance(listed, list) else [None]
    answers = [a for a in texts if isinstance(a, str)]
    if len(answers) < len(texts):
        raise BadSample('the answers are not strings (write "3" for 3)')
    if not any(a.strip() for a in answers):
        raise BadSample("a question without an answer")
    info[QUESTION], info[ANSWERS] = info[QUESTION].strip(), answers
    return answers


def question_of(record: Record) -> str | None:
    """The question of a record; None where it has no question, or no answers to it."""
    return question_in(record.info)


def question_in(info: Mapping[str, Any]) -> str | None:
    """The question of a `Record.info`; None where it has no question, or no answers to it."""
    return info.get(QUESTION) if ANSWERS in info else None


def question(source: Source, row: int) -> str | None:
    """The question of a row, without reading its image where the source supports that. Raises BadSample."""
    read = getattr(source, "question", None)
    text: str | None = read(row) if callable(read) else question_of(source.record(row))
    return text


def check_asks(source: Source) -> None:
    """Raises: ValueError when the first readable row has no question."""
    for row in range(len(source)):
        try:
            text = question(source, row)
        except BadSample:
            continue
        if text is None:
            raise ValueError(
                f"{source.name} has no questions: expected a question and its answers for every image, such as "
                "scenes:train?task=vqa, tars whose json holds `question` and `answers`, or a table with these columns."
            )
        return


def majority(pairs: Iterable[tuple[str | None, str]]) -> Mapping[str | None, str]:
    """The most frequent answer by question type, and under None over all questions; the first of equal ones.

    Args: pairs: (question type, answer), one per question.
    """
    counts: dict[str | None, dict[str, int]] = {None: {}}
    for kind, answer in pairs:
        for group in {None, kind}:
            totals = counts.setdefault(group, {})
            totals[answer] = totals.get(answer, 0) + 1
    return {kind: max(sorted(totals), key=totals.__getitem__) for kind, totals in counts.items() if totals}
