"""What a source may have beyond `kiloword.types.Source`, and how it is read where a source lacks it:

    natural, remote   images may be cropped and mirrored at random (default True); reading a row can need the network
    notes             what a user should know of damaged parts of the data
    classnames, templates, labels     names of the classes of `Record.label`; prompts, {c} for a name; [N] int64 class
                      of each row, -1: none, or several
    key(row), captions(row), info(row)     as in the `Record`, without reading the image. Raise BadSample
    at(epoch)         the source of another epoch: as many rows, some of them others
    remote_file(row)  the file with the image of a row of remote data
    relevance(captions, rows)     ground truth [T, I]: which captions are true of the images of which rows
    scene(row), hierarchies(row)  what the image shows; chains of captions, from general to specific
    image_levels()    the images at several levels of generality, with the info that HierarImgs has
    answers, majority()     every answer to a question; the most frequent one by type of question, None: over all

`Record.info` may have: question, answers, question_type, answer_type; image_id, question_id, which result files name;
domain of NoCaps (in, near, out); hierarchies as above; group and level (0: the most general) of the levels of an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from kiloword.data.rows import Rows, key_text
from kiloword.data.sample import question_in
from kiloword.types import BadSample, NoCaption, Source


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


def check_asks(source: Source) -> None:
    """Raises: ValueError when the first readable row has no question."""
    for row in range(len(source)):
        try:
            text = question_in(info_of(source, row))
        except BadSample:
            continue
        if text is None:
            raise ValueError(
                f"{source.name} has no questions: expected a question and its answers for every image, such as "
                "scenes:train?task=vqa, tars whose json holds `question` and `answers`, or a table with these columns."
            )
        return
