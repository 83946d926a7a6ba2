"""A small class data set with a tree of its classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NODES = {
    "0": {"name": "thing", "parent": None},
    "1": {"name": "animal", "parent": "0"},
    "2": {"name": "dog", "parent": "1"},
    "3": {"name": "cat", "parent": "1"},
    "4": {"name": "car", "parent": "0", "phrase": "a fast car"},
}
TREE: dict[str, Any] = {"nodes": NODES, "classes": ["2", "3", "4"], "templates": {"2": "this is {}", "3": "here {}"}}
THING, ANIMAL, CAR = "this is a thing", "this is an animal", "here a fast car"
DOG, CAT = "this is a dog", "this is a cat"


def write_photos(folder: Path) -> Path:
    """Twelve images of 32 pixels of each of three classes, in class folders, and the tree beside them."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("0_dog", "1_cat", "2_car")):
        (folder / name).mkdir(parents=True)
        for n in range(12):
            pixels = rng.integers(0, 60, (32, 32, 3)) + 90 * np.eye(3, dtype=int)[label]
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{n:02d}.png")
    (folder.parent / "tree.json").write_text(json.dumps(TREE))
    return folder
