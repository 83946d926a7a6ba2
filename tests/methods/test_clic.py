"""Composed images, swapped words and their loss, against a transcription of arXiv:2505.24424, eq. 4 to 7."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.clic import IMAGES, NEGATIVES, POSITIVES, ClicSettings, apart, clic_loss, joined, swapped_across
from kiloword.methods.negatives import SWAPPED, contrast, swapped
from kiloword.methods.registry import preset
from kiloword.types import BadSample, Record
from literal import matching, softmax_rows
from parts import agree, blocks, cosine, drawn, ids_of, loader, mean, units


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


def ours(images: Tensor, texts: Tensor, of: list[int], sets: list[int], scale: float, chunk: int = 0) -> Tensor:
    """texts [C, D] of images `of`; the first two of an image are its orders."""
    n = sum(k >= 0 for k in sets)
    distance = apart(texts[:n], torch.tensor(of[:n]), torch.tensor(sets[:n]), len(images))
    columns = {"vec": texts, "position": torch.tensor(of), "set": torch.tensor(sets)}
    return mean(clic_loss(blocks(cosine(), {"vec": scale * images, "apart": distance}, columns, chunk), ClicSettings()))


@pytest.mark.parametrize("chunk", [0, 2])
def test_the_loss_and_its_gradient_are_the_paper_s(chunk: int) -> None:
    n, k = 4, 3
    images, positives, negatives = leaves = [
        units(*shape, 6, seed=s).requires_grad_() for s, shape in enumerate(((n,), (k, n), (n,)))
    ]
    texts = torch.cat([positives.transpose(0, 1).flatten(0, 1), negatives])
    of = [*(i for i in range(n) for _ in range(k)), *range(n)]
    found = ours(images, texts, of, [*list(range(k)) * n, *[-1] * n], 5.0, chunk)
    agree(found, papers(images, positives, negatives, 5.0), leaves)


def test_an_image_without_a_negative_adds_no_choice() -> None:
    images, texts = units(2, 4), units(5, 4, seed=1)
    positives = texts[:4].reshape(2, 2, 4).transpose(0, 1)
    with_both = papers(images, positives, torch.stack([texts[4], texts[4]]), 3.0)
    choices = [F.softplus(3 * images[1] @ (texts[4] - texts[n])) for n in (2, 3)]
    found = ours(images, texts, [0, 0, 1, 1, 0], [0, 1, 0, 1, -1], 3.0)
    torch.testing.assert_close(found, with_both - 0.5 * torch.stack(choices).sum() / 4, rtol=1e-10, atol=0)


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


class Said:
    """A red and a blue image with captions, and bad rows where there are none."""

    name, fingerprint = "said", "0"

    def __init__(self, *said: list[str]) -> None:
        self.said = said

    def __len__(self) -> int:
        return len(self.said)

    def record(self, row: int) -> Record:
        if not self.said[row]:
            raise BadSample("gone")
        image = np.zeros((32, 32, 3), np.uint8)
        image[..., 2 * row] = 255
        return Record(str(row), image, self.said[row])


def test_a_batch_has_both_images_in_one_and_both_captions() -> None:
    tokenizer = Tokenizer.train(["a dog. a cat."] * 9, 300)
    source = Said(["a dog"], ["a cat. it sits"])
    made = loader(source, preset("clip+clic").inputs, rows=2, tokenizer=tokenizer, seed=3).batch(0)
    positives, negatives = (made.inputs.texts(name) for name in (POSITIVES, NEGATIVES))
    assert (made.inputs.tensor(IMAGES).sum((2, 3)) == 255 * 16 * 32 * torch.tensor([1, 0, 1])).all()
    said, wrong = ([tokenizer.decode(ids) for ids in ids_of(group.texts)] for group in (positives, negatives))
    assert [set(said[:2]), set(said[2:])] == [{"a dog. a cat.", "a cat. a dog."}] * 2
    assert all(re.fullmatch("a (dog|cat). a (dog|cat).", text) for text in wrong)
    assert positives.image_of_text.tolist() == [0, 0, 1, 1]
    assert negatives.image_of_text.tolist() == [0, 1]


@pytest.mark.parametrize("chunk", [0, 2])
def test_the_loss_and_its_gradient_are_the_literal_ones(chunk: int) -> None:
    of, swaps = [0, 0, 1, 2, 0, 2], torch.tensor([False, False, False, False, True, True])
    rows, columns = drawn(3, 5).requires_grad_(), drawn(6, 5, seed=1).requires_grad_()
    right = {"vec": columns, "position": torch.tensor(of), "swapped": swaps}
    total = contrast(blocks(cosine(), {"vec": rows}, right, chunk))
    agree(mean(total), softmax_rows(rows @ columns.T, matching(of) * ~swaps), [rows, columns])


@pytest.mark.parametrize("length", [2, 5, 12])
def test_all_pairs_of_different_words_are_alike_likely(length: int) -> None:
    """The pair of a draw is the one at its place in the list of all pairs."""
    rng = np.random.default_rng(length)
    for seed in range(200):
        words = [str(word) for word in rng.choice(["red", "Red", "blue", "dog", "the", "cat"], length)]
        names = [word for word in words if word != "the"]
        places = [(a, b) for a in range(len(names)) for b in range(a + 1, len(names))]
        places = [(a, b) for a, b in places if names[a].lower() != names[b].lower()]
        expected = None
        if places:
            a, b = places[int(np.random.default_rng(seed).integers(len(places)))]
            names[a], names[b] = names[b], names[a]
            rest = iter(names)
            expected = " ".join(word if word == "the" else next(rest) for word in words)
        assert swapped(" ".join(words), np.random.default_rng(seed)) == expected


def test_words_change_places_and_nothing_else() -> None:
    caption = "a dog chases, under the tree."
    found = {swapped(caption, np.random.default_rng(seed)) for seed in range(50)}
    assert found == {"a chases dog, under the tree.", "a tree chases, under the dog.", "a dog tree, under the chases."}
    for without in ("", "a dog", "the dog is on it", "dog Dog DOG", "12 34 !!", "\u72d7 \u732b"):
        assert swapped(without, np.random.default_rng(0)) is None
    book = " ".join(f"word{n % 977}x" for n in range(100_000))  # 5 billion pairs, of which none is listed
    assert swapped(book, np.random.default_rng(0)) != book


def test_captions_without_negatives_are_counted() -> None:
    few, scenes = Said(["a dog", "dogs run"], ["it is"], []), open_source("scenes:train?n=64&captions=1", 32)
    for name, key, lacking in (("negatives", SWAPPED, 2), ("clic", NEGATIVES, 1)):
        note: Any = preset(f"clip+{name}").inputs[key].note
        assert f"{lacking} of the first 3 captions" in note(few)
        assert "of the first 64 captions" in note(scenes)
