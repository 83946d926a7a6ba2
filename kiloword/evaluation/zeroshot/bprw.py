"""Bayesian prompt re-weighting: weight the prompts of a class by how well they explain its images.

The prompts of a class are the components of a Gaussian mixture; samples from images are its observations. The weights
are the mode of their posterior under a Dirichlet prior, by expectation maximisation.
Source: arXiv:2410.18857, algorithm 1.

    C  classes   N  largest number of prompts of a class; others are padded   J  observations of a class
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from kiloword.evaluation.zeroshot import PromptOptions
from kiloword.model.encoding import chunks
from kiloword.model.heads import Head
from kiloword.model.pooling import at_least_float
from kiloword.randomness import key
from kiloword.types import Features

HELD = 2**23  # numbers of observations in memory at once, in double precision


def reweigh(
    texts: Features,
    group: Tensor,
    n: int,
    images: Features,
    names: list[str],
    chosen: Tensor,
    options: PromptOptions,
) -> tuple[Tensor, int]:
    """Weights [T] float64 of the prompts of n classes, which sum to 1 in each; and the largest number of steps taken.

    Args: texts: Gaussians of T prompts; group [T] int64 in [0, n); images: Gaussians of I images, on the CPU as all
    that is computed here; names: of the images, to key their samples; chosen [n, M] int64, images of each class.
    """
    options = options.resolved()
    assert options.samples is not None
    mean, log_var = texts["vec"].cpu().double(), texts["log_var"].cpu().double()
    place = padded(group.cpu(), n)  # [C, N], -1: none
    held = chosen.shape[1] * options.samples * mean.shape[1]
    out, steps = torch.zeros(len(mean), dtype=torch.float64), 0
    for part in chunks(n, max(1, HELD // held)):
        samples = torch.stack([observations(images, names, which, options) for which in chosen[part]])
        real = place[part] >= 0
        fitted, used = fit(samples, mean[place[part]], log_var[place[part]], real, options)
        out[place[part][real]] = fitted[real]
        steps = max(steps, used)
    return out, steps


def padded(group: Tensor, n: int) -> Tensor:
    """Indices of the prompts of each class, [n, N], padded with -1."""
    return torch.nn.utils.rnn.pad_sequence(by_class(group, n), batch_first=True, padding_value=-1)


def by_class(group: Tensor, n: int) -> list[Tensor]:
    """Indices of the prompts of each of n classes. Args: group [T]."""
    return [(group == c).nonzero()[:, 0] for c in range(n)]


def observations(images: Features, names: list[str], which: Tensor, options: PromptOptions) -> Tensor:
    """Samples from the Gaussians of M images, [M x samples, D] float64; keyed by image, so reproducible."""
    assert options.samples is not None
    gaussians = {name: images[name][which].cpu().double()[:, None] for name in ("vec", "log_var")}  # [M, 1, D]
    noise = [_normal(options.samples, gaussians["vec"].shape[-1], options.seed, names[i]) for i in which.tolist()]
    return (gaussians["vec"] + (0.5 * gaussians["log_var"]).exp() * torch.stack(noise)).flatten(0, 1)


def _normal(samples: int, dim: int, seed: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(key(seed, name, "prompts"))
    return torch.randn(samples, dim, generator=generator, dtype=torch.float64)


def fit(seen: Tensor, mean: Tensor, log_var: Tensor, real: Tensor, options: PromptOptions) -> tuple[Tensor, int]:
    """Weights [C, N] of the components, and the number of steps.

    Args: seen [C, J, D]; mean, log_var [C, N, D]; real [C, N] bool: not padding.
    """
    options = options.resolved()
    assert options.alpha is not None
    start = initial(log_var, real)
    density = log_density(seen, mean, log_var.exp() + options.eps).masked_fill(~real[:, None], -math.inf)
    pseudo = prior(start, real, options.alpha, options.prior)
    weights, going, taken = start, torch.ones(len(start), dtype=torch.bool), 0
    while taken < options.steps and bool(going.any()):
        new = maximised(density, weights, pseudo)
        moved = (new - weights).abs().amax(1) > options.tolerance
        weights = torch.where(going[:, None], new, weights)  # each class stops independently of others
        going, taken = going & moved, taken + 1
    return weights, taken


def initial(log_var: Tensor, real: Tensor) -> Tensor:
    """Initial weights: proportional to 1 / trace, [C, N] of log variances [C, N, D] (line 5)."""
    return (-log_var.logsumexp(-1)).masked_fill(~real, -math.inf).softmax(-1)


def log_density(seen: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """log f_n(x_j), [C, J, N] of seen [C, J, D] and components [C, N, D]; by matrix products, never [C, J, N, D].

    Centred at the mean of the components of a class, so that the expanded square cancels few digits.
    """
    middle = mean.mean(1, keepdim=True)
    x, m, precision = seen - middle, mean - middle, 1 / var
    square = x.square() @ precision.mT - 2 * x @ (m * precision).mT + (m.square() * precision).sum(-1)[:, None]
    volume = (var.log() + math.log(2 * math.pi)).sum(-1)
    return -0.5 * (square + volume[:, None])


def prior(start: Tensor, real: Tensor, alpha: float, kind: Literal["symmetric", "uncertainty"]) -> Tensor:
    """alpha_n - 1 of the Dirichlet prior, [C, N]: equal, or of the same sum with the mode at `start`."""
    count = real.sum(-1, keepdim=True).to(start)
    share = real / count if kind == "symmetric" else start
    return (alpha - 1) * count * share


def maximised(density: Tensor, weights: Tensor, pseudo: Tensor) -> Tensor:
    """One step of expectation maximisation: new weights [C, N] (lines 10 to 19).

    For alpha < 1, negative weights are set to 0; if all are negative, the component that explains most gets 1.
    """
    responsible = (density + weights.log()[:, None]).softmax(-1)  # [C, J, N]
    explained = responsible.sum(1)
    new = (explained + pseudo).clamp(min=0)
    most = torch.nn.functional.one_hot(explained.argmax(-1), explained.shape[-1]).to(new)
    new = torch.where(new.sum(-1, keepdim=True) > 0, new, most)
    return new / new.sum(-1, keepdim=True)


def objective(density: Tensor, weights: Tensor, pseudo: Tensor) -> Tensor:
    """Log posterior of weights up to a constant, [C]; no step decreases it for alpha >= 1."""
    likelihood = (density + weights.log()[:, None]).logsumexp(-1).sum(-1)
    return likelihood + torch.xlogy(pseudo, weights).sum(-1)


def combined(
    head: Head, texts: Features, group: Tensor, n: int, weights: Tensor | None, options: PromptOptions
) -> Features:
    """One row per class, the sum of its prompts' features times their weights: as the head's ensemble, except where
    `renormalise` and `variance` say otherwise.

    Args: weights [T], those of a class sum to 1; None: equal. They come from `bprw`, whose defaults are its authors'.
    """
    if weights is None:
        share = texts["vec"].new_ones(len(group)) / torch.bincount(group, minlength=n)[group]
        classes = head.ensemble(texts, group, n)
    else:
        share = weights.to(texts["vec"])
        classes = head.ensemble(texts, group, n, share)
    if not (weights is None if options.renormalise is None else options.renormalise):
        vec = at_least_float(texts["vec"]) * share[:, None]
        classes["vec"] = vec.new_zeros(n, vec.shape[1]).index_add(0, group, vec)
    variance = options.variance or (None if weights is None else "squares")
    if variance is None:
        return classes
    log_share = (2 if variance == "squares" else 1) * share.log()
    place = padded(group.cpu(), n).to(group.device)
    log_var = (at_least_float(texts["log_var"]) + log_share[:, None])[place]  # [C, N, D]
    classes["log_var"] = log_var.masked_fill(place[..., None] < 0, -math.inf).logsumexp(1)
    return classes
