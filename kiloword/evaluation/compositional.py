"""The task `compositional`: whether true captions score above false ones.

Files are read as SugarCrepe (arXiv:2306.14610), SugarCrepe++ (arXiv:2406.11171), Winoground (arXiv:2204.03162), ARO
(arXiv:2210.01936) and VALSE (arXiv:2112.07566) distribute them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.data.columns import load_json
from kiloword.data.images.decode import decode
from kiloword.data.reading import read_image
from kiloword.data.sample import clean
from kiloword.data.source import key_of, names_of, rows_by_name
from kiloword.evaluation.features import Seen, seen, tile
from kiloword.evaluation.metrics import check_scores, rounding
from kiloword.evaluation.retrieval import scores_of_pairs
from kiloword.evaluation.task import Findings, Inputs
from kiloword.evaluation.tasks import CompositionalTaskOptions
from kiloword.report.blocks import Gallery
from kiloword.terminal import shown
from kiloword.types import BadSample, Record, Skipped, Source

AGREEING = 2  # of VALSE's three annotators: fewer chose the caption alone, and the foil is not valid
# keys of the images of an entry
IMAGES = ("image_0", "image_1", "image_file", "image_path", "image", "filename", "key")
BOX = ("bbox_x", "bbox_y", "bbox_w", "bbox_h")


class Cut(NamedTuple):
    """An image, or a part of one."""

    image: str  # name of its file, or its key
    box: tuple[float, ...] | None = None  # x, y, width and height of the part in pixels


@dataclass(frozen=True)
class Item:
    """Captions of one image, or two images each with its caption (Winoground)."""

    category: str
    images: tuple[Cut, ...]
    positives: tuple[str, ...]  # of two images the first is true of the first, the second of the second
    negatives: tuple[str, ...] = ()
    chosen: tuple[bool, ...] = ()  # WinoGAViL: whether each image is associated with the cue

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions, true ones first."""
        return self.positives + self.negatives

    def figures(self, scores: Tensor, texts: Tensor) -> Iterator[tuple[str, float, Tensor, Tensor]]:
        """Name and chance of each figure, scores that must be higher, and those that must be lower.

        Args: scores of images with captions, [images, captions]; texts [captions, D], whose cosines are compared where
        two captions are true: both with each other, then each false one with each.
        """
        p, q = len(self.positives), len(self.negatives)
        if len(self.images) == 2:
            own, by_text, by_image = scores.diagonal(), scores.flip(1).diagonal(), scores.flip(0).diagonal()
            yield "text_score", 1 / 4, own, by_text
            yield "image_score", 1 / 4, own, by_image
            yield "group_score", 1 / 6, own, torch.stack([by_text, by_image])
            return
        name, chance = ("accuracy", 1 / (1 + q)) if p == 1 else ("image_to_text", 1 / comb(p + q, p))
        yield name, chance, scores[0, :p, None], scores[0, None, p:]
        if p > 1:
            cosines = (texts[:, None] * texts[:p]).sum(2)
            yield "text_only", 1 / (1 + 2 * q), cosines[0, 1], cosines[p:]


@dataclass(frozen=True)
class Benchmark:
    """The keys of a benchmark's entries, and how it counts."""

    positives: Sequence[str]
    negatives: Sequence[str] = ()  # without: a list under the key of the positive one holds it and the negatives
    category: str = ""
    ties_win: bool = False  # a true caption that ties with a false one counts as right
    least: int = 1  # items below which a category is not part of the mean over categories
    symmetric: bool = True  # whether symmetric relations are


BENCHMARKS = {  # by the key that no earlier benchmark has: Winoground, VALSE, three of ARO, SugarCrepe++, SugarCrepe
    "caption_0": Benchmark(("caption_0", "caption_1"), category="collapsed_tag"),
    "foil": Benchmark(("caption",), ("foil",), "linguistic_phenomena"),
    "attributes": Benchmark(("true_caption",), ("false_caption",), "attributes", least=25),
    "true_caption": Benchmark(("true_caption",), ("false_caption",), "relation_name", symmetric=False),
    "caption_options": Benchmark(("caption_options",), ties_win=True),
    "caption2": Benchmark(("caption", "caption2"), ("negative_caption",)),
    "negative_caption": Benchmark(("caption",), ("negative_caption",)),
}


