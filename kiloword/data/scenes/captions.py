"""Captions of scenes: what can be said of one, in which words, and what a caption means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import TypeVar

from kiloword.data.scenes.query import ANY, Pattern, Query, Relation, entails, stated
from kiloword.data.scenes.world import BACKGROUNDS, COLOURS, COLUMNS, ROWS, SHAPES, Scene, Thing
from kiloword.errors import article
from kiloword.randomness import key

X = TypeVar("X")

OF_A_THING = ("shape", "colour", "size", "fill")
_FACTS = {  # that captions of a level state, as often as they stand here
    1: [*["colour", "shape"] * 3, *["fill"] * 2, "size", "row", "column", "count", "background"],
    2: [
        *["size fill colour shape"] * 3,
        *["fill colour shape"] * 3,
        *["size colour shape"] * 2,
        "size fill shape row column",
        "fill colour row column",
        "fill shape row column",
        "colour shape row column",
        "colour shape background",
    ],
}
_INNER = {level: [one for one in facts if set(one.split()) <= set(OF_A_THING)] for level, facts in _FACTS.items()}
_TWO_THINGS = ("colour shape", "shape colour", "colour colour", "shape shape")

PICTURES = ("picture", "image", "drawing")
NOUNS = ("object", "shape", "thing")
NUMBERS = ("zero", "one", "two", "three")
SIZE_WORDS = (("small", "little"), ("large", "big"))
FILL_WORDS = (("solid", "filled"), ("striped",), ("hollow", "outlined"))
RELATIONS: dict[str, tuple[Relation, bool]] = {  # words: relation, whether the things keep their order
    "left of": ("left", True),
    "to the left of": ("left", True),
    "right of": ("left", False),
    "to the right of": ("left", False),
    "above": ("above", True),
    "higher than": ("above", True),
    "below": ("above", False),
    "lower than": ("above", False),
}
PLACES: dict[str, tuple[int | None, int | None]] = {
    **{f"{word} row": (r, None) for r, word in enumerate(ROWS)},
    **{f"{word} column": (None, c) for c, word in enumerate(COLUMNS)},
    "centre": (1, 1),
    "middle": (1, 1),
    **{
        f"{word} {column}{corner}": (r, c)
        for corner in ("", " corner")
        for r, words in enumerate((("top", "upper"), ("middle",), ("bottom", "lower")))
        for c, column in enumerate(COLUMNS)
        for word in words
        if (r, c) != (1, 1) and (not corner or 1 not in (r, c))
    },
}


class StyleChoices:
    """A number as a sequence of choices, so that one integer selects one wording."""

    def __init__(self, number: int) -> None:
        self.rest = number

    def __call__(self, options: Sequence[X]) -> X:
        self.rest, index = divmod(self.rest, len(options))
        return options[index]


def describe(scene: Scene, level: int, choices: int, inner: bool = False) -> Query:
    """A query of one level that is true of the scene.

    Args: level 0: true of every scene; 1: one fact (about a third of all scenes match); 2: one thing described
    fully or nearly, or two things in a relation (about 1%); 3: every thing with all its attributes and its place,
    and the background, the count or a relation. choices: any number from 0, which selects the content; inner: state
    shape, colour, size and fill alone, which are true of any part of the image that shows the things.
    """
    pick, things = StyleChoices(choices), scene.things
    if level == 0:
        return pick((Query(), Query((ANY,)), Query((ANY,))))
    if level == 3:
        return Query(tuple(stated(t, OF_A_THING) for t in things)) if inner else _everything(scene, pick)
    if level == 2 and not inner and len(things) > 1 and pick((False, False, True)):
        first, second, relation = _ordered(things, pick)
        one, other = pick(_TWO_THINGS).split()
        return Query((stated(first, [one]), stated(second, [other])), relation)
    facts = pick((_INNER if inner else _FACTS)[level])
    if facts == "count":
        return Query(count=len(things))
    background = scene.background if facts.endswith("background") else None
    of_thing = facts.removesuffix("background").split()
    return Query((stated(pick(things), of_thing),) if of_thing else (), background=background)


def _everything(scene: Scene, pick: StyleChoices) -> Query:
    things, relation = scene.things, None
    say_background = pick((True, True, True, False))
    other = pick((False, True)) or not say_background
    if other and len(things) > 1 and pick((True, False)):
        first, second, relation = _ordered(things, pick)
        things = (first, second, *(t for t in things if t not in (first, second)))
        other = False
    number = len(things) if other else None
    return Query(tuple(Pattern(*t) for t in things), relation, number, scene.background if say_background else None)


def _ordered(things: Sequence[Thing], pick: StyleChoices) -> tuple[Thing, Thing, Relation]:
    """Two things and a relation between them, which exists because things are at different places."""
    relations: list[tuple[Thing, Thing, Relation]] = []
    for a in things:
        relations += [(a, b, "left") for b in things if a.column < b.column]
        relations += [(a, b, "above") for b in things if a.row < b.row]
    return pick(relations)


def chain(scene: Scene, number: int, inner: bool = False) -> list[Query]:
    """Four queries that are true of a scene, from level 0 to level 3, each entailed by the next.

    Args: number, from 0, selects one of the many chains; inner: as of `describe`.
    """
    queries = [describe(scene, 3, number, inner)]
    for level in (2, 1, 0):
        candidates = (describe(scene, level, key(number, level, attempt), inner) for attempt in count())
        queries.append(next(query for query in candidates if entails(queries[-1], query)))
    return queries[::-1]


def render(query: Query, style: int = 0) -> str:
    """A caption of the query. Args: style: any number from 0, which selects words and order; up to 2^40 most differ."""
    pick = StyleChoices(style)
    colour = None if query.background is None else BACKGROUNDS[query.background]
    ground = article(f"{colour} background")
    if not query.things and query.count is None:
        picture = article(pick(PICTURES))
        return pick((f"{picture} with {ground}", ground, f"the background is {colour}")) if colour else picture
    phrase, sentence = _list(query, pick) if query.things else ("", False)
    if query.count is not None:
        number = f"{NUMBERS[query.count]} {pick(NOUNS)}{'s' * (query.count > 1)}"
        phrase = f"{pick(('', 'exactly '))}{number}{': ' * bool(phrase)}{phrase}"
    there = f"there {'are' if (query.count or 1) > 1 else 'is'} {phrase}"
    picture = article(pick(PICTURES))
    framed = phrase if sentence else pick((phrase, f"{picture} of {phrase}", f"{picture} with {phrase}", there))
    if colour is None:
        return framed
    if framed in (phrase, there) and pick((True, False, False)):
        return f"on {ground}, {framed}"
    return f"{framed} {pick(('on', 'against'))} {ground}"


def _list(query: Query, pick: StyleChoices) -> tuple[str, bool]:
    """The things in words, and whether these are a sentence."""
    rest, things = list(query.things), list[Pattern]()
    if not query.relation:
        while rest:
            things.append(rest.pop(pick(range(len(rest)))))
        words = [_thing(p, pick, alone=len(things) == 1 and query.count is None) for p in things]
        return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])), False
    relation = pick([words for words, (kind, _) in RELATIONS.items() if kind == query.relation])
    first, second = rest[:2] if RELATIONS[relation][1] else rest[1::-1]
    sentence = query.count is None and pick((False, True))
    phrase = f"{_thing(first, pick)} {'is ' if sentence else ''}{relation} {_thing(second, pick)}"
    for other in rest[2:]:
        phrase += f", {pick(('together', 'along'))} with {_thing(other, pick)}"
    return phrase, sentence


def _thing(p: Pattern, pick: StyleChoices, alone: bool = False) -> str:
    where = ""
    if (p.row, p.column) != (None, None):
        phrase = pick([words for words, place in PLACES.items() if place == (p.row, p.column)])
        where = f" {pick(('in', 'at')) if None not in (p.row, p.column) else 'in'} the {phrase}"
    if p == ANY and alone:
        return pick(("something", "an object", "at least one object", "at least one shape", "at least one thing"))
    fill = None if p.fill is None else pick(FILL_WORDS[p.fill])
    colour = None if p.colour is None else COLOURS[p.colour]
    size = None if p.size is None else pick(SIZE_WORDS[p.size])
    words = [w for w in (size, *((fill, colour) if pick((False, True)) else (colour, fill))) if w is not None]
    if p.shape is None and len(words) < 2 and pick((False, True)):
        return " ".join(["something", *words]) + where
    return article(" ".join([*words, pick(NOUNS) if p.shape is None else SHAPES[p.shape]])) + where


_COLOUR, _NOUN = "|".join(BACKGROUNDS), "|".join(NOUNS)
_PICTURE = f"an? (?:{'|'.join(PICTURES)})"
_NOTHING = re.compile(
    rf"{_PICTURE}(?: with an? ({_COLOUR}) background)?|an? ({_COLOUR}) background|the background is ({_COLOUR})"
)
_CAPTION = re.compile(
    rf"(?:on an? (?P<before>{_COLOUR}) background, )?(?:{_PICTURE} (?:of|with) |there (?:is|are) )?"
    rf"(?:(?:exactly )?(?:(?P<one>one) (?:{_NOUN})|(?P<more>two|three) (?:{_NOUN})s)(?P<colon>: )?)?"
    rf"(?P<things>.*?)(?: (?:on|against) an? (?P<after>{_COLOUR}) background)?"
)
_RELATION = re.compile(rf" (?:is )?({'|'.join(sorted(RELATIONS, key=len, reverse=True))}) ")
_ADJECTIVES: dict[str, tuple[str, int]] = {
    **{w: ("colour", i) for i, w in enumerate(COLOURS)},
    **{w: ("size", i) for i, words in enumerate(SIZE_WORDS) for w in words},
    **{w: ("fill", i) for i, words in enumerate(FILL_WORDS) for w in words},
}


def parse(caption: str) -> Query | None:
    """The query that a caption means, or None when it is not of this language (case and a final period aside)."""
    text = " ".join(caption.lower().split()).removesuffix(".")
    if m := _NOTHING.fullmatch(text):
        colour = m[1] or m[2] or m[3]
        return Query(background=BACKGROUNDS.index(colour) if colour else None)
    m = _CAPTION.fullmatch(text)
    if m is None or (m["before"] and m["after"]):
        return None
    colour, number = m["before"] or m["after"], m["one"] or m["more"]
    background = BACKGROUNDS.index(colour) if colour else None
    if number and bool(m["colon"]) != bool(m["things"]):
        return None
    if number and not m["things"]:
        return Query((), None, NUMBERS.index(number), background)
    try:
        return Query(*_parse_list(m["things"]), NUMBERS.index(number) if number else None, background)
    except (KeyError, ValueError):  # not of this language
        return None


def _parse_list(text: str) -> tuple[tuple[Pattern, ...], Relation | None]:
    """Things and their relation. Raises KeyError or ValueError for text outside the language, as `_parse_thing`."""
    text, *others = re.split(", (?:together|along) with ", text)
    first, *related = _RELATION.split(text)
    if not related and not others:
        return tuple(map(_parse_thing, re.split(", | and ", first))), None
    words, second = related
    relation, in_order = RELATIONS[words]
    pair = (first, second) if in_order else (second, first)
    return tuple(map(_parse_thing, (*pair, *others))), relation


@lru_cache(maxsize=65536)
def _parse_thing(text: str) -> Pattern:
    what, *where = re.split(" (?:in|at) the ", text)
    facts: dict[str, int | None] = {}
    if where:
        (place,) = where
        facts["row"], facts["column"] = PLACES[place]
    first, *words = what.split()
    if first == "something":
        words.append(NOUNS[0])
    elif what.startswith("at least one "):
        words = words[2:]
    elif first not in ("a", "an"):
        raise ValueError(text)
    *adjectives, head = words
    if head not in NOUNS:
        facts["shape"] = SHAPES.index(head)
    for name, value in (_ADJECTIVES[word] for word in adjectives):
        if name in facts:
            raise ValueError(text)
        facts[name] = value
    return Pattern(**facts)
