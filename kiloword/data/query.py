"""`FILE?NAME=VALUE&NAME=VALUE`: options of data that is named by more than a path, such as names of columns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from kiloword.errors import suggestion
from kiloword.terminal import shown

FORM = "FILE?image=COLUMN&caption=COLUMN,COLUMN"


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of a table."""

    image: str = ""  # column of images; "": one of `tables.IMAGE_COLUMNS`
    caption: tuple[str, ...] = ()  # columns of captions
    question: str = ""  # column of questions
    answer: str = ""  # column of answers; with `question` alone, questions have no answers
    label: str = ""  # column of labels; "": one of `tables.LABEL_COLUMNS` in a table without captions and questions
    info: tuple[str, ...] = ()  # columns of other values of `Record.info`
    images: str = ""  # folder of images, see `tables.images_folder`; "": the folder of the table
    split: str = ""  # only rows with this value in the column `split`; "": all
    annotations: str = ""  # file of the answers to a json of questions


Readers = Mapping[str, tuple[Callable[[str], Any], str]]
"""Options by name: what reads a value, raising ValueError or KeyError, and what is allowed, for messages."""


def split_query(src: str) -> tuple[str, str]:
    """The path and the options of a source. A path that exists has none, even if it contains a question mark."""
    ends = [place for place, letter in enumerate(src) if letter == "?"]
    there = (end for end in [len(src), *ends] if os.path.exists(os.path.expanduser(src[:end])))
    end = next(there, ends[0] if ends else len(src))
    return src[:end], src[end + 1 :]


def read_options(what: str, query: str, readers: Readers) -> dict[str, Any]:
    """Values of the options `NAME=VALUE&...`.

    Args: what: names the data in messages.
    Raises: ValueError for an unknown option, one that is given twice, and a value that is not allowed.
    """
    options: dict[str, Any] = {}
    for item in query.split("&") if query else []:
        name, _, value = item.partition("=")
        if name not in readers:
            raise ValueError(
                f"{what} has no option {shown(name[:60])!r}; it has {', '.join(readers)}.{suggestion(name, readers)}"
            )
        if name in options:
            raise ValueError(f"{what}: option {name!r} is given twice")
        read, allowed = readers[name]
        try:
            options[name] = read(value)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{what}: {name}={shown(value[:60])}: expected {allowed}") from error
    return options


def levels_of(value: str) -> dict[int, float]:
    """Levels with or without weights, "0:1,3:2" or "0,3". Raises: ValueError."""
    parts = [item.partition(":") for item in value.split(",")]
    levels = {int(level): float(weight or 1) for level, _, weight in parts}
    if min(levels) < 0 or not any(levels.values()) or not all(0 <= weight <= 1e6 for weight in levels.values()):
        raise ValueError(value)
    return levels


def within(allowed: range) -> Callable[[str], int]:
    """Reads whole numbers of a range."""
    return lambda value: allowed[allowed.index(int(value))]


def parse_query(path: str, query: str) -> TableOptions:
    """The options of a table. `%26` in a value stands for `&`, `%2C` for a comma within a name, `%25` for `%`.

    Errors: as of `read_options`; ValueError for an empty value.
    """

    def one(value: str) -> str:
        if not value:
            raise ValueError(value)
        return unquote(value)

    def several(value: str) -> tuple[str, ...]:
        return tuple(map(one, value.split(",")))

    kinds = {name: one if value == "" else several for name, value in vars(TableOptions()).items()}
    return TableOptions(**read_options(path, query, {n: (k, f"a value, as in {FORM}") for n, k in kinds.items()}))
