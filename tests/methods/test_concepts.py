"""Phrases of captions, and both losses of C2LIP, against loops over images and phrases (arXiv:2603.25722)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.methods.concepts import PHRASES, AttendedContrast, phrases_of
from kiloword.methods.registry import preset
from kiloword.model.image import extra
from kiloword.model.model import initialise
from kiloword.models.build import build
from kiloword.randomness import Draw
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.types import BatchInputs, Example, TextGroup, Texts
from kiloword.verify.batch import MethodChoice, batch, config
from kiloword.verify.suite import learner


@pytest.mark.parametrize(
    ("caption", "phrases"),
    [
        ("A small red-brown dog under the old tree.", ["small red-brown dog", "old tree"]),
        ("Two women, a man and the women", ["Two women", "man", "women"]),
        ("a dog, a dog", ["dog"]),
        ("it is on", []),
        ("", []),
        ("\u72d7\u548c\u732b", ["\u72d7\u548c\u732b"]),
    ],
)
def test_phrases_stand_between_plain_words_and_punctuation(caption: str, phrases: list[str]) -> None:
    assert phrases_of(caption) == phrases


def example(*captions: str, key: str = "k") -> Example:
    return Example(key, 0, torch.zeros(3, 4, 4, dtype=torch.uint8), list(captions))


def made_by(settings: dict[str, Any], some: Example, epochs: int = 1) -> list[list[str]]:
    make, fetch = preset("siglip+concepts", {"concepts": settings}).inputs[PHRASES].make, None
    return [list(make(some, fetch, Draw(0, epoch, 0))) for epoch in range(epochs)]  # type: ignore[arg-type]


def test_phrases_are_of_all_captions_or_the_caption_itself() -> None:
    assert made_by({}, example("a dog on the grass", "a dog at a tree")) == [["dog", "grass", "tree"]]
    assert made_by({}, example("it is")) == [["it is"]]
    drawn = made_by({"most": 1}, example("a dog on the grass"), epochs=20)
    assert {tuple(phrases) for phrases in drawn} == {("dog",), ("grass",)}


def test_phrases_come_from_a_table(tmp_path: Path) -> None:
    table = pa.table({"key": ["k", "l"], "captions": [["a wet dog", "green grass"], []]})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    settings = {"table": str(tmp_path / "t.parquet")}
    assert made_by(settings, example("a cat")) == [["a wet dog", "green grass"]]
    assert made_by(settings, example("a cat", key="l")) == [["a cat"]]
    with pytest.raises(ValueError, match="no such file"):
        made_by({"table": str(tmp_path / "none.parquet")}, example("a cat"))


def literal(rows: list[list[Tensor]], of: list[int], scale: Tensor, bias: Tensor) -> Tensor:
    """The sigmoid loss of cosines of images (rows) with phrases, the mean over phrases."""
    total = scale.new_zeros(())
    for i, row in enumerate(rows):
        for c, cosine in enumerate(row):
            sign = 1 if of[c] == i else -1
            total = total - F.logsigmoid(sign * (scale * cosine + bias)).sum()
    return total / len(of)


def on_pool(pool: Literal["mean", "map"]) -> Learner:
    slots, size = preset("siglip+concepts"), config()
    made = Learner(build(replace(size, head=replace(size.head, image_pool=pool)), slots, seed=0), slots)
    initialise(made.contrasts, 0, "contrasts.")
    return made.double()


@pytest.mark.parametrize("pool", ["mean", "map"])
def test_both_losses_are_the_literal_ones(pool: Literal["mean", "map"]) -> None:
    made, some = on_pool(pool), batch(end=5, method="siglip+concepts")
    group = some.inputs[PHRASES]
    assert isinstance(group, TextGroup)
    of, head, encoded = group.image_of_text.tolist(), made.model.head, made.encode(some)
    assert len(of) == 4
    pooling: Any = head.pooling
    phrases, images = made.model.encode_text(group.texts)[1]["vec"], encoded.images["vec"]
    whole, attended = list[list[Tensor]](), list[list[Tensor]]()
    for i in range(5):
        patches = list[Tensor]()
        for patch in encoded.image_tokens[i, extra(made.model.config.image) :]:
            alone = patch if pool == "mean" else pooling.image_pool.map(patch[None, None])[0]
            patches.append(F.normalize(pooling.project_image_tokens(alone), dim=0))
        whole.append([images[i] @ phrase for phrase in phrases])
        row = []
        for phrase in phrases:
            weights = torch.stack([patch @ phrase for patch in patches]).softmax(0)
            seen = torch.stack([w * patch for w, patch in zip(weights, patches, strict=True)]).sum(0)
            row.append(F.cosine_similarity(seen, phrase, dim=0))
        attended.append(row)
    assert head.bias is not None
    losses = made.pair_losses(made.all_inputs(encoded, some))
    weights = [p for p in made.model.parameters() if p.requires_grad]
    for name, rows in (("phrases", whole), ("attended_phrases", attended)):
        expected = literal(rows, of, head.log_scale.exp(), head.bias)
        torch.testing.assert_close(losses[name], expected, rtol=1e-10, atol=0)
        values = losses[name], expected
        gradients = [torch.autograd.grad(v, weights, retain_graph=True, allow_unused=True) for v in values]
        for a, b in zip(*gradients, strict=True):
            assert (a is None) == (b is None) or float((b if a is None else a).abs().max()) == 0  # type: ignore[union-attr]
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_batch_without_phrases_trains(micro: int) -> None:
    made, some = learner("siglip+concepts"), batch(end=4, method="siglip+concepts")
    nothing = TextGroup(Texts.pack([]), torch.zeros(0, dtype=torch.int64))
    report = backward(made, replace(some, inputs=BatchInputs({PHRASES: nothing})).split(micro))
    assert float(report["phrases"]) == float(report["attended_phrases"]) == 0
    assert float(report["loss"]) == pytest.approx(float(report["pair"]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clip+concepts", "has no bias, which the sigmoid of concepts needs"),
        ("llip+concepts", "one vector per image with one per phrase"),
        ("prolip+concepts", "one vector per image with one per phrase"),
        ("flair+concepts", "one vector per image with one per phrase"),
        ("filip+concepts", "one vector per image with one per phrase"),
    ],
)
def test_what_does_not_mix_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name)


def test_a_pooling_that_cannot_pool_one_patch_is_refused() -> None:
    size = config()
    with pytest.raises(ValueError, match=r"image-pool attentional does not: use cls, mean, max, map"):
        AttendedContrast(replace(size, head=replace(size.head, image_pool="attentional")))


def test_the_attended_loss_can_be_omitted() -> None:
    assert preset("siglip+concepts", {"concepts": {"attended": 0.0}}).contrasts.keys() == {"phrases"}
    assert MethodChoice("siglip+concepts").slots.contrasts["attended_phrases"][0] == 0.01
