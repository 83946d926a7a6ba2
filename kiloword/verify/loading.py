"""What the loader makes of a method's transforms and inputs: the same on all ranks, of the stated shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kiloword.config.recipes import DataConfig
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import Batch, TextGroup
from kiloword.verify.batch import IMAGES, MethodChoice, config, slots_of
from kiloword.verify.checks import RANDOM_INPUT, Check

ROWS = 64


def loaded(method: str | MethodChoice, rank: int = 0, ranks: int = 1, workers: int = 0) -> Batch:
    """A rank's share of a batch of scenes."""
    source, text, slots = open_source(f"scenes:train?n={ROWS}", 32), config().text, slots_of(method)
    tokenizer = Tokenizer.train([c for row in range(ROWS) for c in source.record(row).captions], 500)
    made = {"transforms": slots.transforms, "inputs": slots.inputs, "rank": rank, "ranks": ranks, "workers": workers}
    loader = Loader(source, Order(ROWS, IMAGES, 0), DataConfig(), text, 32, tokenizer, **made)  # type: ignore[arg-type]
    return next(loader.batches(1, 2))


def what_is_loaded(method: str | MethodChoice) -> Iterator[Check]:
    """What the loader makes for the method."""
    slots = slots_of(method)
    if slots.transforms or slots.inputs:
        name = "bytes of a batch that are made otherwise on other ranks or workers"
        yield Check(name, made_otherwise(method), 0, RANDOM_INPUT)
    if slots.inputs:
        model, wrong = slots.shape(config()), []
        for name, value in loaded(method).inputs.items():
            shape = slots.inputs[name].shape
            stated = "texts" if shape is None else f"torch.uint8 {list(shape(model))}"
            made = "texts" if isinstance(value, TextGroup) else f"{value.dtype} {list(value.shape[1:])}"
            wrong += [f"{name}: made {made}, stated {stated}"] if made != stated else []
        yield Check("inputs of another kind or shape than stated", len(wrong), 0, where="; ".join(wrong))


def made_otherwise(method: str | MethodChoice) -> float:
    """Bytes that differ between a batch made on one rank, and on two ranks with a worker."""

    def tensors(made: Batch) -> list[Tensor]:
        groups = (value.texts.ids if isinstance(value, TextGroup) else value for value in made.inputs.values())
        return [made.images, made.texts.ids, *groups]

    whole, parts = tensors(loaded(method)), [tensors(loaded(method, rank, 2, 1)) for rank in (0, 1)]
    joined = [torch.cat(values) for values in zip(*parts, strict=True)]
    if any(a.shape != b.shape for a, b in zip(joined, whole, strict=True)):
        return float("inf")
    return float(sum((a != b).sum() for a, b in zip(joined, whole, strict=True)))
