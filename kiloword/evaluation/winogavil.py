"""The task `winogavil`: the images that people associate with a cue (arXiv:2207.12576)."""

from __future__ import annotations

import csv
import json
from math import comb
from pathlib import Path

import torch
from torch import Tensor

from kiloword.evaluation.compositional import Cut, Item, scored
from kiloword.evaluation.metrics import rounding
from kiloword.evaluation.task import Findings, Inputs
from kiloword.evaluation.tasks import WinogavilTaskOptions


def run(inputs: Inputs, options: WinogavilTaskOptions) -> Findings:
    """Choose as many candidates as there are associations, those with the highest scores, and compare both sets.

    `avg_jaccard_score` over all items, `jaccard_score_5-6` and `_10-12` over those with so many candidates.
    Prompts are "A cue" and "An cue", as in DataComp's evaluation. Ties get their expected value.
    Raises: ValueError for a file without these columns, and where no item has all its images.
    """
    _, usable = scored(inputs, read(options.pairs))
    values = [(len(item.images), jaccard(scores[:, 0], torch.tensor(item.chosen))) for item, scores, _ in usable]
    yield "items", float(len(usable))
    yield "avg_jaccard_score", sum(value for _, value in values) / len(values)
    for name, counts in ("5-6", range(7)), ("10-12", range(10, 13)):
        chosen = [value for count, value in values if count in counts]
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


def read(path: Path | None) -> list[Item]:
    """The items of a file, and which candidates of each are associated with its cue. Raises: ValueError for others."""
    items = []
    try:
        with Path(path or "").open(newline="", encoding="utf-8-sig") as file:
            for row in csv.DictReader(file):
                cue, names, right = row["cue"].lower(), *(json.loads(row[c]) for c in ("candidates", "associations"))
                prompt, chosen = f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}", tuple(name in right for name in names)
                if not 0 < sum(chosen) == len(right):
                    raise ValueError
                items.append(Item("winogavil", tuple(Cut(str(name)) for name in names), (prompt,), chosen=chosen))
    except (LookupError, ValueError, TypeError, AttributeError, IsADirectoryError):
        items = []
    if not items:
        raise ValueError(
            f"--pairs {path}: expected winogavil_dataset.csv, with the columns cue, candidates and associations, the "
            'last two as JSON lists of names (["bee", "hat"]), and every association among the candidates.'
        )
    return items
