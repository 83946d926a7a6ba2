"""Composed images, swapped words and their loss, against a transcription of arXiv:2505.24424, eq. 4 to 7."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import DataConfig
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.losses.pairs import Blocks
from kiloword.methods.clic import (
    IMAGES,
    NEGATIVES,
    POSITIVES,
    ClicSettings,
    apart,
    clic_loss,
    joined,
    swapped_across,
    without,
)
from kiloword.methods.registry import preset
from kiloword.model.heads import cosine_head, unit
from kiloword.model.model import initialise
from kiloword.training.accumulate import backward
from kiloword.types import Record, TextGroup
from kiloword.verify.batch import batch, config
from kiloword.verify.suite import learner, verify


def papers(images: Tensor, positives: Tensor, negatives: Tensor, scale: float) -> Tensor:
    """images [I, D], positives [K, I, D], negatives [I, D]: sums over pairs, as the equations are printed."""
    total, (k, n) = images.new_zeros(()), positives.shape[:2]
    for p in positives:
        for i in range(n):
            own = (scale * images[i] @ p[i]).exp()
            to_texts = sum(((scale * images[i] @ p[j]).exp() for j in range(n)), total.new_zeros(()))
            to_images = sum(((scale * images[j] @ p[i]).exp() for j in range(n)), total.new_zeros(()))
            contrast = -((own / to_texts).log() + (own / to_images).log()) / (2 * k * n)
            choice = -(own / (own + (scale * images[i] @ negatives[i]).exp())).log() / (k * n)
            total = total + 0.5 * contrast + 0.5 * choice
    return total + sum(((positives[0, i] - positives[1, i]) ** 2).sum() for i in range(n)) / n


def ours(images: Tensor, texts: Tensor, of: list[int], sets: list[int], scale: float, chunk: int) -> Tensor:
    """texts [C, D] of images `of`; the first two of an image are its orders."""
    head = cosine_head(1.0, fixed=True).double()
    initialise(head, 0)
    n = sum(k >= 0 for k in sets)
    distance = apart(texts[:n], torch.tensor(of[:n]), torch.tensor(sets[:n]), len(images))
    rows = {"vec": scale * images, "position": torch.arange(len(images)), "apart": distance}
    columns = {"vec": texts, "position": torch.tensor(of), "set": torch.tensor(sets)}
    total = clic_loss(Blocks(head, rows, columns, chunk), ClicSettings())
    return total.sum / total.count


@pytest.mark.parametrize("chunk", [0, 2])
def test_the_loss_and_its_gradient_are_the_papers(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    n, k = 4, 4
    images, positives, negatives = (
        unit(torch.randn(*shape, 6, generator=generator, dtype=torch.float64)) for shape in ((n,), (k, n), (n,))
    )
    measured = []
    for fast in (True, False):
        leaves = [x.clone().requires_grad_() for x in (images, positives, negatives)]
        if fast:
            texts = torch.cat([leaves[1].transpose(0, 1).flatten(0, 1), leaves[2]])
            of = [*(i for i in range(n) for _ in range(k)), *range(n)]
            loss = ours(leaves[0], texts, of, [*list(range(k)) * n, *[-1] * n], 5.0, chunk)
        else:
            loss = papers(leaves[0], leaves[1], leaves[2], 5.0)
        measured.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for a, b in zip(*measured, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def published(images: Tensor, texts: Tensor, scale: float, k: int) -> Tensor:
    """What losses.py of AmitPeleg/CLIC computes in one process: texts [(K + 1) I, D], positives by set, negatives."""
    n = len(images)
    logits, labels, total = scale * images @ texts.T, torch.arange(n), images.new_zeros(())
    negative = logits[labels, labels + n * k]
    for s in range(k):
        own = logits[:, s * n : (s + 1) * n]
        pair = torch.stack([own.diagonal(), negative], 1)
        contrast = (F.cross_entropy(own, labels) + F.cross_entropy(own.T, labels)) / 2
        total = total + (0.5 * contrast + 0.5 * F.cross_entropy(pair, torch.zeros_like(labels))) / k
    return total + F.mse_loss(texts[:n], texts[n : 2 * n], reduction="none").sum(1).mean()


def test_the_loss_is_that_of_the_published_code() -> None:
    generator = torch.Generator().manual_seed(1)
    images, texts = (unit(torch.randn(n, 6, generator=generator, dtype=torch.float64)) for n in (5, 20))
    by_image = torch.cat([texts[:15].reshape(3, 5, 6).transpose(0, 1).flatten(0, 1), texts[15:]])
    of = [*(i for i in range(5) for _ in range(3)), *range(5)]
    measured = ours(images, by_image, of, [*list(range(3)) * 5, *[-1] * 5], 4.0, 0)
    torch.testing.assert_close(measured, published(images, texts, 4.0, 3), rtol=1e-10, atol=0)


def test_an_image_without_a_negative_adds_no_choice() -> None:
    generator = torch.Generator().manual_seed(2)
    images, texts = (unit(torch.randn(n, 4, generator=generator, dtype=torch.float64)) for n in (2, 5))
    of, sets = [0, 0, 1, 1, 0], [0, 1, 0, 1, -1]
    positives = texts[:4].reshape(2, 2, 4).transpose(0, 1)
    with_both = papers(images, positives, torch.stack([texts[4], texts[4]]), 3.0)
    choices = [F.softplus(3 * images[1] @ (texts[4] - texts[n])) for n in (2, 3)]
    measured = ours(images, texts, of, sets, 3.0, 0)
    torch.testing.assert_close(measured, with_both - 0.5 * torch.stack(choices).sum() / 4, rtol=1e-10, atol=0)


def test_micro_batches_without_any_text_leave_the_gradient() -> None:
    gradients = []
    for parts in (1, 16):
        made, some = learner("clip+clic"), batch(method="clip+clic")
        group = some.inputs[NEGATIVES]
        assert isinstance(group, TextGroup)
        assert set(group.image_of_text.tolist()) < set(range(16))
        backward(made, some.split(parts))
        gradients.append([p.grad for p in made.parameters() if p.requires_grad])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_a_word_of_each_caption_changes_places() -> None:
    draws = {swapped_across("A dog and a dog run.", "Cats run", np.random.default_rng(n)) for n in range(20)}
    assert draws == {("A cats and a cats run.", "Dog run")}
    assert swapped_across("a dog runs", "the dog", np.random.default_rng(0)) is None
    assert swapped_across("it is", "a red cat", np.random.default_rng(0)) is None


def test_positives_are_two_orders_then_further_sentences() -> None:
    rng = np.random.default_rng(0)
    assert joined(["A dog "], ["a cat", "it sits"], 4, rng) == ["A dog. a cat.", "a cat. A dog."]
    texts = joined(["a dog", "it runs"], ["a cat!", "it sits", "it is red"], 4, rng)
    assert texts[:2] == ["a dog. a cat!", "a cat! a dog."]
    further = [{"it runs", *text.replace("it runs.", "").strip().split(".")[:1]} for text in texts[2:]]
    assert sorted(map(sorted, further)) == [["it is red", "it runs"], ["it runs", "it sits"]]


class Two:
    """A red image of dogs and a blue one of cats."""

    name, fingerprint = "two", "0"

    def __len__(self) -> int:
        return 2

    def record(self, row: int) -> Record:
        image = np.zeros((32, 32, 3), np.uint8)
        image[..., 2 * row] = 255
        return Record(str(row), image, [["a dog"], ["a cat"]][row])


def test_a_batch_has_both_images_in_one_and_both_captions() -> None:
    tokenizer = Tokenizer.train(["a dog. a cat."] * 9, 300)
    inputs = preset("clip+clic").inputs
    loader = Loader(Two(), Order(2, 2, 0), DataConfig(), config().text, 32, tokenizer, inputs=inputs, seed=3)
    made = loader.batch(0)
    images, positives, negatives = (made.inputs[name] for name in (IMAGES, POSITIVES, NEGATIVES))
    assert isinstance(images, Tensor)
    assert images.shape == (2, 3, 32, 32)
    assert (images.sum((2, 3)) == 255 * 16 * 32 * torch.tensor([1, 0, 1])).all()
    assert isinstance(positives, TextGroup)
    assert isinstance(negatives, TextGroup)
    spoken = [
        [tokenizer.decode(t.ids.tolist()) for t in (g.texts.cut(n, n + 1) for n in range(len(g.texts)))]
        for g in (positives, negatives)
    ]
    assert [set(spoken[0][:2]), set(spoken[0][2:])] == [{"a dog. a cat.", "a cat. a dog."}] * 2
    assert all(re.fullmatch("a (dog|cat). a (dog|cat).", text) for text in spoken[1])
    assert positives.image_of_text.tolist() == [0, 0, 1, 1]
    assert negatives.image_of_text.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["llip+clic", "flair+clic", "vqa+clic"])
def test_methods_that_it_does_not_fit_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="compares one vector per image with one per caption"):
        preset(name)


def test_captions_without_a_word_to_swap_are_counted() -> None:
    class Few(Two):
        def record(self, row: int) -> Record:
            return Record("k", b"", [["a dog", "it is"], ["12"]][row])

    assert without(Few()) == "clic: 2 of the first 3 captions have no word to swap, and no negative"
    assert "clic: 0 of the first 64 captions" in without(open_source("scenes:train?n=64&captions=1", 32))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["siglip+clic", "prolip+clic", "siglip+compose+clic", "coca+clic"])
def test_it_is_verified(method: str) -> None:
    assert not [check for check in verify(method, (1, 2)) if not check.passed]
