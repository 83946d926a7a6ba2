"""What a classifier predicts for every image: figures of each class, confusions, and the mistakes it is surest of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kiloword.evaluation.retrieval import Score
from kiloword.report import Html, folded, heat_map, percent, table, tiles
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.types import Source

SHOWN = 12  # mistakes with their images
MATRIX = 20  # classes whose whole confusion matrix fits a page
PAIRS = 20  # most frequent confusions, of more classes
ROWS = 20  # worst classes in the table; all are in a folded one
SIDE = 160  # pixels: largest side of an image on the page
Pixels = npt.NDArray[np.uint8]


@dataclass
class Predictions:
    """Collected batch by batch: `batches` before `scoring` sees the scores of each. Images of several classes are not.

    All lists hold one entry a batch of n images.
    """

    rows: list[int] = field(default_factory=list)  # of the source, one an image
    labels: list[Tensor] = field(default_factory=list)  # [n]
    first: list[Tensor] = field(default_factory=list)  # [n], predicted classes
    lead: list[Tensor] = field(default_factory=list)  # [n], score of the prediction above that of the true class

    def note(self, rows: Sequence[int], labels: Tensor) -> None:
        """The rows and labels of the batch whose scores come next."""
        self.rows += rows
        self.labels.append(labels.cpu())

    def scoring(self, score: Score) -> Score:
        """The same score, whose blocks [n, C] are noted."""

        def noted(images: Features, classes: Features) -> Tensor:
            block = score(images, classes)
            labels, scores = self.labels[-1], block.detach().cpu()
            if labels.ndim == 1 and len(labels) == len(scores):
                best, first = scores.max(1)
                self.first.append(first)
                self.lead.append(best - scores.gather(1, labels[:, None])[:, 0])
            return block

        return noted

    def confusion(self, count: int) -> Tensor:
        """Number of images by true and predicted class, [C, C]; with several classes an image, and without any, 0."""
        if not self.first:
            return torch.zeros(count, count, dtype=torch.int64)
        true, first = torch.cat(self.labels), torch.cat(self.first)
        return torch.bincount(true * count + first, minlength=count**2).view(count, count)

    def surest(self) -> list[tuple[int, int, int]]:
        """(row, true class, predicted class) of the mistakes with the largest lead, at most SHOWN."""
        if not self.first:
            return []
        true, first, lead = map(torch.cat, (self.labels, self.first, self.lead))
        wrong = ((true != first) & (lead > 0)).nonzero()[:, 0]  # a tie is no mistake: equal names of two classes
        order = wrong[lead[wrong].argsort(descending=True, stable=True)][:SHOWN].tolist()
        return [(self.rows[i], int(true[i]), int(first[i])) for i in order]


def mistakes(matcher: Matcher, source: Source, predictions: Predictions, names: Sequence[str]) -> dict[str, Any]:
    """Page data of one model: the confusion matrix, and images of mistakes with both classes."""
    confusion = predictions.confusion(len(names))
    if not int(confusion.sum()):
        return {}
    surest = predictions.surest()
    images = images_of(matcher, source, [row for row, _, _ in surest])
    words = [f"{names[true]}, called {names[first]}" for _, true, first in surest]
    return {"names": list(names), "confusion": confusion.numpy(), "mistakes": list(zip(images, words, strict=True))}


def images_of(matcher: Matcher, source: Source, rows: Sequence[int]) -> list[Pixels]:
    """Images [H, W, 3] of rows as the model sees them, no larger than SIDE, also of one that reads stored tokens."""
    from PIL import Image

    from kiloword.data.reading import eval_batches
    from kiloword.data.stored import WithTokens

    config = matcher.model.config
    if not rows:
        return []
    source = source.source if isinstance(source, WithTokens) else source
    parts = [range(row, row + 1) for row in rows]
    batches = eval_batches(source, config.image.size, config.preprocess.resize, parts=parts)
    images = [Image.fromarray(p.permute(1, 2, 0).contiguous().numpy()) for b in batches for p in b.images]
    for image in images:
        image.thumbnail((SIDE, SIDE))
    return [np.asarray(image) for image in images]


def classes_table(names: Sequence[str], confusion: npt.NDArray[np.int64]) -> Iterator[str]:
    """Each class, the worst first: images, recall, precision, and what it is taken for most often."""
    counts, called, right = confusion.sum(1), confusion.sum(0), confusion.diagonal()
    seen = [c for c in range(len(names)) if counts[c]]
    order = sorted(seen, key=lambda c: right[c] / counts[c])
    wrong = confusion - np.diag(right)
    rows: list[list[object]] = []
    for c in order:
        most = int(wrong[c].argmax())
        taken = f"{names[most]} ({percent(wrong[c, most] / counts[c])})" if wrong[c, most] else None
        precision = f"{right[c] / called[c]:.1%}" if called[c] else None
        rows.append([names[c], f"{counts[c]:,}", f"{right[c] / counts[c]:.1%}", precision, taken])
    head = ["class", "images", "recall", "precision", "mostly taken for"]
    yield table(rows[:ROWS], head)
    if len(seen) > ROWS:
        yield folded(f"The {ROWS} worst of {len(seen):,} classes; all classes", table(rows, head))


def confusions(names: Sequence[str], confusion: npt.NDArray[np.int64]) -> Iterator[str]:
    """The whole matrix of few classes, else the most frequent confusions."""
    if len(names) <= MATRIX:
        yield heat_map(confusion, names, names, caption="Images by class; a framed cell is right.")
        return
    wrong = confusion - np.diag(confusion.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
    pairs = [divmod(int(place), len(names)) for place in order]
    counts = confusion.sum(1)
    rows = [[names[t], names[p], f"{wrong[t, p]:,}", f"{wrong[t, p] / counts[t]:.1%}"] for t, p in pairs if wrong[t, p]]
    yield table(rows, ["class", "taken for", "images", "of the class"])


def gallery(images: Sequence[tuple[Pixels, str]]) -> Html:
    """The mistakes with the largest lead."""
    return tiles(images, columns=4) if images else Html()
