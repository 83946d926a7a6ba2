"""From the loader to the device: micro-batches are split before the copy, which has a stream of its own on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.distributed.device import on_device
from kiloword.verify.batch import batch
from sources import tensors


def test_a_gpu_copies_micro_batches_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the streams of `torch.cuda`. A step begins before the next batch is asked for."""
    events, on = list[Any](), ["compute"]

    @contextmanager
    def using(stream: Any) -> Iterator[None]:
        on[0] = stream.name
        yield
        on[0] = "compute"

    def current(device: object) -> Any:
        return SimpleNamespace(name=on[0], wait_stream=lambda other: events.append(("waits for", other.name)))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(name="copies"))
    monkeypatch.setattr(torch.cuda, "stream", using)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(Tensor, "to", lambda x, *to, **how: events.append(("copied", on[0])) or x)  # type: ignore[func-returns-value]
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: events.append(("kept for", stream.name)))
    whole, asked = batch(0, 4), list[int]()
    count = 2 * len(tensors(whole))  # of both halves: none may be freed while the step still reads it
    for step, (given, micro) in enumerate(
        on_device((asked.append(n) or whole for n in range(3)), torch.device("cuda"), 2)  # type: ignore[func-returns-value]
    ):
        assert asked == [*range(step + 1)]
        assert given is whole
        assert [len(piece) for piece in micro] == [2, 2]
        assert [*dict.fromkeys(events)] == [("copied", "copies"), ("waits for", "copies"), ("kept for", "compute")]
        assert events.count(("copied", "copies")) >= events.count(("kept for", "compute")) == count
        events.clear()


def test_on_the_cpu_nothing_is_copied() -> None:
    whole = batch(0, 4)
    [(_, micro)] = on_device(iter([whole]), torch.device("cpu"), 2)
    assert micro[0].images.data_ptr() == whole.images.data_ptr()
    assert torch.equal(torch.cat([piece.texts.ids for piece in micro]), whole.texts.ids)
