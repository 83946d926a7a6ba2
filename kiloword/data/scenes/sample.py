"""The scenes of a data set: a pure function of its selection, drawn in blocks.

Only `random` and `integers` of the generator are used: NumPy may change the stream of its other functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
import numpy.typing as npt

from kiloword.data.scenes.world import MOST, SPLITS, VERSION, SceneRows, codes, held_out, splits
from kiloword.randomness import generator

BLOCK = 4096
GROUP = 8  # scenes of a hard group


@dataclass(frozen=True)
class Selection:
    """Settings that determine the scenes of a data set, but not their captions and images."""

    split: str = "train"
    n: int = 20000
    seed: int = 0
    objects: tuple[int, ...] = (1, 2, 3)  # numbers of things, equally often
    near: float = 0.0  # share of scenes that differ from an earlier one in exactly one attribute
    heldout: bool = False  # train: held-out pairs never occur; val and test: every scene has one
    hard: bool = False  # groups of eight scenes that share all but shapes


@dataclass(frozen=True)
class Drawn:
    """The scenes of a selection, all different."""

    rows: SceneRows  # [N, 16]
    twin: npt.NDArray[np.int64]  # [N] the earlier row that a near-duplicate was made from, or -1


@lru_cache(maxsize=8)
def draw_scenes(selection: Selection) -> Drawn:
    """All scenes of a selection, in order. Raises ValueError when there are too few different ones."""
    s = selection
    base = _distinct(s, s.n // GROUP if s.hard else s.n)
    if s.hard:
        base = _groups(base, _rng(s, "shapes"))
    twin = np.full(s.n, -1, np.int64)
    if s.near > 0:
        _near_duplicates(s, base, twin)
    base.setflags(write=False)
    return Drawn(base, twin)


def _rng(s: Selection, *purpose: int | str) -> np.random.Generator:
    return generator(VERSION, s.seed, s.split, *purpose)


def _distinct(s: Selection, n: int) -> SceneRows:
    """The first n different scenes of the split (different but for shapes, if hard), [n, 16]."""
    blocks: list[SceneRows] = []
    seen: set[int] = set()
    for block in _blocks(s):
        block = block[_admitted(s, block)]
        fresh = []
        for i, code in enumerate(codes(block, shapes=not s.hard).tolist()):
            if code not in seen:
                seen.add(code)
                fresh.append(i)
        blocks.append(block[fresh])
        if len(seen) >= n:
            return np.concatenate(blocks)[:n]
    raise ValueError(
        f"scenes: only {len(seen)} different scenes fit these settings, {n} were asked; ask for a smaller n"
    )


def _admitted(s: Selection, rows: SceneRows) -> npt.NDArray[np.bool_]:
    ok = np.asarray(splits(rows) == SPLITS.index(s.split))
    return ok & (held_out(rows) ^ (s.split == "train")) if s.heldout else ok


def _blocks(s: Selection) -> Iterator[SceneRows]:
    """Endless blocks of scenes [N, 16]; of single things one block of all scenes."""
    if s.objects == (1,):
        things = np.indices((6, 9, 8, 8, 2, 3)).reshape(6, -1).T  # [20736, 6]
        rows = np.full((len(things), 1 + 5 * MOST), -1, np.int8)
        rows[:, :6] = things[_rng(s, "single").random(len(things)).argsort()]
        yield rows
        return
    yield from (_block(_rng(s, "block", number), s.objects) for number in count())


def _block(rng: np.random.Generator, objects: tuple[int, ...]) -> SceneRows:
    number = np.array(objects)[rng.integers(len(objects), size=BLOCK)]
    place = rng.random((BLOCK, 9)).argsort(1)[:, :MOST]
    place[np.arange(MOST) >= number[:, None]] = 9  # sorts last
    place.sort(1)
    rows = np.empty((BLOCK, 1 + 5 * MOST), np.int8)
    rows[:, 0] = rng.integers(6, size=BLOCK)
    rows[:, 1::5] = place
    for column, values in ((2, 8), (3, 8), (4, 2), (5, 3)):
        rows[:, column::5] = rng.integers(values, size=(BLOCK, MOST))
    things = rows[:, 1:].reshape(BLOCK, MOST, 5)
    things[things[:, :, 0] == 9] = -1
    return rows


def _groups(base: SceneRows, rng: np.random.Generator) -> SceneRows:
    """Eight scenes for each one, [8N, 16]: every thing takes every shape once."""
    rows = base.repeat(GROUP, axis=0)
    for k in range(2, 1 + 5 * MOST, 5):
        shapes = rng.random((len(base), GROUP)).argsort(1).reshape(-1)
        rows[:, k] = np.where(rows[:, k - 1] < 0, -1, shapes)
    return rows


def _near_duplicates(s: Selection, rows: SceneRows, twin: npt.NDArray[np.int64]) -> None:
    """Replace about a share `near` of the rows by neighbours of earlier rows, in place."""
    rng = _rng(s, "near")
    seen = set(codes(rows).tolist())
    for i in np.flatnonzero(rng.random(len(rows)) < s.near).tolist():
        if i > 0:
            twin[i], rows[i] = _neighbour(s, rows[:i], rng, seen)
            seen.add(int(codes(rows[i : i + 1])[0]))


def _neighbour(s: Selection, earlier: SceneRows, rng: np.random.Generator, seen: set[int]) -> tuple[int, SceneRows]:
    """A new scene of the split that differs from an earlier one in one attribute, each attribute equally often."""
    attribute = int(rng.integers(6))
    for attempt in range(1000):
        base = int(rng.integers(len(earlier)))
        row = _changed(earlier[base], attribute, rng)[None]
        if _admitted(s, row)[0] and int(codes(row)[0]) not in seen:
            return base, row[0]
        if attempt % 100 == 99:  # among few scenes an attribute may have no free neighbour
            attribute = (attribute + 1) % 6
    raise ValueError(f"scenes: no free near-duplicate left for near={s.near:g}; ask for a smaller rate or n")


def _changed(row: SceneRows, attribute: int, rng: np.random.Generator) -> SceneRows:
    """Another value for one attribute (background, place, shape, colour, size, fill) of one thing, [16]."""
    row = row.copy()
    if attribute == 0:
        row[0] = (row[0] + rng.integers(1, 6)) % 6
        return row
    things = int((row[1::5] >= 0).sum())
    at = 5 * int(rng.integers(things)) + attribute
    if attribute == 1:
        free = np.setdiff1d(np.arange(9), row[1::5])
        row[at] = free[rng.integers(len(free))]
        used = row[1 : 1 + 5 * things].reshape(things, 5)
        used[:] = used[used[:, 0].argsort()]
        return row
    values = (8, 8, 2, 3)[attribute - 2]
    row[at] = (row[at] + rng.integers(1, values)) % values
    return row
