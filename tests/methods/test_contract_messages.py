"""What a method of one's own gets wrong at first is refused with a sentence that says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from kiloword.losses.pairs import sigmoid_loss
from kiloword.methods.method import Method, annotated
from kiloword.methods.registry import preset
from kiloword.model.heads import cosine_head
from kiloword.models.build import build
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.verify.batch import batch, config


class Images(nn.Module):
    """Images against images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = cosine_head(5.0, bias=-1.0)

    def features(self, model: Any, batch: Any, encoded: Any) -> Any:
        return encoded.images, encoded.images

    def loss(self, pairs: Any) -> Any:
        return sigmoid_loss(pairs, annotated)


class Norms(nn.Module):
    """A term without a meaning."""

    def count(self, batch: Any) -> Any:
        return batch.position.new_full((), len(batch))

    def forward(self, model: Any, batch: Any, encoded: Any) -> Any:
        return encoded.images["vec"].sum()


class Headless(Images):
    def __init__(self) -> None:
        super().__init__()
        del self.head


class Unnamed(Images):
    def features(self, model: Any, batch: Any, encoded: Any) -> Any:
        return {"vector": encoded.images["vec"]}, encoded.images


class Summed(Images):
    def loss(self, pairs: Any) -> Any:
        return sigmoid_loss(pairs, annotated).sum


class Number(Norms):
    def count(self, batch: Any) -> Any:
        return len(batch)


class Masked(Norms):
    def forward(self, model: Any, batch: Any, encoded: Any) -> Any:
        return model.image_tokens(batch.images, masked=torch.ones(len(batch), 4, dtype=torch.bool)).sum()


class Raw(Norms):
    def forward(self, model: Any, batch: Any, encoded: Any) -> Any:
        return model.image_tower(batch.images).sum()


class Normalised(Norms):
    def forward(self, model: Any, batch: Any, encoded: Any) -> Any:
        return model.normalise(batch.images).sum()


class NoModule:
    def count(self, batch: Any) -> Any:
        return None


def step(method: Method) -> None:
    backward(Learner(build(config(), method), method), [batch()])


def with_loss(slot: str, make: Callable[[], Any]) -> Method:
    changes: dict[str, Any] = {slot: {"own": (1.0, lambda config: make())}}
    return replace(preset("siglip"), **changes)


@pytest.mark.parametrize(
    ("slot", "make", "says"),
    [
        ("contrasts", Headless, "the contrast own is made as a Headless without head: see Contrast of"),
        (
            "contrasts",
            Unnamed,
            r"the contrast own returned features \['vector'\] for a side: 'vec' \[N, D\] is missing",
        ),
        ("contrasts", Summed, r"the contrast own returned a Tensor: expected kiloword.types.Total\(sum, count\)"),
        ("terms", NoModule, "the term own is made as a NoModule: expected a torch.nn.Module"),
        ("terms", Number, "the count of the term own is of type int: expected a scalar tensor"),
        ("terms", Masked, "no mask token: the method's `shape` sets mask_token"),
        ("terms", Raw, r"takes normalised images, not torch.uint8: give it model.normalise\(images\)"),
    ],
)
def test_a_loss_that_lacks_something_says_what(slot: str, make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        step(with_loss(slot, make))


def test_losses_that_lack_nothing_pass() -> None:
    step(with_loss("contrasts", Images))
    step(with_loss("terms", Norms))


def test_tokens_of_a_trunk_are_no_pixels() -> None:
    method = with_loss("terms", Normalised)
    step(method)
    cached = Learner(build(config("cached"), method), method), batch(trunks="cached")
    with pytest.raises(ValueError, match=r"these are tokens of .*, which batch\.images are above a trunk"):
        backward(cached[0], [cached[0].above_trunks(cached[1])])


def test_a_pair_loss_returns_a_total() -> None:
    with pytest.raises(ValueError, match="the pair loss returned a Tensor: expected"):
        step(replace(preset("siglip"), pair_loss=lambda pairs, positives: sigmoid_loss(pairs, positives).sum))  # type: ignore[arg-type,return-value]
