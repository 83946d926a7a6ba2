"""Decoding without cached keys and values: the reference of `kiloword.generation.decoding.ModelDecoding`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.generation.decoding import next_logits, table_of, text_decoder
from kiloword.model.decoder import DecoderMemory
from kiloword.model.model import Model
from kiloword.types import Texts


class WholeDecoding:
    """Reference `Decoding` without cache: every step runs all tokens through text tower and decoder, as in training."""

    def __init__(self, model: Model, memory: DecoderMemory) -> None:
        self._model, self._decoder, self._memory = model, text_decoder(model), memory
        self._table = table_of(model)
        self._ids = torch.empty(len(memory), 0, dtype=torch.int64, device=self._table.device)

    def step(self, ids: Tensor) -> Tensor:
        """Newest tokens [N] -> logits of the next ones, at least fp32 [N, V]."""
        self._ids = torch.cat([self._ids, ids[:, None]], 1)
        n, longest = self._ids.shape
        starts = torch.arange(0, n * longest + 1, longest, device=ids.device)
        texts = Texts(self._ids.flatten(), starts, longest)
        packing = self._model.text_tower.packing(texts)
        x = F.pad(self._model.text_tower(texts), (0, 0, 0, packing.tail))
        x = self._decoder(x, self._memory.keys, packing, self._memory.packing())[starts[1:] - 1]
        return next_logits(x, self._table)

    def reorder(self, rows: Tensor) -> None:
        """Row n continues from row rows[n]."""
        self._ids, self._memory = self._ids[rows], self._memory.take(rows)
