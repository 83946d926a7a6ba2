"""Self-distillation: small crops of an image predict what an averaged tower sees in large ones.

Source: SILC (arXiv:2310.13355); the loss is DINO's (arXiv:2104.14294, eq. 1 to 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import AugmentConfig, ModelConfig
from kiloword.config.settings import ABOVE_0, BELOW_1, BaseSettings, setting
from kiloword.distributed.collectives import sum_over_ranks
from kiloword.methods.method import Component, Method, Part, Ramp, Term, follow
from kiloword.model.blocks import Init
from kiloword.model.heads import unit
from kiloword.model.image import ImageTower
from kiloword.model.model import Model
from kiloword.model.resnet import check_vit
from kiloword.randomness import Draw
from kiloword.types import Batch, Encoded, Example, Fetch, Input, image_shape

CROPS = "self_distill_crops"  # the input: uint8 [I, global + local, 3, H, W]


@dataclass(frozen=True, kw_only=True)
class SelfDistill(BaseSettings):
    """Crops, teacher and loss. Temperatures and the centre's momentum are DINO's."""

    small: int = setting(4, "small crops of an image, which the student sees", 1, 64)
    least: float = setting(0.05, "smallest share of an image's area in a small crop", 0.01, BELOW_1)
    weight: float = setting(1.0, "weight of the loss", 0)
    rise: float = setting(0.0, "share of the run in which the weight rises from 0; 0: constant", 0, BELOW_1)
    large: int = setting(2, "large crops of an image, which the teacher sees", 1, 16)
    area: float = setting(0.4, "share of an image's area that parts small crops from large", 0.01, BELOW_1)
    momentum: float = setting(0.996, "of the teacher's average; rises to 1 by a cosine", 0, BELOW_1)
    temperature: float = setting(0.1, "divides the student's cosines", ABOVE_0)
    teacher_temperature: float = setting(0.04, "divides the teacher's cosines", ABOVE_0)
    centre: float = setting(0.9, "momentum of the centre of the teacher's cosines", 0, BELOW_1)
    prototypes: int = setting(0, "outputs that are compared; 0: 65536, at most 64 times the tower's width", 0)
    hidden: int = setting(0, "width of the projection's two hidden layers; 0: 2048, at most 4 times the tower's", 0)
    dim: int = setting(0, "width before the prototypes; 0: 256, at most the tower's", 0)

    def __post_init__(self) -> None:
        if self.least >= self.area:
            raise ValueError(
                f"small crops have at least {self.least:g} and at most {self.area:g} of an image's area: expected "
                "ascending numbers."
            )


def self_distill(method: Method, settings: SelfDistill) -> Method:
    """Add the loss, whose crops cost passes of the image tower."""
    weight = Ramp(settings.weight, 0, settings.rise) if settings.rise else settings.weight
    large = AugmentConfig(crop=settings.area, flip=0.5)

    def make(example: Example, fetch: Fetch, draw: Draw) -> Tensor:
        crops = [fetch.view(example.row, draw.other(f"large {n}"), large) for n in range(settings.large)]
        for small in (draw.other(f"small {n}") for n in range(settings.small)):
            whole = fetch.view(example.row, small, AugmentConfig(flip=0.5))
            crops.append(window(whole, settings.least, settings.area, small))
        return torch.stack(crops)

    crops = Input(make, image_shape(settings.large + settings.small))
    return method.plus(terms={"self_distill": (weight, Part(SelfDistillTerm, settings))}, inputs={CROPS: crops})


def window(image: Tensor, least: float, most: float, draw: Draw) -> Tensor:
    """A window of an image, uint8 [3, H, H], resized to its size; the window's share of the area is least to most."""
    size = image.shape[-1]
    share, left, top = draw.rng("window").random(3).tolist()
    n = max(1, round(math.sqrt(least + share * (most - least)) * size))
    x, y = (round(at * (size - n)) for at in (left, top))
    part = image[None, :, y : y + n, x : x + n].float()
    scaled = F.interpolate(part, (size, size), mode="bilinear")
    return scaled[0].round().clamp(0, 255).to(torch.uint8)


