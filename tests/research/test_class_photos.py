"""The judge of class data by captions of its tree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kiloword.api import Matcher
from kiloword.config.recipes import DataConfig, Recipe, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.models.build import build
from research import classes
from trees import CAR, CAT, DOG, write_photos


def test_a_photo_counts_where_the_caption_of_its_class_is_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = preset("siglip")
    matcher = Matcher(build(sizes()["debug"], method, seed=0), Tokenizer.train([DOG, CAT, CAR], 300), method)
    photos = write_photos(tmp_path / "data" / "photos")
    best = torch.tensor([0] * 12 + [2, 1] * 6 + [0] * 12)  # of dogs all are right, of cats half, of cars none
    shown = iter([best])

    def score(images: list[torch.Tensor], texts: dict[str, torch.Tensor]) -> torch.Tensor:
        assert len(texts["vec"]) == 3
        return torch.nn.functional.one_hot(next(shown)[: len(images)], 3)

    monkeypatch.setattr(matcher, "score", score)
    options = classes.ClassOptions(out=tmp_path, data=str(photos), val=str(photos), level=2)
    judged = classes.classified(options, matcher)
    assert judged["top1"] == 0.5
    np.testing.assert_array_equal(judged["outcomes"], [1] * 12 + [0, 1] * 6 + [0] * 12)


def test_a_part_needs_as_many_photos_as_it_names(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "data" / "photos")  # 36
    recipe = Recipe(method="siglip", data=DataConfig(sources=(f"tree:{photos}?levels=2",)))
    assert [len(classes.part(rows)(recipe)) for rows in (slice(36), slice(20), slice(20, None))] == [36, 20, 16]
    for rows, least in ((slice(37), 37), (slice(36, None), 37), (slice(40_000), "40,000")):
        with pytest.raises(ValueError, match=f"has 36 rows: expected {least} or more"):
            classes.part(rows)(recipe)
