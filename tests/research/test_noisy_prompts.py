"""Noisy prompts of a tree's classes."""

from __future__ import annotations

from pathlib import Path

import torch

from kiloword.evaluation.prompts import Prompts
from research.classes import tree_of
from research.prompts import nearest, noisy
from trees import ANIMAL, CAR, CAT, DOG, write_photos


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
