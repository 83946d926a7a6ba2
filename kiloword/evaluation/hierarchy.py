"""The task `hierarchy`: general and specific captions and images (arXiv:2410.18857, section 4.4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kiloword.config.recipes import Nearest
from kiloword.distributed.sharing import in_turns, is_first
from kiloword.evaluation.calibration import defined, spearman
from kiloword.evaluation.features import kept, seen, tile
from kiloword.evaluation.metrics import check_scores
from kiloword.evaluation.retrieval import Score
from kiloword.evaluation.task import Findings, Inputs, Task
from kiloword.methods.prolip.gaussian import inclusion, log_inclusion, variance_sum
from kiloword.model.encoding import chunks, join, rows
from kiloword.model.heads import unit
from kiloword.model.pooling import at_least_float
from kiloword.randomness import key
from kiloword.report import Block, Gallery, Plot, Text, distributions
from kiloword.terminal import warn
from kiloword.types import BadSample, Features, Source

Includes = Literal["inc", "h"]
STEPS = 50
PANEL = 1 << 22  # scores in memory at once
PAIRS = 1 << 18  # dimensions of pairs of Gaussians in memory at once
JUDGED = 256  # images per query of the ground truth
TRIES = 8  # number of next chains searched for a wrong text
EXAMPLES = 8  # images of the page
TAIL = 2  # percent at each end of a histogram, in its outermost bars


@dataclass(frozen=True, kw_only=True)
class HierarchyTaskOptions:
    """How the caption that includes an image most is chosen, and how a traversal steps."""

    # inclusion score by which the root caption of an image is chosen; None: inc. h at eps 0 chooses the narrowest
    # captions, not the most general
    includes: Includes | None = None
    # log of a variance added in inc and h; None: 0. At -10 or less distances hardly count: h then chooses the widest
    # caption, inc the narrowest
    eps: float | None = None
    nearest: Nearest = "cosine"  # similarity by which a traversal steps; csd needs a model with Gaussians


def run(inputs: Inputs, options: HierarchyTaskOptions) -> Findings:
    """Evaluate on chains of captions (json `hierarchies`, scenes) and on images of several levels (HierarImgs, scenes).

    Two protocols retrieve texts of an image along a path: `hierarcaps_` and `traversal_ROOT_`, which measure different
    things. Models with Gaussians also get uncertainty and inclusion by level: `text_` of chains, `image_` of images.
    Raises: ValueError for options out of range, data without levels, and images of levels for a model without Gaussians
    """
    if options.includes not in (None, *get_args(Includes)):
        raise ValueError(f"includes is {options.includes!r}: expected {' or '.join(get_args(Includes))}.")
    if not -100 <= (options.eps or 0) <= 20:
        raise ValueError(f"eps is {options.eps}: expected a number from -100 to 20; the paper evaluates at 0.")
    source, (chains, groups) = inputs.source, read(inputs.source)
    if chains:
        yield from _chains(inputs, options, chains)
    image_levels: Callable[[], Source] | None = getattr(source, "image_levels", None)
    if image_levels is not None:
        yield from _image_levels(replace(inputs, source=image_levels()), optional=bool(chains))
    elif groups:
        yield from _image_levels(inputs, optional=bool(chains))
    elif not chains:
        raise ValueError(
            f"{source.name} has no levels: give each image's json `hierarchies` (lists of texts, general to specific, "
            "all of one length), make images of several levels (tools/hierarimgs.py), or use scenes."
        )


ImageChains = list[list[str]]
"""Chains of texts of one image, each from general to specific."""


def read(source: Source) -> tuple[dict[int, ImageChains], dict[str, dict[int, int]]]:
    """Chains of captions by row, and images of several levels (group -> level -> row), of the readable rows.

    Chains are those of the source's `hierarchies(row)`, else of its json (`hierarchies`), all of as many texts as the
    first. Of images of several levels the json has a `group` and a `level` from 0, the most general.
    """
    chains: dict[int, ImageChains] = {}
    groups: dict[str, dict[int, int]] = {}
    hierarchies = getattr(source, "hierarchies", None)
    for row in range(len(source)):
        try:
            info = source.record(row).info if hierarchies is None else {"hierarchies": hierarchies(row)}
        except BadSample:  # reported when the images are encoded
            continue
        found = info.get("hierarchies")
        if isinstance(found, list) and found and all(isinstance(texts, list) for texts in found):
            stripped = [[text.strip() if isinstance(text, str) else "" for text in texts] for texts in found]
            first = next(iter(chains.values()), stripped)[0]
            if len(first) > 1 and all(len(texts) == len(first) and all(texts) for texts in stripped):
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
    rows: list[int]  # I rows of the source

    @staticmethod
    def of(by_row: Mapping[int, ImageChains]) -> Chains:
        """The chains of images."""
        index: dict[str, int] = {}
        places = [[index.setdefault(t, len(index)) for t in texts] for each in by_row.values() for texts in each]
        image = [i for i, each in enumerate(by_row.values()) for _ in each]
        return Chains(list(index), torch.tensor(places), torch.tensor(image), list(by_row))

    def true(self, source: object, texts: Tensor, image: Tensor) -> Tensor | None:
        """Whether texts [n, k] are true of the image beside them, image [n]: bool; None without ground truth."""
        relevance = getattr(source, "relevance", None)
        if relevance is None:
            return None
        true = torch.zeros_like(texts, dtype=torch.bool)
        for part in chunks(len(self.rows), JUDGED):
            here = ((image >= part.start) & (image < part.stop)).nonzero()[:, 0]
            different, place = torch.unique(texts[here], return_inverse=True)
            table = torch.as_tensor(relevance([self.texts[t] for t in different.tolist()], self.rows[part]))
            true[here] = table[place, (image[here] - part.start)[:, None]]
        return true


def _chains(inputs: Inputs, options: HierarchyTaskOptions, by_row: Mapping[int, ImageChains]) -> Findings:
    """Both protocols, each with every root that the model has; for Gaussians uncertainty and inclusion by level."""
    matcher, source, parts = inputs.matcher, inputs.source, []
    reason = f"no hierarchies of {len(next(iter(by_row.values()))[0])} texts each"
    for part in seen(inputs):
        parts.append(kept(part, [row in by_row for row in part.rows], reason, inputs.skipped))
    chains = Chains.of({row: by_row[row] for part in parts for row in part.rows})
    if not chains.rows:
        raise ValueError(f"{source.name}: none of the images that have hierarchies is usable.")
    images = join([part.images for part in parts])
    texts, empty = matcher.encode_text(chains.texts), matcher.encode_text([""])
    gaussian, score = "log_var" in texts, matcher.score
    if options.nearest == "csd" and not gaussian:
        raise ValueError("nearest csd needs a model with uncertainty, and this one has none: use cosine.")
    radius = (texts["vec"].double() - empty["vec"].double()).square().sum(1).sqrt()
    paths = {"hierarcaps": radius_paths(score, images, texts, radius)}
    roots = {"empty": empty["vec"]}
    if gaussian:
        roots["inclusive"] = texts["vec"][most_inclusive(images, texts, options.includes or "inc", options.eps or 0.0)]
        roots["mean"] = unit(roots["empty"] + roots["inclusive"])
    elif (options.includes, options.eps) != (None, None) and is_first():
        warn("note: --includes and --eps have no effect: they compare Gaussians, and this model has none.")
    paths |= {f"traversal_{n}": traversals(score, images, texts, vec, options.nearest) for n, vec in roots.items()}
    true = {name: chains.true(source, path, torch.arange(len(path))) for name, path in paths.items()}
    for name, path in paths.items():
        yield from measure(path, chains, true[name], name)
    yield "hierarcaps_order", float(kendall(radius.cpu()[chains.places]).mean())
    if gaussian:
        uncertainty, wrong = variance_sum(texts).cpu()[chains.places], wrong_texts(chains, source)
        yield from uncertainty_by_level(uncertainty, "text")
        yield from inclusion_by_level({k: v.cpu() for k, v in texts.items()}, chains.places, wrong, "text")
        if inputs.page:
            yield boxes({str(k): values for k, values in enumerate(uncertainty.T)}, "level of the text")
    if inputs.page:
        yield from _examples(source, chains, paths, true)


def radius_paths(score: Score, images: Features, texts: Features, radius: Tensor, steps: int = STEPS) -> Tensor:
    """The protocol of HierarCaps: for each threshold, the best-matching text with a radius [N] up to it.

    Thresholds are equally spaced from the smallest to the largest radius, so paths go from general to specific. Ties:
    the first text. Returns: [I, steps] int64, indices into the texts. Source: arXiv:2407.08521, its public evaluator.
    """
    limits = torch.linspace(0, 1, steps, dtype=radius.dtype, device=radius.device)
    limits = radius.min() + limits * (radius.max() - radius.min())
    limits[-1] = radius.max()

    def paths(part: slice) -> Tensor:
        scores = check_scores(score(rows(images, part), texts))  # [i, N]
        return torch.stack([scores.masked_fill(radius > limit, -torch.inf).argmax(1) for limit in limits], 1).cpu()

    return torch.cat(list(in_turns(list(chunks(len(images["vec"]), max(1, PANEL // len(radius)))), paths)))


def traversals(
    score: Score, images: Features, texts: Features, roots: Tensor, nearest: Nearest = "cosine", steps: int = STEPS
) -> Tensor:
    """The protocol of ProLIP: from the text nearest to an image to a root, the nearest text at every step.

    Steps are equally spaced on the line between both, ends included, and normalised. The first text is nearest by the
    model's score, the others by "cosine" of the means or by "csd", which subtracts half of the variance of each text.
    Args: roots [I, D] or [1, D], norm 1. Returns: [I, steps] int64. Source: arXiv:2410.18857, section 4.4.
    """
    vec = at_least_float(texts["vec"])
    penalty = 0.5 * variance_sum(texts) if nearest == "csd" else vec.new_zeros(len(vec))
    roots = at_least_float(roots).expand(len(images["vec"]), -1)

    def paths(part: slice) -> Tensor:
        start = vec[check_scores(score(rows(images, part), texts)).argmax(1)]  # [i, D]
        near, far = start @ vec.T, roots[part] @ vec.T  # [i, N]
        path = []
        for weight in torch.linspace(0, 1, steps).tolist():
            length = torch.lerp(start, roots[part], weight).norm(dim=1, keepdim=True).clamp(min=1e-12)
            path.append((torch.lerp(near, far, weight) / length - penalty).argmax(1))
        return torch.stack(path, 1).cpu()

    with torch.autocast(vec.device.type, enabled=False):  # validation on CUDA runs in bf16: texts lie close together
        return torch.cat(list(in_turns(list(chunks(len(roots), max(1, PANEL // len(vec)))), paths)))


def most_inclusive(images: Features, texts: Features, by: Includes = "inc", eps: float = 0.0) -> Tensor:
    """The text that includes each image most, of I and N Gaussians: [I] int64.

    Args: by: "inc", eq. 3, as in the authors' code; "h", H of eq. 4, as in the paper; eps: see `log_inclusion`.
    """
    measured, (n, d) = inclusion if by == "h" else log_inclusion, texts["vec"].shape
    block = max(1, min(16, PAIRS // d))  # images

    def best(part: slice) -> Tensor:
        image = {name: images[name][part, None] for name in ("vec", "log_var")}
        several = chunks(n, max(1, PAIRS // (block * d)))
        return torch.cat([measured(image, rows(texts, t), eps).sum(-1) for t in several], 1).argmax(1).cpu()

    return torch.cat(list(in_turns(list(chunks(len(images["vec"]), block)), best)))


def measure(paths: Tensor, chains: Chains, true: Tensor | None, name: str) -> Iterator[tuple[str, float]]:
    """Metrics of paths [I, S], means over images; every retrieved text counts once.

    `precision`: share of the retrieved texts that are in a chain of the image; `recall`: share of the levels of which
    a text was retrieved; `hit`: whether any was. Of a traversal's last text, `root_recall`: it is the most general of a
    chain, our reading of R@1[ROOT] in ProLIP's table 2; `root_hit`: it is anywhere in a chain, the other reading.
    `true_precision`, `true_recall`: every text that is true of the image [I, S] is right, and counts for its levels.
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
        if true is not None:
            right = {text for text, is_true in zip(path, true[i].tolist(), strict=True) if is_true}
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
    """Metrics of the uncertainty of chains [C, L], general to specific.

    `chain_uncertainty@k`: mean at level k; `chain_uncertainty_spearman`: correlation of level and uncertainty over all
    chains; `chain_uncertainty_order`: mean Kendall's tau of level and certainty within a chain, 1: uncertainty always
    falls. A text in several chains counts in each, unlike in `eval uncertainty`.
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


def wrong_texts(chains: Chains, source: object) -> Tensor:
    """For every chain and level a text of that level that is wrong for its image, [C, L]; -1: none.

    It is the text of one of the next chains that is in no chain of the image and, with ground truth, not true of it.
    """
    places, wrong = chains.places, torch.full_like(chains.places, -1)
    of_image = chains.image[:, None] * len(chains.texts)  # tells equal texts of several images apart
    for shift in range(1, min(TRIES, len(places) - 1) + 1):
        other = places.roll(-shift, 0)
        free = (wrong < 0) & ~torch.isin(of_image + other, of_image + places)
        true = chains.true(source, other, chains.image)
        wrong = torch.where(free if true is None else free & ~true, other, wrong)
    return wrong


def _image_levels(inputs: Inputs, optional: bool) -> Findings:
    """Uncertainty of images by level, and inclusion of specific images in general ones."""
    source, parts = inputs.source, list(seen(inputs))
    images = {name: value.cpu() for name, value in join([part.images for part in parts]).items()}
    place = {row: i for i, row in enumerate(row for part in parts for row in part.rows)}
    by_group = read(source)[1].values()
    levels = range(max(max(group) + 1 for group in by_group))
    whole_rows = [[group[k] for k in levels] for group in by_group if all(group.get(k) in place for k in levels)]
    if "log_var" not in images or not whole_rows or len(levels) < 2:
        if optional:
            return
        why = "the model has no uncertainty" if "log_var" not in images else "no image is there at every level"
        raise ValueError(f"{source.name}: levels of images are judged by their uncertainty, but {why}.")
    groups = torch.tensor([[place[row] for row in group] for group in whole_rows])  # [G, L]
    uncertainty, finest = variance_sum(images)[groups], rows(images, groups[:, -1])
    whole = torch.stack([inclusion(finest, rows(images, level)).sum(-1) for level in groups.T[:-1]], 1)  # [G, L - 1]
    yield from uncertainty_by_level(uncertainty, "image")
    yield from inclusion_by_level(images, groups, torch.full_like(groups, -1), "image")
    for k, h in enumerate(whole.T):
        yield f"image_inclusion_whole_h@{k}", float((h > 0).double().mean())
    if inputs.page:  # at most six levels are drawn (Figs. 8, C.2, C.3)
        drawn = sorted({round(k * (len(levels) - 2) / 4) for k in range(5)})
        yield distributions({f"level {k}": uncertainty[:, k] for k in (*drawn, levels[-1])}, "sum of variances", TAIL)
        yield distributions({f"level {k}": whole[:, k] for k in drawn}, "H(whole image in level)", TAIL)
        for g in [g for g in whole[:, 0].argsort(stable=True).tolist() if whole[g, 0] <= 0][:3]:
            values = zip(whole_rows[g], uncertainty[g].tolist(), strict=True)
            tiles = [tile(source, row, f"{value:#.3g}") for row, value in values]
            yield Gallery(tiles, f"The whole is not within level 0, H {float(whole[g, 0]):.3g}; variance by level")


def boxes(groups: Mapping[str, Tensor], label: str) -> Plot:
    """Sums of variances by group: boxes of the middle half, with whiskers from 5% to 95%."""

    def draw(axes: Any) -> None:
        axes.boxplot([values.numpy() for values in groups.values()], whis=(5, 95), sym="", tick_labels=list(groups))
        axes.set(xlabel=label, ylabel="sum of variances")

    return Plot(draw, f"uncertainty by {label}: {', '.join(groups)}")


def _examples(
    source: Source, chains: Chains, paths: Mapping[str, Tensor], true: Mapping[str, Tensor | None]
) -> Iterator[Block]:
    """Some images, the same ones for every model: their chain and what each protocol retrieved (Fig. 9)."""
    yield Text("Retrieved texts, from general to specific. ✓: in a chain of the image or, of scenes, true of it.")
    order = sorted(range(len(chains.rows)), key=lambda i: key(source.fingerprint, "examples", chains.rows[i]))
    for i in sorted(order[:EXAMPLES]):
        yield Gallery([tile(source, chains.rows[i], source.record(chains.rows[i]).key)])
        image_chains = chains.places[chains.image == i].tolist()
        yield Text(f"as annotated: {' → '.join(chains.texts[t] for t in image_chains[0])}")
        for name, path in paths.items():
            known, steps = true[name], path[i].tolist()
            right = [t in chain(*image_chains) for t in steps] if known is None else known[i].tolist()
            marked = [f"{chains.texts[t]}{' ✓' if ok else ''}" for t, ok in zip(steps, right, strict=True)]
            short = [text for text, _ in groupby(marked)]  # without repeats
            yield Text(f"{name.replace('_', ', root ')}: {' → '.join(short if name == 'hierarcaps' else short[::-1])}")


TASK = Task(
    name="hierarchy",
    help="Retrieve from general to specific captions along chains, and measure uncertainty by level.",
    data="images with chains of captions (`hierarchies`) or of several levels (HierarImgs), or scenes",
    options=HierarchyTaskOptions,
    run=run,
)
