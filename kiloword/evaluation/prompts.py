"""Select and weight the prompts of a class: all equally, the least uncertain, or by how well they explain images.

Bayesian prompt re-weighting: the prompts of a class are the components of a Gaussian mixture, samples from images its
observations; the weights are the mode of their posterior under a Dirichlet prior, by expectation maximisation.
Source: arXiv:2410.18857, section 3.4, algorithm 1, table 3 and appendix C.5.

    C  classes   N  largest number of prompts of a class; others are padded   J  observations of a class
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from kiloword.config.settings import BaseSettings
from kiloword.evaluation.retrieval import Score
from kiloword.evaluation.task import Values
from kiloword.methods.prolip.gaussian import variance_sum
from kiloword.model.encoding import chunks, rows
from kiloword.model.heads import Head
from kiloword.model.pooling import at_least_float
from kiloword.randomness import key
from kiloword.types import Features

HELD = 2**23  # numbers of observations in memory at once, in double precision
ROWS = 4096  # images scored at once

Way = Literal["ensemble", "filter", "topk", "bprw"]
READERS: dict[str, Way] = {"coeff": "filter", "k": "topk"}  # options of one way; all ways combine, bprw has the others


@dataclass(frozen=True, kw_only=True)
class PromptOptions(BaseSettings):
    """How prompts are combined, and options of the prompt selections filter, topk and bprw."""

    # normalise the mean of a class; None: yes, but not with bprw (as in the authors' code). Section 4.2: no
    renormalise: bool | None = None
    # variance of a class of prompts with weights p: sum p var (1 / N when equal), or sum p^2 var (1 / N^2, of their
    # average); None: squares with bprw, otherwise as the model was trained (--settings.ensemble)
    variance: Literal["linear", "squares"] | None = None

    # filter: keep prompts up to this many standard deviations above the mean uncertainty of their class
    coeff: float = 1.0
    k: int = 0  # topk: number of prompts per class to keep, the least uncertain; 0: half of them
    shots: int = 0  # bprw: labelled images per class to fit on, excluded from scoring; 0: the nearest, unlabelled
    neighbours: int = 10  # bprw without shots: nearest images per class; the paper: 5, but its total of 100 implies 10
    samples: int | None = None  # bprw: samples from each of those images; None: 10, or 100 / shots
    alpha: float | None = None  # bprw: Dirichlet prior, larger is more uniform; None: 5, with shots 2
    eps: float = 0.02  # bprw: added to every variance
    prior: Literal["symmetric", "uncertainty"] = "symmetric"  # bprw; uncertainty: mode at 1 / trace of the covariance
    steps: int = 1000  # bprw: largest number of steps of expectation maximisation
    tolerance: float = 1e-6  # bprw: stop when no weight of the class changes by more than this
    seed: int = 0  # bprw: seed of the samples and of the choice of labelled images

    def check(self, way: Way) -> None:
        """Raises: ValueError for values out of range, and for options of another selection."""
        for f in fields(self):
            reader = READERS.get(f.name, "bprw")
            if f.name not in ("renormalise", "variance") and reader != way and getattr(self, f.name) != f.default:
                raise ValueError(f"--prompts.{f.name} is used by --prompts {reader}, but --prompts is {way}.")
        least = {"k": 0, "shots": 0, "neighbours": 1, "samples": 1, "steps": 1, "eps": 0.0, "tolerance": 0.0}
        for name, low in {**least, "coeff": -1e300}.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise ValueError(f"--prompts.{name} is {value:g}. Expected a finite number of at least {low:g}.")
        if not 0 < self.prior_strength < math.inf:
            raise ValueError(f"--prompts.alpha is {self.prior_strength:g}. Expected a number above 0; 1 is no prior.")
        if self.prior_strength < 1 and self.prior == "uncertainty":
            raise ValueError(
                f"--prompts.prior uncertainty has no mode with alpha {self.prior_strength:g}. Expected at least 1."
            )

    @property
    def prior_strength(self) -> float:
        """`alpha`, where it is not given that of appendix C.5."""
        return (2.0 if self.shots else 5.0) if self.alpha is None else self.alpha

    @property
    def samples_of_image(self) -> int:
        """`samples`, where it is not given that of appendix C.5."""
        return (max(1, 100 // self.shots) if self.shots else 10) if self.samples is None else self.samples


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
    steps: int = 0  # of expectation maximisation


def check_gaussians(features: Features, way: Way, options: PromptOptions) -> None:
    """Raises: ValueError for a model without uncertainty."""
    if (way != "ensemble" or options.variance is not None) and "log_var" not in features:
        flag = f"--prompts {way}" if way != "ensemble" else f"--prompts.variance {options.variance}"
        raise ValueError(
            f"{flag} needs the variances of prompts, which this model does not have. Omit it, or use a model trained "
            "by prolip or with +gaussian."
        )


def choose(way: Way, head: Head, score: Score, prompts: Prompts, images: Images, options: PromptOptions) -> Chosen:
    """Classes from prompts; only bprw uses the images, and their labels only with shots.

    Raises: ValueError for a model without Gaussians (except for the ensemble), and for too few labelled images.
    """
    check_gaussians(prompts.texts, way, options)
    options.check(way)
    if way == "bprw":
        return _bprw(head, score, prompts, images, options)
    kept, group = torch.ones(len(prompts.group), dtype=torch.bool), prompts.group.cpu()
    if way != "ensemble":
        uncertainty = variance_sum(prompts.texts).cpu().double()
        kept = filtered(uncertainty, group, options.coeff) if way == "filter" else least(uncertainty, group, options.k)
    where = kept.nonzero()[:, 0].to(prompts.group.device)
    texts, kept_group = {name: value[where] for name, value in prompts.texts.items()}, prompts.group[where]
    count = torch.bincount(group[kept], minlength=int(group.max()) + 1)
    return Chosen(combined(head, texts, kept_group, prompts.n, None, options), kept / count[group].double())


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


def by_class(group: Tensor, n: int) -> list[Tensor]:
    """Indices of the prompts of each of n classes. Args: group [T]."""
    return [(group == c).nonzero()[:, 0] for c in range(n)]


def padded(group: Tensor, n: int) -> Tensor:
    """Indices of the prompts of each class, [n, N], padded with -1."""
    return torch.nn.utils.rnn.pad_sequence(by_class(group, n), batch_first=True, padding_value=-1)


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
    return Chosen(combined(head, prompts.texts, prompts.group, prompts.n, weights, options), weights, taken, steps)


def nearest(score: Score, images: Features, classes: Features, m: int) -> Tensor:
    """The m images with the best scores for each class, all if there are fewer: [n, m]; does not use labels."""
    best, place = torch.zeros(len(classes["vec"]), 0), torch.zeros(len(classes["vec"]), 0, dtype=torch.int64)
    for part in chunks(len(images["vec"]), ROWS):
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
        raise ValueError("--prompts.shots needs one class per image, but these images have several: omit it.")
    drawn = [key(images.fingerprint, options.seed, "shots", row) for row in images.rows]
    places_of: list[list[int]] = [[] for _ in names]
    for place in sorted(range(len(drawn)), key=drawn.__getitem__):
        places_of[int(images.labels[place])].append(place)
    few = next((c for c, places in enumerate(places_of) if len(places) <= options.shots), None)
    if few is not None:
        raise ValueError(
            f"the class {names[few]!r} has {len(places_of[few])} labelled images: --prompts.shots {options.shots} "
            f"needs {options.shots} of each class for fitting, and at least one more to score."
        )
    return torch.tensor([places[: options.shots] for places in places_of])


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
    mean, log_var = texts["vec"].cpu().double(), texts["log_var"].cpu().double()
    place = padded(group.cpu(), n)  # [C, N], -1: none
    held = chosen.shape[1] * options.samples_of_image * mean.shape[1]
    out, steps = torch.zeros(len(mean), dtype=torch.float64), 0
    for part in chunks(n, max(1, HELD // held)):
        samples = torch.stack([observations(images, names, which, options) for which in chosen[part]])
        real = place[part] >= 0
        fitted, used = fit(samples, mean[place[part]], log_var[place[part]], real, options)
        out[place[part][real]] = fitted[real]
        steps = max(steps, used)
    return out, steps


def observations(images: Features, names: list[str], which: Tensor, options: PromptOptions) -> Tensor:
    """Samples from the Gaussians of M images, [M x samples, D] float64; keyed by image, so reproducible."""
    gaussians = {name: images[name][which].cpu().double()[:, None] for name in ("vec", "log_var")}  # [M, 1, D]
    shape, noise = (options.samples_of_image, gaussians["vec"].shape[-1]), []
    for i in which.tolist():
        generator = torch.Generator().manual_seed(key(options.seed, names[i], "prompts"))
        noise.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return (gaussians["vec"] + (0.5 * gaussians["log_var"]).exp() * torch.stack(noise)).flatten(0, 1)


def fit(seen: Tensor, mean: Tensor, log_var: Tensor, real: Tensor, options: PromptOptions) -> tuple[Tensor, int]:
    """Weights [C, N] of the components, and the number of steps.

    Args: seen [C, J, D]; mean, log_var [C, N, D]; real [C, N] bool: not padding.
    """
    start = initial(log_var, real)
    density = log_density(seen, mean, log_var.exp() + options.eps).masked_fill(~real[:, None], -math.inf)
    pseudo = prior(start, real, options.prior_strength, options.prior)
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


def statistics(way: Way, chosen: Chosen, prompts: Prompts, captions: Sequence[str]) -> Values:
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
    place_of = dict[int, int]()
    for c, caption, weight in zip(group.tolist(), captions, chosen.weights.tolist(), strict=True):
        place_of[c] = place_of.get(c, -1) + 1
        yield f"weight@{c}.{place_of[c]}@{caption}", weight
