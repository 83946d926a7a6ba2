"""From tower tokens to features to scores: a pooling and, optionally, an uncertainty, which are independent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.distributed.collectives import whole
from kiloword.distributed.device import device_type
from kiloword.model.blocks import Init
from kiloword.model.encoding import chunks, rows
from kiloword.model.pooling import ImagePool, TextPool, at_least_float
from kiloword.types import Features, Texts

TOGETHER = 16  # images and texts whose `score` gives the scores of pairs
BLOCK = {"cpu": 1024, "cuda": 4096}  # rows and columns of pairs that are scored at once


def unit(x: Tensor) -> Tensor:
    """Normalise [..., D] to norm 1, at least in single precision."""
    return F.normalize(at_least_float(x), dim=-1)


def shares(like: Tensor, group: Tensor, n: int, weights: Tensor | None) -> Tensor:
    """Weights [T] of the prompts of n classes, scaled to sum to 1 in each, of the type of `like`; None: equal ones."""
    share = like.new_ones(len(group)) if weights is None else weights.to(like)
    return share / share.new_zeros(n).index_add(0, group, share)[group]


@dataclass(frozen=True)
class Scale:
    """How scores become logits, exp(log_scale) * score + bias.

    Args: start: initial scale; bias: initial bias, None: no bias (softmax gives it no gradient); limit: upper limit of
    the scale, None: unlimited; distance: scale minus the squared distance 2 - 2 score in place of the score; trained:
    whether scale and bias are trained. Raises: ValueError for a scale or limit that is not above 0.
    """

    start: float = 1 / 0.07
    bias: float | None = None
    limit: float | None = None
    distance: bool = False
    trained: bool = True

    def __post_init__(self) -> None:
        for name, value in (("scale", self.start), ("max_scale", self.limit)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value:g}: expected a number above 0.")
        if self.bias is not None and not math.isfinite(self.bias):
            raise ValueError(f"bias is {self.bias:g}: expected a number.")


class Piece(nn.Module):
    """Base of the modules that fill the slots of a method."""

    @staticmethod
    def towers(config: ModelConfig, settings: Any) -> ModelConfig:
        """The configuration of the towers that this module needs, such as a further token."""
        return config

    def after_step(self, model: Any, step: int, done: float) -> None:
        """Change what has no gradient (teachers, centres, queues: buffers and frozen parameters), alike on every rank.

        Called before the first step, and after every one. Buffers and frozen parameters are saved and resumed.

        Args: step: number of steps done, 0: to copy initial weights; done: share of the run, in [0, 1].
        """


class Pooling(Piece):
    """How tokens become features, and features a similarity: by default the cosine of one vector each.

    Attributes: one_vector: whether the score is the cosine of one vector per image and one per text; several: whether
    the pair loss reads its `sides`; unread: settings of the head that it does not read; attends_to_patches: for a
    reader, what the maps of `explain` are, where they are of patches.
    """

    one_vector = False
    several = False
    unread: tuple[str, ...] = ()
    image_projection: nn.Linear | None
    text_projection: nn.Linear
    attends_to_patches = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "score" in vars(cls) and "score_pairs" not in vars(cls):  # the one of a base would score otherwise
            cls.score_pairs = _diagonals  # type: ignore[assignment]

    def image(self, tokens: Tensor) -> Features:
        """Tokens [I, E + P, W] -> features of images, every value [I, ...], with unit vectors "vec" [I, D]."""
        raise NotImplementedError

    def text(self, tokens: Tensor, texts: Texts) -> Features:
        """Packed tokens [S, W] -> features of texts, every value [T, ...], with unit vectors "vec" [T, D]."""
        raise NotImplementedError

    def project_image_tokens(self, tokens: Tensor) -> Tensor:
        """[..., W] -> [..., D], the shared dimension; not normalised."""
        return tokens if self.image_projection is None else self.image_projection(tokens)

    def project_text_tokens(self, tokens: Tensor) -> Tensor:
        """[..., W] -> [..., D], the shared dimension; not normalised."""
        out: Tensor = self.text_projection(tokens)
        return out

    def pooled(self, tokens: Tensor) -> Tensor:
        """One vector [I, W] of tokens [I, E + P, W], before the projection to the shared space."""
        return tokens.mean(1)

    def memory(self, tokens: Tensor) -> Tensor:
        """Input of a text decoder's cross-attention: [I, E + P, W] -> [I, Q, W']."""
        return tokens

    def score(self, images: Features, texts: Features) -> Tensor:
        """Similarities [i, t]."""
        return at_least_float(images["vec"]) @ at_least_float(texts["vec"]).T

    def score_pairs(self, images: Features, texts: Features) -> Tensor:
        """Similarities [n] of image n with text n; a class with its own `score` may have a faster way than that."""
        return (at_least_float(images["vec"]) * at_least_float(texts["vec"])).sum(1)

    def block(self, images: Features, texts: Features) -> tuple[int, int]:
        """Rows and columns of pairs to score at once; fewer where pairs are expensive."""
        side = BLOCK.get(device_type(images["vec"].device), BLOCK["cuda"])
        return side, side

    def sides(self) -> Mapping[str, Pooling]:
        """Other similarities of the same features by name, which a pair loss reads with the same scale."""
        return {}

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None) -> Features:
        """Normalised (weighted) mean of the unit vectors of each class (arXiv:2103.00020, section 3.1.4)."""
        vec = texts["vec"] if weights is None else texts["vec"] * weights[:, None]
        return {"vec": unit(vec.new_zeros(n, vec.shape[1]).index_add(0, group, vec))}

    def explain(self, images: Features, texts: Features) -> Tensor:
        """Share of each token of the images in the match with each text: [i, t, heads, tokens]."""
        raise ValueError(
            "this model's pooling, such as one vector per image, cannot explain which part of an image matched"
        )


class Uncertainty(Piece):
    """How features get an uncertainty, and the penalty that it subtracts from similarities."""

    def image(self, tokens: Tensor, pooling: Pooling) -> Features:
        """Tokens [I, E + P, W] -> further features of images."""
        raise NotImplementedError

    def text(self, tokens: Tensor, texts: Texts, pooling: Pooling) -> Features:
        """Packed tokens [S, W] -> further features of texts."""
        raise NotImplementedError

    def penalty(self, features: Features) -> Tensor:
        """[N], subtracted from every similarity of an image or a text."""
        raise NotImplementedError

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None) -> Features:
        """The uncertainty of each class, of its prompts."""
        raise NotImplementedError


def _diagonals(pooling: Pooling, images: Features, texts: Features) -> Tensor:
    """`score_pairs` by `score`."""
    parts = chunks(len(images["vec"]), TOGETHER)
    return torch.cat([pooling.score(rows(images, part), rows(texts, part)).diagonal() for part in parts])


class Head(nn.Module):
    """Pooling and uncertainty, the scale that turns scores into logits, and further scores of the same pairs.

    Args: further: heads by name that a pair loss reads beside this one (`PairBlocks.beside`).
    """

    log_limit: Tensor | None

    def __init__(
        self,
        pooling: Pooling,
        uncertainty: Uncertainty | None = None,
        scale: Scale = Scale(),
        further: Mapping[str, Head] | None = None,
    ) -> None:
        super().__init__()
        self.pooling, self.scale = pooling, scale
        self.uncertainty = uncertainty
        self.log_scale = nn.Parameter(torch.full((1,), torch.nan), scale.trained)  # until `initialise`
        self.bias = None if scale.bias is None else nn.Parameter(torch.full((1,), torch.nan), scale.trained)
        # rounded like the buffer: otherwise the limit would change on resuming in double precision
        self._limit = math.inf if scale.limit is None else float(torch.tensor(math.log(scale.limit), device="cpu"))
        self.register_buffer("log_limit", None if scale.limit is None else torch.tensor([self._limit]))
        for name, head in (further or {}).items():
            self.add_module(name, head)

    def image(self, tokens: Tensor) -> Features:
        """Tokens [I, E + P, W] -> features of images."""
        uncertain = {} if self.uncertainty is None else self.uncertainty.image(tokens, self.pooling)
        return {**self.pooling.image(tokens), **uncertain}

    def text(self, tokens: Tensor, texts: Texts) -> Features:
        """Packed tokens [S, W] -> features of texts."""
        uncertain = {} if self.uncertainty is None else self.uncertainty.text(tokens, texts, self.pooling)
        return {**self.pooling.text(tokens, texts), **uncertain}

    def score(self, images: Features, texts: Features, pairs: bool = False) -> Tensor:
        """[i, t], or [n] of `pairs`; higher is a better match. At least single precision, under autocast too."""
        with torch.autocast(images["vec"].device.type, enabled=False):
            score = (self.pooling.score_pairs if pairs else self.pooling.score)(images, texts)
            if self.uncertainty is None:
                return score
            of_images = self.uncertainty.penalty(images)
            return score - (of_images if pairs else of_images[:, None]) - self.uncertainty.penalty(texts)

    def score_pairs(self, images: Features, texts: Features) -> Tensor:
        """Scores [n] of image n with text n."""
        return self.score(images, texts, pairs=True)

    def block(self, images: Features, texts: Features) -> tuple[int, int]:
        """Rows and columns of pairs to score at once."""
        return self.pooling.block(images, texts)

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None = None) -> Features:
        """Combine the prompts of each class into one row.

        Args: texts: features of T prompts; group [T] int64 in [0, n); weights [T], equal when None.
        """
        uncertainty = self.uncertainty
        uncertain = {} if uncertainty is None else uncertainty.ensemble(texts, group, n, weights)
        return {**self.pooling.ensemble(texts, group, n, weights), **uncertain}

    def logits(self, score: Tensor) -> Tensor:
        """exp(log_scale) * score + bias; of distances -exp(log_scale) * (2 - 2 score) + bias."""
        scaled = at_least_float(self.log_scale).exp() * (2 * score - 2 if self.scale.distance else score)
        return scaled if self.bias is None else scaled + at_least_float(self.bias)

    @torch.no_grad()
    def clamp_(self) -> None:
        """Clamp the scale to its limit, after each optimizer step. A larger loaded scale becomes the limit."""
        if self._limit < math.inf:
            self.log_scale.clamp_(max=self._limit)
        for head in self.further().values():
            head.clamp_()

    def further(self) -> dict[str, Head]:
        """The heads inside, by name."""
        return {name: part for name, part in self.named_children() if isinstance(part, Head)}

    def beside(self, name: str) -> Head:
        """Another score of the same pairs: a head inside, or a side of the pooling with the scale of this head."""
        inside = self.further()
        if name in inside:
            return inside[name]
        with torch.device("meta"):
            head = Head(self.pooling.sides()[name], scale=self.scale)
        head.log_scale, head.bias = self.log_scale, self.bias
        return head

    def scales(self) -> list[nn.Parameter]:
        """Scale and bias, which form a separate parameter group of the optimizer."""
        return [self.log_scale] if self.bias is None else [self.log_scale, self.bias]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.log_limit is not None:
            loaded = state_dict.get(prefix + "log_scale")
            stored = state_dict.get(prefix + "log_limit", self.log_limit)
            values = [float(whole(x).detach()) for x in (stored, loaded) if x is not None]
            self._limit = max(self._limit, *values)
            state_dict[prefix + "log_limit"] = torch.full_like(self.log_limit, self._limit)
        else:
            state_dict.pop(prefix + "log_limit", None)  # saved with a limit, loaded without
        super()._load_from_state_dict(state_dict, prefix, *args)

    def initial(self) -> dict[str, Init]:
        log_scale = {"log_scale": Init(math.log(self.scale.start))}
        return log_scale if self.bias is None else {**log_scale, "bias": Init(self.scale.bias or 0.0)}


class Single(Pooling):
    """One vector per image and per text; the score is their cosine."""

    one_vector = True

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
        return {"vec": unit(self.project_image_tokens(self.pooled(tokens)))}

    def text(self, tokens: Tensor, texts: Texts) -> Features:
        return {"vec": unit(self.project_text_tokens(self.text_pool(tokens, texts)))}

    def pooled(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.image_pool(tokens)
        return out

    def memory(self, tokens: Tensor) -> Tensor:
        return self.image_pool.memory(tokens)
