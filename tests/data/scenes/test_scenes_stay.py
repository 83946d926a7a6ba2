"""Every option of scenes draws and says what it always did; what corrupted captions mean, too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kiloword.data.scenes import Scene, Thing, draw, open_scenes, parse, parse_scenes, render
from kiloword.data.scenes.captions import describe, describe_things
from kiloword.data.scenes.hierarchy import area, chain
from kiloword.data.scenes.questions import ask
from kiloword.data.scenes.raster import draw_inner
from kiloword.data.scenes.world import splits

STRIDE = 0x9E3779B97F4A7C15
SAID = {
    "describe 0": "46ec9425",
    "describe 1": "b1a94128",
    "describe 2": "ecd7a749",
    "describe 3": "757ac2dd",
    "describe_things 0": "46ec9425",
    "describe_things 1": "0139e123",
    "describe_things 2": "d839358a",
    "describe_things 3": "907dc780",
}
CHAINS = "7ac9aea5"
ASKED = {
    "background": "24beedd0",
    "colour": "d0538c8e",
    "count": "82add27e",
    "fill": "b703afb5",
    "place": "ea2e9522",
    "shape": "10286204",
    "size": "4cad2a82",
    "yes/no": "62e22113",
}
TYPES = {"yes/no": "yes/no", "count": "number"}
SCENES = {
    "?n=200": (200, "023e25c2", "746fe58f"),
    "?n=200&near=0.5&seed=2": (200, "96dfd1ec", "e1fba13b"),
    ":test?heldout=1&n=99": (99, "28df3b75", "e4882b23"),
    ":val?hard=shape&n=16&captions=3": (16, "6d7d4ee7", "651ddb98"),
    ":test?objects=1&captions=4&levels=1,3:2": (1000, "bc751c6d", "758c12c3"),
    "?objects=2,3&inner=1&n=99&size=48": (99, "71a1ebda", "48a3ce61"),
    "?task=count&n=50&wrong=0.5": (50, "89e13c5e", "bfba661e"),
    ":val?task=colour&n=20": (20, "4d6332ff", "78648cb0"),
    "?n=5000&levels=0,1&captions=9": (5000, "af53ecc3", "ce0882b6"),
}
MEANT = (82, "9686a61b")
AREAS = [
    [376, 376, 204, 756, 756, 296],
    [396, 396, 252, 784, 784, 384],
    [228, 228, 172, 464, 464, 268],
    [192, 192, 144, 384, 384, 232],
    [198, 198, 184, 396, 396, 316],
    [294, 294, 206, 590, 590, 312],
    [288, 288, 232, 576, 576, 388],
    [270, 270, 212, 530, 530, 320],
]
MEANS = {
    24: [68.4, 68.4, 63.3, 69.6],
    25: [69.2, 67.2, 63.3, 70.2],
    48: [68.2, 68.2, 63.3, 67.8],
    63: [68.5, 67.7, 63.3, 67.7],
}


def short(lines: Iterable[object]) -> str:
    return hashlib.blake2b("\n".join(map(str, lines)).encode(), digest_size=4).hexdigest()


def numbers(count: int) -> list[int]:
    """Spread over 63 bits."""
    return [(n + 1) * STRIDE % 2**63 for n in range(count)]


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    source = parse_scenes("scenes?n=300&seed=5")
    return [source.scene(row) for row in range(300)]


def test_captions_of_scenes(scenes: list[Scene]) -> None:
    said: dict[str, str] = {}
    for tell in (describe, describe_things):
        for level in range(4):
            queries = [tell(scene, level, n) for scene, n in zip(scenes, numbers(300), strict=True)]
            said[f"{tell.__name__} {level}"] = short(map(render, queries, numbers(300)[::-1]))
    assert said == SAID
    chains = [chain(scene, n, describe) for scene, n in zip(scenes[:25], numbers(25), strict=True)]
    assert short(query for queries in chains for query in queries) == CHAINS


def test_what_is_asked_of_scenes(scenes: list[Scene]) -> None:
    asked = [ask(scenes[n % 300], number) for n, number in enumerate(numbers(1500))]
    assert {kind: short(q for q in asked if q.kind == kind) for kind in {q.kind for q in asked}} == ASKED
    assert {q.kind: q.answer_type for q in asked} == {kind: TYPES.get(kind, "other") for kind in ASKED}


def test_which_scenes_there_are() -> None:
    drawn = {}
    for options in SCENES:
        source = parse_scenes(f"scenes{options}")
        rows = [0, 1, 7, len(source) // 2, len(source) - 1]
        said = [[source.captions(row), source.hierarchies(row), source.key(row)] for row in rows]
        drawn[options] = (len(source), short([source.rows.tolist(), source._drawn.twin.tolist()]), short(said))
    assert drawn == SCENES
    single = parse_scenes("scenes:test?objects=1").rows
    assert np.unique(splits(single)).tolist() == [2]


def test_corrupted_captions_mean_what_they_did(scenes: list[Scene]) -> None:
    """A word left out, said twice, or all from it on turned round: mostly no caption any more."""
    meant = []
    for n, number in enumerate(numbers(200)):
        words = render(describe(scenes[n], 1 + n % 3, number), number).split()
        at = number % len(words)
        for changed in (words[:at] + words[at + 1 :], words[: at + 1] + words[at:], words[:at] + words[at:][::-1]):
            meant.append(parse(" ".join(changed)))
    assert (sum(one is not None for one in meant), short(meant)) == MEANT
    for caption in ("", "red", "a", "a star and", "a star, a star, a star and a star", "two objects:",
                    "a star left of a star left of a star", "four objects", "a star in the nowhere", "a blue blue star",
                    "a picture of", "a star together with a star", "a star on a pink background"):  # fmt: skip
        assert parse(caption) is None, caption


def test_things_are_drawn_as_large_as_ever() -> None:
    areas = [[area(Thing(shape, 0, size, fill, 1, 2)) for size in (0, 1) for fill in range(3)] for shape in range(8)]
    assert np.allclose(areas, AREAS, rtol=0.02)
    scene = Scene(3, (Thing(4, 2, 1, 1, 0, 1), Thing(7, 6, 0, 2, 2, 2)))
    for size in (24, 25, 48, 63):
        outer, inner = draw(scene, size), draw_inner(scene, 2 * size)
        assert outer.shape == (size, size, 3)
        margin = -(-2 * size // 4)
        assert (
            inner[margin : 2 * size - margin, margin : 2 * size - margin] == draw(scene, 2 * size - 2 * margin)
        ).all()
        inner[margin : 2 * size - margin, margin : 2 * size - margin] = 0
        assert {tuple(p) for p in inner.reshape(-1, 3).tolist()} == {(95, 60, 35), (0, 0, 0)}
        means = [part.mean() for half in np.array_split(outer, 2) for part in np.array_split(half, 2, 1)]
        assert np.allclose(means, MEANS[size], atol=1.0)


def test_scenes_of_another_size_or_with_questions_are_the_same_scenes() -> None:
    one: Any = open_scenes("scenes:val?n=20")
    for other in (one.resolution(32), open_scenes("scenes:val?n=20", 32), open_scenes("scenes:val?n=20&size=32", 99)):
        assert other.settings.size == 32
        assert other.fingerprint == one.fingerprint
        assert other.captions(3) == one.captions(3)
        assert other.record(3).image.shape == (32, 32, 3)
    asked: Any = open_scenes("scenes:val?n=20&task=vqa")
    assert (asked.resolution(32).settings.size, asked.resolution(32).asked(3)) == (32, asked.asked(3))
    assert asked.key(3) == one.key(3)
    assert asked.record(3).info["scene"] == one.record(3).info["scene"]
    assert (one.classnames, one.templates, one.settings.size) == (None, [], 64)
    for row in (-1, 20):
        with pytest.raises(IndexError, match=f"row {row} of 20"):
            one.scene(row)