def read(path: str | Path | None) -> tuple[Benchmark, list[Item]]:
    """The items of a file, or of all .json and .jsonl files of a folder, of one benchmark.

    Raises: ValueError when there is none, and naming an entry that is of no benchmark or lacks a text.
    """
    if path is None:
        raise ValueError("--pairs is missing: name the json file of the true and false captions, or its folder.")
    folder, found, items = Path(path).expanduser(), set[Benchmark](), list[Item]()
    for file in [folder] if folder.is_file() else sorted(folder.glob("*.json*")):
        parsed = load_json(file)
        for name, listed in parsed.items() if isinstance(parsed, dict) else [(file.stem, parsed)]:
            # an object has lists by category, or an entry under each name
            for n, values in enumerate(listed if isinstance(listed, list) else [listed]):
                try:
                    benchmark = next(made for key, made in BENCHMARKS.items() if key in values)
                    items += _items(benchmark, name if isinstance(listed, list) else file.stem, values)
                    found.add(benchmark)
                except (AttributeError, TypeError, ValueError, LookupError, StopIteration, BadSample):
                    raise ValueError(
                        f"{shown(file.name)}, entry {n} of {shown(name[:60])}: expected an image and captions as "
                        "SugarCrepe, SugarCrepe++, Winoground, ARO or VALSE have them."
                    ) from None
    if len(found) > 1:
        raise ValueError(f"{path} holds files of several benchmarks: give each its own --pairs.")
    if not items:
        missing = "no item in any .json or .jsonl file" if Path(path).exists() else "no such file or folder"
        raise ValueError(f"--pairs {path}: {missing}.")
    return found.pop(), items


def _items(benchmark: Benchmark, category: str, values: Mapping[str, Any]) -> Iterator[Item]:
    """The item of an entry; none where it is not valid. Raises: any error for an entry that lacks a text."""
    names = [values[key] for key in IMAGES if key in values][: 2 if "image_0" in values else 1]
    true, false = ([values[key] for key in keys] for keys in (benchmark.positives, benchmark.negatives))
    if benchmark.ties_win:
        true, false = true[0][:1], true[0][1:]
    texts = [*names, *true, *false]
    if len(clean(texts)) < len(texts) or not names or len(names) + len(false) < 2:
        raise ValueError
    box = tuple(float(values[key]) for key in BOX) if values.get(BOX[0]) is not None else None
    kind = values.get(benchmark.category) or category
    if values.get("mturk", {}).get("caption", AGREEING) >= AGREEING:
        category = "_".join(kind) if isinstance(kind, list) else str(kind)
        yield Item(category, tuple(Cut(name, box) for name in names), tuple(clean(true)), tuple(clean(false)))


class Cuts:
    """Rows of a source, some of them cut to a box: a source without captions.

    Args: places: the row of each, and the image with its box.
    """

    def __init__(self, source: Source, places: Sequence[tuple[int, Cut]]) -> None:
        self.source, self.places = source, places
        self.name, self.fingerprint = source.name, source.fingerprint

    def __len__(self) -> int:
        return len(self.places)

    def key(self, row: int) -> str:
        """The key in the source. Raises BadSample."""
        return key_of(self.source, self.places[row][0])

    def record(self, row: int) -> Record:
        """The record of the source, its image cut, black where the box reaches beyond it. Raises BadSample."""
        place, cut = self.places[row]
        record = read_image(self.source, place)
        if cut.box is None:
            return record
        x, y, w, h = map(round, cut.box)
        if w < 1 or h < 1:
            raise BadSample(f"its box is {w} x {h} pixels")
        part = Image.fromarray(decode(record.image)).crop((x, y, x + w, y + h))
        return replace(record, image=np.asarray(part, np.uint8))


