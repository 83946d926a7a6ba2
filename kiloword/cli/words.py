"""Arguments of a command line before a verb parses them, and verbs whose first argument is a method.

No torch at import: help is instant.
"""

from __future__ import annotations

import mimetypes
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from kiloword.addresses import public
from kiloword.cli.papers import chosen, method_settings
from kiloword.config.options import Mixing
from kiloword.config.papers import NamedRecipe
from kiloword.config.settings import Nothing, check, leaves
from kiloword.errors import suggestion
from kiloword.files import utf8
from kiloword.terminal import say

# Ends of flags whose values are texts, not paths.
TEXTS = ("--texts", "--name", "--message", "--curves", ".merge", ".teacher")
TEXTS_OR_FILE = ("--classes", "--templates")  # flags whose values are texts, or a file of them
WITHOUT_VALUE = ("--open", "--no-open", "--trust-code", "--no-trust-code")  # flags of search
REQUIRED = arg(help_behavior_hint="(required)")  # of values whose default is only "not given"
NOTHING_KEPT = {  # verbs that write their results only at the end
    "eval": "no results were written.",
    "mine": "no results were written.",
    "verify": "nothing was written.",
}
OUTPUTS = {  # flags that name a file to write when the work is done, and an example of one
    "--json": "results.json",
    "--html": "report.html",
    "--csv": "table.csv",
    "--page": "page.html",
    "--plane": "plane.html",
    "--png": "samples.png",
    "--results": "results.json",
}


def settled(argv: Sequence[str], verbs: Collection[str]) -> list[str]:
    """The arguments without credentials of URLs; texts among them are decoded as UTF-8 in every locale.

    Paths stay as Python decoded them, as it can open them only in that form.
    Raises: ValueError for an unknown verb, or an empty argument, which as a path would be the current directory.
    """
    if argv and argv[0]:
        check_known(argv[0], "verb", verbs)
    flag, words, query = "kiloword", [], _query(argv)
    for n, word in enumerate(argv):
        name, _, value = word.partition("=")
        flag = name if word.startswith("--") or (n == 0 and name) else flag
        value = value if "=" in word and word.startswith("--") else word
        if not value:
            raise ValueError(f"{flag} got an empty value, perhaps of an unset shell variable: expected a value.")
        is_text = flag.endswith(TEXTS) or n == query or (flag in TEXTS_OR_FILE and not os.path.isfile(value))
        words.append(utf8(public(word), "replace") if is_text else public(word))
    return words


def _query(argv: Sequence[str]) -> int | None:
    """The place of the query of search: its second word that is no flag, and no value of a flag."""
    words = [n for n, (before, word) in enumerate(pairwise(argv), 1) if not (word.startswith("-") or _takes(before))]
    return words[1] if argv[:1] == ["search"] and len(words) > 1 else None


def _takes(word: str) -> bool:
    """Whether a word is a flag of search whose value is the next word."""
    return word.startswith("--") and "=" not in word and word.replace("_", "-") not in WITHOUT_VALUE


def check_known(word: str, noun: str, names: Collection[str]) -> None:
    """Raises: ValueError for a word that is none of the names, and no flag."""
    if not word.startswith("-") and word not in names:
        raise ValueError(f"unknown {noun} {word!r}: expected one of {', '.join(names)}.{suggestion(word, names)}")


def check_outputs(argv: Sequence[str]) -> None:
    """Raises: ValueError, before any work, where a file that a verb writes at its end cannot or should not be written:
    a photo, or a file that it writes for another flag."""
    files: dict[Path, str] = {}
    for word, after in pairwise([*argv, ""]):
        flag, equals, value = word.partition("=")
        value = value if equals else after
        if flag in OUTPUTS and value:
            _check_file(flag, Path(value))
            if (other := files.setdefault(Path(value).resolve(), flag)) != flag:
                raise ValueError(f"{other} and {flag} are both {value}: give each a file of its own.")
        if flag == "--explain" and Path(value).is_file():
            raise ValueError(f"--explain {value} is a file. Expected a folder, which may be new.")


