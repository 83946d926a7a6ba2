"""Find methods and components by name. Custom methods are written "module:preset".

The module of a built-in method defines `Settings` (a frozen dataclass) and `preset(settings) -> Method`. The `preset`
of a custom method takes no argument, or one whose annotation is a settings dataclass. `COMPONENTS` of a module can be
added to any method: "llip+compose+mined" has llip's settings, and those of each component under its name. A custom
component, "llip+module:name", is a `Component` of that name in its module.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import field, is_dataclass, make_dataclass, replace
from pathlib import PurePath
from types import ModuleType
from typing import Any

from kiloword.config.settings import BaseSettings, check, parse
from kiloword.errors import article, suggestion
from kiloword.methods.method import Component, Method, check_vectors

SEVERAL = ("terms", "contrasts")  # slots that take more than one component
OF_PAIRS = ("pair loss", "positives", "prepare")  # slots that say nothing without a pair loss
LONGEST = 1000  # maximum length of a method's name, components included
ORDER = (
    "uncertainty",
    "pair loss",
    "positives",
    "pooling",
    "",
    "deterministic",
    "prefixes",
    "captions",
)  # slots in order of application, as components check what others set; "": any other
PRESETS = {  # a new method is one line here
    "cappa": "coca.cappa",
    "clip": "clip",
    "clip-c": "clip_c",
    "coca": "coca.coca",
    "fff": "fff.preset",
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
COMPONENT_MODULES = (
    "clic",
    "concepts",
    "matryoshka",
    "negatives",
    "reinforced",
    "self_distill",
    "sub_captions",
    "superclass",
    "text_crops",
)  # modules that have components and no preset


def names() -> list[str]:
    """Built-in presets, as the command line writes them."""
    return list(PRESETS)


def components() -> dict[str, Component]:
    """Components by name: what can follow the name of a method after "+"."""
    modules = map(_module, (*PRESETS.values(), *COMPONENT_MODULES))
    return {name: part for module in modules for name, part in getattr(module, "COMPONENTS", {}).items()}


def _module(path: str) -> ModuleType:
    return importlib.import_module(f"kiloword.methods.{path}")


def preset(name: str, settings: dict[str, Any] | None = None) -> Method:
    """Build a method from its name, or from "module:preset"; either can have components ("llip+compose").

    Raises: ValueError for an unknown name or setting, or for incompatible components.
    """
    make, kind = find(name)
    if kind is None and settings:
        raise ValueError(f"{name} takes no settings, but got {', '.join(settings)}.")
    try:
        method: Any = make() if kind is None else make(_checked(settings or {}, kind))
    except ValueError as e:
        raise ValueError(f"settings of {name}: {e}" if kind else str(e)) from e
    if not isinstance(method, Method):
        raise ValueError(
            f"{name} returned {article(type(method).__name__)}: expected a kiloword.methods.method.Method."
        )
    return method


def _checked(settings: dict[str, Any], kind: type) -> Any:
    parsed: Any = parse(settings, kind)
    check(parsed, prefix="")
    return parsed


def base_of(name: str) -> str:
    """The name without components: "mine:preset" for "mine:preset+compose"."""
    return parts_of(name)[0]


def omitted(name: str, component: str) -> str:
    """The name of a method without a component: "clip+compose" of "clip+matryoshka+compose"."""
    return "+".join(part for part in parts_of(name) if part != component)


def modules_of(name: str) -> set[str]:
    """The parts of a method's name that are code of users: {"mine:preset", "mine:term"} of "mine:preset+mine:term"."""
    return {part for part in parts_of(name) if ":" in part}


def parts_of(name: str) -> list[str]:
    """The base and the components of a name: ["llip", "mine:loss"] of "llip+mine:loss"."""
    return re.split(r"\+(?=[^+])", name)  # "pcme++" is one name


def find(name: str) -> tuple[Callable[..., Method], type | None]:
    """The preset function and its settings class (None when it takes no argument)."""
    if len(name) > LONGEST:
        raise ValueError(f"the name of a method has {len(name):,} characters: expected at most {LONGEST}.")
    base, *added = parts_of(name)
    if added:
        return _mixed(name, base, added)
    if ":" in name:
        return _custom(name)
    if name not in PRESETS:
        yours = os.path.isfile(f"{name}.py")
        hint = f" Did you mean {name}:preset, of {name}.py in this folder?" if yours else suggestion(name, PRESETS)
        expected = f"{', '.join(PRESETS)}, or your own module:preset.{hint}"
        raise ValueError(f"unknown method {name!r}: expected {expected}")
    module = _module(PRESETS[name])
    return module.preset, module.Settings


def _mixed(name: str, base: str, added: list[str]) -> tuple[Callable[..., Method], type]:
    """A preset with components; its settings are those of the base and one field per component."""
    make, kind = find(base)
    chosen = _chosen(base, added)
    nested = [(_field(word), part.settings, field(default_factory=part.settings)) for word, part in chosen.items()]
    mixed: Any = make_dataclass("Settings", nested, bases=(kind or BaseSettings,), frozen=True, kw_only=True)
    mixed.__module__ = __name__

    def build(settings: Any) -> Method:
        method = make() if kind is None else make(settings)
        turns = {word: ORDER.index(part.slot if part.slot in ORDER else "") for word, part in chosen.items()}
        for word in sorted(chosen, key=turns.__getitem__):
            method = _with(method, word, chosen[word], getattr(settings, _field(word)))
        return replace(method, name=name)

    return build, mixed


