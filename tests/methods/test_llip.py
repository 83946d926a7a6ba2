"""Llip against the paper's equations, written out in loops (arXiv:2405.00740, eq. 1 to 3)."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import mostly_slow
from kiloword.config.recipes import HeadConfig, ModelConfig, sizes
from kiloword.losses.pairs import Blocks, sigmoid_loss
from kiloword.methods.llip.pooling import Attention, Contextual, ContextualSettings
from kiloword.methods.method import annotated
from kiloword.methods.registry import preset
from kiloword.model.heads import Head
from kiloword.model.model import Model, initialise
from kiloword.models.build import build
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.types import Features, Texts
from kiloword.verify.batch import batch, config
from kiloword.verify.suite import Way, gradients, verify

WIDTH, DIM, K, PATCHES = 32, 16, 3, 4
TEXTS = Texts.pack([[0] * n for n in (2, 4, 3, 1, 5)])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model(method: str = "llip", size: ModelConfig | None = None, **settings: Any) -> Model:
    return build(size or config(), preset(method, settings)).double()


def tower_tokens() -> tuple[Tensor, Tensor]:
    """Three images of K + P tokens and five texts, as towers make them."""
    return numbers(3, K + PATCHES, WIDTH).requires_grad_(), numbers(15, WIDTH, seed=1).requires_grad_()


def softmax(z: list[Tensor], temperature: float) -> list[Tensor]:
    """The paper's softmax with temperature, as printed below eq. 1."""
    exps = [torch.exp(x * temperature) for x in z]
    return [e / torch.stack(exps).sum() for e in exps]


def matrix(of: Tensor, token: int, m: int) -> Tensor:
    """W^mk [W, d]: of a shared projection, of the token's own, or of the one that all patches share."""
    d = of.shape[2] // 4
    return of[min(token, len(of) - 1)][:, m * d : (m + 1) * d]


