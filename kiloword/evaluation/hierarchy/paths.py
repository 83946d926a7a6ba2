"""Paths of retrieved texts from specific to general, by two protocols.

The protocols measure different things: do not compare their metrics with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise

import torch
from torch import Tensor

from kiloword.config.recipes import Nearest
from kiloword.distributed.sharing import in_turns
from kiloword.evaluation.hierarchy import Includes
from kiloword.evaluation.hierarchy.chains import Chains
from kiloword.evaluation.metrics import check_scores
from kiloword.evaluation.retrieval import Score
from kiloword.methods.prolip.gaussian import inclusion, log_inclusion, variance_sum
from kiloword.model.encoding import chunks, rows
from kiloword.model.heads import unit
from kiloword.model.pooling import at_least_float
from kiloword.types import Features

Truth = Callable[[list[int], slice], Tensor]
"""Texts, by index, and images i to j -> [texts, j - i] bool: whether the text is true of the image."""

STEPS = 50
PANEL = 1 << 22  # scores in memory at once
PAIRS = 1 << 18  # dimensions of pairs of Gaussians in memory at once
JUDGED = 256  # images per query of the ground truth
TURN = 64  # blocks of images per turn of a rank


def radii(texts: Features, root: Features) -> Tensor:
    """Distances of N texts from the root [1, D], by "vec": [N] in double precision."""
    return (texts["vec"].double() - root["vec"].double()).square().sum(1).sqrt()


def radius_paths(score: Score, images: Features, texts: Features, radius: Tensor, steps: int = STEPS) -> Tensor:
    """The protocol of HierarCaps: for each threshold, the best-matching text with a radius up to it.

    Thresholds are equally spaced from the smallest to the largest radius [N], so paths go from general to specific.
    Ties: the first text, as in its public evaluator.

    Returns: [I, steps] int64, indices into the texts. Source: arXiv:2407.08521 and its public evaluator.
    """
    limits = torch.linspace(0, 1, steps, dtype=radius.dtype, device=radius.device)
    limits = radius.min() + limits * (radius.max() - radius.min())
    limits[-1] = radius.max()
    first = torch.searchsorted(limits, radius)  # [N] the first step that admits each text
    order = first.argsort(stable=True)
    bounds = torch.searchsorted(first[order], torch.arange(steps + 1, device=order.device)).tolist()

    def paths(part: slice) -> Tensor:
        panel = check_scores(score(rows(images, part), texts))[:, order]
        return _best_so_far(panel, order, bounds).cpu()

    parts = list(chunks(len(images["vec"]), max(1, PANEL // len(order))))
    return torch.cat(list(in_turns(parts, paths))).to(order.device)


def _best_so_far(panel: Tensor, order: Tensor, bounds: list[int]) -> Tensor:
    """The best column before each bound: scores [i, N], text indices [N] -> [i, steps]."""
    best, place = panel.new_full((len(panel),), -torch.inf), order[0].expand(len(panel))
    path = []
    for start, end in pairwise(bounds):
        if end > start:
            value, at = panel[:, start:end].max(1)  # of equal values the first
            at = order[start + at]
            better = (value > best) | ((value == best) & (at < place))
            best, place = torch.where(better, value, best), torch.where(better, at, place)
        path.append(place)
    return torch.stack(path, 1)


def traversals(
    score: Score,
    images: Features,
    texts: Features,
    roots: Tensor,
    nearest: Nearest = "cosine",
    steps: int = STEPS,
) -> Tensor:
    """The protocol of ProLIP: from the text nearest to an image to a root, the nearest text at every step.

    Steps are equally spaced on the line between both, ends included, and normalised. The first text is nearest by the
    model's score. The paper does not define nearest for the other steps: "cosine" of the means, or "csd", which
    subtracts half of the variance of each text (the point on the line has none).

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

    parts = list(chunks(len(roots), max(1, PANEL // len(vec))))
    with torch.autocast(vec.device.type, enabled=False):  # validation on CUDA runs in bf16: texts lie close together
        return torch.cat(list(in_turns(parts, paths))).to(vec.device)


def most_inclusive(images: Features, texts: Features, by: Includes = "inc", eps: float = 0.0) -> Tensor:
    """The text that includes each image most: [I] int64, of I and N Gaussians; summed over dimensions.

    Args: by: "inc", eq. 3, as in the authors' code; "h", H of eq. 4, as in the paper; eps: see `log_inclusion`. At eps
    0 and the small variances of trained models, H is about the squared distance over the sum of the variances: it is
    largest for the narrowest text wider than the image, a specific one. Inc falls with the distance. At eps -10 or less
    distances hardly matter: H selects the widest text, inc the narrowest.
    """
    n, d = texts["vec"].shape
    block = max(1, min(16, PAIRS // d))  # images
    image = {name: images[name][:, None] for name in ("vec", "log_var")}
    text = {name: texts[name][None] for name in ("vec", "log_var")}

    measured = inclusion if by == "h" else log_inclusion

    def best(part: slice) -> Tensor:
        parts = []
        for start in range(part.start, part.stop, block):
            these = rows(image, slice(start, min(start + block, part.stop)))
            several = chunks(n, max(1, PAIRS // (block * d)))
            panel = [measured(these, {name: v[:, t] for name, v in text.items()}, eps).sum(-1) for t in several]
            parts.append(torch.cat(panel, 1).argmax(1).cpu())
        return torch.cat(parts)

    parts = list(chunks(len(images["vec"]), TURN * block))
    return torch.cat(list(in_turns(parts, best))).to(images["vec"].device)


def mean_root(empty: Tensor, inclusive: Tensor) -> Tensor:
    """The normalised mean of two roots, [I, D] of [1, D] and [I, D]."""
    return unit(empty + inclusive)


def measure(paths: Tensor, chains: Chains) -> Iterator[tuple[str, float]]:
    """Metrics of paths [I, S], means over images; every retrieved text counts once.

    `precision`: share of the retrieved texts that are in a chain of the image; `recall`: share of the levels of which
    a text was retrieved; `hit`: whether any text of a chain was retrieved.
    """
    precision, recall, hit = [], [], []
    for i, path in enumerate(paths.tolist()):
        retrieved, image_chains = set(path), chains.of(i)
        right = retrieved.intersection(chain(*image_chains))
        levels = [not retrieved.isdisjoint(level) for level in zip(*image_chains, strict=True)]
        precision.append(len(right) / len(retrieved))
        recall.append(sum(levels) / len(levels))
        hit.append(bool(right))
    yield "precision", sum(precision) / len(paths)
    yield "recall", sum(recall) / len(paths)
    yield "hit", sum(hit) / len(paths)


def measure_root(retrieved: Tensor, chains: Chains) -> Iterator[tuple[str, float]]:
    """How often the text nearest to the root of each image, [I], is in a chain of the image.

    `root_recall`: it is the most general text of a chain, our reading of R@1[ROOT] in ProLIP's table 2; `root_hit`: it
    is anywhere in a chain, the other reading.
    """
    image_chains = [(text, chains.of(i)) for i, text in enumerate(retrieved.tolist())]
    yield "root_recall", sum(any(one[0] == text for one in each) for text, each in image_chains) / len(retrieved)
    yield "root_hit", sum(any(text in one for one in each) for text, each in image_chains) / len(retrieved)


def measure_truth(paths: Tensor, chains: Chains, truth: Truth, batch: int = JUDGED) -> Iterator[tuple[str, float]]:
    """As `measure`, but every text that is true of the image is correct, whether in its chains or not.

    `true_precision`: share of the retrieved texts that are true; `true_recall`: share of the levels of which a true
    text was retrieved, from any chain.
    """
    at = chains.levels()
    precision = recall = 0.0
    for part in chunks(len(paths), batch):
        texts = sorted({text for path in paths[part].tolist() for text in path})
        truth_of_text = dict(zip(texts, truth(texts, part), strict=True))
        for i, path in enumerate(paths[part].tolist()):
            retrieved = sorted(set(path))
            right = [text for text in retrieved if bool(truth_of_text[text][i])]
            precision += len(right) / len(retrieved)
            recall += float(at[right].any(0).float().mean())
    yield "true_precision", precision / len(paths)
    yield "true_recall", recall / len(paths)
