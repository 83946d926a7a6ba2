"""Phrases of captions, and both losses of C2LIP, against loops over images and phrases (arXiv:2603.25722)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.methods.concepts import PHRASES, phrases_of
from kiloword.methods.registry import preset
from kiloword.model.image import extra
from kiloword.randomness import Draw
from kiloword.types import BatchInputs, Example, TextGroup, Texts
from kiloword.verify.batch import batch
from literal import sigmoid_pairs
from parts import agree, gradients, learner, losses, size

NAME = "siglip+concepts"


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


def phrases(settings: dict[str, Any], *captions: str, epoch: int = 0, key: str = "k") -> list[str]:
    make, fetch = preset(NAME, {"concepts": settings}).inputs[PHRASES].make, Any
    return list(make(Example(key, 0, torch.zeros(3, 4, 4), list(captions)), fetch, Draw(0, epoch, 0)))


def test_phrases_are_of_all_captions_a_table_or_the_caption_itself(tmp_path: Path) -> None:
    assert phrases({}, "a dog on the grass", "a dog at a tree") == ["dog", "grass", "tree"]
    assert phrases({}, "it is") == ["it is"]
    drawn = {tuple(phrases({"most": 1}, "a dog on the grass", epoch=n)) for n in range(20)}
    assert drawn == {("dog",), ("grass",)}
    table = pa.table({"key": ["j", "k", "l"], "captions": [["ice"], ["a wet dog", "green grass"], []]})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    settings = {"table": str(tmp_path / "t.parquet")}
    assert phrases(settings, "a cat") == ["a wet dog", "green grass"]
    assert phrases(settings, "a cat", key="l") == phrases(settings, "a cat", key="unknown") == ["a cat"]


@pytest.mark.parametrize("pool", ["mean", "map"])
def test_both_losses_are_the_literal_ones(pool: str) -> None:
    made, some = learner(NAME, shape=size(head__image_pool=pool)), batch(end=5, method=NAME)
    group: Any = some.inputs[PHRASES]
    of, head, encoded = group.image_of_text.tolist(), made.model.head, made.encode(some)
    assert len(of) == 4
    pooling: Any = head.pooling
    spoken, images = made.model.encode_text(group.texts)[1]["vec"], encoded.images["vec"]
    whole, attended = list[list[Tensor]](), list[list[Tensor]]()
    for i in range(5):
        patches = list[Tensor]()
        for patch in encoded.image_tokens[i, extra(made.model.config.image) :]:
            alone = patch if pool == "mean" else pooling.image_pool.map(patch[None, None])[0]
            patches.append(F.normalize(pooling.project_image_tokens(alone), dim=0))
        whole.append([images[i] @ phrase for phrase in spoken])
        row = []
        for phrase in spoken:
            weights = torch.stack([patch @ phrase for patch in patches]).softmax(0)
            seen = torch.stack([w * patch for w, patch in zip(weights, patches, strict=True)]).sum(0)
            row.append(F.cosine_similarity(seen, phrase, dim=0))
        attended.append(row)
    found, weights = losses(made, some), [p for p in made.parameters() if p.requires_grad]
    y = (torch.arange(5)[:, None] == torch.tensor(of)).double()
    for name, rows in (("phrases", whole), ("attended_phrases", attended)):
        cosines = torch.stack([torch.stack(row) for row in rows])
        agree(found[name], sigmoid_pairs(head.log_scale.exp() * cosines + head.bias, y) / len(of), weights)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_without_phrases_trains(parts: int) -> None:
    nothing = TextGroup(Texts.pack([]), torch.zeros(0, dtype=torch.int64))
    some = replace(batch(end=4, method=NAME), inputs=BatchInputs({PHRASES: nothing}))
    report = gradients(learner(NAME), some, parts)
    assert report["loss:phrases"] == report["loss:attended_phrases"] == 0
    torch.testing.assert_close(report["loss:loss"], report["loss:pair"])
