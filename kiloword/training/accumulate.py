"""The exact gradient of one big batch from any number of micro-batches, for every method.

The first pass computes the features of all micro-batches without a graph and the gradient of the pair loss by these
features. The second pass runs each micro-batch again and backpropagates its share. (GradCache, arXiv:2101.06983.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from kiloword.config.recipes import NO_MICRO
from kiloword.distributed.collectives import ranks, sum_over_ranks
from kiloword.distributed.device import PrecisionContext
from kiloword.losses.pairs import learns
from kiloword.model.resnet import batch_norms, batch_statistics
from kiloword.training.engine import Reducer
from kiloword.training.learner import Learner, Replay
from kiloword.types import Batch, Features


def backward(
    learner: Learner, micro: list[Batch], precision: PrecisionContext = nullcontext, reducer: Reducer | None = None
) -> dict[str, Tensor]:
    """Compute the gradient of the mean loss over the `micro` of all ranks; it is added to the parameters' `grad`.

    Args: micro: this rank's share of the batch as one or more micro-batches; precision: a context for the towers
    (autocast); reducer: the learner's reducer, to reuse over many steps.
    Returns: mean losses over the global batch, detached: "loss", "pair" and every term.
    Raises: ValueError for several micro-batches of a model with batch norm.
    """
    if len(micro) > 1 and any(norm.weight.requires_grad for norm in batch_norms(learner).values()):
        raise ValueError(NO_MICRO)
    with batch_statistics(learner):
        return _backward(learner, micro, precision, reducer or Reducer(learner, overlap=False))


def _backward(learner: Learner, micro: list[Batch], precision: PrecisionContext, reducer: Reducer) -> dict[str, Tensor]:
    counts = learner.counts(micro)
    totals: dict[str, Tensor] = {}
    replays: Sequence[Replay | None] = [None] * len(micro)
    if len(micro) > 1 and learner.method.pair_weight:
        totals, replays = _pair_gradients(learner, micro, precision)
    reducer.begin()
    reports = []
    for n, (batch, replay) in enumerate(zip(micro, replays, strict=True), 1):
        if n == len(micro):
            reducer.last()
        with precision():
            out = learner(batch, counts, replay)
        out["loss"].backward()
        reports.append(_complete(learner, out, totals, len(micro)))
    reducer.finish()
    names = list(reports[0])
    local = torch.stack([torch.stack([report[n].detach() for report in reports]).sum() for n in names])
    means = sum_over_ranks(local)
    means[names.index("loss")] /= ranks()
    return dict(zip(names, means, strict=True))


def _complete(learner: Learner, report: dict[str, Tensor], totals: dict[str, Tensor], parts: int) -> dict[str, Tensor]:
    """Replace the surrogate "pair" of a micro-batch by its part of the totals over all micro-batches."""
    if not totals:
        return report
    shares = {name: value / parts for name, value in totals.items()}
    missing = shares["pair"] - report["pair"].detach()
    loss = report["loss"].detach() + learner.method.pair_weight * missing * ranks()
    return {**report, **shares, "loss": loss}


def _pair_gradients(
    learner: Learner, micro: list[Batch], precision: PrecisionContext
) -> tuple[dict[str, Tensor], list[Replay]]:
    """The pair loss (and metrics reported with it) over all micro-batches, and the gradients each one replays."""
    with torch.no_grad(), precision():
        inputs = [learner.pair_inputs(learner.encode(b), b) for b in micro]
    images, texts = (_concatenate([pair[side] for pair in inputs]) for side in (0, 1))
    losses = learner.pair_loss(images, texts)
    pair = losses["pair"]
    weights: list[Tensor] = [p for p in learner.model.head.parameters() if p.requires_grad]
    floats = [[k for k, v in f.items() if v.requires_grad] for f in (images, texts)]
    leaves = [images[k] for k in floats[0]] + [texts[k] for k in floats[1]]
    gradients = torch.autograd.grad(pair, [*leaves, *weights], allow_unused=True)
    by_image = dict(zip(floats[0], gradients, strict=False))
    by_text = dict(zip(floats[1], gradients[len(floats[0]) :], strict=False))
    by_weight = [(p, g / len(inputs)) for p, g in zip(weights, gradients[len(leaves) :], strict=True) if g is not None]
    image_parts = _split(by_image, [len(i["vec"]) for i, _ in inputs])
    text_parts = _split(by_text, [len(t["vec"]) for _, t in inputs])
    replays = [Replay(i, t, by_weight) for i, t in zip(image_parts, text_parts, strict=True)]
    return {name: value.detach() for name, value in losses.items()}, replays


def _concatenate(parts: list[Features]) -> Features:
    """The features of all micro-batches, as leaves of a new graph."""
    whole = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    return {k: v.requires_grad_() if learns(k, v) else v for k, v in whole.items()}


def _split(gradients: Mapping[str, Tensor | None], sizes: list[int]) -> list[Features]:
    """Rows of every gradient for each micro-batch; features that the score did not use are omitted."""
    rows = {k: torch.split(g, sizes) for k, g in gradients.items() if g is not None}
    return [{k: parts[n] for k, parts in rows.items()} for n in range(len(sizes))]
