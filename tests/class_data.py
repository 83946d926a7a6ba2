"""Labelled images in every form in which class data lies on disk, and photos with a tree of their classes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from kiloword.data.open import open_source
from tars import write_tar

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


def class_folders(root: Path, images: list[tuple[bytes, int]], names: list[str]) -> str:
    for row, (image, label) in enumerate(images):
        folder = root / "folders" / names[label].replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row:04}.png").write_bytes(image)
    return str(root / "folders")


def csv_of_names(root: Path, images: list[tuple[bytes, int]], names: list[str]) -> str:
    """Names as labels, and the same image files as the class folders."""
    class_folders(root, images, names)
    with (root / "names.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "kind"])
        for row, (_, label) in enumerate(images):
            name = names[label].replace(" ", "_")
            table.writerow([f"folders/{name}/{row:04}.png", name])
    return f"{root / 'names.csv'}?label=kind"


def tsv_of_indices(root: Path, images: list[tuple[bytes, int]], names: list[str]) -> str:
    (root / "tsv").mkdir(parents=True)
    (root / "tsv" / "classnames.txt").write_text("\n".join(names))
    lines = ["filepath\tlabel"]
    for row, (image, label) in enumerate(images):
        (root / "tsv" / f"{row}.png").write_bytes(image)
        lines.append(f"{row}.png\t{label}")
    (root / "tsv" / "labels.tsv").write_text("\n".join(lines))
    return str(root / "tsv" / "labels.tsv")


def parquet(root: Path, images: list[tuple[bytes, int]], names: list[str]) -> str:
    """Bytes of images, names as labels."""
    root.mkdir(parents=True, exist_ok=True)
    labels = [names[label] for _, label in images]
    pq.write_table(pa.table({"image": [image for image, _ in images], "class": labels}), root / "own.parquet")
    return str(root / "own.parquet")


def hugging_face(root: Path, images: list[tuple[bytes, int]], names: list[str]) -> str:
    """As the library datasets writes it: images as structs, a `ClassLabel` in the metadata of the schema."""
    root.mkdir(parents=True, exist_ok=True)
    features = {"img": {"_type": "Image"}, "fine_label": {"names": names, "_type": "ClassLabel"}}
    table = pa.table(
        {"img": [{"bytes": image, "path": None} for image, _ in images], "fine_label": [label for _, label in images]}
    )
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), root / "hf.parquet")
    return str(root / "hf.parquet")


def tar(root: Path, images: list[tuple[bytes, int]], names: list[str]) -> str:
    members: list[tuple[str, bytes]] = []
    for row, (image, label) in enumerate(images):
        members += [(f"{row:04}.png", image), (f"{row:04}.cls", str(label).encode())]
    write_tar(root / "tars" / "0.tar", members)
    (root / "tars" / "classnames.txt").write_text("\n".join(names))
    return str(root / "tars")


FORMS: dict[str, Callable[[Path, list[tuple[bytes, int]], list[str]], str]] = {
    form.__name__: form for form in (class_folders, csv_of_names, tsv_of_indices, parquet, hugging_face, tar)
}


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
