"""Autoregressive decoding with text tower and text decoder, with cached keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from kiloword.methods.coca.coca import decoded, decoder_of
from kiloword.model.attention import KeyValueCache
from kiloword.model.decoder import DecoderMemory, TextDecoder
from kiloword.model.model import Model
from kiloword.model.pooling import at_least_float
from kiloword.types import Texts


def text_decoder(model: Model) -> TextDecoder:
    """Raises: ValueError for a model without one."""
    if "text_decoder" not in model.more:
        raise ValueError(
            "this model has no text decoder, so it cannot generate text: train coca, sycoca or a method with +caption."
        )
    return decoder_of(model)


def writer(model: Model) -> TextDecoder:
    """The text decoder of images. Raises: ValueError for a model without one."""
    if "fuser" in model.more:
        raise ValueError(
            "this model answers questions: its decoder needs a question about the image. Use a model of coca, sycoca "
            "or another method with +caption."
        )
    return text_decoder(model)


class ModelDecoding:
    """`Decoding` of a model. Consecutive texts of one image share its memory if all images have equal numbers."""

    def __init__(self, model: Model, memory: DecoderMemory) -> None:
        self._tower, self._decoder = model.text_tower, text_decoder(model)
        self._table = table_of(model)
        self._caches = [KeyValueCache() for _ in self._tower.blocks], [KeyValueCache() for _ in self._decoder.layers]
        self._whole, self._of = memory, torch.arange(len(memory), device=self._table.device)
        self._seen = self._of  # images of the current memory
        self._memory, self._packing = memory, memory.packing()

    def step(self, ids: Tensor) -> Tensor:
        """Newest tokens [N] -> logits of the next ones, at least fp32 [N, V]."""
        towers, layers = self._caches
        x = self._tower.step(ids[:, None], towers)
        x = self._decoder.step(x, self._memory.keys, layers, self._packing)[:, 0]
        return next_logits(x, self._table)

    def reorder(self, rows: Tensor) -> None:
        """Row n continues from row rows[n]."""
        for cache in (*self._caches[0], *self._caches[1]):
            cache.take(rows)
        self._of = self._of[rows]
        images, counts = torch.unique_consecutive(self._of, return_counts=True)
        needed = images if bool((counts == counts[0]).all()) else self._of
        if not torch.equal(needed, self._seen):
            self._seen, self._memory = needed, self._whole.take(needed)
            self._packing = self._memory.packing()


def table_of(model: Model) -> Tensor:
    """Output weight [V, W] of the text decoder, at least fp32."""
    return at_least_float(text_decoder(model).table(model.text_tower.tokens))


def next_logits(x: Tensor, table: Tensor) -> Tensor:
    """Logits of the next tokens [N, V], without autocast: in bf16 close logits would be equal.

    Args: x [N, W]: decoder outputs; table [V, W]: from `table_of`.
    """
    with torch.autocast(x.device.type, enabled=False):
        return x.to(table.dtype) @ table.T


def log_probabilities(model: Model, texts: Texts, tokens: Tensor, memory: DecoderMemory) -> tuple[Tensor, Tensor]:
    """Log probability of each next token (words and end) of texts [S'], and its text [S'].

    Args: tokens [S, W]: outputs of the text tower; memory: row n for text n.
    """
    x, targets = decoded(model, texts, tokens, memory.keys, memory.packing())
    x, targets = x[targets >= 0], targets[targets >= 0]
    log_p = next_logits(x, table_of(model)).log_softmax(-1)
    lengths = texts.starts.diff() - 1 - len(model.config.text.extra_tokens)
    return log_p.gather(1, targets[:, None])[:, 0], torch.repeat_interleave(lengths)
