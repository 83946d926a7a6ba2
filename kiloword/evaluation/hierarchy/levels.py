"""Whether what is more general is more uncertain, and includes what is more specific: chains of texts, of images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kiloword.evaluation.calibration import defined, spearman
from kiloword.evaluation.features import chunks
from kiloword.evaluation.hierarchy.chains import Chains
from kiloword.evaluation.hierarchy.paths import JUDGED, Truth
from kiloword.methods.prolip.gaussian import inclusion, log_inclusion, rows
from kiloword.types import Features

TRIES = 8  # next chains that may give a wrong text


def kendall(values: Tensor) -> Tensor:
    """Kendall's tau of values [C, L] against 0, 1, ..., L - 1, each row alone: [C] double, from -1 to 1.

    tau-a: of all pairs, those in order less those in reverse. Equal values count 0, the expected value over every order
    of theirs, so a constant gives 0; without ties it is scipy's.
    """
    n = values.shape[1]
    i, j = torch.triu_indices(n, n, 1, device=values.device)
    return (values[:, j] - values[:, i]).sign().double().mean(1)


def uncertainty_by_level(uncertainty: Tensor) -> Iterator[tuple[str, float]]:
    """Of the uncertainty of chains [C, L], general to specific.

    `chain_uncertainty@k`: mean at level k; `chain_uncertainty_spearman`: of level and uncertainty over everything, left
    out where all are equal; `chain_uncertainty_order`: mean Kendall's tau within a chain of its levels and how certain
    they are, 1: it always falls. A text that stands in several chains counts in each, unlike in `eval uncertainty`.
    """
    for k, value in enumerate(uncertainty.double().mean(0).tolist()):
        yield f"chain_uncertainty@{k}", value
    level = torch.arange(uncertainty.shape[1]).expand_as(uncertainty)
    yield from defined("chain_uncertainty_spearman", spearman(level.flatten(), uncertainty.flatten()))
    yield "chain_uncertainty_order", float(kendall(-uncertainty).mean())


def included(features: Features, specific: Tensor, general: Tensor) -> Tensor:
    """H(specific in general), the sum over dimensions with eps 0: [n] of two lists [n] of rows."""
    return inclusion(rows(features, specific), rows(features, general)).sum(-1)


def inclusion_by_level(features: Features, chains: Tensor, others: Tensor) -> Iterator[tuple[str, float]]:
    """Share of chains [C, L] whose level k is included in level k - 1, by two tests.

    `inclusion_h@k`: H(k in k - 1) > 0. Its sign mostly says which of the two is wider, so a wide text far away passes
    too. `inclusion_inc@k`: inc(k, k - 1) is greater than inc(k, o) for a wrong text o of level k - 1, others[C, k - 1];
    -1: there is none, and the chain is left out. Equal texts are left out of both. Chance is one half.
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
            own_parent, wrong = (log_inclusion(child, rows(features, p[tested])).sum(-1) for p in (general, other))
            yield (
                f"inclusion_inc@{k}",
                float(((own_parent > wrong).double() + 0.5 * (own_parent == wrong).double()).mean()),
            )


def wrong_texts(chains: Chains, truth: Truth | None = None, batch: int = JUDGED) -> Tensor:
    """For every chain and level a text of that level that is wrong of its image, [C, L]; -1: none was found.

    It is taken from the next chains that have one: it stands in no chain of the image and, where the truth is known,
    is not true of it. Without the truth some are right all the same.
    """
    places, wrong = chains.places, torch.full_like(chains.places, -1)
    for shift in range(1, min(TRIES, len(places) - 1) + 1):
        other = places.roll(-shift, 0)
        free = (wrong < 0) & ~_own_texts(chains, other)
        wrong = torch.where(free if truth is None else free & ~_true(chains, other, truth, batch), other, wrong)
    return wrong


def _own_texts(chains: Chains, texts: Tensor) -> Tensor:
    """Whether texts [C, L] stand in some chain of the same image: [C, L] bool."""
    n = len(chains.texts)
    stands = (chains.image[:, None] * n + chains.places).flatten()
    return torch.isin(chains.image[:, None] * n + texts, stands)


def _true(chains: Chains, texts: Tensor, truth: Truth, batch: int) -> Tensor:
    """Whether texts [C, L] are true of the chains' images: [C, L] bool."""
    parts = []
    for part in chunks(len(chains.rows), batch):
        here = (chains.image >= part.start) & (chains.image < part.stop)
        unique_texts, place = torch.unique(texts[here], return_inverse=True)
        parts.append(truth(unique_texts.tolist(), part)[place, (chains.image[here] - part.start)[:, None]])
    return torch.cat(parts)
