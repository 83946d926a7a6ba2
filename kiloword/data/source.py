"""What a source may have beyond `kiloword.types.Source`, and how it is read where a source lacks it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from kiloword.data.rows import Rows, key_text
from kiloword.data.sample import question_in
from kiloword.types import BadSample, NoCaption, Source


class OptionalMembers(Protocol):
    """Members that a source may have; nothing else of a source is read. No source has all of them."""

    natural: bool  # images may be cropped and mirrored at random; default True
    notes: list[str]  # what a user should know of damaged parts of the data
    classnames: list[str] | None  # of the classes that `Record.label` counts
    labels: NDArray[np.int64]  # [N] class of each row, read without images; -1: none, or several
    templates: list[str] | None  # prompts of the classes, with {c} for a class name
    answers: Sequence[str]  # every answer that a question of the source can have
    remote: bool  # reading a row can need the network; default False

    def key(self, row: int) -> str:
        """`Record.key` without reading the image. Raises BadSample."""

    def captions(self, row: int) -> list[str]:
        """`Record.captions` without reading the image. Raises BadSample."""

    def question(self, row: int) -> str | None:
        """The question of a row without reading the image; None: it has none. Raises BadSample."""

    def info(self, row: int) -> Mapping[str, Any]:
        """`Record.info` without reading the image. Raises BadSample."""

    def remote_file(self, row: int) -> str:
        """The remote file with the image of a row, as `kiloword.data.remote.opened` takes it."""

    def at(self, epoch: int) -> Source:
        """The source of another epoch: as many rows, some of them others."""

    def relevance(self, captions: Sequence[str], rows: Sequence[int]) -> NDArray[np.bool_]:
        """Ground truth [T, I]: which captions are true of the images of which rows. Raises ValueError."""

    def scene(self, row: int) -> Any:
        """What the image of a row shows, a `kiloword.data.scenes.Scene`."""

    def hierarchies(self, row: int) -> list[list[str]]:
        """Chains of captions of a row, from general to specific; default: `RecordInfo.hierarchies`."""

    def image_levels(self) -> Source:
        """The images at several levels of generality, with the `Record.info` that HierarImgs has."""

    def majority(self) -> Mapping[str | None, str]:
        """The most frequent answer by type of question, and under None over all questions."""


class RecordInfo(TypedDict, total=False):
    """Values of `Record.info` that are read; it may hold others."""

    question: str
    answers: list[str]  # one per annotator
    question_type: str | None  # for figures by type
    answer_type: str | None
    image_id: int | str  # official ids, which result files name
    question_id: int | str
    domain: str  # of NoCaps: in, near or out
    hierarchies: list[list[str]]  # chains of captions, from general to specific
    group: str  # shared by the levels of one image
    level: int  # of the image in its group, 0: the most general


def key_of(source: Source, row: int) -> str:
    """A row's key, without reading its image where the source supports that. Raises BadSample."""
    return str(source.key(row)) if hasattr(source, "key") else source.record(row).key


def keys(source: Source) -> list[str | None]:
    """The key of every row; None where only the record has it and cannot be read."""
    if isinstance(source, Rows):
        return [key_text(raw) for raw in source.table.column("key").to_pylist()]

    def key(row: int) -> str | None:
        try:
            return key_of(source, row)
        except BadSample:
            return None

    return [key(row) for row in range(len(source))]


def rows_by_name(source: Source) -> dict[str, int]:
    """The row of every name of an image (see `names_of`); -1 where a shortened name fits several rows."""
    whole = {key: row for row, key in enumerate(keys(source)) if key is not None}
    rows = dict[str, int]()
    for key, row in whole.items():
        for name in names_of(key)[1:]:
            rows[name] = row if rows.get(name, row) == row else -1
    return {**rows, **whole}


def names_of(image: str) -> list[str]:
    """Names of an image or its file, most specific first: whole, without suffix, without folders, without both."""
    path = PurePosixPath(image)
    return list(dict.fromkeys([image, str(path.with_suffix("")), path.name, path.stem]))


def texts_of(source: Source, row: int) -> list[str]:
    """A row's captions or answers, without reading its image where the source supports that. Raises BadSample."""
    return list(source.captions(row) if hasattr(source, "captions") else source.record(row).captions)


def info_of(source: Source, row: int) -> Mapping[str, Any]:
    """A row's `Record.info`, without reading its image where the source supports that. Raises BadSample."""
    if hasattr(source, "info"):
        info: Mapping[str, Any] = source.info(row)
        return info
    try:
        return source.record(row).info
    except NoCaption as error:
        return error.record.info


def question(source: Source, row: int) -> str | None:
    """The question of a row, without reading its image where the source supports that. Raises BadSample."""
    text: str | None = source.question(row) if hasattr(source, "question") else question_in(source.record(row).info)
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
