"""Llip against the paper's equations, written out in loops (arXiv:2405.00740, eq. 1 to 3)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import mostly_slow
from kiloword.config.recipes import HeadConfig, sizes
from kiloword.methods.registry import preset
from kiloword.verify import suite
from kiloword.verify.batch import MethodChoice, batch
from literal import CAPTIONS, pairs, small
from parts import agree, drawn, learner, losses, model, size

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


def eq3(cosines: Tensor, scale: Tensor, bias: Tensor, own: list[int]) -> Tensor:
    """The sigmoid loss over all pairs, by images; the printed sign of the bias is a typo."""
    total = torch.zeros(())
    for i, j in itertools.product(range(len(cosines)), range(len(own))):
        sign = 1.0 if own[j] == i else -1.0
        total = total + torch.log(1 + torch.exp(-sign * (scale * cosines[i, j] + bias))).squeeze()
    return total / len(cosines)


CASES = list(itertools.product(("multiply", "divide"), (False, True), (False, True), ("direct", "gram")))


@pytest.mark.parametrize(("mode", "per_token", "patch_keys", "form"), mostly_slow(CASES, 0, 5, -1))
def test_loss_is_the_paper_s(mode: str, per_token: bool, patch_keys: bool, form: str) -> None:
    """And so are its gradients by every parameter of the model."""
    said = {"temperature_mode": mode, "per_token_projections": per_token, "patch_keys": patch_keys, "form": form}
    llip = learner("llip", {"k": K, "heads": M, "bias": -2.0, **said}, small(), chunk=2)
    some, head = pairs(llip.model, CAPTIONS), llip.model.head
    encoded = llip.encode(some)
    h = encoded.image_tokens if patch_keys else encoded.image_tokens[:, :K]
    g = encoded.text_tokens[some.texts.starts[1:] - 1]
    temperature = 5 / math.sqrt(DIM / M) if mode == "multiply" else 1 / 5
    cosines = literal(head.pooling, h, g, temperature)
    torch.testing.assert_close(head.score(encoded.images, encoded.texts), cosines, rtol=0, atol=1e-10)
    expected = eq3(cosines, head.log_scale.exp(), head.bias, some.image_of_text.tolist())
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
    logits = llip.head.explain(images, {"query": query, "vec": query}).log().detach()
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
        llip.head.explain(images, texts)


def test_shortlist_vector_is_the_equal_mixture_and_tokens_are_projected() -> None:
    llip = model("llip", {"k": K, "heads": M, "per_token_projections": True})
    pooling, tokens = llip.head.pooling, drawn(3, K + 4, 32)
    values = torch.stack([tokens[:, k] @ pooling.value[k] for k in range(K)], 1)
    got = llip.head.image(tokens)["vec"]
    torch.testing.assert_close(got, F.normalize(pooling.out(values.mean(1)), dim=1))
    assert not got.requires_grad
    head = model("llip", {"k": K, "heads": M}).head
    expected = head.pooling.out(tokens @ head.pooling.value[0])
    torch.testing.assert_close(head.project_image_tokens(tokens), expected)
    assert head.project_text_tokens(tokens).shape == (3, K + 4, DIM)


def test_the_gram_form_is_cut_in_any_way_too() -> None:
    """Models as small as those of the conformity suite would never choose it."""
    direct, gram = (MethodChoice("llip", {"form": form, "k": 3, "heads": 4}) for form in ("direct", "gram"))
    reference = suite.gradients(direct)
    for way, permute in ((suite.Way(), True), (suite.Way(micro=4), False), (suite.Way(chunk=3), False)):
        found = suite.gradients(gram, way, permute)
        assert all(float((found[name] - value).abs().max()) < 1e-10 for name, value in reference.items())


def test_any_method_can_take_the_pooling() -> None:
    """Scale, limit and bias stay; at a size whose own pool reads the class token too."""
    mix = model("clip+contextual", {"contextual": {"k": 4}}, size(head__image_pool="cls"))
    assert preset("clip+contextual").pair_loss is preset("clip").pair_loss
    assert mix.head.bias is None
    assert mix.config.image.extra_tokens == 4
    mix.head.log_scale.data.fill_(9.0)
    mix.head.clamp_()
    assert mix.head.log_scale.exp().item() == pytest.approx(100.0)
    score = mix.score(*encoded(mix))
    assert score.shape == (16, len(batch().texts))
    assert float(score.detach().abs().max()) <= 1 + 1e-5
