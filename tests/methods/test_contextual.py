"""Both exact forms of the pairwise cosine against the plain equation; memory; numbers that stay finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.losses.pairs import sigmoid_loss
from kiloword.methods.llip import scores as mixing
from kiloword.methods.llip.scores import PairSizes, ScoreForm, block, choose, cosine
from kiloword.methods.method import annotated
from parts import Largest, blocks, drawn, model, size

FORMS: tuple[ScoreForm, ...] = ("direct", "gram")
Inputs = tuple[Tensor, ...]


def inputs(i: int, t: int, n: int, m: int, d: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Keys, values, query, target and W_O transposed."""
    keys, values, query = drawn(i, n, m, d), drawn(i, n, m, d, seed=1), drawn(t, m, d, seed=2)
    target, out = F.normalize(drawn(t, m * d, seed=3), dim=1), drawn(m * d, m * d, seed=4) / (m * d) ** 0.5
    return tuple(x.to(dtype).requires_grad_() for x in (keys, values, query, target, out))


def literal(keys: Tensor, values: Tensor, query: Tensor, target: Tensor, out: Tensor, factor: float) -> Tensor:
    """Eq. 1 and 2 at once, everything stored: [i, t, D]."""
    phi = torch.einsum("inmd,tmd->itmn", keys, factor * query).softmax(-1)
    z = torch.einsum("itmn,inmd->itmd", phi, values).flatten(2) @ out.T
    return (F.normalize(z, dim=-1) * target).sum(-1)


def cancellation(keys: Tensor, values: Tensor, query: Tensor, _: Tensor, out: Tensor, factor: float) -> float:
    """How much longer the parts of a mixture are than their sum z, at worst. The Gram form computes |z|^2 from them."""
    phi = torch.einsum("inmd,tmd->itmn", keys, factor * query).softmax(-1)
    parts = torch.einsum("itmn,inmd,mdk->itmnk", phi, values, out.T.unflatten(0, values.shape[2:]))
    return float((parts.norm(dim=-1).sum((2, 3)) / parts.sum((2, 3)).norm(dim=-1)).max().detach())


