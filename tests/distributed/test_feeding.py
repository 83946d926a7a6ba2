"""From the loader to the device: micro-batches are split before the copy, which has a stream of its own on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.distributed.device import on_device
from kiloword.types import Batch, Texts


def batch(images: int = 4, captions: int = 2) -> Batch:
    """`captions` of one word for each image, with every optional field."""
    count = images * captions
    return Batch(
        images=torch.zeros(images, 3, 2, 2, dtype=torch.uint8),
        texts=Texts.pack([[n] for n in range(count)]),
        image_of_text=torch.arange(images).repeat_interleave(captions),
        seeds=torch.arange(images),
        position=torch.arange(images),
        composed=torch.zeros(images, dtype=torch.bool),
        image_features={"teacher": torch.rand(images, 3)},
        text_features={"truth": torch.rand(count, images)},
        questions=Texts.pack([[n] for n in range(images)]),
    )


def tensors(item: Any) -> list[Tensor]:
    found = list[Tensor]()
    item.each(lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


class Card:
    """Stands in for `torch.cuda`: what is asked of it, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.on = "compute"

    def stream_of(self, device: object) -> Any:
        return SimpleNamespace(name="copies")

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        self.on = stream.name
        yield
        self.on = "compute"

    def current(self, device: object) -> Any:
        return SimpleNamespace(name=self.on, wait_stream=lambda other: self.events.append(("waits for", other.name)))

    def copied(self, batch: Batch) -> Batch:
        self.events.append((f"{len(batch)} images", self.on))
        return batch

    def kept(self, stream: Any) -> None:
        self.events.append(("kept for", stream.name))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "Stream", card.stream_of)
    monkeypatch.setattr(torch.cuda, "stream", card.using)
    monkeypatch.setattr(torch.cuda, "current_stream", card.current)
    monkeypatch.setattr(Batch, "to", lambda batch, device: card.copied(batch))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: card.kept(stream))
    return card


def test_a_gpu_copies_micro_batches_beside_the_computation(card: Card) -> None:
    whole = batch()
    for given, micro in on_device(iter([whole, whole]), torch.device("cuda"), 2):
        assert given is whole
        assert [len(piece) for piece in micro] == [2, 2]
        kept = len(tensors(whole)) * 2  # of both halves: none may be freed while the step still reads it
        assert card.events == [
            *[("2 images", "copies")] * 2,
            ("waits for", "copies"),
            *[("kept for", "compute")] * kept,
        ]
        card.events.clear()


def test_a_step_begins_before_the_next_batch_is_asked_for(card: Card) -> None:
    asked = []
    pairs = on_device((asked.append(n) or batch() for n in range(3)), torch.device("cuda"), 1)  # type: ignore[func-returns-value]
    next(pairs)
    assert asked == [0]


def test_on_the_cpu_nothing_is_copied() -> None:
    whole = batch()
    [(_, micro)] = on_device(iter([whole]), torch.device("cpu"), 2)
    assert micro[0].images.data_ptr() == whole.images.data_ptr()
    assert torch.equal(torch.cat([piece.texts.ids for piece in micro]), whole.texts.ids)


def test_a_changed_copy_is_not_counted_by_what_it_was_before() -> None:
    moved = batch().to("cpu").to("cpu")
    assert moved.host is moved.before_move
    assert moved.host.before_move is None
    shorter = replace(moved, texts=moved.texts.cut(0, 4))
    assert shorter.host is shorter


def test_every_tensor_of_a_batch_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x.clone())  # needs a GPU
    whole = batch()
    pinned = whole.pin_memory()
    assert len(tensors(pinned)) == len(tensors(whole)) == 11
    for before, after in zip(tensors(whole), tensors(pinned), strict=True):
        assert torch.equal(before, after)
        assert before.data_ptr() != after.data_ptr()
