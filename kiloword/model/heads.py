"""From tower tokens to features to scores: a pooling and, optionally, an uncertainty, which are independent."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.distributed.device import device_type
from kiloword.model.blocks import Init
from kiloword.model.pooling import ImagePool, TextPool, at_least_float
from kiloword.types import Features, Texts

BLOCK = {"cpu": 1024, "cuda": 4096}  # rows and columns of pairs scored at once, unless the pooling defines `block`


def unit(x: Tensor) -> Tensor:
    """Normalise [..., D] to norm 1, at least in single precision."""
    return F.normalize(at_least_float(x), dim=-1)


class Pooling(Protocol):
    """How tokens become features, and features a similarity. Implemented as an nn.Module."""

    def image(self, tokens: Tensor) -> Features: ...
    def text(self, tokens: Tensor, texts: Texts) -> Features: ...
    def project_image_tokens(self, tokens: Tensor) -> Tensor: ...
    def project_text_tokens(self, tokens: Tensor) -> Tensor: ...
    def score(self, images: Features, texts: Features) -> Tensor: ...
    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None) -> Features: ...
    def explain(self, images: Features, texts: Features) -> Any: ...


class Uncertainty(Protocol):
    """How features get an uncertainty, and the penalty that it subtracts from similarities."""

    def image(self, tokens: Tensor, pooling: Pooling) -> Features: ...
    def text(self, tokens: Tensor, texts: Texts, pooling: Pooling) -> Features: ...
    def penalty(self, features: Features) -> Tensor: ...
    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None) -> Features: ...


class Head(nn.Module):
    """Pooling and uncertainty, and the scale and bias that turn scores into logits.

    Args: scale: initial scale of scores; bias: initial bias, None: no bias (softmax gives it no gradient); max_scale:
    upper limit of the scale, None: unlimited.
    """

    log_limit: Tensor | None

    def __init__(
        self,
        pooling: Pooling,
        uncertainty: Uncertainty | None = None,
        scale: float = 1 / 0.07,
        bias: float | None = None,
        max_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.uncertainty = uncertainty
        self.log_scale = nn.Parameter(torch.full((1,), torch.nan))  # until `initialise`
        self.rescale(scale, bias, max_scale)

    def rescale(
        self, scale: float, bias: float | None = None, max_scale: float | None = None, distance: bool = False
    ) -> Head:
        """Set other initial values and limit of scale and bias, as a pair loss needs; call before initialisation.

        Args: distance: scale minus the squared distance 2 - 2 score in place of the score.
        Raises: ValueError for a scale or limit that is not positive, or a bias that is NaN or infinite.
        """
        for name, value in (("scale", scale), ("max_scale", max_scale)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value:g}: expected a number above 0.")
        if bias is not None and not math.isfinite(bias):
            raise ValueError(f"bias is {bias:g}: expected a number.")
        self.distance = distance
        self.bias = None if bias is None else nn.Parameter(torch.full((1,), torch.nan))
        self._start = (math.log(scale), bias or 0.0)
        # rounded like the buffer: otherwise the limit would change on resuming in double precision
        self._limit = math.inf if max_scale is None else float(torch.tensor(math.log(max_scale), device="cpu"))
        self.register_buffer("log_limit", None if max_scale is None else torch.tensor([self._limit]))
        return self

    def twin(self, pooling: Any) -> Head:
        """A head whose scale and bias start, and are trained, as those of this one. Args: pooling: with `score`."""
        limit = None if self._limit == math.inf else math.exp(self._limit)
        bias = None if self.bias is None else self._start[1]
        made = Head(pooling).rescale(math.exp(self._start[0]), bias, limit, self.distance)
        made.log_scale.requires_grad_(self.log_scale.requires_grad)
        return made

    def image(self, tokens: Tensor) -> Features:
        """Tokens [I, E + P, W] -> features of images."""
        uncertain = {} if self.uncertainty is None else self.uncertainty.image(tokens, self.pooling)
        return {**self.pooling.image(tokens), **uncertain}

    def text(self, tokens: Tensor, texts: Texts) -> Features:
        """Packed tokens [S, W] -> features of texts."""
        uncertain = {} if self.uncertainty is None else self.uncertainty.text(tokens, texts, self.pooling)
        return {**self.pooling.text(tokens, texts), **uncertain}

    def project_image_tokens(self, tokens: Tensor) -> Tensor:
        """[..., W] -> [..., D], the shared dimension; not normalised."""
        return self.pooling.project_image_tokens(tokens)

    def project_text_tokens(self, tokens: Tensor) -> Tensor:
        """[..., W] -> [..., D], the shared dimension; not normalised."""
        return self.pooling.project_text_tokens(tokens)

    def score(self, images: Features, texts: Features) -> Tensor:
        """[i, t], higher is a better match; at least single precision, under autocast too."""
        with torch.autocast(images["vec"].device.type, enabled=False):
            score = self.pooling.score(images, texts)
            if self.uncertainty is None:
                return score
            return score - self.uncertainty.penalty(images)[:, None] - self.uncertainty.penalty(texts)

    def score_pairs(self, images: Features, texts: Features) -> Tensor:
        """Scores [n] of image i with text i; in one batch if the pooling defines `score_pairs`."""
        pooling_score = getattr(self.pooling, "score_pairs", None)
        if pooling_score is None:
            pairs = (
                [{k: v[[n]] for k, v in side.items()} for side in (images, texts)] for n in range(len(images["vec"]))
            )
            return torch.cat([self.score(*pair)[0] for pair in pairs])
        with torch.autocast(images["vec"].device.type, enabled=False):
            score: Tensor = pooling_score(images, texts)
            if self.uncertainty is None:
                return score
            return score - self.uncertainty.penalty(images) - self.uncertainty.penalty(texts)

    def block(self, images: Features, texts: Features) -> tuple[int, int]:
        """Rows and columns of pairs to score at once; a pooling with expensive pairs defines `block`."""
        pooling_block = getattr(self.pooling, "block", None)
        side = BLOCK.get(device_type(images["vec"].device), BLOCK["cuda"])
        return (side, side) if pooling_block is None else pooling_block(images, texts)

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None = None) -> Features:
        """Combine the prompts of each class into one row.

        Args: texts: features of T prompts; group [T] int64 in [0, n); weights [T], equal when None.
        """
        uncertainty = self.uncertainty
        uncertain = {} if uncertainty is None else uncertainty.ensemble(texts, group, n, weights)
        return {**self.pooling.ensemble(texts, group, n, weights), **uncertain}

    def explain(self, images: Features, texts: Features) -> Any:
        """Contribution of image tokens to a match, if the pooling defines it."""
        return self.pooling.explain(images, texts)

    def logits(self, score: Tensor) -> Tensor:
        """exp(log_scale) * score + bias; of distances -exp(log_scale) * (2 - 2 score) + bias."""
        scaled = at_least_float(self.log_scale).exp() * (2 * score - 2 if self.distance else score)
        return scaled if self.bias is None else scaled + at_least_float(self.bias)

    def score_of(self, logits: Tensor) -> Tensor:
        """Inverse of `logits`: the scores."""
        shifted = logits if self.bias is None else logits - at_least_float(self.bias)
        scored = shifted / at_least_float(self.log_scale).exp()
        return 1 + 0.5 * scored if self.distance else scored

    @torch.no_grad()
    def clamp_(self) -> None:
        """Clamp the scale to its limit, after each optimizer step. A larger loaded scale becomes the limit."""
        if self._limit < math.inf:
            self.log_scale.clamp_(max=self._limit)
        for head in self.inner().values():
            head.clamp_()

    def inner(self) -> dict[str, Head]:
        """Auxiliary heads by attribute name: other scores of the same pairs (`PairBlocks.beside`)."""
        return {name: part for name, part in self.named_children() if isinstance(part, Head)}

    def scales(self) -> list[nn.Parameter]:
        """Scale and bias, which form a separate parameter group of the optimizer."""
        return [self.log_scale] if self.bias is None else [self.log_scale, self.bias]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.log_limit is not None:
            loaded = state_dict.get(prefix + "log_scale")
            stored = state_dict.get(prefix + "log_limit", self.log_limit)
            values = [_number(x) for x in (stored, loaded) if x is not None]
            self._limit = max(self._limit, *values)
            state_dict[prefix + "log_limit"] = torch.full_like(self.log_limit, self._limit)
        else:
            state_dict.pop(prefix + "log_limit", None)  # saved with a limit, loaded without
        super()._load_from_state_dict(state_dict, prefix, *args)

    def initial(self) -> dict[str, Init]:
        log_scale = {"log_scale": Init(self._start[0])}
        return log_scale if self.bias is None else {**log_scale, "bias": Init(self._start[1])}


def _number(x: Tensor) -> float:
    """Value of a [1] (or, in imported weights, scalar) tensor that may be sharded."""
    full = x.full_tensor() if hasattr(x, "full_tensor") else x
    return float(full.detach())


class Single(nn.Module):
    """One vector per image and per text; the score is their cosine."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.image_pool = ImagePool(config.image, config.head)
        self.text_pool = TextPool(config.text, config.head.text_pool)
        dim, width = config.head.dim, self.image_pool.width
        if not config.head.image_projection and width != dim:
            raise ValueError(f"without an image projection the embedding size {dim} must be the tower's width {width}")
        self.image_projection = (
            nn.Linear(width, dim, bias=config.head.image_projection_bias) if config.head.image_projection else None
        )
        self.text_projection = nn.Linear(config.text.width, dim, bias=config.head.text_projection_bias)

    def image(self, tokens: Tensor) -> Features:
        return {"vec": unit(self.project_image_tokens(self.image_pool(tokens)))}

    def text(self, tokens: Tensor, texts: Texts) -> Features:
        return {"vec": unit(self.project_text_tokens(self.text_pool(tokens, texts)))}

    def memory(self, tokens: Tensor) -> Tensor:
        """Input of a text decoder's cross-attention."""
        return self.image_pool.memory(tokens)

    def project_image_tokens(self, tokens: Tensor) -> Tensor:
        return tokens if self.image_projection is None else self.image_projection(tokens)

    def project_text_tokens(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.text_projection(tokens)
        return out

    def score(self, images: Features, texts: Features) -> Tensor:
        return at_least_float(images["vec"]) @ at_least_float(texts["vec"]).T

    def score_pairs(self, images: Features, texts: Features) -> Tensor:
        return (at_least_float(images["vec"]) * at_least_float(texts["vec"])).sum(1)

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None) -> Features:
        """Normalised (weighted) mean of the unit vectors of each class (arXiv:2103.00020, section 3.1.4)."""
        vec = texts["vec"] if weights is None else texts["vec"] * weights[:, None]
        return {"vec": unit(vec.new_zeros(n, vec.shape[1]).index_add(0, group, vec))}

    def explain(self, images: Features, texts: Features) -> Any:
        raise ValueError(
            "this model pools each image into one vector, so it cannot explain which part of an image matched"
        )


class Cosine(nn.Module):
    """Pooling of a head whose features are made elsewhere, such as an auxiliary one: it scores them by their cosine."""

    def score(self, images: Features, texts: Features) -> Tensor:
        return at_least_float(images["vec"]) @ at_least_float(texts["vec"]).T


def cosine_head(scale: float, bias: float | None = None, max_scale: float | None = None, fixed: bool = False) -> Head:
    """A head with the scale and bias of cosines of features that are made elsewhere. Args: fixed: train neither."""
    pooling: Any = Cosine()
    head = Head(pooling, scale=scale, bias=bias, max_scale=max_scale)
    for p in head.scales() if fixed else ():
        p.requires_grad_(False)
    return head
