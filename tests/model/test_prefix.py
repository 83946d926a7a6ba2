"""The first numbers of an embedding, normalised again, against the same of the whole embedding; what has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from folders import model_folder
from kiloword.api import Matcher, load
from kiloword.config.recipes import sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.model.heads import Head, Single
from kiloword.model.prefix import keep_prefix_
from kiloword.models.build import build
from kiloword.models.model_folder import read_model_file

TEXTS = ["a dog on the grass", "two cats", "a blue star"]
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
MATRYOSHKA = "siglip+matryoshka"


def first(vec: Tensor, dim: int) -> Tensor:
    return F.normalize(vec[:, :dim], dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with prefixes of 8 and 4 of its 16 numbers."""
    settings = {"matryoshka": {"smallest": 4}}
    return model_folder(tmp_path_factory.mktemp("models") / "model", MATRYOSHKA, settings)


@pytest.mark.parametrize("dim", [1, 8, 16])
def test_both_sides_keep_their_first_numbers(folder: Path, dim: int) -> None:
    whole, part = load(folder), load(folder, dim=dim)
    for name, data in (("encode_image", IMAGES), ("encode_text", TEXTS)):
        vec = getattr(part, name)(data)["vec"]
        torch.testing.assert_close(vec, first(getattr(whole, name)(data)["vec"], dim))
    assert part.model.config.head.dim == dim
    scores = first(whole.encode_image(IMAGES)["vec"], dim) @ first(whole.encode_text(TEXTS)["vec"], dim).T
    torch.testing.assert_close(part.score(IMAGES, TEXTS), scores)


def test_probabilities_take_the_scale_that_was_trained_with_the_prefix(folder: Path) -> None:
    matcher = load(folder)
    inner: Any = matcher.model.head.prefix_8
    with torch.no_grad():
        inner.log_scale.fill_(0.5)
        inner.bias.fill_(-1.0)
    keep_prefix_(matcher.model, 8)
    assert float(matcher.model.head.log_scale.detach()) == 0.5
    assert float(matcher.model.head.logits(torch.zeros(())).detach()) == -1.0


def test_a_tower_without_projection_gets_one() -> None:
    config = sizes()["debug"]
    config = replace(config, head=replace(config.head, image_projection=False, dim=config.image.width))
    tokenizer = Tokenizer.train(TEXTS, 300)
    text = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    method = replace(preset("clip"), further=(lambda config, scale: {"own": Head(Single(config))},))  # no prefix
    whole, part = (Matcher(build(replace(config, text=text), method, seed=0), tokenizer) for _ in range(2))
    keep_prefix_(part.model, 3)
    torch.testing.assert_close(part.encode_image(IMAGES)["vec"], first(whole.encode_image(IMAGES)["vec"], 3))
    assert part.model.config.head.image_projection


def test_what_is_saved_is_a_smaller_model_of_the_method_without_prefixes(folder: Path, tmp_path: Path) -> None:
    part = load(folder, dim=4)
    saved = load(part.save(tmp_path / "small"))
    assert torch.equal(saved.encode_text(TEXTS)["vec"], part.encode_text(TEXTS)["vec"])
    file = read_model_file(tmp_path / "small")
    assert (file.method, file.settings, file.model.head.dim) == ("siglip", {}, 4)
    assert saved.card == part.card


def test_a_note_says_what_the_model_was_trained_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(folder, dim=8)
    load(folder, dim=16)
    assert capsys.readouterr().err == ""
    load(folder, dim=6)
    assert "first 8, 4 numbers" in capsys.readouterr().err
    load(model_folder(tmp_path / "plain"), dim=8)
    assert "+matryoshka" in capsys.readouterr().err


def test_what_has_no_prefix(folder: Path) -> None:
    for method in ("llip", "prolip", "flair"):  # scores that compare more
        with pytest.raises(ValueError, match="pooling"):
            keep_prefix_(build(sizes()["debug"], preset(method), seed=0), 8)
    for dim in (0, -1, 17):
        with pytest.raises(ValueError, match=f"dimension {dim} .*1 to 16"):
            load(folder, dim=dim)
