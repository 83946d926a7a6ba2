"""How a user's own `module:preset` is found, and what is said when it is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kiloword.methods.registry import preset

OWN = """
from dataclasses import replace
from kiloword.methods import siglip
from kiloword.types import Pairs

def good():
    return replace(siglip.preset(siglip.Settings()), name="good")

def bare(settings):
    return good()

def number():
    return 3

def positives(pairs: Pairs):
    return good()

def undefined(settings: "Nowhere"):
    return good()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the working folder; the path is that of the installed command, which does not look there."""
    (tmp_path / "own_methods.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "own_methods", raising=False)


def test_a_file_in_the_working_folder_is_found() -> None:
    assert preset("own_methods:good").name == "good"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("bare", "takes 'settings' without a known type: annotate it"),
        ("positives", "Pairs is not a class of settings"),
        ("undefined", "takes 'settings' without a known type: annotate it"),
        ("number", "returned an int: expected a kiloword.methods.method.Method"),
        ("missing", "no attribute 'missing'"),
    ],
)
def test_what_is_no_preset_gets_a_sentence(function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(f"own_methods:{function}")
