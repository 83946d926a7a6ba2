"""Result files as the servers of hidden test sets take them: COCO and NoCaps captions, VQA answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kiloword.data.columns import load_json
from kiloword.data.source import info_of
from kiloword.files import write_json
from kiloword.terminal import shown, warn
from kiloword.types import BadSample, Source


def check_results(source: Source, name: str) -> None:
    """Errors: ValueError, before anything is computed, when the first readable row has no official id `name`."""
    for row in range(len(source)):
        with suppress(BadSample):
            official_id(source.name, info_of(source, row), name)
            return


def write_results(
    path: Path, source: Source, name: str, what: str, rows: Iterable[tuple[Mapping[str, Any], str]]
) -> None:
    """Write `[{NAME: id, WHAT: text}, ...]` atomically, in the order of the rows; a note counts rows that are missing.

    Args: name: key of ids in `Record.info`, `image_id` or `question_id`; what: `caption` or `answer`; rows:
    `Record.info` and the text of each row.
    Errors: ValueError for a row without id, and for two of one id.
    """
    texts: dict[int | str, str] = {}
    for info, text in rows:
        one = official_id(source.name, info, name)
        if one in texts:
            raise ValueError(f"{source.name} has two rows with {name} {shown(str(one)[:60])}. Expected one of each.")
        texts[one] = text
    write_json(path, [{name: one, what: text} for one, text in texts.items()])
    if len(texts) < len(source):
        warn(f"{path}: {len(source) - len(texts):,} of {len(source):,} rows have no result; official servers want all.")


def read_results(path: Path, name: str) -> dict[int | str, str]:
    """The captions of a result file by their ids. Errors: ValueError for another file."""
    try:
        return {whole_number(row[name]): str(row["caption"]) for row in load_json(path)}
    except (TypeError, KeyError):
        raise ValueError(f"{path} is no list of results. Expected objects with `{name}` and `caption`.") from None


def whole_number(value: Any) -> Any:
    """The number of a text of digits: distributors of a data set and writers of results differ in it."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def official_id(source: str, info: Mapping[str, Any], name: str) -> int | str:
    """An official id: a whole number, also where a table has its digits; other texts as they are."""
    value = whole_number(info.get(name))
    if not isinstance(value, int | str) or isinstance(value, bool) or value == "":
        raise ValueError(
            f"{source} has no `{name}`, by which result files name a row. Expected json as it is distributed, or a "
            f"table (or the json of tars) with `{name}`."
        )
    return value
