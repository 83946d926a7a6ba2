"""FFF: all captions of an image in one batch, positives mined by a teacher, a searched initial bias.

Source: arXiv:2405.10286. The teacher is frozen and sees images without augmentation, so its features are precomputed
(`kiloword embed`) and loaded with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kiloword.config.settings import ABOVE_0, BaseSettings, Nothing, setting
from kiloword.distributed.collectives import sum_over_ranks
from kiloword.losses.pairs import Balanced, sigmoid_loss, supcon_loss
from kiloword.methods import clip, siglip
from kiloword.methods.method import PAIR, Component, Method
from kiloword.model.pooling import at_least_float
from kiloword.types import Batch, Pairs, Positives, Rule

if TYPE_CHECKING:
    from kiloword.training.step import Learner

LEAST, MOST = -40.0, 20.0  # range of the search for a bias
STEPS = (1.0, 0.1, 0.02)  # of successive grids
EDGE, NOTHING = 0.5, 1e-5  # this close to the ends, or below this loss, nearly all pairs are of one class
MISSING = ", as missing features have cosine 0 and must not match"


@dataclass(frozen=True, kw_only=True)
class Mined(BaseSettings):
    """Which pairs of image and text match, by cosines of teacher features: eq. 2."""

    image_text: bool = setting(True, "the term S_it > p1")
    image_image: bool = setting(True, "the term S_ii > p2")
    text_text: bool = setting(True, "the term S_tt > p3 and S_it > p1_text")
    p1: float = setting(
        0.27, "S_it of image and text; annotated pairs have 0.29 by CLIP ViT-L/14", ABOVE_0, 1, hint=MISSING
    )
    p2: float = setting(0.92, "S_ii of the image and the text's image", ABOVE_0, 1, hint=MISSING)
    p3: float = setting(0.99, "S_tt, the mean cosine of the text and the image's texts", ABOVE_0, 1, hint=MISSING)
    p1_text: float = setting(
        0.24, "p1' of eq. 2: S_it required beside p3, below p1; near 0: S_tt decides alone", ABOVE_0, 1, hint=MISSING
    )
    annotated_always: bool = setting(True, "annotated pairs are positives whatever their cosines")
    teacher: str = setting("teacher", "name of the precomputed features")


@dataclass(frozen=True, kw_only=True)
class Exact(BaseSettings):
    """Positives of data with complete ground truth (scenes)."""

    balance: bool = setting(False, "divide a text's positives by their sum: every text has the same weight")


@dataclass(frozen=True, kw_only=True)
class Mining(Mined, Exact):
    """Mined positives in training."""


@dataclass(frozen=True, kw_only=True)
class BiasSearch(BaseSettings):
    """Initial value of the bias."""

    bias_search: Literal["grid", "none"] = setting("grid", "how to find the initial bias with the lowest loss")
    bias_batches: int = setting(4, "number of batches on which bias_search computes the loss", 1)


@dataclass(frozen=True, kw_only=True)
class Slots(Mining, BiasSearch):
    """What FFF changes in a method with sigmoid loss."""

    positives: Literal["mined", "annotated"] = setting("mined", "annotated: needs no teacher")
    reduction: Literal["texts", "images"] = setting("texts", "the loss is a mean over texts (eq. 3) or images")


@dataclass(frozen=True, kw_only=True)
class Settings(Slots, siglip.Settings):
    """Positives and bias search, and the logit before training."""


@dataclass(frozen=True, kw_only=True)
class SupCon(clip.Settings):
    """Supervised contrast over all positives of an image and of a text."""

    form: Literal["out", "in"] = setting("out", "the mean over positives outside or inside the logarithm")


def matches(settings: Mined, it: Tensor, ii: Tensor, tt: Tensor) -> Tensor:
    """Which pairs each enabled term accepts, bool [3, ...]; a pair matches by any. Source: arXiv:2405.10286, eq. 2.

    Args: it, ii, tt: cosines [...] of image and text, of image and the text's image, and of the text and the image's
    texts on average.
    """
    by_image, by_own_image = (it > settings.p1) & settings.image_text, (ii > settings.p2) & settings.image_image
    by_text = (tt > settings.p3) & (it > settings.p1_text) & settings.text_text
    return torch.stack([by_image, by_own_image, by_text])


@dataclass(frozen=True)
class MinedPositives(Rule):
    """Positives by eq. 2. Pairs without teacher features (composed examples, missing rows) match if annotated."""

    settings: Mined
    mined = True

    def __call__(self, pairs: Pairs) -> Tensor:
        """[i, t] in {0, 1}."""
        settings, name = self.settings, self.settings.teacher
        image, text = pairs.images[f"image_features.{name}"], pairs.texts[f"text_features.{name}"]
        it = _cosines(image, text)
        ii = _cosines(image, pairs.texts[f"image_features.{name}"]) if settings.image_image else it
        # the mean of cosines with the image's texts is the cosine with their mean
        tt = _cosines(pairs.images[f"image_features.{name}.texts"], text) if settings.text_text else it
        mineable = pairs.images["mineable"][:, None] & pairs.texts["mineable"]
        mined = matches(settings, it, ii, tt).any(0) & mineable
        judged = mineable & image.any(1)[:, None] & text.any(1)
        annotated = pairs.annotated if settings.annotated_always else pairs.annotated & ~judged
        return (mined | annotated).to(pairs.logits.dtype)


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """[n, D], [m, D] -> [n, m]."""
    return at_least_float(a) @ at_least_float(b).T


def exact(pairs: Pairs) -> Tensor:
    """All true pairs, by the ground truth of the data, and the annotated pairs: [i, t] in {0, 1}."""
    true = pairs.texts["text_features.truth"].T[pairs.images["position"]]
    mineable = pairs.images["mineable"][:, None] & pairs.texts["mineable"]
    return (pairs.annotated | (true & mineable)).to(pairs.logits.dtype)


def preset(settings: Settings) -> Method:
    """All captions of an image, positives by the settings, the sigmoid loss and the searched bias."""
    summary = "all captions, mined positives, searched bias"
    return fixed(replace(siglip.preset(settings), name="fff", source="arXiv:2405.10286", summary=summary), settings)


def fixed(method: Method, settings: Slots) -> Method:
    """Apply all of FFF: all captions, mined positives, reduction of the loss, bias search."""
    if method.pair_loss is not sigmoid_loss:
        raise ValueError(f"{method.name} has no sigmoid loss, which fff needs: add +sigmoid, or +mined+many alone.")
    method = replace(method, captions="all", pair_loss=partial(sigmoid_loss, reduction=settings.reduction))
    if settings.positives == "mined":
        method = mined(method, settings)
    return searched(method, settings)


def mined(method: Method, settings: Mining) -> Method:
    """Use annotated and mined positives. Raises: ValueError when every term is off."""
    if not (settings.image_text or settings.image_image or settings.text_text):
        raise ValueError("every term of eq. 2 is off, so nothing can be mined: enable one, or use annotated pairs.")
    return _with(method, MinedPositives(settings), settings.teacher, settings.balance)


def all_true(method: Method, settings: Exact) -> Method:
    """Use all true pairs as positives."""
    return _with(method, exact, "truth", settings.balance)


def _with(method: Method, positives: Positives, need: str, balance: bool) -> Method:
    """Replace the positives of a method, and the precomputed features that they need."""
    before = getattr(method.positives, "positives", method.positives)  # of `Balanced`
    old = before.settings.teacher if isinstance(before, MinedPositives) else "truth" if before is exact else ""
    needs = tuple(name for name in method.needs if name not in (old, need))
    return replace(method, positives=Balanced(positives) if balance else positives, needs=(*needs, need))


def many(method: Method, settings: Nothing) -> Method:
    """Use all captions of an image in one batch."""
    return replace(method, captions="all")


def searched(method: Method, settings: BiasSearch) -> Method:
    """Search the initial bias of least loss. Raises: ValueError for a method that has another preparation already."""
    if settings.bias_search == "none":
        return method
    if method.scale.bias is None or method.several_scores or method.prepare is not None:
        raise ValueError(
            f"{method.name} has no bias, or several, or searches it already: add +sigmoid, or omit bias-search."
        )
    return replace(method, prepare=partial(search, n=settings.bias_batches))


def search(learner: Learner, batches: Iterator[Batch], n: int) -> str:
    """Set the head's bias to the minimum of the mean pair loss over the first `n` batches; nothing else changes.

    Three grids, each around the best value of the one before, then a parabola through that and its neighbours: it
    resolves finer than the rounding of the loss allows for a grid. The loss must be convex in the bias, as sigmoid
    losses are. The same on every rank: losses are sums over ranks. Source: arXiv:2405.10286, section 4.4.
    Returns: a message for the log, with a warning if nearly all pairs are of one class, or the bias is above 0.
    """
    bias: Any = learner.model.head.bias  # a method without one is refused
    contrast: Any = learner.contrasts[PAIR]
    with torch.no_grad():
        inputs = [contrast.inputs(learner.model, batch, learner.encode(batch)) for batch in islice(batches, n)]

    @torch.no_grad()
    def losses(at: list[float]) -> list[float]:
        """Mean loss at each bias value; leaves the bias at the last one."""
        shares = []
        for value in at:
            bias.fill_(value)
            shares.append(torch.stack([learner.pair_losses({PAIR: one})[PAIR] for one in inputs]).mean())
        means: list[float] = sum_over_ranks(torch.stack(shares).double()).tolist()
        return means

    before, best, low, high = float(bias.detach()), 0.0, LEAST, MOST
    for step in STEPS:
        grid = [low + step * n for n in range(round((high - low) / step) + 1)]
        found = losses(grid)
        place = min(range(len(grid)), key=found.__getitem__)
        best, low, high = grid[place], grid[place] - step, grid[place] + step
    if 0 < place < len(grid) - 1:
        left, middle, right = found[place - 1 : place + 2]
        bend = left - 2 * middle + right
        best = best if bend <= 0 else best + step * (left - right) / (2 * bend)
    first, last = (losses([value])[0] for value in (before, best))  # leaves the bias at the best value
    message = f"bias {before:.4g} -> {best:.4g} (grid over {len(inputs)} batches, loss {first:.4g} -> {last:.4g})"
    if best <= 0 and last > NOTHING and LEAST + EDGE < best < MOST - EDGE:
        return message
    return (
        f"{message}. Where few pairs match, the best bias is below 0; at a loss of 0, or a bias near {LEAST:g} or "
        f"{MOST:g}, nearly no or every pair matches, so that there is little to learn. If positives are mined, do the "
        "thresholds fit the teacher? `kiloword mine SRC --features DIR --out OUT --calibrate` proposes some."
    )


def supcon(method: Method, settings: SupCon) -> Method:
    """Use the supervised contrastive loss with CLIP's scale and limit, without bias."""
    return replace(clip.softmax(method, settings), pair_loss=partial(supcon_loss, form=settings.form))


COMPONENTS = {
    "fff": Component("positives", "all captions, mined positives, searched bias", Slots, fixed),
    "mined": Component("positives", "pairs with similar teacher features", Mining, mined),
    "exact": Component("positives", "all true pairs, from ground truth in the data", Exact, all_true),
    "supcon": Component("pair_loss", "supervised contrastive loss", SupCon, supcon),
    "many": Component("captions", "all captions of an image in one batch", Nothing, many),
    "bias-search": Component("prepare", "initial bias of least loss", BiasSearch, searched),
}
