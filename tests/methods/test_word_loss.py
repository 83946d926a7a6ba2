"""The loss of next words from chunks of logits, against torch's cross-entropy of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kiloword.methods.coca import captioning
from kiloword.methods.coca.captioning import prefixes, word_loss
from kiloword.types import Texts


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 12), vocab=st.integers(2, 9), chunk=st.integers(1, 13), smoothing=st.sampled_from([0, 0.1, 0.9])
)
def test_word_loss_in_chunks(n: int, vocab: int, chunk: int, smoothing: float) -> None:
    x, table = random(n, 5).requires_grad_(), random(vocab, 5, seed=1).requires_grad_()
    targets = torch.randint(-1, vocab, (n,), generator=torch.Generator().manual_seed(n))
    fast = 3 * word_loss(x, table, targets, smoothing, chunk)
    slow = 3 * F.cross_entropy(x @ table.T, targets, ignore_index=-1, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(loss, (x, table)) for loss in (fast, slow)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_word_loss_of_what_is_frozen() -> None:
    """The same value and gradients where a side, or both, learn nothing."""
    x, table, targets = random(7, 5), random(6, 5, seed=1), torch.tensor([0, 5, -1, 2, 2, 1, 4])
    free = [side.clone().requires_grad_() for side in (x, table)]
    both = word_loss(free[0], free[1], targets, 0.1, 3)
    wanted = torch.autograd.grad(both, free)
    for sides, free_one, expected in (((free[0], table), free[0], wanted[0]), ((x, free[1]), free[1], wanted[1])):
        found = word_loss(*sides, targets, 0.1, 3)
        assert torch.equal(found, both)
        assert torch.equal(torch.autograd.grad(found, free_one)[0], expected)
    assert torch.equal(word_loss(x, table, targets, 0.1, 3), both)


def test_word_loss_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in half precision, their exponents and sums in single."""
    kinds: list[torch.dtype] = []

    def watch(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        kinds.append(logits.dtype)
        return words(logits, targets, smoothing)

    words = captioning._words
    monkeypatch.setattr(captioning, "_words", watch)
    x, table = random(300, 64).float().requires_grad_(), (random(500, 64, seed=1) / 8).float().requires_grad_()
    targets = torch.randint(-1, 500, (300,), generator=torch.Generator().manual_seed(0))
    exact = word_loss(x, table, targets, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        near = word_loss(x, table, targets, 0.1)
    assert near.dtype == torch.float32
    assert kinds == [torch.float32, torch.bfloat16]
    assert near.item() == pytest.approx(exact.item(), rel=1e-3)
    for a, b in zip(torch.autograd.grad(near, (x, table)), torch.autograd.grad(exact, (x, table)), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.01


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers of the largest tensor that any operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.most = max(self.most, x.numel() if isinstance(x, Tensor) else 0)
        return out


class Kept:
    """Counts the numbers that are kept for the backward pass."""

    sum = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.sum += x.numel()
        return x


def test_word_loss_never_holds_all_logits() -> None:
    """The largest tensor, and what is kept for the backward pass, do not grow with words times vocabulary."""
    vocab, width, chunk = 700, 8, 16
    for n in (64, 256):
        x, table = random(n, width).requires_grad_(), random(vocab, width, seed=1).requires_grad_()
        targets = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(0))
        kept = Kept()
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t), Largest() as seen:  # type: ignore[no-untyped-call]
            word_loss(x, table, targets, 0.1, chunk).backward()  # type: ignore[no-untyped-call]
        assert seen.most == chunk * vocab < n * vocab
        assert kept.sum == (n + vocab) * width


def test_prefixes() -> None:
    texts = Texts.pack([[5, 6, 7, 8], [9, 10], [11, 12, 13]])
    place, before = prefixes(texts, 2)
    assert place.tolist() == [0, 1, 6]
    assert (before.ids.tolist(), before.starts.tolist(), before.longest) == ([5, 6, 11], [0, 2, 2, 3], 2)
