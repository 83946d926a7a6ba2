"""Cross-attention maps of a text decoder for each word of a caption, and Grad-CAM of the first layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kiloword.explain.maps import attentions
from kiloword.generation.decoding import log_probabilities, writer
from kiloword.model.decoder import DecoderMemory
from kiloword.model.encoding import inference
from kiloword.model.heads import Single
from kiloword.model.image import extra, grid
from kiloword.model.model import vit
from kiloword.model.pooling import at_least_float

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.text.tokenizer import Tokenizer


END = "(end)"  # label of the end of a caption


@dataclass(frozen=True)
class WordMaps:
    """Attention of a text decoder to one image for the n words of one caption; the last "word" is its end.

    A word of several tokens has their mean map and joint probability.
    """

    words: list[str]  # n
    maps: Tensor  # [n, P] at the position that predicts the word; each sums to 1
    probabilities: Tensor  # [n] of each word, given the words before it


def explain_words(matcher: Matcher, image: Tensor, texts: Sequence[str]) -> list[WordMaps]:
    """Attention maps for each word of T texts in one image, uint8 [1, 3, H, W]: the mean over heads of the last layer's
    cross-attention to the patches (with attentional pooling, to the queries, times theirs), scaled to sum to 1.

    Raises: ValueError for a model without a text decoder.
    """
    model, decoder = matcher.model, writer(matcher.model)
    cross = decoder.layers[-1].get_submodule("cross.attention")
    pool = model.head.pooling.image_pool.attentional if isinstance(model.head.pooling, Single) else None
    explained = list[WordMaps]()
    with inference(model):
        with attentions(None if pool is None else pool.get_submodule("attention")) as pooled:
            memory = DecoderMemory(decoder.remember(model.memory(model.image_tokens(image))))
        for text in texts:
            packed = matcher.tokenizer.encode([text], model.config.text).to(image.device)
            with attentions(cross) as seen:
                log_p, _ = log_probabilities(model, packed, model.text_tower(packed), memory)
            looks = (seen[0] @ pooled[0] if pooled else seen[0])[0, :, extra(model.config.image) :]  # [L, P]
            start, end = int(matcher.tokenizer.roles.prefix), len(log_p)
            words = words_of(matcher.tokenizer, packed.ids[start:end].tolist())
            predicted = [(word, [start + n - 1 for n in tokens if start + n]) for word, tokens in words]
            places = [*(some for some in predicted if some[1]), (END, [end - 1])]
            parts = [looks[some] for _, some in places]  # [tokens, P] each
            maps = torch.stack([(part / part.sum(1, keepdim=True)).mean(0) for part in parts])
            probabilities = torch.stack([log_p[some].sum().exp() for _, some in places])
            explained.append(WordMaps([word for word, _ in places], maps, probabilities))
    return explained


def words_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Words, split at spaces, of ids without special tokens, and the indices of the tokens of each: a token belongs to
    the last word of the text decoded up to it."""
    words = tokenizer.decode(ids).split()
    groups: list[list[int]] = [[] for _ in words]
    for n in range(len(ids)):
        so_far = len(tokenizer.decode(ids[: n + 1]).split())
        if groups:
            groups[min(max(so_far, 1), len(words)) - 1].append(n)
    return [(word, tokens) for word, tokens in zip(words, groups, strict=True) if tokens]


Target = Literal["score", "caption"]
"""Target of the gradients: the score of image and text, or the log probability of the caption."""


def gradcam(matcher: Matcher, image: Tensor, texts: Sequence[str], target: Target = "score") -> Tensor:
    """ReLU(sum_c alpha_c A_c) of the stem's patches A [P, W]; alpha_c is the mean over patches of d target / d A_c.

    Args: image: uint8 [1, 3, H, W]. Returns: maps [T, P], non-negative, of any scale; 0 where no channel supports the
    text. Errors: ValueError for target "caption" with a model without text decoder.
    """
    model, tower = matcher.model, vit(matcher.model, "gradcam")
    packed = matcher.tokenizer.encode(list(texts), model.config.text).to(image.device)
    leaves: list[Tensor] = []

    def hold(module: Any, inputs: Any, out: Tensor) -> Tensor:
        if leaves:  # the class token of a trunk, after its map
            return out
        leaves.append(out.detach().requires_grad_())
        return leaves[0]

    def values(tokens: Tensor) -> Tensor:
        """What is explained: [T]."""
        if target == "score":
            return model.score(model.head.image(tokens), features)[0]
        keys = writer(model).remember(model.memory(tokens))
        memory = DecoderMemory(keys).take(torch.zeros(len(packed), dtype=torch.int64, device=image.device))
        log_p, text = log_probabilities(model, packed, words, memory)
        return log_p.new_zeros(len(packed)).index_add(0, text, log_p)

    maps = []
    with inference(model), torch.inference_mode(False), tower.patches.register_forward_hook(hold):
        with torch.no_grad():
            words, features = model.encode_text(packed)
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
    return torch.cat(maps)
