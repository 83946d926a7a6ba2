"""Images and texts in the plane of their principal components: `kiloword score MODEL --plane FILE` (ProLIP, Fig. 1).

The projection is linear, so that a Gaussian remains one, with covariance P diag(variances) P^T. Axes are those of the
means; the paper's are those of ten samples of each Gaussian (arXiv:2410.18857, appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kiloword.data.images.decode import decode
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.report import Html, made_by, page, percent, scatter, section, signed, table, tiles, write
from kiloword.report.images import Pixels
from kiloword.report.plots import Dots
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.api import Matcher

STDS = 2  # standard deviations, of the ellipses
CORNERS = 48  # of an ellipse
MOST = 200  # images and texts of a page, at most
SIDE = 160  # largest side of an image of the page, in pixels
_INTRO = (
    "Near points are alike to the model. A dot is a text, a square an image; an ellipse around it reaches "
    f"{STDS} standard deviations to each side, where the model has Gaussians: the wider, the less certain. A wide "
    "ellipse of a text that covers those of images says that the text is true of all of them.\n\n"
    "The axes are the two directions in which the points of this page vary most, each with a scale of its own, so that "
    "planes of two models cannot be compared point by point, only by what lies near what."
)


@dataclass(frozen=True)
class Projection:
    """M points in a plane."""

    means: Tensor  # [M, 2]
    spread: Tensor | None  # [M, 2, 2] covariances
    share: Tensor  # [2] of the means' variance


def project(parts: Sequence[Features]) -> Projection:
    """Features of several kinds, one after the other, in the plane of their means' two principal components."""
    several = [{name: part[name].double().cpu() for name in ("vec", "log_var") if name in part} for part in parts]
    means = torch.cat([part["vec"] for part in several])
    axes, share = principal(means)
    spread = None
    if all("log_var" in part for part in several):
        variances = torch.cat([part["log_var"] for part in several]).exp()
        spread = torch.einsum("ad,nd,bd->nab", axes, variances, axes)
    return Projection((means - means.mean(0)) @ axes.T, spread, share)


def principal(points: Tensor) -> tuple[Tensor, Tensor]:
    """Two axes [2, D] along which points [N, D] vary most, their shares of the variance [2].

    The sign of an axis is arbitrary: its largest entry is made positive.
    """
    _, values, axes = torch.linalg.svd(points - points.mean(0), full_matrices=True)
    axes = axes[:2]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    squares = torch.nn.functional.pad(values.square(), (0, 2))
    return axes * largest.sign(), squares[:2] / squares.sum().clamp_min(torch.finfo(squares.dtype).tiny)


def outline(mean: Tensor, spread: Tensor) -> list[tuple[float, float]]:
    """Points STDS standard deviations from the mean [2] of a Gaussian with covariance [2, 2]."""
    variance, axes = torch.linalg.eigh(spread)
    turns = 2 * math.pi * torch.arange(CORNERS, dtype=axes.dtype) / CORNERS
    circle = torch.stack([turns.cos(), turns.sin()])  # [2, CORNERS]
    points = mean[:, None] + STDS * axes * variance.clamp_min(0).sqrt() @ circle
    return [(x, y) for x, y in points.T.tolist()]


def components(share: Tensor) -> list[str]:
    """The labels of both axes."""
    return [f"component {n + 1}, {percent(s)} of the variance" for n, s in enumerate(share.tolist())]


def write_plane(path: Path, models: Mapping[str, Matcher], images: Sequence[Path], texts: Sequence[str]) -> None:
    """Write a page with the same images and texts in a plane of each model.

    Raises: ValueError for fewer than 2 or more than MOST points, and where the file cannot be written.
    """
    count = len(images) + len(texts)
    if not 2 <= count <= MOST:
        raise ValueError(f"--plane got {count} images and texts: expected 2 to {MOST} in all.")
    names = [str(n + 1) for n in range(len(images))], [_letters(n) for n in range(len(texts))]
    planes = [_plane(name, matcher, images, texts, names) for name, matcher in models.items()]
    small = [(_small(path), f"{name}: {path.name}") for name, path in zip(names[0], images, strict=True)]
    key = [tiles(small)] if small else []
    rows = [[name, text] for name, text in zip(names[1], texts, strict=True)]
    points = section("The points", *key, table(rows, ["", "text"]))
    html = page("Images and texts in a plane", _INTRO, [points, *planes])
    write(path, signed(html, made_by()))


def _plane(
    name: str, matcher: Matcher, images: Sequence[Path], texts: Sequence[str], names: tuple[list[str], list[str]]
) -> tuple[str, Html]:
    parts = [matcher.encode_image(list(images))] if images else []
    parts += [matcher.encode_text(list(texts))] if texts else []
    plane = project(parts)
    points = [(x, y) for x, y in plane.means.tolist()]
    rings = [] if plane.spread is None else list(map(outline, plane.means, plane.spread))
    n = len(images)
    sides = {"images": Dots([], points[:n], rings[:n]), "texts": Dots(points[n:], [], rings[n:])}
    drawn = {side: dots for side, dots in sides.items() if dots.dots or dots.squares}
    labels = [(x, y, label) for (x, y), label in zip(points, [*names[0], *names[1]], strict=True)]
    below = "This model has no Gaussians: everything is a point."
    if plane.spread is not None:
        sums = torch.cat([matcher.uncertainty(part).double().cpu() for part in parts]).tolist()
        uncertainties = ", ".join(f"{label} {value:#.3g}" for (*_, label), value in zip(labels, sums, strict=True))
        below = f"Uncertainty (sum of variances): {uncertainties}."
    return section(name, scatter(drawn, *components(plane.share), labels=labels), below)


def _letters(n: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    return ascii_uppercase[n] if n < 26 else _letters(n // 26 - 1) + ascii_uppercase[n % 26]


def _small(path: Path) -> Pixels:
    image = Image.fromarray(decode(read_whole(path, "it", MAX_IMAGE)))
    image.thumbnail((SIDE, SIDE))
    return np.asarray(image)
