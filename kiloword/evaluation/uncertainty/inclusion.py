"""Inclusion of Gaussians compared with inclusion of captions: H, eq. 4 of arXiv:2410.18857."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kiloword.data.scenes.captions import parse
from kiloword.data.scenes.query import follows
from kiloword.evaluation.calibration import groups
from kiloword.evaluation.uncertainty.data import Chain, EncodedData, selected
from kiloword.methods.prolip.gaussian import csd, inclusion
from kiloword.model.encoding import chunks
from kiloword.randomness import key
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher

PAIRS = 4096  # pairs compared at once
MOST = 2000  # largest number of chains to test

Pair = tuple[int, int, int]
"""Indices of two texts (specific, general), and the index of their chain."""


def pairwise(a: Features, b: Features, of: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """H(a in b), summed over dimensions with eps 0, and CSD, of rows `of` [n] of a and `within` [n] of b.

    Returns: [n] double each.
    """
    h, distance = [], []
    for part in chunks(len(of), PAIRS):
        x, y = selected(a, of[part]), selected(b, within[part])
        h.append(inclusion(x, y).double().sum(-1).cpu())
        distance.append(csd(x, y).double().cpu())
    return torch.cat(h), torch.cat(distance)


def matched(data: EncodedData) -> tuple[Tensor, Tensor]:
    """H(image in caption) and CSD of every caption with its image, [T] each; -H is H(caption in image)."""
    assert data.texts is not None
    return pairwise(data.images, data.texts, data.image, torch.arange(len(data.image)))


@dataclass
class Links:
    """Pairs of texts to compare, from N chains."""

    texts: list[str]  # unique
    pairs: dict[str, list[Pair]]  # "chain_3_in_2": a text in the next more general one, ...; "reverse"; "unrelated"
    exact: bool  # ground truth is exact (scenes), else from the chains

    def right(self, pairs: Sequence[Pair]) -> Tensor:
        """Ground truth: whether the second text of each pair includes the first, [n] bool."""
        if self.exact:
            return torch.tensor([_follows(self.texts[a], self.texts[b]) for a, b, _ in pairs])
        links = {(a, b) for name, linked in self.pairs.items() if name.startswith("chain") for a, b, _ in linked}
        return torch.tensor([(a, b) in links or a == b for a, b, _ in pairs])


def links(chains: Sequence[Chain], exact: bool) -> Links:
    """Pairs from at most MOST chains, a random sample. Equal texts of a chain make no pair.

    "chain" has all adjacent levels, "reverse" the same pairs reversed, "unrelated" a text and one of the next more
    general level of another image's chain. Args: exact: the texts are captions of scenes.
    """
    rng = np.random.Generator(np.random.Philox(key("chains", len(chains))))
    index: dict[str, int] = {}
    order = rng.permutation(len(chains))[:MOST].tolist()
    indexed = [(chains[n][0], [index.setdefault(text, len(index)) for text in chains[n][1]]) for n in order]
    pairs: dict[str, list[Pair]] = {}
    for n, ((image, chain), (other, wrong)) in enumerate(zip(indexed, [*indexed[1:], *indexed[:1]], strict=True)):
        for k in range(len(chain) - 1, 0, -1):
            if chain[k] != chain[k - 1]:
                pairs.setdefault(f"chain_{k}_in_{k - 1}", []).append((chain[k], chain[k - 1], n))
            if image != other:
                pairs.setdefault("unrelated", []).append((chain[k], wrong[k - 1], n))
    unrelated = pairs.pop("unrelated", [])
    every = [pair for linked in pairs.values() for pair in linked]
    pairs |= {"chain": every, "reverse": [(b, a, n) for a, b, n in every], "unrelated": unrelated}
    return Links(list(index), pairs, exact)


def _follows(a: str, b: str) -> bool:
    specific, general = parse(a), parse(b)
    assert specific is not None, "captions of scenes can be parsed"
    assert general is not None, "captions of scenes can be parsed"
    return follows(specific, general)


@dataclass
class InclusionAnswers:
    """Inclusion by a model of n pairs, and the ground truth. All [n]."""

    h: Tensor  # double, H(first in second)
    distance: Tensor  # double, CSD
    truth: Tensor  # bool
    held: Tensor  # bool, pairs of the chains used to choose the overlap

    def says(self, overlap: float = math.inf) -> Tensor:
        """The result of `Matcher.includes`."""
        return (self.h > 0) & (self.distance < overlap)


def answers(matcher: Matcher, tested: Links) -> dict[str, InclusionAnswers]:
    """Answers for every non-empty list of pairs."""
    features = matcher.encode_text(tested.texts)
    by_name = {}
    for name, pairs in tested.pairs.items():
        if pairs:
            a, b, n = torch.tensor(pairs).T
            by_name[name] = InclusionAnswers(*pairwise(features, features, a, b), tested.right(pairs), n % 2 == 0)
    return by_name


def inclusion_tests(by_name: Mapping[str, InclusionAnswers]) -> Iterator[tuple[str, float]]:
    """Accuracies, in [0, 1], of predicting that one text includes another if H > 0.

    `inclusion_chain_K_in_J`: a text of level K in that of level J of one chain; `inclusion_chain`: over all of these;
    `inclusion_reverse`: reversed; `inclusion_unrelated`: a text in the more general one of another image's chain, of
    which the share `inclusion_unrelated_true` is true. The sign of H mostly depends on which is wider, so that
    unrelated pairs pass too. For names with `_overlap`, the distance must also be below `inclusion_overlap`, as in
    `Matcher.includes`: it is chosen on every other chain, and the accuracies are those of the rest.
    """
    for name, answer in by_name.items():
        yield f"inclusion_{name}", float((answer.says() == answer.truth).double().mean())
    if "unrelated" not in by_name:
        return
    yield "inclusion_unrelated_true", float(by_name["unrelated"].truth.double().mean())
    overlap = best_overlap([by_name[name] for name in ("chain", "unrelated") if name in by_name])
    yield "inclusion_overlap", overlap
    for name, answer in by_name.items():
        if not bool(answer.held.all()):
            right = (answer.says(overlap) == answer.truth)[~answer.held]
            yield f"inclusion_{name}_overlap", float(right.double().mean())


def best_overlap(answer_lists: Sequence[InclusionAnswers]) -> float:
    """The largest distance at which to accept H > 0, such that most answers of the held pairs are right; 4: any.

    4 is the distance of opposite unit means without variance.
    """
    accepted = [(a.distance[mask], a.truth[mask]) for a in answer_lists for mask in [a.held & (a.h > 0)]]
    distance, truth = (torch.cat(each) for each in zip(*accepted, strict=True))
    values, which, _ = groups(distance)
    gain = torch.zeros_like(values).index_add(0, which, 2 * truth.double() - 1)  # of accepting pairs at this distance
    best = int(torch.cat([gain.new_zeros(1), gain.cumsum(0)]).argmax())
    if best == len(values):
        return max(4.0, 2 * float(values[-1])) if len(values) else 4.0
    return float(values[best]) if best == 0 else float((values[best - 1] + values[best]) / 2)
