"""`FILE?NAME=VALUE&NAME=VALUE`: parameters of a file that is named as a data set, such as names of columns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from kiloword.data.sources.sample import IMAGE_SUFFIXES
from kiloword.errors import suggestion
from kiloword.terminal import shown

FORM = "FILE?image=COLUMN&caption=COLUMN,COLUMN"
_LIST = "tuple"  # how the type of a parameter with several values begins


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Parameters of a table."""

    image: str = ""  # column of images; "": one of `columns.IMAGE_COLUMNS`
    caption: tuple[str, ...] = ()  # columns of captions
    question: str = ""  # column of questions
    answer: str = ""  # column of answers; with `question` alone, questions have no answers
    label: str = ""  # column of labels; "": one of `columns.LABEL_COLUMNS` in a table without captions and questions
    info: tuple[str, ...] = ()  # columns of other values of `Record.info`
    images: str = ""  # folder of images, see `images_folder`; "": the folder of the table
    split: str = ""  # only rows with this value in the column `split`; "": all


Options = TypeVar("Options", bound=TableOptions)


def split_query(src: str) -> tuple[str, str]:
    """The path and the parameters of a source. A path that exists has none, even if it contains a question mark."""
    places = [place for place, letter in enumerate(src) if letter == "?"]
    if not places or Path(src).expanduser().exists():
        return src, ""
    first = next((place for place in places if Path(src[:place]).expanduser().exists()), places[0])
    return src[:first], src[first + 1 :]


def parse_query(path: str, query: str, kind: type[Options]) -> Options:
    """The parameters of a file. `%26` in a value stands for `&`, `%2C` for a comma within a name, `%25` for `%`.

    Errors: ValueError for an unknown parameter, one without a value, and one that is given twice.
    """
    known, chosen = {field.name: str(field.type) for field in fields(kind)}, dict[str, str | tuple[str, ...]]()
    for item in query.split("&") if query else []:
        name, _, value = item.partition("=")
        if name not in known:
            raise ValueError(
                f"{path} has no parameter {shown(name[:60])!r}; it has {', '.join(known)}, as in {FORM}."
                f"{suggestion(name, known)}"
            )
        if name in chosen:
            raise ValueError(f"{path}: the parameter {name} is given twice.")
        values = tuple(map(unquote, value.split(",")))
        if not all(values):
            raise ValueError(f"{path}: the parameter {name} has an empty value. Expected {name}=VALUE, as in {FORM}.")
        chosen[name] = values if known[name].startswith(_LIST) else unquote(value)
    return kind(**chosen)  # type: ignore[arg-type]


Readers = Mapping[str, tuple[Callable[[str], Any], str]]
"""Options by name: what reads a value, raising ValueError or KeyError, and what is allowed, for messages."""


def read_options(what: str, query: str, readers: Readers) -> dict[str, Any]:
    """Values of the options `NAME=VALUE&...` of data that is named by more than a path.

    Args: what: names the data in messages.
    Raises: ValueError for an unknown option, one that is given twice, and a value that is not allowed.
    """
    options: dict[str, Any] = {}
    for item in query.split("&") if query else []:
        name, _, value = item.partition("=")
        if name not in readers:
            hint = suggestion(name, readers)
            raise ValueError(f"{what} has no option '{shown(name[:60])}'; options: {', '.join(sorted(readers))}.{hint}")
        if name in options:
            raise ValueError(f"{what}: option '{name}' is given twice")
        read, allowed = readers[name]
        try:
            options[name] = read(value)
        except (ValueError, KeyError) as e:
            raise ValueError(f"{what}: {name}={shown(value[:60])}: expected {allowed}") from e
    return options


def image_file(path: Path) -> Path:
    """The path of an image, whose suffix a table may omit."""
    if path.suffix.lower().removeprefix(".") in IMAGE_SUFFIXES or os.path.exists(path):
        return path
    complete = (path.with_name(f"{path.name}.{suffix}") for suffix in IMAGE_SUFFIXES)
    return next((file for file in complete if os.path.exists(file)), path)


def hold_images(folder: Path, names: Iterable[str]) -> bool:
    """Whether a folder holds one of the images."""
    return any(name and os.path.exists(image_file(folder / name)) for name in names)


def no_images(path: Path, first: str, looked: str) -> ValueError:
    """That not one image of a file, such as the first, is where it was looked for."""
    return ValueError(
        f"{path}: none of its images, such as {shown(first[:200])}, is in {looked}. Name their folder: "
        f"{path.name}?images=FOLDER."
    )


def images_folder(path: Path, named: str) -> Path:
    """The folder of a file's images: absolute, beside the file, beside its folder, or in the current folder.

    Args: named: by the parameter `images`; "": the folder of the file.
    Errors: ValueError when there is none of this name.
    """
    if not named:
        return path.parent
    folder = Path(named).expanduser()
    parents = [path.parent, path.absolute().parent.parent, Path()]
    places = [folder] if folder.is_absolute() else [parent / folder for parent in parents]
    existing = next((place for place in places if place.is_dir()), None)
    if existing is None:
        listed = ", ".join(dict.fromkeys(map(str, places)))
        raise ValueError(f"{path}: there is no folder images={shown(named[:200])}. Looked for {listed}.")
    return existing
