"""Matryoshka: the pair loss of a method on prefixes of its vectors too. Source: arXiv:2205.13147."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import BaseSettings, setting
from kiloword.losses.pairs import weighted
from kiloword.methods.method import Component, Method
from kiloword.model.heads import Head, Pooling, Scale, unit
from kiloword.types import Features, PairBlocks, Positives, Total


@dataclass(frozen=True, kw_only=True)
class Settings(BaseSettings):
    """The prefixes: half of the embedding, a quarter, and so on."""

    smallest: int = setting(8, "size of the smallest prefix, which is halved from the whole embedding", 1)
    weight: float = setting(1.0, "weight of the pair loss of each prefix; that of the whole embedding is 1", 0)


def prefixes(dim: int, smallest: int) -> list[int]:
    """Sizes below `dim`, halved until `smallest`, descending. Raises: ValueError when there is none."""
    smaller = [dim >> n for n in range(1, dim.bit_length()) if dim >> n >= smallest]
    if not smaller:
        raise ValueError(f"embeddings of {dim} have no prefix of at least {smallest}: expected at most {dim // 2}.")
    return smaller


class Prefix(Pooling):
    """Scores features by the cosine of the first `dim` numbers of their vectors."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def score(self, images: Features, texts: Features) -> Tensor:
        """[i, t], the cosine of the prefixes, normalised again."""
        return unit(images["vec"][:, : self.dim]) @ unit(texts["vec"][:, : self.dim]).T


def matryoshka(method: Method, settings: Settings) -> Method:
    """Add the pair loss on prefixes, each with a scale and a bias of its own. Raises: ValueError for other poolings."""
    if method.prepare or method.uncertainty or method.further:
        raise ValueError(
            f"{method.name} scores pairs by more than the cosine of one vector each, of which matryoshka would take "
            "prefixes, or prepares its one head before training."
        )

    def heads(config: ModelConfig, scale: Scale) -> dict[str, Head]:
        dims = prefixes(config.head.dim, settings.smallest)
        return {f"prefix_{dim}": Head(Prefix(dim), scale=scale) for dim in dims}

    def loss(pairs: PairBlocks, positives: Positives) -> Total:
        dims = prefixes(pairs.row("vec").shape[1], settings.smallest)
        parts = ((settings.weight, pairs.beside(f"prefix_{dim}"), method.pair_loss) for dim in dims)
        return weighted(positives, (1.0, pairs, method.pair_loss), *parts)

    return replace(method, further=(*method.further, heads), pair_loss=loss)


WHOLE = "whole"  # the head of a second loss of whole images and texts


def whole_head(config: ModelConfig, scale: Scale) -> dict[str, Head]:
    """A head for the cosine of the vectors "vec" of whole images and texts."""
    return {WHOLE: Head(Pooling(), scale=scale)}


COMPONENTS = {
    "matryoshka": Component("further", "the pair loss on prefixes of the embedding too", Settings, matryoshka, "text")
}
