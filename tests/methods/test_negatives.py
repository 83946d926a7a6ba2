"""Captions with swapped words, and the contrast with them, against loops over pairs (arXiv:2210.01936)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kiloword.data.open import open_source
from kiloword.losses.pairs import Blocks
from kiloword.methods.negatives import SWAPPED, contrast, swapped, without
from kiloword.methods.registry import preset
from kiloword.model.heads import cosine_head
from kiloword.model.model import initialise
from kiloword.training.accumulate import backward
from kiloword.types import BadSample, Record, TextGroup
from kiloword.verify.batch import batch
from kiloword.verify.suite import learner, verify


def draws(caption: str, n: int = 50) -> set[str | None]:
    return {swapped(caption, np.random.default_rng(seed)) for seed in range(n)}


def test_two_words_change_places_and_nothing_else() -> None:
    assert draws("a dog chases, under the tree, a Cat.") == {
        "a chases dog, under the tree, a Cat.",
        "a tree chases, under the dog, a Cat.",
        "a Cat chases, under the tree, a dog.",
        "a dog tree, under the chases, a Cat.",
        "a dog Cat, under the tree, a chases.",
        "a dog chases, under the Cat, a tree.",
    }


@pytest.mark.parametrize("caption", ["", "a dog", "the dog is on it", "dog Dog DOG", "12 34 !!", "\u72d7 \u732b"])
def test_captions_without_two_words_have_no_negative(caption: str) -> None:
    assert draws(caption) == {None}


def literal(rows: Tensor, columns: Tensor, of: list[int], swaps: list[bool]) -> Tensor:
    total = rows.new_zeros(())
    for i, row in enumerate(rows):
        logits = torch.stack([row @ column for column in columns])
        own = [c for c, image in enumerate(of) if image == i and not swaps[c]]
        total = total - torch.stack([(logits[c].exp() / logits.exp().sum()).log() for c in own]).mean()
    return total / len(rows)


@pytest.mark.parametrize("chunk", [0, 2])
def test_the_loss_and_its_gradient_are_the_literal_ones(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    of, swaps = [0, 0, 1, 2, 0, 2], [False, False, False, False, True, True]
    rows, columns = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (3, 6))
    head = cosine_head(1.0, fixed=True).double()
    initialise(head, 0)
    measured = []
    for fast in (True, False):
        a, b = rows.clone().requires_grad_(), columns.clone().requires_grad_()
        left = {"vec": a, "position": torch.arange(3)}
        right = {"vec": b, "position": torch.tensor(of), "swapped": torch.tensor(swaps)}
        total = contrast(Blocks(head, left, right, chunk))
        loss = total.sum / total.count if fast else literal(a, b, of, swaps)
        measured.append([loss.detach(), *torch.autograd.grad(loss, [a, b])])
    for a, b in zip(*measured, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


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


def test_a_caption_of_a_book_is_swapped_at_once() -> None:
    caption = " ".join(f"word{n % 977}x" for n in range(100_000))  # 5 billion pairs
    assert swapped(caption, np.random.default_rng(0)) != caption


def test_micro_batches_without_a_swapped_caption_leave_the_gradient() -> None:
    gradients = []
    for parts in (1, 16):
        made, some = learner("clip+negatives"), batch(method="clip+negatives")
        group = some.inputs[SWAPPED]
        assert isinstance(group, TextGroup)
        assert set(group.image_of_text.tolist()) < set(range(16))
        backward(made, some.split(parts))
        gradients.append([p.grad for p in made.parameters() if p.requires_grad])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_a_pooling_without_one_vector_is_refused() -> None:
    for name in ("llip+negatives", "flair+negatives"):
        with pytest.raises(ValueError, match="compares one vector per image with one per text"):
            preset(name)


def test_captions_without_negatives_are_counted() -> None:
    class Few:
        name, fingerprint = "few", "0"

        def __len__(self) -> int:
            return 3

        def record(self, row: int) -> Record:
            if row == 2:
                raise BadSample("gone")
            return Record("k", b"", [["a dog", "dogs run"], ["it is"]][row])

    assert without(Few()).startswith("negatives: 2 of the first 3 captions have no two words to swap")
    assert "of the first 64 captions" in without(open_source("scenes:train?n=64&captions=1", 32))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["clip+negatives", "prolip+negatives", "siglip+compose+negatives"])
def test_it_is_verified(method: str) -> None:
    assert not [check for check in verify(method, (1, 2)) if not check.passed]
