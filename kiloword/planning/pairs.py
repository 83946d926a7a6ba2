"""Cost of the pair loss: local images with the texts of all ranks, in blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kiloword.losses.many import Balanced, supcon_loss
from kiloword.losses.pairs import sigmoid_loss, softmax_loss
from kiloword.methods.fff.preset import MinedPositives
from kiloword.methods.llip import scores as mixing
from kiloword.methods.llip.pooling import Contextual
from kiloword.methods.method import Method
from kiloword.methods.pcmepp.matching import WithDeterministic, matching_loss
from kiloword.model.heads import BLOCK
from kiloword.model.model import Model
from kiloword.planning.heads import mixed_tokens
from kiloword.planning.layers import Work

COPIES = 6  # of a block's logits that are there at once, gradient and positives among them


@dataclass(frozen=True)
class Side:
    """What a feature row holds that travels between ranks, in numbers."""

    floats: int  # with gradient
    constant: int = 0  # precomputed features
    whole: int = 2  # integers: position, mineable


def features(model: Model, teacher: int = 0) -> tuple[Side, Side]:
    """Numbers of an image's and of a text's features.

    Args: teacher: width of precomputed features, an image's own, those of its texts' mean and a text's; 0: none.
    """
    dim = model.config.head.dim
    uncertainty = dim if model.head.uncertainty is not None else 0
    mixed = isinstance(model.head.pooling, Contextual)
    image = dim + uncertainty + (2 * mixed_tokens(model) * dim if mixed else 0)
    text = dim + uncertainty + (dim if mixed else 0)
    return Side(image, 2 * teacher), Side(text, 3 * teacher)


def pair_work(
    model: Model, method: Method, images: float, texts: float, device: str, chunk: int = 0, teacher: int = 0
) -> tuple[Work, float]:
    """Arithmetic of I images against T texts of every rank, and bytes of what one block needs while it is there.

    A pair of single vectors costs 2 D forward and 4 D backward. Losses that must see all pairs first (softmax, pseudo-
    positives, balanced positives) score them once more for each such pass, unless all pairs are one block.
    Everything is at least in single precision.
    """
    if method.pair_weight == 0:
        return Work("pair loss", "pair loss"), 0.0
    if isinstance(model.head.pooling, Contextual):
        forward, backward, held = _mixed(model, images, texts, device, chunk)
        step = _steps(images, texts, _contextual_step(model, texts, device, chunk))
    else:
        forward, backward = 2 * images * texts * model.config.head.dim, 4 * images * texts * model.config.head.dim
        side = chunk or BLOCK.get(device, BLOCK["cuda"])
        step = _steps(images, texts, (side, side))
        held = COPIES * min(images, side) * min(texts, side) * 4.0
    whole = step == (1, 1)
    again = 0 if whole else passes(method)
    total = Work("pair loss", "pair loss", forward * (1 + again), backward)
    if isinstance(method.pair_loss, WithDeterministic):
        means = 2 * images * texts * model.config.head.dim
        second = 0 if whole else (method.pair_loss.loss == "softmax")
        total = total + Work(forward=means * (1 + second), backward=2 * means)
    total = total + _mined(method, images, texts, teacher, 1 + passes(method))
    return replace(total, single=total.forward + total.backward), held


def function_of(method: Method) -> Any:
    """The pair loss itself, without what stands around it."""
    loss = method.pair_loss.main if isinstance(method.pair_loss, WithDeterministic) else method.pair_loss
    return loss.func if isinstance(loss, partial) else loss


def _given(method: Method, name: str, usual: Any) -> Any:
    """An argument of the pair loss."""
    loss = method.pair_loss.main if isinstance(method.pair_loss, WithDeterministic) else method.pair_loss
    return loss.keywords.get(name, usual) if isinstance(loss, partial) else usual


def passes(method: Method) -> int:
    """How often a loss scores all pairs before it can say anything of one."""
    function = function_of(method)
    first = function in (softmax_loss, supcon_loss) or (function is matching_loss and _given(method, "pseudo", 0.1) > 0)
    return int(first) + isinstance(method.positives, Balanced)


def columns(method: Method) -> int:
    """Numbers of every text that a loss sums over ranks, or takes the largest or least of."""
    inside = 5 if _given(method, "form", "out") == "in" else 3  # maxima, sums at them, positives
    nearest = int(_given(method, "pseudo", 0.1) > 0)
    found = {softmax_loss: 3, supcon_loss: inside, matching_loss: nearest}.get(function_of(method), 0)
    beside = isinstance(method.pair_loss, WithDeterministic) and method.pair_loss.loss == "softmax"
    return found + 3 * beside + isinstance(method.positives, Balanced)


def known(method: Method) -> bool:
    """Whether the loss is one whose passes are counted here."""
    return function_of(method) in (softmax_loss, supcon_loss, matching_loss, sigmoid_loss)


def _mined(method: Method, images: float, texts: float, teacher: int, times: int) -> Work:
    """Cosines of the teacher's features, 2 I T D' each, in every pass over the pairs."""
    positives = method.positives.positives if isinstance(method.positives, Balanced) else method.positives
    if not isinstance(positives, MinedPositives):
        return Work()
    s = positives.settings
    cosines = (s.image_text or s.text_text) + s.image_image + s.text_text
    return Work(forward=2.0 * images * texts * teacher * cosines * times)


def _steps(images: float, texts: float, step: tuple[int, int]) -> tuple[int, int]:
    """How many blocks down and across."""
    return -int(-images // step[0]), -int(-texts // step[1])


def _sizes(model: Model) -> tuple[mixing.PairSizes, str]:
    pooling = model.head.pooling
    assert isinstance(pooling, Contextual)
    return mixing.PairSizes(mixed_tokens(model), pooling.settings.heads, model.config.head.dim), pooling.settings.form


def _contextual_step(model: Model, texts: float, device: str, chunk: int) -> tuple[int, int]:
    sizes, form = _sizes(model)
    chosen = mixing.choose(sizes, int(texts)) if form == "auto" else form
    return (chunk, chunk) if chunk else mixing.block(sizes, chosen, device)  # type: ignore[arg-type]


def _mixed(model: Model, images: float, texts: float, device: str, chunk: int) -> tuple[float, float, float]:
    """FLOP forward and backward, and bytes, of text-conditioned cosines: N tokens, M heads, w = M N (`mixing`).

    A pair costs, in the Gram form, 4 N D + 2 w^2 forward and 8 N D + 2 w^2 backward; in the direct form 6 N D + 2 D^2
    and 6 N D + 2 D^2. Once a block and text, y = t W_O^T: 2 D^2; once a block, A = W_O W_O^T: 2 D^3; once a block and
    image, Gram matrices: 2 N D^2 + 2 w^2 d. Backward these three cost twice that.
    """
    sizes, form = _sizes(model)
    n, w, d = sizes.tokens, sizes.weights, sizes.dim
    rows, columns = _contextual_step(model, texts, device, chunk)
    down, across = _steps(images, texts, (rows, columns))
    of_block = mixing.choose(sizes, int(min(columns, texts))) if form == "auto" else form
    once = 2.0 * d * d * texts * down + 2.0 * d**3 * down * across
    if of_block == "gram":
        once += (2.0 * n * d * d + 2.0 * w * w * d / sizes.heads) * images * across
        pair, back, number = 4.0 * n * d + 2.0 * w * w, 8.0 * n * d + 2.0 * w * w, w
    else:
        pair, back, number = 6.0 * n * d + 2.0 * d * d, 6.0 * n * d + 2.0 * d * d, w + d
    held = COPIES * min(images, rows) * min(texts, columns) * number * 4.0
    return pair * images * texts + once, back * images * texts + 2 * once, held
