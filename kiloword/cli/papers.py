"""Flags --recipe and --config of train and plan, and the verb recipes. No torch or rich at import: help is instant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kiloword.config import papers
from kiloword.config.papers import LENGTHS, TOWERS, NamedRecipe, RecipeValue
from kiloword.config.settings import leaves, parse
from kiloword.errors import suggestion
from kiloword.files import write_json
from kiloword.terminal import say

_WIDE = 240  # columns where the output is no terminal


def chosen(method: str, name: str | None, config: str | None) -> NamedRecipe | None:
    """The recipe that --recipe or --config names. Args: method: METHOD, "" where it is omitted.

    Raises: ValueError for both flags, a recipe that cannot be read, and one of another method.
    """
    if name and config:
        raise ValueError('--recipe and --config are both given: give one; a file inherits a recipe by base = "NAME".')
    if not (name or config):
        return None
    named = papers.load(name, method) if name else papers.read(Path(str(config)))
    if ":" in named.method and not method:
        raise ValueError(
            f"{named.name} names the method {named.method}, of a module: give it as METHOD if you trust it."
        )
    if not (named.method or method):
        raise ValueError(f"{named.name} names no method: give METHOD, or add method to the file.")
    if method and named.method and not named.is_of(method):
        raise ValueError(
            f"{named.name} is a recipe of {named.method}, but METHOD is {method}: omit METHOD, or give it."
        )
    return named


def method_settings(named: NamedRecipe, kind: type) -> Any:
    """The settings of a method, with the values of a recipe. Raises: ValueError for those that it does not have."""
    values = named.settings()
    known = [leaf.path for leaf in leaves(kind())]
    for name in (name.removeprefix("settings.") for name in named.entries if name.startswith("settings.")):
        if name not in known:
            expected = f"expected one of {', '.join(known)}.{suggestion(name, known)}"
            raise ValueError(f"recipe {named.name}: unknown setting 'settings.{name}': {expected}")
    try:
        return parse(values, kind, strict=True)
    except ValueError as e:
        raise ValueError(f"recipe {named.name}: settings: {e}") from e


def report(named: NamedRecipe, recipe: Any, length: dict[str, Any], replaced: str) -> list[str]:
    """Every value of a recipe with its source, and what this run has instead. Args: recipe: as it runs; length: of its
    flags; replaced: the flag that replaces the towers, or ""."""
    lines = [f"recipe     {named.name}{f': {named.about}' if named.about else ''}"]
    now = {leaf.path: leaf.value for leaf in leaves(recipe)} | length | dict(_leaves(recipe.settings, "settings."))
    for name, entry in papers.expanded(named).items():
        note = _why(entry)
        if replaced and (name.startswith(TOWERS) or name == "size"):
            note = f"replaced by {replaced}"
        elif name in LENGTHS and name not in length:
            note = f"replaced by --{next(iter(length), 'steps')}"
        elif name in now and _plain(now[name]) != _plain(entry.value):
            note = f"here {_text(now[name])}; {note}"
        lines.append(f"  {name:32} {_text(entry.value):16} {note}".rstrip())
    return lines


def towers_flag(named: NamedRecipe, size: Sequence[str], init: Sequence[str]) -> str:
    """The flag that replaces the towers of a recipe, or "". Args: size, init: values of the flags."""
    if init:
        return f"--init {init[0]}"
    return f"--size {size[0]}" if size and size[0] != named.value("size") else ""


def _why(entry: RecipeValue) -> str:
    """The source of a value, or the reason for it."""
    return entry.source or (f"open: {entry.open}" if entry.open else "")


def _leaves(tree: dict[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{at}{key}.")
        yield f"{at}{key}", value


def _plain(value: Any) -> Any:
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    """A value as tables show it."""
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:_}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def listing(json: Path | None = None) -> None:
    """Print the recipes of papers."""
    from kiloword.terminal.screen import Screen, plain_table

    table = plain_table("recipe", "method", "towers", "data", "batch", "length", "about")
    rows = []
    for one in map(papers.load, papers.names()):
        length = " ".join(f"{_text(value)} {name}" for name, value in one.length().items())
        cells = (one.method, one.value("size"), _fact(one, "data"), one.value("batch"), length, one.about)
        rows.append((one.name, *(_text(cell) for cell in cells)))
        table.add_row(*rows[-1])
    Screen(_WIDE).print(table)
    say("kiloword recipes show NAME prints each value with its source; kiloword train --recipe NAME trains by it.")
    if json is not None:
        keys = ("method", "towers", "data", "batch", "length", "about")
        write_json(json, {name: dict(zip(keys, cells, strict=True)) for name, *cells in rows})


def page(name: str, json: Path | None = None) -> None:
    """Print each value of a recipe, its source, and what the paper leaves open with our choice."""
    from kiloword.terminal.screen import Screen, plain_table

    one = papers.load(name)
    values = papers.expanded(one)
    say(f"{one.name}: {one.about}; method {one.method}; {one.paper}")
    table = plain_table("setting", "value", "source, or why chosen where the paper leaves it open")
    for key, entry in [*values.items(), *((f"plan.{key}", entry) for key, entry in one.facts.items())]:
        table.add_row(key, _text(entry.value), _why(entry))
    Screen(_WIDE).print(table)
    say(*(f"note: {note}" for note in one.notes))
    if json is not None:
        facts = {key: asdict(entry) for key, entry in one.facts.items()}
        words = {"method": one.method, "about": one.about, "paper": one.paper, "notes": list(one.notes)}
        write_json(json, {**words, "values": {key: asdict(entry) for key, entry in values.items()}, "plan": facts})


def _fact(one: NamedRecipe, name: str) -> Any:
    return one.facts[name].value if name in one.facts else ""
