"""FFF: many captions an image in one batch, false negatives made positives by a teacher, a searched bias.

Source: arXiv:2405.10286. The teacher is frozen and sees what is not augmented, so its features are constants: they are
made once (`kiloword embed`) and come with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from kiloword.config import recipes
from kiloword.config.recipes import ModelConfig
from kiloword.losses.many import Balanced, supcon_loss
from kiloword.losses.pairs import sigmoid_loss, softmax_loss
from kiloword.methods import clip
from kiloword.methods.fff import bias_search
from kiloword.methods.method import Method, Piece
from kiloword.model.heads import Head, Single
from kiloword.model.pooling import at_least_float
from kiloword.types import Batch, Pairs, Positives

if TYPE_CHECKING:
    from kiloword.training.learner import Learner


@dataclass(frozen=True, kw_only=True)
class Mined(recipes.Settings):
    """Which pairs of an image and a text match, by a teacher's cosines: eq. 2."""

    image_text: bool = True  # the term S_it > p1
    image_image: bool = True  # the term S_ii > p2
    text_text: bool = True  # the term S_tt > p3 and S_it > p1_text
    p1: float = 0.27  # of the teacher's image and text; of CLIP ViT-L/14, whose annotated pairs have 0.29 on average
    p2: float = 0.92  # of the image and the text's image
    p3: float = 0.99  # of the text and the image's texts, on average
    p1_text: float = 0.24  # p1' < p1, asked of pairs that p3 found; near 0: S_tt decides alone (table 5)
    annotated_always: bool = True  # pairs that the data names match whatever the teacher says
    teacher: str = "teacher"  # name of its features beside the data


@dataclass(frozen=True, kw_only=True)
class Mining(Mined):
    """Mined positives as training takes them."""

    balance: bool = False  # divide each text's positives by their sum: a text of many images counts once


@dataclass(frozen=True, kw_only=True)
class Exact(recipes.Settings):
    """Positives of data that knows the truth (scenes)."""

    balance: bool = False  # divide each text's positives by their sum: a text of many images counts once


@dataclass(frozen=True, kw_only=True)
class BiasSearch(recipes.Settings):
    """Where the bias starts."""

    bias_search: Literal["grid", "gradient", "none"] = "grid"  # where the loss of the untrained model is least
    bias_batches: int = 4  # batches whose loss it is


@dataclass(frozen=True, kw_only=True)
class Slots(Mining, BiasSearch):
    """What FFF changes in a method that has a sigmoid loss."""

    positives: Literal["mined", "annotated"] = "mined"  # annotated: needs no teacher
    reduction: Literal["texts", "images"] = "texts"  # what the loss is divided by; texts: eq. 3


@dataclass(frozen=True, kw_only=True)
class Settings(Slots):
    scale: float = 10.0  # initial factor of the cosine
    bias: float = -10.0  # initial; the logit is scale * cosine + bias, and bias_search changes it


@dataclass(frozen=True, kw_only=True)
class SupCon(clip.Settings):
    form: Literal["out", "in"] = "out"  # the mean over positives outside or inside the logarithm


@dataclass(frozen=True, kw_only=True)
class Nothing(recipes.Settings):
    """A piece without settings."""


def check(settings: Mined) -> None:
    """Raises: ValueError for a threshold that is no cosine above 0, or when every term is off."""
    for name in ("p1", "p2", "p3", "p1_text"):
        value = getattr(settings, name)
        if not (math.isfinite(value) and 0 < value <= 1):
            raise ValueError(
                f"threshold {name} is {value:g}: expected a cosine above 0 and at most 1, as what has no features "
                "scores 0 and must match nothing."
            )
    if not (settings.image_text or settings.image_image or settings.text_text):
        raise ValueError(
            "every term of eq. 2 is off, so nothing can be mined: leave one on, or take the annotated pairs."
        )


def matches(settings: Mined, it: Tensor | None, ii: Tensor | None, tt: Tensor | None) -> Tensor:
    """Which pairs match, bool [i, t], by the terms that are on. Source: arXiv:2405.10286, eq. 2.

    Args: it, ii, tt: cosines [i, t] of image and text, of image and the text's image, and of the text and the
    image's texts on average; None is allowed where no term that is on needs it.
    """
    known = next(s for s in (it, ii, tt) if s is not None)
    found = torch.zeros_like(known, dtype=torch.bool)
    if settings.image_text:
        assert it is not None
        found |= it > settings.p1
    if settings.image_image:
        assert ii is not None
        found |= ii > settings.p2
    if settings.text_text:
        assert it is not None
        assert tt is not None
        found |= (tt > settings.p3) & (it > settings.p1_text)
    return found


