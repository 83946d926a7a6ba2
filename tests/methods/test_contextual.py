"""Both exact forms of the pairwise cosine against the plain equation; memory; numbers that stay finite."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kiloword.config.recipes import sizes
from kiloword.losses.pairs import Blocks, sigmoid_loss
from kiloword.methods.llip import scores as mixing
from kiloword.methods.llip.pooling import Contextual, ContextualSettings, tokens
from kiloword.methods.llip.scores import PairSizes, ScoreForm, block, choose, cosine
from kiloword.methods.method import annotated
from kiloword.model.heads import Head
from kiloword.model.model import initialise

FORMS: tuple[ScoreForm, ...] = ("direct", "gram")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(i: int, t: int, n: int, m: int, d: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Keys, values, query, target and W_O transposed."""
    keys, values, query, out = numbers(i, n, m, d), numbers(i, n, m, d, seed=1), numbers(t, m, d, seed=2), None
    target, out = F.normalize(numbers(t, m * d, seed=3), dim=1), numbers(m * d, m * d, seed=4) / (m * d) ** 0.5
    return tuple(x.to(dtype).requires_grad_() for x in (keys, values, query, target, out))  # type: ignore[return-value]


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
    return [score.detach(), *torch.autograd.grad(score, given, numbers(*score.shape, seed=5).to(score.dtype))]


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
    usual, mixing.TILE = mixing.TILE, tile
    try:
        found = with_gradients(cosine, some, 1.3, form)
    finally:
        mixing.TILE = usual
    for got, expected in zip(found, with_gradients(literal, some, 1.3), strict=True):
        assert float((got - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_single_precision(form: ScoreForm) -> None:
    exact, single = inputs(6, 50, 8, 4, 8), inputs(6, 50, 8, 4, 8, torch.float32)
    expected, found = with_gradients(literal, exact, 1.0), with_gradients(cosine, single, 1.0, form)
    for got, right in zip(found, expected, strict=True):
        assert float((got - right).abs().max()) < 2e-6 * max(1.0, float(right.abs().max()))


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
    for x in with_gradients(cosine, given, 1.0, form):  # type: ignore[arg-type]
        assert bool(x.isfinite().all())
        assert float(x.abs().max()) < 1e13  # torch's normalize: the same where all is zero


@pytest.mark.parametrize("form", FORMS)
def test_without_gradient_nothing_is_kept(form: ScoreForm, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    tile = mixing._tile

    def noted(*args: Any) -> Any:
        result, kept = tile(*args)
        made.append(weakref.ref(kept))
        return result, kept

    monkeypatch.setattr(mixing, "_tile", noted)
    some = inputs(4, 6, 3, 2, 4)
    with torch.no_grad():
        score = cosine(*some, 1.0, form)
    assert score.grad_fn is None
    assert len(made) == 1
    assert made[0]() is None
    score = cosine(*some, 1.0, form)
    assert made[1]() is not None


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


def features(pooling: Contextual, i: int, t: int, n: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    m, d = pooling.settings.heads, pooling.dim // pooling.settings.heads
    keys, values, query, target, _ = (x.detach().float() for x in inputs(i, t, n, m, d))
    images = {"vec": F.normalize(values.mean(1).flatten(1)), "keys": keys, "values": values}
    texts = {"vec": target, "query": query}
    for x in (keys, values, target, query):
        x.requires_grad_()
    return images | {"position": torch.arange(i)}, texts | {"position": torch.arange(t) % i}


def made(form: ScoreForm | str = "auto", heads: int = 8, k: int = 16) -> tuple[Head, Contextual]:
    mixture = ContextualSettings(form=form, heads=heads, k=k)  # type: ignore[arg-type]
    pooling = Contextual(tokens(sizes()["tiny"], mixture), mixture)
    head = Head(pooling, scale=10.0, bias=-10.0)
    initialise(head, 0)
    return head, pooling


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_pairs_times_dimensions_is_ever_made(form: ScoreForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss with gradients, forward and backward: no tensor near [I, T, D], [I, T, N] or even [I, T, M]."""
    monkeypatch.setitem(mixing.SAVED, "cpu", 1 << 20)
    monkeypatch.setattr(mixing, "TILE", 1 << 16)
    head, pooling = made(form)
    images, texts = features(pooling, 64, 512, 16)
    with Largest() as seen:
        pairs = Blocks(head, images, texts)
        sigmoid_loss(pairs, annotated).sum.backward()  # type: ignore[no-untyped-call]
    down, across = pairs.step
    assert seen.numbers <= max(64 * 16 * 128 + 1, 64 * 512, down * 128 * 128)  # keys, logits, Gram matrices
    assert seen.numbers < 64 * 512 * 8
    assert down * across < 64 * 512 / 2
    monkeypatch.setattr(pooling, "block", lambda *_: (64, 512), raising=False)
    monkeypatch.setattr(mixing, "TILE", 1 << 30)
    with Largest() as seen:  # the watch itself: all at once does make them
        sigmoid_loss(Blocks(head, images, texts), annotated).sum.backward()  # type: ignore[no-untyped-call]
    assert seen.numbers >= 64 * 512 * 128


@pytest.mark.parametrize("form", FORMS)
def test_blocks_do_not_change_the_loss(form: ScoreForm) -> None:
    """Three ways to cut the same pairs, against autograd through the whole score."""
    head, pooling = made(form)
    head.double()
    found = []
    for chunk in (0, 3, 5):
        images, texts = features(pooling, 6, 11, 4)
        images, texts = ({k: _leaf(v) for k, v in f.items()} for f in (images, texts))
        loss = sigmoid_loss(Blocks(head, images, texts, chunk), annotated).sum
        leaves = [images["keys"], images["values"], texts["vec"], texts["query"]]
        leaves += [head.log_scale, pooling.out.weight]
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_() if x.is_floating_point() else x


def test_many_texts_are_for_the_gram_form() -> None:
    """And a block is bounded whatever comes: on a GPU with 32k texts too."""
    base = PairSizes(32, 8, 512)
    assert choose(base, 32) == "direct"
    assert choose(base, 1024) == "gram"
    for size in (base, PairSizes(64, 8, 512), PairSizes(128, 8, 1024), PairSizes(1, 1, 16)):
        for form in FORMS:
            for device in ("cpu", "cuda"):
                down, across = block(size, form, device)
                assert down * across * 2 * size.weights <= mixing.SAVED[device]


def test_explain_gives_the_weights_of_the_mixture() -> None:
    head, pooling = made()
    images, texts = ({k: v.detach() for k, v in f.items()} for f in features(pooling, 3, 4, 5))
    phi = head.explain(images, texts)  # [i, t, M, N]
    assert phi.shape == (3, 4, 8, 5)
    assert torch.allclose(phi.sum(-1), torch.ones(3, 4, 8))
    mixed = torch.einsum("itmn,inmd->itmd", phi, images["values"]).flatten(2)
    expected = (F.normalize(pooling.out(mixed), dim=-1) * texts["vec"]).sum(-1)
    assert torch.allclose(head.score(images, texts), expected, atol=1e-5)
