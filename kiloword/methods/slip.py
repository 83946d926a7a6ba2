"""SLIP: CLIP, and SimCLR's contrast of two views of each image. Source: arXiv:2112.12750, arXiv:2002.05709."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kiloword.config.recipes import AugmentConfig, ModelConfig
from kiloword.config.settings import ABOVE_0, BaseSettings, setting
from kiloword.losses.pairs import summed, sums_of
from kiloword.methods import clip
from kiloword.methods.method import Component, Contrast, Method, Part
from kiloword.model.heads import Head, Pooling, Scale, unit
from kiloword.model.model import Model
from kiloword.randomness import Draw
from kiloword.types import Batch, Encoded, Example, Features, Fetch, Input, PairBlocks, Pairs, Total, image_shape

VIEWS = "simclr_views"  # the input: uint8 [I, 2, 3, H, W]


@dataclass(frozen=True, kw_only=True)
class SimclrSettings(BaseSettings):
    """The contrast of views, with the values of SLIP's published code."""

    weight: float = setting(1.0, "weight of the contrast of views", 0)
    temperature: float = setting(0.1, "divides the cosines of views", ABOVE_0)
    hidden: int = setting(0, "width of the projection's two hidden layers; 0: 4096, at most 8 times the tower's", 0)
    dim: int = setting(256, "embedding size of views", 1)
    crop: float = setting(0.08, "smallest share of an image's area in a view", 0.001, 1)


@dataclass(frozen=True, kw_only=True)
class Settings(SimclrSettings, clip.Settings):
    """The settings of CLIP and of the contrast of views."""


def preset(settings: Settings) -> Method:
    method = simclr(clip.preset(settings), settings)
    return replace(method, name="slip", source="arXiv:2112.12750", summary="CLIP, and two views of an image alike")


def simclr(method: Method, settings: SimclrSettings) -> Method:
    """Add the contrast of two views of each image, which cost two more passes of the image tower.

    Raises: ValueError for a method that has it.
    """
    augment = AugmentConfig(crop=settings.crop, flip=0.5, jitter=0.8, grayscale=0.2, blur=0.5)

    def views(example: Example, fetch: Fetch, draw: Draw) -> Tensor:
        return torch.stack([fetch.view(example.row, draw.other(f"simclr {n}"), augment) for n in range(2)])

    contrast = settings.weight, Part(SimclrContrast, settings)
    return method.plus(contrasts={"simclr": contrast}, inputs={VIEWS: Input(views, image_shape(2))})


class SimclrContrast(Contrast):
    """Every view against all views of all images: the other view of its image is its positive."""

    def __init__(self, config: ModelConfig, settings: SimclrSettings) -> None:
        super().__init__()
        width = config.image.width
        hidden = settings.hidden or min(4096, 8 * width)
        self.projection = nn.Sequential(
            nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(),
            nn.Linear(hidden, settings.dim),
        )  # fmt: skip
        self.head = Head(Pooling(), scale=Scale(1 / settings.temperature, trained=False))

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        """Both views of every image as rows and columns: "vec" [2 I, dim]; "place" [2 I] tells a view from others."""
        tokens = model.image_tokens(batch.inputs.tensor(VIEWS).flatten(0, 1))
        vec = unit(self.projection(model.head.pooling.pooled(tokens)))  # [2 I, dim]
        position = batch.position.repeat_interleave(2)
        of_image = torch.arange(2, device=position.device).repeat(len(batch))
        side = {"vec": vec, "position": position, "place": 2 * position + of_image}
        return side, side

    def loss(self, pairs: PairBlocks) -> Total:
        return nt_xent(pairs)


def nt_xent(pairs: PairBlocks) -> Total:
    """SimCLR's loss: softmax over all columns but the row itself ("place"), mean over rows. arXiv:2002.05709, eq. 1."""

    def masked(block: Pairs) -> tuple[Tensor, Tensor]:
        """Logits without each row itself, and its positives, bool [i, t]."""
        itself = block.images["place"][:, None] == block.texts["place"]
        return block.logits.masked_fill(itself, -torch.inf), block.annotated & ~itself

    sums = sums_of(pairs, lambda block: ([masked(block)[0]], []))[0][0]

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        logits, positive = masked(block)
        values = torch.where(positive, sums[rows, None] - block.logits, 0).sum(1)
        return values, (logits - sums[rows, None]).exp() - positive.to(logits)

    return summed(pairs, loss, pairs.shape[0])


COMPONENTS = {
    "simclr": Component("contrasts", "two augmented views of an image are alike (SimCLR)", SimclrSettings, simclr)
}
