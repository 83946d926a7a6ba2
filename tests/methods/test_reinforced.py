"""Distillation from stored features: against a literal transcription of arXiv:2311.17049, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.options import RunOptions
from kiloword.config.recipes import AugmentConfig
from kiloword.losses.pairs import Blocks
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.methods.reinforced import distillation
from kiloword.model.heads import cosine_head
from kiloword.model.model import initialise
from kiloword.training import effects
from kiloword.training.accumulate import backward
from kiloword.verify.batch import MethodChoice, batch
from kiloword.verify.suite import learner, verify

SCALES = {"a": 20.0, "b": 7.0}
OF_TEXT = torch.tensor([0, 0, 1, 2, 3, 3, 3, 4])


def some(shape: tuple[int, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=1)


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


def sides(chunk: int = 0) -> tuple[Blocks, Tensor, Tensor, dict[str, tuple[Tensor, Tensor, float]]]:
    """Blocks of 5 images and 8 texts with two teachers of other dimensions."""
    images, texts = (3 * some((5, 6), 5)).requires_grad_(), some((8, 6), 9).requires_grad_()
    teachers = {name: (some((5, d), d), some((8, d), d + 1), SCALES[name]) for name, d in (("a", 4), ("b", 7))}
    head = cosine_head(1.0, fixed=True).double()
    initialise(head, 0)
    rows = {"vec": images, "position": torch.arange(5)} | {f"image_features.{k}": v[0] for k, v in teachers.items()}
    columns = {"vec": texts, "position": OF_TEXT} | {f"text_features.{k}": v[1] for k, v in teachers.items()}
    return Blocks(head, rows, columns, chunk), images, texts, teachers


@pytest.mark.parametrize("chunk", [0, 3])
def test_the_loss_and_its_gradients_are_the_papers(chunk: int) -> None:
    pairs, images, texts, teachers = sides(chunk)
    total = distillation(pairs, SCALES)
    expected = literal(images, texts, teachers)
    torch.testing.assert_close(total.sum / total.count, expected, rtol=1e-10, atol=1e-12)
    measured = torch.autograd.grad(total.sum / total.count, [images, texts])
    torch.testing.assert_close(measured, torch.autograd.grad(expected, [images, texts]), rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_open_clips_distillation() -> None:
    """DistillClipLoss with probabilities averaged over teachers, as in ml-mobileclip: a cross-entropy, not a KL."""
    pairs, images, texts, teachers = sides()
    by_image, by_text = (
        torch.stack([(s * i @ t.T if dim else s * t @ i.T).softmax(1) for i, t, s in teachers.values()]).mean(0)
        for dim in (1, 0)
    )
    logits = images @ texts.T
    theirs = -(by_image * logits.log_softmax(1)).sum(1).mean() - (by_text * logits.T.log_softmax(1)).sum(1).mean()
    total = distillation(pairs, SCALES)
    measured = torch.autograd.grad(total.sum / total.count, [images, texts])
    torch.testing.assert_close(measured, torch.autograd.grad(theirs / 2, [images, texts]), rtol=1e-10, atol=1e-12)


def test_images_and_texts_without_features_are_left_out() -> None:
    pairs, images, texts, _ = sides(3)
    for name in SCALES:
        pairs.images[f"image_features.{name}"][2] = 0
        pairs.texts[f"text_features.{name}"][3] = 0
    total = distillation(pairs, SCALES)
    gradients = torch.autograd.grad(total.sum, [images, texts])
    assert total.sum.isfinite()
    assert not gradients[0][2].any()
    assert not gradients[1][3].any()
    assert gradients[0][1].any()


def test_the_step_shares_the_weight_and_the_scale_of_the_head() -> None:
    settings = {"reinforced": {"weight": 0.25, "scales": (30.0,)}}
    choice = MethodChoice("clip+reinforced", settings)
    made, data = learner(choice), batch(method=choice)
    values = backward(made, [data])
    torch.testing.assert_close(values["loss"], 0.75 * values["pair"] + 0.25 * values["reinforced"])
    encoded = made.encode(data)
    teachers = {"teacher": (data.image_features["teacher"].double(), data.text_features["teacher"].double(), 30.0)}
    scaled = encoded.images["vec"] * made.model.head.log_scale.exp()
    expected = literal(scaled.detach(), encoded.texts["vec"].detach(), teachers)
    torch.testing.assert_close(values["reinforced"], expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("clip", {"teachers": ("a", "a")}, "expected different names"),
        ("clip", {"teachers": ("a", "b", "c"), "scales": (1.0, 2.0)}, "3 teachers have 2 scales"),
        ("clip", {"scales": (0.0,)}, "expected a number above 0"),
        ("clip", {"weight": 1.0}, "weight"),
        ("llip", {}, "does not give one vector per image"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(f"{name}+reinforced", {"reinforced": settings})


def test_features_of_every_teacher_are_needed() -> None:
    choice = MethodChoice("siglip+reinforced", {"reinforced": {"teachers": ("a", "b")}})
    assert choice.slots.needs == ("a", "b")
    with pytest.raises(ValueError, match="lacks the features of the teacher 'a'"):
        backward(learner(choice), [batch()])
    assert preset("fff+reinforced+exact").needs == ("truth", "teacher")  # whatever positives needed before


@pytest.mark.slow
@pytest.mark.parametrize("method", ["clip+reinforced", "siglip+reinforced+compose", "siglip+reinforced+self-distill"])
def test_it_is_verified(method: str) -> None:
    assert not [check for check in verify(method, (1, 2)) if not check.passed]


@pytest.mark.parametrize(
    ("augment", "named"),
    [
        (AugmentConfig(), ""),
        (AugmentConfig(flip=0.5, drop_patches=0.5), ""),
        (AugmentConfig(crop=0.5, flip=0.5), "augment.crop 0.5"),
        (AugmentConfig(jitter=0.3, grayscale=0.1), "augment.jitter 0.3, augment.grayscale 0.1"),
    ],
)
def test_a_run_on_images_that_no_teacher_saw_begins_with_a_note(augment: AugmentConfig, named: str) -> None:
    base = default_recipe("clip+reinforced", "debug", ("scenes?n=16",))
    recipe = replace(base, data=replace(base.data, augment=augment))
    told = [note for note in effects.notes(recipe, RunOptions(device="cpu")) if "teacher saw whole images" in note]
    assert len(told) == bool(named)
    assert all(f"others: {named}." in note for note in told)
