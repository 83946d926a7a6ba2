"""Questions: VQAv2's questions json with its annotations json (visualqa.org)."""

from __future__ import annotations

from pathlib import Path
from sys import intern
from typing import Any

import pyarrow as pa

from kiloword.data.sources.layouts.objects import Id, Objects, column, load_json, objects, value, values
from kiloword.terminal import shown

_TEST = "-dev"  # test-dev2015 is a part of the images of test2015


def vqa(path: Path, data: dict[str, Any], annotations: Path | None) -> tuple[pa.Table, str]:
    """Questions in the order of the file, with all answers where there are annotations.

    Returns: the table, and the name of the subset of COCO (`val2014`), by which images are named.
    """
    questions = objects(path, data, "questions")
    ids = values(path, questions, "questions", "question_id", int, str)
    images = values(path, questions, "questions", "image_id", int, str)
    subset = str(data.get("data_subtype", "")).replace(_TEST, "")
    columns: dict[str, list[Any]] = {
        "image": [_file(subset, image) for image in images],
        "question": values(path, questions, "questions", "question", str),
        "question_id": ids,
        "image_id": images,
    }
    if annotations is not None:
        columns |= _answers(annotations, ids)
    return pa.table({name: column(cells) for name, cells in columns.items()}), subset


def _file(subset: str, image: Id) -> str:
    """The name of an image of COCO; other data name images by their files."""
    return f"COCO_{subset}_{image:012d}.jpg" if isinstance(image, int) and subset else str(image)


def _answers(path: Path, ids: list[Id]) -> dict[str, list[Any]]:
    """The columns of answers to the questions with these ids."""
    data = load_json(path, _short)
    if not isinstance(data, dict):
        raise ValueError(f"{path} is a list. Expected an object with `annotations`.")
    rows = objects(path, data, "annotations")
    by_id = dict(zip(values(path, rows, "annotations", "question_id", int, str), range(len(rows)), strict=True))
    missing = next((one for one in ids if one not in by_id), None)
    if missing is not None:
        raise ValueError(f"{path} has no answers to the question {shown(str(missing)[:60])}: is it of other questions?")
    kinds = [kind for kind in ("question_type", "answer_type") if any(kind in row for row in rows)]
    ordered = [rows[by_id[one]] for one in ids]
    return {
        "answers": _texts(path, ordered),
        **{kind: values(path, ordered, "annotations", kind, str) for kind in kinds},
    }


def _short(row: dict[str, Any]) -> Any:
    """An answer as its text alone, of which there are few: the file of VQAv2's training questions has 4.4 million."""
    answer = row.get("answer")
    return intern(answer) if isinstance(answer, str) and "question_id" not in row else row


def _texts(path: Path, rows: Objects) -> list[list[str]]:
    answers = []
    for n, row in enumerate(rows):
        of_question = value(path, row, "answers", (list,), f"annotations[{n}]")
        if not all(isinstance(answer, str) for answer in of_question):
            raise ValueError(f"{path}: annotations[{n}].answers holds an object without the key `answer`.")
        answers.append(of_question)
    return answers
