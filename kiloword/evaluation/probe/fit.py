"""Linear classifiers on features that are there already: gradient steps, logistic regression, sweeps.

All on the CPU, and the same every time: first weights and shuffles are keyed by the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.evaluation.probe import COUNT, RECIPES, ProbeOptions
from kiloword.model.encoding import chunks
from kiloword.randomness import key
from kiloword.terminal.progress import track

MOMENTUM = 0.9  # of sgd
CLOSE = 1e-6  # lbfgs ends when no entry of the gradient of the mean loss, in its coordinates, is larger
STEPS = (8, 4, 2, 1)  # of a sweep around the best of every 16th


@dataclass
class LabelledFeatures:
    """Features with classes."""

    x: Tensor  # [N, D] float32
    y: Tensor  # [N] int64

    def __len__(self) -> int:
        return len(self.x)

    def of(self, places: Tensor) -> LabelledFeatures:
        """Some of them."""
        return LabelledFeatures(self.x[places], self.y[places])

    def and_(self, other: LabelledFeatures) -> LabelledFeatures:
        """Both, one after the other."""
        return LabelledFeatures(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]))


@dataclass
class Linear:
    """A fitted classifier."""

    weight: Tensor  # [C, D] float32
    bias: Tensor  # [C]

    def __call__(self, x: Tensor) -> Tensor:
        """[N, D] -> logits [N, C]."""
        return F.linear(x, self.weight, self.bias)

    def accuracy(self, rows: LabelledFeatures) -> float:
        """Share of rows whose class is the first, in [0, 1]; 0 of a fit that diverged."""
        logits = self(rows.x)
        return float((logits.argmax(1) == rows.y).double().mean()) if bool(logits.isfinite().all()) else 0.0


def fit(rows: LabelledFeatures, classes: int, options: ProbeOptions, decay: float, seed: int) -> Linear:
    """The classifier that a recipe makes of rows.

    Args: options: with their numbers filled in; decay: weight decay, of lbfgs the strength; seed: of what is random.
    """
    optimiser = RECIPES[options.recipe].optimiser
    if optimiser == "lbfgs":
        assert options.max_iter is not None
        return logistic(rows, classes, decay, options.max_iter)
    return steps(rows, start(rows.x.shape[1], classes, optimiser, seed), options, decay, seed)


def start(width: int, classes: int, optimiser: str, seed: int) -> Linear:
    """First weights: of sgd normal with deviation 0.01 and no bias (SLIP), else uniform up to width^-1/2 (torch's)."""
    generator = torch.Generator().manual_seed(key(seed, "probe start"))
    if optimiser == "sgd":
        return Linear(0.01 * torch.randn(classes, width, generator=generator), torch.zeros(classes))
    bound = width**-0.5
    weight, bias = (2 * torch.rand(shape, generator=generator) - 1 for shape in ((classes, width), (classes,)))
    return Linear(bound * weight, bound * bias)


def shuffled(n: int, epoch: int, seed: int) -> Tensor:
    """The order of n rows in an epoch."""
    rng = np.random.Generator(np.random.Philox(key(seed, epoch, "probe order")))
    return torch.from_numpy(rng.permutation(n))


def steps(rows: LabelledFeatures, first: Linear, options: ProbeOptions, decay: float, seed: int) -> Linear:
    """Cross-entropy in shuffled batches, the last of an epoch smaller; a cosine from `lr` to 0, no warm-up."""
    assert options.lr is not None
    assert options.epochs is not None
    assert options.batch is not None
    weight, bias = (x.clone().requires_grad_() for x in (first.weight, first.bias))
    kind = RECIPES[options.recipe].optimiser
    optimiser: torch.optim.Optimizer
    if kind == "sgd":
        optimiser = torch.optim.SGD([weight, bias], options.lr, momentum=MOMENTUM, weight_decay=decay)
    else:
        optimiser = torch.optim.AdamW([weight, bias], options.lr, weight_decay=decay)
    count = options.epochs * math.ceil(len(rows) / options.batch)
    batches = _batches(len(rows), options.epochs, options.batch, seed)
    for step, places in enumerate(track(batches, "probe", "steps", count)):
        optimiser.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * step / count)) * options.lr
        optimiser.zero_grad()
        loss = F.cross_entropy(F.linear(rows.x[places], weight, bias), rows.y[places])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return Linear(weight.detach(), bias.detach())


def _batches(n: int, epochs: int, batch: int, seed: int) -> Iterator[Tensor]:
    for epoch in range(epochs):
        order = shuffled(n, epoch, seed)
        yield from (order[part] for part in chunks(n, batch))


def logistic(rows: LabelledFeatures, classes: int, strength: float, max_iter: int) -> Linear:
    """Multinomial logistic regression: least mean cross-entropy + strength |W|^2 / (2 N), no price on biases.

    N times that, with strength 1 / C, is scikit-learn's; with two classes it has one weight vector, at half the price.
    By L-BFGS from 0 in double precision, which single cannot follow to the optimum, in coordinates where features have
    mean 0 and nearly unit covariance, the price counted in: a tower's features lie along few directions, and the same
    optimum takes a fraction of the iterations.
    """
    x, mean = rows.x.double(), rows.x.double().mean(0)
    basis = _coordinates(x - mean, classes, strength)  # [D, D]
    turned = LabelledFeatures((x - mean) @ basis, rows.y)
    inner = torch.zeros(classes, x.shape[1], dtype=torch.float64, requires_grad=True)  # weight = inner @ basis.T
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [inner, bias],
        max_iter=max_iter,
        max_eval=2 * max_iter,
        tolerance_grad=CLOSE,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    price = basis.square().sum(0)  # [D]: the columns are orthogonal, so |inner @ basis.T|^2 is this times inner^2

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(F.linear(turned.x, inner, bias), turned.y)
        loss = loss + strength / (2 * len(rows)) * (inner.square() * price).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    weight = inner.detach() @ basis.T
    return Linear(weight.float(), (bias.detach() - weight @ mean).float())


def _coordinates(x: Tensor, classes: int, strength: float) -> Tensor:
    """Orthogonal columns [D, D] in which the objective is about equally curved everywhere, for centred x [N, D]."""
    along, axes = torch.linalg.eigh(x.T @ x / len(x))
    curved = along.clamp(min=0) / classes + strength / len(x)
    least = max(1e-12 * float(curved.max()), torch.finfo(x.dtype).tiny)
    basis: Tensor = axes * curved.clamp(min=least).rsqrt()
    return basis


def sweep(values: Sequence[float], accuracy: Callable[[float], float]) -> tuple[float, dict[float, float]]:
    """The value whose validation accuracy is highest, and the accuracies of all that were tried.

    Every 16th of 97 first, then neighbours 8, 4, 2 and 1 places beside the best, as CLIP (arXiv:2103.00020, appendix
    A.3) and CLIP_benchmark do; of equals the smallest.
    """
    assert len(values) == COUNT
    tried: dict[float, float] = {}

    def best(places: Sequence[int]) -> int:
        for place in places:
            if values[place] not in tried:
                tried[values[place]] = accuracy(values[place])
        return max(places, key=lambda place: (tried[values[place]], -place))

    peak = best(range(0, COUNT, 2 * STEPS[0]))
    for step in STEPS:
        peak = best([max(peak - step, 0), peak, min(peak + step, COUNT - 1)])
    return values[peak], tried
