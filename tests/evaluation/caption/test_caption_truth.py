"""Captions of scenes judged by the exact oracle, against a literal search of everything a caption could mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiloword.data.scenes.captions import parse, render
from kiloword.data.scenes.query import Pattern, Query
from kiloword.data.scenes.world import Scene, Thing
from kiloword.evaluation.caption.truth import JudgedCaption, Statement, elsewhere, judge, judge_caption

RED_STAR = Thing(shape=4, colour=0, size=1, fill=0, row=0, column=0)  # large, solid, top left
BLUE_CIRCLE = Thing(shape=0, colour=5, size=0, fill=1, row=2, column=2)  # small, striped, bottom right
TWO = Scene(background=5, things=(RED_STAR, BLUE_CIRCLE))  # navy
ONE = Scene(background=0, things=(RED_STAR,))  # white
COLUMN = Scene(background=0, things=(RED_STAR, BLUE_CIRCLE._replace(column=0)))
ROW = Scene(background=0, things=(RED_STAR, BLUE_CIRCLE._replace(row=0)))


def literal(query: Query, scene: Scene) -> tuple[int, int, int]:
    """True statements, statements and mentioned objects: every map of things to objects or to nothing is tried."""
    names = ("shape", "colour", "size", "fill", "row", "column")
    best_true, total, mentioned = -1, 0, 0
    for chosen in product([None, *range(len(scene.things))], repeat=len(query.things)):
        used = [c for c in chosen if c is not None]
        if len(set(used)) < len(used):
            continue  # two things, one object
        truths, named = [], 0
        for pattern, c in zip(query.things, chosen, strict=True):
            said = {name: getattr(pattern, name) for name in names if getattr(pattern, name) is not None}
            own = [c is not None and getattr(scene.things[c], name) == value for name, value in said.items()]
            truths += own or [c is not None]
            named += bool(own) and all(own)
        if query.relation:
            a, b = chosen[:2]
            axis = {"left": "column", "above": "row"}[query.relation]
            there = a is not None and b is not None
            truths.append(there and getattr(scene.things[a], axis) < getattr(scene.things[b], axis))
        if query.count is not None:
            truths.append(query.count == len(scene.things))
        if query.background is not None:
            truths.append(query.background == scene.background)
        best_true, total = max(best_true, sum(truths)), len(truths)
        mentioned = max(mentioned, named)
    return best_true, total, mentioned


def things() -> st.SearchStrategy[Thing]:
    """Few values, so that things are often alike."""
    few = (range(2), range(2), range(2), range(3), range(3), range(3))
    return st.builds(Thing, *map(st.sampled_from, few))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    found = draw(st.lists(things(), min_size=1, max_size=3, unique_by=lambda t: (t.row, t.column)))
    return Scene(draw(st.integers(0, 1)), tuple(sorted(found, key=lambda t: (t.row, t.column))))


@st.composite
def queries(draw: st.DrawFn) -> Query:
    said = draw(st.lists(things(), max_size=3))
    kept = draw(st.lists(st.tuples(*[st.booleans()] * 6), min_size=len(said), max_size=len(said)))
    both = zip(said, kept, strict=True)
    patterns = [Pattern(*(v if k else None for v, k in zip(t, keep, strict=True))) for t, keep in both]
    relation = draw(st.sampled_from([None, "left", "above"])) if len(patterns) > 1 else None
    count = draw(st.sampled_from([None, 1, 2, 3]))
    return Query(tuple(patterns), relation, count, draw(st.sampled_from([None, 0, 1])))


@pytest.mark.slow
@given(queries(), scenes(), st.integers(0, 2**40))
@settings(max_examples=300, deadline=None)
def test_equals_a_literal_search(query: Query, scene: Scene, style: int) -> None:
    found = judge_caption(render(query, style), scene)
    true, total, mentioned = literal(query, scene)
    assert (sum(s.true for s in found.statements), len(found.statements), found.mentioned) == (true, total, mentioned)
    assert found.true == (true == total)
    assert found.objects == len(scene.things)


def says(found: JudgedCaption) -> Iterator[str]:
    for kind, words, true in found.statements:
        yield f"{'+' if true else '-'}{kind} {words}"


@pytest.mark.parametrize(
    ("caption", "scene", "said", "mentioned"),
    [
        ("A large red star.", TWO, "+shape star, +colour red, +size large", 1),
        ("a small red star", TWO, "+shape star, +colour red, -size small", 0),
        ("a blue star", TWO, "+shape star, -colour blue", 0),  # each half is true of another: of equals the first
        ("a red star and a red star", TWO, "+shape star, +colour red, -shape star, -colour red", 1),
        ("a star above a circle", TWO, "+shape star, +shape circle, +relation above", 2),
        ("a star below a circle", TWO, "+shape circle, +shape star, -relation above", 2),
        ("a star left of a circle", ONE, "+shape star, -shape circle, -relation left of", 1),
        ("a star left of a circle", COLUMN, "+shape star, +shape circle, -relation left of", 2),  # neither is
        ("a circle right of a star", COLUMN, "+shape star, +shape circle, -relation left of", 2),
        ("a star above a circle", ROW, "+shape star, +shape circle, -relation above", 2),
        ("something", TWO, "+thing an object", 0),
        ("a star and a thing", ONE, "-thing an object, +shape star", 1),
        ("three things on a navy background", TWO, "-count three objects, +background navy background", 0),
        ("one object: a star in the top left", ONE, "+shape star, +row top, +column left, +count one object", 1),
        ("an image", TWO, "", 0),
    ],
)
def test_statements_by_hand(caption: str, scene: Scene, said: str, mentioned: int) -> None:
    found = judge_caption(caption, scene)
    assert ", ".join(says(found)) == said
    assert found.parsable
    assert found.mentioned == mentioned


def test_outside_the_language_nothing_is_known() -> None:
    assert parse("a star star star") is None
    found = judge_caption("a star star star", TWO)
    assert astuple(found) == (False, (), 0, 2)
    assert not found.true


def test_the_whole_set() -> None:
    captions = ["a red star", "a blue star", "an image", "star star", "a star and a circle"]
    found = judge(captions, [ONE, ONE, TWO, TWO, TWO])
    assert found == {
        "parsable": 4 / 5,
        "wholly_true": 3 / 5,  # the red star, the image, star and circle
        "objects_mentioned": 3 / 8,
        "statements": 6 / 4,
        "statements_true": 5 / 6,
        "caption_statements_true": (1 + 0.5 + 0 + 1) / 4,  # "an image" states nothing, "star star" nobody knows what
        "statements_true@shape": 1.0,
        "statements_true@colour": 0.5,
    }
    assert judge(["an image"], [ONE]) == {
        "parsable": 1.0,
        "wholly_true": 1.0,
        "objects_mentioned": 0.0,
        "statements": 0.0,
    }
    assert judge(["nonsense"], [ONE]) == {
        "parsable": 0.0,
        "wholly_true": 0.0,
        "objects_mentioned": 0.0,
        "caption_statements_true": 0.0,
    }


def test_what_captions_are_worth_elsewhere() -> None:
    found = elsewhere(["a circle", "a white background", "nonsense"], [TWO, ONE, ONE])
    assert found == {  # half of three is one: the first caption goes to the second scene, the last to the first
        "wholly_true_elsewhere": 1 / 3,
        "statements_true_elsewhere": 1 / 2,
        "caption_statements_true_elsewhere": 1 / 3,
        "objects_mentioned_elsewhere": 0.0,
    }
    assert elsewhere(["a circle"], [TWO]) == {}


def test_every_kind_is_named() -> None:
    caption = "two things: a small striped blue circle in the bottom right corner below a thing on a navy background"
    assert [s for s in judge_caption(caption, TWO).statements if not s.true] == []
    kinds = {name.partition("@")[2] for name in judge([caption], [TWO]) if "@" in name}
    assert kinds == {"shape", "colour", "size", "fill", "row", "column", "thing", "relation", "count", "background"}
    assert Statement("relation", "above", True) in judge_caption(caption, TWO).statements


@pytest.mark.parametrize("captions", [[], ["a star", "a star"], "a"])
def test_one_caption_a_scene(captions: list[str]) -> None:
    with pytest.raises(ValueError, match="captions came for 1 scenes"):
        judge(captions, [ONE])
