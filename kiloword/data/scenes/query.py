"""Captions as logic: a query is true or false of a scene, exactly, and one query can follow from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kiloword.data.scenes.world import MOST, SceneRows, Thing

Bools = npt.NDArray[np.bool_]


class Pattern(NamedTuple):
    """Stated attributes of one thing; None: not stated."""

    shape: int | None = None
    colour: int | None = None
    size: int | None = None
    fill: int | None = None
    row: int | None = None
    column: int | None = None


ANY = Pattern()
Relation = Literal["left", "above"]


@dataclass(frozen=True)
class Query:
    """True of a scene that fulfils all its parts.

    things: different things of the scene, in canonical order, so that equal meanings are equal queries.
    relation: the first thing lies in a column left of (a row above) the second's.
    count: the exact number of things in the scene, described or not. background: index.
    """

    things: tuple[Pattern, ...] = ()
    relation: Relation | None = None
    count: int | None = None
    background: int | None = None

    def __post_init__(self) -> None:
        related = 2 if self.relation else 0
        if len(self.things) > MOST:
            raise ValueError(f"a query has at most {MOST} things, this one has {len(self.things)}")
        rest = sorted(self.things[related:], key=lambda pattern: [-1 if v is None else v for v in pattern])
        object.__setattr__(self, "things", (*self.things[:related], *rest))


def stated(thing: Thing, facts: Sequence[str]) -> Pattern:
    """The pattern of a thing that states some of its facts, by name."""
    return Pattern(**{fact: getattr(thing, fact) for fact in facts})


def fits(pattern: Pattern, attributes: Thing | Pattern) -> bool:
    """Whether the attributes have all values that the pattern states."""
    return all(value in (None, actual) for value, actual in zip(pattern, attributes, strict=True))


def truth_table(queries: Sequence[Query], rows: SceneRows) -> Bools:
    """Which queries are true of which scenes: some assignment of different things to the patterns of a query holds.

    Args: T queries; scenes as rows [I, 16] (see `world.to_rows`).
    Returns: bool [T, I].
    """
    place, *facts = rows[:, 1:].reshape(-1, MOST, 5).transpose(2, 1, 0)  # [3, I] each
    line, column, there = place // 3, place % 3, place >= 0
    out = np.zeros((len(queries), len(rows)), np.bool_)
    for holds, query in zip(out, queries, strict=True):
        shown = [
            np.logical_and.reduce(
                [there, *(a == v for a, v in zip((*facts, line, column), p, strict=True) if v is not None)]
            )
            for p in query.things
        ]
        axis = column if query.relation == "left" else line
        for chosen in permutations(range(MOST), len(shown)):
            fit = np.ones(len(rows), np.bool_) if query.relation is None else axis[chosen[0]] < axis[chosen[1]]
            holds |= np.logical_and.reduce([fit, *(thing[which] for thing, which in zip(shown, chosen, strict=True))])
        if query.count is not None:
            holds &= there.sum(0) == query.count
        if query.background is not None:
            holds &= rows[:, 0] == query.background
    return out


def entails(a: Query, b: Query) -> bool:
    """Whether b follows from the statements of a: True is certain, False can be wrong (see `follows`)."""
    if b.background not in (None, a.background):
        return False
    if b.count not in (None, a.count) and not b.count == len(a.things) == MOST:
        return False
    for places in permutations(range(len(a.things)), len(b.things)):
        described = [a.things[place] for place in places]
        if all(map(fits, b.things, described)):
            if b.relation is None or (a.relation == b.relation and places[:2] == (0, 1)):
                return True
            first, second = (thing.column if b.relation == "left" else thing.row for thing in described[:2])
            if first is not None and second is not None and first < second:
                return True
    return False


def follows(a: Query, b: Query) -> bool:
    """Whether b is true of every scene of which a is, by its statements and the number of things that a asks for.

    It is exact for the captions that scenes have. What must hold because places differ, it does not see (what is left
    of the centre is in the left column): only queries written by hand can need that.
    """
    least = max(len(a.things), a.count or 1)
    return entails(replace(a, things=a.things + (ANY,) * (least - len(a.things))), b)
