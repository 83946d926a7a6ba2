"""Text towers of other libraries: their tokens in the place of word embeddings."""

from __future__ import annotations

import torch

from kiloword.config.recipes import TextConfig
from kiloword.methods.prolip.inclusion import drop_words, mask_words
from kiloword.types import Batch, Texts


def tokens_of(texts: Texts, width: int = 3) -> Texts:
    """Texts with tokens that tell their place: row n is n, n, ..."""
    rows = torch.arange(len(texts.ids), dtype=torch.float32)[:, None].expand(-1, width)
    return Texts(texts.ids, texts.starts, texts.longest, tokens=rows.clone())


def test_tokens_go_where_ids_go() -> None:
    texts = tokens_of(Texts.pack([[0, 7, 8, 1], [0, 9, 1], [0, 6, 7, 8, 1]]))
    batch = Batch(torch.zeros(2, 1), texts, torch.tensor([0, 0, 1]), *torch.zeros(2, 2).long(), torch.zeros(2).bool())
    first, second = batch.split(2)
    assert first.texts.tokens is not None
    assert second.texts.tokens is not None
    assert first.texts.tokens[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert second.texts.tokens[0].tolist() == [7, 7, 7]
    moved = batch.each(torch.Tensor.double).texts.tokens
    assert moved is not None
    assert moved.dtype == torch.float64
    place, spans = texts.spans(torch.tensor([8, 1]), torch.tensor([2, 1]), 3)
    assert spans.tokens is not None
    assert spans.tokens[:, 2].tolist() == place.tolist() == [8, 9, 1]
    assert texts.cut(3, 3).tokens is not None
    assert Texts.pack([[0, 1]]).cut(0, 1).tokens is None


def test_hidden_words_hide_their_tokens() -> None:
    texts, config = tokens_of(Texts.pack([[0, 7, 8, 9, 6, 1], [0, 9, 8, 1]])), TextConfig()
    masked = mask_words(texts, torch.tensor([3, 4]), 0.5, config)
    assert masked.tokens is not None
    assert texts.tokens is not None
    hidden = masked.ids == config.special["mask"]
    assert hidden.sum() == 3
    assert torch.equal(masked.tokens, texts.tokens.masked_fill(hidden[:, None], 0))
    dropped = drop_words(texts, torch.tensor([3, 4]), 0.5, config)
    assert dropped.tokens is not None
    assert torch.equal(dropped.tokens, texts.tokens[~hidden])
