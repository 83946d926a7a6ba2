"""Questions about a scene and their answers; exactly one thing fits each description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from kiloword.data.scenes.captions import NOUNS, NUMBERS, OF_A_THING, StyleChoices
from kiloword.data.scenes.query import ANY, Pattern, fits, stated
from kiloword.data.scenes.world import BACKGROUNDS, COLUMNS, MOST, ROWS, WORDS, Scene, Thing
from kiloword.errors import article

VERSION = "questions-v1"
PLACES = [
    ["centre" if r == c == 1 else f"{row} {column}" for c, column in enumerate(COLUMNS)] for r, row in enumerate(ROWS)
]
COUNTS = tuple(str(n) for n in range(MOST + 1))
_NAMED = [word for kind in ("colour", "shape", "size", "fill") for word in WORDS[kind]]
ANSWERS = ("yes", "no", *COUNTS, *_NAMED, *(p for row in PLACES for p in row), *BACKGROUNDS)
"""Every answer there is."""

_KINDS = ("colour", "shape", "size", "fill", "place", "background", *["count"] * 2, *["yes/no"] * 3)
_PLACE = ("row", "column")
_DESCRIPTIONS = [*(facts for n in range(4) for facts in combinations(OF_A_THING, n)), _PLACE]
_COUNTED = (("colour",), ("shape",), ("size",), ("fill",), ("colour", "shape"), ("fill", "shape"), ("size", "shape"))
_EXISTS = (("colour", "shape"), ("colour", "shape"), ("fill", "shape"), ("size", "colour"), ("fill", "colour", "shape"))
_ASKED = {
    "colour": ("what colour is {}?", "which colour does {} have?"),
    "shape": ("what shape is {}?", "which shape does {} have?"),
    "size": ("what size is {}?", "which size does {} have?"),
    "fill": ("how is {} filled?", "which fill does {} have?"),
}
_RELATIONS = {"left of": ("column", 1), "right of": ("column", -1), "above": ("row", 1), "below": ("row", -1)}


@dataclass(frozen=True)
class Question:
    """A question, its answer, and its kind: colour, shape, size, fill, place, background, count or yes/no."""

    words: str
    answer: str
    kind: str


def ask(scene: Scene, choices: int) -> Question:
    """A question about the scene. Args: choices: any number from 0, which selects the question and its words."""
    pick = StyleChoices(choices)
    kind = pick(_KINDS)
    if kind not in WORDS:
        return {"place": _place, "background": _background, "count": _count, "yes/no": _yes_no}[kind](scene, pick)
    thing = pick(scene.things)
    described = _definite(scene, thing, pick, (kind,))
    assert described is not None, "a place tells every thing"
    return Question(pick(_ASKED[kind]).format(_the(described, pick)), WORDS[kind][getattr(thing, kind)], kind)


def _place(scene: Scene, pick: StyleChoices) -> Question:
    thing = pick(scene.things)
    described = _definite(scene, thing, pick, _PLACE)
    if described is None:  # an equal thing is elsewhere
        return _background(scene, pick)
    words = pick(("where is {}?", "in which part of the picture is {}?")).format(_the(described, pick))
    return Question(words, PLACES[thing.row][thing.column], "place")


def _background(scene: Scene, pick: StyleChoices) -> Question:
    words = pick(("what colour is the background?", "which colour does the background have?"))
    return Question(words, BACKGROUNDS[scene.background], "background")


def _count(scene: Scene, pick: StyleChoices) -> Question:
    """All things, or those with one or two facts of a thing in the scene, so that "0" is not the usual answer."""
    pattern = ANY
    if pick((True, True, True, False)):
        pattern = stated(pick(scene.things), pick(_COUNTED))
        if pick((False, False, True)):
            pattern = _changed(scene, pattern, pick)
    words = pick(("how many {} are there?", "how many {} does the picture show?"))
    return Question(words.format(_some(pattern, pick, "s")), COUNTS[len(_fitting(scene, pattern))], "count")


def _yes_no(scene: Scene, pick: StyleChoices) -> Question:
    yes = pick((True, False))
    form = pick((_exists, _exists, _is, _related, _number))
    words = form(scene, yes, pick) or _exists(scene, yes, pick)
    return Question(words, "yes" if yes else "no", "yes/no")


def _exists(scene: Scene, yes: bool, pick: StyleChoices) -> str:
    pattern = stated(pick(scene.things), pick(_EXISTS))
    pattern = pattern if yes else _changed(scene, pattern, pick)
    assert bool(_fitting(scene, pattern)) == yes
    return f"{pick(('is there', 'does the picture show'))} {_some(pattern, pick)}?"


def _is(scene: Scene, yes: bool, pick: StyleChoices) -> str:
    """Is the star red?"""
    thing, fact = pick(scene.things), pick(("colour", "fill", "size"))
    described = _definite(scene, thing, pick, (fact,))
    assert described is not None
    value = getattr(thing, fact)
    if not yes:
        value = pick([v for v in range(len(WORDS[fact])) if v != value])
    return f"is {_the(described, pick)} {WORDS[fact][value]}?"


def _related(scene: Scene, yes: bool, pick: StyleChoices) -> str | None:
    """Is the star above the circle? Things are not described by places; None where that is impossible."""
    pairs = [
        (a, b, words)
        for words, (axis, sign) in _RELATIONS.items()
        for a in scene.things
        for b in scene.things
        if sign * getattr(a, axis) < sign * getattr(b, axis)
    ]
    if not pairs:
        return None
    first, second, words = pick(pairs)
    if not yes:
        first, second = second, first
    one, other = (_definite(scene, thing, pick, _PLACE) for thing in (first, second))
    return f"is {_the(one, pick)} {words} {_the(other, pick)}?" if one and other else None


def _number(scene: Scene, yes: bool, pick: StyleChoices) -> str:
    """Are there two objects?"""
    count = len(scene.things)
    if not yes:
        count = pick([n for n in range(1, MOST + 1) if n != count])
    verb, plural = ("is", "") if count == 1 else ("are", "s")
    return f"{verb} there exactly {NUMBERS[count]} {_some(ANY, pick, plural)}?"


def _changed(scene: Scene, pattern: Pattern, pick: StyleChoices) -> Pattern:
    """Another value for one of the pattern's facts, so that no thing fits; half the time a value in the scene."""
    false: dict[str, list[Pattern]] = {}
    for fact in (f for f in OF_A_THING if getattr(pattern, f) is not None):
        others = (pattern._replace(**{fact: value}) for value in range(len(WORDS[fact])))
        if patterns := [p for p in others if not _fitting(scene, p)]:
            false[fact] = patterns
    if not false:  # one fact of few values, which are all in the scene
        return pattern
    fact = pick(list(false))
    near = [p for p in false[fact] if getattr(p, fact) in [getattr(t, fact) for t in scene.things]]
    use_near = pick((True, False))
    return pick(near if near and use_near else false[fact])


