"""The loss of next words from chunks of logits, against torch's cross-entropy of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.methods.coca.captioning import word_loss
from parts import Largest, drawn


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 12), vocab=st.integers(2, 9), chunk=st.integers(1, 13), smoothing=st.sampled_from([0, 0.1, 0.9])
)
def test_word_loss_in_chunks(n: int, vocab: int, chunk: int, smoothing: float) -> None:
    x, table = drawn(n, 5).requires_grad_(), drawn(vocab, 5, seed=1).requires_grad_()
    targets = torch.randint(-1, vocab, (n,), generator=torch.Generator().manual_seed(n))
    fast = 3 * word_loss(x, table, targets, smoothing, chunk)
    slow = 3 * F.cross_entropy(x @ table.T, targets, ignore_index=-1, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(loss, (x, table)) for loss in (fast, slow))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_word_loss_of_what_is_frozen() -> None:
    """The same value and gradients where a side, or both, learn nothing."""
    x, table, targets = drawn(7, 5), drawn(6, 5, seed=1), torch.tensor([0, 5, -1, 2, 2, 1, 4])
    free = [side.clone().requires_grad_() for side in (x, table)]
    both = word_loss(free[0], free[1], targets, 0.1, 3)
    wanted = torch.autograd.grad(both, free)
    for sides, free_one, expected in (((free[0], table), free[0], wanted[0]), ((x, free[1]), free[1], wanted[1])):
        found = word_loss(*sides, targets, 0.1, 3)
        assert torch.equal(found, both)
        assert torch.equal(torch.autograd.grad(found, free_one)[0], expected)
    assert torch.equal(word_loss(x, table, targets, 0.1, 3), both)


def test_word_loss_under_autocast() -> None:
    """Logits in half precision, their exponents and sums in single."""
    x, table = drawn(300, 64).float().requires_grad_(), (drawn(500, 64, seed=1) / 8).float().requires_grad_()
    targets = torch.randint(-1, 500, (300,), generator=torch.Generator().manual_seed(0))
    exact = word_loss(x, table, targets, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        near = word_loss(x, table, targets, 0.1)
    assert near.dtype == torch.float32
    assert near.item() == pytest.approx(exact.item(), rel=1e-3)
    assert near.item() != exact.item()
    for a, b in zip(torch.autograd.grad(near, (x, table)), torch.autograd.grad(exact, (x, table)), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.01


@pytest.mark.parametrize("n", [64, 256])
def test_word_loss_never_holds_all_logits(n: int) -> None:
    """The largest tensor, and what is kept for the backward pass, do not grow with words times vocabulary."""
    vocab, width, chunk, kept = 700, 8, 16, list[int]()
    x, table = drawn(n, width).requires_grad_(), drawn(vocab, width, seed=1).requires_grad_()
    targets = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(0))

    def keep(x: Tensor) -> Any:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), Largest() as seen:
        word_loss(x, table, targets, 0.1, chunk).backward()
    assert seen.numbers == chunk * vocab < n * vocab
    assert sum(kept) == (n + vocab) * width
