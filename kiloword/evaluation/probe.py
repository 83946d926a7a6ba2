"""The task `probe`: how well one linear layer on frozen image features tells classes apart.

Fits run on the CPU, and are the same every time: first weights, shuffles and draws are keyed by the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, AdamW

from kiloword.data.open import open_source
from kiloword.errors import needs
from kiloword.evaluation.features import Classes, classes_of, labelled
from kiloword.evaluation.task import Findings, Inputs
from kiloword.evaluation.tasks import ProbeOptions, ProbeTaskOptions
from kiloword.evaluation.zeroshot import figures
from kiloword.model.encoding import chunks
from kiloword.randomness import generator, key
from kiloword.terminal.progress import track
from kiloword.types import Features, Skipped, Source

Layer = tuple[Tensor, Tensor]
"""A linear classifier: weight [C, D], bias [C]."""

EPOCHS = {
    "clip_benchmark": 10,  # CLIP_benchmark's `linear_probe` and its defaults
    "adamw": 20,  # arXiv:2405.10286, appendix A.2, by CLIP_benchmark's code
    # arXiv:2407.01408 drops the projection, tunes rate and batch for each data set: these are SLIP's, 0.1 for a batch
    # of 256 (arXiv:2112.12750)
    "sgd": 50,
}
COUNT, STRIDES = 97, (8, 4, 2, 1)  # values of a sweep; its steps around the best of every 16th


class Split(NamedTuple):
    """Features with classes, on the CPU."""

    x: Tensor  # [N, D] float32
    y: Tensor  # [N] int64


def run(inputs: Inputs, options: ProbeTaskOptions) -> Findings:
    """Fit on `train`, evaluate on `source`: `acc1`, `acc5`, `mean_per_class_recall`, as of `zeroshot`.

    Also the accuracy on the training rows, their number, and the weight decay; with `val` the accuracy on it by weight
    decay, as "sweep@0.01".
    Raises: ValueError for data that are the same, or of other classes, and for a class of less than `shots` images.
    """
    chosen, size = options.probe, inputs.matcher.model.config.image.size
    if options.train is None:
        raise ValueError("a probe is fitted on data of its own: give --train SRC, with a class for every image.")
    source = open_source(options.train, size) if isinstance(options.train, str) else options.train
    decay = chosen.weight_decay
    given = (options.val is not None) + (decay is not None)
    if given > 1 or (chosen.recipe == "lbfgs" and not given):
        raise ValueError("give --val to select the weight decay, or --probe.weight-decay to set it: one of them.")
    if source.fingerprint == inputs.source.fingerprint:
        raise ValueError("--data and --train are the same: expected different images.")
    classes, of_test = (classes_of(data, options.classnames) for data in (source, inputs.source))
    if classes is not None and of_test is not None and classes.names != of_test.names:
        raise ValueError("--data and --train have different classes: expected the same names in the same order.")
    pooled = chosen.recipe in ("sgd", "lbfgs")

    def split(data: Source, name: str) -> Split:
        bad = list[Skipped]()
        found = encoded(replace(inputs, source=data, skipped=bad), classes, pooled)
        inputs.skipped.extend(replace(one, reason=f"{one.reason} ({name})") for one in bad)
        return found

    test, rows = encoded(inputs, of_test, pooled), split(source, "train")
    if chosen.shots:
        rows = drawn(rows, chosen.shots, source.fingerprint, chosen.seed)
    val = open_source(options.val, size) if isinstance(options.val, str) else options.val
    held, tried = None if val is None else split(val, "val"), dict[float, float]()
    highest = max(int(part.y.max()) for part in (rows, test, held) if part is not None)
    count = max(1 + highest, len(classes or of_test or ()))
    if held is not None:
        decay, tried = sweep(
            6 if chosen.recipe == "lbfgs" else 2, lambda decay: accuracy(fit(rows, count, decay, chosen), held)
        )
        if not chosen.shots:  # k shots stay k
            rows = Split(torch.cat([rows.x, held.x]), torch.cat([rows.y, held.y]))
    layer = fit(rows, count, decay or 0.0, chosen)
    yield from figures(F.linear(test.x, *layer), test.y)
    yield "train_acc1", accuracy(layer, rows)
    yield "train_rows", float(len(rows.x))
    yield "weight_decay", decay or 0.0
    yield from ((f"sweep@{value:.3g}", share) for value, share in sorted(tried.items()))


def accuracy(layer: Layer, rows: Split) -> float:
    """Share of rows whose class is the first, in [0, 1]; 0 of a fit that diverged."""
    logits = F.linear(rows.x, *layer)
    return float((logits.argmax(1) == rows.y).double().mean()) if bool(logits.isfinite().all()) else 0.0


def sweep(high: int, accuracy: Callable[[float], float]) -> tuple[float, dict[float, float]]:
    """The weight decay whose validation accuracy is highest, and the accuracies of all that were tried.

    Of 97 values from 1e-6 to 10^high, evenly spaced as logarithms, every 16th first, then neighbours 8, 4, 2 and 1
    places beside the best, as CLIP (arXiv:2103.00020, appendix A.3) and CLIP_benchmark; of equals the smallest.
    """
    values = [10 ** (-6 + (high + 6) * place / (COUNT - 1)) for place in range(COUNT)]
    tried: dict[float, float] = {}

    def best(places: Sequence[int]) -> int:
        for place in places:
            if values[place] not in tried:
                tried[values[place]] = accuracy(values[place])
        return max(places, key=lambda place: (tried[values[place]], -place))

    peak = best(range(0, COUNT, 2 * STRIDES[0]))
    for stride in STRIDES:
        peak = best([max(peak - stride, 0), peak, min(peak + stride, COUNT - 1)])
    return values[peak], tried


def fit(rows: Split, classes: int, decay: float, options: ProbeOptions) -> Layer:
    """The classifier that a recipe makes of rows."""
    if options.recipe != "lbfgs":
        first = start(rows.x.shape[1], classes, options.recipe, options.seed)
        return steps(rows, first, replace(options, weight_decay=decay))
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise ValueError(needs("--probe.recipe lbfgs", "scikit-learn", "eval")) from None
    fitted = LogisticRegression(C=1 / max(decay, 1e-12), max_iter=1000).fit(rows.x.double().numpy(), rows.y.numpy())
    weight, bias = torch.zeros(classes, rows.x.shape[1]), torch.full((classes,), -1e9)  # of classes without a row
    two = len(fitted.classes_) == 2  # which have one weight vector
    weight[fitted.classes_[two:]] = torch.from_numpy(fitted.coef_).float()
    bias[fitted.classes_] = 0.0
    bias[fitted.classes_[two:]] = torch.from_numpy(fitted.intercept_).float()
    return weight, bias


def drawn(train: Split, shots: int, fingerprint: str, seed: int) -> Split:
    """The first `shots` rows of every class, in an order keyed by the seed. Raises: ValueError for a class of fewer."""
    order = torch.tensor(sorted(range(len(train.y)), key=lambda row: key(fingerprint, seed, "probe rows", row)))
    by_class = [order[train.y[order] == c] for c in sorted(set(train.y.tolist()))]
    least = min(map(len, by_class))
    if least < shots:
        raise ValueError(f"a class has {least} labelled training images: expected --probe.shots, {shots}.")
    places = torch.cat([places[:shots] for places in by_class]).sort().values
    return Split(train.x[places], train.y[places])


def start(width: int, classes: int, recipe: str, seed: int) -> Layer:
    """First weights: of sgd normal with deviation 0.01 and no bias (SLIP), else uniform up to width^-1/2 (torch's)."""
    generator = torch.Generator().manual_seed(key(seed, "probe start"))
    if recipe == "sgd":
        return 0.01 * torch.randn(classes, width, generator=generator), torch.zeros(classes)
    bound = width**-0.5
    weight, bias = (2 * torch.rand(shape, generator=generator) - 1 for shape in ((classes, width), (classes,)))
    return bound * weight, bound * bias


def shuffled(n: int, epoch: int, seed: int) -> Tensor:
    """The order of n rows in an epoch."""
    return torch.from_numpy(generator(seed, epoch, "probe order").permutation(n))


def steps(rows: Split, first: Layer, options: ProbeOptions) -> Layer:
    """Cross-entropy in shuffled batches, the last of an epoch smaller; a cosine from `lr` to 0, no warm-up."""
    weight, bias = (x.clone().requires_grad_() for x in first)
    sgd, n, lr = options.recipe == "sgd", len(rows.x), options.lr
    update = (partial(SGD, momentum=0.9) if sgd else AdamW)(
        [weight, bias], lr, weight_decay=options.weight_decay or 0.0
    )
    epochs, batch = options.epochs or EPOCHS[options.recipe], options.batch or (256 if sgd else 64)
    count = epochs * math.ceil(n / batch)
    orders = (shuffled(n, epoch, options.seed) for epoch in range(epochs))
    batches = (order[part] for order in orders for part in chunks(n, batch))
    for step, places in enumerate(track(batches, "probe", "steps", count)):
        update.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * step / count)) * lr
        update.zero_grad()
        loss = F.cross_entropy(F.linear(rows.x[places], weight, bias), rows.y[places])
        loss.backward()  # type: ignore[no-untyped-call]
        update.step()
    return weight.detach(), bias.detach()


