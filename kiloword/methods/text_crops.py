"""Text crops: parts of images and captions predict what averaged towers see in the whole of both. Source: COSMOS.

arXiv:2412.01814, and its published code; research/differences.md says what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import ABOVE_0, BELOW_1, BaseSettings, setting
from kiloword.losses.pairs import logsumexp_over_ranks
from kiloword.methods.coca.coca import by_image
from kiloword.methods.method import Component, Contrast, Method, Part, follow
from kiloword.methods.self_distill import check_areas, check_towers, window
from kiloword.methods.sub_captions import sentences_of
from kiloword.model.attention import Packing
from kiloword.model.blocks import CrossAttention
from kiloword.model.heads import Head, Pooling, Scale, Single, unit
from kiloword.model.image import ImageTower, extra
from kiloword.model.model import Model
from kiloword.model.text import TextTower
from kiloword.randomness import Draw
from kiloword.types import (
    Batch,
    Encoded,
    Example,
    Features,
    Fetch,
    Input,
    PairBlocks,
    Pairs,
    TextGroup,
    Texts,
    Total,
    image_shape,
)

CROPS, PARTS = "text_crops_images", "text_crops_texts"  # inputs: uint8 [I, small, 3, H, W]; texts


@dataclass(frozen=True, kw_only=True)
class TextCropSettings(BaseSettings):
    """Parts of images and captions, and the teacher. Numbers are those of the published training script."""

    weight: float = setting(1.0, "weight of the loss", 0)
    parts: int = setting(6, "sentences of an image's captions, each a text that the student reads", 1, 64)
    small: int = setting(6, "small crops of an image, which the student sees", 1, 64)
    area: float = setting(0.4, "largest share of an image's area in a small crop", 0.01, BELOW_1)
    least: float = setting(0.05, "smallest share of an image's area in a small crop", 0.01, BELOW_1)
    momentum: float = setting(0.999, "of the teacher's average; with batches of 4096, 0.99", 0, BELOW_1)
    heads: int = setting(8, "heads of the attention to words and patches; must divide the embedding size", 1)
    scale: float = setting(1 / 0.07, "initial scale of the cosines, which is learned", ABOVE_0, 100)


def text_crops(method: Method, settings: TextCropSettings) -> Method:
    """Add the loss, which costs passes of both towers. Raises: ValueError for a method that it does not fit."""
    check_areas(settings.least, settings.area)

    def crops(example: Example, fetch: Fetch, draw: Draw) -> Tensor:
        """Windows of the batch's image, so that they fit its captions where a transform composed it."""
        draws = (draw.other(f"text crops {n}") for n in range(settings.small))
        return torch.stack([window(example.image, settings.least, settings.area, one) for one in draws])

    def parts(example: Example, fetch: Fetch, draw: Draw) -> Sequence[str]:
        """Sentences of the captions; where they are too few, none is taken twice more often than another."""
        sentences = sentences_of(example.captions) or example.captions[:1]
        order = draw.rng("text parts").permutation(len(sentences)).tolist()
        return [sentences[order[k % len(order)]] for k in range(settings.parts)]

    contrast = settings.weight, Part(TextCropsContrast, settings)
    inputs = {CROPS: Input(crops, image_shape(settings.small)), PARTS: Input(parts)}
    return method.plus(contrasts={"text_crops": contrast}, inputs=inputs)


def _towers(images: nn.Module, texts: nn.Module, pooling: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"image_tower": images, "text_tower": texts, "pooling": pooling})


