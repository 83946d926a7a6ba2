"""Linear probe: how well one linear layer on frozen features tells classes apart. `kiloword eval probe MODEL`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kiloword.data.reading import name_of
from kiloword.distributed.sharing import is_first
from kiloword.evaluation.classes import NOT_AMONG, OTHER, classes_of
from kiloword.evaluation.probe import RECIPES, ProbeOptions, ProbeTaskOptions
from kiloword.evaluation.probe.data import Split, held_out, log, order, shots, split
from kiloword.evaluation.probe.fit import LabelledFeatures, Linear, fit, sweep
from kiloword.evaluation.task import Inputs, Values
from kiloword.evaluation.zeroshot import zeroshot
from kiloword.model.encoding import chunks
from kiloword.types import Features, Skipped, Source

if TYPE_CHECKING:
    from kiloword.api import Matcher

SWEEP, SEED = "sweep@", "seed@"
TRAIN_ROWS, DECAY = "train_rows", "weight_decay"
TESTS = ("test", "val", "valid", "validation", "dev")  # folders beside `train`
ROWS = 4096  # images classified at once


def run(inputs: Inputs, task_options: ProbeTaskOptions) -> Values:
    """Fit on `train`, evaluate on `source`: `acc1`, `acc5`, `mean_per_class_recall`, as of `zeroshot`.

    With several seeds their mean, the standard deviation of the sample as `acc1_std`, and each seed's value as
    `seed@0.acc1`. Also the accuracy on the training rows, their number, and the weight decay; with a sweep the
    accuracy on the validation rows by decay, as `sweep@0.01`.
    """
    matcher, val = inputs.matcher, task_options.val
    task_options.probe.check(val is not None)
    options = task_options.probe.resolved(val is not None)
    sources = _sources(matcher, inputs.source, task_options.train, val)
    data = _read(inputs, sources, options, task_options)
    if not is_first():
        return
    by_seed = [dict(_once(data, options, seed)) for seed in options.seeds]
    if len(by_seed) == 1:
        yield from by_seed[0].items()
        return
    yield from _together(by_seed)
    for seed, metrics in zip(options.seeds, by_seed, strict=True):
        yield from ((f"{SEED}{seed}.{name}", value) for name, value in metrics.items())


def _together(by_seed: Sequence[dict[str, float]]) -> Iterator[tuple[str, float]]:
    """Means and deviations of accuracies, and other numbers that are the same for all seeds."""
    for name in (n for n in by_seed[0] if not n.startswith(SWEEP)):
        values = [metrics[name] for metrics in by_seed]
        if name not in (TRAIN_ROWS, DECAY):
            yield name, statistics.fmean(values)
            yield f"{name}_std", statistics.stdev(values)
        elif len(set(values)) == 1:
            yield name, values[0]


@dataclass
class ProbeData:
    """What a probe is fitted and evaluated on."""

    train: LabelledFeatures
    test: LabelledFeatures
    val: LabelledFeatures | None
    names: Sequence[str]  # of all classes
    split: Split  # train's
    fingerprint: str  # train's


def _once(data: ProbeData, options: ProbeOptions, seed: int) -> Iterator[tuple[str, float]]:
    """The metrics of one seed: choose the decay, fit again on all drawn rows, evaluate."""
    by_class = order(data.split, data.fingerprint, seed)
    if options.shots:
        by_class = shots(by_class, options.shots, data.names)
    rows, count = data.train.of(_flat(by_class)), len(data.names)
    decay, tried = options.weight_decay, dict[float, float]()
    if decay is None:
        fitted, chosen = rows, data.val
        if chosen is None:
            assert options.val_share is not None
            fitted, chosen = (data.train.of(torch.tensor(x).sort()[0]) for x in held_out(by_class, options.val_share))
        values = RECIPES[options.recipe].sweep
        assert values is not None
        decay, tried = sweep(values.values(), lambda decay: fit(fitted, count, options, decay, seed).accuracy(chosen))
        if data.val is not None and not options.shots:  # k shots stay k
            rows = rows.and_(data.val)
    layer = fit(rows, count, options, decay, seed)
    yield from judged(layer, data.test)
    yield "train_acc1", layer.accuracy(rows)
    yield TRAIN_ROWS, float(len(rows))
    yield DECAY, decay
    yield from ((f"{SWEEP}{value:.3g}", accuracy) for value, accuracy in sorted(tried.items()))


def _flat(by_class: Sequence[Sequence[int]]) -> torch.Tensor:
    """All places, in the order of the source."""
    return torch.tensor([place for places in by_class for place in places]).sort()[0]


def judged(layer: Linear, test: LabelledFeatures) -> Iterator[tuple[str, float]]:
    """`zeroshot`'s metrics of a classifier. Raises: ValueError when it diverged."""
    if not bool(layer.weight.isfinite().all() and layer.bias.isfinite().all()):
        raise ValueError("the probe's weights became NaN or infinite: use a smaller --probe.lr or --probe.weight-decay")

    def score(images: Features, _: Features) -> torch.Tensor:
        return layer(images["vec"])

    batches = (({"vec": test.x[part]}, test.y[part]) for part in chunks(len(test), ROWS))
    yield from zeroshot(score, batches, {"vec": layer.weight})


