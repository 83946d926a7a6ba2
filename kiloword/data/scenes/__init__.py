"""The built-in data set: drawn scenes whose captions are logical queries, so that all matches are known exactly.

It has ground truth for false negatives, generality and hierarchy. `scenes-v1` is frozen.
"""

from kiloword.data.scenes.captions import parse, render
from kiloword.data.scenes.query import Pattern, Query, matches
from kiloword.data.scenes.raster import draw
from kiloword.data.scenes.source import SceneQuestions, ScenesSource, open_scenes, parse_scenes, relevance
from kiloword.data.scenes.world import Scene, Thing

__all__ = [
    "Pattern",
    "Query",
    "Scene",
    "SceneQuestions",
    "ScenesSource",
    "Thing",
    "draw",
    "matches",
    "open_scenes",
    "parse",
    "parse_scenes",
    "relevance",
    "render",
]
