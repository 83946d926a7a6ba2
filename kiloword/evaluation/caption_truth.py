"""Exact evaluation of captions of scenes: the statements of each caption, and which of them are true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from kiloword.data.scenes.captions import NOUNS, NUMBERS, parse
from kiloword.data.scenes.query import ANY, Query
from kiloword.data.scenes.world import BACKGROUNDS, COLOURS, COLUMNS, FILLS, ROWS, SHAPES, SIZES, Scene, Thing

KINDS = ("shape", "colour", "size", "fill", "row", "column", "thing", "relation", "count", "background")
OVERALL = ("wholly_true", "statements_true", "caption_statements_true", "objects_mentioned")
_VALUES = {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "fill": FILLS, "row": ROWS, "column": COLUMNS}


class Statement(NamedTuple):
    """One statement of a caption."""

    kind: str  # one of KINDS
    words: str  # for people
    true: bool


class JudgedCaption(NamedTuple):
    """One caption of one scene."""

    parsable: bool
    statements: tuple[Statement, ...] = ()
    mentioned: int = 0  # objects of the scene that the caption names

    @property
    def share(self) -> float:
        """The true share of its statements, 0 outside the language."""
        return sum(s.true for s in self.statements) / len(self.statements) if self.statements else 0.0


def judge(captions: Sequence[str], scenes: Sequence[Scene]) -> dict[str, float]:
    """How true captions are of their scenes, one caption a scene, by what `judge_caption` finds.

    `parsable` and `wholly_true`: shares of all captions that are in the language, and true to the last word.
    `statements`: their mean number in captions of the language. `statements_true`, `statements_true@KIND`: the true
    share of all of them. `caption_statements_true`: mean of each caption's own share, 0 outside the language, without
    captions that state nothing ("an image"). `objects_mentioned`: share of all objects that captions mention.
    `..._elsewhere`: the same captions judged on the scene half the data further on, as general captions are often true.
    What no caption decides (a share of none) is omitted.
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
        "wholly_true": sum(one.parsable and all(s.true for s in one.statements) for one in judged) / len(judged),
        "objects_mentioned": sum(one.mentioned for one in judged) / sum(len(scene.things) for scene in scenes),
    }
    if parsable:
        values["statements"] = len(statements) / len(parsable)
    shares = [one.share for one in judged if one.statements or not one.parsable]
    if shares:
        values["caption_statements_true"] = sum(shares) / len(shares)
    for name, kinds in {"": KINDS, **{f"@{kind}": (kind,) for kind in KINDS}}.items():
        if group := [statement.true for statement in statements if statement.kind in kinds]:
            values[f"statements_true{name}"] = sum(group) / len(group)
    return values


def judge_caption(caption: str, scene: Scene) -> JudgedCaption:
    """What one caption says of a scene.

    Its statements are each attribute of each thing, of a thing without any ("an object") that it is there, the relation
    of two things, the number of objects, and the background. Things stand for different objects: by the assignment
    with most true statements, of equals with most mentioned objects, then the first in reading order. A thing for which
    no object is left has no true statement or relation. An object is mentioned by a thing with attributes that are all
    true of it, in the assignment that mentions most.
    """
    query = parse(caption)
    if query is None:
        return JudgedCaption(False)
    short = max(0, len(query.things) - len(scene.things))
    judged = []
    for chosen in permutations((*scene.things, *[None] * short), len(query.things)):
        said = [(p, thing) for p, thing in zip(query.things, chosen, strict=True) if thing is not None and p != ANY]
        named = sum(all(a in (None, b) for a, b in zip(p, thing, strict=True)) for p, thing in said)
        judged.append((tuple(_about_things(query, chosen)), named))
    best, _ = max(judged, key=lambda one: (sum(s.true for s in one[0]), one[1]))  # the first of equals
    count, background, others = query.count, query.background, list[Statement]()
    if count is not None:
        words = f"{NUMBERS[count]} {NOUNS[0]}{'s' if count > 1 else ''}"
        others.append(Statement("count", words, count == len(scene.things)))
    if background is not None:
        others.append(Statement("background", f"{BACKGROUNDS[background]} background", background == scene.background))
    return JudgedCaption(True, (*best, *others), max(named for _, named in judged))


def _about_things(query: Query, chosen: Sequence[Thing | None]) -> Iterator[Statement]:
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
