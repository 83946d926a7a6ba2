"""Whether one caption of scenes follows from another: is true of every possible scene of which the other is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import numpy.typing as npt

from kiloword.data.scenes.query import ANY, Pattern, Query, fits, truth_table
from kiloword.data.scenes.world import COLOURS, FILLS, MOST, SHAPES, SIZES, SceneRows

BLOCK = 1 << 14  # scenes evaluated at once
_VALUES = {"shape": len(SHAPES), "colour": len(COLOURS), "size": len(SIZES), "fill": len(FILLS)}


def follows(a: Query, b: Query) -> bool:
    """Whether b is true of every scene of which a is; a must be true of some scene.

    Unless `entails` proves it, scenes of a are enumerated until b is false of one. It suffices to take as few things as
    a allows, and of the values that b does not name only one.
    """
    if entails(a, b):
        return True
    least = max(len(a.things), a.count or 1)
    if b.background not in (None, a.background):
        return False
    if b.count is not None and b.count != a.count and not b.count == least == MOST:
        return False
    if len(b.things) > least:  # a scene of a with the fewest things
        return False
    rest = replace(b, count=None)
    return not any((truth_table([rest], rows) < truth_table([a], rows)).any() for rows in _scenes(a, rest, least))


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
    first, second = (s.column if b.relation == "left" else s.row for s in described[:2])
    return first is not None and second is not None and first < second


def _scenes(a: Query, b: Query, count: int) -> Iterator[SceneRows]:
    """Blocks of scenes [n, 16] with `count` things that include every kind of scene of a that could make b false."""
    patterns = [*a.things, *[ANY] * (count - len(a.things))]
    options = [_things(pattern, b) for pattern in patterns]
    shape = [len(o) for o in options]
    for start in range(0, math.prod(shape), BLOCK):
        index = np.unravel_index(np.arange(start, min(start + BLOCK, math.prod(shape))), shape)
        rows = np.full((len(index[0]), 1 + 5 * MOST), -1, np.int8)
        rows[:, 0] = a.background or 0
        for k, (things, i) in enumerate(zip(options, index, strict=True)):
            rows[:, 1 + 5 * k : 6 + 5 * k] = things[i]
        places = np.sort(rows[:, 1 : 1 + 5 * count : 5], 1)
        yield rows[(places[:, 1:] != places[:, :-1]).all(1)]


def _things(pattern: Pattern, b: Query) -> npt.NDArray[np.int8]:
    """Things that a pattern allows, [n, 5] as in `SceneRows`: all places, and of each attribute the values b names, and
    one other."""
    values: list[list[int]] = [list(range(9))]
    for name, n in _VALUES.items():
        stated = getattr(pattern, name)
        named = {v for p in b.things if (v := getattr(p, name)) is not None}
        other = [v for v in range(n) if v not in named][:1]
        values.append([stated] if stated is not None else [*other, *sorted(named)])
    grid = np.stack(np.meshgrid(*values[1:], values[0], indexing="ij"), -1).reshape(-1, 5)[:, [4, 0, 1, 2, 3]]
    row, column = pattern.row, pattern.column
    fits = ((grid[:, 0] // 3 == row) | (row is None)) & ((grid[:, 0] % 3 == column) | (column is None))
    return np.asarray(grid[fits], np.int8)
