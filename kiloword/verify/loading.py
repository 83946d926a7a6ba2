"""What the loader makes of a method's transforms and inputs: the same on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from kiloword.config.recipes import DataConfig
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import TextGroup
from kiloword.verify.batch import IMAGES, MethodChoice, config, slots_of

ROWS = 64


def made_otherwise(method: str | MethodChoice) -> float:
    """Bytes that differ between a batch of scenes made on one rank, and on two ranks with a worker."""
    source, text, slots = open_source(f"scenes:train?n={ROWS}", 32), config().text, slots_of(method)
    tokenizer = Tokenizer.train([c for row in range(ROWS) for c in source.record(row).captions], 500)

    def loaded(rank: int, ranks: int, workers: int) -> list[Tensor]:
        made = {"transforms": slots.transforms, "inputs": slots.inputs, "rank": rank, "ranks": ranks}
        loader = Loader(
            source,
            Order(ROWS, IMAGES, 0),
            DataConfig(),
            text,
            32,
            tokenizer,
            workers=workers,
            **made,  # type: ignore[arg-type]
        )
        batch = next(loader.batches(1, 2))
        groups = (value.texts.ids if isinstance(value, TextGroup) else value for value in batch.inputs.values())
        return [batch.images, batch.texts.ids, *groups]

    joined = [torch.cat(parts) for parts in zip(loaded(0, 2, 1), loaded(1, 2, 1), strict=True)]
    pairs = zip(joined, loaded(0, 1, 0), strict=True)
    return float(sum((a != b).sum() if a.shape == b.shape else float("inf") for a, b in pairs))
