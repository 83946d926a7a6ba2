"""What zero-shot classification counts besides accuracy over all images: by groups of images, by parts of class names,
F1. Names of the metrics are those of DataComp's evaluation and of WILDS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kiloword.errors import suggestion
from kiloword.evaluation.metrics import Standing, check_scores, hit, macro_f1, rounding, standing
from kiloword.evaluation.zeroshot import ZeroshotTaskOptions

MOST = 500  # groups of one field; more are no groups but names of images
NO_GROUP = "Other"  # a group that is never the worst, as in WILDS' FMoW


class Tally:
    """Counts over batches of images. `see` and `add` are called in the same order.

    Args: names: of the C classes. Raises: ValueError for a class name of one word where `attributes` is chosen.
    """

    def __init__(self, options: ZeroshotTaskOptions, names: Sequence[str]) -> None:
        self.options, self.names = options, names
        self._groups: list[list[str | None]] = [[] for _ in options.group_by]  # of each field, by image
        self._fields = set[str]()  # that any image has
        self._standings: list[Standing] = []
        self._labels: list[Tensor] = []  # [n] of each batch, where images have one class
        self._predicted = torch.zeros(len(names), dtype=torch.float64)
        self._parts = _parts_of(names) if options.attributes else {}
        self._part_hits: dict[str, list[Tensor]] = {part: [] for part in self._parts}

    def see(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """The `Record.info` of a batch of images, for their groups."""
        for groups, field in zip(self._groups, self.options.group_by, strict=True):
            groups += [group_of(info, field) for info in infos]
        self._fields.update(*infos)

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Scores [n, C] of a batch. Args: labels [n] int64, or [n, C] 0/1 of images with several classes."""
        if not (self.options.group_by or self.options.any_label or self.options.macro_f1 or self.options.attributes):
            return
        positive = labels.bool() if labels.ndim == 2 else torch.nn.functional.one_hot(labels, len(self.names)).bool()
        self._standings.append(standing(scores, positive))
        if labels.ndim == 2:
            self._check_sets()
            return
        best = check_scores(scores).amax(1, keepdim=True)
        first = (scores >= best - rounding(best)).double()
        first /= first.sum(1, keepdim=True)  # [n, C]: the chance of each class to be the prediction
        self._labels.append(labels)
        self._predicted += first.sum(0)
        for name, part in self._parts.items():
            self._part_hits[name].append((first * (part == part[labels][:, None])).sum(1))

    def _check_sets(self) -> None:
        for name in ("macro_f1", "attributes"):
            if getattr(self.options, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} needs one class per image, but these images have several."
                )

    def values(self) -> Iterator[tuple[str, float]]:
        """The metrics that the options ask for."""
        if not self._standings:
            return
        where = Standing(*(torch.cat(column) for column in zip(*self._standings, strict=True)))
        if self.options.any_label:
            yield "acc1", hit(where, 1).mean().item()
            if len(self.names) >= 5:
                yield "acc5", hit(where, 5).mean().item()
        if self.options.macro_f1:
            yield "F1-macro_all", self._f1(where)
        for name, hits in self._part_hits.items():
            yield f"{name}_acc1", torch.cat(hits).mean().item()
        if self.options.group_by:
            yield from self._by_group(where)

    def _f1(self, where: Standing) -> float:
        labels, count = torch.cat(self._labels), len(self.names)
        right = torch.bincount(labels, weights=hit(where, 1), minlength=count)
        return macro_f1(right, self._predicted, torch.bincount(labels, minlength=count).double())

    def _by_group(self, where: Standing) -> Iterator[tuple[str, float]]:
        hits = {"acc": hit(where, 1)} | ({"acc_top5": hit(where, 5)} if len(self.names) >= 5 else {})
        by = zip(self.options.group_by, self._groups, strict=True)
        fields = {field_name(field): self._places(field, groups) for field, groups in by}
        for metric, right in hits.items():
            means = {f: {g: right[rows].mean().item() for g, rows in groups.items()} for f, groups in fields.items()}
            worst = {f: min(v for g, v in of.items() if g != NO_GROUP or len(of) == 1) for f, of in means.items()}
            yield f"{metric}_wg", min(worst.values())
            yield from ((f"{metric}_worst_{field}", value) for field, value in worst.items())
            yield from ((f"{metric}_{field}:{g}", value) for field, of in means.items() for g, value in of.items())
        yield from ((f"count_{f}:{g}", float(len(rows))) for f, groups in fields.items() for g, rows in groups.items())

    def _places(self, field: str, groups: Sequence[str | None]) -> dict[str, Tensor]:
        """Places of the images of each group, by its name. Raises: ValueError without groups, or for too many."""
        places: dict[str, list[int]] = {}
        for place, group in enumerate(groups):
            if group is not None:
                places.setdefault(group, []).append(place)
        if not places:
            known = sorted(self._fields)
            raise ValueError(
                f"--group-by {field}: no image has this field. Expected a key of its json, or a column that "
                f"FILE?info=COLUMN names; it has {', '.join(known[:20]) or 'none'}.{suggestion(field, known)}"
            )
        if len(places) > MOST:
            raise ValueError(f"--group-by {field} has {len(places):,} values. Expected at most {MOST}.")
        return {group: torch.tensor(places[group]) for group in sorted(places)}


def group_of(info: Mapping[str, Any], field: str) -> str | None:
    """The group of an image: a value of its information as text. `a.b` is in the object `a`, `a.0` in the list `a`.

    `a=FIELD` is FIELD where the image has no `a`.
    """
    value: Any = info
    first, mark, other = field.partition("=")
    if mark and field not in info:
        group = group_of(info, first)
        return group_of(info, other) if group is None else group
    for name in [field] if field in info else field.split("."):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return str(value) if isinstance(value, str | int | float) and str(value) else None


def field_name(field: str) -> str:
    """How a field of groups is named in metrics: `region` of `region=npy.0`."""
    return field.partition("=")[0]


def _parts_of(names: Sequence[str]) -> dict[str, Tensor]:
    """The attribute and the object of each class, each as the number of the first class that has it: [C].

    Raises: ValueError for a class name that is not "attribute object".
    """
    pairs = [name.replace("_", " ").split(maxsplit=1) for name in names]
    single = next((name for name, words in zip(names, pairs, strict=True) if len(words) < 2), None)
    if single is not None:
        raise ValueError(f'--attributes: the class {single!r} is one word. Expected "attribute object" of each.')
    columns = {"attribute": [pair[0] for pair in pairs], "object": [pair[1] for pair in pairs]}
    return {part: torch.tensor([words.index(word) for word in words]) for part, words in columns.items()}
