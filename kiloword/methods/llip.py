"""Llip: mixture tokens become image features separately for every text. Source: arXiv:2405.00740."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import ABOVE_0, BaseSettings, setting
from kiloword.losses.pertext import PerText, check_heads, weights
from kiloword.methods import siglip
from kiloword.methods.method import Component, Method, Part
from kiloword.model.blocks import Init
from kiloword.model.heads import Pooling, Single, unit
from kiloword.model.image import extra, grid
from kiloword.model.pooling import TextPool, at_least_float
from kiloword.types import Features, Texts


@dataclass(frozen=True, kw_only=True)
class ContextualSettings(BaseSettings):
    """How mixture tokens become an image's features."""

    k: int = setting(16, "number of mixture tokens; the paper uses 1 to 128, mostly 64, class token included", 1)
    pool: Literal["contextual", "first", "average", "learned_average"] = setting(
        "contextual", "contextual: a vector per image and text; others: per image"
    )
    heads: int = setting(8, "heads of the attention from texts to tokens; must divide the embedding size", 1)
    temperature: float = setting(5.0, "temperature of that attention; the paper: 5, in ablations 8 and 1", ABOVE_0)
    temperature_mode: Literal["multiply", "divide"] = setting(
        "multiply", "logits t q.k / sqrt(d) (section 7), or q.k / t (eq. 1)"
    )
    per_token_projections: bool = setting(False, "separate key and value projections per mixture token")
    patch_keys: bool = setting(False, "mix the patches too (appendix B.3)")
    per_patch_projections: bool = setting(False, "with both: separate projections per patch, too")
    norms: bool = setting(False, "layer norms of keys, values and queries, as the authors' largest models have")
    form: Literal["auto", "direct", "gram"] = setting("auto", "computation of the exact score; auto: the cheaper")


@dataclass(frozen=True, kw_only=True)
class Settings(ContextualSettings, siglip.Settings):
    """Mixture tokens and their pooling, and the logit before training."""


def preset(settings: Settings) -> Method:
    method, summary = mixed(siglip.preset(settings), settings), "tokens mixed for every text, sigmoid over all pairs"
    return replace(method, name="llip", source="arXiv:2405.00740", summary=summary)


def mixed(method: Method, settings: ContextualSettings) -> Method:
    """Replace the pooling of a method by mixture tokens and theirs; scale, bias and uncertainty stay."""
    kinds = {"contextual": Contextual, "learned_average": LearnedAverage}
    return replace(method, pooling=Part(kinds.get(settings.pool, OneVector), settings))


def with_tokens(config: ModelConfig, settings: ContextualSettings) -> ModelConfig:
    """The configuration with K mixture tokens in place of the class token and of the pooling."""
    image = replace(config.image, class_token=False, extra_tokens=settings.k)
    return replace(config, image=image, head=replace(config.head, image_pool="mean"))  # which nothing reads


class OneVector(Single):
    """Baselines of the paper: the tower has K extra tokens; the first one, or the mean of all, is the image vector."""

    towers = staticmethod(with_tokens)

    def __init__(self, config: ModelConfig, settings: ContextualSettings) -> None:
        super().__init__(config)  # whose pool of images is unused, and has no parameters
        self.read = 1 if settings.pool == "first" else settings.k

    def image(self, tokens: Tensor) -> Features:
        return {"vec": unit(self.project_image_tokens(tokens[:, : self.read].mean(1)))}


