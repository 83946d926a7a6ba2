"""A baseline from colours alone: least squares on colour histograms, for comparison with a model's metrics.

Supervised, unlike zero-shot: fitted on labelled (or captioned) training images. It uses neither shape nor position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kiloword.data.images.augmentation import EvalTransform
from kiloword.evaluation.metrics import classification, standing
from kiloword.evaluation.retrieval import retrieval
from kiloword.types import BadSample, Features, LabelSet, Source

BINS = 5  # per colour channel: 125 cells in all
RIDGE = 1e-3
WORDS = re.compile(r"[^\W_]+")


@dataclass
class BaselineSample:
    """The first readable rows of a source."""

    colours: Tensor  # [N, BINS^3] float64
    captions: list[list[str]]
    labels: list[int | LabelSet | None]

    def pairs(self) -> tuple[list[str], list[int]]:
        """All captions, and the image of each."""
        pairs = [(caption, i) for i, captions in enumerate(self.captions) for caption in captions]
        return [caption for caption, _ in pairs], [i for _, i in pairs]


def histogram(images: Tensor) -> Tensor:
    """Square roots of the colour histograms of uint8 [N, 3, H, W]: [N, BINS^3] float64, of norm 1."""
    levels = images.long() * BINS // 256
    cells = ((levels[:, 0] * BINS + levels[:, 1]) * BINS + levels[:, 2]).flatten(1)
    counts = torch.zeros(len(cells), BINS**3, dtype=torch.float64).scatter_add_(
        1, cells, torch.ones_like(cells).double()
    )
    return (counts / cells.shape[1]).sqrt()


def read(source: Source, n: int, size: int = 64) -> BaselineSample:
    """Histograms, captions and labels of the first n rows, without unreadable ones."""
    transform = EvalTransform(size, "squash")
    colours, captions, labels = [], [], []
    for row in range(min(n, len(source))):
        try:
            record = source.record(row)
            colours.append(histogram(transform(record.image)[None]))
        except BadSample:
            continue
        captions.append(record.captions)
        labels.append(record.label)
    if not colours:
        raise ValueError(f"{source.name}: none of the first {n} rows is a readable image")
    return BaselineSample(torch.cat(colours), captions, labels)


def ridge(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Ridge regression: weights [A, B] from inputs [N, A] to outputs [N, B]."""
    square = inputs.T @ inputs + RIDGE * len(inputs) * torch.eye(inputs.shape[1], dtype=inputs.dtype)
    weights: Tensor = torch.linalg.solve(square, inputs.T @ outputs)
    return weights


def class_scores(train: Tensor, labels: Tensor, test: Tensor, classes: int) -> Tensor:
    """Scores [N, C] of images for classes by least squares.

    Args: histograms [M, BINS^3] with labels [M] to learn from; histograms [N, BINS^3] to score.
    """
    return _constant(test) @ ridge(_constant(train), torch.nn.functional.one_hot(labels, classes).double())


def classify(train: Source, test: Source, n: int = 2000) -> Iterator[tuple[str, float]]:
    """`acc1`, `acc5`, `mean_per_class_recall` of least squares from histograms to classes, fitted on n images."""
    train_sample, test_sample = read(train, n), read(test, len(test))
    train_labels, test_labels = _labels(train, train_sample), _labels(test, test_sample)
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    scores = class_scores(train_sample.colours, train_labels, test_sample.colours, classes)
    yield from classification(
        standing(scores, torch.nn.functional.one_hot(test_labels, classes).bool()), test_labels, classes
    )


class ColourMatcher:
    """Scores images and captions by the cosine of a histogram and its prediction from the words of the caption."""

    def __init__(self, sample: BaselineSample) -> None:
        captions, images = sample.pairs()
        self.vocabulary = sorted({word for caption in captions for word in words(caption)})
        self.mean = sample.colours.mean(0)
        self.weights = ridge(bags(captions, self.vocabulary), (sample.colours - self.mean)[images])  # [V + 1, BINS^3]

    def images(self, colours: Tensor) -> Features:
        """Of histograms [N, BINS^3]."""
        return {"vec": torch.nn.functional.normalize(colours - self.mean, dim=1)}

    def texts(self, captions: Sequence[str]) -> Features:
        """Of T captions."""
        return {"vec": torch.nn.functional.normalize(bags(captions, self.vocabulary) @ self.weights, dim=1)}


def dot(images: Features, texts: Features) -> Tensor:
    """Scores [N, T]: products of the vectors."""
    return images["vec"] @ texts["vec"].T


def retrieve(train: Source, test: Source, n: int = 2000, ks: Sequence[int] = (1, 5, 10)) -> Iterator[tuple[str, float]]:
    """Image and text recall by a `ColourMatcher`, fitted on n images."""
    train_sample, test_sample = read(train, n), read(test, len(test))
    captions, images = test_sample.pairs()
    if not any(train_sample.captions) or not captions:
        name = test.name if any(train_sample.captions) else train.name
        raise ValueError(f"{name} has no captions for the colour baseline")
    matcher = ColourMatcher(train_sample)
    features = matcher.images(test_sample.colours), matcher.texts(captions)
    yield from retrieval(dot, *features, torch.tensor(images), ks)


def words(caption: str) -> list[str]:
    return WORDS.findall(caption.lower())


def bags(captions: Iterable[str], vocabulary: Sequence[str]) -> Tensor:
    """Counts of every vocabulary word, and a constant: [T, V + 1] float64."""
    place = {word: i for i, word in enumerate(vocabulary)}
    rows = []
    for caption in captions:
        row = [0.0] * len(vocabulary) + [1.0]
        for word in words(caption):
            if word in place:
                row[place[word]] += 1
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def _labels(source: Source, sample: BaselineSample) -> Tensor:
    labels = [label for label in sample.labels if isinstance(label, int)]
    if len(labels) < len(sample.labels):
        raise ValueError(f"{source.name} has no class labels for the colour baseline")
    return torch.tensor(labels)


def _constant(colours: Tensor) -> Tensor:
    return torch.cat([colours, torch.ones(len(colours), 1, dtype=colours.dtype)], 1)
