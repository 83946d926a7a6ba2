"""Noisy prompts of a tree's classes."""

from __future__ import annotations

from pathlib import Path

from research.classes import tree_of
from research.prompts import noisy
from trees import ANIMAL, CAR, CAT, DOG, write_photos


def test_a_class_has_its_caption_those_above_it_and_those_of_other_classes(tmp_path: Path) -> None:
    tree = tree_of(str(write_photos(tmp_path / "data" / "photos"))).tree
    assert noisy(tree) == {
        DOG: [DOG, ANIMAL, CAT, CAR],
        CAT: [CAT, ANIMAL, CAR, DOG],
        CAR: [CAR, DOG, CAT],  # only the root is above it, which says nothing
    }
