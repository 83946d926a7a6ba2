"""One set in every form of class data: equal figures of zero-shot classification and probes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import kiloword
from class_data import FORMS, drawn
from folders import model_folder
from kiloword.api import Matcher
from kiloword.data.map_style import MapStyleSource
from kiloword.evaluation import evaluate
from kiloword.evaluation.probe import ProbeOptions


@pytest.fixture(scope="module")
def matcher(tmp_path_factory: pytest.TempPathFactory) -> Matcher:
    return kiloword.load(str(model_folder(tmp_path_factory.mktemp("class data") / "model")))


def judged(matcher: Matcher, test: Any, train: Any) -> dict[str, dict[str, float]]:
    names, probe = ["one object", "two objects", "three objects"], ProbeOptions(epochs=3)
    return {
        "zeroshot": evaluate(matcher, "zeroshot", test, templates="a photo of {}"),
        "probe": evaluate(matcher, "probe", test, train=train, classnames=names, probe=probe),
    }


@pytest.fixture(scope="module")
def sets() -> dict[str, Any]:
    return {split: drawn(f"scenes:{split}?task=count&n={n}") for split, n in (("test", 40), ("train", 60))}


class InMemory:
    """A data set as of torchvision."""

    def __init__(self, images: list[tuple[bytes, int]], classes: list[str]) -> None:
        self.images, self.classes = images, classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        image, label = self.images[row]
        return Image.open(io.BytesIO(image)), label


@pytest.fixture(scope="module")
def in_memory(matcher: Matcher, sets: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The figures of the images that are in no file."""
    return judged(matcher, *(MapStyleSource(InMemory(*sets[split]), split) for split in ("test", "train")))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_equal_figures(
    matcher: Matcher, sets: dict[str, Any], in_memory: dict[str, dict[str, float]], form: str, tmp_path: Path
) -> None:
    found = judged(matcher, *(FORMS[form](tmp_path / split, *sets[split]) for split in ("test", "train")))
    assert found == in_memory
    assert found["probe"]["train_rows"] == 60
    assert found["zeroshot"]["acc1"] > 0
