"""Grad-CAM: attribute the score of a text, or its probability under the decoder, to patches of the first layer.

Source: Selvaraju et al., ICCV 2017 (arXiv:1610.02391), eq. 1 and 2; the first layer: arXiv:2401.02137, figure 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from kiloword.explain.words import check_texts, log_probabilities
from kiloword.generation.decoding import writer
from kiloword.model.encoding import inference
from kiloword.model.image import ImageTower
from kiloword.model.model import vit
from kiloword.model.pooling import at_least_float

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.images.inputs import Images

TOGETHER = 16  # images whose activations are held at once
Target = Literal["score", "caption"]
"""Target of the gradients: the score of image and text, or the log probability of the caption."""


def gradcam(matcher: Matcher, images: Images, texts: Sequence[str], target: Target = "score") -> Tensor:
    """ReLU(sum_c alpha_c A_c) of the stem's patches A [P, W]; alpha_c is the mean over patches of d target / d A_c.

    Returns: maps [I, T, P], non-negative, of any scale; 0 where no channel supports the text.
    Errors: ValueError for an invalid target, and for target "caption" with a model without text decoder.
    """
    model = matcher.model
    tower = vit(model, "gradcam")
    check_texts("gradcam", texts)
    if target not in get_args(Target):
        raise ValueError(f"target is {target!r}: expected {' or '.join(get_args(Target))}.")
    values = _scores(matcher, texts) if target == "score" else partial(_log_likelihoods, matcher, texts)
    maps = []
    with inference(model), torch.inference_mode(False), torch.enable_grad():
        for part in torch.split(matcher.pixels(images), TOGETHER):
            with held(tower) as seen:  # a graph holds these images and one text at a time
                maps.append(torch.stack([_map(one, seen) for one in values(model.image_tokens(part))], 1))
    return torch.cat(maps)


def _map(values: Tensor, seen: dict[str, Tensor]) -> Tensor:
    """Maps [I, P] for the values [I] of one text; images are independent of each other."""
    (gradient,) = torch.autograd.grad(values.sum(), seen["leaf"], retain_graph=True)
    alpha = at_least_float(gradient).mean(1, keepdim=True)  # [I, 1, W]
    return (alpha * at_least_float(seen["activations"])).sum(-1).relu()


def _scores(matcher: Matcher, texts: Sequence[str]) -> Callable[[Tensor], Sequence[Tensor]]:
    """From image tokens to the scores [I] of each text."""
    features = {name: value.clone() for name, value in matcher.encode_text(texts).items()}  # no inference tensors
    return lambda tokens: matcher.model.score(matcher.model.head.image(tokens), features).unbind(1)


def _log_likelihoods(matcher: Matcher, texts: Sequence[str], tokens: Tensor) -> Iterator[Tensor]:
    """Log probabilities [I] of each text, its end included, given image tokens."""
    model, decoder = matcher.model, writer(matcher.model)
    memory = decoder.remember(model.memory(tokens))
    for text in texts:
        packed = matcher.tokenizer.encode([text] * len(tokens), model.config.text).to(tokens.device)
        log_p, packing = log_probabilities(model, decoder, packed, model.text_tower(packed), memory)
        yield log_p.new_zeros(len(tokens)).index_add(0, packing.text, log_p)


@contextmanager
def held(tower: ImageTower) -> Iterator[dict[str, Tensor]]:
    """While the tower runs, hold its first layer: "activations" [I, P, W], and "leaf", by which gradients are taken.

    The leaf is the output of the stem's linear part, to which the convolutions' is added; positions are not yet.
    """
    seen: dict[str, Tensor] = {}

    def hold(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        if seen:  # the class token of a trunk, after its map
            return out
        seen["leaf"] = out.detach().requires_grad_()
        seen["activations"] = seen["leaf"].detach()
        return seen["leaf"]

    def add(module: nn.Module, inputs: Any, out: Tensor) -> None:
        seen["activations"] = seen["activations"] + out.detach()

    with ExitStack() as hooks:
        hooks.enter_context(tower.patches.register_forward_hook(hold))
        if tower.stem is not None:
            hooks.enter_context(tower.stem.register_forward_hook(add))
        yield seen