class Attention(Pooling):
    """Base of both attention poolings: keys and values of tokens, output and text projections.

    No layer has a bias: softmax would give a bias of the keys no gradient.
    """

    towers = staticmethod(with_tokens)
    unread = ("image_projection", "image_projection_bias", "text_projection_bias")

    def __init__(self, config: ModelConfig, settings: ContextualSettings) -> None:
        super().__init__()
        self.dim, self.width, self.settings = config.head.dim, config.image.width, settings
        check_heads(settings.heads, self.dim)
        self.extra = extra(config.image)
        patches = grid(config.image) ** 2 if settings.per_patch_projections else 1  # which share one
        matrices = settings.k + patches * settings.patch_keys if settings.per_token_projections else 1
        self.key, self.value = (nn.Parameter(torch.empty(matrices, self.width, self.dim)) for _ in range(2))
        self.key_norm, self.value_norm, self.query_norm = (
            nn.LayerNorm(self.dim) if settings.norms else nn.Identity() for _ in range(3)
        )
        self.out = nn.Linear(self.dim, self.dim, bias=False)  # W_O
        self.text_pool = TextPool(config.text, config.head.text_pool)
        self.text_projection = nn.Linear(config.text.width, self.dim, bias=False)  # W_T

    @property
    def factor(self) -> float:
        """Factor of the products of queries and keys."""
        t, size = self.settings.temperature, self.dim // self.settings.heads
        return float(t / size**0.5 if self.settings.temperature_mode == "multiply" else 1 / t)

    def keys_and_values(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [I, N, M, d] each, of tower tokens [I, E + P, W]; N = K, or K + P with `patch_keys`."""
        mixed = tokens[:, : self.settings.k]
        if self.settings.patch_keys:
            mixed = torch.cat([mixed, tokens[:, self.extra :]], 1)
        keys, values = self.key_norm(_project(mixed, self.key)), self.value_norm(_project(mixed, self.value))
        shape = (*mixed.shape[:2], self.settings.heads, -1)
        return keys.view(shape), values.view(shape)

    def project_image_tokens(self, tokens: Tensor) -> Tensor:
        """[..., W] -> [..., D]: value projection, then W_O; with projections per token, their mean."""
        out: Tensor = self.out(self.value_norm(tokens @ self.value.mean(0)))
        return out

    def initial(self) -> dict[str, Init]:
        """Queries and keys start so that the logits of eq. 1 have a standard deviation of one.

        Tower tokens have entries of size one, so that width^-1/2 keeps that size, also for q.k / sqrt(d). At a
        temperature of 5 the attention would otherwise start nearly one-hot and hardly learn. Queries and keys share
        the correction equally, so that both learn at the same rate.
        """
        return {
            "key": Init(std=self.shrink * self.width**-0.5),
            "value": Init(std=self.width**-0.5),
            "out.weight": Init(std=self.dim**-0.5),
            "text_projection.weight": Init(std=self.text_projection.in_features**-0.5),
        }

    @property
    def shrink(self) -> float:
        """Factor of the deviations of initial queries and keys."""
        return float((self.factor * (self.dim // self.settings.heads) ** 0.5) ** -0.5)


def _project(mixed: Tensor, matrices: Tensor) -> Tensor:
    """[I, N, W] -> [I, N, D], by a matrix [M, W, D] per token; of fewer, the last one has all tokens from there on."""
    if len(matrices) == 1:
        return mixed @ matrices[0]
    own = len(matrices) if len(matrices) == mixed.shape[1] else len(matrices) - 1
    projected = torch.einsum("ikw,kwd->ikd", mixed[:, :own], matrices[:own])
    return torch.cat([projected, mixed[:, own:] @ matrices[-1]], 1) if own < mixed.shape[1] else projected


class Contextual(Attention, PerText):
    """Mixes the tokens of every image for every text by the query of the text (arXiv:2405.00740, eq. 1 and 2).

    "vec" of an image does not depend on a text: it is the mean of the values, used for shortlists and without gradient
    in training. The query is computed from the text feature before projection.
    """

    def __init__(self, config: ModelConfig, settings: ContextualSettings) -> None:
        super().__init__(config, settings)
        self.query = nn.Linear(config.text.width, self.dim, bias=False)  # W_Q
        self.form = settings.form

    def image(self, tokens: Tensor) -> Features:
        keys, values = self.keys_and_values(tokens)
        mean = values.detach().mean(1).flatten(1)
        return {"vec": unit(self.out(mean)).detach(), "keys": keys, "values": values}

    def text(self, tokens: Tensor, texts: Texts) -> Features:
        pooled = self.text_pool(tokens, texts)
        query = self.query_norm(self.query(pooled)).view(pooled.shape[0], self.settings.heads, -1)
        return {"vec": unit(self.project_text_tokens(pooled)), "query": query}

    def output(self, texts: Features) -> Tensor:
        return self.out.weight

    def initial(self) -> dict[str, Init]:
        return {**super().initial(), "query.weight": Init(std=self.shrink * self.query.in_features**-0.5)}


class LearnedAverage(Attention):
    """One learned query for all texts, so that an image is one vector (arXiv:2405.00740, section 5)."""

    one_vector = True
    text = Single.text

    def __init__(self, config: ModelConfig, settings: ContextualSettings) -> None:
        super().__init__(config, settings)
        self.query = nn.Parameter(torch.empty(self.dim))

    def image(self, tokens: Tensor) -> Features:
        """[I, N, W] to "vec" [I, D]: mixture tokens averaged by learned queries, whatever the text."""
        keys, values = self.keys_and_values(tokens)
        query = self.query_norm(self.query).view(1, self.settings.heads, -1)
        phi = weights(at_least_float(keys), at_least_float(query), self.factor)[:, 0]  # [I, M, N]
        mixed = torch.einsum("imn,inmd->imd", phi.to(values.dtype), values).flatten(1)
        return {"vec": unit(self.out(mixed))}

    def initial(self) -> dict[str, Init]:
        return {**super().initial(), "query": Init(std=self.shrink)}


COMPONENTS = {
    "contextual": Component("pooling", "mixture tokens, mixed separately for every text", ContextualSettings, mixed)
}
