"""Prompts of classes, right, wrong and vague: which way to weigh them classifies best? (research/README.md)

The claim is arXiv:2410.18857, table 3; `research.generality` judges its Gaussians by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kiloword.api import Matcher
from kiloword.data.sources.tree import ClassTree
from kiloword.evaluation.classes import Classes
from kiloword.evaluation.task import Inputs
from kiloword.evaluation.zeroshot import PromptOptions, Way
from kiloword.evaluation.zeroshot.prompts import Images
from kiloword.evaluation.zeroshot.task import chosen_by, encoded, encoded_images
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
    """Whether each photo's class is the best, by every way: outcomes [N] as `prompts WAY`, and `prompts WAY top1`."""
    source = tree_of(val)
    class_prompts = noisy(source.tree)
    names = list(class_prompts)
    _, asked = encoded(matcher, names, class_prompts)
    images = encoded_images(Inputs(matcher, source), Classes(names))
    shots = f"bprw {SHOTS}"
    few = chosen_by(matcher, WAYS[shots][0], asked, images, WAYS[shots][1])
    rest, metrics = images.without(few.taken), dict[str, Any]()
    for name, (way, options) in WAYS.items():
        chosen = few if name == shots else chosen_by(matcher, way, asked, rest, options)
        outcomes = _right(matcher, rest, chosen.classes)
        metrics |= {f"prompts {name}": outcomes, f"prompts {name} top1": float(outcomes.mean())}
    return metrics


def _right(matcher: Matcher, images: Images, classes: Features) -> Outcomes:
    best = matcher.score(images.images, classes).argmax(1).cpu()
    return (best == images.labels).numpy().astype(np.float64)
