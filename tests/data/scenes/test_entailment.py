"""Whether one caption of scenes follows from another: against drawn scenes, and on pairs that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scenes import queries

from kiloword.data.scenes.captions import describe
from kiloword.data.scenes.entailment import follows
from kiloword.data.scenes.query import Pattern, Query, matches, truth_table
from kiloword.data.scenes.source import parse_scenes
from kiloword.data.scenes.world import Scene, Thing


@st.composite
def nested(draw: st.DrawFn) -> tuple[Query, Query]:
    """Two queries, the second often what is left of the first when facts are taken away."""
    a, b = draw(queries()), draw(queries())
    if draw(st.booleans()):
        keep = draw(st.lists(st.booleans(), min_size=18, max_size=18))
        things = [Pattern(*(v if keep[6 * n + k] else None for k, v in enumerate(t))) for n, t in enumerate(a.things)]
        fewer = tuple(things if a.relation else things[: draw(st.integers(0, len(things)))])
        b = Query(fewer, draw(st.sampled_from([None, a.relation])), draw(st.sampled_from([None, a.count])), None)
    return a, b


@settings(max_examples=60, deadline=None)
@given(nested(), st.integers(0, 2**32))
def test_what_follows_is_true_of_every_scene(pair: tuple[Query, Query], seed: int) -> None:
    a, b = pair
    shown = [scene for scene in completions(a, np.random.default_rng(seed), 60) if matches(a, scene)]
    if shown and follows(a, b):
        assert all(matches(b, scene) for scene in shown)


def completions(a: Query, rng: np.random.Generator, tries: int) -> list[Scene]:
    """Scenes that a may be true of: its things with what is not said drawn, and more things where there is room."""
    made = []
    for _ in range(tries):
        count = a.count or int(rng.integers(max(1, len(a.things)), 4))
        said = [*a.things, *[Pattern()] * 3][:count]
        draws = [[int(rng.integers(n)) for n in (8, 8, 2, 3, 3, 3)] for _ in said]
        things = [
            Thing(*(d if s is None else s for s, d in zip(p, ds, strict=True)))
            for p, ds in zip(said, draws, strict=True)
        ]
        if len({(t.row, t.column) for t in things}) == len(things):
            made.append(Scene(int(rng.integers(6)) if a.background is None else a.background, tuple(things)))
    return made


LEFT, RIGHT = Pattern(column=0), Pattern(column=2)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Query(), Query((Pattern(),)), True),  # every scene has something
        (Query(), Query((Pattern(), Pattern())), False),
        (Query(count=2), Query((Pattern(), Pattern())), True),
        (Query((LEFT, RIGHT)), Query((LEFT, RIGHT), "left"), True),
        (Query((Pattern(colour=1), Pattern(column=1)), "left"), Query((Pattern(colour=1, column=0),)), True),
        (Query((Pattern(colour=1), Pattern(column=2)), "left"), Query((Pattern(colour=1, column=0),)), False),
        (Query((LEFT, LEFT, LEFT)), Query((Pattern(row=0),)), True),  # three different places
        (Query((LEFT, LEFT)), Query((Pattern(row=0),)), False),
        (Query((LEFT, LEFT, LEFT)), Query(count=3), True),  # there are no more
        (Query((LEFT, LEFT)), Query(count=2), False),
        (Query((Pattern(size=0), Pattern(size=1))), Query((Pattern(size=1), Pattern(size=0))), True),
        (Query((Pattern(), Pattern())), Query((Pattern(size=1),)), False),
        (Query((Pattern(colour=2),)), Query((Pattern(colour=2),), background=1), False),
        (Query((Pattern(colour=2),), background=1), Query(background=1), True),
    ],
)
def test_entailment_of_known_pairs(a: Query, b: Query, expected: bool) -> None:
    assert follows(a, b) is expected


def test_what_does_not_follow_has_a_scene_against_it() -> None:
    """Descriptions of one scene: over 20,000 others, one of them contradicts whatever does not follow."""
    rows = parse_scenes("scenes?n=20000").rows
    source = parse_scenes("scenes:test?n=40")
    for row in range(40):
        scene = source.scene(row)
        a, b = (describe(scene, k, 7919 * row + k) for k in (1, 2))
        for x, y in ((a, b), (b, a), (a, describe(scene, 1, row))):
            truth = truth_table([x, y], rows)
            assert truth[0].sum() >= 20
            assert follows(x, y) == bool((truth[0] <= truth[1]).all())