def scored(inputs: Inputs, items: Sequence[Item]) -> tuple[Cuts, list[tuple[Item, Tensor, Tensor]]]:
    """The items all of whose images could be read, scores [images, captions] and the vectors [captions, D] of each.

    Every image and every caption is encoded once. The name of an image is looked up as it is, without its suffix,
    without its folders, and without both. Names that the source lacks, or has several times, are appended to `skipped`.
    Raises: ValueError when no item has all its images.
    """
    source, rows = inputs.source, rows_by_name(inputs.source)
    found, missing = dict[Cut, int](), dict[str, Skipped]()
    for cut in (cut for item in items for cut in item.images):
        row = next((rows[name] for name in names_of(cut.image) if name in rows), -1)
        if row >= 0:
            found[cut] = row
        else:
            missing[cut.image] = Skipped(-1, cut.image, f"{source.name} has no image of this name, or several")
    inputs.skipped.extend(missing.values())
    cuts = Cuts(source, [(row, cut) for cut, row in found.items()])
    encoded = Seen.whole(seen(replace(inputs, source=cuts))) if found else None
    places = {cuts.places[row][1]: n for n, row in enumerate(encoded.rows if encoded else ())}
    usable = [item for item in items if all(cut in places for cut in item.images)]
    if encoded is None or not usable:
        raise ValueError(
            f"{source.name} has the images of no item of --pairs, such as {shown(items[0].images[0].image)!r}."
        )
    number = {text: n for n, text in enumerate(dict.fromkeys(text for item in usable for text in item.captions))}
    images, texts = encoded.images, inputs.matcher.encode_text(list(number))
    pairs = [(places[cut], number[text]) for item in usable for cut in item.images for text in item.captions]
    a, b = torch.tensor(pairs, device=texts["vec"].device).unbind(1)
    scores = check_scores(scores_of_pairs(inputs.matcher.score_pairs, images, texts, a, b)).float().cpu()
    each = torch.split(scores, [len(item.images) * len(item.captions) for item in usable])
    vec = texts["vec"].float().cpu()
    return cuts, [
        (item, own.view(len(item.images), -1), vec[[number[text] for text in item.captions]])
        for item, own in zip(usable, each, strict=True)
    ]


def run(inputs: Inputs, options: CompositionalTaskOptions) -> Findings:
    """Count the items whose true captions all score higher than the false ones (in ARO's orders, at least as high).

    Yields for each figure its mean over items and over categories, its value at chance (all orders of the scores
    equally likely) and `NAME@CATEGORY`; `ties`: items with equal scores, up to rounding. The page shows wrong items.
    Raises: ValueError as `read` and `scored`.
    """
    benchmark, items = read(options.pairs)
    cuts, usable = scored(inputs, items)
    right, chance, tied = dict[str, list[bool]](), dict[str, list[float]](), 0
    for item, scores, texts in usable:
        ties = False
        for name, likely, high, low in item.figures(scores, texts):
            margin, limit = high - low, rounding(low)
            right.setdefault(name, []).append(bool((margin >= -limit if benchmark.ties_win else margin > limit).all()))
            chance.setdefault(name, []).append(likely)
            ties |= bool((margin.abs() <= limit).any())
        tied += ties
    yield "items", float(len(usable))
    yield "items_skipped", float(len(items) - len(usable))
    yield "ties", float(tied)
    for name in right:
        yield from means(name, right[name], chance[name], [item.category for item, _, _ in usable], benchmark)
    if inputs.page:
        rows, tiles = {cut: row for row, (_, cut) in enumerate(cuts.places)}, []
        for (item, scores, _), good in zip(usable, next(iter(right.values())), strict=True):
            for cut, own in zip(item.images if not good else (), scores.tolist(), strict=False):
                lines = [f"{score:.3f} {text}" for score, text in zip(own, item.captions, strict=True)]
                tiles.append(tile(cuts, rows[cut], item.category, *lines))
        yield Gallery(tiles[:12], "Wrong items: each image with its scores, true captions first", 4)


def means(
    name: str, right: Sequence[bool], chance: Sequence[float], categories: Sequence[str], benchmark: Benchmark
) -> Iterator[tuple[str, float]]:
    """Means of a figure: over items, at chance, over the categories that the benchmark counts, of each category."""
    names, of, count = np.unique(categories, return_inverse=True, return_counts=True)
    # of ARO's relations, those that hold in both directions, which its code does not count
    relations = Path(__file__).with_name("symmetric_relations.txt").read_text("utf-8").splitlines()
    counted = (count >= benchmark.least) & ~np.isin(names, [] if benchmark.symmetric else relations)
    for suffix, values in (("", right), ("_chance", chance)):
        by_category = np.bincount(of, values) / count
        yield f"{name}{suffix}", float(np.mean(values))
        if counted.any():
            yield f"{name}_by_category{suffix}", float(by_category[counted].mean())
        yield from ((f"{name}{suffix}@{category}", float(by_category[n])) for n, category in enumerate(names))
    yield from ((f"{name}_items@{category}", float(n)) for category, n in zip(names, count, strict=True))
