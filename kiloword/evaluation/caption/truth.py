"""Exact evaluation of captions of scenes: the statements of each caption, and which of them are true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from kiloword.data.scenes.captions import NOUNS, NUMBERS, parse
from kiloword.data.scenes.query import ANY, Pattern, Query
from kiloword.data.scenes.world import BACKGROUNDS, COLOURS, COLUMNS, FILLS, ROWS, SHAPES, SIZES, Scene, Thing

KINDS = ("shape", "colour", "size", "fill", "row", "column", "thing", "relation", "count", "background")
OVERALL = ("wholly_true", "statements_true", "caption_statements_true", "objects_mentioned")
_VALUES = {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "fill": FILLS, "row": ROWS, "column": COLUMNS}
Assignment = tuple[Thing | None, ...]  # for each thing that a caption names, the object it stands for


class Statement(NamedTuple):
    """One statement of a caption."""

    kind: str  # one of KINDS
    words: str  # for people
    true: bool


@dataclass(frozen=True)
class JudgedCaption:
    """One caption of one scene."""

    parsable: bool
    statements: tuple[Statement, ...]
    mentioned: int  # objects of the scene that the caption names
    objects: int  # that the scene has

    @property
    def true(self) -> bool:
        """Whether the whole caption is: the same as `parse` and `matches`."""
        return self.parsable and all(s.true for s in self.statements)


def judge(captions: Sequence[str], scenes: Sequence[Scene]) -> dict[str, float]:
    """How true captions are of their scenes, one caption a scene, by what `judge_caption` finds.

    `parsable`: share of the captions that are in the language; nothing is known of what others say.
    `wholly_true`: share of all captions that are true to the last word; a caption outside the language is not.
    `statements`: mean number of statements of the captions in the language, how specific they are.
    `statements_true`: share of all their statements, added over captions, that are true; `statements_true@KIND`: of
    those of one kind. It says nothing of captions outside the language, so read it beside `parsable`, or take
    `caption_statements_true`: the mean of each caption's own share, 0 outside the language; captions that state nothing
    ("an image") have no share and are skipped.
    `objects_mentioned`: share of the scenes' objects, added over all scenes, that the captions mention.
    What no caption decides (a share of none) is omitted.

    Errors: ValueError unless there are as many captions as scenes, at least one.
    """
    if not captions or len(captions) != len(scenes) or isinstance(captions, str):
        raise ValueError(f"{len(captions)} captions came for {len(scenes)} scenes. Expected one for each of some.")
    return summary([judge_caption(caption, scene) for caption, scene in zip(captions, scenes, strict=True)])


def summary(judged: Sequence[JudgedCaption]) -> dict[str, float]:
    """The values of `judge` from captions that were judged one by one."""
    parsable = [one for one in judged if one.parsable]
    statements = [statement for one in parsable for statement in one.statements]
    values = {
        "parsable": len(parsable) / len(judged),
        "wholly_true": sum(one.true for one in judged) / len(judged),
        "objects_mentioned": sum(one.mentioned for one in judged) / sum(one.objects for one in judged),
    }
    if parsable:
        values["statements"] = len(statements) / len(parsable)
    shares = [_share(one.statements) if one.parsable else 0.0 for one in judged if one.statements or not one.parsable]
    if shares:
        values["caption_statements_true"] = sum(shares) / len(shares)
    by_kind = {kind: [statement for statement in statements if statement.kind == kind] for kind in KINDS}
    groups = {"": statements, **{f"@{kind}": of_kind for kind, of_kind in by_kind.items()}}
    return values | {f"statements_true{name}": _share(group) for name, group in groups.items() if group}


def elsewhere(captions: Sequence[str], scenes: Sequence[Scene]) -> dict[str, float]:
    """How true the same captions are of other scenes, for comparison: a general caption is true of many scenes.

    Each caption is judged on the scene half the data set further on; a single scene has no other.
    """
    half = len(scenes) // 2
    if not half:
        return {}
    values = judge(captions, [*scenes[half:], *scenes[:half]])
    return {f"{name}_elsewhere": values[name] for name in OVERALL if name in values}


def judge_caption(caption: str, scene: Scene) -> JudgedCaption:
    """What one caption says of a scene.

    Its statements are: each attribute of each thing (shape, colour, size, fill, row, column); of a thing without any
    ("an object") that it is there; the relation of two things; the number of objects; the background. Which object a
    thing stands for is the reader's to choose, different ones for different things: of all such assignments the one
    counts by which most statements are true, of equals the one that mentions most objects, then the first in reading
    order. A thing for which no object is left has no true statement, and no relation of it is true.

    An object is mentioned by a thing with attributes that are all true of it; of all pairings of different things with
    different objects the largest counts. It need not be the assignment above, and no relation, count or background
    matters for it.
    """
    query = parse(caption)
    if query is None:
        return JudgedCaption(False, (), 0, len(scene.things))
    short = max(0, len(query.things) - len(scene.things))
    assignments = permutations((*scene.things, *[None] * short), len(query.things))
    judged = [(tuple(_about_things(query, a)), _mentioned(query, a)) for a in assignments]
    best, _ = max(judged, key=lambda one: (sum(s.true for s in one[0]), one[1]))  # the first of equals
    mentioned = max(count for _, count in judged)
    return JudgedCaption(True, (*best, *_about_all(query, scene)), mentioned, len(scene.things))


def _about_things(query: Query, chosen: Assignment) -> Iterator[Statement]:
    """The statements about things, when these stand for the chosen objects."""
    for pattern, thing in zip(query.things, chosen, strict=True):
        if pattern == ANY:
            yield Statement("thing", f"an {NOUNS[0]}", thing is not None)
        for kind, value in pattern._asdict().items():
            if value is not None:
                yield Statement(kind, _VALUES[kind][value], thing is not None and getattr(thing, kind) == value)
    if query.relation is not None:
        first, second = chosen[:2]
        axis, words = ("column", "left of") if query.relation == "left" else ("row", "above")
        true = first is not None and second is not None and getattr(first, axis) < getattr(second, axis)
        yield Statement("relation", words, true)


def _about_all(query: Query, scene: Scene) -> Iterator[Statement]:
    """The statements about the scene as a whole."""
    if query.count is not None:
        words = f"{NUMBERS[query.count]} {NOUNS[0]}{'s' if query.count > 1 else ''}"
        yield Statement("count", words, query.count == len(scene.things))
    if query.background is not None:
        words = f"{BACKGROUNDS[query.background]} background"
        yield Statement("background", words, query.background == scene.background)


def _mentioned(query: Query, chosen: Assignment) -> int:
    """Number of things with attributes that are all true of their object."""
    pairs = zip(query.things, chosen, strict=True)
    return sum(thing is not None and pattern != ANY and _true_of(pattern, thing) for pattern, thing in pairs)


def _true_of(pattern: Pattern, thing: Thing) -> bool:
    return all(value in (None, actual) for value, actual in zip(pattern, thing, strict=True))


def _share(statements: Sequence[Statement]) -> float:
    return sum(s.true for s in statements) / len(statements)
