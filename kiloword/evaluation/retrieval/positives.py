"""More positives than the annotated pairs, and retrieval metrics against them: `eval retrieval --extra-positives FILE`.

ECCV Caption (arXiv:2204.03359) and CxC, as the `eccv_caption` package distributes both, or a table of images and
captions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from kiloword.data.query import read_options, split_query
from kiloword.data.sample import check_regular, decode_text, read_whole
from kiloword.data.source import keys, names_of, texts_of
from kiloword.distributed.sharing import in_turns
from kiloword.evaluation.features import CaptionedImages
from kiloword.evaluation.metrics import average_precision_at_r, hit, precision_at, standing
from kiloword.evaluation.retrieval.relevance import PANEL, Score
from kiloword.model.encoding import chunks, rows
from kiloword.terminal import shown
from kiloword.types import BadSample, Features, Source

LARGEST = 1 << 28  # bytes of a file
FILES = ("image_to_caption", "caption_to_image")  # in the names of the two files of ECCV Caption

Listed = dict[int, list[int]]
"""The positives of every query: places of items by the place of the query."""


@dataclass(frozen=True)
class Positives:
    """Ground truth in both directions; queries that are not listed are not counted."""

    texts: Listed  # of images
    images: Listed  # of texts
    unmatched: int  # listed queries of which the data has nothing, or no positive


def read(src: str, data: CaptionedImages) -> Positives:
    """The positives that a file lists.

    json as ECCV Caption distributes it lists, for each query, all its positives, the annotated ones included; of
    `..._image_to_caption.json` and `..._caption_to_image.json` one is named and both are read. Its captions are ids of
    COCO, whose texts come from COCO's annotations: `FILE?captions=captions_val2014.json`. Any other data set (a table
    with images and captions) adds its pairs to the annotated ones.
    Raises: ValueError for files of another form, and when they have nothing to do with the data.
    """
    path, query = split_query(src)
    if path.lower().endswith(".json") and any(name in Path(path).name for name in FILES):
        chosen = read_options(path, query, {"captions": (unquote, "COCO's annotations")})
        positives = _of_coco(Path(path).expanduser(), chosen.get("captions", ""), data)
    else:
        from kiloword.data.open import open_source

        positives = _of_pairs(open_source(src), data)
    if not positives.images or not positives.texts:
        raise ValueError(f"--extra-positives {src}: it lists no image and caption of the data.")
    return positives


def _of_pairs(source: Source, data: CaptionedImages) -> Positives:
    """The annotated pairs, and those of a source whose image and caption are both in the data."""
    images: dict[str, list[int]] = {}
    for place, key in enumerate(data.keys):
        for name in names_of(key):
            images.setdefault(name, []).append(place)
    captions: dict[str, list[int]] = {}
    for place, text in enumerate(data.captions):
        captions.setdefault(text, []).append(place)
    pairs = set(enumerate(data.image_of_text))
    unmatched = 0
    for row, own_key in enumerate(keys(source)):
        places = next((images[name] for name in names_of(own_key or "") if name in images), [])
        texts = [t for text in (texts_of(source, row) if places else []) for t in captions.get(text, [])]
        pairs |= {(t, i) for t in texts for i in places}
        unmatched += not texts
    return _both(pairs, unmatched, len(data.keys) > 0 and len(pairs) > len(data.image_of_text))


def _both(pairs: set[tuple[int, int]], unmatched: int, more: bool) -> Positives:
    texts, images = Listed(), Listed()
    for t, i in sorted(pairs) if more else ():
        texts.setdefault(i, []).append(t)
        images.setdefault(t, []).append(i)
    return Positives(texts, images, unmatched)


def _of_coco(path: Path, annotations: str, data: CaptionedImages) -> Positives:
    """Positives of json by ids of COCO's images and captions."""
    if not annotations:
        raise ValueError(
            f"{path} names captions by COCO's ids: name the annotations that have them, such as "
            f"{path.name}?captions=captions_val2014.json."
        )
    other = path.name.replace(FILES[0], FILES[1]) if FILES[0] in path.name else path.name.replace(FILES[1], FILES[0])
    files = {name: next(f for f in (path, path.with_name(other)) if name in f.name) for name in FILES}
    image_place = {number: place for place, key in enumerate(data.keys) if (number := _number(key)) is not None}
    text_place = _places_of_captions(Path(annotations).expanduser(), data)
    texts, lost_images = _placed(files[FILES[0]], image_place, text_place)
    images, lost_texts = _placed(files[FILES[1]], text_place, image_place)
    return Positives(texts, images, lost_images + lost_texts)


