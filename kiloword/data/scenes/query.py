"""Captions as logic: a query is true or false of a scene, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kiloword.data.scenes.world import MOST, Scene, SceneRows, Thing

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
        ordered = self.things[:related] + tuple(sorted(self.things[related:], key=_order))
        object.__setattr__(self, "things", ordered)


def _order(pattern: Pattern) -> tuple[int, ...]:
    return tuple(-1 if v is None else v for v in pattern)


def matches(query: Query, scene: Scene) -> bool:
    """Whether the query is true of the scene: some assignment of different things to its patterns holds."""
    if query.background not in (None, scene.background) or query.count not in (None, len(scene.things)):
        return False
    return any(_holds(query, things) for things in permutations(scene.things, len(query.things)))


def fits(pattern: Pattern, attributes: Thing | Pattern) -> bool:
    """Whether the attributes have all values that the pattern states."""
    return all(stated in (None, value) for stated, value in zip(pattern, attributes, strict=True))


def _holds(query: Query, things: tuple[Thing, ...]) -> bool:
    if not all(map(fits, query.things, things)):
        return False
    if query.relation == "left":
        return things[0].column < things[1].column
    return query.relation is None or things[0].row < things[1].row


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
