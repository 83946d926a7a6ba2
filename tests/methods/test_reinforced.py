"""Distillation from stored features: against a literal transcription of arXiv:2311.17049."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.config.recipes import AugmentConfig, DataConfig, Recipe
from kiloword.methods.registry import preset
from kiloword.methods.reinforced import distillation
from kiloword.verify.batch import MethodChoice, batch
from parts import agree, blocks, cosine, learner, losses, mean, units

SCALES = {"a": 20.0, "b": 7.0}


def literal(images: Tensor, texts: Tensor, teachers: Mapping[str, tuple[Tensor, Tensor, float]]) -> Tensor:
    """The mean over teachers of (KL over texts, mean of images; KL over images, mean of texts) / 2, by loops."""
    total = images.new_zeros(())
    for of_images, of_texts, scale in teachers.values():
        ours, theirs = images @ texts.T, scale * of_images @ of_texts.T
        for own, other in ((ours, theirs), (ours.T, theirs.T)):
            for q_logits, p_logits in zip(own, other, strict=True):
                p, q = p_logits.exp() / p_logits.exp().sum(), q_logits.exp() / q_logits.exp().sum()
                each = sum((p[n] * (p[n] / q[n]).log() for n in range(len(p))), images.new_zeros(()))
                total = total + each / len(own) / 2 / len(teachers)
    return total


def sides(chunk: int = 0) -> tuple[Any, Tensor, Tensor, dict[str, tuple[Tensor, Tensor, float]]]:
    """Blocks of 5 images and 8 texts with two teachers of other dimensions."""
    images, texts = (3 * units(5, 6, seed=5)).requires_grad_(), units(8, 6, seed=9).requires_grad_()
    teachers = {n: (units(5, d, seed=d), units(8, d, seed=d + 1), SCALES[n]) for n, d in (("a", 4), ("b", 7))}
    rows = {"vec": images} | {f"image_features.{k}": v[0] for k, v in teachers.items()}
    columns = {"vec": texts, "position": torch.tensor([0, 0, 1, 2, 3, 3, 3, 4])}
    columns |= {f"text_features.{k}": v[1] for k, v in teachers.items()}
    return blocks(cosine(), rows, columns, chunk), images, texts, teachers


@pytest.mark.parametrize("chunk", [0, 3])
def test_the_loss_and_its_gradients_are_the_papers(chunk: int) -> None:
    pairs, images, texts, teachers = sides(chunk)
    agree(mean(distillation(pairs, SCALES)), literal(images, texts, teachers), [images, texts])


def test_images_and_texts_without_features_are_left_out() -> None:
    pairs, images, texts, _ = sides(3)
    for name in SCALES:
        pairs.images[f"image_features.{name}"][2] = 0
        pairs.texts[f"text_features.{name}"][3] = 0
    total = distillation(pairs, SCALES)
    by_images, by_texts = torch.autograd.grad(total.sum, [images, texts])
    assert total.sum.isfinite()
    assert by_images.any(1).tolist() == [n != 2 for n in range(5)]
    assert by_texts.any(1).tolist() == [n != 3 for n in range(8)]


def test_the_step_shares_the_weight_and_the_scale_of_the_head() -> None:
    settings = {"reinforced": {"weight": 0.25, "scales": (30.0,)}}
    made, some = learner("clip+reinforced", settings), batch(method=MethodChoice("clip+reinforced", settings))
    found, encoded = losses(made, some), made.encode(some)
    torch.testing.assert_close(found["loss"], 0.75 * found["pair"] + 0.25 * found["reinforced"])
    teachers = {"teacher": (some.image_features["teacher"].double(), some.text_features["teacher"].double(), 30.0)}
    scaled = encoded.images["vec"] * made.model.head.log_scale.exp()
    torch.testing.assert_close(found["reinforced"], literal(scaled, encoded.texts["vec"], teachers))


def test_features_of_every_teacher_are_needed_and_a_note_is_on_crops_that_none_has_seen() -> None:
    data = (DataConfig(augment=AugmentConfig(crop=crop)) for crop in (1.0, 0.5))
    assert [bool(preset("clip+reinforced").notes[-1](Recipe(method="clip", data=one))) for one in data] == [False, True]
    settings = {"reinforced": {"teachers": ("a", "b")}}
    assert preset("siglip+reinforced", settings).needs == ("a", "b")
    assert preset("fff+reinforced+exact").needs == ("truth", "teacher")  # whatever positives needed before
