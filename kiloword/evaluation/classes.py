"""The classes of a task: their names, and which class each label of the data is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kiloword.data.classes.names import places_among, read_classnames
from kiloword.data.reading import EvalBatch
from kiloword.terminal import shown
from kiloword.types import Source

NONE, OTHER = -1, -2  # places of a row without label, and of one whose class is not among those of the task
NOT_AMONG = "its class is not among the class names"  # why a row is skipped


@dataclass(frozen=True)
class Classes:
    """C classes. Labels of the data are indices of `names`, or, where the data names others, of `place`."""

    names: list[str]
    place: Tensor | None = None  # [classes of the data] int64, the class in `names`, or OTHER

    def __len__(self) -> int:
        return len(self.names)

    @property
    def labels(self) -> int:
        """The number of classes that labels of the data count."""
        return len(self.names if self.place is None else self.place)

    def places(self, labels: Tensor) -> Tensor:
        """Classes of labels, [n] int64; labels below 0 stay. Raises: ValueError for one out of range."""
        if len(labels) and int(labels.max()) >= self.labels:
            span = f"{int(labels.min())} to {int(labels.max())}"
            raise ValueError(f"labels run from {span}, but there are {self.labels} classes")
        return labels if self.place is None else torch.where(labels < 0, labels, self.place[labels.clamp(min=0)])

    def targets(self, part: EvalBatch) -> Tensor:
        """Classes of images that may have several: [n, C] int64, 0 or 1; -1 for an image without label.

        Raises: ValueError for a class out of range, a set of another number of classes, and an image with one class.
        """
        sets = part.label_sets or []
        targets = torch.zeros(len(sets), len(self), dtype=torch.int64)
        for row, classes in enumerate(sets):
            if classes is not None:
                if classes.classes not in (None, self.labels):
                    raise ValueError(
                        f"{part.keys[row]} has a label of {classes.classes} classes, not of {self.labels}."
                    )
                places = self.places(torch.tensor(classes.indices, dtype=torch.int64))
                targets[row, places[places >= 0]] = 1
            elif part.labels is None or part.labels[row] < 0:
                targets[row] = NONE
            else:
                raise ValueError(f"{part.keys[row]} has one class, but other images have lists: expected lists.")
        return targets


def classes_of(source: Source, chosen: Sequence[str] | str | None) -> Classes | None:
    """The classes that a task tells apart; None where neither the data nor the user names any.

    Chosen names that are names of the data, in another order or only some of them, are matched by name: rows of other
    classes are omitted. So are the names of the data, where the user names more. Else names go by their order, which
    needs equal numbers.

    Args: chosen: class names; a file of them or a known data set (`data.classes.names`); None: those of the data.
    Raises: ValueError for names that do not fit the data.
    """
    named = list(getattr(source, "classnames", None) or [])
    if chosen is None:
        return Classes(named) if named else None
    names = read_classnames(chosen) if isinstance(chosen, str) else list(chosen)
    if not named or named == names:
        return Classes(names)
    places = [OTHER if place is None else place for place in places_among(named, names)]
    if sum(place != OTHER for place in places) in (len(named), len(names)):
        return Classes(names, torch.tensor(places))
    if len(named) == len(names) and all(place in (at, OTHER) for at, place in enumerate(places)):
        return Classes(names)
    raise ValueError(
        f"{len(names)} class names are given, but {source.name} has {len(named)} classes, the first "
        f"{shown(', '.join(named[:3])[:200])}: expected as many in the same order, or the same names."
    )
