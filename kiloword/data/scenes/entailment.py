"""Whether one caption of scenes follows from another, exactly: over every scene there can be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kiloword.data.scenes.hierarchy import entails
from kiloword.data.scenes.query import ANY, Pattern, Query, truth_table
from kiloword.data.scenes.world import COLOURS, FILLS, MOST, SHAPES, SIZES, SceneRows

BLOCK = 1 << 14  # scenes looked at at once
_VALUES = {"shape": len(SHAPES), "colour": len(COLOURS), "size": len(SIZES), "fill": len(FILLS)}


def follows(a: Query, b: Query) -> bool:
    """Whether b is true of every scene of which a is; a must be true of some scene.

    What the words do not prove is decided by scenes: all those of a that could tell b apart, until one does. More
    things than a needs never make b false, and of values that b does not name one stands for all.
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


def _scenes(a: Query, b: Query, count: int) -> Iterator[SceneRows]:
    """Blocks of scenes [n, 16] with `count` things, among them every kind of scene of a that b could be false of."""
    patterns = [*a.things, *[ANY] * (count - len(a.things))]
    options = [_things(pattern, b) for pattern in patterns]
    shape = [len(o) for o in options]
    for start in range(0, math.prod(shape), BLOCK):
        index = np.unravel_index(np.arange(start, min(start + BLOCK, math.prod(shape))), shape)
        rows = np.full((len(index[0]), 1 + 5 * MOST), -1, np.int8)
        rows[:, 0] = a.background or 0
        for k, (things, i) in enumerate(zip(options, index, strict=True)):
            rows[:, 1 + 5 * k : 6 + 5 * k] = things[i]
        yield rows[_apart(rows[:, 1 : 1 + 5 * count : 5])]


def _things(pattern: Pattern, b: Query) -> npt.NDArray[np.int8]:
    """Things that a pattern allows, [n, 5] as in `SceneRows`: every place, and of each attribute what b tells apart."""
    values: list[list[int]] = [list(range(9))]
    for name, n in _VALUES.items():
        own = getattr(pattern, name)
        named = {v for p in b.things if (v := getattr(p, name)) is not None}
        other = [v for v in range(n) if v not in named][:1]
        values.append([own] if own is not None else [*other, *sorted(named)])
    grid = np.stack(np.meshgrid(*values[1:], values[0], indexing="ij"), -1).reshape(-1, 5)[:, [4, 0, 1, 2, 3]]
    row, column = pattern.row, pattern.column
    fits = ((grid[:, 0] // 3 == row) | (row is None)) & ((grid[:, 0] % 3 == column) | (column is None))
    return np.asarray(grid[fits], np.int8)


def _apart(places: SceneRows) -> npt.NDArray[np.bool_]:
    """Whether all things lie at different places, [n] of [n, things]."""
    ordered = np.sort(places, 1)
    return np.asarray((ordered[:, 1:] != ordered[:, :-1]).all(1))
