"""Find methods and components by name. Custom methods are written "module:preset".

The module of a built-in method defines `Settings` (a frozen dataclass) and `preset(settings) -> Method`. The `preset`
of a custom method takes no argument, or one whose annotation is a settings dataclass. `COMPONENTS` of a module can be
added to any method: "llip+compose+mined" has llip's settings, and those of each component under its name. A custom
component, "llip+module:name", is a `Component` of that name in its module.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import field, make_dataclass, replace
from importlib import import_module
from typing import Any

from kiloword.config.settings import Nothing, check, parse
from kiloword.errors import article, suggestion
from kiloword.methods.method import SLOTS, Component, Method
from kiloword.model.heads import Single

METHOD = "kiloword.methods.method.Method"
LONGEST = 1000  # maximum length of a method's name, components included
MODELS = ("open_clip:", "hf:", "hf-hub:")  # begin the names of other libraries' models, which are no modules
PRESETS = {  # names as the command line has them; a new method is one line here
    "cappa": "coca.cappa",
    "clip": "clip",
    "clip-c": "clip_c",
    "coca": "coca.coca",
    "fff": "fff",
    "filip": "filip",
    "flair": "flair",
    "llip": "llip",
    "pcme++": "pcmepp",
    "prolip": "prolip.preset",
    "prolip-released": "prolip.released",
    "siglip": "siglip",
    "slip": "slip",
    "sycoca": "coca.sycoca",
    "vqa": "coca.vqa",
}
# modules that have components and no preset
OTHERS = (
    *("clic", "concepts", "matryoshka", "negatives", "reinforced"),
    *("self_distill", "sub_captions", "superclass"),
)


def components() -> dict[str, Component]:
    """Components by name: what can follow the name of a method after "+"."""
    modules = (import_module(f"kiloword.methods.{path}") for path in (*PRESETS.values(), *OTHERS))
    return {name: part for module in modules for name, part in getattr(module, "COMPONENTS", {}).items()}


def preset(name: str, settings: dict[str, Any] | None = None) -> Method:
    """Build a method from its name, or from "module:preset"; either can have components ("llip+compose").

    Raises: ValueError for an unknown name or setting, or for incompatible components.
    """
    make, kind = find(name)
    try:
        parsed: Any = parse(settings or {}, kind)
        check(parsed, prefix="")
        method: Any = make(parsed)
    except ValueError as e:
        raise ValueError(f"settings of {name}: {e}") from e
    if not isinstance(method, Method):
        raise ValueError(f"{name} returned {article(type(method).__name__)}: expected a {METHOD}.")
    return method


def base_of(name: str) -> str:
    """The name without components: "mine:preset" for "mine:preset+compose"."""
    return parts_of(name)[0]


def modules_of(name: str) -> set[str]:
    """The parts of a method's name that are code of users: {"mine:preset", "mine:term"} of "mine:preset+mine:term"."""
    return {part for part in parts_of(name) if ":" in part}


def parts_of(name: str) -> list[str]:
    """The base and the components of a name: ["llip", "mine:loss"] of "llip+mine:loss"."""
    return re.split(r"\+(?=[^+])", name)  # "pcme++" is one name


def find(name: str) -> tuple[Callable[[Any], Method], type]:
    """The preset function and its settings class, with a field for each component. Raises: ValueError as `preset`."""
    if len(name) > LONGEST:
        raise ValueError(f"the name of a method has {len(name):,} characters: expected at most {LONGEST}.")
    base, *added = parts_of(name)
    if _is_code(base):
        make, kind = _custom(base)
    elif base in PRESETS:
        module = import_module(f"kiloword.methods.{PRESETS[base]}")
        make, kind = module.preset, module.Settings
    else:
        hint = f" To start from a model's weights, use --init {name}." if ":" in name else suggestion(base, PRESETS)
        raise ValueError(f"unknown method {base!r}: expected {', '.join(PRESETS)}, or your own module:preset.{hint}")
    if not added:
        return make, kind
    chosen = _chosen(base, added)
    nested = [(short, part.settings, field(default_factory=part.settings)) for short, (_, part) in chosen.items()]
    mixed: Any = make_dataclass("Settings", nested, bases=(kind,), frozen=True, kw_only=True)
    order = sorted(chosen.items(), key=lambda pair: SLOTS.index(pair[1][1].slot))

    def build(settings: Any) -> Method:
        method = make(settings)
        for short, (word, part) in order:
            method = _with(method, word, part, getattr(settings, short))
        return replace(method, name=name)

    return build, mixed


