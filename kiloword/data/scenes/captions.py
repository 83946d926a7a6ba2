"""Captions of a scene as queries, at four levels of generality."""

from __future__ import annotations

from collections.abc import Sequence

from kiloword.data.scenes.grammar import StyleChoices
from kiloword.data.scenes.query import ANY, Pattern, Query, Relation
from kiloword.data.scenes.world import Scene, Thing

_ONE_FACT = (*["colour", "shape"] * 3, *["fill"] * 2, *["size"], "row", "column", "count", "background")
_SEVERAL_FACTS = (
    *[("size", "fill", "colour", "shape")] * 3,
    *[("fill", "colour", "shape")] * 3,
    *[("size", "colour", "shape")] * 2,
    ("size", "fill", "shape", "place"),
    ("fill", "colour", "place"),
    ("fill", "shape", "place"),
    ("colour", "shape", "place"),
    ("colour", "shape", "background"),
)
_OF_A_THING = ("shape", "colour", "size", "fill")
_ONE_OF_A_THING = tuple(f for f in _ONE_FACT if f in _OF_A_THING)
_SEVERAL_OF_A_THING = tuple(facts for facts in _SEVERAL_FACTS if set(facts) <= set(_OF_A_THING))
_TWO_THINGS = ("colour shape", "shape colour", "colour colour", "shape shape")


def describe(scene: Scene, level: int, choices: int) -> Query:
    """A query of one level that is true of the scene.

    Args: level 0: true of every scene; 1: one fact (about a third of all scenes match); 2: one thing described
    fully or nearly, or two things in a relation (about 1%); 3: every thing with all its attributes and its place,
    and the background, the count or a relation. choices: any number from 0, which selects the content.
    """
    pick = StyleChoices(choices)
    return (_anything, _one_fact, _one_thing, _everything)[level](scene, pick)


def describe_things(scene: Scene, level: int, choices: int) -> Query:
    """As `describe`, but of shape, colour, size and fill alone: true of any part that shows the things.

    Args: level 0: true of every scene; 1: one fact; 2: several facts of one thing; 3: every thing with all its facts.
    """
    pick = StyleChoices(choices)
    if level == 0:
        return _anything(scene, pick)
    if level == 3:
        return Query(tuple(_facts(t, _OF_A_THING) for t in scene.things))
    facts = (pick(_ONE_OF_A_THING),) if level == 1 else pick(_SEVERAL_OF_A_THING)
    return Query((_facts(pick(scene.things), facts),))


def _anything(scene: Scene, pick: StyleChoices) -> Query:
    return pick((Query(), Query((ANY,)), Query((ANY,))))


def _one_fact(scene: Scene, pick: StyleChoices) -> Query:
    fact = pick(_ONE_FACT)
    if fact == "count":
        return Query(count=len(scene.things))
    if fact == "background":
        return Query(background=scene.background)
    return Query((_facts(pick(scene.things), (fact,)),))


def _one_thing(scene: Scene, pick: StyleChoices) -> Query:
    if len(scene.things) > 1 and pick((False, False, True)):
        first, second, relation = _ordered(scene.things, pick)
        one, other = pick(_TWO_THINGS).split()
        return Query((_facts(first, (one,)), _facts(second, (other,))), relation)
    facts = pick(_SEVERAL_FACTS)
    background = scene.background if "background" in facts else None
    return Query((_facts(pick(scene.things), facts),), background=background)


def _everything(scene: Scene, pick: StyleChoices) -> Query:
    things, relation = scene.things, None
    say_background = pick((True, True, True, False))
    other = pick((False, True)) or not say_background
    if other and len(things) > 1 and pick((True, False)):
        first, second, relation = _ordered(things, pick)
        things = (first, second, *(t for t in things if t not in (first, second)))
        other = False
    count = len(things) if other else None
    return Query(tuple(Pattern(*t) for t in things), relation, count, scene.background if say_background else None)


def _ordered(things: Sequence[Thing], pick: StyleChoices) -> tuple[Thing, Thing, Relation]:
    """Two things and a relation between them, which exists because things are at different places."""
    relations: list[tuple[Thing, Thing, Relation]] = []
    for a in things:
        relations += [(a, b, "left") for b in things if a.column < b.column]
        relations += [(a, b, "above") for b in things if a.row < b.row]
    return pick(relations)


def _facts(thing: Thing, facts: Sequence[str]) -> Pattern:
    names = [n for f in facts for n in (("row", "column") if f == "place" else (f,)) if n != "background"]
    return Pattern(**{n: getattr(thing, n) for n in names})
