"""Chains from general to specific: captions of one scene that entail each other, images with more and more of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count, permutations
from typing import TYPE_CHECKING

import numpy as np

from kiloword.data.scenes.query import Pattern, Query
from kiloword.data.scenes.raster import BACKGROUND_RGB, draw, draw_inner
from kiloword.data.scenes.world import MOST, Scene, Thing
from kiloword.randomness import key
from kiloword.types import Record

if TYPE_CHECKING:
    from kiloword.data.scenes.source import ScenesSource

Describe = Callable[[Scene, int, int], Query]
MEASURED = 96  # pixels a side at which things are measured


def entails(a: Query, b: Query) -> bool:
    """Whether b is true wherever a is, as far as their words show it: True is sure, False may be a missed proof."""
    if b.background not in (None, a.background):
        return False
    if b.count not in (None, a.count) and not b.count == len(a.things) == MOST:
        return False
    chosen = permutations(range(len(a.things)), len(b.things))
    return any(_covers(a, b, places) for places in chosen)


def _covers(a: Query, b: Query, places: Sequence[int]) -> bool:
    """Whether what b says of its things is said by a of the things at these places."""
    described = [a.things[place] for place in places]
    if not all(_says(s, p) for s, p in zip(described, b.things, strict=True)):
        return False
    if b.relation is None or (a.relation == b.relation and tuple(places[:2]) == (0, 1)):
        return True
    first, second = (s.column if b.relation == "left" else s.row for s in described[:2])
    return first is not None and second is not None and first < second


def _says(specific: Pattern, general: Pattern) -> bool:
    return all(g in (None, s) for s, g in zip(specific, general, strict=True))


def chain(scene: Scene, number: int, describe: Describe) -> list[Query]:
    """Four queries that are true of a scene, from level 0 to level 3, each entailed by the next.

    Args: number from 0 up names one of the many chains of the scene; describe says something of one level.
    """
    queries = [describe(scene, 3, number)]
    for level in (2, 1, 0):
        candidates = (describe(scene, level, key(number, level, attempt)) for attempt in count())
        queries.append(next(query for query in candidates if entails(queries[-1], query)))
    return queries[::-1]


class SceneParts:
    """The scenes that have the most things, each as a chain of images: its largest thing alone, the two largest, all.

    A `Source`; `Record.info` holds `level`, `levels`, `group` and `parent` (the key of the more general image) as
    HierarImgs has them. Largest by the pixels that are drawn; the background is the scene's own at every level.
    """

    natural = False

    def __init__(self, source: ScenesSource) -> None:
        self.source = source
        self.name = source.name
        self.fingerprint = f"{source.fingerprint}-parts"
        things = (source.rows[:, 1::5] >= 0).sum(1)
        self.levels = int(things.max())
        self.scenes = np.flatnonzero(things == self.levels)

    def __len__(self) -> int:
        return self.levels * len(self.scenes)

    def record(self, row: int) -> Record:
        """Image and place in its chain; there are no captions."""
        which, level = divmod(row, self.levels)
        group = self.source.key(int(self.scenes[which]))
        scene = self.source.scene(int(self.scenes[which]))
        largest = sorted(scene.things, key=lambda thing: (-area(thing), thing.row, thing.column))
        part = replace(scene, things=tuple(t for t in scene.things if t in largest[: level + 1]))
        settings = self.source.settings
        parent = f"{group}-{level - 1}" if level else None
        info = {"level": level, "levels": self.levels, "group": group, "parent": parent}
        image = (draw_inner if settings.inner else draw)(part, settings.size)
        return Record(f"{group}-{level}", image, [], None, info)


@lru_cache(maxsize=432)  # all that there are
def _area(shape: int, size: int, fill: int, row: int, column: int) -> int:
    alone = draw(Scene(0, (Thing(shape, 0, size, fill, row, column),)), MEASURED)
    return int((alone != np.array(BACKGROUND_RGB[0], np.uint8)).any(-1).sum())


def area(thing: Thing) -> int:
    """Pixels that a thing covers when it is drawn, of MEASURED^2."""
    return _area(thing.shape, thing.size, thing.fill, thing.row, thing.column)
