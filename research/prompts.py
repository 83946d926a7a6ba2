"""Prompts of classes, right, wrong and vague: which way to weigh them classifies best? (research/README.md)

The claim is arXiv:2410.18857, table 3; `research.generality` judges its Gaussians by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.data.tree import ClassTree
from kiloword.evaluation.features import Classes, Seen, labelled as labelled_images
from kiloword.evaluation.prompts import Prompts, by_class, choose, labelled
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.tasks import PromptOptions, Way
from kiloword.evaluation.zeroshot import encoded
from kiloword.types import Features
from research.classes import tree_of
from research.evidence import Outcomes

SHOTS = 5  # labelled images a class, which no way is scored on
WAYS: dict[str, tuple[Way, PromptOptions]] = {
    "ensemble": ("ensemble", PromptOptions()),
    "filter": ("filter", PromptOptions()),
    "best k": ("topk", PromptOptions()),
    "bprw 0": ("bprw", PromptOptions()),
    f"bprw {SHOTS}": ("bprw", PromptOptions(shots=SHOTS)),
}
NEAREST = f"nearest, {SHOTS}"  # the prompt nearest to the labelled images: what labels give without Gaussians
WRONG, VAGUE = 2, 2  # captions of other classes, and of the nodes above


def noisy(tree: ClassTree) -> dict[str, list[str]]:
    """Prompts of every class: its caption, the nearest ones above it but the root's, and those of the next classes."""
    own = [tree.captions[path[-1]] for path in tree.paths]
    prompts = {}
    for label, path in enumerate(tree.paths):
        vague = [tree.captions[node] for node in path[1:-1][-VAGUE:]]
        wrong = [own[(label + step) % len(own)] for step in range(1, WRONG + 1)]
        prompts[own[label]] = [own[label], *vague, *wrong]
    return prompts


def prompted(matcher: Matcher, val: str) -> dict[str, Any]:
    """Whether each photo's class is the best, by every way: outcomes [N] as `prompts WAY`, and `prompts WAY top1`.

    Of models without Gaussians: by the ensemble, and by the prompt that is nearest to the labelled photos.
    """
    source = tree_of(val)
    class_prompts = noisy(source.tree)
    names = list(class_prompts)
    asked = encoded(matcher, names, class_prompts)
    images = Seen.whole(labelled_images(Inputs(matcher, source), classes=Classes(names)))
    few = labelled(images, len(names), PromptOptions(shots=SHOTS))  # [C, 5]
    rest = images.without(few.flatten())
    ways = WAYS if matcher.model.head.uncertainty is not None else {"ensemble": WAYS["ensemble"]}
    classes = {
        name: choose(way, matcher, asked, images if options.shots else rest, options).classes
        for name, (way, options) in ways.items()
    } | {NEAREST: nearest(asked, images.images["vec"][few])}
    outcomes = {f"prompts {name}": _right(matcher, rest, of_way) for name, of_way in classes.items()}
    return outcomes | {f"{name} top1": float(right.mean()) for name, right in outcomes.items()}


def nearest(asked: Prompts, photos: Tensor) -> Features:
    """Of each class the prompt that is nearest to the mean of its labelled photos. Args: photos [C, shots, D]."""
    similarity = (asked.texts["vec"] * photos.mean(1)[asked.group]).sum(1)
    best = torch.stack([places[similarity[places].argmax()] for places in by_class(asked.group, asked.n)])
    return {name: value[best] for name, value in asked.texts.items()}


def _right(matcher: Matcher, images: Seen, classes: Features) -> Outcomes:
    best = matcher.score(images.images, classes).argmax(1).cpu()
    return (best == images.labels).numpy().astype(np.float64)
