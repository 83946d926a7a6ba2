"""Texts sampled from the sentences of long captions (arXiv:2403.17007, 2412.03561, 2602.22419)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kiloword.methods.registry import preset
from kiloword.methods.sub_captions import SubCaptions, SubCaptionSettings, sentences_of
from kiloword.randomness import Draw
from kiloword.types import Example
from kiloword.verify.suite import verify

FETCH: Any = None
PARTS = ["One dog runs.", "It is red!", "Grass grows here"]


def example(*captions: str) -> Example:
    return Example("k", 0, torch.zeros(3, 4, 4, dtype=torch.uint8), list(captions))


def texts_of(settings: SubCaptionSettings, *captions: str, epoch: int = 0) -> list[str]:
    return SubCaptions(settings)(example(*captions), FETCH, Draw(0, epoch, 0)).captions


@pytest.mark.parametrize(
    ("caption", "parts"),
    [
        ("One dog runs. It is red! Grass grows here", PARTS),
        ("a 2.5 m tall tree.  Is it old?\n\nyes", ["a 2.5 m tall tree.", "Is it old?", "yes"]),
        ("", []),
        (" \n", []),
    ],
)
def test_sentences_end_with_a_mark_or_a_line(caption: str, parts: list[str]) -> None:
    assert sentences_of([caption]) == parts


def test_sub_captions_are_some_sentences() -> None:
    settings = SubCaptionSettings(k=200, merge=2)
    made = texts_of(settings, " ".join(PARTS))
    assert len(made) == 200
    pairs = {f"{a} {b}" for a in PARTS for b in PARTS if a != b}
    assert set(made) <= {*PARTS, *pairs}
    neighbours = {f"{PARTS[0]} {PARTS[1]}", f"{PARTS[1]} {PARTS[2]}"}
    merged = [text for text in made if text in pairs]
    assert 60 < len(merged) < 140
    assert 0.45 < sum(text in neighbours for text in merged) / len(merged) < 0.85  # half, and a third of the rest
    assert made == texts_of(settings, " ".join(PARTS))
    assert made != texts_of(settings, " ".join(PARTS), epoch=1)


def test_sub_captions_of_one_sentence_are_it() -> None:
    assert texts_of(SubCaptionSettings(k=3, drop_summary=1.0), "a dog") == ["a dog"] * 3
    assert texts_of(SubCaptionSettings(k=3), " ") == [" "]


@pytest.mark.parametrize(("name", "message"), [("teacher", "--features has features"), ("truth", "ground truth")])
def test_what_is_known_of_whole_captions_does_not_fit(name: str, message: str) -> None:
    known = replace(example("a dog"), text_features={name: torch.zeros(1, 2)})
    with pytest.raises(ValueError, match=f"{message}.*omit one of them"):
        SubCaptions(SubCaptionSettings())(known, FETCH, Draw(0, 0, 0))


def test_the_summary_is_dropped_as_often_as_asked() -> None:
    """In some epochs no text has the first sentence of a caption; captions of one sentence keep it."""
    dropped = 0
    for epoch in range(200):
        made = texts_of(SubCaptionSettings(k=40, drop_summary=0.3), " ".join(PARTS), "A hill.", epoch=epoch)
        assert any("A hill." in text for text in made)
        assert any(PARTS[1] in text for text in made)
        dropped += not any(PARTS[0] in text for text in made)
    assert 35 < dropped < 85
    never = texts_of(SubCaptionSettings(k=40, drop_summary=1.0), " ".join(PARTS))
    assert not any(PARTS[0] in text for text in never)


def test_whole_captions_stay_beside_the_texts() -> None:
    whole = " ".join(PARTS)
    made = texts_of(SubCaptionSettings(k=2, whole=True, drop_summary=1.0), whole, "a dog")
    assert made[:2] == [whole, "a dog"]
    assert len(made) == 4


@pytest.mark.parametrize("name", ["clip+sub-captions+compose", "clip+compose+sub-captions"])
def test_texts_are_sampled_after_other_transforms(name: str) -> None:
    made = preset(name)
    assert isinstance(made.transforms[-1], SubCaptions)
    assert len(made.transforms) == 2
    assert made.captions == "all"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip+sub-captions", "coca+sub-captions"])
def test_sub_captions_conform(name: str) -> None:
    assert not [check for check in verify(name, (1, 2, 4)) if not check.passed]


def test_answers_have_no_sub_captions() -> None:
    with pytest.raises(ValueError, match="cannot be combined with transforms"):
        preset("vqa+sub-captions")
