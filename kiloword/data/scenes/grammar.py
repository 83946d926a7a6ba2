"""Queries as English captions and back: `parse(render(query, style)) == query` for every style."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from kiloword.data.scenes.query import ANY, Pattern, Query, Relation
from kiloword.data.scenes.world import BACKGROUNDS, COLOURS, COLUMNS, ROWS, SHAPES

X = TypeVar("X")

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


class StyleChoices:
    """A number as a sequence of choices, so that one integer selects one wording."""

    def __init__(self, number: int) -> None:
        self.rest = number

    def __call__(self, options: Sequence[X]) -> X:
        self.rest, index = divmod(self.rest, len(options))
        return options[index]


def render(query: Query, style: int = 0) -> str:
    """A caption of the query. Args: style: any number from 0, which selects words and order; up to 2^40 most differ."""
    pick = StyleChoices(style)
    if not query.things and query.count is None:
        return _no_things(query, pick)
    phrase, sentence = _list(query, pick) if query.things else ("", False)
    if query.count is not None:
        phrase = f"{_count(query.count, pick)}: {phrase}".removesuffix(": ")
    plural = query.count is not None and query.count > 1
    return _framed(phrase, sentence, plural, query.background, pick)


def _no_things(query: Query, pick: StyleChoices) -> str:
    picture = pick(PICTURES)
    if query.background is None:
        return with_article(picture)
    ground = with_article(BACKGROUNDS[query.background] + " background")
    forms = (f"{with_article(picture)} with {ground}", ground, f"the background is {BACKGROUNDS[query.background]}")
    return pick(forms)


def _framed(phrase: str, sentence: bool, plural: bool, background: int | None, pick: StyleChoices) -> str:
    there = f"there {'are' if plural else 'is'} {phrase}"
    picture = pick(PICTURES)
    forms = (phrase, f"{with_article(picture)} of {phrase}", f"{with_article(picture)} with {phrase}", there)
    framed = phrase if sentence else pick(forms)
    if background is None:
        return framed
    ground = with_article(BACKGROUNDS[background] + " background")
    if framed in (phrase, there) and pick((True, False, False)):
        return f"on {ground}, {framed}"
    return f"{framed} {pick(('on', 'against'))} {ground}"


def _count(count: int, pick: StyleChoices) -> str:
    noun = pick(NOUNS) + ("s" if count > 1 else "")
    return f"{pick(('', 'exactly '))}{NUMBERS[count]} {noun}"


def _list(query: Query, pick: StyleChoices) -> tuple[str, bool]:
    """The things in words, and whether these are a sentence."""
    if query.relation:
        return _related(query, query.relation, pick)
    alone = len(query.things) == 1 and query.count is None
    things = [_thing(p, pick, alone) for p in _shuffled(query.things, pick)]
    return " and ".join([*([", ".join(things[:-1])] if things[:-1] else []), things[-1]]), False


def _related(query: Query, relation: Relation, pick: StyleChoices) -> tuple[str, bool]:
    words = pick([w for w, (r, _) in RELATIONS.items() if r == relation])
    first, second = query.things[:2] if RELATIONS[words][1] else (query.things[1], query.things[0])
    sentence = query.count is None and pick((False, True))
    phrase = f"{_thing(first, pick)} {'is ' if sentence else ''}{words} {_thing(second, pick)}"
    for other in query.things[2:]:
        phrase += f", {pick(('together', 'along'))} with {_thing(other, pick)}"
    return phrase, sentence


def _shuffled(things: Sequence[Pattern], pick: StyleChoices) -> list[Pattern]:
    rest, out = list(things), []
    while rest:
        out.append(rest.pop(pick(range(len(rest)))))
    return out


def _thing(p: Pattern, pick: StyleChoices, alone: bool = False) -> str:
    where = _place(p, pick)
    if p == ANY and alone:
        return pick(("something", "an object", "at least one object", "at least one shape", "at least one thing"))
    fill = None if p.fill is None else pick(FILL_WORDS[p.fill])
    colour = None if p.colour is None else COLOURS[p.colour]
    size = None if p.size is None else pick(SIZE_WORDS[p.size])
    middle = (fill, colour) if pick((False, True)) else (colour, fill)
    words = [w for w in (size, *middle) if w is not None]
    if p.shape is None and len(words) < 2 and pick((False, True)):
        return " ".join(["something", *words]) + where
    noun = pick(NOUNS) if p.shape is None else SHAPES[p.shape]
    return with_article(" ".join([*words, noun])) + where


def _place(p: Pattern, pick: StyleChoices) -> str:
    if p.row is None and p.column is None:
        return ""
    phrase = pick([words for words, place in PLACES.items() if place == (p.row, p.column)])
    return f" {pick(('in', 'at')) if p.row is not None and p.column is not None else 'in'} the {phrase}"


def _places() -> dict[str, tuple[int | None, int | None]]:
    rows = {w: (r, None) for r, word in enumerate(ROWS) for w in [f"{word} row"]}
    columns = {w: (None, c) for c, word in enumerate(COLUMNS) for w in [f"{word} column"]}
    both: dict[str, tuple[int, int]] = {"centre": (1, 1), "middle": (1, 1)}
    for r, words in enumerate((("top", "upper"), ("middle",), ("bottom", "lower"))):
        for c, column in enumerate(COLUMNS):
            if (r, c) != (1, 1):
                both |= {f"{word} {column}": (r, c) for word in words}
                both |= {f"{word} {column} corner": (r, c) for word in words if r != 1 and c != 1}
    return {**rows, **columns, **both}


PLACES = _places()


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


_BACKGROUND = f"an? ({'|'.join(BACKGROUNDS)}) background"
_PICTURE = f"an? (?:{'|'.join(PICTURES)})"
_ONLY_BACKGROUND = re.compile(rf"(?:{_PICTURE} with )?{_BACKGROUND}|the background is ({'|'.join(BACKGROUNDS)})")
_ONLY_PICTURE = re.compile(_PICTURE)
_BEFORE = re.compile(rf"on {_BACKGROUND}, ")
_AFTER = re.compile(rf" (?:on|against) {_BACKGROUND}$")
_FRAME = re.compile(rf"{_PICTURE} (?:of|with) |there (?:is|are) ")
_NUMBER = re.compile(rf"(?:exactly )?(?:(one) (?:{'|'.join(NOUNS)})|(two|three) (?:{'|'.join(NOUNS)})s)(?:: |$)")
_RELATION = re.compile(rf" (?:is )?({'|'.join(sorted(RELATIONS, key=len, reverse=True))}) ")
_WITH = re.compile(r", (?:together|along) with ")
_AND = re.compile(r", | and ")
_WHERE = re.compile(r" (?:in|at) the ")
_ADJECTIVES: dict[str, tuple[str, int]] = {
    **{w: ("colour", i) for i, w in enumerate(COLOURS)},
    **{w: ("size", i) for i, words in enumerate(SIZE_WORDS) for w in words},
    **{w: ("fill", i) for i, words in enumerate(FILL_WORDS) for w in words},
}
_HEADS = {**dict.fromkeys(NOUNS, -1), **{w: i for i, w in enumerate(SHAPES)}}


def parse(caption: str) -> Query | None:
    """The query that a caption means, or None when it is not of this language (case and a final period aside)."""
    text = " ".join(caption.lower().split()).removesuffix(".")
    if _ONLY_PICTURE.fullmatch(text):
        return Query()
    if m := _ONLY_BACKGROUND.fullmatch(text):
        return Query(background=BACKGROUNDS.index(m[1] or m[2]))
    background = count = None
    if m := _BEFORE.match(text):
        background, text = BACKGROUNDS.index(m[1]), text[m.end() :]
    elif m := _AFTER.search(text):
        background, text = BACKGROUNDS.index(m[1]), text[: m.start()]
    if m := _FRAME.match(text):
        text = text[m.end() :]
    if m := _NUMBER.match(text):
        count, text = NUMBERS.index(m[1] or m[2]), text[m.end() :]
        if not text and not m[0].endswith(": "):
            return Query(count=count, background=background)
    try:
        return Query(*_parse_list(text), count, background)
    except (KeyError, ValueError):  # not of this language
        return None


def _parse_list(text: str) -> tuple[tuple[Pattern, ...], Relation | None]:
    """Things and their relation. Raises KeyError or ValueError for text outside the language, as `_parse_thing`."""
    text, *others = _WITH.split(text)
    first, *related = _RELATION.split(text)
    if not related and not others:
        return tuple(map(_parse_thing, _AND.split(first))), None
    words, second = related
    relation, in_order = RELATIONS[words]
    pair = (first, second) if in_order else (second, first)
    return tuple(map(_parse_thing, (*pair, *others))), relation


@lru_cache(maxsize=65536)
def _parse_thing(text: str) -> Pattern:
    what, *where = _WHERE.split(text)
    facts: dict[str, int | None] = {}
    if where:
        (place,) = where
        facts["row"], facts["column"] = PLACES[place]
    article, *words = what.split()
    if article == "something":
        words.append(NOUNS[0])
    elif what.startswith("at least one "):
        words = words[2:]
    elif article not in ("a", "an"):
        raise ValueError(text)
    *adjectives, head = words
    if _HEADS[head] >= 0:
        facts["shape"] = _HEADS[head]
    for name, value in (_ADJECTIVES[word] for word in adjectives):
        if name in facts:
            raise ValueError(text)
        facts[name] = value
    return Pattern(**facts)
