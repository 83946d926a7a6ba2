"""CLIP-C with little data: photos from scratch, captions by the tree of their classes (research/README.md).

`python -m research.little_data --data tiny/train --val tiny/dev --photos 5000 --out runs/little`;
the claim is arXiv:2407.01408, table 4: composing helps, and more where there is less data. `--rate 0.5 --seeds 100` and
the like choose the learning rates that `RATES` holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tyro

from kiloword.api import Matcher
from kiloword.config.recipes import Recipe
from kiloword.data.reading import eval_batches
from kiloword.data.sources.held_out import SomeRows
from kiloword.data.sources.open import open_source
from kiloword.data.sources.tree import TreeSource
from kiloword.types import Source
from research.arms import Arm, Experiment, Options, main
from research.towers import tokens

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("clip", {}),
    "rho 0.15": ("clip-c", {"rho": 0.15}),
    "rho 0.3": ("clip-c", {"rho": 0.3}),
    "cutmix 0.3": ("clip+cutmix", {"cutmix": {"rho": 0.3}}),
    "stylistic 0.3": ("clip+stylistic", {"stylistic": {"rho": 0.3}}),
}
RATES: dict[str, float] = {}  # times the default learning rate, where seed 100 was better with another


@dataclass(frozen=True, kw_only=True)
class LittleOptions(Options):
    data: str = tyro.MISSING  # class data with a tree
    val: str = tyro.MISSING  # such data to evaluate on
    photos: int = 5_000  # of the training data, the first
    level: int = 6  # of the captions: the classes


def arms(options: LittleOptions) -> list[Arm]:
    """Plain CLIP, two shares of composed pairs, another way to mix two photos, and one photo mixed with itself."""

    def arm(name: str, method: str, settings: dict[str, Any]) -> Arm:
        base = tokens(method, options.size, (f"tree:{options.data}?levels={options.level}",), "max")
        recipe = replace(base, settings=settings, steps=2000, batch=128)
        return Arm(name=name, recipe=recipe, judge=judge, source=first, rate=RATES.get(name, 1.0))

    def first(recipe: Recipe) -> Source:
        source = open_source(recipe.data.sources[0])
        rows = np.arange(min(options.photos, len(source)))
        return SomeRows(source, rows, f"{source.name}, the first {len(rows)}", f"{len(rows)} {source.fingerprint}")

    def judge(matcher: Matcher) -> dict[str, Any]:
        return classified(matcher, options.val, options.level)

    return [arm(name, *choice) for name, choice in METHODS.items()]


def classified(matcher: Matcher, val: str, level: int) -> dict[str, Any]:
    """Whether the caption of its class is the best of all classes' for each photo: outcomes [N], and their mean."""
    source = open_source(f"tree:{val}?levels={level}")
    assert isinstance(source, TreeSource)
    tree = source.tree
    nodes = sorted({tree.node(label, level) for label in range(len(tree.paths))})
    texts = matcher.encode_text([tree.captions[node] for node in nodes])
    right = list[bool]()
    for part in eval_batches(source, matcher.model.config.image.size):
        best = matcher.score(list(part.images), texts).argmax(1).tolist()
        own = [tree.node(int(source.class_of[row]), level) for row in part.rows]
        right += [nodes[place] == node for place, node in zip(best, own, strict=True)]
    return {"top1": float(np.mean(right)), "outcomes": np.array(right, dtype=np.float64)}


EXPERIMENT = Experiment(
    module="research.little_data",
    title="CLIP-C with little data",
    options=LittleOptions,
    arms=arms,
    columns={"top-1": "top1"},
)

if __name__ == "__main__":
    main(EXPERIMENT)
