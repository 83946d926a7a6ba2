"""Texts sampled from the sentences of long captions (arXiv:2403.17007, 2412.03561, 2602.22419)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kiloword.methods.registry import preset
from kiloword.methods.sub_captions import sentences_of
from kiloword.randomness import Draw
from kiloword.types import Example

PARTS = ["One dog runs.", "It is red!", "Grass grows here"]
WHOLE = " ".join(PARTS)


def texts_of(settings: dict[str, Any], *captions: str, epoch: int = 0, **known: Any) -> list[str]:
    (transform,), fetch = preset("clip+sub-captions", {"sub_captions": settings}).transforms, Any
    example = Example("k", 0, torch.zeros(3, 4, 4, dtype=torch.uint8), list(captions))
    return transform(replace(example, **known), fetch, Draw(0, epoch, 0)).captions


@pytest.mark.parametrize(
    ("caption", "parts"),
    [
        (WHOLE, PARTS),
        ("a 2.5 m tall tree.  Is it old?\n\nyes", ["a 2.5 m tall tree.", "Is it old?", "yes"]),
        (" \n", []),
    ],
)
def test_sentences_end_with_a_mark_or_a_line(caption: str, parts: list[str]) -> None:
    assert sentences_of([caption]) == parts


def test_sub_captions_are_some_sentences() -> None:
    settings = {"k": 200, "merge": 2}
    made = texts_of(settings, WHOLE)
    assert len(made) == 200
    pairs = {f"{a} {b}" for a in PARTS for b in PARTS if a != b}
    assert set(made) <= {*PARTS, *pairs}
    neighbours = {f"{PARTS[0]} {PARTS[1]}", f"{PARTS[1]} {PARTS[2]}"}
    merged = [text for text in made if text in pairs]
    assert 60 < len(merged) < 140
    assert 0.45 < sum(text in neighbours for text in merged) / len(merged) < 0.85  # half, and a third of the rest
    assert made == texts_of(settings, WHOLE)
    assert made != texts_of(settings, WHOLE, epoch=1)
    assert texts_of({"k": 3, "drop_summary": 1.0}, "a dog") == ["a dog"] * 3
    assert texts_of({"k": 3}, " ") == [" "]


@pytest.mark.parametrize("name", ["teacher", "truth"])
def test_what_is_known_of_whole_captions_does_not_fit(name: str) -> None:
    with pytest.raises(ValueError, match="omit one"):
        texts_of({}, "a dog", text_features={name: torch.zeros(1, 2)})


def test_the_summary_is_dropped_as_often_as_asked() -> None:
    """In some epochs no text has the first sentence of a caption; captions of one sentence keep it."""
    dropped = 0
    for epoch in range(200):
        made = texts_of({"k": 40, "drop_summary": 0.3}, WHOLE, "A hill.", epoch=epoch)
        assert any("A hill." in text for text in made)
        assert any(PARTS[1] in text for text in made)
        dropped += not any(PARTS[0] in text for text in made)
    assert 35 < dropped < 85
    never = texts_of({"k": 40, "drop_summary": 1.0}, WHOLE)
    assert not any(PARTS[0] in text for text in never)


def test_whole_captions_stay_beside_the_texts() -> None:
    made = texts_of({"k": 2, "whole": True, "drop_summary": 1.0}, WHOLE, "a dog")
    assert made[:2] == [WHOLE, "a dog"]
    assert len(made) == 4


@pytest.mark.parametrize("name", ["clip+sub-captions+compose", "clip+compose+sub-captions"])
def test_texts_are_sampled_after_other_transforms(name: str) -> None:
    (sampled,), made = preset("clip+sub-captions").transforms, preset(name)
    assert [type(one) is type(sampled) for one in made.transforms] == [False, True]
    assert made.captions == "all"
