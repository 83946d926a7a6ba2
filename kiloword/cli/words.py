"""The words of a command line, before a verb reads them, and of verbs whose first word is a method.

No torch at import: help is instant.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from kiloword.addresses import public
from kiloword.checkpoint.files import utf8
from kiloword.config.options import Mixing
from kiloword.config.settings import leaves
from kiloword.terminal import say

TEXTS = ("--texts", "--name", "--curves", ".merge", ".teacher")  # ends of flags whose values are texts, not paths
NOTHING_KEPT = {  # verbs that write their results only at the end
    "eval": "no results were written.",
    "mine": "no results were written.",
    "verify": "nothing was written.",
}


def settled(argv: Sequence[str], verbs: Collection[str]) -> list[str]:
    """The arguments without credentials of URLs; texts among them are decoded as UTF-8 in every locale.

    Paths stay as Python decoded them, as it can open them only in that form.
    Raises: ValueError for an unknown verb, or an empty argument, which as a path would be the current directory.
    """
    _check_verb(argv, verbs)
    flag, words = "kiloword", []
    for n, word in enumerate(argv):
        name, _, value = word.partition("=")
        flag = name if word.startswith("--") or (n == 0 and name) else flag
        if not (value if "=" in word and word.startswith("--") else word):
            raise ValueError(f"{flag} got an empty value, perhaps of an unset shell variable: expected a value.")
        words.append(utf8(public(word), "replace") if flag.endswith(TEXTS) else public(word))
    return words


def _check_verb(argv: Sequence[str], verbs: Collection[str]) -> None:
    if not argv or not argv[0] or argv[0].startswith("-") or argv[0] in verbs:
        return
    near = difflib.get_close_matches(argv[0], verbs, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"unknown verb {argv[0]!r}: expected one of {', '.join(verbs)}.{hint}")


def interruption(argv: Sequence[str], error: KeyboardInterrupt) -> str:
    """The message after Ctrl-C, which says what is kept where that is known."""
    kept = str(error) or NOTHING_KEPT.get(argv[0] if argv else "", "")
    return f"interrupted: {kept}" if kept else "interrupted."


MIXING = tuple(f.name for f in fields(Mixing))  # flags that name a component for a slot
ADDING = (*MIXING, "data", "features", "extra_captions", "weights")  # flags that add something
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
    """The words of such a verb, whose flags are not parsed yet."""

    verb: str
    method: str  # with the components that flags name; "" where only help is requested
    flags: Sequence[str]
    settings: type | None  # of the method

    def read(self, run: Any) -> tuple[Any, Any]:
        """Parse the flags: those of the verb, a dataclass whose defaults `run` holds, and the method's, or None.

        --help prints the flags in `run.common`, by group, --help-all prints all.
        """
        name, about = f"kiloword {self.verb} METHOD", type(run).__doc__
        if {"-h", "--help"} & set(self.flags):
            try:
                tyro.cli(_common(run), args=["--help"], prog=name, description=about)
            finally:
                say(f"These are the common flags; all: kiloword {self.verb} {self.method or 'METHOD'} --help-all")
        kind: Any = self.settings
        own = (kind, field(default_factory=kind)) if kind else (Annotated[None, tyro.conf.Suppress], None)
        words = [("run", Annotated[type(run), arg(name="")], field(default=run)), ("settings", *own)]
        flags = ["--help" if word == "--help-all" else word for word in self.flags]
        parsed: Any = tyro.cli(
            make_dataclass("Words", words), args=flags, prog=name, description=about, registry=REGISTRY
        )
        return parsed.run, parsed.settings


def _common(run: Any) -> type:
    """The flags in `run.common`: a group is a dataclass of them."""
    by_flag = {leaf.flag: leaf for leaf in leaves(run) if leaf.field.metadata.get("flag") != ""}
    groups = []
    for title, flags in run.common.items():
        entries: list[tuple[str, Any, Any]] = []
        for n, flag in enumerate(flags.split()):
            leaf = by_flag[flag]
            hint, text = get_type_hints(leaf.owner)[leaf.field.name], leaf.field.metadata["help"]
            entries.append((f"flag_{n}", Annotated[hint, arg(name=flag, help=text)], field(default=leaf.value)))
        group: Any = make_dataclass(title, entries, frozen=True)
        group.__doc__ = ""
        groups.append((title, Annotated[group, tyro.conf.OmitArgPrefixes], field(default=group())))
    return make_dataclass("Common", groups)


def asked(argv: Sequence[str], example: str) -> MethodCommand:
    """What stands behind the verb, with which the example begins.

    Raises: ValueError without a method, for one that is not known, and as `mixed` and for what is given twice.
    """
    verb, method = example.split()[0], argv[0] if argv and not argv[0].startswith("-") else ""
    if not method and not {"-h", "--help", "--help-all"} & set(argv):
        raise ValueError(f"{verb} needs a method first, e.g. kiloword {example} (`kiloword methods`).")
    flags = argv[1:] if method else argv
    _check_once(flags)
    method = mixed(method, flags)
    if not method:
        return MethodCommand(verb, method, flags, None)
    from kiloword.methods.registry import find

    return MethodCommand(verb, method, flags, find(method)[1])


def mixed(method: str, argv: Sequence[str]) -> str:
    """The method with the components that flags name: llip, --transforms compose -> "llip+compose".

    Raises: ValueError for a component that fills another slot than its flag's, and for --terms of nothing.
    """
    if "--terms" in argv and not values_of(argv, "--terms"):
        raise ValueError("--terms has no value: expected one or several of caption, mim and inclusion.")
    chosen = [(slot, word) for slot in MIXING for word in values_of(argv, f"--{slot.replace('_', '-')}")]
    if not (method and chosen):
        return method
    from kiloword.methods.registry import components

    known = components()
    for slot, word in chosen:
        fits = [name for name, component in known.items() if component.slot == slot.replace("_", " ")]
        if word not in fits:
            raise ValueError(f"--{slot.replace('_', '-')} is {word!r}: expected {' or '.join(fits)}.")
    return "+".join([method, *(word for _, word in chosen)])


def _check_once(argv: Sequence[str]) -> None:
    """Raises: ValueError for a flag that adds something and comes twice: the first would be forgotten.

    Of any other flag the last counts, so that a command can be changed at its end.
    """
    flags = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    adds = [f"--{name.replace('_', '-')}" for name in ADDING]
    twice = next((flag for flag in adds if flags.count(flag) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice: give it once; where it takes several values, they follow it.")


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
