"""Grad-CAM: attribute the score of a text, or its probability under the decoder, to patches of the first layer.

Source: Selvaraju et al., ICCV 2017 (arXiv:1610.02391), eq. 1 and 2; the first layer: arXiv:2401.02137, figure 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kiloword.generation.decoding import log_probabilities, writer
from kiloword.model.decoder import DecoderMemory
from kiloword.model.encoding import inference
from kiloword.model.image import grid
from kiloword.model.model import vit
from kiloword.model.pooling import at_least_float

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.images.inputs import Images

Target = Literal["score", "caption"]
"""Target of the gradients: the score of image and text, or the log probability of the caption."""


def gradcam(matcher: Matcher, images: Images, texts: Sequence[str], target: Target = "score") -> Tensor:
    """ReLU(sum_c alpha_c A_c) of the stem's patches A [P, W]; alpha_c is the mean over patches of d target / d A_c.

    Returns: maps [I, T, P], non-negative, of any scale; 0 where no channel supports the text.
    Errors: ValueError for target "caption" with a model without text decoder.
    """
    model, pixels = matcher.model, matcher.pixels(images)
    tower, packed = vit(model, "gradcam"), matcher.tokenizer.encode(list(texts), model.config.text).to(pixels.device)
    leaves: list[Tensor] = []

    def hold(module: Any, inputs: Any, out: Tensor) -> Tensor:
        if leaves:  # the class token of a trunk, after its map
            return out
        leaves.append(out.detach().requires_grad_())
        return leaves[0]

    def values(tokens: Tensor) -> Tensor:
        """What is explained of one image: [T]."""
        if target == "score":
            scores: Tensor = model.score(model.head.image(tokens), features)[0]
            return scores
        keys = writer(model).remember(model.memory(tokens))
        memory = DecoderMemory(keys).take(torch.zeros(len(packed), dtype=torch.int64, device=pixels.device))
        log_p, text = log_probabilities(model, packed, words, memory)
        return log_p.new_zeros(len(packed)).index_add(0, text, log_p)

    maps = []
    with inference(model), torch.inference_mode(False), tower.patches.register_forward_hook(hold):
        with torch.no_grad():
            words, features = model.encode_text(packed)
        for image in pixels[:, None]:
            leaves.clear()
            with torch.enable_grad():
                each = values(model.image_tokens(image))
            a = leaves[0].detach()  # the output of the stem's linear part; positions are not added yet
            if tower.stem is not None:
                used = grid(model.config.image) * model.config.image.patch
                a = a + tower.stem(model.normalise(image)[..., :used, :used]).detach()
            for value in each:
                (gradient,) = torch.autograd.grad(value, leaves, retain_graph=True)
                alpha = at_least_float(gradient).mean(1, keepdim=True)  # [1, 1, W]
                maps.append((alpha * at_least_float(a)).sum(-1).relu())
    return torch.cat(maps).view(len(pixels), len(packed), -1)
