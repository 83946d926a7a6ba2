"""Find methods and components by name. Custom methods are written "module:preset".

The module of a built-in method defines `Settings` (a frozen dataclass) and `preset(settings) -> Method`. The `preset`
of a custom method takes no argument, or one whose annotation is a settings dataclass.

`COMPONENTS` of a module are components that other methods can use: "llip+compose+mined" is the preset llip with two
components. Its settings are those of llip, and those of each component under the component's name.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType
from typing import Any

from kiloword.config.settings import BaseSettings, check, parse
from kiloword.errors import article
from kiloword.methods.method import Component, Method

LONGEST = 1000  # maximum length of a method's name, components included
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
    return {
        name: component for preset in PRESETS for name, component in getattr(_module(preset), "COMPONENTS", {}).items()
    }


def _module(preset: str) -> ModuleType:
    return importlib.import_module(f"kiloword.methods.{PRESETS[preset]}")


def preset(name: str, settings: dict[str, Any] | None = None) -> Method:
    """Build a method from its name, or from "module:preset"; either can have components ("llip+compose").

    Raises: ValueError for an unknown name or setting, or for incompatible components.
    """
    make, kind = find(name)
    if kind is None:
        if settings:
            raise ValueError(f"{name} takes no settings, but got {', '.join(settings)}.")
        return _checked(name, make())
    try:
        parsed: Any = parse(settings or {}, kind)
        method = _checked(name, make(parsed))
        check(parsed, prefix="")  # second: the messages of the method are more specific
        return method
    except ValueError as e:
        raise ValueError(f"settings of {name}: {e}") from e


def _checked(name: str, method: Any) -> Method:
    if not isinstance(method, Method):
        raise ValueError(
            f"{name} returned {article(type(method).__name__)}: expected a kiloword.methods.method.Method."
        )
    return method


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
        return _own(name)
    if name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown method {name!r}: expected {', '.join(names())}, or your own module:preset.{hint}")
    module = _module(name)
    return module.preset, module.Settings


def _mixed(name: str, base: str, added: list[str]) -> tuple[Callable[..., Method], type]:
    """A preset with components; its settings are those of the base and one field per component."""
    make, kind = find(base)
    chosen = _chosen(base, added)
    fields: list[Any] = [
        (_python(word), component.settings, dataclasses.field(default_factory=component.settings))
        for word, component in chosen.items()
    ]
    mixed = dataclasses.make_dataclass("Settings", fields, bases=(kind or BaseSettings,), frozen=True, kw_only=True)
    mixed.__module__ = __name__

    def build(settings: Any) -> Method:
        base_settings = {} if kind is None else {f.name: getattr(settings, f.name) for f in dataclasses.fields(kind)}
        method = make() if kind is None else make(kind(**base_settings))
        for word in sorted(chosen, key=lambda word: _turn(chosen[word].slot)):
            method = chosen[word].apply(method, getattr(settings, _python(word)))
        return dataclasses.replace(method, name=name)

    return build, mixed


def _turn(slot: str) -> int:
    """Order of application: components check what others set, so uncertainty comes first, then the pair loss."""
    order = ("uncertainty", "pair loss", "", "deterministic")  # "": any other slot
    return order.index(slot if slot in order else "")


def _chosen(base: str, added: list[str]) -> dict[str, Component]:
    known = components()
    for word in added:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"{base} cannot be mixed with {word!r}: expected {', '.join(known)}.{hint}")
    by_slot: dict[str, str] = {}
    for word in added:
        slot = known[word].slot
        if slot in by_slot and (slot != "terms" or added.count(word) > 1):  # several terms are allowed
            raise ValueError(f"{by_slot[slot]} and {word} both fill the slot {slot!r} of {base}: choose one.")
        by_slot[slot] = word
    return {word: known[word] for word in added}


def _python(name: str) -> str:
    return name.replace("-", "_")


def _own(name: str) -> tuple[Callable[..., Method], type | None]:
    module_name, _, function = name.partition(":")
    _check_module(name, module_name, function)
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as `python -m` does; the console script does not
    try:
        make = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as e:
        raise ValueError(
            f"cannot load method {module_name}:{function} ({e}): expected an importable module (in this folder, or "
            f"on PYTHONPATH) with a function {function} that returns a kiloword.methods.method.Method."
        ) from e
    if not callable(make):
        raise ValueError(
            f"{name} is {article(type(make).__name__)}: expected a function that returns a "
            "kiloword.methods.method.Method."
        )
    parameters = list(inspect.signature(make).parameters)
    kind = _hints(make).get(parameters[0]) if parameters else None
    if parameters and not dataclasses.is_dataclass(kind):
        raise ValueError(
            f"{module_name}:{function} takes {parameters[0]!r} without a known type: annotate it with a settings "
            "dataclass, or take no argument."
        )
    return make, kind


def _check_module(name: str, module: str, function: str) -> None:
    """Raises: ValueError for a name that is not a module, such as a file path, with the name to write instead."""
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