def _places_of_captions(path: Path, data: CaptionedImages) -> dict[int, int]:
    """The place of every caption of COCO by its id, where the data has its image with this text."""
    pairs = zip(data.image_of_text, data.captions, strict=True)
    places = {(_number(data.keys[i]), text): t for t, (i, text) in enumerate(pairs)}
    listed = _parsed(path)
    entries = listed.get("annotations") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{path} has no list `annotations`: expected COCO's captions, such as captions_val2014.json.")
    by_id: dict[int, int] = {}
    for n, one in enumerate(entries):
        missing = next(
            (key for key in ("id", "image_id", "caption") if not isinstance(one, dict) or key not in one), None
        )
        if missing is not None:
            raise ValueError(f"{path}: annotation {n} has no {missing}: expected id, image_id and caption.")
        place = places.get((one["image_id"], str(one["caption"]).strip())) if isinstance(one["image_id"], int) else None
        if place is not None and isinstance(one["id"], int):
            by_id[one["id"]] = place
    return by_id


def _placed(path: Path, queries: dict[int, int], items: dict[int, int]) -> tuple[Listed, int]:
    """The positives of a file by places in the data, and the number of queries that the data lacks."""
    listed = _parsed(path)
    if not isinstance(listed, dict) or not all(isinstance(v, list) for v in listed.values()):
        raise ValueError(f"{path} is no object of lists of ids: expected a file of ECCV Caption.")
    placed = Listed()
    for name, ids in listed.items():
        place = queries.get(_number(name) if _number(name) is not None else -1)  # type: ignore[arg-type]
        positives = sorted({items[i] for i in ids if isinstance(i, int) and i in items})
        if place is not None and positives:
            placed[place] = positives
    return placed, len(listed) - len(placed)


def _parsed(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"--extra-positives {path}: no such file.")
    check_regular(path)
    try:
        return json.loads(decode_text(read_whole(path, path.name, LARGEST)))
    except (BadSample, ValueError, RecursionError):
        raise ValueError(shown(f"{path} is not json, or more than {LARGEST >> 20} MB of it.")) from None


def _number(key: str) -> int | None:
    """COCO's id of an image, the digits at the end of its key: COCO_val2014_000000391895 -> 391895."""
    digits = re.search(r"([0-9]{1,18})(?:\.\w+)?$", key)
    return None if digits is None else int(digits[1])


def extra_positives(
    score: Score, images: Features, texts: Features, positives: Positives, ks: Sequence[int], chunk: int = 1024
) -> Iterator[tuple[str, float]]:
    """ECCV Caption's metrics in both directions, as means over the listed queries.

    `..._extra_recall@k` (any hit among the first k), `..._extra_r_precision` (hits among the first R over R, with R
    positives) and `..._extra_map_at_r` (the precision at each hit among the first R, summed, over R); ties get their
    expected value. `extra_unmatched` is the number of listed queries that the data lacks, if any.
    """
    n, t = len(images["vec"]), len(texts["vec"])

    def of_images(which: Tensor) -> Tensor:
        queries = {name: value[which] for name, value in images.items()}
        return torch.cat([score(queries, rows(texts, c)) for c in chunks(t, chunk)], 1)

    def of_texts(which: Tensor) -> Tensor:
        queries = {name: value[which] for name, value in texts.items()}
        return torch.cat([score(rows(images, r), queries) for r in chunks(n, chunk)]).T

    for name, panel, listed, items in (
        ("text_retrieval", of_images, positives.texts, t),
        ("image_retrieval", of_texts, positives.images, n),
    ):
        for metric, value in _means(panel, listed, items, ks, images["vec"].device):
            yield f"{name}_extra_{metric}", value
    if positives.unmatched:
        yield "extra_unmatched", float(positives.unmatched)


def _means(
    panel: Callable[[Tensor], Tensor], listed: Listed, items: int, ks: Sequence[int], device: torch.device
) -> Iterator[tuple[str, float]]:
    """Means over queries. Args: panel: places of queries [q] -> scores [q, items]."""
    queries, truths = list(listed), list(listed.values())

    def judged(part: slice) -> dict[str, float]:
        scores = panel(torch.tensor(queries[part], device=device))
        truth = torch.zeros(scores.shape, dtype=torch.bool)
        for row, places in enumerate(truths[part]):
            truth[row, places] = True
        truth = truth.to(scores.device)
        where = standing(scores, truth)
        sums = {f"recall@{k}": hit(where, k).sum().item() for k in ks}
        sums["r_precision"] = precision_at(scores, truth, truth.sum(1)).sum().item()
        sums["map_at_r"] = average_precision_at_r(scores, truth).sum().item()
        return sums

    parts = list(in_turns(list(chunks(len(queries), max(1, PANEL // items))), judged))
    for metric in parts[0]:
        yield metric, sum(part[metric] for part in parts) / len(queries)
