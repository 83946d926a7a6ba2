"""The exact gradient of one big batch from any number of micro-batches, for every method.

The first pass computes the features of all micro-batches without a graph and the gradients of the pair losses by these
features. The second pass runs each micro-batch again and backpropagates its share. (GradCache, arXiv:2101.06983.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from kiloword.distributed.collectives import ranks, sum_over_ranks
from kiloword.distributed.device import PrecisionContext
from kiloword.losses.pairs import PairInputs
from kiloword.training.engine import replicated
from kiloword.training.learner import Learner, Replay
from kiloword.types import Batch, Features


def backward(
    learner: Learner, micro: list[Batch], precision: PrecisionContext = nullcontext, reducer: nn.Module | None = None
) -> dict[str, Tensor]:
    """Compute the gradient of the mean loss over the `micro` of all ranks; it is added to the parameters' `grad`.

    Args: micro: this rank's share of the batch as one or more micro-batches; precision: a context for the towers
    (autocast); reducer: `engine.replicated(learner)`, to reuse over many steps.
    Returns: mean losses over the global batch, detached: "loss", "pair" and every term.
    """
    reducer = reducer or replicated(learner)
    counts = learner.counts(micro)
    totals: dict[str, Tensor] = {}
    replays: Sequence[dict[str, Replay] | None] = [None] * len(micro)
    if len(micro) > 1 and learner.contrasts:
        totals, replays = _pair_gradients(learner, micro, precision)
    reports = []
    for n, (batch, replay) in enumerate(zip(micro, replays, strict=True), 1):
        reducer.require_backward_grad_sync = n == len(micro)  # type: ignore[assignment]  # read by DDP
        with precision():
            out = reducer(batch, counts, replay)
        out["loss"].backward()
        reports.append(_complete(learner, out, totals, len(micro)))
    names = list(reports[0])
    local = torch.stack([torch.stack([report[n].detach() for report in reports]).sum() for n in names])
    means = sum_over_ranks(local)
    means[names.index("loss")] /= ranks()
    return dict(zip(names, means, strict=True))


def _complete(learner: Learner, report: dict[str, Tensor], totals: dict[str, Tensor], parts: int) -> dict[str, Tensor]:
    """Replace the surrogates of a micro-batch by its part of the totals over all micro-batches."""
    if not totals:
        return report
    shares, weights = {name: value / parts for name, value in totals.items()}, learner.weights()
    missing = [weights[name] * (shares[name] - report[name].detach()) for name in learner.contrasts if name in weights]
    loss = report["loss"].detach() + torch.stack(missing).sum() * ranks()
    return {**report, **shares, "loss": loss}


def _pair_gradients(
    learner: Learner, micro: list[Batch], precision: PrecisionContext
) -> tuple[dict[str, Tensor], list[dict[str, Replay]]]:
    """The pair losses (and metrics reported with them) over all micro-batches, and the gradients each one replays."""
    with torch.no_grad(), precision():
        parts = [learner.inputs(b, learner.encode(b)) for b in map(learner.above_trunks, micro)]
    joined = {name: PairInputs.join([part[name] for part in parts]) for name in parts[0]}
    losses = learner.pair_losses(joined)
    replays: list[dict[str, Replay]] = [{} for _ in micro]
    for name, inputs in joined.items():
        weights = [p for p in learner.contrasts[name].head.parameters() if p.requires_grad]  # type: ignore[union-attr]
        each = _replays(losses[name], inputs, weights, [part[name] for part in parts])
        for replayed, replay in zip(replays, each, strict=True):
            replayed[name] = replay
    return {name: value.detach() for name, value in losses.items()}, replays


def _replays(loss: Tensor, joined: PairInputs, weights: Sequence[Tensor], parts: list[PairInputs]) -> Iterator[Replay]:
    """The gradients of one pair loss for every micro-batch. Args: weights: of its head."""
    floats = [[k for k, v in f.items() if v.requires_grad] for f in (joined.rows, joined.columns)]
    leaves = [joined.rows[k] for k in floats[0]] + [joined.columns[k] for k in floats[1]]
    gradients = torch.autograd.grad(loss, [*leaves, *weights], allow_unused=True)
    by_row = dict(zip(floats[0], gradients, strict=False))
    by_column = dict(zip(floats[1], gradients[len(floats[0]) :], strict=False))
    by_weight = [(p, g / len(parts)) for p, g in zip(weights, gradients[len(leaves) :], strict=True) if g is not None]
    rows = _split(by_row, [len(part.rows["vec"]) for part in parts])
    columns = _split(by_column, [len(part.columns["vec"]) for part in parts])
    return (Replay(i, t, by_weight) for i, t in zip(rows, columns, strict=True))


def _split(gradients: Mapping[str, Tensor | None], sizes: list[int]) -> list[Features]:
    """Rows of every gradient for each micro-batch; features that the score did not use are omitted."""
    rows = {k: torch.split(g, sizes) for k, g in gradients.items() if g is not None}
    return [{k: parts[n] for k, parts in rows.items()} for n in range(len(sizes))]
