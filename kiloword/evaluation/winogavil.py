"""The task `winogavil`: the images that people associate with a cue (arXiv:2207.12576)."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from math import comb
from pathlib import Path

import torch
from torch import Tensor

from kiloword.evaluation.compositional import Cut, Item, scored
from kiloword.evaluation.metrics import rounding
from kiloword.evaluation.task import Findings, Inputs, Task

SETS = {"5": (5, 5), "6": (6, 6), "10": (10, 10), "12": (12, 12), "5-6": (0, 6), "10-12": (10, 12)}  # of candidates


@dataclass(frozen=True, kw_only=True)
class WinogavilTaskOptions:
    """Which associations are asked for."""

    pairs: Path | None = None  # winogavil_dataset.csv: columns `cue`, `candidates` and `associations`


def run(inputs: Inputs, options: WinogavilTaskOptions) -> Findings:
    """Choose as many candidates as there are associations, those with the highest scores, and compare both sets.

    `avg_jaccard_score` over all items, `jaccard_score_N` over those with N candidates; 5 to 6 and 10 to 12 together.
    Prompts are "A cue" and "An cue", as in DataComp's evaluation. Ties get their expected value.
    Raises: ValueError for a file without these columns, and where no item has all its images.
    """
    usable, scores, _, _ = scored(inputs, read(options.pairs))
    counts = [len(item.images) for item in usable]
    values = [jaccard(s[:, 0], torch.tensor(item.chosen)) for s, item in zip(scores, usable, strict=True)]
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


def read(path: Path | None) -> list[Item]:
    """The items of a file, and which candidates of each are associated with its cue.

    Raises: ValueError for another file, naming the line.
    """
    if path is None:
        raise ValueError("--pairs is missing: name winogavil_dataset.csv, which has cues and their associations.")
    items = []
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        for n, row in enumerate(csv.DictReader(file), start=2):
            try:
                cue, names, right = row["cue"].lower(), *(json.loads(row[c]) for c in ("candidates", "associations"))
                if not right or not set(right) <= set(names):
                    raise ValueError
                prompt = f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}"
                chosen = tuple(name in right for name in names)
                items.append(Item("winogavil", tuple(Cut(str(name)) for name in names), (prompt,), chosen=chosen))
            except (LookupError, ValueError, TypeError, AttributeError):
                raise ValueError(
                    f"{path}, line {n}: expected the columns cue, candidates and associations, the last two as JSON "
                    'lists of names (["bee", "hat"]), and every association among the candidates.'
                ) from None
    if not items:
        raise ValueError(f"{path} has no rows: expected the columns cue, candidates and associations.")
    return items


TASK = Task(
    name="winogavil",
    help="Choose the images that people associate with a cue among several: Jaccard index, as DataComp.",
    data="the images that --pairs names, by key or file name",
    options=WinogavilTaskOptions,
    run=run,
)
