"""Recipes by name, as papers state them, and recipes in users' own files: values by dotted name, each with its source.

The recipes of a paper are tables of a TOML file in `paper_recipes/`. A value is plain, or has a source, `{value = 64,
source = "table 1"}`; what the paper leaves open says so, `{value = 5e-4, open = "why this value"}`. `base` names a
recipe whose values a table inherits. A user's file is one such table, or the `config.json` of a run. No torch here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from kiloword.config.recipes import Recipe, model_of_size
from kiloword.config.settings import BaseSettings, check, leaves, parse
from kiloword.errors import suggestion

FOLDER = Path(__file__).parent / "paper_recipes"
LENGTHS = ("steps", "epochs", "samples")
FACTS = ("data", "images", "gpus", "gpu", "captions")  # PLAN + NAME: of the paper's run, not settings of training
PLAN = "plan."
TOWERS = ("model.image.", "model.text.", "model.head.")
SHAPE = (  # what a size sets, where a recipe does not set it itself
    *(f"image.{name}" for name in ("size", "patch", "width", "depth", "heads", "mlp")),
    *(f"text.{name}" for name in ("context", "width", "depth", "heads", "mlp")),
    "head.dim",
)
WORDS = ("about", "method", "notes", "paper", "main")  # keys of a table that are no settings


@dataclass(frozen=True)
class RecipeValue:
    """A value of a recipe: stated by the paper, or our choice where the paper leaves it open."""

    value: Any
    source: str = ""  # where the paper states it
    open: str = ""  # reason for the choice


@dataclass(frozen=True, kw_only=True)
class NamedRecipe(BaseSettings):
    """A recipe of a paper or of a file: only the values that it sets."""

    name: str  # of a paper's recipe; of a file its path
    about: str = ""
    method: str = ""
    notes: tuple[str, ...] = ()
    paper: str = ""
    main: bool = False  # of the recipes of its method, the one named "paper"
    steps: int | None = None
    epochs: float | None = None
    samples: int | None = None
    entries: dict[str, RecipeValue] = field(default_factory=dict)  # by dotted name, as in config.json; one of LENGTHS
    facts: dict[str, RecipeValue] = field(default_factory=dict)  # by the names in FACTS

    def value(self, name: str, default: Any = None) -> Any:
        """The value that it sets, or the default."""
        return self.entries[name].value if name in self.entries else default

    def settings(self) -> dict[str, Any]:
        """The method's settings, nested as in config.json."""
        tree: dict[str, Any] = {}
        for name, entry in self.entries.items():
            if name.startswith("settings."):
                _put(tree, name.split(".")[1:], entry.value)
        return tree

    def is_of(self, method: str) -> bool:
        """Whether it is a recipe of a method, which may have components."""
        return method == self.method or method.startswith(f"{self.method}+")

    def length(self) -> dict[str, Any]:
        """The length: steps, epochs or samples."""
        return {name: length for name in LENGTHS if (length := getattr(self, name)) is not None}


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """The tables of all papers, by name; those whose name begins with an underscore are only inherited from."""
    files = [tomllib.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.toml"))]
    papers = [(file.pop("paper"), file) for file in files]
    return {name: {"paper": paper, **table} for paper, file in papers for name, table in file.items()}


def names() -> list[str]:
    """The recipes of papers, by paper."""
    return [name for name in _tables() if not name.startswith("_")]


def load(name: str, method: str = "") -> NamedRecipe:
    """A recipe of a paper. Args: name: "paper" is the main one of `method`.

    Raises: ValueError for an unknown name.
    """
    if name in names():
        return _read(name, _tables()[name])
    if name != "paper":
        raise ValueError(f"unknown recipe {name!r}: expected one of {', '.join(names())}.{suggestion(name, names())}")
    if not method:
        raise ValueError("--recipe paper is the main recipe of a method: give METHOD first, e.g. train llip.")
    all_of = [recipe for recipe in map(load, names()) if recipe.is_of(method)]
    main = [recipe for recipe in all_of if recipe.main]
    if len(main) != 1:
        expected = f"choose {' or '.join(recipe.name for recipe in all_of)}" if all_of else "there is none"
        raise ValueError(f"--recipe paper: {method} has no single recipe of a paper: {expected}.")
    return main[0]


def expanded(chosen: NamedRecipe) -> dict[str, RecipeValue]:
    """The values of a recipe and of the towers that its size implies."""
    size = chosen.entries.get("size")
    if size is None:
        return chosen.entries
    shape = {leaf.path: leaf.value for leaf in leaves(model_of_size(size.value))}
    implied = {f"model.{name}": RecipeValue(shape[name], open=f"size {size.value}") for name in SHAPE}
    if size.source:
        implied["model.image.patch"] = RecipeValue(shape["image.patch"], size.source)
    return {**chosen.entries, **{name: entry for name, entry in implied.items() if name not in chosen.entries}}


def read(path: Path) -> NamedRecipe:
    """A recipe in a file: TOML, or the config.json of a run.

    Raises: ValueError naming the file, what is wrong in it and what was expected.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file: --config takes a TOML file, or the config.json of a run.")
    try:
        text = path.read_text("utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        if not isinstance(table, dict):
            raise ValueError("expected a table of settings.")
        if str(table.get("format", "")).startswith("kiloword-model"):
            raise ValueError("it describes a model; expected the config.json of a run, one folder above.")
        if str(table.get("format", "")).startswith("kiloword-run"):
            table = table.get("recipe", {})
        chosen = _read(str(path), table)
        own = dict(_entries(table))
        if "base" not in own or "size" not in own or own["size"].value == load(own["base"].value).value("size"):
            return chosen  # another size replaces the towers of the base, as --size does
        kept = {name: entry for name, entry in chosen.entries.items() if name in own or not name.startswith(TOWERS)}
        return replace(chosen, entries=kept)
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f"{path} is no recipe: {e}") from e


def _read(name: str, table: Mapping[str, Any]) -> NamedRecipe:
    """A table with what it inherits. Raises: ValueError for an unknown key."""
    every = _inherited(table)
    words = {word: entry.value for word, entry in every.items() if word in (*WORDS, *LENGTHS)}
    facts = {path.removeprefix(PLAN): every.pop(path) for path in list(every) if path.startswith(PLAN)}
    return replace(
        parse({"name": name, **words}, NamedRecipe),
        entries={path: entry for path, entry in every.items() if path not in WORDS},
        facts=facts,
    )


def _inherited(table: Mapping[str, Any]) -> dict[str, RecipeValue]:
    """The values of a table and of those that it inherits from, by dotted name. Raises: as `_read`."""
    own = dict(_entries(table))
    for path in own:
        if path not in _known() and not path.startswith("settings."):
            raise ValueError(f"unknown setting {path!r}: expected one as in config.json.{suggestion(path, _known())}")
    lengths = [key for key in LENGTHS if key in own]
    if len(lengths) > 1:
        raise ValueError(f"{' and '.join(lengths)} both say how long to train: expected one of them.")
    if "base" not in own:
        return own
    base, none = str(own.pop("base").value), RecipeValue(())
    if base not in _tables():
        expected = f"expected one of {', '.join(names())}.{suggestion(base, names())}"
        raise ValueError(f"its base is {base!r}: {expected}")
    above = _inherited(_tables()[base])
    replaced = {"main", *(LENGTHS if lengths else ())}
    notes = RecipeValue([*above.get("notes", none).value, *own.get("notes", none).value])
    return {**{key: entry for key, entry in above.items() if key not in replaced}, **own, "notes": notes}


def _entries(table: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, RecipeValue]]:
    """The values of nested tables by dotted name."""
    for key, value in table.items():
        path = f"{at}{key}"
        if isinstance(value, dict) and "value" in value and value.keys() <= {"value", "source", "open"}:
            yield path, RecipeValue(value["value"], str(value.get("source", "")), str(value.get("open", "")))
        elif isinstance(value, dict) and path not in _known() - {"settings"}:
            yield from _entries(value, f"{path}.")
        else:
            yield path, RecipeValue(value)


@cache
def _known() -> frozenset[str]:
    """The dotted names of what a table may say."""
    settings = {leaf.path for leaf in leaves(Recipe(method=""))}
    return frozenset(settings | {"base", *WORDS, *LENGTHS} | {PLAN + name for name in FACTS})


def fill(recipe: Recipe, chosen: NamedRecipe, towers: bool = True) -> Recipe:
    """A recipe with the chosen values, but for a length in epochs or samples. Args: towers: also those of the model.

    Raises: ValueError for values of a wrong type or out of their limits.
    """
    tree = asdict(recipe)
    for name, entry in chosen.entries.items():
        if name not in ("epochs", "samples") and (towers or not name.startswith(TOWERS)):
            _put(tree, name.split("."), entry.value)
    try:
        filled = parse(tree, Recipe)
        check(filled, prefix="")
    except ValueError as e:
        raise ValueError(f"recipe {chosen.name}: {e}") from e
    return filled


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
