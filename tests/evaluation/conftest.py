"""Untrained models that the tests of this folder only read, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import kiloword
from folders import model_folder
from kiloword.api import Matcher


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model folder of a method."""
    return cache(lambda method: model_folder(tmp_path_factory.mktemp("models") / method, method))


@pytest.fixture(scope="session")
def folder(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("siglip")


@pytest.fixture(scope="session")
def matcher_of(folder_of: Callable[[str], Path]) -> Callable[[str], Matcher]:
    return cache(lambda method: kiloword.load(folder_of(method)))


@pytest.fixture(scope="session")
def matcher(matcher_of: Callable[[str], Matcher]) -> Matcher:
    return matcher_of("siglip")
