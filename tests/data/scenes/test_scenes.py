"""The embedded data set: its language, its truth, its splits and its images."""

from __future__ import annotations

import hashlib
import pickle
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import mostly_slow
from kiloword.data.scenes import (
    Pattern,
    Query,
    Scene,
    ScenesSource,
    Thing,
    draw,
    matches,
    parse,
    parse_scenes,
    relevance,
    render,
)
from kiloword.data.scenes.captions import describe
from kiloword.data.scenes.raster import BACKGROUND_RGB, COLOUR_RGB
from kiloword.data.scenes.world import codes, held_out, splits, to_rows, to_scene
from kiloword.types import Source


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


@settings(max_examples=400, deadline=None)
@given(queries(), styles)
def test_parse_inverts_render(query: Query, style: int) -> None:
    assert parse(render(query, style)) == query


@settings(max_examples=200, deadline=None)
@given(scenes(), st.integers(0, 3), styles, styles)
def test_descriptions_are_true_and_readable(scene: Scene, level: int, choices: int, style: int) -> None:
    query = describe(scene, level, choices)
    assert matches(query, scene)
    caption = render(query, style)
    assert parse(caption) == query
    assert parse(f" {caption.capitalize()}. ") == query


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(queries(), min_size=1, max_size=12), st.lists(scenes(), min_size=1, max_size=12), st.data())
def test_relevance_is_matches_pair_by_pair(asked: list[Query], shown: list[Scene], data: st.DataObject) -> None:
    levels = st.tuples(st.integers(0, len(shown) - 1), st.integers(0, 3), styles)
    asked = asked + [describe(shown[i], level, c) for i, level, c in data.draw(st.lists(levels, max_size=12))]
    expected = np.array([[matches(q, s) for s in shown] for q in asked])
    np.testing.assert_array_equal(relevance(asked, shown), expected)
    np.testing.assert_array_equal(relevance([render(q, 7) for q in asked], to_rows(shown)), expected)


@settings(max_examples=100, deadline=None)
@given(scenes())
def test_rows_hold_the_whole_scene(scene: Scene) -> None:
    assert to_scene(to_rows([scene])[0]) == scene


STAR, HEART = (
    Thing(4, 0, 0, 0, 0, 2),
    Thing(5, 5, 1, 1, 2, 0),
)  # small solid red top right; large striped blue bottom left


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
        ("a star to the left of a heart", False),
        ("two objects", True),
        ("exactly one shape", False),
        ("two things: a star and a heart", True),
        ("an object in the top row", True),
        ("an object in the middle column", None),
        ("an object in the centre column", False),
        ("something in the upper right corner on a white background", True),
        ("something in the upper right corner on a black background", False),
        ("the background is white", True),
        ("a picture", True),
        ("", None),
        ("a picture of", None),
        ("a red blue star", None),
        ("red star", None),
        ("a star above a heart above a star", None),
        ("a star, a star, a star and a star", None),
        ("on a white background, a star on a white background", None),
        ("a dog", None),
    ],
)
def test_meaning(caption: str, true: bool | None) -> None:
    query = parse(caption)
    assert (None if query is None else matches(query, Scene(0, (STAR, HEART)))) is true


def test_a_caption_outside_the_language_is_named() -> None:
    with pytest.raises(ValueError, match="a dog"):
        relevance(["a dog"], [Scene(0, (STAR,))])


def test_impossible_queries_are_refused() -> None:
    with pytest.raises(ValueError, match="things"):
        Query((Pattern(),), "left")
    with pytest.raises(ValueError, match="counts"):
        Query(count=4)


@pytest.mark.parametrize(("level", "low", "high"), [(0, 1, 1), (1, 0.32, 0.40), (2, 0.007, 0.014), (3, 0.001, 0.0012)])
def test_levels_match_the_stated_share_of_scenes(level: int, low: float, high: float) -> None:
    source = parse_scenes(f"scenes:test?levels={level}")
    said = [source.record(row).captions[0] for row in range(len(source))]
    true = source.relevance(said, range(len(source)))
    assert true.diagonal().all()
    assert low <= true.mean() <= high


def test_language_is_small_and_captions_fit() -> None:
    source = parse_scenes("scenes?levels=0,1,2,3&n=1500")
    said = [c for row in range(1500) for c in source.record(row).captions]
    tokens = [c.replace(",", " ,").replace(":", " :").split() for c in said]
    assert len({t for caption in tokens for t in caption}) < 100
    assert max(map(len, tokens)) <= 46
    assert len(set(said)) > 0.5 * len(said)


