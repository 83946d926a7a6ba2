"""Labelled images of scenes, and photos with a tree of their classes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kiloword.data.classes import names as of_classes
from kiloword.data.open import open_source

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


def wnids(name: str = "imagenet1k") -> list[str]:
    """The WordNet ids of the classes of ImageNet, or of imagenet-a or imagenet-r, in order."""
    lines = (Path(of_classes.__file__).parent / "imagenet.tsv").read_text().splitlines()
    return [line[:9] for line in lines if name == "imagenet1k" or name[-1] in "".join(line.split("\t")[2:])]


def drawn(src: str) -> tuple[list[tuple[bytes, int]], list[str]]:
    """The images of scenes as PNG with their labels, in order of the names of classes; the names of all classes."""
    source = open_source(src, 32)
    images = []
    for row in range(len(source)):
        record, out = source.record(row), io.BytesIO()
        Image.fromarray(record.image).save(out, "PNG")
        images.append((out.getvalue(), record.label))
    names: list[str] = source.classnames  # type: ignore[attr-defined]
    return sorted(images, key=lambda pair: names[pair[1]]), names


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
