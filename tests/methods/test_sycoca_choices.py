"""What SyCoCa's paper leaves open or does otherwise: global scores, sums, the initial weights of all layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kiloword.config.recipes import Recipe
from kiloword.methods.coca import masking
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.training import start
from kiloword.training.accumulate import backward
from kiloword.training.loop import RunOptions, train
from literal import CAPTIONS, captions_of, image_tokens, made, pairs, small, text_tokens


@pytest.mark.parametrize("method", ["sycoca", "sycoca+gaussian"])
def test_scores_by_the_class_token(method: str) -> None:
    """s_i = <v_i, w_cls> as a cosine (section 3.3), of the class token alone."""
    extra = {"class_token": True, "similar_to": "class"}
    learner = made("sycoca", extra) if method == "sycoca" else made(method, {**extra, "gaussian": {"log_var": -2.0}})
    model, batch = learner.model, pairs(learner.model, CAPTIONS)
    settings = masking.MaskSettings(similar_to="class")
    measured = masking.scores(model, batch, learner.encode(batch), settings)
    cls = model.config.text.special["cls"]
    for n, ids in enumerate(captions_of(batch.texts)):
        word = model.head.project_text_tokens(text_tokens(ids, model)[ids.index(cls)])
        image = model.normalise(batch.images)[batch.image_of_text[n]]
        for place, patch in enumerate(model.head.project_image_tokens(image_tokens(image, model)[-16:])):
            expected = patch @ word / (patch.norm() * word.norm())
            torch.testing.assert_close(measured[n, place], expected.detach(), rtol=1e-10, atol=1e-12)


def test_the_end_token_is_the_global_one_without_a_class_token() -> None:
    learner = made("sycoca", {"class_token": False, "similar_to": "class"})
    batch, config = pairs(learner.model, CAPTIONS), learner.model.config
    packing = learner.model.text_tower.packing(batch.texts)
    counted = masking.countable(batch.texts, packing, config.text, masking.MaskSettings(similar_to="class"))
    assert counted.sum() == len(batch.texts)
    assert (batch.texts.ids[counted] == config.text.special["end"]).all()


@pytest.mark.parametrize("parts", [1, 2])
def test_sums_over_the_tokens_of_a_caption(parts: int) -> None:
    """Eq. 4 as printed sums over tokens: a long caption weighs more than a short one. The mean is over captions."""
    losses = {}
    for reduction in ("tokens", "captions"):
        learner = made("coca", {"caption_reduction": reduction})
        losses[reduction] = float(backward(learner, pairs(learner.model, CAPTIONS).split(parts))["caption"])
    words = [len(own) for captions in CAPTIONS for own in captions]
    predicted = sum(n + 1 for n in words)  # every word and the end
    assert losses["captions"] == pytest.approx(losses["tokens"] * predicted / len(words), rel=1e-10)


def test_all_weights_start_with_one_deviation() -> None:
    """Section 4.1: "a Gaussian distribution with a mean of 0 and a standard deviation of 0.01"; norms stay 1."""
    method = preset("sycoca")
    model = build(replace(small(), init_std=0.01), method)
    for name, p in model.named_parameters():
        p = p.detach()
        if p.dim() > 1 or name.endswith("token"):
            assert float(p.std()) == pytest.approx(0.01, rel=0.35 if p.numel() < 200 else 0.15), name
            assert abs(float(p.mean())) < 0.004, name
        elif "norm" in name:
            assert (p == (1.0 if name.endswith("weight") else 0.0)).all(), name
        elif name != "head.log_scale":
            assert (p == 0).all(), name
    assert isinstance(model, Model)
    assert any(name.startswith("more.image_decoder.") for name, _ in model.named_parameters())


def recipe() -> Recipe:
    base = default_recipe("clip", "debug", ("scenes?n=32",))
    return replace(base, data=replace(base.data, tokenizer_vocab=300), batch=8, steps=1)


def test_initial_weights_of_a_model_that_is_loaded(tmp_path: Path) -> None:
    options = RunOptions(quiet=True)
    folder = train(recipe(), tmp_path / "first", options=options)
    some = start.defaults("clip", str(folder))
    start.check(some)
    with pytest.raises(ValueError, match=r"--model\.init-std"):
        start.check(replace(some, model=replace(some.model, init_std=0.01)))
