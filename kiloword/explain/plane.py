"""Images and texts in the plane of their principal components: `kiloword score MODEL --plane FILE` (ProLIP, Fig. 1).

The projection is linear, so that a Gaussian remains one, with covariance P diag(variances) P^T. Axes are those of the
means; the paper's are those of ten samples of each Gaussian (arXiv:2410.18857, appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.data.images.decode import decode
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.report import Block, Gallery, Page, Plot, Table, Text, Tile, made_by, percent, thumbnail, write_page
from kiloword.types import Features

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kiloword.api import Matcher

STDS = 2  # standard deviations, of the ellipses
CORNERS = 48  # of an ellipse
MOST = 200  # images and texts of a page, at most
_INTRO = (
    "Near points are alike to the model. A dot is a text, a square an image; an ellipse around it reaches "
    f"{STDS} standard deviations to each side, where the model has Gaussians: the wider, the less certain.\n\n"
    "The axes are the two directions in which the points of this page vary most, so that planes of two models cannot "
    "be compared point by point, only by what lies near what."
)


@dataclass(frozen=True)
class Projection:
    """M points in a plane."""

    means: Tensor  # [M, 2]
    spread: Tensor | None  # [M, 2, 2] covariances
    share: Tensor  # [2] of the means' variance


def project(parts: Sequence[Features]) -> Projection:
    """Features of several kinds, one after the other, in the plane of their means' two principal components.

    The sign of an axis is arbitrary: its largest entry is made positive.
    """
    means = torch.cat([part["vec"].double().cpu() for part in parts])
    means = means - means.mean(0)
    _, values, axes = torch.linalg.svd(means, full_matrices=True)
    axes = axes[:2] * axes[:2].gather(1, axes[:2].abs().argmax(1, keepdim=True)).sign()  # [2, D]
    squares = torch.nn.functional.pad(values.square(), (0, 2))
    spread = None
    if all("log_var" in part for part in parts):
        variances = torch.cat([part["log_var"].double().cpu() for part in parts]).exp()
        spread = torch.einsum("ad,nd,bd->nab", axes, variances, axes)
    return Projection(means @ axes.T, spread, squares[:2] / squares.sum().clamp_min(torch.finfo(squares.dtype).tiny))


def outline(mean: Tensor, spread: Tensor) -> list[tuple[float, float]]:
    """Points STDS standard deviations from the mean [2] of a Gaussian with covariance [2, 2]."""
    variance, axes = torch.linalg.eigh(spread)
    turns = 2 * math.pi * torch.arange(CORNERS, dtype=axes.dtype) / CORNERS
    circle = torch.stack([turns.cos(), turns.sin()])  # [2, CORNERS]
    points = mean[:, None] + STDS * axes * variance.clamp_min(0).sqrt() @ circle
    return [(x, y) for x, y in points.T.tolist()]


def write_plane(path: Path, models: Mapping[str, Matcher], images: Sequence[Path], texts: Sequence[str]) -> None:
    """Write a page with the same images and texts in a plane of each model.

    Errors: ValueError for fewer than 2 or more than MOST points, and where the file cannot be written.
    """
    count = len(images) + len(texts)
    if not 2 <= count <= MOST:
        raise ValueError(f"--plane got {count} images and texts: expected 2 to {MOST} in all.")
    names = [f"image {n + 1}" for n in range(len(images))], [f"text {n + 1}" for n in range(len(texts))]
    files = (
        (name, file, decode(read_whole(file, "it", MAX_IMAGE))) for name, file in zip(names[0], images, strict=True)
    )
    small = Gallery([Tile(thumbnail(image, 160), [f"{name}: {file.name}"]) for name, file, image in files], columns=6)
    points: list[Block] = [small, Table(list(zip(names[1], texts, strict=True)), ["", "text"])]
    planes = {name: _plane(matcher, images, texts, [*names[0], *names[1]]) for name, matcher in models.items()}
    write_page(path, Page("Images and texts in a plane", _INTRO, {"The points": points, **planes}, made_by()))


def _plane(matcher: Matcher, images: Sequence[Path], texts: Sequence[str], names: Sequence[str]) -> list[Block]:
    parts = [matcher.encode_image(list(images))] if images else []
    parts += [matcher.encode_text(list(texts))] if texts else []
    plane, n = project(parts), len(images)
    rings = [] if plane.spread is None else list(map(outline, plane.means, plane.spread))

    def draw(axes: Axes) -> None:
        for kind, marker, colour, part in (("images", "s", "C0", slice(n)), ("texts", "o", "C1", slice(n, None))):
            points = plane.means[part]
            axes.scatter(points[:, 0], points[:, 1], 16, colour, marker=marker, label=kind if len(points) else None)
            for ring in rings[part]:
                axes.fill(*zip(*ring, strict=True), facecolor=colour, edgecolor=colour, alpha=0.2, linewidth=1)
        for name, point in zip(names, plane.means.tolist(), strict=True):
            axes.annotate(name, point, (4, 3), textcoords="offset points", fontsize=8)
        across, up = (f"component {n}, {percent(s)} of the variance" for n, s in enumerate(plane.share.tolist(), 1))
        axes.set(xlabel=across, ylabel=up)

    below = "This model has no Gaussians: everything is a point."
    if plane.spread is not None:
        sums = torch.cat([matcher.uncertainty(part).double().cpu() for part in parts]).tolist()
        each = ", ".join(f"{name} {value:#.3g}" for name, value in zip(names, sums, strict=True))
        below = f"Uncertainty (sum of variances): {each}."
    return [Plot(draw, f"{n} images and {len(texts)} texts in a plane", height=4), Text(below)]
