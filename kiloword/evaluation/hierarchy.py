"""The task `hierarchy`: general and specific captions and images (arXiv:2410.18857, section 4.4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, groupby

import torch
from torch import Tensor

from kiloword.config.settings import Nothing
from kiloword.evaluation.features import Seen, kept, seen, tile
from kiloword.evaluation.metrics import defined, spearman
from kiloword.evaluation.task import Findings, Inputs
from kiloword.methods.prolip.gaussian import inclusion, log_inclusion, variance_sum
from kiloword.model.encoding import chunks, moved, rows
from kiloword.model.heads import unit
from kiloword.model.pooling import at_least_float
from kiloword.report import Gallery, Text, distributions
from kiloword.types import BadSample, Features, Source

STEPS = 50
TRIES = 8  # number of next chains searched for a wrong text
TAIL = 2  # percent at each end of a histogram, in its outermost bars


def run(inputs: Inputs, options: Nothing) -> Findings:
    """Evaluate chains of captions (json `hierarchies`, scenes) and images of several levels (HierarImgs, scenes).

    `hierarcaps_` and `traversal_ROOT_` are two protocols. Models with Gaussians also get uncertainty and inclusion by
    level: `text_` of chains, `image_` of images.
    Raises: ValueError for data without levels, and images of levels for a model without Gaussians.
    """
    source, (chains, groups) = inputs.source, read(inputs.source)
    levels: Callable[[], Source] | None = getattr(source, "image_levels", None)
    images = inputs.matcher.model.head.uncertainty is not None and (levels or groups)
    if not chains and not images:
        raise ValueError(
            f"{source.name} has no levels: give each image's json `hierarchies` (lists of texts, general to specific, "
            "all of one length); for a model with Gaussians also images of several levels (tools/hierarimgs.py)."
        )
    if chains:
        yield from of_chains(inputs, chains)
    if images:
        yield from of_images(inputs if levels is None else replace(inputs, source=levels()))


def read(source: Source) -> tuple[dict[int, list[list[str]]], dict[str, dict[int, int]]]:
    """Chains of captions by row, and images of several levels (group -> level -> row), of the readable rows.

    Chains are those of the source's `hierarchies(row)`, else of its json (`hierarchies`), all of as many texts as the
    first. Of images of several levels the json has a `group` and a `level` from 0, the most general.
    """
    chains: dict[int, list[list[str]]] = {}
    groups: dict[str, dict[int, int]] = {}
    hierarchies = getattr(source, "hierarchies", None)
    for row in range(len(source)):
        try:
            info = source.record(row).info if hierarchies is None else {"hierarchies": hierarchies(row)}
        except BadSample:  # reported when the images are encoded
            continue
        found = info.get("hierarchies")
        listed = found if isinstance(found, list) else []
        stripped = [[str(text).strip() for text in texts] for texts in listed if isinstance(texts, list)]
        length = len(next(iter(chains.values()), stripped or [[]])[0])
        if length > 1 and all(len(texts) == length and all(texts) for texts in stripped) and stripped:
            chains[row] = stripped
        level, group = info.get("level"), info.get("group")
        if isinstance(level, int) and isinstance(group, str):
            groups.setdefault(group, {})[level] = row
    return chains, groups


@dataclass
class Chains:
    """C chains of L texts from general (level 0) to specific, each written for one of I images."""

    texts: list[str]  # N unique texts, in the order of first occurrence
    places: Tensor  # [C, L] int64, indices into texts
    image: Tensor  # [C] int64, ascending
    truth: Tensor | None = None  # [N, I] bool, of which images texts are true, where that is known

    @staticmethod
    def of(by_row: Mapping[int, list[list[str]]], source: object = None) -> Chains:
        """The chains of images."""
        index: dict[str, int] = {}
        places = [[index.setdefault(t, len(index)) for t in texts] for each in by_row.values() for texts in each]
        image = [i for i, each in enumerate(by_row.values()) for _ in each]
        relevance = getattr(source, "relevance", None)
        truth = None if relevance is None else torch.as_tensor(relevance(list(index), list(by_row)))
        return Chains(list(index), torch.tensor(places), torch.tensor(image), truth)


def of_chains(inputs: Inputs, by_row: Mapping[int, list[list[str]]]) -> Findings:
    """Both protocols, each with every root that the model has; for Gaussians uncertainty and inclusion by level."""
    matcher, source, found = inputs.matcher, inputs.source, Seen.whole(seen(inputs))
    reason = f"no hierarchies of {len(next(iter(by_row.values()))[0])} texts each"
    found = kept(found, [row in by_row for row in found.rows], reason, inputs.skipped)
    chains, images, order = Chains.of({row: by_row[row] for row in found.rows}, source), found.images, found.rows
    texts, empty = matcher.encode_text(chains.texts), matcher.encode_text([""])["vec"]
    scores = torch.cat([matcher.score(rows(images, part), texts) for part in chunks(len(order), 64)])  # [I, N]
    radius = (texts["vec"].double() - empty.double()).square().sum(1).sqrt()
    paths, roots = {"hierarcaps": radius_paths(scores, radius)}, {"empty": empty}
    if "log_var" in texts:
        roots["inclusive"] = texts["vec"][most_inclusive(images, texts)]
        roots["mean"] = unit(empty + roots["inclusive"])
    paths |= {f"traversal_{name}": traversals(scores.argmax(1), texts["vec"], root) for name, root in roots.items()}
    for name, path in paths.items():
        yield from measure(path, chains, name)
    yield "hierarcaps_order", float(kendall(radius.cpu()[chains.places]).mean())
    if "log_var" in texts:
        texts = {name: value.cpu() for name, value in texts.items()}
        uncertainty = variance_sum(texts)[chains.places]
        yield from uncertainty_by_level(uncertainty, "text")
        yield from inclusion_by_level(texts, chains.places, wrong_texts(chains), "text")
        if inputs.page:  # figure 7
            yield distributions(
                {f"level {k}": u for k, u in enumerate(uncertainty.T)}, "sum of variances of texts", TAIL
            )
    for i, row in enumerate(order[:8] if inputs.page else ()):  # figure 9
        yield Gallery([tile(source, row)], f"As annotated: {' → '.join(by_row[row][0])}")
        for name, path in paths.items():
            along = [chains.texts[t] for t, _ in groupby(path[i].tolist())]
            yield Text(f"{name}: {' → '.join(along if name == 'hierarcaps' else along[::-1])}")


def radius_paths(scores: Tensor, radius: Tensor) -> Tensor:
    """The protocol of HierarCaps: for each threshold, the text of the highest score [I, N] with a radius [N] up to it.

    Thresholds are equally spaced from the smallest to the largest radius, so paths go from general to specific. Ties:
    the first text. Returns: [I, STEPS] int64, indices into the texts. Source: arXiv:2407.08521, its public evaluator.
    """
    least, most = radius.aminmax()
    limits = torch.linspace(least, most, STEPS, dtype=radius.dtype, device=radius.device)  # holds both exactly
    return torch.stack([scores.masked_fill(radius > limit, -torch.inf).argmax(1) for limit in limits], 1).cpu()


def traversals(start: Tensor, texts: Tensor, roots: Tensor) -> Tensor:
    """The protocol of ProLIP: from the text nearest to an image to a root, the nearest text by cosine at every step.

    Steps are equally spaced on the line between both, ends included.
    Args: start [I] int64, indices into texts [N, D]; roots [I, D] or [1, D]; norm 1. Returns: [I, STEPS] int64.
    Source: arXiv:2410.18857, section 4.4.
    """
    with torch.autocast(texts.device.type, enabled=False):  # validation on CUDA runs in bf16: texts lie close together
        vec = at_least_float(texts)
        near, far = vec[start] @ vec.T, at_least_float(roots) @ vec.T  # [I, N]
        steps = torch.linspace(0, 1, STEPS).tolist()
        return torch.stack([torch.lerp(near, far.expand_as(near), step).argmax(1) for step in steps], 1).cpu()


def most_inclusive(images: Features, texts: Features) -> Tensor:
    """The text that includes each image most, by inc (eq. 3, eps 0) of I and N Gaussians: [I] int64."""
    each = (log_inclusion(rows(images, slice(i, i + 1)), texts).sum(-1) for i in range(len(images["vec"])))
    return torch.stack([scores.argmax() for scores in each])


def measure(paths: Tensor, chains: Chains, name: str) -> Iterator[tuple[str, float]]:
    """Metrics of paths [I, S], means over images; every retrieved text counts once.

    `precision`: share of retrieved texts in a chain of the image; `recall`: share of levels of which a text was
    retrieved; `hit`: any was. Of a traversal's last text, `root_recall`: it is the most general of a chain (our reading
    of R@1[ROOT] in ProLIP's table 2); `root_hit`: it is anywhere in one. `true_precision`, `true_recall`: by the truth.
    """
    of_level = [set(texts) for texts in chains.places.T.tolist()]
    each: dict[str, list[float]] = defaultdict(list)
    for i, path in enumerate(paths.tolist()):
        image_chains, retrieved = chains.places[chains.image == i].tolist(), set(path)
        right = retrieved.intersection(chain(*image_chains))
        levels = [not retrieved.isdisjoint(level) for level in zip(*image_chains, strict=True)]
        each["precision"].append(len(right) / len(retrieved))
        each["recall"].append(sum(levels) / len(levels))
        each["hit"].append(bool(right))
        if name.startswith("traversal"):
            each["root_recall"].append(any(texts[0] == path[-1] for texts in image_chains))
            each["root_hit"].append(path[-1] in right)
        if chains.truth is not None:
            right = {text for text in retrieved if chains.truth[text, i]}
            each["true_precision"].append(len(right) / len(retrieved))
            each["true_recall"].append(sum(not right.isdisjoint(level) for level in of_level) / len(of_level))
    yield from ((f"{name}_{measure}", sum(values) / len(values)) for measure, values in each.items())


def kendall(values: Tensor) -> Tensor:
    """Kendall's tau of each row of values [C, L] against 0, 1, ..., L - 1: [C] double, from -1 to 1.

    tau-a: share of pairs in order minus share in reverse order; ties count 0, their expected value over all orders.
    """
    n = values.shape[1]
    i, j = torch.triu_indices(n, n, 1, device=values.device)
    return (values[:, j] - values[:, i]).sign().double().mean(1)


def uncertainty_by_level(uncertainty: Tensor, kind: str) -> Iterator[tuple[str, float]]:
    """Metrics of the uncertainty of chains [C, L], general to specific: `chain_uncertainty@k`, the mean at level k;
    `chain_uncertainty_spearman`, its correlation with the level; `chain_uncertainty_order`, the mean Kendall's tau of
    level and certainty within a chain.
    """
    for k, value in enumerate(uncertainty.double().mean(0).tolist()):
        yield f"{kind}_chain_uncertainty@{k}", value
    level = torch.arange(uncertainty.shape[1]).expand_as(uncertainty)
    yield from defined(f"{kind}_chain_uncertainty_spearman", spearman(level.flatten(), uncertainty.flatten()))
    yield f"{kind}_chain_uncertainty_order", float(kendall(-uncertainty).mean())


def inclusion_by_level(features: Features, chains: Tensor, others: Tensor, kind: str) -> Iterator[tuple[str, float]]:
    """Share of chains [C, L] whose level k is included in level k - 1, by two tests; equal texts are omitted.

    `inclusion_h@k`: H(k in k - 1) > 0. The sign mostly depends on which of the two is wider, so that distant wide texts
    pass too. `inclusion_inc@k`: inc(k, k - 1) > inc(k, o) for a wrong text o of level k - 1, others[C, k - 1].
    """
    for k in range(1, chains.shape[1]):
        specific, general, other = chains[:, k], chains[:, k - 1], others[:, k - 1]
        differ = specific != general
        if bool(differ.any()):
            h = inclusion(rows(features, specific[differ]), rows(features, general[differ])).sum(-1)
            yield f"{kind}_inclusion_h@{k}", float((h > 0).double().mean())
        tested = differ & (other >= 0)
        if bool(tested.any()):
            child = rows(features, specific[tested])
            parent, wrong = (log_inclusion(child, rows(features, p[tested])).sum(-1) for p in (general, other))
            right = (parent > wrong).double() + 0.5 * (parent == wrong).double()
            yield f"{kind}_inclusion_inc@{k}", float(right.mean())


def wrong_texts(chains: Chains) -> Tensor:
    """For every chain and level a text of that level that is wrong for its image, [C, L]; -1: none.

    It is the text of one of the next chains that is in no chain of the image and, with ground truth, not true of it.
    """
    places, wrong = chains.places, torch.full_like(chains.places, -1)
    of_image = chains.image[:, None] * len(chains.texts)  # tells equal texts of several images apart
    for shift in range(1, min(TRIES, len(places) - 1) + 1):
        other = places.roll(-shift, 0)
        free = (wrong < 0) & ~torch.isin(of_image + other, of_image + places)
        if chains.truth is not None:
            free &= ~chains.truth[other, chains.image[:, None]]
        wrong = torch.where(free, other, wrong)
    return wrong


def of_images(inputs: Inputs) -> Findings:
    """Uncertainty of images by level, and inclusion of specific images in general ones; none without whole groups."""
    source, found = inputs.source, Seen.whole(seen(inputs))
    images, place = moved(found.images, "cpu"), {row: i for i, row in enumerate(found.rows)}
    by_group = read(source)[1].values()
    levels = range(max(max(group) + 1 for group in by_group))
    whole_rows = [[group[k] for k in levels] for group in by_group if all(group.get(k) in place for k in levels)]
    if not whole_rows or len(levels) < 2:
        return
    groups = torch.tensor([[place[row] for row in group] for group in whole_rows])  # [G, L]
    uncertainty, finest = variance_sum(images)[groups], rows(images, groups[:, -1])
    whole = torch.stack([inclusion(finest, rows(images, level)).sum(-1) for level in groups.T[:-1]], 1)  # [G, L - 1]
    yield from uncertainty_by_level(uncertainty, "image")
    yield from inclusion_by_level(images, groups, torch.full_like(groups, -1), "image")
    for k, h in enumerate(whole.T):
        yield f"image_inclusion_whole_h@{k}", float((h > 0).double().mean())
    if inputs.page:  # figures 8, C.2 and C.3
        yield distributions({f"level {k}": uncertainty[:, k] for k in levels[-6:]}, "sum of variances", TAIL)
        yield distributions({f"level {k}": whole[:, k] for k in levels[-6:-1]}, "H(whole image in level)", TAIL)
        for g in whole[:, 0].argsort(stable=True).tolist()[:3]:
            tiles = [tile(source, row, f"{u:#.3g}") for row, u in zip(whole_rows[g], uncertainty[g], strict=True)]
            yield Gallery(tiles, f"H of the whole in level 0 is {float(whole[g, 0]):.3g}; variance by level")
