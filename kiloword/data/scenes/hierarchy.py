"""Chains from general to specific: captions of one scene that entail each other, and images with more of its things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from kiloword.data.scenes.entailment import entails
from kiloword.data.scenes.query import Query
from kiloword.data.scenes.raster import BACKGROUND_RGB, draw
from kiloword.data.scenes.world import Scene, Thing
from kiloword.randomness import key
from kiloword.types import Record

if TYPE_CHECKING:
    from kiloword.data.scenes.source import ScenesSource

Describe = Callable[[Scene, int, int], Query]
MEASURED = 96  # height and width of the images in which areas are measured


def chain(scene: Scene, number: int, describe: Describe) -> list[Query]:
    """Four queries that are true of a scene, from level 0 to level 3, each entailed by the next.

    Args: number, from 0, selects one of the many chains; describe returns a query of one level, as `captions.describe`.
    """
    queries = [describe(scene, 3, number)]
    for level in (2, 1, 0):
        candidates = (describe(scene, level, key(number, level, attempt)) for attempt in count())
        queries.append(next(query for query in candidates if entails(queries[-1], query)))
    return queries[::-1]


class SceneParts:
    """A `Source` of the scenes with the most things, as chains of images: the largest thing, the two largest, all.

    `Record.info` has `level`, `levels`, `group` and `parent` (the key of the more general image) as in HierarImgs.
    Largest by drawn pixels; the background is that of the scene at every level.
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
        """The image and its place in the chain, without captions."""
        which, level = divmod(row, self.levels)
        group = self.source.key(int(self.scenes[which]))
        scene = self.source.scene(int(self.scenes[which]))
        largest = sorted(scene.things, key=lambda thing: -area(thing))[: level + 1]
        part = replace(scene, things=tuple(t for t in scene.things if t in largest))
        parent = f"{group}-{level - 1}" if level else None
        info = {"level": level, "levels": self.levels, "group": group, "parent": parent}
        image = self.source.settings.draw(part)
        return Record(f"{group}-{level}", image, [], None, info)


@lru_cache(maxsize=3456)  # all things
def area(thing: Thing) -> int:
    """Pixels that a thing covers when it is drawn, of MEASURED^2."""
    alone = draw(Scene(0, (thing,)), MEASURED)
    return int((alone != np.array(BACKGROUND_RGB[0], np.uint8)).any(-1).sum())