class CrossPool(nn.Module):
    """Vectors [..., D] that attend to tokens [..., W] of the other side, plus what they find."""

    def __init__(self, dim: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Linear(width, dim)
        self.norm_query, self.norm_key = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = CrossAttention(dim, heads, dim)

    def keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens, dense [I, N, W] or packed [S, W]."""
        return self.attention.keys(self.norm_key(self.tokens(tokens)))

    def forward(
        self, vec: Tensor, keys: tuple[Tensor, Tensor], packing: Packing | None, packing_k: Packing | None
    ) -> Tensor:
        """Unit vectors of `vec`: dense [I, A, D], or packed [n, D], with the number of each image."""
        return unit(vec + self.attention(self.norm_query(vec), keys, packing, packing_k))


class TextCropsContrast(Contrast):
    """All views of the student against the teacher's images and captions; the mean over pairs of views of InfoNCE."""

    def __init__(self, config: ModelConfig, settings: TextCropSettings) -> None:
        super().__init__()
        check_towers("text-crops", config.image, config.text.trunk)
        self.settings, self.extra = settings, extra(config.image)
        self.teacher = _towers(ImageTower(config.image), TextTower(config.text), Single(config)).requires_grad_(False)
        self.from_words = CrossPool(config.head.dim, config.text.width, settings.heads)
        self.from_patches = CrossPool(config.head.dim, config.image.width, settings.heads)
        self.head = Head(Pooling(), scale=Scale(settings.scale, limit=100))

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        """Rows: views of images, captions, their parts; columns: images and captions of the teacher.

        "view" of a row and "group" of a column: what is normalised together; "weight": that of a pair is the product
        of its row's and its column's.
        """
        caption, part, position = batch.image_of_text, batch.inputs.texts(PARTS).image_of_text, batch.position
        images, captions, parts = self._views(model, batch, encoded)
        views, n = images.shape[1], self.settings.parts
        per_caption = 1 / torch.searchsorted(caption, _rows(caption, len(batch) + 1)).diff()[caption].to(images)
        place = _rows(part, len(part)) - torch.searchsorted(part, part)
        image_view = _rows(position, views).repeat(len(batch))
        weights = images.new_full((len(image_view),), 1 / views), per_caption / (n + 1)
        rows = {
            "vec": torch.cat([images.flatten(0, 1), captions, parts]),
            "position": torch.cat([position.repeat_interleave(views), position[caption], position[part]]),
            "view": torch.cat([image_view, torch.full_like(caption, views), views + 1 + place.clamp(max=n - 1)]),
            "weight": torch.cat([*weights, images.new_full((len(part),), 1 / (n + 1))]) / 4,
        }
        teacher: Any = self.teacher
        with torch.no_grad():
            of_images = teacher.pooling.image(teacher.image_tower(model.normalise(batch.images)))
            of_texts = teacher.pooling.text(teacher.text_tower(batch.texts), batch.texts)
        columns = {
            "vec": torch.cat([of_images["vec"], of_texts["vec"]]),
            "position": torch.cat([position, position[caption]]),
            "group": torch.cat([torch.zeros_like(position), torch.ones_like(caption)]),
            "weight": torch.cat([images.new_ones(len(batch)), per_caption]),
        }
        return rows, columns

    def _views(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Tensor, Tensor, Tensor]:
        """Unit vectors of images and their crops [I, 1 + small, D], of captions [T, D], of their parts [T', D]."""
        pooling, crops, host = model.head.pooling, batch.inputs.tensor(CROPS), batch.host
        assert isinstance(pooling, Single)
        of_crops = pooling.image_pool(model.image_tokens(crops.flatten(0, 1))).unflatten(0, crops.shape[:2])
        pooled = torch.cat([pooling.image_pool(encoded.image_tokens)[:, None], of_crops], 1)
        words = self.from_words.keys(encoded.text_tokens)
        packing = Packing.of(by_image(batch.texts, batch))  # the words of all captions of an image as one text
        images = self.from_words(pooling.project_image_tokens(pooled), words, None, packing)
        patches = self.from_patches.keys(encoded.image_tokens[:, self.extra :])
        captions, parts = TextGroup(batch.texts, batch.image_of_text), batch.inputs.texts(PARTS)
        sides = (
            (captions, encoded.text_tokens, host.image_of_text),
            (parts, model.encode_text(parts.texts)[0], host.inputs.texts(PARTS).image_of_text),
        )
        of_captions, of_parts = (
            self.from_patches(
                pooling.project_text_tokens(pooling.text_pool(tokens, group.texts)),
                patches,
                _packed(group.image_of_text, here, len(batch)),
                None,
            )
            for group, tokens, here in sides
        )
        return images, of_captions, of_parts

    def after_step(self, model: Model, step: int, done: float) -> None:
        """Move the teacher towards the student; at step 0 it becomes the student."""
        student = _towers(model.image_tower, model.text_tower, model.head.pooling)
        follow(self.teacher, student, self.settings.momentum if step else 0.0)

    def loss(self, pairs: PairBlocks) -> Total:
        return by_view(pairs, self.settings.small + 1 + 1 + self.settings.parts)


def _rows(like: Tensor, n: int) -> Tensor:
    return torch.arange(n, device=like.device)


def _packed(owner: Tensor, on_host: Tensor, n: int) -> Packing:
    """Texts as the tokens of their image. Args: owner [T], and the same on the host: the row of each text's image."""
    most = int(on_host.new_zeros(n).index_add(0, on_host, torch.ones_like(on_host)).max())
    return Packing.of(Texts(owner, torch.searchsorted(owner, _rows(owner, n + 1)), most))


def by_view(pairs: PairBlocks, views: int) -> Total:
    """Weighted sum of InfoNCE in both directions, over pairs of a view (of rows) and a group (of columns).

    A row is compared with all columns of a group, a column with all rows of a view; annotated pairs are positives.
    With one row of each view and one column of each group for every image, this is the published loss.
    """
    row_sums, column_sums = _sums(pairs, views)

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        weight, view, group = _weight(block), block.images["view"], block.texts["group"]
        row_norm, row_mass = (side[:, rows][group].T for side in row_sums)
        column_norm, column_mass = (side[:, columns][view] for side in column_sums)
        z = block.logits
        values = weight * ((row_norm + column_norm) / 2 - z)
        pull = ((z - row_norm).exp() * row_mass + (z - column_norm).exp() * column_mass) / 2
        return values.sum(1), pull - weight

    return Total(pairs.total(loss), (pairs.row("view") == 0).sum().to(row_sums[0]))


def _weight(block: Pairs) -> Tensor:
    """[i, t]: of annotated pairs, 0 elsewhere."""
    return block.annotated * block.images["weight"][:, None] * block.texts["weight"]


def _sums(pairs: PairBlocks, views: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Log-sum-exps and weights of positives: of rows by group [2, R] each, and, over all ranks, of columns [V, C]."""
    like = pairs.row("vec")
    logs = [like.new_full((n, size), -torch.inf) for n, size in zip((2, views), pairs.shape, strict=True)]
    mass = [torch.zeros_like(x) for x in logs]
    for rows, columns in pairs.blocks():
        block = pairs.block(rows, columns)
        z, weight = block.logits.detach(), _weight(block)
        for side, part, x, w, kind in (
            (0, rows, z.T, weight.T, block.texts["group"]),
            (1, columns, z, weight, block.images["view"]),
        ):
            logs[side][:, part] = torch.logaddexp(logs[side][:, part], _log_sums(x, kind, len(logs[side])))
            mass[side][:, part] += torch.zeros_like(mass[side][:, part]).index_add(0, kind, w)
    return (logs[0], mass[0]), logsumexp_over_ranks(logs[1], mass[1])


def _log_sums(x: Tensor, kind: Tensor, n: int) -> Tensor:
    """[r, c] -> [n, c]: log-sum-exp over the rows of each kind; -inf without any."""
    top = x.new_full((n, x.shape[1]), -torch.inf).scatter_reduce(0, kind[:, None].expand_as(x), x, "amax")
    return torch.zeros_like(top).index_add(0, kind, (x - top[kind]).exp()).log() + top


COMPONENTS = {
    "text-crops": Component(
        "contrasts",
        "parts of images and captions find averaged towers' image and caption",
        TextCropSettings,
        text_crops,
        "caption",
    )
}