@pytest.mark.slow
def test_no_split_shares_a_scene() -> None:
    rows = {
        src: parse_scenes(src).rows
        for src in ("scenes", "scenes?seed=3", "scenes?near=0.3", "scenes:val", "scenes:val?objects=1", "scenes:test")
    } | {"hard": parse_scenes("scenes:test?hard=shape").rows, "near": parse_scenes("scenes:test?near=0.3").rows}
    of = {src: set(codes(r).tolist()) for src, r in rows.items()}
    for src, r in rows.items():
        assert len(of[src]) == len(r), f"{src} repeats a scene"
        assert len(set(splits(r).tolist())) == 1
    for a, b in combinations([("scenes", "scenes?seed=3", "scenes?near=0.3"), ("scenes:val",), ("scenes:test",)], 2):
        assert not any(of[x] & of[y] for x in a for y in b)
    assert of["scenes"] != of["scenes?seed=3"]


def test_a_smaller_set_is_a_beginning_of_the_larger() -> None:
    few, many = parse_scenes("scenes:test?n=100"), parse_scenes("scenes:test")
    np.testing.assert_array_equal(few.rows, many.rows[:100])
    assert few.record(42).captions == many.record(42).captions
    three = parse_scenes("scenes?captions=3&levels=1,3").record(5).captions
    assert parse_scenes("scenes?captions=5&levels=1,3").record(5).captions[:3] == three


def test_held_out_pairs_occur_in_test_alone() -> None:
    assert not held_out(parse_scenes("scenes?heldout=1&near=0.1").rows).any()
    test = parse_scenes("scenes:test?heldout=1").rows
    assert held_out(test).all()
    pairs = {(t.colour, t.shape) for s in map(to_scene, test) for t in s.things if (3 * t.colour + 1) % 8 == t.shape}
    assert len(pairs) == 8
    assert 0.1 < held_out(parse_scenes("scenes").rows).mean() < 0.4


