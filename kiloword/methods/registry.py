"""Find methods and components by name. Custom methods are written "module:preset".

The module of a built-in method defines `Settings` (a frozen dataclass) and `preset(settings) -> Method`. The `preset`
of a custom method takes no argument, or one whose annotation is a settings dataclass. `COMPONENTS` of a module can be
added to any method: "llip+compose+mined" has llip's settings, and those of each component under its name.
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

from kiloword.config.settings import BaseSettings, check, only, parse
from kiloword.errors import article, suggestion
from kiloword.methods.method import Component, Method

LONGEST = 1000  # maximum length of a method's name, components included
ORDER = (
    "uncertainty",
    "pair loss",
    "",
    "deterministic",
)  # slots in order of application, as components check what others set; "": any other
PRESETS = {  # a new method is one line here
    "clip": "clip",
    "clip-c": "clip_c",
    "coca": "coca.coca",
    "fff": "fff.preset",
    "llip": "llip.preset",
    "pcme++": "pcmepp.preset",
    "prolip": "prolip.preset",
    "prolip-released": "prolip.released",
    "siglip": "siglip",
    "sycoca": "coca.sycoca",
    "vqa": "coca.vqa",
}


def names() -> list[str]:
    """Built-in presets, as the command line writes them."""
    return list(PRESETS)


def components() -> dict[str, Component]:
    """Components by name: what can follow the name of a method after "+"."""
    modules = map(_module, PRESETS)
    return {name: part for module in modules for name, part in getattr(module, "COMPONENTS", {}).items()}


def _module(preset: str) -> ModuleType:
    return importlib.import_module(f"kiloword.methods.{PRESETS[preset]}")


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
    return _parts(name)[0]


def _parts(name: str) -> list[str]:
    return re.split(r"\+(?=[^+])", name)  # "pcme++" is one name


def find(name: str) -> tuple[Callable[..., Method], type | None]:
    """The preset function and its settings class (None when it takes no argument)."""
    if len(name) > LONGEST:
        raise ValueError(f"the name of a method has {len(name):,} characters: expected at most {LONGEST}.")
    base, *added = _parts(name)
    if added:
        return _mixed(name, base, added)
    if ":" in name:
        return _custom(name)
    if name not in PRESETS:
        expected = f"{', '.join(PRESETS)}, or your own module:preset.{suggestion(name, PRESETS)}"
        raise ValueError(f"unknown method {name!r}: expected {expected}")
    module = _module(name)
    return module.preset, module.Settings


def _mixed(name: str, base: str, added: list[str]) -> tuple[Callable[..., Method], type]:
    """A preset with components; its settings are those of the base and one field per component."""
    make, kind = find(base)
    chosen = {word.replace("-", "_"): component for word, component in _chosen(base, added).items()}
    nested = [(word, part.settings, field(default_factory=part.settings)) for word, part in chosen.items()]
    mixed: Any = make_dataclass("Settings", nested, bases=(kind or BaseSettings,), frozen=True, kw_only=True)
    mixed.__module__ = __name__

    def build(settings: Any) -> Method:
        method = make() if kind is None else make(only(settings, kind))
        turns = {word: ORDER.index(part.slot if part.slot in ORDER else "") for word, part in chosen.items()}
        for word in sorted(chosen, key=turns.__getitem__):
            method = chosen[word].apply(method, getattr(settings, word))
        return replace(method, name=name)

    return build, mixed


def _chosen(base: str, added: list[str]) -> dict[str, Component]:
    known = components()
    by_slot: dict[str, str] = {}
    for word in added:
        if word not in known:
            expected = f"{', '.join(known)}.{suggestion(word, known)}"
            raise ValueError(f"{base} cannot be mixed with {word!r}: expected {expected}")
        slot = known[word].slot
        if slot in by_slot and (slot != "terms" or added.count(word) > 1):  # several terms are allowed
            raise ValueError(f"{by_slot[slot]} and {word} both fill the slot {slot!r} of {base}: choose one.")
        by_slot[slot] = word
    return {word: known[word] for word in added}


def _custom(name: str) -> tuple[Callable[..., Method], type | None]:
    module_name, _, function = name.partition(":")
    _check_module(name, module_name, function)
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as `python -m` does; the console script does not
    try:
        make = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as e:
        raise ValueError(
            f"cannot load method {name} ({e}): expected an importable module (in this folder, or on PYTHONPATH) with a "
            f"function {function} that returns a kiloword.methods.method.Method."
        ) from e
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
