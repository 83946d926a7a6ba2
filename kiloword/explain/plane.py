"""Images and texts in the plane of their principal components: `kiloword score MODEL --plane FILE` (ProLIP, Fig. 1).

The projection is linear, so that a Gaussian remains one, with covariance P diag(variances) P^T. Axes are those of the
means; the paper's are those of ten samples of each Gaussian (arXiv:2410.18857, appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.data.images.decode import decode
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.report import Block, Gallery, Page, Plot, Tile, made_by, thumbnail, write_page
from kiloword.types import Features

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kiloword.api import Matcher

STDS = 2  # standard deviations, of the ellipses
CORNERS = 48  # of an ellipse
INTRO = (
    f"A dot is a text, a square an image; an ellipse reaches {STDS} standard deviations of a Gaussian to each side. "
    "The axes are those in which the points of this page vary most: planes of two models differ in them."
)


def project(parts: Sequence[Features]) -> tuple[Tensor, list[Tensor]]:
    """Features of several kinds, one after the other, in the plane of their means' two principal components.

    Returns: means of M points [M, 2], and their covariances [2, 2], none without Gaussians.
    """
    means = torch.cat([part["vec"].double().cpu() for part in parts])
    means = means - means.mean(0)
    axes = torch.linalg.svd(means, full_matrices=True).Vh[:2]  # [2, D]
    spread = list[Tensor]()
    if all("log_var" in part for part in parts):
        variances = torch.cat([part["log_var"].double().cpu() for part in parts]).exp()
        spread = list(torch.einsum("ad,nd,bd->nab", axes, variances, axes))
    return means @ axes.T, spread


def outline(mean: Tensor, spread: Tensor) -> Tensor:
    """Points [CORNERS, 2], STDS standard deviations from the mean [2] of a Gaussian with covariance [2, 2]."""
    variance, axes = torch.linalg.eigh(spread)
    turns = 2 * math.pi * torch.arange(CORNERS, dtype=axes.dtype) / CORNERS
    circle = torch.stack([turns.cos(), turns.sin()])  # [2, CORNERS]
    points: Tensor = mean + STDS * (axes * variance.clamp_min(0).sqrt() @ circle).T
    return points


def write_plane(path: Path, models: Mapping[str, Matcher], images: Sequence[Path], texts: Sequence[str]) -> None:
    """Write a page with the same images and texts in a plane of each model."""
    pictures = [decode(read_whole(file, "it", MAX_IMAGE)) for file in images]
    tiles = [Tile(thumbnail(one, 160), [file.name]) for one, file in zip(pictures, images, strict=True)]
    sections: dict[str, Sequence[Block]] = {"The images": [Gallery(tiles, columns=6)]}
    names = [*(file.name for file in images), *texts]
    for model, matcher in models.items():
        means, spread = project([matcher.encode_image(list(images)), matcher.encode_text(list(texts))])

        def draw(axes: Axes, means: Tensor = means, spread: list[Tensor] = spread) -> None:
            for n, (name, point) in enumerate(zip(names, means.tolist(), strict=True)):
                marker, colour = ("s", "C0") if n < len(images) else ("o", "C1")
                axes.plot(*point, marker, color=colour, markersize=4)
                axes.annotate(name[:40], point, (4, 3), textcoords="offset points", fontsize=8)
                if spread:
                    axes.fill(*outline(means[n], spread[n]).T, facecolor=colour, edgecolor=colour, alpha=0.2)

        sections[model] = [Plot(draw, f"{len(names)} images and texts in a plane", height=4)]
    write_page(path, Page("Images and texts in a plane", INTRO, sections, made_by()))
