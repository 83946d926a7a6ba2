"""Exact evaluation of captions of scenes: the statements of each caption, and which of them are true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.query import ANY, Query, fits
from kiloword.data.scenes.world import Scene, Thing

KINDS = ("shape", "colour", "size", "fill", "row", "column", "thing", "relation", "count", "background")
OVERALL = ("wholly_true", "statements_true", "caption_statements_true", "objects_mentioned")


class JudgedCaption(NamedTuple):
    """One caption of one scene."""

    parsable: bool
    statements: tuple[tuple[str, bool], ...] = ()  # the kind of each statement, and whether it is true
    mentioned: int = 0  # objects of the scene that the caption names

    @property
    def true(self) -> int:
        """How many statements are true."""
        return sum(true for _, true in self.statements)


def judge(captions: Sequence[str], scenes: Sequence[Scene]) -> dict[str, float]:
    """How true captions are of their scenes, one caption a scene; a share of none is omitted.

    `parsable`, `wholly_true`: shares of captions in the language, and true to the last word. `statements`: mean number.
    `statements_true`, `statements_true@KIND`: true share of all. `caption_statements_true`: mean of each caption's own
    share, 0 outside the language, without captions that state nothing. `objects_mentioned`: share of all objects.
    `..._elsewhere`: of the scene half the data further on, as general captions are often true.
    """
    half = len(scenes) // 2
    others = _values(captions, [*scenes[half:], *scenes[:half]]) if half else {}
    return _values(captions, scenes) | {f"{name}_elsewhere": others[name] for name in OVERALL if name in others}


def _values(captions: Sequence[str], scenes: Sequence[Scene]) -> dict[str, float]:
    judged = list(map(judge_caption, captions, scenes))
    parsable = [one for one in judged if one.parsable]
    statements = [statement for one in parsable for statement in one.statements]
    values = {
        "parsable": len(parsable) / len(judged),
        "wholly_true": sum(one.true == len(one.statements) for one in parsable) / len(judged),
        "objects_mentioned": sum(one.mentioned for one in judged) / sum(len(scene.things) for scene in scenes),
    }
    if parsable:
        values["statements"] = len(statements) / len(parsable)
    shares = [one.true / max(1, len(one.statements)) for one in judged if one.statements or not one.parsable]
    if shares:
        values["caption_statements_true"] = sum(shares) / len(shares)
    for name, kinds in {"": KINDS, **{f"@{kind}": (kind,) for kind in KINDS}}.items():
        if group := [true for kind, true in statements if kind in kinds]:
            values[f"statements_true{name}"] = sum(group) / len(group)
    return values


def judge_caption(caption: str, scene: Scene) -> JudgedCaption:
    """What one caption says of a scene: each attribute of each thing (of "an object", that it is there), the relation
    of two things, the number of objects, and the background.

    Things stand for different objects: by the assignment with most true statements, of equals with most mentioned
    objects. Where no object is left, nothing is true of a thing. A thing mentions an object if all its attributes are
    true of the object, in the assignment that mentions most.
    """
    query = parse(caption)
    if query is None:
        return JudgedCaption(False)
    short = max(0, len(query.things) - len(scene.things))
    judged = list[tuple[tuple[tuple[str, bool], ...], int]]()
    for chosen in permutations((*scene.things, *[None] * short), len(query.things)):
        said = [(p, thing) for p, thing in zip(query.things, chosen, strict=True) if thing is not None and p != ANY]
        named = sum(fits(p, thing) for p, thing in said)
        judged.append((tuple(_about_things(query, chosen)), named))
    best, _ = max(judged, key=lambda one: (sum(true for _, true in one[0]), one[1]))  # the first of equals
    if query.count is not None:
        best += (("count", query.count == len(scene.things)),)
    if query.background is not None:
        best += (("background", query.background == scene.background),)
    return JudgedCaption(True, best, max(named for _, named in judged))


def _about_things(query: Query, chosen: Sequence[Thing | None]) -> Iterator[tuple[str, bool]]:
    """The statements about things, when these stand for the chosen objects."""
    for pattern, thing in zip(query.things, chosen, strict=True):
        if pattern == ANY:
            yield "thing", thing is not None
        for kind, value in pattern._asdict().items():
            if value is not None:
                yield kind, thing is not None and getattr(thing, kind) == value
    if query.relation is not None:
        (first, second), axis = chosen[:2], "column" if query.relation == "left" else "row"
        yield "relation", None not in (first, second) and getattr(first, axis) < getattr(second, axis)
