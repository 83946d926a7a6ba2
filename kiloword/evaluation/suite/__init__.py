"""Suites: lists of data sets, each with its task, options and the metric that counts. No torch: help is instant.

A suite is a TOML file, one of those in this folder or a user's own; `docs/evaluation.md` describes the keys.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kiloword.addresses import is_url
from kiloword.config.settings import BaseSettings, parse
from kiloword.errors import suggestion
from kiloword.evaluation import find

FOLDER = Path(__file__).parent
AVERAGE = "average"  # the group of all data sets
LISTED = ("classnames", "templates")  # options that take a list of texts in place of the name of a file
_NAME = re.compile(r"[A-Za-z0-9][\w.+ -]*", re.ASCII)  # names of data sets become names of files


@dataclass(frozen=True, kw_only=True)
class Entry(BaseSettings):
    """One data set of a suite."""

    name: str
    task: str  # one of `kiloword.evaluation.NAMES`
    metric: str | tuple[str, ...]  # the metric that counts; of several, their mean
    # folders or files to look for below the root, before `name`; scenes and URLs as they are
    data: tuple[str, ...] = ()
    split: str | None = None  # folder of the split within; None: the suite's
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task
    files: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)  # options that name files below the root
    groups: tuple[str, ...] = ()  # whose averages it counts in, besides that of all
    note: str = ""

    def task_options(self) -> Any:
        """The options as the task takes them. Raises: ValueError for an unknown task or option, or a wrong type."""
        task = find(self.task)
        task.options_from({**self.options, **self.files})
        lists = {name: self.options[name] for name in LISTED if isinstance(self.options.get(name), list)}
        return replace(parse(dict(self.options) | dict.fromkeys(lists, ""), task.options), **lists)

    def places(self, root: Path) -> list[str]:
        """Where the data set may be, most likely first, without the folder of the split; scenes and URLs as they are.

        Of `data` before the name. For vtab/dtd: `vtab/dtd`, `wds_vtab-dtd` (CLIP_benchmark), `wds_vtab-dtd_test`
        (DataComp), `wds/vtab/dtd`, `wds/wds_vtab-dtd`, `vtab-dtd`.
        """
        listed = list[str]()
        for name in (*self.data, self.name):
            flat = name.replace("/", "-")
            forms = (name, f"wds_{flat}", f"wds_{flat}_{self.split}", f"wds/{name}", f"wds/wds_{flat}", flat)
            listed += [name] if _is_elsewhere(name) else [str(root / form) for form in forms]
        return list(dict.fromkeys(listed))

    def located(self, root: Path) -> str | None:
        """The SRC; a place that has the folder of the split has precedence. None: it is at none of its places."""
        places = self.places(root)
        splits = [Path(place) / self.split for place in places if self.split and not _is_elsewhere(place)]
        found = [str(path) for path in splits if path.is_dir()]
        return next(iter(found + [place for place in places if _is_elsewhere(place) or exists(place)]), None)


@dataclass(frozen=True, kw_only=True)
class Suite(BaseSettings):
    """A suite as its file declares it."""

    title: str = ""
    source: str = ""  # paper and table
    split: str = "test"  # of data sets that name none
    dataset: tuple[Entry, ...]
    name: str = ""  # of the file

    def groups(self) -> dict[str, list[Entry]]:
        """Group -> its data sets, in the order of the file; the last is `AVERAGE`, of all."""
        names = dict.fromkeys(group for entry in self.dataset for group in entry.groups)
        groups = {name: [entry for entry in self.dataset if name in entry.groups] for name in names}
        return {**groups, AVERAGE: list(self.dataset)}

    def selected(self, only: Sequence[str]) -> list[Entry]:
        """Data sets by name or group; all where nothing is named. Raises: ValueError for an unknown name."""
        known = {entry.name: [entry] for entry in self.dataset} | self.groups()
        for name in only:
            if name not in known:
                hint = suggestion(name, known)
                raise ValueError(f"--only {name}: {self.name} has no such data set or group: {', '.join(known)}.{hint}")
        chosen = {entry.name for name in only or (AVERAGE,) for entry in known[name]}
        return [entry for entry in self.dataset if entry.name in chosen]


def names() -> list[str]:
    """The suites of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_suite(name: str) -> Suite:
    """A suite of this package by name, or a user's by the path of its TOML file.

    Raises: ValueError for an unknown suite, and for a file that is not one: what is wrong in which data set.
    """
    path = FOLDER / f"{name}.toml" if name in names() else Path(name).expanduser()
    if not path.is_file():
        known = ", ".join(names())
        raise ValueError(f"unknown suite {name!r}: expected {known}, or a TOML file.{suggestion(name, names())}")
    try:
        suite = parse(tomllib.loads(path.read_text("utf-8")), Suite)
        sets = suite.dataset
        taken = [AVERAGE, *{group for entry in sets for group in entry.groups}, *(entry.name for entry in sets)]
        if not sets or len(set(taken)) < len(taken):
            twice = next((name for name in taken if taken.count(name) > 1), None)
            what = "it has no data sets" if twice is None else f"two data sets or groups are named {twice!r}"
            raise ValueError(f"{what}: expected one [[dataset]] or more, each with a name of its own.")
        for entry in sets:
            if not _NAME.fullmatch(entry.name) or not entry.metric:
                raise ValueError(f"{entry.name!r} needs a metric, and a name of letters, digits, spaces and _ . + -")
            entry.task_options()
    except ValueError as error:
        raise ValueError(f"{path} is no suite: {error}") from error
    dataset = tuple(replace(entry, split=suite.split) if entry.split is None else entry for entry in sets)
    return replace(suite, name=path.stem, dataset=dataset)


def exists(place: str) -> bool:
    """Whether there is a folder or a file, also where it has a query."""
    return Path(place).exists() or Path(place.partition("?")[0]).is_file()


def _is_elsewhere(name: str) -> bool:
    """Whether a name is of data that does not lie below a root: scenes, or a URL."""
    return is_url(name) or re.match(r"scenes([:?]|$)", name) is not None
