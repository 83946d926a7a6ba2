"""Captions: COCO's json (and NoCaps'), Karpathy's splits, and token files of Flickr8k and Flickr30k."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa

from kiloword.data.sources.layouts.objects import Id, column, objects, read_all, value, values
from kiloword.data.sources.query import TableOptions

TOKEN = re.compile(rb"([^\t\r\n#]+)#\w+\t([^\r\n]*)")  # of Flickr: IMAGE#NUMBER, a tab, a caption
_DOMAIN = re.compile("(?:in|near|out)-domain")


def coco(path: Path, data: dict[str, Any]) -> tuple[pa.Table, list[str]]:
    """Images in the order of the file, each with its captions; NoCaps' `domain` without "-domain".

    Returns: the table, and notes. A file without `annotations`, of test images, has no captions.
    """
    images = objects(path, data, "images")
    ids, files = values(path, images, "images", "id", int, str), values(path, images, "images", "file_name", str)
    captions: dict[Id, list[str]] = {one: [] for one in ids}
    if len(captions) < len(ids):
        raise ValueError(f"{path}: two of its images have the same id.")
    annotations = objects(path, data, "annotations") if "annotations" in data else []
    unknown = 0
    for image, text in zip(
        values(path, annotations, "annotations", "image_id", int, str),
        values(path, annotations, "annotations", "caption", str),
        strict=True,
    ):
        if image in captions:
            captions[image].append(text)
        else:
            unknown += 1
    columns = {"image": column(files), "captions": column(list(captions.values())), "image_id": column(ids)}
    if any("domain" in image for image in images):
        domains = values(path, images, "images", "domain", str)
        columns["domain"] = column([d.removesuffix("-domain") if _DOMAIN.fullmatch(d) else d for d in domains])
    note = f"{path}: {unknown:,} captions are of images that `images` does not list; they are not used."
    return pa.table(columns), [note] if unknown else []


def karpathy(path: Path, data: dict[str, Any], options: TableOptions) -> pa.Table:
    """Images in the order of the file, with `raw` sentences; for split=train those of `restval` too, as is usual."""
    images = objects(path, data, "images")
    folders = [value(path, i, "filepath", (str,), "images") + "/" if "filepath" in i else "" for i in images]
    files = values(path, images, "images", "filename", str)
    sentences = values(path, images, "images", "sentences", list)
    splits = values(path, images, "images", "split", str)
    if options.split == "train":
        splits = ["train" if split == "restval" else split for split in splits]
    named = "cocoid" if any("cocoid" in image for image in images) else "imgid"
    return pa.table(
        {
            "image": column([folder + file for folder, file in zip(folders, files, strict=True)]),
            "captions": column([_raw(path, n, of_image) for n, of_image in enumerate(sentences)]),
            "split": column(splits),
            "image_id": column(values(path, images, "images", named, int, str)),
        }
    )


def _raw(path: Path, image: int, sentences: list[Any]) -> list[str]:
    where = f"images[{image}].sentences"
    if not all(isinstance(sentence, dict) for sentence in sentences):
        raise ValueError(f"{path}: {where} holds something other than objects.")
    return values(path, sentences, where, "raw", str)


def tokens(path: Path, split: Path | None) -> tuple[pa.Table, list[str]]:
    """`IMAGE#NUMBER`, a tab and a caption in each line, a row each.

    Args: split: file with the name of an image in each line. Returns: the table, and the lines of another form.
    """
    lines = [line for line in read_all(path).splitlines() if line.strip()]
    rows = [match for line in lines if (match := TOKEN.fullmatch(line))]
    columns = {"image": [row[1] for row in rows], "caption": [row[2] for row in rows]}
    if split is not None:
        listed = {line.strip() for line in read_all(split).splitlines()}
        columns["split"] = [os.fsencode(split.name) if name in listed else None for name in columns["image"]]
    table = {name: pa.array(cells, pa.large_binary()) for name, cells in columns.items()}
    return pa.table(table), [line.decode(errors="replace") for line in lines if not TOKEN.fullmatch(line)]