def encoded(inputs: Inputs, classes: Classes | None, pooled: bool) -> Split:
    """Features of every labelled image, encoded once.

    Args: pooled: not the embeddings but the inputs of the projection to them, or without one what the pooling returns;
    poolings of several vectors project their sum last.
    Raises: ValueError for data with several classes an image, and for a model without pooled features.
    """
    matcher, parts, caught = inputs.matcher, list[Split](), list[Tensor]()
    pooling: Any = matcher.model.head.pooling
    layers = [x for name in ("image_projection", "out") if (x := getattr(pooling, name, None)) is not None]
    if layers:
        hook = layers[0].register_forward_pre_hook(lambda _, given: caught.append(given[0]))
    else:
        hook = pooling.image_pool.register_forward_hook(lambda _, given, out: caught.append(out))

    def encode(images: Tensor) -> Features:
        caught.clear()
        found = matcher.encode_image(images, inputs.batch)
        if pooled and any(x.ndim != 2 for x in caught):
            raise ValueError("this model has no features before a projection, which the recipe classifies.")
        return {"vec": torch.cat(caught)} if pooled else found

    with hook:
        for part in labelled(inputs, encode, classes):
            if part.labels.ndim != 1:
                raise ValueError(f"{inputs.source.name} has several labels per image: a probe needs one class each")
            parts.append(Split(part.images["vec"].float().cpu(), part.labels.cpu()))
    return Split(*map(torch.cat, zip(*parts, strict=True)))
