"""Read levels of generality from a data set: chains of captions, and images of several levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kiloword.types import BadSample, Source


@dataclass
class Chains:
    """Chains of L texts from general (level 0) to specific, each written for one of I images."""

    texts: list[str]  # N unique texts, in the order of first occurrence
    places: Tensor  # [C, L] int64, indices into texts
    image: Tensor  # [C] int64, ascending
    rows: list[int]  # I rows of the source

    def of(self, image: int) -> list[list[int]]:
        """The chains of one image, as indices into the texts."""
        chains: list[list[int]] = self.places[self.image == image].tolist()
        return chains

    def levels(self) -> Tensor:
        """Levels of each text, [N, L] bool."""
        at = torch.zeros(len(self.texts), self.places.shape[1], dtype=torch.bool)
        at[self.places, torch.arange(self.places.shape[1])] = True
        return at


def gather(chains: Sequence[tuple[int, list[list[str]]]]) -> Chains:
    """Chains of images, each as (row, chains)."""
    index: dict[str, int] = {}
    places = [[index.setdefault(t, len(index)) for t in chain] for _, image_chains in chains for chain in image_chains]
    image = [i for i, (_, image_chains) in enumerate(chains) for _ in image_chains]
    return Chains(list(index), torch.tensor(places), torch.tensor(image), [row for row, _ in chains])


@dataclass
class SourceLevels:
    """Levels read from the rows of a source."""

    chains: dict[int, list[list[str]]]  # by row
    problems: dict[int, str]  # by row: why its chains cannot be used
    groups: dict[str, dict[int, int]]  # of images of several levels: group -> level -> row


def read(source: Source) -> SourceLevels:
    """Chains and levels of every readable row, from the source's `hierarchies(row)`, else from its json.

    The json has `hierarchies` (lists of texts, general to specific) or `group` and `level` (a name that the levels of
    one image share, and a number from 0, the most general). All chains have as many texts as the first.
    """
    stored, length = SourceLevels({}, {}, {}), None
    for row, info in _infos(source):
        if "hierarchies" in info:
            try:
                stored.chains[row] = _checked(info["hierarchies"], length)
                length = len(stored.chains[row][0])
            except BadSample as error:
                stored.problems[row] = str(error)
        level, group = info.get("level"), info.get("group")
        if isinstance(level, int) and isinstance(group, str):
            stored.groups.setdefault(group, {})[level] = row
    return stored


def _infos(source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    hierarchies = getattr(source, "hierarchies", None)
    for row in range(len(source)):
        try:
            yield row, {"hierarchies": hierarchies(row)} if hierarchies is not None else source.record(row).info
        except BadSample:  # reported when the images are encoded
            continue


def _checked(hierarchies: Any, length: int | None) -> list[list[str]]:
    """Validate the chains of one row. Raises: BadSample with the reason."""
    if not (isinstance(hierarchies, list) and hierarchies and all(isinstance(chain, list) for chain in hierarchies)):
        raise BadSample("hierarchies is not a list of chains")
    chains = [[text.strip() if isinstance(text, str) else "" for text in chain] for chain in hierarchies]
    if not all(map(all, chains)):
        raise BadSample("a chain of hierarchies has an entry that is not a text")
    length = len(chains[0]) if length is None else length
    if length < 2 or any(len(chain) != length for chain in chains):
        raise BadSample(
            f"a chain of {' and '.join(str(len(chain)) for chain in chains)} texts, {max(length, 2)} expected"
        )
    return chains


def complete(groups: dict[str, dict[int, int]]) -> Tensor:
    """Rows of the groups that have all levels, general to specific: [G, L]; G 0 where there are none."""
    levels = max((max(group) + 1 for group in groups.values()), default=0)
    whole = [[group[level] for level in range(levels)] for group in groups.values() if len(group) == levels]
    return torch.tensor(whole, dtype=torch.int64).view(-1, levels)
