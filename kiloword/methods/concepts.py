"""Noun phrases of captions, compared with images and with the patches that they attend to. Source: arXiv:2603.25722.

The losses are those of the authors' public code of C2LIP (SamsungLabs/concept_centric_clip). Neither has parameters:
the scale and bias are the model's, and the attention is the dot product of the vectors that are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import BaseSettings, setting
from kiloword.data.joins import CaptionTable
from kiloword.distributed.collectives import ranks
from kiloword.losses.pairs import sigmoid_loss
from kiloword.losses.pertext import PerText
from kiloword.methods.method import Component, Method, Part, ScaledContrast, annotated
from kiloword.methods.negatives import content_words
from kiloword.model.heads import Head, Scale, Single, unit
from kiloword.model.image import extra
from kiloword.model.model import Model
from kiloword.randomness import Draw
from kiloword.types import Batch, Encoded, Example, Features, Fetch, Input, PairBlocks, Total

PHRASES = "phrases"  # the input: texts


@dataclass(frozen=True, kw_only=True)
class ConceptSettings(BaseSettings):
    """The phrases, and how much both losses weigh."""

    weight: float = setting(1.0, "weight of the loss of images with phrases (NPC)", 0)
    attended: float = setting(0.01, "weight of the loss of phrases with the patches that they attend to (XAC)", 0)
    most: int = setting(8, "phrases of an image, drawn anew in every epoch where it has more", 1)
    table: str = setting("", "parquet table of key and captions, an image's phrases; without, by a rule of words")


def phrases_of(caption: str) -> list[str]:
    """Runs of content words with nothing but spaces and hyphens between them, each once."""
    spans = list[tuple[int, int]]()
    for word in content_words(caption):
        if spans and not caption[spans[-1][1] : word.start()].strip("- \t\n"):
            spans[-1] = spans[-1][0], word.end()
        else:
            spans.append(word.span())
    return list(dict.fromkeys(caption[first:end] for first, end in spans))


def concepts(method: Method, settings: ConceptSettings) -> Method:
    """Add both losses. Raises: ValueError for a method whose scores are not one cosine with a scale and a bias."""
    if method.uncertainty is not None or method.scale.bias is None:
        raise ValueError(
            f"concepts compares one vector per image and phrase by a sigmoid, but {method.name} has no bias, or an "
            "uncertainty: add +sigmoid, or use siglip."
        )
    table = CaptionTable(settings.table) if settings.table else None

    def make(example: Example, fetch: Fetch, draw: Draw) -> list[str]:
        listed = table.captions(example.key) if table else [p for text in example.captions for p in phrases_of(text)]
        phrases = list(dict.fromkeys(listed)) or example.captions[:1]
        if len(phrases) <= settings.most:
            return phrases
        chosen = draw.rng("phrases").choice(len(phrases), settings.most, replace=False)
        return [phrases[n] for n in sorted(chosen.tolist())]

    contrasts = {"phrases": (settings.weight, Part(PhraseContrast))}
    if settings.attended:
        contrasts["attended_phrases"] = settings.attended, Part(AttendedContrast)
    return method.plus(contrasts=contrasts, inputs={PHRASES: Input(make)})


class PhraseContrast(ScaledContrast):
    """Every image against all phrases of the batch: those of its captions are positives (NPC). Rows carry the bias."""

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        """Images "vec" [I, D + 1], times the scale, and the bias; phrases "vec" [C, D + 1], and ones."""
        columns, (log_scale, bias) = encoded_phrases(model, batch, encoded), model.head.scales()
        vec = encoded.images["vec"]
        rows = torch.cat([log_scale.exp() * vec, bias.expand(len(vec), 1)], 1)
        columns["vec"] = torch.cat([columns["vec"], columns["vec"].new_ones(len(columns["vec"]), 1)], 1)
        return {"vec": rows}, columns

    def loss(self, pairs: PairBlocks) -> Total:
        """Sigmoid loss of all images and phrases, the mean over phrases; 0 where there is none."""
        total = sigmoid_loss(pairs, annotated, reduction="texts")
        return replace(total, count=total.count.clamp_min(1 / ranks()))


class AttendedContrast(PhraseContrast):
    """Every phrase against what it finds among the patches of every image (XAC)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if (pool := config.head.image_pool) in ("attention", "attentional"):
            raise ValueError(
                f"concepts pools each patch alone, which --model.head.image-pool {pool} does not: use map."
            )
        self.extra = extra(config.image)
        self.head = Head(ByPhrase(), scale=Scale(1.0, trained=False))

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        """Images "vec" [I, D], "keys" and "values" [I, P, 1, D], "scale" and "bias" [I, 1]; phrases "vec" [C, D]."""
        columns, (log_scale, bias) = encoded_phrases(model, batch, encoded), model.head.scales()
        pooling = model.head.pooling
        assert isinstance(pooling, Single)
        patches = encoded.image_tokens[:, self.extra :]
        pool, n = pooling.image_pool.map, len(patches)
        alone = patches if pool is None else pool(patches.flatten(0, 1)[:, None]).view_as(patches)
        keys = unit(pooling.project_image_tokens(alone))[:, :, None]
        rows = {"vec": encoded.images["vec"].detach(), "keys": keys}
        return rows | {"scale": log_scale.exp().expand(n, 1), "bias": bias.expand(n, 1)}, columns


class ByPhrase(PerText):
    """Scores a pair by the cosine of a phrase with the mean of patches, weighted by the softmax of their products."""

    @property
    def factor(self) -> float:
        return 1.0

    def output(self, texts: Features) -> Tensor:
        return torch.eye(texts["vec"].shape[1], dtype=texts["vec"].dtype, device=texts["vec"].device)

    def score(self, images: Features, texts: Features) -> Tensor:
        """[i, t], times the scale of each image's row, plus its bias."""
        phrases = {"vec": texts["vec"], "query": texts["vec"][:, None]}
        return images["scale"] * super().score({**images, "values": images["keys"]}, phrases) + images["bias"]


def encoded_phrases(model: Model, batch: Batch, encoded: Encoded) -> Features:
    """The phrases "vec" [C, D] and "position" [C] of their images; they pass the text tower once for both losses."""
    group = batch.inputs.texts(PHRASES)
    vec = encoded.once(PHRASES, lambda: model.encode_text(group.texts)[1]["vec"])
    return {"vec": vec, "position": batch.position[group.image_of_text]}


COMPONENTS = {
    "concepts": Component(
        "contrasts", "noun phrases of captions, and the patches they attend to", ConceptSettings, concepts, "phrase"
    )
}
