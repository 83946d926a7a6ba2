"""Whether true captions score above false ones: `kiloword eval compositional MODEL --data SRC --pairs FILE`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import NamedTuple

import torch
from torch import Tensor

from kiloword.evaluation.compositional import CompositionalTaskOptions
from kiloword.evaluation.compositional.images import Cuts, images_of
from kiloword.evaluation.compositional.items import Benchmark, Cut, Item, read
from kiloword.evaluation.features import seen
from kiloword.evaluation.metrics import check_scores, rounding
from kiloword.evaluation.retrieval import PairScore, scores_of_pairs
from kiloword.evaluation.task import Inputs, Values
from kiloword.model.encoding import join
from kiloword.types import Features


def run(inputs: Inputs, options: CompositionalTaskOptions) -> Values:
    """Encode each image and each caption once, score the pairs of every item, and count the items that are right.

    An item is right if every true caption scores higher than every false one; an equal score is wrong, as in
    SugarCrepe's and Winoground's code, but right in ARO's orders, as in ARO's. Yields for each figure its mean over
    items, its mean over categories, its value at chance (all orders of the scores equally likely) and `NAME@CATEGORY`.
    `ties` is the number of items with equal scores, up to rounding.
    Raises: ValueError as `items.read` and `images.images_of`.
    """
    stored = read(options.pairs)
    cuts = images_of(inputs.source, stored.items, inputs.skipped)
    places, images = encoded(replace(inputs, source=cuts), cuts)
    usable = [item for item in stored.items if all(cut in places for cut in item.images)]
    if not usable:
        raise ValueError(f"{inputs.source.name}: no item of {options.pairs} has all its images.")
    captions = list(dict.fromkeys(text for item in usable for text in (*item.positives, *item.negatives)))
    texts = inputs.matcher.encode_text(captions)
    compared = Comparisons.of(usable, places, {text: n for n, text in enumerate(captions)})
    scores = compared.scores(inputs.matcher.score_pairs, images, texts)
    verdicts = list(compared.verdicts(scores, stored.benchmark))
    yield "items", float(len(usable))
    yield "items_skipped", float(len(stored.items) - len(usable))
    yield "ties", float(torch.stack([verdict.tied for verdict in verdicts]).any(0).sum())
    for verdict in verdicts:
        yield from figures(verdict, [item.category for item in usable], stored.benchmark)
    if inputs.shown is not None:
        from kiloword.evaluation.compositional.page import drawn

        inputs.shown.update(drawn(stored.benchmark, usable, verdicts, compared.by_item(scores, usable), cuts, places))


def encoded(inputs: Inputs, cuts: Cuts) -> tuple[dict[Cut, int], Features]:
    """The place of every readable image in the features, and the features."""
    rows: list[int] = []
    parts: list[Features] = []
    for part in seen(inputs):
        rows += part.rows
        parts.append(part.images)
    return {cuts.places[row][1]: place for place, row in enumerate(rows)}, join(parts)


class Verdict(NamedTuple):
    """One figure of N items."""

    name: str
    right: Tensor  # [N] bool
    tied: Tensor  # [N] bool: two scores that were compared are equal up to rounding
    chance: Tensor  # [N] float64: share of all orders of the scores that are right


Higher = list[tuple[int, int]]
"""Which pair of an item must score higher than which, as places in the item's list of pairs."""


