"""Llip against the paper's equations, written out in loops (arXiv:2405.00740, eq. 1 to 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from cases import mostly_slow
from kiloword.config.recipes import HeadConfig, sizes
from kiloword.losses import pertext as mixing
from kiloword.losses.pairs import sigmoid_loss
from kiloword.losses.pertext import ScoreForm, cosine
from kiloword.methods.method import annotated
from kiloword.verify.batch import batch
from literal import CAPTIONS, matching, pairs, sigmoid_pairs, small
from parts import Largest, agree, blocks, drawn, learner, losses, model, size

DIM, K, M = 16, 3, 4


def softmax(z: list[Tensor], temperature: float) -> list[Tensor]:
    """The paper's softmax with temperature, as printed below eq. 1."""
    exps = [torch.exp(x * temperature) for x in z]
    return [e / torch.stack(exps).sum() for e in exps]


def matrix(of: Tensor, token: int, m: int) -> Tensor:
    """W^mk [W, d]: of a shared projection, of the token's own, or of the one that all patches share."""
    d = of.shape[2] // M
    return of[min(token, len(of) - 1)][:, m * d : (m + 1) * d]


def mixed(pooling: Any, h: Tensor, query: list[Tensor], temperature: float) -> Tensor:
    """z [D] of one image's tokens h [N, W] for the queries of M heads."""
    heads = []
    for m in range(M):
        keys = [hk @ matrix(pooling.key, k, m) for k, hk in enumerate(h)]
        values = [hk @ matrix(pooling.value, k, m) for k, hk in enumerate(h)]
        phi = softmax([query[m] @ key for key in keys], temperature)  # eq. 1
        heads.append(sum((p * v for p, v in zip(phi, values, strict=True)), torch.zeros(())))
    return torch.cat(heads) @ pooling.out.weight.T  # eq. 2


def literal(pooling: Any, h: Tensor, g: Tensor, temperature: float) -> Tensor:
    """Cosine of z_ij and z'_j by loops over images i, texts j, heads m and tokens k."""
    rows = []
    for hi in h:
        row = []
        for gj in g:
            query = [gj @ pooling.query.weight.T[:, m * DIM // M : (m + 1) * DIM // M] for m in range(M)]
            z, target = mixed(pooling, hi, query, temperature), gj @ pooling.text_projection.weight.T
            row.append((z / z.norm()) @ (target / target.norm()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


CASES = [  # every two of which occur together
    ("multiply", False, False, "direct"),
    ("multiply", True, True, "gram"),
    ("divide", False, True, "direct"),
    ("divide", True, False, "gram"),
    ("multiply", False, False, "gram"),
    ("divide", True, True, "direct"),
]


@pytest.mark.parametrize(("mode", "per_token", "patch_keys", "form"), mostly_slow(CASES, 0, 1, 3))
def test_loss_is_the_paper_s(mode: str, per_token: bool, patch_keys: bool, form: str) -> None:
    """And so are its gradients by every parameter of the model."""
    said = {"temperature_mode": mode, "per_token_projections": per_token, "patch_keys": patch_keys, "form": form}
    llip = learner("llip", {"k": K, "heads": M, "bias": -2.0, **said}, small(), chunk=2)
    some, head = pairs(llip.model, CAPTIONS), llip.model.head
    assert head.pooling.form == form
    encoded = llip.encode(some)
    h = encoded.image_tokens if patch_keys else encoded.image_tokens[:, :K]
    g = encoded.text_tokens[some.texts.starts[1:] - 1]
    temperature = 5 / math.sqrt(DIM / M) if mode == "multiply" else 1 / 5
    cosines = literal(head.pooling, h, g, temperature)
    torch.testing.assert_close(head.score(encoded.images, encoded.texts), cosines, rtol=0, atol=1e-10)
    alone = head.score_pairs(encoded.images, {name: value[:4] for name, value in encoded.texts.items()})
    torch.testing.assert_close(alone, cosines.diagonal(), rtol=0, atol=1e-10)
    y = matching(some.image_of_text.tolist())
    expected = sigmoid_pairs(head.log_scale.exp() * cosines + head.bias, y) / 4  # eq. 3; its bias's sign is a typo
    agree(losses(llip, some)["pair"], expected, list(llip.model.parameters()), atol=1e-10)


@pytest.mark.parametrize("mode", ["multiply", "divide"])
@pytest.mark.parametrize("temperature", [1.0, 5.0, 10.0])
def test_attention_starts_open(mode: str, temperature: float) -> None:
    """Whatever the temperature, the weights of the mixture differ by about e: no token is out of it."""
    shape = replace(sizes()["tiny"], head=HeadConfig(dim=256))
    llip = model("llip", {"temperature": temperature, "temperature_mode": mode}, shape)
    pooling = llip.head.pooling
    images = pooling.image(drawn(4, 16, llip.config.image.width))
    query = pooling.query(drawn(50, llip.config.text.width, seed=1)).view(50, 8, -1)
    logits = llip.head.pooling.explain(images, {"query": query, "vec": query}).log().detach()
    assert 0.7 < float((logits - logits.mean(-1, keepdim=True)).std()) < 1.4


def encoded(llip: Any) -> tuple[Any, Any]:
    some = batch()
    return llip.encode_image(some.images)[1], llip.encode_text(some.texts)[1]


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 0.2, 0.5, 0.3, 2.0], dtype=torch.float64)])
def test_ensemble_means_targets_and_queries(weights: Tensor | None) -> None:
    """Targets: normalise, mean, normalise; queries: plain mean."""
    llip = model("llip")
    texts = {k: v[:5] for k, v in encoded(llip)[1].items()}
    group = torch.tensor([0, 1, 0, 1, 1])
    got, every = llip.head.ensemble(texts, group, 2, weights), torch.ones(5).double() if weights is None else weights
    for c in range(2):
        share = every[group == c]
        target = (texts["vec"][group == c] * share[:, None]).sum(0)
        query = (texts["query"][group == c] * share[:, None, None]).sum(0) / share.sum()
        torch.testing.assert_close(got["vec"][c], target / target.norm())
        torch.testing.assert_close(got["query"][c], query)


