"""Which columns of a table are read, by their usual names or by the parameters of the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kiloword.data.sources.query import FORM, TableOptions
from kiloword.data.sources.sample import ANSWERS, QUESTION
from kiloword.errors import suggestion
from kiloword.terminal import shown

IMAGE_COLUMNS = ("image", "filepath", "img", "file_name")
LABEL_COLUMNS = ("label", "class", "cls", "fine_label")
CAPTION_COLUMNS = ("captions", "caption", "title")
ANSWER_COLUMNS = (ANSWERS, "answer")
INFO_COLUMNS = ("question_type", "answer_type", "image_id", "question_id", "domain")
SPLIT = "split"


@dataclass(frozen=True)
class TableColumns:
    """Names of the columns that are read."""

    image: str
    texts: dict[str, str]  # column by key: of questions their key in `Record.info`, of captions the column itself
    info: tuple[str, ...] = ()  # columns of other values of `Record.info`
    label: str = ""  # column of labels; "": none

    @property
    def names(self) -> list[str]:
        """The columns of texts and of other values."""
        return list(dict.fromkeys([*self.texts.values(), *self.info, *filter(None, [self.label])]))


def choose(path: Path, names: Sequence[str], options: TableOptions) -> TableColumns:
    """The columns that are read. Errors: ValueError for a missing column, and one that the table has twice."""
    named = [options.image, *options.caption, options.question, options.answer, options.label, *options.info]
    for column in filter(None, [*named, SPLIT if options.split else ""]):
        if column not in names:
            raise ValueError(
                f"{path} has no column {shown(column[:60])!r}; it has {_listed(names)}."
                f"{suggestion(column, names)} Columns are named by {FORM}."
            )
    image, question = options.image or _first(IMAGE_COLUMNS, names), options.question or _first((QUESTION,), names)
    answers, caption = options.answer or _first(ANSWER_COLUMNS, names), _first(CAPTION_COLUMNS, names)
    if (options.caption and (options.question or options.answer)) or (options.answer and not question):
        raise ValueError(
            f"{path}: questions need question=COLUMN, and answer=COLUMN where they have answers, without caption=. It "
            f"has the columns {_listed(names)}."
        )
    info = tuple(dict.fromkeys([*options.info, *(c for c in INFO_COLUMNS if names.count(c) == 1)]))
    if question and (answers or options.question) and not options.caption:
        key = ANSWERS if options.answer else answers
        texts = {QUESTION: question, **({key: answers} if answers else {})}
        columns = TableColumns(image, texts, info)
    else:
        captions = options.caption or ((caption,) if caption else ())
        columns = TableColumns(image, {c: c for c in captions}, info)
    columns = replace(columns, label=options.label or ("" if columns.texts else _first(LABEL_COLUMNS, names)))
    if not image or not (columns.texts or columns.label):
        raise ValueError(
            f"{path} has the columns {_listed(names)}. Expected `image` (or `filepath`) and `caption`, `captions` (or "
            "`title`) in its first line; or `image`, `question` and `answers` (or `answer`); or `image` and `label`. "
            f"Other columns are named by {FORM}."
        )
    check_once(path, names, image, *columns.names)
    return columns


def check_once(path: Path, names: Sequence[str], *columns: str) -> None:
    """Errors: ValueError when a table has two columns of one name."""
    for column in columns:
        if names.count(column) > 1:
            raise ValueError(f"{path} has {names.count(column)} columns named {column}. Expected one.")


def _first(columns: Sequence[str], names: Sequence[str]) -> str:
    """The first of the columns that the table has; "" if it has none."""
    return next((column for column in columns if column in names), "")


def _listed(names: Sequence[str]) -> str:
    return shown(", ".join(names)[:200]) or "none"
