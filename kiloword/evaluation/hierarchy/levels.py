"""Uncertainty and inclusion by level, from general to specific, of chains of texts or images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kiloword.evaluation.calibration import defined, spearman
from kiloword.evaluation.hierarchy.chains import Chains
from kiloword.evaluation.hierarchy.paths import JUDGED, Truth
from kiloword.methods.prolip.gaussian import inclusion, log_inclusion, rows
from kiloword.model.encoding import chunks
from kiloword.types import Features, Source

TRIES = 8  # number of next chains searched for a wrong text


@dataclass
class ImageLevels:
    """G images of a source at L levels, the last one the whole image."""

    source: Source
    rows: list[list[int]]  # [G, L]
    uncertainty: Tensor  # [G, L] sums of variances
    whole: Tensor  # [G, L - 1] H(whole image in level k), summed over dimensions


def kendall(values: Tensor) -> Tensor:
    """Kendall's tau of each row of values [C, L] against 0, 1, ..., L - 1: [C] double, from -1 to 1.

    tau-a: share of pairs in order minus share in reverse order. Ties count 0, their expected value over all orders, so
    a constant gives 0; without ties it equals scipy's.
    """
    n = values.shape[1]
    i, j = torch.triu_indices(n, n, 1, device=values.device)
    return (values[:, j] - values[:, i]).sign().double().mean(1)


def uncertainty_by_level(uncertainty: Tensor) -> Iterator[tuple[str, float]]:
    """Metrics of the uncertainty of chains [C, L], general to specific.

    `chain_uncertainty@k`: mean at level k; `chain_uncertainty_spearman`: correlation of level and uncertainty over all
    chains, omitted if all are equal; `chain_uncertainty_order`: mean Kendall's tau of level and certainty within a
    chain, 1: uncertainty always falls. A text in several chains counts in each, unlike in `eval uncertainty`.
    """
    for k, value in enumerate(uncertainty.double().mean(0).tolist()):
        yield f"chain_uncertainty@{k}", value
    level = torch.arange(uncertainty.shape[1]).expand_as(uncertainty)
    yield from defined("chain_uncertainty_spearman", spearman(level.flatten(), uncertainty.flatten()))
    yield "chain_uncertainty_order", float(kendall(-uncertainty).mean())


def included(features: Features, specific: Tensor, general: Tensor) -> Tensor:
    """H(specific in general), summed over dimensions, with eps 0: [n], for two lists [n] of rows."""
    return inclusion(rows(features, specific), rows(features, general)).sum(-1)


def inclusion_by_level(features: Features, chains: Tensor, others: Tensor) -> Iterator[tuple[str, float]]:
    """Share of chains [C, L] whose level k is included in level k - 1, by two tests.

    `inclusion_h@k`: H(k in k - 1) > 0. The sign mostly depends on which of the two is wider, so that distant wide texts
    pass too. `inclusion_inc@k`: inc(k, k - 1) > inc(k, o) for a wrong text o of level k - 1, others[C, k - 1]; chains
    with -1 have none and are omitted. Both omit equal texts. Chance level is one half.
    """
    for k in range(1, chains.shape[1]):
        specific, general, other = chains[:, k], chains[:, k - 1], others[:, k - 1]
        differ = specific != general
        if bool(differ.any()):
            h = included(features, specific[differ], general[differ])
            yield f"inclusion_h@{k}", float((h > 0).double().mean())
        tested = differ & (other >= 0)
        if bool(tested.any()):
            child = rows(features, specific[tested])
            parent, wrong = (log_inclusion(child, rows(features, p[tested])).sum(-1) for p in (general, other))
            right = (parent > wrong).double() + 0.5 * (parent == wrong).double()
            yield f"inclusion_inc@{k}", float(right.mean())


def wrong_texts(chains: Chains, truth: Truth | None = None, batch: int = JUDGED) -> Tensor:
    """For every chain and level a text of that level that is wrong for its image, [C, L]; -1: none.

    It is taken from one of the next chains: it is in no chain of the image and, with ground truth, not true of it.
    Without ground truth some texts are true by chance.
    """
    places, wrong = chains.places, torch.full_like(chains.places, -1)
    of_image = chains.image[:, None] * len(chains.texts)  # tells equal texts of several images apart
    for shift in range(1, min(TRIES, len(places) - 1) + 1):
        other = places.roll(-shift, 0)
        free = (wrong < 0) & ~torch.isin(of_image + other, of_image + places)
        wrong = torch.where(free if truth is None else free & ~_true(chains, other, truth, batch), other, wrong)
    return wrong


def _true(chains: Chains, texts: Tensor, truth: Truth, batch: int) -> Tensor:
    """Whether texts [C, L] are true of the chains' images: [C, L] bool."""
    parts = []
    for part in chunks(len(chains.rows), batch):
        here = (chains.image >= part.start) & (chains.image < part.stop)
        unique_texts, place = torch.unique(texts[here], return_inverse=True)
        parts.append(truth(unique_texts.tolist(), part)[place, (chains.image[here] - part.start)[:, None]])
    return torch.cat(parts)
