"""The embedded data set: its language, its truth, its splits and its images; scenes-v1 is as it always was."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cases import mostly_slow
from kiloword.data.scenes.captions import chain, describe, parse, render
from kiloword.data.scenes.query import Pattern, Query, follows
from kiloword.data.scenes.raster import BACKGROUND_RGB, COLOUR_RGB, draw
from kiloword.data.scenes.source import area, open_scenes, parse_scenes
from kiloword.data.scenes.world import Scene, Thing, codes, splits
from kiloword.types import Source
from sources import records


def maybe(n: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, n - 1)


patterns = st.builds(Pattern, maybe(8), maybe(8), maybe(2), maybe(3), maybe(3), maybe(3))
styles = st.integers(0, 2**63 - 1)


@st.composite
def queries(draw_: st.DrawFn) -> Query:
    relation = draw_(st.sampled_from([None, "left", "above"]))
    things = tuple(draw_(st.lists(patterns, min_size=2 if relation else 0, max_size=3)))
    return Query(things, relation, draw_(st.none() | st.integers(1, 3)), draw_(maybe(6)))


@st.composite
def scenes(draw_: st.DrawFn) -> Scene:
    places = sorted(draw_(st.sets(st.integers(0, 8), min_size=1, max_size=3)))
    attributes = st.tuples(*(st.integers(0, n - 1) for n in (8, 8, 2, 3)))
    return Scene(draw_(st.integers(0, 5)), tuple(Thing(*draw_(attributes), p // 3, p % 3) for p in places))


@settings(max_examples=200)
@given(queries(), styles)
def test_parse_inverts_render(query: Query, style: int) -> None:
    assert parse(render(query, style)) == query


@settings(max_examples=200)
@given(scenes(), st.integers(0, 3), st.booleans(), styles, styles)
def test_descriptions_are_true_and_readable(scene: Scene, level: int, inner: bool, choices: int, style: int) -> None:
    query = describe(scene, level, choices, inner)
    assert literal(query, scene)
    caption = render(query, style)
    assert parse(caption) == query
    assert parse(f" {caption.capitalize()}. ") == query
    if inner:
        assert query.relation is query.count is query.background is None
        assert all(p.row is p.column is None for p in query.things)


def literal(query: Query, scene: Scene) -> bool:
    """Whether some assignment of different things to the patterns holds."""
    if query.background not in (None, scene.background) or query.count not in (None, len(scene.things)):
        return False
    for things in permutations(scene.things, len(query.things)):
        if all(v in (None, t) for p, thing in zip(query.things, things, strict=True) for v, t in zip(p, thing)):  # noqa: B905
            left = query.relation != "left" or things[0].column < things[1].column
            if left and (query.relation != "above" or things[0].row < things[1].row):
                return True
    return False


@given(st.lists(queries(), min_size=1, max_size=12), st.lists(st.integers(0, 999), min_size=1, max_size=12), st.data())
def test_relevance_is_literal_pair_by_pair(asked: list[Query], rows: list[int], data: st.DataObject) -> None:
    source = parse_scenes("scenes?n=1000")
    levels = st.tuples(st.sampled_from(rows), st.integers(0, 3), styles)
    asked = asked + [describe(source.scene(i), level, c) for i, level, c in data.draw(st.lists(levels, max_size=12))]
    expected = np.array([[literal(q, source.scene(row)) for row in rows] for q in asked])
    np.testing.assert_array_equal(source.relevance([render(q, 7) for q in asked], rows), expected)


# Small solid red at the top right; large striped blue at the bottom left.
STAR, HEART = Thing(4, 0, 0, 0, 0, 2), Thing(5, 5, 1, 1, 2, 0)


@pytest.mark.parametrize(
    ("caption", "true"),
    [
        ("a red star", True),
        ("a red heart", False),
        ("a red star and something red", False),  # two different things
        ("a red star and something blue", True),
        ("a star above a heart", True),
        ("a star is below a heart", False),
        ("a heart left of something red", True),
        ("two objects", True),
        ("exactly one shape", False),
        ("two things: a star and a heart", True),
        ("an object in the top row", True),
        ("an object in the centre column", False),
        ("something in the upper right corner on a white background", True),
        ("something in the upper right corner on a black background", False),
        ("the background is white", True),
        ("a picture", True),
        *((outside, None) for outside in (
            "", "a", "red", "a dog", "red star", "a picture of", "a red blue star", "a star and", "two objects:",
            "four objects", "one objects", "an object in the middle column", "a star in the nowhere",
            "a star above a heart above a star", "a star, a star, a star and a star", "a star together with a star",
            "on a white background, a star on a white background", "a star on a pink background",
        )),
    ],
)  # fmt: skip
def test_meaning(caption: str, true: bool | None) -> None:
    query = parse(caption)
    assert (None if query is None else literal(query, Scene(0, (STAR, HEART)))) is true
    if true is None:
        with pytest.raises(ValueError, match="not a caption"):
            parse_scenes("scenes").relevance([caption], [0])


ANY, LEFT, RIGHT = Pattern(), Pattern(column=0), Pattern(column=2)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Query(), Query((ANY,)), True),  # every scene has something
        (Query(), Query((ANY, ANY)), False),
        (Query(count=2), Query((ANY, ANY)), True),
        (Query((LEFT, RIGHT)), Query((LEFT, RIGHT), "left"), True),
        (Query((Pattern(colour=1), Pattern(column=2)), "left"), Query((Pattern(colour=1, column=0),)), False),
        (Query((LEFT, LEFT)), Query((Pattern(row=0),)), False),
        (Query((LEFT, LEFT, LEFT)), Query(count=3), True),  # there are no more
        (Query((LEFT, LEFT)), Query(count=2), False),
        (Query((Pattern(size=0), Pattern(size=1))), Query((Pattern(size=1), Pattern(size=0))), True),
        (Query((ANY, ANY)), Query((Pattern(size=1),)), False),
        (Query((Pattern(colour=2),)), Query((Pattern(colour=2),), background=1), False),
        (Query((Pattern(colour=2),), background=1), Query(background=1), True),
    ],
)
def test_what_follows_from_known_queries(a: Query, b: Query, expected: bool) -> None:
    assert follows(a, b) is expected


def test_no_split_shares_a_scene() -> None:
    sources = ("scenes", "scenes?seed=3", "scenes:val", "scenes:val?objects=1", "scenes:test", "scenes:test?hard=shape")
    rows = {src: parse_scenes(src).rows for src in sources}
    of = {src: set(codes(r).tolist()) for src, r in rows.items()}
    for src, r in rows.items():
        assert len(of[src]) == len(r), f"{src} repeats a scene"
        assert len(set(splits(r).tolist())) == 1
    for a, b in combinations([("scenes", "scenes?seed=3"), ("scenes:val",), ("scenes:test",)], 2):
        assert not any(of[x] & of[y] for x in a for y in b)
    assert of["scenes"] != of["scenes?seed=3"]


def test_a_smaller_set_is_a_beginning_of_the_larger() -> None:
    few, many = parse_scenes("scenes:test?n=100"), parse_scenes("scenes:test")
    np.testing.assert_array_equal(few.rows, many.rows[:100])
    assert few.captions(42) == many.captions(42)
    three, five = (parse_scenes(f"scenes?captions={n}&levels=1,3").captions(5) for n in (3, 5))
    assert five[:3] == three


@pytest.mark.parametrize("task", mostly_slow(["colour", "shape", "fill", "count"], 1))
def test_prompts_of_a_task_are_true_of_their_class_alone(task: str) -> None:
    """Training captions use their words, too."""
    source = parse_scenes(f"scenes:test?task={task}&n=200")
    names, labels = source.classnames or [], np.array([record.label for record in records(source)])
    assert set(labels) == set(range(len(names)))
    train = parse_scenes("scenes?levels=1&n=3000")
    said = {c for row in range(3000) for c in train.captions(row)}
    for template in source.templates:
        prompts = [template.format(c=name) for name in names]
        assert (source.relevance(prompts, range(200)) == (np.arange(len(names))[:, None] == labels)).all()
        assert said & set(prompts), template


@pytest.mark.parametrize("src", ["scenes:test?captions=2&n=50", "scenes:test?task=vqa&n=50"])
def test_the_source(src: str) -> None:
    """In a worker, and of a larger size."""
    source, big = open_scenes(src, 64), open_scenes(src, 96)
    copy = pickle.loads(pickle.dumps(source))
    assert isinstance(source, Source)
    assert (source.natural, source.classnames, len(pickle.dumps(source)) < 1000) == (False, None, True)
    assert source.fingerprint == copy.fingerprint == big.fingerprint != open_scenes(f"{src}&seed=1").fingerprint
    a, b, c = source.record(7), copy.record(7), big.record(7)
    assert (a.key, a.captions, a.info) == (b.key, b.captions, b.info) == (c.key, c.captions, c.info)
    assert (copy.key(7), copy.captions(7)) == (a.key, a.captions)
    np.testing.assert_array_equal(a.image, b.image)
    assert (a.image.shape, c.image.shape, a.image.dtype) == ((64, 64, 3), (96, 96, 3), np.uint8)


def test_images_by_level_show_the_largest_things() -> None:
    source = parse_scenes("scenes:test?n=30")
    parts = source.image_levels()
    for row in range(len(parts)):
        which, level = divmod(row, parts.levels)
        scene = source.scene(int(parts.scenes[which]))
        areas = sorted(map(area, scene.things), reverse=True)
        kept = tuple(thing for thing in scene.things if area(thing) in areas[: level + 1])
        shown = parts.record(row)
        if len(set(areas)) == len(areas):
            np.testing.assert_array_equal(shown.image, draw(replace(scene, things=kept), 64))
        assert shown.info is not None
        assert (shown.info["level"], shown.info["parent"] is None) == (level, level == 0)


@pytest.mark.parametrize(
    ("src", "said"),
    [
        ("scenes:foo", "train, val, test"),
        ("scenes?colour=1", "it has captions, hard, inner, levels"),
        ("scenes?n=0", "1 to"),
        ("scenes?n=1&n=2", "twice"),
        ("scenes?levels=4", "levels 0 to 3"),
        ("scenes?levels=1:0", "levels 0 to 3"),
        ("scenes?levels=1:-1,2:2", "levels 0 to 3"),
        ("scenes?inner=yes", "0 or 1"),
        ("scenes?task=size", "colour, fill, shape, count"),
        ("scenes?task=shape&objects=2", "omit objects="),
        ("scenes?task=vqa&levels=1", "levels="),
        ("scenes?hard=colour", "shape"),
        ("scenes?hard=shape&n=12", "not a multiple"),
        ("scenes?hard=shape&inner=1", "choose one"),
        ("scenes:test?objects=1&n=9000", "different scenes"),
    ],
)
def test_bad_settings_are_refused(src: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        len(parse_scenes(src).rows)


@given(scenes(), st.sampled_from([24, 37, 64, 224]))
def test_images_show_things_at_their_places_and_nothing_else(scene: Scene, side: int) -> None:
    image = draw(scene, side)
    edges = [round(k * side / 3) for k in range(4)]
    places = {(t.row, t.column): t for t in scene.things}
    for r, (top, bottom) in enumerate(pairwise(edges)):
        for c, (left, right) in enumerate(pairwise(edges)):
            far = np.abs(image[top:bottom, left:right].astype(int) - BACKGROUND_RGB[scene.background]).max(-1) > 40
            assert far.mean() > 0.02 if (r, c) in places else not far.any()
    solid = draw(Scene(0, (Thing(scene.things[0].shape % 7, 3, 1, 0, 0, 0),)), 63)  # the centre of a moon may be empty
    assert tuple(solid[10, 10]) == COLOUR_RGB[3]


@pytest.mark.parametrize(("side", "n"), [(64, 200), (50, 40), (97, 40)])
def test_inner_things_lie_within_every_centre_half(side: int, n: int) -> None:
    source, plain = parse_scenes(f"scenes:test?inner=1&n={n}", side), parse_scenes(f"scenes:test?n={n}")
    np.testing.assert_array_equal(source.rows, plain.rows)
    assert source.fingerprint != plain.fingerprint
    margin = -(-side // 4)
    for row in range(n):
        image, ground = source.record(row).image.astype(int), BACKGROUND_RGB[source.scene(row).background]
        within = draw(source.scene(row), side - 2 * margin)
        assert (image[margin : side - margin, margin : side - margin] == within).all()
        image[margin : side - margin, margin : side - margin] = ground
        assert (image == ground).all()


def short(lines: Iterable[object]) -> str:
    return hashlib.blake2b("\n".join(map(str, lines)).encode(), digest_size=4).hexdigest()


# Quoted figures stand on this world. If it must change, it gets another version.
SCENES = {  # number, scenes, what records say of five rows, and the sum of the mean pixels of these
    "?n=200": (200, "d456511f", "83520fba", 514.6),
    ":val?hard=shape&n=16&captions=3": (16, "6d2499e1", "e946e095", 605.8),
    ":test?objects=1&captions=4&levels=1,3:2": (1000, "d67d7464", "e1d9ebd4", 445.1),
    "?objects=2,3&inner=1&n=99": (99, "2c5d2059", "a6a45d98", 699.6),
    "?task=count&n=50": (50, "16c132fb", "69c21714", 473.4),
    "?n=5000&levels=0,1&captions=9": (5000, "71f53be5", "8b772315", 606.2),
}
DESCRIBED = ["46ec9425", "b1a94128", "ecd7a749", "757ac2dd"]
DESCRIBED_INNER = ["46ec9425", "0139e123", "d839358a", "907dc780"]
AREAS = [[376, 376, 204, 756, 756, 296], [396, 396, 252, 784, 784, 384], [228, 228, 172, 464, 464, 268]]
AREAS += [[192, 192, 144, 384, 384, 232], [198, 198, 184, 396, 396, 316], [294, 294, 206, 590, 590, 312]]
AREAS += [[288, 288, 232, 576, 576, 388], [270, 270, 212, 530, 530, 320]]  # small, large: solid, striped, hollow


@pytest.mark.parametrize(("options", "expected"), SCENES.items())
def test_scenes_v1_is_frozen(options: str, expected: tuple[int, str, str, float]) -> None:
    source, said, pixels = parse_scenes(f"scenes{options}", 48 if "inner" in options else 64), [], 0.0
    for row in (0, 1, 7, len(source) // 2, len(source) - 1):
        r = source.record(row)
        info = [r.info["levels"], r.info["scene"], r.info.get("group")]
        said.append([r.captions, source.hierarchies(row), r.key, r.label, *info])
        pixels += float(r.image.mean())
    assert (len(source), short(source.rows.tolist()), short(said)) == expected[:3]
    assert pixels == pytest.approx(expected[3], abs=0.3)  # last bits of sines may differ between machines


def test_what_is_said_of_scenes_is_frozen() -> None:
    """Corrupted captions mean what they did, too."""
    source = parse_scenes("scenes?n=300&seed=5")
    drawn = [source.scene(row) for row in range(300)]
    numbers = [(n + 1) * 0x9E3779B97F4A7C15 % 2**63 for n in range(1500)]  # spread over 63 bits
    for inner, expected in ((False, DESCRIBED), (True, DESCRIBED_INNER)):
        tell = partial(describe, inner=inner)
        levels = [[tell(s, level, n) for s, n in zip(drawn, numbers, strict=False)] for level in range(4)]
        assert [short(map(render, asked, numbers[299::-1])) for asked in levels] == expected
    chains = [query for scene, n in zip(drawn[:25], numbers, strict=False) for query in chain(scene, n)]
    assert short(chains) == "7ac9aea5"
    meant = []
    for n, number in enumerate(numbers[:200]):
        words = render(describe(drawn[n], 1 + n % 3, number), number).split()
        at = number % len(words)
        for changed in (words[:at] + words[at + 1 :], words[: at + 1] + words[at:], words[:at] + words[at:][::-1]):
            meant.append(parse(" ".join(changed)))
    assert (sum(query is not None for query in meant), short(meant)) == (82, "9686a61b")
    areas = [[area(Thing(shape, 0, size, fill, 1, 2)) for size in (0, 1) for fill in range(3)] for shape in range(8)]
    assert np.allclose(areas, AREAS, rtol=0.02)
