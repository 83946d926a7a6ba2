"""Class data in experiments: its judge by captions of the tree, noisy prompts of its classes, phrases of captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from class_data import ANIMAL, CAR, CAT, DOG, write_photos
from kiloword.api import Matcher
from kiloword.config.recipes import DataConfig, Recipe, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation.prompts import Prompts
from kiloword.methods.registry import preset
from kiloword.models.build import build
from research import classes
from research.classes import tree_of
from research.phrases import phrases, runs
from research.prompts import nearest, noisy


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


def test_a_class_has_its_caption_those_above_it_and_those_of_other_classes(tmp_path: Path) -> None:
    tree = tree_of(str(write_photos(tmp_path / "data" / "photos"))).tree
    assert noisy(tree) == {
        DOG: [DOG, ANIMAL, CAT, CAR],
        CAT: [CAT, ANIMAL, CAR, DOG],
        CAR: [CAR, DOG, CAT],  # only the root is above it, which says nothing
    }


def test_the_nearest_prompt_of_a_class_is_that_of_its_own() -> None:
    texts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.0, -1.0]])
    asked = Prompts({"vec": texts}, torch.tensor([0, 0, 1, 1]), 2)
    photos = torch.tensor([[[0.0, 1.0], [0.6, 0.8]], [[1.0, 0.0], [0.0, 1.0]]])  # class b is nearer to texts of a
    assert torch.equal(nearest(asked, photos)["vec"], texts[[1, 2]])


def test_runs_end_at_function_words_and_punctuation() -> None:
    assert runs("A brown Dog runs on the wet sand, barking loudly.") == [
        ["brown", "dog", "runs"],
        ["wet", "sand"],
        ["barking", "loudly"],
    ]
    assert runs("The and of") == []


def test_a_phrase_is_true_of_every_photo_with_a_caption_that_has_it() -> None:
    captions = [
        ["A brown dog on wet sand .", "the brown dog"],
        ["A brown dog in a very long row of red tall wide old houses"],  # a run of five words is no phrase
        ["Wet sand", "sand"],
        ["a large brown dog"],  # also a brown dog
    ]
    made = phrases(captions)
    assert dict(zip(made.texts, made.photos, strict=True)) == {
        "brown dog": [0, 1, 3],
        "large brown dog": [3],
        "long row": [1],
        "wet sand": [0, 2],
    }
    assert made.of_at_most(1).texts == ["large brown dog", "long row"]
