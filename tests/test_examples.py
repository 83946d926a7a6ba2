"""Every public function has an example in its docstring, and all of them run as they stand there."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import kiloword
from kiloword.config.options import RunOptions
from kiloword.data.sources.map_style import MapStyleSource
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.model.model import build
from kiloword.training.loop import train
from kiloword.verify import batch as verify_batch

REFERENCE = Path(__file__).parents[1] / "docs" / "reference" / "python.md"


def documented() -> Iterator[tuple[str, Any]]:
    """The functions and methods of the reference, by name; protocols, which users implement, have none to call."""
    for name in re.findall(r"^::: (\S+)", REFERENCE.read_text(), re.MULTILINE):
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


def test_the_reference_has_functions() -> None:
    assert {"kiloword.api.load.load", "kiloword.api.matcher.Matcher.score", "kiloword.types.Texts.pack"} <= set(
        FUNCTIONS
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_an_example(name: str) -> None:
    assert ">>> " in (FUNCTIONS[name].__doc__ or ""), f"{name} has no example"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the examples read, in a folder of their own: images, models, a batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("examples"))
        for name, colour in (("dog", "brown"), ("cat", "grey")):
            Image.new("RGB", (40, 40), colour).save(f"{name}.png")
        source = MapStyleSource([("dog.png", "a dog"), ("cat.png", ["a cat", "an animal"])])
        for method in ("prolip", "coca"):
            recipe = replace(default_recipe(method, "debug", data=("pets",)), steps=1, batch=2)
            out = "runs/first" if method == "prolip" else "runs/coca"
            train(recipe, out, source=source, options=RunOptions(workers=0))
        network = build(verify_batch.config(), preset("siglip"))
        model = kiloword.load("runs/first/model")
        yield {
            "kiloword": kiloword,
            "model": model,
            "network": network,
            "batch": verify_batch.batch(),
            "preset": preset,
        }


@pytest.mark.slow
def test_the_examples_run(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    for name, function in FUNCTIONS.items():
        module = vars(sys.modules[function.__module__])
        for test in finder.find(function, name, globs=module | names):
            runner.run(test, clear_globs=False)
    assert runner.failures == 0, capsys.readouterr().out
    assert runner.tries >= len(FUNCTIONS)
