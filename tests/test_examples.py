"""Every public function has an example in the reference, and all of them run as they stand there."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kiloword.config.options import RunOptions
from kiloword.data.map_style import MapStyleSource
from kiloword.methods.defaults import default_recipe
from kiloword.training.loop import train

REFERENCE = Path(__file__).parents[1] / "docs" / "reference" / "python.md"
PAGE = REFERENCE.read_text()


def documented() -> Iterator[tuple[str, Any]]:
    """The functions and methods of the reference, by name; protocols, which users implement, have none to call."""
    for name in re.findall(r"^::: (\S+)", PAGE, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        try:
            yield from _functions(name, importlib.import_module(name))
        except ModuleNotFoundError:
            yield from _functions(name, getattr(importlib.import_module(module), attribute))


def _functions(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(thing):
        yield name, thing
    elif not getattr(thing, "_is_protocol", False):
        for inner_name, value in vars(thing).items():
            inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if not inner_name.startswith("_") and (inspect.isclass(inner) or inspect.isfunction(inner)):
                yield from _functions(f"{name}.{inner_name}", inner) if _is_of(thing, inner, inner_name) else ()


def _is_of(thing: Any, inner: Any, name: str) -> bool:
    """Whether a module or class defines a function or class, and does not import it or use it as a default."""
    if inspect.ismodule(thing):
        return bool(inner.__module__ == thing.__name__)
    return bool(inner.__qualname__ == f"{thing.__qualname__}.{name}")


FUNCTIONS = dict(documented())


def test_a_public_function_has_an_example() -> None:
    assert FUNCTIONS.keys() >= {"kiloword.api.load.load", "kiloword.api.matcher.Matcher.score"}
    for name, function in FUNCTIONS.items():
        assert re.search(rf"^>>> .*\b{function.__name__}\b", PAGE, re.MULTILINE), f"{name} has no example"


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images and models that the examples read."""
    monkeypatch.chdir(tmp_path)
    for name, colour in (("dog", "brown"), ("cat", "grey")):
        Image.new("RGB", (40, 40), colour).save(f"{name}.png")
    source = MapStyleSource([("dog.png", "a dog"), ("cat.png", ["a cat", "an animal"])])
    for method, out in (("prolip", "runs/first"), ("coca", "runs/coca")):
        recipe = replace(default_recipe(method, "debug", data=("pets",)), steps=1, batch=2)
        train(recipe, out, source=source, options=RunOptions(workers=0))


def test_the_examples_run(in_folder: None) -> None:
    text = re.sub(r"^```.*$", "", PAGE, flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, REFERENCE.name, str(REFERENCE), 0)
    runner = doctest.DocTestRunner(verbose=False)
    printed: list[str] = []
    results = runner.run(examples, out=printed.append)
    assert results.failed == 0, "".join(printed)
    assert results.attempted >= len(FUNCTIONS)