def _is_code(word: str) -> bool:
    return ":" in word and not word.startswith(MODELS)


def _custom(name: str) -> tuple[Callable[[Any], Method], type]:
    make = _loaded("method", name, Callable, f"a function that returns a {METHOD} (a component is METHOD+{name})")  # type: ignore[arg-type]
    try:
        first = next(iter(inspect.signature(make, eval_str=True).parameters.values()), None)
    except NameError as e:
        raise ValueError(f"{name} has an annotation that is not known there: {e}.") from e
    if first is not None and "__dataclass_fields__" not in getattr(first.annotation, "__dict__", ()):
        raise ValueError(f"{name} takes {str(first)!r}: expected a class of settings with @dataclass, or no argument.")
    return (make, first.annotation) if first else (lambda settings: make(), Nothing)


def _loaded(what: str, name: str, kind: type, expected: str) -> Any:
    """What a user's module has, written module:name. Raises: ValueError when there is none of its kind."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as `python -m` does; the console script does not
    try:
        found = pkgutil.resolve_name(name)
        if not isinstance(found, kind):
            raise AttributeError(f"it is {article(type(found).__name__)}")
        return found
    except (ImportError, AttributeError, ValueError) as e:
        raise ValueError(
            f"cannot load {what} {name} ({e}): expected {expected}, as MODULE:NAME in this folder or on PYTHONPATH."
        ) from e


def _chosen(base: str, added: list[str]) -> dict[str, tuple[str, Component]]:
    """Components by the name of their settings. Raises: ValueError for unknown ones, two of one slot or of one name."""
    known, by_slot, chosen = components(), dict[str, str](), dict[str, tuple[str, Component]]()
    for word in added:
        if _is_code(word):
            part = _loaded("component", word, Component, "a kiloword.methods.method.Component")
        elif word in known:
            part = known[word]
        else:
            expected = f"{', '.join(known)}, or your own module:name.{suggestion(word, known)}"
            raise ValueError(f"{base} cannot be mixed with {word!r}: expected {expected}")
        short = word.rpartition(":")[2].replace("-", "_")  # "bias_search" of "bias-search", "simclr" of "mine:simclr"
        if short in chosen:
            raise ValueError(f"{base} is mixed with two components named {short!r}: choose one, or rename it.")
        if part.slot in by_slot and part.slot not in ("terms", "contrasts"):
            raise ValueError(f"{by_slot[part.slot]} and {word} both fill the slot {part.slot!r} of {base}: choose one.")
        by_slot[part.slot], chosen[short] = word, (word, part)
    return chosen


def _with(method: Method, word: str, part: Component, settings: Any) -> Method:
    """The method with a component. Raises: ValueError where it would change nothing, or leave a head without a loss."""
    if part.slot in ("pair_loss", "positives", "prepare") and method.pair_weight == 0:
        raise ValueError(f"{method.name} has no pair loss, which {word} would change: omit +{word}.")
    if (part.vectors or part.slot == "pooling") and method.pooling.kind is not Single:
        raise ValueError(
            f"{word} needs Single, the pooling of one vector per image and text, but {method.name} has "
            f"{method.pooling.kind.__name__}: choose one of them."
        )
    if part.vectors and method.pair_weight == 0:
        raise ValueError(f"{word} needs vectors that a pair loss trains, but {method.name} has none: omit +{word}.")
    if part.gaussians and method.uncertainty is None:
        raise ValueError(f"{word} compares Gaussians, but {method.name} has none: add +gaussian.")
    if part.slot == "pair_loss" and method.further:
        raise ValueError(f"{method.name} scores pairs in several ways, each by a loss: {word} would keep one.")
    mixed = replace(part.apply(method, settings), name=f"{method.name}+{word}")
    if part.slot != "pair_loss":
        return mixed
    note = f"{word} replaces the pair loss of {method.name}: settings that only that loss reads have no effect."
    return replace(mixed, notes=(*mixed.notes, lambda recipe: note))
