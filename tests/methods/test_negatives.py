"""Captions with swapped words, and the contrast with them, against loops over pairs (arXiv:2210.01936)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kiloword.data.open import open_source
from kiloword.methods.negatives import contrast, swapped, without
from kiloword.types import BadSample, Record
from parts import agree, blocks, cosine, drawn, mean


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
    of, swaps = [0, 0, 1, 2, 0, 2], [False, False, False, False, True, True]
    rows, columns = drawn(3, 5).requires_grad_(), drawn(6, 5, seed=1).requires_grad_()
    right = {"vec": columns, "position": torch.tensor(of), "swapped": torch.tensor(swaps)}
    total = contrast(blocks(cosine(), {"vec": rows}, right, chunk))
    agree(mean(total), literal(rows, columns, of, swaps), [rows, columns])


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


def test_captions_without_negatives_are_counted() -> None:
    class Few:
        name, fingerprint = "few", "0"

        def __len__(self) -> int:
            return 3

        def record(self, row: int) -> Record:
            if row == 2:
                raise BadSample("gone")
            return Record("k", b"", [["a dog", "dogs run"], ["it is"]][row])

    assert "2 of the first 3 captions" in without(Few())
    assert "of the first 64 captions" in without(open_source("scenes:train?n=64&captions=1", 32))
