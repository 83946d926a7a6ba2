"""The task `probe`: how well one linear layer on frozen image features tells classes apart.

Fits run on the CPU, and are the same every time: first weights, shuffles and draws are keyed by the seed.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.settings import BaseSettings, check, setting, unread
from kiloword.data.open import open_source
from kiloword.data.reading import name_of
from kiloword.distributed.sharing import is_first
from kiloword.evaluation.classes import NOT_AMONG, OTHER, classes_of
from kiloword.evaluation.features import labelled
from kiloword.evaluation.task import ClassNames, Data, Findings, Inputs, Task
from kiloword.evaluation.zeroshot import zeroshot
from kiloword.model.encoding import chunks
from kiloword.randomness import key
from kiloword.terminal.progress import track
from kiloword.types import Features, Skipped

Name = Literal["clip_benchmark", "adamw", "sgd", "lbfgs"]
Kind = Literal["vec", "pooled"]
TESTS = ("test", "val", "valid", "validation", "dev")  # folders beside `train`
ROWS = 4096  # images classified at once
MOMENTUM = 0.9  # of sgd
CLOSE = 1e-6  # lbfgs ends when no entry of the gradient of the mean loss, in its coordinates, is larger
COUNT, STEPS = 97, (8, 4, 2, 1)  # values of a sweep; its steps around the best of every 16th
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(BaseSettings):
    """Settings of the probe; None: the value of the recipe."""

    recipe: Name = "clip_benchmark"  # as in: FFF (adamw), SLIP and CLIP-C (sgd), CLIP (lbfgs)
    features: Kind | None = None  # vec: the embedding; pooled: before the projection. None: vec, sgd and lbfgs pooled
    lr: float | None = setting(None, "learning rate at the start of the cosine. None: 0.1", 0, needs="recipe!=lbfgs")
    epochs: int | None = setting(
        None, "passes over the data. None: clip_benchmark 10, adamw 20, sgd 50", 1, needs="recipe!=lbfgs"
    )
    batch: int | None = setting(None, "images in a step. None: 64, sgd 256", 1, needs="recipe!=lbfgs")
    max_iter: int | None = setting(None, "largest number of iterations. None: 1000", 1, needs="recipe=lbfgs")
    weight_decay: float | None = setting(
        None, "lbfgs: L2 strength, 1 / C of scikit-learn. None: swept on --val, by lbfgs also without, or else 0", 0
    )
    shots: int = setting(0, "training images per class, drawn by the seed; 0: all", 0)
    seeds: tuple[int, ...] = ()  # of draws, shuffles, weights; several: report the mean. (): 0, with shots 0 1 2


class Recipe(NamedTuple):
    """What a paper does. Images are seen once and un-augmented, as in all of them but SLIP."""

    optimiser: Literal["adamw", "sgd", "lbfgs"]
    features: Kind
    epochs: int = 0
    lr: float = 0.1
    batch: int = 64
    max_iter: int = 1000
    sweep: tuple[int, int] | None = None  # powers of ten of the least and of the largest weight decay
    held_out: float = 0.0  # share of each class to sweep on without --val


RECIPES: dict[Name, Recipe] = {
    # CLIP_benchmark's `linear_probe` and its defaults: without a validation split the decay is 0
    "clip_benchmark": Recipe("adamw", "vec", 10, sweep=(-6, 2)),
    # arXiv:2405.10286, appendix A.2, by CLIP_benchmark's code, whose batch it does not change
    "adamw": Recipe("adamw", "vec", 20),
    # arXiv:2407.01408 drops the projection, tunes rate and batch for each data set: these are SLIP's, 0.1 for a batch
    # of 256 (arXiv:2112.12750)
    "sgd": Recipe("sgd", "pooled", 50, batch=256),
    # arXiv:2103.00020, appendix A.3
    "lbfgs": Recipe("lbfgs", "pooled", sweep=(-6, 6), held_out=0.1),
}


@dataclass(frozen=True, kw_only=True)
class ProbeTaskOptions:
    """What the probe is fitted on, and how."""

    train: Data | None = None  # training data; None: the split `train` that goes with --data
    val: Data | None = None  # data on which the weight decay is chosen
    # class names: a text file with one per line, a JSON file, or a data set (kiloword data names). None: of the data
    classnames: ClassNames | None = None
    probe: ProbeOptions = field(default_factory=ProbeOptions)


def resolved(options: ProbeOptions, val: bool) -> Recipe:
    """The recipe with the chosen numbers. Args: val: whether a validation split is given.

    Raises: ValueError for numbers that make no sense, and for options that the recipe does not read.
    """
    check(options, "--probe.")
    useless = next(unread(options, ProbeOptions(), "--probe."), None)
    if useless is not None or len(set(options.seeds)) < len(options.seeds):
        raise ValueError(f"{useless or '--probe.seeds names one twice'}: omit it.")
    recipe = RECIPES[options.recipe]
    if val and (recipe.sweep is None or options.weight_decay is not None):
        raise ValueError("--val selects a weight decay, which --probe.weight-decay or --probe.recipe sets: omit one.")
    names = ("features", "lr", "epochs", "batch", "max_iter")
    return recipe._replace(**{name: value for name in names if (value := getattr(options, name)) is not None})


class Split(NamedTuple):
    """Features with classes, on the CPU."""

    x: Tensor  # [N, D] float32
    y: Tensor  # [N] int64
    rows: Tensor  # [N] int64, of the source

    def of(self, places: Tensor | Sequence[int]) -> Split:
        """Some of them."""
        return Split(*(values[places] for values in self))


class Linear(NamedTuple):
    """A fitted classifier."""

    weight: Tensor  # [C, D] float32
    bias: Tensor  # [C]

    def accuracy(self, split: Split) -> float:
        """Share of rows whose class is the first, in [0, 1]; 0 of a fit that diverged."""
        logits = F.linear(split.x, *self)
        return float((logits.argmax(1) == split.y).double().mean()) if bool(logits.isfinite().all()) else 0.0


class ProbeData(NamedTuple):
    """What a probe is fitted and evaluated on."""

    train: Split
    test: Split
    val: Split | None
    names: Sequence[str]  # of all classes
    fingerprint: str  # of the training data


def run(inputs: Inputs, options: ProbeTaskOptions) -> Findings:
    """Fit on `train`, evaluate on `source`: `acc1`, `acc5`, `mean_per_class_recall`, as of `zeroshot`.

    With several seeds their mean, the standard deviation of the sample as `acc1_std`, and each seed's value as
    `seed@0.acc1`. Also the accuracy on the training rows, their number, and the weight decay; with a sweep the
    accuracy on the validation rows by decay, as `sweep@0.01`.
    """
    recipe = resolved(options.probe, options.val is not None)
    seeds = options.probe.seeds or ((0, 1, 2) if options.probe.shots else (0,))
    data = _read(inputs, options, recipe.features)
    if not is_first():
        return
    by_seed = [dict(fit_once(data, recipe, options.probe, seed)) for seed in seeds]
    if len(by_seed) == 1:
        yield from by_seed[0].items()
        return
    for name in (n for n in by_seed[0] if not n.startswith("sweep@")):
        values = [metrics[name] for metrics in by_seed]
        if name not in ("train_rows", "weight_decay"):
            yield name, statistics.fmean(values)
            yield f"{name}_std", statistics.stdev(values)
        elif len(set(values)) == 1:
            yield name, values[0]
    for seed, metrics in zip(seeds, by_seed, strict=True):
        yield from ((f"seed@{seed}.{name}", value) for name, value in metrics.items())


def fit_once(data: ProbeData, recipe: Recipe, options: ProbeOptions, seed: int) -> Iterator[tuple[str, float]]:
    """The metrics of one seed: choose the decay, fit again on all drawn rows, evaluate. Raises: ValueError."""
    by_class = order(data.train, data.fingerprint, seed)
    if options.shots:
        few = next((c for c, places in enumerate(by_class) if 0 < len(places) < options.shots), None)
        if few is not None:
            raise ValueError(
                f"the class {data.names[few]!r} has {len(by_class[few])} labelled training images: expected at least "
                f"--probe.shots, {options.shots}, of each."
            )
        by_class = [places[: options.shots] for places in by_class]
    rows, count = data.train.of(sorted(place for places in by_class for place in places)), len(data.names)
    decay, tried = options.weight_decay, dict[float, float]()
    if decay is None and recipe.sweep is not None and (data.val is not None or recipe.held_out):
        fitted, chosen = rows, data.val
        if chosen is None:
            fitted, chosen = (data.train.of(sorted(part)) for part in held_out(by_class, recipe.held_out))
        decay, tried = sweep(recipe.sweep, lambda decay: fit(fitted, count, recipe, decay, seed).accuracy(chosen))
        if data.val is not None and not options.shots:  # k shots stay k
            rows = Split(*(torch.cat(both) for both in zip(rows, data.val, strict=True)))
    layer = fit(rows, count, recipe, decay or 0.0, seed)
    if not all(bool(values.isfinite().all()) for values in layer):
        raise ValueError("the probe's weights became NaN or infinite: use a smaller --probe.lr or --probe.weight-decay")
    batches = (({"vec": data.test.x[part]}, data.test.y[part]) for part in chunks(len(data.test.x), ROWS))
    yield from zeroshot(lambda images, _: F.linear(images["vec"], *layer), batches, {"vec": layer.weight})
    yield "train_acc1", layer.accuracy(rows)
    yield "train_rows", float(len(rows.x))
    yield "weight_decay", decay or 0.0
    yield from ((f"sweep@{value:.3g}", accuracy) for value, accuracy in sorted(tried.items()))


def held_out(by_class: Sequence[Sequence[int]], share: float) -> tuple[list[int], list[int]]:
    """Places to fit on, and places to choose on: the last `share` of each class, at least one, but not its only one.

    Raises: ValueError where no class has two.
    """
    fitted, chosen = list[int](), list[int]()
    for places in by_class:
        kept = len(places) - (min(max(1, round(share * len(places))), len(places) - 1) if len(places) > 1 else 0)
        fitted += places[:kept]
        chosen += places[kept:]
    if not chosen:
        raise ValueError(
            "one training image a class leaves none to choose a weight decay on: give --val, --probe.weight-decay, "
            "or --probe.shots 2 and more."
        )
    return fitted, chosen


def sweep(powers: tuple[int, int], accuracy: Callable[[float], float]) -> tuple[float, dict[float, float]]:
    """The value whose validation accuracy is highest, and the accuracies of all that were tried.

    Of 97 values between two powers of ten, evenly spaced as logarithms, every 16th first, then neighbours 8, 4, 2
    and 1 places beside the best, as CLIP (arXiv:2103.00020, appendix A.3) and CLIP_benchmark; of equals the smallest.
    """
    low, high = powers
    values = [10 ** (low + (high - low) * place / (COUNT - 1)) for place in range(COUNT)]
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


def fit(rows: Split, classes: int, recipe: Recipe, decay: float, seed: int) -> Linear:
    """The classifier that a recipe makes of rows. Args: decay: weight decay, of lbfgs the strength."""
    if recipe.optimiser == "lbfgs":
        return logistic(rows, classes, decay, recipe.max_iter)
    return steps(rows, start(rows.x.shape[1], classes, recipe.optimiser, seed), recipe, decay, seed)


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


def steps(rows: Split, first: Linear, recipe: Recipe, decay: float, seed: int) -> Linear:
    """Cross-entropy in shuffled batches, the last of an epoch smaller; a cosine from `lr` to 0, no warm-up."""
    weight, bias = (x.clone().requires_grad_() for x in first)
    optimiser: torch.optim.Optimizer
    if recipe.optimiser == "sgd":
        optimiser = torch.optim.SGD([weight, bias], recipe.lr, momentum=MOMENTUM, weight_decay=decay)
    else:
        optimiser = torch.optim.AdamW([weight, bias], recipe.lr, weight_decay=decay)
    n = len(rows.x)
    count = recipe.epochs * math.ceil(n / recipe.batch)
    orders = (shuffled(n, epoch, seed) for epoch in range(recipe.epochs))
    batches = (order[part] for order in orders for part in chunks(n, recipe.batch))
    for step, places in enumerate(track(batches, "probe", "steps", count)):
        optimiser.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * step / count)) * recipe.lr
        optimiser.zero_grad()
        loss = F.cross_entropy(F.linear(rows.x[places], weight, bias), rows.y[places])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return Linear(weight.detach(), bias.detach())


def logistic(rows: Split, classes: int, strength: float, max_iter: int) -> Linear:
    """Multinomial logistic regression: least mean cross-entropy + strength |W|^2 / (2 N), no price on biases.

    N times that, with strength 1 / C, is scikit-learn's; with two classes it has one weight vector, at half the price.
    By L-BFGS from 0 in double precision, which single cannot follow to the optimum, in coordinates where features have
    mean 0 and nearly unit covariance, the price counted in: a tower's features lie along few directions, and the same
    optimum takes a fraction of the iterations.
    """
    x, mean = rows.x.double(), rows.x.double().mean(0)
    centred = x - mean
    along, axes = torch.linalg.eigh(centred.T @ centred / len(x))  # directions of about equal curvature
    curved = along.clamp(min=0) / classes + strength / len(x)
    least = max(1e-12 * float(curved.max()), torch.finfo(x.dtype).tiny)
    basis = axes * curved.clamp(min=least).rsqrt()  # [D, D]
    turned = centred @ basis
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
        loss: Tensor = F.cross_entropy(F.linear(turned, inner, bias), rows.y)
        loss = loss + strength / (2 * len(x)) * (inner.square() * price).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    weight = inner.detach() @ basis.T
    return Linear(weight.float(), (bias.detach() - weight @ mean).float())


def order(train: Split, fingerprint: str, seed: int) -> list[list[int]]:
    """Places of the training rows by class, [C][n_c], each class shuffled by the seed.

    The order depends on the rows alone: the first k of a class are the same for any larger k.
    """
    drawn = [key(fingerprint, seed, "probe rows", row) for row in train.rows.tolist()]
    by_class: list[list[int]] = [[] for _ in range(int(train.y.max()) + 1)]
    for place in sorted(range(len(drawn)), key=drawn.__getitem__):
        by_class[int(train.y[place])].append(place)
    return by_class


def _read(inputs: Inputs, options: ProbeTaskOptions, kind: Kind) -> ProbeData:
    """Features of all splits, checked. Warns of classes that the training data lacks.

    Raises: ValueError for splits that are the same, or of other classes, and for features that are no numbers.
    """
    if (train := options.train) is None:
        train = beside(inputs.source.name)
        log.warning("training data: %s", train)
    size, given = inputs.matcher.model.config.image.size, {"test": inputs.source, "train": train, "val": options.val}
    sources = {n: open_source(s, size) if isinstance(s, str) else s for n, s in given.items() if s is not None}
    if len({source.fingerprint for source in sources.values()}) < len(sources):
        raise ValueError(f"two of the {' and '.join(sources)} data are the same: expected different images.")
    splits, named = dict[str, Split](), dict[str, list[str]]()
    for what, source in sources.items():
        bad = list[Skipped]()
        split = encoded(replace(inputs, source=source, skipped=bad), kind)
        if (classes := classes_of(source, options.classnames)) is not None:
            named[what], places = classes.names, classes.places(split.y)
            bad += [Skipped(row, name_of(source, row), NOT_AMONG) for row in split.rows[places == OTHER].tolist()]
            split = split._replace(y=places).of(places != OTHER)
        if nan := int((~split.x.isfinite().all(1)).sum()):
            raise ValueError(f"{source.name}: features of {nan} of {len(split.x)} images are NaN or infinite.")
        inputs.skipped.extend(bad if what == "test" else [replace(b, reason=f"{b.reason} ({what})") for b in bad])
        splits[what] = split
    names = next(iter(named.values()), [])
    present = {what: set(split.y.tolist()) for what, split in splits.items()}
    highest = max(-1, *(c for of_split in present.values() for c in of_split))
    if any(other != names for other in named.values()) or (names and highest >= len(names)):
        counts = ", ".join(f"{len(listed)} ({what})" for what, listed in named.items())
        raise ValueError(f"labels run to {highest}, class names: {counts}. Expected the same names in the same order.")
    if len(present["train"]) < 2 or not present["test"]:
        raise ValueError("expected training images of two or more classes, and test images of them.")
    names = names or [str(c) for c in range(highest + 1)]
    if lacking := sorted(present["test"] - present["train"]):
        listed = ", ".join(repr(names[c]) for c in lacking[:3])
        message = "%d classes of the test images have no training image, so the probe cannot know them: %s"
        log.warning(message, len(lacking), listed)
    return ProbeData(splits["train"], splits["test"], splits.get("val"), names, sources["train"].fingerprint)


def beside(test: str) -> str:
    """The training split that goes with test data: scenes:train, or a folder `train` in it or beside it.

    Raises: ValueError where there is none.
    """
    if re.match(r"scenes:(test|val)(\?|$)", test):
        return re.sub("^scenes:(test|val)", "scenes:train", test)
    folder = Path(test).expanduser()
    places = [folder / "train", *([folder.absolute().parent / "train"] if folder.name in TESTS else [])]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise ValueError(f"no training data beside {test}: give --train SRC, with a class for every image.")
    return str(found)


def encoded(inputs: Inputs, kind: Kind) -> Split:
    """Features of every labelled image, encoded once.

    Args: kind: "pooled" are the inputs of the projection to the embedding, or without one what the pooling returns;
    poolings of several vectors project their sum last.
    Raises: ValueError for data with several classes an image, and for a model without pooled features.
    """
    matcher, parts, caught = inputs.matcher, list[Split](), list[Tensor]()
    pooling: Any = matcher.model.head.pooling
    layer = next((x for name in ("image_projection", "out") if (x := getattr(pooling, name, None)) is not None), None)
    hook: Any = None
    if layer is not None:
        hook = layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    elif (pool := getattr(pooling, "image_pool", None)) is not None:
        hook = pool.register_forward_hook(lambda _, inputs, out: caught.append(out))

    def encode(images: Tensor) -> Features:
        caught.clear()
        found = matcher.encode_image(images, inputs.batch)
        if kind == "pooled" and [x.ndim for x in caught] != [2] * max(1, len(caught)):
            raise ValueError("this model has no features before a projection: use --probe.features vec.")
        return {"vec": torch.cat(caught)} if kind == "pooled" else found

    try:
        for part in labelled(inputs, encode):
            if part.labels.ndim != 1:
                raise ValueError(f"{inputs.source.name} has many labels an image: a probe needs one class each")
            parts.append(Split(part.images["vec"].float().cpu(), part.labels.cpu(), torch.tensor(part.rows)))
    finally:
        if hook is not None:
            hook.remove()
    return Split(*map(torch.cat, zip(*parts, strict=True)))


TASK = Task(
    name="probe",
    help="Fit a linear layer on frozen image features, and classify with it: accuracy.",
    data="class folders, a table with a column `label`, tars with .cls, or scenes:test?task=colour",
    options=ProbeTaskOptions,
    run=run,
    hidden="^(sweep|seed)@",
)
