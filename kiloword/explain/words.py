"""Cross-attention maps of a text decoder for each word of a caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.explain.maps import attentions
from kiloword.generation.decoding import writer
from kiloword.methods.coca.coca import decoded, prefixes
from kiloword.model.attention import Packing
from kiloword.model.blocks import Keys
from kiloword.model.decoder import Layer, TextDecoder
from kiloword.model.encoding import inference
from kiloword.model.heads import Single
from kiloword.model.image import extra
from kiloword.model.pooling import at_least_float
from kiloword.types import Texts

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.images.inputs import Images
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.model.model import Model

END = "(end)"  # label of the end of a caption


@dataclass(frozen=True)
class WordMaps:
    """Attention of a text decoder to one image for the n words of one caption; the last "word" is its end.

    A word of several tokens has their mean map and joint probability.
    """

    words: list[str]  # n
    maps: Tensor  # [n, P] at the position that predicts the word; each sums to 1
    on_patches: Tensor  # [n] share of the attention on patches; the rest is on class token and others
    probabilities: Tensor  # [n] of each word, given the words before it


def explain_words(matcher: Matcher, images: Images, texts: Sequence[str]) -> list[list[WordMaps]]:
    """Attention maps for each word of T texts in each of I images: I lists of T.

    The mean over heads of the last layer's cross-attention to the patches, scaled to sum to 1. With attentional pooling
    the decoder attends to queries, which attend to the patches: the map is the product of both.

    Raises: ValueError for a model without a text decoder, and for invalid images or texts.
    """
    model, decoder = matcher.model, writer(matcher.model)
    check_texts("explain_words", texts)
    pixels, first = matcher.pixels(images), extra(model.config.image)
    layer = decoder.layers[-1]
    assert isinstance(layer, Layer)
    assert layer.cross is not None
    explained = []
    with inference(model):
        packed = matcher.tokenizer.encode(list(texts), model.config.text).to(pixels.device)
        words = [_words(matcher.tokenizer, model, packed.cut(t, t + 1).ids.tolist()) for t in range(len(texts))]
        tokens = model.text_tower(packed)
        pool = model.head.pooling.image_pool.attentional if isinstance(model.head.pooling, Single) else None
        for image in pixels[:, None]:
            with attentions([] if pool is None else [pool.get_submodule("attention")]) as pooled:
                memory = model.memory(model.image_tokens(image))
            keys = decoder.remember(memory.expand(len(texts), -1, -1))
            with attentions([layer.cross.attention]) as seen:
                log_p, packing = log_probabilities(model, decoder, packed, tokens, keys)
            looks = seen[0] @ pooled[0][0] if pooled else seen[0]  # [T, L, E + P]
            explained.append(list(map(_word_maps, looks[..., first:], packing.pad(log_p), words)))
    return explained


def check_texts(name: str, texts: Sequence[str]) -> None:
    """Raises: ValueError for anything but a list of at least one string; `name`: of the function, for the message."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"{name} got {str(texts)[:60]!r} as texts: expected a list of strings")
    if not texts:
        raise ValueError(f"{name} got no texts: expected at least one")


def _word_maps(looks: Tensor, log_p: Tensor, words: list[tuple[str, list[int]]]) -> WordMaps:
    """Maps of one caption: looks [L, P] and log_p [L] by predicting position; words with their token positions."""
    predicted = [(word, [place - 1 for place in places if place > 0]) for word, places in words]
    predicted = [(word, places) for word, places in predicted if places]  # without a start token nothing predicts one
    seen = [looks[places] for _, places in predicted]  # [tokens, P] each
    return WordMaps(
        [word for word, _ in predicted],
        torch.stack([(part / part.sum(1, keepdim=True)).mean(0) for part in seen]),
        torch.stack([part.sum(1).mean() for part in seen]),
        torch.stack([log_p[places].sum().exp() for _, places in predicted]),
    )


def _words(tokenizer: Tokenizer, model: Model, ids: list[int]) -> list[tuple[str, list[int]]]:
    """Words of one caption and the positions of their tokens; the end is last."""
    end = len(ids) - 1 - len(model.config.text.extra_tokens)
    start = int(tokenizer.roles.prefix)
    inside = words_of(tokenizer, ids[start:end])
    return [*((word, [start + n for n in tokens]) for word, tokens in inside), (END, [end])]


def words_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Words, split at spaces, of ids without special tokens, and the indices of the tokens of each.

    A token belongs to the last word of the text decoded up to it, which holds for any tokenizer.
    """
    words = tokenizer.decode(ids).split()
    groups: list[list[int]] = [[] for _ in words]
    for n in range(len(ids)):
        so_far = len(tokenizer.decode(ids[: n + 1]).split())
        if groups:
            groups[min(max(so_far, 1), len(words)) - 1].append(n)
    return [(word, tokens) for word, tokens in zip(words, groups, strict=True) if tokens]


def log_probabilities(
    model: Model, decoder: TextDecoder, texts: Texts, tokens: Tensor, keys: list[Keys]
) -> tuple[Tensor, Packing]:
    """Log probabilities of the next tokens (words and end) of captions: [S'], and their packing.

    Args: tokens [S, W]: outputs of the text tower; keys: memory of text n, from `TextDecoder.remember`.
    """
    extras = len(model.config.text.extra_tokens)
    x, targets = decoded(model, texts, tokens, keys)
    x, targets = x[targets >= 0], targets[targets >= 0]
    log_p = at_least_float(x @ decoder.table(model.text_tower.tokens).T).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], Packing.of(prefixes(texts, 1 + extras)[1])
