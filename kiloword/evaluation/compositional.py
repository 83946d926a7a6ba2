"""The task `compositional`: whether true captions score above false ones.

Files are read as SugarCrepe (arXiv:2306.14610), SugarCrepe++ (arXiv:2406.11171), Winoground (arXiv:2204.03162), ARO
(arXiv:2210.01936) and VALSE (arXiv:2112.07566) distribute them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.data.columns import load_json
from kiloword.data.images.decode import MAX_PIXELS, decode
from kiloword.data.reading import read_image
from kiloword.data.sample import clean
from kiloword.data.source import key_of, names_of, rows_by_name
from kiloword.evaluation.features import seen
from kiloword.evaluation.metrics import check_scores, rounding
from kiloword.evaluation.retrieval import scores_of_pairs
from kiloword.evaluation.task import Findings, Inputs, Task
from kiloword.model.encoding import join
from kiloword.randomness import key
from kiloword.report import Block, Gallery, Tile, thumbnail
from kiloword.terminal import shown
from kiloword.types import BadSample, Features, Record, Skipped, Source

AGREEING = 2  # of VALSE's three annotators: fewer chose the caption alone, and the foil is not valid
BOX = ("bbox_x", "bbox_y", "bbox_w", "bbox_h")
EXAMPLES = 6  # items on the page that are right, and as many that are wrong


@dataclass(frozen=True, kw_only=True)
class CompositionalTaskOptions:
    """Which captions are compared."""

    # json or jsonl of SugarCrepe, SugarCrepe++, Winoground, ARO or VALSE, as distributed, or a folder of such files
    pairs: str | None = None


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

    @property
    def between(self) -> list[tuple[str, str]]:
        """Pairs of captions that are compared without an image: both true ones, then each false one with each."""
        if len(self.images) > 1 or len(self.positives) < 2:
            return []
        return [
            (self.positives[0], self.positives[1]),
            *((false, true) for false in self.negatives for true in self.positives),
        ]

    def figures(self, scores: Tensor, between: Tensor) -> Iterator[tuple[str, float, Tensor, Tensor]]:
        """Name and chance of each figure, scores that must be higher, and those that must be lower.

        Args: scores of images with captions, [images, captions]; of the pairs in `between`.
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
        if len(between):
            yield "text_only", 1 / (1 + 2 * q), between[0], between[1:]


@dataclass(frozen=True)
class Benchmark:
    """The keys of a benchmark's entries, and how it counts. `a|b` is the first of these keys that an entry has."""

    name: str
    images: Sequence[str]
    positives: Sequence[str]
    negatives: Sequence[str] = ()  # without: a list under the key of the positive one holds it and the negatives
    category: str = ""
    ties_win: bool = False  # a true caption that ties with a false one counts as right
    least: int = 1  # items below which a category is not part of the mean over categories
    symmetric: bool = True  # whether symmetric relations are

    @property
    def needs(self) -> str:
        """The keys of an entry."""
        return ", ".join((*self.images, *self.positives, *self.negatives)).replace("|", " or ")


BENCHMARKS = {  # by the key that no earlier benchmark has
    "caption_0": Benchmark("Winoground", ("image_0", "image_1"), ("caption_0", "caption_1"), (), "collapsed_tag"),
    "foil": Benchmark("VALSE", ("image_file",), ("caption",), ("foil",), "linguistic_phenomena"),
    "attributes": Benchmark(
        "ARO attribution", ("image_path|image",), ("true_caption",), ("false_caption",), "attributes", least=25
    ),
    "true_caption": Benchmark(
        "ARO relation", ("image_path|image",), ("true_caption",), ("false_caption",), "relation_name", symmetric=False
    ),
    "caption_options": Benchmark("ARO order", ("image|image_path",), ("caption_options",), ties_win=True),
    "caption2": Benchmark("SugarCrepe++", ("filename|key",), ("caption", "caption2"), ("negative_caption",)),
    "negative_caption": Benchmark("SugarCrepe", ("filename|key",), ("caption",), ("negative_caption",)),
}


@cache
def symmetric_relations() -> frozenset[str]:
    """ARO's relations that hold in both directions, which its code does not count."""
    return frozenset(Path(__file__).with_name("symmetric_relations.txt").read_text(encoding="utf-8").splitlines())


def read(path: str | Path | None) -> tuple[Benchmark, list[Item]]:
    """The items of a file, or of all .json and .jsonl files of a folder.

    Raises: ValueError when there is none, for files of several benchmarks, and naming an entry that lacks a text.
    """
    if path is None:
        raise ValueError("--pairs is missing: name the json file of the true and false captions, or its folder.")
    folder, found, items = Path(path).expanduser(), dict[str, Benchmark](), list[Item]()
    for file in [folder] if folder.is_file() else sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")]):
        for n, (category, values) in enumerate(_entries(file, load_json(file))):
            keys = list(values) if isinstance(values, dict) else []
            benchmark = next((made for key, made in BENCHMARKS.items() if key in keys), None)
            try:
                if benchmark is None:
                    raise ValueError
                items += _items(benchmark, category, values)
                found[benchmark.name] = benchmark
            except (AttributeError, TypeError, ValueError, LookupError, BadSample):
                which = (
                    f"{benchmark.name} needs {benchmark.needs}" if benchmark else f"known are {', '.join(BENCHMARKS)}"
                )
                has = ", ".join(keys) or "no keys"
                raise ValueError(shown(f"{file.name}, item {n} ({category}): {which}; it has {has}.")) from None
    if len(found) > 1:
        raise ValueError(f"{path} holds files of {' and '.join(found)}: give each benchmark its own --pairs.")
    if not items:
        raise ValueError(f"--pairs {path}: no item in any .json or .jsonl file.")
    return next(iter(found.values())), items


