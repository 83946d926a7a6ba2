"""Scenes: one to three things on a 3 x 3 grid before a background; which ones a data set has; and tasks of classes.

Frozen as scenes-v1. Of the generator only `random` and `integers` are used: NumPy may change its other functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kiloword.randomness import generator

VERSION = "scenes-v1"

SHAPES = ("circle", "square", "triangle", "diamond", "star", "heart", "cross", "moon")
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
SIZES = ("small", "large")
FILLS = ("solid", "striped", "hollow")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
BACKGROUNDS = ("white", "black", "grey", "brown", "beige", "navy")
MOST = 3  # things in a scene
SPLITS = ("train", "val", "test")
GROUP = 8  # scenes of a hard group: they share all but shapes
BLOCK = 4096  # scenes drawn at once

SceneRows = npt.NDArray[np.int8]
"""Scenes as numbers, [N, 16]: background, then three times (place, shape, colour, size, fill), sorted by place; -1 for
an absent thing. Equal scenes are equal rows."""


class Thing(NamedTuple):
    """One drawn thing: indices into the tuples of words above."""

    shape: int
    colour: int
    size: int
    fill: int
    row: int
    column: int


WORDS = dict(zip(Thing._fields, (SHAPES, COLOURS, SIZES, FILLS, ROWS, COLUMNS), strict=True))


@dataclass(frozen=True)
class Scene:
    """A background and one to three things at different places, in reading order."""

    background: int
    things: tuple[Thing, ...]

    def describe(self) -> dict[str, Any]:
        """The scene in words, for `Record.info` and reports."""
        things = [{name: words[getattr(t, name)] for name, words in WORDS.items()} for t in self.things]
        return {"background": BACKGROUNDS[self.background], "objects": things}


def to_scene(row: SceneRows) -> Scene:
    """The scene of one row [16]."""
    background, *values = row.tolist()
    things = (values[k : k + 5] for k in range(0, 5 * MOST, 5))
    return Scene(background, tuple(Thing(*facts, *divmod(place, 3)) for place, *facts in things if place >= 0))


def codes(rows: SceneRows, shapes: bool = True) -> npt.NDArray[np.uint64]:
    """One number per scene, [N]: equal if and only if the scenes are (except in shapes, with shapes False)."""
    code = rows[:, 0].astype(np.uint64)
    for k in range(1, 1 + 5 * MOST, 5):
        place, shape, colour, size, fill = (rows[:, k + a].astype(np.int64) for a in range(5))
        thing = (((place * 8 + (shape if shapes else 0)) * 8 + colour) * 2 + size) * 3 + fill
        code = code * np.uint64(4096) + np.where(place < 0, 4095, thing).astype(np.uint64)
    return code


def splits(rows: SceneRows) -> npt.NDArray[np.int64]:
    """The split of every scene, [N] index into SPLITS: 80% train, 10% val, 10% test.

    It is a hash of the content, so no two splits share a scene, whatever the seed. The hash ignores shapes, so that the
    scenes of a hard group, which differ in shapes only, lie in one split.
    """
    x = codes(rows, shapes=False) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    part = (x ^ (x >> np.uint64(31))) % np.uint64(10)
    return np.where(part == 0, 2, np.where(part == 1, 1, 0))


@lru_cache(maxsize=8)
def draw_scenes(split: str, n: int, seed: int, objects: tuple[int, ...], hard: bool) -> SceneRows:
    """The first n different scenes of a split, [n, 16], read-only. Raises: ValueError where there are too few.

    Args: objects: numbers of things, equally often; hard: in groups of GROUP scenes that share all but shapes.
    """
    wanted = n // GROUP if hard else n
    rows: SceneRows = np.empty((0, 1 + 5 * MOST), np.int8)
    for block in _blocks(split, seed, objects):
        rows = np.concatenate([rows, block[splits(block) == SPLITS.index(split)]])
        if len(rows) >= wanted:  # the first of equal scenes stay, in order
            rows = rows[np.sort(np.unique(codes(rows, shapes=not hard), return_index=True)[1])]
        if len(rows) >= wanted:
            break
    else:
        raise ValueError(
            f"scenes: only {len(rows)} different scenes fit these settings, {wanted} were asked; ask for a smaller n"
        )
    rows = rows[:wanted]
    if hard:  # every thing takes every shape once
        rng, rows = generator(VERSION, seed, split, "shapes"), rows.repeat(GROUP, 0)
        for k in range(2, 1 + 5 * MOST, 5):
            shapes = rng.random((wanted, GROUP)).argsort(1).reshape(-1)
            rows[:, k] = np.where(rows[:, k - 1] < 0, -1, shapes)
    rows.setflags(write=False)
    return rows


def _blocks(split: str, seed: int, objects: tuple[int, ...]) -> Iterator[SceneRows]:
    """Endless blocks of scenes [BLOCK, 16]; of single things one block of all 20,736 scenes."""
    if objects == (1,):
        things = np.indices((6, 9, 8, 8, 2, 3)).reshape(6, -1).T
        rows = np.full((len(things), 1 + 5 * MOST), -1, np.int8)
        rows[:, :6] = things[generator(VERSION, seed, split, "single").random(len(things)).argsort()]
        yield rows
        return
    for number in count():
        rng = generator(VERSION, seed, split, "block", number)
        things_of = np.array(objects)[rng.integers(len(objects), size=BLOCK)]
        place = rng.random((BLOCK, 9)).argsort(1)[:, :MOST]
        place[np.arange(MOST) >= things_of[:, None]] = 9  # sorts last
        place.sort(1)
        rows = np.empty((BLOCK, 1 + 5 * MOST), np.int8)
        rows[:, 0] = rng.integers(6, size=BLOCK)
        rows[:, 1::5] = place
        for column, values in ((2, 8), (3, 8), (4, 2), (5, 3)):
            rows[:, column::5] = rng.integers(values, size=(BLOCK, MOST))
        each = rows[:, 1:].reshape(BLOCK, MOST, 5)
        each[each[:, :, 0] == 9] = -1
        yield rows


@dataclass(frozen=True)
class ClassTask:
    """Classes of scenes; every prompt is a caption of the language when `{c}` is one of the names."""

    classnames: tuple[str, ...]
    templates: tuple[str, ...]
    objects: tuple[int, ...] = (1,)  # numbers of things in its scenes


_OF_ONE = ("something {c}", "a picture of something {c}", "an image with something {c}", "there is something {c}")
TASKS = {
    "colour": ClassTask(COLOURS, _OF_ONE),
    "fill": ClassTask(FILLS, _OF_ONE),
    "shape": ClassTask(SHAPES, ("a {c}", "a picture of a {c}", "an image with a {c}", "there is a {c}")),
    "count": ClassTask(
        ("one object", "two objects", "three objects"),
        ("{c}", "exactly {c}", "a picture with {c}", "an image of exactly {c}"),
        (1, 2, 3),
    ),
}


def label(task: str, scene: Scene) -> int:
    """The class of a scene, an index into the task's names."""
    return len(scene.things) - 1 if task == "count" else int(getattr(scene.things[0], task))