@dataclass(frozen=True)
class Comparisons:
    """The pairs that N items score, item by item, and which must score higher than which."""

    pairs: Tensor  # [P, 2]: image and text, or two texts
    of_texts: Tensor  # [P] bool: the pair is of two texts
    starts: list[int]  # [N + 1]: the first pair of each item
    higher: dict[str, Tensor]  # figure -> [C, 3]: item, the pair that must score higher, the one that must score lower
    chance: dict[str, Tensor]  # figure -> [N]

    @staticmethod
    def of(items: Sequence[Item], places: dict[Cut, int], texts: dict[str, int]) -> Comparisons:
        """Comparisons of items, given the places of their images and captions in the features."""
        pairs: list[tuple[int, int, bool]] = []
        higher: dict[str, list[tuple[int, int, int]]] = {}
        chance: dict[str, list[float]] = {}
        starts = [0]
        for n, item in enumerate(items):
            captions = [texts[text] for text in (*item.positives, *item.negatives)]
            for name, (likely, compared) in _figures(item).items():
                higher.setdefault(name, []).extend((n, starts[-1] + a, starts[-1] + b) for a, b in compared)
                chance.setdefault(name, []).append(likely)
            pairs += [(places[cut], text, False) for cut in item.images for text in captions]
            if len(item.positives) == 2 and item.negatives:
                one, two, *negatives = captions
                pairs += [(one, two, True), *((a, b, True) for b in negatives for a in (one, two))]
            starts.append(len(pairs))
        table = torch.tensor(pairs)
        return Comparisons(
            table[:, :2],
            table[:, 2].bool(),
            starts,
            {name: torch.tensor(rows) for name, rows in higher.items()},
            {name: torch.tensor(values, dtype=torch.float64) for name, values in chance.items()},
        )

    def scores(self, score: PairScore, images: Features, texts: Features) -> Tensor:
        """Scores of all pairs, [P] on the CPU: the model's, and of two texts the cosine of their means."""
        device = texts["vec"].device
        scores = torch.zeros(len(self.pairs))
        for which, left, by in ((~self.of_texts, images, score), (self.of_texts, texts, _cosine)):
            a, b = self.pairs[which].to(device).unbind(1)
            if len(a):
                scores[which] = check_scores(scores_of_pairs(by, left, texts, a, b)).float().cpu()
        return scores

    def by_item(self, scores: Tensor, items: Sequence[Item]) -> list[Tensor]:
        """The scores of every item's images with its captions, [images, captions] each."""
        shapes = [(len(item.images), len(item.positives) + len(item.negatives)) for item in items]
        return [scores[start : start + a * b].view(a, b) for start, (a, b) in zip(self.starts, shapes, strict=False)]

    def verdicts(self, scores: Tensor, benchmark: Benchmark) -> Iterator[Verdict]:
        """The figures of all items from the scores [P]."""
        for name, rows in self.higher.items():
            item, high, low = rows.unbind(1)
            margin, limit = scores[high] - scores[low], rounding(scores[low])
            wins = margin >= -limit if benchmark.ties_win else margin > limit
            ones = torch.ones(len(self.starts) - 1)
            right = ones.scatter_reduce(0, item, wins.float(), "amin").bool()
            tied = (ones - 1).scatter_reduce(0, item, (margin.abs() <= limit).float(), "amax").bool()
            yield Verdict(name, right, tied, self.chance[name])


def _figures(item: Item) -> dict[str, tuple[float, Higher]]:
    """The figures of an item: chance, and what must score higher than what."""
    if len(item.images) == 2:
        by_text, by_image = [(0, 1), (3, 2)], [(0, 2), (3, 1)]
        return {
            "text_score": (1 / 4, by_text),
            "image_score": (1 / 4, by_image),
            "group_score": (1 / 6, by_text + by_image),
        }
    p, q = len(item.positives), len(item.negatives)
    compared = [(a, p + b) for a in range(p) for b in range(q)]
    if p == 1:
        return {"accuracy": (1 / (1 + q), compared)}
    between = [(p + q, p + q + n) for n in range(1, 2 * q + 1)]
    return {"image_to_text": (1 / comb(p + q, p), compared), "text_only": (1 / (1 + 2 * q), between)}


def _cosine(a: Features, b: Features) -> Tensor:
    return (a["vec"].float() * b["vec"].float()).sum(1)


def figures(verdict: Verdict, categories: Sequence[str], benchmark: Benchmark) -> Values:
    """Means of a verdict: over items, at chance, over the categories that the benchmark counts, of each category."""
    names = sorted(set(categories))
    numbers = {category: n for n, category in enumerate(names)}
    of = torch.tensor([numbers[category] for category in categories])
    count = torch.bincount(of, minlength=len(names)).double()
    right = torch.bincount(of, verdict.right.double(), len(names)) / count
    chance = torch.bincount(of, verdict.chance, len(names)) / count
    name, counted = verdict.name, torch.tensor([benchmark.counts(c, int(n)) for c, n in zip(names, count, strict=True)])
    yield name, verdict.right.double().mean().item()
    yield f"{name}_chance", verdict.chance.mean().item()
    if counted.any():
        yield f"{name}_by_category", right[counted].mean().item()
        yield f"{name}_by_category_chance", chance[counted].mean().item()
    for n, category in enumerate(names):
        yield f"{name}@{category}", right[n].item()
        yield f"{name}_chance@{category}", chance[n].item()
        yield f"{name}_items@{category}", count[n].item()