class DistillHead(nn.Module):
    """Three layers, then cosines with prototypes: [n, W] -> [n, K]. DINO's, without its fixed norm of weights."""

    def __init__(self, width: int, settings: SelfDistill) -> None:
        super().__init__()
        hidden = settings.hidden or min(2048, 4 * width)
        dim = settings.dim or min(256, width)
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, dim)
        )
        self.prototypes = nn.Parameter(torch.empty(settings.prototypes or min(65536, 64 * width), dim))

    def initial(self) -> dict[str, Init]:
        return {"prototypes": Init(std=0.02)}

    def forward(self, x: Tensor) -> Tensor:
        """Cosines [n, K], in single precision also under autocast."""
        vec = unit(self.layers(x))
        with torch.autocast(x.device.type, enabled=False):
            return vec @ unit(self.prototypes).T


class SelfDistillTerm(Term):
    """Cross-entropy of the student's small crops with the teacher's large ones; the mean over pairs of crops."""

    centre: Tensor
    seen: Tensor  # [K + 1]: the sum of the step's teacher outputs, and their number

    def __init__(self, config: ModelConfig, settings: SelfDistill) -> None:
        super().__init__()
        check_vit(config.image, "self-distill")
        if config.image.trunk.name:
            raise ValueError("self-distill averages towers, which cannot stand on a trunk: omit one of both.")
        self.settings = settings
        self.projection = DistillHead(config.image.width, settings)
        self.teacher_tower = ImageTower(config.image).requires_grad_(False)
        self.teacher_projection = DistillHead(config.image.width, settings).requires_grad_(False)
        outputs = len(self.projection.prototypes)
        self.register_buffer("centre", torch.zeros(outputs))
        self.register_buffer("seen", torch.zeros(outputs + 1), persistent=False)

    def count(self, batch: Batch) -> int:
        """The number of pairs of a large and a small crop."""
        return len(batch) * self.settings.large * self.settings.small

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        """The sum over pairs of crops."""
        crops = batch.inputs.tensor(CROPS)
        large, small = crops[:, : self.settings.large], crops[:, self.settings.large :]
        target = self._taught(model, large)
        tokens = model.image_tokens(small.flatten(0, 1))
        cosines = self.projection(tokens.mean(1)).unflatten(0, small.shape[:2])
        return cross_entropy(target, cosines / self.settings.temperature)

    @torch.no_grad()
    def _taught(self, model: Model, large: Tensor) -> Tensor:
        """The teacher's probabilities [I, G, K]; adds its cosines to those of which the centre is made."""
        tokens = self.teacher_tower(model.normalise(large.flatten(0, 1)))
        cosines = self.teacher_projection(tokens.mean(1))
        self.seen[:-1] += cosines.sum(0)
        self.seen[-1] += len(cosines)
        sharp: Tensor = (cosines - self.centre) / self.settings.teacher_temperature
        return sharp.softmax(1).unflatten(0, large.shape[:2])  # type: ignore[no-any-return, no-untyped-call]

    @torch.no_grad()
    def after_step(self, model: Model, step: int, done: float) -> None:
        """Move the teacher towards the student, and the centre towards the mean of the teacher's outputs of the step.

        At step 0 the teacher becomes the student. Raises: ValueError for an adapted tower.
        """
        settings = self.settings
        momentum = 1 - (1 - settings.momentum) * (math.cos(math.pi * done) + 1) / 2 if step else 0.0
        follow(self.teacher_tower, model.image_tower, momentum)
        follow(self.teacher_projection, self.projection, momentum)
        counted = sum_over_ranks(self.seen)
        mean = counted[:-1] / counted[-1]
        usable = mean.isfinite().all() & (counted[-1] > 0)
        if step:
            self.centre.copy_(torch.where(usable, self.centre.lerp(mean, 1 - settings.centre), self.centre))
        self.seen.zero_()


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """Sum over large crops g and small crops l of -p_g log q_l. Args: target [I, G, K]; logits [I, L, K]."""
    return -(target.sum(1) * logits.log_softmax(2).sum(1)).sum()


COMPONENTS = {
    "self-distill": Component("terms", "small crops predict an averaged tower's large crops", SelfDistill, self_distill)
}