def test_hard_groups_share_all_but_shapes() -> None:
    source = parse_scenes("scenes:test?hard=shape&n=200")
    records = [source.record(row) for row in range(200)]
    without = codes(source.rows, shapes=False).reshape(-1, 8)
    assert (without == without[:, :1]).all()
    assert len(set(without[:, 0].tolist())) == 25
    assert [r.info["group"] for r in records] == [row // 8 for row in range(200)]
    assert len({r.key for r in records}) == 200
    for group in range(25):
        rows = range(8 * group, 8 * group + 8)
        assert sorted(source.scene(r).things[0].shape for r in rows) == list(range(8))
        np.testing.assert_array_equal(
            source.relevance([records[r].captions[0] for r in rows], rows), np.eye(8, dtype=bool)
        )


def test_near_duplicates_differ_in_one_attribute() -> None:
    source = parse_scenes("scenes:val?near=0.2")
    by_key = {r.key: r for r in map(source.record, range(1000))}
    near = [r for r in by_key.values() if "near" in r.info]
    assert 150 < len(near) < 250
    kinds = [_difference(r.info["scene"], by_key[r.info["near"]].info["scene"]) for r in near]
    counts = {k: kinds.count(k) for k in ("background", "place", "shape", "colour", "size", "fill")}
    assert min(counts.values()) > 15
    assert sum(counts.values()) == len(near)


def _difference(a: dict, b: dict) -> str:
    """The one attribute in which two described scenes differ."""
    assert len(a["objects"]) == len(b["objects"])
    if a["background"] != b["background"]:
        assert a["objects"] == b["objects"]
        return "background"
    x = [t for t in a["objects"] if t not in b["objects"]]
    y = [t for t in b["objects"] if t not in a["objects"]]
    assert len(x) == len(y) == 1
    different = {k for k in x[0] if x[0][k] != y[0][k]}
    if different <= {"row", "column"}:
        return "place"
    assert len(different) == 1
    return different.pop()


def test_wrong_captions_are_false_and_marked() -> None:
    source = parse_scenes("scenes?wrong=0.25&n=400&levels=0,1,2,3")
    marks: list[bool] = []
    for row in range(400):
        record = source.record(row)
        true = source.relevance(record.captions, [row])[:, 0]
        np.testing.assert_array_equal(true, ~np.array(record.info["wrong"]))
        marks += record.info["wrong"]
        assert all(level > 0 for level, w in zip(record.info["levels"], record.info["wrong"], strict=True) if w)
    assert 0.2 < np.mean(marks) < 0.3


def test_levels_come_as_often_as_their_weights() -> None:
    source = parse_scenes("scenes?levels=1:1,3:3&n=600")
    levels = [level for row in range(600) for level in source.record(row).info["levels"]]
    assert set(levels) == {1, 3}
    assert 0.71 < levels.count(3) / len(levels) < 0.79
    assert {parse_scenes("scenes:test").record(r).info["levels"][0] for r in range(20)} == {3}


@pytest.mark.parametrize("task", ["colour", "shape", "fill", "count"])
def test_prompts_of_a_task_are_true_of_their_class_alone(task: str) -> None:
    source = parse_scenes(f"scenes:test?task={task}&n=200")
    names = source.classnames
    assert names is not None
    labels = np.array([source.record(row).label for row in range(200)])
    assert set(labels) == set(range(len(names)))
    for template in source.templates:
        prompts = [template.format(c=name) for name in names]
        np.testing.assert_array_equal(source.relevance(prompts, range(200)), np.arange(len(names))[:, None] == labels)


@pytest.mark.parametrize("task", mostly_slow(["colour", "shape", "fill", "count"], 1))
def test_training_captions_use_the_prompts_words(task: str) -> None:
    source = parse_scenes("scenes?levels=1&n=3000")
    said = {c for row in range(3000) for c in source.record(row).captions}
    prompts = parse_scenes(f"scenes:test?task={task}")
    assert prompts.classnames is not None
    for template in prompts.templates:
        assert any(template.format(c=name) in said for name in prompts.classnames), template


def test_the_source() -> None:
    source = parse_scenes("scenes:test?captions=2&n=50")
    assert isinstance(source, Source)
    assert source.natural is False
    assert source.classnames is None
    copy = pickle.loads(pickle.dumps(source))  # a worker's
    big = source.resolution(96)
    assert len(pickle.dumps(source)) < 1000
    assert source.fingerprint == copy.fingerprint == big.fingerprint != parse_scenes("scenes:test?n=50").fingerprint
    assert source.name == "scenes:test?captions=2&n=50"
    a, b, c = source.record(7), copy.record(7), big.record(7)
    assert (a.key, a.captions, a.info) == (b.key, b.captions, b.info) == (c.key, c.captions, c.info)
    np.testing.assert_array_equal(a.image, b.image)
    assert (a.image.shape, c.image.shape, a.image.dtype) == ((64, 64, 3), (96, 96, 3), np.uint8)
    for row in (-1, 50):
        with pytest.raises(IndexError):
            source.record(row)


def test_size_of_the_src_goes_before_the_models() -> None:
    assert parse_scenes("scenes", 32).settings.size == 32
    assert parse_scenes("scenes?size=48", 32).settings.size == 48
    assert ScenesSource().settings == parse_scenes("scenes?").settings == parse_scenes("scenes").settings


@pytest.mark.parametrize(
    ("src", "said"),
    [
        ("scenes:foo", "train, val, test"),
        ("scenes:", "train, val, test"),
        ("scenery", "expected scenes"),
        ("scenes?colour=1", "options: captions, hard, heldout, inner, levels"),
        ("scenes?n=0", "n=0: expected a number of images, 1 to"),
        ("scenes?n=1&n=2", "twice"),
        ("scenes?size=8", "24 to 2048"),
        ("scenes?levels=4", "levels 0 to 3"),
        ("scenes?levels=1:-1", "levels 0 to 3"),
        ("scenes?levels=", "levels 0 to 3"),
        ("scenes?wrong=nan", "a share from 0 to 1"),
        ("scenes?near=1.5", "a share from 0 to 1"),
        ("scenes?heldout=yes", "0 or 1"),
        ("scenes?objects=4", "1 to 3"),
        ("scenes?task=size", "colour, fill, shape, count"),
        ("scenes?task=shape&objects=2", "omit objects="),
        ("scenes?hard=colour", "expected shape"),
        ("scenes?hard=shape&n=12", "not a multiple"),
        ("scenes?hard=shape&inner=1", "choose one"),
        ("scenes?hard=shape&near=0.1", "neither"),
        ("scenes?wrong=0.1&n=1", "has none"),
        ("scenes?&", "no option ''"),
    ],
)
def test_bad_settings_are_refused(src: str, said: str) -> None:
    with pytest.raises(ValueError) as e:
        parse_scenes(src)
    assert said in str(e.value)


def test_too_few_different_scenes_are_reported() -> None:
    with pytest.raises(ValueError, match=r"only \d+ different scenes fit"):
        len(parse_scenes("scenes:test?objects=1&n=9000").rows)
    assert len(parse_scenes("scenes?objects=1").rows) == 10_000


KINDS = [(shape, size, fill) for shape in range(8) for size in range(2) for fill in range(3)]


@pytest.mark.parametrize("side", [48, 64, 96])
def test_every_kind_of_thing_looks_different(side: int) -> None:
    images = [draw(Scene(1, (Thing(s, 0, z, f, 1, 1),)), side).astype(int) for s, z, f in KINDS]
    for (a, x), (b, y) in combinations(zip(KINDS, images, strict=True), 2):
        clearly = (np.abs(x - y).max(-1) > 60).sum() * (64 / side) ** 2
        assert clearly >= 8, f"{a} and {b} differ in {clearly} pixels"


def test_colours_and_backgrounds_are_far_apart() -> None:
    for a, b in combinations(COLOUR_RGB + BACKGROUND_RGB, 2):
        assert np.linalg.norm(np.subtract(a, b)) > 75, (a, b)
    for a in COLOUR_RGB:
        assert min(np.linalg.norm(np.subtract(a, b)) for b in BACKGROUND_RGB) > 100, a


@settings(max_examples=200, deadline=None)
@given(scenes(), st.sampled_from([24, 37, 64, 224]))
def test_images_show_things_at_their_places_and_nothing_else(scene: Scene, side: int) -> None:
    image = draw(scene, side)
    edges = [round(k * side / 3) for k in range(4)]
    places = {(t.row, t.column): t for t in scene.things}
    for r, (top, bottom) in enumerate(pairwise(edges)):
        for c, (left, right) in enumerate(pairwise(edges)):
            far = np.abs(image[top:bottom, left:right].astype(int) - BACKGROUND_RGB[scene.background]).max(-1) > 40
            if (r, c) in places:
                assert far.mean() > 0.02
            else:
                assert not far.any()


def test_solid_things_have_their_colour() -> None:
    for shape in set(range(8)) - {7}:  # the centre of a moon may be empty
        image = draw(Scene(0, (Thing(shape, 3, 1, 0, 0, 0),)), 63)
        assert tuple(image[10, 10]) == COLOUR_RGB[3]


@pytest.mark.parametrize(("side", "n"), [(64, 200), (50, 40), (97, 40)])
def test_inner_things_lie_within_every_centre_half(side: int, n: int) -> None:
    source = parse_scenes(f"scenes:test?inner=1&n={n}", side)
    for row in range(n):
        image, ground = source.record(row).image.astype(int), BACKGROUND_RGB[source.scene(row).background]
        rows, columns = np.nonzero((image != ground).any(-1))
        assert len(rows)
        for place in (rows, columns):
            assert side / 4 <= place.min() < place.max() + 1 <= 3 * side / 4


def test_inner_scenes_are_the_same_ones() -> None:
    inner, plain = parse_scenes("scenes:test?inner=1&n=50"), parse_scenes("scenes:test?n=50")
    np.testing.assert_array_equal(inner.rows, plain.rows)
    np.testing.assert_array_equal(inner.record(3).image[16:48, 16:48], plain.resolution(32).record(3).image)
    assert inner.fingerprint != plain.fingerprint


def test_inner_captions_are_true_and_of_things_alone() -> None:
    source = parse_scenes("scenes?inner=1&levels=0,1,2,3&wrong=0.2&n=300")
    levels = set()
    for row in range(len(source)):
        record = source.record(row)
        true = source.relevance(record.captions, [row])[:, 0]
        np.testing.assert_array_equal(true, ~np.array(record.info["wrong"]))
        for caption, level, wrong in zip(record.captions, record.info["levels"], record.info["wrong"], strict=True):
            query = parse(caption)
            assert query is not None
            assert query.relation is query.count is query.background is None
            assert all(p.row is p.column is None for p in query.things)
            if level == 3 and not wrong:
                assert len(query.things) == len(source.scene(row).things)
            levels.add(level)
    assert levels == {0, 1, 2, 3}


def test_scenes_v1_is_frozen() -> None:
    """Quoted figures stand on this world. If it must change, it gets another version."""
    digest = hashlib.blake2b(digest_size=8)
    total = 0.0
    for src in (
        "scenes",
        "scenes:val?near=0.2",
        "scenes:test?wrong=0.5&captions=3&levels=0,1,2,3",
        "scenes:test?hard=shape",
    ):
        source = parse_scenes(src)
        for row in range(60):
            record = source.record(row)
            digest.update("\n".join([record.key, *record.captions, repr(record.info)]).encode())
            total += float(record.image.mean())
    assert digest.hexdigest() == "7b863d56b4efb00f"
    assert parse_scenes("scenes").fingerprint == "scenes-v1-5d536c354736738c"  # runs are resumed by it
    assert total / 240 == pytest.approx(99.95, abs=0.05)  # last bits of sines may differ between machines
