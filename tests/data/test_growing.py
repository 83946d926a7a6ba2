"""Loader processes that start by themselves: the same batches, and only where waiting for data would cost more."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import pytest
import torch

from kiloword.config.recipes import DataConfig, TextConfig
from kiloword.data import growing
from kiloword.data.loader import Loader
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import Record, Source

STEPS, BATCH, ROWS = 12, 4, 24


@dataclass
class Slow:
    """Images that take their time."""

    seconds: float
    name: str = "slow"
    fingerprint: str = "s"

    def __len__(self) -> int:
        return ROWS

    def key(self, row: int) -> str:
        return f"k{row}"

    def record(self, row: int) -> Record:
        time.sleep(self.seconds)
        return Record(self.key(row), np.full((8, 8, 3), row, np.uint8), [f"image {row}"])


def loader(seconds: float, **changes: int) -> Loader:
    tokenizer = Tokenizer.train([f"image {row}" for row in range(ROWS)], 300)
    text = TextConfig(context=16, vocab=300)
    source, order = cast(Source, Slow(seconds)), Order(ROWS, BATCH, seed=0)
    return Loader(source, order, DataConfig(sources=("slow",)), text, 8, tokenizer, **changes)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "LOOKS_S", 0.1)
    monkeypatch.setattr(growing, "LEAST_LEFT_S", 0.1)


def test_processes_start_where_a_run_waits_and_change_no_batch() -> None:
    plain, grown, notes = loader(0.0), loader(0.01), list[str]()
    batches = list(growing.batches(grown, 2, STEPS, 1, notes.append))
    assert grown.workers == 1
    assert len(notes) == 1
    assert "loader processes prepare it (1 at a time; --workers sets their number)." in notes[0]
    expected = list(plain.batches(2, STEPS))
    assert len(batches) == len(expected) == STEPS - 2
    assert all(torch.equal(a.images, b.images) for a, b in zip(batches, expected, strict=True))


def test_none_start_where_they_would_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that does not wait, one that is nearly over, one without a core to spare, and where nothing can fork."""
    notes = list[str]()

    def workers(seconds: float, most: int, computing: float = 0.0) -> int:
        of = loader(seconds)
        for _ in growing.batches(of, 0, STEPS, most, notes.append):
            time.sleep(computing)
        return of.workers

    assert workers(0.0, 1, computing=0.03) == 0
    assert workers(0.01, 0) == 0
    monkeypatch.setattr(growing, "LEAST_LEFT_S", 100.0)
    assert workers(0.01, 1) == 0
    monkeypatch.setattr(growing, "LEAST_LEFT_S", 0.1)
    monkeypatch.setattr(growing, "_forks", lambda: False)
    assert workers(0.01, 1) == 0
    assert notes == []


def test_as_many_start_as_the_wait_asks_for() -> None:
    of = loader(0.01)  # a batch takes 0.04 s
    for _ in islice(growing.batches(of, 0, 40, 8, lambda sentence: None), 30):
        time.sleep(0.02)
    assert of.workers in (2, 3)


def test_a_loader_with_processes_keeps_its_number() -> None:
    of = loader(0.01, workers=2)
    list(growing.batches(of, 0, STEPS, 1, pytest.fail))
    assert of.workers == 2
