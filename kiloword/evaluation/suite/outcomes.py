"""The data sets of a suite: where they are below one root, what became of each, and the means of groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kiloword.addresses import is_url
from kiloword.evaluation.suite import Entry, Suite


@dataclass
class Outcome:
    """What became of one data set."""

    entry: Entry
    source: str | None  # SRC; None: at none of its places
    places: list[str]  # where it was looked for
    results: dict[str, dict[str, float]] = field(default_factory=dict)  # model -> metrics
    errors: dict[str, str] = field(default_factory=dict)  # model -> why it has no metrics

    @property
    def state(self) -> str:
        """ "missing", "failed" (for a model or more) or "evaluated"."""
        return "missing" if self.source is None else "failed" if self.errors else "evaluated"

    def values(self) -> dict[str, float]:
        """Model -> the value that counts."""
        return {model: self.entry.value(metrics) for model, metrics in self.results.items()}


@dataclass(frozen=True)
class GroupMean:
    """The mean of a group over the data sets that all models have."""

    group: str
    n: int  # data sets in the mean
    of: int  # data sets in the group
    values: Mapping[str, float]  # model -> mean; empty for n = 0

    @property
    def complete(self) -> bool:
        """Whether the mean is that of the whole group, as the suite's paper defines it."""
        return self.n == self.of


def outcomes(suite: Suite, root: Path, only: Sequence[str] = ()) -> list[Outcome]:
    """The data sets of a suite, located below the root and not evaluated yet.

    Raises: ValueError for a root that is not there, unknown names in `only`, and where nothing is found.
    """
    chosen = suite.selected(only)
    if not root.is_dir():
        raise ValueError(
            f"--data {root}: no such folder. Expected the folder that holds the data sets of {suite.name}."
        )
    every = [_outcome(root, entry, suite.split) for entry in chosen]
    if all(one.source is None for one in every):
        first = every[0]
        names = [str(Path(place).relative_to(root)) for place in first.places[:3]]
        raise ValueError(
            f"--data {root} has none of the {len(every)} data sets of {suite.name}: {first.entry.name}, for example, "
            f"was looked for as {', '.join(names)}, ... (docs/suites.md)."
        )
    return every


def _outcome(root: Path, entry: Entry, default_split: str) -> Outcome:
    """A data set with the files that its options name; without one of them it is missing."""
    options = dict(entry.options)
    for option, names in entry.files.items():
        wanted = [str(root / name) for name in ([names] if isinstance(names, str) else names)]
        existing = next(filter(_exists, wanted), None)
        if existing is None:
            return Outcome(entry, None, wanted)
        options[option] = existing
    chosen = replace(entry, options=options)
    return Outcome(chosen, located(root, entry, default_split), places(root, entry, default_split))


def places(root: Path, entry: Entry, default_split: str) -> list[str]:
    """Where a data set may be, most likely first, without the folder of the split.

    For the name vtab/dtd: `vtab/dtd`, `wds_vtab-dtd` (CLIP_benchmark), `wds_vtab-dtd_test` (DataComp), `wds/vtab/dtd`,
    `wds/wds_vtab-dtd`, `vtab-dtd`. Scenes and URLs stand as they are.
    """
    split, listed = split_of(entry, default_split), dict[str, None]()
    for name in (entry.name, *entry.data):
        flat = name.replace("/", "-")
        forms = (name, f"wds_{flat}", f"wds_{flat}_{split}", f"wds/{name}", f"wds/wds_{flat}", flat)
        listed |= dict.fromkeys([name] if is_elsewhere(name) else [str(root / form) for form in forms])
    return list(listed)


def split_of(entry: Entry, default_split: str) -> str:
    """The split of a data set; "": its place has no folders of splits."""
    return default_split if entry.split is None else entry.split


def is_elsewhere(name: str) -> bool:
    """Whether a name is of data that does not lie below a root: scenes, or a URL."""
    return is_url(name) or re.match(r"scenes([:?]|$)", name) is not None


def located(root: Path, entry: Entry, default_split: str) -> str | None:
    """The SRC of a data set, with the folder of its split where it has one; None: it is at none of its places.

    A place with this folder has precedence over one without.
    """
    split, candidates = split_of(entry, default_split), places(root, entry, default_split)
    if split:
        for place in candidates:
            if not is_elsewhere(place) and (Path(place) / split).is_dir():
                return str(Path(place) / split)
    return next((place for place in candidates if is_elsewhere(place) or _exists(place)), None)


def _exists(place: str) -> bool:
    return Path(place).exists() or Path(place.partition("?")[0]).is_file()  # a file with a query


def averages(suite: Suite, every: Sequence[Outcome], models: Sequence[str]) -> list[GroupMean]:
    """The mean of each group, in the order of the suite; the last is that of all data sets, whichever were chosen."""
    values = {one.entry.name: one.values() for one in every if set(one.results) >= set(models)}
    out = []
    for group, entries in suite.groups().items():
        with_values = [values[entry.name] for entry in entries if entry.name in values]
        n = len(with_values)
        means = {model: sum(one[model] for one in with_values) / n for model in models} if n else {}
        out.append(GroupMean(group, n, len(entries), means))
    return out
