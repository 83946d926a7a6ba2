"""World T of research/README.md: class photos whose captions name nodes of a tree; its recipe, sources and judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tyro

from kiloword.api import Matcher
from kiloword.config.recipes import Recipe
from kiloword.data.edits import Selection, digest
from kiloword.data.open import open_source
from kiloword.data.reading import eval_batches
from kiloword.data.tree import ClassTree, TreeSource
from kiloword.types import Source
from research.arms import Options
from research.towers import tokens


@dataclass(frozen=True, kw_only=True)
class ClassOptions(Options):
    data: str = tyro.MISSING  # class data with a tree
    val: str = tyro.MISSING  # such data to evaluate on
    level: int = 6  # of the captions to classify by: the classes


def base(options: ClassOptions, method: str, query: str, steps: int, batch: int) -> Recipe:
    """Small towers with patches of 16, pooled by maxima, on `tree:DATA?query`; `--steps` and `--batch` go first."""
    recipe = tokens(method, options.size, (f"tree:{options.data}?{query}",), "max")
    return replace(recipe, steps=steps, batch=batch)


def tree_of(src: str) -> TreeSource:
    """The class data with captions of all levels. Raises: ValueError where there is no tree."""
    source = open_source(f"tree:{src}")
    assert isinstance(source, TreeSource)
    return source


def part(rows: slice, wrap: Callable[[TreeSource], Source] = lambda source: source) -> Callable[[Recipe], Source]:
    """What opens some rows of a recipe's data, a fair sample if its shards are shuffled.

    Args: rows: all before a row, or all from one on; wrap: applied first. Errors of what it returns: ValueError for
    data that ends too early.
    """
    least = (rows.start or 0) + 1 if rows.stop is None else rows.stop

    def opened(recipe: Recipe) -> Source:
        tree = open_source(recipe.data.sources[0])
        assert isinstance(tree, TreeSource)
        source = wrap(tree)
        if len(source) < least:
            raise ValueError(f"{source.name} has {len(source):,} rows: expected {least:,} or more.")
        chosen = np.arange(len(source))[rows]
        what = f"rows {chosen[0]} to {chosen[-1]}"
        return Selection(source, f"{source.name}, {what}", digest(f"{what} {source.fingerprint}"), chosen)

    return opened


def nodes_at(tree: ClassTree, level: int) -> list[int]:
    """The nodes that part the classes at a level."""
    return sorted({tree.node(label, level) for label in range(len(tree.paths))})


def classified(options: ClassOptions, matcher: Matcher) -> dict[str, Any]:
    """Whether the caption of its class is the best of all classes' for each photo: outcomes [N], and their mean."""
    source, level = tree_of(options.val), options.level
    tree, nodes = source.tree, nodes_at(source.tree, level)
    texts = matcher.encode_text([tree.captions[node] for node in nodes])
    right = list[bool]()
    for batch in eval_batches(source, matcher.model.config.image.size):
        best = matcher.score(list(batch.images), texts).argmax(1).tolist()
        own = [tree.node(int(source.class_of[row]), level) for row in batch.rows]
        right += [nodes[place] == node for place, node in zip(best, own, strict=True)]
    return {"top1": float(np.mean(right)), "outcomes": np.array(right, dtype=np.float64)}
