"""General and specific captions and images: `kiloword eval hierarchy MODEL` (arXiv:2410.18857, section 4.4).

Two protocols retrieve texts of an image from specific to general (metrics `hierarcaps_` and `traversal_`). Gaussian
models also get the uncertainty and inclusion by level of texts and images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kiloword.distributed.sharing import is_first
from kiloword.evaluation.features import seen
from kiloword.evaluation.hierarchy import HierarchyTaskOptions, Includes, Nearest
from kiloword.evaluation.hierarchy.chains import Chains, SourceLevels, complete, gather, read
from kiloword.evaluation.hierarchy.levels import (
    included,
    inclusion_by_level,
    kendall,
    uncertainty_by_level,
    wrong_texts,
)
from kiloword.evaluation.hierarchy.paths import (
    Truth,
    check_includes,
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

if TYPE_CHECKING:
    from kiloword.api import Matcher


def run(inputs: Inputs, options: HierarchyTaskOptions) -> Values:
    """Evaluate on chains of captions (json `hierarchies`, scenes) and on images of several levels (HierarImgs, scenes).

    Raises: ValueError for options out of range, for data without levels, and for data with levels of images only if
    the model has no uncertainty.
    """
    by: tuple[Includes, float] = ("inc" if options.includes is None else options.includes, options.eps or 0.0)
    check_includes(*by)
    matcher, source = inputs.matcher, inputs.source
    page: dict[str, Any] = {} if inputs.shown is None else inputs.shown
    stored = read(source)
    if stored.chains:
        chains, images = _encode(inputs, stored)
        texts = matcher.encode_text(chains.texts)
        truth = _truth(source, chains)
        yield from _official(matcher, images, texts, chains, truth, page)
        yield from _traversals(matcher, images, texts, chains, truth, by, options.nearest, page)
        if "log_var" not in texts and (options.includes, options.eps) != (None, None) and is_first():
            warn("note: --includes and --eps have no effect: they compare Gaussians, and this model has none.")
        if "log_var" in texts:
            yield from _text_levels(texts, chains, truth, page)
        page |= {"chains": chains, "source": source, "truth": truth}
    levelled = _levelled(source, stored)
    if levelled is not None:
        yield from _image_levels(replace(inputs, source=levelled), bool(stored.chains), page)
    elif not stored.chains:
        why = f" (row {next(iter(stored.problems))}: {next(iter(stored.problems.values()))})" if stored.problems else ""
        raise ValueError(
            f"{source.name} has no levels{why}: give each image's json `hierarchies` (chains of captions, general to "
            "specific), make images of several levels (python -m kiloword.data.hierarimgs), or use scenes"
        )


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
    relevant = relevance
    return lambda texts, part: torch.as_tensor(relevant([chains.texts[t] for t in texts], chains.rows[part]))


def _official(
    matcher: Matcher, images: Features, texts: Features, chains: Chains, truth: Truth | None, page: dict[str, Any]
) -> Values:
    """The protocol of HierarCaps; `order` is Kendall's tau of radius against level."""
    radius = radii(texts, matcher.encode_text([""]))
    paths = radius_paths(matcher.score, images, texts, radius).cpu()
    page["paths"] = {"HierarCaps": paths}
    yield from _named("hierarcaps_", measure(paths, chains))
    yield "hierarcaps_order", float(kendall(radius.cpu()[chains.places]).mean())
    if truth is not None:
        yield from _named("hierarcaps_", measure_truth(paths, chains, truth))


def _traversals(
    matcher: Matcher,
    images: Features,
    texts: Features,
    chains: Chains,
    truth: Truth | None,
    includes: tuple[Includes, float],
    nearest: Nearest,
    page: dict[str, Any],
) -> Values:
    """The protocol of ProLIP, for each root that the model has."""
    if nearest == "csd" and "log_var" not in texts:
        raise ValueError("nearest csd needs a model with uncertainty, and this one has none: use cosine")
    for name, root in _roots(matcher, images, texts, includes).items():
        paths = traversals(matcher.score, images, texts, root, nearest).cpu()
        page["paths"][f"traversal, root {name}"] = paths
        yield from _named(f"traversal_{name}_", measure(paths, chains))
        yield from _named(f"traversal_{name}_", measure_root(paths[:, -1], chains))
        if truth is not None:
            yield from _named(f"traversal_{name}_", measure_truth(paths, chains, truth))


def _roots(matcher: Matcher, images: Features, texts: Features, includes: tuple[Includes, float]) -> dict[str, Tensor]:
    """Roots: the embedding of "" [1, D]; for Gaussians also the text that includes each image most, and their mean."""
    empty = matcher.encode_text([""])["vec"]
    if "log_var" not in texts:
        return {"empty": empty}
    inclusive = texts["vec"][most_inclusive(images, texts, *includes)]
    return {"empty": empty, "inclusive": inclusive, "mean": mean_root(empty, inclusive)}


def _text_levels(texts: Features, chains: Chains, truth: Truth | None, page: dict[str, Any]) -> Values:
    uncertainty = variance_sum(texts).cpu()[chains.places]  # [C, L]
    page["texts"] = uncertainty
    yield from _named("text_", uncertainty_by_level(uncertainty))
    on_cpu = {name: texts[name].cpu() for name in ("vec", "log_var")}
    yield from _named("text_", inclusion_by_level(on_cpu, chains.places, wrong_texts(chains, truth)))


def _levelled(source: Source, stored: SourceLevels) -> Source | None:
    """The source of images of several levels, if any."""
    make: Callable[[], Source] | None = getattr(source, "image_levels", None)
    if make is not None:
        return make()
    return source if stored.groups else None


def _image_levels(inputs: Inputs, optional: bool, page: dict[str, Any]) -> Values:
    """Uncertainty of images by level, and inclusion of specific images in general ones."""
    source = inputs.source
    parts = list(seen(inputs))
    images = {name: value.cpu() for name, value in join([part.images for part in parts]).items()}
    place = {row: i for i, row in enumerate(row for part in parts for row in part.rows)}
    groups = _usable(complete(read(source).groups), place)
    if "log_var" not in images or len(groups) < 1 or groups.shape[1] < 2:
        if optional:
            return
        why = "the model has no uncertainty" if "log_var" not in images else "no image is there at every level"
        raise ValueError(f"{source.name}: levels of images are judged by their uncertainty, but {why}")
    uncertainty = variance_sum(images)[groups]  # [G, L]
    page |= {"images": uncertainty, "groups": groups}
    yield from _named("image_", uncertainty_by_level(uncertainty))
    yield from _named("image_", inclusion_by_level(images, groups, torch.full_like(groups, -1)))
    whole = groups[:, -1]
    for k in range(groups.shape[1] - 1):
        h = included(images, whole, groups[:, k])
        page.setdefault("whole_in_level", {})[k] = h
        yield f"image_inclusion_whole_h@{k}", float((h > 0).double().mean())


def _usable(groups: Tensor, place: dict[int, int]) -> Tensor:
    """Groups of rows whose images are all readable, as indices into the encoded images: [G, L]."""
    whole = [[place[row] for row in group] for group in groups.tolist() if all(row in place for row in group)]
    return torch.tensor(whole, dtype=torch.int64).view(-1, groups.shape[1])


def _named(prefix: str, values: Values) -> Values:
    return ((prefix + name, value) for name, value in values)