def _with(method: Method, word: str, part: Component, settings: Any) -> Method:
    """The method with a component. Raises: ValueError where it would change nothing, or leave a head without a loss."""
    if part.slot in OF_PAIRS and method.pair_weight == 0:
        raise ValueError(f"{method.name} has no pair loss, which {word} would change: omit +{word}.")
    if part.vectors:
        check_vectors(method, word, part.vectors)
    if part.slot == "pair loss" and method.further:
        raise ValueError(
            f"{method.name} scores pairs in several ways, each with a loss, of which {word} would keep one."
        )
    mixed = replace(part.apply(method, settings), name=f"{method.name}+{word}")
    if part.slot != "pair loss":
        return mixed
    note = f"{word} replaces the pair loss of {method.name}: settings that only that loss reads have no effect."
    return replace(mixed, notes=(*mixed.notes, lambda recipe: note))


def _field(word: str) -> str:
    """The name of a component's settings: "bias_search" of "bias-search", "simclr" of "mine:simclr"."""
    return word.rpartition(":")[2].replace("-", "_")


def _chosen(base: str, added: list[str]) -> dict[str, Component]:
    known = components()
    chosen: dict[str, Component] = {}
    by_slot: dict[str, str] = {}
    for word in added:
        if word not in known and ":" not in word:
            expected = f"{', '.join(known)}, or your own module:name.{suggestion(word, known)}"
            raise ValueError(f"{base} cannot be mixed with {word!r}: expected {expected}")
        one = _custom_component(word) if ":" in word else known[word]
        if _field(word) in map(_field, chosen):
            raise ValueError(f"{base} is mixed with two components named {_field(word)!r}: choose one, or rename it.")
        if one.slot in by_slot and one.slot not in SEVERAL:
            raise ValueError(f"{by_slot[one.slot]} and {word} both fill the slot {one.slot!r} of {base}: choose one.")
        by_slot[one.slot], chosen[word] = word, one
    return chosen


def _custom_component(name: str) -> Component:
    """A user's component. Raises: ValueError when it cannot be imported, or is none."""
    module_name, _, attribute = name.partition(":")
    _check_module(name, module_name, attribute)
    component = _imported("component", name, "a kiloword.methods.method.Component")
    if not isinstance(component, Component):
        raise ValueError(
            f"{name} is {article(type(component).__name__)}: expected a kiloword.methods.method.Component."
        )
    return component


def _custom(name: str) -> tuple[Callable[..., Method], type | None]:
    module_name, _, function = name.partition(":")
    _check_module(name, module_name, function)
    make = _imported("method", name, "a function that returns a kiloword.methods.method.Method")
    if not callable(make):
        expected = "expected a function that returns a kiloword.methods.method.Method."
        raise ValueError(f"{name} is {article(type(make).__name__)}: {expected}")
    parameters = list(inspect.signature(make).parameters)
    kind = _hints(make).get(parameters[0]) if parameters else None
    if parameters and not is_dataclass(kind):
        raise ValueError(
            f"{name} takes {parameters[0]!r} without a known type: annotate it with a settings dataclass, or take no "
            "argument."
        )
    return make, kind


def _imported(kind: str, name: str, what: str) -> Any:
    """An attribute of a user's module, written module:attribute. Raises: ValueError when there is none."""
    module_name, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as `python -m` does; the console script does not
    try:
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute) and os.path.isfile(f"{module_name}.py"):
            hidden = getattr(module, "__file__", None) or ""
            if os.path.abspath(hidden) != os.path.abspath(f"{module_name}.py"):
                raise ImportError(f"{hidden} hides {module_name}.py of this folder: rename that")
        return getattr(module, attribute)
    except (ImportError, AttributeError) as e:
        raise ValueError(
            f"cannot load {kind} {name} ({e}): expected an importable module (in this folder, or on PYTHONPATH) with "
            f"{attribute}, {what}."
        ) from e


LIBRARIES = ("open_clip", "hf", "hf-hub")  # prefixes of their models' names (`interop.names`), which are no modules


def _check_module(name: str, module: str, function: str) -> None:
    """Raises: ValueError for a name that is not a module, such as a file path, with the name to write instead."""
    if module in LIBRARIES:
        raise ValueError(
            f"{name} is the name of a model, where a method was expected: one of {', '.join(PRESETS)}. A run begins "
            f"with the weights of that model by --init {name}."
        )
    path = PurePath(module)
    stem = path.stem if path.suffix == ".py" else path.name
    if module == stem and all(word.isidentifier() for word in (*module.split("."), function)):
        return
    folder = f" with PYTHONPATH={str(path.parent)!r}" if path.parent != PurePath(".") else ""
    hint = f", here perhaps {stem}:{function or 'preset'}{folder}" if stem.isidentifier() else ""
    raise ValueError(
        f"the method {name!r} is not module:preset: expected the names of a Python module and a function in it{hint}."
    )


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """Annotated types; empty if a name in them cannot be resolved."""
    try:
        return typing.get_type_hints(make)
    except (NameError, TypeError, AttributeError):
        return {}