@dataclass(frozen=True)
class MinedPositives:
    """Positives by eq. 2. Pairs that cannot be judged (composed examples, features unknown) match if annotated."""

    settings: Mined
    mined: ClassVar[bool] = True  # logged as a share of all pairs

    def __call__(self, pairs: Pairs) -> Tensor:
        """[i, t] in {0, 1}."""
        settings, name = self.settings, self.settings.teacher
        image, text = pairs.images[f"image_side.{name}"], pairs.texts[f"text_side.{name}"]
        it = ii = tt = None
        if settings.image_text or settings.text_text:
            it = _cosines(image, text)
        if settings.image_image:
            ii = _cosines(image, pairs.texts[f"image_side.{name}"])
        if settings.text_text:  # the mean of cosines with the image's texts is the cosine with their mean
            tt = _cosines(pairs.images[f"image_side.{name}.texts"], text)
        mineable = pairs.images["mineable"][:, None] & pairs.texts["mineable"]
        found = matches(settings, it, ii, tt) & mineable
        judged = mineable & image.any(1)[:, None] & text.any(1)
        kept = pairs.annotated if settings.annotated_always else pairs.annotated & ~judged
        return (found | kept).to(pairs.logits.dtype)


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """[n, D], [m, D] -> [n, m]."""
    return at_least_float(a) @ at_least_float(b).T


def exact(pairs: Pairs) -> Tensor:
    """The pairs that are true, known from data that can tell, and the annotated ones: [i, t] in {0, 1}."""
    true = pairs.texts["text_side.truth"].T[pairs.images["position"]]
    mineable = pairs.images["mineable"][:, None] & pairs.texts["mineable"]
    return (pairs.annotated | (true & mineable)).to(pairs.logits.dtype)


def preset(settings: Settings) -> Method:
    def head(config: ModelConfig) -> Head:
        return Head(Single(config), scale=settings.scale, bias=settings.bias)

    plain = Method(
        name="fff",
        source="arXiv:2405.10286",
        summary="all captions, mined positives, searched bias",
        head=head,
        pair_loss=sigmoid_loss,
    )
    return fixed(plain, settings)


def fixed(method: Method, settings: Slots) -> Method:
    """A method with all that FFF changes: captions, positives, what the loss is divided by, where the bias starts."""
    if method.pair_loss is not sigmoid_loss:
        raise ValueError(f"{method.name} has no sigmoid loss, which fff needs: add +sigmoid, or +mined+many alone.")
    method = replace(method, captions="all", pair_loss=partial(sigmoid_loss, reduction=settings.reduction))
    if settings.positives == "mined":
        method = mined(method, settings)
    return searched(method, settings)


def mined(method: Method, settings: Mining) -> Method:
    """A method whose positives are annotated or mined."""
    check(settings)
    return _with(method, MinedPositives(settings), settings.teacher, settings.balance)


def known(method: Method, settings: Exact) -> Method:
    """A method whose positives are all that is true."""
    return _with(method, exact, "truth", settings.balance)


def _with(method: Method, positives: Positives, need: str, balance: bool) -> Method:
    """Other positives, and what they need beside the data in place of what those before needed."""
    before = method.positives.positives if isinstance(method.positives, Balanced) else method.positives
    old = before.settings.teacher if isinstance(before, MinedPositives) else "truth" if before is exact else ""
    needs = tuple(name for name in method.needs if name not in (old, need))
    return replace(method, positives=Balanced(positives) if balance else positives, needs=(*needs, need))


def many(method: Method, settings: Nothing) -> Method:
    """A method with all captions of an image in one batch."""
    return replace(method, captions="all")


def searched(method: Method, settings: BiasSearch) -> Method:
    """A method whose bias starts where the loss is least. Raises: ValueError when it prepares otherwise already."""
    if settings.bias_search == "none":
        return method
    if getattr(method.pair_loss, "func", method.pair_loss) in (softmax_loss, supcon_loss):
        raise ValueError(f"{method.name} has no bias to search, as softmax gives it no gradient: add +sigmoid.")
    if method.prepare is not None:
        raise ValueError(f"{method.name} already sets its parameters before the first step: leave bias-search out.")
    if settings.bias_batches < 1:
        raise ValueError(f"bias_batches is {settings.bias_batches}: expected at least 1.")
    how, n = settings.bias_search, settings.bias_batches

    def prepare(learner: Learner, batches: Iterator[Batch]) -> str:
        return bias_search.search(learner, batches, how, n)

    return replace(method, prepare=prepare)


def supcon(method: Method, settings: SupCon) -> Method:
    """A method with supervised contrast as its loss, and CLIP's scale and limit; a bias could not learn."""

    def head(config: ModelConfig) -> Head:
        return clip.scaled(method.head(config), settings)

    return replace(method, pair_loss=partial(supcon_loss, form=settings.form), head=head)


PIECES = {
    "fff": Piece(slot="positives", summary="all captions, mined positives, searched bias", settings=Slots, apply=fixed),
    "mined": Piece(slot="positives", summary="pairs that a teacher finds alike", settings=Mining, apply=mined),
    "exact": Piece(slot="positives", summary="pairs that the data knows to be true", settings=Exact, apply=known),
    "supcon": Piece(slot="pair loss", summary="supervised contrast", settings=SupCon, apply=supcon),
    "many": Piece(slot="captions", summary="all captions in one batch", settings=Nothing, apply=many),
    "bias-search": Piece(slot="prepare", summary="bias of least loss", settings=BiasSearch, apply=searched),
}
