"""The contract of methods: contrasts, terms, inputs, weights by progress, teachers, components of users."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import own_methods as own
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import FIELD
from kiloword.methods.method import Part, Ramp
from kiloword.methods.registry import preset
from kiloword.methods.slip import VIEWS
from kiloword.model.heads import Pooling
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import backward
from kiloword.types import Input, TextGroup
from kiloword.verify import suite
from kiloword.verify.batch import batch, config
from parts import gradients, ids_of, learner, loader


def test_a_contrast_is_the_dense_loss_of_all_captions_with_all() -> None:
    made, some = learner(own.with_loss("contrasts", own.Texts)), batch()
    head: Any = made.contrasts["texts"].head
    vec, of = made.encode(some).texts["vec"], some.image_of_text
    logits = vec @ vec.T * head.log_scale.exp() + head.bias
    target = (of[:, None] == of).double()
    expected = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="sum") / len(vec)
    torch.testing.assert_close(backward(made, [some])["texts"], expected.detach(), rtol=1e-12, atol=0)


def test_the_weight_of_a_loss_follows_the_run() -> None:
    def at(done: float) -> dict[str, Tensor]:
        made = learner(own.with_loss("contrasts", own.Texts, Ramp(2.0, 0.25, 0.75)))
        made.done = done
        return gradients(made, batch(), 4)

    start, middle, end = map(at, (0.1, 0.5, 0.9))
    for measured, weight in ((start, 0.0), (middle, 1.0), (end, 2.0)):
        expected = measured["loss:pair"] + weight * measured["loss:texts"]
        torch.testing.assert_close(measured["loss:loss"], expected, rtol=1e-12, atol=0)
    assert not start["contrasts.texts.head.bias"].any()
    torch.testing.assert_close(2 * middle["contrasts.texts.head.bias"], end["contrasts.texts.head.bias"])


WRONG: list[tuple[str, Any, str]] = [  # of which a step or the method says what is missing
    ("contrasts", own.Three, "3 features"),
    ("contrasts", own.Summed, "Total"),
    ("contrasts", own.Reading, "image_features.teacher"),
    ("terms", own.NoModule, "subclass"),
    ("terms", own.Masked, "mask token"),
    ("terms", own.Rows, "scalar"),
    ("terms", own.Raw, "normalise"),
]


@pytest.mark.parametrize(("slot", "make", "word"), WRONG)
def test_a_loss_that_lacks_something_says_what(slot: str, make: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        backward(learner(own.with_loss(slot, make)), [batch()])
    if make in (own.Summed, own.Reading):  # as a pair loss, too
        method = replace(preset("siglip"), pair_loss=lambda pairs, positives: make.loss(None, pairs))
        with pytest.raises(ValueError, match=word):
            backward(learner(method), [batch()])


def test_what_a_method_cannot_have() -> None:
    with pytest.raises(ValueError, match="pooling"):  # without Part
        replace(preset("siglip"), pooling=Pooling)  # type: ignore[arg-type]
    for base, name in (("siglip", "pair"), ("coca", "caption")):  # losses have names of their own
        with pytest.raises(ValueError, match=name):
            replace(preset(base), contrasts={name: (1.0, Part(own.Texts))})
    made = learner(own.with_loss("terms", own.Normalised), shape=config("cached"))
    with pytest.raises(ValueError, match="trunk"):  # whose tokens are no pixels
        backward(made, [made.above_trunks(batch(trunks="cached"))])
    with pytest.raises(ValueError, match=r"'crops'.*'simclr_views'"):  # an input that nobody makes
        batch(method="slip").split(2)[1].inputs["crops"]


SCENES = open_source("scenes:train?n=32", 32)
TOKENIZER = Tokenizer.train([c for row in range(32) for c in SCENES.record(row).captions], 400)


def made_of(inputs: dict[str, Input]) -> Any:
    return next(loader(SCENES, inputs, tokenizer=TOKENIZER).batches())


def halves(example: Any, fetch: Any, draw: Any) -> list[str]:
    words = example.captions[0].split()
    return [" ".join(words[:2]), " ".join(words[2:])] if example.row % 2 else []


def test_inputs_are_made_of_examples_and_split_with_them() -> None:
    whole = made_of({"halves": Input(halves), VIEWS: preset("slip").inputs[VIEWS]})
    group, pixels = whole.inputs["halves"], whole.inputs[VIEWS]
    assert isinstance(group, TextGroup)
    assert (pixels.shape, pixels.dtype) == ((8, 2, 3, 32, 32), torch.uint8)
    assert (pixels[:, 0] != pixels[:, 1]).any()
    assert len(group.texts) == len(group.image_of_text)
    assert (group.image_of_text.bincount(minlength=8) % 2 == 0).all()
    parts = [part.inputs["halves"] for part in whole.split(4)]
    assert [ids for part in parts for ids in ids_of(part.texts)] == ids_of(group.texts)
    rows = torch.cat([part.image_of_text + 2 * n for n, part in enumerate(parts)])
    assert torch.equal(rows, group.image_of_text)


def test_an_input_of_two_kinds_is_refused() -> None:
    def either(example: Any, fetch: Any, draw: Any) -> Tensor | list[str]:
        return torch.zeros(3) if example.row % 2 else ["half"]

    with pytest.raises(ValueError, match="'mixed'"):
        made_of({"mixed": Input(either)})


def test_a_component_of_a_user_mixes_like_any() -> None:
    assert preset("llip+own_methods:texts", {"texts": {"weight": 0.5}}).contrasts["texts"][0] == 0.5
    with pytest.raises(ValueError, match="'texts'"):
        preset("siglip+own_methods:texts+own_methods:texts")
    without = next(iter(suite.verify("llip+own_methods:texts", ())))
    assert without.passed, without


def test_modules_state_the_rates_of_their_parameters() -> None:
    optimizer = Optimizer(learner(own.with_loss("contrasts", own.Slow)), FIELD, 10)
    rates = {
        optimizer.names[p]: g["base_lr"] for part in optimizer.parts for g in part.param_groups for p in g["params"]
    }
    assert rates["contrasts.texts.head.bias"] == pytest.approx(0.1 * rates["contrasts.texts.head.log_scale"])
