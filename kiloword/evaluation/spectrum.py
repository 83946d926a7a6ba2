"""The task `spectrum`: singular values of the covariance of image features (arXiv:2405.00740, figure 5)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kiloword.config.settings import Nothing
from kiloword.data.reading import EvalBatch
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.task import Findings, Inputs
from kiloword.methods.llip import OneVector
from kiloword.model.encoding import inference
from kiloword.model.heads import Single
from kiloword.model.image import extra
from kiloword.model.model import Model
from kiloword.report import Plot


def run(inputs: Inputs, options: Nothing) -> Findings:
    """Yield `effective_rank`, `dimensions`, `vectors` and every `singular_value@k`, k from 1, the largest first.

    The vectors are outputs of the image tower that the head reads: one per mixture token, or per pooled image, as in
    arXiv:2110.09348.
    """
    model = inputs.matcher.model

    def encode(part: EvalBatch) -> Tensor:
        with inference(model):
            tokens = model.image_tokens(part.images.to(model.device))
            return tower_output(model, tokens).flatten(0, 1).cpu()

    vectors, spread = covariance(per_batch(inputs, encode))
    if vectors < 2:
        raise ValueError(f"{inputs.source.name} has {vectors} usable vector: a covariance needs 2 or more.")
    values = torch.linalg.eigvalsh(spread).flip(0).clamp(min=0)
    yield "effective_rank", effective_rank(values)
    yield "dimensions", float(len(values))
    yield "vectors", float(vectors)
    yield from ((f"singular_value@{k}", value) for k, value in enumerate(values.tolist(), start=1))
    if inputs.page:
        above = values[values > 1e-12 * values[0]].tolist()

        def draw(axes: Any) -> None:
            axes.semilogy(range(1, len(above) + 1), above)
            axes.set(xlabel="rank", ylabel="singular value")

        yield Plot(draw, "singular values of the covariance by rank, those above rounding")


def covariance(parts: Iterable[Tensor]) -> tuple[int, Tensor]:
    """Number of vectors, and their covariance [W, W] in double precision, from parts [n, W]."""
    count, first, sums, products = 0, None, torch.zeros(()), torch.zeros(())
    for part in parts:
        x = part.double()
        first = x.mean(0) if first is None else first  # shifted, so that a mean far from zero does not cancel digits
        x = x - first
        count, sums, products = count + len(x), sums + x.sum(0), products + x.T @ x
    return count, (products - sums.outer(sums) / count) / max(count - 1, 1)


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of singular values scaled to sum to 1 (Roy and Vetterli, 2007); 0 where all are 0."""
    total = float(values.sum())
    return math.exp(float(torch.special.entr(values / total).sum())) if total > 0 else 0.0


def tower_output(model: Model, tokens: Tensor) -> Tensor:
    """Tower outputs that the head uses, from tokens [I, E + P, W]: [I, N, W], N 1 or the number of mixture tokens."""
    pooling = model.head.pooling
    if isinstance(pooling, OneVector):
        return tokens[:, : pooling.read]
    if isinstance(pooling, Single):
        pooled: Tensor = pooling.image_pool(tokens)
        return pooled[:, None]
    mixture = extra(model.config.image) - int(model.config.image.uncertainty_token)
    return tokens[:, :mixture] if mixture else tokens