def _definite(scene: Scene, thing: Thing, pick: StyleChoices, without: Sequence[str]) -> Pattern | None:
    """A description without some facts that fits this thing only; None where there is none."""
    allowed = [stated(thing, facts) for facts in _DESCRIPTIONS if not set(facts) & set(without)]
    alone = [p for p in allowed if len(_fitting(scene, p)) == 1]
    return pick(alone) if alone else None


def _fitting(scene: Scene, pattern: Pattern) -> list[Thing]:
    return [t for t in scene.things if fits(pattern, t)]


def _the(pattern: Pattern, pick: StyleChoices) -> str:
    where = "" if pattern.row is None or pattern.column is None else f" in the {PLACES[pattern.row][pattern.column]}"
    return f"the {_noun(pattern, pick, ('object', 'thing'))}{where}"


def _some(pattern: Pattern, pick: StyleChoices, plural: str = "") -> str:
    """Things of a kind: "a red star", "red stars"."""
    words = _noun(pattern, pick)
    if plural:
        return f"{words}es" if words.endswith("s") else f"{words}s"
    return article(words) if pattern != ANY else words


def _noun(pattern: Pattern, pick: StyleChoices, nouns: Sequence[str] = NOUNS) -> str:
    adjectives = [WORDS[fact][v] for fact in ("size", "fill", "colour") if (v := getattr(pattern, fact)) is not None]
    return " ".join([*adjectives, pick(nouns) if pattern.shape is None else WORDS["shape"][pattern.shape]])