def check_once(argv: Sequence[str]) -> None:
    """Raises: ValueError for a flag of several values that is given twice.

    Of any other flag the last value counts, so that a command can be changed at its end; sweep joins those of its own.
    """
    flags = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    twice = next((flag for flag in flags if flag in ADDING and flags.count(flag) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice: give it once; where it takes several values, they follow it.")


def _check_file(flag: str, path: Path) -> None:
    """Raises: ValueError for a folder, and a path below a file or in a folder that forbids to write."""
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder. Expected a file, such as {path / OUTPUTS[flag]}.")
    kind = mimetypes.guess_type(path.name)[0] or ""
    if flag != "--png" and kind.startswith("image/"):
        raise ValueError(f"{flag} {path} has the name of an image. Expected a file such as {OUTPUTS[flag]}.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{flag} {path} cannot be written: {above} is no folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {path} cannot be written: the folder {above} does not allow it.")


def interruption(argv: Sequence[str], error: KeyboardInterrupt) -> str:
    """The message after Ctrl-C, which says what is saved where that is known."""
    saved = str(error) or NOTHING_KEPT.get(argv[0] if argv else "", "")
    return f"interrupted: {saved}" if saved else "interrupted."


MIXING = tuple(f"--{f.name.replace('_', '-')}" for f in fields(Mixing))  # flags that name a component for a slot
ADDING = (  # flags of several values, of which the first ones would be lost
    *MIXING, "--data", "--val", "--weights", "--features", "--image-features", "--text-features", "--extra-captions",
    "--keep", "--freeze", "--unfreeze", "--lora.targets", "--images", "--texts", "--classes", "--templates", "--beside",
    "--explain-what", "--only", "--curves", "--ranks", "--seeds", "--group-by",
)  # fmt: skip
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
class MethodCommand:
    """A verb, its method, and its flags, which are not parsed yet."""

    verb: str
    method: str  # with the components that flags name; "" where only help is requested
    flags: Sequence[str]
    settings: type = Nothing  # of the method
    recipe: NamedRecipe | None = None  # of --recipe or --config

    def read(self, run: Any) -> tuple[Any, Any]:
        """Parse the flags of the verb, a dataclass whose defaults `run` holds, and the flags of the method.

        --help prints the flags in `run.common`, by group, --help-all prints all.
        Raises: ValueError for a setting of the method that is NaN, infinite or out of its limits.
        """
        name, about = f"kiloword {self.verb} {self.method or 'METHOD'}", type(run).__doc__
        if {"-h", "--help"} & set(self.flags):
            try:
                tyro.cli(_common(run), args=["--help"], prog=name, description=about)
            finally:
                if names := ", ".join(leaf.flag for leaf in leaves(self.settings())):
                    say(f"Settings of {self.method} (--settings.NAME): {names}.")
                if self.verb == "train" and "--data" not in self.flags:
                    say("Some defaults depend on the data: these are for scenes; `--data SRC --help` shows yours.")
                say(f"These are the common flags; all: {name} --help-all")
        kind: Any = self.settings
        usual = kind() if self.recipe is None else method_settings(self.recipe, kind)
        words = [("run", Annotated[type(run), arg(name="")], field(default=run))]
        words.append(("settings", kind, field(default=usual)))
        flags = ["--help" if word == "--help-all" else word for word in self.flags]
        parsed: Any = tyro.cli(
            make_dataclass("Words", words), args=flags, prog=name, description=about, registry=REGISTRY
        )
        check(parsed.settings, "--settings.")
        return parsed.run, parsed.settings


def _common(run: Any) -> type:
    """The flags in `run.common`: a group is a dataclass of them."""
    by_flag = {leaf.flag: leaf for leaf in leaves(run) if leaf.field.metadata.get("flag") != ""}
    groups = []
    for title, flags in run.common.items():
        entries: list[tuple[str, Any, Any]] = []
        for n, flag in enumerate(flags.split()):
            leaf = by_flag[flag]
            hint, text = get_type_hints(leaf.owner, include_extras=True)[leaf.field.name], leaf.field.metadata["help"]
            entries.append((f"flag_{n}", Annotated[hint, arg(name=flag, help=text)], field(default=leaf.value)))
        group: Any = make_dataclass(title, entries, frozen=True)
        group.__doc__ = ""
        groups.append((title, Annotated[group, tyro.conf.OmitArgPrefixes], field(default=group())))
    return make_dataclass("Common", groups)


def method_command(argv: Sequence[str], example: str) -> MethodCommand:
    """The method, the recipe and the flags of a verb, with which the example begins.

    Raises: ValueError without a method or for an unknown one, as `chosen` and `mixed`.
    """
    verb, method = example.split()[0], argv[0] if argv and not argv[0].startswith("-") else ""
    recipe = chosen(method, *((values_of(argv, flag) or (None,))[0] for flag in ("--recipe", "--config")))
    if not (method or recipe) and not {"-h", "--help", "--help-all"} & set(argv):
        raise ValueError(f"{verb} needs a method first, e.g. kiloword {example} (`kiloword methods`).")
    flags = argv[1:] if method else argv
    method = mixed(method or (recipe.method if recipe else ""), flags)
    if not method:
        return MethodCommand(verb, method, flags)
    from kiloword.methods.registry import find

    return MethodCommand(verb, method, flags, find(method)[1], recipe)


def mixed(method: str, argv: Sequence[str]) -> str:
    """The method with the components that flags name: llip, --transforms compose -> "llip+compose".

    Raises: ValueError for a component that its flag does not take, and for --terms or --contrasts of nothing.
    """
    if values_of(argv, "--captions") == ("many",):
        raise ValueError(f"--captions is 'many': expected one, all or a number, or {method or 'METHOD'}+many.")
    for flag in ("--terms", "--contrasts"):
        if flag in argv and not values_of(argv, flag):
            raise ValueError(f"{flag} has no value: expected one or several of {', '.join(_fitting(flag))}.")
    chosen = [(flag, word) for flag in MIXING for word in values_of(argv, flag)]
    if not (method and chosen):
        return method
    for flag, word in chosen:
        if ":" not in word and word not in (fits := _fitting(flag)):
            raise ValueError(f"{flag} is {word!r}: expected {' or '.join(fits)}.")
    return "+".join([method, *(word for _, word in chosen)])


def _fitting(flag: str) -> list[str]:
    """The components that a flag of the mixing takes."""
    from kiloword.methods.registry import components

    slot = flag.removeprefix("--").replace("-", " ")
    return [name for name, component in components().items() if component.slot == slot]


def values_of(argv: Sequence[str], flag: str) -> tuple[str, ...]:
    """The values that follow a flag, or come with it behind "="; of a flag that comes again, the last ones."""
    for n, word in reversed(list(enumerate(argv))):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != flag:
            continue
        if equals:
            return (value,)
        rest = list(argv[n + 1 :])
        end = next((i for i, w in enumerate(rest) if w.startswith("--")), len(rest))
        return tuple(rest[:end])
    return ()
