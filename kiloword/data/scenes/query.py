"""Captions as logic: a query is true or false of a scene, exactly, and one query can follow from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kiloword.data.scenes.world import MOST, Scene, SceneRows, Thing, to_rows

Bools = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.int32]


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
        if not related <= len(self.things) <= MOST:
            raise ValueError(f"a query has {related} to {MOST} things, this one has {len(self.things)}")
        if self.count not in (None, 1, 2, 3):
            raise ValueError(f"a query counts 1 to {MOST} things, this one {self.count}")
        rest = sorted(self.things[related:], key=lambda pattern: [-1 if v is None else v for v in pattern])
        object.__setattr__(self, "things", (*self.things[:related], *rest))


def stated(thing: Thing, facts: Sequence[str]) -> Pattern:
    """The pattern of a thing that states some of its facts, by name."""
    return Pattern(**{fact: getattr(thing, fact) for fact in facts})


def fits(pattern: Pattern, attributes: Thing | Pattern) -> bool:
    """Whether the attributes have all values that the pattern states."""
    return all(value in (None, actual) for value, actual in zip(pattern, attributes, strict=True))


def matches(query: Query, scene: Scene) -> bool:
    """Whether the query is true of the scene: some assignment of different things to its patterns holds."""
    return bool(truth_table([query], to_rows([scene]))[0, 0])


_OFFSETS = (0, 8, 16, 18, 21, 24)  # first bit of shape, colour, size, fill, row, column
_EXISTS = 1 << 27


def truth_table(queries: Sequence[Query], rows: SceneRows) -> Bools:
    """Which queries are true of which scenes.

    Args: T queries; scenes as rows [I, 16] (see `world.to_rows`).
    Returns: bool [T, I], the same as `matches` pair by pair.
    """
    out = np.empty((len(queries), len(rows)), np.bool_)
    things, counts = _thing_bits(rows), (rows[:, 1::5] >= 0).sum(1)
    columns, lines = (axis.T for axis in (rows[:, 1::5] % 3, rows[:, 1::5] // 3))  # [3, I]
    ordered = {"left": columns[:, None] < columns, "above": lines[:, None] < lines}  # [3, 3, I]: a before b
    kinds: dict[tuple[int, Relation | None], list[int]] = {}
    for t, q in enumerate(queries):
        kinds.setdefault((len(q.things), q.relation), []).append(t)
    for (n, relation), index in kinds.items():
        for k in range(0, len(index), 128):  # few enough to stay in the processor's cache
            part = index[k : k + 128]
            masks = np.array([[_mask(p) for p in queries[t].things] for t in part], np.int32).reshape(len(part), n)
            out[part] = _assignable(masks, things, ordered[relation] if relation else None)
    _restrict(out, [q.count for q in queries], counts)
    _restrict(out, [q.background for q in queries], rows[:, 0])
    return out


def _thing_bits(rows: SceneRows) -> Bits:
    """One bit for every attribute's value, [3, I]; 0 for an absent thing."""
    place, *facts = rows[:, 1:].reshape(-1, MOST, 5).astype(np.int32).transpose(2, 0, 1)
    attributes = (*facts, place // 3, place % 3)
    bits = np.full(place.shape, _EXISTS, np.int32)
    for offset, value in zip(_OFFSETS, attributes, strict=True):
        bits |= np.int32(1) << (offset + np.maximum(value, 0))
    return np.ascontiguousarray(np.where(place < 0, 0, bits).T, np.int32)


def _mask(pattern: Pattern) -> int:
    return _EXISTS + sum(1 << (o + value) for o, value in zip(_OFFSETS, pattern, strict=True) if value is not None)


def _assignable(masks: Bits, things: Bits, ordered: Bools | None) -> Bools:
    """Whether different things fit all masks [t, n], [t, I]; the first two in order, if `ordered`."""
    t, n = masks.shape
    if n == 0:
        return np.ones((t, things.shape[1]), np.bool_)
    fits = [[(things[o] & masks[:, p, None]) == masks[:, p, None] for o in range(MOST)] for p in range(n)]
    holds = np.zeros((t, things.shape[1]), np.bool_)
    for chosen in permutations(range(MOST), n):
        ok = fits[0][chosen[0]]
        for p in range(1, n):
            ok = ok & fits[p][chosen[p]]
        holds |= ok if ordered is None else ok & ordered[chosen[0], chosen[1]]
    return holds


def _restrict(out: Bools, stated: list[int | None], actual: npt.NDArray[np.integer]) -> None:
    """Set [T, I] to False where a stated number differs from the actual one [I]."""
    for value in {v for v in stated if v is not None}:
        index = [t for t, v in enumerate(stated) if v == value]
        out[index] &= actual == value


def entails(a: Query, b: Query) -> bool:
    """Whether b follows from the statements of a: True is certain, False can be wrong (see `follows`)."""
    if b.background not in (None, a.background):
        return False
    if b.count not in (None, a.count) and not b.count == len(a.things) == MOST:
        return False
    return any(_covers(a, b, places) for places in permutations(range(len(a.things)), len(b.things)))


def _covers(a: Query, b: Query, places: Sequence[int]) -> bool:
    """Whether a states of its things at these places all that b states of its things."""
    described = [a.things[place] for place in places]
    if not all(map(fits, b.things, described)):
        return False
    if b.relation is None or (a.relation == b.relation and tuple(places[:2]) == (0, 1)):
        return True
    first, second = (thing.column if b.relation == "left" else thing.row for thing in described[:2])
    return first is not None and second is not None and first < second


def follows(a: Query, b: Query) -> bool:
    """Whether b is true of every scene of which a is, by its statements and the number of things that a asks for.

    It is exact for the captions that scenes have. What must hold because places differ, it does not see (what is left
    of the centre is in the left column): only queries written by hand can need that.
    """
    least = max(len(a.things), a.count or 1)
    return entails(replace(a, things=a.things + (ANY,) * (least - len(a.things))), b)