def literal(pooling: Contextual, h: Tensor, g: Tensor, temperature: float) -> Tensor:
    """Cosine of z_ij and z'_j by loops over images i, texts j, heads m and tokens k."""
    rows = []
    for hi in h:
        row = []
        for gj in g:
            heads = []
            for m in range(4):
                query = gj @ pooling.query.weight.T[:, m * DIM // 4 : (m + 1) * DIM // 4]
                keys = [hk @ matrix(pooling.key, k, m) for k, hk in enumerate(hi)]
                values = [hk @ matrix(pooling.value, k, m) for k, hk in enumerate(hi)]
                phi = softmax([query @ key for key in keys], temperature)  # eq. 1
                heads.append(sum((p * v for p, v in zip(phi, values, strict=True)), torch.zeros(())))
            z = torch.cat(heads) @ pooling.out.weight.T  # eq. 2
            target = gj @ pooling.text_projection.weight.T
            row.append((z / z.norm()) @ (target / target.norm()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def eq3(cosines: Tensor, scale: Tensor, bias: Tensor, own: list[int]) -> Tensor:
    """The sigmoid loss over all pairs; the printed sign of the bias is a typo."""
    total = torch.zeros(())
    for i, j in itertools.product(range(len(cosines)), range(len(own))):
        sign = 1.0 if own[j] == i else -1.0
        total = total + torch.log(1 + torch.exp(-sign * (scale * cosines[i, j] + bias))).squeeze()
    return total


CASES = list(itertools.product(("multiply", "divide"), (False, True), (False, True), ("direct", "gram")))


@pytest.mark.parametrize(("mode", "per_token", "patch_keys", "form"), mostly_slow(CASES, 0, 5, -1))
def test_loss_is_the_paper_s(mode: str, per_token: bool, patch_keys: bool, form: str) -> None:
    """To 1e-10, and so are its gradients by every parameter of the head and by the tokens of both towers."""
    settings: dict[str, Any] = {"temperature_mode": mode, "per_token_projections": per_token, "patch_keys": patch_keys}
    head = model(k=K, heads=4, bias=-2.0, form=form, **settings).head
    pooling = head.pooling
    assert isinstance(pooling, Contextual)
    temperature = 5 / math.sqrt(DIM / 4) if mode == "multiply" else 1 / 5
    found = []
    for reference in (False, True):
        images, words = tower_tokens()
        own = [0, 0, 1, 2, 2]
        if reference:
            g = torch.stack([part[-1] for part in words.split(TEXTS.starts.diff().tolist())])
            cosines = literal(pooling, images if patch_keys else images[:, :K], g, temperature)
            assert head.bias is not None
            loss = eq3(cosines, head.log_scale.exp(), head.bias, own)
        else:
            photos, texts = head.image(images), head.text(words, TEXTS)
            cosines = head.score(photos, texts)
            photos, texts = photos | {"position": torch.arange(3)}, texts | {"position": torch.tensor(own)}
            loss = sigmoid_loss(Blocks(head, photos, texts, chunk=2), annotated).sum
        gradients = torch.autograd.grad(loss, [images, words, *head.parameters()])
        found.append([cosines.detach(), loss.detach(), *gradients])
    for got, expected in zip(*found, strict=True):
        assert float((got - expected).abs().max()) < 1e-10
        assert float(expected.abs().max()) > 1e-6  # nothing here is trivially zero


@pytest.mark.parametrize("mode", ["multiply", "divide"])
@pytest.mark.parametrize("temperature", [1.0, 5.0, 10.0])
def test_attention_starts_open(mode: str, temperature: float) -> None:
    """Whatever the temperature, the logits start with a deviation of about one: no token is out of the mixture."""
    size = replace(sizes()["tiny"], head=HeadConfig(dim=256))
    method = preset("llip", {"temperature": temperature, "temperature_mode": mode})
    head = method.head(method.shape(size))
    initialise(head, 0)
    pooling = head.pooling
    assert isinstance(pooling, Contextual)
    keys, _ = pooling.keys_and_values(numbers(4, 16, pooling.width).float())
    query = pooling.query(numbers(50, pooling.query.in_features, seed=1).float()).view(50, 8, -1)
    logits = torch.einsum("inmd,tmd->itmn", keys, query) * pooling.factor
    assert 0.7 < float(logits.detach().std()) < 1.4


def encoded(made: Model) -> tuple[Features, Features]:
    some = batch()
    return made.encode_image(some.images)[1], made.encode_text(some.texts)[1]


def test_ensemble_means_targets_and_queries() -> None:
    """Targets: normalise, mean, normalise; queries: plain mean."""
    made = model()
    texts = encoded(made)[1]
    texts = {k: v[:5] for k, v in texts.items()}
    group, weights = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0.5, 0.2, 0.5, 0.3, 2.0], dtype=torch.float64)
    for w in (None, weights):
        got = made.head.ensemble(texts, group, 2, w)
        for c in range(2):
            share = torch.ones(5, dtype=torch.float64)[group == c] if w is None else w[group == c]
            target = (texts["vec"][group == c] * share[:, None]).sum(0)
            query = (texts["query"][group == c] * share[:, None, None]).sum(0) / share.sum()
            assert torch.allclose(got["vec"][c], target / target.norm())
            assert torch.allclose(got["query"][c], query)
    alone = made.head.ensemble(texts, torch.arange(5), 5, None)
    assert torch.allclose(alone["query"], texts["query"])


@pytest.mark.parametrize("pool", ["first", "average", "learned_average"])
def test_baselines_read_the_same_tokens_into_one_vector(pool: str) -> None:
    made = model(pool=pool, k=K, heads=4)
    assert made.config.image.extra_tokens == K
    assert not made.config.image.class_token
    pooling = made.head.pooling
    tokens = numbers(3, K + PATCHES, WIDTH)
    got = made.head.image(tokens)
    assert list(got) == ["vec"]
    if isinstance(pooling, Attention):
        query = pooling.query.view(4, -1)  # type: ignore[operator]
        z = []
        for hi in tokens[:, :K]:
            heads = []
            for m in range(4):
                phi = softmax([query[m] @ (hk @ matrix(pooling.key, 0, m)) for hk in hi], pooling.factor)
                heads.append(sum(p * (hk @ matrix(pooling.value, 0, m)) for p, hk in zip(phi, hi, strict=True)))
            z.append(torch.cat(heads) @ pooling.out.weight.T)  # type: ignore[arg-type]
        expected = torch.stack(z)
    else:
        read = tokens[:, 0] if pool == "first" else tokens[:, :K].mean(1)
        expected = pooling.project_image_tokens(read)
    assert torch.allclose(got["vec"], F.normalize(expected, dim=1), atol=1e-12)
    images, texts = encoded(made)
    assert torch.allclose(made.score(images, texts), images["vec"] @ texts["vec"].T)
    with pytest.raises(ValueError, match="pools each image into one vector"):
        made.head.explain(images, texts)


def test_shortlist_vector_is_the_equal_mixture() -> None:
    made = model(k=K, heads=4, per_token_projections=True)
    tokens = numbers(3, K + PATCHES, WIDTH)
    pooling = made.head.pooling
    assert isinstance(pooling, Contextual)
    values = torch.stack([tokens[:, k] @ pooling.value[k] for k in range(K)], 1)
    got = made.head.image(tokens)
    assert torch.allclose(got["vec"], F.normalize(pooling.out(values.mean(1)), dim=1))
    assert not got["vec"].requires_grad


def test_projections_of_tokens() -> None:
    made = model(k=K, heads=4, pool="contextual")
    pooling = made.head.pooling
    assert isinstance(pooling, Contextual)
    tokens = numbers(2, 5, WIDTH)
    assert torch.allclose(made.head.project_image_tokens(tokens), pooling.out(tokens @ pooling.value[0]))
    assert made.head.project_text_tokens(tokens).shape == (2, 5, DIM)


@pytest.mark.parametrize(
    "settings",
    [{}, {"per_token_projections": True, "patch_keys": True, "form": "gram"}, {"pool": "learned_average"}],
    ids=["llip", "all tokens", "learned average"],
)
def test_every_parameter_learns(settings: dict[str, Any]) -> None:
    slots = preset("llip", settings)
    learner = Learner(build(config(), slots), slots).double()
    backward(learner, [batch()])
    gradients = {n: 0.0 if p.grad is None else float(p.grad.abs().max()) for n, p in learner.named_parameters()}
    assert [n for n, g in gradients.items() if g < 1e-10 * max(gradients.values())] == []


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperature_is_a_positive_number(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*: expected above 0"):
        model(temperature=temperature)


@pytest.mark.slow
def test_conformity_on_one_rank() -> None:
    checks = list(verify("llip", ranks=(1,)))
    assert not [check for check in checks if not check.passed]


OWN = """
from kiloword.methods.registry import preset as built_in

def gram():
    return built_in("llip", {"form": "gram", "k": 3, "heads": 4})

def direct():
    return built_in("llip", {"form": "direct", "k": 3, "heads": 4})
"""


def test_the_gram_form_is_cut_in_any_way_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models as small as those of the conformity suite would never choose it."""
    (tmp_path / "own_llip.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_llip", raising=False)
    reference = gradients("own_llip:direct")
    for way, permute in ((Way(), False), (Way(micro=4), False), (Way(chunk=3), False), (Way(), True)):
        found = gradients("own_llip:gram", way, permute)
        assert all(float((found[name] - value).abs().max()) < 1e-10 for name, value in reference.items())


def test_any_method_can_take_the_pooling() -> None:
    """Scale, limit, loss and bias stay; at a size whose own pool reads the class token too."""
    clip, mix = preset("clip"), preset("clip+contextual", {"contextual": {"k": 4}})
    assert mix.pair_loss is clip.pair_loss
    made = build(replace(config(), head=replace(config().head, image_pool="cls")), mix)
    assert isinstance(made.head, Head)
    assert isinstance(made.head.pooling, Contextual)
    assert made.head.bias is None
    assert made.head.log_limit is not None
    assert made.config.image.extra_tokens == 4
    score = made.score(*encoded(made))
    assert score.shape == (16, len(batch().texts))
    assert float(score.detach().abs().max()) <= 1 + 1e-5


def test_refusals() -> None:
    with pytest.raises(ValueError, match="heads 3 does not divide the embedding size 16"):
        model(heads=3)
    with pytest.raises(ValueError, match="k is 0: expected at least 1"):
        model(k=0)
    with pytest.raises(ValueError, match=r"temperature is 0\.0: expected above 0"):
        model(temperature=0.0)
    with pytest.raises(ValueError, match="llip has a pooling that contextual"):
        preset("llip+contextual")
    assert ContextualSettings().pool == "contextual"
