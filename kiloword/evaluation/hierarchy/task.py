"""General and specific captions and images: `kiloword eval hierarchy MODEL` (arXiv:2410.18857, section 4.4).

Two protocols retrieve texts of an image from specific to general (metrics `hierarcaps_` and `traversal_`). Gaussian
models also get the uncertainty and inclusion by level of texts and images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor

from kiloword.distributed.sharing import is_first
from kiloword.evaluation.features import seen
from kiloword.evaluation.hierarchy import HierarchyTaskOptions, Includes
from kiloword.evaluation.hierarchy.chains import Chains, SourceLevels, complete, gather, read
from kiloword.evaluation.hierarchy.levels import (
    ImageLevels,
    included,
    inclusion_by_level,
    kendall,
    uncertainty_by_level,
    wrong_texts,
)
from kiloword.evaluation.hierarchy.paths import (
    Truth,
    mean_root,
    measure,
    measure_root,
    measure_truth,
    most_inclusive,
    radii,
    radius_paths,
    traversals,
)
from kiloword.evaluation.task import Inputs, Values
from kiloword.methods.prolip.gaussian import variance_sum
from kiloword.model.encoding import join
from kiloword.terminal import warn
from kiloword.types import Features, Source


def run(inputs: Inputs, options: HierarchyTaskOptions) -> Values:
    """Evaluate on chains of captions (json `hierarchies`, scenes) and on images of several levels (HierarImgs, scenes).

    Raises: ValueError for options out of range, for data without levels, and for data with levels of images only if
    the model has no uncertainty.
    """
    includes, eps = options.includes or "inc", options.eps or 0.0
    if includes not in get_args(Includes):
        raise ValueError(f"includes is {includes!r}: expected {' or '.join(get_args(Includes))}.")
    if not -100 <= eps <= 20:
        raise ValueError(f"eps is {eps}: expected a number from -100 to 20; the paper evaluates at 0.")
    source, page = inputs.source, {} if inputs.shown is None else inputs.shown
    stored = read(source)
    if stored.chains:
        yield from _chains(inputs, options, stored, (includes, eps), page)
    make: Callable[[], Source] | None = getattr(source, "image_levels", None)
    levelled = make() if make is not None else source if stored.groups else None
    if levelled is not None:
        yield from _image_levels(replace(inputs, source=levelled), bool(stored.chains), page)
    elif not stored.chains:
        why = f" (row {next(iter(stored.problems))}: {next(iter(stored.problems.values()))})" if stored.problems else ""
        raise ValueError(
            f"{source.name} has no levels{why}: give each image's json `hierarchies` (chains of captions, general to "
            "specific), make images of several levels (tools/hierarimgs.py), or use scenes"
        )


def _chains(
    inputs: Inputs,
    options: HierarchyTaskOptions,
    stored: SourceLevels,
    includes: tuple[Includes, float],
    page: dict[str, Any],
) -> Values:
    """Both protocols, each with every root that the model has; for Gaussians uncertainty and inclusion by level."""
    matcher, source = inputs.matcher, inputs.source
    chains, images = _encode(inputs, stored)
    texts, empty = matcher.encode_text(chains.texts), matcher.encode_text([""])
    gaussian, truth = "log_var" in texts, _truth(source, chains)
    if options.nearest == "csd" and not gaussian:
        raise ValueError("nearest csd needs a model with uncertainty, and this one has none: use cosine")
    radius = radii(texts, empty)
    paths = radius_paths(matcher.score, images, texts, radius).cpu()
    page |= {"chains": chains, "source": source, "truth": truth, "paths": {"HierarCaps": paths}}
    order = [("order", float(kendall(radius.cpu()[chains.places]).mean()))]
    yield from _measured("hierarcaps_", paths, chains, truth, order)
    roots = {"empty": empty["vec"]}
    if gaussian:
        roots["inclusive"] = texts["vec"][most_inclusive(images, texts, *includes)]
        roots["mean"] = mean_root(roots["empty"], roots["inclusive"])
    for name, root in roots.items():
        paths = traversals(matcher.score, images, texts, root, options.nearest).cpu()
        page["paths"][f"traversal, root {name}"] = paths
        yield from _measured(f"traversal_{name}_", paths, chains, truth, measure_root(paths[:, -1], chains))
    if gaussian:
        yield from _named("text_", uncertainty_by_level(variance_sum(texts).cpu()[chains.places]))
        on_cpu = {name: texts[name].cpu() for name in ("vec", "log_var")}
        yield from _named("text_", inclusion_by_level(on_cpu, chains.places, wrong_texts(chains, truth)))
    elif (options.includes, options.eps) != (None, None) and is_first():
        warn("note: --includes and --eps have no effect: they compare Gaussians, and this model has none.")


def _encode(inputs: Inputs, stored: SourceLevels) -> tuple[Chains, Features]:
    """Encode the images with chains; append all others to `skipped`."""
    parts, chains = [], []
    for part in seen(inputs):
        why = {row: stored.problems.get(row, "no hierarchies") for row in part.rows if row not in stored.chains}
        for reason in sorted(set(why.values())):
            part = part.without([why.get(row) == reason for row in part.rows], reason, inputs.skipped)
        parts.append(part.images)
        chains += [(row, stored.chains[row]) for row in part.rows]
    if not chains:
        raise ValueError(f"{inputs.source.name}: none of the images that have hierarchies is usable")
    return gather(chains), join(parts)


def _truth(source: Source, chains: Chains) -> Truth | None:
    """Ground truth of captions and images, if the source has it."""
    relevance: Callable[..., Any] | None = getattr(source, "relevance", None)
    if relevance is None:
        return None
    return lambda texts, part: torch.as_tensor(relevance([chains.texts[t] for t in texts], chains.rows[part]))


def _measured(
    prefix: str, paths: Tensor, chains: Chains, truth: Truth | None, more: Iterable[tuple[str, float]]
) -> Values:
    """Metrics of paths, `more`, and with ground truth those by it."""
    by_truth = () if truth is None else measure_truth(paths, chains, truth)
    return _named(prefix, chain(measure(paths, chains), more, by_truth))


def _image_levels(inputs: Inputs, optional: bool, page: dict[str, Any]) -> Values:
    """Uncertainty of images by level, and inclusion of specific images in general ones."""
    source = inputs.source
    parts = list(seen(inputs))
    images = {name: value.cpu() for name, value in join([part.images for part in parts]).items()}
    rows = [row for part in parts for row in part.rows]
    place = {row: i for i, row in enumerate(rows)}
    every = complete(read(source).groups)  # [G, L]
    readable = [[place[row] for row in group] for group in every.tolist() if all(row in place for row in group)]
    groups = torch.tensor(readable, dtype=torch.int64).view(-1, every.shape[1])
    if "log_var" not in images or len(groups) < 1 or groups.shape[1] < 2:
        if optional:
            return
        why = "the model has no uncertainty" if "log_var" not in images else "no image is there at every level"
        raise ValueError(f"{source.name}: levels of images are judged by their uncertainty, but {why}")
    uncertainty = variance_sum(images)[groups]  # [G, L]
    whole = torch.stack([included(images, groups[:, -1], groups[:, k]) for k in range(groups.shape[1] - 1)], 1)
    page["images"] = ImageLevels(source, [[rows[i] for i in group] for group in groups.tolist()], uncertainty, whole)
    yield from _named("image_", uncertainty_by_level(uncertainty))
    yield from _named("image_", inclusion_by_level(images, groups, torch.full_like(groups, -1)))
    for k, h in enumerate(whole.T):
        yield f"image_inclusion_whole_h@{k}", float((h > 0).double().mean())


def _named(prefix: str, values: Iterable[tuple[str, float]]) -> Values:
    return ((prefix + name, value) for name, value in values)
