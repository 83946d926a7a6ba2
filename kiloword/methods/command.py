"""Verbs whose flags depend on a method: `kiloword train METHOD --settings.k 16`. No torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from kiloword.config import papers
from kiloword.config.papers import NamedRecipe
from kiloword.config.settings import Nothing, check, leaves, parse
from kiloword.errors import suggestion
from kiloword.terminal import say

HELP = ("-h", "--help", "--help-all")
REGISTRY = ConstructorRegistry()


@REGISTRY.struct_rule
def _declared(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Settings as tyro reads them, where a field declares another flag than its name (`settings.about`)."""
    if not is_dataclass(info.type) or not any("flag" in f.metadata for f in fields(info.type)):
        return None
    hints, specs = get_type_hints(info.type, include_extras=True), []
    for f in fields(info.type):
        kind, flag = hints[f.name], f.metadata.get("flag")
        if flag is not None:
            kind = Annotated[kind, arg(name=flag) if flag or is_dataclass(kind) else tyro.conf.Suppress]
        specs.append(StructFieldSpec(f.name, kind, getattr(info.default, f.name), f.metadata.get("help")))
    return StructConstructorSpec(info.type, tuple(specs))


@dataclass(frozen=True)
class MethodWords:
    """The words of a verb: its method, and flags that are not parsed yet, as their defaults depend on some of them."""

    verb: str
    method: str  # with its components; "" where only help is requested
    flags: Sequence[str]
    settings: type = Nothing  # of the method
    recipe: NamedRecipe | None = None  # of --recipe or --config

    def first(self, flag: str, default: Any = None) -> Any:
        """The first value of a flag as a word, where it is given."""
        return (values_of(self.flags, flag) or (default,))[0]

    def read(self, run: Any) -> tuple[Any, Any]:
        """Parse the flags of the verb, a dataclass whose defaults `run` holds, and the flags of the method.

        --help prints the flags in `run.common`, by group, --help-all prints all.
        Raises: ValueError for a setting of the method that is NaN, infinite or out of its limits.
        """
        name, about = f"kiloword {self.verb} {self.method or 'METHOD'}", cleandoc(type(run).__doc__ or "")
        if {"-h", "--help"} & set(self.flags):
            try:
                tyro.cli(_common(run), args=["--help"], prog=name, description=about)
            finally:
                if names := ", ".join(leaf.flag for leaf in leaves(self.settings())):
                    say(f"Settings of {self.method} (--settings.NAME): {names}.")
                say(f"These are the common flags; all, by your method, data and size: {name} --help-all")
        usual = self.settings() if self.recipe is None else method_settings(self.recipe, self.settings)
        parts: list[tuple[str, Any, Any]] = [("run", Annotated[type(run), arg(name="")], field(default=run))]
        words = make_dataclass("Words", [*parts, ("settings", self.settings, field(default=usual))])
        flags = ["--help" if word == "--help-all" else word for word in self.flags]
        parsed: Any = tyro.cli(words, args=flags, prog=name, description=about, registry=REGISTRY)
        check(parsed.settings, "--settings.")
        return parsed.run, parsed.settings


def _common(run: Any) -> type:
    """The flags in `run.common`: a group is a dataclass of them."""
    by_flag, groups = {leaf.flag: leaf for leaf in leaves(run) if leaf.field.metadata.get("flag") != ""}, []
    for title, flags in run.common.items():
        entries: list[tuple[str, Any, Any]] = []
        for flag in flags.split():
            leaf = by_flag[flag]
            hint, text = get_type_hints(leaf.owner, include_extras=True)[leaf.field.name], leaf.field.metadata["help"]
            name = flag.replace("-", "_").replace(".", "_")
            entries.append((name, Annotated[hint, arg(name=flag, help=text)], field(default=leaf.value)))
        group: Any = make_dataclass(title, entries, frozen=True)
        group.__doc__ = ""
        groups.append((title, Annotated[group, tyro.conf.OmitArgPrefixes], field(default=group())))
    return make_dataclass("Common", groups)


def method_words(argv: Sequence[str], example: str) -> MethodWords:
    """The method, the recipe and the flags of a verb, with which the example begins.

    Raises: ValueError without a method or for an unknown one, and as `named_recipe`.
    """
    verb, method = example.split()[0], argv[0] if argv and not argv[0].startswith("-") else ""
    flags = argv[1:] if method else argv
    recipe = named_recipe(method, *((values_of(flags, flag) or (None,))[0] for flag in ("--recipe", "--config")))
    method = method or (recipe.method if recipe else "")
    if not method:
        if not set(HELP) & set(flags):
            raise ValueError(f"{verb} needs a method first, e.g. kiloword {example} (`kiloword methods`).")
        return MethodWords(verb, method, flags)
    from kiloword.methods.registry import find

    return MethodWords(verb, method, flags, find(method)[1], recipe)


def named_recipe(method: str, name: str | None, config: str | None) -> NamedRecipe | None:
    """The recipe that --recipe or --config names. Args: method: METHOD, "" where it is omitted.

    Raises: ValueError for both flags, a recipe that cannot be read, and one of another method.
    """
    if name and config:
        raise ValueError('--recipe and --config are both given: give one; a file inherits a recipe by base = "NAME".')
    if not (name or config):
        return None
    named = papers.load(name, method) if name else papers.read(Path(str(config)))
    if not method and (":" in named.method or not named.method):
        names = f"names the method {named.method}, of a module" if named.method else "names no method"
        raise ValueError(f"{named.name} {names}: give it as METHOD if you trust it.")
    if method and named.method and not named.is_of(method):
        raise ValueError(f"{named.name} is a recipe of {named.method}, but METHOD is {method}: omit METHOD.")
    return named


def method_settings(named: NamedRecipe, kind: type) -> Any:
    """The settings of a method, with the values of a recipe. Raises: ValueError for those that it does not have."""
    known = [leaf.path for leaf in leaves(kind())]
    for name in (name.removeprefix("settings.") for name in named.entries if name.startswith("settings.")):
        if name not in known:
            expected = f"expected one of {', '.join(known)}.{suggestion(name, known)}"
            raise ValueError(f"recipe {named.name}: unknown setting 'settings.{name}': {expected}")
    try:
        return parse(named.settings(), kind)
    except ValueError as e:
        raise ValueError(f"recipe {named.name}: settings: {e}") from e


def values_of(words: Sequence[str], flag: str) -> tuple[str, ...]:
    """The values that follow a flag, or come with it behind "="; of a flag that comes again, the last ones."""
    for n, word in reversed(list(enumerate(words))):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != flag:
            continue
        if equals:
            return (value,)
        rest = list(words[n + 1 :])
        end = next((i for i, w in enumerate(rest) if w.startswith("--")), len(rest))
        return tuple(rest[:end])
    return ()