def with_gradients(f: Callable[..., Tensor], given: Inputs, *more: Any) -> list[Tensor]:
    score = f(*given, *more)
    return [score.detach(), *torch.autograd.grad(score, given, drawn(*score.shape, seed=5).to(score.dtype))]


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(1, 4),
    st.sampled_from([1, 40, 1 << 18]), st.sampled_from(FORMS),
)  # fmt: skip
def test_both_forms_are_the_equation(i: int, t: int, n: int, m: int, d: int, tile: int, form: ScoreForm) -> None:
    """In double precision to 1e-12, gradients by everything too, however the tiles are cut; where the parts of a
    mixture cancel, to rounding times the cube of that: gradients divide by |z|^3."""
    some = inputs(i, t, n, m, d)
    bound = max(1e-12, 1e-15 * cancellation(*some, 1.3) ** 3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mixing, "TILE", tile)
        found = with_gradients(cosine, some, 1.3, form)
    for got, expected in zip(found, with_gradients(literal, some, 1.3), strict=True):
        assert float((got - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_single_precision(form: ScoreForm) -> None:
    exact, single = inputs(6, 50, 8, 4, 8), inputs(6, 50, 8, 4, 8, torch.float32)
    expected, found = with_gradients(literal, exact, 1.0), with_gradients(cosine, single, 1.0, form)
    for got, right in zip(found, expected, strict=True):
        assert float((got - right).abs().max()) < 2e-6 * max(1.0, float(right.abs().max()))
    with torch.no_grad():
        assert torch.equal(cosine(*single, 1.0, form), found[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vanishing_mixture_gives_finite_numbers(form: ScoreForm, dtype: torch.dtype) -> None:
    """Values that are zero, that cancel, or that W_O sends to zero: |z|^2 is then nothing but rounding."""
    keys, values, query, target, out = (x.detach() for x in inputs(3, 5, 2, 2, 4, dtype))
    values[0] = 0
    values[1, 1], keys[1, 1] = -values[1, 0], keys[1, 0]
    out[:, :4] = 0  # the first head leads nowhere
    values[2, :, 1] = 0  # and the second has nothing to say
    given = tuple(x.requires_grad_() for x in (keys, values, query, target, out))
    for x in with_gradients(cosine, given, 1.0, form):
        assert bool(x.isfinite().all())
        assert float(x.abs().max()) < 1e13  # torch's normalize: the same where all is zero


def made(form: str, i: int, t: int, n: int) -> tuple[Any, Any, Any]:
    """A head of 8 heads of 16 dimensions, and features of i images of n mixture tokens and t texts."""
    head = model("llip", {"form": form, "heads": 8, "k": n}, size(head__dim=128)).head
    keys, values, query, target, _ = (x.detach().requires_grad_() for x in inputs(i, t, n, 8, 16))
    images = {"vec": F.normalize(values.mean(1).flatten(1)).detach(), "keys": keys, "values": values}
    return head, images, {"vec": target, "query": query, "position": torch.arange(t) % i}


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_pairs_times_dimensions_is_ever_made(form: ScoreForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss with gradients, forward and backward: no tensor near [I, T, D], [I, T, N] or even [I, T, M]."""
    monkeypatch.setitem(mixing.SAVED, "cpu", 1 << 20)
    monkeypatch.setattr(mixing, "TILE", 1 << 16)
    head, images, texts = made(form, 64, 512, 16)
    with Largest() as seen:
        sigmoid_loss(blocks(head, images, texts), annotated).sum.backward()
    down, across = head.block(images, texts)
    assert seen.numbers <= max(64 * 16 * 128 + 1, 64 * 512, down * 128 * 128)  # keys, logits, Gram matrices
    assert seen.numbers < 64 * 512 * 8
    assert down * across < 64 * 512 / 2
    monkeypatch.setattr(mixing, "TILE", 1 << 30)
    with Largest() as seen:  # the watch itself: all at once does make them
        sigmoid_loss(blocks(head, images, texts, 512), annotated).sum.backward()
    assert seen.numbers >= 64 * 512 * 128


@pytest.mark.parametrize("form", FORMS)
def test_blocks_do_not_change_the_loss(form: ScoreForm) -> None:
    """Three ways to cut the same pairs, against autograd through the whole score."""
    head, images, texts = made(form, 6, 11, 4)
    leaves = [images["keys"], images["values"], texts["vec"], texts["query"], head.log_scale, head.pooling.out.weight]
    found = []
    for chunk in (0, 3, 5):
        loss = sigmoid_loss(blocks(head, images, texts, chunk), annotated).sum
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-12)


def test_many_texts_are_for_the_gram_form() -> None:
    """And a block is bounded whatever comes: on a GPU with 32k texts too."""
    base = PairSizes(32, 8, 512)
    assert choose(base, 32) == "direct"
    assert choose(base, 1024) == "gram"
    for pair in (base, PairSizes(64, 8, 512), PairSizes(128, 8, 1024), PairSizes(1, 1, 16)):
        for form in FORMS:
            for device in ("cpu", "cuda"):
                down, across = block(pair, form, device)
                assert down * across * 2 * pair.weights <= mixing.SAVED[device]


def test_explain_gives_the_weights_of_the_mixture() -> None:
    head, images, texts = made("auto", 3, 4, 5)
    phi = head.explain(images, texts)  # [i, t, M, N]
    assert phi.shape == (3, 4, 8, 5)
    torch.testing.assert_close(phi.sum(-1), torch.ones_like(phi[..., 0]))
    mixed = torch.einsum("itmn,inmd->itmd", phi, images["values"]).flatten(2)
    expected = (F.normalize(head.pooling.out(mixed), dim=-1) * texts["vec"]).sum(-1)
    torch.testing.assert_close(head.score(images, texts), expected)