@pytest.mark.parametrize("pool", ["first", "average", "learned_average"])
def test_baselines_read_the_same_tokens_into_one_vector(pool: str) -> None:
    llip = model("llip", {"pool": pool, "k": K, "heads": M})
    assert (llip.config.image.extra_tokens, llip.config.image.class_token) == (K, False)
    pooling, tokens = llip.head.pooling, drawn(3, K + 4, 32)
    if pool == "learned_average":
        query, factor = list(pooling.query.view(M, -1)), pooling.factor
        expected = torch.stack([mixed(pooling, h, query, factor) for h in tokens[:, :K]])
    else:
        expected = pooling.project_image_tokens(tokens[:, 0] if pool == "first" else tokens[:, :K].mean(1))
    got = llip.head.image(tokens)
    assert list(got) == ["vec"]
    torch.testing.assert_close(got["vec"], F.normalize(expected, dim=1))
    images, texts = encoded(llip)
    torch.testing.assert_close(llip.score(images, texts), images["vec"] @ texts["vec"].T)
    with pytest.raises(ValueError, match="one vector"):
        llip.head.pooling.explain(images, texts)


def test_shortlist_vector_is_the_equal_mixture_and_tokens_are_projected() -> None:
    llip = model("llip", {"k": K, "heads": M, "per_token_projections": True})
    pooling, tokens = llip.head.pooling, drawn(3, K + 4, 32)
    values = torch.stack([tokens[:, k] @ pooling.value[k] for k in range(K)], 1)
    got = llip.head.image(tokens)["vec"]
    torch.testing.assert_close(got, F.normalize(pooling.out(values.mean(1)), dim=1))
    assert not got.requires_grad
    head = model("llip", {"k": K, "heads": M}).head
    expected = head.pooling.out(tokens @ head.pooling.value[0])
    torch.testing.assert_close(head.pooling.project_image_tokens(tokens), expected)
    assert head.pooling.project_text_tokens(tokens).shape == (3, K + 4, DIM)


