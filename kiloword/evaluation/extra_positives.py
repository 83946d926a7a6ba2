"""More positives than the annotated pairs: files of ECCV Caption (arXiv:2204.03359) and CxC, by ids of COCO."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import torch
from torch import Tensor

from kiloword.data.columns import load_json
from kiloword.data.query import read_options, split_query
from kiloword.evaluation.features import CaptionedImages

FILES = ("image_to_caption", "caption_to_image")
Listed = dict[int, list[int]]
"""Query -> its positives, both by their places in the data."""


class Positives(NamedTuple):
    """Ground truth in both directions; queries that are not listed are not counted."""

    texts: Listed  # of images
    images: Listed  # of texts
    unmatched: int  # listed queries of which the data has nothing, or no positive


def truth(listed: Listed, items: int) -> Callable[[slice], Tensor]:
    """Rows of the listed queries -> [q, items] bool: which items are positives."""
    places = list(listed.values())
    return lambda q: torch.stack([torch.zeros(items).index_fill(0, torch.tensor(p), 1).bool() for p in places[q]])


def read_positives(src: str, data: CaptionedImages) -> Positives:
    """The positives of `..._image_to_caption.json` and `..._caption_to_image.json`; both are read where one is named.

    Captions are ids of COCO, whose texts come from its annotations: `FILE?captions=captions_val2014.json`.
    Raises: ValueError for files of another form, and when they have nothing to do with the data.
    """
    path, query = split_query(src)
    file = Path(path).expanduser()
    annotations = read_options(path, query, {"captions": (unquote, "COCO's annotations")})
    name = next((name for name in FILES if name in file.name), None)
    if name is None or "captions" not in annotations:
        raise ValueError(
            f"--extra-positives {src}: expected a json of ECCV Caption or CxC, named ..._image_to_caption.json or "
            "..._caption_to_image.json, with COCO's annotations: FILE?captions=captions_val2014.json."
        )
    images = {number: place for place, key in enumerate(data.keys) if (number := _number(key)) is not None}
    pairs = zip(data.image_of_text, data.captions, strict=True)
    places = {(_number(data.keys[i]), text): t for t, (i, text) in enumerate(pairs)}
    try:
        of_image, of_text = (load_json(file.with_name(file.name.replace(name, other))) for other in FILES)
        listed = load_json(Path(annotations["captions"]).expanduser())["annotations"]
        ids = {one["id"]: places.get((one["image_id"], str(one["caption"]).strip())) for one in listed}
        texts = {number: place for number, place in ids.items() if place is not None}
        of_images, of_texts = _placed(of_image, images, texts), _placed(of_text, texts, images)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"--extra-positives {src}: expected lists of ids, and COCO's annotations.") from error
    if not of_images or not of_texts:
        raise ValueError(f"--extra-positives {src}: it lists no image and caption of the data.")
    return Positives(of_images, of_texts, len(of_image) + len(of_text) - len(of_images) - len(of_texts))


def _placed(listed: Mapping[str, list[int]], queries: Mapping[Any, int], items: Mapping[Any, int]) -> Listed:
    """The positives of a file by places in the data."""
    numbered = ((queries.get(_number(name)), {items[i] for i in ids if i in items}) for name, ids in listed.items())
    return {place: sorted(found) for place, found in numbered if place is not None and found}


def _number(key: str) -> int | None:
    """COCO's id of an image, the digits at the end of its key: COCO_val2014_000000391895 -> 391895."""
    digits = re.search(r"([0-9]{1,18})(?:\.\w+)?$", key)
    return None if digits is None else int(digits[1])
