"""Select and weight the prompts of a class: all equally, the least uncertain, or by how well they explain images.

Bayesian prompt re-weighting: the prompts of a class are the components of a Gaussian mixture, samples from images its
observations; the weights are the mode of their posterior under a Dirichlet prior, by expectation maximisation.
Source: arXiv:2410.18857, section 3.4, algorithm 1, table 3 and appendix C.5, which has the constants.

    C  classes   T  prompts of all classes   N  prompts of a class   J  observations of a class
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.evaluation.features import Seen
from kiloword.evaluation.task import Values
from kiloword.evaluation.tasks import PromptOptions, Way
from kiloword.methods.prolip.gaussian import variance_sum
from kiloword.model.encoding import rows
from kiloword.model.heads import Head, shares
from kiloword.model.pooling import at_least_float
from kiloword.randomness import key
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher

NEIGHBOURS = SAMPLES = 10  # without shots: images of a class, samples of each; the paper: 5, its total: 100
SHOT_SAMPLES = 100  # with shots: samples of all labelled images of a class
EPS, STEPS, TOLERANCE = 0.02, 1000, 1e-6  # added to variances; of expectation maximisation


@dataclass
class Prompts:
    """The prompts of n classes."""

    texts: Features  # of T prompts
    group: Tensor  # [T] int64, the class of each, in [0, n)
    n: int
    captions: Sequence[str] = ()  # [T]


@dataclass
class Chosen:
    """Classes from weighted prompts."""

    classes: Features  # [n, ...]
    weights: Tensor  # [T] float64; those of a class sum to 1
    taken: Tensor  # labelled images used for fitting


@torch.no_grad()
def choose(way: Way, matcher: Matcher, prompts: Prompts, images: Seen | None, options: PromptOptions) -> Chosen:
    """Classes from prompts; only bprw uses the images, and their labels only with shots.

    Raises: ValueError for a model without Gaussians, unless it is not asked for any, and for too few labelled images.
    """
    texts, group, n, head = prompts.texts, prompts.group, prompts.n, matcher.model.head
    if (way != "ensemble" or options.variance is not None) and "log_var" not in texts:
        raise ValueError(
            "--prompts other than ensemble and --prompts.variance need the variances of prompts, which this model does "
            "not have: use a model trained by prolip or with +gaussian."
        )
    weights, taken = torch.zeros(len(group), dtype=torch.float64), torch.arange(0)
    places = by_class(group.cpu(), n)
    if way == "bprw":
        assert images is not None
        if options.shots:
            seen = labelled(images, n, options)
            taken = seen.flatten()
        else:
            of_classes = matcher.score(images.images, head.ensemble(texts, group, n)).cpu()  # [I, C]
            seen = of_classes.topk(min(NEIGHBOURS, len(of_classes)), dim=0).indices.T
        mean, log_var = (texts[name].cpu().double() for name in ("vec", "log_var"))
        for own, which in zip(places, seen, strict=True):
            samples = observations(images, which, options)
            weights[own] = fit(samples, mean[own], log_var[own], alpha=2.0 if options.shots else 5.0)
        return Chosen(combined(head, texts, group, n, weights, options), weights, taken)
    for own in places:
        kept = own
        if way != "ensemble":
            uncertainty = variance_sum(rows(texts, own.to(group.device))).cpu().double()
            if way == "topk":
                kept = own[uncertainty.argsort(stable=True)[: (len(own) + 1) // 2]]
            else:
                limit = uncertainty.mean() + uncertainty.std(correction=0)
                kept = own[uncertainty <= torch.maximum(limit, uncertainty.min())]
        weights[kept] = 1 / len(kept)
    where = weights.nonzero()[:, 0].to(group.device)
    return Chosen(combined(head, rows(texts, where), group[where], n, None, options), weights, taken)


def by_class(group: Tensor, n: int) -> list[Tensor]:
    """Indices of the prompts of each of n classes. Args: group [T]."""
    return [(group == c).nonzero()[:, 0] for c in range(n)]


def combined(
    head: Head, texts: Features, group: Tensor, n: int, weights: Tensor | None, options: PromptOptions
) -> Features:
    """One row per class, the sum of its prompts' features times their weights: as the head's ensemble, except where
    `renormalise` and `variance` say otherwise.

    Args: weights [T], those of a class sum to 1; None: equal. They come from `bprw`, whose defaults are its authors'.
    """
    share = None if weights is None else weights.to(texts["vec"])
    classes, authors = head.ensemble(texts, group, n, share), share is not None
    if share is None:
        share = shares(texts["vec"], group, n, None)
    if not (not authors if options.renormalise is None else options.renormalise):
        vec = at_least_float(texts["vec"]) * share[:, None]
        classes["vec"] = vec.new_zeros(n, vec.shape[1]).index_add(0, group, vec)
    variance = options.variance or ("squares" if authors else None)
    if variance is not None:
        log_var = at_least_float(texts["log_var"]) + (2 if variance == "squares" else 1) * share.log()[:, None]
        classes["log_var"] = torch.stack([log_var[own].logsumexp(0) for own in by_class(group, n)])
    return classes


def labelled(images: Seen, n: int, options: PromptOptions) -> Tensor:
    """`shots` images of each of n classes, [n, shots], drawn by the data's fingerprint and the seed.

    Raises: ValueError for several labels per image, and for a class without an image left to score.
    """
    drawn = [key(images.fingerprint, options.seed, "shots", row) for row in images.rows]
    order = torch.tensor(sorted(range(len(drawn)), key=drawn.__getitem__))
    of_classes = [order[images.labels[order] == c] for c in range(n)] if images.labels.ndim == 1 else []
    if not of_classes or min(map(len, of_classes)) <= options.shots:
        raise ValueError(
            f"--prompts.shots {options.shots} needs one class per image, {options.shots} images of each class for "
            "fitting, and at least one more to score."
        )
    return torch.stack([of_class[: options.shots] for of_class in of_classes])


def observations(images: Seen, which: Tensor, options: PromptOptions) -> Tensor:
    """Samples from the Gaussians of M images, [M x samples, D] float64; keyed by image, so reproducible."""
    samples, parts = max(1, SHOT_SAMPLES // options.shots) if options.shots else SAMPLES, []
    for i in which.tolist():
        mean, log_var = (images.images[name][i].cpu().double() for name in ("vec", "log_var"))
        name = f"{images.fingerprint} {images.rows[i]}"
        generator = torch.Generator().manual_seed(key(options.seed, name, "prompts"))
        noise = torch.randn(samples, len(mean), generator=generator, dtype=torch.float64)
        parts.append(mean + (0.5 * log_var).exp() * noise)
    return torch.cat(parts)


def fit(seen: Tensor, mean: Tensor, log_var: Tensor, alpha: float, eps: float = EPS, steps: int = STEPS) -> Tensor:
    """Weights [N] of the components of one class: algorithm 1, from weights proportional to 1 / trace (line 5).

    Args: seen [J, D]; mean, log_var [N, D]; alpha: of the Dirichlet prior, at least 1, which is none.
    """
    weights, density = (-log_var.logsumexp(-1)).softmax(0), log_density(seen, mean, log_var.exp() + eps)
    for _ in range(steps):
        new = (density + weights.log()).softmax(1).sum(0) + alpha - 1  # lines 10 to 18
        new /= new.sum()
        moved, weights = (new - weights).abs().max(), new
        if moved <= TOLERANCE:
            break
    return weights


def log_density(seen: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """log f_n(x_j), [J, N] of seen [J, D] and components [N, D]; by matrix products, never [J, N, D].

    Centred at the mean of the components, so that the expanded square cancels few digits.
    """
    middle, precision = mean.mean(0), 1 / var
    x, m = seen - middle, mean - middle
    square = x.square() @ precision.T - 2 * x @ (m * precision).T + (m.square() * precision).sum(1)
    return -0.5 * (square + (var.log() + math.log(2 * math.pi)).sum(1))


def statistics(way: Way, chosen: Chosen, prompts: Prompts) -> Values:
    """Statistics of the weights, then `weight@CLASS.N@PROMPT`.

    `max_weight` and `entropy` (nats) are means over classes (appendix C.5); of N uniform weights: 1 / N, ln N.
    """
    places = by_class(prompts.group.cpu(), prompts.n)
    if way == "bprw":
        of_classes = [chosen.weights[place] for place in places]
        yield "max_weight", float(torch.stack([weights.max() for weights in of_classes]).mean())
        yield "entropy", float(torch.stack([torch.special.entr(weights).sum() for weights in of_classes]).mean())
    else:
        yield "kept", float((chosen.weights > 0).sum()) / prompts.n
    for c, place in enumerate(places):
        for n, prompt in enumerate(place.tolist()):
            yield f"weight@{c}.{n}@{prompts.captions[prompt]}", float(chosen.weights[prompt])
