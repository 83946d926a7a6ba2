"""Select and weight the prompts of a class: all equally, the least uncertain, or by how well they explain images.

Source: arXiv:2410.18857, section 3.4 and table 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kiloword.evaluation.retrieval import Score
from kiloword.evaluation.zeroshot import PromptOptions, Way
from kiloword.evaluation.zeroshot.bprw import by_class, combined, padded, reweigh
from kiloword.methods.prolip.gaussian import variance_sum
from kiloword.model.encoding import chunks, rows
from kiloword.model.heads import Head
from kiloword.randomness import key
from kiloword.types import Features

WEIGHT = "weight@"
ROWS = 4096  # images scored at once


@dataclass
class Prompts:
    """The prompts of n classes."""

    texts: Features  # of T prompts
    group: Tensor  # [T] int64, the class of each, in [0, n)
    n: int
    names: Sequence[str]  # of the classes


@dataclass
class Images:
    """Images to fit weights on and to score."""

    images: Features  # of I images
    labels: Tensor  # [I] int64, or [I, C] 0/1
    rows: list[int]  # of the source
    fingerprint: str  # of the source

    def without(self, places: Tensor) -> Images:
        """A copy without the images at `places`."""
        keep = torch.ones(len(self.rows), dtype=torch.bool)
        keep[places] = False
        where = keep.nonzero()[:, 0]
        images = {name: value[where.to(value.device)] for name, value in self.images.items()}
        return Images(images, self.labels[where], [self.rows[i] for i in where.tolist()], self.fingerprint)


@dataclass
class Chosen:
    """Classes from weighted prompts."""

    classes: Features  # [n, ...]
    weights: Tensor  # [T] float64; those of a class sum to 1
    taken: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # labelled images used for fitting
    seen: Tensor | None = None  # [n, M] images that each class was fitted on
    steps: int = 0  # of expectation maximisation


def check_gaussians(features: Features, way: Way, options: PromptOptions) -> None:
    """Raises: ValueError for a model without uncertainty."""
    if options.variance is not None and "log_var" not in features:
        raise ValueError(
            f"--prompts.variance {options.variance} combines variances, which this model does not have. Omit it, or "
            "use a model trained by prolip or with +gaussian."
        )
    if way != "ensemble" and "log_var" not in features:
        raise ValueError(
            f"--prompts {way} weights prompts by their uncertainty, which this model does not have. "
            "Use --prompts ensemble, or a model trained by prolip or with +gaussian."
        )


def choose(way: Way, head: Head, score: Score, prompts: Prompts, images: Images, options: PromptOptions) -> Chosen:
    """Classes from prompts; only bprw uses the images, and their labels only with shots.

    Raises: ValueError for a model without Gaussians (except for the ensemble), and for too few labelled images.
    """
    check_gaussians(prompts.texts, way, options)
    options.check(way)
    if way == "bprw":
        return _bprw(head, score, prompts, images, options)
    kept = torch.ones(len(prompts.group), dtype=torch.bool)
    if way != "ensemble":
        uncertainty, group = variance_sum(prompts.texts).cpu().double(), prompts.group.cpu()
        kept = filtered(uncertainty, group, options.coeff) if way == "filter" else least(uncertainty, group, options.k)
    where = kept.nonzero()[:, 0].to(prompts.group.device)
    texts, group = {name: value[where] for name, value in prompts.texts.items()}, prompts.group[where]
    return Chosen(combined(head, texts, group, prompts.n, None, options), _shares(kept, prompts.group.cpu()))


def filtered(uncertainty: Tensor, group: Tensor, coeff: float) -> Tensor:
    """Prompts of at most mean + coeff * standard deviation of the uncertainties of their class, and the least one.

    Args: uncertainty, group [T]. Returns: [T] bool.
    """
    kept = torch.zeros(len(group), dtype=torch.bool)
    for places in by_class(group, int(group.max()) + 1):
        of_class = uncertainty[places]
        limit = of_class.mean() + coeff * of_class.std(correction=0)
        kept[places] = of_class <= torch.maximum(limit, of_class.min())
    return kept


def least(uncertainty: Tensor, group: Tensor, k: int) -> Tensor:
    """The k least uncertain prompts of each class, or half of them, rounded up, for k = 0; ties: the first.

    Args: uncertainty, group [T]. Returns: [T] bool.
    """
    kept = torch.zeros(len(group), dtype=torch.bool)
    for places in by_class(group, int(group.max()) + 1):
        order = uncertainty[places].argsort(stable=True)
        kept[places[order[: k or (len(places) + 1) // 2]]] = True
    return kept


def _shares(kept: Tensor, group: Tensor) -> Tensor:
    """Equal weights of the kept prompts, [T] float64."""
    count = torch.bincount(group[kept], minlength=int(group.max()) + 1)
    return kept / count[group].double()


def _bprw(head: Head, score: Score, prompts: Prompts, images: Images, options: PromptOptions) -> Chosen:
    taken = torch.zeros(0, dtype=torch.int64)
    if options.shots:
        seen = labelled(images, prompts.names, options)
        taken = seen.flatten()
    else:
        base = head.ensemble(prompts.texts, prompts.group, prompts.n)
        seen = nearest(score, images.images, base, options.neighbours)
    names = [f"{images.fingerprint} {row}" for row in images.rows]
    weights, steps = reweigh(prompts.texts, prompts.group, prompts.n, images.images, names, seen, options)
    classes = combined(head, prompts.texts, prompts.group, prompts.n, weights, options)
    return Chosen(classes, weights, taken, seen, steps)


def nearest(score: Score, images: Features, classes: Features, m: int) -> Tensor:
    """The m images with the best scores for each class, all if there are fewer: [n, m]; does not use labels."""
    total = len(images["vec"])
    best, place = torch.zeros(len(classes["vec"]), 0), torch.zeros(len(classes["vec"]), 0, dtype=torch.int64)
    for part in chunks(total, ROWS):
        scores = score(rows(images, part), classes).cpu().T  # [n, i]
        best = torch.cat([best.to(scores), scores], 1)
        place = torch.cat([place, torch.arange(part.start, part.stop).expand(len(scores), -1)], 1)
        best, order = best.topk(min(m, best.shape[1]), dim=1)
        place = place.gather(1, order)
    return place


def labelled(images: Images, names: Sequence[str], options: PromptOptions) -> Tensor:
    """`shots` images of each class, [n, shots], drawn by the data's fingerprint and the seed.

    Raises: ValueError for several labels per image, and for a class without an image left to score.
    """
    if images.labels.ndim != 1:
        raise ValueError(
            "--prompts.shots needs one class per image, but these images have several: use --prompts.shots 0."
        )
    drawn = [key(images.fingerprint, options.seed, "shots", row) for row in images.rows]
    order = sorted(range(len(drawn)), key=drawn.__getitem__)
    places_of: list[list[int]] = [[] for _ in names]
    for place in order:
        places_of[int(images.labels[place])].append(place)
    few = next((c for c, places in enumerate(places_of) if len(places) <= options.shots), None)
    if few is not None:
        raise ValueError(
            f"the class {names[few]!r} has {len(places_of[few])} labelled images: --prompts.shots {options.shots} "
            f"needs {options.shots} of each class for fitting, and at least one more to score."
        )
    return torch.tensor([places[: options.shots] for places in places_of])


def values(way: Way, chosen: Chosen, prompts: Prompts, captions: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Statistics of the weights, and of uniform weights for comparison; then `weight@CLASS.N@PROMPT`.

    `max_weight` and `entropy` (nats) are means over classes (appendix C.5: 1 / N and ln N when uniform).
    """
    group = prompts.group.cpu()
    if way == "bprw":
        yield "held_out", float(len(chosen.taken))
        yield "steps", float(chosen.steps)
        place = padded(group, prompts.n)
        count = (place >= 0).sum(1).double()
        weights = chosen.weights[place].masked_fill(place < 0, 0)  # [C, N]
        yield "max_weight", float(weights.amax(1).mean())
        yield "max_weight_uniform", float((1 / count).mean())
        yield "entropy", float(torch.special.entr(weights).sum(1).mean())
        yield "entropy_uniform", float(count.log().mean())
    else:
        yield "kept", float((chosen.weights > 0).sum()) / prompts.n
    yield from zip(_weight_names(group.tolist(), captions), chosen.weights.tolist(), strict=True)


def _weight_names(group: Sequence[int], captions: Sequence[str]) -> Iterator[str]:
    """Names with indices, which distinguish classes and prompts of equal text."""
    place: dict[int, int] = {}
    for c, caption in zip(group, captions, strict=True):
        place[c] = place.get(c, -1) + 1
        yield f"{WEIGHT}{c}.{place[c]}@{caption}"
