"""Associations of images with a cue: `kiloword eval winogavil MODEL --data IMAGES --pairs winogavil_dataset.csv`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from math import comb
from pathlib import Path

import torch
from torch import Tensor

from kiloword.data.sample import decode_text, read_whole
from kiloword.evaluation.compositional.images import images_of
from kiloword.evaluation.compositional.items import LARGEST, Cut, Item
from kiloword.evaluation.compositional.task import encoded
from kiloword.evaluation.metrics import check_scores, rounding
from kiloword.evaluation.retrieval import scores_of_pairs
from kiloword.evaluation.task import Inputs, Values
from kiloword.evaluation.winogavil import WinogavilTaskOptions
from kiloword.terminal import shown
from kiloword.types import BadSample

COLUMNS = ("cue", "candidates", "associations")
SETS = {"5": (5, 5), "6": (6, 6), "10": (10, 10), "12": (12, 12), "5-6": (0, 6), "10-12": (10, 12)}  # of candidates


def run(inputs: Inputs, options: WinogavilTaskOptions) -> Values:
    """Choose as many candidates as there are associations, those with the highest scores, and compare both sets.

    `avg_jaccard_score` over all items, `jaccard_score_N` over those with N candidates; 5 to 6 and 10 to 12 together.
    Prompts are "A cue" and "An cue", as in DataComp's evaluation. Ties get their expected value.
    Raises: ValueError for a file without these columns, and where no item has all its images.
    """
    items, relevant = read(options.pairs)
    cuts = images_of(inputs.source, items, inputs.skipped)
    places, images = encoded(replace(inputs, source=cuts), cuts)
    usable = [n for n, item in enumerate(items) if all(cut in places for cut in item.images)]
    if not usable:
        raise ValueError(f"{inputs.source.name}: no item of {options.pairs} has all its images.")
    texts = inputs.matcher.encode_text([items[n].positives[0] for n in usable])
    counts = [len(items[n].images) for n in usable]
    image = torch.tensor([places[cut] for n in usable for cut in items[n].images])
    text = torch.arange(len(usable)).repeat_interleave(torch.tensor(counts))
    scores = check_scores(scores_of_pairs(inputs.matcher.score_pairs, images, texts, image, text)).cpu()
    ends = list(accumulate(counts))
    values = [
        jaccard(scores[end - count : end], relevant[n]) for n, count, end in zip(usable, counts, ends, strict=True)
    ]
    yield "items", float(len(usable))
    yield "avg_jaccard_score", sum(values) / len(values)
    for name, (least, most) in SETS.items():
        chosen = [value for value, count in zip(values, counts, strict=True) if least <= count <= most]
        if chosen:
            yield f"jaccard_score_{name}", sum(chosen) / len(chosen)


def jaccard(scores: Tensor, relevant: Tensor) -> float:
    """Jaccard index of the k relevant items and the k with the highest scores, in expectation over ties.

    Args: scores [C]; relevant [C] bool, with at least one.
    """
    k = int(relevant.sum())
    last = scores.topk(k).values[-1]
    above = scores > last + rounding(last)
    tied = (scores >= last - rounding(last)) & ~above
    hits, places = int((above & relevant).sum()), k - int(above.sum())
    good, bad = int((tied & relevant).sum()), int((tied & ~relevant).sum())
    ways = {x: comb(good, x) * comb(bad, places - x) for x in range(places + 1)}
    return sum(n * (hits + x) / (2 * k - hits - x) for x, n in ways.items()) / comb(good + bad, places)


def read(path: Path | None) -> tuple[list[Item], list[Tensor]]:
    """The items of a file, and which candidates of each are associated with its cue, [C] bool.

    Raises: ValueError for another file, naming the line.
    """
    if path is None:
        raise ValueError("--pairs is missing: name winogavil_dataset.csv, which has cues and their associations.")
    try:
        rows = list(csv.DictReader(io.StringIO(decode_text(read_whole(path, path.name, LARGEST)))))
    except (OSError, BadSample, csv.Error) as error:
        raise ValueError(f"--pairs {path}: {getattr(error, 'strerror', None) or error}") from None
    missing = [column for column in COLUMNS if not rows or column not in rows[0]]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]}. Expected {', '.join(COLUMNS)}, with rows below.")
    items = [item for n, row in enumerate(rows, start=2) for item in _item(row, f"{path}, line {n}")]
    return [item for item, _ in items], [relevant for _, relevant in items]


def _item(row: dict[str, str], place: str) -> Iterator[tuple[Item, Tensor]]:
    candidates, associations = (_names(row[column], f"{place}: {column}") for column in COLUMNS[1:])
    unknown = next((name for name in associations if name not in candidates), None)
    if unknown is not None:
        raise ValueError(shown(f"{place}: the association {unknown[:60]!r} is not among the candidates."))
    cue = (row["cue"] or "").lower()
    if not cue:
        raise ValueError(f"{place} has no cue.")
    prompt = f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}"
    relevant = torch.tensor([name in associations for name in candidates])
    yield Item("winogavil", tuple(map(Cut, candidates)), (prompt,)), relevant


def _names(text: str | None, place: str) -> list[str]:
    """A JSON list of names."""
    try:
        names = json.loads(text or "")
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(shown(f'{place} is {(text or "")[:60]!r}. Expected a JSON list of names: ["bee", "hat"].'))
    return names
