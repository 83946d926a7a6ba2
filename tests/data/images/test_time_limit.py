"""A sample that takes too long to decode is named and replaced, with and without workers; nothing else changes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_decode import scans

from cases import mostly_slow
from kiloword.config.recipes import DataConfig, TextConfig
from kiloword.data.images import time_limit
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.loader import Loader
from kiloword.data.reading import eval_batches
from kiloword.data.sampler import Order
from kiloword.data.steps import in_order
from kiloword.data.tars.shards import TarSource
from kiloword.data.text.tokenizer import Tokenizer
from tars import pairs, write_tar

ROWS, SLOW = 12, 5


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TarSource:
    """Decoding its row 5 takes 1 s, in one call of libjpeg; the limit is 0.2 s."""
    monkeypatch.setattr(time_limit, "SECONDS", 0.2)
    monkeypatch.setattr(time_limit, "POLL_S", 0.05)
    monkeypatch.setattr("kiloword.data.steps.POLL_S", 0.05)
    members = pairs(ROWS)
    slow = scans(80, Image.new("L", (4200, 4200)))
    members = {name: slow if name == f"{SLOW:04d}.png" else body for name, body in members.items()}
    return TarSource("x", [write_tar(tmp_path / "x.tar", members)])


def loader(source: TarSource, workers: int, given_up: set[int]) -> Loader:
    tokenizer = Tokenizer.train(["image 0123456789"] * 20, 300)
    return Loader(
        source,
        Order(ROWS, 4, 0),
        DataConfig(sources=("x",), decoder="simplejpeg"),
        TextConfig(vocab=512),
        32,
        tokenizer,
        workers=workers,
        given_up=given_up,
    )


@pytest.mark.parametrize("workers", mostly_slow([0, 1], 0))
def test_a_slow_row_is_replaced(source: TarSource, workers: int) -> None:
    pytest.importorskip("simplejpeg")
    given_up: set[int] = set()
    batches = list(loader(source, workers, given_up).batches(0, 3))
    assert given_up == {SLOW}
    assert [(s.row, s.key, s.reason) for b in batches for s in b.skipped] == [
        (SLOW, f"{SLOW:04d}", "decoding takes more than 0.2 s of processor time")
    ]
    assert [len(batch) for batch in batches] == [4, 4, 4]
    again = list(loader(source, 0, given_up).batches(0, 3))  # as a resumed run reads: nothing is late
    for one, other in zip(batches, again, strict=True):
        assert np.array_equal(one.images, other.images)
        assert np.array_equal(one.texts.ids, other.texts.ids)
        assert one.skipped == other.skipped


@pytest.mark.parametrize("workers", mostly_slow([0, 1], 0))
def test_evaluation_leaves_it_out(source: TarSource, workers: int) -> None:
    batches = list(eval_batches(source, 32, batch=4, workers=workers))
    assert [row for batch in batches for row in batch.rows] == [row for row in range(ROWS) if row != SLOW]
    assert [(s.row, s.reason) for b in batches for s in b.skipped] == [
        (SLOW, "decoding takes more than 0.2 s of processor time")
    ]


def test_waiting_is_not_late(source: TarSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only processor time counts: a process that stands still, or waits for a core, loses no row."""
    call = EvalTransform.__call__

    def slept(self: EvalTransform, image: bytes) -> object:
        time.sleep(0.5 if len(image) < 5000 else 0)
        return call(self, image)

    monkeypatch.setattr(EvalTransform, "__call__", slept)
    batches = list(eval_batches(source, 32, batch=2, parts=[range(2)]))
    assert [row for batch in batches for row in batch.rows] == [0, 1]


def test_the_thread_ends_with_the_batches(source: TarSource) -> None:
    before = threading.active_count()
    batches = eval_batches(source, 32, batch=4)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_errors_come_out_as_they_are(source: TarSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: EvalTransform, image: bytes) -> object:
        raise KeyError("bug")

    monkeypatch.setattr(EvalTransform, "__call__", fails)
    with pytest.raises(KeyError, match="bug"):
        next(eval_batches(source, 32, batch=4))


def test_an_interrupted_reader_ends_its_thread() -> None:
    """One that still decodes while the process ends makes torch and OpenCV abort it: exit code 134 for 130 or 143."""

    def make(step: int) -> int:
        for row in range(100):
            with time_limit.decoding(row):
                if row == 3:  # the main thread waits for this batch
                    os.kill(os.getpid(), signal.SIGALRM)
                time.sleep(0.02)
        return step

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    threads, before = set(threading.enumerate()), signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(in_order(make, range(3), 0, apart=True))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert set(threading.enumerate()) <= threads  # those of other tests may end meanwhile


def test_a_slot_that_is_read_while_it_is_written_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "SECONDS", 0.0)
    monkeypatch.setattr(time_limit, "_busy", lambda process, thread: 1e6)  # a thread that has worked for long
    limit = time_limit.TimeLimit(1, set())
    idle, size = limit._slots[:], len(limit._slots)
    limit.begin(0, 1, 1, 7)
    written = limit._slots[:]
    for cut in range(size):
        limit._slots[:] = written[:cut] + idle[cut:]
        limit.check()
    limit._slots[:] = written
    with pytest.raises(time_limit.Late):
        limit.check()
