"""Spectrum of image features: `kiloword eval spectrum MODEL` (arXiv:2405.00740, section 7, figure 5).

The singular values of the covariance of the image tower's outputs, as in arXiv:2110.09348, which measures collapse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kiloword.data.reading import EvalBatch
from kiloword.distributed.sharing import share
from kiloword.errors import count
from kiloword.evaluation.features import per_batch
from kiloword.evaluation.spectrum import Of, SpectrumTaskOptions
from kiloword.evaluation.task import Inputs, Results, Values
from kiloword.methods.llip import OneVector
from kiloword.model.encoding import inference
from kiloword.model.heads import Single
from kiloword.model.image import extra
from kiloword.randomness import key
from kiloword.report import line_plot, metric_table, page, section
from kiloword.types import Record, Skipped, Source

if TYPE_CHECKING:
    from kiloword.model.model import Model

VALUE = "singular_value@"
NOTHING = 1e-12  # of the largest singular value: what is smaller is rounding


def run(inputs: Inputs, options: SpectrumTaskOptions) -> Values:
    """Yield `effective_rank`, `dimensions`, `vectors` and every `singular_value@k`, k from 1, the largest first.

    `of`: "tower", as in the paper: the outputs of the image tower that the head uses, [W] each, one vector per
    mixture token or per pooled image; "vec": the images' "vec" [D]. `samples` images are drawn by the data set's
    fingerprint; all if there are fewer.
    """
    source, samples = inputs.source, options.samples
    if samples < 2:
        raise ValueError(f"--samples is {samples}: expected at least 2 images for a spectrum.")
    subset = _SpectrumRows(source, _chosen(source, samples))
    vectors, spread = covariance(_outputs(inputs, subset, options.of))
    if vectors < 2:
        raise ValueError(f"{source.name} has {count(vectors, 'usable vector')}: expected at least 2 for a spectrum.")
    values = singular_values(spread)
    yield "effective_rank", effective_rank(values)
    yield "dimensions", float(len(values))
    yield "vectors", float(vectors)
    for k, value in enumerate(values.tolist(), start=1):
        yield f"{VALUE}{k}", value


def covariance(parts: Iterable[Tensor]) -> tuple[int, Tensor]:
    """Number of vectors, and their covariance [W, W] in double precision, from parts [n, W].

    Without parts: 0, and a scalar.
    """
    count, first, sums, products = 0, None, torch.zeros(()), torch.zeros(())
    for part in parts:
        x = part.double()
        first = x.mean(0) if first is None else first  # shifted, so that a mean far from zero does not cancel digits
        x = x - first
        count, sums, products = count + len(x), sums + x.sum(0), products + x.T @ x
    if not count:
        return 0, products
    return count, (products - sums.outer(sums) / count) / max(count - 1, 1)


def singular_values(spread: Tensor) -> Tensor:
    """Singular values [W] of a covariance [W, W], the largest first; at least 0."""
    values: Tensor = torch.linalg.eigvalsh(spread)
    return values.flip(0).clamp(min=0)


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of singular values scaled to sum to 1 (Roy and Vetterli, 2007): from 1 to their number.

    Args: values: of the covariance, the squares of those of the centred features. Returns 0 where all are 0.
    """
    total = float(values.sum())
    return math.exp(float(torch.special.entr(values / total).sum())) if total > 0 else 0.0


def _chosen(source: Source, samples: int) -> list[int]:
    """A sample of rows of a source, ascending: the same for every model."""
    rng = np.random.Generator(np.random.Philox(key(source.fingerprint, "spectrum")))
    return sorted(rng.permutation(len(source))[:samples].tolist())


class _SpectrumRows:
    """A subset of the rows of a source."""

    def __init__(self, source: Source, rows: Sequence[int]) -> None:
        self.source, self.rows = source, rows
        self.name, self.fingerprint = source.name, source.fingerprint

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, row: int) -> Record:
        return self.source.record(self.rows[row])


def _outputs(inputs: Inputs, subset: _SpectrumRows, of: Of) -> Iterator[Tensor]:
    """Vectors of all images in batches: [n, W], or [n, D] for "vec"."""
    model = inputs.matcher.model
    device = model.device

    def encode(part: EvalBatch) -> Tensor:
        with inference(model):
            tokens, features = model.encode_image(part.images.to(device))
            vectors = features["vec"] if of == "vec" else tower_output(model, tokens).flatten(0, 1)
            return vectors if share()[1] == 1 else vectors.cpu()

    skipped: list[Skipped] = []
    for vectors in per_batch(replace(inputs, source=subset, skipped=skipped), encode):
        yield vectors.to(device)
    inputs.skipped.extend(replace(one, row=subset.rows[one.row]) for one in skipped)


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


def report(metrics: Results, data: str, shown: Mapping[str, Any]) -> str:
    """HTML page with the spectra of several models. Args: metrics: model -> metrics from `run`."""
    spectra = {model: _spectrum(values) for model, values in metrics.items()}
    relative = {model: [(k, v / points[0][1]) for k, v in points] for model, points in spectra.items()}
    names = {"effective_rank": "effective rank", "dimensions": "dimensions", "vectors": "vectors"}
    ranks = metric_table(metrics, names, form=".1f", whole=["dimensions", "vectors"], by_model=True, first="model")
    return page(
        "Spectrum of image features",
        f"Singular values of the covariance of image features on {data}. The slower they fall, the more directions "
        "the features use. The effective rank is exp of the entropy of the values scaled to sum to 1.",
        [
            section("Effective rank", ranks),
            section("Singular values", line_plot(spectra, "rank", "singular value", log_y=True)),
            section(
                "Against the largest",
                line_plot(relative, "rank", "share of the largest", log_y=True),
                f"Values below {NOTHING:.0e} of the largest are rounding errors, and omitted.",
            ),
        ],
    )


def _spectrum(values: Mapping[str, float]) -> list[tuple[float, float]]:
    """Points (k, value) above rounding."""
    points = [(float(n.removeprefix(VALUE)), v) for n, v in values.items() if n.startswith(VALUE)]
    above_rounding = [(k, v) for k, v in points if v > NOTHING * points[0][1]]
    if not above_rounding:
        raise ValueError("all images have the same features: there is no spectrum to draw")
    return above_rounding
