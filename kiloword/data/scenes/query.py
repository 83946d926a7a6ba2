"""Captions as logic: a query is true or false of a scene, exactly, and one query can follow from another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kiloword.data.scenes.world import COLOURS, FILLS, MOST, SHAPES, SIZES, Scene, SceneRows, Thing, to_rows

Bools = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.int32]
BLOCK = 1 << 14  # scenes that `follows` evaluates at once


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
    """Whether b is true of every scene of which a is; a must be true of some scene.

    Unless `entails` proves it, scenes of a are enumerated until b is false of one. It suffices to take as few things as
    a allows, and of the values that b does not name only one.
    """
    if entails(a, b):
        return True
    least = max(len(a.things), a.count or 1)
    if b.background not in (None, a.background) or len(b.things) > least:
        return False
    if b.count not in (None, a.count) and not b.count == least == MOST:
        return False
    rest = replace(b, count=None)
    return not any((truth_table([rest], rows) < truth_table([a], rows)).any() for rows in _scenes(a, rest, least))


def _scenes(a: Query, b: Query, count: int) -> Iterator[SceneRows]:
    """Blocks of scenes [n, 16] with `count` things that include every kind of scene of a that could make b false."""
    options = [_things(pattern, b) for pattern in [*a.things, *[ANY] * (count - len(a.things))]]
    shape = [len(things) for things in options]
    for start in range(0, math.prod(shape), BLOCK):
        index = np.unravel_index(np.arange(start, min(start + BLOCK, math.prod(shape))), shape)
        things = np.concatenate([option[i] for option, i in zip(options, index, strict=True)], 1)
        rows = np.full((len(things), 1 + 5 * MOST), -1, np.int8)
        rows[:, 0], rows[:, 1 : 1 + 5 * count] = a.background or 0, things
        places = np.sort(things[:, ::5], 1)
        yield rows[(places[:, 1:] != places[:, :-1]).all(1)]


def _things(pattern: Pattern, b: Query) -> SceneRows:
    """Things that a pattern allows, [n, 5] as in `SceneRows`: of each attribute the values b names, and one other."""
    places = [p for p in range(9) if pattern.row in (None, p // 3) and pattern.column in (None, p % 3)]
    values = []
    for k, words in enumerate((SHAPES, COLOURS, SIZES, FILLS)):
        named = {p[k] for p in b.things} - {None}
        other = [v for v in range(len(words)) if v not in named][:1]
        values.append([*named, *other] if pattern[k] is None else [pattern[k]])
    return np.array(list(product(places, *values)), np.int8)
