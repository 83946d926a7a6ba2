"""The verb recipes, and what a run prints of the recipe that it follows. No torch or rich at import."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from kiloword.config import papers
from kiloword.config.papers import NamedRecipe, RecipeValue
from kiloword.config.recipes import Recipe
from kiloword.config.settings import leaves, leaves_of, shown
from kiloword.files import write_json
from kiloword.terminal import say


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the recipes of papers, or show one with the source of each value.

    Examples:
      kiloword recipes
      kiloword recipes show llip-b32
    """

    what: Positional[Literal["list", "show"]] = "list"  # list all, or show one with its name
    name: Positional[str] = ""  # recipe to show
    json: Path | None = None  # write the table to this file

    def run(self) -> None:
        """Print a table. Raises: ValueError for an unknown recipe."""
        from kiloword.terminal.screen import say_table

        if (self.what == "show") != bool(self.name):
            raise ValueError("recipes expects list, or show NAME, e.g. kiloword recipes show llip-b32.")
        if self.what == "show":
            one = papers.load(self.name)
            plain: dict[str, Any] = {key: getattr(one, key) for key in ("method", "about", "paper", "notes")}
            plain |= {"values": papers.expanded(one), "plan": one.facts}
            say(f"{one.name}: {one.about}; method {one.method}; {one.paper}")
            rows = plain["values"] | {f"plan.{key}": entry for key, entry in one.facts.items()}
            columns = ("setting", "value", "source, or why chosen where the paper leaves it open")
            say_table([(key, shown(entry.value), _source(entry)) for key, entry in rows.items()], *columns)
            plain |= {name: {key: asdict(entry) for key, entry in plain[name].items()} for name in ("values", "plan")}
            last = [f"note: {note}" for note in one.notes]
        else:
            names, plain = ("method", "towers", "data", "batch", "length", "about"), {}
            for one in map(papers.load, papers.names()):
                data = one.facts["data"].value if "data" in one.facts else ""
                length = " ".join(f"{shown(value)} {name}" for name, value in one.length().items())
                cells = [one.method, one.value("size"), data, one.value("batch"), length, one.about]
                plain[one.name] = dict(zip(names, (cell and shown(cell) for cell in cells), strict=True))
            say_table([(name, *cells.values()) for name, cells in plain.items()], "recipe", *names)
            last = [
                "kiloword recipes show NAME prints each value with its source; kiloword train --recipe NAME uses it."
            ]
        say(*last)
        if self.json is not None:
            write_json(self.json, plain)


def report(named: NamedRecipe, recipe: Recipe, length: dict[str, Any]) -> list[str]:
    """Every value of a recipe with its source, and what this run has instead. Args: length: of its flags."""
    lines = [f"recipe     {named.name}{f': {named.about}' if named.about else ''}"]
    now = {leaf.path: leaf.value for leaf in leaves(recipe)} | length
    now |= dict(leaves_of(recipe.settings, "settings"))
    for name, entry in papers.expanded(named).items():
        here = now.get(name, entry.value)
        changed = "" if _plain(here) == _plain(entry.value) else f"here {shown(here)}; "
        lines.append(f"  {name:32} {shown(entry.value):16} {changed}{_source(entry)}".rstrip())
    return lines


def towers_flag(named: NamedRecipe, size: str | None, init: str | None) -> str:
    """The flag that replaces the towers of a recipe, or "". Args: size, init: values of the flags."""
    if init:
        return f"--init {init}"
    return f"--size {size}" if size and size != named.value("size") else ""


def _source(entry: RecipeValue) -> str:
    """The source of a value, or the reason for it."""
    return entry.source or (f"open: {entry.open}" if entry.open else "")


def _plain(value: Any) -> Any:
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value