FORMS: tuple[ScoreForm, ...] = ("direct", "gram")
Inputs = tuple[Tensor, ...]


def sides(i: int, t: int, n: int, m: int, d: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Keys, values, query, target and W_O transposed."""
    keys, values, query = drawn(i, n, m, d), drawn(i, n, m, d, seed=1), drawn(t, m, d, seed=2)
    target, out = F.normalize(drawn(t, m * d, seed=3), dim=1), drawn(m * d, m * d, seed=4) / (m * d) ** 0.5
    return tuple(x.to(dtype).requires_grad_() for x in (keys, values, query, target, out))


def plain(keys: Tensor, values: Tensor, query: Tensor, target: Tensor, out: Tensor, factor: float) -> Tensor:
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
    some = sides(i, t, n, m, d)
    bound = max(1e-12, 1e-15 * cancellation(*some, 1.3) ** 3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mixing, "TILE", tile)
        found = with_gradients(cosine, some, 1.3, form)
    for got, expected in zip(found, with_gradients(plain, some, 1.3), strict=True):
        assert float((got - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_single_precision_of_several_tiles(form: ScoreForm) -> None:
    shape = 2, mixing.TILE // 64 + 900, 8, 8, 2
    exact, single = sides(*shape), sides(*shape, torch.float32)
    expected, found = with_gradients(plain, exact, 1.0), with_gradients(cosine, single, 1.0, form)
    for got, right in zip(found, expected, strict=True):
        assert float((got - right).abs().max()) < 1e-5 * max(1.0, float(right.abs().max()))
    with torch.no_grad():
        assert torch.equal(cosine(*single, 1.0, form), found[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vanishing_mixture_gives_finite_numbers(form: ScoreForm, dtype: torch.dtype) -> None:
    """Values that are zero, that cancel, or that W_O sends to zero: |z|^2 is then nothing but rounding."""
    keys, values, query, target, out = (x.detach() for x in sides(3, 5, 2, 2, 4, dtype))
    values[0] = 0
    values[1, 1], keys[1, 1] = -values[1, 0], keys[1, 0]
    out[:, :4] = 0  # the first head leads nowhere
    values[2, :, 1] = 0  # and the second has nothing to say
    given = tuple(x.requires_grad_() for x in (keys, values, query, target, out))
    for x in with_gradients(cosine, given, 1.0, form):
        assert bool(x.isfinite().all())
        assert float(x.abs().max()) < 1e13  # torch's normalize: the same where all is zero


def pairs_of(form: str, i: int, t: int, n: int) -> tuple[Any, Any, Any]:
    """A head of 8 heads of 16 dimensions, and features of i images of n mixture tokens and t texts."""
    head = model("llip", {"form": form, "heads": 8, "k": n}, size(head__dim=128)).head
    keys, values, query, target, _ = (x.detach().requires_grad_() for x in sides(i, t, n, 8, 16))
    images = {"vec": F.normalize(values.mean(1).flatten(1)).detach(), "keys": keys, "values": values}
    return head, images, {"vec": target, "query": query, "position": torch.arange(t) % i}


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_pairs_times_dimensions_is_ever_made(form: ScoreForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss with gradients, forward and backward: no tensor near [I, T, D], [I, T, N] or even [I, T, M]."""
    monkeypatch.setitem(mixing.SAVED, "cpu", 1 << 20)
    monkeypatch.setattr(mixing, "TILE", 1 << 16)
    head, images, texts = pairs_of(form, 64, 512, 16)
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


def test_explain_gives_the_weights_of_the_mixture() -> None:
    head, images, texts = pairs_of("auto", 3, 4, 5)
    phi = head.pooling.explain(images, texts)  # [i, t, M, N]
    torch.testing.assert_close(phi.sum(-1), torch.ones_like(phi[..., 0]))
    mixed = torch.einsum("itmn,inmd->itmd", phi, images["values"]).flatten(2)
    expected = (F.normalize(head.pooling.out(mixed), dim=-1) * texts["vec"]).sum(-1)
    torch.testing.assert_close(head.score(images, texts), expected)