def _entries(file: Path, parsed: Any) -> Iterator[tuple[str, Any]]:
    """Category and values of every entry: of a list, of an object, or of an object of lists by category."""
    for name, values in parsed.items() if isinstance(parsed, dict) else [(file.stem, parsed)]:
        if isinstance(values, list):
            yield from ((name, entry) for entry in values)
        else:
            yield file.stem, values


def _items(benchmark: Benchmark, category: str, values: Mapping[str, Any]) -> Iterator[Item]:
    """The item of an entry; none where it is not valid. Raises: any error for an entry that lacks a text."""

    def texts(keys: str) -> list[str]:
        value = values[next(iter([key for key in keys.split("|") if key in values]), keys)]
        listed = value if isinstance(value, list) and not benchmark.negatives else [value]
        if len(kept := clean(listed)) < len(listed):
            raise ValueError
        return kept

    if values.get("mturk", {}).get("caption", AGREEING) < AGREEING:
        return
    box = None if values.get(BOX[0]) is None else tuple(float(values[key]) for key in BOX)
    kind = values.get(benchmark.category) or category
    images = tuple(Cut(name, box) for keys in benchmark.images for name in texts(keys))
    captions = tuple(text for keys in (*benchmark.positives, *benchmark.negatives) for text in texts(keys))
    true = len(benchmark.positives)
    if len(images) == 1 and len(captions) == true:
        raise ValueError
    yield Item("_".join(kind) if isinstance(kind, list) else str(kind), images, captions[:true], captions[true:])


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

    def locate(self, row: int) -> tuple[Source, int]:
        """The row of the source, whose file may be fetched ahead."""
        return self.source, self.places[row][0]

    def record(self, row: int) -> Record:
        """The record of the source, its image cut, black where the box reaches beyond it. Raises BadSample."""
        place, cut = self.places[row]
        record = read_image(self.source, place)
        if cut.box is None:
            return record
        x, y, w, h = map(round, cut.box)
        if w < 1 or h < 1 or w * h > MAX_PIXELS:
            raise BadSample(f"its box is {w} x {h} pixels")
        part = Image.fromarray(decode(record.image)).crop((x, y, x + w, y + h))
        return replace(record, image=np.asarray(part, dtype=np.uint8))


class Scored(NamedTuple):
    """Items all of whose images could be read, and the scores of their pairs."""

    items: list[Item]
    scores: list[Tensor]  # of each item, [images, captions]
    between: list[Tensor]  # of each item, of its pairs of captions
    cuts: Cuts


def scored(inputs: Inputs, items: Sequence[Item]) -> Scored:
    """Encode every image and every caption of the items once, and score the pairs of each item.

    The name of an image is looked up as it is, without its suffix, without its folders, and without both. Names that
    the source lacks are appended to `skipped`.
    Raises: ValueError for a name that fits several rows, and when no item has all its images.
    """
    source, rows = inputs.source, rows_by_name(inputs.source)
    found, missing = dict[Cut, int](), dict[str, int]()
    for cut in (cut for item in items for cut in item.images):
        row = next((rows[name] for name in names_of(cut.image) if name in rows), None)
        if row is None:
            missing[cut.image] = missing.get(cut.image, 0) + 1
        elif row < 0:
            raise ValueError(f"{source.name} has several images that {cut.image!r} can mean: give each its own name.")
        else:
            found[cut] = row
    inputs.skipped.extend(Skipped(-1, name, f"not in {source.name}, {n} uses") for name, n in missing.items())
    cuts = Cuts(source, [(row, cut) for cut, row in found.items()])
    parts = list(seen(replace(inputs, source=cuts))) if found else []
    places = {cuts.places[row][1]: n for n, row in enumerate(row for part in parts for row in part.rows)}
    usable = [item for item in items if all(cut in places for cut in item.images)]
    if not usable:
        named = f"such as {next(iter(missing))!r}; it has {next(iter(rows), 'nothing')!r}" if missing else "readable"
        raise ValueError(f"{source.name} has the images of no item of --pairs, {named}.")
    number = {text: n for n, text in enumerate(dict.fromkeys(text for item in usable for text in item.captions))}
    images, texts = join([part.images for part in parts]), inputs.matcher.encode_text(list(number))
    pairs = [[(places[cut], number[text]) for cut in item.images for text in item.captions] for item in usable]
    between = [[(number[a], number[b]) for a, b in item.between] for item in usable]
    halves = list[tuple[Tensor, ...]]()
    for score, left, listed in ((inputs.matcher.score_pairs, images, pairs), (_cosine, texts, between)):
        values = torch.empty(0)
        if flat := [pair for of_item in listed for pair in of_item]:
            a, b = torch.tensor(flat, device=texts["vec"].device).unbind(1)
            values = check_scores(scores_of_pairs(score, left, texts, a, b)).float().cpu()
        halves.append(torch.split(values, list(map(len, listed))))
    scores = [values.view(len(item.images), -1) for item, values in zip(usable, halves[0], strict=True)]
    return Scored(usable, scores, list(halves[1]), cuts)