def _read(
    inputs: Inputs, sources: dict[str, Source], options: ProbeOptions, task_options: ProbeTaskOptions
) -> ProbeData:
    """Features of all splits, checked."""
    splits: dict[str, Split] = {}
    for what, source in sources.items():
        encoded = split(replace(inputs, source=source), task_options.cache)
        splits[what] = _chosen(encoded, source, task_options.classnames)
        split_note = "" if what == "test" else f" ({what})"
        inputs.skipped.extend(replace(row, reason=row.reason + split_note) for row in splits[what].skipped)
    names = _classes(sources, splits, task_options.classnames)
    rows = {what: _rows(sources[what].name, splits[what], options) for what in splits}
    train = splits["train"]
    return ProbeData(rows["train"], rows["test"], rows.get("val"), names, train, sources["train"].fingerprint)


def _rows(name: str, encoded: Split, options: ProbeOptions) -> LabelledFeatures:
    assert options.features is not None
    x = encoded.features.get(options.features)
    if x is None:
        raise ValueError(
            f"this model has no features {options.features!r}: it has no projection that one could stand before. "
            "Use --probe.features vec."
        )
    bad = (~x.isfinite().all(1)).nonzero()[:, 0]
    if len(bad):
        row = int(encoded.rows[bad[0]])
        raise ValueError(f"{name}: features of {len(bad)} of {len(x)} images are NaN or infinite, first of row {row}.")
    return LabelledFeatures(x, encoded.labels)


def _chosen(encoded: Split, source: Source, classnames: Sequence[str] | str | None) -> Split:
    """The split with the labels of the chosen classes, without rows of others."""
    classes = None if classnames is None else classes_of(source, classnames)
    if classes is None:
        return encoded
    places = classes.places(encoded.labels)
    kept, other = (places != OTHER).nonzero()[:, 0], encoded.rows[places == OTHER].tolist()
    if not len(kept):
        raise ValueError(f"{source.name}: none of its {len(places)} labelled images has a class among the class names")
    skipped = [Skipped(row, name_of(source, row), NOT_AMONG) for row in other]
    features = {name: value[kept] for name, value in encoded.features.items()}
    return Split(features, places[kept], encoded.rows[kept], [*encoded.skipped, *skipped])


def _classes(sources: dict[str, Source], splits: dict[str, Split], classnames: Sequence[str] | str | None) -> list[str]:
    """Names of all classes, numbers where the data has none. Warns of classes that the training data lacks."""
    by_split = {what: classes_of(source, classnames) for what, source in sources.items()}
    lists = {what: classes.names for what, classes in by_split.items() if classes is not None}
    first, names = next(iter(lists.items()), ("", []))
    for what, other in lists.items():
        if other != names:
            raise ValueError(
                f"{sources[first].name} names {len(names)} classes and {sources[what].name} {len(other)}, or others: "
                "expected the same names in the same order."
            )
    highest = max(int(split_.labels.max()) for split_ in splits.values())
    names = names or [str(c) for c in range(highest + 1)]
    if highest >= len(names):
        raise ValueError(f"labels run to {highest}, but there are {len(names)} class names: expected one each.")
    present = set(splits["train"].labels.tolist())
    if len(present) < 2:
        raise ValueError(f"{sources['train'].name} has one class only: there is nothing to tell apart.")
    lacking = sorted(set(splits["test"].labels.tolist()) - present)
    if lacking:
        listed = ", ".join(repr(names[c]) for c in lacking[:3])
        message = "%d classes of the test images have no training image, so the probe cannot know them: %s"
        log.warning(message, len(lacking), listed)
    return names


def _sources(matcher: Matcher, test: Source, train: Source | str | None, val: Source | str | None) -> dict[str, Source]:
    """The splits by use. Raises: ValueError where two are the same."""
    from kiloword.data.open import open_source

    size = matcher.model.config.image.size
    if train is None:
        train = beside(test.name)
        log.warning("training data: %s", train)
    by_use: dict[str, Source | str | None] = {"test": test, "train": train, "val": val}
    sources = {
        what: open_source(source, size) if isinstance(source, str) else source
        for what, source in by_use.items()
        if source is not None
    }
    for what, source in sources.items():
        same = next((w for w, other in sources.items() if w != what and other.fingerprint == source.fingerprint), None)
        if same is not None:
            raise ValueError(f"the {what} and {same} data are the same, {source.name}: expected different images.")
    return sources


def beside(test: str) -> str:
    """The training split that goes with test data: scenes:train, or a folder `train` in it or beside it.

    Raises: ValueError where there is none.
    """
    if re.match(r"scenes:(test|val)(\?|$)", test):
        return re.sub("^scenes:(test|val)", "scenes:train", test)
    folder = Path(test).expanduser()
    places = [folder / "train", *([folder.absolute().parent / "train"] if folder.name in TESTS else [])]
    folder_ = next((place for place in places if place.is_dir()), None)
    if folder_ is None:
        raise ValueError(
            f"no training data beside {test}: give --train SRC, with a class label for every image (.cls members)."
        )
    return str(folder_)
