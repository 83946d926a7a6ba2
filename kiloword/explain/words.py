"""Cross-attention maps of a text decoder for each word of a caption.

Not used in training: as in `maps.py`, attention probabilities are recomputed from the inputs that hooks record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from kiloword.generation.decoding import writer
from kiloword.methods.coca.captioning import decoded, prefixes
from kiloword.model.attention import Packing
from kiloword.model.blocks import CrossAttention, Keys
from kiloword.model.decoder import Layer, TextDecoder
from kiloword.model.encoding import inference
from kiloword.model.heads import Single
from kiloword.model.image import extra
from kiloword.model.pooling import AttentionalPool, at_least_float
from kiloword.types import Texts

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.data.images.inputs import Images
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.model.model import Model

Layers = Literal["last", "mean"]
"""Cross-attention of the last layer, or the mean of all layers."""

When = Literal["writing", "reading"]
"""writing: attention at the position that predicts a word; reading: at the position of the word."""

END = "(end)"  # label of the end of a caption


@dataclass(frozen=True)
class WordMaps:
    """Attention of a text decoder to one image for the n words of one caption; the last "word" is its end.

    `grid`: rows x columns of patches, P in all. A word of several tokens has their mean map and joint probability.
    """

    words: list[str]  # n
    maps: Tensor  # [n, P], each sums to 1
    on_patches: Tensor  # [n] share of the attention on patches; the rest is on class token and others
    chances: Tensor  # [n] probability of each word, given the words before it
    grid: tuple[int, int]


def explain_words(
    matcher: Matcher,
    images: Images,
    texts: Sequence[str],
    layers: Layers = "last",
    when: When = "writing",
) -> list[list[WordMaps]]:
    """Attention maps for each word of T texts in each of I images: I lists of T.

    The mean over heads of the cross-attention to the patches, scaled to sum to 1. With attentional pooling the decoder
    attends to queries, which attend to the patches: the map is the product of both.

    Raises: ValueError for a model without a text decoder, and for invalid images or texts.
    """
    decoder = writer(matcher.model)
    check_texts("explain_words", texts)
    check_choice("layers", layers, Layers)
    check_choice("when", when, When)
    pixels = matcher.pixels(images)
    with inference(matcher.model):
        packed = matcher.tokenizer.encode(list(texts), matcher.model.config.text).to(pixels.device)
        return _explained(matcher.model, matcher.tokenizer, decoder, pixels, packed, layers, when)


def check_texts(name: str, texts: Sequence[str]) -> None:
    """Raises: ValueError for anything but a list of at least one string; `name`: of the function, for the message."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"{name} got {str(texts)[:60]!r} as texts: expected a list of strings")
    if not texts:
        raise ValueError(f"{name} got no texts: expected at least one")


def check_choice(name: str, value: str, kind: Any) -> None:
    """Raises: ValueError for a value that is not in the Literal `kind`."""
    if value not in get_args(kind):
        raise ValueError(f"{name} is {value!r}: expected {' or '.join(get_args(kind))}.")


def _explained(
    model: Model, tokenizer: Tokenizer, decoder: TextDecoder, pixels: Tensor, texts: Texts, layers: Layers, when: When
) -> list[list[WordMaps]]:
    tokens = model.text_tower(texts)
    with looking(_pools(model)) as gathered:
        memory = model.memory(model.image_tokens(pixels))
    first, side = extra(model.config.image), model.config.image.size // model.config.image.patch
    groups = [_words(tokenizer, model, texts.cut(t, t + 1).ids.tolist()) for t in range(len(texts))]
    explained = []
    for i in range(len(pixels)):
        keys = decoder.remember(memory[i : i + 1].expand(len(texts), -1, -1))
        with looking(_crossings(decoder, layers)) as seen:
            log_p, packing = log_chances(model, decoder, texts, tokens, keys)
        looks = torch.stack(seen).mean(0)  # [T, L, M]
        looks = looks @ gathered[0][i] if gathered else looks  # [T, L, E + P]
        rows = packing.pad(log_p)  # [T, L]
        explained.append(
            [_word_maps(looks[t, :, first:], rows[t], groups[t], (side, side), when) for t in range(len(texts))]
        )
    return explained


def _word_maps(
    looks: Tensor, log_p: Tensor, groups: list[tuple[str, list[int]]], grid: tuple[int, int], when: When
) -> WordMaps:
    """Maps of one caption: looks [L, P] and log_p [L] by predicting position; groups: words and token positions."""
    last = max(place for _, places in groups for place in places) - 1
    maps, on_patches, chances, words = [], [], [], []
    for word, places in groups:
        predicted = [place - 1 for place in places if place > 0]
        if not predicted:  # the first word, for a tokenizer without start token
            continue
        here = predicted if when == "writing" else [min(place + 1, last) for place in predicted]
        seen = looks[here]  # [tokens, P]
        words.append(word)
        on_patches.append(seen.sum(1).mean())
        maps.append((seen / seen.sum(1, keepdim=True)).mean(0))
        chances.append(log_p[predicted].sum().exp())
    return WordMaps(words, torch.stack(maps), torch.stack(on_patches), torch.stack(chances), grid)


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


def log_chances(
    model: Model, decoder: TextDecoder, texts: Texts, tokens: Tensor, keys: list[Keys]
) -> tuple[Tensor, Packing]:
    """Log probabilities of the next tokens (words and end) of captions: [S'], and their packing.

    Args: tokens [S, W]: outputs of the text tower; keys: memory of text n, from `TextDecoder.remember`.
    """
    extras = len(model.config.text.extra_tokens)
    x, targets = decoded(decoder, model, texts, tokens, keys, extras)
    x, targets = x[targets >= 0], targets[targets >= 0]
    log_p = at_least_float(x @ decoder.table(model.text_tower.tokens).T).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], Packing.of(prefixes(texts, 1 + extras)[1])


@contextmanager
def looking(attentions: Sequence[CrossAttention]) -> Iterator[list[Tensor]]:
    """Context that records the attention probabilities of cross-attentions, mean over heads: [N, L, M] each."""
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple[Tensor, Keys, Packing | None, Packing | None]) -> None:
        assert isinstance(module, CrossAttention)
        x, keys, packing, _ = inputs
        seen.append(probabilities(module, x, keys[0], packing).mean(1))

    handles = [attention.register_forward_pre_hook(look) for attention in attentions]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def probabilities(attention: CrossAttention, x: Tensor, k: Tensor, packing: Packing | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) of a cross-attention: [N, H, L, M].

    Args: x dense [N, L, W] or packed [S, W]; k dense [N, M, H, d].
    """
    q = attention.q(x).unflatten(-1, (attention.heads, -1))
    q = q if packing is None else packing.pad(q)
    logits: Tensor = torch.einsum("nqhd,nmhd->nhqm", at_least_float(q), at_least_float(k)) * q.shape[-1] ** -0.5
    return logits.softmax(-1)


def _crossings(decoder: TextDecoder, layers: Layers) -> list[CrossAttention]:
    every = []
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        assert layer.cross is not None
        every.append(layer.cross.attention)
    return every[-1:] if layers == "last" else every


def _pools(model: Model) -> list[CrossAttention]:
    """The attention of the pooling queries, if any, whose outputs the decoder attends to."""
    pooling = model.head.pooling
    pool = pooling.image_pool.attentional if isinstance(pooling, Single) else None
    assert pool is None or isinstance(pool, AttentionalPool)
    return [] if pool is None else [pool.attention]
