"""FFF on class photos: at which precision and recall do mined positives pay? (research/README.md)

`python -m research.mined --data tiny/train --val tiny/dev --out runs/mined --grid` trains on the positives of oracles
of nine qualities; without `--grid` on other uses of an exact one, and on those of a CLIP of other photos. The claim is
arXiv:2405.10286, table 5. Captions name classes, so that a batch of 512 has 2.6 photos that match each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kiloword.config.recipes import Recipe
from kiloword.data.tree import TreeSource
from kiloword.losses.pairs import sigmoid_loss
from kiloword.methods.fff import Exact, all_true
from kiloword.methods.method import Component, Method
from kiloword.randomness import generator
from kiloword.types import PairBlocks, Pairs, Positives, Total
from research import teacher
from research.arms import Arm, Experiment, main
from research.classes import ClassOptions, base, classified, part
from research.evidence import Claim

STEPS, BATCH = 150, 512
PRECISIONS, RECALLS = (1.0, 0.8, 0.5), (1.0, 0.5, 0.1)
HALF = 20_000  # photos of the arms; the teacher is trained on the others
TEACHER_STEPS, TEACHER_BATCH = 1000, 128
ANNOTATED, EXACT, TEACHER = "annotated", "oracle 1, 1", "clip of other photos"
SEARCHED = ("annotated, searched bias", "exact, searched bias")
IGNORED = "siglip+research.mined:ignored"
ANNOTATED_RATE, POSITIVES_RATE = 2.0, 2.0  # times the default learning rate: the best of annotated, of the exact oracle


@dataclass(frozen=True, kw_only=True)
class MinedOptions(ClassOptions):
    grid: bool = False  # the oracles of nine qualities, in place of other uses of an exact one


class Oracle:
    """Class photos, and a teacher's opinion which captions are true of them, right to a known degree.

    It takes neighbours in the tree for one class, for as many classes as makes `precision` of the pairs that it mines
    true, and has an opinion of a share `recall` of the photos. Implements `kiloword.types.Source`.
    """

    def __init__(self, source: TreeSource, precision: float, recall: float) -> None:
        self.source, self.precision, self.recall = source, precision, recall
        self.fingerprint = f"{source.fingerprint} {precision} {recall}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("source", "digest"):
            raise AttributeError(name)  # during unpickling there is no source yet
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def group_of(self) -> NDArray[np.int64]:
        """[C] what the oracle takes each class for."""
        paths = self.source.tree.paths
        order = sorted(range(len(paths)), key=paths.__getitem__)
        groups, pairs = np.arange(len(paths)), len(paths) // 2
        confused = generator("oracle", 0).permutation(pairs)[: round((1 / self.precision - 1) * pairs)]
        for pair in confused.tolist():
            groups[order[2 * pair + 1]] = groups[order[2 * pair]]
        return groups

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """[N] the photos of which the oracle has an opinion."""
        return generator("oracle", 1).random(len(self.source.class_of)) < self.recall

    def relevance(self, captions: Sequence[str], rows: Sequence[int]) -> NDArray[np.bool_]:
        """Which captions it takes to be true of which rows' images, bool [T, I]."""
        tree, places = self.source.tree, np.asarray(rows, np.int64)
        of_class = tree.truth(captions, np.arange(len(tree.paths)))  # [T, C]
        of_group = np.zeros_like(of_class)
        for place, group in enumerate(self.group_of.tolist()):
            of_group[:, group] |= of_class[:, place]
        return of_group[:, self.group_of[self.source.class_of[places]]] & self.known[places]


def _ignoring(pairs: PairBlocks, positives: Positives) -> Total:
    """SigLIP's loss without the pairs that are positive and not annotated: they are neither matches nor others."""

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        y = block.annotated.to(block.logits.dtype)
        counts = 1 - (positives(block) - y).clamp(min=0)  # [i, t]
        values = F.softplus(block.logits) - y * block.logits
        return (counts * values).sum(1), counts * (block.logits.sigmoid() - y)

    total = pairs.total(loss)
    return Total(total, total.new_full((), float(pairs.shape[0])), pairs.rows)


def _ignore(method: Method, settings: Exact) -> Method:
    if method.pair_loss is not sigmoid_loss:
        raise ValueError(f"{method.name} has no sigmoid loss, of which pairs could be ignored: use siglip.")
    return replace(all_true(method, settings), pair_loss=_ignoring)


ignored = Component("positives", "true pairs that are not annotated do not count", Exact, _ignore)


def arms(options: MinedOptions) -> list[Arm]:
    """SigLIP on annotated pairs, and on those that an oracle or a teacher adds."""

    def arm(name: str, method: str, precision: float = 1.0, recall: float = 1.0, **settings: Any) -> Arm:
        recipe = replace(_base(options, method), settings=settings)
        rate = ANNOTATED_RATE if name.startswith(ANNOTATED) else POSITIVES_RATE
        source = part(slice(HALF), partial(Oracle, precision=precision, recall=recall))
        return Arm(name=name, recipe=recipe, judge=partial(classified, options), source=source, rate=rate)

    if options.grid:
        grid = [(precision, recall) for precision in PRECISIONS for recall in RECALLS]
        oracles = [arm(f"oracle {p:g}, {r:g}", "siglip+exact", p, r) for p, r in grid]
        return [arm(ANNOTATED, "siglip"), *oracles]
    clip = arm(TEACHER, "siglip+mined", mined=teacher.thresholds(options.out))
    return [
        arm(ANNOTATED, "siglip"),
        arm(EXACT, "siglip+exact"),
        arm("exact, balanced", "siglip+exact", exact={"balance": True}),
        arm("exact, ignored", IGNORED),
        arm(SEARCHED[0], "siglip+bias-search"),
        arm(SEARCHED[1], "siglip+exact+bias-search"),
        replace(clip, recipe=teacher.joined(clip.recipe, options.out)),
    ]


def _base(options: MinedOptions, method: str) -> Recipe:
    return replace(base(options, method, f"levels={options.level}", STEPS, BATCH), precision="bf16")


def first(options: MinedOptions) -> None:
    """The teacher: a CLIP of the photos that no arm sees."""
    if not options.grid:
        recipe = replace(_base(options, "clip"), steps=TEACHER_STEPS, batch=TEACHER_BATCH)
        teacher.make(recipe, options.out, options.device, options.workers, part(slice(HALF, None)))


def notes(options: MinedOptions) -> Sequence[str]:
    """What the teacher mines."""
    return () if options.grid else teacher.notes(options)


EXPERIMENT = Experiment(
    module="research.mined",
    title="Mined positives of photos of classes",
    options=MinedOptions,
    arms=arms,
    first=first,
    columns={"top-1": "top1"},
    claims=(
        Claim(says="an exact oracle", arm=EXACT, rivals=(ANNOTATED,), least=0.01),
        Claim(says="a trained teacher", arm=TEACHER, rivals=(ANNOTATED,), least=0.01),
        Claim(says="added afterwards, bias searched by both", arm=SEARCHED[1], rivals=SEARCHED[:1], least=0.01),
    ),
    notes=notes,
)

if __name__ == "__main__":
    main(EXPERIMENT)