def _cosine(a: Features, b: Features) -> Tensor:
    return (a["vec"].float() * b["vec"].float()).sum(1)


def run(inputs: Inputs, options: CompositionalTaskOptions) -> Findings:
    """Encode each image and each caption once, score the pairs of every item, and count the items that are right.

    An item is right if every true caption scores higher than every false one; an equal score is wrong, as in
    SugarCrepe's and Winoground's code, but right in ARO's orders, as in ARO's. Yields for each figure its mean over
    items, its mean over categories, its value at chance (all orders of the scores equally likely) and `NAME@CATEGORY`.
    `ties` is the number of items with equal scores, up to rounding.
    Raises: ValueError as `read` and `scored`.
    """
    benchmark, items = read(options.pairs)
    usable, scores, between, cuts = scored(inputs, items)
    right, chance, tied = dict[str, list[bool]](), dict[str, list[float]](), 0
    for item, of_item, of_texts in zip(usable, scores, between, strict=True):
        ties = False
        for name, likely, high, low in item.figures(of_item, of_texts):
            margin, limit = high - low, rounding(low)
            right.setdefault(name, []).append(bool((margin >= -limit if benchmark.ties_win else margin > limit).all()))
            chance.setdefault(name, []).append(likely)
            ties |= bool((margin.abs() <= limit).any())
        tied += ties
    yield "items", float(len(usable))
    yield "items_skipped", float(len(items) - len(usable))
    yield "ties", float(tied)
    categories = [item.category for item in usable]
    for name in right:
        yield from means(name, right[name], chance[name], categories, benchmark)
    if inputs.page:
        last = list(right.values())[-1 if benchmark.name == "Winoground" else 0]
        yield from _examples(cuts, usable, last, scores)


def means(
    name: str, right: Sequence[bool], chance: Sequence[float], categories: Sequence[str], benchmark: Benchmark
) -> Iterator[tuple[str, float]]:
    """Means of a figure: over items, at chance, over the categories that the benchmark counts, of each category."""
    names = sorted(set(categories))
    numbers = {category: n for n, category in enumerate(names)}
    of = torch.tensor([numbers[category] for category in categories])
    hits, likely = torch.tensor(right, dtype=torch.float64), torch.tensor(chance, dtype=torch.float64)
    count = torch.bincount(of, minlength=len(names)).double()
    by_category = torch.bincount(of, hits, len(names)) / count
    by_chance = torch.bincount(of, likely, len(names)) / count
    omitted = frozenset() if benchmark.symmetric else symmetric_relations()
    counted = torch.tensor(
        [n >= benchmark.least and c not in omitted for c, n in zip(names, count.tolist(), strict=True)]
    )
    yield name, hits.mean().item()
    yield f"{name}_chance", likely.mean().item()
    if counted.any():
        yield f"{name}_by_category", by_category[counted].mean().item()
        yield f"{name}_by_category_chance", by_chance[counted].mean().item()
    for n, category in enumerate(names):
        yield f"{name}@{category}", by_category[n].item()
        yield f"{name}_chance@{category}", by_chance[n].item()
        yield f"{name}_items@{category}", count[n].item()


def _examples(cuts: Cuts, items: Sequence[Item], right: Sequence[bool], scores: Sequence[Tensor]) -> Iterator[Block]:
    """Items that are wrong, then items that are right, the same order for every model."""
    rows = {cut: row for row, (_, cut) in enumerate(cuts.places)}
    order = sorted(range(len(items)), key=lambda n: key(cuts.fingerprint, "examples", n))
    for wanted, title in ((False, "Wrong"), (True, "Right")):
        tiles = []
        for n in [n for n in order if right[n] is wanted][:EXAMPLES]:
            item = items[n]
            for i, cut in enumerate(item.images):
                true = (i,) if len(item.images) > 1 else range(len(item.positives))
                lines = [
                    f"{score:.3f} {text} ({'true' if c in true else 'false'})"
                    for c, (text, score) in enumerate(zip(item.captions, scores[n][i].tolist(), strict=True))
                ]
                tiles.append(Tile(thumbnail(decode(cuts.record(rows[cut]).image)), [item.category, *lines], wanted))
        if tiles:
            yield Gallery(tiles, title, 5 if len(items[0].images) == 1 else 4)


TASK = Task(
    name="compositional",
    help="Compare scores of true captions with those of false ones: SugarCrepe, Winoground, ARO, VALSE.",
    data="the images that --pairs names, by key or file name",
    options=CompositionalTaskOptions,
    run=run,
    hidden=r"_(chance|items)@",
)
